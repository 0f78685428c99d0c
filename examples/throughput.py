"""As many inferences per second as possible: how many streams that takes is measured once, and remembered."""

import logging
import time

import numpy as np
from onnx import TensorProto, helper, numpy_helper

import tunewright

logging.basicConfig(level=logging.INFO, format="  %(message)s")  # tells what is measured

rng = np.random.default_rng(0)
nodes, weights, last, channels = [], [], "x", 3
for layer in range(4):
    weights.append(numpy_helper.from_array(rng.standard_normal((32, channels, 3, 3)).astype(np.float32), f"w{layer}"))
    nodes.append(helper.make_node("Conv", [last, f"w{layer}"], [f"a{layer}"], pads=[1, 1, 1, 1]))
    nodes.append(helper.make_node("Relu", [f"a{layer}"], [f"r{layer}"]))
    last, channels = f"r{layer}", 32
nodes.append(helper.make_node("GlobalAveragePool", [last], ["y"]))
graph = helper.make_graph(
    nodes, "small",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 56, 56])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 32, 1, 1])],
    weights,
)  # fmt: skip
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
picture = {"x": rng.random((1, 3, 56, 56), np.float32)}

core = tunewright.Core()
for name, config in (
    ("one stream", {"PERFORMANCE_HINT": "LATENCY"}),
    ("a stream on each core", {"PERFORMANCE_HINT": "THROUGHPUT"}),
    ("as measured", {"NUM_STREAMS": "AUTO"}),
):
    compiled = core.compile_model(model, "CPU", config)
    queue = tunewright.AsyncInferQueue(compiled)
    for _ in queue:
        queue.start_async(picture)  # the first inference of a request makes its memory, the very first one compiles
    queue.wait_all()
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < 0.5:
        queue.start_async(picture)
        count += 1
    queue.wait_all()
    rate = count / (time.perf_counter() - begin)
    print(f"{name:22} {compiled.streams.count} streams, {len(queue)} requests: {rate:6.0f} inferences per second")
