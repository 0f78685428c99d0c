"""BATCH: requests of single examples run together, wait no longer than they may, and get their own results."""

import gc
import logging
import threading
import time
import weakref

import numpy as np
import pytest
from onnx import parser

from helpers.made_devices import made
from tunewright import AsyncInferQueue, Core, InputError, RequestCancelled, UnsupportedError
from tunewright.runtime.requests.request import DeviceModel
from tunewright.runtime.several import batch
from tunewright.runtime.several.batch import BatchModel
from unit.runtime.test_multi_device import until

NETWORK = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[{first}, 8] x) => (float[{first}, 8] y, float[{first}] z)
{{
    y = Softmax<axis=1>(x)
    z = ReduceMax<axes=[1], keepdims=0>(x)
}}
"""


def network(first="1"):
    return parser.parse_model(NETWORK.format(first=first))


def feed(number):
    return {"x": np.arange(8, dtype=np.float32)[None] * (number % 7) / 7 + number}


def check(results, number):
    x = feed(number)["x"]
    e = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(results["y"], e / e.sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_array_equal(results["z"], x.max(1))


@pytest.fixture
def patient(monkeypatch):
    """Requests wait as long as AUTO_BATCH_TIMEOUT says, whatever a batch takes, and batches always pay."""
    monkeypatch.setattr(batch, "PATIENCE", 1e9)
    monkeypatch.setattr(batch, "TRIALS", 1 << 60)


def compiled(device="BATCH:CPU.HOST(4)", model=None, **config):
    return Core().compile_model(model or network(), device, config)


def counted(model, monkeypatch):
    """How many examples each batch had."""
    sizes, real = [], model._run_together
    monkeypatch.setattr(model, "_run_together", lambda entries: (sizes.append(len(entries)), real(entries))[1])
    return sizes


@pytest.mark.parametrize("device", ["BATCH:CPU(4)", "BATCH:CPU.HOST(3)"])
@pytest.mark.parametrize("first", ["1", "n"])
def test_every_result_is_its_inputs(device, first):
    model, got, lock = compiled(device, network(first)), {}, threading.Lock()
    assert isinstance(model, BatchModel) and model.optimal_requests == model.size
    queue = AsyncInferQueue(model)
    assert len(queue) == model.size

    def over(request, number):
        with lock:
            got.setdefault(number, []).append(request.results)

    queue.set_callback(over)
    for number in range(101):
        queue.start_async(feed(number), number)
    queue.wait_all()
    assert sorted(got) == list(range(101))
    for number, results in got.items():
        assert len(results) == 1
        check(results[0], number)
    assert model._compared and not model.refused


def test_they_run_together(patient, monkeypatch):
    model = compiled(AUTO_BATCH_TIMEOUT=60_000)
    sizes = counted(model, monkeypatch)
    queue = AsyncInferQueue(model, 4)
    for number in range(40):
        queue.start_async(feed(number))
    queue.wait_all()
    assert sizes == [4] * 10

    outcomes = {}
    threads = [threading.Thread(target=lambda n=n: outcomes.update({n: model(feed(n))})) for n in range(8)]
    more = [model.create_infer_request() for _ in range(8)]  # so that it is known that more may come
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number, results in outcomes.items():
        check(results, number)
    assert sizes == [4] * 12 and len(more) == 8


def test_nobody_waits_longer_than_the_timeout(patient, monkeypatch):
    model = compiled(AUTO_BATCH_TIMEOUT=1500)
    sizes = counted(model, monkeypatch)
    requests = [model.create_infer_request() for _ in range(4)]
    begin = time.monotonic()
    for number, request in enumerate(requests[:3]):
        request.start_async(feed(number))
    for number, request in enumerate(requests[:3]):
        assert request.wait(30)
        check(request.results, number)
    assert 1.45 < time.monotonic() - begin < 20 and sizes == [3]
    # and not at all, when nobody is left who could come
    model = compiled(AUTO_BATCH_TIMEOUT=60_000)
    begin = time.monotonic()
    check(model(feed(3)), 3)
    requests = [model.create_infer_request() for _ in range(2)]
    model._idle.get()  # the request of that call
    gc.collect()
    for number, request in enumerate(requests):
        request.start_async(feed(number))
    for number, request in enumerate(requests):
        assert request.wait(30)
        check(request.results, number)
    assert time.monotonic() - begin < 20


def test_waiting_is_bounded_by_what_it_can_gain():
    model = compiled(AUTO_BATCH_TIMEOUT=60_000)
    requests = [model.create_infer_request() for _ in range(4)]
    for number, request in enumerate(requests):
        request.start_async(feed(number))
    for request in requests:
        assert request.wait(30)
    begin = time.monotonic()
    check(requests[0].infer(feed(9)), 9)
    assert time.monotonic() - begin < 20


def test_a_busy_device_is_waited_for(monkeypatch, patient):
    with made(monkeypatch, "GPU.7") as [device]:
        model = compiled("BATCH:GPU.7(4)", AUTO_BATCH_TIMEOUT=300)
        sizes = counted(model, monkeypatch)
        requests = [model.create_infer_request() for _ in range(8)]
        device.open.clear()
        for number in range(4):
            requests[number].start_async(feed(number))
        until(lambda: device.running)
        for number in range(4, 6):
            requests[number].start_async(feed(number))
        until(lambda: model._shelf._overdue)
        requests[6].start_async(feed(6))
        device.open.set()
        for number in range(7):
            assert requests[number].wait(30)
            check(requests[number].results, number)
        assert sizes == [4, 3], "what came while the device was busy ran together"


def test_an_error_is_its_own_requests(patient, monkeypatch):
    model = compiled(AUTO_BATCH_TIMEOUT=60_000)
    requests = [model.create_infer_request() for _ in range(5)]
    requests[4].start_async({"x": np.zeros((1, 7), np.float32)})
    for number, request in enumerate(requests[:4]):
        request.start_async(feed(number))
    for number, request in enumerate(requests[:4]):
        assert request.wait(30)
        check(request.results, number)
    with pytest.raises(InputError, match=r"\[1, 7\]"):
        requests[4].wait()
    with pytest.raises(InputError, match="nothing"):
        model({"nothing": 1})

    # a batch that fails is run one by one
    tried = []
    monkeypatch.setattr(model, "_run_together", lambda entries: tried.append(len(entries)) or 1 / 0)
    for _ in range(batch.FAILURES + 2):
        for number, request in enumerate(requests[:4]):
            request.start_async(feed(number), number)
        for number, request in enumerate(requests[:4]):
            assert request.wait(30)
            check(request.results, number)
    requests[4].start_async(feed(4))
    requests[4].cancel()
    assert len(tried) == batch.FAILURES and "division by zero" in model.refused, "what always fails is not tried again"


def test_cancel_and_callbacks(patient):
    model, called = compiled(AUTO_BATCH_TIMEOUT=60_000), []
    requests = [model.create_infer_request() for _ in range(5)]
    for number, request in enumerate(requests):
        request.set_callback(lambda request, number: called.append(number))
    for number in range(3):
        requests[number].start_async(feed(number), number)
    requests[1].cancel()
    with pytest.raises(RequestCancelled):
        requests[1].wait()
    requests[1].start_async(feed(8), 8)  # the fourth: its place of before is still taken
    assert requests[0].wait(30) and requests[2].wait(30) and requests[1].wait(30)
    check(requests[1].results, 8)
    assert sorted(called) == [0, 2, 8]
    with pytest.raises(InputError, match="is running"):
        requests[3].start_async(feed(3))
        requests[3].start_async(feed(3))


def test_an_inference_in_a_callback(patient):
    model, inner = compiled(AUTO_BATCH_TIMEOUT=60_000), []
    requests = [model.create_infer_request() for _ in range(4)]
    for number, request in enumerate(requests):
        request.set_callback(lambda request, number: inner.append((number, model(feed(number + 10)))))
        request.start_async(feed(number), number)
    for request in requests:
        assert request.wait(30)
    for number, results in inner:
        check(results, number + 10)
    assert len(inner) == 4


def test_tensors_that_stay(patient, monkeypatch):
    model = compiled(AUTO_BATCH_TIMEOUT=60_000)
    sizes = counted(model, monkeypatch)
    requests = [model.create_infer_request() for _ in range(4)]
    for number, request in enumerate(requests):
        request.get_tensor("x")[:] = feed(number)["x"]
        request.start_async()
    for number, request in enumerate(requests):
        assert request.wait(30)
        check({name: request.get_tensor(name) for name in "yz"}, number)
    assert sizes == [4]
    y = np.zeros((1, 8), np.float32)
    requests[0].set_tensor("y", y)
    check({**requests[0].infer(), "y": y}, 0)  # by itself
    assert requests[0].infer(remote=True)["z"].shape == (1,) and sizes == [4]


def test_other_sizes_run_by_themselves():
    model = compiled("BATCH:CPU.HOST(4)", network("n"))
    x = np.concatenate([feed(n)["x"] for n in range(3)])
    results = model({"x": x})
    for number in range(3):
        check({name: value[number : number + 1] for name, value in results.items()}, number)


MODELS = {
    "weights": ("g (float[1, 8] x, float[8, 8] w) => (float[1, 8] y) { y = MatMul(x, w) }", "'w'.*not one example"),
    "scalar": ("g (float[1, 8] x, float s) => (float[1, 8] y) { y = Mul(x, s) }", "'s'.*no dimension for examples"),
    "open": ("g (float[1, n] x) => (float[1, n] y) { y = Relu(x) }", "'x'.*requests may choose"),
    "fixed": (
        "g (float[1, 8] x) => (float[1, m] y) <int64[2] s = {1, -1}> { y = Reshape(x, s) }",
        "'y'.*not one part for each",
    ),
    "sum": ("g (float[1, 8] x) => (float y) { y = ReduceSum<keepdims=0>(x) }", "'y'.*not one part for each"),
    "none": ("g (float[4, 8] x) => (float[4, 8] y) { y = Relu(x) }", "'x'.*not one example"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot(name, monkeypatch, caplog):
    text, match = MODELS[name]
    model = parser.parse_model('<ir_version: 8, opset_import: ["" : 17]>' + text)
    with pytest.raises(UnsupportedError, match=f"batches (of 4 )?are not possible.*{match}.*name the device alone"):
        compiled(model=model)
    with made(monkeypatch, "GPU.7"), caplog.at_level(logging.INFO, "tunewright"):
        found = compiled("GPU.7", model, PERFORMANCE_HINT="THROUGHPUT")
        assert isinstance(found, DeviceModel) and "requests run one by one: " in caplog.text
        assert "one by one" in found.get_property("STREAMS_ORIGIN")


MIXING = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[1, 8] x) => (float[1, 8] y)
{
    m = ReduceMax<axes=[0], keepdims=1>(x)
    y = Sub(x, m)
}
"""


@pytest.mark.parametrize("first", [[1] * 4, [-3] * 4, [1, 2, 3, 4]])
def test_examples_that_depend_on_each_other(first, patient, caplog):
    model = compiled(model=parser.parse_model(MIXING), AUTO_BATCH_TIMEOUT=60_000)
    queue, got = AsyncInferQueue(model, 4), []
    queue.set_callback(lambda request, number: got.append(request.results["y"]))
    with caplog.at_level(logging.WARNING, "tunewright"):
        for number in first:
            queue.start_async(feed(number), number)
        queue.wait_all()
        assert bool(model.refused) == (first != [1] * 4), "what zeros do not change is seen later"
        for number in range(8):
            queue.start_async(feed(number), number)
        queue.wait_all()
    assert "depends on the others" in model.refused and caplog.text.count("run one by one") == 1
    assert len(got) == 12 and not any(y.any() for y in got)
    assert not model(feed(5))["y"].any()


def test_requests_run_together_where_throughput_is_asked_of_a_gpu(monkeypatch, tmp_path):
    with made(monkeypatch, "GPU.7"):
        wish = {"PERFORMANCE_HINT": "THROUGHPUT", "USER_DB_PATH": str(tmp_path)}
        model = compiled("GPU.7", **wish)
        assert isinstance(model, BatchModel) and model.size == 8 and model.optimal_requests == 16
        assert model.get_property("EXECUTION_DEVICES") == ["GPU.7"]
        assert compiled("GPU.7", **wish, PERFORMANCE_HINT_NUM_REQUESTS=4).size == 4
        both = compiled("MULTI:GPU.7,CPU.HOST(2)", **wish)
        assert both.optimal_requests == 18
        queue, got = AsyncInferQueue(both), {}
        queue.set_callback(lambda request, number: got.update({number: request.results}))
        for number in range(100):
            queue.start_async(feed(number), number)
        queue.wait_all()
        for number in range(100):
            check(got[number], number)
        for other in ({"PERFORMANCE_HINT": "LATENCY"}, {"ALLOW_AUTO_BATCHING": "NO"}):
            assert isinstance(compiled("GPU.7", **(wish | other)), DeviceModel)
    assert isinstance(compiled("CPU.HOST", **wish), DeviceModel), "a processor gains nothing"


def test_what_it_holds_and_that_it_ends(patient):
    model = compiled(AUTO_BATCH_TIMEOUT=1, PERF_COUNT="YES")
    requests = [model.create_infer_request() for _ in range(2)]
    requests[0].infer(feed(1))
    assert requests[0].get_profiling_info() and requests[0].get_totals().seconds > 0
    assert model.memory_statistics() is not None and model.name == model._alone.name
    model.set_property({"GPU_QUEUE_PRIORITY": "LOW"})
    check(model(feed(2)), 2)
    gone, thread = weakref.ref(model), model._shelf._thread
    assert thread is not None
    del model, requests
    until(lambda: (gc.collect(), gone() is None)[1])
    thread.join(30)
    assert not thread.is_alive()
