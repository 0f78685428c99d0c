"""Small plans: results in one piece of memory, plans that are one launch, an If that decides by single numbers."""

import threading

import numpy as np
import pytest
from onnx import parser

from tunewright import Core, ExecutionError
from tunewright.plugins.single import open_device

native = pytest.mark.skipif(open_device("CPU").family != "native", reason="needs the native CPU device")

NETWORK = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[3, 8] x, float[8, 8] w) => (float[3, 8] y, float[3] z)
{
    a = MatMul(x, w)
    y = Add(a, x)
    axes = Constant <value_ints = [1]> ()
    z = ReduceSum <keepdims = 0> (y, axes)
}
"""
W = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)


def compiled(text, device="CPU", **config):
    return Core().compile_model(parser.parse_model(text), device, config)


def feed(number):
    return {"x": np.full((3, 8), number, np.float32), "w": W}


def check(results, number):
    x = feed(number)["x"]
    y = x @ W + x
    np.testing.assert_allclose(results["y"], y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(results["z"], y.sum(-1), rtol=1e-4, atol=1e-4)


def frame(request):
    ((_, found),) = request.executor.frames()
    return found


def segments(request):
    return len(frame(request).segments)


@native
def test_results_are_the_callers():
    request = compiled(NETWORK).create_infer_request()
    kept = [request.infer(feed(number)) for number in range(6)]
    assert segments(request) == 1 and request.get_totals().launches == 1
    for number, results in enumerate(kept):
        check(results, number)
        for array in results.values():
            assert array.ctypes.data % 64 == 0 and array.flags.writeable and array.flags.c_contiguous
            array[:] = 9
    check(request.infer(feed(7)), 7)


@native
def test_one_kernel_is_enough():
    request = compiled("""<ir_version: 8, opset_import: ["" : 17]>
g (float[4, 4] x) => (float[4, 4] y) { y = Relu(x) }""").create_infer_request()
    for number in (-3, 3):
        x = np.full((4, 4), number, np.float32)
        np.testing.assert_array_equal(request.infer({"x": x})["y"], np.maximum(x, 0))
    assert segments(request) == 1


@native
@pytest.mark.parametrize(
    "text",
    ["g (float[4096, 64] x) => (float[4096, 64] y) { y = Relu(x) }",  # too large to share a piece of memory
     "g (float[4, 4] x) => (float[4, 4] y, float[4, 4] z) { y = Relu(x) z = Identity(x) }",  # an input comes back
     "g (float[4, 4] x) => (float[4, 4] y) { a = MatMul(x, x) d = Det(a) y = Mul(a, d) }"],  # the host has a step
)  # fmt: skip
def test_results_that_share_no_piece_of_memory(text):
    request = compiled('<ir_version: 8, opset_import: ["" : 17]> ' + text).create_infer_request()
    want = compiled('<ir_version: 8, opset_import: ["" : 17]> ' + text, "CPU.HOST").create_infer_request()
    (shape,) = [type.dims for type in request.model.inputs.values()]
    for seed in range(3):
        x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
        for name, value in want.infer({"x": x}).items():
            np.testing.assert_allclose(request.infer({"x": x})[name], value, rtol=1e-4, atol=1e-5)
    assert segments(request) == (3 if "Det" in text else 1)


@native
def test_counted_plans_are_one_launch_too():
    request = compiled(NETWORK, PERF_COUNT="YES").create_infer_request()
    check(request.infer(feed(2)), 2)
    rows = [row for row in request.get_profiling_info() if row.calls]
    assert segments(request) == 1 and rows and all(row.device_seconds > 0 for row in rows)


@native
def test_a_request_that_failed_runs_again(monkeypatch):
    request = compiled(NETWORK).create_infer_request()
    check(request.infer(feed(1)), 1)
    (segment,), fails = frame(request).segments, [KeyboardInterrupt, MemoryError]
    again = segment.bound._again

    def failing():
        if fails:
            raise fails.pop()
        return again()

    monkeypatch.setattr(segment.bound, "_again", failing)
    with pytest.raises(ExecutionError, match="not enough memory"):
        request.infer(feed(2))
    with pytest.raises(KeyboardInterrupt):
        request.infer(feed(3))
    check(request.infer(feed(4)), 4)


@native
def test_inputs_of_other_threads_do_not_mix():
    model, wrong = compiled(NETWORK), []

    def work(first):
        request = model.create_infer_request()
        for number in range(first, first + 200):
            y = request.infer(feed(number))["y"]
            if not np.allclose(y, feed(number)["x"] @ W + number, rtol=1e-4, atol=1e-3):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(1000 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


SWITCH = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[4, 8] x, int64 rate, bool loud) => (float[4, 8] y, float[4] z)
{
    high = Constant <value = int64 {16000}> ()
    is_high = Equal(rate, high)
    go = And(is_high, loud)
    z, y = If (go) <
        then_branch = left () => (float[4] s, float[4, 8] a) {
            a = Exp(x)
            axes = Constant <value_ints = [1]> ()
            s = ReduceSum <keepdims = 0> (a, axes)
        },
        else_branch = right () => (float[4] t, float[4, 8] b) {
            b = Neg(x)
            t = ReduceMax <axes = [1], keepdims = 0> (b)
        }
    >
}
"""


#: the branches' results have other shapes, so that they are no part of a launch
OPEN = (
    SWITCH.replace("float[4] z", "float[n] z")
    .replace("float[4] s", "float[8] s")
    .replace("value_ints = [1]", "value_ints = [0]")
)


@native
@pytest.mark.parametrize("text, first, axis", [(OPEN, 2, 0), (SWITCH, 1, -1)], ids=["branches apart", "one launch"])
def test_what_was_decided_before_is_known(text, first, axis):
    request, rng = compiled(text).create_infer_request(), np.random.default_rng(0)
    for turn in range(3):
        for rate, loud in ((16000, True), (8000, True), (16000, False), (-1, False)):
            x = rng.standard_normal((4, 8)).astype(np.float32)
            made = request.infer({"x": x, "rate": np.array(rate), "loud": np.array(loud)})
            y = np.exp(x) if rate == 16000 and loud else -x
            z = y.sum(axis) if rate == 16000 and loud else y.max(-1)
            np.testing.assert_allclose(made["y"], y, rtol=1e-5)
            np.testing.assert_allclose(made["z"], z, rtol=1e-5)
            launches = request.get_totals().launches
            assert launches == (1 if turn else first), "the second time it is known which branch it is"


def test_more_values_than_are_remembered(monkeypatch):
    from tunewright.runtime.control import decision

    monkeypatch.setattr(decision, "MOST", 3)
    request, x = compiled(OPEN).create_infer_request(), np.ones((4, 8), np.float32)
    for rate in [*range(15997, 16003)] * 2:
        y = request.infer({"x": x, "rate": np.array(rate), "loud": np.array(True)})["y"]
        np.testing.assert_allclose(y, np.exp(x) if rate == 16000 else -x, rtol=1e-5)
    (found,) = [frame.decision for _, frame in request.executor.frames() if frame.decision is not None]
    assert 0 < len(found.known) <= 3


BOUNDS = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[4] x, int64[1] at, bool go) => (float[1] y)
{
    y = If (go) <
        then_branch = left () => (float[1] a) { a = GatherElements(x, at) },
        else_branch = right () => (float[1] b) { b = Gather(x, at) }
    >
}
"""


def test_an_error_in_a_known_branch_says_where():
    model, x = compiled(BOUNDS, "CPU.HOST"), np.arange(4, dtype=np.float32)
    request = model.create_infer_request()
    for go in (True, False):
        inputs = {"x": x, "at": np.array([2]), "go": np.array(go)}
        for _ in range(2):
            assert request.infer(inputs)["y"] == 2
        told = []
        for fresh in (model.create_infer_request(), request):
            with pytest.raises(ExecutionError) as error:
                fresh.infer(inputs | {"at": np.array([9])})
            told.append(str(error.value))
        assert told[0] == told[1] and "node" in told[0]
