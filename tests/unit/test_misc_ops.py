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
