"""Shape arithmetic that families share. Dimensions may be numbers, names or unknown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..ir.types import Dim, DType, Shape, TensorType, Type
from .base import Attrs, Infer, Operands


def tensor(operands: Operands, i: int) -> TensorType:
    """The type of input i, which must be there and be a tensor."""
    operand = operands[i] if i < len(operands) else None
    if operand is None:
        raise ValueError(f"input {i} is missing")
    return operand.tensor


def value(operands: Operands, i: int) -> Any:
    """The constant value of input i; None when it is absent or not constant."""
    operand = operands[i] if i < len(operands) else None
    return None if operand is None else operand.value


def given(operands: Operands, i: int) -> bool:
    return i < len(operands) and operands[i] is not None


def axis_of(axis: int, rank: int, what: str = "axis") -> int:
    """A non-negative axis."""
    if not -rank <= axis < rank:
        raise ValueError(f"{what} {axis} does not fit rank {rank}")
    return axis % rank if rank else 0


def broadcast_dim(a: Dim, b: Dim) -> Dim:
    if a == b:
        return a
    if a == 1:
        return b
    if b == 1:
        return a
    if isinstance(a, int) and isinstance(b, int):
        raise ValueError(f"dimensions {a} and {b} do not broadcast")
    # A number above one beats something open: the open one must be 1 or that number.
    return a if isinstance(a, int) else b if isinstance(b, int) else None


def broadcast(*shapes: Shape | None) -> Shape | None:
    """numpy's broadcasting; None when a rank is not known."""
    if any(s is None for s in shapes):
        return None
    known = [s for s in shapes if s is not None]
    rank = max((len(s) for s in known), default=0)
    result: list[Dim] = []
    for k in range(rank):
        dim: Dim = 1
        for s in known:
            at = k - rank + len(s)
            if at >= 0:
                dim = broadcast_dim(dim, s[at])
        result.append(dim)
    return tuple(result)


def same_as(i: int = 0, dtype: DType | None = None) -> Infer:
    """The output has the shape of input i, and its type unless another is given."""

    def infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
        t = tensor(operands, i)
        return [TensorType(dtype or t.dtype, t.shape)]

    return infer


def elementwise(dtype: DType | None = None) -> Infer:
    """All inputs broadcast together; the type is the first input's unless another is given."""

    def infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
        types = [o.tensor for o in operands if o is not None]
        if not types:
            raise ValueError("has no input")
        return [TensorType(dtype or types[0].dtype, broadcast(*(t.shape for t in types)))]

    return infer
