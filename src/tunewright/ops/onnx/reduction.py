"""Reductions over axes, arguments of extrema, cumulative sums, the softmax family."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from tunewright.ir.types import Dim, DType, TensorType, Type
from tunewright.ops import batch_rules

from .. import shapes
from ..base import Array, Attrs, Operands, OpSpec
from ..numeric import limits, narrow, wide
from ..samples import dense
from ..samples.base import with_samples

#: (x, axes, keepdims) -> the reduced array; axes is empty when nothing is reduced
Reducer: TypeAlias = Callable[[Array, tuple[int, ...], bool], Any]


def _sum(x: Array, axes: tuple[int, ...], keep: bool) -> Any:
    return np.sum(x, axis=axes, keepdims=keep, dtype=x.dtype)


def _prod(x: Array, axes: tuple[int, ...], keep: bool) -> Any:
    return np.prod(x, axis=axes, keepdims=keep, dtype=x.dtype)


def _mean(x: Array, axes: tuple[int, ...], keep: bool) -> Any:
    if x.dtype.kind == "f":
        return np.mean(x, axis=axes, keepdims=keep)
    return np.trunc(np.mean(x, axis=axes, keepdims=keep, dtype=np.float64))


def _extremum(function: np.ufunc, largest: bool) -> Reducer:
    def reduce(x: Array, axes: tuple[int, ...], keep: bool) -> Any:
        initial: Any = None
        if not x.size:  # an empty set gives the neutral element
            if x.dtype.kind == "f":
                initial = -math.inf if largest else math.inf
            else:
                initial = not largest if x.dtype == np.bool_ else limits(x.dtype)[0 if largest else 1]
            return function.reduce(x, axis=axes, keepdims=keep, initial=initial)
        return function.reduce(x, axis=axes, keepdims=keep)

    return reduce


def _l1(x: Array, axes: tuple[int, ...], keep: bool) -> Any:
    return _sum(np.abs(x), axes, keep)


def _l2(x: Array, axes: tuple[int, ...], keep: bool) -> Any:
    return np.sqrt(_sum(np.square(x), axes, keep))


def _log_sum(x: Array, axes: tuple[int, ...], keep: bool) -> Any:
    return np.log(_sum(x, axes, keep))


def _log_sum_exp(x: Array, axes: tuple[int, ...], keep: bool) -> Any:
    if not x.size:
        return np.log(_sum(x, axes, keep))
    top = x.max(axis=axes, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    total = _sum(np.exp(x - top), axes, keep)
    return np.log(total) + (top if keep else np.squeeze(top, axes))


def _sum_square(x: Array, axes: tuple[int, ...], keep: bool) -> Any:
    return _sum(np.square(x), axes, keep)


def _spec(name: str, reducer: Reducer) -> OpSpec:
    def reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
        x, axes = wide(inputs[0]), shapes.optional(inputs, 1)
        chosen = _axes(None if axes is None else axes.reshape(-1).tolist(), attrs, x.ndim)
        y = narrow(reducer(x, chosen, bool(attrs.get("keepdims", 1))), inputs[0].dtype)
        return [y.copy() if y.base is not None else y]

    return OpSpec(name, reference, _infer_reduce, flops=_input_flops, batch=batch_rules.reduced)


def _axes(axes: Sequence[int] | None, attrs: Attrs, rank: int) -> tuple[int, ...]:
    if not axes:
        return () if attrs.get("noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted(shapes.axes_of(axes, rank)))


def _infer_reduce(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, keep = shapes.tensor(operands, 0), bool(attrs.get("keepdims", 1))
    axes = shapes.ints(operands, 1)
    if shapes.given(operands, 1) and axes is None and shapes.length(shapes.tensor(operands, 1)) != 0:
        return [TensorType(x.dtype, shapes.unknown(len(x.shape)) if keep and x.shape is not None else None)]
    if x.shape is None:
        full = not axes and not attrs.get("noop_with_empty_axes", 0) and not keep
        return [TensorType(x.dtype, () if full else None)]
    return [TensorType(x.dtype, _reduced(x.shape, _axes(axes, attrs, len(x.shape)), keep))]


def _reduced(shape: Sequence[Dim], axes: Sequence[int], keep: bool) -> tuple[Dim, ...]:
    if keep:
        return tuple(1 if i in axes else d for i, d in enumerate(shape))
    return tuple(d for i, d in enumerate(shape) if i not in axes)


def _input_flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    return float(inputs[0].size) if inputs[0] is not None else 0.0


# -- ArgMax, ArgMin ---------------------------------------------------------------------------------------------------
def _arg(name: str, function: Callable[..., Any]) -> OpSpec:
    def reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
        x = wide(inputs[0])
        axis = shapes.axis_of(int(attrs.get("axis", 0)), x.ndim)
        if attrs.get("select_last_index", 0):
            y = x.shape[axis] - 1 - np.asarray(function(np.flip(x, axis), axis=axis))
        else:
            y = np.asarray(function(x, axis=axis))
        return [narrow(np.expand_dims(y, axis) if attrs.get("keepdims", 1) else y, np.dtype(np.int64))]

    return OpSpec(name, reference, _infer_arg, flops=_input_flops, batch=batch_rules.argument)


def _infer_arg(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = shapes.tensor(operands, 0)
    if x.shape is None:
        return [TensorType(DType.INT64)]
    axis = shapes.axis_of(int(attrs.get("axis", 0)), len(x.shape))
    return [TensorType(DType.INT64, _reduced(x.shape, (axis,), bool(attrs.get("keepdims", 1))))]


# -- CumSum, CumProd --------------------------------------------------------------------------------------------------
def _cumulative(
    name: str, function: np.ufunc, neutral: int, batch: batch_rules.BatchRule | None = None
) -> OpSpec:  # fmt: skip
    def reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
        x = wide(inputs[0])
        axis = shapes.axis_of(int(inputs[1].reshape(-1)[0]), x.ndim)
        if attrs.get("reverse", 0):
            x = np.flip(x, axis)
        y = function.accumulate(x, axis=axis, dtype=x.dtype)
        if attrs.get("exclusive", 0):
            lead = (slice(None),) * axis
            shifted = np.full_like(y, neutral)
            shifted[(*lead, slice(1, None))] = y[(*lead, slice(None, -1))]
            y = shifted
        if attrs.get("reverse", 0):
            y = np.flip(y, axis).copy()
        return [narrow(y, inputs[0].dtype)]

    return OpSpec(name, reference, shapes.same_as(), batch=batch)


# -- softmax family ---------------------------------------------------------------------------------------------------
def softmax(x: Array, axis: int = -1) -> Array:
    """exp(x) / sum(exp(x)), shifted by the maximum, in the type of ``x``."""
    if not x.size:
        return x.copy()
    y = x - x.max(axis=axis, keepdims=True)
    np.exp(y, out=y)
    y /= y.sum(axis=axis, keepdims=True)
    return np.asarray(y)


def _softmax(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, dtype = wide(inputs[0]), inputs[0].dtype
    axis = shapes.axis_of(int(attrs.get("axis", -1)), x.ndim)
    if x.dtype == dtype or not x.size:
        return [narrow(softmax(x, axis), dtype)]
    # ONNX defines Softmax by Exp, ReduceSum and Div in the input's type. Narrow floats are rounded after each of them.
    y = wide(narrow(np.exp(x - x.max(axis=axis, keepdims=True)), dtype))
    return [narrow(y / wide(narrow(y.sum(axis=axis, keepdims=True), dtype)), dtype)]


def _log_softmax(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x = wide(inputs[0])
    if not x.size:
        return [inputs[0].copy()]
    axis = shapes.axis_of(int(attrs.get("axis", -1)), x.ndim)
    y = x - x.max(axis=axis, keepdims=True)
    y -= np.log(np.exp(y).sum(axis=axis, keepdims=True))
    return [narrow(y, inputs[0].dtype)]


def _hardmax(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x = wide(inputs[0])
    axis = shapes.axis_of(int(attrs.get("axis", -1)), x.ndim)
    y = np.zeros(x.shape, x.dtype)
    if x.size:
        np.put_along_axis(y, np.expand_dims(x.argmax(axis), axis), 1, axis)
    return [narrow(y, inputs[0].dtype)]


def _infer_softmax(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = shapes.tensor(operands, 0)
    if x.shape is not None:
        shapes.axis_of(int(attrs.get("axis", -1)), len(x.shape))
    return [TensorType(x.dtype, x.shape)]


def _softmax_flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    return 5.0 * outputs[0].size


OPS = with_samples(
    (
        _spec("ReduceSum", _sum),
        _spec("ReduceProd", _prod),
        _spec("ReduceMean", _mean),
        _spec("ReduceMax", _extremum(np.maximum, True)),
        _spec("ReduceMin", _extremum(np.minimum, False)),
        _spec("ReduceL1", _l1),
        _spec("ReduceL2", _l2),
        _spec("ReduceLogSum", _log_sum),
        _spec("ReduceLogSumExp", _log_sum_exp),
        _spec("ReduceSumSquare", _sum_square),
        _arg("ArgMax", np.argmax),
        _arg("ArgMin", np.argmin),
        _cumulative("CumSum", np.add, 0, batch_rules.cumulative),
        _cumulative("CumProd", np.multiply, 1),
        OpSpec("Softmax", _softmax, _infer_softmax, flops=_softmax_flops, batch=batch_rules.along(-1)),
        OpSpec("LogSoftmax", _log_softmax, _infer_softmax, flops=_softmax_flops, batch=batch_rules.along(-1)),
        OpSpec("Hardmax", _hardmax, _infer_softmax, batch=batch_rules.along(-1)),
    ),
    dense.REDUCTION,
)
