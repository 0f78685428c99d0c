"""Operators on sequences and optionals. A sequence is a list, an absent optional is None."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.types import Dim, DType, OptionalType, SequenceType, Shape, TensorType, Type
from tunewright.ops.base import Attrs, Operands, OpSpec
from tunewright.ops.shapes import axis_of, given, tensor, value

_SCALAR_INT = TensorType(DType.INT64, ())


def _sequence(operands: Operands, i: int) -> SequenceType:
    operand = operands[i] if i < len(operands) else None
    kind = operand.type if operand is not None else None
    if isinstance(kind, OptionalType):  # a present optional is its content
        kind = kind.elem
    if kind is None and operand is not None:
        return SequenceType()
    if not isinstance(kind, SequenceType):
        raise ValueError(f"input {i} must be a sequence, not {kind}")
    return kind


def _common(types: Sequence[Type | None]) -> Type | None:
    """A common type of all elements. Dimensions that differ become open."""
    first = types[0] if types else None
    if not isinstance(first, TensorType):
        return first
    shape: Shape | None = first.shape
    for other in types[1:]:
        if not isinstance(other, TensorType) or other.dtype != first.dtype:
            raise ValueError(f"a sequence cannot hold both {first} and {other}")
        if shape is None or other.shape is None or len(shape) != len(other.shape):
            shape = None
        else:
            shape = tuple(a if a == b else None for a, b in zip(shape, other.shape, strict=True))
    return TensorType(first.dtype, shape)


def _place(position: Any, length: int, last: int) -> int:
    """A checked position, counted from either end."""
    at = last if position is None else int(np.asarray(position).reshape(()))
    limit = last + 1
    if not -length <= at < limit:
        raise ValueError(f"position {at} does not fit a sequence of {length}")
    return at + length if at < 0 else at


# -- sequences ---------------------------------------------------------------------------------------------------------
def _construct(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    return [list(inputs)]


def _infer_construct(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    return [SequenceType(_common([o.type for o in operands if o is not None]))]


def _empty(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    return [[]]


def _infer_empty(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    return [SequenceType(TensorType(DType.of_onnx(int(attrs.get("dtype", 1)))))]


def _insert(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    items, item, position = [*inputs, None][:3]
    at = _place(position, len(items), len(items))
    return [[*items[:at], item, *items[at:]]]


def _infer_insert(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    kind, item = _sequence(operands, 0).elem, tensor(operands, 1)
    return [SequenceType(None if kind is None else _common([kind, item]))]


def _erase(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    items, position = [*inputs, None][:2]
    at = _place(position, len(items), len(items) - 1)
    return [[*items[:at], *items[at + 1 :]]]


def _infer_same(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    return [_sequence(operands, 0)]


def _at(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    items, position = inputs
    return [items[_place(position, len(items), len(items) - 1)]]


def _infer_at(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    return [_sequence(operands, 0).elem]


def _length(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    return [np.asarray(len(inputs[0]), np.int64)]


def _infer_length(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    _sequence(operands, 0)
    return [_SCALAR_INT]


def _sizes(split: Any, extent: int) -> list[int]:
    """Lengths of the parts. A single number is the length of each part; the last one may be shorter."""
    if split.ndim:
        return [int(s) for s in split]
    step = int(split)
    if step <= 0:
        raise ValueError(f"a split of {step} is not positive")
    return [min(step, extent - at) for at in range(0, extent, step)]


def _is_unbind(split: Any, attrs: Attrs) -> bool:
    """Whether the slices lose the axis. PyTorch exports `unbind` as a split of 1. ONNX's text then ignores keepdims,
    but ONNX Runtime honours it."""
    return not attrs.get("keepdims", 1) and (split is None or (np.ndim(split) == 0 and int(split) == 1))


def _split(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    x, split = [*inputs, None][:2]
    axis = axis_of(int(attrs.get("axis", 0)), x.ndim)
    if _is_unbind(split, attrs):
        return [[np.asarray(part) for part in np.moveaxis(x, axis, 0)]]
    split = np.asarray(1) if split is None else split
    sizes = _sizes(split, x.shape[axis])
    if sum(sizes) != x.shape[axis] or any(s < 0 for s in sizes):
        raise ValueError(f"parts of {sizes} do not make up dimension {x.shape[axis]}")
    return [np.split(x, np.cumsum(sizes)[:-1], axis) if sizes else []]


def _infer_split(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = tensor(operands, 0)
    if x.shape is None:
        return [SequenceType(TensorType(x.dtype))]
    axis = axis_of(int(attrs.get("axis", 0)), len(x.shape))
    dims: list[Dim] = list(x.shape)
    sizes = value(operands, 1) if given(operands, 1) else None
    if given(operands, 1) and sizes is None and not attrs.get("keepdims", 1):
        return [SequenceType(TensorType(x.dtype))]
    if _is_unbind(sizes, attrs):
        del dims[axis]
    elif not given(operands, 1):
        dims[axis] = 1
    else:
        each = set(sizes.tolist()) if sizes is not None and sizes.ndim == 1 else set()
        dims[axis] = int(each.pop()) if len(each) == 1 else None
    return [SequenceType(TensorType(x.dtype, tuple(dims)))]


def _concat(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    (items,) = inputs
    axis = int(attrs["axis"])
    return [np.stack(items, axis) if attrs.get("new_axis", 0) else np.concatenate(items, axis)]


def _infer_concat(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    item = _sequence(operands, 0).elem
    if not isinstance(item, TensorType):
        return [None]
    if item.shape is None:
        return [TensorType(item.dtype)]
    dims: list[Dim] = list(item.shape)
    if attrs.get("new_axis", 0):
        dims.insert(axis_of(int(attrs["axis"]), len(dims) + 1), None)
    else:
        dims[axis_of(int(attrs["axis"]), len(dims))] = None
    return [TensorType(item.dtype, tuple(dims))]


# -- optionals ---------------------------------------------------------------------------------------------------------
def _optional(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    return [inputs[0] if inputs else None]


def _infer_optional(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    if given(operands, 0):
        operand = operands[0]
        return [OptionalType(operand.type if operand is not None else None)]
    kind = attrs.get("type")
    if kind is None:
        raise ValueError("an empty optional needs attribute 'type'")
    return [OptionalType(kind)]


def _get_element(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    if inputs[0] is None:
        raise ValueError("the optional is empty")
    return [inputs[0]]


def _infer_get_element(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    operand = operands[0] if operands else None
    if operand is None:
        raise ValueError("input 0 is missing")
    return [operand.type.elem if isinstance(operand.type, OptionalType) else operand.type]


def _has_element(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    return [np.asarray(bool(inputs) and inputs[0] is not None)]


def _infer_has_element(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    return [TensorType(DType.BOOL, ())]


OPS = (
    OpSpec("SequenceConstruct", _construct, _infer_construct),
    OpSpec("SequenceEmpty", _empty, _infer_empty),
    OpSpec("SequenceInsert", _insert, _infer_insert),
    OpSpec("SequenceErase", _erase, _infer_same),
    OpSpec("SequenceAt", _at, _infer_at),
    OpSpec("SequenceLength", _length, _infer_length),
    OpSpec("SplitToSequence", _split, _infer_split),
    OpSpec("ConcatFromSequence", _concat, _infer_concat),
    OpSpec("Optional", _optional, _infer_optional),
    OpSpec("OptionalGetElement", _get_element, _infer_get_element),
    OpSpec("OptionalHasElement", _has_element, _infer_has_element),
)
