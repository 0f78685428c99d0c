"""Rewrites preserve meaning: random graphs give the same outputs with all passes and with none."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from golden import graphs
from tunewright.frontend.onnx import load
from tunewright.passes.base import Context, run_passes
from tunewright.passes.standard import DEVICE, NEUTRAL
from tunewright.settings import Settings

CHANNELS, SIZE = 4, 6
UNARY = ["Relu", "Sigmoid", "Neg", "Abs", "Identity", "Tanh", "Softplus", "HardSigmoid", "Exp"]


class Builder:
    """A random model over tensors of shape [batch, CHANNELS, SIZE, SIZE] (batch may be symbolic)."""

    def __init__(self, draw: Any, batch: int | str) -> None:
        self.draw, self.batch = draw, batch
        self.rng = np.random.default_rng(draw(st.integers(0, 2**16)))
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.values = ["x0", "x1"]

    def add(self, op: str, inputs: list[str], outputs: int = 1, **attrs: Any) -> list[str]:
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(onnx.helper.make_node(op, inputs, names, **attrs))
        return names

    def const(self, array: Any) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(onnx.numpy_helper.from_array(np.asarray(array), name))
        return name

    def weight(self, *shape: int) -> str:
        return self.const((self.rng.standard_normal(shape) * 0.5).astype(np.float32))

    def pick(self) -> str:
        return self.draw(st.sampled_from(self.values))

    def step(self) -> None:
        kind = self.draw(st.sampled_from(sorted(STEPS)))
        self.values.extend(STEPS[kind](self, self.pick()))

    def model(self) -> onnx.ModelProto:
        shape = [self.batch, CHANNELS, SIZE, SIZE]
        used = self.draw(st.lists(st.sampled_from(self.values[2:]), min_size=1, max_size=2, unique=True))
        outputs = list(dict.fromkeys([self.values[-1], *used]))
        graph = onnx.helper.make_graph(
            self.nodes,
            "random",
            [onnx.helper.make_tensor_value_info(f"x{i}", onnx.TensorProto.FLOAT, shape) for i in range(2)],
            [onnx.helper.make_empty_tensor_value_info(o) for o in outputs],
            self.weights,
        )
        return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)], ir_version=10)


def _scale_shape(b: Builder) -> tuple[int, ...]:
    return b.draw(st.sampled_from([(), (1,), (CHANNELS, 1, 1), (1, CHANNELS, 1, 1), (SIZE,), (SIZE, SIZE)]))


def _binary(b: Builder, x: str) -> list[str]:
    return b.add(b.draw(st.sampled_from(["Add", "Sub", "Mul", "Max", "Min"])), [x, b.pick()])


def _scale(b: Builder, x: str) -> list[str]:
    operands = [x, b.weight(*_scale_shape(b))]
    if b.draw(st.booleans()):
        operands.reverse()
    return b.add(b.draw(st.sampled_from(["Add", "Sub", "Mul"])), operands)


def _neutral(b: Builder, x: str) -> list[str]:
    op, number = b.draw(st.sampled_from([("Add", 0.0), ("Mul", 1.0), ("Div", 1.0), ("Pow", 1.0), ("Sub", 0.0)]))
    return b.add(op, [x, b.const(np.full(b.draw(st.sampled_from([(), (1, 1)])), number, np.float32))])


def _conv(b: Builder, x: str) -> list[str]:
    group, kernel = b.draw(st.sampled_from([(1, 1), (1, 3), (2, 3), (4, 1)]))
    pad = kernel // 2
    inputs = [x, b.weight(CHANNELS, CHANNELS // group, kernel, kernel)]
    if b.draw(st.booleans()):
        inputs.append(b.weight(CHANNELS))
    return b.add("Conv", inputs, group=group, pads=[pad] * 4)


def _conv_transpose(b: Builder, x: str) -> list[str]:
    return b.add("ConvTranspose", [x, b.weight(CHANNELS, CHANNELS // 2, 3, 3)], group=2, pads=[1] * 4)


def _batch_norm(b: Builder, x: str) -> list[str]:
    variance = b.const(b.rng.uniform(0.5, 2.0, CHANNELS).astype(np.float32))
    return b.add("BatchNormalization", [x, *(b.weight(CHANNELS) for _ in range(3)), variance])


def _matmul(b: Builder, x: str) -> list[str]:
    return b.add("MatMul", [x, b.weight(SIZE, SIZE)])


def _gemm(b: Builder, x: str) -> list[str]:
    flat = b.add("Reshape", [x, b.const(np.asarray([-1, SIZE], np.int64))])
    trans = b.draw(st.booleans())
    made = b.add("Gemm", [*flat, b.weight(SIZE, SIZE), b.weight(SIZE)], transB=int(trans), alpha=0.5, beta=2.0)
    scaled = b.add("Mul", [*made, b.weight(SIZE)])
    return b.add("Reshape", [*scaled, b.const(np.asarray([-1, CHANNELS, SIZE, SIZE], np.int64))])


def _reshape(b: Builder, x: str) -> list[str]:
    flat = b.add("Flatten", [x])
    return b.add("Reshape", [*flat, b.const(np.asarray([-1, CHANNELS, SIZE, SIZE], np.int64))])


def _transpose(b: Builder, x: str) -> list[str]:
    perm = b.draw(st.sampled_from([[0, 1, 3, 2], [0, 1, 2, 3]]))
    return b.add("Transpose", b.add("Transpose", [x], perm=perm), perm=[0, 1, 3, 2])


def _split_concat(b: Builder, x: str) -> list[str]:
    parts = b.add("Split", [x], 2, axis=1, num_outputs=2)
    if b.draw(st.booleans()):
        half = CHANNELS // 2
        parts = [b.add("Conv", [p, b.weight(half, half, 3, 3)], pads=[1] * 4)[0] for p in parts]
    if b.draw(st.booleans()):
        parts = [b.add(b.draw(st.sampled_from(UNARY[:4])), [p])[0] for p in parts]
    return b.add("Concat", parts, axis=1)


def _normalise(b: Builder, x: str) -> list[str]:
    axes = b.const(np.asarray([-1], np.int64))
    centred = b.add("Sub", [x, *b.add("ReduceMean", [x, axes])])
    variance = b.add("ReduceMean", [*b.add("Mul", centred * 2), axes])
    root = b.add("Sqrt", b.add("Add", [*variance, b.const(np.float32(1e-3))]))
    return b.add("Mul", [*b.add("Div", [*centred, *root]), b.weight(SIZE)])


def _swish(b: Builder, x: str) -> list[str]:
    return b.add("Mul", [x, *b.add("Sigmoid", [x])])


STEPS: dict[str, Any] = {
    "unary": lambda b, x: b.add(b.draw(st.sampled_from(UNARY)), [x]),
    "clip": lambda b, x: b.add("Clip", [x, b.const(np.float32(-1)), b.const(np.float32(2))]),
    "softmax": lambda b, x: b.add("Softmax", [x], axis=-1),
    "pool": lambda b, x: b.add("MaxPool", [x], kernel_shape=[3, 3], pads=[1] * 4),
    "binary": _binary,
    "scale": _scale,
    "neutral": _neutral,
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "batch_norm": _batch_norm,
    "matmul": _matmul,
    "gemm": _gemm,
    "reshape": _reshape,
    "transpose": _transpose,
    "split_concat": _split_concat,
    "normalise": _normalise,
    "swish": _swish,
}


@st.composite
def models(draw: Any) -> tuple[onnx.ModelProto, int]:
    size = draw(st.integers(1, 3))
    builder = Builder(draw, draw(st.sampled_from([size, "N"])))
    for _ in range(draw(st.integers(1, 14))):
        builder.step()
    return builder.model(), size


def check(model: onnx.ModelProto, size: int) -> None:
    strict = Settings.make({"VERIFY_PASSES": "YES"}, Settings())
    plain, optimised = load(model, strict).graph, load(model, strict).graph
    run_passes(optimised, [*NEUTRAL, *DEVICE], Context(strict))
    arrays = graphs.inputs(plain, sizes={"N": size})
    want = graphs.run(plain, arrays)
    if all(np.isfinite(w).all() and np.abs(w).max(initial=0) < 1e6 for w in want):
        graphs.assert_close(graphs.run(optimised, arrays, strict), want)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(models())
def test_passes_preserve_meaning(case: tuple[onnx.ModelProto, int]) -> None:
    check(*case)


@pytest.mark.soak
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
@given(models())
def test_passes_preserve_meaning_of_many_graphs(case: tuple[onnx.ModelProto, int]) -> None:
    check(*case)
