"""Quantised elementwise operators, pools and conversions of com.microsoft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tunewright.ir.types import DType, Shape, TensorType, Type

from ..base import Array, Attrs, Infer, Operand, Operands, OpSpec
from ..numeric import sigmoid
from ..onnx.reduction import softmax
from ..shapes import axis_of, broadcast, given, optional, same_as, tensor
from .common import MS, dequantize, infer, permuted, quantize, run, saturate, to_first, to_last, without


def _number(x: Array | None, default: float = 0) -> Any:
    """A scalar parameter as float32."""
    return np.float32(default) if x is None else np.float32(x.reshape(-1)[0])


def _fma(x: Array, factor: Any, addend: Any) -> Array:
    """x * factor + addend, rounded to float32 once. Sums between two quantisation steps then round to the same side."""
    return np.asarray(x.astype(np.float64) * factor + addend).astype(np.float32)


def _add(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    a, a_scale, a_zero, b, b_scale, b_zero, c_scale = inputs[:7]
    c_zero, scale = optional(inputs, 7), _number(c_scale)
    left, right = _number(a_scale) / scale, _number(b_scale) / scale
    fixed = _number(c_zero) - (left * _number(a_zero) + right * _number(b_zero))
    return [saturate(np.rint(_fma(a, left, _fma(b, right, fixed))), None, a.dtype)]


def _mul(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    a, a_scale, a_zero, b, b_scale, b_zero, c_scale = inputs[:7]
    product = (a.astype(np.float32) - _number(a_zero)) * (b.astype(np.float32) - _number(b_zero))
    ratio = _number(a_scale) * _number(b_scale) / _number(c_scale)
    return [saturate(np.rint(product * ratio + _number(optional(inputs, 7))), None, a.dtype)]


def _infer_binary(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    a, b = tensor(operands, 0), tensor(operands, 3)
    if a.dtype != b.dtype:
        raise ValueError(f"the operands are {a.dtype} and {b.dtype}")
    return [TensorType(a.dtype, broadcast(a.shape, b.shape))]


def _table(name: str, function: Callable[[Array, Attrs], Array]) -> OpSpec:
    """An operator that applies a function to one quantised tensor: (x, scale, zero, scale of y, zero of y)."""

    def reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
        x = inputs[0]
        y = function(dequantize(x, inputs[1], inputs[2]), attrs)
        return [quantize(y, inputs[3], optional(inputs, 4), x.dtype)]

    return OpSpec(MS + name, reference, same_as())


def _leaky_relu(x: Array, attrs: Attrs) -> Array:
    return np.where(x >= 0, x, x * np.float32(attrs.get("alpha", 0.01)))


def _requantize(parameters: Sequence[Array], y_scale: Array, y_zero: Array) -> Array:
    """Requantise (x, scale, zero) to another scale and zero point; x itself where both are the same."""
    x, scale, zero = parameters
    same_zero = 0 if zero is None else int(zero.reshape(-1)[0])
    if x.dtype == y_zero.dtype and _number(scale) == _number(y_scale) and same_zero == int(y_zero.reshape(-1)[0]):
        return x
    return quantize(dequantize(x, scale, zero), y_scale, y_zero)


def _concat(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    y_scale, y_zero = inputs[:2]
    parts = [_requantize(inputs[i : i + 3], y_scale, y_zero) for i in range(2, len(inputs), 3)]
    return [np.concatenate(parts, attrs["axis"])]


def _infer_concat(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    if len(operands) < 5 or (len(operands) - 2) % 3:
        raise ValueError(f"has {len(operands)} inputs; two and then three for each tensor are needed")
    t = infer("Concat", [operands[i] for i in range(2, len(operands), 3)], {"axis": attrs["axis"]})
    return [TensorType(tensor(operands, 1).dtype, t.shape)]


def _where(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    z_scale, z_zero = inputs[7:9]
    x, y = (_requantize(inputs[i : i + 3], z_scale, z_zero) for i in (1, 4))
    return [np.where(inputs[0], x, y)]


def _infer_where(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    shapes = [tensor(operands, i).shape for i in (0, 1, 4)]
    return [TensorType(tensor(operands, 1).dtype, broadcast(*shapes))]


# ---- pools and reductions ----


def _pooled(inputs: Sequence[Any], attrs: Attrs, pool: Callable[[Array], Array]) -> Sequence[Any]:
    """Dequantise, pool with channels first, quantise. Parameters: (x, scale, zero, scale of y, zero of y)."""
    x = inputs[0]
    last = attrs.get("channels_last", 0)
    floats = dequantize(x.transpose(to_first(x.ndim)) if last else x, inputs[1], inputs[2])
    y = pool(floats)
    y = quantize(y.transpose(to_last(y.ndim)) if last else y, inputs[3], optional(inputs, 4), x.dtype)
    return [np.ascontiguousarray(y)]


def _average_pool(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    return _pooled(inputs, attrs, lambda x: run("AveragePool", [x], without(attrs, "channels_last")))


def _global_average_pool(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """Global average pooling: the integer sum is scaled once."""
    x, x_scale, x_zero, y_scale, y_zero = inputs
    axes = tuple(range(1, x.ndim - 1)) if attrs.get("channels_last", 0) else tuple(range(2, x.ndim))
    count = int(np.prod([x.shape[a] for a in axes]))
    sums = x.sum(axes, dtype=np.int32, keepdims=True) - np.int32(_number(x_zero)) * count
    ratio = _number(x_scale) / (_number(y_scale) * np.float32(count))
    return [saturate(np.rint(sums.astype(np.float32) * ratio), np.asarray(_number(y_zero)), x.dtype)]


def _infer_pool(op: str) -> Infer:
    def infer_types(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
        x = tensor(operands, 0)
        last = attrs.get("channels_last", 0)
        source = TensorType(DType.FLOAT32, (permuted(x, to_first) if last else x).shape)
        t = infer(op, [Operand(source)], without(attrs, "channels_last"))
        return [TensorType(x.dtype, (permuted(t, to_last) if last else t).shape)]

    return infer_types


def _reduce_mean(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    x = inputs[0]
    y = dequantize(x, inputs[1], inputs[2]).mean(_axes(attrs, x.ndim), keepdims=bool(attrs.get("keepdims", 1)))
    return [quantize(np.asarray(y), inputs[3], optional(inputs, 4), x.dtype)]


def _axes(attrs: Attrs, rank: int) -> tuple[int, ...]:
    return tuple(axis_of(a, rank, "axes") for a in attrs.get("axes", ())) or tuple(range(rank))


def _reduced(shape: Shape | None, attrs: Attrs) -> Shape | None:
    if shape is None:
        return None
    axes, keep = _axes(attrs, len(shape)), attrs.get("keepdims", 1)
    return tuple(1 if i in axes else d for i, d in enumerate(shape) if keep or i not in axes)


def _infer_reduce_mean(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    t = tensor(operands, 0)
    return [t.with_shape(_reduced(t.shape, attrs))]


def _reduce_sum_integer(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    x = inputs[0]
    dtype = np.int32 if x.dtype.kind == "i" else np.uint32
    return [np.asarray(x.sum(_axes(attrs, x.ndim), dtype=dtype, keepdims=bool(attrs.get("keepdims", 1))))]


def _infer_reduce_sum_integer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    t = tensor(operands, 0)
    dtype = DType.INT32 if t.dtype.numpy.kind == "i" else DType.UINT32
    return [TensorType(dtype, _reduced(t.shape, attrs))]


def _mul_integer(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    a, a_zero, b, b_zero = inputs[0], inputs[1], inputs[2], optional(inputs, 3)
    left = a.astype(np.int32) - (0 if a_zero is None else a_zero.astype(np.int32).reshape(()))
    return [np.asarray(left * (b.astype(np.int32) - (0 if b_zero is None else b_zero.astype(np.int32).reshape(()))))]


def _infer_mul_integer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    return [TensorType(DType.INT32, broadcast(tensor(operands, 0).shape, tensor(operands, 2).shape))]


def _softmax(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """Softmax over one axis since opset 13. Before, over all dimensions from the axis on together."""
    x = inputs[0]
    axis = axis_of(attrs.get("axis", -1), x.ndim)
    floats = dequantize(x, inputs[1], inputs[2])
    if attrs["opset"] < 13:
        rows = int(np.prod(x.shape[:axis]))
        y = softmax(floats.reshape(rows, -1)).reshape(x.shape)
    else:
        y = softmax(floats, axis)
    steps = np.floor(1 / _number(inputs[3]))  # ONNX Runtime takes the number of whole steps in 1
    return [saturate(np.rint(y * steps), inputs[4].reshape(()), x.dtype)]


# ---- conversions ----


def _axis(attrs: Attrs, parameter: Array, rank: int) -> int | None:
    return axis_of(attrs.get("axis", 1), rank) if parameter.ndim == 1 and parameter.size > 1 else None


def _quantize_linear(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    x, scale, zero = inputs[0], inputs[1], optional(inputs, 2)
    wide = x.astype(np.float32, copy=False)
    return [quantize(wide, scale.astype(np.float32), zero, np.uint8, _axis(attrs, scale, x.ndim))]


def _infer_quantize_linear(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    dtype = tensor(operands, 2).dtype if given(operands, 2) else DType.UINT8
    return [TensorType(dtype, tensor(operands, 0).shape)]


def _dequantize_linear(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    x, scale = inputs[0], inputs[1]
    return [dequantize(x, scale, optional(inputs, 2), _axis(attrs, scale, x.ndim)).astype(scale.dtype, copy=False)]


def _infer_dequantize_linear(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    return [TensorType(tensor(operands, 1).dtype, tensor(operands, 0).shape)]


OPS = (
    OpSpec(MS + "QLinearAdd", _add, _infer_binary),
    OpSpec(MS + "QLinearMul", _mul, _infer_binary),
    _table("QLinearSigmoid", lambda x, attrs: sigmoid(x)),
    _table("QLinearLeakyRelu", _leaky_relu),
    OpSpec(MS + "QLinearConcat", _concat, _infer_concat),
    OpSpec(MS + "QLinearWhere", _where, _infer_where),
    OpSpec(MS + "QLinearSoftmax", _softmax, same_as()),
    OpSpec(MS + "QLinearAveragePool", _average_pool, _infer_pool("AveragePool")),
    OpSpec(MS + "QLinearGlobalAveragePool", _global_average_pool, _infer_pool("GlobalAveragePool")),
    OpSpec(MS + "QLinearReduceMean", _reduce_mean, _infer_reduce_mean),
    OpSpec(MS + "ReduceSumInteger", _reduce_sum_integer, _infer_reduce_sum_integer),
    OpSpec(MS + "MulInteger", _mul_integer, _infer_mul_integer),
    OpSpec(MS + "QuantizeLinear", _quantize_linear, _infer_quantize_linear),
    OpSpec(MS + "DequantizeLinear", _dequantize_linear, _infer_dequantize_linear),
)
