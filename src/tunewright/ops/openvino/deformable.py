"""DeformableConv2D: a convolution with predicted offsets of its taps and an optional mask of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import Dim, TensorType, Type

from ..base import Array, Attrs, Operands, OpSpec
from ..numeric import wide
from ..shapes import given
from .common import choice, ints, name, ranked

_AUTO = ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")


def _geometry(attrs: Attrs, size: Sequence[Dim], kernel: Sequence[Dim]) -> list[tuple[int, int, int, Dim]]:
    """Per axis: stride, dilation, leading padding, output size."""
    strides, dilations = ints(attrs, "strides", (1, 1)), ints(attrs, "dilations", (1, 1))
    pads = ints(attrs, "pads", (0, 0, 0, 0))
    if len(strides) != 2 or len(dilations) != 2 or len(pads) != 4:
        raise ValueError("attributes 'strides', 'dilations' and 'pads' need 2, 2 and 4 values")
    auto = choice(attrs, "auto_pad", "NOTSET", _AUTO)
    result: list[tuple[int, int, int, Dim]] = []
    for axis, (n, k) in enumerate(zip(size, kernel, strict=True)):
        stride, dilation = strides[axis], dilations[axis]
        front, back = (0, 0) if auto == "VALID" else (pads[axis], pads[axis + 2])
        if not isinstance(n, WHOLE) or not isinstance(k, WHOLE):
            result.append((stride, dilation, front, None))
            continue
        reach = (k - 1) * dilation + 1
        if auto.startswith("SAME"):
            total = max((-(-n // stride) - 1) * stride + reach - n, 0)
            front = total // 2 if auto == "SAME_UPPER" else total - total // 2
            back = total - front
        if n + front + back < reach:
            raise ValueError(f"the kernel reaches over {reach} elements, but the padded data have {n + front + back}")
        result.append((stride, dilation, front, (n + front + back - reach) // stride + 1))
    return result


def deformable_conv(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    x, offsets, weights = (wide(v) for v in inputs[:3])
    mask = wide(inputs[3]) if len(inputs) > 3 and inputs[3] is not None else None
    groups, shared = int(attrs.get("group", 1)), int(attrs.get("deformable_groups", 1))
    batch, channels, height, width = x.shape
    outputs, _, kernel_h, kernel_w = weights.shape
    (sy, dy, py, oh), (sx, dx, px, ow) = _geometry(attrs, x.shape[2:], weights.shape[2:])
    assert isinstance(oh, WHOLE) and isinstance(ow, WHOLE)
    taps = kernel_h * kernel_w
    moved = offsets.reshape(batch, shared, kernel_h, kernel_w, 2, oh, ow)
    rows = (np.arange(kernel_h) * dy)[:, None, None, None] + (np.arange(oh) * sy - py)[:, None]
    columns = (np.arange(kernel_w) * dx)[:, None, None] + np.arange(ow) * sx - px
    y = (moved[:, :, :, :, 0] + rows.astype(x.dtype)).reshape(batch, shared, -1)
    at = (moved[:, :, :, :, 1] + columns.astype(x.dtype)).reshape(batch, shared, -1)
    inside = ((y >= 0) & (y < height) & (at >= 0) & (at < width)).astype(x.dtype)
    if mask is not None:
        inside = inside * mask.reshape(inside.shape)
    y, at = np.clip(y, 0, height - 1), np.clip(at, 0, width - 1)
    top, left = np.floor(y).astype(np.int64), np.floor(at).astype(np.int64)
    bottom, right = np.minimum(top + 1, height - 1), np.minimum(left + 1, width - 1)
    down, across = y - top, at - left
    maps = x.reshape(batch, shared, channels // shared, height * width)

    def tap(row: Array, column: Array, weight: Array) -> Array:
        index = np.broadcast_to((row * width + column)[:, :, None], (*maps.shape[:3], row.shape[2]))
        return np.asarray(np.take_along_axis(maps, index, axis=3) * (weight * inside)[:, :, None])

    sampled = tap(top, left, (1 - down) * (1 - across)) + tap(top, right, (1 - down) * across)
    sampled += tap(bottom, left, down * (1 - across)) + tap(bottom, right, down * across)
    patches = sampled.reshape(batch, groups, channels // groups * taps, oh * ow)
    filters = weights.reshape(groups, outputs // groups, -1)
    return [np.matmul(filters, patches).reshape(batch, outputs, oh, ow).astype(inputs[0].dtype, copy=False)]


def _infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    data, (batch, channels, *size) = ranked(operands, 0, 4, "the data")
    _, (_, moves, *_) = ranked(operands, 1, 4, "the offsets")
    _, (outputs, inner, *kernel) = ranked(operands, 2, 4, "the filters")
    groups, shared = int(attrs.get("group", 1)), int(attrs.get("deformable_groups", 1))
    if isinstance(channels, WHOLE) and (channels % groups or channels % shared):
        raise ValueError(f"{channels} channels do not fall into {groups} groups and {shared} deformable groups")
    if isinstance(channels, WHOLE) and isinstance(inner, WHOLE) and inner * groups != channels:
        raise ValueError(f"the filters (input 2) take {inner} x {groups} channels, but there are {channels}")
    if isinstance(kernel[0], WHOLE) and isinstance(kernel[1], WHOLE):
        taps = shared * kernel[0] * kernel[1]
        if isinstance(moves, WHOLE) and moves != 2 * taps:
            raise ValueError(f"the offsets (input 1) have {moves} channels instead of {2 * taps}")
        if given(operands, 3):
            _, (_, weights, *_) = ranked(operands, 3, 4, "the mask")
            if isinstance(weights, WHOLE) and weights != taps:
                raise ValueError(f"the mask (input 3) has {weights} channels instead of {taps}")
    return [TensorType(data.dtype, (batch, outputs, *(g[3] for g in _geometry(attrs, size, kernel))))]


def _flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    filters = inputs[2]
    return 2.0 * outputs[0].size * (filters.size / filters.dims[0] if filters is not None else 1.0)


OPS = (OpSpec(name("DeformableConv2D"), deformable_conv, _infer, flops=_flops),)
