"""Last layers of networks: RegionYolo, CTCGreedyDecoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import Dim, TensorType, Type

from ..base import Array, Attrs, Operands, OpSpec
from ..numeric import wide
from ..shapes import axis_of, times
from .common import flag, ints, name, ranked, required


def _regions(attrs: Attrs) -> tuple[int, int, int, bool]:
    """Regions, coordinates, classes, and whether classes use a softmax (YOLO v2) instead of a sigmoid (v3)."""
    softmax = flag(attrs, "do_softmax", True)
    regions = int(required(attrs, "num")) if softmax else len(ints(attrs, "mask"))
    return regions, int(required(attrs, "coords")), int(required(attrs, "classes")), softmax


def region_yolo(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    regions, coords, classes, softmax = _regions(attrs)
    batch, _, height, width = inputs[0].shape
    x = wide(inputs[0])[:, : regions * (coords + classes + 1)].reshape(batch, regions, -1, height, width)
    result = x.copy()
    with np.errstate(over="ignore"):
        for part in (slice(0, 2), slice(coords, coords + 1 if softmax else coords + 1 + classes)):
            result[:, :, part] = 1 / (1 + np.exp(-x[:, :, part]))
    if softmax:
        logits = x[:, :, coords + 1 :]
        powers = np.exp(logits - logits.max(axis=2, keepdims=True))
        result[:, :, coords + 1 :] = powers / powers.sum(axis=2, keepdims=True)
    shape = _region_shape((batch, regions * (coords + classes + 1), height, width), attrs)
    return [result.reshape([-1 if d is None else int(d) for d in shape]).astype(inputs[0].dtype, copy=False)]


def _region_shape(shape: tuple[Dim, ...], attrs: Attrs) -> tuple[Dim, ...]:
    """The result shape: flat from 'axis' to 'end_axis' for YOLO v2, unchanged rank for v3."""
    if not flag(attrs, "do_softmax", True):
        return shape
    first, last = axis_of(int(attrs.get("axis", 1)), 4), axis_of(int(attrs.get("end_axis", 3)), 4, "end_axis")
    return (*shape[:first], times(*shape[first : last + 1]), *shape[last + 1 :])


def _infer_region(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    data, (batch, channels, height, width) = ranked(operands, 0, 4, "the data")
    regions, coords, classes, _ = _regions(attrs)
    needed = regions * (coords + classes + 1)
    if isinstance(channels, WHOLE) and channels < needed:
        raise ValueError(f"the data (input 0) have {channels} channels, but {needed} are needed")
    return [TensorType(data.dtype, _region_shape((batch, needed, height, width), attrs))]


def ctc_greedy_decoder(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    data, mask = inputs[:2]
    steps, batch, classes = data.shape
    best = data.argmax(axis=2)
    active = np.logical_and.accumulate(mask != 0, axis=0)
    emitted = active & (best < classes - 1)
    if flag(attrs, "ctc_merge_repeated", True):
        emitted[1:] &= best[1:] != best[:-1]
    result = np.full((batch, steps, 1, 1), -1, data.dtype)
    for i in range(batch):
        labels = best[emitted[:, i], i]
        result[i, : len(labels), 0, 0] = labels
    return [result]


def _infer_ctc(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    data, (steps, batch, _) = ranked(operands, 0, 3, "the data")
    ranked(operands, 1, 2, "the mask")
    return [TensorType(data.dtype, (batch, steps, 1, 1))]


OPS = (
    OpSpec(name("RegionYolo"), region_yolo, _infer_region),
    OpSpec(name("CTCGreedyDecoder"), ctc_greedy_decoder, _infer_ctc),
)
