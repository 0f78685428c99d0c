"""Helpers of the OpenVINO families: names, attributes, shapes, and the arithmetic of boxes.

The operators have ONNX's domain ``org.openvinotoolkit`` and OpenVINO's attributes. Where OpenVINO's own ONNX front end
knows an operator, inputs, defaults and outputs follow that front end. Otherwise they follow its operation set.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tunewright.ir.types import Dim, TensorType

from ..base import Array, Attrs, Operands
from ..shapes import need_rank, tensor

DOMAIN = "org.openvinotoolkit"


def name(op: str) -> str:
    """``PriorBox`` -> ``org.openvinotoolkit::PriorBox``."""
    return f"{DOMAIN}::{op}"


def required(attrs: Attrs, key: str) -> Any:
    """The value of an attribute without a default."""
    if key not in attrs:
        raise ValueError(f"attribute {key!r} is missing")
    return attrs[key]


def floats(attrs: Attrs, key: str, default: tuple[float, ...] = ()) -> Array:
    """The attribute as a float32 array. A single number is a list of one."""
    return np.asarray(attrs.get(key, default), np.float32).reshape(-1)


def ints(attrs: Attrs, key: str, default: tuple[int, ...] = ()) -> list[int]:
    """The attribute as a list of integers. A single number is a list of one."""
    return [int(v) for v in np.asarray(attrs.get(key, default), np.float64).reshape(-1)]


def single(attrs: Attrs, key: str, default: float = 0.0) -> np.float32:
    """A number attribute as float32, the precision in which OpenVINO computes."""
    return np.float32(attrs.get(key, default))


def flag(attrs: Attrs, key: str, default: bool = False) -> bool:
    """A boolean attribute, which models write as a number or as a word."""
    value = attrs.get(key, default)
    return value.lower() in ("true", "1") if isinstance(value, str) else bool(value)


def choice(attrs: Attrs, key: str, default: str, allowed: tuple[str, ...]) -> str:
    """A word attribute that must be one of ``allowed``."""
    word = str(attrs.get(key, default))
    if word not in allowed:
        raise ValueError(f"attribute {key!r} is {word!r}, not one of {', '.join(allowed)}")
    return word


def ranked(operands: Operands, i: int, rank: int, what: str) -> tuple[TensorType, tuple[Dim, ...]]:
    """The type of input i and its ``rank`` dimensions. They are unknown when the rank is unknown."""
    t = tensor(operands, i)
    return t, need_rank(t, rank, f"{what} (input {i})")


def descending(scores: Array) -> Array:
    """Indices by falling score. Equal scores keep their order."""
    return np.argsort(-scores, kind="stable")


def overlaps(a: Array, b: Array, offset: float = 0.0) -> Array:
    """Intersection over union of boxes [4, ...], with broadcasting. ``offset`` is 1 where a box includes its corner
    pixels."""
    one, zero = np.float32(offset), np.float32(0)
    width = np.maximum(np.minimum(a[2], b[2]) - np.maximum(a[0], b[0]) + one, zero)
    height = np.maximum(np.minimum(a[3], b[3]) - np.maximum(a[1], b[1]) + one, zero)
    inside = width * height
    area = (a[2] - a[0] + one) * (a[3] - a[1] + one) + (b[2] - b[0] + one) * (b[3] - b[1] + one)
    touch = (a[0] <= b[2]) & (a[1] <= b[3]) & (b[0] <= a[2]) & (b[1] <= a[3])
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(touch, inside / (area - inside), zero)


def suppress(
    boxes: Array, threshold: float, limit: int | None = None, offset: float = 0.0, candidates: Array | None = None
) -> Array:
    """Suppress overlapping boxes greedily. Boxes come by falling score; the result is at most ``limit`` indices."""
    left = np.arange(len(boxes)) if candidates is None else np.flatnonzero(candidates)
    corners = np.ascontiguousarray(boxes[left].T)
    kept: list[int] = []
    while len(left) and (limit is None or len(kept) < limit):
        kept.append(int(left[0]))
        stay = ~(overlaps(corners[:, :1], corners, offset) > np.float32(threshold))
        stay[0] = False
        left, corners = left[stay], corners[:, stay]
    return np.asarray(kept, np.int64)


def refine(boxes: Array, deltas: Array, offset: float, limit: float = math.inf, inclusive: bool = True) -> Array:
    """Move and scale boxes by deltas (dx, dy, log dw, log dh). With ``inclusive``, the box has its far corner."""
    one, half = np.float32(offset), np.float32(0.5)
    size = boxes[..., 2:] - boxes[..., :2] + one
    center = deltas[..., :2] * size + (boxes[..., :2] + half * size)
    with np.errstate(over="ignore"):
        reach = half * (np.exp(np.minimum(deltas[..., 2:], np.float32(limit))) * size)
    far = center + reach - (one if inclusive else np.float32(0))
    return np.concatenate([center - reach, far], axis=-1)


def clip_boxes(boxes: Array, width: float, height: float) -> Array:
    """Clip corners to [0, width] x [0, height]."""
    high = np.asarray([width, height, width, height], np.float32)
    return np.maximum(np.float32(0), np.minimum(boxes, high))
