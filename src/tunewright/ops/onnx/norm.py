"""Normalisations. Statistics of narrow floats are computed in float32, and the result is rounded once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import DType, TensorType, Type
from tunewright.ops import batch_rules

from .. import shapes
from ..base import Array, Attrs, Flops, Operands, OpSpec
from ..numeric import narrow, wide
from ..samples import dense
from ..samples.base import with_samples


def _per_channel(v: Array, x: Array) -> Array:
    """One number per channel, shaped to broadcast over [N, C, ...]."""
    return wide(v).astype(x.dtype, copy=False).reshape(-1, *(1 for _ in range(x.ndim - 2)))


def standardize(x: Array, axes: tuple[int, ...], epsilon: float) -> tuple[Array, Array, Array]:
    """(x - mean) / sqrt(variance + epsilon), the mean, and 1 / sqrt(...), all with the reduced axes kept."""
    mean = x.mean(axis=axes, keepdims=True)
    y = x - mean
    variance = np.square(y).mean(axis=axes, keepdims=True)
    inverse = 1 / np.sqrt(variance + x.dtype.type(epsilon))
    y *= inverse
    return y, mean, inverse


# -- BatchNormalization -----------------------------------------------------------------------------------------------
def _batch_norm(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x = wide(inputs[0])
    scale, bias, mean, variance = (wide(v).astype(x.dtype, copy=False) for v in inputs[1:5])
    if not attrs.get("training_mode", 0):
        return [narrow(_affine(x, scale, bias, mean, variance, attrs), inputs[0].dtype)]
    axes = tuple(i for i in range(x.ndim) if i != 1)
    momentum = x.dtype.type(attrs.get("momentum", 0.9))
    now_mean, now_variance = x.mean(axis=axes), x.var(axis=axes)
    y = _affine(x, scale, bias, now_mean, now_variance, attrs)
    return [
        narrow(y, inputs[0].dtype),
        narrow(mean * momentum + now_mean * (1 - momentum), inputs[3].dtype),
        narrow(variance * momentum + now_variance * (1 - momentum), inputs[4].dtype),
    ]


def _affine(x: Array, scale: Array, bias: Array, mean: Array, variance: Array, attrs: Attrs) -> Array:
    factor = scale / np.sqrt(variance + x.dtype.type(attrs.get("epsilon", 1e-5)))
    y = x * _per_channel(factor, x)
    y += _per_channel(bias - mean * factor, x)
    return np.asarray(y)


def _infer_batch_norm(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = shapes.tensor(operands, 0)
    channels = None if x.shape is None or len(x.shape) < 2 else x.shape[1]
    for i, what in ((1, "scale"), (2, "B"), (3, "mean"), (4, "variance")):
        (size,) = shapes.need_rank(shapes.tensor(operands, i), 1, what)
        channels = shapes.same_dim(channels, size, f"{what} and channels differ in number")
    statistics = [TensorType(shapes.tensor(operands, i).dtype, (channels,)) for i in (3, 4)]
    return [TensorType(x.dtype, x.shape), *statistics][:n]


# -- InstanceNormalization, GroupNormalization, MeanVarianceNormalization ---------------------------------------------
def _instance_norm(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x = wide(inputs[0])
    y, _, _ = standardize(x, tuple(range(2, x.ndim)), attrs.get("epsilon", 1e-5))
    y *= _per_channel(inputs[1], x)
    y += _per_channel(inputs[2], x)
    return [narrow(y, inputs[0].dtype)]


def _group_norm(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, groups = wide(inputs[0]), int(attrs["num_groups"])
    rows = x.reshape(x.shape[0], groups, math.prod(x.shape[1:]) // groups)
    y, _, _ = standardize(rows, (2,), attrs.get("epsilon", 1e-5))
    y = y.reshape(x.shape)
    y *= _per_channel(inputs[1], x)
    y += _per_channel(inputs[2], x)
    return [narrow(y, inputs[0].dtype)]


def _infer_affine(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = shapes.tensor(operands, 0)
    channels = None if x.shape is None or len(x.shape) < 2 else x.shape[1]
    for i, what in ((1, "scale"), (2, "bias")):
        (size,) = shapes.need_rank(shapes.tensor(operands, i), 1, what)
        channels = shapes.same_dim(channels, size, f"{what} and channels differ in number")
    groups = attrs.get("num_groups")
    if groups is not None and isinstance(channels, WHOLE) and (groups < 1 or channels % groups):
        raise ValueError(f"{channels} channels do not divide into {groups} groups")
    return [TensorType(x.dtype, x.shape)]


def _mean_variance_norm(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x = wide(inputs[0])
    axes = tuple(shapes.axes_of(attrs.get("axes", (0, 2, 3)), x.ndim))
    centred = x - x.mean(axis=axes, keepdims=True)
    deviation = np.sqrt(np.square(centred).mean(axis=axes, keepdims=True))
    return [narrow(centred / (deviation + x.dtype.type(1e-9)), inputs[0].dtype)]


# -- LayerNormalization, RMSNormalization -----------------------------------------------------------------------------
def _layer_norm(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x = wide(inputs[0])
    axis = shapes.axis_of(int(attrs.get("axis", -1)), x.ndim)
    y, mean, inverse = standardize(x, tuple(range(axis, x.ndim)), attrs.get("epsilon", 1e-5))
    y = y * wide(inputs[1])
    bias = shapes.optional(inputs, 2)
    if bias is not None:
        y += wide(bias)
    stash = _stash(attrs).numpy
    return [narrow(y, inputs[0].dtype), narrow(mean, stash), narrow(inverse, stash)]


def _stash(attrs: Attrs) -> DType:
    return shapes.dtype_of(attrs.get("stash_type", 1), "stash_type")


def _infer_layer_norm(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = shapes.tensor(operands, 0)
    reduced = None
    if x.shape is not None:
        axis = shapes.axis_of(int(attrs.get("axis", -1)), len(x.shape))
        reduced = (*x.shape[:axis], *(1 for _ in x.shape[axis:]))
        _check_fits(operands, x, (1, 2))
    stash = _stash(attrs)
    return [TensorType(x.dtype, x.shape), TensorType(stash, reduced), TensorType(stash, reduced)][:n]


def _check_fits(operands: Operands, x: TensorType, which: Sequence[int]) -> None:
    """Check that scale and bias broadcast to the input without enlarging it."""
    for i in which:
        if shapes.given(operands, i):
            t = shapes.tensor(operands, i)
            both = shapes.broadcast(x.shape, t.shape)
            if both is not None and x.shape is not None and len(both) != len(x.shape):
                raise ValueError(f"input {i}, {t}, does not fit {x}")


def _rms_norm(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x = wide(inputs[0])
    axis = shapes.axis_of(int(attrs.get("axis", -1)), x.ndim)
    square = np.square(x).mean(axis=tuple(range(axis, x.ndim)), keepdims=True)
    y = x / np.sqrt(square + x.dtype.type(attrs.get("epsilon", 1e-5)))
    # The scale may have another type than the input. The result has the type of the scale.
    return [narrow(y * wide(inputs[1]), inputs[1].dtype)]


def _infer_rms_norm(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, scale = shapes.tensor(operands, 0), shapes.tensor(operands, 1)
    if x.shape is not None:
        shapes.axis_of(int(attrs.get("axis", -1)), len(x.shape))
        _check_fits(operands, x, (1,))
    return [TensorType(scale.dtype, x.shape)]


# -- LRN, LpNormalization ---------------------------------------------------------------------------------------------
def _lrn(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, size = wide(inputs[0]), int(attrs["size"])
    square = np.square(x)
    total = np.zeros_like(x)
    channels = x.shape[1]
    for offset in range(-min((size - 1) // 2, channels), min(size // 2, channels) + 1):
        low, high = max(0, -offset), min(channels, channels - offset)
        if low < high:
            total[:, low:high] += square[:, low + offset : high + offset]
    total *= x.dtype.type(attrs.get("alpha", 1e-4) / size)
    total += x.dtype.type(attrs.get("bias", 1.0))
    return [narrow(x / total ** x.dtype.type(attrs.get("beta", 0.75)), inputs[0].dtype)]


def _lp_norm(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, p, axis = wide(inputs[0]), int(attrs.get("p", 2)), int(attrs.get("axis", -1))
    if p not in (1, 2):
        raise ValueError(f"p {p} is not 1 or 2")
    norm = np.sqrt(np.square(x).sum(axis, keepdims=True)) if p == 2 else np.abs(x).sum(axis, keepdims=True)
    return [narrow(np.where(norm == 0, 0, x / np.where(norm == 0, 1, norm)), inputs[0].dtype)]


def _flops(per_element: int) -> Flops:
    def flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
        return float(per_element * outputs[0].size)

    return flops


OPS = with_samples(
    (
        OpSpec(
            "BatchNormalization",
            _batch_norm,
            _infer_batch_norm,
            flops=_flops(2),
            batch=batch_rules.normalised,
            roles=("input", "scale", "bias", "mean", "variance"),
        ),
        OpSpec(
            "InstanceNormalization",
            _instance_norm,
            _infer_affine,
            flops=_flops(7),
            batch=batch_rules.first(0),
            roles=("input", "scale", "bias"),
        ),
        OpSpec(
            "GroupNormalization",
            _group_norm,
            _infer_affine,
            flops=_flops(7),
            batch=batch_rules.first(0),
            roles=("input", "scale", "bias"),
        ),
        OpSpec("MeanVarianceNormalization", _mean_variance_norm, shapes.same_as(), flops=_flops(6)),
        OpSpec(
            "LayerNormalization",
            _layer_norm,
            _infer_layer_norm,
            flops=_flops(7),
            batch=batch_rules.along(-1, behind=True),
            roles=("input", "scale", "bias"),
        ),
        OpSpec(
            "RMSNormalization",
            _rms_norm,
            _infer_rms_norm,
            flops=_flops(4),
            batch=batch_rules.along(-1, behind=True),
            roles=("input", "scale"),
        ),
        OpSpec("LRN", _lrn, shapes.same_as(), flops=_flops(8), batch=batch_rules.first(0)),
        OpSpec("LpNormalization", _lp_norm, shapes.same_as(), flops=_flops(3), batch=batch_rules.along(-1)),
    ),
    dense.NORM,
)
