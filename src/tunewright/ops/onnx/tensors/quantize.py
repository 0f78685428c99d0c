"""QuantizeLinear, DequantizeLinear and DynamicQuantizeLinear for every type: per tensor, per axis or in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.types import DType, TensorType, Type
from tunewright.ops import batch_rules, shapes
from tunewright.ops.base import Array, Attrs, Operands, OpSpec
from tunewright.ops.numeric import limits, narrow, saturate, wide
from tunewright.ops.samples import model as samples_model
from tunewright.ops.samples.base import with_samples

_FLOAT8 = frozenset({DType.FLOAT8E4M3FN, DType.FLOAT8E4M3FNUZ, DType.FLOAT8E5M2, DType.FLOAT8E5M2FNUZ})


def spread(value: Array, shape: Sequence[int], axis: int, block: int = 0) -> Array:
    """Reshape a scale or zero point to broadcast: one number, one per index of an axis, or one per block along it."""
    if value.size == 1:
        return value.reshape(())
    axis = shapes.axis_of(axis, len(shape))
    if not block:
        if value.ndim != 1 or value.size != shape[axis]:
            raise ValueError(f"{list(value.shape)} scales do not fit axis {axis} of {list(shape)}")
        return value.reshape(*(-1 if i == axis else 1 for i in range(len(shape))))
    value = np.repeat(value, block, axis)
    if value.shape[axis] != shape[axis]:
        value = value[(*(slice(None),) * axis, slice(0, shape[axis]))]
    if value.shape != tuple(shape):
        raise ValueError(f"blocks of {block} along axis {axis} do not fit {list(shape)}")
    return value


def to_integers(x: Array, zero: Array | None, dtype: np.dtype[Any]) -> Array:
    """round(x) + zero point, ties to even, saturated. Overwrites ``x``, a float array that belongs to the caller."""
    x = np.rint(x, out=x) if x.ndim else np.asarray(np.rint(x))
    if zero is not None and zero.any():
        x = x + zero.astype(x.dtype)
    low, high = limits(dtype)
    return np.asarray(np.clip(x, low, high)).astype(dtype)


def _quantize(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, scale, zero = inputs[0], inputs[1], shapes.optional(inputs, 2)
    axis, block = int(attrs.get("axis", 1)), int(attrs.get("block_size", 0))
    to = DType.of_numpy(zero.dtype) if zero is not None else _declared(attrs) or DType.UINT8
    # The quotient is rounded to ``precision`` (default: the scale's type) before it is quantised.
    precision = DType.of_onnx(int(attrs["precision"])).numpy if attrs.get("precision") else scale.dtype
    divisor = wide(spread(narrow(scale, precision), x.shape, axis, block))
    ratio = np.asarray(wide(narrow(x, precision)) / divisor)
    if precision != ratio.dtype:
        ratio = wide(narrow(ratio, precision))
    offset = None if zero is None else spread(zero, x.shape, axis, block)
    if to.is_integer:
        return [to_integers(ratio, offset, to.numpy)]
    if to in _FLOAT8:
        return [saturate(ratio, to.numpy) if attrs.get("saturate", 1) else ratio.astype(to.numpy)]
    return [np.asarray(ratio if offset is None else ratio + wide(offset)).astype(to.numpy)]


def _declared(attrs: Attrs) -> DType | None:
    code = attrs.get("output_dtype", 0)
    return shapes.dtype_of(code, "output_dtype") if code else None


def _infer_quantize(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, declared = shapes.tensor(operands, 0), _declared(attrs)
    dtype = declared or DType.UINT8
    if shapes.given(operands, 2):
        dtype = shapes.tensor(operands, 2).dtype
        if declared not in (None, dtype):
            raise ValueError(f"output_dtype {declared} and the zero point's type {dtype} differ")
    return [TensorType(dtype, x.shape)]


def dequantize(x: Array, scale: Array, zero: Array | None, axis: int = 1, block: int = 0) -> Array:
    """(x - zero point) * scale in float32."""
    if x.dtype.itemsize >= 4:
        centred = x if zero is None else x - spread(zero, x.shape, axis, block)  # float32 would lose digits of int32
        y = centred.astype(np.float32)
    else:
        y = x.astype(np.float32)
        if zero is not None:
            offset = spread(zero, x.shape, axis, block).astype(np.float32)
            if offset.any():
                y -= offset
    return np.asarray(y * wide(spread(scale, x.shape, axis, block)))


def _dequantize(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, scale, zero = inputs[0], inputs[1], shapes.optional(inputs, 2)
    y = dequantize(x, scale, zero, int(attrs.get("axis", 1)), int(attrs.get("block_size", 0)))
    declared = _declared(attrs)
    return [narrow(y, scale.dtype if declared is None else declared.numpy)]


def _infer_dequantize(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, scale = shapes.tensor(operands, 0), shapes.tensor(operands, 1)
    if shapes.given(operands, 2) and shapes.tensor(operands, 2).dtype is not x.dtype:
        raise ValueError(f"the input is {x.dtype}, its zero point {shapes.tensor(operands, 2).dtype}")
    return [TensorType(_declared(attrs) or scale.dtype, x.shape)]


def _dynamic(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x = inputs[0]
    low, high = np.float32(min(0.0, x.min(initial=0))), np.float32(max(0.0, x.max(initial=0)))
    scale = np.float32(1.0 if high == low else high - low) / np.float32(255)
    zero = np.rint(np.clip(-low / scale, 0, 255))
    y = to_integers(np.asarray(x / scale), np.asarray(zero), np.dtype(np.uint8))
    return [y, np.asarray(scale, np.float32), np.asarray(zero).astype(np.uint8)]


def _infer_dynamic(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = shapes.tensor(operands, 0)
    return [TensorType(DType.UINT8, x.shape), TensorType(DType.FLOAT32, ()), TensorType(DType.UINT8, ())][:n]


OPS = with_samples(
    (
        OpSpec(
            "QuantizeLinear",
            _quantize,
            _infer_quantize,
            batch=batch_rules.scaled,
            roles=("input", "scale", "zero-point"),
        ),
        OpSpec(
            "DequantizeLinear",
            _dequantize,
            _infer_dequantize,
            batch=batch_rules.scaled,
            roles=("input", "scale", "zero-point"),
        ),
        OpSpec("DynamicQuantizeLinear", _dynamic, _infer_dynamic),
    ),
    samples_model.QUANTIZE,
)
