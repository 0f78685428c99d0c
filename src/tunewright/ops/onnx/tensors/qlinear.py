"""Products of quantised tensors, exact in integers: QLinearConv, QLinearMatMul, MatMulInteger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.types import DType, TensorType, Type
from tunewright.ops import batch_rules, shapes
from tunewright.ops.base import Array, Attrs, Operands, OpSpec
from tunewright.ops.numeric import integer_matmul, saturate, wide
from tunewright.ops.samples import model as samples_model
from tunewright.ops.samples.base import with_samples

from ..conv import centred, conv_flops, conv_shape, convolve_integer
from ..matmul import matmul_shape
from .quantize import to_integers


def _requantize(total: Array, factor: Array, zero: Array | None, dtype: np.dtype[Any]) -> Array:
    scaled = np.asarray(total.astype(np.float32) * factor)
    if DType.of_numpy(dtype).is_integer:
        return to_integers(scaled, zero, dtype)
    return saturate(scaled if zero is None else scaled + wide(zero), dtype)


def _qlinear_conv(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero = inputs[:8]
    total = convolve_integer(centred(x, x_zero), centred(w, w_zero), attrs)
    column = (-1, *(1 for _ in range(x.ndim - 2)))
    bias = shapes.optional(inputs, 8)
    if bias is not None:
        total += bias.astype(np.int64).reshape(column)
    factor = x_scale.reshape(()) * w_scale.reshape(() if w_scale.size == 1 else column) / y_scale.reshape(())
    return [_requantize(total, factor, y_zero.reshape(()), y_zero.dtype)]


def _infer_qlinear_conv(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, w, zero = shapes.tensor(operands, 0), shapes.tensor(operands, 3), shapes.tensor(operands, 7)
    return [TensorType(zero.dtype, conv_shape(x, w, attrs))]


def _qlinear_conv_flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    return conv_flops(inputs, outputs, attrs, weights=3)


# -- matrices ---------------------------------------------------------------------------------------------------------
def _rows(v: Array) -> Array:
    """A parameter of the left operand: one number, one per row, or an array of the operand's rank."""
    return v.reshape(()) if v.size == 1 else v.reshape(-1, 1) if v.ndim == 1 else v


def _columns(v: Array) -> Array:
    """A parameter of the right operand: one number, one per column, or an array of the operand's rank."""
    return v.reshape(()) if v.size == 1 else v


def _integer_product(a: Array, b: Array, a_zero: Array | None, b_zero: Array | None) -> Array:
    left, right = a.astype(np.int32), b.astype(np.int32)
    if a_zero is not None and a_zero.any():
        left = left - _rows(a_zero.astype(np.int32))
    if b_zero is not None and b_zero.any():
        right = right - _columns(b_zero.astype(np.int32))
    return integer_matmul(left, right)


def _matmul_integer(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    a_zero, b_zero = shapes.optional(inputs, 2), shapes.optional(inputs, 3)
    return [_integer_product(inputs[0], inputs[1], a_zero, b_zero).astype(np.int32)]


def _infer_matmul_integer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    a, b = shapes.tensor(operands, 0), shapes.tensor(operands, 1)
    return [TensorType(DType.INT32, matmul_shape(a.shape, b.shape))]


def _qlinear_matmul(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = inputs
    if DType.of_numpy(a.dtype).is_integer:
        total = _integer_product(a, b, a_zero, b_zero)
    else:
        total = np.matmul(wide(a) - wide(_rows(a_zero)), wide(b) - wide(_columns(b_zero)))
    factor = np.asarray(wide(_rows(a_scale)) * wide(_columns(b_scale)) / wide(_rows(y_scale)), np.float32)
    return [_requantize(total, factor, _rows(y_zero), y_zero.dtype)]


def _infer_qlinear_matmul(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    a, b, zero = shapes.tensor(operands, 0), shapes.tensor(operands, 3), shapes.tensor(operands, 7)
    return [TensorType(zero.dtype, matmul_shape(a.shape, b.shape))]


def _product_flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    a = inputs[0]
    assert a is not None
    return 2.0 * outputs[0].size * a.dims[-1]


OPS = with_samples(
    (
        OpSpec(
            "QLinearConv",
            _qlinear_conv,
            _infer_qlinear_conv,
            flops=_qlinear_conv_flops,
            heavy=True,
            batch=batch_rules.first(0),
        ),
        OpSpec(
            "QLinearMatMul",
            _qlinear_matmul,
            _infer_qlinear_matmul,
            flops=_product_flops,
            heavy=True,
            batch=batch_rules.product(0, 3),
        ),
        OpSpec(
            "MatMulInteger",
            _matmul_integer,
            _infer_matmul_integer,
            flops=_product_flops,
            heavy=True,
            batch=batch_rules.product(0, 1),
        ),
    ),
    samples_model.QUANTIZE,
)
