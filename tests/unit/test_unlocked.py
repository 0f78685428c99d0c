"""Launches in the calling thread: Python's lock is others' meanwhile, and small networks of one thread run so."""

import threading

import numpy as np
import pytest
from onnx import parser

from tunewright import Core
from tunewright.devices import unlocked
from tunewright.plugins.single import open_device

INLINE = open_device("CPU").inline()
pytestmark = pytest.mark.skipif(INLINE is None, reason="this runtime offers no device without threads")

#: waits for somebody to write to x, but not for ever, and says what it saw
WAITS = """
__kernel void waits(__global volatile int* x, __global int* seen, long most) {
  long i = 0;
  while (i < most && x[0] == 0) i++;
  seen[0] = x[0];
}
"""


def waiting(most):
    """A launch of it, and its arrays."""
    queue = INLINE.queue()
    launch = INLINE.launch(queue, INLINE.build(WAITS), "waits", (1,))
    x, seen = np.zeros(1, np.int32), np.zeros(1, np.int32)
    for at, value in enumerate((x, seen, np.int64(most))):
        launch.set(at, value)
    return queue, launch, x, seen


def test_other_threads_go_on_while_a_kernel_runs():
    if not unlocked.possible():
        pytest.skip("there is no way to leave the lock here")
    queue, launch, x, seen = waiting(100_000)
    for _ in range(1 + unlocked.TRIALS):  # the first compiles it, the others find that it takes long
        launch()
    queue.finish()
    assert not seen[0]
    launch.set(2, np.int64(1 << 34))  # seconds, if nobody comes
    begin = threading.Event()

    def write():
        assert begin.wait(60)
        x[0] = 7

    other = threading.Thread(target=write)
    other.start()
    begin.set()
    launch()
    other.join(60)
    assert seen[0] == 7, "the other thread had to wait until the kernel was over"


def test_a_brief_kernel_keeps_the_lock():
    if not unlocked.possible():
        pytest.skip("there is no way to leave the lock here")
    queue, launch, x, seen = waiting(1)
    launch()
    keeping = launch._again
    assert keeping is not None and keeping is not launch._leaving
    x[0] = 5
    launch()
    queue.finish()
    assert seen[0] == 5 and queue.launches == 2 and not queue.pending


def test_pyopencl_says_what_is_wrong():
    import pyopencl as cl

    _, launch, _, _ = waiting(1)
    launch()
    launch._again = lambda: -54  # CL_INVALID_WORK_GROUP_SIZE
    launch._local = (3,)
    with pytest.raises(cl.Error, match="INVALID_WORK_GROUP_SIZE"):
        launch()


def test_without_such_a_way_pyopencl_enqueues(monkeypatch):
    monkeypatch.setattr(unlocked, "_functions", lambda: None)
    assert not unlocked.possible()
    queue, launch, x, seen = waiting(1)
    for number in (3, 4):
        x[0] = number
        launch()
        queue.finish()
        assert seen[0] == number and launch._again is None


SMALL = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[4, 8] x, bool go) => (float[4, 8] y, float[4, 8] z)
{
    z = Exp(x)
    y = If (go) <
        then_branch = left () => (float[4, 8] a) { s = Softmax(x) a = Add(s, z) },
        else_branch = right () => (float[4, 8] b) { b = Neg(z) }
    >
}
"""


def test_a_small_network_of_one_thread_runs_in_the_calling_one():
    """One kernel alone, too, takes its arguments from a table."""
    compiled = Core().compile_model(parser.parse_model(SMALL), "CPU", {"NUM_STREAMS": 2})
    device = compiled.env.device
    if device.target.units == open_device("CPU").target.units:
        pytest.skip("there is one core")
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    e = np.exp(x)
    for go, want in ((True, e / e.sum(-1, keepdims=True) + e), (False, -e)):
        for _ in range(3):
            made = compiled({"x": x, "go": np.array(go)})
            np.testing.assert_allclose(made["y"], want, rtol=1e-5)
            np.testing.assert_allclose(made["z"], e, rtol=1e-6)
    (plan,) = compiled.program.plans
    assert plan.device is device.inline() is not device and not plan.device.confined
    assert plan.device.leaves_lock == unlocked.possible() and [len(run.steps) for run in plan.runs.values()] == [1]
    assert plan.device._programs is open_device("CPU").inline()._programs, "they are compiled once for all"


def test_results_that_share_a_piece_of_memory_are_each_the_callers():
    compiled = Core().compile_model(parser.parse_model(SMALL), "CPU")
    inputs = {"x": np.ones((4, 8), np.float32), "go": np.array(True)}
    first, second = compiled(inputs), compiled(inputs)
    kept = {name: array.copy() for name, array in first.items()}
    for array in second.values():
        assert array.ctypes.data % 64 == 0 and array.flags.writeable
        array[:] = 9
    for name, array in first.items():
        np.testing.assert_array_equal(array, kept[name])


BESIDE = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[16, 128] x, float[128, 128] w) => (float[16, 128] y, float[16] z)
{
    a = MatMul(x, w)
    b = Softmax(a)
    c = MatMul(b, w)
    y = Tanh(c)
    axes = Constant <value_ints = [1]> ()
    z = ReduceSum <keepdims = 0> (y, axes)
}
"""


def side_by_side(count, threads=3):
    """Each thread has a request and inputs of its own, from the first launch on, and the same results each time."""
    compiled = Core().compile_model(parser.parse_model(BESIDE), "CPU", {"NUM_STREAMS": 2})
    rng, wrong = np.random.default_rng(0), []
    w = (rng.standard_normal((128, 128)) / 11).astype(np.float32)
    feeds = [{"x": rng.standard_normal((16, 128)).astype(np.float32), "w": w} for _ in range(threads)]
    together = threading.Barrier(threads)

    def work(feed):
        request = compiled.create_infer_request()
        together.wait(60)
        first = request.infer(feed)
        for _ in range(count):
            wrong.extend(name for name, y in request.infer(feed).items() if not np.array_equal(y, first[name]))
        a = feed["x"] @ w
        e = np.exp(a - a.max(-1, keepdims=True))
        y = np.tanh(e / e.sum(-1, keepdims=True) @ w)
        if not np.allclose(first["y"], y, atol=1e-5) or not np.allclose(first["z"], y.sum(-1), atol=1e-4):
            wrong.append("first")

    workers = [threading.Thread(target=work, args=(feed,)) for feed in feeds]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong and all(plan.device is compiled.env.device.inline() for plan in compiled.program.plans)


def test_kernels_run_side_by_side():
    side_by_side(200)


@pytest.mark.soak
def test_kernels_run_side_by_side_for_long():
    side_by_side(100_000)
