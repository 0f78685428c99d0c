"""Several models, shapes and batches in one tuning: shared layers, weights, goals, going on where it was stopped."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tunewright
from tunewright import Core, tools
from tunewright.devices import energy
from tunewright.errors import DeviceError, InputError, ModelError
from tunewright.knowledge.record import Ratio
from tunewright.measure.base import Regime
from tunewright.model_tuning import objective, several_models
from tunewright.model_tuning.layers import TuningResult
from tunewright.model_tuning.model import ModelTuning
from tunewright.model_tuning.several_models import Goal, Workload
from tunewright.plugins.single import open_device
from tunewright.search.space import Config
from tunewright.tools.tune.command import parse_bytes
from tunewright.tools.tune.workloads import InputShapes, cases_of, paths_of, weights_of
from tunewright.tuning import evidence, session
from tunewright.tuning.tuner import Tuner

pytestmark = pytest.mark.skipif(open_device("CPU").family == "host", reason="needs a CPU device with kernels")


def model(*widths):
    """Products of 16 rows with weights of these widths, one after the other."""
    rng = np.random.default_rng(0)
    pairs = list(pairwise(widths))
    weights = [
        numpy_helper.from_array(rng.standard_normal(shape, np.float32) / 16, f"w{n}") for n, shape in enumerate(pairs)
    ]
    ends = (("x", widths[0]), ("y", widths[-1]))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", width]) for name, width in ends)
    names = ["x", *(f"v{n}" for n in range(1, len(pairs))), "y"]
    nodes = [helper.make_node("MatMul", [names[n], f"w{n}"], [names[n + 1]], name=f"m{n}") for n in range(len(pairs))]
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Three models; the first two share a layer."""
    monkeypatch.setenv("TUNEWRIGHT_USER_DB_PATH", str(tmp_path / "kb"))
    monkeypatch.setenv("TUNEWRIGHT_TUNE_RESULT_PATH", str(tmp_path / "results"))
    (tmp_path / "nets" / "deep").mkdir(parents=True)
    for name, widths in (("a", (96, 128, 128)), ("b", (128, 128, 64)), ("deep/c", (256, 256, 32))):
        onnx.save(model(*widths), tmp_path / "nets" / f"{name}.onnx")
    return tmp_path / "nets"


def work(path, rows=16, **how):
    core = Core()

    def open_():
        loaded = core.read_model(path).reshape({"x": [rows, _width(path)]})
        return loaded, {"x": np.ones((rows, _width(path)), np.float32)}

    return Workload(f"{path.name} {rows}", open_, str(path), **how)


def _width(path):
    return onnx.load(str(path)).graph.input[0].type.tensor_type.shape.dim[1].dim_value


@pytest.fixture
def searches(monkeypatch):
    """Searches that find another config of a space to be 1.5 times as fast, at once; the problems that were posed."""
    posed: list[str] = []

    def tune(self, problem, device, default, answer, *, report=None, seconds=None, stop=None, regime=None, decide=True):
        posed.append(problem.key())
        solver, space = default.solver, default.solver.space(problem, device.target)
        config = next(c for c in space if c != Config(default.config))
        mine = (default.solver.id, Config(default.config))
        gain = Ratio(1.5, 1.4, 1.6, 9)
        made = evidence.measurement(
            problem,
            device.target,
            solver,
            config,
            evidence.ContestSamples([1e-3], 0.0, gain, Ratio.one(), True, mine),
            Regime("layer", 1, 1),
            {},
        )
        self.user.add([made])
        return session.Outcome(mine, False, "made up", records=(made,))

    monkeypatch.setattr(Tuner, "tune", tune)
    monkeypatch.setattr(ModelTuning, "network", lambda self: None)
    return posed


def keys(path, rows=16):
    compiled = Core().compile_model(str(path))
    compiled({"x": np.ones((rows, _width(path)), np.float32)})
    return {problem for problem, _ in compiled.env.tuner.chosen}


def test_layers_that_models_share_are_searched_once(folder, searches):
    paths = sorted(folder.rglob("*.onnx"))
    results = Core().tune_many([work(path) for path in paths], budget=60.0)
    every = [keys(path) for path in paths]
    assert sorted(searches) == sorted(set().union(*every)) and len(searches) < sum(map(len, every))
    assert [len(result.layers) for result in results] == [len(one) for one in every]
    assert all(layer.outcome is not None or layer.skipped for result in results for layer in result.layers)
    files = [json.loads(path.read_text()) for path in (folder.parent / "results").glob("*.json")]
    assert sorted(file["model"] for file in files) == sorted(f"{path.name} 16" for path in paths)
    assert all(file["state"] == "finished" for file in files)
    layers = [layer for file in files for layer in file["layers"]]
    assert {layer["strategy"] for layer in layers if not layer["skipped"]} == {"auto"}


def test_time_goes_where_the_weighted_hope_is(folder, searches):
    a, c = folder / "a.onnx", folder / "deep" / "c.onnx"
    for heavy, light in ((a, c), (c, a)):
        searches.clear()
        works = [work(heavy, importance=1000.0), work(light, importance=1.0)]
        Core().tune_many(works, budget=60.0, again=True)
        first = [key for key in searches if key in keys(heavy)]
        assert searches[: len(first)] == first, "all of what counts comes before anything of what does not"


def test_parts_of_one_model_are_weighed_by_how_often_they_come(folder, searches):
    a = folder / "a.onnx"
    works = [work(a, rows=8, part=0.999), work(a, rows=512, part=0.001)]
    Core().tune_many(works, budget=60.0)
    assert set(searches[:2]) == keys(a, 8), "though an inference of 512 rows takes many times as long"


def test_it_goes_on_where_it_was_interrupted(folder, searches):
    paths = sorted(folder.rglob("*.onnx"))
    works = [work(path) for path in paths]
    first = Core().tune_many(works, budget=60.0, stop=lambda: len(searches) >= 2)
    assert len(searches) == 2 and all(result.stopped for result in first)
    Core().tune_many(works, budget=60.0)
    assert len(searches) == len(set(searches)) == len(set().union(*map(keys, paths)))
    before = len(searches)
    Core().tune_many(works, budget=60.0)
    assert len(searches) == before, "all is known"


def test_a_model_that_cannot_be_read_loses_nothing_of_the_others(folder, searches, caplog):
    (folder / "bad.onnx").write_bytes(b"no model")
    works = [work(folder / "a.onnx"), Workload("bad", lambda: (Core().read_model(folder / "bad.onnx"), {}), "bad")]
    assert len(Core().tune_many(works, budget=60.0)) == 1 and searches
    assert any(r.getMessage().startswith("bad is left out") for r in caplog.records)
    with pytest.raises(ModelError, match=r"bad\.onnx: this is not an ONNX model"):
        Core().tune_many(works[1:], budget=60.0)


def test_it_ends_once_the_gain_is_promised(folder, searches, monkeypatch):
    def whole(self):
        return TuningResult(self.layers, 1.3, 1.0, Ratio(1.3, 1.2, 1.4, 9), 0.0, [], False, {})

    monkeypatch.setattr(ModelTuning, "whole", whole)
    paths = sorted(folder.rglob("*.onnx"))
    results = Core().tune_many([work(path) for path in paths], budget=60.0, until="1.05x")
    assert 0 < len(searches) < len(set().union(*map(keys, paths)))
    assert any(layer.skipped == several_models.ENOUGH for result in results for layer in result.layers)


def test_it_goes_on_until_the_gain_is_there(folder, searches, monkeypatch):
    """What the network says counts, not what searches promised."""
    rounds = []

    def whole(self):
        rounds.append(1)
        return TuningResult(self.layers, 1.02, 1.0, Ratio(1.02, 1.01, 1.03, 9), 0.0, [], False, {"whole": 1.0})

    monkeypatch.setattr(ModelTuning, "whole", whole)
    (result,) = Core().tune_many([work(folder / "deep" / "c.onnx")], budget=60.0, until="1.05x")
    assert len(rounds) > 1 and result.gain.median == pytest.approx(1.02 ** len(rounds))
    assert result.before == 1.02


def test_it_ends_when_searching_stops_paying(folder, searches, monkeypatch):
    made = Tuner.tune

    def nothing(self, problem, device, default, answer, **how):
        found = made(self, problem, device, default, answer, **how)
        return session.Outcome(found.chosen, False, "nothing is near")

    monkeypatch.setattr(Tuner, "tune", nothing)
    monkeypatch.setattr(several_models, "ROW", 2)
    monkeypatch.setattr(several_models, "expected", lambda layers, of: 0.0)
    paths = sorted(folder.rglob("*.onnx"))
    results = Core().tune_many([work(path) for path in paths], budget=60.0, until="stalls")
    assert len(searches) == 2
    assert any(layer.skipped == several_models.STALLED for result in results for layer in result.layers)


@pytest.mark.parametrize("text", ["2y", "1x", "0.5x", "nan", "1.2", "", "infx"])
def test_goals_that_are_none(text):
    with pytest.raises(InputError, match=r"1\.2x, or stalls"):
        Goal.parse(text)


def test_goals():
    assert Goal.parse(" 1.2X ") == Goal(1.2) and Goal.parse("stalls") == Goal(stalls=True)


# ---- the command line -----------------------------------------------------------------------------------------------


def test_cases_and_batches():
    assert cases_of(None, None) == [InputShapes()]
    assert cases_of(["x=1x3:0.7", "ids=1x128,mask=1x128"], None) == [
        InputShapes(("x=1x3",), weight=0.7),
        InputShapes(("ids=1x128", "mask=1x128")),
    ]
    assert cases_of(["in:0=1x3", "in:0=2x3:2"], None) == [
        InputShapes(("in:0=1x3",)),
        InputShapes(("in:0=2x3",), weight=2.0),
    ]
    assert cases_of(None, "1:0.8,8:0.2") == [InputShapes(batch=1, weight=0.8), InputShapes(batch=8, weight=0.2)]
    for case, batch in ((["x"], None), (["x=3:0"], None), (None, "a"), (None, "1:-1"), (["x=3"], "1"), (None, "")):
        with pytest.raises(InputError, match=r"--case|--batch"):
            cases_of(case, batch)


def test_models_of_folders_and_their_weights(folder):
    models, dumps = paths_of([folder, folder / "a.onnx"])
    assert models == [folder / "a.onnx", folder / "b.onnx", folder / "deep" / "c.onnx"] and not dumps
    assert weights_of(["c=3", f"{folder / 'a.onnx'}=0.5"], models) == dict(zip(models, (0.5, 1.0, 3.0), strict=True))
    for text in ("c", "c=0", "c=x", "q=1"):
        with pytest.raises(InputError, match="--weight"):
            weights_of([text], models)
    (folder / "d.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="models and dumps"):
        paths_of([folder])


@pytest.mark.parametrize(("text", "size"), [("4096", 4096), ("64k", 65536), ("64M", 1 << 26), ("1.5GiB", 3 << 29)])
def test_sizes(text, size):
    assert parse_bytes(text) == size


def call(capsys, *words):
    code = tools.execute([str(word) for word in words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_tunes_a_folder_and_says_what_is_left(folder, searches, capsys):
    code, out, err = call(capsys, "tune", folder, "-b", "60", "-s", "rows=8", "--weight", "c=2")
    assert code == 0, err
    assert [Path(line).stem for line in out.splitlines() if line.endswith(".onnx")] == ["a", "b", "c"]
    gained, following = out.splitlines()[-2:]
    assert "over 3 models or shapes" in gained and gained.startswith(("gained: ", "promised: "))
    again = f"tunewright tune {folder} -d CPU -s rows=8 --weight c=2 -c "
    assert following.startswith(f"next: nothing ({again}") and " -c USER_DB_PATH=" in following


def test_batches_as_json(folder, searches, capsys):
    code, out, _ = call(capsys, "tune", folder / "a.onnx", "-b", "60", "--batch", "1:0.8,8:0.2", "--json")
    found = json.loads(out)
    assert code == 0 and found["schema"] == "tunewright.tuned/1"
    assert [row["model"] for row in found["results"]] == [f"{folder / 'a.onnx'} batch={n}" for n in (1, 8)]
    assert all(Path(row["file"]).exists() for row in found["results"]) and found["next"].startswith("nothing (")
    assert set(searches) == keys(folder / "a.onnx", 1) | keys(folder / "a.onnx", 8)


@pytest.mark.parametrize(("options", "text"), [
    (["--until", "soon"], "--until: 'soon' is no goal"),
    (["--case", "x=3", "--lock"], "--lock"),
    (["--case", "z=3"], "there is no input 'z'"),
    (["--max-workspace", "lots"], "--max-workspace"),
    (["--case", "rows=3", "-d", "HETERO:CPU,CPU.HOST"], "one model with one set of shapes"),
])  # fmt: skip
def test_mistakes_are_told_before_the_work(folder, capsys, options, text):
    code, _, err = call(capsys, "tune", folder / "a.onnx", *options)
    assert code == 2 and text in err and "Traceback" not in err


def test_python_does_the_same(folder, searches):
    results = tunewright.tune_many(folder, budget="1m", batches={1: 0.8, 8: 0.2})
    assert [result.written["model"] for result in results[:2]] == [f"{folder / 'a.onnx'} batch={n}" for n in (1, 8)]
    assert results[0].written["command"].startswith(f"tunewright tune {folder} -d CPU --batch 1:0.8,8:0.2 -c ")
    (one,) = tunewright.tune_many({folder / "b.onnx": 2.0}, budget=60.0, cases={"rows=4": 1.0}, until="stalls")
    assert "rows=4" in one.written["model"] and "b.onnx=2" in one.written["command"]
    with pytest.raises(InputError, match="stands for several devices"):
        tunewright.tune_many(folder, "MULTI:CPU,CPU.HOST")


# ---- objectives -----------------------------------------------------------------------------------------------------


def test_throughput_is_decided_with_all_streams_busy(folder, monkeypatch):
    rates, busy = [], []
    real = objective.streams.rate
    monkeypatch.setattr(objective.streams, "rate", lambda q, *rest: rates.append(len(q)) or real(q, *rest))
    neighbours = objective.Serving._neighbours

    def counted(self):
        busy.append(self.plugin.streams - 1)
        return neighbours(self)

    monkeypatch.setattr(objective.Serving, "_neighbours", counted)
    (result,) = Core().tune_many([work(folder / "a.onnx", rows=64)], budget=6.0, objective="throughput")
    units = open_device("CPU").target.units
    assert set(busy) == {units - 1}, "a stream on each thread, as a load with PERFORMANCE_HINT = THROUGHPUT has"
    assert result.layers and all(layer.device.target.units == 1 for layer in result.layers)
    assert set(rates) <= {units}


@pytest.fixture
def rapl(tmp_path):
    """Counters of two packages, of which one starts over."""
    for n, start in enumerate((1_000_000, 5_000_000)):
        package = tmp_path / "cap" / f"intel-rapl:{n}"
        package.mkdir(parents=True)
        (package / "energy_uj").write_text(f"{start}\n")
        (package / "max_energy_range_uj").write_text("6000000\n")
        (tmp_path / "cap" / f"intel-rapl:{n}:0").mkdir()
    return tmp_path / "cap"


def test_energy_of_a_processor(rapl):
    meter = energy.meter("cpu", powercap=rapl)
    assert meter.name == "RAPL" and meter.joules() == 0
    (rapl / "intel-rapl:0" / "energy_uj").write_text("1500000\n")
    (rapl / "intel-rapl:1" / "energy_uj").write_text("200000\n")  # 5.0 to 6.0, and 0.2 from the beginning
    assert meter.joules() == pytest.approx(0.5 + 1.2)
    assert "no counters" in energy.meter("cpu", powercap=rapl / "none")


def test_without_a_counter_energy_is_refused_in_words(folder, monkeypatch, capsys):
    monkeypatch.setattr(energy, "POWERCAP", folder / "none")
    monkeypatch.setattr(energy, "meter", lambda kind, number: "nothing here tells it")
    code, _, err = call(capsys, "tune", folder / "a.onnx", "--objective", "energy")
    assert code == 2 and err.count("\n") == 1
    assert "the energy of this device cannot be measured: nothing here tells it" in err
    with pytest.raises(DeviceError, match="--objective latency"):
        Core().tune_many([work(folder / "a.onnx")], objective="energy")
    with pytest.raises(InputError, match="latency, throughput, energy"):
        Core().tune_many([work(folder / "a.onnx")], objective="speed")


def test_energy_has_the_last_word(folder, monkeypatch):
    class Made(energy.EnergyMeter):
        """An inference takes two joules."""

        name, used = "made", 0.0

        def joules(self):
            self.used += 1.0
            return self.used

    monkeypatch.setattr(objective, "ENERGY_TURN", 0.0)
    saving = objective.Saving.__new__(objective.Saving)
    saving._meter = Made()
    monkeypatch.setattr(saving, "_turns", lambda turn: ([turn(0)], [turn(1)]), raising=False)
    saving.values = {}

    class Request:
        def infer(self, values):
            saving._meter.used += 1.0

    assert saving._duel(Request(), Request()) == ([2.0], [2.0])


def test_candidates_that_need_too_much_workspace_are_refused_with_the_reason(tmp_path):
    """A convolution of which Winograd needs scratch memory."""
    from tunewright.ir.types import DType, TensorType, blocked
    from tunewright.solvers.base import Problem

    device = open_device("CPU")
    type = TensorType(DType.FLOAT32, (1, 64, 28, 28), blocked(device.target.vector_bytes // 4))
    problem = Problem("Conv", (type, TensorType(DType.FLOAT32, (64, 64, 3, 3))), (type,), {"pads": (1, 1, 1, 1)},
                      constant=(False, True))  # fmt: skip
    free, capped = (Tuner(Core({"TUNE_MAX_WORKSPACE": n, "USER_DB_PATH": str(tmp_path)}).settings) for n in (0, 4096))
    found = []
    for solver in capped.ask(problem, device)[0]:
        if solver.host:
            continue
        for config in list(solver.space(problem, device.target))[:50]:
            needed = solver.workspace(problem, config, device) or 0
            said = capped._barred(solver, config, problem, device, ("", Config()))
            assert free._barred(solver, config, problem, device, ("", Config())) is None
            assert (said is not None) == (needed > 4096)
            found += [said] if said else []
    assert found and all("bytes of workspace, and TUNE_MAX_WORKSPACE is 4,096" in text for text in found)
