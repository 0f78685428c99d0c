"""Small random models in the forms that exporters write, for ONNX Runtime's optimizer and quantizer to work on."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from .ort_oracle import IR_VERSION


class Builder:
    """A model, node by node. Values are names; weights are random."""

    def __init__(self, seed: int, opset: int) -> None:
        self.rng, self.opset = np.random.default_rng(seed), opset
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, shape: list[Any], dtype: int = onnx.TensorProto.FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def const(self, array: Any) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def weight(self, *shape: int, scale: float = 1.0) -> str:
        return self.const((self.rng.standard_normal(shape) * scale).astype(np.float32))

    def node(self, op: str, *inputs: str, outputs: int = 1, **attrs: Any) -> Any:
        names = [f"v{len(self.nodes)}_{k}" for k in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, name=f"{op}_{len(self.nodes)}", **attrs))
        return names[0] if outputs == 1 else names

    def model(self, *outputs: str) -> onnx.ModelProto:
        infos = [helper.make_empty_tensor_value_info(o) for o in outputs]
        graph = helper.make_graph(self.nodes, "model", self.inputs, infos, self.weights)
        opsets = [helper.make_opsetid("", self.opset)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        return onnx.shape_inference.infer_shapes(model)


def conv_net(seed: int = 0) -> onnx.ModelProto:
    """Convolutions with every activation that ONNX Runtime fuses, a residual, a branch, pools and a classifier."""
    b = Builder(seed, 17)
    x = b.input("x", ["n", 3, 17, 15])

    def conv(x: str, cin: int, cout: int, k: int = 3, group: int = 1, **attrs: Any) -> str:
        w, pad = b.weight(cout, cin // group, k, k, scale=(k * k * cin / group) ** -0.5), k // 2
        bias = b.weight(cout, scale=0.1)
        return b.node("Conv", x, w, bias, kernel_shape=[k, k], pads=[pad] * 4, group=group, **attrs)

    x = b.node("Relu", conv(x, 3, 8, strides=[2, 2]))
    y = b.node("LeakyRelu", conv(x, 8, 8, group=8), alpha=0.1)
    y = b.node("Add", conv(y, 8, 8, k=1), x)
    x = b.node("Relu", y)
    left = b.node("Clip", conv(x, 8, 6), b.const(np.float32(0)), b.const(np.float32(6)))
    right = b.node("Sigmoid", conv(x, 8, 5, k=1))
    x = b.node("Concat", left, right, axis=1)
    x = b.node("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = b.node("AveragePool", x, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    x = b.node("Mul", x, b.node("Sigmoid", b.node("GlobalAveragePool", x)))
    x = b.node("Flatten", b.node("GlobalAveragePool", x))
    x = b.node("Relu", b.node("Gemm", x, b.weight(12, 11, scale=0.3), b.weight(12, scale=0.1), transB=1))
    return b.model(b.node("Softmax", b.node("Gemm", x, b.weight(12, 7, scale=0.3), b.weight(7)), axis=-1))


def transformer(seed: int = 0, opset: int = 17, layers: int = 2, decomposed: bool = False) -> onnx.ModelProto:
    """A BERT-like encoder as the torch exporter writes it; ``decomposed`` has LayerNormalization in small steps."""
    hidden, heads, words = 16, 4, 23
    b = Builder(seed, opset)
    ids = b.input("ids", ["n", "s"], onnx.TensorProto.INT64)
    mask = b.input("mask", ["n", "s"], onnx.TensorProto.INT64)

    def ints(*v: int) -> str:
        return b.const(np.array(v, np.int64))

    def norm(x: str) -> str:
        gamma, beta = b.weight(hidden), b.weight(hidden, scale=0.1)
        if not decomposed:
            return b.node("LayerNormalization", x, gamma, beta, epsilon=1e-12)
        centred = b.node("Sub", x, b.node("ReduceMean", x, axes=[-1]))
        square = b.node("Pow", centred, b.const(np.float32(2)))
        deviation = b.node("Sqrt", b.node("Add", b.node("ReduceMean", square, axes=[-1]), b.const(np.float32(1e-12))))
        return b.node("Add", b.node("Mul", b.node("Div", centred, deviation), gamma), beta)

    def dense(x: str, cin: int, cout: int) -> str:
        return b.node("Add", b.node("MatMul", x, b.weight(cin, cout, scale=cin**-0.5)), b.weight(cout, scale=0.1))

    def split(x: str, perm: list[int]) -> str:
        return b.node("Transpose", b.node("Reshape", x, ints(0, 0, heads, hidden // heads)), perm=perm)

    length = b.node("Gather", b.node("Shape", ids), b.const(np.int64(1)), axis=0)
    places = b.node("Unsqueeze", b.node("Range", b.const(np.int64(0)), length, b.const(np.int64(1))), ints(0))
    x = b.node("Add", b.node("Gather", b.weight(words, hidden), ids), b.node("Gather", b.weight(12, hidden), places))
    x = norm(x)
    wide = b.node("Cast", b.node("Unsqueeze", mask, ints(1, 2)), to=onnx.TensorProto.FLOAT)
    bias = b.node("Mul", b.node("Sub", b.const(np.float32(1)), wide), b.const(np.float32(-10000)))
    for _ in range(layers):
        q, k, v = (dense(x, hidden, hidden) for _ in range(3))
        scores = b.node("MatMul", split(q, [0, 2, 1, 3]), split(k, [0, 2, 3, 1]))
        scores = b.node("Div", scores, b.const(np.float32((hidden // heads) ** 0.5)))
        weights = b.node("Softmax", b.node("Add", scores, bias), axis=3)
        mixed = b.node("Transpose", b.node("MatMul", weights, split(v, [0, 2, 1, 3])), perm=[0, 2, 1, 3])
        mixed = b.node("Reshape", mixed, ints(0, 0, hidden))
        x = norm(b.node("Add", dense(mixed, hidden, hidden), x))
        y = dense(x, hidden, 4 * hidden)
        half = b.node("Erf", b.node("Div", y, b.const(np.float32(2**0.5))))
        y = b.node("Mul", b.node("Mul", y, b.node("Add", half, b.const(np.float32(1)))), b.const(np.float32(0.5)))
        x = norm(b.node("Add", dense(y, 4 * hidden, hidden), x))
    return b.model(x)


def lstm(seed: int = 0, direction: str = "bidirectional") -> onnx.ModelProto:
    """A recurrent layer and a projection."""
    size, width, count = 6, 5, 2 if direction == "bidirectional" else 1
    b = Builder(seed, 14)
    x = b.input("x", ["s", "n", width])
    w, r = b.weight(count, 4 * size, width, scale=0.4), b.weight(count, 4 * size, size, scale=0.4)
    y = b.node("LSTM", x, w, r, b.weight(count, 8 * size, scale=0.1), outputs=3, hidden_size=size, direction=direction)
    last = b.node("Reshape", b.node("Transpose", y[0], perm=[0, 2, 1, 3]), b.const(np.array([0, 0, -1], np.int64)))
    return b.model(b.node("MatMul", last, b.weight(count * size, 3)), y[1])
