"""Tensors from shapes and scalars: ConstantOfShape, Range, EyeLike, Trilu."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE, SymArray
from tunewright.ir.types import DType, TensorType, Type
from tunewright.ops import shapes
from tunewright.ops.base import Array, Attrs, Operands, OpSpec
from tunewright.ops.numeric import wide
from tunewright.ops.samples import shape
from tunewright.ops.samples.base import with_samples


def _fill(attrs: Attrs) -> Array:
    value = attrs.get("value")
    return np.zeros(1, np.float32) if value is None else value


def _constant_of_shape(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    value = _fill(attrs)
    return [np.full(inputs[0].reshape(-1).tolist(), value.reshape(-1)[0], value.dtype)]


def _infer_constant_of_shape(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    dims = shapes.ints(operands, 0)
    dtype = DType.of_numpy(_fill(attrs).dtype)
    if dims is None:
        return [TensorType(dtype, shapes.unknown(shapes.length(shapes.tensor(operands, 0))))]
    if min(dims, default=0) < 0:
        raise ValueError(f"shape {dims} is negative")
    return [TensorType(dtype, tuple(dims))]


def _range_length(start: float, limit: float, delta: float) -> int:
    if delta == 0:
        raise ValueError("delta is 0")
    if all(isinstance(v, WHOLE) for v in (start, limit, delta)):
        return max(0, -((start - limit) // delta))  # type: ignore[return-value]
    if not all(math.isfinite(v) for v in (start, limit, delta)):
        raise ValueError(f"a range from {start} to {limit} by {delta} has no end")
    return max(0, math.ceil((limit - start) / delta))


def _number(value: Array) -> Any:
    return (value if isinstance(value, SymArray) else wide(value)).reshape(()).item()


def _range(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    dtype = inputs[0].dtype
    start, limit, delta = (wide(v).reshape(()).item() for v in inputs)
    count = _range_length(start, limit, delta)
    kind = np.int64 if isinstance(start, WHOLE) else np.float64
    return [(np.arange(count, dtype=kind) * delta + start).astype(dtype)]


def _infer_range(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    first = shapes.tensor(operands, 0)
    values = [shapes.value(operands, i) for i in range(3)]
    if any(v is None for v in values):
        return [TensorType(first.dtype, (None,))]
    return [TensorType(first.dtype, (_range_length(*(_number(v) for v in values)),))]


def _eye_dtype(fallback: DType, attrs: Attrs) -> DType:
    code = attrs.get("dtype")
    return fallback if code is None else shapes.dtype_of(code, "dtype")


def _eye_like(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x = inputs[0]
    if x.ndim != 2:
        raise ValueError(f"the input has rank {x.ndim} instead of 2")
    dtype = _eye_dtype(DType.of_numpy(x.dtype), attrs).numpy
    rows, columns = np.ogrid[: x.shape[0], : x.shape[1]]
    return [(columns - rows == int(attrs.get("k", 0))).astype(dtype)]


def _infer_eye_like(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = shapes.tensor(operands, 0)
    return [TensorType(_eye_dtype(x.dtype, attrs), shapes.need_rank(x, 2, "the input"))]


def _trilu(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, k = inputs[0], shapes.optional(inputs, 1)
    shift = 0 if k is None else int(k.reshape(-1)[0])
    rows, columns = np.ogrid[: x.shape[-2], : x.shape[-1]]
    kept = columns - rows >= shift if attrs.get("upper", 1) else columns - rows <= shift
    return [np.where(kept, x, np.zeros((), x.dtype))]


def _infer_trilu(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = shapes.tensor(operands, 0)
    if x.shape is not None and len(x.shape) < 2:
        raise ValueError(f"the input has rank {len(x.shape)}; a matrix is needed")
    return [TensorType(x.dtype, x.shape)]


OPS = with_samples(
    (
        OpSpec("ConstantOfShape", _constant_of_shape, _infer_constant_of_shape),
        OpSpec("Range", _range, _infer_range),
        OpSpec("EyeLike", _eye_like, _infer_eye_like),
        OpSpec("Trilu", _trilu, _infer_trilu),
    ),
    shape.GENERATE,
)
