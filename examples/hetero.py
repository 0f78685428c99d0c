"""One model on two devices: who runs which node, changing that by hand, and measuring what is best."""

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

import tunewright

rng = np.random.default_rng(0)
weights = [numpy_helper.from_array(rng.standard_normal((16, 3, 3, 3)).astype(np.float32) / 5, "w")]
nodes = [
    helper.make_node("Conv", ["x", "w"], ["features"], name="conv", pads=[1, 1, 1, 1]),
    helper.make_node("Relu", ["features"], ["active"], name="relu"),
    helper.make_node("ReduceMax", ["active"], ["peaks"], name="peaks", axes=[2, 3], keepdims=0),
    helper.make_node("NonZero", ["peaks"], ["found"], name="found"),
]
graph = helper.make_graph(
    nodes, "detector",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 32, 32])],
    [helper.make_tensor_value_info("found", TensorProto.INT64, [2, None])],
    weights,
)  # fmt: skip
proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
picture = {"x": rng.random((1, 3, 32, 32), np.float32)}

core = tunewright.Core()
model = core.read_model(proto)
# CPU.HOST stands for a second device here; with a GPU it is HETERO:GPU,CPU
devices = "HETERO:CPU,CPU.HOST"

# NonZero has no kernel on CPU: it falls back to the next device.
for name, support in core.query_model(model, devices).items():
    print(f"{name:6} runs on {support.device:8} by {support.solver}")
compiled = core.compile_model(model, devices)
found = compiled(picture)["found"]
print(f"{len(compiled.subgraphs)} subgraphs, placed by {compiled.origin}: {found.shape[1]} found")

# By hand: the same as a file, {"relu": "CPU.HOST"}, that the setting HETERO_AFFINITY names.
model.affinity = {"relu": "CPU.HOST", "peaks": "CPU"}
compiled = core.compile_model(model, devices, {"PERF_COUNT": "YES", "HETERO_DUMP_GRAPH_DOT": "YES"})
request = compiled.create_infer_request()
assert np.array_equal(request.infer(picture)["found"], found)
request.infer(picture)  # the first inference may compile kernels
for number, totals in enumerate(request.get_subgraph_totals()):
    print(f"subgraph {number} on {compiled.subgraphs[number].device:8} {totals.seconds * 1e6:6.0f} us")
print("drawn:", ", ".join(sorted(path.name for path in Path().glob("hetero_*.dot"))))

# Measured: candidates run in turns, and loads from now on use the fastest.
model.affinity = {}
best = core.place_model(model, picture, devices, budget=0.5).best
print(f"fastest: {best.name}, {(best.seconds or 0) * 1e6:.0f} us")
print("placed by", core.compile_model(model, devices).origin)
