"""Convolutions as matrix products. 1x1 kernels need one product, depthwise ones run tap by tap. All others use im2col
in bounded chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import Dim, DType, Shape, TensorType, Type
from tunewright.ops import batch_rules

from .. import shapes
from ..base import Array, Attrs, Operands, OpSpec
from ..numeric import chunks, narrow, product_type, wide
from ..samples import dense
from ..samples.base import with_samples
from ..windows import MOST_PADDING, Windows, all_pads, output_dims, padded, spread, taps, window_view, windows
from .tensors.slicing import pad

_CHUNK = 4 << 20  # bytes of unfolded input at a time: fits the last-level cache


def convolve(x: Array, w: Array, attrs: Attrs) -> Array:
    """[N, C, *S] with [M, C/group, *K] -> [N, M, *O], in the type of the operands. BLAS must support that type."""
    group = int(attrs.get("group", 1))
    if x.ndim < 3 or w.ndim != x.ndim:
        raise ValueError(f"input of rank {x.ndim} and weights of rank {w.ndim}")
    if x.shape[1] != w.shape[1] * group or w.shape[0] % group:
        raise ValueError(f"{x.shape[1]} channels do not fit weights of shape {list(w.shape)} in {group} groups")
    win = windows(x.shape[2:], w.shape[2:], attrs)
    y = np.empty((x.shape[0], w.shape[0], *win.output), x.dtype)
    if not y.size:
        return y
    if win.trivial:
        _pointwise(x, w, win, group, y)
    elif w.shape[1] == 1 and group > 1:
        _depthwise(padded(x, win), w, win, y)
    else:
        _unfolded(padded(x, win), w, win, group, y)
    return y


def _pointwise(x: Array, w: Array, win: Windows, group: int, y: Array) -> None:
    """Convolution with one tap: a product per image and group."""
    if any(s != 1 for s in win.strides) or win.output != x.shape[2:]:
        reach = (slice(0, (o - 1) * s + 1, s) for o, s in zip(win.output, win.strides, strict=True))
        x = x[(slice(None), slice(None), *reach)]
    columns = np.ascontiguousarray(x).reshape(x.shape[0], group, x.shape[1] // group, -1)
    np.matmul(
        w.reshape(group, w.shape[0] // group, -1), columns, out=y.reshape(x.shape[0], group, w.shape[0] // group, -1)
    )


def _depthwise(x: Array, w: Array, win: Windows, y: Array) -> None:
    """Depthwise convolution: one multiply-add per tap, over blocks of channels that fit the cache."""
    batch, channels = x.shape[:2]
    times = w.shape[0] // channels
    out = y.reshape(batch, channels, times, *win.output)
    weights = w.reshape(channels, times, math.prod(win.kernel), *(1 for _ in win.kernel))
    block = max(1, (1 << 17) // max(1, times * math.prod(win.output) * x.itemsize))
    scratch = np.empty((min(block, channels), times, *win.output), x.dtype)
    regions = taps(win)
    for n in range(batch):
        for begin, end in chunks(channels, block):
            target, product = out[n, begin:end], scratch[: end - begin]
            for k, (_, region) in enumerate(regions):
                part = x[(n, slice(begin, end), None, *region)]
                if k == 0:
                    np.multiply(part, weights[begin:end, :, k], out=target)
                else:
                    np.multiply(part, weights[begin:end, :, k], out=product)
                    target += product


def _unfolded(x: Array, w: Array, win: Windows, group: int, y: Array) -> None:
    """Convolution by im2col, a few output rows at a time."""
    batch, channels = x.shape[:2]
    depth = channels * math.prod(win.kernel)
    weights = w.reshape(group, w.shape[0] // group, -1)
    row = math.prod(win.output[1:])
    rows = max(1, min(win.output[0], _CHUNK // max(1, depth * row * x.itemsize)))
    buffer = np.empty(depth * rows * row, x.dtype)
    view = window_view(x, win)
    lead = (slice(None),) * (1 + len(win.kernel))
    for n in range(batch):
        target = y[n].reshape(group, w.shape[0] // group, -1)
        for begin, end in chunks(win.output[0], rows):
            columns = buffer[: depth * (end - begin) * row]
            source = view[n][(*lead, slice(begin, end))]
            np.copyto(columns.reshape(source.shape), source)
            matrix = columns.reshape(group, depth // group, -1)
            if group == 1:
                np.matmul(weights[0], matrix[0], out=target[0, :, begin * row : end * row])
            else:
                target[:, :, begin * row : end * row] = np.matmul(weights, matrix)


def add_bias(y: Array, bias: Array | None) -> Array:
    """Add one number per channel to ``y``, in place."""
    if bias is not None:
        y += bias.astype(y.dtype).reshape(-1, *(1 for _ in y.shape[2:]))
    return y


def _conv(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, w = inputs[0], inputs[1]
    return [narrow(add_bias(convolve(wide(x), wide(w), attrs), shapes.optional(inputs, 2)), x.dtype)]


# -- integers ---------------------------------------------------------------------------------------------------------
def centred(x: Array, zero: Array | None, axis: int = 0) -> Array:
    """``x`` minus its zero point (a scalar, or one per index of ``axis``), as int32."""
    x = x.astype(np.int32)
    if zero is None or not zero.any():
        return x
    zero = zero.astype(np.int32)
    shape = () if zero.size == 1 else tuple(-1 if i == axis else 1 for i in range(x.ndim))
    return np.asarray(x - zero.reshape(shape))


def convolve_integer(x: Array, w: Array, attrs: Attrs) -> Array:
    """Convolve integers exactly: the result is int64."""
    dtype = product_type(x, w, math.prod(w.shape[1:]))
    if dtype == np.int64:
        dtype = np.dtype(np.float64)  # products of int8 and int16 never need more than 53 bits
    return convolve(x.astype(dtype), w.astype(dtype), attrs).astype(np.int64)


def _conv_integer(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x = centred(inputs[0], shapes.optional(inputs, 2))
    w = centred(inputs[1], shapes.optional(inputs, 3))
    return [convolve_integer(x, w, attrs).astype(np.int32)]


# -- types and work ---------------------------------------------------------------------------------------------------
def conv_shape(x: TensorType, w: TensorType, attrs: Attrs) -> Shape | None:
    """The output shape of a convolution. Raises when the shapes do not match."""
    rank = len(x.shape) if x.shape is not None else len(w.shape) if w.shape is not None else None
    if rank is None:
        return None
    if rank < 3:
        raise ValueError(f"the input has rank {rank}; a batch, channels and at least one spatial axis are needed")
    xs, ws = shapes.need_rank(x, rank, "the input"), shapes.need_rank(w, rank, "the weights")
    group = int(attrs.get("group", 1))
    if group < 1:
        raise ValueError(f"group {group} is not positive")
    channels, per_group, filters = xs[1], ws[1], ws[0]
    if isinstance(channels, WHOLE) and isinstance(per_group, WHOLE) and channels != per_group * group:
        raise ValueError(f"{channels} channels do not fit weights for {per_group} channels in {group} groups")
    if isinstance(filters, WHOLE) and filters % group:
        raise ValueError(f"{filters} filters do not divide into {group} groups")
    return (xs[0], filters, *output_dims(xs[2:], kernel_dims(ws, attrs), attrs))


def kernel_dims(weights: Shape, attrs: Attrs) -> tuple[Dim, ...]:
    """The kernel's size. The weights and the attribute must agree on it."""
    spatial = weights[2:]
    declared = attrs.get("kernel_shape")
    if not declared:
        return spatial
    if len(declared) != len(spatial):
        raise ValueError(f"kernel_shape {list(declared)} does not fit weights of rank {len(weights)}")
    return tuple(
        shapes.same_dim(a, b, "kernel_shape and the weights differ") for a, b in zip(spatial, declared, strict=True)
    )


def _check_bias(operands: Operands, i: int, filters: Dim) -> None:
    if shapes.given(operands, i):
        (size,) = shapes.need_rank(shapes.tensor(operands, i), 1, "the bias")
        shapes.same_dim(size, filters, "bias and filters differ in number")


def _infer_conv(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, w = shapes.tensor(operands, 0), shapes.tensor(operands, 1)
    if x.dtype is not w.dtype:
        raise ValueError(f"the input is {x.dtype}, the weights are {w.dtype}")
    shape = conv_shape(x, w, attrs)
    if shape is not None:
        _check_bias(operands, 2, shape[1])
    return [TensorType(x.dtype, shape)]


def _infer_conv_integer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    return [TensorType(DType.INT32, conv_shape(shapes.tensor(operands, 0), shapes.tensor(operands, 1), attrs))]


def conv_flops(
    inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs, weights: int = 1
) -> float:
    """Count a multiply and an add per output element and weight of its filter."""
    w = inputs[weights]
    assert w is not None
    return 2.0 * outputs[0].size * math.prod(w.dims[1:])


# -- transposed -------------------------------------------------------------------------------------------------------
def transposed_size(size: int, kernel: int, attrs: Attrs, rank: int, k: int) -> tuple[int, int]:
    """(output size, elements cut at the beginning) along one axis."""
    stride, dilation = spread(attrs, "strides", rank)[k], spread(attrs, "dilations", rank)[k]
    extra = spread(attrs, "output_padding", rank, least=0)[k]
    auto, wanted = attrs.get("auto_pad", "NOTSET"), attrs.get("output_shape")
    full = stride * (size - 1) + extra + (kernel - 1) * dilation + 1
    if wanted or auto in ("SAME_UPPER", "SAME_LOWER"):
        out = wanted[len(wanted) - rank + k] if wanted else size * stride
        total = max(0, full - out)
        if total > 2 * MOST_PADDING:
            raise ValueError(f"output_shape {list(wanted or ())} leaves {out} of {full} elements")
        return out, total // 2 if auto == "SAME_UPPER" else total - total // 2
    pads = (0,) * (2 * rank) if auto == "VALID" else all_pads(attrs, rank)
    out = full - pads[k] - pads[k + rank]
    if out < 0:
        raise ValueError(f"pads {list(pads)} cut more than there is")
    return out, pads[k]


def _conv_transpose(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, w = wide(inputs[0]), wide(inputs[1])
    group, rank, batch = int(attrs.get("group", 1)), x.ndim - 2, x.shape[0]
    if rank < 1 or w.ndim != x.ndim or x.shape[1] != w.shape[0] or w.shape[0] % group:
        raise ValueError(f"input of shape {list(x.shape)} and weights of shape {list(w.shape)} in {group} groups")
    kernel, per_group = w.shape[2:], w.shape[1]
    strides, dilations = spread(attrs, "strides", rank), spread(attrs, "dilations", rank)
    sizes = [transposed_size(x.shape[k + 2], kernel[k], attrs, rank, k) for k in range(rank)]
    # The product gives what each input element adds to the output, per tap. The loop adds it at the right position.
    weights = w.reshape(group, w.shape[0] // group, -1).swapaxes(1, 2)
    extent = tuple(
        (s - 1) * t + (k - 1) * d + 1 for s, t, k, d in zip(x.shape[2:], strides, kernel, dilations, strict=True)
    )
    inner = Windows(tuple(kernel), tuple(strides), tuple(dilations), (0,) * rank, (0,) * rank, tuple(x.shape[2:]))
    full = np.zeros((batch, group, per_group, *extent), x.dtype)
    for b in range(batch if x.size else 0):
        columns = np.matmul(weights, x[b].reshape(group, x.shape[1] // group, -1))
        columns = columns.reshape(group, per_group, math.prod(kernel), *x.shape[2:])
        for k, (_, region) in enumerate(taps(inner)):
            full[b][(slice(None), slice(None), *region)] += columns[:, :, k]
    pairs = [(0, 0), (0, 0), *((-cut, out + cut - e) for (out, cut), e in zip(sizes, extent, strict=True))]
    y = pad(full.reshape(batch, group * per_group, *extent), pairs)
    bias = shapes.optional(inputs, 2)
    return [narrow(add_bias(y, bias), inputs[0].dtype)]


def _infer_conv_transpose(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, w = shapes.tensor(operands, 0), shapes.tensor(operands, 1)
    if x.dtype is not w.dtype:
        raise ValueError(f"the input is {x.dtype}, the weights are {w.dtype}")
    rank = len(x.shape) if x.shape is not None else len(w.shape) if w.shape is not None else None
    if rank is None:
        return [TensorType(x.dtype)]
    if rank < 3:
        raise ValueError(f"the input has rank {rank}; a batch, channels and at least one spatial axis are needed")
    xs, ws = shapes.need_rank(x, rank, "the input"), shapes.need_rank(w, rank, "the weights")
    group, spatial = int(attrs.get("group", 1)), rank - 2
    if group < 1:
        raise ValueError(f"group {group} is not positive")
    shapes.same_dim(xs[1], ws[0], "channels of the input and of the weights differ")
    filters = ws[1] * group if isinstance(ws[1], WHOLE) else None
    _check_bias(operands, 2, filters)
    kernel = kernel_dims(ws, attrs)
    dims: list[Dim] = []
    for k in range(spatial):
        size, taps_ = xs[k + 2], kernel[k]
        if isinstance(size, WHOLE) and isinstance(taps_, WHOLE):
            dims.append(transposed_size(size, taps_, attrs, spatial, k)[0])
        else:
            wanted = attrs.get("output_shape")
            dims.append(wanted[len(wanted) - spatial + k] if wanted else None)
    return [TensorType(x.dtype, (xs[0], filters, *dims))]


def _transpose_flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    x, w = inputs[0], inputs[1]
    assert x is not None and w is not None
    return 2.0 * x.size * math.prod(w.dims[1:])


OPS = with_samples(
    (
        OpSpec(
            "Conv",
            _conv,
            _infer_conv,
            flops=conv_flops,
            heavy=True,
            batch=batch_rules.first(0),
            roles=("input", "weights", "bias"),
        ),
        OpSpec(
            "ConvInteger", _conv_integer, _infer_conv_integer, flops=conv_flops, heavy=True, batch=batch_rules.first(0)
        ),
        OpSpec(
            "ConvTranspose",
            _conv_transpose,
            _infer_conv_transpose,
            flops=_transpose_flops,
            heavy=True,
            batch=batch_rules.first(0),
            roles=("input", "weights", "bias"),
        ),
    ),
    dense.CONV,
)
