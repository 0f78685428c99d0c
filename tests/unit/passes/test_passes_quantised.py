"""Layers between DequantizeLinear and QuantizeLinear: which become integer ones, and results within a step of floats.

Scales are no multiples of each other: else many sums lie in the middle between two steps, where the last bit decides.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from conformance.short_form import every_other
from tunewright.core import Core


class Net:
    """A QDQ model being written."""

    def __init__(self, *shape: int) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
        self.outputs: list[str] = []
        self.rng = np.random.default_rng(0)

    def const(self, array: Any, dtype: Any = np.float32) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def add(self, op: str, *inputs: str, **attrs: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name, **attrs))
        return name

    def q(self, x: str, scale: float, zero: int, dtype: Any = np.int8) -> str:
        return self.add("QuantizeLinear", x, self.const(scale), self.const(zero, dtype))

    def dq(self, x: str, scale: Any, zero: Any, dtype: Any = np.int8, **attrs: Any) -> str:
        return self.add("DequantizeLinear", x, self.const(scale), self.const(zero, dtype), **attrs)

    def qdq(self, x: str, scale: float, zero: int, dtype: Any = np.int8) -> str:
        return self.dq(self.q(x, scale, zero, dtype), scale, zero, dtype)

    def weights(self, *shape: int, channels: bool = True, dtype: Any = np.int8, axis: int = 0) -> str:
        info = np.iinfo(dtype)
        w = self.const(self.rng.integers(info.min + 1, int(info.max) + 1, shape), dtype)
        size = shape[axis] if channels else ()
        scale = self.scale = self.rng.uniform(0.001, 0.01, size).astype(np.float32)
        zero = np.full(size, 0 if dtype is np.int8 else 128)
        return self.dq(w, scale, zero, dtype, axis=axis)

    def bias(self, x_scale: float, count: int) -> str:
        """For the last weights: whole numbers of steps of the products."""
        whole = self.const(self.rng.integers(-2000, 2000, count), np.int32)
        scale = np.float32(x_scale) * self.scale
        return self.dq(whole, scale, np.zeros(scale.shape), np.int32, axis=0)

    def model(self, *outputs: str) -> onnx.ModelProto:
        made = [helper.make_empty_tensor_value_info(name) for name in outputs]
        graph = helper.make_graph(self.nodes, "g", self.inputs, made, self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
        return onnx.shape_inference.infer_shapes(model)


def ops(model: onnx.ModelProto) -> Counter[str]:
    compiled = Core().compile_model(model, "CPU")
    return Counter(node.op.removeprefix("com.microsoft::") for node in compiled.graph.nodes)


def within_a_step(model: onnx.ModelProto, *shape: int, scale: float = 1.0) -> None:
    """Against the floats, as the host computes them; of bytes that they are made of."""
    x = (np.random.default_rng(1).standard_normal(shape) * scale).astype(np.float32)
    got, want = (Core().compile_model(model, device)({"x": x}) for device in ("CPU", "CPU.HOST"))
    for name, expected in want.items():
        assert expected.dtype.itemsize == 1, "compare quantised results"
        error = np.abs(got[name].astype(int) - expected.astype(int))
        assert error.max(initial=0) <= 1 and (error == 0).mean() >= 0.999, f"{(error > 0).mean():.2%} differ"
        assert len(np.unique(expected)) > 20, "a result of few values says little"


@every_other(("dtype", [np.int8, np.uint8]), ("channels", [True, False]))
def test_convolutions_and_a_residual(dtype: Any, channels: bool) -> None:
    net = Net(1, 5, 14, 13)
    low = int(np.iinfo(dtype).min)
    a = net.qdq("x", 0.03, low + 100, dtype)
    b = net.add("Conv", a, net.weights(21, 5, 3, 3, channels=channels), net.bias(0.03, 21), pads=[1] * 4)
    c = net.qdq(net.add("Relu", b), 0.0107, low, dtype)
    d = net.qdq(net.add("Conv", c, net.weights(21, 21, 1, 1, channels=channels)), 0.0213, low + 120, dtype)
    y = net.q(net.add("Add", c, d), 0.0231, low + 60, dtype)
    pooled = net.add("MaxPool", net.dq(y, 0.0231, low + 60, dtype), kernel_shape=[3, 3], strides=[2, 2])
    z = net.q(pooled, 0.0231, low + 60, dtype)
    model = net.model(y, z)
    found = ops(model)
    assert found["QLinearConv"] == 2 and found["QLinearAdd"] == 1 and found["MaxPool"] == 1
    assert not found["Conv"] and not found["DequantizeLinear"] and found["QuantizeLinear"] == 1
    within_a_step(model, 1, 5, 14, 13)


def test_products_of_matrices() -> None:
    net = Net(7, 40)
    a = net.qdq("x", 0.03, 100, np.uint8)
    y = net.q(net.add("MatMul", a, net.weights(40, 24, axis=1)), 0.05, 128, np.uint8)
    model = net.model(y)
    found = ops(model)
    assert found["QLinearMatMul"] == 1 and not found["MatMul"] and not found["DequantizeLinear"]
    within_a_step(model, 7, 40)


@pytest.mark.parametrize("turned", [0, 1])
@pytest.mark.parametrize("rows", [1, 6])
def test_fully_connected(turned: int, rows: int) -> None:
    net = Net(rows, 41)
    shape = (70, 41) if turned else (41, 70)
    w = net.weights(*shape, axis=0 if turned else 1)
    y = net.q(
        net.add("Gemm", net.qdq("x", 0.03, 100, np.uint8), w, net.bias(0.03, 70), transB=turned), 0.017, 128, np.uint8
    )
    model = net.model(y)
    found = ops(model)
    assert found["QGemm"] == 1 and not found["Gemm"] and not found["DequantizeLinear"]
    within_a_step(model, rows, 41)
    scaled = Net(rows, 41)
    made = scaled.add("Gemm", scaled.qdq("x", 0.03, 0), scaled.weights(41, 70, axis=1), alpha=0.5)
    assert not ops(scaled.model(scaled.q(made, 0.017, 0)))["QGemm"]


@pytest.mark.parametrize(("op", "attrs"), [("Sigmoid", {}), ("LeakyRelu", {"alpha": 0.3})])
def test_functions_of_bytes(op: str, attrs: dict[str, Any]) -> None:
    net = Net(2, 9, 5)
    model = net.model(net.q(net.add(op, net.qdq("x", 0.02, 3), **attrs), 0.0071, -100))
    found = ops(model)
    assert found[f"QLinear{op}"] == 1 and not found["DequantizeLinear"]
    within_a_step(model, 2, 9, 5)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_parts_of_different_scales_are_joined_as_bytes(dtype: Any) -> None:
    """Nothing is rounded that was not before, so all is equal."""
    low = int(np.iinfo(dtype).min)
    net = Net(1, 8, 6, 5)
    a, b = (net.qdq("x", scale, low + zero, dtype) for scale, zero in ((0.02, 100), (0.013, 128)))
    model = net.model(net.q(net.add("Concat", a, b, axis=1), 0.013, low + 128, dtype))
    found = ops(model)
    assert found["Concat"] == 1 and found["QLinearLeakyRelu"] == 1 and not found["DequantizeLinear"]
    x = np.random.default_rng(1).standard_normal((1, 8, 6, 5)).astype(np.float32)
    got, want = (Core().compile_model(model, device)({"x": x}) for device in ("CPU", "CPU.HOST"))
    for name, expected in want.items():
        np.testing.assert_array_equal(got[name], expected)
    other = Net(1, 8, 6, 5)
    mixed = other.add("Concat", other.qdq("x", 0.02, 0), "x", axis=1)
    assert ops(other.model(other.q(mixed, 0.02, 0)))["DequantizeLinear"] == 1


def test_a_mobile_block_against_another_engine() -> None:
    """More channels than values of which a key tells: a zero point for each of them must not hide that all are 0."""
    ort = pytest.importorskip("onnxruntime")
    net = Net(1, 3, 20, 18)
    x = net.qdq("x", 0.02, 128, np.uint8)
    a = net.add("Conv", x, net.weights(16, 3, 3, 3), net.bias(0.02, 16), pads=[1] * 4, strides=[2, 2])
    b = net.qdq(net.add("Relu", a), 0.021, 0, np.uint8)
    c = net.qdq(net.add("Relu", net.add("Conv", b, net.weights(96, 16, 1, 1), net.bias(0.021, 96))), 0.033, 0, np.uint8)
    d = net.add("Conv", c, net.weights(96, 1, 3, 3), net.bias(0.033, 96), pads=[1] * 4, group=96)
    e = net.qdq(net.add("Relu", d), 0.031, 0, np.uint8)
    f = net.qdq(net.add("Conv", e, net.weights(16, 96, 1, 1), net.bias(0.031, 16)), 0.047, 120, np.uint8)
    g = net.qdq(net.add("Add", b, f), 0.049, 118, np.uint8)
    h = net.qdq(net.add("Concat", g, b, axis=1), 0.05, 110, np.uint8)
    pooled = net.qdq(net.add("GlobalAveragePool", h), 0.03, 100, np.uint8)
    pooled = net.qdq(net.add("Flatten", pooled), 0.03, 100, np.uint8)
    gemm = net.add("Gemm", pooled, net.weights(70, 32), net.bias(0.03, 70), transB=1)
    model = net.model(net.q(gemm, 0.012, 128, np.uint8))
    found = ops(model)
    assert found["QLinearConv"] == 4 and found["QLinearAdd"] == 1 and found["QGemm"] == 1 and not found["Conv"]
    data = {"x": np.random.default_rng(1).standard_normal((1, 3, 20, 18)).astype(np.float32)}
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    (want,) = session.run(None, data)
    (got,) = Core().compile_model(model, "CPU")(data).values()
    assert len(np.unique(want)) > 20
    assert np.abs(got.astype(int) - want.astype(int)).max() <= 1


def convolution(bias: Any = None, zero: int = 0, bound: str = "", y_scale: float = 0.02) -> onnx.ModelProto:
    net = Net(1, 8, 6, 6)
    inputs = [net.qdq("x", 0.02, 0), net.weights(8, 8, 3, 3, channels=False)]
    made = net.add("Conv", *inputs, *([] if bias is None else [net.const(bias)]))
    if bound:
        made = net.add(bound, made, *([net.const(-0.5), net.const(0.5)] if bound == "Clip" else []))
    return net.model(net.q(made, y_scale, zero))


def test_a_bound_stays_where_saturation_does_not_do_it() -> None:
    assert ops(convolution(bound="Relu", zero=-128))["QLinearConv"] == 1
    within_a_step(convolution(bound="Relu", zero=-128), 1, 8, 6, 6)
    assert not ops(convolution(bound="Relu", zero=0))["QLinearConv"]
    assert not ops(convolution(bound="Clip"))["QLinearConv"]


def test_a_bias_that_is_no_number_of_steps_stays_a_float() -> None:
    """Half a step of the products is more than `BIAS_ERROR` of a result's step when that is small."""
    bias = np.random.default_rng(1).standard_normal(8) * 0.1
    assert ops(convolution(bias, y_scale=0.2))["QLinearConv"] == 1
    within_a_step(convolution(bias, y_scale=0.2), 1, 8, 6, 6, scale=3)
    assert not ops(convolution(bias, y_scale=1e-5))["QLinearConv"]
    assert ops(convolution(np.zeros(8), y_scale=1e-5))["QLinearConv"] == 1


def test_moves_need_equal_steps() -> None:
    for scale, count in ((0.02, 0), (0.03, 1)):
        net = Net(1, 8, 6, 6)
        moved = net.add("Transpose", net.qdq("x", 0.02, 3), perm=[0, 2, 3, 1])
        found = ops(net.model(net.q(moved, scale, 3)))
        assert found["DequantizeLinear"] == count


def test_the_host_and_whoever_asks_keep_floats() -> None:
    model = convolution()
    assert any(n.op == "Conv" for n in Core().compile_model(model, "CPU.HOST").graph.nodes)
    off = Core().compile_model(model, "CPU", {"DISABLED_PASSES": "quantised"})
    assert any(n.op == "Conv" for n in off.graph.nodes)
    one = Core().compile_model(model, "CPU", {"DISABLED_PASSES": "quantised-conv"})
    assert any(n.op == "Conv" for n in one.graph.nodes)


def test_what_others_read_is_still_computed() -> None:
    """A result that is an output in floats too is made in floats."""
    net = Net(1, 8, 6, 6)
    made = net.add("Conv", net.qdq("x", 0.02, 0), net.weights(8, 8, 3, 3))
    model = net.model(net.q(made, 0.02, 0), made)
    assert not ops(model)["QLinearConv"]
