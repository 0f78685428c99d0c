"""States of a loop that grow: how much longer each iteration makes them, whatever values the loop computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunewright.errors import TunewrightError
from tunewright.ir.graph import Graph, Node
from tunewright.ir.symbolic import LEAST, SymInt, Whole, same
from tunewright.ir.types import TensorType
from tunewright.ops.control_types import CONDITION, ITERATION, made_by, states, with_dims
from tunewright.ops.infer import Budget, propagate

#: most iterations that have bodies of their own: sizes 0 and 1 are classes of their own, and others may be
MOST_FIRST = 4


class Irregular(Exception):
    """The types of states follow no rule that is known before the loop."""


@dataclass(frozen=True)
class Growth:
    """The types of a Loop's states at the beginning of each iteration."""

    #: types at the beginning of each of the first iterations
    first: Sequence[Sequence[TensorType]]
    #: what each iteration adds to each size of each state
    steps: Sequence[tuple[int, ...]]
    #: number of first iterations that have bodies of their own
    apart: int

    def types(self, iteration: Whole) -> list[TensorType]:
        """Types of the states at the beginning of an iteration."""
        return [
            with_dims(type, [d + step * iteration for d, step in zip(type.dims, added, strict=True)])
            for type, added in zip(self.first[0], self.steps, strict=True)
        ]

    def grown_bytes(self) -> int:
        """Bytes that an iteration adds, for the sizes at hand."""
        return sum(b.at_hand.nbytes - a.at_hand.nbytes for a, b in zip(self.types(8), self.types(9), strict=True))


def growth_of(node: Node, types: Sequence[TensorType]) -> Growth | None:
    """Return how a Loop's states grow, whose first iteration takes these types. None: they do not. Raises Irregular."""
    body, count = node.bodies["body"], states(node)
    rows = [list(types[2 : 2 + count])]
    captured = types[2 + count :]
    while len(rows) <= MOST_FIRST + 1:
        rows.append(_following(node, body, rows[-1], captured))
        if len(rows) == 2 and all(_is(a, b) for a, b in zip(*rows, strict=True)):
            return None
    steps = [_difference(a, b) for a, b in zip(rows[-2], rows[-1], strict=True)]
    apart = 0
    while any(step and _is_small(d) for type, added in zip(rows[apart], steps, strict=True)
              for d, step in zip(type.dims, added, strict=True)):  # fmt: skip
        apart += 1
        if apart > MOST_FIRST:
            raise Irregular("they stay small")
    found = Growth(rows, steps, apart)
    for iteration, row in enumerate(rows):
        if not all(_is(a, b) for a, b in zip(found.types(iteration), row, strict=True)):
            raise Irregular("they do not grow by the same in each iteration")
    return found


def _is_small(size: Whole) -> bool:
    return not isinstance(size, SymInt) and size < LEAST


def _is(a: TensorType, b: TensorType) -> bool:
    """Whether two types have the same element type and the same size expressions. This adds no guards."""
    return a.dtype is b.dtype and same(a.dims, b.dims)


def _difference(a: TensorType, b: TensorType) -> tuple[int, ...]:
    steps = tuple(y - x for x, y in zip(a.dims, b.dims, strict=True))
    if not all(isinstance(step, int) and step >= 0 for step in steps):
        raise Irregular("they do not grow by a number that is known")
    return steps


def _following(
    node: Node, body: Graph, given: Sequence[TensorType], captured: Sequence[TensorType]
) -> list[TensorType]:
    """Infer the types of the states after an iteration. Raises Irregular."""

    def infer(graph: Graph) -> object:
        return propagate(graph, Budget(), tolerant=True, bodies=True)

    try:
        made = made_by(node, body, [ITERATION, CONDITION, *given, *captured], infer)[1 : 1 + len(given)]
    except TunewrightError as error:
        raise Irregular(error.what) from error
    found = [type for type in made if type is not None]
    if len(found) != len(given) or any(
        a.dtype is not b.dtype or len(a.dims) != len(b.dims) for a, b in zip(given, found, strict=True)
    ):
        raise Irregular("they depend on data")
    return found
