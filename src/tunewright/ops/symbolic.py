"""Folding of shape arithmetic on symbolic integers, while a plan is made for a class of shapes.

Operators on small integer tensors compute with `SymInt` elements; see `ir/symbolic.py`. Other operators pin the values
if their result is small too. Some operators make large tensors out of sizes (a mask, positions), or floats to compute
with (a width). They stay nodes and run with each inference.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..ir.graph import Graph, Node, Value
from ..ir.launch_symbols import is_late
from ..ir.symbolic import SymArray, SymInt, greater, lesser, sym_array
from ..ir.types import DType, TensorType
from . import lookup, shapes
from .base import Array, Attrs
from .numeric import limits

#: most elements of a result that still counts as shape arithmetic
FEW = 64

#: operators whose result sizes depend on float inputs
_BY_FLOATS = frozenset({"Resize", "Upsample", "Range"})

_Fold = Callable[[Sequence[Any], Attrs, int], Sequence[Any]]


def fold(graph: Graph, node: Node) -> bool:
    """Replace a node over partly symbolic constants by its results. False where it must run with each inference."""
    types = [v.type for v in node.outputs]
    if not all(isinstance(t, TensorType) and t.is_static and not t.is_symbolic and t.size <= FEW for t in types):
        return False
    if _makes_floats(node) and not _decides(node):
        return False
    arrays = [None if v is None else v.const for v in node.inputs]
    if node.op == "Gather" and isinstance(arrays[1], SymArray) and not isinstance(arrays[0], SymArray):
        return False  # a row of a table, for example of positions: pinned, it would be right for one size alone
    main = arrays[: len(arrays) - node.operands]
    found = [*_evaluate(node.op, main, node.attrs, len(node.outputs))]
    if node.epilogue:
        results = [found[0]]
        for step in node.epilogue:
            given = [arrays[i] if i >= 0 else results[~i] for i in step.args]
            results.append(_evaluate(step.op, given, step.attrs, 1)[0])
        found = results[-1:]
    for value, result in zip(node.outputs, found, strict=False):
        graph.replace(value, _constant(graph, value, result))
    graph.remove(node)
    return True


def _decides(node: Node) -> bool:
    """Whether floats computed from sizes may decide about shapes: as a factor, or by becoming integers or bools."""
    found, waiting = {node}, [node]
    while waiting:
        one = waiting.pop()
        if one.bodies or len(found) > FEW or one.op in _BY_FLOATS or not _makes_floats(one):
            return True
        for user in dict.fromkeys(u for v in one.outputs for u in v.users):
            others = (v for v in user.inputs if v is not None and v.const is None)
            alone = all(v.producer in found for v in others)  # a value that also depends on data is data
            if user not in found and (alone or user.bodies or user.op in _BY_FLOATS):
                found.add(user)
                waiting.append(user)
    return False


def _makes_floats(node: Node) -> bool:
    casts = [step for step in node.epilogue if step.op == "Cast"]
    known = all(v.tensor is not None and v.tensor.dtype.is_float for v in node.outputs)
    return known and all(shapes.dtype_of(step.attrs.get("to"), "to").is_float for step in casts)


def _evaluate(op: str, arrays: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    way = _WAYS.get(op)
    if way is not None and any(isinstance(a, SymArray) or (a is not None and a.dtype == object) for a in arrays):
        return way(arrays, attrs, n)
    spec = lookup(op)
    assert spec is not None
    return spec.reference([a if a is None else pinned(a) for a in arrays], attrs, n)


def _constant(graph: Graph, value: Value, result: Array) -> Value:
    """The result as a constant of the inferred type."""
    type = value.type
    array = result
    if result.dtype == object and any(isinstance(item, SymInt) for item in result.flat):
        if isinstance(type, TensorType) and type.dtype.is_integer:
            result = _fitting(result, type.dtype)
        array = sym_array(result.tolist() if result.ndim else result.item())
    else:
        dtype = type.dtype.numpy if isinstance(type, TensorType) and result.dtype == object else None
        array = np.ascontiguousarray(result, dtype).reshape(result.shape)
    made = graph.constant(array, value.name)
    if isinstance(type, TensorType) and isinstance(made.type, TensorType):
        made.type = made.type.with_dtype(type.dtype)
    return made


def _fitting(array: Array, dtype: DType) -> Array:
    """The elements in the range of ``dtype``. Elements outside the range wrap around and are pinned to a number."""
    low, high = limits(dtype.numpy)
    made = array.copy()
    for at, item in np.ndenumerate(array):
        if not low <= item <= high:
            made[at] = (int(item) - low) % (high - low + 1) + low
    return made


def pinned(array: Any) -> Any:
    """The tensor with its symbolic values pinned to their present numbers."""
    if array.dtype != object:
        return array
    return np.array([int(v) for v in array.flat], np.int64).reshape(array.shape)


def _objects(array: Any) -> Array:
    made = np.empty(array.shape, object)
    made[...] = np.asarray(array, object)
    return made


def _elementwise(function: Callable[..., Any]) -> _Fold:
    def run(arrays: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
        given = np.broadcast_arrays(*[_objects(a) for a in arrays])
        made = np.empty(given[0].shape, object)
        for at in np.ndindex(made.shape):
            made[at] = function(*[a[at] for a in given])
        return [made]

    return run


def _divided(a: Any, b: Any) -> Any:
    """Divide as ONNX does, rounding towards zero."""
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _remainder(arrays: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """The remainder with the divisor's sign, or (``fmod``) with the dividend's."""
    function = (lambda a, b: a - _divided(a, b) * b) if attrs.get("fmod", 0) else operator.mod
    return _elementwise(function)(arrays, attrs, n)


def _sign(a: Any) -> int:
    return int(a > 0) - int(a < 0)


def _truth(function: Callable[[Any, Any], bool]) -> _Fold:
    made = _elementwise(function)

    def run(arrays: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
        return [made(arrays, attrs, n)[0].astype(bool)]

    return run


def _least(items: Sequence[Any]) -> Any:
    """The least; an expression where a launch finds out which it is."""
    return lesser(*items) if any(map(is_late, items)) else min(items)


def _most(items: Sequence[Any]) -> Any:
    return greater(*items) if any(map(is_late, items)) else max(items)


def _where(condition: Any, a: Any, b: Any) -> Any:
    return a if condition else b


def _cast(arrays: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    to = shapes.dtype_of(attrs.get("to"), "to")
    if to in (DType.INT64, DType.INT32):
        return [arrays[0]]
    return [np.array([int(v) for v in arrays[0].flat]).reshape(arrays[0].shape).astype(to.numpy)]


def _gather(arrays: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    x, indices = arrays
    axis, at = shapes.axis_of(int(attrs.get("axis", 0)), x.ndim), np.array(indices, np.int64)
    made = np.empty((*x.shape[:axis], *at.shape, *x.shape[axis + 1 :]), object)
    made[...] = np.take(_objects(x), at, axis)
    return [made]


def _by(name: str) -> _Fold:
    """A fold by the reference, which only moves elements."""

    def run(arrays: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
        spec = lookup(name)
        assert spec is not None
        moved = [_objects(arrays[0]), *arrays[1:]] if name != "Concat" else [_objects(a) for a in arrays]
        return spec.reference(moved, attrs, n)

    return run


def _range(arrays: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    start, limit, delta = (a.reshape(()).item() for a in arrays)
    count = int(-((start - limit) // delta))
    made = np.empty(max(0, count), object)
    made[:] = [start + k * delta for k in range(max(0, count))]
    return [made]


def _reduced(function: Callable[[Sequence[Any]], Any]) -> _Fold:
    def run(arrays: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
        x = _objects(arrays[0])
        given = shapes.optional(arrays, 1)
        named = [] if given is None else given.reshape(-1).tolist()
        if given is not None and not named and attrs.get("noop_with_empty_axes", 0):
            return [x]
        axes = shapes.axes_of(named, x.ndim) or [*range(x.ndim)]
        if len(axes) != x.ndim:
            raise ValueError("only whole shapes are reduced here")
        made = np.empty((1,) * x.ndim if attrs.get("keepdims", 1) else (), object)
        made[...] = function([*x.flat])
        return [made]

    return run


_WAYS: Mapping[str, _Fold] = {
    "Add": _elementwise(lambda a, b: a + b),
    "Sub": _elementwise(lambda a, b: a - b),
    "Mul": _elementwise(lambda a, b: a * b),
    "Div": _elementwise(_divided),
    "Mod": _remainder,
    "Sign": _elementwise(_sign),
    "Neg": _elementwise(lambda a: -a),
    "Abs": _elementwise(abs),
    "Min": _elementwise(lambda *items: _least(items)),
    "Max": _elementwise(lambda *items: _most(items)),
    "Where": _elementwise(_where),
    "Equal": _truth(lambda a, b: a == b),
    "Less": _truth(lambda a, b: a < b),
    "LessOrEqual": _truth(lambda a, b: a <= b),
    "Greater": _truth(lambda a, b: a > b),
    "GreaterOrEqual": _truth(lambda a, b: a >= b),
    "Cast": _cast,
    "Gather": _gather,
    "Range": _range,
    "ReduceSum": _reduced(sum),
    "ReduceProd": _reduced(math.prod),
    "ReduceMin": _reduced(_least),
    "ReduceMax": _reduced(_most),
} | {
    name: _by(name)
    for name in (
        "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Split", "Concat", "Tile",
        "Expand",
    )
}  # fmt: skip
