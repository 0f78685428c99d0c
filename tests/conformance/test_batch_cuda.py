"""Requests that run together on a CUDA device, as ALLOW_AUTO_BATCHING does it: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

from conformance import interpreter as interpreter

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from tunewright import AsyncInferQueue, Core
from tunewright.devices.base import address
from tunewright.devices.cuda.device import CudaDevice, CudaQueue
from tunewright.ir.types import TensorType
from tunewright.plugins import single
from tunewright.plugins.batching import batch_tune, streams
from tunewright.runtime.requests.request import DeviceModel
from tunewright.runtime.several.batch import BatchModel

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
COUNT = 10


def network() -> Any:
    """A convolution, a pooling and a product: what a picture's network has."""
    rng = np.random.default_rng(0)
    weights = {"w": (8, 3, 3, 3), "b": (8,), "d": (8, 5)}
    arrays = {name: (rng.standard_normal(shape) / 3).astype(np.float32) for name, shape in weights.items()}
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "d"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(n, 1, s) for n, s in (("x", ["n", 3, 8, 8]), ("y", ["n", 5]))]
    constants = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture
def core(device, monkeypatch, tmp_path):
    monkeypatch.setattr(single, "available", lambda: ({"GPU.0": CudaDevice}, {}))
    monkeypatch.setattr(single, "serving", {"GPU.0": CudaDevice}.get)
    monkeypatch.setattr(single, "_opened", lambda key: device)
    return Core({"USER_DB_PATH": str(tmp_path / "kb"), "PERFORMANCE_HINT": "THROUGHPUT"})


def served(model: Any, feeds: list[Any]) -> list[Any]:
    queue, got = AsyncInferQueue(model), {}
    queue.set_callback(lambda request, number: got.update({number: request.results["y"]}))
    for number, feed in enumerate(feeds):
        queue.start_async({"x": feed}, number)
    queue.wait_all()
    return [got[number] for number in range(len(feeds))]


def test_requests_run_together_by_default(core, monkeypatch):
    staged, real = set(), CudaQueue._staging
    monkeypatch.setattr(CudaQueue, "_staging", lambda self, array: (staged.add(array.shape), real(self, array))[1])
    rng = np.random.default_rng(1)
    feeds = [rng.standard_normal((1, 3, 8, 8)).astype(np.float32) for _ in range(COUNT)]
    alone = core.compile_model(network(), "GPU.0", {"ALLOW_AUTO_BATCHING": "NO"})
    assert isinstance(alone, DeviceModel)
    want = [alone({"x": feed})["y"] for feed in feeds]
    together = core.compile_model(network(), "GPU.0", {"NUM_STREAMS": 1})  # the interpreter has one thread
    assert isinstance(together, BatchModel) and together.size == together.optimal_requests == 8
    for got, expected in zip(served(together, feeds), want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-2, atol=1e-3)
    assert together._batches and not together.refused
    assert (1, 3, 8, 8) in staged and (8, 3, 8, 8) not in staged, "examples are put together where they are read"


def test_memory_that_is_read_where_it_is(device):
    """Batches are put together where the device takes them from; others go through memory in between."""
    made = device.host_memory(48)
    begin, queue = address(made), device.queue()
    pinned = np.ndarray((3, 4), np.float32, made)
    there = device.new(TensorType.of(pinned))
    for number, array in enumerate((pinned, np.zeros((3, 4), np.float32), pinned[::-1], pinned)):
        array[...] = np.arange(12).reshape(3, 4) + number
        queue.put(array, there)
        [got] = queue.fetch([there])
        np.testing.assert_array_equal(got, array)
    assert begin in device.pinned
    del made, pinned, array
    gc.collect()
    assert begin not in device.pinned


def test_the_batch_is_measured(core, monkeypatch):
    """All of it but the time: in an interpreter that says nothing, so it is made up."""
    tried = []

    def measure(models, inputs, seconds):
        for point, model in models.items():
            tried.append(point.name)
            served(model, [inputs["x"]] * point.batch)
        return {point: [float(min(point.batch, 4))] * 4 for point in models}

    monkeypatch.setattr(streams, "measure", measure)
    monkeypatch.setattr(streams, "doubt_of", lambda *_: "")  # a busy machine has it measured once more
    monkeypatch.setattr(streams, "GPU", (1,))
    monkeypatch.setattr(batch_tune, "MOST", 4)
    model = core.compile_model(network(), "GPU.0", {"NUM_STREAMS": "AUTO"})
    assert isinstance(model, BatchModel) and model.size == 4 and model.optimal_requests == 4
    assert tried == ["1x1", "1x2", "1x1", "1x2x2", "1x4x2", "1x2x2", "1x4x4", "1x8x4"]
    assert core.get_property("GPU.0", "OPTIMAL_BATCH_SIZE", {"MODEL_PTR": core.read_model(network())}) == 4
