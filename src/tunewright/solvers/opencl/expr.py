"""Element-wise operations as C expressions: what a chain of them, alone or behind a convolution, is generated from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ...ir.types import DType

#: (C expressions of the arguments, in the type they are computed in; their types; the result's type; attributes)
#: -> the C expression of the result. An argument may be used more than once: it is always a plain name.
Emit: TypeAlias = Callable[[Sequence[str], Sequence[DType], DType, Mapping[str, Any]], str]


def _infix(op: str) -> Emit:
    return lambda args, types, out, attrs: f" {op} ".join(args)


EXPRESSIONS: dict[str, Emit] = {
    "Relu": lambda a, t, out, attrs: f"{a[0]} > 0 ? {a[0]} : 0",
    "Add": _infix("+"),
    "Mul": _infix("*"),
    "Sigmoid": lambda a, t, out, attrs: f"f32_sigmoid({a[0]})",
}


def why_not(op: str, types: Sequence[DType], out: DType, attrs: Mapping[str, Any]) -> str | None:
    """None when `expression` can write the operation for these element types."""
    if op not in EXPRESSIONS:
        return f"{op} has no expression in C"
    return None


def expression(op: str, args: Sequence[str], types: Sequence[DType], out: DType, attrs: Mapping[str, Any]) -> str:
    """One element of the result from one element of each argument."""
    return EXPRESSIONS[op](args, types, out, attrs)
