"""`tunewright explain` as a user meets it."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from helpers.kb_records import exact
from tunewright.knowledge import open_databases
from tunewright.measure.ceilings import Ceilings
from tunewright.plugins.single import open_device
from tunewright.runtime.insight.explain import explain
from tunewright.settings import Settings
from tunewright.solvers.base import Problem
from tunewright.tools.explain import looking
from tunewright.tools.explain_view import gain_cell, operations, origin_lines, summary, what_runs

needs_opencl = pytest.mark.skipif(open_device("CPU").family == "host", reason="needs a CPU device with kernels")
DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def model(tmp_path):
    """Two products, the first with a Relu; one node is constant, one a view."""
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(rng.standard_normal(s, np.float32), n) for n, s in (("w", (32, 48)), ("v", (48, 8)))
    ]
    weights.append(numpy_helper.from_array(np.asarray([0]), "at"))
    nodes = [
        helper.make_node("Neg", ["v"], ["u"], name="folded"),
        helper.make_node("MatMul", ["x", "w"], ["h"], name="first"),
        helper.make_node("Relu", ["h"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "u"], ["s"], name="second"),
        helper.make_node("Unsqueeze", ["s", "at"], ["y"], name="flat"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 32])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, "n", 8])
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_the_table_has_a_row_per_layer_and_fits_80_columns(call, model, monkeypatch):
    code, out, err = call("explain", model, "-s", "n=6", "-n", 2, "-d", "CPU.HOST")
    assert code == 0 and err == ""
    title, *lines = out.splitlines()
    assert title.startswith(f"{model} on CPU.HOST: ")
    assert all(len(line) <= 80 for line in lines)
    assert lines[1].split() == ["ms"]
    assert lines[2].split() == ["layer", "and", "kernel", "from", "share", "roof"]
    assert [line.split()[:2] for line in lines if line.endswith("%")] == [["first", "default"], ["second", "default"]]
    monkeypatch.setenv("COLUMNS", "120")
    _, out, _ = call("explain", model, "-s", "n=6", "-n", 2, "-d", "CPU.HOST")
    rows = [line.split() for line in out.splitlines() if line.endswith("%")]
    assert sum(float(row[3].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.2)
    assert "MatMul + Relu: host.reference" in out and "Layers by origin: 2 default; 1 optimized out." in out
    assert "Roofline of CPU.HOST, measured: " in out and "may be above 100 %" in out
    assert "What to tune next" not in out, "the host has nothing to choose from"


def test_without_timing_there_are_no_times(call, model):
    _, out, err = call("explain", model, "--no-time", "-d", "CPU.HOST")
    assert "n taken as 1" in err
    assert out.splitlines()[2].split() == ["layer", "and", "kernel", "from"]
    assert "Roofline" not in out and " ms" not in out


@needs_opencl
def test_what_to_tune_next(call, model, monkeypatch):
    # A product of half a microsecond may be above what was measured as the roofline on a busy machine.
    monkeypatch.setattr("tunewright.runtime.insight.explain.ceilings", lambda device: Ceilings(1e15, 1e15))
    _, out, _ = call("explain", model, "-s", "n=6", "-n", 3)
    text = " ".join(out.split())
    assert "What to tune next" in text and "1. " in text
    assert "default, up to" in text and "candidates, none measured" in text
    assert "MatMul(f32[6,32], f32[32,48]) -> f32[6,48] | Relu" in text


@pytest.mark.parametrize("pattern", ["first", "relu", "fir*", "rel?"])
def test_a_layer_in_full_by_its_name_a_pattern_or_a_node_that_was_fused_into_it(call, model, pattern):
    code, out, _ = call("explain", model, "-s", "n=6", "--layer", pattern, "-n", 2, "-d", "CPU.HOST")
    assert code == 0
    title, *lines = out.splitlines()
    assert title == "first" and all(len(line) <= 80 for line in lines)
    rows = {line[2:].split("  ")[0]: line for line in lines if line.startswith("  ") and line[2:3].isalpha()}
    assert {"operation", "stands for", "problem", "device", "kernel", "origin", "runner-up", "search", "in the model",
            "work", "roofline", "solvers"} <= set(rows)  # fmt: skip
    assert "MatMul + Relu" in rows["operation"] and "first, relu" in rows["stands for"]
    assert "never tuned" in rows["search"]
    text = " ".join(out.split())
    assert "host.reference chosen default" in text
    assert "refuses for devices that compile null, and CPU.HOST compiles nothing" in text
    assert "second" not in out


def test_several_layers_and_one_for_which_nobody_was_asked(call, model):
    _, out, _ = call("explain", model, "--layer", "flat", "-l", "s*d", "--no-time", "-d", "CPU.HOST")
    names = [line for line in out.splitlines() if line and not line.startswith(" ")]
    assert names == ["second", "flat"], "in the order of the plan"
    assert "nobody was asked: nothing has to run" in " ".join(out.split())


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("frist", "--layer frist: there is no such layer (did you mean first"),
        ("zzz*", "--layer zzz*: there is no such layer (the layers are first, flat, relu, second)"),
        ("folded", "node 'folded': was folded or dropped at compile time, so no layer runs it"),
    ],
)
def test_an_unknown_layer_names_the_closest(call, model, pattern, message):
    code, out, err = call("explain", model, "--layer", pattern, "--no-time", "-d", "CPU.HOST", "-s", "n=6")
    assert (code, out) == (2, "") and message in err


def test_mistakes_are_told_before_the_work(call, model, tmp_path):
    code, _, err = call("explain", model, "-d", "GPU.9")
    assert code == 2 and "there is no device 'GPU.9'" in err
    code, _, err = call("explain", model, "--json", tmp_path / "no" / "report.json")
    assert code == 2 and "cannot be written" in err
    code, _, err = call("explain", tmp_path / "none.onnx")
    assert code == 2 and "none.onnx" in err
    code, _, err = call("explain", model, "-n", 0)
    assert code == 2 and "--help" in err


def test_help_has_an_example(call):
    code, out, _ = call("explain", "--help")
    assert code == 0 and "Example: tunewright explain model.onnx" in " ".join(out.split())


# ---- JSON -----------------------------------------------------------------------------------------------------------

REPORT = {"schema", "model", "device", "config", "tune", "inputs", "origins", "time", "ceilings", "next", "layers",
          "environment", "streams", "requests", "auto_batch", "streams_origin"}  # fmt: skip
LAYER = {
    "name", "op", "inside", "fused", "nodes", "device", "on_host", "problem", "kernel", "solver", "config",
    "origin", "match", "evidence", "runner_up", "solvers", "barred", "nearest", "heuristic", "candidates",
    "measured", "time", "roofline", "note",
}  # fmt: skip
EVIDENCE = {"layer", "gain", "control", "confirmed", "default", "ms", "lower_ms", "upper_ms", "samples", "error",
            "regime", "problem", "date", "tool", "digest"}  # fmt: skip
PARTS = {
    "runner_up": {"solver", "config", "why", "evidence"},
    "solvers": {"solver", "state", "why", "config", "evidence", "measured"},
    "time": {"ms", "lower_ms", "upper_ms", "calls", "inferences"},
    "roofline": {"flops", "bytes", "peak_flops", "peak_bandwidth", "floor_ms", "bound", "share", "why"},
}
NEXT = {"problem", "layers", "ms", "lost_ms", "share", "origin", "measured", "candidates"}


def test_json_goes_to_stdout_alone_or_to_a_file(call, model, tmp_path):
    code, out, _ = call("explain", model, "-s", "n=6", "-n", 2, "--json", "-")
    assert code == 0
    report = json.loads(out)
    assert set(report) == REPORT and report["schema"] == "tunewright.explain/1"
    assert set(report["time"]) == {"ms", "floor_ms", "inferences"} and report["inputs"] == {"x": "float32[6,32]"}
    for layer in report["layers"]:
        assert set(layer) == LAYER
        for name, members in PARTS.items():
            some = layer[name] if name == "solvers" else [layer[name]]
            assert all(set(each) == members for each in some if each is not None), name
    assert all(set(row) == NEXT for row in report["next"])
    assert all(set(top) == {"flops", "bandwidth"} for top in report["ceilings"].values())
    code, out, _ = call("explain", model, "--layer", "second", "--no-time", "--json", tmp_path / "r.json")
    written = json.loads((tmp_path / "r.json").read_text())
    assert code == 0 and out.startswith("second\n") and [each["name"] for each in written["layers"]] == ["second"]
    assert written["time"] is None


def test_every_member_of_the_json_is_documented():
    text = (DOCS / "explain.md").read_text(encoding="utf-8")
    for name in set().union(REPORT, LAYER, EVIDENCE, NEXT, *PARTS.values()):
        assert f"`{name}`" in text, name


# ---- knowledge ------------------------------------------------------------------------------------------------------


@pytest.fixture
def knowing(model, tmp_path):
    """Options that name a knowledge base with a measured answer for the first product, and the answer's config."""
    from tunewright import Core

    settings = {"USER_DB_PATH": str(tmp_path / "kb")}
    compiled = Core(settings).compile_model(Core().read_model(model).reshape({"x": [6, 32]}))
    step = next(s for s in compiled.program.plans[-1].steps if s.choice is not None)
    problem, choice = Problem.of(step.node), step.choice
    config = next(c for c in choice.solver.space(problem, open_device("CPU").target) if c != choice.config)
    database = open_databases.open_user(Settings.make(settings, Settings()))
    default = (choice.solver.id, choice.config)
    database.add([
        exact(problem, config, "CPU", default=default, gain=(1.5, 1.4, 1.6)),
        exact(problem, choice.config, "CPU", default=default, gain=(1.0, 1.0, 1.0)),
    ])  # fmt: skip
    return ("-c", f"USER_DB_PATH={tmp_path / 'kb'}", "-s", "n=6"), config, database


@needs_opencl
def test_a_measured_layer_shows_its_gain_and_its_evidence(call, model, knowing):
    options, config, _ = knowing
    _, out, _ = call("explain", model, *options, "--no-time")
    assert out.splitlines()[2].split() == ["layer", "and", "kernel", "from", "gain"]
    first, second = (line.split() for line in out.splitlines() if line.startswith(("first", "second")))
    assert first == ["first", "user", "1.50x"] and "1.40-1.60" in out
    assert second[0] == "second" and second[-1] in ("1.50x", "-"), "another shape: a good guess, or nothing"
    _, out, _ = call("explain", model, *options, "--layer", "first", "--no-time")
    text = " ".join(out.split())
    assert "origin user knowledge base" in text and "gain 1.50x (1.40 to 1.60) over opencl." in text
    assert "control 1.00x (0.99 to 1.01): the default against itself" in text and "regime cold" in text
    assert "measured 2026-11-15T12:00:00" in text and "measurements of 2 configs kept" in text
    assert "the next answer, user knowledge base (exact)" in text
    for name, value in config.items():
        assert f"{name}={value}" in text


@needs_opencl
@pytest.mark.parametrize("how", [("FIND_ENFORCE=5",), ("TUNING_MODE=TUNING_CREATE", "FIND_ENFORCE=4")])
def test_explain_neither_tunes_nor_deletes(call, model, knowing, how):
    options, _, database = knowing
    before = [record.digest for record in database]
    settings = [part for text in how for part in ("-c", text)]
    code, out, err = call("explain", model, *options, "--no-time", *settings)
    assert code == 0 and "nothing is tuned or deleted here" in err and "user" in out
    assert [record.digest for record in database] == before and not database.events()


def test_a_tuning_file_that_tuning_would_make_is_not_missed(tmp_path):
    create = {"TUNING_MODE": "TUNING_CREATE", "TUNING_FILE": str(tmp_path / "new.json")}
    settings, _ = looking(Settings.make(create, Settings()))
    assert (settings.tuning_mode, settings.find_enforce, settings.tuning_file) == ("TUNING_USE_EXISTING", "1", "")
    (tmp_path / "new.json").write_text("{}")
    assert looking(Settings.make(create, Settings()))[0].tuning_file == str(tmp_path / "new.json")
    plain = Settings()
    assert looking(plain) == (plain, "")
    off = Settings.make({"TUNING_MODE": "TUNING_DISABLED"}, Settings())
    assert looking(off) == (off, "")


@needs_opencl
def test_texts_of_a_row(model, knowing):
    from dataclasses import replace

    from tunewright import Core
    from tunewright.knowledge.key import KeyMatch, MatchKind

    options, _, _ = knowing
    compiled = Core({"USER_DB_PATH": options[1].partition("=")[2]}).compile_model(model)
    layers = explain(compiled, {"x": np.ones((6, 32), np.float32)}, count=2)
    first = layers[0]
    assert origin_lines(first) == "user" and gain_cell(first) == "1.50x\n1.40-1.60"
    other = replace(first, match=KeyMatch(MatchKind.PROVISIONAL, ("software",)))
    assert origin_lines(other) == "user\nprovisional:\nsoftware"
    long = replace(first, fused=("Add", "Mul", "Sigmoid", "Mul", "Add", "Relu"), inside="loop.body")
    assert what_runs(long).startswith("MatMul + Add + Mul + Sigmoid + Mul + 2 more in loop.body: opencl.")
    about = summary([first, other])
    assert about.origins == {"user knowledge base": 1, "user knowledge base (provisional)": 1}
    new = replace(first, match=None, found=None, measured=0, origin="default", name="new")
    assert gain_cell(new) == "-" and gain_cell(replace(new, measured=2)) == "none"
    assert [row.layers for row in summary([first, new]).next] == [("new",), ("first",)], "what was measured comes last"
    assert about.seconds == 2 * first.timing.seconds


def test_operations_for_people():
    assert [operations(n) for n in (12, 1500, 2.37e8, 7.8e9)] == ["12 FLOP", "1.5 kFLOP", "237 MFLOP", "7.8 GFLOP"]
