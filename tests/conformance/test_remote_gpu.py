"""Remote tensors on a GPU: streams. Run it alone: other tests switch Triton to its interpreter, which has none."""

from __future__ import annotations

import os

import pytest
from onnx import parser

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter is on", allow_module_level=True)
pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import torch

from tunewright import Core
from tunewright.devices.cuda.device import CudaDevice
from tunewright.plugins.single import SingleDevice
from tunewright.settings import Settings


def model(text):
    return Core().read_model(parser.parse_model('<ir_version: 10, opset_import: ["" : 21]>\n' + text))


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    if os.environ.get("TRITON_INTERPRET") == "1":  # set by a module that was read later
        pytest.skip("Triton's interpreter is on")
    return CudaDevice("GPU.0")


def near(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-2 * float(want.abs().max()))


BIG = "g (float[n, 4096] x) => (float[n, 4096] y) { a = Tanh(x) b = MatMul(a, a) c = Tanh(b) y = MatMul(c, a) }"


@pytest.mark.parametrize("default", [True, False])
def test_the_callers_stream(gpu, default):
    """Nothing is waited for in between, and everything is in order: also what is overwritten behind the request."""
    stream = torch.cuda.default_stream() if default else torch.cuda.Stream()
    mine = SingleDevice(gpu.lent(None, stream)).compile(model(BIG), Settings.make({"INFERENCE_PRECISION_HINT": "F32"}))
    x = torch.empty(4096, 4096, device="cuda")
    with torch.cuda.stream(stream):
        for turn in range(5):
            x.normal_(generator=torch.Generator("cuda").manual_seed(turn)).mul_(1e-2)
            y = torch.from_dlpack(mine({"x": x}, remote=True)["y"])
            a = torch.tanh(x)
            want = torch.tanh(a @ a) @ a
            x.fill_(turn)  # while the request may still run
            near(y, want)


def test_a_reader_on_another_stream_waits(gpu):
    stream, reader = torch.cuda.Stream(), torch.cuda.Stream()
    mine = SingleDevice(gpu.lent(None, stream)).compile(model(BIG), Settings.make({"INFERENCE_PRECISION_HINT": "F32"}))
    with torch.cuda.stream(stream):
        x = torch.randn(4096, 4096, device="cuda") * 1e-2
    want = torch.from_dlpack(mine({"x": x}, remote=True)["y"]).clone()
    torch.cuda.synchronize()
    for _ in range(5):
        result = mine({"x": x}, remote=True)["y"]
        with torch.cuda.stream(reader):
            copy = torch.from_dlpack(result).clone()  # `from_dlpack` tells which stream reads
        del result
        reader.synchronize()
        assert torch.equal(copy, want)


def test_the_target_tells_every_version(gpu):
    software = dict(gpu.target.software)
    assert set(software) == {"torch", "triton", "cuda", "cudnn", "cublas", "driver"}
    assert "unknown" not in software.values() and gpu.memory_bytes and gpu.target.arch.startswith("sm_")


def test_a_request_with_a_stream_of_its_own_is_over_when_it_returns(gpu):
    mine = SingleDevice(gpu).compile(model(BIG), Settings.make({"INFERENCE_PRECISION_HINT": "F32"}))
    x = torch.randn(4096, 4096, device="cuda") * 1e-2
    for _ in range(3):
        x.mul_(1.1)  # on the current stream: the request's waits for it
        y = torch.from_dlpack(mine({"x": x}, remote=True)["y"])
        a = torch.tanh(x)
        near(y, torch.tanh(a @ a) @ a)


@pytest.mark.parametrize("config", [{"GPU_QUEUE_PRIORITY": "HIGH"}, {"GPU_QUEUE_THROTTLE": "LOW"}])
def test_hints_of_a_queue(gpu, config):
    mine = SingleDevice(gpu).compile(model(BIG), Settings.make(config))
    request = mine.create_infer_request()
    if "GPU_QUEUE_PRIORITY" in config:
        assert request.executor.queue.stream.priority < 0
    x = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(0)) * 1e-2
    a = torch.tanh(x)
    near(torch.from_numpy(request.infer({"x": x.numpy()})["y"]), torch.tanh(a @ a) @ a)
