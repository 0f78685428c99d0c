"""Interpolation between pixels: GridSample, RoiAlign, and the grids of AffineGrid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import Dim, TensorType, Type
from tunewright.ops import shapes
from tunewright.ops.base import Array, Attrs, Operands, OpSpec
from tunewright.ops.input_errors import ReportedFault, check_rows, describe
from tunewright.ops.numeric import narrow, wide
from tunewright.ops.samples import model as samples_model
from tunewright.ops.samples.base import with_samples

from .resize import cubic


# -- GridSample -------------------------------------------------------------------------------------------------------
def _reflect(x: Array, low: float, high: float) -> Array:
    """Reflect coordinates at the borders until they lie between them."""
    span = high - low
    if span <= 0:
        return np.full_like(x, low)
    away = np.where(x < low, low - x, np.where(x > high, x - high, 0))
    turns = np.trunc(away / span)
    rest = away - turns * span
    even = turns % 2 == 0
    return np.where(
        x < low,
        np.where(even, low + rest, high - rest),
        np.where(x > high, np.where(even, high - rest, low + rest), x),
    )


def _at(index: Array, size: int, mode: str, low: float, high: float) -> tuple[Array, Array | None]:
    """Valid indices for the integers ``index``, and where a value counts (None: everywhere)."""
    if mode == "zeros":
        return np.clip(index, 0, size - 1).astype(np.int64), (index >= 0) & (index < size)
    if mode == "reflection":
        index = np.trunc(_reflect(index, low, high))
    return np.clip(index, 0, size - 1).astype(np.int64), None


def _axis_taps(x: Array, size: int, attrs: Attrs) -> list[tuple[Array, Array | None]]:
    """(index, weight) of each tap along one axis, for coordinates in [-1, 1]. A weight of None stands for 1."""
    mode, padding = attrs.get("mode", "linear"), attrs.get("padding_mode", "zeros")
    if padding not in ("zeros", "border", "reflection"):
        raise ValueError(f"padding_mode {padding!r} is not zeros, border or reflection")
    corners = bool(attrs.get("align_corners", 0))
    low, high = (0.0, size - 1.0) if corners else (-0.5, size - 0.5)
    x = (x + 1) / 2 * (size - 1) if corners else ((x + 1) * size - 1) / 2
    if mode == "nearest":
        x = np.rint(x)
    if padding == "border" and mode != "cubic":  # cubic pads each tap separately, as PyTorch does
        x = np.where((x < low) | (x > high), np.clip(x, 0, size - 1), x)
    elif padding == "reflection":
        x = _reflect(x, low, high)
    if mode == "nearest":
        index, valid = _at(np.trunc(x), size, padding, low, high)
        return [(index, None if valid is None else valid.astype(x.dtype))]
    if mode not in ("linear", "cubic"):
        raise ValueError(f"mode {mode!r} is not nearest, linear or cubic")
    base = np.floor(x)
    part = x - base
    taps: list[tuple[Array, Array | None]] = []
    for t in (0, 1) if mode == "linear" else (-1, 0, 1, 2):
        weight = (1 - part if t == 0 else part) if mode == "linear" else cubic(part - t, -0.75).astype(x.dtype)
        index, valid = _at(base + t, size, padding, low, high)
        taps.append((index, weight if valid is None else np.where(valid, weight, 0)))
    return taps


def _grid_sample(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, grid = wide(inputs[0]), wide(inputs[1])
    rank = x.ndim - 2
    if grid.shape[-1] != rank or grid.shape[0] != x.shape[0]:
        raise ValueError(f"grid of shape {list(grid.shape)} does not fit input of shape {list(x.shape)}")
    y = np.zeros((*x.shape[:2], *grid.shape[1:-1]), x.dtype)
    if not y.size or not x.size:
        return [narrow(y, inputs[0].dtype)]
    for b in range(x.shape[0]):
        # The last coordinate of the grid belongs to the first spatial axis.
        per_axis = [_axis_taps(grid[b, ..., rank - 1 - k], x.shape[k + 2], attrs) for k in range(rank)]
        pixels = np.ascontiguousarray(x[b].reshape(x.shape[1], -1).T)  # gathers all channels of a pixel at once
        total = np.zeros((math.prod(grid.shape[1:-1]), x.shape[1]), x.dtype)
        for combination in itertools.product(*per_axis):
            flat = np.ravel_multi_index([index for index, _ in combination], x.shape[2:])
            value = pixels[flat.reshape(-1)]
            weights = [w for _, w in combination if w is not None]
            if weights:
                value *= math.prod(weights[1:], start=weights[0]).astype(x.dtype).reshape(-1, 1)
            total += value
        y[b] = total.T.reshape(y.shape[1:])
    return [narrow(y, inputs[0].dtype)]


def _infer_grid_sample(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, grid = shapes.tensor(operands, 0), shapes.tensor(operands, 1)
    if x.shape is None or grid.shape is None:
        rank = x.rank if x.shape is not None else grid.rank
        return [TensorType(x.dtype, shapes.unknown(rank))]
    if len(x.shape) != len(grid.shape) or len(x.shape) < 3:
        raise ValueError(f"input of rank {len(x.shape)} and grid of rank {len(grid.shape)}")
    shapes.same_dim(grid.shape[-1], len(x.shape) - 2, "coordinates of the grid")
    batch = shapes.same_dim(x.shape[0], grid.shape[0], "batch of input and grid")
    return [TensorType(x.dtype, (batch, x.shape[1], *grid.shape[1:-1]))]


# -- RoiAlign ---------------------------------------------------------------------------------------------------------
#: Limit of samples per box. A box with more does not fit the image.
MOST_SAMPLES = 1 << 26


def _line(begin: float, length: float, bins: int, samples: int, size: int) -> tuple[Array, Array, Array, Array, Array]:
    """The sample points of one axis: lower and upper pixel, their weights, and whether the point counts."""
    step = length / bins
    at = begin + np.arange(bins)[:, None] * step + (np.arange(samples) + 0.5) * step / max(samples, 1)
    at = at.reshape(-1)
    valid = (at >= -1) & (at <= size)
    at = np.maximum(at, 0)
    low = np.minimum(at.astype(np.int64), size - 1)
    high = np.minimum(low + 1, size - 1)
    at = np.where(low >= size - 1, low, at)
    upper = at - low
    return low, high, (1 - upper) * valid, upper * valid, valid


def _roi_align(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, rois, batch = wide(inputs[0]), wide(inputs[1]).astype(np.float64), inputs[2]
    height, width = int(attrs.get("output_height", 1)), int(attrs.get("output_width", 1))
    ratio, scale = int(attrs.get("sampling_ratio", 0)), float(attrs.get("spatial_scale", 1.0))
    half = str(attrs.get("coordinate_transformation_mode", "half_pixel")).lower() == "half_pixel"
    mode = str(attrs.get("mode", "avg")).lower()
    if mode not in ("avg", "max"):
        raise ValueError(f"mode {mode!r} is not avg or max")
    check_rows(batch, len(x))
    y = np.zeros((len(rois), x.shape[1], height, width), x.dtype)
    for r, (x1, y1, x2, y2) in enumerate(rois * scale - (0.5 if half else 0.0)):
        wide_, tall = x2 - x1, y2 - y1
        if not half:
            wide_, tall = max(wide_, 1.0), max(tall, 1.0)
        rows, columns = ratio or math.ceil(tall / height), ratio or math.ceil(wide_ / width)
        if rows < 1 or columns < 1:
            continue  # nothing is sampled, so the result stays zero
        if rows * height * columns * width > MOST_SAMPLES:
            raise ValueError(describe(ReportedFault.BOX, r, MOST_SAMPLES))
        yl, yh, wyl, wyh, _ = _line(y1, tall, height, rows, x.shape[2])
        xl, xh, wxl, wxh, _ = _line(x1, wide_, width, columns, x.shape[3])
        image = x[int(batch[r])]
        parts = [
            image[:, yi[:, None], xi] * np.outer(wy, wx).astype(x.dtype)
            for yi, wy in ((yl, wyl), (yh, wyh))
            for xi, wx in ((xl, wxl), (xh, wxh))
        ]
        if mode == "avg":
            total = (parts[0] + parts[1] + parts[2] + parts[3]).reshape(-1, height, rows, width, columns)
            y[r] = total.sum(axis=(2, 4)) / x.dtype.type(rows * columns)
        else:
            y[r] = np.maximum.reduce(parts).reshape(-1, height, rows, width, columns).max(axis=(2, 4))
    return [narrow(y, inputs[0].dtype)]


def _infer_roi_align(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = shapes.tensor(operands, 0)
    channels = shapes.need_rank(x, 4, "the input")[1]
    rois = shapes.need_rank(shapes.tensor(operands, 1), 2, "rois")
    shapes.same_dim(rois[1], 4, "coordinates of a roi")
    (count,) = shapes.need_rank(shapes.tensor(operands, 2), 1, "batch_indices")
    number = shapes.same_dim(rois[0], count, "rois and batch_indices differ in number")
    return [
        TensorType(x.dtype, (number, channels, int(attrs.get("output_height", 1)), int(attrs.get("output_width", 1))))
    ]


# -- AffineGrid -------------------------------------------------------------------------------------------------------
def axis_points(size: int, corners: bool) -> Array:
    """Coordinates of an axis' pixels. -1 and 1 are the centres of the outer pixels (``corners``) or the ends of the
    axis."""
    if corners:
        return np.linspace(-1, 1, size) if size > 1 else np.full(size, -1.0)
    return np.asarray((2 * np.arange(size) + 1) / size - 1)


def _affine_grid(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    theta, size = inputs[0], inputs[1].reshape(-1).tolist()
    spatial = size[2:]
    rank = len(spatial)
    lines = [axis_points(d, bool(attrs.get("align_corners", 0))) for d in spatial]
    points = np.stack([*np.meshgrid(*lines, indexing="ij")[::-1], np.ones(spatial)], -1).reshape(-1, rank + 1)
    grid = np.matmul(points, wide(theta).astype(np.float64).swapaxes(-1, -2))
    return [narrow(grid.reshape(theta.shape[0], *spatial, rank), theta.dtype)]


def _infer_affine_grid(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    theta, size = shapes.tensor(operands, 0), shapes.ints(operands, 1)
    batch, rows, _ = shapes.need_rank(theta, 3, "theta")
    if size is None:
        length = shapes.length(shapes.tensor(operands, 1))
        rank: int | None = length - 2 if length is not None else rows if isinstance(rows, WHOLE) else None
        return [TensorType(theta.dtype, None if rank is None else (batch, *(None,) * rank, rank))]
    if len(size) not in (4, 5):
        raise ValueError(f"size {size} is not [N, C, H, W] or [N, C, D, H, W]")
    spatial: list[Dim] = list(size[2:])
    return [TensorType(theta.dtype, (batch, *spatial, len(size) - 2))]


OPS = with_samples(
    (
        OpSpec("GridSample", _grid_sample, _infer_grid_sample),
        OpSpec("RoiAlign", _roi_align, _infer_roi_align),
        OpSpec("AffineGrid", _affine_grid, _infer_affine_grid),
    ),
    samples_model.RESIZE,
)
