"""Remote tensors: memory of a caller's as it is, through DLPack and pyopencl, on a processor that shares the host's
memory and on one that is treated as if it did not."""

import gc
import os
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import tunewright
from helpers import opencl_runtime
from helpers.opencl_runtime import needs_opencl
from tunewright import Core, DeviceError, InputError, RemoteContext, RemoteTensor
from tunewright.devices import dlpack, interop
from tunewright.devices.host import cpu_count
from tunewright.devices.opencl.programs import quietly
from tunewright.plugins.single import SingleDevice, open_device
from tunewright.runtime.requests.remote_tensors import Stay
from tunewright.settings import Settings


def model(text):
    return parser.parse_model('<ir_version: 10, opset_import: ["" : 21]>\n' + text)


TWO = """g (float[n, 4] x, float[n, 4] z) => (float[n, 4] y, float[n, 4] w)
{ a = Tanh(x) y = Add(a, z) b = Mul(a, z) w = Relu(b) }"""


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def expected(x, z):
    return {"y": np.tanh(x) + z, "w": np.maximum(np.tanh(x) * z, 0)}


def near(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


class Foreign:
    """A tensor of some library: nothing but DLPack."""

    def __init__(self, array, place=(1, 0), old=False):
        self.array, self.place, self.old = array, place, old

    def __dlpack_device__(self):
        return self.place

    def __dlpack__(self, **given):
        if self.old and given:
            raise TypeError("an exporter of before")
        return self.array.__dlpack__(**given)


# DLPack


@pytest.mark.parametrize("old", [False, True])
def test_a_tensor_is_the_same_bytes(rng, old):
    arrays = (
        normal(rng, 3, 5),
        normal(rng, 6, 8)[::2, 1::3],
        normal(rng, 3, 5).T,
        np.array(3),
        np.arange(4) > 1,
        np.zeros((0, 2)),
    )
    for array in arrays:
        for writable in (False, True):
            got = dlpack.array(Foreign(array, old=old), writable)
            np.testing.assert_array_equal(got, array)
            assert got.dtype == array.dtype and got.shape == array.shape
            if array.size:
                assert got.strides == array.strides and np.shares_memory(got, array)
                assert got.flags.writeable or not writable


def test_a_tensor_lives_as_long_as_an_array_of_its_bytes(rng):
    array = normal(rng, 8)
    gone = weakref.ref(array)
    got = dlpack.array(Foreign(array))[2:]
    del array
    gc.collect()
    assert gone() is not None
    got = got.copy()
    gc.collect()
    assert gone() is None and got.shape == (6,)


def test_what_may_not_be_written_is_told(rng):
    array = normal(rng, 4)
    array.flags.writeable = False
    with pytest.raises(BufferError, match="read-only"):
        dlpack.array(Foreign(array), writable=True)


def test_torch_has_element_types_that_numpy_has_not():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6, dtype=torch.bfloat16)[1:]
    got = dlpack.array(tensor)
    assert got.dtype == ml_dtypes.bfloat16 and got.ctypes.data == tensor.data_ptr()
    np.testing.assert_array_equal(got.astype(np.float32), [1, 2, 3, 4, 5])


# Where the processor computes


@pytest.fixture(params=["CPU.HOST", "CPU", pytest.param(opencl_runtime.NAME, marks=needs_opencl, id="OpenCL")])
def compiled(request):
    return Core().compile_model(model(TWO), request.param)


def test_tensors_of_others_and_arrays_may_be_mixed(rng, compiled):
    x, z = normal(rng, 3, 4), normal(rng, 3, 4)
    for given in ({"x": Foreign(x), "z": z}, [Foreign(x), Foreign(z)], {"x": x.tolist(), "z": Foreign(z, (3, 0))}):
        got = compiled(given)
        for name, want in expected(x, z).items():
            assert type(got[name]) is np.ndarray
            near(got[name], want)


def test_a_tensor_with_gaps_is_read_right(rng, compiled):
    x, z = normal(rng, 6, 8)[::2, 1::2], normal(rng, 3, 4)
    near(compiled({"x": Foreign(x), "z": z})["y"], expected(x, z)["y"])


def test_remote_results_are_the_callers(rng, compiled):
    x, z = normal(rng, 3, 4), normal(rng, 3, 4)
    request = compiled.create_infer_request()
    first = request.infer({"x": x, "z": z}, remote=True)
    assert all(isinstance(t, RemoteTensor) and t.shape == (3, 4) and t.dtype == np.float32 for t in first.values())
    shared = np.from_dlpack(first["y"])
    second = request.infer({"x": first["y"], "z": first["w"]}, remote=True)  # one request's results are its own inputs
    near(shared, expected(x, z)["y"])
    near(second["y"].numpy(), expected(*expected(x, z).values())["y"])
    near(np.asarray(second["w"], np.float64), expected(*expected(x, z).values())["w"])
    assert not np.shares_memory(shared, np.from_dlpack(second["y"])) and first["y"].nbytes == 48
    assert np.shares_memory(np.from_dlpack(first["y"]), shared)
    assert repr(first["y"]) == f"<RemoteTensor float32[3, 4] on {compiled.env.device.name}>"
    with pytest.raises(ValueError, match="copied"):
        np.asarray(first["y"], copy=False)


def test_outputs_are_written_where_the_caller_says(rng, compiled):
    x, z = normal(rng, 5, 4), normal(rng, 5, 4)
    mine, other = compiled.context.empty((5, 4), "float32"), np.full((5, 8), 7, np.float32)
    given = {"y": mine, "w": Foreign(other[:, ::2])}
    got = compiled({"x": Foreign(x), "z": z}, outputs=given)
    assert got["y"] is mine and got["w"] is given["w"]
    near(mine.numpy(), expected(x, z)["y"])
    near(other[:, ::2], expected(x, z)["w"])
    assert (other[:, 1::2] == 7).all()
    only = compiled({"x": x, "z": z}, outputs={"w": other[:, :4].copy()})
    assert type(only["y"]) is np.ndarray and type(only["w"]) is np.ndarray


def test_an_output_may_be_the_memory_of_an_input(rng, compiled):
    x, z = normal(rng, 64, 4), normal(rng, 64, 4)
    y = compiled.context.empty((64, 4), np.float32)
    np.from_dlpack(y)[:] = x
    got = compiled({"x": y, "z": z}, outputs={"y": y}, remote=True)
    near(y.numpy(), expected(x, z)["y"])
    near(got["w"].numpy(), expected(x, z)["w"])


def test_outputs_that_are_inputs_or_constants_or_one_another(rng):
    proto = model(
        """g (float[2, 4] x) => (float[2, 4] a, float[2, 4] b, float[2, 4] c, float[8] d, float[3] k)
           { a = Identity(x) b = Relu(x) c = Identity(b) s = Constant<value = int64[1] {-1}>() d = Reshape(b, s)
             k = Constant<value = float[3] {1, 2, 3}>() }"""
    )
    mine = Core().compile_model(proto)
    x = normal(rng, 2, 4)
    want = mine({"x": x})
    names = list(want)
    into = {name: mine.context.empty(value.shape, value.dtype) for name, value in want.items()}
    for got in (mine({"x": x}, remote=True), mine({"x": x}, outputs=into)):
        arrays = [np.from_dlpack(got[name]) for name in names]
        for i, array in enumerate(arrays):
            np.testing.assert_array_equal(array, want[names[i]])
            assert not any(np.shares_memory(array, other) for other in [x, *arrays[:i], *arrays[i + 1 :]])


def test_what_is_known_late_and_what_is_no_tensor(rng):
    """Behind NonZero the plan is cut: outputs of both parts; a list stays with the host."""
    proto = model(
        """g (float[6] x, float[6, 4] table, float[4, 3] w) => (float[k, 3] y, float[6] r, seq(float[?]) s)
           { r = Relu(x) p = NonZero(r) z = Constant<value = int64[1] {0}>() i = Squeeze(p, z) t = Gather(table, i)
             u = Tanh(t) y = MatMul(u, w) s = SequenceConstruct(r) }"""
    )
    mine = Core().compile_model(proto)
    given = {"x": np.array([1, -1, 2, 0, 3, -2], np.float32), "table": normal(rng, 6, 4), "w": normal(rng, 4, 3)}
    want = mine(given)
    got = mine({name: Foreign(array) for name, array in given.items()}, remote=True)
    assert type(got["s"]) is list
    near(got["y"].numpy(), want["y"])
    near(got["r"].numpy(), want["r"])
    y = mine.context.empty((3, 3), "float32")
    mine(given, outputs={"y": y})
    near(y.numpy(), want["y"])
    with pytest.raises(InputError, match=r"is float32\[3, 3\] for these inputs, not float32\[2, 3\]"):
        mine(given, outputs={"y": mine.context.empty((2, 3), "float32")})


def test_a_list_takes_tensors_of_others(rng):
    proto = model("g (seq(float[?, 2]) s) => (float[?, 2] y) { y = ConcatFromSequence<axis = 0>(s) }")
    a, b = normal(rng, 1, 2), normal(rng, 2, 2)
    np.testing.assert_array_equal(Core().compile_model(proto)({"s": [Foreign(a), b]})["y"], np.concatenate([a, b]))


def test_errors_name_the_tensor_and_what_is_wrong(rng, compiled):
    x, z = normal(rng, 3, 4), normal(rng, 3, 4)
    frozen = normal(rng, 3, 4)
    frozen.flags.writeable = False
    for given, text in [
        ({"x": Foreign(x.astype(np.float64)), "z": z}, r"input 'x': takes float32, not float64"),
        ({"x": Foreign(normal(rng, 3, 5)), "z": z}, r"input 'x': takes float32\[n,4\], not shape \[3, 5\]"),
        ({"x": Foreign(normal(rng, 2, 4)), "z": Foreign(z)}, r"input 'z': has n = 3, but input 'x' has n = 2"),
        ({"x": Foreign(x, (2, 1)), "z": z}, r"input 'x': is in GPU.1's memory, which this device cannot reach"),
        ({"x": Foreign(x, (8, 0)), "z": z}, r"input 'x': is in memory of a device that DLPack calls \(8, 0\)"),
    ]:
        with pytest.raises(InputError, match=text):
            compiled(given)
    for given, text in [
        ({"q": x}, "there is no output 'q' .*the outputs are y, w"),
        ({"y": 3}, "output 'y': int is no tensor that can be written to"),
        ({"y": normal(rng, 3, 5)}, r"output 'y': is float32\[n,4\], not float32\[3, 5\]"),
        ({"y": np.zeros((3, 4))}, r"output 'y': is float32\[n,4\], not float64\[3, 4\]"),
        ({"y": normal(rng, 2, 4)}, r"output 'y': is float32\[3, 4\] for these inputs, not float32\[2, 4\]"),
        ({"y": frozen}, "output 'y': is read-only"),
        ({"y": Foreign(frozen)}, "output 'y': cannot be shared through DLPack: it is read-only"),
    ]:
        with pytest.raises(InputError, match=text):
            compiled({"x": x, "z": z}, outputs=given)
    near(compiled({"x": x, "z": z})["y"], expected(x, z)["y"])


def test_memory_for_tensors(rng, compiled):
    context = compiled.context
    assert isinstance(context, RemoteContext) and repr(context).startswith("<RemoteContext of CPU")
    assert context.empty((2,), "bfloat16").dtype == ml_dtypes.bfloat16
    assert context.empty((), np.int64).numpy().shape == ()
    for shape, dtype in [((2,), "word"), ((2,), str), ((-1,), "float32")]:
        with pytest.raises(InputError):
            context.empty(shape, dtype)
    with pytest.raises(InputError, match="ndarray is no"):
        context.tensor(normal(rng, 3), (3,), "float32")


def test_a_processor_without_a_context_takes_none():
    with pytest.raises(DeviceError, match="takes no context"):
        Core().create_context("CPU.HOST", queue=object())
    assert Core().create_context("CPU.HOST").device is open_device("CPU.HOST")


def test_torch_tensors_are_read_and_written_in_place(compiled):
    torch = pytest.importorskip("torch")
    x, z, y = torch.randn(16, 4), torch.randn(16, 4), torch.zeros(16, 4)
    got = compiled({"x": x, "z": z}, outputs={"y": y}, remote=True)
    near(y.numpy(), expected(x.numpy(), z.numpy())["y"])
    there = torch.from_dlpack(got["w"])
    assert there.data_ptr() == np.from_dlpack(got["w"]).ctypes.data
    with pytest.raises(InputError, match=r"input 'x': cannot be shared.*detach"):
        compiled({"x": x.requires_grad_(), "z": z})


# A caller's OpenCL


class Theirs:
    """A caller's context, queue and kernel."""

    def __init__(self, shares_memory):
        import pyopencl as cl

        self.cl, device = cl, open_device(opencl_runtime.NAME)
        self.context = cl.Context([device.raw])
        self.queue = cl.CommandQueue(self.context)
        self.core = Core()
        if shares_memory:
            self.remote = self.core.create_context(opencl_runtime.NAME, context=self.context, queue=self.queue)
        else:
            device = opencl_runtime.device(shares_memory=False)
            self.remote = RemoteContext(device.lent(self.context, self.queue))
        text = "kernel void fill(global float* x, float v) { x[get_global_id(0)] = v + get_global_id(0); }"
        with quietly():  # Intel's compiler always says something
            self.program = cl.Program(self.context, text).build()

    def buffer(self, shape, flags=None):
        size = 4 * int(np.prod(shape))
        return self.cl.Buffer(self.context, flags or self.cl.mem_flags.READ_WRITE, size=size)

    def fill(self, memory, count, value):
        """Enqueued, not waited for."""
        kernel = self.cl.Kernel(self.program, "fill")
        kernel(self.queue, (count,), None, memory, np.float32(value))

    def read(self, buffer, shape):
        array = np.empty(shape, np.float32)
        self.cl.enqueue_copy(self.queue, array, buffer)
        return array


@pytest.fixture(params=[True, False], ids=["shared", "own memory"])
def theirs(request):
    if not opencl_runtime.NAME:
        pytest.skip(opencl_runtime.WHY_NOT)
    return Theirs(request.param)


def test_buffers_and_a_queue_of_a_caller(theirs):
    mine = theirs.core.compile_model(model(TWO), theirs.remote)
    xb, yb, zb = (theirs.buffer((8, 4)) for _ in range(3))
    x, y = (theirs.remote.tensor(b, (8, 4), np.float32) for b in (xb, yb))
    ramp = np.arange(32, dtype=np.float32).reshape(8, 4)
    for turn in range(3):
        theirs.fill(xb, 32, turn - 16)  # it may still run: the queue is in order
        theirs.fill(zb, 32, 10 * turn)
        got = mine({"x": x, "z": theirs.remote.tensor(zb, (8, 4), "float32")}, outputs={"y": y}, remote=True)
        want = expected(ramp + turn - 16, ramp + 10 * turn)
        assert got["y"] is y
        near(theirs.read(yb, (8, 4)), want["y"])
        near(got["w"].numpy(), want["w"])
        host = mine({"x": x, "z": ramp})  # mixed with the host's, both ways
        near(host["y"], expected(ramp + turn - 16, ramp)["y"])
    near(y.numpy(), want["y"])
    here = np.empty((8, 4), np.float32)
    assert mine({"x": x, "z": ramp}, outputs={"y": here}, remote=True)["y"] is here
    near(here, expected(ramp - 14, ramp)["y"])


def test_threads_take_one_buffer_and_write_others(rng, theirs):
    mine = theirs.core.compile_model(model(TWO), theirs.remote)
    shape = (64, 4)
    xb, z = theirs.buffer(shape), normal(rng, *shape)
    theirs.fill(xb, 256, -128)
    want = expected(np.arange(-128, 128, dtype=np.float32).reshape(shape), z)
    failures = []

    def work():
        try:
            x = theirs.remote.tensor(xb, shape, "float32")
            for _ in range(25):
                y = theirs.remote.tensor(theirs.buffer(shape), shape, "float32")
                got = mine({"x": x, "z": z}, outputs={"y": y}, remote=True)
                near(got["w"].numpy(), want["w"])
                near(y.numpy(), want["y"])
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert not interop._MAPPED


def test_a_buffer_that_is_input_and_output(rng, theirs):
    mine = theirs.core.compile_model(model(TWO), theirs.remote)
    buffer, z = theirs.buffer((8, 4)), normal(rng, 8, 4)
    tensor = theirs.remote.tensor(buffer, (8, 4), "float32")
    theirs.fill(buffer, 32, -16)
    mine({"x": tensor, "z": tensor}, outputs={"y": tensor})
    ramp = np.arange(-16, 16, dtype=np.float32).reshape(8, 4)
    near(theirs.read(buffer, (8, 4)), expected(ramp, ramp)["y"])
    host = theirs.buffer((8, 4), theirs.cl.mem_flags.READ_WRITE | theirs.cl.mem_flags.HOST_READ_ONLY)
    fixed = theirs.remote.tensor(host, (8, 4), "float32")
    theirs.fill(host, 32, 0)
    near(mine({"x": fixed, "z": z})["y"], expected(ramp + 16, z)["y"])
    if theirs.remote.device.shares_memory:
        with pytest.raises(InputError, match="output 'y': is a Buffer that the host may only read"):
            mine({"x": z, "z": z}, outputs={"y": fixed})
    assert not interop._MAPPED


def test_shared_virtual_memory_of_a_caller(rng, theirs):
    cl = theirs.cl
    mine = theirs.core.compile_model(model(TWO), theirs.remote)
    memory = [cl.SVMAllocation(theirs.context, 128, 64, cl.svm_mem_flags.READ_WRITE) for _ in range(2)]
    x, y = (theirs.remote.tensor(m, (8, 4), "float32") for m in memory)
    z = normal(rng, 8, 4)
    theirs.fill(memory[0], 32, -16)
    mine({"x": x, "z": z}, outputs={"y": y})
    want = expected(np.arange(32, dtype=np.float32).reshape(8, 4) - 16, z)["y"]
    near(y.numpy(), want)
    array = cl.csvm_empty(theirs.context, (8, 4), np.float32)
    near(mine({"x": y, "z": z}, outputs={"y": theirs.remote.tensor(cl.SVM(array), (8, 4), "float32")})["w"],
         expected(want, z)["w"])  # fmt: skip


@needs_opencl
def test_a_buffer_is_not_copied_where_memory_is_shared(monkeypatch):
    theirs = Theirs(True)
    mine = theirs.core.compile_model(model(TWO), theirs.remote)
    buffers = [theirs.buffer((64, 4)) for _ in range(3)]
    tensors = [theirs.remote.tensor(b, (64, 4), "float32") for b in buffers]
    request = mine.create_infer_request()
    seen, storages = [], Stay.storages

    def spy(stay, plan, inputs, *sizes):
        found = storages(stay, plan, inputs, *sizes)
        seen.append([*inputs, *found.values()])
        return found

    monkeypatch.setattr(Stay, "storages", spy)
    for b in buffers:
        theirs.fill(b, 256, 0)
    request.infer({"x": tensors[0], "z": tensors[1]}, outputs={"y": tensors[2]})
    theirs.queue.finish()
    there = []
    for b in buffers:
        array, _ = theirs.cl.enqueue_map_buffer(theirs.queue, b, theirs.cl.map_flags.READ, 0, (1,), np.uint8)
        there.append(array.ctypes.data)
        array.base.release(theirs.queue)
    assert [array.ctypes.data for array in seen[0]] == there


def test_two_models_share_memory(rng, theirs):
    """What one makes the other takes, where it is."""
    first = theirs.core.compile_model(model(TWO), theirs.remote)
    second = theirs.core.compile_model(model("g (float[n, 4] v) => (float[n] s) { s = ReduceSum<keepdims = 0>(v, a) }"
                                             .replace("{ s", "{ a = Constant<value = int64[1] {1}>() s")),
                                       theirs.remote)  # fmt: skip
    x, z = normal(rng, 9, 4), normal(rng, 9, 4)
    middle = first({"x": x, "z": z}, remote=True)["y"]
    got = second({"v": middle}, remote=True)["s"]
    near(got.numpy(), expected(x, z)["y"].sum(1))
    near(second([middle])["s"], expected(x, z)["y"].sum(1))
    if not theirs.remote.device.shares_memory:
        with pytest.raises(BufferError, match="DLPack has no tensors"):
            np.from_dlpack(middle)
        stranger = SingleDevice(Theirs(False).remote.device).compile(Core().read_model(model(TWO)), Settings.make())
        with pytest.raises(InputError, match="input 'x': is in another context's memory"):
            stranger({"x": middle, "z": z})


def test_detours_and_late_kernels_take_buffers(rng, theirs):
    """Det has no kernel: the host computes it. NonZero's result is not planned."""
    proto = model(
        """g (float[n, 4, 4] x, float[n] z) => (float[n] y, int64[1, k] places, float[n] d, float[n, 4, 4] same)
        { a = Relu(x) b = Add(a, x) d = Det(x) e = Add(d, z) f = Tanh(e) g = Sub(f, d) y = Mul(g, z)
          places = NonZero(y) same = Identity(x) }"""
    )
    mine = theirs.core.compile_model(proto, theirs.remote)
    x, z = normal(rng, 3, 4, 4), normal(rng, 3)
    want = Core().compile_model(proto, "CPU.HOST")({"x": x, "z": z})
    xb, zb = theirs.buffer(x.shape), theirs.buffer(z.shape)
    theirs.cl.enqueue_copy(theirs.queue, xb, x)
    theirs.cl.enqueue_copy(theirs.queue, zb, z)
    given = {"x": theirs.remote.tensor(xb, x.shape, "float32"), "z": theirs.remote.tensor(zb, z.shape, "float32")}
    for got in (mine(given), mine(given, remote=True)):
        for name, array in want.items():
            near(np.asarray(got[name]), array)


def test_what_a_caller_may_get_wrong(rng, theirs):
    cl, remote, core = theirs.cl, theirs.remote, theirs.core
    mine = core.compile_model(model(TWO), remote)
    z = normal(rng, 8, 4)
    with pytest.raises(InputError, match="the memory has 64 bytes, the tensor 128"):
        remote.tensor(theirs.buffer((4, 4)), (8, 4), "float32")
    with pytest.raises(InputError, match="ndarray is not a Buffer or SVM"):
        remote.tensor(z, (8, 4), "float32")
    constant = theirs.buffer((8, 4), cl.mem_flags.READ_ONLY)
    with pytest.raises(InputError, match="output 'y': is a Buffer that may only be read"):
        mine({"x": z, "z": z}, outputs={"y": remote.tensor(constant, (8, 4), "float32")})
    theirs.cl.enqueue_copy(theirs.queue, constant, z)
    near(mine({"x": remote.tensor(constant, (8, 4), "float32"), "z": z})["y"], expected(z, z)["y"])
    with pytest.raises(InputError, match="input 'x': takes float32, not int32"):
        mine({"x": remote.tensor(constant, (8, 4), "int32"), "z": z})
    with pytest.raises(DeviceError, match="no CommandQueue"):
        core.create_context(opencl_runtime.NAME, context=theirs.context, queue=3)
    with pytest.raises(DeviceError, match="no Context"):
        core.create_context(opencl_runtime.NAME, context=3)
    with pytest.raises(DeviceError, match="not of that context"):
        other = cl.Context(theirs.context.devices)
        core.create_context(opencl_runtime.NAME, context=theirs.context, queue=cl.CommandQueue(other))
    how = cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE
    try:
        unordered = cl.CommandQueue(theirs.context, properties=how)
    except cl.Error:
        return
    with pytest.raises(DeviceError, match="out of order"):
        core.create_context(opencl_runtime.NAME, queue=unordered)


def test_a_buffer_of_another_context(rng, theirs):
    """Where memory is shared, whose it is makes no difference; else it cannot be reached."""
    mine = theirs.core.compile_model(model(TWO), theirs.remote)
    other = Theirs(True)
    x, z = normal(rng, 8, 4), normal(rng, 8, 4)
    buffer = other.buffer((8, 4))
    other.cl.enqueue_copy(other.queue, buffer, x)
    other.queue.finish()
    tensor = theirs.remote.tensor(buffer, (8, 4), "float32")
    if theirs.remote.device.shares_memory:
        near(mine({"x": tensor, "z": z})["y"], expected(x, z)["y"])
    else:
        with pytest.raises(InputError, match="input 'x': is a Buffer of another context"):
            mine({"x": tensor, "z": z})


def test_empty_tensors_of_a_caller(theirs):
    mine = theirs.core.compile_model(model(TWO), theirs.remote)
    x = theirs.remote.tensor(theirs.buffer((2, 4)), (0, 4), "float32")
    got = mine({"x": x, "z": np.zeros((0, 4), np.float32)}, remote=True)
    assert got["y"].numpy().shape == (0, 4) and x.numpy().shape == (0, 4)


def test_a_failed_request_gives_buffers_back(rng, theirs):
    """What was mapped is not mapped any more: the caller may use it, and so may the next request."""
    mine = theirs.core.compile_model(model(TWO), theirs.remote)
    buffer = theirs.buffer((8, 4))
    x = theirs.remote.tensor(buffer, (8, 4), "float32")
    with pytest.raises(InputError, match="input 'z'"):
        mine({"x": x, "z": np.zeros(3)})
    theirs.fill(buffer, 32, 1)
    z = normal(rng, 8, 4)
    near(mine({"x": x, "z": z})["y"], expected(1 + np.arange(32, dtype=np.float32).reshape(8, 4), z)["y"])


@needs_opencl
def test_a_callers_context_has_all_its_threads(rng, caplog):
    core = Core({"CPU_THREADS_NUM": "1"})
    open_device(opencl_runtime.NAME)._told_threads = False  # it is told once
    theirs = Theirs(True)
    remote = core.create_context(opencl_runtime.NAME, context=theirs.context)
    mine = core.compile_model(model(TWO), remote)
    assert remote.device.context == theirs.context and remote.device.target.units == remote.device.raw.max_compute_units
    assert ["CPU_THREADS_NUM changes nothing" in r.message for r in caplog.records] == [True] * (cpu_count() > 1)
    x, z = normal(rng, 3, 4), normal(rng, 3, 4)
    near(mine({"x": x, "z": z})["y"], expected(x, z)["y"])


def test_names_are_public():
    assert {"RemoteContext", "RemoteTensor"} <= set(tunewright.__all__)


PAGE = Path(__file__).parents[3] / "docs" / "remote-tensors.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.skipif(opencl_runtime.NAME != "CPU.INTEL", reason="the page's runtime is not here")
def test_the_examples_of_the_page_run(rng, tmp_path):
    """Those that need no GPU."""
    here = [text for text in EXAMPLES if "torch.cuda" not in text]
    assert len(here) == 3 and len(EXAMPLES) == 4
    body = model(
        """g (float[1, 3, 32, 32] x) => (float[1, 10] y)
           { s = Constant<value = int64[2] {1, 3072}>() a = Reshape(x, s) y = MatMul(a, w) }"""
    )
    body.graph.initializer.append(numpy_helper.from_array(normal(rng, 3072, 10), "w"))
    onnx.save(body, tmp_path / "model.onnx")
    onnx.save(model("g (float[1, 10] y) => (int64[1] best) { best = ArgMax<axis = 1, keepdims = 0>(y) }"),
              tmp_path / "head.onnx")  # fmt: skip
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TUNEWRIGHT_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", "\n".join(here)], check=True, cwd=tmp_path, env=env)
