"""Pooling over regions: ROIPooling, PSROIPooling, DeformablePSROIPooling, ExperimentalDetectronROIFeatureExtractor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import TensorType, Type

from ..base import Array, Attrs, Operands, OpSpec
from ..shapes import given
from .common import choice, flag, ints, name, ranked, required, single

_HALF, _ONE, _ZERO = np.float32(0.5), np.float32(1), np.float32(0)


def _round(x: Array) -> Array:
    """Round halves away from zero, as C does."""
    return np.asarray(np.trunc(x + np.copysign(_HALF, x)))


def _sample(maps: Array, y: Array, x: Array) -> Array:
    """Bilinear values [c, *points] of maps [c, h, w] at points inside them. y and x have the same shape."""
    height, width = maps.shape[-2:]
    top, left = np.floor(y).astype(np.int64), np.floor(x).astype(np.int64)
    bottom, right = np.minimum(top + 1, height - 1), np.minimum(left + 1, width - 1)
    dx, dy = (x - left).astype(np.float32), (y - top).astype(np.float32)
    upper = maps[:, top, left] + (maps[:, top, right] - maps[:, top, left]) * dx
    lower = maps[:, bottom, left] + (maps[:, bottom, right] - maps[:, bottom, left]) * dx
    result: Array = upper + (lower - upper) * dy
    return result


def _pooled(attrs: Attrs) -> tuple[int, int]:
    if "output_roi" in attrs:
        height, width = ints(attrs, "output_roi")
        return height, width
    return int(required(attrs, "pooled_h")), int(required(attrs, "pooled_w"))


def roi_pooling(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    data, rois = (v.astype(np.float32, copy=False) for v in inputs[:2])
    rows, columns = _pooled(attrs)
    pool = _max_roi if choice(attrs, "method", "max", ("max", "bilinear")) == "max" else _bilinear_roi
    result = np.zeros((len(rois), data.shape[1], rows, columns), np.float32)
    for i, roi in enumerate(rois):
        if roi[0] < 0:  # the end of a Proposal's list
            break
        pool(data[int(roi[0])], roi[1:], single(attrs, "spatial_scale", 1.0), result[i])
    return [result.astype(inputs[0].dtype, copy=False)]


def _max_roi(maps: Array, roi: Array, scale: np.float32, out: Array) -> None:
    x0, y0, x1, y1 = (int(v) for v in _round(roi * scale))
    bounds = []
    for start, end, bins, size in ((y0, y1, out.shape[1], maps.shape[1]), (x0, x1, out.shape[2], maps.shape[2])):
        step = np.float32(max(end - start + 1, 1)) / np.float32(bins)
        at = np.arange(bins + 1, dtype=np.float32) * step
        low = np.clip(np.floor(at[:-1]).astype(np.int64) + start, 0, size)
        high = np.clip(np.ceil(at[1:]).astype(np.int64) + start, 0, size)
        bounds.append(list(zip(low, high, strict=True)))
    for p, (top, bottom) in enumerate(bounds[0]):
        for q, (left, right) in enumerate(bounds[1]):
            if bottom > top and right > left:
                out[:, p, q] = maps[:, top:bottom, left:right].max(axis=(1, 2))


def _bilinear_roi(maps: Array, roi: Array, scale: np.float32, out: Array) -> None:
    """Bilinear ROIPooling. The corners of the region are relative to the map's size, so ``scale`` is unused."""
    points = []
    for start, end, bins, size in (
        (roi[1], roi[3], out.shape[1], maps.shape[1]),
        (roi[0], roi[2], out.shape[2], maps.shape[2]),
    ):
        last = np.float32(size - 1)
        if bins == 1:
            at = np.asarray([_HALF * (start + end) * last])
        else:
            at = np.arange(bins, dtype=np.float32) * ((end - start) * last / np.float32(bins - 1)) + start * last
            at[-1] = last * end  # without the rounding error of the line above
        points.append(at)
    y, x = np.meshgrid(*points, indexing="ij")
    inside = (y >= 0) & (y <= maps.shape[1] - 1) & (x >= 0) & (x <= maps.shape[2] - 1)
    out[:, inside] = _sample(maps, y[inside], x[inside])


def _infer_roi_pooling(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    data, (_, channels, _, _) = ranked(operands, 0, 4, "the feature map")
    _, (count, _) = ranked(operands, 1, 2, "the rois")
    return [TensorType(data.dtype, (count, channels, *_pooled(attrs)))]


def psroi_pooling(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    data, rois = (v.astype(np.float32, copy=False) for v in inputs[:2])
    channels, bins, scale = (
        int(required(attrs, "output_dim")),
        int(required(attrs, "group_size")),
        single(attrs, "spatial_scale", 1.0),
    )
    average = choice(attrs, "mode", "average", ("average", "bilinear")) == "average"
    grid = int(attrs.get("spatial_bins_x", 1)), int(attrs.get("spatial_bins_y", 1))
    result = np.zeros((len(rois), channels, bins, bins), np.float32)
    for i, roi in enumerate(rois):
        if roi[0] < 0:
            break
        maps = data[int(roi[0])]
        if average:
            _average_psroi(maps, roi[1:], scale, result[i])
        else:
            _bilinear_psroi(maps, roi[1:] * scale, grid, result[i])
    return [result.astype(inputs[0].dtype, copy=False)]


def _average_psroi(maps: Array, roi: Array, scale: np.float32, out: Array) -> None:
    """Average PSROIPooling. Bin (p, q) of output channel c pools input channel (c * bins + p) * bins + q."""
    bins = out.shape[1]
    start, end = _round(roi[:2]) * scale, (_round(roi[2:]) + _ONE) * scale
    step = (end - start) / np.float32(bins)
    k = np.arange(bins, dtype=np.float32)[:, None]
    size = np.asarray(maps.shape[:0:-1])  # width, height
    low = np.clip(np.floor(start + k * step).astype(np.int64), 0, size - 1)
    high = np.clip(np.ceil(start + (k + 1) * step).astype(np.int64), 0, size)
    by_bin = maps.reshape(out.shape[0], bins, bins, *maps.shape[1:])
    for p in range(bins):
        for q in range(bins):
            part = by_bin[:, p, q, low[p, 1] : high[p, 1], low[q, 0] : high[q, 0]]
            if part.size:
                out[:, p, q] = part.mean(axis=(1, 2), dtype=np.float32)


def _bilinear_psroi(maps: Array, roi: Array, grid: tuple[int, int], out: Array) -> None:
    """Bilinear PSROIPooling. Each output bin is the mean of one sample per group of channels; there are grid_x x grid_y
    groups."""
    channels, rows, columns = out.shape
    height, width = maps.shape[1:]
    step_x, step_y = (roi[2] - roi[0]) / np.float32(grid[0]), (roi[3] - roi[1]) / np.float32(grid[1])
    by_group = maps.reshape(grid[1], grid[0], channels, height, width)

    def places(start: np.float32, step: np.float32, bins: int, size: int) -> Array:
        last = np.float32(size - 1)
        if bins == 1:
            return np.asarray([(start + start + step) * last / np.float32(2)], np.float32)
        return np.arange(bins, dtype=np.float32) * (step * last / np.float32(bins - 1)) + start * last

    for gy in range(grid[1]):
        for gx in range(grid[0]):
            y = places(roi[1] + np.float32(gy) * step_y, step_y, rows, height)
            x = places(roi[0] + np.float32(gx) * step_x, step_x, columns, width)
            y, x = np.meshgrid(y, x, indexing="ij")
            inside = (y >= 0) & (x >= 0) & (y < height) & (x < width)
            out[:, inside] += _sample(by_group[gy, gx], y[inside], x[inside])
    out /= np.float32(grid[0] * grid[1])


def deformable_psroi_pooling(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    data, rois = (v.astype(np.float32, copy=False) for v in inputs[:2])
    offsets = inputs[2].astype(np.float32, copy=False) if len(inputs) > 2 and inputs[2] is not None else None
    channels, bins, scale = (
        int(required(attrs, "output_dim")),
        int(attrs.get("group_size", 1)),
        single(attrs, "spatial_scale", 1.0),
    )
    parts, spread = int(attrs.get("part_size", 1)), single(attrs, "trans_std", 1.0)
    grid = np.asarray([int(attrs.get("spatial_bins_x", 1)), int(attrs.get("spatial_bins_y", 1))])
    height, width = data.shape[2:]
    result = np.zeros((len(rois), channels, bins, bins), np.float32)
    channel, p, q = np.indices(result.shape[1:])
    source = (channel * bins + p) * bins + q
    for i, roi in enumerate(rois):
        if roi[0] < 0:
            continue
        maps = data[int(roi[0])]
        start = _round(roi[1:3]) * scale - _HALF
        size = np.maximum((_round(roi[3:5]) + _ONE) * scale - _HALF - start, np.float32(0.1))
        step = size / np.float32(bins)
        corner = start + np.stack([q, p], axis=-1).astype(np.float32) * step  # [c, p, q, (x, y)]
        if offsets is not None:
            groups = offsets.shape[1] // 2
            own = offsets[i].reshape(groups, 2, parts, parts)[
                channel // (channels // groups), :, p * parts // bins, q * parts // bins
            ]
            corner = corner + own * spread * size
        total, count = np.zeros(corner.shape[:-1], np.float32), np.zeros(corner.shape[:-1], np.int64)
        for gy in range(grid[1]):
            for gx in range(grid[0]):
                at = corner + np.asarray([gx, gy], np.float32) * (step / grid.astype(np.float32))
                x, y = at[..., 0], at[..., 1]
                inside = (x >= -0.5) & (x <= width - 0.5) & (y >= -0.5) & (y <= height - 0.5)
                x = np.clip(x[inside], _ZERO, np.float32(width - 1))
                y = np.clip(y[inside], _ZERO, np.float32(height - 1))
                total[inside] += _sample_each(maps, source[inside], y, x)
                count += inside
        result[i] = np.where(count > 0, total / np.maximum(count, 1).astype(np.float32), _ZERO)
    return [result.astype(inputs[0].dtype, copy=False)]


def _sample_each(maps: Array, channel: Array, y: Array, x: Array) -> Array:
    """Bilinear values. Each point reads its own channel."""
    top, left = np.floor(y).astype(np.int64), np.floor(x).astype(np.int64)
    bottom, right = np.minimum(top + 1, maps.shape[1] - 1), np.minimum(left + 1, maps.shape[2] - 1)
    dx, dy = (x - left).astype(np.float32), (y - top).astype(np.float32)
    upper = maps[channel, top, left] + (maps[channel, top, right] - maps[channel, top, left]) * dx
    lower = maps[channel, bottom, left] + (maps[channel, bottom, right] - maps[channel, bottom, left]) * dx
    result: Array = upper + (lower - upper) * dy
    return result


def _infer_psroi(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    data, (_, channels, _, _) = ranked(operands, 0, 4, "the feature map")
    _, (count, _) = ranked(operands, 1, 2, "the rois")
    outputs, bins = int(required(attrs, "output_dim")), int(attrs.get("group_size", 1))
    bilinear = not given(operands, 2) and attrs.get("mode", "average") == "bilinear"
    groups = int(attrs.get("spatial_bins_x", 1)) * int(attrs.get("spatial_bins_y", 1)) if bilinear else bins * bins
    if isinstance(channels, WHOLE) and channels != outputs * groups:
        raise ValueError(f"the feature map (input 0) has {channels} channels instead of {outputs} x {groups}")
    return [TensorType(data.dtype, (count, outputs, bins, bins))]


def roi_features(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    rois = inputs[0].astype(np.float32, copy=False)
    levels = [v.astype(np.float32, copy=False) for v in inputs[1:]]
    scales = ints(attrs, "pyramid_scales", (4, 8, 16, 32, 64))
    bins, ratio = int(attrs.get("output_size", 7)), int(attrs.get("sampling_ratio", 2))
    shift = _HALF if flag(attrs, "aligned") else _ZERO
    result = np.zeros((len(rois), levels[0].shape[1], bins, bins), np.float32)
    area = (rois[:, 2] - rois[:, 0]) * (rois[:, 3] - rois[:, 1])
    for i in np.flatnonzero(area > 0):
        # A region of 224 x 224 belongs to the third level of the pyramid.
        size = np.log2(np.sqrt(area[i]) / np.float32(224) + np.float32(1e-6))
        level = min(max(int(np.floor(size + 2)), 0), len(levels) - 1)
        result[i] = _align(levels[level][0], rois[i] * np.float32(1 / scales[level]) - shift, bins, ratio)
    return [result.astype(inputs[0].dtype, copy=False), inputs[0]][:n]


def _align(maps: Array, roi: Array, bins: int, ratio: int) -> Array:
    """The mean of a grid of bilinear samples in each bin (ROIAlign)."""
    height, width = maps.shape[1:]
    size = np.maximum(roi[2:] - roi[:2], _ONE)
    step = size / np.float32(bins)
    points = []
    for axis, limit in ((1, height), (0, width)):
        samples = ratio if ratio > 0 else int(np.ceil(size[axis] / bins))
        inner = (np.arange(samples, dtype=np.float32) + _HALF) * step[axis] / np.float32(samples)
        at = roi[axis] + np.arange(bins, dtype=np.float32)[:, None] * step[axis] + inner
        points.append((np.clip(at, _ZERO, np.float32(limit - 1)), (at >= -1) & (at <= limit), samples))
    (y, y_in, ny), (x, x_in, nx) = points
    inside = y_in.reshape(-1)[:, None] & x_in.reshape(-1)[None, :]
    values = _sample(maps, *np.meshgrid(y.reshape(-1), x.reshape(-1), indexing="ij")) * inside
    result: Array = values.reshape(-1, bins, ny, bins, nx).sum(axis=(2, 4)) / np.float32(nx * ny)
    return result


def _infer_roi_features(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    rois, (count, _) = ranked(operands, 0, 2, "the rois")
    _, (_, channels, _, _) = ranked(operands, 1, 4, "the features")
    scales = ints(attrs, "pyramid_scales", (4, 8, 16, 32, 64))
    if len(operands) - 1 > len(scales):
        raise ValueError(f"{len(operands) - 1} levels of features, but {len(scales)} values in 'pyramid_scales'")
    bins = int(attrs.get("output_size", 7))
    return [TensorType(rois.dtype, (count, channels, bins, bins)), TensorType(rois.dtype, (count, 4))][:n]


OPS = (
    OpSpec(name("ROIPooling"), roi_pooling, _infer_roi_pooling),
    OpSpec(name("PSROIPooling"), psroi_pooling, _infer_psroi),
    OpSpec(name("DeformablePSROIPooling"), deformable_psroi_pooling, _infer_psroi),
    OpSpec(name("ExperimentalDetectronROIFeatureExtractor"), roi_features, _infer_roi_features),
)
