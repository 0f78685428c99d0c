"""Operands that say what to do (axes, starts, shapes, ...) and come at run time are no reason to need the host."""

import numpy as np
import pytest
from onnx import parser

import tunewright
from tunewright.plugins.single import open_device
from tunewright.runtime.plans.deferred_kernels import LateKernel

pytestmark = pytest.mark.skipif(open_device("CPU").family == "host", reason="needs a CPU device with kernels")

X = np.random.default_rng(0).standard_normal((4, 6, 5)).astype(np.float32)


def model(text, version=21):
    return parser.parse_model(f'<ir_version: 10, opset_import: ["" : {version}]>\n' + text)


def ints(*values):
    return np.array(values, np.int64)


def scalar(value, dtype=np.int64):
    return np.asarray(value, dtype)


#: name -> the graph, and what is given in each of several runs beside x
CASES = {
    "slice": (
        "(float[4, 6, 5] x, int64[k] s, int64[k] e, int64[k] a, int64[k] d) => (float y) { y = Slice(x, s, e, a, d) }",
        [
            {"s": ints(1), "e": ints(3), "a": ints(0), "d": ints(1)},
            {"s": ints(-1, 2), "e": ints(-99, 99), "a": ints(1, -1), "d": ints(-2, 1)},
            {"s": ints(2), "e": ints(2), "a": ints(0), "d": ints(1)},
        ],
    ),
    "pad": (
        "(float[4, 6, 5] x, int64[6] p, float v) => (float y) { y = Pad(x, p, v) }",
        [
            {"p": ints(1, 0, 2, 0, 3, 0), "v": scalar(7, np.float32)},
            {"p": ints(0, -1, 0, 0, -2, 1), "v": scalar(-1, np.float32)},
        ],
    ),
    "reflected pad": (
        '(float[4, 6, 5] x, int64[6] p) => (float y) { y = Pad<mode = "reflect">(x, p) }',
        [{"p": ints(1, 0, 2, 0, 3, 0)}, {"p": ints(0, 5, 0, 3, 0, 1)}],
    ),
    "reshape": (
        "(float[4, 6, 5] x, int64[k] s) => (float y) { t = Neg(x) y = Reshape(t, s) }",
        [{"s": ints(2, -1)}, {"s": ints(0, 0, 5)}, {"s": ints(120)}],
    ),
    "expand": (
        "(float[4, 6, 5] x, int64[k] s) => (float y) { y = Expand(x, s) }",
        [{"s": ints(2, 4, 6, 5)}, {"s": ints(1)}],
    ),
    "tile": (
        "(float[4, 6, 5] x, int64[3] r) => (float y) { y = Tile(x, r) }",
        [{"r": ints(1, 2, 3)}, {"r": ints(2, 0, 1)}],
    ),
    "squeeze and unsqueeze": (
        "(float[4, 6, 5] x, int64[k] a) => (float y) { u = Unsqueeze(x, a) n = Neg(u) y = Squeeze(n, a) }",
        [{"a": ints(0)}, {"a": ints(-1, 1)}],
    ),
    "sum": (
        "(float[4, 6, 5] x, int64[k] a) => (float y, float z) { y = ReduceSum(x, a) z = ReduceMin<keepdims=0>(x, a) }",
        [{"a": ints(0)}, {"a": ints(-1, 1)}, {"a": ints(0, 1, 2)}],
    ),
    "largest": (
        "(float[4, 6, 5] x, int64[1] k) => (float v, int64 i) { v, i = TopK<axis = 1>(x, k) }",
        [{"k": ints(2)}, {"k": ints(6)}, {"k": ints(0)}],
    ),
    "split": (
        "(float[4, 6, 5] x, int64[2] s) => (float y, float z) { y, z = Split<axis = 1>(x, s) }",
        [{"s": ints(2, 4)}, {"s": ints(6, 0)}],
    ),
    "resize to sizes": (
        '(float[4, 6, 5] x, int64[3] s) => (float y) { y = Resize<mode = "linear">(x, , , s) }',
        [{"s": ints(4, 9, 3)}, {"s": ints(4, 2, 15)}],
    ),
    "resize by scales": (
        '(float[4, 6, 5] x, float[3] s) => (float y) { y = Resize<mode = "nearest">(x, , s) }',
        [{"s": np.array([1, 2, 0.6], np.float32)}, {"s": np.array([1, 0.5, 3], np.float32)}],
    ),
    "filled": (
        "(float[4, 6, 5] x, int64[k] s) => (float y) { f = ConstantOfShape<value = float[1] {2.5}>(s) y = Mul(f, x) }",
        [{"s": ints(4, 6, 5)}, {"s": ints(2, 1, 1, 1)}],
    ),
    "one-hot": (
        "(float[4, 6, 5] x, int64[3] i, int64 d, float[2] v) => (float y) { y = OneHot(i, d, v) }",
        [
            {"i": ints(0, 2, 1), "d": scalar(3), "v": np.array([0, 1], np.float32)},
            {"i": ints(-1, 4, 9), "d": scalar(5), "v": np.array([-1, 2], np.float32)},
        ],
    ),
    "cumulative sum": (
        "(float[4, 6, 5] x, int64 a) => (float[4, 6, 5] y) { y = CumSum(x, a) }",
        [{"a": scalar(0)}, {"a": scalar(-1)}],
    ),
    "range": (
        "(float[4, 6, 5] x, int64 b, int64 e, int64 d) => (int64 y) { y = Range(b, e, d) }",
        [
            {"b": scalar(0), "e": scalar(7), "d": scalar(2)},
            {"b": scalar(5), "e": scalar(-6), "d": scalar(-3)},
            {"b": scalar(5), "e": scalar(5), "d": scalar(1)},
        ],
    ),
    "range of floats": (
        "(float[4, 6, 5] x, float b, float e, float d) => (float y) { y = Range(b, e, d) }",
        [
            {"b": scalar(0, np.float32), "e": scalar(1, np.float32), "d": scalar(0.1, np.float32)},
            {"b": scalar(3, np.float32), "e": scalar(-1, np.float32), "d": scalar(-0.75, np.float32)},
        ],
    ),
    "crop or pad": (
        "(float[4, 6, 5] x, int64[3] s) => (float y) { y = CenterCropPad(x, s) }",
        [{"s": ints(2, 8, 5)}, {"s": ints(5, 3, 1)}],
    ),
    "shapes of what has an open shape": (
        """(float[4, 6, 5] x, int64[1] s, int64[1] e) => (int64 y, int64 z)
           { t = Slice(x, s, e) n = Neg(t) y = Shape(n) z = Size(n) }""",
        [{"s": ints(0), "e": ints(2)}, {"s": ints(1), "e": ints(1)}],
    ),
    "operands that a kernel has just made": (
        """(float[4, 6, 5] x, int64[1] s) => (float y) { two = Constant<value_ints = [2]>()
           a = Mul(s, two) b = Add(a, two) t = Slice(x, a, b, two) p = Concat<axis = 0>(a, b, s, s, s, s)
           q = Pad(t, p) r = Exp(q) y = ReduceSum(r, s) }""",
        [{"s": ints(0)}, {"s": ints(1)}],
    ),
    "a product behind an open shape": (
        """(float[4, 6, 5] x, int64[1] s, int64[1] e, float[5, 3] w) => (float y)
           { t = Slice(x, s, e) m = MatMul(t, w) y = Softmax(m) }""",
        [
            {"s": ints(0), "e": ints(3), "w": X[0, :5, :3]},
            {"s": ints(3), "e": ints(4), "w": X[1, 1:, 2:]},
        ],
    ),
    "a loop whose body slices": (
        """(float[4, 6, 5] x, int64 n) => (float last, float rows) {
           last, rows = Loop(n, , x) <body = b (int64 i, bool go, float[4, 6, 5] c) => (bool on, float d, float row) {
             on = Identity(go) axis = Constant<value_ints = [0]>() one = Constant<value_ints = [1]>()
             at = Unsqueeze(i, axis) to = Add(at, one) row = Slice(c, at, to) d = Sub(c, row) }> }""",
        [{"n": scalar(2)}, {"n": scalar(4)}],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_reference(name):
    text, runs = CASES[name]
    proto = model(f"g {text}")
    device = tunewright.Core({"HOST_FALLBACK": "NO"}).compile_model(proto, "CPU")
    host = tunewright.Core().compile_model(proto, "CPU.HOST")
    for given in [*runs, *runs]:  # the second time with kernels that are there
        got, want = (compiled({"x": X, **given}) for compiled in (device, host))
        assert list(got) == list(want)
        for key in want:
            assert (got[key].shape, got[key].dtype) == (want[key].shape, want[key].dtype)
            np.testing.assert_allclose(got[key], want[key], rtol=1e-5, atol=1e-6)


SLICE = "g (float[n] x, int64[1] s, int64[1] e) => (float y) { y = Slice(x, s, e) }"


def test_kernels_for_operands_of_long_ago_are_dropped():
    compiled = tunewright.Core({"HOST_FALLBACK": "NO", "SHAPE_TEMPLATES": "NO"}).compile_model(model(SLICE))
    x = np.arange(100, dtype=np.float32)
    for end in range(3 * LateKernel.MOST):
        np.testing.assert_array_equal(compiled({"x": x, "s": ints(0), "e": ints(end)})["y"], x[:end])
    (plan,) = compiled.program.plans
    (step,) = plan.steps
    assert isinstance(step.kernel, LateKernel) and len(step.kernel._kernels) == LateKernel.MOST


def test_the_counters_tell_that_it_ran_on_the_device():
    compiled = tunewright.Core({"HOST_FALLBACK": "NO", "PERF_COUNT": "YES"}).compile_model(model(SLICE))
    request = compiled.create_infer_request()
    request.infer({"x": np.arange(9, dtype=np.float32), "s": ints(2), "e": ints(7)})
    (row,) = request.get_profiling_info()
    assert row.device_seconds > 0 and row.host_seconds == 0


def test_with_the_host_to_help_it_runs_there():
    compiled = tunewright.Core({"PERF_COUNT": "YES", "SHAPE_TEMPLATES": "NO"}).compile_model(model(SLICE))
    request = compiled.create_infer_request()
    request.infer({"x": np.arange(9, dtype=np.float32), "s": ints(2), "e": ints(7)})
    (row,) = request.get_profiling_info()
    assert row.kernel == "host.reference"


def test_operands_that_make_no_sense_are_an_error_with_the_node():
    core = tunewright.Core({"HOST_FALLBACK": "NO"})
    text = "g (float[4, 6] x, int64[k] p) => (float y) { y = Pad(x, p) }"
    with pytest.raises(tunewright.TunewrightError, match=r"'y' \(Pad\)"):
        core.compile_model(model(text))({"x": X[:, :, 0], "p": ints(1, 2, 3)})
    text = "g (float[4, 6] x, int64[k] s) => (float y) { y = Reshape(x, s) }"
    with pytest.raises(tunewright.TunewrightError, match=r"'y' \(Reshape\)"):
        core.compile_model(model(text))({"x": X[:, :, 0], "s": ints(5, 5)})


def test_results_that_are_too_large_are_refused():
    text = "g (float[4, 6] x, int64[k] s) => (float y) { y = Tile(x, s) }"
    compiled = tunewright.Core({"HOST_FALLBACK": "NO", "MAX_TENSOR_BYTES": 10_000}).compile_model(model(text))
    assert compiled({"x": X[:, :, 0], "s": ints(2, 2)})["y"].shape == (8, 12)
    with pytest.raises(tunewright.LimitError, match="MAX_TENSOR_BYTES"):
        compiled({"x": X[:, :, 0], "s": ints(1000, 1000)})


def test_what_no_kernel_takes_is_told_when_it_is_known():
    text = """g (bool c, float[2] x) => (float y)
    {
      t = If(c) <
        then_branch = a () => (float p) { p = Relu(x) },
        else_branch = b () => (float8e5m2 q) { q = Cast<to = 19>(x) }
      >
      y = Neg(t)
    }"""
    core = tunewright.Core({"HOST_FALLBACK": "NO"})
    compiled = core.compile_model(model(text))
    x = np.array([1, -1], np.float32)
    np.testing.assert_array_equal(compiled({"c": scalar(True, bool), "x": x})["y"], [-1, 0])
    with pytest.raises(tunewright.UnsupportedError, match=r"'q' \(Cast\).*float8_e5m2.*HOST_FALLBACK = YES"):
        compiled({"c": scalar(False, bool), "x": x})
