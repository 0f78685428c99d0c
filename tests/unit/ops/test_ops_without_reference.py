"""Operators that onnx.reference lacks, against onnxruntime."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from tunewright import Core

ort = pytest.importorskip("onnxruntime")


@pytest.mark.parametrize(("pooled", "scale"), [([3, 4], 0.7), ([2, 2], 1.0), ([1, 5], 0.25)])
def test_max_roi_pool(pooled: list[int], scale: float) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 9, 11)).astype(np.float32)
    regions = np.asarray([[0, 1, 2, 7, 8], [1, 0.5, 3.5, 20, 30], [1, 3, 3, 3, 3], [0, -4, -4, 2, 2]], np.float32)
    node = helper.make_node("MaxRoiPool", ["x", "r"], ["y"], pooled_shape=pooled, spatial_scale=scale)
    infos = [helper.make_tensor_value_info(n, 1, a.shape) for n, a in (("x", x), ("r", regions))]
    graph = helper.make_graph([node], "g", infos, [helper.make_empty_tensor_value_info("y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (want,) = session.run(None, {"x": x, "r": regions})
    (got,) = Core().compile_model(model)({"x": x, "r": regions}).values()
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("split", [None, 1, [1, 1, 1, 1], [2, 2]])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_split_to_sequence(split: int | list[int] | None, keepdims: int) -> None:
    """A split of one number 1 heeds keepdims, which is how PyTorch exports `unbind`."""
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    ints = [] if split is None else [helper.make_node("Constant", [], ["k"], value=helper.make_tensor(
        "k", 7, np.shape(split), np.ravel(split).tolist()))]  # fmt: skip
    nodes = [
        *ints, helper.make_node("Constant", [], ["last"], value_int=-1),
        helper.make_node("SplitToSequence", ["x", *(["k"] if ints else [])], ["parts"], keepdims=keepdims),
        helper.make_node("SequenceAt", ["parts", "last"], ["part"]), helper.make_node("Shape", ["part"], ["dims"]),
    ]  # fmt: skip
    outputs = [helper.make_empty_tensor_value_info(n) for n in ("part", "dims")]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", 1, ["N", 3])], outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    want = session.run(None, {"x": x})
    for got, expected in zip(Core().compile_model(model)({"x": x}).values(), want, strict=True):
        np.testing.assert_array_equal(got, expected)
