"""Who would run a node: `Core.query_model`, ``tunewright query``, and the error where the host may not help."""

import json

import numpy as np
import onnx
import pytest
from onnx import parser

import tunewright
from tunewright import tools
from tunewright.plugins.single import open_device

on_opencl = pytest.mark.skipif(open_device("CPU").family == "host", reason="needs a CPU device with kernels")

#: one node for a kernel, two that only the host runs, and a branch
MIXED = """<ir_version: 10, opset_import: ["" : 21]>
g (float[6] x, bool c) => (int64[1, n] at, float[2] y, float z)
{
  [relu] r = Relu(x)
  [find] at = NonZero(r)
  [low] l = Cast<to = 19>(x)
  [high] h = Cast<to = 1>(l)
  [choose] z = If(c) <
    then_branch = t () => (float p) { [minus] p = Neg(x) },
    else_branch = e () => (float q) { [first] q, k = Unique(x) }
  >
  [cut] y, v, w = Split<axis = 0, num_outputs = 3>(h)
}"""
#: everything has kernels
PLAIN = """<ir_version: 10, opset_import: ["" : 21]>
g (float[2, 3] x, float[3, 4] w) => (float[2, 4] y) { [product] m = MatMul(x, w) [relu] y = Relu(m) }"""


def mixed():
    return parser.parse_model(MIXED)


@pytest.fixture
def core():
    return tunewright.Core()


# In Python


@on_opencl
def test_every_node_has_an_answer(core):
    answers = core.query_model(mixed())
    assert set(answers) == {"relu", "find", "low", "high", "choose", "minus", "first", "cut"}
    assert all(answers.values()), "with the host to help everything runs"
    assert answers["relu"].solver == "opencl.elementwise" and not answers["relu"].on_host
    assert answers["minus"].solver == "opencl.elementwise", "bodies are asked too"
    assert answers["choose"].solver == "control flow" and answers["choose"].on_host
    for name in ("find", "low", "first"):
        assert answers[name].solver == "host.reference" and answers[name].on_host, name
    assert "float8_e5m2" in answers["low"].rejected["opencl.elementwise"]


@on_opencl
def test_without_the_host_the_reasons_say_why(core):
    answers = core.query_model(mixed(), "CPU", {"HOST_FALLBACK": "NO"})
    missing = {name for name, support in answers.items() if not support}
    assert missing == {"find", "low", "high", "first"}
    assert answers["find"].solver is None and answers["find"].rejected == {"host.reference": "HOST_FALLBACK is NO"}
    assert answers["relu"] and answers["relu"].rejected["host.reference"] == "HOST_FALLBACK is NO"


@on_opencl
def test_what_waits_for_values_is_said_to_be_chosen_then(core):
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[6] x, int64[1] s, int64[1] e) => (int64 n, float[6] y)
        { [cut] t = Slice(x, s, e) [minus] m = Neg(t) [shape] n = Shape(m) [plus] y = Abs(x) }"""
    answers = core.query_model(parser.parse_model(text), "CPU", {"HOST_FALLBACK": "NO"})
    assert {name: support.solver for name, support in answers.items()} == {
        "cut": "chosen as it runs",
        "minus": "opencl.elementwise",
        "shape": "from shapes",
        "plus": "opencl.elementwise",
    }
    assert any("is not constant" in reason for reason in answers["cut"].rejected.values())


def test_on_the_host_nothing_is_a_fallback(core):
    answers = core.query_model(mixed(), "CPU.HOST", {"HOST_FALLBACK": "NO"})
    for name, support in answers.items():
        assert support, name
        assert support.on_host == (name == "choose"), name


def test_the_null_device_runs_nothing(core):
    answers = core.query_model(parser.parse_model(PLAIN), "NULL", {"HOST_FALLBACK": "NO"})
    assert set(answers) == {"product", "relu"}
    assert all(not s.on_host for s in answers.values())


def test_asking_changes_nothing(core):
    model = core.read_model(mixed())
    before = [(n.name, n.op) for n in model.graph.nodes]
    core.query_model(model)
    assert [(n.name, n.op) for n in model.graph.nodes] == before
    assert model.inputs["x"].shape == (6,)


# The error


@on_opencl
def test_compiling_without_the_host_names_every_node_that_needs_it(core):
    with pytest.raises(tunewright.UnsupportedError) as caught:
        core.compile_model(mixed(), "CPU", {"HOST_FALLBACK": "NO"})
    text = str(caught.value)
    for name, op in (("low", "Cast"), ("high", "Cast")):
        assert f"node '{name}' ({op})" in text
    assert "HOST_FALLBACK = YES" in text and "float8_e5m2" in text
    assert "'relu'" not in text and "'find'" not in text


@on_opencl
def test_a_long_list_is_cut_short(core):
    nodes = " ".join(f"[n{i}] y{i} = Cast <to = 8> (x)" for i in range(14))
    outputs = ", ".join(f"string[6] y{i}" for i in range(14))
    proto = parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g (float[6] x) => ({outputs}) {{ {nodes} }}')
    with pytest.raises(tunewright.UnsupportedError, match=r"'n9'.*; and 4 more") as caught:
        core.compile_model(proto, "CPU", {"HOST_FALLBACK": "NO", "DISABLED_PASSES": "common-subexpressions"})
    assert "'n10'" not in str(caught.value)


@on_opencl
def test_what_needs_no_host_compiles_without_it(core):
    compiled = core.compile_model(parser.parse_model(PLAIN), "CPU", {"HOST_FALLBACK": "NO"})
    x, w = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
    np.testing.assert_array_equal(compiled({"x": x, "w": w})["y"], np.full((2, 4), 3, np.float32))


@on_opencl
def test_a_branch_that_needs_the_host_is_told_when_it_is_taken(core):
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[6] x, bool c) => (float z) { z = If(c) <
        then_branch = t () => (float p) { [minus] p = Neg(x) },
        else_branch = e () => (float q) { [first] s = Cast <to = 8> (x) q = Cast <to = 1> (s) } > }"""
    compiled = core.compile_model(parser.parse_model(text), "CPU", {"HOST_FALLBACK": "NO"})
    x = np.arange(6, dtype=np.float32)
    np.testing.assert_array_equal(compiled({"x": x, "c": np.asarray(True)})["z"], -x)
    with pytest.raises(tunewright.UnsupportedError, match=r"node '.*first' \(Cast\)"):
        compiled({"x": x, "c": np.asarray(False)})


# On the command line


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    """Runs ``tunewright query`` on a model: (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(proto, *arguments):
        path = tmp_path / "model.onnx"
        onnx.save(proto, path)
        code = tools.execute(["query", str(path), *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@on_opencl
def test_the_command_prints_a_table_and_a_sum(call):
    code, out, _ = call(mixed())
    assert code == 0
    assert "8 nodes: " in out and "0 without a solver" in out
    assert "host.reference (host)" in out and "opencl.elementwise" in out


@on_opencl
def test_the_command_leaves_with_1_when_a_node_cannot_run(call):
    code, out, _ = call(mixed(), "--config", "HOST_FALLBACK=NO")
    assert code == 1
    assert "4 without a solver" in out and "none: host.reference: HOST_FALLBACK is NO" in out
    code, out, _ = call(parser.parse_model(PLAIN), "--config", "HOST_FALLBACK=NO")
    assert code == 0 and "2 nodes: 2 on CPU, 0 on the host, 0 without a solver" in out


@on_opencl
def test_the_command_tells_what_the_others_said(call):
    _, out, _ = call(mixed())
    assert "float8_e5m2" not in out
    _, out, _ = call(mixed(), "--why")
    assert "float8_e5m2" in out


@on_opencl
def test_the_command_prints_json(call):
    code, out, _ = call(mixed(), "--json", "--config", "HOST_FALLBACK=NO")
    rows = {row["node"]: row for row in json.loads(out)}
    assert code == 1 and len(rows) == 8
    assert rows["find"] == {
        "node": "find",
        "op": "NonZero",
        "solver": None,
        "on_host": False,
        "device": "",
        "rejected": {"host.reference": "HOST_FALLBACK is NO"},
    }
    assert rows["relu"]["solver"] == "opencl.elementwise"
    code, out, _ = call(parser.parse_model(PLAIN), "--json", "--device", "CPU.HOST")
    assert code == 0 and {row["solver"] for row in json.loads(out)} == {"host.reference"}


def test_mistakes_leave_with_2(call):
    code, out, err = call(parser.parse_model(PLAIN), "--device", "NPU")
    assert code == 2 and not out and "there is no device 'NPU'" in err
    code, out, err = call(parser.parse_model(PLAIN), "--config", "HOST_FALLBAK=NO")
    assert code == 2 and not out and "did you mean HOST_FALLBACK" in err
