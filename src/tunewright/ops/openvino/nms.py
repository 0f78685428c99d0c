"""OpenVINO's suppression of overlapping boxes: NonMaxSuppression, MulticlassNms, MatrixNms."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tunewright.ir.types import Dim, DType, TensorType, Type

from ..base import Array, Attrs, Operands, OpSpec
from ..shapes import given
from .common import choice, descending, flag, name, overlaps, ranked, single

#: one selected box: (image, class, box, score)
_Found = tuple[int, int, int, np.float32]


def _index_type(attrs: Attrs) -> DType:
    word = choice(attrs, "output_type", "i64", ("i64", "i32"))
    return DType.INT64 if word == "i64" else DType.INT32


def _scalar(inputs: Sequence[Any], i: int, default: float) -> float:
    return float(np.asarray(inputs[i]).reshape(-1)[0]) if len(inputs) > i and inputs[i] is not None else default


def _overlaps(box: Array, others: Array, offset: float = 0.0) -> Array:
    """Intersection over union. A box without an area overlaps no other box."""
    one, zero = np.float32(offset), np.float32(0)
    inside = np.prod(
        np.maximum(np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2]) + one, zero), axis=1
    )
    area, areas = np.prod(box[2:] - box[:2] + one), np.prod(others[:, 2:] - others[:, :2] + one, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((area > 0) & (areas > 0), inside / (area + areas - inside), zero)


def _corners(boxes: Array, attrs: Attrs) -> Array:
    """Boxes as (y0, x0, y1, x1) with the smaller corner first."""
    if choice(attrs, "box_encoding", "corner", ("corner", "center")) == "center":
        center, half = boxes[..., 1::-1], boxes[..., 3:1:-1] / np.float32(2)
        return np.concatenate([center - half, center + half], axis=-1)
    return np.concatenate(
        [np.minimum(boxes[..., :2], boxes[..., 2:]), np.maximum(boxes[..., :2], boxes[..., 2:])], axis=-1
    )


def _soft(
    boxes: Array, scores: Array, limit: int, iou: np.float32, least: np.float32, sigma: np.float32
) -> list[tuple[int, np.float32]]:
    """Soft suppression. A kept box lowers the scores of boxes that overlap it; with sigma 0 it removes them."""
    scale = np.float32(-0.5) / sigma if sigma > 0 else np.float32(0)
    waiting = [(-scores[i], int(i), 0) for i in np.flatnonzero(scores > least)]
    heapq.heapify(waiting)
    kept: list[tuple[int, np.float32]] = []
    while waiting and len(kept) < limit:
        negative, i, seen = heapq.heappop(waiting)
        score = -negative
        hard = False
        for overlap in _overlaps(boxes[i], boxes[[k for k, _ in kept[seen:]]])[::-1]:
            if sigma > 0 or overlap <= iou:
                score = score * np.exp(scale * overlap * overlap)
            else:
                hard = True
            if hard or score <= least:
                break
        if hard:
            continue
        if score == -negative:
            kept.append((i, score))
        elif score > least:
            heapq.heappush(waiting, (-score, i, len(kept)))
    return kept


def non_max_suppression(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    boxes, scores = (v.astype(np.float32, copy=False) for v in inputs[:2])
    limit = min(int(_scalar(inputs, 2, 0)), boxes.shape[1])
    iou, least, sigma = (np.float32(_scalar(inputs, i, 0.0)) for i in (3, 4, 5))
    corners = _corners(boxes, attrs)
    found: list[_Found] = []
    for image in range(len(scores)):
        for c in range(scores.shape[1]):
            kept = _soft(corners[image], scores[image, c], limit, iou, least, sigma)
            found += [(image, c, i, score) for i, score in kept]
    if flag(attrs, "sort_result_descending", True):
        found.sort(key=lambda f: (-f[3], *f[:3]))
    dtype = _index_type(attrs).numpy
    indices = np.asarray([f[:3] for f in found], dtype).reshape(-1, 3)
    rows = np.asarray([(f[0], f[1], f[3]) for f in found], np.float32).reshape(-1, 3)
    return [indices, rows.astype(inputs[1].dtype, copy=False), np.asarray([len(found)], dtype)][:n]


def _infer_nms(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    ranked(operands, 0, 3, "the boxes")
    scores, _ = ranked(operands, 1, 3, "the scores")
    index = _index_type(attrs)
    return [TensorType(index, (None, 3)), TensorType(scores.dtype, (None, 3)), TensorType(index, (1,))][:n]


def _multiclass(boxes: Array, scores: Array, attrs: Attrs) -> list[tuple[int, np.float32]]:
    """The kept boxes of one class. The threshold is multiplied by 'nms_eta' while it is above one half."""
    threshold, eta = single(attrs, "iou_threshold"), single(attrs, "nms_eta", 1.0)
    offset = 0.0 if flag(attrs, "normalized", True) else 1.0
    order = np.flatnonzero(scores >= single(attrs, "score_threshold"))
    order = order[descending(scores[order])]
    top = int(attrs.get("nms_top_k", -1))
    kept: list[int] = []
    for i in order[: top if top > -1 else None]:
        if not np.any(_overlaps(boxes[i], boxes[kept], offset) >= threshold):
            kept.append(int(i))
            if eta < 1 and threshold > 0.5:
                threshold = threshold * eta
    return [(i, scores[i]) for i in kept]


def _matrix(boxes: Array, scores: Array, attrs: Attrs) -> list[tuple[int, np.float32]]:
    """The boxes of one class. All scores decay at once by their overlaps with better boxes."""
    order = np.flatnonzero(scores > single(attrs, "score_threshold"))
    order = order[descending(scores[order])]
    top = int(attrs.get("nms_top_k", -1))
    order = order[: top if top > -1 else None]
    own, offset = boxes[order], 0.0 if flag(attrs, "normalized", True) else 1.0
    better = np.tri(len(order), k=-1, dtype=bool)
    corners = own.T
    overlap = np.where(better, overlaps(corners[:, :, None], corners[:, None], offset), np.float32(0))
    worst = overlap.max(axis=1, initial=0)
    if choice(attrs, "decay_function", "linear", ("linear", "gaussian")) == "gaussian":
        decay = np.exp((worst * worst - overlap * overlap) * single(attrs, "gaussian_sigma", 2.0))
    else:
        decay = (1 - overlap) / (1 - worst + np.float32(1e-10))
    decayed = np.where(better, decay, np.float32(1)).min(axis=1, initial=1) * scores[order]
    return [(int(order[k]), decayed[k]) for k in np.flatnonzero(decayed > single(attrs, "post_threshold"))]


_Select = Callable[[Array, Array, Attrs], list[tuple[int, np.float32]]]


def _of_image(image: int, boxes: Array, scores: Array, attrs: Attrs, select: _Select) -> list[_Found]:
    """The best boxes of one image over all classes. Boxes are [m, 4], or [class, m, 4] if separate per class."""
    found = []
    for c in range(len(scores)):
        if c != int(attrs.get("background_class", -1)):
            found += [
                (image, c, i, score) for i, score in select(boxes if boxes.ndim == 2 else boxes[c], scores[c], attrs)
            ]
    found.sort(key=lambda f: (-f[3], *f[1:3]))
    keep = int(attrs.get("keep_top_k", -1))
    return found[: keep if keep > -1 else None]


def _sorted(found: list[_Found], attrs: Attrs, select: _Select) -> list[_Found]:
    """Sort the boxes, which arrive by image and then by score. MatrixNms sorts by class across images only."""
    order = choice(attrs, "sort_result_type", "none", ("none", "score", "classid"))
    across = flag(attrs, "sort_result_across_batch")
    if order == "score" and across:
        return sorted(found, key=lambda f: (-f[3], *f[:3]))
    if order == "classid" and across:
        return sorted(found, key=lambda f: (f[1], f[0], -f[3], f[2]))
    if order == "classid" and select is _multiclass:
        return sorted(found, key=lambda f: (f[0], f[1], -f[3], f[2]))
    return found


def _rows(
    found: list[_Found], box_of: Callable[[_Found], Array], index_of: Callable[[_Found], int], images: int, attrs: Attrs
) -> list[Array]:
    dtype = _index_type(attrs).numpy
    rows = np.asarray([[f[1], f[3], *box_of(f)] for f in found], np.float32).reshape(-1, 6)
    indices = np.asarray([index_of(f) for f in found], dtype).reshape(-1, 1)
    counts = np.bincount(np.asarray([f[0] for f in found], np.int64), minlength=images)
    return [rows, indices, counts.astype(dtype)]


def _select_all(inputs: Sequence[Any], attrs: Attrs, n: int, select: _Select) -> list[Array]:
    boxes, scores = (v.astype(np.float32, copy=False) for v in inputs[:2])
    found: list[_Found] = []
    if scores.ndim == 3:  # all classes share the boxes: [image, m, 4], [image, class, m]
        for image in range(len(scores)):
            found += _of_image(image, boxes[image], scores[image], attrs, select)
        count = boxes.shape[1]
        result = _rows(
            _sorted(found, attrs, select),
            lambda f: boxes[f[0], f[2]],
            lambda f: f[0] * count + f[2],
            len(scores),
            attrs,
        )
    else:  # [class, m of all images, 4], [class, m of all images], and the number of boxes per image
        sizes = [int(v) for v in inputs[2]]
        starts = [0, *np.cumsum(sizes).tolist()]
        for image, size in enumerate(sizes):
            part = slice(starts[image], starts[image] + size)
            found += _of_image(image, boxes[:, part], scores[:, part], attrs, select)
        classes = len(boxes)
        result = _rows(
            _sorted(found, attrs, select),
            lambda f: boxes[f[1], starts[f[0]] + f[2]],
            lambda f: (starts[f[0]] + f[2]) * classes + f[1],
            len(sizes),
            attrs,
        )
    return [result[0].astype(inputs[0].dtype, copy=False), *result[1:]][:n]


def _infer_rows(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    boxes, (images, _, _) = ranked(operands, 0, 3, "the boxes")
    count: Dim = images
    if given(operands, 2):
        ranked(operands, 1, 2, "the scores")
        _, (count,) = ranked(operands, 2, 1, "the numbers of boxes")
    else:
        ranked(operands, 1, 3, "the scores")
    choice(attrs, "sort_result_type", "none", ("none", "score", "classid"))
    index = _index_type(attrs)
    return [TensorType(boxes.dtype, (None, 6)), TensorType(index, (None, 1)), TensorType(index, (count,))][:n]


OPS = (
    OpSpec(name("NonMaxSuppression"), non_max_suppression, _infer_nms),
    OpSpec(name("MulticlassNms"), lambda inputs, attrs, n: _select_all(inputs, attrs, n, _multiclass), _infer_rows),
    OpSpec(name("MatrixNms"), lambda inputs, attrs, n: _select_all(inputs, attrs, n, _matrix), _infer_rows),
)
