"""`tunewright benchmark` as a user meets it: data, batches, loads, reports, sweeps, baselines, mistakes."""

from __future__ import annotations

import _thread
import csv
import json
import sys
import weakref
from itertools import pairwise

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tunewright
from tunewright import Core, Preprocess
from tunewright.errors import InputError
from tunewright.settings import Settings
from tunewright.tools.benchmark import (
    chart as benchmark_chart,
)
from tunewright.tools.benchmark import (
    measure as benchmark_measure,
)
from tunewright.tools.benchmark import (
    run as benchmark_run,
)
from tunewright.tools.benchmark import (
    sweep,
)
from tunewright.tools.benchmark.data import batch_size, check_batch, gather, with_batch

pillow = pytest.importorskip("PIL.Image")


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


def save(path, nodes, inputs, outputs, weights=()):
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(weights))
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def value(name, shape, type=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, type, shape)


@pytest.fixture
def model(tmp_path):
    """y = Relu(x @ w) with an open batch."""
    w = np.arange(6, dtype=np.float32).reshape(3, 2)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="matmul"),
        helper.make_node("Relu", ["h"], ["y"], name="relu"),
    ]
    return save(tmp_path / "model.onnx", nodes, [value("x", ["batch", 3])], [value("y", ["batch", 2])],
                [numpy_helper.from_array(w, "w")])  # fmt: skip


def identity(path, shape, type=TensorProto.FLOAT):
    return save(path, [helper.make_node("Identity", ["x"], ["y"])], [value("x", shape, type)], [value("y", None, type)])


def read_model(path):
    return Core().read_model(path)


def data(path, given=None, shapes=None, batch=None):
    return gather(read_model(path), given, shapes, batch, 0, Settings())


# -- data -------------------------------------------------------------------------------------------------------------
def test_files_are_taken_in_turn(tmp_path, model):
    folder = tmp_path / "data"
    folder.mkdir()
    for i in range(3):
        np.save(folder / f"{i}.npy", np.full((1, 3), i, np.float32))
    (folder / "notes.txt").write_text("not data")
    found = data(model, [f"x={folder}"])
    assert [f["x"][0, 0] for f in found.feeds] == [0, 1, 2] and found.batch == 1
    assert found.origin == {"x": f"3 files, {folder / '0.npy'} the first"}
    found = data(model, [f"{folder}/2.npy", f"x={folder}/0.npy"])
    assert [f["x"][0, 0] for f in found.feeds] == [2, 0]
    found = data(model, [f"x={folder}"], batch=4)
    assert [f["x"].shape for f in found.feeds] == [(4, 3)] * 3 and (found.feeds[2]["x"] == 2).all()
    np.save(folder / "9.npy", np.zeros((2, 3), np.float32))
    with pytest.raises(InputError, match=r"different shapes: \[1, 3\]"):
        data(model, [f"x={folder}"])
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match="no arrays and no pictures"):
        data(model, [f"x={empty}"])


def picture(path, colour, size=(8, 6)):
    pillow.new("RGB", size, colour).save(path)
    return path


def test_pictures_fit_the_input(tmp_path):
    red = picture(tmp_path / "a_red.png", (255, 0, 51))
    picture(tmp_path / "b_green.png", (0, 255, 0))
    for shape in ([1, 3, 4, 5], ["n", 3, 4, 5], [3, 4, 5]):
        (feed,) = data(identity(tmp_path / "m.onnx", shape), [f"x={red}"]).feeds
        x = feed["x"].reshape(3, 4, 5)
        assert feed["x"].dtype == np.float32 and feed["x"].flags.c_contiguous
        assert (x[0] == 1).all() and (x[1] == 0).all() and x[2] == pytest.approx(0.2)
    (feed,) = data(identity(tmp_path / "m.onnx", [1, 4, 5, 3], TensorProto.UINT8), [f"x={red}"]).feeds
    assert feed["x"].shape == (1, 4, 5, 3) and (feed["x"] == (255, 0, 51)).all()
    (feed,) = data(identity(tmp_path / "m.onnx", [1, 3, 4, 5], TensorProto.INT8), [f"x={red}"]).feeds
    assert (feed["x"][0, :, 0, 0] == (127, -128, -77)).all()
    (feed,) = data(identity(tmp_path / "m.onnx", [1, 1, 4, 5]), [f"x={red}"]).feeds
    assert feed["x"].shape == (1, 1, 4, 5) and 0 < feed["x"][0, 0, 0, 0] < 1  # grey
    (feed,) = data(identity(tmp_path / "m.onnx", [4, 5]), [f"x={red}"]).feeds
    assert feed["x"].shape == (4, 5)
    (feed,) = data(identity(tmp_path / "m.onnx", [1, 3, "h", "w"]), [f"x={red}"]).feeds
    assert feed["x"].shape == (1, 3, 6, 8)  # its own size
    (feed, again) = data(identity(tmp_path / "m.onnx", [1, 3, 4, 5]), [f"x={tmp_path}"]).feeds
    assert feed["x"][0, 0, 0, 0] == 1 and again["x"][0, 1, 0, 0] == 1
    # as many as the batch has are one value, and the first comes again
    found = data(identity(tmp_path / "m.onnx", ["n", 3, 4, 5]), [f"x={tmp_path}"], batch=3)
    assert [f["x"].shape for f in found.feeds] == [(3, 3, 4, 5)]
    assert found.feeds[0]["x"][:, 0, 0, 0].tolist() == [1, 0, 1]


def test_pictures_that_cannot_be_used(tmp_path, monkeypatch):
    red, broken = picture(tmp_path / "red.png", (255, 0, 0)), tmp_path / "broken.jpg"
    broken.write_bytes(b"no picture")
    image = identity(tmp_path / "m.onnx", [1, 3, 4, 5])
    with pytest.raises(InputError, match="cannot be read as a picture"):
        data(image, [f"x={broken}"])
    with pytest.raises(InputError, match="there is no such file"):
        data(image, ["x=absent.png"])
    with pytest.raises(InputError, match="which dimension are the colours"):
        data(identity(tmp_path / "m.onnx", [1, 7, 4, 5]), [f"x={red}"])
    with pytest.raises(InputError, match="which is not a picture"):
        data(identity(tmp_path / "m.onnx", [5]), [f"x={red}"])
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match="Pillow is not installed"):
        data(identity(tmp_path / "m.onnx", [1, 3, 4, 5]), [f"x={red}"])


# -- batch ------------------------------------------------------------------------------------------------------------
def test_the_batch_dimension_is_found_or_missed_clearly(tmp_path, model):
    opened = read_model(model)
    assert str(with_batch(opened, 8).inputs["x"]) == "float32[8,3]" and batch_size(with_batch(opened, 8)) == 8
    add = [helper.make_node("Add", ["a", "b"], ["y"])]
    fixed = save(tmp_path / "f.onnx", add, [value("a", [1, 4]), value("b", [1, 4])], [value("y", None)])
    assert {str(t) for t in with_batch(read_model(fixed), 3).inputs.values()} == {"float32[3,4]"}
    # of two open dimensions the one that more inputs share
    both = save(tmp_path / "b.onnx", [helper.make_node("Sum", ["a", "b", "c"], ["y"])],
                [value("a", ["s", 4]), value("b", ["n", 4]), value("c", ["n", 4])], [value("y", None)])  # fmt: skip
    types = with_batch(read_model(both), 5).inputs
    assert [str(types[n]) for n in "abc"] == ["float32[s,4]", "float32[5,4]", "float32[5,4]"]
    none = save(tmp_path / "n.onnx", add, [value("a", [2, 4]), value("b", [1, 4])], [value("y", None)])
    with pytest.raises(InputError, match="has no batch dimension"):
        with_batch(read_model(none), 2)
    with pytest.raises(InputError, match="has no batch dimension: with 3 examples"):
        check_batch({"y": read_model(fixed).inputs["a"]}, 3)
    check_batch({"y": with_batch(opened, 6).inputs["x"]}, 3)
    # the height of a picture is no batch
    picture = save(tmp_path / "p.onnx", [helper.make_node("Neg", ["x"], ["y"])], [value("x", [1, 3, 8, 8])],
                   [value("y", None)])  # fmt: skip
    one, many = (read_model(picture).preprocess(Preprocess(layout=layout)) for layout in ("HWC", "NHWC"))
    assert batch_size(one) is None and batch_size(many) == 1
    with pytest.raises(InputError, match="has no batch dimension"):
        with_batch(one, 2)


def test_a_batch_that_the_model_cannot_take(call, tmp_path, model):
    weights = [numpy_helper.from_array(np.array([1, 12]), "shape")]
    flat = save(tmp_path / "flat.onnx", [helper.make_node("Reshape", ["x", "shape"], ["y"])], [value("x", [1, 3, 4])],
                [value("y", [1, 12])], weights)  # fmt: skip
    code, _, err = call("benchmark", flat, "-n", 1, "--batch", 4, "-d", "CPU.HOST")
    assert code == 2 and "--batch" in err and "Traceback" not in err
    code, out, _ = call("benchmark", model, "-n", 2, "--batch", 4, "--report", "-", "-d", "CPU.HOST")
    report = json.loads(out)
    assert code == 0 and report["batch"] == 4 and report["inputs"] == {"x": "float32[4,3]"}
    assert report["examples_per_second"] == pytest.approx(4 * report["throughput_per_second"])


# -- load and report --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("api", ["sync", "async"])
def test_both_ways_to_drive_it(call, model, api):
    code, out, _ = call("benchmark", model, "--api", api, "--streams", 2, "--requests", 3, "-n", 20, "--report", "-")
    report = json.loads(out)
    assert code == 0 and (report["api"], report["streams"], report["requests"]) == (api, 2, 3)
    assert report["inferences"] == 20 and len(report["samples"]["latency_ms"]) == 20
    assert len(report["samples"]["slices"]["per_second"]) == 6
    assert 0 < report["concurrency"] <= 3.01 and 0 < report["run_ms"] <= report["latency_ms"]["max"]
    assert report["launches"] >= 1 and report["schema"] == "tunewright.benchmark/2"
    assert report["copy_us"] is None and report["interrupted"] is False
    assert isinstance(report["advice"], list)


def test_hints_and_precision_become_settings(call, model):
    _, out, _ = call("benchmark", model, "--hint", "throughput", "--precision", "f32", "-n", 4, "--report", "-",
                     "--percentiles", "50,75")  # fmt: skip
    report = json.loads(out)
    assert report["config"] == {"PERFORMANCE_HINT": "THROUGHPUT", "INFERENCE_PRECISION_HINT": "F32"}
    assert report["streams"] == report["requests"] and report["api"] == ("async" if report["streams"] > 1 else "sync")
    assert list(report["latency_ms"]) == ["median", "mean", "p75", "min", "max", "std", "iqr"]


def test_counters_have_origins_and_shares(call, model, tmp_path):
    target = tmp_path / "r.json"
    code, out, _ = call("benchmark", model, "-n", 5, "--pc", "--report", target, "-d", "CPU.HOST")
    rows = json.loads(target.read_text())["counters"]
    ran = [row for row in rows if row["status"] == "EXECUTED"]
    assert code == 0 and sum(row["share"] for row in ran) == pytest.approx(1)
    spent = [row["host_ms"] + row["device_ms"] for row in rows]
    assert spent == sorted(spent, reverse=True)
    assert all(row["chosen"] == "default" for row in ran) and "origin" in out and "no copies" in out


def test_reports_as_csv(call, model, tmp_path):
    target = tmp_path / "r.csv"
    assert call("benchmark", model, "-n", 5, "-d", "CPU.HOST", "--report", target)[0] == 0
    with target.open() as file:
        rows = {row["key"]: row for row in csv.DictReader(file)}
    assert rows["inferences"] == {"key": "inferences", "type": "int", "value": "5"}
    assert rows["latency_ms.p99"]["type"] == "float" and float(rows["latency_ms.p99"]["value"]) > 0
    assert rows["interrupted"]["value"] == "false" and rows["environment.cores"]["type"] == "int"


# -- baseline ---------------------------------------------------------------------------------------------------------
def test_against_a_baseline(call, model, tmp_path):
    target = tmp_path / "old.json"
    run = ("benchmark", model, "-n", 60, "-d", "CPU.HOST")
    assert call(*run, "--report", target)[0] == 0
    old = json.loads(target.read_text())

    def times(factor):
        slices = old["samples"]["slices"]
        changed = {"latency_ms": [s * factor for s in slices["latency_ms"]],
                   "per_second": [r / factor for r in slices["per_second"]]}  # fmt: skip
        path = tmp_path / f"{factor}.json"
        path.write_text(json.dumps({**old, "samples": {"slices": changed}}))
        return path

    # a hundred times as fast as it is: no load of the machine hides that
    code, out, err = call(*run, "--baseline", times(0.01), "--fail-if-slower", 50, "--report", tmp_path / "new.json")
    assert code == 1 and "worse, p = " in out and "slower than the baseline, 50 % is allowed" in err
    found = json.loads((tmp_path / "new.json").read_text())["baseline"]
    assert found["latency"]["significant"] and found["slower_by"] > 0.5 and found["judged_by"] == "latency"
    code, out, _ = call(*run, "--baseline", times(100), "--fail-if-slower", 0)
    assert code == 0 and "better, p = " in out and "not the same" not in out
    code, out, _ = call("benchmark", model, "-n", 60, "--batch", 2, "-d", "CPU.HOST", "--baseline", times(100))
    assert code == 0 and "not the same: batch: 1 then, 2 now" in out
    code, out, _ = call("benchmark", model, "-n", 2, "-d", "CPU.HOST", "--baseline", target)
    assert code == 0 and "too few inferences to compare" in out


# -- sweep ------------------------------------------------------------------------------------------------------------
def test_a_sweep(call, model, tmp_path):
    target, chart = tmp_path / "sweep.json", tmp_path / "sweep.png"
    code, out, err = call("benchmark", model, "--sweep", "--streams", "1,2", "--requests", "1-2", "--batch", "1,8",
                          "-t", 0.02, "--repetitions", 2, "--latency-bound", "10s", "--report", target, "--chart",
                          chart, "-d", "CPU.HOST")  # fmt: skip
    assert code == 0, err
    assert "8 points of 0.02 s" in err and f"chart written to {chart}" in err
    report = json.loads(target.read_text())
    points = {p["label"]: p for p in report["points"]}
    assert {(p["streams"], p["requests"], p["batch"]) for p in points.values()} == {
        (s, r, b) for s in (1, 2) for r in (1, 2) for b in (1, 8)
    }
    assert all(p["inferences"] >= 2 and p["latency_ms"]["median"] > 0 for p in points.values())
    best = max(points.values(), key=lambda p: p["examples_per_second"])
    assert report["sweet_spot"] == best["label"] and best["frontier"] and report["latency_bound_ms"] == 10_000
    assert f"--streams {best['streams']} --requests {best['requests']} --batch {best['batch']}" in out
    assert "examples per second" in out and "┤" in out and f"{best['label']} *" in out
    assert max(map(len, out.splitlines()[:-1])) <= 80
    with pillow.open(chart) as picture:
        assert picture.size[0] > 1000 and len(np.unique(np.asarray(picture.convert("L")))) > 20
    code, out, _ = call("benchmark", model, "--sweep", "--streams", 1, "--batch", "1", "-n", 3, "--report", "-",
                        "--latency-bound", "0.001us", "-d", "CPU.HOST")  # fmt: skip
    assert code == 0 and json.loads(out)["sweet_spot"] is None


def test_a_sweep_keeps_one_model_in_memory(call, model, monkeypatch):
    """The one before is gone when the next is compiled; a turn begins with the model that the last one ended with."""
    made, order = [], []
    compile_ = benchmark_run.Bench.compile

    def counted(self, data, streams, batch):
        assert all(old() is None for old in made)
        found = compile_(self, data, streams, batch)
        made.append(weakref.ref(found))
        order.append((streams, batch))
        return found

    monkeypatch.setattr(benchmark_run.Bench, "compile", counted)
    code, out, _ = call("benchmark", model, "--sweep", "--streams", "1,2", "--requests", "2,3", "--batch", "1,4",
                        "-t", 0.06, "--repetitions", 3, "--report", "-")  # fmt: skip
    report = json.loads(out)
    assert code == 0 and len(report["points"]) == 8 and all(point["inferences"] for point in report["points"])
    assert len(order) == 4 + 3 + 3 and all(a != b for a, b in pairwise(order))


def test_a_sweep_leaves_out_what_the_model_cannot(call, tmp_path):
    """Other points are not lost by it."""
    two = identity(tmp_path / "two.onnx", ["n", 2])
    reshape = save(
        tmp_path / "one.onnx", [helper.make_node("Reshape", ["x", "s"], ["y"], name="flat")],
        [value("x", ["n", 2])], [value("y", [1, 2])], [numpy_helper.from_array(np.array([1, 2]), "s")],
    )  # fmt: skip
    how = ("--sweep", "--streams", 1, "--requests", 1, "-n", 2, "--report", "-")
    code, out, err = call("benchmark", reshape, *how, "--batch", "1,3")
    assert code == 0 and [p["batch"] for p in json.loads(out)["points"]] == [1]
    why = "note: left out: 1 stream, 1 request, batch 3: --batch: the model takes no batch of 3"
    assert why in " ".join(err.split())
    code, out, err = call("benchmark", reshape, *how, "--batch", "3,5")
    assert code == 2 and not out and "the model takes no batch of" in err
    assert call("benchmark", two, *how, "--batch", "1,3")[0] == 0


def test_without_matplotlib_the_picture_alone_is_missing(call, model, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_chart, "find_spec", lambda name: None)
    target = tmp_path / "sweep.csv"
    code, out, err = call("benchmark", model, "--sweep", "--streams", 1, "--batch", 1, "-n", 3, "--chart",
                          tmp_path / "x.png", "--report", target, "-d", "CPU.HOST")  # fmt: skip
    assert code == 2 and "matplotlib is not installed" in err and "tunewright[plot]" in err
    assert "sweet spot" in out and not (tmp_path / "x.png").exists()
    with target.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["requests"] for row in rows] == ["1", "2"] and float(rows[0]["latency_ms.median"]) > 0


# -- mistakes ---------------------------------------------------------------------------------------------------------
MISTAKES = [
    (["--streams", "two"], "not a whole number"),
    (["--streams", "1,2"], "--sweep takes several"),
    (["--requests", "0"], "not a whole number"),
    (["--hint", "fast"], "latency"),
    (["--percentiles", "101"], "not a percentile"),
    (["--latency-bound", "20ms"], "needs --sweep"),
    (["--chart", "x.png"], "needs --sweep"),
    (["--sweep", "--pc"], "does not apply to --sweep"),
    (["--sweep", "--latency-bound", "soon"], "not a time"),
    (["--fail-if-slower", "5"], "needs --baseline"),
    (["--baseline", "{folder}/absent.json"], "cannot be read"),
    (["--baseline", "{model}"], "is not JSON"),
    (["--baseline", "{folder}/other.json"], "not a report of this version"),
    (["--report", "{folder}/absent/x.csv"], "cannot be written"),
    (["--trace", "{folder}/absent/x.json"], "cannot be written"),
    (["--batch", "2", "--input", "x=[[1,2,3]]", "--shape", "y=2"], "there is no input 'y'"),
]


@pytest.mark.parametrize(("arguments", "text"), MISTAKES, ids=[" ".join(a)[:30] for a, _ in MISTAKES])
def test_mistakes_are_one_line(call, model, tmp_path, arguments, text):
    (tmp_path / "other.json").write_text('{"schema": "something else"}')
    given = [a.format(folder=tmp_path, model=model) for a in arguments]
    code, out, err = call("benchmark", model, "-n", "1", "-d", "CPU.HOST", *given)
    assert code == 2 and out == "" and text in " ".join(err.split()) and "Traceback" not in err


@pytest.mark.parametrize("more", [["--api", "sync"], ["--streams", "2", "--requests", "4"]])
def test_an_interrupt_reports_what_was_measured(call, model, tmp_path, monkeypatch, more):
    """Ctrl-C while it measures: the figures so far, and the code of an interrupt."""
    target, note = tmp_path / "r.json", benchmark_measure._Driver.note

    def noted(self, *args):
        note(self, *args)
        if len(self.result.latencies) == 5:
            _thread.interrupt_main()

    monkeypatch.setattr(benchmark_measure._Driver, "note", noted)
    code, out, err = call("benchmark", model, "-t", 60, "-d", "CPU.HOST", "-w", 0, "--report", target, *more)
    assert code == 130 and err.endswith("tunewright: interrupted\n")
    report = json.loads(target.read_text())
    assert report["interrupted"] and report["inferences"] >= 5 and report["seconds"] < 30
    assert ", interrupted: " in out and "throughput: " in out


def test_an_interrupt_ends_a_sweep_with_what_is_there(call, model, tmp_path, monkeypatch):
    target, measured = tmp_path / "r.json", []

    def until_third(*args, **more):
        measured.append(args)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return measure(*args, **more)

    measure = sweep.measure
    monkeypatch.setattr(sweep, "measure", until_third)
    code, out, _ = call("benchmark", model, "--sweep", "--streams", "1", "--requests", "1-4", "--batch", "1", "-t",
                        0.02, "-d", "CPU.HOST", "--report", target)  # fmt: skip
    report = json.loads(target.read_text())
    assert code == 130 and report["interrupted"] and len(report["points"]) == 2 and "sweet spot" in out


# -- from Python ------------------------------------------------------------------------------------------------------
def test_from_python(model):
    x = np.ones((4, 3), np.float32)
    report = tunewright.benchmark(model, {"x": x}, "CPU.HOST", streams=2, requests=2, count=6)
    assert (report["inferences"], report["streams"], report["requests"], report["batch"]) == (6, 2, 2, 4)
    json.dumps(report)
    assert tunewright.benchmark(model, device="CPU.HOST", batch=2, seconds=0.01)["inputs"] == {"x": "float32[2,3]"}


def test_advice_names_the_settings_that_kernels_depend_on(model, tmp_path, monkeypatch):
    """A stream of several has a part of the threads: kernels that are tuned for all of them would not be used."""
    monkeypatch.setenv("TUNEWRIGHT_USER_DB_PATH", str(tmp_path / "kb"))
    monkeypatch.setenv("TUNEWRIGHT_SYSTEM_DB_PATH", str(tmp_path / "none"))
    monkeypatch.setenv("TUNEWRIGHT_HEURISTIC_PATH", "")
    given = {"PERFORMANCE_HINT": "THROUGHPUT", "NUM_STREAMS": 2, "EXECUTION_MODE_HINT": "ACCURACY", "PERF_COUNT": "YES"}
    report = tunewright.benchmark(model, {"x": np.ones((1, 3), np.float32)}, config=given, count=5)
    [untuned] = [advice["text"] for advice in report["advice"] if advice["kind"] == "untuned"]
    assert f"`tunewright tune {model} -d CPU -s x=1x3 -c " in untuned
    database = f"USER_DB_PATH={tmp_path / 'kb'}"
    for setting in ("NUM_STREAMS=2 ", "EXECUTION_MODE_HINT=ACCURACY", database, "HEURISTIC_PATH="):
        assert f" -c {setting}" in untuned
    assert "PERF_COUNT" not in untuned and "PERFORMANCE_HINT" not in untuned
