"""Activations of one tensor, and PRelu, which also takes a slope. Computed in at least single precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from tunewright.ir.types import TensorType, Type

from .. import shapes
from ..base import Array, Attrs, Operands, OpSpec
from ..numeric import blockwise, erf, narrow, sigmoid, softplus, wide
from ..samples import base
from ..samples.base import with_samples

Activation: TypeAlias = Callable[[Array, Attrs], Any]

# ONNX attributes and their defaults are float32. For a float64 input the difference is visible.
_LEAKY, _HARD, _SIXTH = (float(np.float32(v)) for v in (0.01, 0.2, 1 / 6))


def relu(x: Array, attrs: Attrs) -> Any:
    return np.maximum(x, x.dtype.type(0))


def leaky_relu(x: Array, attrs: Attrs) -> Any:
    return np.where(x < 0, x * x.dtype.type(attrs.get("alpha", _LEAKY)), x)


def thresholded_relu(x: Array, attrs: Attrs) -> Any:
    return np.where(x > attrs.get("alpha", 1.0), x, x.dtype.type(0))


def elu(x: Array, attrs: Attrs) -> Any:
    return np.where(x > 0, x, x.dtype.type(attrs.get("alpha", 1.0)) * np.expm1(np.minimum(x, 0)))


def selu(x: Array, attrs: Attrs) -> Any:
    alpha = x.dtype.type(attrs.get("alpha", 1.67326319217681884765625))
    gamma = x.dtype.type(attrs.get("gamma", 1.05070102214813232421875))
    return gamma * np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


def celu(x: Array, attrs: Attrs) -> Any:
    alpha = x.dtype.type(attrs.get("alpha", 1.0))
    return np.maximum(x, 0) + alpha * np.expm1(np.minimum(x, 0) / alpha)


def gelu(x: Array, attrs: Attrs) -> Any:
    half, one = x.dtype.type(0.5), x.dtype.type(1)
    if attrs.get("approximate", "none") == "tanh":
        root, cubic = x.dtype.type(np.sqrt(2 / np.pi)), x.dtype.type(0.044715)
        return blockwise(lambda v: half * v * (one + np.tanh(root * (v + cubic * v * v * v))), x)
    root = x.dtype.type(np.sqrt(0.5))
    return blockwise(lambda v: half * v * (one + erf(v * root)), x)


def hard_sigmoid(x: Array, attrs: Attrs) -> Any:
    alpha, beta = x.dtype.type(attrs.get("alpha", _HARD)), x.dtype.type(attrs.get("beta", 0.5))
    return np.clip(alpha * x + beta, x.dtype.type(0), x.dtype.type(1))


def hard_swish(x: Array, attrs: Attrs) -> Any:
    return x * np.clip(x * x.dtype.type(_SIXTH) + x.dtype.type(0.5), x.dtype.type(0), x.dtype.type(1))


def mish(x: Array, attrs: Attrs) -> Any:
    return x * np.tanh(softplus(x))


def swish(x: Array, attrs: Attrs) -> Any:
    alpha = attrs.get("alpha", 1.0)
    return x * sigmoid(x if alpha == 1 else x * x.dtype.type(alpha))


def shrink(x: Array, attrs: Attrs) -> Any:
    bias, threshold = attrs.get("bias", 0.0), attrs.get("lambd", 0.5)
    return np.where(x < -threshold, x + bias, np.where(x > threshold, x - bias, 0))


def softsign(x: Array, attrs: Attrs) -> Any:
    return x / (1 + np.abs(x))


#: all activations of one tensor, by operator name
ACTIVATIONS: dict[str, Activation] = {
    "Celu": celu,
    "Elu": elu,
    "Gelu": gelu,
    "HardSigmoid": hard_sigmoid,
    "HardSwish": hard_swish,
    "LeakyRelu": leaky_relu,
    "Mish": mish,
    "Relu": relu,
    "Selu": selu,
    "Shrink": shrink,
    "Sigmoid": lambda x, attrs: sigmoid(x),
    "Softplus": lambda x, attrs: softplus(x),
    "Softsign": softsign,
    "Swish": swish,
    "ThresholdedRelu": thresholded_relu,
}


def _spec(name: str, function: Activation) -> OpSpec:
    def reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
        x = inputs[0]
        return [narrow(function(wide(x), attrs), x.dtype)]

    return OpSpec(name, reference, shapes.same_as(), elementwise=True)


def _prelu(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, slope = wide(inputs[0]), wide(inputs[1])
    return [narrow(np.where(x < 0, x * slope, x), inputs[0].dtype)]


def _infer_prelu(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, slope = shapes.tensor(operands, 0), shapes.tensor(operands, 1)
    if x.dtype is not slope.dtype:
        raise ValueError(f"inputs differ in type: {x.dtype} and {slope.dtype}")
    shapes.broadcast(x.shape, slope.shape)  # raises when the shapes do not fit; the slope never widens x
    return [TensorType(x.dtype, x.shape)]


def _swiglu(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    a, b = wide(inputs[0]), wide(inputs[1])
    return [narrow(swish(a, attrs) * b, inputs[0].dtype)]


OPS = with_samples(
    (
        *(_spec(name, function) for name, function in ACTIVATIONS.items()),
        OpSpec("PRelu", _prelu, _infer_prelu, elementwise=True),
        OpSpec("SwiGLU", _swiglu, shapes.elementwise(), elementwise=True),
    ),
    base.ACTIVATIONS,
)
