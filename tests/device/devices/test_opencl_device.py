"""OpenCL devices: names and targets, which runtimes are offered, programs, and life without any; and what they and the
CPU device do alike: memory that they share with numpy, requests, threads."""

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from onnx import numpy_helper, parser

import tunewright
from helpers import opencl_runtime
from helpers.launches import run_text
from helpers.opencl_runtime import needs_opencl
from tunewright.devices.kernel_cache import KernelCache
from tunewright.devices.opencl import device as opencl
from tunewright.devices.opencl import naming, probe
from tunewright.devices.opencl.device import OPTIONS, OpenCLDevice
from tunewright.plugins import single
from tunewright.plugins.single import available, open_device, visible


def model(text, version=21):
    return parser.parse_model(f'<ir_version: 10, opset_import: ["" : {version}]>\n' + text)


@pytest.fixture
def core():
    return tunewright.Core({"HOST_FALLBACK": "NO"})


@pytest.fixture
def device():
    """The OpenCL runtime for the processor."""
    if not opencl_runtime.NAME:
        pytest.skip(opencl_runtime.WHY_NOT)
    return open_device(opencl_runtime.NAME)


@pytest.fixture(params=["CPU", pytest.param(opencl_runtime.NAME, marks=needs_opencl, id="OpenCL")])
def name(request):
    """Devices that share the host's memory, and have kernels."""
    return request.param


# Names and targets


def test_the_processor_has_a_name_for_each_way_to_use_it(device):
    names, _ = available()
    runtimes = [n for n in names if n.startswith("CPU.") and names[n] is OpenCLDevice]
    assert {"CPU", "CPU.NATIVE", "CPU.HOST"} <= set(names) and opencl_runtime.NAME in runtimes
    assert names["CPU"] is names["CPU.NATIVE"] is not OpenCLDevice, "OpenCL is chosen by name alone"
    assert device.family == "opencl" and device.name == opencl_runtime.NAME
    assert open_device("CPU.HOST").family == "host"
    assert open_device(device.name.lower()) is device
    assert {"CPU", "CPU.HOST", *runtimes} <= set(visible(alternatives=True))
    assert [n for n in tunewright.Core().available_devices if n.startswith("CPU")] == ["CPU"], "one processor"


def test_a_name_asks_no_more_than_it_must(monkeypatch):
    """To look for OpenCL's runtimes takes time and memory."""
    asked = []
    for family, implementation in single.families().items():
        monkeypatch.setattr(implementation, "available", classmethod(
            lambda cls, family=family, real=implementation.available: (asked.append(family), real())[1]))  # fmt: skip
    single.serving.cache_clear()
    open_device("CPU")
    assert asked in (["native"], ["native", "opencl", "host"])
    asked.clear()
    single.available.cache_clear()
    with pytest.raises(tunewright.DeviceError):
        open_device("NPU")
    assert sorted(asked) == sorted(single.families()), "to say which there are"


def test_an_unknown_device_is_told_with_those_that_there_are():
    with pytest.raises(tunewright.DeviceError, match=r"there is no device 'CPU.NONE'.*the devices are CPU") as caught:
        open_device("CPU.NONE")
    assert all(f" {name}" in str(caught.value) for name in visible(alternatives=True))
    with pytest.raises(tunewright.DeviceError, match=r"there is no OpenCL device 'GPU.99'"):
        OpenCLDevice("GPU.99")


def test_the_target_tells_everything_that_a_kernel_depends_on(device):
    target, software = device.target, dict(device.target.software)
    assert (target.device, target.language) == ("cpu", "c")
    assert target.options == OPTIONS and "-cl-denorms-are-zero" in target.options
    assert software["driver"] == device.raw.driver_version and software["version"] == device.raw.version
    assert target.units == device.raw.max_compute_units
    assert (target.vector_bytes, target.registers) in {(16, 16), (32, 16), (64, 32)}
    assert f"driver {software['driver']}" in str(target)
    assert device.memory_bytes and device.describe()["software"] == software


def test_two_ways_to_use_one_processor_are_two_targets(device):
    host = open_device("CPU.HOST").target
    assert host.name == device.target.name and host != device.target


@pytest.mark.parametrize(
    ("flags", "vectors"),
    [({"avx2", "avx512f"}, (64, 32)), ({"avx2"}, (32, 16)), ({"sse4_2"}, (16, 16))],
)
def test_vectors_are_those_that_the_processor_has(flags, vectors, monkeypatch):
    monkeypatch.setattr(opencl, "cpu_flags", lambda: frozenset(flags))
    assert opencl._vectors() == vectors


def test_a_runtime_uses_all_its_threads(device, caplog):
    """It has no way to confine a launch to some of them: that is told, and nothing changes."""
    device._told_threads = False
    settings = tunewright.Core({"CPU_THREADS_NUM": 1}).settings
    assert device.configured(settings) is device is device.with_threads(1) is device.configured(settings)
    told = [r.message for r in caplog.records if "CPU_THREADS_NUM" in r.message]
    assert len(told) == (device.target.units > 1)


# What is offered


def kinds(*names):
    """Devices for the processor, of runtimes and versions."""
    import pyopencl as cl

    return [
        SimpleNamespace(name="x", type=cl.device_type.CPU, platform=SimpleNamespace(name=name), driver_version=version)
        for name, version in names
    ]


@needs_opencl
def test_the_newest_of_a_runtimes_versions_that_works_is_offered():
    old, new, other = kinds(("Intel(R) OpenCL", "2024.9"), ("Intel(R) OpenCL", "2024.10"), ("Some Thing", "1"))
    assert naming.names([old, other, new]) == ({"CPU.INTEL": new, "CPU.SOME": other}, {})
    found, reasons = naming.names([old, other, new], (), lambda d: "" if d is old else "it crashed")
    assert found == {"CPU.INTEL": old} and reasons == {"CPU.SOME": "it crashed"}


def test_a_device_runs_a_kernel_before_it_is_offered(device):
    assert probe.run(device.raw) == "" == probe._try(device.raw)


#: a kernel, and what is said of a device that has trouble with it
TROUBLE = {
    "kernel void probe(global int* x, int y) { x[get_global_id(0)] = 2; }": "its results are wrong",
    "kernel void probe(global int* x, int y) { nonsense }": "nonsense",
    "kernel void probe(global int* x, int y) { *(global volatile int*)16 = 1; }": "ended with SIG",
}


@pytest.mark.parametrize("text", TROUBLE)
def test_a_device_that_cannot_is_not_offered_and_told_with_the_reason(device, text, monkeypatch, tmp_path):
    """In a process of its own, which a driver may crash."""
    child = f"""
import sys
from tunewright.devices.opencl import probe as opencl_probe
opencl_probe.TEXT = {text!r}
sys.exit(opencl_probe.main(sys.argv[1:]))
"""
    run = subprocess.run

    def altered(command, **given):
        at = command.index("-m")
        return run([*command[:at], "-c", child, *command[at + 2 :]], **given)

    monkeypatch.setattr(subprocess, "run", altered)
    monkeypatch.setattr(probe, "TEXT", text)
    monkeypatch.setenv("TUNEWRIGHT_CACHE_DIR", str(tmp_path))
    why = probe.why_not(device.raw)
    assert why.startswith("it does not run kernels right: ") and TROUBLE[text] in why and "CPU needs none" in why
    found, reasons = naming.names([device.raw], (), probe.why_not)
    assert found == {} and reasons == {device.name: why}


def test_the_answer_is_remembered_and_a_failure_for_a_while(device, monkeypatch, tmp_path):
    monkeypatch.setenv("TUNEWRIGHT_CACHE_DIR", str(tmp_path))
    answers, asked = ["it crashed", ""], []
    monkeypatch.setattr(probe, "_try", lambda raw: (asked.append(raw), answers.pop(0))[1])
    assert "it crashed" in probe.why_not(device.raw) and "it crashed" in probe.why_not(device.raw)
    later = time.time() + probe.AGAIN
    monkeypatch.setattr(probe, "time", SimpleNamespace(time=lambda: later))
    assert probe.why_not(device.raw) == probe.why_not(device.raw) == "" and len(asked) == 2
    later += 100 * probe.AGAIN
    assert probe.why_not(device.raw) == "", "what is right stays so"
    (entry,) = KernelCache.of(tunewright.Core().settings.from_environment()).entries()
    assert entry.label.startswith("probe: ")


def test_without_a_kernel_cache_it_is_tried_each_time(device, monkeypatch):
    monkeypatch.setenv("TUNEWRIGHT_CACHE_DIR", "")
    asked = []
    monkeypatch.setattr(probe, "_try", lambda raw: (asked.append(raw), "")[1])
    assert probe.why_not(device.raw) == probe.why_not(device.raw) == "" and len(asked) == 2


@pytest.mark.parametrize(("status", "told"), [(-signal.SIGILL, "SIGILL"), (7, "ended with 7"), (None, "than 60 s")])
def test_a_process_that_ends_otherwise_is_told(device, status, told, monkeypatch):
    def ran(command, **given):
        if status is None:
            raise subprocess.TimeoutExpired(command, given["timeout"])
        return subprocess.CompletedProcess(command, status, b"", b"")

    monkeypatch.setattr(subprocess, "run", ran)
    assert told in probe._try(device.raw)


def test_a_device_that_cannot_be_used_is_an_error_with_the_reason(monkeypatch):
    names, reasons = available()
    monkeypatch.setattr(single, "available", lambda: (names, {**reasons, "CPU.BROKEN": "it crashed; update it"}))
    with pytest.raises(tunewright.DeviceError, match=r"cpu.broken cannot be used: it crashed; update it \(the devices"):
        open_device("cpu.broken")


BROKEN = """
import json, sys
from tunewright.devices.opencl import probe as opencl_probe
opencl_probe._try = lambda raw: "it crashed"
from tunewright import tools
sys.exit(tools.execute(json.loads(sys.argv[1])))
"""


@needs_opencl
def test_commands_pass_over_what_cannot_be_used(tmp_path):
    """No traceback anywhere: it is listed with its reason, AUTO does without, and its name is an error."""
    import onnx

    onnx.save(model(SCALE), tmp_path / "scale.onnx")
    environment = {**os.environ, "TUNEWRIGHT_CACHE_DIR": "", "NO_COLOR": "1", "COLUMNS": "200"}

    def execute(*arguments):
        command = [sys.executable, "-c", BROKEN, json.dumps([*map(str, arguments)])]
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=120, cwd=tmp_path
        )  # fmt: skip

    listed = execute("devices")
    assert listed.returncode == 0, listed.stderr
    lines = listed.stdout.splitlines()
    at = lines.index(opencl_runtime.NAME)
    assert "unusable  it does not run kernels right: it crashed" in lines[at + 1]
    run = [execute("run", tmp_path / "scale.onnx", "-d", name) for name in ("AUTO", opencl_runtime.NAME)]
    assert run[0].returncode == 0, run[0].stderr
    assert run[1].returncode == 2 and "cannot be used" in run[1].stderr
    assert not any("Traceback" in done.stderr for done in [listed, *run])


# Memory


SCALE = "g (float[n, 4] x) => (float[n, 4] y) { two = Constant<value_float = 2.0>() y = Mul(x, two) }"


def test_an_input_that_may_not_be_written_is_only_read(core, name):
    x = np.frombuffer(np.arange(12, dtype=np.float32).tobytes(), np.float32).reshape(3, 4)
    assert not x.flags.writeable
    before = x.copy()
    np.testing.assert_array_equal(core.compile_model(model(SCALE), name)({"x": x})["y"], 2 * before)
    np.testing.assert_array_equal(x, before)


def test_an_empty_input_gives_an_empty_result(core, name):
    compiled = core.compile_model(model(SCALE), name)
    assert compiled({"x": np.zeros((0, 4), np.float32)})["y"].shape == (0, 4)
    np.testing.assert_array_equal(compiled({"x": np.ones((2, 4), np.float32)})["y"], np.full((2, 4), 2, np.float32))


def test_an_input_with_gaps_is_read_right(core, name):
    x = np.arange(48, dtype=np.float32).reshape(6, 8)[::2, 1::2]
    np.testing.assert_array_equal(core.compile_model(model(SCALE), name)({"x": x})["y"], 2 * x)


def test_host_and_device_read_the_same_bytes(device):
    """No copies: what a kernel writes is in the array that was given to it."""
    array = device.alloc(64).view(np.float32)
    array[:] = 1
    run_text(device, "kernel void twice(global float* x) { x[get_global_id(0)] *= 2; }", "twice", (16,), [array])
    assert (array == 2).all() and array.ctypes.data % 64 == 0


# Programs


def test_a_text_is_compiled_once(device):
    text = "kernel void one(global int* x) { x[0] = 1; }"
    assert device.build(text) is device.build(text)
    assert device.build(text) is not device.build(text.replace("= 1", "= 2"))


def test_a_new_shape_compiles_nothing(core, name):
    device = open_device(name)
    compiled = core.compile_model(
        model(
            """g (float[n, k] x, float[k, 8] w) => (float[n, 8] y)
               { a = MatMul(x, w) b = Softmax(a) c = Transpose<perm = [1, 0]>(b) d = Transpose<perm = [1, 0]>(c)
                 e = ReduceMean(x) y = Add(d, e) }"""
        ),
        name,
    )
    w = np.ones((32, 8), np.float32)
    # A kernel may have one text for small shapes and another for large ones.
    for n in (40000, 1, 16, 64, 2048):
        compiled({"x": np.ones((n, 32), np.float32), "w": w})
    for thread in threading.enumerate():
        if thread.name == "tunewright-plans":  # it makes a plan that is better for small shapes
            thread.join()
    known = len(device._programs)
    for n in (11, 17, 48, 96, 129, 700, 1999, 5000):
        y = compiled({"x": np.ones((n, 32), np.float32), "w": w})["y"]
        np.testing.assert_allclose(y, np.full((n, 8), 1.125, np.float32), rtol=1e-6)
    assert len(device._programs) == known


def test_a_kernel_that_does_not_compile_is_an_error_with_the_compilers_words(device):
    with pytest.raises(tunewright.ExecutionError, match=r"(?s)CPU.* cannot compile a kernel: .*nonsense"):
        device.build("kernel void broken(global float* x) { x[0] = nonsense; }")
    assert device.build("kernel void sound(global float* x) { x[0] = 1; }") is not None


def test_building_and_launching_read_and_write_no_pickles(core, device, monkeypatch):
    """pyopencl can keep programs and argument setters as pickles in the user's cache folder: code to who reads them."""

    def refuse(*args, **kwargs):
        raise AssertionError("a pickle")

    for function in ("load", "loads", "dump", "dumps"):
        monkeypatch.setattr(pickle, function, refuse)
    text = SCALE.replace("y = Mul(x, two)", "t = Mul(x, two) s = Sub(t, x) u = Mul(s, s) y = Add(u, two)")
    compiled = core.compile_model(model(text), device.name)
    np.testing.assert_array_equal(compiled({"x": np.full((1, 4), 3, np.float32)})["y"], np.full((1, 4), 11, np.float32))


# Requests and threads


NETWORK = """g (float[1, 8, 12, 12] x) => (float[1, 16] y)
{ c = Conv<pads = [1, 1, 1, 1]>(x, w) r = Relu(c) p = GlobalAveragePool(r) f = Flatten(p) d = MatMul(f, m)
  s = Softmax(d) t = Tanh(d) y = Add(s, t) }"""


def network():
    rng, proto = np.random.default_rng(3), model(NETWORK)
    for name, shape in {"w": (16, 8, 3, 3), "m": (16, 16)}.items():
        weights = (rng.standard_normal(shape) * 0.1).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(weights, name))
    return proto


def images(count):
    return [np.random.default_rng(seed).standard_normal((1, 8, 12, 12)).astype(np.float32) for seed in range(count)]


def test_eight_threads_infer_on_one_model_at_once(core, name):
    compiled, host = core.compile_model(network(), name), tunewright.Core().compile_model(network(), "CPU.HOST")
    xs = images(8)
    expected = [host({"x": x})["y"] for x in xs]
    start, failures = threading.Barrier(8), []

    def work(k):
        start.wait()
        try:
            for turn in range(50):
                at = (k + turn) % 8
                np.testing.assert_allclose(compiled({"x": xs[at]})["y"], expected[at], rtol=1e-4, atol=1e-6)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_requests_have_memory_and_queues_of_their_own(core, name):
    compiled = core.compile_model(network(), name)
    a, b = compiled.create_infer_request(), compiled.create_infer_request()
    assert a.executor.queue is not b.executor.queue
    x, z = images(2)
    first = a.infer({"x": x})["y"]
    kept = first.copy()
    other = b.infer({"x": z})["y"]
    again = a.infer({"x": x})["y"]
    np.testing.assert_array_equal(first, kept)
    np.testing.assert_array_equal(again, kept)
    assert not np.array_equal(other, kept)
    assert not any(np.shares_memory(p, q) for p, q in ((first, other), (first, again), (other, again)))


@pytest.mark.parametrize("join", ["YES", "NO"])
def test_launches_are_counted(core, name, join):
    compiled = core.compile_model(network(), name, config={"PERF_COUNT": "YES", "JOIN_LAUNCHES": join})
    request = compiled.create_infer_request()
    (x,) = images(1)
    request.infer({"x": x})
    before = request.executor.launches
    request.infer({"x": x})
    rows = [row for row in request.get_profiling_info() if row.calls]
    assert sum(row.launches for row in rows) == request.executor.launches - before == request.get_totals().launches > 0
    for row in rows:
        assert row.launches >= (join == "NO") and row.kernel.startswith("opencl.") and row.device_seconds > 0, row
        assert row.host_seconds == 0, row


def test_a_host_operation_is_marked_in_the_counters(name):
    text = "g (float[6] x) => (string[6] y) { t = Relu(x) y = Cast<to = 8>(t) }"
    request = tunewright.Core({"PERF_COUNT": "YES"}).compile_model(model(text), name).create_infer_request()
    request.infer({"x": np.array([1, -1, 2, 0, 3, -2], np.float32)})
    relu, cast = request.get_profiling_info()
    assert relu.launches == 1 and relu.host_seconds == 0
    assert cast.kernel == "host.reference" and cast.launches == 0 and cast.host_seconds > 0


def _in_a_fork(results, compiled, made, name):
    signal.alarm(60)
    for use in (lambda: compiled, lambda: tunewright.Core().compile_model(made, name)):
        try:
            use()({"x": np.ones((3, 4), np.float32)})
            results.put("it ran")
        except tunewright.DeviceError as error:
            results.put(str(error))
    for other in ("CPU", "CPU.HOST"):
        results.put(tunewright.Core().compile_model(made, other)({"x": np.ones((1, 4), np.float32)})["y"].tolist())


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_is_told_and_does_not_hang(device):
    """Its threads stayed where they were. Other devices work there."""
    made = model(SCALE)
    compiled = tunewright.Core().compile_model(made, device.name)
    compiled({"x": np.ones((2, 4), np.float32)})
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=_in_a_fork, args=(results, compiled, made, device.name))
    with device._programs._lock:  # as if another thread compiled just now: nobody lets go of its lock in the fork
        child.start()
    child.join(60)
    assert child.exitcode == 0
    for _ in range(2):
        assert "was forked from one that had opened the device" in results.get()
    assert [results.get(), results.get()] == [[[2, 2, 2, 2]]] * 2
    assert np.array_equal(compiled({"x": np.ones((1, 4), np.float32)})["y"], [[2] * 4]), "and the parent goes on"


# Without it


WITHOUT = """
import sys
sys.modules["pyopencl"] = None  # an import of it fails
import numpy as np
from onnx import parser
import tunewright
from tunewright.plugins.single import available, open_device, visible
names, reasons = available()
assert {"CPU", "CPU.HOST"} <= set(names) and not any(f.__name__ == "OpenCLDevice" for f in names.values()), names
assert "pip install 'tunewright[opencl]'" in reasons["opencl"], reasons
assert open_device("CPU").family != "opencl"
model = parser.parse_model('<ir_version: 10, opset_import: ["" : 21]> g (float[3] x) => (float[3] y) { y = Relu(x) }')
y = tunewright.Core({"HOST_FALLBACK": "NO"}).compile_model(model)({"x": np.array([-1, 0, 2], np.float32)})["y"]
assert y.tolist() == [0, 0, 2]
for name in ("GPU", "CPU.INTEL"):
    try:
        open_device(name)
    except tunewright.DeviceError as error:
        assert "pip install 'tunewright[opencl]'" in str(error), error
    else:
        raise AssertionError(f"there is {name}")
from tunewright import tools
assert tools.execute(["devices"]) == 0
import pkgutil, importlib, tunewright.devices
for info in pkgutil.walk_packages(tunewright.devices.__path__, "tunewright.devices."):
    importlib.import_module(info.name)
"""


def test_without_pyopencl_everything_else_is_as_it_was():
    done = subprocess.run([sys.executable, "-W", "error", "-c", WITHOUT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "pip install 'tunewright[opencl]'" in done.stdout
