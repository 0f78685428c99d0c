"""Arithmetic, comparison, logic and bit operators with numpy broadcasting. One element of each input makes one output
element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tunewright.ir.types import DType, TensorType, Type
from tunewright.ops import batch_rules

from .. import shapes
from ..base import Array, Attrs, Infer, Operands, OpSpec, Reference
from ..input_errors import check_divisors
from ..numeric import erf, narrow, wide
from ..samples import base
from ..samples.base import with_samples


def unary(function: Callable[[Array], Any]) -> Reference:
    """Make a reference from a function of one tensor, computed in at least single precision."""

    def reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
        x = inputs[0]
        return [narrow(function(wide(x)), x.dtype)]

    return reference


def binary(function: Callable[[Array, Array], Any]) -> Reference:
    """Make a reference from a function of two tensors. The result has the type of the first."""

    def reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
        a, b = inputs
        return [narrow(function(wide(a), wide(b)), a.dtype)]

    return reference


def compare(function: Callable[[Array, Array], Any]) -> Reference:
    """Make a reference from a comparison of two tensors. Strings are compared as Python does."""

    def reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
        return [narrow(function(inputs[0], inputs[1]), np.dtype(np.bool_))]

    return reference


def variadic(function: Callable[[Array, Array], Any]) -> Reference:
    """Make a reference that folds one or more tensors from the left."""

    def reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
        result = wide(inputs[0])
        if len(inputs) == 1:
            return [narrow(result, inputs[0].dtype).copy()]
        for x in inputs[1:]:
            result = function(result, wide(x))
        return [narrow(result, inputs[0].dtype)]

    return reference


def divide(a: Array, b: Array) -> Array:
    """Divide. Integer quotients are truncated towards zero, as in C."""
    if a.dtype.kind not in "iu":
        return np.divide(a, b)
    check_divisors(b)
    if a.dtype.kind == "u":
        return np.floor_divide(a, b)
    quotient, rest = np.divmod(a, b)
    return np.asarray(quotient + ((rest != 0) & ((a < 0) != (b < 0))).astype(a.dtype))


def power(a: Array, b: Array) -> Array:
    """``a`` to the power ``b``, in the type of the base. Integers to negative powers are computed in float64."""
    if b.size == 1 and b.ndim <= a.ndim and a.dtype.kind == "f":
        exponent = float(b.reshape(()))
        if exponent == 2:
            return np.square(a)
        if exponent == 0.5:
            return np.sqrt(a)
    if a.dtype.kind in "iu":
        if b.dtype.kind in "iu" and (b.dtype.kind == "u" or not (b < 0).any()):
            return np.asarray(np.power(a, b.astype(a.dtype)))
        return np.asarray(np.power(a.astype(np.float64), b.astype(np.float64)))
    return np.asarray(np.power(a, b.astype(a.dtype)))


def _mod(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    a, b = inputs
    check_divisors(b)
    function = np.fmod if attrs.get("fmod", 0) else np.mod
    return [narrow(function(wide(a), wide(b)), a.dtype)]


def _mean(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    total = wide(inputs[0])
    for x in inputs[1:]:
        total = total + wide(x)
    return [narrow(total / total.dtype.type(len(inputs)), inputs[0].dtype)]


def _bit_shift(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    """Shift bits. A shift by a negative count or by all bits leaves only the sign extension."""
    x, y = inputs
    bits = x.dtype.itemsize * 8
    outside = (y < 0) | (y >= bits)
    count = np.where(outside, 0, y).astype(x.dtype)
    if attrs.get("direction") == "LEFT":
        shifted, beyond = np.left_shift(x, count), np.zeros_like(x)
    elif attrs.get("direction") == "RIGHT":
        shifted, beyond = np.right_shift(x, count), np.where(x < 0, -1, 0).astype(x.dtype)
    else:
        raise ValueError(f"direction {attrs.get('direction')!r} is not LEFT or RIGHT")
    return [np.where(outside, beyond, shifted).astype(x.dtype)]


def _is_inf(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x = wide(inputs[0])
    result = np.isinf(x)
    if not attrs.get("detect_negative", 1):
        result &= x > 0
    if not attrs.get("detect_positive", 1):
        result &= x < 0
    return [np.asarray(result)]


def _is_nan(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    return [np.asarray(np.isnan(wide(inputs[0])))]


def _where(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    condition, x, y = inputs
    return [narrow(np.where(condition, x, y), x.dtype)]


def _infer_where(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    condition, x, y = (shapes.tensor(operands, i) for i in range(3))
    if condition.dtype is not DType.BOOL:
        raise ValueError(f"the condition is {condition.dtype} instead of bool")
    if x.dtype is not y.dtype:
        raise ValueError(f"inputs differ in type: {x.dtype} and {y.dtype}")
    return [TensorType(x.dtype, shapes.broadcast(condition.shape, x.shape, y.shape))]


def _clip(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x = wide(inputs[0])
    low, high = shapes.optional(inputs, 1), shapes.optional(inputs, 2)
    y = x.copy() if low is None and high is None else x
    if low is not None:
        y = np.maximum(y, wide(low.reshape(())))
    if high is not None:
        y = np.minimum(y, wide(high.reshape(())))
    return [narrow(y, inputs[0].dtype)]


def _infer_clip(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = shapes.tensor(operands, 0)
    for i, what in ((1, "min"), (2, "max")):
        if shapes.given(operands, i):
            bound = shapes.tensor(operands, i)
            if bound.dtype is not x.dtype:
                raise ValueError(f"{what} is {bound.dtype}, the input {x.dtype}")
            if shapes.count(bound.shape) not in (None, 1):
                raise ValueError(f"{what} is {bound} instead of a scalar")
    return [TensorType(x.dtype, x.shape)]


def _same(name: str, function: Callable[[Array], Any]) -> OpSpec:
    return OpSpec(name, unary(function), shapes.same_as(), elementwise=True)


def _pair(name: str, reference: Reference, infer: Infer | None = None) -> OpSpec:
    return OpSpec(name, reference, infer or shapes.elementwise(), elementwise=True)


_BOOL = shapes.elementwise(DType.BOOL)

OPS = with_samples(
    (
        _same("Abs", np.abs),
        _same("Acos", np.arccos),
        _same("Acosh", np.arccosh),
        _same("Asin", np.arcsin),
        _same("Asinh", np.arcsinh),
        _same("Atan", np.arctan),
        _same("Atanh", np.arctanh),
        _same("BitwiseNot", np.invert),
        _same("Ceil", np.ceil),
        _same("Cos", np.cos),
        _same("Cosh", np.cosh),
        _same("Erf", erf),
        _same("Exp", np.exp),
        _same("Floor", np.floor),
        _same("Log", np.log),
        _same("Neg", np.negative),
        _same("Not", np.logical_not),
        _same("Reciprocal", np.reciprocal),
        _same("Round", np.rint),
        _same("Sign", np.sign),
        _same("Sin", np.sin),
        _same("Sinh", np.sinh),
        _same("Sqrt", np.sqrt),
        _same("Tan", np.tan),
        _same("Tanh", np.tanh),
        _pair("Add", binary(np.add)),
        _pair("Sub", binary(np.subtract)),
        _pair("Mul", binary(np.multiply)),
        _pair("Div", binary(divide)),
        _pair("Pow", binary(power), shapes.elementwise(mixed=True)),
        _pair("Mod", _mod),
        _pair("And", binary(np.logical_and)),
        _pair("Or", binary(np.logical_or)),
        _pair("Xor", binary(np.logical_xor)),
        _pair("BitwiseAnd", binary(np.bitwise_and)),
        _pair("BitwiseOr", binary(np.bitwise_or)),
        _pair("BitwiseXor", binary(np.bitwise_xor)),
        _pair("BitShift", _bit_shift),
        _pair("Max", variadic(np.maximum)),
        _pair("Min", variadic(np.minimum)),
        _pair("Sum", variadic(np.add)),
        _pair("Mean", _mean),
        _pair("Where", _where, _infer_where),
        _pair("Clip", _clip, _infer_clip),
        OpSpec("Equal", compare(np.equal), _BOOL, batch=batch_rules.elementwise),
        OpSpec("Greater", compare(np.greater), _BOOL, batch=batch_rules.elementwise),
        OpSpec("GreaterOrEqual", compare(np.greater_equal), _BOOL, batch=batch_rules.elementwise),
        OpSpec("Less", compare(np.less), _BOOL, batch=batch_rules.elementwise),
        OpSpec("LessOrEqual", compare(np.less_equal), _BOOL, batch=batch_rules.elementwise),
        OpSpec("IsInf", _is_inf, shapes.same_as(dtype=DType.BOOL), batch=batch_rules.elementwise),
        OpSpec("IsNaN", _is_nan, shapes.same_as(dtype=DType.BOOL), batch=batch_rules.elementwise),
    ),
    base.ELEMENTWISE,
)
