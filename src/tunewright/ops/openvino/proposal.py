"""Region proposals and heads of two-stage detectors: Proposal, GenerateProposals, ExperimentalDetectron*."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import DType, TensorType, Type

from ..base import Array, Attrs, Operands, OpSpec
from .common import clip_boxes, descending, flag, floats, name, ranked, refine, required, single, suppress

#: logarithm of the largest growth factor of a predicted size
_MAX_LOG = math.log(1000.0 / 16.0)
_REQUIRED = ("base_size", "pre_nms_topn", "post_nms_topn", "nms_thresh", "feat_stride", "min_size", "ratio", "scale")


def _anchors(attrs: Attrs, tensorflow: bool) -> Array:
    """Anchors [ratio x scale, 4] around the first cell."""
    base, half = np.float32(required(attrs, "base_size")), np.float32(0.5)
    one = np.float32(0 if tensorflow else 1)
    ratios, scales = floats(attrs, "ratio"), floats(attrs, "scale")
    width = np.sqrt(base * base / ratios)
    if not tensorflow:
        width = np.floor(width + half)
    height = width * ratios
    if not tensorflow:
        height = np.floor(height + half)
    reach = half * (np.stack([width, height], axis=1)[:, None] * scales[:, None] - one).reshape(-1, 2)
    center = half * (base - one) - (half * base if tensorflow else np.float32(0))
    return np.concatenate([center - reach, center + reach], axis=1).astype(np.float32)


def proposal(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    dtype = inputs[0].dtype
    scores, deltas, info = (v.astype(np.float32, copy=False) for v in inputs[:3])
    tensorflow = attrs.get("framework", "") == "tensorflow"
    one = np.float32(0 if tensorflow else 1)
    info = info.reshape(-1)
    image_h, image_w = (info[1], info[0]) if tensorflow else (info[0], info[1])
    min_h, min_w = (single(attrs, "min_size") * info[k if len(info) > 3 else 2] for k in (2, 3))
    images, channels, height, width = scores.shape
    count = channels // 2
    stride = int(required(attrs, "feat_stride"))
    rows, columns = (np.arange(size, dtype=np.float32) * stride for size in (height, width))
    shift = np.zeros((height, width, 1, 4), np.float32)
    shift[..., 0::2] = rows[:, None, None, None] if tensorflow else columns[None, :, None, None]
    shift[..., 1::2] = columns[None, :, None, None] if tensorflow else rows[:, None, None, None]
    anchors = (shift + _anchors(attrs, tensorflow)).reshape(-1, 4)
    if tensorflow:
        anchors = clip_boxes(anchors, image_w, image_h)
    scaling = np.asarray(
        [single(attrs, "box_coordinate_scale", 1.0)] * 2 + [single(attrs, "box_size_scale", 1.0)] * 2, np.float32
    )
    before, after = int(required(attrs, "pre_nms_topn")), int(required(attrs, "post_nms_topn"))
    rois = np.zeros((images, after, 5), np.float32)
    chances = np.zeros((images, after), np.float32)
    for i in range(images):
        moved = deltas[i].reshape(count, 4, height, width).transpose(2, 3, 0, 1).reshape(-1, 4) / scaling
        boxes = refine(anchors, moved, float(one), inclusive=False)
        if flag(attrs, "clip_before_nms", True):
            boxes = clip_boxes(boxes, image_w - one, image_h - one)
        size = boxes[:, 2:] - boxes[:, :2] + one
        score = scores[i, count:].transpose(1, 2, 0).reshape(-1) * ((size[:, 0] >= min_w) & (size[:, 1] >= min_h))
        order = descending(score)[:before]
        kept = order[suppress(boxes[order], float(required(attrs, "nms_thresh")), after, float(one))]
        chosen = boxes[kept]
        if flag(attrs, "clip_after_nms"):
            chosen = clip_boxes(chosen, image_w, image_h)
        if flag(attrs, "normalize"):
            chosen = chosen / np.asarray([image_w, image_h, image_w, image_h], np.float32)
        rois[i, : len(kept), 0], rois[i, : len(kept), 1:], chances[i, : len(kept)] = i, chosen, score[kept]
        if len(kept) < after:
            rois[i, len(kept), 0] = -1  # marks the end of the list
    return [rois.reshape(-1, 5).astype(dtype, copy=False), chances.reshape(-1).astype(dtype, copy=False)][:n]


def _infer_proposal(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    for key in _REQUIRED:
        required(attrs, key)
    scores, (images, channels, _, _) = ranked(operands, 0, 4, "the class probabilities")
    ranked(operands, 1, 4, "the box deltas")
    count = len(floats(attrs, "ratio")) * len(floats(attrs, "scale"))
    if isinstance(channels, WHOLE) and channels != 2 * count:
        raise ValueError(
            f"{count} ratios x scales need {2 * count} class probabilities (input 0) per cell, not {channels}"
        )
    after = int(attrs["post_nms_topn"])
    rows = images * after if isinstance(images, WHOLE) else None
    return [TensorType(scores.dtype, (rows, 5)), TensorType(scores.dtype, (rows,))][:n]


def _propose(
    info: Array,
    anchors: Array,
    deltas: Array,
    scores: Array,
    limits: tuple[int, int, float],
    smallest: tuple[float, float],
    offsets: tuple[float, float],
    drop: bool,
) -> tuple[Array, Array]:
    """Boxes and scores of one image.

    ``limits``: numbers of boxes before and after suppression, and its threshold. ``offsets``: of sizes and of overlaps.
    ``drop``: remove boxes below the smallest width or height; otherwise their score becomes zero.
    """
    before, after, threshold = limits
    one, count = np.float32(offsets[0]), len(scores)
    moved = deltas.reshape(count, 4, *scores.shape[1:]).transpose(2, 3, 0, 1).reshape(-1, 4)
    boxes = clip_boxes(refine(anchors, moved, float(one), _MAX_LOG), info[1] - one, info[0] - one)
    size = boxes[:, 2:] - boxes[:, :2] + one
    valid = (size[:, 0] >= np.float32(smallest[0])) & (size[:, 1] >= np.float32(smallest[1]))
    score = scores.transpose(1, 2, 0).reshape(-1)
    if not drop:
        score = score * valid
    order = descending(score)[:before]
    kept = order[suppress(boxes[order], threshold, after, offsets[1], valid[order] if drop else None)]
    return boxes[kept], score[kept]


def single_image_proposals(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    dtype = inputs[0].dtype
    info, anchors, deltas, scores = (v.astype(np.float32, copy=False) for v in inputs[:4])
    before, after = int(attrs.get("pre_nms_count", 1000)), int(attrs.get("post_nms_count", 1000))
    least = float(attrs.get("min_size", 0.0))
    limits = before, after, float(attrs.get("nms_threshold", 0.7))
    boxes, score = _propose(info.reshape(-1), anchors, deltas, scores, limits, (least, least), (1.0, 0.0), drop=False)
    rois = np.zeros((after, 4), dtype)
    chances = np.zeros(len(rois), dtype)
    rois[: len(boxes)], chances[: len(boxes)] = boxes, score
    return [rois, chances][:n]


def _infer_single_image(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    ranked(operands, 1, 2, "the anchors")
    ranked(operands, 2, 3, "the deltas")
    scores, _ = ranked(operands, 3, 3, "the scores")
    count = int(attrs.get("post_nms_count", 1000))
    return [TensorType(scores.dtype, (count, 4)), TensorType(scores.dtype, (count,))][:n]


def generate_proposals(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    dtype = inputs[0].dtype
    scores, deltas, info, anchors = (v.astype(np.float32, copy=False) for v in inputs[:4])
    limits = (
        int(attrs.get("pre_nms_topN", 6000)),
        int(attrs.get("post_nms_topN", 300)),
        float(attrs.get("nms_thresh", 0.7)),
    )
    one = 1.0 if flag(attrs, "legacy_plus_one", True) else 0.0
    least = float(attrs.get("min_size", 1.0))
    anchors = np.broadcast_to(anchors, (*scores.shape[2:], *anchors.shape[-2:])).reshape(-1, 4)
    found = []
    for i in range(len(scores)):
        scale_h, scale_w = (info[i, 2], info[i, -1]) if info.shape[1] > 2 else (1.0, 1.0)
        smallest = least * scale_w, least * scale_h
        found.append(_propose(info[i], anchors, deltas[i], scores[i], limits, smallest, (one, one), drop=True))
    rois = np.concatenate([boxes for boxes, _ in found]) if found else np.empty((0, 4), np.float32)
    chances = np.concatenate([score for _, score in found]) if found else np.empty(0, np.float32)
    counts = np.asarray([len(score) for _, score in found], np.int64)
    return [rois.astype(dtype, copy=False), chances.astype(dtype, copy=False), counts][:n]


def _infer_generate(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    scores, (images, *_) = ranked(operands, 0, 4, "the scores")
    ranked(operands, 1, 4, "the deltas")
    ranked(operands, 2, 2, "the image sizes")
    ranked(operands, 3, 2, "the anchors")
    dtype = scores.dtype
    return [TensorType(dtype, (None, 4)), TensorType(dtype, (None,)), TensorType(DType.INT64, (images,))][:n]


def detectron_output(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    dtype = inputs[0].dtype
    rois, deltas, scores = (v.astype(np.float32, copy=False) for v in inputs[:3])
    classes, limit = int(attrs.get("num_classes", 81)), int(attrs.get("max_detections_per_image", 100))
    per_class = int(attrs.get("post_nms_count", 2000))
    most, threshold = None if per_class < 0 else per_class, float(attrs.get("nms_threshold", 0.5))
    weights = floats(attrs, "deltas_weights", (10.0, 10.0, 5.0, 5.0))
    moved = deltas.reshape(len(rois), classes, 4) / weights
    boxes = refine(rois[:, None], moved, 1.0, float(attrs.get("max_delta_log_wh", _MAX_LOG)))
    boxes = np.maximum(np.float32(0), boxes)
    valid = np.all(rois[:, 2:] > rois[:, :2], axis=1)
    found: list[tuple[int, Array]] = []
    for c in range(1, classes):
        usable = np.flatnonzero(valid & (scores[:, c] > single(attrs, "score_threshold", 0.05)))
        usable = usable[descending(scores[usable, c])]
        found.append((c, usable[suppress(boxes[usable, c], threshold, most, 1.0)]))
    label = np.concatenate([np.full(len(k), c) for c, k in found]).astype(np.int32) if found else np.empty(0, np.int32)
    index = np.concatenate([k for _, k in found]) if found else np.empty(0, np.int64)
    if len(index) > limit:
        order = np.lexsort((index, -scores[index, label]))[:limit]
        label, index = label[order], index[order]
    out_boxes, out_scores = np.zeros((limit, 4), dtype), np.zeros(limit, dtype)
    out_labels = np.zeros(limit, np.int32)
    here = slice(len(index))
    out_boxes[here], out_labels[here], out_scores[here] = boxes[index, label], label, scores[index, label]
    return [out_boxes, out_labels, out_scores][:n]


def _infer_detectron_output(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    rois, _ = ranked(operands, 0, 2, "the rois")
    classes = int(attrs.get("num_classes", 81))
    for i, what, wanted in ((1, "the deltas", 4 * classes), (2, "the scores", classes)):
        _, (_, columns) = ranked(operands, i, 2, what)
        if isinstance(columns, WHOLE) and columns != wanted:
            raise ValueError(f"{what} (input {i}) have {columns} columns instead of {wanted}")
    if len(floats(attrs, "deltas_weights", (10.0, 10.0, 5.0, 5.0))) != 4:
        raise ValueError("attribute 'deltas_weights' needs 4 values")
    limit = int(attrs.get("max_detections_per_image", 100))
    return [TensorType(rois.dtype, (limit, 4)), TensorType(DType.INT32, (limit,)), TensorType(rois.dtype, (limit,))][:n]


def top_rois(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    rois, chances = inputs[:2]
    result = np.zeros((int(attrs.get("max_rois", 1000)), 4), rois.dtype)
    best = rois[descending(chances.astype(np.float32, copy=False))[: len(result)]]
    result[: len(best)] = best
    return [result]


def _infer_top_rois(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    rois, _ = ranked(operands, 0, 2, "the rois")
    ranked(operands, 1, 1, "the probabilities")
    return [TensorType(rois.dtype, (int(attrs.get("max_rois", 1000)), 4))]


OPS = (
    OpSpec(name("Proposal"), proposal, _infer_proposal),
    OpSpec(name("GenerateProposals"), generate_proposals, _infer_generate),
    OpSpec(name("ExperimentalDetectronGenerateProposalsSingleImage"), single_image_proposals, _infer_single_image),
    OpSpec(name("ExperimentalDetectronDetectionOutput"), detectron_output, _infer_detectron_output),
    OpSpec(name("ExperimentalDetectronTopKROIs"), top_rois, _infer_top_rois),
)
