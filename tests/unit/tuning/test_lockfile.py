"""Lockfiles: what is written, what is used of it, and what a frozen model refuses."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tunewright
from tunewright import Core, InputError, LockError, SettingsError
from tunewright.knowledge import json_file
from tunewright.knowledge.database import MemoryDatabase
from tunewright.knowledge.key import Where
from tunewright.knowledge.record import Ratio
from tunewright.knowledge.sqlite import SqliteDatabase
from tunewright.measure.base import Regime
from tunewright.plugins.single import open_device
from tunewright.runtime.insight.explain import explain
from tunewright.search.base import Status
from tunewright.search.space import Config
from tunewright.settings import Settings
from tunewright.solvers.base import Solver
from tunewright.tuning import evidence, knowledge_layers, lockfile, tuner
from tunewright.tuning.lockfile import LockedKernel, LockFile
from tunewright.tuning.tuner import Origin, Tuner
from unit.tuning.test_tuner_with_records import DEVICE, HOST, TILED, Tiled, measured, problem

SOURCE = Path(__file__).parents[3] / "src"
needs_opencl = pytest.mark.skipif(open_device("CPU").family == "host", reason="needs a CPU device with kernels")


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNEWRIGHT_USER_DB_PATH", str(tmp_path / "user"))
    monkeypatch.chdir(tmp_path)
    knowledge_layers.warn.cache_clear()


# ---- the tuner, on a device that runs nothing -----------------------------------------------------------------------


class Wild(Tiled):
    """Gives other bits at each run."""

    id, rank, reproducible = "wild", 5, False


class Rough(Tiled):
    """Rounds early when its tile is 4."""

    id, rank = "rough", 5

    def inexact(self, problem: Any, config: Any) -> str | None:
        return "it rounds early" if config["tile"] == 4 else None


def make(candidates: tuple[Solver, ...] = (TILED, HOST), records: Any = (), **settings: Any) -> Tuner:
    made = Settings.make({key.upper(): value for key, value in settings.items()}, Settings())
    return Tuner(made, candidates, MemoryDatabase(records), MemoryDatabase())


def entry(solver: Solver = TILED, tile: int = 2, **changes: Any) -> LockedKernel:
    made = LockedKernel.of(problem(), DEVICE.target, solver, {"tile": tile}, ["relu"], "default", None)
    return replace(made, **changes)


def write(locked: LockedKernel, where: Where | None = None, mode: str = "PERFORMANCE") -> str:
    LockFile("lock.json").add(where or Where.of(DEVICE.target), mode, {problem().key(): locked})
    return "lock.json"


def test_a_locked_kernel_comes_before_every_knowledge_base() -> None:
    known = [measured(4, Ratio(1.9, 1.8, 2.0, 9))]
    path = write(entry(tile=2))
    choice = make(records=known, lock_file=path).choose(problem(), DEVICE)
    assert (choice.solver, choice.config, choice.origin) == (TILED, {"tile": 2}, Origin.LOCK)
    assert choice.why == "lockfile" and make(records=known).choose(problem(), DEVICE).config["tile"] == 4
    assert make(lock_file=path, frozen="YES").choose(problem(), DEVICE).config == {"tile": 2}


def test_what_is_locked_is_not_tuned(caplog: pytest.LogCaptureFixture) -> None:
    path = write(entry(tile=2))
    with caplog.at_level(logging.WARNING, "tunewright"):
        one = make(lock_file=path, tuning_mode="TUNING_CREATE", find_enforce="4")
    assert "LOCK_FILE answers first" in caplog.text
    assert one.choose(problem(), DEVICE).origin is Origin.LOCK and not list(one.user)


def test_what_is_locked_can_be_deleted_from_the_knowledge_base() -> None:
    one = make(records=[measured(4, Ratio(1.9, 1.8, 2.0, 9))], lock_file=write(entry()), find_enforce="5")
    assert one.choose(problem(), DEVICE).origin is Origin.LOCK and not list(one.user)


ELSEWHERE = replace(Where.of(DEVICE.target), processor="Another processor")
FAULT = evidence.fault(problem(), DEVICE.target, TILED, Config(tile=2), Status.CRASHED, "SIGSEGV")
MISFITS: dict[str, tuple[Callable[[], str], str, dict[str, Any]]] = {
    "solver": (lambda: write(replace(entry(), solver="gone")), "there is no solver 'gone' here", {}),
    "version": (lambda: write(entry(version="0.9")), "version '0.9' of solver tiled is locked, and 1.0 is here", {}),
    "config": (lambda: write(entry(config=Config(tile=3))), "config '{\"tile\": 3}' is none of solver tiled", {}),
    "type": (lambda: write(entry(config=Config(tile=True))), "config '{\"tile\": true}' is none of solver tiled", {}),
    "source": (lambda: write(entry(source="0" * 32)), "source: solver tiled would compile another text", {}),
    "reproducible": (lambda: write(entry(reproducible=False)), "reproducible is locked as False", {}),
    "barred": (lambda: write(entry()), "solver tiled is barred: crashed", {"records": [FAULT]}),
    "accuracy": (lambda: write(entry(Rough(), 4)),
                 "solver rough is excluded by EXECUTION_MODE_HINT = ACCURACY: it rounds early",
                 {"candidates": (Rough(), TILED, HOST), "execution_mode_hint": "ACCURACY"}),
    "place": (lambda: write(entry(), ELSEWHERE), "it was locked for processor 'Another processor' (here: ", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_told_once_and_an_error_when_frozen(name: str, caplog: pytest.LogCaptureFixture) -> None:
    written, message, options = MISFITS[name]
    path = written()
    with caplog.at_level(logging.WARNING, "tunewright"):
        loose = make(lock_file=path, **options)
        for _ in range(2):
            choice = loose.choose(problem(), DEVICE)
            assert choice.origin is Origin.DEFAULT
    told = [r.getMessage() for r in caplog.records if "lockfile" in r.getMessage()]
    assert len(told) == 1 and message in told[0] and (name == "place" or "layer 'relu'" in told[0]), told
    frozen = make(lock_file=path, frozen="YES", **options)
    with pytest.raises(LockError, match=r"the model is frozen, and lockfile lock\.json does not fit") as raised:
        frozen.choose(problem(), DEVICE)
    assert message in raised.value.what and "tunewright lock" in raised.value.hint
    assert name == "place" or problem().key() in raised.value.what


def test_a_default_that_failed_elsewhere_is_not_out_here() -> None:
    other = replace(problem(), attrs={"other": 1})
    failed = evidence.fault(other, DEVICE.target, TILED, Config(tile=1), Status.CRASHED, "SIGSEGV")
    locked = make(records=[failed], lock_file=write(entry(tile=1)), frozen="YES").choose(problem(), DEVICE)
    assert locked.config == {"tile": 1} and locked.origin is Origin.LOCK


def test_a_solver_that_refuses_by_now() -> None:
    class Refusing(Tiled):
        def why_not(self, problem: Any, target: Any) -> str:
            return "not on Sundays"

    with pytest.raises(LockError, match="solver tiled does not take it any more: not on Sundays"):
        make((Refusing(), HOST), lock_file=write(entry()), frozen="YES").choose(problem(), DEVICE)


def test_a_solver_that_is_not_reproducible_is_used_unless_frozen() -> None:
    wild = Wild()
    path = write(entry(wild, 4))
    assert make((wild, TILED, HOST), lock_file=path).choose(problem(), DEVICE).solver is wild
    with pytest.raises(LockError, match="solver wild is not reproducible"):
        make((wild, TILED, HOST), lock_file=path, frozen="YES").choose(problem(), DEVICE)


def test_frozen_and_not_in_the_file() -> None:
    LockFile("lock.json").add(Where.of(DEVICE.target), "PERFORMANCE", {"another problem": entry()})
    assert make(lock_file="lock.json").choose(problem(), DEVICE).origin is Origin.DEFAULT
    with pytest.raises(LockError, match="it names no kernel for this problem; the problem is Relu"):
        make(lock_file="lock.json", frozen="YES").choose(problem(), DEVICE)


def test_frozen_needs_a_file_and_tunes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SettingsError, match="FROZEN = YES needs LOCK_FILE"):
        make(frozen="YES")
    with pytest.raises(InputError, match=r"nowhere\.json: there is no such file"):
        make(frozen="YES", lock_file="nowhere.json")
    with caplog.at_level(logging.WARNING, "tunewright"):
        one = make(frozen="YES", lock_file=write(entry()), tuning_mode="TUNING_CREATE", find_enforce="5")
    assert "FROZEN wins over TUNING_CREATE and FIND_ENFORCE 5 (DB_CLEAN): nothing is tuned or deleted" in caplog.text
    assert one.choose(problem(), DEVICE).origin is Origin.LOCK


# ---- EXECUTION_MODE_HINT --------------------------------------------------------------------------------------------


def test_accuracy_excludes_a_stored_answer_and_the_next_best_answers() -> None:
    rough = Rough()

    def seen(tile: int, gain: float) -> Any:
        return evidence.measurement(
            problem(),
            DEVICE.target,
            rough,
            Config(tile=tile),
            evidence.ContestSamples(
                [1e-3], 0.0, Ratio(gain, gain, gain, 9), Ratio.one(), True, ("rough", Config(tile=1))
            ),
            Regime("cold", 2, 1),
            {},
        )

    records = [seen(4, 2.0), seen(2, 1.5)]
    free = make((rough, TILED, HOST), records).choose(problem(), DEVICE)
    bound = make((rough, TILED, HOST), records, execution_mode_hint="ACCURACY").choose(problem(), DEVICE)
    assert (free.config, bound.config) == ({"tile": 4}, {"tile": 2}) and bound.origin is Origin.USER


def test_accuracy_excludes_a_default() -> None:
    rough = Rough(first=4)
    assert make((rough, TILED, HOST)).choose(problem(), DEVICE).solver is rough
    bound = make((rough, TILED, HOST), execution_mode_hint="ACCURACY").choose(problem(), DEVICE)
    assert bound.solver is TILED


def test_accuracy_excludes_candidates_of_a_search() -> None:
    from tunewright.measure.local import LocalMeasurer

    rough = Rough()
    settings = {"TUNING_MODE": "TUNING_CREATE", "TUNE_SECONDS": "30", "TUNE_RESULT_PATH": ""}

    def found(mode: str) -> Any:
        made = Settings.make({**settings, "EXECUTION_MODE_HINT": mode}, Settings())
        given: tuple[Solver, ...] = (rough, HOST)
        one = Tuner(made, given, MemoryDatabase(), MemoryDatabase(), lambda device, _: LocalMeasurer(device, given))
        return one.choose(problem(), DEVICE)

    assert (found("PERFORMANCE").config, found("ACCURACY").config) == ({"tile": 4}, {"tile": 2})


def test_accuracy_does_not_fuse_onto_the_host() -> None:
    rough = Rough(first=4)
    one = make((rough, HOST), execution_mode_hint="ACCURACY")
    assert one._on_device(problem(), DEVICE) and not one._on_device(problem(), DEVICE, by_default=True)
    exact = make((Rough(first=2), HOST), execution_mode_hint="ACCURACY")
    assert exact._on_device(problem(), DEVICE, by_default=True)


def test_explain_says_why_a_candidate_is_excluded() -> None:
    from tunewright.runtime.insight.solver_verdicts import AskedProblem

    rough = Rough(first=4)
    one = make((rough, TILED, HOST), execution_mode_hint="ACCURACY")
    asked = AskedProblem(one, problem(), DEVICE, one.choose(problem(), DEVICE))
    said = {o.solver: o.why for o in asked.opinions()}
    assert said["rough"] == "excluded by EXECUTION_MODE_HINT = ACCURACY: it rounds early"


@needs_opencl
def test_winograd_with_large_tiles_is_excluded_and_the_next_best_answers(tmp_path: Path) -> None:
    """In a real model, with what tuning would have stored."""
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.standard_normal((32, 32, 3, 3), np.float32), name) for name in "abc"]
    nodes = [helper.make_node("Conv", [x, w, "bias"], [y], pads=[1] * 4) for x, w, y in ("xar", "rbs", "scy")]
    weights.append(numpy_helper.from_array(np.zeros(32, np.float32), "bias"))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 32, 16, 16]) for name in "xy"]
    graph = helper.make_graph(nodes, "convolutions", ends[:1], ends[1:], weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    plain = Core().compile_model(proto)
    winograd = [s for s in plain.env.tuner.candidates if s.id.startswith("opencl.conv_winograd")]
    posed, device, choice, solver = next(
        (posed, device, choice, solver)
        for posed, device, choice in plain.env.tuner.chosen.values()
        for solver in winograd
        if posed.op == "Conv" and solver.why_not(posed, device.target) is None
    )
    space, default = solver.space(posed, device.target), (choice.solver.id, Config(choice.config))
    records = []
    for tile, gain in ((4, 2.0), (2, 1.5)):
        config = next(c for c in space if c["tile"] == tile)
        records.append(
            evidence.measurement(
                posed,
                device.target,
                solver,
                config,
                evidence.ContestSamples([1e-6], 0.0, Ratio(gain, gain, gain, 9), Ratio.one(), True, default),
                Regime("cold", 2, 1),
                {},
            )
        )
    SqliteDatabase(tmp_path / "tuned").add(records)

    def chosen(mode: str) -> Any:
        core = Core({"USER_DB_PATH": str(tmp_path / "tuned"), "EXECUTION_MODE_HINT": mode})
        compiled = core.compile_model(proto)
        found = [each for each in explain(compiled) if each.problem == posed.key()]
        return found[0]

    free, bound = chosen("PERFORMANCE"), chosen("ACCURACY")
    assert (free.solver, free.config["tile"]) == (bound.solver, free.config["tile"]) == (solver.id, 4)
    assert bound.config["tile"] == 2 and bound.origin == "user knowledge base"
    assert "excluded by EXECUTION_MODE_HINT = ACCURACY: Winograd" in bound.runner_up.why


def test_the_hint_is_a_property_of_core() -> None:
    core = Core({"EXECUTION_MODE_HINT": "accuracy"})
    assert core.get_property("CPU", "EXECUTION_MODE_HINT") == "ACCURACY"
    core.set_property({"EXECUTION_MODE_HINT": "PERFORMANCE"})
    compiled = core.compile_model(network(), config={"EXECUTION_MODE_HINT": "ACCURACY"})
    assert compiled.env.tuner.lookup.accurate
    with pytest.raises(SettingsError, match="not one of PERFORMANCE, ACCURACY"):
        core.set_property({"EXECUTION_MODE_HINT": "FAST"})


# ---- the file -------------------------------------------------------------------------------------------------------


def test_what_is_written_is_sorted_stable_and_read_again() -> None:
    here, file, path = Where.of(DEVICE.target), LockFile("lock.json"), Path("lock.json")
    one = entry()
    other = replace(entry(tile=4), nodes=("a", "b"), gain=1.25, origin="user knowledge base")
    assert file.add(here, "PERFORMANCE", {"z": one, "a": other}).added == 2
    text = path.read_bytes()
    assert [*json.loads(text)["places"][0]["kernels"]] == ["a", "z"] and text.endswith(b"}\n")
    assert file.read()[here].kernels == {"a": other, "z": one}
    # the same kernels once more, as a load from this file sees them
    done = file.add(here, "PERFORMANCE", {"a": replace(other, origin="lockfile", gain=None), "z": one})
    assert (done.same, done.added, done.replaced, done.total) == (2, 0, [], 2) and path.read_bytes() == text
    # in another order
    path.unlink()
    file.add(here, "PERFORMANCE", {"z": one})
    file.add(here, "PERFORMANCE", {"a": other})
    assert path.read_bytes() == text and [p.name for p in Path().glob("*lock*")] == ["lock.json"]


def test_other_shapes_nodes_and_places_are_added_and_a_conflict_is_replaced_and_told() -> None:
    here, file = Where.of(DEVICE.target), LockFile("lock.json")
    file.add(here, "PERFORMANCE", {"a": entry()})
    file.add(ELSEWHERE, "PERFORMANCE", {"a": entry(tile=4)})
    done = file.add(here, "PERFORMANCE", {"b": entry(), "a": replace(entry(tile=4), nodes=("more",))})
    assert (done.added, done.total) == (1, 2)
    assert done.replaced == ['\'more\': config {"tile": 2} is now {"tile": 4}']
    found = file.read()
    assert found[here].kernels["a"].nodes == ("more", "relu") and found[here].kernels["a"].config == {"tile": 4}
    assert [*found[ELSEWHERE].kernels] == ["a"]


def test_a_place_is_locked_in_one_execution_mode() -> None:
    here, file = Where.of(DEVICE.target), LockFile("lock.json")
    file.add(here, "PERFORMANCE", {"a": entry()})
    done = file.add(here, "ACCURACY", {"b": entry()})
    assert done.dropped == 1 and [*file.read()[here].kernels] == ["b"] and file.read()[here].mode == "ACCURACY"


BAD: dict[str, tuple[Any, str]] = {
    "empty": ("", "is empty"),
    "no JSON": ("{", "is not JSON"),
    "a list": ("[]", "is no lockfile: it names no schema"),
    "newer": ('{"schema": "tunewright.lock/2"}', "is no lockfile: schema 'tunewright.lock/2' is not"),
    "no places": ('{"schema": "tunewright.lock/1"}', "is damaged: an object with the members places, schema"),
    "twice": ('{"schema": "tunewright.lock/1", "places": [], "places": []}', "two members 'places'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_lockfile_is_an_error_and_not_touched(name: str) -> None:
    text, message = BAD[name]
    Path("lock.json").write_text(text)
    with pytest.raises(InputError, match=r"lockfile lock\.json") as raised:
        make(lock_file="lock.json")
    assert message in str(raised.value)
    if text:
        with pytest.raises(InputError):
            write(entry())
        assert Path("lock.json").read_text() == text


def edited(change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads(Path("lock.json").read_text())
    change(data["places"][0])
    Path("lock.json").write_text(json.dumps(data))


@pytest.mark.parametrize(
    "change",
    [
        lambda place: place.pop("where"),
        lambda place: place["where"].update(units="2"),
        lambda place: place.update(execution_mode="FAST"),
        lambda place: place.update(kernels=[]),
        lambda place: place["kernels"][problem().key()].update(config={"tile": [2]}),
        lambda place: place["kernels"][problem().key()].update(reproducible=1),
        lambda place: place["kernels"][problem().key()].update(gain=-1),
        lambda place: place["kernels"][problem().key()].update(nodes=["x"] * 65),
        lambda place: place["kernels"][problem().key()].update(more=1),
        lambda place: place["kernels"][problem().key()].pop("source"),
    ],
)
def test_a_field_that_is_not_as_it_was_written(change: Callable[[dict[str, Any]], Any]) -> None:
    write(entry())
    edited(change)
    with pytest.raises(InputError, match="is damaged: place 1"):
        make(lock_file="lock.json")


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    write(replace(entry(), nodes=tuple(sorted({f"n{i:03}" for i in range(64)}))))
    assert len(LockedKernel.of(problem(), DEVICE.target, TILED, {"tile": 2}, map(str, range(99)), "", None).nodes) == 64
    monkeypatch.setattr(lockfile, "MOST_PROBLEMS", 0)
    with pytest.raises(InputError, match="is damaged: place 1"):
        make(lock_file="lock.json")
    monkeypatch.setattr(json_file, "MOST_FILE_BYTES", 10)
    with pytest.raises(InputError, match=r"has .* bytes"):
        make(lock_file="lock.json")


def test_a_choice_is_remembered_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "MOST_CHOSEN", 1)
    one = make()
    other = replace(problem(), attrs={"other": 1})
    one.choose(problem(), DEVICE), one.choose(other, DEVICE)
    assert [posed.key() for posed, _, _ in one.chosen.values()] == [other.key()]


# ---- models ---------------------------------------------------------------------------------------------------------


def network() -> onnx.ModelProto:
    """A convolution, an operation that only the host has, and one whose shape depends on data, with an open batch."""
    weights = numpy_helper.from_array(np.random.default_rng(0).standard_normal((8, 3, 3, 3), np.float32), "w")
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("ReduceMean", ["r"], ["m"], name="mean", axes=[2, 3], keepdims=0),
        helper.make_node("Einsum", ["m", "m"], ["y"], name="ein", equation="bc,bd->bcd"),
        helper.make_node("NonZero", ["m"], ["where"], name="nonzero"),
        helper.make_node("Cast", ["where"], ["z"], name="cast", to=TensorProto.FLOAT),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 12, 12])
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "z")]
    graph = helper.make_graph(nodes, "network", [x], outputs, [weights])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def batch(n: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(n).standard_normal((n, 3, 12, 12), np.float32)}


SECOND = """
import sys, json, hashlib
import numpy as np
from tunewright import Core
compiled = Core().compile_model("model.onnx", config={"FROZEN": "YES"})
with np.load("x.npz") as given:
    found = []
    for name in sorted(given):
        outputs = compiled({"x": given[name]})
        found.append({k: hashlib.sha256(v.tobytes()).hexdigest() for k, v in outputs.items()})
chosen = {key: [c.solver.id, dict(c.config), c.origin.value] for (key, _), (_, _, c) in
          compiled.env.tuner.chosen.items()}
print(json.dumps([found, chosen, len(list(compiled.env.tuner.user))]))
"""


def another(solver: Solver, posed: Any, target: Any, config: Any) -> Config:
    """A valid config that is not the one given."""
    space = solver.space(posed, target)
    return next(c for c in space if c != config)


@needs_opencl
def test_a_second_process_uses_exactly_the_locked_kernels(tmp_path: Path) -> None:
    import hashlib

    onnx.save(network(), "model.onnx")
    first = Core().compile_model("model.onnx")
    first(batch(1)), first(batch(2))
    records = []
    for posed, device, choice in first.env.tuner.chosen.values():
        if posed.op == "tunewright::NonZero":
            continue  # it has one config, and is not measured
        if posed.is_static and not choice.solver.host:  # as if tuning had found other configs
            config = another(choice.solver, posed, device.target, choice.config)
            default = (choice.solver.id, Config(choice.config))
            records.append(
                evidence.measurement(
                    posed,
                    device.target,
                    choice.solver,
                    config,
                    evidence.ContestSamples([1e-6], 0.0, Ratio(1.5, 1.4, 1.6, 9), Ratio.one(), True, default),
                    Regime("cold", 2, 1),
                    {},
                )
            )
    assert len(records) >= 2
    SqliteDatabase(tmp_path / "tuned").add(records)
    core = Core({"USER_DB_PATH": str(tmp_path / "tuned")})
    tuned = core.compile_model("model.onnx")
    outputs = [tuned(batch(1)), tuned(batch(2))]
    ran_with = {key: [c.solver.id, dict(c.config)] for (key, _), (_, _, c) in tuned.env.tuner.chosen.items()}
    done = core.lock(tuned, "model.onnx.lock.json")
    # also what would run if a launch were left because of the number of its rows
    mine = {key: [c.solver.id, dict(c.config)] for (key, _), (_, _, c) in tuned.env.tuner.chosen.items()}
    assert all(mine[key] == one for key, one in ran_with.items())
    assert done.total == done.added == len(mine)
    locked = json.loads(Path("model.onnx.lock.json").read_text())["places"][0]["kernels"]
    assert {"user knowledge base", "default"} <= {e["origin"] for e in locked.values()}
    assert any("conv" in e["nodes"] and e["gain"] == 1.5 for e in locked.values())
    assert any(e["solver"] == "host.reference" for e in locked.values())
    np.savez("x.npz", a=batch(1)["x"], b=batch(2)["x"])

    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "TUNEWRIGHT_USER_DB_PATH": str(tmp_path / "empty")}
    ran = subprocess.run([sys.executable, "-c", SECOND], capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    found, chosen, known = json.loads(ran.stdout)
    assert {key: value[:2] for key, value in chosen.items()} == ran_with and known == 0
    assert {value[2] for value in chosen.values()} == {"lockfile"}
    expected = [{k: hashlib.sha256(v.tobytes()).hexdigest() for k, v in one.items()} for one in outputs]
    assert found == expected


@pytest.fixture
def locked() -> Path:
    onnx.save(network(), "model.onnx")
    core = Core()
    compiled = core.compile_model("model.onnx")
    compiled(batch(1))
    core.lock(compiled, "model.onnx.lock.json")
    return Path("model.onnx.lock.json")


def test_a_new_shape_at_inference_is_the_same_error(locked: Path) -> None:
    compiled = Core().compile_model("model.onnx", config={"FROZEN": "YES"})
    before = compiled(batch(1))
    with pytest.raises(LockError, match=r"node 'conv' \(Conv\): the model is frozen.*names no kernel.*\[2,3,12,12\]"):
        compiled(batch(2))
    assert np.array_equal(compiled(batch(1))["y"], before["y"])
    # locking the other shape adds it
    core = Core()
    more = core.compile_model("model.onnx")
    more(batch(2))
    assert core.lock(more, locked).added >= 3
    assert core.compile_model("model.onnx", config={"FROZEN": "YES"})(batch(2))


def test_explain_names_the_lockfile(locked: Path) -> None:
    compiled = Core().compile_model("model.onnx", config={"FROZEN": "YES"})
    layers = {each.name: each for each in explain(compiled, batch(1), count=0)}
    assert layers["conv"].origin == layers["ein"].origin == "lockfile"
    assert layers["conv"].solvers[0].why == "lockfile"


@needs_opencl
def test_problems_that_are_posed_as_they_run_are_locked_too() -> None:
    """With HOST_FALLBACK = NO a Slice whose starts are computed gets its kernel when they are there."""
    nodes = [helper.make_node("Slice", ["x", "s", "e"], ["y"], name="slice")]
    types = {"x": (TensorProto.FLOAT, [16]), "s": (TensorProto.INT64, [1]), "e": (TensorProto.INT64, [1])}
    inputs = [helper.make_tensor_value_info(name, *type) for name, type in types.items()]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["k"])
    graph = helper.make_graph(nodes, "late", inputs, [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), "late.onnx")

    def feed(start: int) -> dict[str, Any]:
        return {"x": np.arange(16, dtype=np.float32), "s": np.array([start]), "e": np.array([9])}

    core = Core({"HOST_FALLBACK": "NO", "SHAPE_TEMPLATES": "NO"})  # with templates the launch reads the starts itself
    compiled = core.compile_model("late.onnx")
    compiled(feed(2))
    assert core.lock(compiled, "late.onnx.lock.json").total == 1
    (entry,) = json.loads(Path("late.onnx.lock.json").read_text())["places"][0]["kernels"].values()
    assert entry["nodes"] == ["slice"]
    frozen = core.compile_model("late.onnx", config={"FROZEN": "YES"})
    assert np.array_equal(frozen(feed(2))["y"], np.arange(2, 9))
    with pytest.raises(LockError, match=r"node 'slice' \(Slice\): the model is frozen"):
        frozen(feed(3))


@needs_opencl
def test_another_device_is_another_place(locked: Path) -> None:
    with pytest.raises(LockError, match=r"it was locked for .*arch"):
        Core().compile_model("model.onnx", "CPU.HOST", {"FROZEN": "YES"})(batch(1))
    core = Core()
    compiled = core.compile_model("model.onnx", "CPU.HOST")
    compiled(batch(1))
    core.lock(compiled, locked)
    assert len(json.loads(locked.read_text())["places"]) == 2
    assert core.compile_model("model.onnx", "CPU.HOST", {"FROZEN": "YES"})(batch(1))
    assert core.compile_model("model.onnx", "CPU", {"FROZEN": "YES"})(batch(1))


def test_a_model_without_a_file_has_no_lockfile_beside_it(locked: Path) -> None:
    with pytest.raises(SettingsError, match="FROZEN = YES needs LOCK_FILE"):
        Core().compile_model(network(), config={"FROZEN": "YES"})
    config = {"FROZEN": "YES", "LOCK_FILE": str(locked)}
    assert Core().compile_model(network(), config=config)(batch(1))


def test_a_frozen_model_is_not_tuned(locked: Path) -> None:
    with pytest.raises(SettingsError, match="FROZEN = YES: nothing is tuned"):
        Core({"FROZEN": "YES"}).tune("model.onnx", batch(1), budget=1.0)


def test_module_level_functions(locked: Path) -> None:
    locked.unlink()
    result = tunewright.tune(
        "model.onnx", batch(1), budget=1.0, lock=True, config={"TUNE_RESULT_PATH": ""}, stop=lambda: True
    )
    assert result.layers and len(LockFile(locked).read()) == 1
    layers = tunewright.explain("model.onnx", count=0, config={"FROZEN": "YES"})  # random inputs, a batch of one
    assert {each.origin for each in layers} >= {"lockfile"}
    with pytest.raises(InputError, match="'soon' is not a time"):
        tunewright.tune("model.onnx", budget="soon")
    with pytest.raises(InputError, match="the model has no file, so its lockfile has no default path"):
        tunewright.tune(network(), budget=1.0, lock=True)
