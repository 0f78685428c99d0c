"""Operators that onnx.reference does not implement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.types import TensorType, Type

from ..base import Array, Attrs, Operands, OpSpec
from ..shapes import tensor


def _rounded(x: Array) -> Array:
    """Round halves away from zero, as C does."""
    return (np.sign(x) * np.floor(np.abs(x) + 0.5)).astype(np.int64)


def _edges(start: int, length: int, bins: int, limit: int) -> tuple[Array, Array]:
    """The first and last positions of a region's bins, clipped to the image."""
    size, at = length / bins, np.arange(bins)
    first, last = np.floor(at * size).astype(np.int64) + start, np.ceil((at + 1) * size).astype(np.int64) + start
    return np.clip(first, 0, limit), np.clip(last, 0, limit)


def _max_roi_pool(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """The largest value in each bin of each region (sample, x1, y1, x2, y2; corners included). An empty bin gives 0."""
    x, regions = inputs
    height, width = (int(s) for s in attrs["pooled_shape"])
    result = np.zeros((len(regions), x.shape[1], height, width), x.dtype)
    corners = _rounded(regions[:, 1:].astype(np.float32) * np.float32(attrs.get("spatial_scale", 1.0)))
    for i, (left, top, right, bottom) in enumerate(corners.tolist()):
        image = x[int(regions[i, 0])]
        tops, bottoms = _edges(top, max(bottom - top + 1, 1), height, x.shape[2])
        lefts, rights = _edges(left, max(right - left + 1, 1), width, x.shape[3])
        for row in range(height):
            for column in range(width):
                window = image[:, tops[row] : bottoms[row], lefts[column] : rights[column]]
                if window.size:
                    result[i, :, row, column] = window.max((1, 2))
    return [result]


def _infer_max_roi_pool(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, regions = tensor(operands, 0), tensor(operands, 1)
    if x.rank not in (None, 4) or regions.rank not in (None, 2):
        raise ValueError(f"takes an image of rank 4 and regions of rank 2, not {x.rank} and {regions.rank}")
    height, width = (int(s) for s in attrs["pooled_shape"])
    count = None if regions.shape is None else regions.shape[0]
    channels = None if x.shape is None else x.shape[1]
    return [TensorType(x.dtype, (count, channels, height, width))]


OPS = (OpSpec("MaxRoiPool", _max_roi_pool, _infer_max_roi_pool),)
