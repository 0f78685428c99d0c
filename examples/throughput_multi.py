"""As many inferences per second as all devices together give: requests go to whichever is free.

CPU and CPU.HOST are two ways to run on one processor, so that this runs everywhere; with a GPU it is MULTI:GPU.0,CPU.
"""

import logging

import numpy as np
from onnx import TensorProto, helper, numpy_helper

import tunewright

logging.basicConfig(level=logging.INFO, format="  %(message)s")  # tells which device comes and goes

rng = np.random.default_rng(0)
w = rng.standard_normal((256, 256)).astype(np.float32)
graph = helper.make_graph(
    [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Relu", ["a"], ["y"])],
    "small",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 256])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 256])],
    [numpy_helper.from_array(w, "w")],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
inputs = [rng.standard_normal((1, 256)).astype(np.float32) for _ in range(300)]

core = tunewright.Core()
compiled = core.compile_model(model, "MULTI:CPU,CPU.HOST(2)")  # two requests at a time for the second
right = []


def over(request, number):
    """On one of the model's threads, for each inference once."""
    right.append(np.allclose(request.results["y"], np.maximum(inputs[number] @ w, 0), rtol=1e-3, atol=1e-3))


queue = tunewright.AsyncInferQueue(compiled)
queue.set_callback(over)
print(f"{len(queue)} requests keep {' and '.join(compiled.execution_devices)} busy")
for number, x in enumerate(inputs):
    queue.start_async({"x": x}, number)  # waits while all requests are busy
    if number == 200:  # devices may come and go at any time
        compiled.set_property({"MULTI_DEVICE_PRIORITIES": "CPU"})
queue.wait_all()
print(f"{sum(right)} right results, now from {', '.join(compiled.execution_devices)}")

# AUTO chooses: the best device that is ready, or all of them for this hint.
compiled = core.compile_model(model, "AUTO:CPU,CPU.HOST", {"PERFORMANCE_HINT": "CUMULATIVE_THROUGHPUT"})
y = compiled({"x": inputs[0]})["y"]
print(f"AUTO: {y.shape[1]} numbers from {max(compiled.served, key=lambda name: compiled.served[name])}")

# BATCH runs the requests of several as one inference, which pays on GPUs.
compiled = core.compile_model(model, "BATCH:CPU.HOST(8)")
queue, right = tunewright.AsyncInferQueue(compiled), []
queue.set_callback(over)
for number, x in enumerate(inputs):
    queue.start_async({"x": x}, number)
queue.wait_all()
print(f"BATCH: {sum(right)} right results, {len(queue)} requests at a time")
