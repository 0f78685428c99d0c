"""Whole networks with seeded random weights: real shapes for tests, benchmarks and the demo, without a download.

Weights are scaled so that activations stay near one, and batch normalisation has non-trivial statistics. Outputs are
therefore worth comparing, and a pass that drops a bias or a scale is detected.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

#: blocks per stage, and whether a block is a bottleneck
RESNETS = {18: ((2, 2, 2, 2), False), 34: ((3, 4, 6, 3), False), 50: ((3, 4, 6, 3), True), 101: ((3, 4, 23, 3), True)}


class Builder:
    """Nodes and weights of a model under construction."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def weight(self, array: np.ndarray[Any, Any]) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def add(self, op: str, *inputs: str, **attrs: Any) -> str:
        """Add a node with one output. Its name consists of the operation and a number."""
        name = f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=name, **attrs))
        return name

    def conv(self, x: str, cin: int, cout: int, kernel: int, stride: int = 1, group: int = 1) -> str:
        fan_in = cin // group * kernel * kernel
        w = self.rng.standard_normal((cout, cin // group, kernel, kernel), np.float32) * np.float32(np.sqrt(2 / fan_in))
        pad = kernel // 2
        return self.add(
            "Conv", x, self.weight(w), kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4, group=group
        )

    def norm(self, x: str, channels: int) -> str:
        """Add a batch normalisation with parameters like those of a trained network."""
        draw = self.rng
        params = (
            draw.uniform(0.5, 1.0, channels),
            draw.normal(0, 0.1, channels),
            draw.normal(0, 0.1, channels),
            draw.uniform(0.8, 1.2, channels),
        )
        return self.add("BatchNormalization", x, *(self.weight(p.astype(np.float32)) for p in params), epsilon=1e-5)

    def dense(self, x: str, cin: int, cout: int) -> str:
        w = self.rng.standard_normal((cin, cout), np.float32) / np.float32(np.sqrt(cin))
        return self.add("Gemm", x, self.weight(w), self.weight(self.rng.normal(0, 0.1, cout).astype(np.float32)))

    def model(self, name: str, shape: list[int | str], result: str, features: int) -> onnx.ModelProto:
        graph = helper.make_graph(
            [*self.nodes, helper.make_node("Identity", [result], ["y"], name="result")],
            name,
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [shape[0], features])],
            self.weights,
        )
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="tunewright.testing"
        )
        model.ir_version = 8
        return model


def resnet(
    depth: int = 18, size: int = 224, classes: int = 1000, width: int = 64, batch: int | str = 1, seed: int = 0
) -> onnx.ModelProto:
    """ResNet-18, -34, -50 or -101 as trainers export it: separate Conv, BatchNormalization, Relu and Add nodes."""
    blocks, bottleneck = RESNETS[depth]
    b = Builder(seed)
    x = b.add("Relu", b.norm(b.conv("x", 3, width, 7, 2), width))
    x = b.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = width
    for stage, count in enumerate(blocks):
        inner = width << stage
        outer = inner * 4 if bottleneck else inner
        for block in range(count):
            stride = 2 if stage and not block else 1
            kernels = ((1, 1), (3, stride), (1, 1)) if bottleneck else ((3, stride), (3, 1))
            path, cin = x, channels
            for i, (kernel, step) in enumerate(kernels):
                last = i == len(kernels) - 1
                cout = outer if last else inner
                path = b.norm(b.conv(path, cin, cout, kernel, step), cout)
                path, cin = path if last else b.add("Relu", path), cout
            if stride != 1 or channels != outer:
                x = b.norm(b.conv(x, channels, outer, 1, stride), outer)
            x, channels = b.add("Relu", b.add("Add", path, x)), outer
    x = b.add("Flatten", b.add("GlobalAveragePool", x))
    return b.model(f"resnet{depth}", [batch, 3, size, size], b.dense(x, channels, classes), classes)


def mobilenet(size: int = 224, classes: int = 1000, batch: int | str = 1, seed: int = 0) -> onnx.ModelProto:
    """MobileNetV2: inverted residuals with depthwise convolutions and Clip(0, 6)."""
    b = Builder(seed)

    def relu6(x: str) -> str:
        return b.add("Clip", x, b.weight(np.asarray(0, np.float32)), b.weight(np.asarray(6, np.float32)))

    x, channels = relu6(b.norm(b.conv("x", 3, 32, 3, 2), 32)), 32
    for expand, out, count, first in (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ):
        for block in range(count):
            stride, hidden, path = first if not block else 1, channels * expand, x
            if expand != 1:
                path = relu6(b.norm(b.conv(path, channels, hidden, 1), hidden))
            path = relu6(b.norm(b.conv(path, hidden, hidden, 3, stride, group=hidden), hidden))
            path = b.norm(b.conv(path, hidden, out, 1), out)
            x, channels = b.add("Add", x, path) if stride == 1 and channels == out else path, out
    x = relu6(b.norm(b.conv(x, channels, 1280, 1), 1280))
    x = b.add("Flatten", b.add("GlobalAveragePool", x))
    return b.model("mobilenet_v2", [batch, 3, size, size], b.dense(x, 1280, classes), classes)


def transformer(
    layers: int = 2, hidden: int = 64, heads: int = 4, length: int = 16, classes: int = 8, batch: int = 1, seed: int = 0
) -> onnx.ModelProto:
    """A BERT-like encoder over embeddings, with LayerNorm, GELU and attention decomposed as older exporters do."""
    b = Builder(seed)
    depth = hidden // heads

    def scalar(value: float) -> str:
        return b.weight(np.asarray(value, np.float32))

    def ints(*values: int) -> str:
        return b.weight(np.asarray(values, np.int64))

    def linear(x: str, cin: int, cout: int) -> str:
        w = b.rng.standard_normal((cin, cout), np.float32) / np.float32(np.sqrt(cin))
        return b.add("Add", b.add("MatMul", x, b.weight(w)), b.weight(b.rng.normal(0, 0.1, cout).astype(np.float32)))

    def norm(x: str) -> str:
        centred = b.add("Sub", x, b.add("ReduceMean", x, axes=[-1]))
        variance = b.add("ReduceMean", b.add("Pow", centred, scalar(2.0)), axes=[-1])
        scaled = b.add("Div", centred, b.add("Sqrt", b.add("Add", variance, scalar(1e-12))))
        gamma, beta = b.rng.uniform(0.8, 1.2, hidden), b.rng.normal(0, 0.1, hidden)
        scaled = b.add("Mul", scaled, b.weight(gamma.astype(np.float32)))
        return b.add("Add", scaled, b.weight(beta.astype(np.float32)))

    def gelu(x: str) -> str:
        erf = b.add("Erf", b.add("Div", x, scalar(2.0**0.5)))
        return b.add("Mul", b.add("Mul", x, b.add("Add", erf, scalar(1.0))), scalar(0.5))

    def split(x: str, perm: list[int]) -> str:
        return b.add("Transpose", b.add("Reshape", x, ints(batch, length, heads, depth)), perm=perm)

    x = norm("x")
    for _ in range(layers):
        q, k, v = (split(linear(x, hidden, hidden), p) for p in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]))
        scores = b.add("Softmax", b.add("Div", b.add("MatMul", q, k), scalar(depth**0.5)), axis=-1)
        mixed = b.add("Transpose", b.add("MatMul", scores, v), perm=[0, 2, 1, 3])
        mixed = b.add("Reshape", mixed, ints(batch, length, hidden))
        x = norm(b.add("Add", x, linear(mixed, hidden, hidden)))
        x = norm(b.add("Add", x, linear(gelu(linear(x, hidden, 4 * hidden)), 4 * hidden, hidden)))
    pooled = b.add("ReduceMean", x, axes=[1], keepdims=0)
    return b.model("transformer", [batch, length, hidden], b.dense(pooled, hidden, classes), classes)
