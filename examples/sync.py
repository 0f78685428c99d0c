"""One inference after the other: the simplest way to use a model."""

import numpy as np
from onnx import TensorProto, helper, numpy_helper

import tunewright


def network():
    """A small classifier of pictures with random weights; a file's name would do as well."""
    rng = np.random.default_rng(0)
    weights = {"w": (8, 3, 3, 3), "b": (8,), "v": (8, 10), "c": (10,)}
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "v", "c"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 64, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 10])],
        [numpy_helper.from_array(rng.standard_normal(s).astype(np.float32), n) for n, s in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


core = tunewright.Core()
compiled = core.compile_model(network(), "CPU")
print(compiled)

# A compiled model can be called; results are arrays by the names of outputs.
picture = np.random.default_rng(1).random((1, 3, 64, 64), np.float32)
scores = compiled({"x": picture})["y"]
print("best class of one picture:", int(scores.argmax()))

# A request has memory of its own. Its input tensor is filled in place, and nothing is copied on a processor.
request = compiled.create_infer_request()
frame = request.get_tensor("x")
for number in range(3):
    frame[:] = np.random.default_rng(number).random(frame.shape)
    scores = request.infer()["y"]
    print(f"picture {number}: class {int(scores.argmax())}, {request.get_totals().seconds * 1e6:.0f} us")
