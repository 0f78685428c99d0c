"""Resize in all modes, one axis after the other. Each output element is a weighted sum of a few input elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE, SymInt
from tunewright.ir.types import Dim, TensorType, Type
from tunewright.ops import batch_rules, shapes
from tunewright.ops.base import Array, Attrs, Operands, OpSpec
from tunewright.ops.numeric import limits, narrow, wide
from tunewright.ops.samples import model as samples_model
from tunewright.ops.samples.base import with_samples

#: How far from the middle of two elements a place is still in the middle: its last bit does not decide.
TIE = 1e-6


# -- sizes ------------------------------------------------------------------------------------------------------------
def _axes(attrs: Attrs, rank: int) -> list[int]:
    axes = attrs.get("axes")
    return list(range(rank)) if not axes else shapes.axes_of(axes, rank)


def _policy(attrs: Attrs) -> str:
    policy = str(attrs.get("keep_aspect_ratio_policy", "stretch"))
    if policy not in ("stretch", "not_larger", "not_smaller"):
        raise ValueError(f"keep_aspect_ratio_policy {policy!r} is unknown")
    return policy


def _scaled(dim: int, scale: float) -> int:
    """floor(dim * scale) in single precision, as other engines compute it: 10 * 0.7 is 7."""
    if isinstance(dim, SymInt):
        exact = Fraction(float(np.float32(scale)))
        if dim * exact.numerator < 1 << 24:  # the product fits the digits of single precision
            return dim * exact.numerator // exact.denominator
    return math.floor(np.float32(dim) * np.float32(scale))


def _plan(
    dims: Sequence[int], scales: Sequence[float] | None, sizes: Sequence[int] | None, attrs: Attrs
) -> tuple[list[int], list[float]]:
    """The output size and the scale of every axis."""
    axes = _axes(attrs, len(dims))
    output, factor = list(dims), [1.0] * len(dims)
    if (scales is None) == (sizes is None):
        raise ValueError("exactly one of scales and sizes must be given")
    chosen: Sequence[float] = sizes if sizes is not None else scales  # type: ignore[assignment]
    if len(chosen) != len(axes):
        raise ValueError(f"{len(chosen)} {'sizes' if sizes is not None else 'scales'} for {len(axes)} axes")
    if sizes is None:
        for axis, scale in zip(axes, chosen, strict=True):
            if not scale > 0:
                raise ValueError(f"scale {scale} is not positive")
            output[axis], factor[axis] = _scaled(dims[axis], scale), float(scale)
        return output, factor
    policy = _policy(attrs)
    if policy == "stretch":
        for axis, size in zip(axes, sizes, strict=True):
            output[axis] = shapes.whole(size)
            factor[axis] = _ratio(output[axis], dims[axis])
        return output, factor
    ratios = [size / dims[axis] if dims[axis] else 1.0 for axis, size in zip(axes, sizes, strict=True)]
    common = min(ratios) if policy == "not_larger" else max(ratios)
    for axis in axes:
        output[axis], factor[axis] = int(common * dims[axis] + 0.5), common
    return output, factor


def _ratio(size: int, dim: int) -> float:
    """The factor by which an axis grows; NaN where it is not the same number for a whole class of shapes."""
    if not isinstance(dim, SymInt) and not isinstance(size, SymInt):
        return size / dim if dim else 1.0
    whole = size // dim if isinstance(size, SymInt) and isinstance(dim, SymInt) else 0
    rest = size - whole * dim
    return float(whole) if not isinstance(whole, SymInt) and not isinstance(rest, SymInt) and not rest else math.nan


# -- one axis ---------------------------------------------------------------------------------------------------------
def _source(x: Array, size: int, scale: float, mode: str, roi: tuple[float, float]) -> Array:
    """The input coordinates of the output indices ``x``.

    The specification's ``length_resized`` is the length of the result, a whole number, even where a scale was given.
    """
    out = len(x)
    if mode == "half_pixel":
        return (x + 0.5) / scale - 0.5
    if mode == "pytorch_half_pixel":
        return (x + 0.5) / scale - 0.5 if out > 1 else np.zeros_like(x)
    if mode == "asymmetric":
        return x / scale
    if mode == "align_corners":
        return x * (size - 1) / (out - 1) if out > 1 else np.zeros_like(x)
    if mode == "half_pixel_symmetric":
        return size / 2 * (1 - out / (scale * size)) + (x + 0.5) / scale - 0.5
    if mode == "tf_crop_and_resize":
        begin, end = roi
        step = x * (end - begin) * (size - 1) / (out - 1) if out > 1 else (end - begin) * (size - 1) / 2
        return np.asarray(np.broadcast_to(begin * (size - 1) + step, (out,)))
    raise ValueError(f"coordinate_transformation_mode {mode!r} is unknown")


def _nearest(x: Array, mode: str) -> Array:
    """Round as ONNX Runtime does, for which a place within `TIE` of the middle is the middle."""
    below = np.floor(x)
    if mode == "round_prefer_floor":
        return below + (x - below >= 0.5 + TIE)
    if mode == "round_prefer_ceil":
        return below + (x - below > 0.5 - TIE)
    if mode == "floor":
        return below
    if mode == "ceil":
        return np.ceil(x)
    raise ValueError(f"nearest_mode {mode!r} is unknown")


def cubic(t: Array, a: float) -> Array:
    """Keys' cubic kernel at the distance ``t``."""
    t = np.abs(t)
    near = ((a + 2) * t - (a + 3)) * t * t + 1
    far = ((t - 5) * t + 8) * t * a - 4 * a
    return np.where(t <= 1, near, np.where(t < 2, far, 0))


def _weights(x: Array, scale: float, attrs: Attrs) -> tuple[Array, Array]:
    """(indices, weights), each [out, taps], before the borders are handled."""
    kernel = attrs.get("mode", "nearest")
    reach = 2 if kernel == "cubic" else 1
    shrink = min(scale, 1.0) if attrs.get("antialias", 0) else 1.0  # antialiasing only matters where the axis shrinks
    start = math.floor(-reach / shrink) + 1
    base = np.floor(x)
    exact = x == base
    base = np.where(exact, base - 1, base)
    taps = np.arange(start, 2 - start)
    distance = (taps - (x - base)[:, None]) * shrink
    if kernel == "cubic":
        weights = cubic(distance, float(attrs.get("cubic_coeff_a", -0.75)))
    elif kernel == "linear":
        weights = np.clip(1 - np.abs(distance), 0, 1)
    else:
        raise ValueError(f"mode {kernel!r} is not nearest, linear or cubic")
    if shrink != 1.0:
        weights = weights / weights.sum(axis=1, keepdims=True)
    return (base[:, None] + taps).astype(np.int64), weights


@dataclass(frozen=True)
class ResizeStep:
    """The resizing of one axis: its new length, the factor, and the part of the input that is used."""

    axis: int
    out: int
    scale: float
    roi: tuple[float, float] = (0.0, 1.0)


@dataclass(frozen=True)
class Taps:
    """The input elements of each output index: ``indices`` and ``weights``, both [out, taps]. No weights: a plain copy.

    ``outside`` [out] marks indices that take the extrapolation value; None marks none.
    """

    indices: Array
    weights: Array | None
    outside: Array | None


def taps(size: int, step: ResizeStep, attrs: Attrs) -> Taps:
    """The taps of an axis of ``size`` elements. ``size`` must not be 0."""
    mode = attrs.get("coordinate_transformation_mode", "half_pixel")
    nearest = attrs.get("mode", "nearest") == "nearest"
    # In single precision 17 / 1.7 is 10, as other engines compute it. In double precision it would select pixel 9.
    where = _source(np.arange(step.out, dtype=np.float32 if nearest else np.float64), size, step.scale, mode, step.roi)
    weights: Array | None = None
    if nearest:
        indices = _nearest(where, attrs.get("nearest_mode", "round_prefer_floor"))[:, None]
    else:
        indices, weights = _weights(where, step.scale, attrs)
        if attrs.get("exclude_outside", 0):
            weights = np.where((indices < 0) | (indices >= size), 0, weights)
            total = weights.sum(axis=1, keepdims=True)
            weights = weights / np.where(total == 0, 1, total)
    outside = (where < 0) | (where > size - 1) if mode == "tf_crop_and_resize" else None
    return Taps(np.clip(indices, 0, size - 1).astype(np.int64), weights, outside)


@dataclass(frozen=True)
class Period:
    """The repeating taps of an axis that grows by ``factor``, a power of two.

    Element ``j`` is the sum of input elements ``j // factor + offsets[j % factor]`` with ``weights[j % factor]``.
    Indices are clamped to the axis. Both arrays are [factor, taps]; without weights the element is copied.

    All values are exact in floating point, so they hold for an axis of any length.
    """

    factor: int
    offsets: Array
    weights: Array | None


#: positions of a longer axis would not be exact in single precision
_MOST_EXACT = 1 << 22
#: length of a trial axis, long enough to show the taps of a middle element
_SAMPLE = 16


def period(size: int, step: ResizeStep, attrs: Attrs) -> Period | None:
    """The repeating taps of an axis; None where they do not repeat."""
    mode = attrs.get("coordinate_transformation_mode", "half_pixel")
    factor = int(step.scale) if math.isfinite(step.scale) else 0
    if factor != step.scale or factor & (factor - 1) or factor < 1 or attrs.get("exclude_outside", 0):
        return None
    if mode not in ("half_pixel", "pytorch_half_pixel", "asymmetric") or not size * factor < _MOST_EXACT:
        return None
    if isinstance(step.out - size * factor, SymInt) or step.out != size * factor:
        return None
    found = taps(_SAMPLE, ResizeStep(step.axis, _SAMPLE * factor, step.scale), attrs)
    middle = slice(_SAMPLE // 2 * factor, (_SAMPLE // 2 + 1) * factor)
    weights = None if found.weights is None else found.weights[middle]
    return Period(factor, found.indices[middle] - _SAMPLE // 2, weights)


def _along(x: Array, step: ResizeStep, attrs: Attrs) -> Array:
    """Resize ``x`` along one axis."""
    axis = step.axis
    size = x.shape[axis]
    if not step.out or not size:
        return np.zeros((*x.shape[:axis], step.out, *x.shape[axis + 1 :]), x.dtype)
    found = taps(size, step, attrs)
    column = (-1, *(1 for _ in range(x.ndim - axis - 1)))
    y = np.take(x, found.indices[:, 0], axis)
    if found.weights is not None:
        weights = found.weights.astype(x.dtype)
        y *= weights[:, 0].reshape(column)
        part = np.empty_like(y)  # one buffer, because fresh memory costs more than the arithmetic
        for t in range(1, weights.shape[1]):
            np.take(x, found.indices[:, t], axis, out=part, mode="clip")
            part *= weights[:, t].reshape(column)
            y += part
    if found.outside is not None and found.outside.any():
        y = np.where(found.outside.reshape(column), extrapolation(attrs, x.dtype), y)
    return np.asarray(y)


def extrapolation(attrs: Attrs, dtype: np.dtype[Any]) -> Array:
    """The value of output elements outside the input."""
    return np.asarray(attrs.get("extrapolation_value", 0.0)).astype(dtype)


def steps(
    dims: Sequence[int], roi: Array | None, scales: Array | None, sizes: Array | None, attrs: Attrs
) -> list[ResizeStep]:
    """The axes to resize, in the order of execution. Empty inputs count as absent.

    Axes that shrink go first, and later axes go before earlier ones, so that fewer elements are gathered one by one.
    Lengths may be symbolic. The factor is NaN where it is not the same for a whole class of shapes.
    """
    roi, scales, sizes = (None if a is None or not a.size else a.reshape(-1) for a in (roi, scales, sizes))
    factors, lengths = (None if a is None else a.tolist() for a in (scales, sizes))
    output, factor = _plan(dims, factors, lengths, attrs)
    axes = _axes(attrs, len(dims))
    crop = attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    if crop and (roi is None or roi.size != 2 * len(axes)):
        raise ValueError("tf_crop_and_resize needs a roi with two numbers per axis")
    found = []
    for k, axis in sorted(enumerate(axes), key=lambda pair: (factor[pair[1]], -pair[1])):
        part = (float(roi[k]), float(roi[k + len(axes)])) if crop and roi is not None else (0.0, 1.0)
        # An open length may be that of the input at some sizes: it is resized there as well.
        if factor[axis] != 1.0 or output[axis] != dims[axis] or part != (0.0, 1.0):
            found.append(ResizeStep(axis, output[axis], factor[axis], part))
    return found


def working_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The accumulation type of weighted sums of elements."""
    if dtype.kind in "iu":
        return np.dtype(np.float64 if dtype.itemsize > 2 else np.float32)
    return np.dtype(wide(np.empty(0, dtype)).dtype)


def _resize(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x = inputs[0]
    nearest = attrs.get("mode", "nearest") == "nearest"
    y = x if nearest else x.astype(working_type(x.dtype), copy=False)
    roi, scales, sizes = (shapes.optional(inputs, i) for i in (1, 2, 3))
    for step in steps(x.shape, roi, scales, sizes, attrs):
        y = _along(y, step, attrs)
    if y is x:
        return [x.copy()]
    if x.dtype.kind in "iu" and y.dtype != x.dtype:
        low, high = limits(x.dtype)
        y = np.clip(np.rint(y), low, high)
    return [narrow(y, x.dtype)]


def _infer_resize(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = shapes.tensor(operands, 0)
    if x.shape is None:
        return [TensorType(x.dtype)]
    scales, sizes = (_known(operands, i) for i in (2, 3))
    axes = _axes(attrs, len(x.shape))
    result: list[Dim] = [None if i in axes else d for i, d in enumerate(x.shape)]
    if scales is None and sizes is None:
        return [TensorType(x.dtype, tuple(result))]
    if all(isinstance(x.shape[a], WHOLE) for a in axes):
        dims = [d if isinstance(d, WHOLE) else 1 for d in x.shape]
        given = None if sizes is None else [shapes.whole(s) for s in sizes]
        output, _ = _plan(dims, scales, given, attrs)
        return [TensorType(x.dtype, tuple(output[i] if i in axes else d for i, d in enumerate(x.shape)))]
    for k, axis in enumerate(axes):
        dim = x.shape[axis]
        if scales is not None:
            result[axis] = _scaled(dim, scales[k]) if isinstance(dim, WHOLE) else dim if scales[k] == 1 else None
        elif sizes is not None and _policy(attrs) == "stretch":
            result[axis] = int(sizes[k])
    return [TensorType(x.dtype, tuple(result))]


def _known(operands: Operands, i: int) -> list[float] | None:
    found = shapes.value(operands, i)
    return None if found is None or not found.size else found.reshape(-1).tolist()


def _flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    count = {"nearest": 0, "linear": 4, "cubic": 16}.get(str(attrs.get("mode", "nearest")), 4)
    return float(2 * count * outputs[0].size)


OPS = with_samples(
    (OpSpec("Resize", _resize, _infer_resize, flops=_flops, batch=batch_rules.resized, size_inputs=(3,), picks=True),),
    samples_model.RESIZE,
)
