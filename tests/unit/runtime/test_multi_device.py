"""MULTI: requests go to whichever device is free, and none is lost when one fails, comes or goes."""

import logging
import threading
import time

import numpy as np
import pytest
from onnx import parser

from helpers.made_devices import W, check, feed, made, network
from tunewright import AsyncInferQueue, Core, DeviceError, ExecutionError, InputError, RequestCancelled, SettingsError
from tunewright.plugins.single import SingleDevice, open_device
from tunewright.runtime.requests.streams import TaskQueue
from tunewright.runtime.several import multi
from tunewright.runtime.several.multi import STRIKES

_WAITER = multi._Waiter


@pytest.fixture
def two(monkeypatch):
    with made(monkeypatch, "GPU.7", "GPU.8") as devices:
        yield devices


def until(done, seconds=120):
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "it never happens"
        time.sleep(0.002)


def more(got, count):
    """Wait until there are so many more."""
    there = len(got)
    until(lambda: len(got) > there + count)


def compiled(devices="MULTI:GPU.7,GPU.8", **config):
    return Core().compile_model(network(), devices, config)


def test_real_devices_share_the_work():
    model = compiled("MULTI:CPU,CPU.HOST(2)")
    assert model.optimal_requests == 3 and model.get_property("EXECUTION_DEVICES") == ["CPU", "CPU.HOST"]
    queue, got = AsyncInferQueue(model, 5), {}
    queue.set_callback(lambda request, n: got.setdefault(n, []).append((request.results["y"], request.device)))
    for number in range(200):
        queue.start_async(feed(number, 1 + number % 3), number)
    queue.wait_all()
    assert sorted(got) == list(range(200)) and all(len(results) == 1 for results in got.values())
    for number, [(y, _)] in got.items():
        check(y, number, 1 + number % 3)
    served = model.served
    assert sum(served.values()) == 200
    assert served == {name: sum(d == name for [(_, d)] in got.values()) for name in ("CPU", "CPU.HOST")}
    check(model(feed(4))["y"], 4)


def test_the_first_that_is_free_is_preferred(two):
    first, _ = two
    model = compiled()
    for number in range(10):
        check(model(feed(number))["y"], number)
    assert model.served == {"GPU.7": 10, "GPU.8": 0}
    first.open.clear()
    one, other = model.create_infer_request(), model.create_infer_request()
    one.start_async(feed(1))
    until(lambda: first.running)
    check(other.infer(feed(2))["y"], 2)
    assert other.device == "GPU.8"
    first.open.set()
    assert one.wait(30) and one.device == "GPU.7"
    check(one.results["y"], 1)


def test_no_more_at_a_time_than_was_said(two):
    first, second = two
    model = compiled("MULTI:GPU.7(2),GPU.8(3)")
    assert model.optimal_requests == 5 == model.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")
    first.seconds = second.seconds = 0.002
    threads = [threading.Thread(target=lambda: [model(feed(1)) for _ in range(10)]) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (first.most, second.most) == (2, 3)
    assert sum(model.served.values()) == 120


def test_inputs_are_not_copied(two, monkeypatch):
    model, seen = compiled(), []
    request = model.create_infer_request()
    x, y = request.get_tensor("w"), np.zeros((3, 8), np.float32)
    x[:] = W
    inner = model.pool._members[0].model.create_infer_request()
    monkeypatch.setattr(inner, "run", lambda inputs, *more, run=inner.run: (seen.append(inputs), run(inputs, *more))[1])
    model.pool._members[0].idle.append(inner)
    request.set_tensor("x", feed(3)["x"])
    request.set_tensor("y", y)
    assert request.infer()["y"] is y
    check(y, 3)
    assert seen[0]["w"] is x


@pytest.mark.parametrize("how", ["device", "driver", "broken"])
def test_a_device_that_fails_mid_run_loses_no_request(two, how, caplog):
    first, second = two
    model = compiled("MULTI:GPU.7(2),GPU.8(2)")
    first.seconds = second.seconds = 0.0005
    errors = {"device": None, "driver": RuntimeError("CUDA error"), "broken": ExecutionError("nonsense")}
    first.fail(errors[how], after=30)
    if how == "broken":
        first.ill = "an illegal memory access"
    got, problems, lock = {}, [], threading.Lock()

    def use(thread):
        queue = AsyncInferQueue(model, 3)

        def over(request, number):
            with lock:
                got.setdefault(number, []).append(request.results["y"])

        queue.set_callback(over)
        try:
            for number in range(thread * 1000, thread * 1000 + 60):
                queue.start_async(feed(number), number)
                if number % 10 == 0:
                    check(model(feed(-number))["y"], -number)
            queue.wait_all()
        except BaseException as error:
            problems.append(error)

    with caplog.at_level(logging.WARNING, "tunewright"):
        threads = [threading.Thread(target=use, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not problems
    assert sorted(got) == [t * 1000 + n for t in range(4) for n in range(60)]
    for number, results in got.items():
        assert len(results) == 1, "called once"
        check(results[0], number)
    assert model.get_property("EXECUTION_DEVICES") == ["GPU.8"] and model.optimal_requests == 2
    assert "GPU.7 is left out" in caplog.text and "GPU.8 goes on" in caplog.text
    assert model.served["GPU.7"] == 30 and sum(model.served.values()) == 264


def test_what_nobody_can_do_is_the_requests_own_fault(two):
    first, second = two
    model = compiled()
    first.fail(ExecutionError("index 9 is out of range"))
    second.fail(ExecutionError("index 9 is out of range"))
    for _ in range(STRIKES + 1):
        with pytest.raises(ExecutionError, match="index 9"):
            model(feed(1))
    with pytest.raises(InputError, match=r"\[2, 7\]"):
        model({"x": np.zeros((2, 7), np.float32), "w": W})
    first.error = second.error = None
    check(model(feed(5))["y"], 5)
    assert model.get_property("EXECUTION_DEVICES") == ["GPU.7", "GPU.8"]


def test_an_operation_that_one_device_refuses(two):
    first, _ = two
    model = compiled()
    first.fail(ExecutionError("not here"))
    for number in range(STRIKES - 1):
        check(model(feed(number))["y"], number)
    assert model.get_property("EXECUTION_DEVICES") == ["GPU.7", "GPU.8"], "it may have been the request"
    for number in range(3):
        check(model(feed(number))["y"], number)
    assert model.get_property("EXECUTION_DEVICES") == ["GPU.8"]
    assert first.begun == STRIKES, "it is not asked any more"


def test_when_every_device_is_broken(two):
    first, _ = two
    model = compiled()
    for device in two:
        device.fail(RuntimeError("gone"))
        device.ill = "it fell off the bus"
    with pytest.raises(RuntimeError, match="gone"):
        model(feed(1))
    request = model.create_infer_request()
    request.start_async(feed(2))
    with pytest.raises(DeviceError, match=r"no device is left.*GPU\.7 is broken: it fell off.*GPU\.8"):
        request.wait()
    first.error, first.ill = None, ""
    model.set_property({"MULTI_DEVICE_PRIORITIES": "GPU.7"})  # repaired
    check(model(feed(3))["y"], 3)


def test_a_request_waits_for_the_only_device_that_can(two):
    first, second = two
    model = compiled()
    second.open.clear()
    busy, late = model.create_infer_request(), model.create_infer_request()
    first.fail()
    busy.start_async(feed(1))
    until(lambda: second.running)
    late.start_async(feed(2))
    assert not late.wait(0.05)
    second.open.set()
    assert busy.wait(30) and late.wait(30)
    check(late.results["y"], 2)


@pytest.mark.parametrize("in_time", [True, False])
def test_who_is_interrupted_while_it_waits_keeps_no_device(two, in_time):
    first, second = two
    model = compiled()

    class Interrupted:
        """A lock that Ctrl-C ends the waiting for, after the device was handed over or before."""

        def __init__(self):
            self.real, self.count = threading.Lock(), 0

        def acquire(self):
            self.count += 1
            if self.count > 1:
                if not in_time:
                    open_all()
                    self.real.acquire()
                raise KeyboardInterrupt
            return self.real.acquire()

        def release(self):
            self.real.release()

    def open_all():
        for device in two:
            device.open.set()

    for device in two:
        device.open.clear()
    busy = [model.create_infer_request() for _ in two]
    for request in busy:
        request.start_async(feed(1))
    until(lambda: first.running and second.running)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multi, "_Waiter", lambda failed: _WAITER(failed, Interrupted()))
        with pytest.raises(KeyboardInterrupt):
            model(feed(2))
    open_all()
    assert all(request.wait(30) for request in busy)
    assert [m.busy for m in model.pool._members] == [0, 0] and not model.pool._waiting


def test_devices_come_and_go_under_load(two):
    first, second = two
    model = compiled("MULTI:GPU.7")
    first.seconds = second.seconds = 0.0005
    second.may_compile.clear()
    got, stop, problems = [], threading.Event(), []

    def use(thread):
        number = thread * 100_000
        try:
            while not stop.is_set():
                check(model(feed(number))["y"], number)
                got.append(number)
                number += 1
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=use, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    try:
        model.set_property({"MULTI_DEVICE_PRIORITIES": "GPU.8(2),GPU.7"})
        until(lambda: len(got) > 20)
        assert model.get_property("EXECUTION_DEVICES") == ["GPU.7"], "the other compiles"
        second.may_compile.set()
        until(lambda: model.served["GPU.8"] > 20)
        assert model.get_property("EXECUTION_DEVICES") == ["GPU.8", "GPU.7"] and model.optimal_requests == 3
        model.set_property({"MULTI_DEVICE_PRIORITIES": "GPU.8"})
        until(lambda: not first.running)
        before = first.begun
        more(got, 50)
        assert first.begun == before and model.get_property("EXECUTION_DEVICES") == ["GPU.8"]
        model.set_property({"MULTI_DEVICE_PRIORITIES": "GPU.7"})  # nobody is ready: requests wait, and are served
        more(got, 50)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not problems and len(got) == len(set(got))
    assert model.get_property("MULTI_DEVICE_PRIORITIES") == "GPU.7"


def test_a_wrong_list_changes_nothing(two):
    model = compiled()
    for text, match in [("", "no device"), ("GPU.7,GPU.7", "same"), ("GPU.7,NONE", "NONE"), ("AUTO", "several")]:
        with pytest.raises((SettingsError, DeviceError), match=match):
            model.set_property({"MULTI_DEVICE_PRIORITIES": text})
    assert model.get_property("EXECUTION_DEVICES") == ["GPU.7", "GPU.8"]
    with pytest.raises(SettingsError, match="only be read"):
        model.set_property({"NUM_STREAMS": 2})
    model.set_property({"GPU_QUEUE_PRIORITY": "HIGH"})
    assert {m.model.settings.gpu_queue_priority for m in model.pool._members} == {"HIGH"}
    check(model(feed(1))["y"], 1)


def test_a_device_that_cannot_compile_is_left_out(two, monkeypatch, caplog):
    real = SingleDevice.compile

    def compile(self, *given, **more):
        if self.name == "GPU.7":
            raise DeviceError("no kernels for this")
        return real(self, *given, **more)

    monkeypatch.setattr(SingleDevice, "compile", compile)
    with caplog.at_level(logging.WARNING, "tunewright"):
        model = compiled()
    assert "GPU.7 is left out, it cannot run the model: no kernels" in caplog.text
    check(model(feed(1))["y"], 1)
    with pytest.raises(DeviceError, match="no kernels"):
        compiled("MULTI:GPU.7")


def test_cancel_and_callbacks(two):
    model = compiled()
    for device in two:
        device.open.clear()
    requests, called = [model.create_infer_request() for _ in range(4)], []
    for i, request in enumerate(requests):
        request.set_callback(lambda request, number: called.append(number))
        request.start_async(feed(i), i)
    until(lambda: all(device.running for device in two))
    requests[1].cancel()  # it runs
    requests[3].cancel()  # it waits for a stream
    for device in two:
        device.open.set()
    assert requests[0].wait(30) and requests[2].wait(30)
    for i in (1, 3):
        with pytest.raises(RequestCancelled):
            requests[i].wait(30)
        assert not requests[i].results
    assert sorted(called) == [0, 2]
    requests[3].start_async(feed(7), 7)
    assert requests[3].wait(30)
    check(requests[3].results["y"], 7)


def test_counters_say_which_device(two):
    first, _ = two
    model = compiled(PERF_COUNT="YES")
    request = model.create_infer_request()
    assert request.get_profiling_info() == [] and request.device == ""
    request.infer(feed(1))
    assert {row.device for row in request.get_profiling_info()} == {"GPU.7"}
    first.fail()
    request.infer(feed(1))
    rows = request.get_profiling_info()
    assert {row.device for row in rows} == {"GPU.8"} and {row.type for row in rows} >= {"MatMul"}
    assert request.get_totals().seconds > 0


def test_lent_tensors_find_a_device_that_reaches_them(two, monkeypatch):
    first, _ = two
    model = compiled("MULTI:GPU.7,CPU.HOST")
    context = Core().create_context("CPU.HOST")
    lent = context.empty((3, 8), "float32")
    np.asarray(lent.memory)[...] = 2
    real = type(first.queue()).adopt

    def adopt(self, value, writable=False):
        if self.device is first:
            raise InputError("is in memory which this device cannot reach")
        return real(self, value, writable)

    monkeypatch.setattr(type(first.queue()), "adopt", adopt)
    request = model.create_infer_request()
    check(request.infer({"x": lent, "w": W})["y"], 2)
    assert request.device == "CPU.HOST" and model.get_property("EXECUTION_DEVICES") == ["GPU.7", "CPU.HOST"]
    first.fail()
    with pytest.raises(InputError, match="cannot reach"):
        compiled("MULTI:GPU.7")({"x": lent, "w": W})


@pytest.mark.parametrize(
    ("device", "match"),
    [
        ("MULTI", "no device is named"),
        ("MULTI:", "no device is named"),
        ("MULTI:CPU,CPU", "same device"),
        ("MULTI:CPU,NOWHERE", "NOWHERE"),
        ("MULTI:AUTO:CPU", "several devices itself"),
        ("MULTI:CPU,MULTI:CPU.HOST", "several devices itself"),
        ("MULTI:CPU(0)", "is not a device"),
        ("MULTI:CPU(x)", "is not a device"),
        ("MULTI:CPU(2", "is not a device"),
        ("AUTO:NOWHERE", "NOWHERE"),
        ("AUTO:CPU,MULTI:CPU", "several devices itself"),
        ("BATCH", "no device is named"),
        ("BATCH:CPU,CPU.HOST", "2 devices"),
        ("BATCH:CPU(1)", "combines no requests"),
    ],
)
def test_names_that_are_wrong(device, match):
    with pytest.raises((SettingsError, DeviceError), match=match):
        Core().compile_model(network(), device)


def test_the_devices_may_be_a_setting():
    model = compiled("MULTI", MULTI_DEVICE_PRIORITIES="CPU.HOST, CPU(1)")
    assert model.get_property("EXECUTION_DEVICES") == ["CPU.HOST", "CPU"]
    support = Core().query_model(network(), "MULTI:CPU,CPU.HOST")
    assert len(support) == 2 and all(support.values())
    assert model.memory_statistics() is not None and "MULTI" in repr(model)


def test_a_model_that_is_given_up_is_freed(two):
    import gc
    import weakref

    model = compiled()
    queue = AsyncInferQueue(model)
    for number in range(10):
        queue.start_async(feed(number))
    queue.wait_all()
    gone = [weakref.ref(model), weakref.ref(model.pool), weakref.ref(model.pool._members[0].model)]
    del model, queue
    until(lambda: (gc.collect(), all(ref() is None for ref in gone))[1])


def test_streams_of_one_device_are_confined():
    units = open_device("CPU").target.units
    model = compiled(f"MULTI:CPU({units}),CPU.HOST")
    assert model.pool.model().env.device.target.units == 1 and model.optimal_requests == units + 1


WRONG = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[4] x, int64[n] i) => (float[n] y)
{
    y = Gather(x, i)
}
"""


def test_an_error_of_the_data_is_the_data_s(two):
    model = Core().compile_model(parser.parse_model(WRONG), "MULTI:GPU.7,GPU.8")
    good = {"x": np.arange(4, dtype=np.float32), "i": np.array([3, 1])}
    with pytest.raises(ExecutionError):
        model({**good, "i": np.array([9])})
    assert list(model(good)["y"]) == [3, 1] and len(model.get_property("EXECUTION_DEVICES")) == 2


def test_what_comes_to_streams_that_were_just_replaced_runs():
    """Devices came or went while somebody was about to start a request."""
    work = TaskQueue(2)
    for _ in range(50):
        runs = [threading.Event() for _ in range(2)]
        for run in runs:
            work.put(run.set)
        assert all(run.wait(10) for run in runs)
        threads = list(work.threads)
        work.end()
        for thread in threads:
            thread.join(10)


@pytest.mark.parametrize("count", [300, pytest.param(40_000, marks=pytest.mark.soak)])
def test_devices_that_fail_and_come_back_all_the_time(monkeypatch, count):
    names = ("GPU.6", "GPU.7", "GPU.8")
    with made(monkeypatch, *names) as devices:
        model, rng = compiled("MULTI:GPU.6,GPU.7(2),GPU.8,CPU.HOST"), np.random.default_rng(0)
        everybody = model.get_property("EXECUTION_DEVICES")
        got, lock, stop, problems = {}, threading.Lock(), threading.Event(), []

        def over(request, number):
            with lock:
                got.setdefault(number, []).append(request.results["y"][0, 0])

        def use(thread):
            queue = AsyncInferQueue(model, 4)
            queue.set_callback(over)
            try:
                for number in range(thread * count, (thread + 1) * count):
                    if number % 7:
                        queue.start_async(feed(number), number)
                        continue
                    y = model(feed(number))["y"]
                    with lock:
                        got.setdefault(number, []).append(y[0, 0])
                queue.wait_all()
            except BaseException as error:
                problems.append(error)

        def disturb():
            while not stop.is_set():
                device = devices[rng.integers(len(devices))]
                device.ill = "an illegal access" if rng.random() < 0.3 else ""
                device.fail([None, RuntimeError("CUDA error"), ExecutionError("no")][rng.integers(3)], rng.integers(20))
                time.sleep(rng.random() * 0.01)
                device.error, device.ill = None, ""
                order = list(rng.permutation(names)[: rng.integers(1, 4)])
                model.set_property({"MULTI_DEVICE_PRIORITIES": ",".join([*order, "CPU.HOST"])})

        threads = [threading.Thread(target=use, args=(i,)) for i in range(4)]
        chaos = threading.Thread(target=disturb)
        for thread in [*threads, chaos]:
            thread.start()
        for thread in threads:
            thread.join(600)
        stop.set()
        chaos.join(60)
        assert not problems and len(everybody) == 4
        assert sorted(got) == list(range(4 * count)) and all(len(results) == 1 for results in got.values())
        scale = 1 + W[:, 0].sum()
        for number, [first] in got.items():
            assert abs(first - number * scale) <= 1e-4 * max(1, abs(number * scale)), number
        assert all(m.busy == 0 for m in model.pool._members)
