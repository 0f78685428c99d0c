"""AUTO: the processor serves while a better device compiles, the better one then, and another when that fails."""

import gc
import logging
import threading
import time

import pytest

from helpers.made_devices import check, feed, made, network
from tunewright import AsyncInferQueue, Core, DeviceError, ExecutionError
from tunewright.plugins.single import SingleDevice
from tunewright.runtime.requests.request import DeviceModel
from unit.runtime.test_multi_device import more, until


@pytest.fixture
def gpu(monkeypatch):
    with made(monkeypatch, "GPU.7") as [device]:
        yield device


@pytest.fixture
def gpus(monkeypatch):
    with made(monkeypatch, "GPU.7", "GPU.8") as devices:
        yield devices


@pytest.fixture(autouse=True)
def no_models_of_other_tests():
    """They have a say in which device a model gets."""
    gc.collect()


def compiled(device="AUTO:GPU.7,CPU.HOST", **config):
    return Core().compile_model(network(), device, config)


def devices(model):
    return model.get_property("EXECUTION_DEVICES")


def test_with_one_device_it_is_that_device():
    model = compiled("AUTO:CPU")
    assert isinstance(model, DeviceModel) and devices(model) == ["CPU"]
    check(model(feed(2))["y"], 2)


def test_without_names_the_gpu_comes_first(gpu):
    model = compiled("AUTO")
    assert set(model.pool.states()) >= {"GPU.7", "CPU"}
    until(lambda: devices(model) == ["GPU.7"])
    assert next(iter(model.pool.states())).startswith("GPU")


def test_the_switch_under_load(gpu, caplog):
    caplog.set_level(logging.INFO, "tunewright")
    gpu.may_compile.clear()
    model = compiled()
    assert devices(model) == ["CPU.HOST"] and model.pool.states() == {"GPU.7": "compiling", "CPU.HOST": "ready"}
    got, lock, seen, stop, problems = {}, threading.Lock(), [], threading.Event(), []

    def use(thread):
        queue = AsyncInferQueue(model, 2)

        def over(request, number):
            with lock:
                got.setdefault(number, []).append(request.results["y"])
                seen.append(request.device)

        queue.set_callback(over)
        number = thread * 100_000
        try:
            while not stop.is_set():
                queue.start_async(feed(number, 1 + number % 2), number)
                number += 1
            queue.wait_all()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=use, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(got) > 50)
        assert devices(model) == ["CPU.HOST"]
        gpu.may_compile.set()
        until(lambda: devices(model) == ["GPU.7"])
        more(got, 50)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not problems
    for number, results in got.items():
        assert len(results) == 1
        check(results[0], number, 1 + number % 2)
    assert set(seen) == {"CPU.HOST", "GPU.7"} and seen[0] == "CPU.HOST" and seen[-1] == "GPU.7"
    assert sum(model.served.values()) == len(got)
    assert "AUTO: compiling for GPU.7" in caplog.text and "AUTO: GPU.7 is ready" in caplog.text


def test_it_is_tried_out_before_anybody_is_sent_there(gpu):
    gpu.may_compile.clear()
    model = compiled()
    model(feed(1, rows=5))
    gpu.open.clear()
    gpu.may_compile.set()
    until(lambda: gpu.running)
    check(model(feed(2, rows=5))["y"], 2, rows=5)
    assert devices(model) == ["CPU.HOST"], "the first inference is slow: nobody waits for it"
    gpu.open.set()
    until(lambda: devices(model) == ["GPU.7"])
    plans = model.pool.model().program._plans
    model(feed(2, rows=5))
    assert len(plans) == 1, "it knew the shapes"


def test_a_device_that_cannot_compile(gpu, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "tunewright")
    real = SingleDevice.compile

    def compile(self, *given, **more):
        if self.name.startswith("GPU"):
            raise DeviceError("no kernels for this")
        return real(self, *given, **more)

    monkeypatch.setattr(SingleDevice, "compile", compile)
    model = compiled()
    until(lambda: "GPU.7 is left out, it cannot run the model: no kernels" in caplog.text)
    check(model(feed(1))["y"], 1)
    assert devices(model) == ["CPU.HOST"]
    with pytest.raises(DeviceError, match="no kernels"):
        compiled("AUTO:GPU.7")


def test_a_device_that_fails_when_it_is_tried_out(gpu):
    gpu.fail(DeviceError("out of memory"))
    model = compiled()
    model(feed(1))
    until(lambda: model.pool.states()["GPU.7"] != "compiling")
    check(model(feed(2))["y"], 2)
    assert devices(model) == ["CPU.HOST"]


def test_a_device_that_fails_later(gpus):
    first, second = gpus
    model = compiled("AUTO:GPU.7,GPU.8")
    assert model.pool.states() == {"GPU.7": "ready", "GPU.8": "waiting"}, "without a processor nobody serves meanwhile"
    check(model(feed(1))["y"], 1)
    first.fail()
    second.may_compile.clear()
    request = model.create_infer_request()
    request.start_async(feed(2))
    until(lambda: model.pool.states()["GPU.8"] == "compiling")
    assert not request.wait(0.02)
    second.may_compile.set()
    assert request.wait(30) and request.device == "GPU.8"
    check(request.results["y"], 2)
    assert devices(model) == ["GPU.8"]


def waiting(model):
    with model.pool._lock:
        return len(model.pool._waiting)


def test_many_wait_for_a_device_that_nobody_has_asked_for_yet(monkeypatch):
    """The first refuses them, the second cannot compile the model, and the third begins to compile only then."""
    real = SingleDevice.compile

    def compile(self, *given, **more):
        found = real(self, *given, **more)
        if self.name == "GPU.8":
            found.create_infer_request()  # waits for the device's permission
            raise DeviceError("no kernels for this")
        return found

    monkeypatch.setattr(SingleDevice, "compile", compile)
    with made(monkeypatch, "GPU.7", "GPU.8", "GPU.9") as [first, second, third]:
        model = compiled("AUTO:GPU.7,GPU.8,GPU.9")
        first.fail(ExecutionError("not here"))
        for device in (second, third):
            device.may_compile.clear()
        outcomes = {}
        threads = [threading.Thread(target=lambda n=n: outcomes.update({n: model(feed(n))["y"]})) for n in range(6)]
        for thread in threads:
            thread.start()
        until(lambda: waiting(model) == 6)
        assert model.pool.states() == {"GPU.7": "ready", "GPU.8": "compiling", "GPU.9": "waiting"}
        second.may_compile.set()
        until(lambda: model.pool.states()["GPU.9"] == "compiling")
        assert waiting(model) == 6
        third.may_compile.set()
        for thread in threads:
            thread.join(30)
        assert len(outcomes) == 6
        for number, y in outcomes.items():
            check(y, number)


def test_processor_first_is_the_processor(gpu):
    model = compiled("AUTO:CPU.HOST,GPU.7")
    check(model(feed(1))["y"], 1)
    time.sleep(0.05)
    assert model.pool.states() == {"CPU.HOST": "ready", "GPU.7": "waiting"}


def test_all_devices_for_cumulative_throughput(gpu, caplog):
    model = compiled(PERFORMANCE_HINT="CUMULATIVE_THROUGHPUT", NUM_STREAMS=1)
    assert "AUTO: CPU.HOST computes in numpy, for which GPU.7 waits, too" in caplog.text
    until(lambda: devices(model) == ["GPU.7", "CPU.HOST"])
    assert model.optimal_requests == 2
    gpu.open.clear()
    one, other = model.create_infer_request(), model.create_infer_request()
    one.start_async(feed(1))
    until(lambda: gpu.running)
    other.infer(feed(2))
    assert other.device == "CPU.HOST"
    gpu.open.set()
    assert one.wait(30)


def test_hints_are_handed_down(gpu):
    model = compiled(PERFORMANCE_HINT="THROUGHPUT")
    until(lambda: devices(model) == ["GPU.7"])
    assert model.optimal_requests == 2 and model.pool.model().optimal_requests == 2
    assert compiled("AUTO:CPU", PERFORMANCE_HINT="THROUGHPUT").settings.performance_hint == "THROUGHPUT"


def test_more_important_models_have_the_better_device(gpus):
    names = "AUTO:GPU.7,GPU.8,CPU.HOST"
    low = compiled(names, MODEL_PRIORITY="LOW")
    until(lambda: devices(low) == ["GPU.7"])
    others = {"high": compiled(names, MODEL_PRIORITY="HIGH")}
    until(lambda: devices(others["high"]) == ["GPU.7"] and devices(low) == ["GPU.8"])
    others["middle"] = compiled(names)
    until(lambda: devices(others["middle"]) == ["GPU.8"] and devices(low) == ["CPU.HOST"])
    others["also"] = compiled(names, MODEL_PRIORITY="HIGH")
    until(lambda: devices(others["also"]) == ["GPU.7"])
    for name in others:
        check(others[name](feed(1))["y"], 1)
    check(low(feed(2))["y"], 2)
    del others["high"], others["also"]
    until(lambda: (gc.collect(), devices(others["middle"]) == ["GPU.7"])[1])
    until(lambda: devices(low) == ["GPU.8"])
    others.clear()
    until(lambda: (gc.collect(), devices(low) == ["GPU.7"])[1])
    check(low(feed(3))["y"], 3)


def test_a_less_important_model_shares_the_only_device(gpu):
    high = compiled("AUTO:GPU.7,CPU.HOST", MODEL_PRIORITY="HIGH")
    until(lambda: devices(high) == ["GPU.7"])
    low = compiled("AUTO:GPU.7,CPU.HOST", MODEL_PRIORITY="LOW")
    check(low(feed(1))["y"], 1)
    time.sleep(0.02)
    assert devices(low) == ["CPU.HOST"] and low.pool.states()["GPU.7"] == "waiting"
