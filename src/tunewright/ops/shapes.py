"""Shape arithmetic of several families. Dimensions are numbers, names or unknown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..ir.symbolic import WHOLE, SymInt, same
from ..ir.types import MAX_RANK, Dim, DType, Shape, TensorType, Type
from .base import Attrs, Infer, Operands


def tensor(operands: Operands, i: int) -> TensorType:
    """The type of input i, which must be present and a tensor."""
    operand = operands[i] if i < len(operands) else None
    if operand is None:
        raise ValueError(f"input {i} is missing")
    return operand.tensor


def value(operands: Operands, i: int) -> Any:
    """The constant value of input i; None when it is absent or not constant."""
    operand = operands[i] if i < len(operands) else None
    return None if operand is None else operand.value


def ints(operands: Operands, i: int) -> list[int] | None:
    """The constant value of an integer input as a flat list; None when it is absent or not constant."""
    found = value(operands, i)
    return None if found is None else [whole(v) for v in found.reshape(-1).tolist()]


def whole(value: Any) -> int:
    """The integer of an array with one element. Symbolic integers stay symbolic."""
    return value if isinstance(value, SymInt) else int(value)  # type: ignore[return-value]


def given(operands: Operands, i: int) -> bool:
    return i < len(operands) and operands[i] is not None


def optional(inputs: Sequence[Any], i: int) -> Any:
    """Input i of a reference; None when it is absent."""
    return inputs[i] if i < len(inputs) else None


def dtype_of(code: Any, what: str) -> DType:
    """The element type of an attribute that holds ONNX's type number."""
    try:
        return DType.of_onnx(int(code))
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{what} = {code!r} names no element type") from None


def axis_of(axis: int, rank: int, what: str = "axis") -> int:
    """The axis as a non-negative number."""
    if not -rank <= axis < rank:
        raise ValueError(f"{what} {axis} does not fit rank {rank}")
    return axis % rank if rank else 0


def axes_of(axes: Iterable[int], rank: int) -> list[int]:
    """The axes as non-negative numbers, each at most once."""
    result = [axis_of(int(a), rank) for a in axes]
    if len(set(result)) != len(result):
        raise ValueError(f"axes {result} name one axis twice")
    return result


def unknown(rank: int | None) -> Shape | None:
    """A shape of known rank with unknown dimensions."""
    if rank is not None and rank > MAX_RANK:
        raise ValueError(f"{rank} dimensions are more than {MAX_RANK}")
    return None if rank is None else (None,) * rank


def length(type: TensorType) -> int | None:
    """The number of elements of a vector; None when unknown."""
    if type.shape is None:
        return None
    if not type.shape:
        return 1
    return type.shape[0] if isinstance(type.shape[0], WHOLE) else None


def count(shape: Iterable[Dim] | None) -> int | None:
    """The number of elements; None unless every dimension is a number (or one of them is 0)."""
    if shape is None:
        return None
    dims = list(shape)
    if 0 in dims:
        return 0
    return math.prod(dims) if all(isinstance(d, WHOLE) for d in dims) else None  # type: ignore[arg-type]


def times(*dims: Dim) -> Dim:
    """The product of dimensions; None unless all are numbers."""
    return math.prod(d for d in dims if isinstance(d, WHOLE)) if all(isinstance(d, WHOLE) for d in dims) else None


def broadcast_dim(a: Dim, b: Dim) -> Dim:
    if b == 1:
        return a
    if a == 1:
        return b
    if a == b:
        return a
    if isinstance(a, WHOLE) and isinstance(b, WHOLE):
        raise ValueError(f"dimensions {a} and {b} do not broadcast")
    # A number above one wins over an open dimension, which must be 1 or that number.
    return a if isinstance(a, WHOLE) else b if isinstance(b, WHOLE) else None


def broadcast(*shapes: Shape | None) -> Shape | None:
    """The shape after numpy's broadcasting; None when a rank is unknown."""
    if not shapes:
        return ()
    result = shapes[0]
    for shape in shapes[1:]:
        if result is None or shape is None:
            return None
        if None not in shape and same(shape, result):
            continue
        if len(result) < len(shape):
            result, shape = shape, result
        lead = len(result) - len(shape)
        tail = tuple(broadcast_dim(a, b) for a, b in zip(result[lead:], shape, strict=True))
        result = result[:lead] + tail
    return result


def same_dim(a: Dim, b: Dim, what: str) -> Dim:
    """The more specific of two dimensions that must be equal."""
    if isinstance(a, WHOLE) and isinstance(b, WHOLE) and a != b:
        raise ValueError(f"{what}: {a} against {b}")
    return a if isinstance(a, WHOLE) or b is None else b if isinstance(b, WHOLE) or a is None else a


def need_rank(type: TensorType, rank: int, what: str) -> Shape:
    """The shape of an operand of fixed rank; unknown dimensions when even the rank is unknown."""
    if type.shape is None:
        return (None,) * rank
    if len(type.shape) != rank:
        raise ValueError(f"{what} has rank {len(type.shape)} instead of {rank}")
    return type.shape


def same_as(i: int = 0, dtype: DType | None = None) -> Infer:
    """Make an inference for outputs with the shape of input i, and with its type unless ``dtype`` is given."""

    def infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
        t = tensor(operands, i)
        return [TensorType(dtype or t.dtype, t.shape)]

    return infer


def elementwise(dtype: DType | None = None, *, mixed: bool = False) -> Infer:
    """Make an inference that broadcasts all inputs. The type is the first input's unless ``dtype`` is given.

    Unless ``mixed``, all inputs must be of one type.
    """

    def infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
        types = [o.tensor for o in operands if o is not None]
        if not types:
            raise ValueError("has no input")
        first = types[0].dtype
        if not mixed:
            for t in types:
                if t.dtype is not first:
                    raise ValueError(f"inputs differ in type: {first} and {t.dtype}")
        return [TensorType(dtype or first, broadcast(*[t.shape for t in types]))]

    return infer
