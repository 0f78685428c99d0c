"""Problems of classes of shapes: the sizes that they contain, and the problem for other sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..ir.symbolic import SymArray, SymInt
from ..ir.types import TensorType, Type
from .base import Problem, tensor


def numbers(problem: Problem) -> list[SymInt]:
    """Every number of a problem that may be symbolic; also plain dimensions, so that `Problem.sizes` can be found among
    them."""
    return [*_numbers([problem.sizes, *problem.attrs.values(), *(v for _, v in problem.values)])]


def _numbers(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from _numbers(value)
        elif isinstance(value, SymArray):
            yield from _numbers(value.reshape(-1).tolist())
        elif isinstance(value, (SymInt, int)) and not isinstance(value, bool):
            yield value


def with_numbers(problem: Problem, value_of: Callable[[SymInt], int]) -> Problem:
    """The problem with each symbolic number replaced by ``value_of`` of it."""

    def value(given: Any) -> Any:
        if isinstance(given, tuple):
            return tuple(map(value, given))
        return value_of(given) if isinstance(given, SymInt) else given

    def type_of(type: Type | None) -> Type | None:
        return TensorType(type.dtype, value(type.shape), type.layout) if isinstance(type, TensorType) else type

    def array(i: int, given: Any) -> Any:
        if not isinstance(given, SymArray):
            return given
        dtype = tensor(problem.inputs[i]).dtype.numpy
        return np.array([value(v) for v in given.reshape(-1).tolist()], dtype).reshape(given.shape)

    return Problem(
        problem.op, tuple(map(type_of, problem.inputs)), tuple(map(type_of, problem.outputs)),
        {name: value(given) for name, given in problem.attrs.items()}, problem.epilogue, problem.operands,
        problem.constant, tuple((i, array(i, given)) for i, given in problem.values),
    )  # fmt: skip
