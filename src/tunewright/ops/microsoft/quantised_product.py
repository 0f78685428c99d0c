"""Quantised products of com.microsoft: convolutions, matrix products, and products with weights of a few bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import Dim, DType, TensorType, Type

from .. import batch_rules
from ..base import Array, Attrs, Infer, Operands, OpSpec
from ..numeric import integer_matmul, wide
from ..onnx.matmul import matmul_shape
from ..shapes import axis_of, given, optional, tensor
from .common import (
    MS,
    along,
    dims,
    dynamic_quantize,
    heavy,
    infer,
    permuted,
    product_flops,
    retyped,
    run,
    saturate,
    to_first,
    to_last,
    without,
)

# ---- convolution ----


def _conv(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    last = attrs.get("channels_last", 0)
    x = inputs[0].transpose(to_first(inputs[0].ndim)) if last else inputs[0]
    y = run("QLinearConv", [np.ascontiguousarray(x), *inputs[1:]], without(attrs, "channels_last"))
    return [np.ascontiguousarray(y.transpose(to_last(y.ndim))) if last else y]


def _infer_conv(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    last = attrs.get("channels_last", 0)
    taken = retyped(operands, 0, permuted(tensor(operands, 0), to_first)) if last else operands
    t = infer("QLinearConv", taken, without(attrs, "channels_last"))
    return [permuted(t, to_last) if last else t]


def _conv_flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    w = inputs[3]
    assert w is not None
    return 2.0 * outputs[0].size * (w.size / max(w.dims[0], 1))


# ---- matrix products of integers ----


def _columns(p: Array) -> Array:
    """A parameter of the right operand: one number, or one per column."""
    return p.reshape(()) if p.size == 1 else p


def _shifted(x: Array, zero: Array | None) -> Array:
    return x.astype(np.int32) if zero is None else x.astype(np.int32) - _columns(zero).astype(np.int32)


def _scaled(product: Array, scale: Array, bias: Array | None) -> Array:
    y = product.astype(np.float32) * scale
    return np.asarray(y if bias is None else y + bias, np.float32)


def _to_float(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    a, b, a_scale, b_scale = inputs[:4]
    product = integer_matmul(_shifted(a, optional(inputs, 4)), _shifted(b, optional(inputs, 5)))
    return [_scaled(product, np.asarray(_columns(a_scale) * _columns(b_scale)), optional(inputs, 6))]


def _dynamic_matmul(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    a, b, b_scale = inputs[:3]
    quantised, a_scale, a_zero = dynamic_quantize(a)
    product = integer_matmul(_shifted(quantised, np.asarray(a_zero)), _shifted(b, optional(inputs, 3)))
    return [_scaled(product, np.asarray(a_scale * _columns(b_scale)), optional(inputs, 4))]


def _infer_matmul(dtype: DType) -> Infer:
    def infer_types(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
        return [TensorType(dtype, matmul_shape(tensor(operands, 0).shape, tensor(operands, 1).shape))]

    return infer_types


def _integer16(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """Integer product with sums that wrap at 32 bits."""
    return [integer_matmul(inputs[0], inputs[1]).astype(np.int64).astype(np.int32)]


def _gemm(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    a, a_scale, a_zero, b, b_scale, b_zero = inputs[:6]
    c, y_scale, y_zero = optional(inputs, 6), optional(inputs, 7), optional(inputs, 8)
    left = _shifted(a, a_zero)
    right = _shifted(b.T if attrs.get("transB", 0) else b, b_zero)
    product = integer_matmul(left.T if attrs.get("transA", 0) else left, right)
    if c is not None:
        product = product + c
    scale = np.float32(attrs.get("alpha", 1.0)) * a_scale.reshape(()) * along(b_scale, 1, 0)
    if y_scale is None:
        return [_scaled(product, np.asarray(scale), None)]
    y = product.astype(np.float32) * (scale / y_scale.reshape(()))
    return [saturate(np.rint(y), y_zero, a.dtype if y_zero is None else y_zero.dtype)]


def _infer_gemm(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    a, b = dims(operands, 0, 2), dims(operands, 3, 2)
    rows, inner = reversed(a) if attrs.get("transA", 0) else a
    depth, columns = reversed(b) if attrs.get("transB", 0) else b
    if isinstance(inner, WHOLE) and isinstance(depth, WHOLE) and inner != depth:
        raise ValueError(f"columns of A ({inner}) and rows of B ({depth}) differ")
    dtype = DType.FLOAT32
    if given(operands, 7):
        dtype = tensor(operands, 8 if given(operands, 8) else 0).dtype
    return [TensorType(dtype, (rows, columns))]


def _gemm_flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    a = inputs[0]
    assert a is not None
    return 2.0 * outputs[0].size * a.dims[0 if attrs.get("transA", 0) else 1]


# ---- weights of a few bits ----


def unpack_bits(packed: Array, bits: int) -> Array:
    """Numbers of ``bits`` bits from bytes along the last axis, lowest bits first."""
    if bits == 8:
        return packed
    if bits == 4:
        return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    stream = np.unpackbits(packed, axis=-1, bitorder="little")
    stream = stream[..., : stream.shape[-1] // bits * bits].reshape(*packed.shape[:-1], -1, bits)
    return np.asarray((stream.astype(np.uint16) << np.arange(bits, dtype=np.uint16)).sum(-1)).astype(np.uint8)


def _n_bits_weights(inputs: Sequence[Any], attrs: Attrs) -> Array:
    """The dequantised matrix (N, K) in float32."""
    packed, scales, zeros, groups = inputs[1], inputs[2], optional(inputs, 3), optional(inputs, 4)
    rows, depth, block, bits = attrs["N"], attrs["K"], attrs["block_size"], attrs.get("bits", 4)
    blocks = -(-depth // block)
    numbers = unpack_bits(np.ascontiguousarray(packed).reshape(rows, blocks, -1), bits)[..., :block]
    numbers = numbers.reshape(rows, -1)[:, :depth]
    scale = wide(scales).reshape(rows, blocks)
    if zeros is None:
        zero: Array = np.full((1, 1), 1 << (bits - 1), np.float32).repeat(blocks, 1)
    elif zeros.dtype == np.uint8:
        zero = unpack_bits(np.ascontiguousarray(zeros).reshape(rows, -1), bits)[:, :blocks].astype(np.float32)
    else:
        zero = wide(zeros).reshape(rows, blocks)
    group = np.arange(depth) // block if groups is None else groups.reshape(-1)[:depth]
    return np.asarray((numbers.astype(np.float32) - zero[:, group]) * scale[:, group])


def _matmul_n_bits(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """Product with weights of a few bits, always in float32. ``accuracy_level`` only permits less exact arithmetic."""
    a, bias = inputs[0], optional(inputs, 5)
    y = np.matmul(wide(a), _n_bits_weights(inputs, attrs).T)
    return [np.asarray(y if bias is None else y + wide(bias)).astype(a.dtype, copy=False)]


def _infer_matmul_n_bits(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    if attrs.get("weight_prepacked", 0):
        raise NotImplementedError("weights that are packed for one kind of GPU (weight_prepacked) are not supported")
    return [_replace_last(operands, attrs["K"], attrs["N"])]


def _replace_last(operands: Operands, depth: int, width: int) -> TensorType:
    a = tensor(operands, 0)
    if a.shape is None:
        return a
    if isinstance(a.shape[-1], int) and a.shape[-1] != depth:
        raise ValueError(f"the last dimension of A is {a.shape[-1]}, not {depth}")
    return a.with_shape((*a.shape[:-1], width))


#: the sixteen values of each bitsandbytes type
FP4 = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4], np.float32)
NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)


def _matmul_bnb4(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """Product with bitsandbytes weights: two values per byte, high half first, in blocks over the flattened (N, K)."""
    a, packed, largest = inputs
    table = np.concatenate([FP4, -FP4]) if attrs["quant_type"] == 0 else NF4
    count = attrs["N"] * attrs["K"]
    numbers = table[np.stack([packed.reshape(-1) >> 4, packed.reshape(-1) & 15], -1).reshape(-1)[:count]]
    w = (numbers * wide(largest).reshape(-1)[np.arange(count) // attrs["block_size"]]).reshape(attrs["N"], attrs["K"])
    return [np.matmul(wide(a), w.T if attrs.get("transB", 1) else w).astype(a.dtype, copy=False)]


def _infer_matmul_bnb4(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    depth, width = attrs["K"], attrs["N"]
    return [_replace_last(operands, depth, width) if attrs.get("transB", 1) else _replace_last(operands, width, depth)]


def _gather_axes(rank: int, attrs: Attrs) -> tuple[int, int]:
    gather = axis_of(attrs.get("gather_axis", 0), rank, "gather_axis")
    block = axis_of(attrs.get("quantize_axis", 1), rank, "quantize_axis")
    if gather == block:
        raise ValueError("gather_axis and quantize_axis are the same")
    return gather, block


def _gather_block_quantized(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """Gather quantised rows and dequantise them. Rows outside the table are zero."""
    data, indices, scales, zeros = inputs[0], inputs[1], inputs[2], optional(inputs, 3)
    gather, block_axis = _gather_axes(data.ndim, attrs)
    bits = attrs.get("bits", 4)
    shift: Any = 0
    if data.dtype == np.uint8:
        data, shift = unpack_bits(data, bits), 1 << (bits - 1)
        zeros = None if zeros is None else unpack_bits(zeros, bits)
    size, block = data.shape[gather], attrs.get("block_size", 128) or data.shape[block_axis]
    place = np.where(indices < 0, indices + size, indices)
    inside = (place >= 0) & (place < size)
    place = np.where(inside, place, 0)
    taken = np.take(data, place, gather).astype(np.float32)
    # The block axis moves when the indices' dimensions replace an axis in front of it.
    moved = block_axis if block_axis < gather else block_axis + indices.ndim - 1

    def spread(p: Array) -> Array:
        rows = np.take(p, np.zeros_like(place) if p.shape[gather] == 1 else place, gather)
        return np.take(rows, np.arange(taken.shape[moved]) // block, moved) if rows.shape[moved] > 1 else rows

    if zeros is not None:
        taken = taken - spread(zeros).astype(np.float32)
    else:
        taken = taken - np.float32(shift)
    y = taken * wide(spread(scales))
    lead = inside.reshape(*[1] * gather, *indices.shape, *[1] * (data.ndim - gather - 1))
    return [np.where(lead, y, np.float32(0)).astype(scales.dtype)]


def _infer_gather_block_quantized(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    data, indices, scales = (tensor(operands, i) for i in range(3))
    if data.shape is None or indices.shape is None:
        return [TensorType(scales.dtype)]
    gather, _ = _gather_axes(len(data.shape), attrs)
    shape: list[Dim] = list(data.shape)
    if data.dtype is DType.UINT8 and attrs.get("bits", 4) != 8:
        last = shape[-1]
        shape[-1] = last * (8 // attrs.get("bits", 4)) if isinstance(last, WHOLE) else None
    return [TensorType(scales.dtype, (*shape[:gather], *indices.shape, *shape[gather + 1 :]))]


OPS = (
    heavy("QLinearConv", _conv, _infer_conv, _conv_flops),
    heavy("QGemm", _gemm, _infer_gemm, _gemm_flops),
    heavy("MatMulIntegerToFloat", _to_float, _infer_matmul(DType.FLOAT32), product_flops(0, -1)),
    heavy("DynamicQuantizeMatMul", _dynamic_matmul, _infer_matmul(DType.FLOAT32), product_flops(0, -1)),
    heavy("MatMulInteger16", _integer16, _infer_matmul(DType.INT32), product_flops(0, -1)),
    heavy("MatMulNBits", _matmul_n_bits, _infer_matmul_n_bits, product_flops(0, -1), batch_rules.along(-1)),
    heavy("MatMulBnb4", _matmul_bnb4, _infer_matmul_bnb4, product_flops(0, -1)),
    OpSpec(MS + "GatherBlockQuantized", _gather_block_quantized, _infer_gather_block_quantized, picks=True),
)
