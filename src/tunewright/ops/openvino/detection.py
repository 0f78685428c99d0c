"""DetectionOutput, the last layer of SSD networks: decodes boxes, suppresses overlapping ones, keeps the best.

The result has a fixed number of rows (image, class, score, x0, y0, x1, y1). A row whose image is -1 ends the list, and
zeros follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import Dim, TensorType, Type

from ..base import Array, Attrs, Operands, OpSpec
from ..shapes import given, times
from .common import descending, flag, ints, name, ranked, required, single, suppress

_CODES = ("CORNER", "CENTER_SIZE")


@dataclass(frozen=True)
class _Settings:
    """The attributes, with the defaults of OpenVINO's ONNX front end."""

    background: int
    top_k: int
    keep_top_k: int
    centered: bool
    variance_in_target: bool
    share_location: bool
    nms_threshold: np.float32
    confidence: np.float32
    clip_before: bool
    clip_after: bool
    mxnet: bool
    normalized: bool
    image: tuple[float, float]
    objectness: np.float32

    @property
    def prior_size(self) -> int:
        """The number of values of a prior. Priors in pixels start with the index of their image."""
        return 4 if self.normalized else 5

    @staticmethod
    def of(attrs: Attrs) -> _Settings:
        code = str(attrs.get("code_type", "CORNER")).rsplit(".", 1)[-1].upper()
        if code not in _CODES:
            raise ValueError(f"attribute 'code_type' is {attrs['code_type']!r}, not one of {', '.join(_CODES)}")
        required(attrs, "nms_threshold")
        return _Settings(
            background=int(attrs.get("background_label_id", 0)),
            top_k=int(attrs.get("top_k", -1)),
            keep_top_k=(ints(attrs, "keep_top_k", (1,)) or [-1])[0],
            centered=code == "CENTER_SIZE",
            variance_in_target=flag(attrs, "variance_encoded_in_target"),
            share_location=flag(attrs, "share_location", True),
            nms_threshold=single(attrs, "nms_threshold"),
            confidence=single(attrs, "confidence_threshold"),
            clip_before=flag(attrs, "clip_before_nms"),
            clip_after=flag(attrs, "clip_after_nms"),
            mxnet=flag(attrs, "decrease_label_id"),
            normalized=flag(attrs, "normalized", True),
            image=(float(attrs.get("input_width", 1)), float(attrs.get("input_height", 1))),
            objectness=single(attrs, "objectness_score"),
        )


def _clip(boxes: Array) -> Array:
    return np.maximum(np.float32(0), np.minimum(boxes, np.float32(1)))


def _decode(priors: Array, variances: Array | None, location: Array, s: _Settings) -> Array:
    """Boxes [prior, location class, 4] from priors [prior, (1,) 4] and predicted locations."""
    if not s.normalized:
        priors = priors / np.asarray(s.image * 2, np.float32)
    if variances is not None:
        location = location * variances
    if s.centered:
        size = priors[..., 2:] - priors[..., :2]
        center = location[..., :2] * size + (priors[..., :2] + priors[..., 2:]) / np.float32(2)
        with np.errstate(over="ignore"):
            reach = np.exp(location[..., 2:]) * size / np.float32(2)
        boxes = np.concatenate([center - reach, center + reach], axis=-1)
    else:
        boxes = priors + location
    return _clip(boxes) if s.clip_before else boxes


def _caffe(boxes: Array, scores: Array, s: _Settings) -> dict[int, Array]:
    """Suppression as in Caffe, per class: the priors that stay, best first."""
    kept = {}
    for c in range(scores.shape[1]):
        if c == s.background:
            continue
        candidates = np.flatnonzero(scores[:, c] > s.confidence)
        candidates = candidates[descending(scores[candidates, c])]
        if s.top_k > -1:
            candidates = candidates[: s.top_k]
        own = boxes[candidates, 0 if s.share_location else c]
        kept[c] = candidates[suppress(own, float(s.nms_threshold))]
    return kept


def _mxnet(boxes: Array, scores: Array, s: _Settings) -> dict[int, Array]:
    """Suppression as in MXNet: each prior only represents its best class."""
    usable = scores.copy()
    usable[:, 0] = -1
    if s.background > -1:
        usable[:, s.background] = -1
    label = usable.argmax(axis=1)
    best = usable[np.arange(len(usable)), label]
    candidates = np.flatnonzero((best > -1) & (best >= s.confidence) & (label > 0))
    candidates = candidates[descending(best[candidates])]
    if s.top_k > -1:
        candidates = candidates[: s.top_k]
    kept = {}
    for c in range(scores.shape[1]):
        own = candidates[label[candidates] == c]
        kept[c] = own[suppress(boxes[own, 0 if s.share_location else c], float(s.nms_threshold))]
    return kept


def _best(kept: dict[int, Array], scores: Array, limit: int) -> dict[int, Array]:
    """The ``limit`` best detections of an image, grouped by class."""
    labels = np.concatenate([np.full(len(p), c) for c, p in kept.items()])
    priors = np.concatenate(list(kept.values()))
    order = np.lexsort((priors, -scores[priors, labels]))[:limit]
    return {c: priors[order][labels[order] == c] for c in kept}


def detection_output(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    s = _Settings.of(attrs)
    dtype = inputs[0].dtype
    location, confidence, priors = (v.astype(np.float32, copy=False) for v in inputs[:3])
    images = location.shape[0]
    count = priors.shape[2] // s.prior_size
    scores = confidence.reshape(images, count, -1)
    classes = scores.shape[2]
    location = location.reshape(images, count, 1 if s.share_location else classes, 4)
    refined = len(inputs) > 4 and inputs[3] is not None and inputs[4] is not None
    if refined:
        objectness = inputs[3].astype(np.float32).reshape(images, count, 2)[..., 1]
        first = inputs[4].astype(np.float32).reshape(location.shape)
        nothing = np.zeros(classes, np.float32)
        nothing[s.background] = 1
        scores = np.where((objectness < s.objectness)[..., None], nothing, scores)
    rows = []
    for i in range(images):
        of_image = priors[i if len(priors) > 1 else 0]
        own = of_image[0].reshape(count, s.prior_size)
        used = count
        if not s.normalized:
            ends = np.flatnonzero(own[:, 0] == -1)  # the end marker of a Proposal's list
            used = int(ends[0]) if len(ends) else count
        variances = None if s.variance_in_target else of_image[1][: count * 4].reshape(count, 1, 4)
        boxes = own[:, None, -4:]
        if refined:
            boxes = _decode(boxes, variances, first[i], s)
        boxes = _decode(boxes, variances, location[i], s)[:used]
        seen = scores[i, :used]
        kept = (_mxnet if s.mxnet else _caffe)(boxes, seen, s)
        if -1 < s.keep_top_k < sum(len(p) for p in kept.values()):
            kept = _best(kept, seen, s.keep_top_k)
        for c, chosen in kept.items():
            row = np.empty((len(chosen), 7), np.float32)
            row[:, 0], row[:, 1], row[:, 2] = i, c - s.mxnet, seen[chosen, c]
            corners = boxes[chosen, 0 if s.share_location else c]
            row[:, 3:] = _clip(corners) if s.clip_after else corners
            rows.append(row)
    found = np.concatenate(rows) if rows else np.empty((0, 7), np.float32)
    total = _rows(images, count, classes, s)
    assert isinstance(total, WHOLE)
    result = np.zeros((1, 1, total, 7), np.float32)
    result[0, 0, : len(found)] = found[:total]
    if len(found) < total:
        result[0, 0, len(found), 0] = -1
    return [result.astype(dtype, copy=False)]


def _rows(images: Dim, priors: Dim, classes: Dim, s: _Settings) -> Dim:
    if s.keep_top_k > 0:
        return times(images, s.keep_top_k)
    if s.keep_top_k == -1 and s.top_k > 0:
        return times(images, s.top_k, classes)
    return times(images, priors, classes)


def _infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    s = _Settings.of(attrs)
    if given(operands, 3) != given(operands, 4):
        raise ValueError("the additional confidences and locations (inputs 3 and 4) go together")
    locations, (images, coordinates) = ranked(operands, 0, 2, "the locations")
    _, (_, confidences) = ranked(operands, 1, 2, "the confidences")
    _, (_, halves, values) = ranked(operands, 2, 3, "the priors")
    if isinstance(halves, WHOLE) and halves < (1 if s.variance_in_target else 2):
        raise ValueError("the priors (input 2) have no variances")
    priors: Dim = None
    classes: Dim = None
    if isinstance(values, WHOLE):
        priors = values // s.prior_size
        if priors * s.prior_size != values or not priors:
            raise ValueError(f"the priors (input 2) have {values} values, not a multiple of {s.prior_size}")
        if isinstance(confidences, WHOLE):
            classes = confidences // priors
            if classes * priors != confidences:
                raise ValueError(f"{confidences} confidences (input 1) are no multiple of {priors} priors")
            expected = priors * 4 * (1 if s.share_location else classes)
            if isinstance(coordinates, WHOLE) and coordinates != expected:
                raise ValueError(f"the locations (input 0) have {coordinates} values instead of {expected}")
    return [TensorType(locations.dtype, (1, 1, _rows(images, priors, classes, s), 7))]


OPS = (OpSpec(name("DetectionOutput"), detection_output, _infer),)
