"""The OpenCL device: its names and target, memory that it shares with numpy, programs, threads, and life without it."""

import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest
from onnx import numpy_helper, parser

import tunewright
from tunewright.devices import opencl
from tunewright.devices.opencl import OPTIONS, OpenCLDevice
from tunewright.plugins.single import available, open_device, visible

pytestmark = pytest.mark.skipif("opencl" in available()[1], reason="there is no OpenCL runtime here")


def model(text, version=21):
    return parser.parse_model(f'<ir_version: 10, opset_import: ["" : {version}]>\n' + text)


@pytest.fixture
def core():
    return tunewright.Core({"HOST_FALLBACK": "NO"})


@pytest.fixture
def device():
    return open_device("CPU")


# Names and targets


def test_the_processor_has_a_name_for_each_way_to_use_it(device):
    names, _ = available()
    runtimes = [n for n in names if n.startswith("CPU.") and names[n] is OpenCLDevice]
    assert {"CPU", "CPU.HOST"} <= set(names) and runtimes
    assert device.family == "opencl" and device.name == "CPU"
    assert open_device("CPU.HOST").family == "host"
    assert any(open_device(n.lower()).raw == device.raw for n in runtimes), "CPU is one of the runtimes"
    assert {"CPU", "CPU.HOST", *runtimes} <= set(visible(alternatives=True))
    assert [n for n in tunewright.Core().available_devices if n.startswith("CPU")] == ["CPU"], "one processor"


@pytest.mark.skipif("CPU.POCL" not in available()[0], reason="PoCL is not installed")
def test_pocl_can_be_asked_for():
    pocl = open_device("CPU.POCL")
    assert "Portable" in dict(pocl.target.software)["opencl"] and "PoCL" in dict(pocl.target.software)["version"]


def test_an_unknown_device_is_told_with_those_that_there_are():
    with pytest.raises(tunewright.DeviceError, match=r"there is no device 'CPU.NONE'.*the devices are CPU"):
        open_device("CPU.NONE")
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
    ("compiles_for", "flags", "vectors"),
    [
        ("skylake-avx512", {"avx2", "avx512f"}, (64, 32)),
        ("icelake-server", {"avx2", "avx512f"}, (64, 32)),
        ("haswell", {"avx2", "avx512f"}, (32, 16)),  # an old LLVM takes a new processor for one that it knows
        ("nehalem", {"sse4_2"}, (16, 16)),
    ],
)
def test_vectors_are_those_of_the_processor_that_the_runtime_compiles_for(compiles_for, flags, vectors, monkeypatch):
    monkeypatch.setattr(opencl, "cpu_flags", lambda: frozenset(flags))
    assert opencl._vectors(f"OpenCL 3.0 PoCL HSTR: pthread-x86_64-pc-linux-gnu-{compiles_for}") == vectors


def test_another_runtime_uses_the_vectors_that_the_processor_has(monkeypatch):
    monkeypatch.setattr(opencl, "cpu_flags", lambda: frozenset({"avx2", "avx512f"}))
    assert opencl._vectors("OpenCL 3.0 (Build 0)") == (64, 32)


# Memory


SCALE = "g (float[n, 4] x) => (float[n, 4] y) { two = Constant<value_float = 2.0>() y = Mul(x, two) }"


def test_an_input_that_may_not_be_written_is_only_read(core):
    x = np.frombuffer(np.arange(12, dtype=np.float32).tobytes(), np.float32).reshape(3, 4)
    assert not x.flags.writeable
    before = x.copy()
    np.testing.assert_array_equal(core.compile_model(model(SCALE))({"x": x})["y"], 2 * before)
    np.testing.assert_array_equal(x, before)


def test_an_empty_input_gives_an_empty_result(core):
    compiled = core.compile_model(model(SCALE))
    assert compiled({"x": np.zeros((0, 4), np.float32)})["y"].shape == (0, 4)
    np.testing.assert_array_equal(compiled({"x": np.ones((2, 4), np.float32)})["y"], np.full((2, 4), 2, np.float32))


def test_an_input_with_gaps_is_read_right(core):
    x = np.arange(48, dtype=np.float32).reshape(6, 8)[::2, 1::2]
    np.testing.assert_array_equal(core.compile_model(model(SCALE))({"x": x})["y"], 2 * x)


def test_host_and_device_read_the_same_bytes(device):
    """No copies: what a kernel writes is in the array that was given to it."""
    array = device.alloc(64).view(np.float32)
    array[:] = 1
    queue = device.queue()
    text = "kernel void twice(global float* x) { x[get_global_id(0)] *= 2; }"
    launch = device.launch(queue, device.build(text), "twice", (16,))
    launch.set(0, array)
    launch()
    queue.finish()
    assert (array == 2).all() and array.ctypes.data % 64 == 0


# Programs


def test_a_text_is_compiled_once(device):
    text = "kernel void one(global int* x) { x[0] = 1; }"
    assert device.build(text) is device.build(text)
    assert device.build(text) is not device.build(text.replace("= 1", "= 2"))


def test_a_new_shape_compiles_nothing(core, device):
    compiled = core.compile_model(
        model(
            """g (float[n, k] x, float[k, 8] w) => (float[n, 8] y)
               { a = MatMul(x, w) b = Softmax(a) c = Transpose<perm = [1, 0]>(b) d = Transpose<perm = [1, 0]>(c)
                 e = ReduceMean(x) y = Add(d, e) }"""
        )
    )
    w = np.ones((32, 8), np.float32)
    # A kernel may have one text for small shapes and another for large ones; the largest first, since a model whose
    # shapes were all tiny so far runs without threads, and changes over once.
    for n in (40000, 1, 16, 64, 2048):
        compiled({"x": np.ones((n, 32), np.float32), "w": w})
    known = len(device._programs)
    for n in (11, 17, 48, 96, 129, 700, 1999, 5000):
        y = compiled({"x": np.ones((n, 32), np.float32), "w": w})["y"]
        np.testing.assert_allclose(y, np.full((n, 8), 1.125, np.float32), rtol=1e-6)
    assert len(device._programs) == known


def test_a_kernel_that_does_not_compile_is_an_error_with_the_compilers_words(device):
    with pytest.raises(tunewright.ExecutionError, match=r"(?s)CPU cannot compile a kernel: .*nonsense"):
        device.build("kernel void broken(global float* x) { x[0] = nonsense; }")
    assert device.build("kernel void sound(global float* x) { x[0] = 1; }") is not None


def test_building_and_launching_read_and_write_no_pickles(core, monkeypatch):
    """pyopencl can keep programs and argument setters as pickles in the user's cache folder: code to who reads them."""

    def refuse(*args, **kwargs):
        raise AssertionError("a pickle")

    for name in ("load", "loads", "dump", "dumps"):
        monkeypatch.setattr(pickle, name, refuse)
    text = SCALE.replace("y = Mul(x, two)", "t = Mul(x, two) s = Sub(t, x) u = Mul(s, s) y = Add(u, two)")
    compiled = core.compile_model(model(text))
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


def test_eight_threads_infer_on_one_model_at_once(core):
    compiled, host = core.compile_model(network()), tunewright.Core().compile_model(network(), "CPU.HOST")
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


def test_requests_have_memory_and_queues_of_their_own(core):
    compiled = core.compile_model(network())
    a, b = compiled.create_infer_request(), compiled.create_infer_request()
    assert not set(a.executor.queues.values()) & set(b.executor.queues.values())
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
def test_launches_are_counted(core, join):
    compiled = core.compile_model(network(), config={"PERF_COUNT": "YES", "JOIN_LAUNCHES": join})
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


def test_a_host_operation_is_marked_in_the_counters():
    text = "g (float[6] x) => (int64[1, n] y) { t = Relu(x) y = NonZero(t) }"
    request = tunewright.Core({"PERF_COUNT": "YES"}).compile_model(model(text)).create_infer_request()
    request.infer({"x": np.array([1, -1, 2, 0, 3, -2], np.float32)})
    relu, non_zero = request.get_profiling_info()
    assert relu.launches == 1 and relu.host_seconds == 0
    assert non_zero.kernel == "host.reference" and non_zero.launches == 0 and non_zero.host_seconds > 0


# Without it


WITHOUT = """
import sys
sys.modules["pyopencl"] = None  # an import of it fails
import numpy as np
from onnx import parser
import tunewright
from tunewright.plugins.single import available, open_device, visible
names, reasons = available()
assert names["CPU"].__name__ == "HostDevice" and "CPU.HOST" in names, names
assert "pyopencl cannot be imported" in reasons["opencl"], reasons
assert open_device("CPU").family == "host"
model = parser.parse_model('<ir_version: 10, opset_import: ["" : 21]> g (float[3] x) => (float[3] y) { y = Relu(x) }')
y = tunewright.Core({"HOST_FALLBACK": "NO"}).compile_model(model)({"x": np.array([-1, 0, 2], np.float32)})["y"]
assert y.tolist() == [0, 0, 2]
try:
    open_device("GPU")
except tunewright.DeviceError as error:
    assert "pyopencl cannot be imported" in str(error), error
else:
    raise AssertionError("there is a GPU")
"""


def test_without_pyopencl_the_processor_is_the_host():
    done = subprocess.run([sys.executable, "-W", "error", "-c", WITHOUT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_small_plan_runs_in_the_calling_thread_and_changes_over_once(core, device):
    if device.inline() is None:
        pytest.skip("this runtime offers no device without threads")
    compiled = core.compile_model(model("g (float[n] x) => (float[n] y) { a = Exp(x) y = Add(a, x) }"))
    x = np.linspace(-1, 1, 1 << 22, dtype=np.float32)
    used = []
    for n in (8, 100, 1 << 22, 8):
        y = compiled({"x": x[:n]})["y"]
        np.testing.assert_allclose(y, np.exp(x[:n]) + x[:n], rtol=0, atol=1e-6)
        used.append(compiled.program.plans[-1].device)
    assert used == [device.inline(), device.inline(), device, device.inline()], "the fourth has its plan already"
    compiled({"x": x[:9]})
    assert compiled.program.plans[-1].device is device, "a new shape shares the kernels that are there"
