"""Many inferences in flight: a queue starts them as requests become free, and calls back with each result."""

import threading

import numpy as np
from onnx import TensorProto, helper, numpy_helper

import tunewright

rng = np.random.default_rng(0)
weights = rng.standard_normal((256, 256)).astype(np.float32)
graph = helper.make_graph(
    [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Relu", ["a"], ["y"])], "layer",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, [16, 256])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, [16, 256])],
    [numpy_helper.from_array(weights, "w")],
)  # fmt: skip
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

compiled = tunewright.Core().compile_model(model, "CPU", {"PERFORMANCE_HINT": "THROUGHPUT"})
queue = tunewright.AsyncInferQueue(compiled)
print(f"{compiled.streams.count} streams, {len(queue)} requests")

inputs = [rng.standard_normal((16, 256)).astype(np.float32) for _ in range(100)]
results = {}
lock = threading.Lock()


def done(request, number):
    """On a stream's thread. The results are the request's until it is started again, so take what you need."""
    with lock:
        results[number] = request.results["y"]


queue.set_callback(done)
for number, values in enumerate(inputs):
    queue.start_async({"x": values}, userdata=number)  # waits while all requests are busy
queue.wait_all()  # raises the first error, if there was one

right = all(np.allclose(results[k], np.maximum(x @ weights, 0), rtol=1e-3, atol=1e-3) for k, x in enumerate(inputs))
print(f"{len(results)} results, {'all' if right else 'NOT all'} as numpy has them")
