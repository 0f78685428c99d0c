"""Requests that are started and waited for, and queues of them: every result is its input's, no callback is lost."""

import threading

import numpy as np
import pytest
from onnx import parser

from tunewright import AsyncInferQueue, Core, InputError, RequestCancelled
from tunewright.plugins.single import open_device

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
    with pytest.raises(InputError, match="nothing was started"):
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
