"""OpenVINO's Interpolate (any axes) and its ancestor Interp (two spatial axes, sizes as attributes).

Every mode is a product of one-dimensional filters, so each axis is one small matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import Dim, TensorType, Type

from ..base import Array, Attrs, Operands, OpSpec
from ..numeric import wide
from ..shapes import axis_of, given, tensor, value
from .common import choice, flag, ints, name, ranked, single

_MODES = ("nearest", "linear", "linear_onnx", "cubic")
_COORDINATES = ("half_pixel", "pytorch_half_pixel", "asymmetric", "tf_half_pixel_for_nn", "align_corners")
_NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil", "simple")


def _source(attrs: Attrs, size: int, out: int, scale: np.float32) -> Array:
    """The input coordinates of the output elements."""
    x = np.arange(out, dtype=np.float32)
    half = np.float32(0.5)
    word = choice(attrs, "coordinate_transformation_mode", "half_pixel", _COORDINATES)
    if word == "asymmetric":
        return x / scale
    if word == "align_corners":
        return np.zeros_like(x) if out == 1 else x * np.float32(size - 1) / np.float32(out - 1)
    if word == "tf_half_pixel_for_nn":
        return (x + half) / scale
    if word == "pytorch_half_pixel" and out == 1:
        return np.zeros_like(x)
    return (x + half) / scale - half


def _nearest(attrs: Attrs, at: Array, scale: np.float32) -> Array:
    word = choice(attrs, "nearest_mode", "round_prefer_floor", _NEAREST)
    if word == "floor" or (word == "simple" and scale >= 1):
        return np.floor(at) if word == "floor" else np.trunc(at)
    if word in ("ceil", "simple"):
        return np.ceil(at)
    away = np.trunc(at + np.copysign(np.float32(0.5), at))
    return away if word == "round_prefer_ceil" else np.where(at == np.trunc(at) + np.float32(0.5), np.floor(at), away)


def _filter(attrs: Attrs, mode: str, size: int, out: int, scale: np.float32, smooth: bool) -> Array:
    """The weights [out, size] of one axis."""
    at = _source(attrs, size, out, scale)
    rows = np.arange(out)
    weights = np.zeros((out, size), np.float32)
    if mode == "nearest":
        weights[rows, np.clip(_nearest(attrs, at, scale).astype(np.int64), 0, size - 1)] = 1
    elif mode == "linear_onnx":
        at = np.clip(at, 0, size - 1)
        left = np.minimum(np.floor(at).astype(np.int64), size - 1)
        part = (at - left).astype(np.float32)
        np.add.at(weights, (rows, left), 1 - part)
        np.add.at(weights, (rows, np.minimum(left + 1, size - 1)), part)
    elif mode == "linear":
        sharp = scale if smooth else np.float32(1)
        distance = at[:, None] - np.arange(size, dtype=np.float32)
        weights = np.maximum(np.float32(0), 1 - np.abs(sharp * distance)).astype(np.float32)
        total = weights.sum(axis=1, keepdims=True)
        weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    else:
        a = single(attrs, "cube_coeff", -0.75)
        base = np.floor(at)
        s = (at - base).astype(np.float32)
        for k, d in enumerate((s + 1, s, 1 - s, 2 - s)):  # distances to the four neighbours; the inner two are below 1
            weight = ((a + 2) * d - (a + 3)) * d * d + 1 if k in (1, 2) else ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
            np.add.at(weights, (rows, np.clip(base.astype(np.int64) + k - 1, 0, size - 1)), weight)
    return weights


def _resize(x: Array, axes: Sequence[int], sizes: Sequence[int], scales: Sequence[np.float32], attrs: Attrs) -> Array:
    mode = choice(attrs, "mode", "linear_onnx", _MODES)
    smooth = flag(attrs, "antialias") and any(s < 1 for s in scales)
    result = x if x.dtype.kind == "f" else x.astype(np.float32)
    for axis, size, scale in zip(axes, sizes, scales, strict=True):
        weights = _filter(attrs, mode, x.shape[axis], size, scale, smooth).astype(result.dtype, copy=False)
        if mode == "nearest":
            result = np.take(result, weights.argmax(axis=1), axis=axis)
        else:
            result = np.moveaxis(np.tensordot(weights, result, axes=(1, axis)), 0, axis)
    return np.ascontiguousarray(result)


def _plan(
    attrs: Attrs, shape: Sequence[Dim], sizes: Any, scales: Any, axes: Any
) -> tuple[list[int], list[Dim], list[np.float32], list[Dim]]:
    """The axes, their new sizes (None where unknown), their scales, and the shape after padding."""
    begin, end = (ints(attrs, k)[: len(shape)] for k in ("pads_begin", "pads_end"))
    begin, end = (p + [0] * (len(shape) - len(p)) for p in (begin, end))
    padded: list[Dim] = [d + b + e if isinstance(d, WHOLE) else None for d, b, e in zip(shape, begin, end, strict=True)]
    chosen = [axis_of(int(a), len(shape)) for a in (axes if axes is not None else range(len(shape)))]
    new: list[Dim] = []
    factors: list[np.float32] = []
    by_sizes = choice(attrs, "shape_calculation_mode", "sizes", ("sizes", "scales")) == "sizes"
    given_values = sizes if by_sizes else scales
    for k, axis in enumerate(chosen):
        size = padded[axis]
        wanted = None if given_values is None else given_values[k]
        if by_sizes:
            new.append(None if wanted is None else int(wanted))
            factors.append(
                np.float32(int(wanted) / size)
                if wanted is not None and isinstance(size, WHOLE) and size
                else np.float32(1)
            )
        else:
            factors.append(np.float32(1 if wanted is None else wanted))
            known = isinstance(size, WHOLE) and wanted is not None
            new.append(math.floor(np.float32(size) * np.float32(wanted) + np.float32(1e-5)) if known else None)
    return chosen, new, factors, padded


def _split(inputs: Sequence[Any], floating: bool) -> tuple[Any, Any, Any]:
    """Sizes, scales and axes. Interpolate-4 has one input for each, Interpolate-11 one input for sizes or scales."""
    rest = [inputs[i] if i < len(inputs) else None for i in (1, 2, 3)]
    return (rest[0], rest[1], rest[2]) if floating else (rest[0], rest[0], rest[1])


def interpolate(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    x = wide(inputs[0])
    four = len(inputs) > 2 and inputs[2] is not None and inputs[2].dtype.kind == "f"
    axes, sizes, scales, padded = _plan(attrs, x.shape, *_split(inputs, four))
    if tuple(padded) != x.shape:
        begin, end = (ints(attrs, k) for k in ("pads_begin", "pads_end"))
        both = [
            (b[k] if k < len(b) else 0, e[k] if k < len(e) else 0) for b, e in ((begin, end),) for k in range(x.ndim)
        ]
        x = np.pad(x, both)
    result = _resize(x, axes, [int(s or 0) for s in sizes], scales, attrs)
    return [_as(result, inputs[0].dtype)]


def _as(result: Array, dtype: Any) -> Array:
    return (np.rint(result) if dtype.kind in "iu" else result).astype(dtype, copy=False)


def _infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    data = tensor(operands, 0)
    choice(attrs, "mode", "linear_onnx", _MODES)
    if data.shape is None:
        return [data]
    four = given(operands, 2) and tensor(operands, 2).dtype.is_float
    at = 3 if four else 2
    if given(operands, at) and value(operands, at) is None:
        return [data.with_shape((None,) * len(data.shape))]
    known = [value(operands, i) for i in (1, 2, 3)]
    sizes, scales, axes = (known[0], known[1], known[2]) if four else (known[0], known[0], known[1])
    chosen, new, _, shape = _plan(attrs, data.shape, sizes, scales, axes)
    untouched = not any(ints(attrs, "pads_begin")) and not any(ints(attrs, "pads_end"))
    dims: list[Dim] = list(data.shape) if untouched else shape
    for axis, size in zip(chosen, new, strict=True):
        dims[axis] = size
    return [data.with_shape(tuple(dims))]


def _interp_size(attrs: Attrs, shape: Sequence[Dim], like: Sequence[Dim] | None) -> list[Dim]:
    if like is not None:
        return [like[2], like[3]]
    sizes: list[Dim] = []
    shrink, zoom = int(attrs.get("shrink_factor", 1)) or 1, int(attrs.get("zoom_factor", 1)) or 1
    for key, d in (("height", shape[2]), ("width", shape[3])):
        if int(attrs.get(key, 0)) > 0:
            sizes.append(int(attrs[key]))
        elif isinstance(d, WHOLE):
            size = (d - 1) // shrink + 1
            sizes.append(size + (size - 1) * (zoom - 1))
        else:
            sizes.append(None)
    return sizes


def interp(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    x = wide(inputs[0])
    like = inputs[1].shape if len(inputs) > 1 and inputs[1] is not None else None
    sizes = [int(d or 0) for d in _interp_size(attrs, x.shape, like)]
    scales = [np.float32(s / d) for s, d in zip(sizes, x.shape[2:], strict=True)]
    mode = "align_corners" if flag(attrs, "align_corners", True) else "asymmetric"
    rule = {"mode": "linear_onnx", "coordinate_transformation_mode": mode}
    return [_as(_resize(x, (2, 3), sizes, scales, rule), inputs[0].dtype)]


def _infer_interp(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    data, shape = ranked(operands, 0, 4, "the data")
    like = ranked(operands, 1, 4, "the data of the wanted size")[1] if given(operands, 1) else None
    return [TensorType(data.dtype, (*shape[:2], *_interp_size(attrs, shape, like)))]


OPS = (
    OpSpec(name("Interpolate"), interpolate, _infer),
    OpSpec(name("Interp"), interp, _infer_interp),
)
