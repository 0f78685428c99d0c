"""Inferences of small networks that run together: their last launches are one, and each has its own end."""

import contextlib
import threading

import numpy as np
import pytest
from onnx import parser

from tunewright import AsyncInferQueue, Core, ExecutionError, InputError, RequestCancelled
from tunewright.devices import opencl, unlocked
from tunewright.plugins.single import open_device
from tunewright.runtime.streams import MOST, Streams

CPU = open_device("CPU")
pytestmark = pytest.mark.skipif(
    CPU.inline() is None or CPU.target.units == 1 or not unlocked.possible(),
    reason="small networks do not run in the calling thread here",
)

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


class Idle(Streams):
    """Streams whose threads never come to it, and whose inferences are tiny."""

    def submit(self, task):
        task.streams = self
        self._work.tasks.append(task)
        self._work.seconds = self._work.used = 1e-5
        self._work.is_tiny = True


@pytest.fixture(scope="module")
def model():
    return Core().compile_model(parser.parse_model(NETWORK), "CPU", {"NUM_STREAMS": 2})


def feed(number):
    return {"x": np.full((3, 8), number, np.float32), "w": W}


def check(results, number):
    x = feed(number)["x"]
    y = x @ W + x
    np.testing.assert_allclose(results["y"], y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(results["z"], y.sum(-1), rtol=1e-4, atol=1e-4)


@pytest.fixture
def requests(model):
    """Some that have run once, and wait for one thread."""
    streams, made = Idle(2), [model.create_infer_request() for _ in range(6)]
    for number, request in enumerate(made):
        check(request.infer(feed(number)), number)
        assert request.can_prepare
        request._streams = streams
    return made


@pytest.fixture
def enqueued(monkeypatch):
    """Launches that there were."""
    found, call = [], opencl.Launch.__call__
    monkeypatch.setattr(opencl.Launch, "__call__", lambda self: (found.append(self), call(self))[1])
    return found


def start(requests, numbers):
    for request, number in zip(requests, numbers, strict=True):
        request.start_async(feed(number), number)
    return requests[0]._streams


def test_they_are_one_launch(requests, enqueued):
    told = []
    for request in requests:
        request.set_callback(lambda request, number: told.append(number))
    for first in (10, 20):
        streams = start(requests, range(first, first + 6))
        assert streams.help() and not streams.help() and len(enqueued) == first // 10
        for number, request in enumerate(requests, first):
            assert request.wait() and request.get_totals().launches == 1
            check(request.results, number)
        assert told[-6:] == list(range(first, first + 6)), "in their order"
    check(requests[3].infer(feed(7)), 7)
    assert len(enqueued) == 3


def test_results_are_the_callers(requests):
    streams = start(requests, range(6))
    assert streams.help()
    first = [request.results for request in requests]
    assert start(requests, range(6, 12)).help()
    for number, results in enumerate(first):
        check(results, number)
        for array in results.values():
            assert array.ctypes.data % 64 == 0 and array.flags.writeable and array.flags.c_contiguous
            array[:] = 9
    for number, request in enumerate(requests, 6):
        check(request.results, number)


def test_each_has_its_own_error_and_may_be_cancelled(requests):
    requests[1].set_callback(lambda request, number: 1 / 0)
    streams = start(requests[:2], range(2))
    requests[2].start_async({"x": np.zeros((3, 7), np.float32), "w": W})
    requests[3].start_async({"x": np.asfortranarray(feed(3)["x"]), "w": W})  # it is copied, and runs by itself
    start(requests[4:], (4, 5))
    requests[4].cancel()
    assert streams.help()
    for number, error in ((1, ZeroDivisionError), (2, InputError), (4, RequestCancelled)):
        with pytest.raises(error):
            requests[number].wait()
    for number in (0, 3, 5):
        assert requests[number].wait()
        check(requests[number].results, number)
    assert not streams._work.running and not streams._work.over


def test_one_that_is_cancelled_while_it_runs_has_no_results(requests, monkeypatch):
    begin = opencl.OpenCLQueue.begin

    def late(self, others):
        requests[2].cancel()
        begin(self, others)

    monkeypatch.setattr(opencl.OpenCLQueue, "begin", late)
    assert start(requests, range(6)).help()
    with pytest.raises(RequestCancelled):
        requests[2].wait()
    assert not requests[2].results and requests[3].wait()
    check(requests[3].results, 3)


def test_a_launch_that_fails_is_tried_one_by_one(requests, monkeypatch):
    from tunewright.solvers.opencl.joined import JoinedLauncher

    begin, last = JoinedLauncher.begin, requests[4].executor.frames()[0][1].together[0].launcher

    def failing(self, others=()):
        if others or self is last:
            raise RuntimeError("no such luck")
        begin(self)

    monkeypatch.setattr(JoinedLauncher, "begin", failing)
    assert start(requests, range(6)).help()
    for number, request in enumerate(requests):
        if number == 4:
            with pytest.raises(RuntimeError, match="no such luck"):
                request.wait()
        else:
            assert request.wait()
            check(request.results, number)
    monkeypatch.undo()
    assert start(requests, range(6)).help()
    check(requests[4].results, 4)


@pytest.mark.parametrize("when", ["prepare", "begin", "complete"])
def test_ctrl_c_reaches_all_and_leaves_nothing_behind(requests, monkeypatch, enqueued, when):
    """Wherever it comes: what was prepared for memory that is gone is never launched."""
    kind = opencl.OpenCLQueue if when == "begin" else type(requests[0])
    real, calls = getattr(kind, when), []

    def interrupted(self, *given):
        calls.append(self)
        if len(calls) == (1 if when == "begin" else 3):
            raise KeyboardInterrupt
        return real(self, *given)

    monkeypatch.setattr(kind, when, interrupted)
    streams = start(requests, range(6))
    with pytest.raises(KeyboardInterrupt):
        streams.help()
    ended = 0
    for request in requests:
        with contextlib.suppress(KeyboardInterrupt):
            ended += request.wait()
    assert ended < 6 and not streams._work.running
    monkeypatch.undo()
    for number, request in enumerate(requests):
        check(request.infer(feed(number)), number)
    assert start(requests, range(6)).help()
    for number, request in enumerate(requests):
        check(request.results, number)


def test_a_callback_may_wait_for_another_one(requests):
    """Nobody else would end it."""
    seen = []
    requests[0].set_callback(lambda request, number: seen.append(requests[5].wait()))
    requests[5].set_callback(lambda request, number: seen.append(number))
    assert start(requests, range(6)).help()
    assert seen == [5, True] and requests[0].wait()
    check(requests[5].results, 5)


def test_a_callback_may_start_another_one(model):
    """Though all requests are busy, as long as some of them are only to be ended."""
    queue, got, lock = AsyncInferQueue(model, 6), [], threading.Lock()

    def over(request, number):
        with lock:
            got.append(number)
        check(request.results, number)
        if number == 40:
            queue.start_async(feed(100), 100)

    queue.set_callback(over)
    work = model.streams._work
    for number in range(80):
        work.seconds = work.used = 1e-5
        queue.start_async(feed(number), number)
    queue.wait_all()
    assert sorted(got) == [*range(80), 100]


def test_a_queue_has_enough_of_them(model):
    """For each stream as many as are begun together, while they are short."""
    queue, got = AsyncInferQueue(model), []
    queue.set_callback(lambda request, number: got.append(number) or check(request.results, number))
    work = model.streams._work
    for number in range(400):
        work.seconds = work.used = 1e-5
        queue.start_async(feed(number), number)
    queue.wait_all()
    assert sorted(got) == list(range(400)) and 2 < len(queue) <= MOST * 2


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


def test_what_was_decided_before_is_known(enqueued):
    compiled = Core().compile_model(parser.parse_model(SWITCH), "CPU", {"NUM_STREAMS": 2})
    request, rng = compiled.create_infer_request(), np.random.default_rng(0)
    for turn in range(3):
        for rate, loud in ((16000, True), (8000, True), (16000, False), (-1, False)):
            x = rng.standard_normal((4, 8)).astype(np.float32)
            enqueued.clear()
            made = request.infer({"x": x, "rate": np.array(rate), "loud": np.array(loud)})
            y = np.exp(x) if rate == 16000 and loud else -x
            z = y.sum(-1) if rate == 16000 and loud else y.max(-1)
            np.testing.assert_allclose(made["y"], y, rtol=1e-5)
            np.testing.assert_allclose(made["z"], z, rtol=1e-5)
            assert len(enqueued) == (1 if turn else 2), "the second time it is known which branch it is"


LOOP = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[4, 8] x) => (float[4, 8] y)
{
    n = Constant <value = int64 {5}> ()
    t = Constant <value = bool {1}> ()
    e = Abs(x)
    y = Loop (n, t, e) <body = b (int64 i, bool on, float[4, 8] s) => (bool more, float[4, 8] z)
    {
        limit = Constant <value = float {40.0}> ()
        z = Add(s, s)
        top = ReduceMax <keepdims = 0> (z)
        more = Less(top, limit)
    }>
}
"""


def test_a_loop_sees_what_its_body_made():
    """It looks at the condition of each turn before it begins the next."""
    compiled = Core().compile_model(parser.parse_model(LOOP), "CPU", {"NUM_STREAMS": 2})
    streams, made = Idle(2), [compiled.create_infer_request() for _ in range(5)]
    for request in made:
        request.infer({"x": np.ones((4, 8), np.float32)})
        assert request.can_prepare
        request._streams = streams
    for turn in range(3):
        for number, request in enumerate(made):
            request.start_async({"x": np.full((4, 8), -number - turn, np.float32)})
        assert streams.help()
        for number, request in enumerate(made, turn):
            turns = next((k for k in range(1, 5) if number * 2**k >= 40), 5)
            np.testing.assert_array_equal(request.results["y"], np.full((4, 8), number * 2**turns, np.float32))


def test_more_values_than_are_remembered(monkeypatch):
    from tunewright.runtime import brief

    monkeypatch.setattr(brief, "MOST", 3)
    compiled = Core().compile_model(parser.parse_model(SWITCH), "CPU", {"NUM_STREAMS": 2})
    request, x = compiled.create_infer_request(), np.ones((4, 8), np.float32)
    for rate in [*range(15997, 16003)] * 2:
        y = request.infer({"x": x, "rate": np.array(rate), "loud": np.array(True)})["y"]
        np.testing.assert_allclose(y, np.exp(x) if rate == 16000 else -x, rtol=1e-5)
    (switch,) = [frame.switch for _, frame in request.executor.frames() if frame.switch is not None]
    assert 0 < len(switch.known) <= 3


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
    compiled = Core().compile_model(parser.parse_model(BOUNDS), "CPU.HOST", {"NUM_STREAMS": 2})
    request, x = compiled.create_infer_request(), np.arange(4, dtype=np.float32)
    for go in (True, False):
        inputs = {"x": x, "at": np.array([2]), "go": np.array(go)}
        for _ in range(2):
            assert request.infer(inputs)["y"] == 2
        told = []
        for fresh in (compiled.create_infer_request(), request):
            with pytest.raises(ExecutionError) as error:
                fresh.infer(inputs | {"at": np.array([9])})
            told.append(str(error.value))
        assert told[0] == told[1] and "node" in told[0]
