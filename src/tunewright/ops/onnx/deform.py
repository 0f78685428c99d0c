"""Operators related to convolution and pooling that scatter or sample: DeformConv, Col2Im, MaxUnpool."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import Dim, TensorType, Type

from .. import shapes
from ..base import Array, Attrs, Operands, OpSpec
from ..input_errors import check_rows
from ..numeric import narrow, wide
from ..samples import dense
from ..samples.base import with_samples
from ..windows import all_pads, spread, taps, windows
from .conv import add_bias, conv_flops, conv_shape
from .tensors.slicing import pad


# -- DeformConv -------------------------------------------------------------------------------------------------------
def _bilinear(pixels: Array, at: Array, spatial: Sequence[int]) -> Array:
    """[points, channels] of ``pixels`` [*spatial flat, channels] at coordinates [axes, points]. Outside points are
    zero."""
    base = np.floor(at)
    part = at - base
    total = np.zeros((at.shape[1], pixels.shape[1]), pixels.dtype)
    for corner in itertools.product((0, 1), repeat=len(spatial)):
        index = [base[k] + c for k, c in enumerate(corner)]
        weight = np.ones(at.shape[1], at.dtype)
        for k, c in enumerate(corner):
            weight *= np.where((index[k] >= 0) & (index[k] < spatial[k]), part[k] if c else 1 - part[k], 0)
        legal = [np.clip(i, 0, d - 1).astype(np.int64) for i, d in zip(index, spatial, strict=True)]
        total += pixels[np.ravel_multi_index(legal, spatial)] * weight.astype(pixels.dtype)[:, None]
    return total


def _deform_conv(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, w, offset = (wide(v) for v in inputs[:3])
    bias, mask = shapes.optional(inputs, 3), shapes.optional(inputs, 4)
    group, sets, rank = int(attrs.get("group", 1)), int(attrs.get("offset_group", 1)), x.ndim - 2
    win = windows(x.shape[2:], w.shape[2:], attrs)
    count, points, channels = math.prod(win.kernel), math.prod(win.output), x.shape[1] // sets
    offset = offset.reshape(x.shape[0], sets, count, rank, points)
    factor = None if mask is None else wide(mask).reshape(x.shape[0], sets, count, points)
    corner = np.stack(
        np.meshgrid(
            *(np.arange(o) * s - h for o, s, h in zip(win.output, win.strides, win.head, strict=True)), indexing="ij"
        )
    ).reshape(rank, points)
    y = np.empty((x.shape[0], w.shape[0], *win.output), x.dtype)
    columns = np.empty((x.shape[1], count, points), x.dtype)
    for b in range(x.shape[0]):
        for g in range(sets):
            part = slice(g * channels, (g + 1) * channels)
            pixels = np.ascontiguousarray(x[b, part].reshape(channels, -1).T)
            for k in range(count):
                tap = np.unravel_index(k, win.kernel)
                move = np.array([int(t) * d for t, d in zip(tap, win.dilations, strict=True)]).reshape(rank, 1)
                value = _bilinear(pixels, corner + move + offset[b, g, k], x.shape[2:])
                columns[part, k] = value.T if factor is None else value.T * factor[b, g, k]
        matrix = columns.reshape(group, -1, points)
        y[b] = np.matmul(w.reshape(group, w.shape[0] // group, -1), matrix).reshape(y.shape[1:])
    return [narrow(add_bias(y, bias), inputs[0].dtype)]


def _infer_deform_conv(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, w, offset = (shapes.tensor(operands, i) for i in range(3))
    shape = conv_shape(x, w, attrs)
    if shape is None:
        return [TensorType(x.dtype, shapes.unknown(offset.rank))]
    places = shapes.need_rank(offset, len(shape), "the offsets")
    dims = [shapes.same_dim(a, b, "the offsets do not fit") for a, b in zip(shape[2:], places[2:], strict=True)]
    return [TensorType(x.dtype, (*shape[:2], *dims))]


# -- Col2Im -----------------------------------------------------------------------------------------------------------
def _col2im(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, image, block = wide(inputs[0]), inputs[1].reshape(-1).tolist(), inputs[2].reshape(-1).tolist()
    rank, count = len(image), math.prod(block)
    win = windows(image, block, attrs)
    channels = x.shape[1] // count
    if x.shape[1] % count or x.shape[2] != math.prod(win.output):
        raise ValueError(f"columns of shape {list(x.shape)} do not fit an image {image} in blocks {block}")
    pads = all_pads(attrs, rank)
    full = np.zeros((x.shape[0], channels, *(d + pads[k] + pads[k + rank] for k, d in enumerate(image))), x.dtype)
    columns = x.reshape(x.shape[0], channels, count, *win.output)
    for k, (_, region) in enumerate(taps(win)):
        full[(slice(None), slice(None), *region)] += columns[:, :, k]
    return [narrow(pad(full, [(0, 0), (0, 0), *((-pads[k], -pads[k + rank]) for k in range(rank))]), inputs[0].dtype)]


def _infer_col2im(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, image, block = shapes.tensor(operands, 0), shapes.ints(operands, 1), shapes.ints(operands, 2)
    batch, columns, _ = shapes.need_rank(x, 3, "the input")
    if image is None:
        rank = shapes.length(shapes.tensor(operands, 1))
        return [TensorType(x.dtype, None if rank is None else (batch, *(None,) * (rank + 1)))]
    channels: Dim = None
    if block is not None and isinstance(columns, WHOLE):
        if min(block, default=1) < 1 or columns % math.prod(block):
            raise ValueError(f"{columns} columns do not divide into blocks {block}")
        channels = columns // math.prod(block)
    return [TensorType(x.dtype, (batch, channels, *image))]


# -- MaxUnpool --------------------------------------------------------------------------------------------------------
def unpooled(dims: Sequence[Dim], attrs: Attrs) -> tuple[Dim, ...]:
    """The spatial dimensions of the smallest input that the pooling can have had."""
    kernel, rank = attrs["kernel_shape"], len(dims)
    if len(kernel) != rank:
        raise ValueError(f"kernel_shape {list(kernel)} does not fit {rank} spatial axes")
    strides, pads = spread(attrs, "strides", rank), all_pads(attrs, rank)
    return tuple(
        (d - 1) * strides[k] - pads[k] - pads[k + rank] + kernel[k] if isinstance(d, WHOLE) else None
        for k, d in enumerate(dims)
    )


def _max_unpool(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, indices, wanted = inputs[0], inputs[1], shapes.optional(inputs, 2)
    dims = [d for d in (*x.shape[:2], *unpooled(x.shape[2:], attrs)) if d is not None]
    y = np.zeros(math.prod(int(d) for d in dims), x.dtype)
    check_rows(indices, y.size)
    y[indices.reshape(-1)] = x.reshape(-1)
    y = y.reshape([int(d) for d in dims])
    if wanted is None:
        return [y]
    # The indices count elements of the smallest possible output. A larger output gets zeros at its ends.
    return [pad(y, [(0, int(w) - d) for w, d in zip(wanted.tolist(), y.shape, strict=True)])]


def _infer_max_unpool(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, wanted = shapes.tensor(operands, 0), shapes.ints(operands, 2)
    if wanted is not None:
        return [TensorType(x.dtype, tuple(wanted))]
    if x.shape is None or shapes.given(operands, 2):
        return [TensorType(x.dtype, shapes.unknown(x.rank))]
    return [TensorType(x.dtype, (*x.shape[:2], *unpooled(x.shape[2:], attrs)))]


OPS = with_samples(
    (
        OpSpec("DeformConv", _deform_conv, _infer_deform_conv, flops=conv_flops, heavy=True),
        OpSpec("Col2Im", _col2im, _infer_col2im),
        OpSpec("MaxUnpool", _max_unpool, _infer_max_unpool),
    ),
    dense.DEFORM,
)
