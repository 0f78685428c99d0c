"""Requests that are started and waited for, and queues of them: every result is its input's, no callback is lost."""

import gc
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref

import numpy as np
import pytest
from onnx import parser

from tunewright import AsyncInferQueue, Core, InputError, RequestCancelled
from tunewright.plugins.single import open_device
from tunewright.runtime.requests.streams import Streams

NETWORK = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n, 8] x, float[8, 8] w) => (float[n, 8] y)
{
    a = MatMul(x, w)
    y = Add(a, x)
}
"""
W = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
DEVICES = [d for d in ("CPU", "CPU.HOST") if d == "CPU.HOST" or open_device("CPU").family != "host"]


@pytest.fixture(params=DEVICES)
def model(request):
    return Core().compile_model(parser.parse_model(NETWORK), request.param, {"NUM_STREAMS": 2})


def feed(number, rows=3):
    return {"x": np.full((rows, 8), number, np.float32), "w": W}


def want(number, rows=3):
    x = np.full((rows, 8), number, np.float32)
    return x @ W + x


class Gate:
    """A callback that says when it begins, and ends when it may."""

    def __init__(self):
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, request, userdata):
        self.entered.set()
        assert self.open.wait(60)


def test_a_started_request_has_its_results(model):
    request = model.create_infer_request()
    with pytest.raises(InputError, match="no inference was started"):
        request.wait()
    for number in range(20):
        request.start_async(feed(number), userdata=number)
        assert request.wait() and request.wait(0), "waiting again is harmless"
        np.testing.assert_allclose(request.results["y"], want(number), rtol=1e-5)
    np.testing.assert_allclose(request.infer(feed(3))["y"], want(3), rtol=1e-5)


def test_many_in_flight(model):
    queue, got, lock = AsyncInferQueue(model, 5), {}, threading.Lock()
    assert len(queue) == len(list(queue)) == 5

    def over(request, number):
        with lock:
            assert number not in got
            got[number] = request.results["y"]

    queue.set_callback(over)
    for number in range(300):
        queue.start_async(feed(number, 1 + number % 4), number)
    queue.wait_all()
    assert sorted(got) == list(range(300)) and queue.is_ready()
    for number, y in got.items():
        np.testing.assert_allclose(y, want(number, 1 + number % 4), rtol=1e-5)


def test_an_error_reaches_who_waits_for_it_and_nobody_else(model):
    wrong, right = model.create_infer_request(), model.create_infer_request()
    wrong.start_async({"x": np.zeros((2, 7), np.float32), "w": W})
    right.start_async(feed(1))
    with pytest.raises(InputError, match=r"\[2, 7\]"):
        wrong.wait()
    assert right.wait()
    wrong.start_async(feed(2))
    assert wrong.wait()
    np.testing.assert_allclose(wrong.results["y"], want(2), rtol=1e-5)

    queue, done = AsyncInferQueue(model, 2), []
    queue.set_callback(lambda request, number: done.append(number))
    for number in range(10):
        queue.start_async(feed(number) if number != 4 else {"x": np.zeros(3, np.float32), "w": W}, number)
    with pytest.raises(InputError):
        queue.wait_all()
    assert sorted(done) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    queue.wait_all()  # it was told


def test_a_callback_that_fails_is_told(model):
    request = model.create_infer_request()
    request.set_callback(lambda request, userdata: userdata["missing"])
    request.start_async(feed(1), {})
    with pytest.raises(KeyError, match="missing"):
        request.wait()
    request.set_callback(None)
    request.start_async(feed(1))
    assert request.wait()


def test_time_out_and_a_busy_request(model):
    request, gate = model.create_infer_request(), Gate()
    request.set_callback(gate)
    request.start_async(feed(1))
    assert gate.entered.wait(60) and not request.wait(0.01)
    for use in (request.infer, request.start_async):
        with pytest.raises(InputError, match="is running"):
            use(feed(2))
    gate.open.set()
    assert request.wait(60)
    np.testing.assert_allclose(request.results["y"], want(1), rtol=1e-5)


def test_a_queue_holds_back_who_feeds_it(model):
    queue, gate = AsyncInferQueue(model, 1), Gate()
    queue.set_callback(gate)
    queue.start_async(feed(1))
    assert gate.entered.wait(60) and not queue.is_ready()
    second = threading.Thread(target=queue.start_async, args=(feed(2),))
    second.start()
    second.join(0.05)
    assert second.is_alive(), "it waits for the only request"
    gate.open.set()
    second.join(60)
    queue.wait_all()
    assert not second.is_alive()


def test_cancel(model):
    gate = Gate()
    busy = [model.create_infer_request() for _ in range(model.optimal_requests)]
    for request in busy:  # every stream has something to do
        request.set_callback(gate)
        request.start_async(feed(1))
    late, called = model.create_infer_request(), []
    late.set_callback(lambda request, userdata: called.append(userdata))
    late.start_async(feed(2))
    late.cancel()
    with pytest.raises(RequestCancelled):
        late.wait()
    gate.open.set()
    for request in busy:
        assert request.wait()
        request.cancel()  # too late: it is over
        assert request.wait() and request.results
    late.start_async(feed(3), "again")
    assert late.wait() and called == ["again"]


def test_what_is_cancelled_while_it_runs_has_no_results(model, monkeypatch):
    request, entered, go = model.create_infer_request(), threading.Event(), threading.Event()
    real = request.run

    def slow(inputs):
        entered.set()
        assert go.wait(60)
        return real(inputs)

    monkeypatch.setattr(request, "run", slow)
    request.start_async(feed(1))
    assert entered.wait(60)
    request.cancel()
    go.set()
    with pytest.raises(RequestCancelled):
        request.wait()
    assert not request.results


def test_streams_share_the_threads():
    units = open_device("CPU").target.units
    proto = parser.parse_model(NETWORK)
    one = Core().compile_model(proto, "CPU")
    assert one.optimal_requests == 1 and one.env.device.target.units == units
    many = Core().compile_model(proto, "CPU", {"PERFORMANCE_HINT": "THROUGHPUT"})
    assert many.optimal_requests == units and many.env.device.target.units == 1
    given = Core().compile_model(proto, "CPU", {"PERFORMANCE_HINT": "THROUGHPUT", "NUM_STREAMS": 1})
    assert given.optimal_requests == 1 and given.env.device.target.units == units
    np.testing.assert_allclose(many(feed(1))["y"], one(feed(1))["y"], rtol=1e-6)


def test_a_queue_needs_requests(model):
    with pytest.raises(InputError, match="-1 requests"):
        AsyncInferQueue(model, -1)


STATIC = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[3, 8] x, float[8, 8] w, float[n] z) => (float[3, 8] y, float[n] v)
{
    a = MatMul(x, w)
    y = Add(a, x)
    v = Neg(z)
}
"""


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_that_stay(device):
    request = Core().compile_model(parser.parse_model(STATIC), device).create_infer_request()
    x, mine = request.get_tensor("x"), np.full((8, 8), np.nan, np.float32)
    assert x.shape == (3, 8) and x.ctypes.data % 64 == 0 and request.get_tensor("x") is x
    request.set_tensor("w", mine)
    request.set_tensor("z", np.zeros(2, np.float32))
    mine[:] = W  # it is used where it is
    for number in range(3):
        x[:] = number
        np.testing.assert_allclose(request.infer()["y"], want(number), rtol=1e-5)
        np.testing.assert_allclose(request.get_tensor("y"), want(number), rtol=1e-5)
    request.start_async()
    assert request.wait()
    np.testing.assert_allclose(request.get_tensor("y"), want(2), rtol=1e-5)
    got = request.infer({"x": np.full((3, 8), 7, np.float32)})["y"]
    np.testing.assert_allclose(got, want(7), rtol=1e-5, err_msg="what is given comes before what was set")

    result = np.zeros((3, 8), np.float32)
    request.set_tensor("y", result)
    request.infer()
    np.testing.assert_allclose(result, want(2), rtol=1e-5)
    request.set_tensor("y", None)
    x[:] = 5
    request.infer()
    np.testing.assert_allclose(result, want(2), rtol=1e-5, err_msg="it was taken back")

    request.set_tensor("w", None)
    with pytest.raises(InputError, match="'w'"):
        request.infer()


def test_tensors_that_cannot_be(model):
    request = model.create_infer_request()
    with pytest.raises(InputError, match="no tensor can be made"):
        request.get_tensor("x")  # its size is open
    for name in ("y", "nothing"):
        with pytest.raises(InputError, match="there is no result"):
            request.get_tensor(name)
    with pytest.raises(InputError, match="inputs and outputs are x, w, y"):
        request.set_tensor("nothing", W)
    with pytest.raises(InputError, match="'x'"):
        request.infer()


def test_several_wait_for_one(model):
    request, gate = model.create_infer_request(), Gate()
    request.set_callback(gate)
    request.start_async(feed(1))
    assert gate.entered.wait(60)
    told, waiters = [], [threading.Thread(target=lambda: told.append(request.wait(60))) for _ in range(4)]
    for waiter in waiters:
        waiter.start()
    gate.open.set()
    for waiter in waiters:
        waiter.join(60)
    assert told == [True] * 4


def test_every_waiter_is_told_the_error(model):
    request, told = model.create_infer_request(), []

    def wait():
        try:
            request.wait(60)
        except InputError as error:
            told.append(error)

    request.start_async({"x": np.zeros((2, 7), np.float32), "w": W})
    waiters = [threading.Thread(target=wait) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:
        waiter.join(60)
    assert len(told) == 3


def test_when_it_is_over(model):
    """Once, with the error if there is one, whether it is asked for before the end or after it."""
    request, told = model.create_infer_request(), []
    request.start_async(feed(1))
    assert request.wait(60)
    request.when_over(lambda *how: told.append(how))
    assert told == [(request, None)]
    gate = Gate()
    request.set_callback(gate)
    request.start_async(feed(1))
    assert gate.entered.wait(60)
    over = threading.Event()
    request.when_over(lambda *how: (told.append(how), over.set()))
    gate.open.set()
    assert over.wait(60) and told == [(request, None)] * 2
    request.set_callback(None)
    request.start_async({"x": W})
    with pytest.raises(InputError):
        request.wait(60)
    request.when_over(lambda *how: told.append(how))
    assert isinstance(told[2][1], InputError)


def test_a_mistake_behind_the_end_is_logged_and_harms_nobody(model, caplog):
    request = model.create_infer_request()
    request.start_async(feed(1))
    assert request.wait(60)
    request.when_over(lambda request, error: 1 / 0)
    assert "ZeroDivisionError" in caplog.text
    request.start_async(feed(2))
    assert request.wait(60)


def test_cancel_races_with_the_stream(model):
    """Cancelled or done, never both and never lost, whenever it is cancelled."""
    request, called = model.create_infer_request(), []
    request.set_callback(lambda request, number: called.append(number))
    outcomes = {"done": 0, "cancelled": 0}
    for number in range(200):
        request.start_async(feed(number), number)
        if number % 3:
            time.sleep(number % 7 * 2e-5)
        request.cancel()
        try:
            assert request.wait(60)
            outcomes["done"] += 1
            assert called.pop() == number
            np.testing.assert_allclose(request.results["y"], want(number), rtol=1e-5)
        except RequestCancelled:
            outcomes["cancelled"] += 1
            assert not called and not request.results
    assert sum(outcomes.values()) == 200


def test_a_queue_survives_cancelled_requests(model):
    queue = AsyncInferQueue(model, 3)
    for number in range(60):
        queue.start_async(feed(number), number)
        if number % 5 == 0:
            for request in queue:
                request.cancel()
    queue.wait_all()
    assert queue.is_ready()
    queue.start_async(feed(1))
    queue.wait_all()


def test_models_go_while_their_threads_wait():
    """Threads keep no model alive, and end with it."""
    compiled = Core().compile_model(parser.parse_model(NETWORK), "CPU.HOST", {"NUM_STREAMS": 3})
    queue = AsyncInferQueue(compiled)
    for number in range(9):
        queue.start_async(feed(number))
    queue.wait_all()
    gone, threads = weakref.ref(compiled), list(compiled.streams._work.threads)
    assert len(threads) == 3 and all(thread.is_alive() for thread in threads)
    del compiled, queue
    gc.collect()
    assert gone() is None
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def settled(streams):
    """Nothing is left to do, and nobody who would do it counts as busy."""
    work, end = streams._work, time.monotonic() + 60
    while time.monotonic() < end:
        with work.lock:
            if not (work.tasks or work.running or work.called or work.dozing):
                assert work.asleep == len(work.threads) <= work.count
                return
        time.sleep(1e-3)
    raise AssertionError(vars(work))


class Idle(Streams):
    """Streams whose threads never come to it."""

    def submit(self, task):
        self._work.tasks.append(task)


def test_who_waits_runs_what_no_stream_has_begun(model):
    request, where = model.create_infer_request(), []
    request._streams = Idle(1)
    request.set_callback(lambda request, userdata: where.append(threading.get_ident()))
    for number in range(3):
        request.start_async(feed(number))
        assert not request.wait(0.01), "it might take longer than that"
        assert request.wait()
        np.testing.assert_allclose(request.results["y"], want(number), rtol=1e-5)
    assert where == [threading.get_ident()] * 3 and not request._streams._work.tasks
    request.start_async({"x": W})
    with pytest.raises(InputError):
        request.wait()
    request.start_async(feed(1))
    request.cancel()
    with pytest.raises(RequestCancelled):
        request.wait()
    assert not request._streams._work.running


def test_never_more_at_a_time_than_streams(model, monkeypatch):
    """Whoever runs them: threads that wait take part, and count."""
    lock, now, most = threading.Lock(), [0], [0]
    run = type(model.create_infer_request()).run

    def counted(self, inputs, *others, **more):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(2e-4)
        try:
            return run(self, inputs, *others, **more)
        finally:
            with lock:
                now[0] -= 1

    monkeypatch.setattr(type(model.create_infer_request()), "run", counted)
    wrong = []

    def work(first):
        request = model.create_infer_request()
        for number in range(first, first + 30):
            request.start_async(feed(number))
            request.wait()
            if not np.allclose(request.results["y"], want(number), rtol=1e-5):
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(100 * k,)) for k in range(5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not wrong and most[0] <= model.streams.count
    settled(model.streams)


def test_who_feeds_a_queue_takes_part(model):
    """While it waits for a free request it runs brief inferences itself, and their callbacks."""
    queue, where, got = AsyncInferQueue(model, 2), [], {}

    def over(request, number):
        where.append(threading.get_ident())
        got[number] = request.results["y"]

    queue.set_callback(over)
    for number in range(500):
        queue.start_async(feed(number), number)
    queue.wait_all()
    settled(model.streams)
    assert threading.get_ident() in where and sorted(got) == list(range(500))
    for number, y in got.items():
        np.testing.assert_allclose(y, want(number), rtol=1e-5)
    where.clear()
    model.streams._work.is_brief = False  # inferences that take long are left to the threads
    queue.set_callback(lambda request, number: (time.sleep(2e-3), where.append(threading.get_ident())))
    for number in range(10):
        model.streams._work.seconds = 1.0  # it is that of the last one
        queue.start_async(feed(number), number)
    model.streams._work.seconds = 1.0
    queue.wait_all()
    assert threading.get_ident() not in where and len(where) == 10


def test_a_thread_is_not_woken_for_what_who_waits_runs(model):
    """It looks by itself, and takes what nobody came for, however often that happens."""
    request, work, where = model.create_infer_request(), model.streams._work, []
    request.set_callback(lambda request, number: where.append(threading.get_ident()))
    request.start_async(feed(0))
    assert request.wait(60) and where.pop() != threading.get_ident(), "nobody else runs it within a time"
    for _ in range(20):  # where the caller loses its core between the two for a millisecond a thread takes it
        where.clear()
        for number in range(200):
            request.start_async(feed(number))
            assert request.wait()
        if where.count(threading.get_ident()) > 100:
            break
    assert where.count(threading.get_ident()) > 100
    with work.lock:
        work.helped = True
    for number in range(100):
        request.start_async(feed(number))
        with work.lock:
            work.helped = True
        assert request.wait(60)
        np.testing.assert_allclose(request.results["y"], want(number), rtol=1e-5)
    settled(model.streams)


def test_threads_sleep_when_there_is_nothing_to_do(model):
    """Also where somebody took part: nobody looks every so often whether there is something."""
    request = model.create_infer_request()
    for number in range(10):
        request.start_async(feed(number))
        request.wait()
    settled(model.streams)
    used = []
    for _ in range(5):  # threads of other tests may end meanwhile
        before = time.process_time()
        time.sleep(0.3)
        used.append(time.process_time() - before)
    assert min(used) < 0.03


def test_no_thread_looks_by_itself_while_inferences_take_long(model):
    """It is woken for each: beside them that costs nothing."""
    request, work, where = model.create_infer_request(), model.streams._work, []
    request.set_callback(lambda request, number: (time.sleep(2e-3), where.append(threading.get_ident())))
    for number in range(8):
        request.start_async(feed(number))
        assert request.wait()
        assert not work.dozing and not work.is_brief
    assert len(where) == 8
    settled(model.streams)


def test_as_many_requests_as_keep_streams_busy(model):
    """Two for each stream; not when somebody said how many, and not of one stream."""

    def count(jobs=0, **config):
        compiled = Core().compile_model(parser.parse_model(NETWORK), "CPU.HOST", config)
        return len(AsyncInferQueue(compiled, jobs))

    assert len(AsyncInferQueue(model)) == 4 and len(AsyncInferQueue(model, 2)) == 2
    assert count(NUM_STREAMS=3) == 6 and count(NUM_STREAMS=1) == 1 and count(jobs=5, NUM_STREAMS=1) == 5
    assert count(NUM_STREAMS=2, PERFORMANCE_HINT_NUM_REQUESTS=2) == 2


def test_what_a_feeder_starts_last_is_run_without_it(model):
    """It was expected to come back, and does not."""
    queue, got = AsyncInferQueue(model, 3), []
    queue.set_callback(lambda request, number: got.append(number))
    for count in range(1, 60):
        got.clear()
        for number in range(count):
            queue.start_async(feed(number), number)
        end = time.monotonic() + 60
        while len(got) < count and time.monotonic() < end:
            time.sleep(1e-4)
        assert sorted(got) == list(range(count))
    settled(model.streams)


def test_several_feed_one_model(model):
    got, lock = [], threading.Lock()

    def feeding(first):
        queue = AsyncInferQueue(model, 2)

        def over(request, number):
            right = np.allclose(request.results["y"], want(number), rtol=1e-5)
            with lock:
                got.append(number if right else -1)

        queue.set_callback(over)
        for number in range(first, first + 100):
            queue.start_async(feed(number), number)
        queue.wait_all()

    feeders = [threading.Thread(target=feeding, args=(100 * k,)) for k in range(3)]
    for feeder in feeders:
        feeder.start()
    for feeder in feeders:
        feeder.join(60)
    assert sorted(got) == list(range(300))
    settled(model.streams)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interruption_of_who_takes_part_is_its_own(model, error):
    queue, here = AsyncInferQueue(model, 1), threading.get_ident()

    def interrupted(request, number):
        if threading.get_ident() == here:
            raise error

    queue.set_callback(interrupted)
    with pytest.raises(error):
        for _ in range(100_000):  # until this thread has run one
            queue.start_async(feed(1))
    with pytest.raises(error):
        queue.wait_all()
    queue.set_callback(None)
    queue.start_async(feed(1))
    queue.wait_all()
    settled(model.streams)


def test_an_interruption_while_who_waits_runs_it(model, monkeypatch):
    """It comes out of `wait`, and the request works again."""
    request = model.create_infer_request()
    request._streams, real, interrupts = Idle(1), request.run, [KeyboardInterrupt]

    def interrupted(*given):
        if interrupts:
            raise interrupts.pop()
        return real(*given)

    monkeypatch.setattr(request, "run", interrupted)
    request.start_async(feed(1))
    with pytest.raises(KeyboardInterrupt):
        request.wait()
    assert not request._streams._work.running and not request._streams._work.tasks
    for number in (2, 3):
        request.start_async(feed(number))
        assert request.wait()
        np.testing.assert_allclose(request.results["y"], want(number), rtol=1e-5)


def test_callbacks_of_a_queue_that_fail(model):
    """Each inference runs, the first error is raised once, and no request is lost."""
    queue, done, lock = AsyncInferQueue(model, 3), [], threading.Lock()

    def over(request, number):
        with lock:
            done.append(number)
        if number % 3 == 0:
            raise ValueError(f"callback {number}")

    queue.set_callback(over)
    for _ in range(2):
        done.clear()
        for number in range(30):
            queue.start_async(feed(number), number)
        with pytest.raises(ValueError, match="callback"):
            queue.wait_all()
        assert sorted(done) == list(range(30)) and queue.is_ready()
        queue.wait_all()
    settled(model.streams)


def test_a_callback_may_wait_for_another_one(model):
    requests, seen = [model.create_infer_request() for _ in range(2)], []
    for request in requests:
        request._streams = Idle(2)
    requests[1]._streams = requests[0]._streams
    requests[0].set_callback(lambda request, number: seen.append(requests[1].wait()))
    requests[1].set_callback(lambda request, number: seen.append(number))
    for number, request in enumerate(requests):
        request.start_async(feed(number), number)
    assert requests[0].wait() and seen == [1, True]
    np.testing.assert_allclose(requests[1].results["y"], want(1), rtol=1e-5)


def test_a_callback_may_start_another_one(model):
    queue, got, lock = AsyncInferQueue(model, 6), {}, threading.Lock()

    def over(request, number):
        with lock:
            got[number] = request.results["y"]
        if number == 40:
            queue.start_async(feed(100), 100)

    queue.set_callback(over)
    for number in range(80):
        queue.start_async(feed(number), number)
    queue.wait_all()
    assert sorted(got) == [*range(80), 100]
    for number, y in got.items():
        np.testing.assert_allclose(y, want(number), rtol=1e-5)


def test_results_are_the_callers(model):
    """Of each inference its own, whatever ran since."""
    queue, got = AsyncInferQueue(model, 2), {}
    queue.set_callback(lambda request, number: got.__setitem__(number, request.results["y"]))
    for number in range(40):
        queue.start_async(feed(number), number)
    queue.wait_all()
    for y in got.values():
        y[:] = -1  # nobody else has it
    for number in range(40, 80):
        queue.start_async(feed(number), number)
    queue.wait_all()
    for number, y in got.items():
        np.testing.assert_allclose(y, want(number) if number >= 40 else -1, rtol=1e-5)


def test_as_many_streams_as_there_are_requests_for():
    """Devices come and go: what waits begins at once, and threads that are too many end."""
    streams, gate, ran = Streams(1), Gate(), []
    streams.submit(lambda: (gate(None, None), ran.append(0)))
    assert gate.entered.wait(60)
    both = threading.Event()
    streams.submit(lambda: ran.append(1))
    streams.submit(lambda: (ran.append(2), both.set()))
    assert not both.wait(0.01)
    streams.resize(2)
    assert both.wait(60) and ran == [1, 2] and streams.count == 2
    threads = list(streams._work.threads)
    streams.resize(1)
    gate.open.set()
    end = time.monotonic() + 60
    while len(streams._work.threads) > 1 and time.monotonic() < end:
        time.sleep(1e-3)
    assert sum(thread.is_alive() for thread in threads) <= 2 and len(streams._work.threads) == 1
    over = threading.Event()
    streams.submit(over.set)
    assert over.wait(60) and ran == [1, 2, 0]


def test_no_thread_can_be_made(model, monkeypatch):
    request = model.create_infer_request()
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (_ for _ in ()).throw(RuntimeError("no more")))
    with pytest.raises(RuntimeError, match="no more"):
        request.start_async(feed(1))
    monkeypatch.setattr(threading.Thread, "start", start)
    request.start_async(feed(2))
    assert request.wait()
    np.testing.assert_allclose(request.results["y"], want(2), rtol=1e-5)


SCRIPT = """
import os
import sys
import threading
import time

import numpy as np
from onnx import parser

from tunewright import AsyncInferQueue, Core

compiled = Core().compile_model(parser.parse_model(sys.argv[1]), sys.argv[2], {"NUM_STREAMS": 2})
feed = {"x": np.ones((3, 8), np.float32), "w": np.ones((8, 8), np.float32)}
queue = AsyncInferQueue(compiled, 3)
done = []
queue.set_callback(lambda request, number: (time.sleep(0.01), os.write(1, b"%d " % number)))
for number in range(6):
    queue.start_async(feed, number)
"""


@pytest.mark.parametrize("device", DEVICES)
def test_the_end_of_the_process_waits_for_what_was_started(device):
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, NETWORK, device], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
    assert sorted(map(int, ran.stdout.split())) == list(range(6))


def test_the_end_of_the_process_does_not_wait_for_ever():
    stuck = "\nfrom tunewright.runtime.requests import streams\nstreams.LAST_SECONDS = 0.3\n"
    stuck += "request = compiled.create_infer_request()\n"
    stuck += "request.set_callback(lambda request, userdata: threading.Event().wait())\nrequest.start_async(feed)\n"
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT + stuck, NETWORK, "CPU.HOST"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("device", DEVICES)
def test_a_fork_has_streams_of_its_own(device):
    compiled = Core().compile_model(parser.parse_model(NETWORK), device, {"NUM_STREAMS": 2})
    gate, held, used = Gate(), compiled.create_infer_request(), compiled.create_infer_request()
    used.start_async(feed(1))
    assert used.wait(60)
    held.set_callback(gate)
    held.start_async(feed(1))
    assert gate.entered.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there are threads: that is what is tried
        child = os.fork()
    if not child:
        code = 1
        try:
            used.start_async(feed(5))
            right = used.wait(30) and np.allclose(used.results["y"], want(5), rtol=1e-5)
            try:
                held.wait(30)
            except InputError as error:
                code = 0 if right and "forked" in str(error) else 2
        finally:
            os._exit(code)
    gate.open.set()
    assert held.wait(60)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def soak(count, device, jobs):
    """``count`` requests through a queue of ``jobs``: each result is its input's, each callback comes once.
    Seconds, and the resident bytes at ten points."""
    compiled = Core().compile_model(parser.parse_model(NETWORK), device, {"NUM_STREAMS": 2})
    queue = AsyncInferQueue(compiled, jobs)
    inputs = [feed(number) for number in range(64)]
    wanted = [want(number) for number in range(64)]
    called, wrong, sizes = np.full(count, 0, np.uint8), [], []  # not zeros: their pages are taken when they are written

    def over(request, number):
        called[number] += 1  # each number is one request's
        if not np.allclose(request.results["y"], wanted[number % 64], rtol=1e-5, atol=1e-5):
            wrong.append(number)

    queue.set_callback(over)
    begin = time.perf_counter()
    for number in range(count):
        queue.start_async(inputs[number % 64], number)
        if number % (count // 10) == count // 10 - 1:
            sizes.append(resident())
    queue.wait_all()
    seconds = time.perf_counter() - begin
    assert not wrong and (called == 1).all(), f"{len(wrong)} wrong, {(called != 1).sum()} lost or repeated"
    return seconds, sizes


def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("jobs", [4, 32])
@pytest.mark.parametrize("device", DEVICES)
def test_soak_short(device, jobs):
    soak(1500, device, jobs)


@pytest.mark.soak
@pytest.mark.parametrize("device", DEVICES)
def test_soak(device):
    """A million requests: nothing is lost, and memory stays flat within 2 %."""
    seconds, sizes = soak(1_000_000, device, 32)
    print(f"{device}: {seconds:.0f} s, resident MB {[round(s / 1e6, 1) for s in sizes]}")
    assert max(sizes[1:]) / min(sizes[1:]) < 1.02, sizes
