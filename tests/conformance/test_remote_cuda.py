"""Remote tensors of CUDA devices, on the processor through Triton's interpreter; streams: test_remote_gpu.py."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from onnx import parser

from conformance import interpreter as interpreter

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import torch

from tunewright import Core, DeviceError, InputError, RemoteContext, RemoteTensor
from tunewright.devices.cuda import device as cuda
from tunewright.devices.cuda.device import CudaArray, _stream_handle
from tunewright.plugins.single import SingleDevice
from tunewright.settings import Settings

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(interpreter.ON_GPU, reason="its tensors are the processor's; test_remote_gpu.py has the GPU's"),
]
TWO = """g (float[n, 4] x, float[n, 4] z) => (float[n, 4] y, float[n, 4] w)
{ a = Tanh(x) y = Add(a, z) b = Mul(a, z) w = Relu(b) }"""


def model(text):
    return Core().read_model(parser.parse_model('<ir_version: 10, opset_import: ["" : 21]>\n' + text))


def expected(x, z):
    return {"y": torch.tanh(x) + z, "w": torch.relu(torch.tanh(x) * z)}


def near(got, want):
    torch.testing.assert_close(torch.as_tensor(got), want, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def compiled(device):
    return SingleDevice(device).compile(model(TWO), Settings.make({"INFERENCE_PRECISION_HINT": "F32"}))


def test_tensors_of_the_device_are_inputs_and_results(compiled):
    x, z = torch.randn(3, 4), torch.randn(3, 4)
    request = compiled.create_infer_request()
    want = expected(x, z)
    for given in ({"x": x, "z": z}, {"x": x, "z": z.numpy()}, [x.t().contiguous().t(), z]):
        got = request.infer(given, remote=True)
        for name, tensor in got.items():
            assert isinstance(tensor, RemoteTensor) and isinstance(tensor.memory, CudaArray)
            there = torch.from_dlpack(tensor)
            assert there.data_ptr() == tensor.memory.tensor.data_ptr()
            near(there, want[name])
    host = request.infer({"x": x, "z": z})
    assert all(type(array) is np.ndarray for array in host.values())
    near(host["y"], want["y"])


def test_results_stay_as_they_are_when_the_request_goes_on(compiled):
    x, z = torch.randn(3, 4), torch.randn(3, 4)
    request = compiled.create_infer_request()
    first = torch.from_dlpack(request.infer({"x": x, "z": z}, remote=True)["y"])
    request.infer({"x": x + 1, "z": z}, remote=True)
    near(first, expected(x, z)["y"])
    x += 1  # the inputs are the caller's again, too
    near(first, expected(x - 1, z)["y"])


def test_outputs_are_written_where_the_caller_says(compiled):
    x, z, y = torch.randn(5, 4), torch.randn(5, 4), torch.zeros(5, 4)
    w = compiled.context.empty((5, 4), torch.float32)
    got = compiled({"x": x, "z": z}, outputs={"y": y, "w": w})
    assert got["y"] is y and got["w"] is w
    near(y, expected(x, z)["y"])
    near(torch.from_dlpack(w), expected(x, z)["w"])
    only = compiled({"x": x, "z": z}, outputs={"y": y})
    assert type(only["w"]) is np.ndarray
    near(only["w"], expected(x, z)["w"])
    compiled({"x": y, "z": z}, outputs={"y": y})  # in place
    near(y, expected(expected(x, z)["y"], z)["y"])


def test_two_models_share_memory(device, compiled):
    text = "g (float[n, 4] v) => (float[n, 4] u) { u = Softmax<axis = 1>(v) }"
    second = SingleDevice(device).compile(model(text), Settings.make({"INFERENCE_PRECISION_HINT": "F32"}))
    x, z = torch.randn(7, 4), torch.randn(7, 4)
    middle = compiled({"x": x, "z": z}, remote=True)["y"]
    near(torch.from_dlpack(second([middle], remote=True)["u"]), torch.softmax(expected(x, z)["y"], 1))


def test_half_floats_and_host_steps(device):
    """Det has no kernel, and NonZero's result no place."""
    proto = model(
        """g (float[n, 4, 4] x, float16[n] h) => (float[n] d, int64[1, k] p, float[n, 4, 4] same, float16[n] q)
           { a = Relu(x) d = Det(x) p = NonZero(d) same = Identity(x) q = Relu(h) }"""
    )
    mine = SingleDevice(device).compile(proto, Settings.make({"INFERENCE_PRECISION_HINT": "F32"}))
    x, h = torch.randn(3, 4, 4), torch.randn(3, dtype=torch.float16)
    got = mine({"x": x, "h": h}, remote=True)
    near(torch.from_dlpack(got["q"]), torch.relu(h))
    near(torch.from_dlpack(got["same"]), x)
    assert torch.from_dlpack(got["same"]).data_ptr() != x.data_ptr()
    torch.testing.assert_close(torch.from_dlpack(got["d"]), torch.det(x), rtol=1e-4, atol=1e-5)
    assert got["p"].numpy().tolist() == [[0, 1, 2]]


def test_every_element_type_that_torch_holds(device):
    for dtype in (torch.float64, torch.bfloat16, torch.bool, torch.uint8, torch.int64, torch.int32):
        name = {"float64": "double"}.get(str(dtype)[6:], str(dtype)[6:])
        mine = SingleDevice(device).compile(model(f"g ({name}[n, 2] x) => ({name}[n, 2] y) {{ y = Identity(x) }}"),
                                            Settings.make())  # fmt: skip
        x = torch.tensor([[1, 0], [3, 1]]).to(dtype)
        assert torch.equal(torch.from_dlpack(mine([x], remote=True)["y"]), x)


@pytest.mark.parametrize(("name", "code"), [("float8e4m3fn", 17), ("int4", 22)])
def test_types_that_only_the_host_computes(device, name, code):
    text = f"g (float[n] x) => ({name}[n] y, {name}[n] z) {{ y = Cast<to = {code}>(x) z = Identity(y) }}"
    mine = SingleDevice(device).compile(model(text), Settings.make())
    got = mine([torch.tensor([2.0, -3.0])], remote=True)
    again = mine.create_infer_request().infer([torch.tensor([1.0, 1.0])], remote=True)
    assert all(t.numpy().astype(np.float32).tolist() == [2, -3] for t in got.values())
    assert all(t.numpy().astype(np.float32).tolist() == [1, 1] for t in again.values())


class Elsewhere:
    """A tensor that says where it is."""

    def __init__(self, place):
        self.place = place

    def __dlpack_device__(self):
        return self.place

    def __dlpack__(self, **given):
        raise AssertionError("nobody should ask for it")


def test_errors_name_the_tensor_and_what_is_wrong(compiled):
    x = torch.randn(3, 4)
    for given, text in [
        ({"x": x.double(), "z": x}, "input 'x': takes float32, not float64"),
        ({"x": torch.randn(3, 5), "z": x}, r"input 'x': takes float32\[n,4\], not shape \[3, 5\]"),
        ({"x": Elsewhere((2, 3)), "z": x}, "input 'x': is in GPU.3's memory, the model is on GPU.0"),
        ({"x": Elsewhere((7, 0)), "z": x}, r"input 'x': is in memory of a device that DLPack calls \(7, 0\)"),
        ({"x": x.to(torch.complex64), "z": x}, "input 'x': has elements of complex64, which no kernel takes"),
        ({"x": torch.randn(3, 4, requires_grad=True), "z": x}, "input 'x': cannot be shared through DLPack: .*detach"),
    ]:
        with pytest.raises(InputError, match=text):
            compiled(given)
    for given, text in [
        ({"y": torch.zeros(3, 8)[:, ::2]}, "output 'y': has gaps"),
        ({"y": torch.zeros(3, 4, dtype=torch.float16)}, r"output 'y': is float32\[n,4\], not float16\[3, 4\]"),
        ({"y": torch.zeros(2, 4)}, r"is float32\[3, 4\] for these inputs, not float32\[2, 4\]"),
    ]:
        with pytest.raises(InputError, match=text):
            compiled({"x": x, "z": x}, outputs=given)


def test_streams_of_several_libraries_are_one_number():
    assert _stream_handle(SimpleNamespace(cuda_stream=77)) == 77  # torch
    assert _stream_handle(SimpleNamespace(ptr=78)) == 78  # CuPy
    assert _stream_handle(SimpleNamespace(__cuda_stream__=lambda: (0, 79))) == 79  # cuda.core
    assert [_stream_handle(n) for n in (0, 1, 80)] == [0, 0, 80]  # 1 is DLPack's number of the default stream
    for wrong in (None, True, -1, "0"):
        with pytest.raises(DeviceError, match="no stream of CUDA"):
            _stream_handle(wrong)


def test_a_gpu_takes_a_stream_and_no_context(device):
    with pytest.raises(DeviceError, match="takes no context"):
        device.lent(object(), None)
    assert RemoteContext(device.lent(None, 0)).device is not device


def test_the_version_of_cublas_is_asked_from_the_library(monkeypatch):
    def ask(part, found):
        found._obj.value = (12, 8, 4)[part]
        return 0

    def load(name):
        assert name == "libcublas.so.12"
        return SimpleNamespace(cublasGetProperty=ask)

    assert cuda._cublas("99.0") == "unknown"  # there is no such library
    monkeypatch.setattr(cuda.ctypes, "CDLL", load)
    assert cuda._cublas("12.8") == "12.8.4"
