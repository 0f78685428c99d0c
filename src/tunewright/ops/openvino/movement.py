"""OpenVINO layers that move data: Copy, Crop, Tile, ShuffleChannels, SpaceToBatch, BatchToSpace, StridedSlice,
ReorgYolo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import Dim, TensorType, Type

from ..base import Array, Attrs, Operands, OpSpec
from ..shapes import axis_of, given, same_as, tensor, times, value
from .common import ints, name, ranked, required


def copy(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    return [inputs[0].copy()]


def crop_window(attrs: Attrs, shape: Sequence[Dim], like: Sequence[Dim] | None) -> list[tuple[int, Dim]]:
    """First element and length per axis. The lengths come from 'dim', from 'crop_end', or from a second input."""
    rank = len(shape)
    axes = [axis_of(a, rank) for a in ints(attrs, "axis", (2,))]
    offsets = ints(attrs, "offset", tuple(ints(attrs, "crop_begin", (0,))))
    if like is not None and len(axes) == 1:
        axes = list(range(axes[0], rank))  # in Caffe a single axis stands for itself and all later axes
    if len(offsets) == 1:
        offsets *= len(axes)
    lengths, ends = ints(attrs, "dim"), ints(attrs, "crop_end")
    parts: list[tuple[int, Dim]] = [(0, d) for d in shape]
    for k, axis in enumerate(axes):
        if k >= len(offsets):
            raise ValueError(f"{len(axes)} axes are cropped, but {len(offsets)} offsets are given")
        size = shape[axis]
        length: Dim = None
        if k < len(lengths):
            length = lengths[k]
        elif k < len(ends):
            length = size - offsets[k] - ends[k] if isinstance(size, WHOLE) else None
        elif like is not None:
            length = like[axis]
        else:
            raise ValueError("one of the attributes 'dim' and 'crop_end', or a second input, is needed")
        if isinstance(size, WHOLE) and isinstance(length, WHOLE) and not 0 <= offsets[k] <= offsets[k] + length <= size:
            raise ValueError(f"elements {offsets[k]} to {offsets[k] + length} of axis {axis} are outside of its {size}")
        parts[axis] = (offsets[k], length)
    return parts


def crop(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    like = inputs[1].shape if len(inputs) > 1 and inputs[1] is not None else None
    where = tuple(slice(start, start + int(length or 0)) for start, length in crop_window(attrs, inputs[0].shape, like))
    return [np.ascontiguousarray(inputs[0][where])]


def _infer_crop(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    data = tensor(operands, 0)
    like = tensor(operands, 1) if given(operands, 1) else None
    if data.shape is None or (like is not None and like.shape is None):
        return [data.with_shape(None)]
    window = crop_window(attrs, data.shape, like.shape if like is not None else None)
    return [data.with_shape(tuple(d for _, d in window))]


def _repeats(attrs: Attrs, rank: int) -> list[int]:
    repeats = [1] * rank
    repeats[axis_of(int(required(attrs, "axis")), rank)] = int(required(attrs, "tiles"))
    return repeats


def tile(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    if len(inputs) > 1 and inputs[1] is not None:
        return [np.tile(inputs[0], [int(r) for r in inputs[1]])]
    return [np.tile(inputs[0], _repeats(attrs, inputs[0].ndim))]


def _infer_tile(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    data = tensor(operands, 0)
    if data.shape is None:
        return [data]
    if given(operands, 1):
        known = value(operands, 1)
        if known is None:
            return [data.with_shape(None)]
        repeats = [int(r) for r in known]
    else:
        repeats = _repeats(attrs, len(data.shape))
    rank = max(len(repeats), len(data.shape))
    dims = (1,) * (rank - len(data.shape)) + data.shape
    repeats = [1] * (rank - len(repeats)) + repeats
    return [data.with_shape(tuple(d if r == 1 else times(d, r) for d, r in zip(dims, repeats, strict=True)))]


def shuffle_channels(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    x = inputs[0]
    axis, group = axis_of(int(attrs.get("axis", 1)), x.ndim), int(attrs.get("group", 1))
    split = x.reshape(*x.shape[:axis], group, x.shape[axis] // group, *x.shape[axis + 1 :])
    return [np.ascontiguousarray(split.swapaxes(axis, axis + 1)).reshape(x.shape)]


def _infer_shuffle(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    data, group = tensor(operands, 0), int(attrs.get("group", 1))
    if data.shape is not None:
        size = data.shape[axis_of(int(attrs.get("axis", 1)), len(data.shape))]
        if group < 1 or (isinstance(size, WHOLE) and size % group):
            raise ValueError(f"{size} channels do not fall into {group} groups")
    return [data]


def space_to_batch(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    x, (block, begin, end) = inputs[0], ([int(v) for v in a] for a in inputs[1:4])
    x = np.pad(x, list(zip(begin, end, strict=True)))
    split = [v for d, b in zip(x.shape[1:], block[1:], strict=True) for v in (d // b, b)]
    rank = x.ndim - 1
    order = [*range(2, 2 * rank + 1, 2), 0, *range(1, 2 * rank + 1, 2)]
    x = x.reshape(x.shape[0], *split).transpose(order)
    return [np.ascontiguousarray(x).reshape(-1, *x.shape[rank + 1 :])]


def batch_to_space(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    x, (block, begin, end) = inputs[0], ([int(v) for v in a] for a in inputs[1:4])
    rank = x.ndim - 1
    batch = x.shape[0] // int(np.prod(block[1:]))
    order = [rank, *(v for k in range(rank) for v in (rank + 1 + k, k))]
    joined = x.reshape(*block[1:], batch, *x.shape[1:]).transpose(order)
    x = joined.reshape(batch, *(d * b for d, b in zip(x.shape[1:], block[1:], strict=True)))
    return [np.ascontiguousarray(x[tuple(slice(b, d - e) for b, e, d in zip(begin, end, x.shape, strict=True))])]


def _infer_blocks(operands: Operands, to_batch: bool) -> Sequence[Type | None]:
    data = tensor(operands, 0)
    if data.shape is None:
        return [data]
    known = [value(operands, i) for i in (1, 2, 3)]
    if any(k is None for k in known):
        return [data.with_shape((None,) * len(data.shape))]
    block, begin, end = ([int(v) for v in k] for k in known)
    if not len(block) == len(begin) == len(end) == len(data.shape) or block[0] != 1 or min(block) < 1:
        raise ValueError(f"the block {block} and the borders {begin}, {end} do not fit data of rank {len(data.shape)}")
    area = int(np.prod(block))
    dims: list[Dim] = []
    for k, (d, b) in enumerate(zip(data.shape, block, strict=True)):
        if not isinstance(d, WHOLE):
            dims.append(None)
        elif to_batch:
            padded = d + begin[k] + end[k]
            if padded % b:
                raise ValueError(f"axis {k} of {padded} elements does not fall into blocks of {b}")
            dims.append(padded * area if k == 0 else padded // b)
        else:
            if k == 0 and d % area:
                raise ValueError(f"a batch of {d} does not fall into blocks of {area}")
            dims.append((d // area if k == 0 else d * b) - begin[k] - end[k])
    return [data.with_shape(tuple(dims))]


def _slices(attrs: Attrs, begin: Array, end: Array, step: Array | None) -> tuple[Any, ...]:
    """The numpy index of a StridedSlice. Masks select ignored bounds, new axes and removed axes."""
    masks = ("begin_mask", "end_mask", "new_axis_mask", "shrink_axis_mask", "ellipsis_mask")
    low, high, new, gone, rest = ([*ints(attrs, key), *(0,) * len(begin)] for key in masks)
    index: list[Any] = []
    for k in range(len(begin)):
        stride = int(step[k]) if step is not None else 1
        if rest[k]:
            index.append(Ellipsis)
        elif new[k]:
            index.append(np.newaxis)
        elif gone[k]:
            index.append(int(begin[k]))
        else:
            index.append(slice(None if low[k] else int(begin[k]), None if high[k] else int(end[k]), stride))
    return tuple(index)


def strided_slice(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    step = inputs[3] if len(inputs) > 3 else None
    return [np.array(inputs[0][_slices(attrs, inputs[1], inputs[2], step)], copy=True)]


def _infer_strided_slice(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    data = tensor(operands, 0)
    begin, end, step = (value(operands, i) for i in (1, 2, 3))
    if data.shape is None or begin is None or end is None or (given(operands, 3) and step is None):
        return [data.with_shape(None)]
    if not data.is_static:
        return [data.with_shape(None)]
    probe = np.broadcast_to(np.zeros((), np.int8), data.dims)  # a broadcast view, which stores no elements
    return [data.with_shape(probe[_slices(attrs, begin, end, step)].shape)]


def reorg_yolo(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    x, stride = inputs[0], _stride(attrs)
    batch, channels, height, width = x.shape
    inner = channels // (stride * stride)
    # OpenVINO reads the data as a plane that is larger by the stride in both directions, with correspondingly fewer
    # channels.
    wide = x.reshape(batch, inner, height, stride, width, stride).transpose(0, 3, 5, 1, 2, 4)
    return [np.ascontiguousarray(wide).reshape(batch, channels * stride * stride, height // stride, width // stride)]


def _stride(attrs: Attrs) -> int:
    stride = ints(attrs, "stride", tuple(ints(attrs, "strides")))
    if not stride or stride[0] < 1:
        raise ValueError("attribute 'stride' must be a positive number")
    return stride[0]


def _infer_reorg(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    data, (batch, channels, height, width) = ranked(operands, 0, 4, "the data")
    stride = _stride(attrs)
    if isinstance(channels, WHOLE) and (channels < stride * stride or channels % (stride * stride)):
        raise ValueError(f"{channels} channels are no multiple of {stride} x {stride}")
    for d in (height, width):
        if isinstance(d, WHOLE) and d % stride:
            raise ValueError(f"{d} rows or columns are no multiple of the stride, {stride}")
    plane = (d // stride if isinstance(d, WHOLE) else None for d in (height, width))
    return [TensorType(data.dtype, (batch, times(channels, stride, stride), *plane))]


OPS = (
    OpSpec(name("Copy"), copy, same_as(), view=True),
    OpSpec(name("Crop"), crop, _infer_crop),
    OpSpec(name("Tile"), tile, _infer_tile),
    OpSpec(name("ShuffleChannels"), shuffle_channels, _infer_shuffle),
    OpSpec(name("SpaceToBatch"), space_to_batch, lambda operands, attrs, n: _infer_blocks(operands, True)),
    OpSpec(name("BatchToSpace"), batch_to_space, lambda operands, attrs, n: _infer_blocks(operands, False)),
    OpSpec(name("StridedSlice"), strided_slice, _infer_strided_slice),
    OpSpec(name("ReorgYolo"), reorg_yolo, _infer_reorg),
)
