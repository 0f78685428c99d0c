"""NonMaxSuppression: each best box removes the boxes of its class that overlap it too much."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.types import DType, TensorType, Type
from tunewright.ops import shapes
from tunewright.ops.base import Array, Attrs, Operands, OpSpec
from tunewright.ops.numeric import chunks
from tunewright.ops.samples import shape
from tunewright.ops.samples.base import with_samples


def _corners(boxes: Array, centre: bool) -> Array:
    """[x1, y1, x2, y2]. Boxes given by corners are ordered so that x1 <= x2 and y1 <= y2."""
    if centre:
        half = boxes[..., 2:] / 2
        return np.concatenate([boxes[..., :2] - half, boxes[..., :2] + half], -1)
    low, high = np.minimum(boxes[..., :2], boxes[..., 2:]), np.maximum(boxes[..., :2], boxes[..., 2:])
    return np.concatenate([low[..., ::-1], high[..., ::-1]], -1)


_BLOCK = 64  # number of candidates compared with each other at once


def _overlapping(a: Array, b: Array, threshold: float) -> Array:
    """Booleans [n, m]: whether a box of a, [4, n], and one of b, [4, m], exceed the threshold of intersection over
    union."""
    a = a[:, :, None]
    width = np.minimum(a[2], b[2]) - np.maximum(a[0], b[0])
    height = np.minimum(a[3], b[3]) - np.maximum(a[1], b[1])
    inside = np.maximum(width, 0) * np.maximum(height, 0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - inside
    # Boxes that do not meet have inside = 0. Two boxes without an area give 0 / 0, which compares as false.
    return np.asarray((inside / union > threshold) & (inside > 0))


def suppress(boxes: Array, scores: Array, limit: int, threshold: float, least: float | None) -> list[int]:
    """Indices of the boxes that stay, best first. Of equal scores the lower index comes first."""
    candidates = np.arange(len(scores)) if least is None else np.flatnonzero(scores > least)
    order = candidates[np.argsort(-scores[candidates], kind="stable")]
    ranked = boxes[order].T
    kept: list[int] = []  # positions in `order`
    for begin, end in chunks(len(order), _BLOCK):
        if len(kept) >= limit:
            break
        block = ranked[:, begin:end]
        gone = np.asarray(_overlapping(ranked[:, kept], block, threshold).any(axis=0))
        among = _overlapping(block, block, threshold)
        for i in range(end - begin):
            if not gone[i] and len(kept) < limit:
                kept.append(begin + i)
                gone |= among[i]
    return [int(i) for i in order[kept]]


def _scalar(inputs: Sequence[Any], i: int) -> Any:
    found = shapes.optional(inputs, i)
    return None if found is None or not found.size else found.reshape(-1)[0]


def _non_max_suppression(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    boxes, scores = inputs[0], inputs[1]
    limit, threshold, least = (_scalar(inputs, i) for i in (2, 3, 4))
    limit = 0 if limit is None else max(0, int(limit))
    threshold = 0.0 if threshold is None else threshold
    corners = _corners(boxes, bool(attrs.get("center_point_box", 0)))
    found = [
        (b, c, index)
        for b in range(scores.shape[0])
        for c in range(scores.shape[1])
        for index in suppress(corners[b], scores[b, c], limit, threshold, least)
    ]
    return [np.array(found, np.int64).reshape(-1, 3)]


def _infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    boxes = shapes.need_rank(shapes.tensor(operands, 0), 3, "boxes")
    scores = shapes.need_rank(shapes.tensor(operands, 1), 3, "scores")
    shapes.same_dim(boxes[2], 4, "coordinates of a box")
    shapes.same_dim(boxes[0], scores[0], "batch of boxes and scores")
    shapes.same_dim(boxes[1], scores[2], "boxes and scores differ in number")
    return [TensorType(DType.INT64, (None, 3))]


OPS = with_samples((OpSpec("NonMaxSuppression", _non_max_suppression, _infer),), shape.DETECTION)
