"""MULTI, AUTO, BATCH and HETERO from the command line."""

import json

import numpy as np
import onnx
import pytest
from onnx import parser

from tunewright import tools

NETWORK = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[1, 8] x) => (float[1, 8] y)
{
    [relu] a = Relu(x)
    [add] y = Add(a, x)
}
"""

#: operations for four subgraphs
CHAIN = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[1, 8] x) => (float[1, 8] y)
<float[8, 8] w = {WEIGHTS}>
{
    [relu] a = Relu(x)
    [matmul] b = MatMul(a, w)
    [tanh] c = Tanh(b)
    [add] d = Add(c, x)
    [exp] y = Exp(d)
}
""".replace("WEIGHTS", ", ".join(str(float(v)) for v in np.eye(8)[::-1].ravel()))
AFFINITY = {"relu": "CPU", "matmul": "CPU.NATIVE", "tanh": "CPU.HOST", "add": "CPU", "exp": "CPU"}


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TUNEWRIGHT_USER_DB_PATH", str(tmp_path / "kb"))
    onnx.save(parser.parse_model(NETWORK), tmp_path / "m.onnx")
    return str(tmp_path / "m.onnx")


@pytest.mark.parametrize("device", ["MULTI:CPU,CPU.HOST(2)", "AUTO", "AUTO:CPU.HOST,CPU", "BATCH:CPU.HOST(4)"])
def test_run(device, model, capsys):
    assert tools.execute(["run", model, "--device", device, "--no-save"]) == 0
    assert "float32[1,8]" in capsys.readouterr().out


def test_benchmark_tells_who_served(model, capsys):
    assert tools.execute(["benchmark", model, "-n", "30", "-d", "MULTI:CPU,CPU.HOST"]) == 0
    assert "served by: CPU " in capsys.readouterr().out
    assert tools.execute(["benchmark", model, "-n", "30", "-d", "AUTO:CPU.HOST"]) == 0
    assert "served by: CPU.HOST\n" in capsys.readouterr().out
    assert tools.execute(["benchmark", model, "-n", "30", "-d", "AUTO:CPU.HOST,CPU", "--pc", "--report", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["devices"] == ["CPU.HOST"] and report["served"]["CPU"] == 0 and report["served"]["CPU.HOST"] >= 30
    assert tools.execute(["benchmark", model, "-n", "30", "-d", "CPU.HOST"]) == 0
    assert "served by" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("MULTI:", "MULTI: no device is named (name one, or more: MULTI:GPU.0 for example)"),
        ("MULTI:CPU,cpu", "MULTI: cpu is the same device as CPU (name each device once)"),
        ("MULTI:AUTO", "MULTI: AUTO is several devices itself"),
        ("AUTO:NOWHERE", "there is no device 'NOWHERE'"),
        ("BATCH:CPU(1)", "a batch of 1 combines no requests"),
    ],
)
@pytest.mark.parametrize("command", ["run", "benchmark"])
def test_wrong_names(command, device, said, model, capsys):
    assert tools.execute([command, model, "-d", device]) == 2
    assert said in capsys.readouterr().err


def test_query_is_about_the_first_that_runs_it(model):
    assert tools.execute(["query", model, "-d", "MULTI:CPU,CPU.HOST"]) == 0


PARTS = [
    ("MULTI:CPU,CPU.HOST(2)", ["CPU", "CPU.HOST(2)"]),
    ("AUTO:CPU.HOST,CPU", ["CPU.HOST", "CPU"]),
    ("AUTO", ["CPU"]),
    ("BATCH:CPU.HOST(4)", ["CPU.HOST, 4 examples at a time", "CPU.HOST"]),
    ("HETERO:CPU,CPU.HOST", ["CPU", "CPU.HOST"]),
]


@pytest.mark.parametrize(("device", "parts"), PARTS)
def test_devices_apart(device, parts):
    from tunewright import Core

    found = Core().apart(device)
    assert [str(one) for one in found] == parts
    for one in found:
        assert one.device in ("CPU", "CPU.HOST")
        assert one.inputs({"x": np.ones((1, 8))})["x"].shape == (one.batch, 8)


@pytest.mark.parametrize(("device", "parts"), PARTS)
def test_explain_tells_of_each(device, parts, model, capsys):
    if device.startswith("HETERO"):
        parts = ["CPU"]  # all of it fits there
    assert tools.execute(["explain", model, "-d", device, "--no-time"]) == 0
    out = capsys.readouterr().out
    titles = [line for line in out.splitlines() if line.startswith(model)]
    assert [line.partition(f" on {device}, ")[2].rpartition(":")[0] for line in titles] == parts
    assert out.count("Layers by origin") == len(parts)
    assert tools.execute(["explain", model, "-d", device, "--no-time", "--json", "-", "--layer", "add"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [part["part"] for part in report["parts"]] == parts and "layers" not in report
    batches = [4 if "examples" in part else 1 for part in parts]
    assert [part["inputs"] for part in report["parts"]] == [{"x": f"float32[{n},8]"} for n in batches]
    assert all([layer["nodes"][-1] for layer in part["layers"]] == ["add"] for part in report["parts"])


def test_explain_tells_of_subgraphs_as_they_run(model, tmp_path, capsys):
    (tmp_path / "affinity.json").write_text('{"relu": "CPU.HOST", "add": "CPU"}')
    how = ["-d", "HETERO:CPU,CPU.HOST", "-c", f"HETERO_AFFINITY={tmp_path / 'affinity.json'}"]
    assert tools.execute(["explain", model, *how, "-n", "2", "--json", "-"]) == 0
    parts = json.loads(capsys.readouterr().out)["parts"]
    assert [part["part"] for part in parts] == ["subgraph 0 on CPU.HOST", "subgraph 1 on CPU"]
    assert [[layer["name"] for layer in part["layers"]] for part in parts] == [["relu"], ["add"]]
    assert all(part["time"]["inferences"] == 2 for part in parts)
    assert tools.execute(["explain", model, *how, "--no-time", "--layer", "add"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{model} on HETERO:CPU,CPU.HOST, subgraph 1 on CPU: ") and "\nrelu\n" not in out
    assert tools.execute(["explain", model, *how, "--no-time", "--layer", "nothing"]) == 2
    assert "there is no such layer" in capsys.readouterr().err


def test_explain_in_python(model):
    import tunewright

    found = tunewright.explain(model, device="MULTI:CPU,CPU.HOST", count=0)
    assert {layer.device for layer in found} == {"CPU", "CPU.HOST"}


@pytest.mark.parametrize(("device", "parts"), PARTS)
def test_tune_gives_each_its_time(device, parts, model, tmp_path, capsys):
    folder, report = tmp_path / "results", tmp_path / "report.html"
    if device.startswith("HETERO"):
        parts = ["CPU"]  # all of it fits there, and nothing runs elsewhere
    code = tools.execute(["tune", model, "-d", device, "-b", "4", "--result", str(folder), "--report", str(report)])
    out, err = capsys.readouterr()
    assert code == 0, err
    if len(parts) > 1:
        headings = [line.rpartition(", ")[0] for line in out.splitlines() if line.endswith(" s")]
        assert headings == parts and out.splitlines()[0] == f"{parts[0]}, 2 s"
    files = sorted(folder.iterdir())
    assert len(files) == len(parts), "no file takes the place of another"
    contents = [json.loads(file.read_text()) for file in files]
    assert sorted(c["device"] for c in contents) == sorted(part.split(",")[0].partition("(")[0] for part in parts)
    budgets = sorted(c["budget"] for c in contents)  # the last has what the first left over
    assert budgets[0] == 4 / len(parts) and budgets[-1] <= 4 and "<h1" in report.read_text()


def test_tune_tunes_the_subgraphs_of_hetero(model, tmp_path, capsys):
    """What is tuned are the problems that HETERO poses, for the devices it poses them to: so it finds the answers."""
    from tunewright import Core
    from tunewright.knowledge.key import WHERE_FIELDS, Where
    from tunewright.solvers.base import Problem

    onnx.save(parser.parse_model(CHAIN), model)
    (tmp_path / "affinity.json").write_text(json.dumps(AFFINITY))
    how, folder = f"HETERO_AFFINITY={tmp_path / 'affinity.json'}", tmp_path / "results"
    hetero = f"HETERO:{','.join(dict.fromkeys(AFFINITY.values()))}"
    command = ["tune", model, "-d", hetero, "-c", how, "-b", "2", "--result", str(folder)]
    assert tools.execute(command) == 0
    out, err = capsys.readouterr()
    headings = {line.rpartition(", ")[0] for line in out.splitlines() if line.endswith(" s")}
    assert headings == {"subgraph 0 on CPU", "subgraph 1 on CPU.NATIVE", "subgraph 3 on CPU"}
    assert "subgraph 2 on CPU.HOST: it runs reference operations" in err and "differently" not in err
    files = {c["model"]: c for c in (json.loads(file.read_text()) for file in folder.iterdir())}
    assert set(files) == {f"{model}, subgraph {n} of 4" for n in (0, 1, 3)}
    compiled = Core({"HETERO_AFFINITY": str(tmp_path / "affinity.json")}).compile_model(model, hetero)
    for number in (0, 1, 3):
        part, file = compiled.subgraphs[number], files[f"{model}, subgraph {number} of 4"]
        posed = {Problem.of(step.node).key() for plan in part.model.program.plans for step in plan.steps if step.choice}
        assert posed and {layer["problem"] for layer in file["layers"]} == posed
        where = Where.of(part.model.env.device.target)
        assert file["where"] == {name: getattr(where, name) for name in WHERE_FIELDS}


def test_subgraphs_one_by_one_give_what_the_whole_gives(model):
    from tunewright import Core

    onnx.save(parser.parse_model(CHAIN), model)
    core, x = Core(), {"x": np.linspace(-1, 1, 8, dtype=np.float32)[None]}
    loaded = core.read_model(model)
    loaded.affinity = dict(AFFINITY)
    found = core.apart("HETERO:CPU,CPU.NATIVE,CPU.HOST", model=loaded, inputs=x)
    assert [one.device for one in found] == ["CPU", "CPU.NATIVE", "CPU.HOST", "CPU"]
    values = dict(x)
    for one in found:
        assert all(np.array_equal(value, values[name]) for name, value in one.inputs(x).items())
        values |= core.compile_model(one.model(loaded), one.device, one.config)(one.inputs(x))
    want = np.exp(np.tanh(np.maximum(x["x"].astype("d"), 0) @ np.eye(8)[::-1]) + x["x"])
    np.testing.assert_allclose(values["y"], want, rtol=1e-5)


def test_lock_locks_all_and_frozen_runs_them(model, tmp_path, capsys):
    (tmp_path / "affinity.json").write_text('{"relu": "CPU.HOST", "add": "CPU"}')
    split = ["-d", "HETERO:CPU,CPU.HOST", "-c", f"HETERO_AFFINITY={tmp_path / 'affinity.json'}"]
    for how in (["-d", "MULTI:CPU,CPU.HOST"], ["-d", "BATCH:CPU(4)"], split):
        assert tools.execute(["run", model, *how, "--frozen", "--no-save"]) == 2
        assert tools.execute(["lock", model, *how]) == 0
        out = capsys.readouterr().out
        assert len(out.splitlines()) == 2, out
        assert tools.execute(["run", model, *how, "--frozen", "--no-save"]) == 0
        capsys.readouterr()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["graph", "MODEL"], "stands for several devices, and a graph is that of one (name one of CPU, CPU.HOST)"),
        (["devices"], "MULTI:CPU,CPU.HOST: a single device is wanted here (name one of CPU, CPU.HOST)"),
        (["driver", "softmax", "--input", "float32[4,8]"], ": a single device is wanted here"),
        (["kb", "verify"], "MULTI:CPU,CPU.HOST: a single device is wanted here (name one of CPU, CPU.HOST)"),
    ],
)
def test_what_is_for_one_device_says_so(command, said, model, capsys):
    wanted = [model if part == "MODEL" else part for part in command]
    assert tools.execute([*wanted, "-d", "MULTI:CPU,CPU.HOST"]) == 2
    assert said in capsys.readouterr().err


def test_a_graph_of_the_only_device(model, capsys):
    assert tools.execute(["graph", model, "-d", "BATCH:CPU(4)"]) == 0
    assert "Relu" in capsys.readouterr().out


def test_what_was_tuned_is_not_lost_by_another_devices_error(model, tmp_path, capsys, monkeypatch):
    from tunewright import Core
    from tunewright.errors import DeviceError

    tune = Core.tune

    def fail(self, model, inputs, device, *args, **how):
        if device == "CPU.HOST":
            raise DeviceError("it broke")
        return tune(self, model, inputs, device, *args, **how)

    monkeypatch.setattr(Core, "tune", fail)
    report = tmp_path / "report.html"
    assert tools.execute(["tune", model, "-d", "MULTI:CPU,CPU.HOST", "-b", "2", "--report", str(report)]) == 2
    out, err = capsys.readouterr()
    assert "nothing was searched" in out and "it broke" in err and report.exists()


def test_python_tunes_one_device_at_a_time(model):
    from tunewright import Core
    from tunewright.errors import DeviceError

    with pytest.raises(DeviceError, match=r"several devices \(tune CPU, CPU.HOST one by one; `Core.apart`"):
        Core().tune(model, {"x": np.ones((1, 8), np.float32)}, "MULTI:CPU,CPU.HOST", 1.0)


def test_counters_tell_subgraphs_and_devices(model, tmp_path, capsys):
    from tunewright.runtime.insight.counters import CounterRow, NodeStatus
    from tunewright.tools.benchmark.measure import BenchmarkResult, accumulate
    from tunewright.tools.benchmark.report import show_counters

    (tmp_path / "affinity.json").write_text('{"relu": "CPU.HOST", "add": "CPU"}')
    how = ["-d", "HETERO:CPU,CPU.HOST", "-c", f"HETERO_AFFINITY={tmp_path / 'affinity.json'}", "-n", "5", "--pc"]
    assert tools.execute(["benchmark", model, *how, "--report", str(tmp_path / "r.json")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert any(line[:5] == ["relu", "Relu", "0", "on", "CPU.HOST"] for line in lines)
    at = lines.index(["subgraph", "device", "nodes", "ms", "share"]) + 2
    assert [line[:3] for line in lines[at : at + 2]] == [["0", "CPU.HOST", "1"], ["1", "CPU", "1"]]
    counters = json.loads((tmp_path / "r.json").read_text())["counters"]
    assert {(row["name"], row["device"], row["subgraph"]) for row in counters} == {
        ("relu", "CPU.HOST", 0), ("add", "CPU", 1)
    }  # fmt: skip
    result = BenchmarkResult()  # of MULTI: the same nodes, on whichever device was free
    for device, seconds in (("CPU", 1e-3), ("CPU.HOST", 5e-3), ("CPU", 3e-3)):
        accumulate(
            result, [CounterRow("add", "Add", NodeStatus.EXECUTED, "k", device_seconds=seconds, calls=1, device=device)]
        )
    assert [(row.device, row.device_seconds) for row in result.rows] == [("CPU", 4e-3), ("CPU.HOST", 5e-3)]
    show_counters(result)
    shown = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("add")]
    assert [line[2] for line in shown] == ["CPU.HOST", "CPU"] and [line[-1] for line in shown] == ["55.6%", "44.4%"]
    assert tools.execute(["benchmark", model, "-n", "5", "--pc"]) == 0
    assert " subgraph" not in capsys.readouterr().out
