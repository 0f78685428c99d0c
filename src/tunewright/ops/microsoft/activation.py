"""Activations and other elementwise operators of com.microsoft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tunewright.ir.types import Type

from ..base import Array, Attrs, Operands, OpSpec
from ..numeric import sigmoid, wide
from ..onnx.reduction import softmax
from ..shapes import axis_of, elementwise, optional, same_as, tensor
from .common import MS, fast_gelu, gelu, part


def _pointwise(name: str, function: Callable[..., Any]) -> OpSpec:
    """Make an element-wise operator from a function of (inputs in at least float32, attrs)."""

    def reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
        y = function([None if x is None else wide(x) for x in inputs], attrs)
        return [np.asarray(y).astype(inputs[0].dtype, copy=False)]

    return OpSpec(name, reference, elementwise(), elementwise=True)


def _sum(inputs: Sequence[Any]) -> Array:
    total = inputs[0]
    for x in inputs[1:]:
        total = total if x is None else total + x
    return np.asarray(total)


def _quick_gelu(inputs: Sequence[Any], attrs: Attrs) -> Array:
    x = inputs[0]
    return np.asarray(x * sigmoid(np.asarray(x * x.dtype.type(attrs.get("alpha", 1.702)))))


def _scaled_silu(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """Scaled SiLU. Every step is rounded to the type of x."""
    x, scale = inputs[0], optional(inputs, 1)
    factor = attrs.get("alpha", 1.0) if scale is None else float(scale.reshape(-1)[0])
    z = np.asarray(wide(x) * np.float32(factor)).astype(x.dtype)
    gate = sigmoid(wide(z)).astype(x.dtype)
    return [np.asarray(wide(z) * wide(gate)).astype(x.dtype)]


def _gated_add(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """Gated addition. The product is rounded to the result's type before the addition."""
    x, y, gate = inputs
    product = np.asarray(wide(y) * wide(gate)).astype(x.dtype)
    return [np.asarray(wide(x) + wide(product)).astype(x.dtype)]


def _bias_split_gelu(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    left, right = np.split(wide(inputs[0]) + wide(inputs[1]), 2, axis=-1)
    return [np.asarray(left * gelu(np.asarray(right))).astype(inputs[0].dtype, copy=False)]


def _infer_bias_split_gelu(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    t = tensor(operands, 0)
    return [t if t.shape is None else t.with_shape((*t.shape[:-1], part(t.shape[-1], 2, "the last dimension")))]


def _bias_softmax(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """Add the bias and take a softmax over all dimensions from ``axis`` on together."""
    x = np.asarray(wide(inputs[0]) + wide(inputs[1]))
    rows = int(np.prod(x.shape[: axis_of(attrs.get("axis", 1), x.ndim)]))
    return [softmax(x.reshape(rows, -1)).reshape(x.shape).astype(inputs[0].dtype, copy=False)]


OPS = (
    _pointwise(MS + "Gelu", lambda xs, attrs: gelu(xs[0])),
    _pointwise(MS + "BiasGelu", lambda xs, attrs: gelu(_sum(xs))),
    _pointwise(MS + "FastGelu", lambda xs, attrs: fast_gelu(_sum(xs))),
    _pointwise(MS + "QuickGelu", _quick_gelu),
    _pointwise(MS + "BiasAdd", lambda xs, attrs: _sum(xs)),
    OpSpec(MS + "ScaledSiLU", _scaled_silu, same_as()),
    OpSpec(MS + "GatedAdd", _gated_add, elementwise(), elementwise=True),
    OpSpec(MS + "BiasSplitGelu", _bias_split_gelu, _infer_bias_split_gelu),
    OpSpec(MS + "BiasSoftmax", _bias_softmax, same_as()),
)
