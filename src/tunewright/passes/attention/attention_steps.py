"""Tables of the steps that may lie between the two products of an attention, and functions that find them in a graph.

From a softmax, `scores` goes back through steps of `SCORE_STEPS` to a product of queries and keys. `weights` goes on
through steps of `WEIGHT_STEPS` to the product with the values. A new spelling of exporters is one more line in a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ops.base import Array

from .. import value_facts
from ..pattern import Const, Match, OneOf, Op, Pattern, is_float_scalar, matches, scalar

#: The most steps between softmax and a product, and the most values that a search examines.
DEEPEST, MOST_VALUES = 10, 64
#: The exponential of a score this low is negligible beside that of a usual score.
LOW = -1e4
VIEWS = "Reshape|Squeeze|Unsqueeze|Flatten|Identity"


def _is_low(array: Array) -> bool:
    return is_float_scalar(array) and float(array.reshape(())) <= LOW


def _absorbs(array: Array) -> bool:
    """Whether the sum of this constant and a usual score has lost the score; with -10,000 the score would remain."""
    return _is_low(array) and float(array.reshape(())) <= (-6e4 if array.dtype == np.float16 else -1e30)


def _is_zero(array: Array) -> bool:
    return bool(array.dtype.kind != "b" and array.size and not array.any())


def _between_floats(node: Node) -> bool:
    kinds = [value_facts.dtype(v) for v in (node.inputs[0], node.output)]
    return all(k is not None and "float" in str(k) for k in kinds)


_LOWEST, _ABSORBING, _ZERO = Const("low", _is_low), Const("low", _absorbs), Const("", _is_zero)


@dataclass(frozen=True)
class StepKind:
    """A kind of step: its ``pattern`` reads ``x``, which is scores or weights, and names its other operands."""

    name: str
    pattern: Pattern


#: Steps behind the product of queries and keys; the first that leads to a product counts.
SCORE_STEPS = (
    StepKind("cast", Op("Cast", "x", where=_between_floats)),
    StepKind("view", Op(VIEWS, "x", rest=True)),
    StepKind("times", Op("Mul", "x", scalar("factor"))),
    StepKind("over", Op("Div", "x", scalar("factor"))),
    StepKind("capped", Op("Mul", Op("Tanh", Op("Div", "x", scalar("over"))), scalar("cap"))),
    StepKind("capped", Op("Mul", Op("Tanh", Op("Mul", "x", scalar("under"))), scalar("cap"))),
    StepKind("seen", OneOf(
        Op("Where", "seen", "x", _LOWEST), Op("Add", "x", Op("Where", "seen", _ZERO, _ABSORBING, shared=True)),
    )),
    StepKind("hidden", OneOf(
        Op("Where", "seen", _LOWEST, "x"), Op("Add", "x", Op("Where", "seen", _ABSORBING, _ZERO, shared=True)),
    )),
    StepKind("bias", Op("Add", "x", "bias")),
    StepKind("less", Op("Sub", "x", "bias")),
)  # fmt: skip

#: steps between the softmax and the product with values
WEIGHT_STEPS = (
    StepKind("cast", Op("Cast", "x", where=_between_floats)),
    StepKind("view", Op(VIEWS, "x", rest=True)),
    StepKind("guarded", Op("Where", Op("IsNaN", "x"), _ZERO, "x")),
    StepKind("seen", Op("Where", "seen", "x", _ZERO)),
    StepKind("hidden", Op("Where", "seen", _ZERO, "x")),
)  # fmt: skip


@dataclass(frozen=True)
class AttentionStep:
    """One step of a graph: its result, and the values that its pattern names."""

    kind: str
    result: Value
    match: Match


@dataclass(frozen=True)
class Path:
    """The steps from a product to a softmax (of scores), or from a softmax to a product (of weights)."""

    product: Node
    steps: tuple[AttentionStep, ...] = ()


@dataclass
class _Search:
    """A search backwards that examines a limited number of values."""

    graph: Graph
    left: int = field(default=MOST_VALUES)

    def back(self, value: Value, depth: int) -> Iterator[Path]:
        node, self.left = value.producer, self.left - 1
        if node is None or self.left < 0:
            return
        if is_product(node):
            yield Path(node)
            return
        for kind in SCORE_STEPS if depth else ():
            for match in matches(kind.pattern, value, Match(self.graph, node)):
                for path in self.back(match["x"], depth - 1):
                    yield Path(path.product, (*path.steps, AttentionStep(kind.name, value, match)))


def is_product(node: Node) -> bool:
    return node.op == "MatMul" and not node.epilogue


def scores(graph: Graph, softmax: Node) -> Path | None:
    """The path from a product of queries and keys to the softmax; of several, the one with the fewest sums."""
    start = softmax.inputs[0]
    if start is None:
        return None
    found = list(_Search(graph).back(start, DEEPEST))
    return min(found, key=lambda path: sum(s.kind in ("bias", "less") for s in path.steps), default=None)


def weights(graph: Graph, softmax: Node) -> Path | str:
    """The path from the softmax to the product with values, or how else the weights are read."""
    value, steps = softmax.output, list[AttentionStep]()
    for _ in range(DEEPEST):
        users = value.users
        if len(users) == 1 and is_product(users[0]) and users[0].inputs[0] is value is not users[0].inputs[1]:
            return Path(users[0], tuple(steps))
        step = None if graph.is_output(value) else _on(graph, value, users)
        if step is None:
            break
        steps.append(step)
        value = step.result
    readers = "the outside" if graph.is_output(value) else ", ".join(sorted({user.op for user in value.users}))
    return f"its weights are read by {readers or 'no node'}"


def _on(graph: Graph, value: Value, users: Sequence[Node]) -> AttentionStep | None:
    """The step that contains all readers of some weights."""
    for user in users:
        for kind in WEIGHT_STEPS:
            for match in matches(kind.pattern, user.output, Match(graph, user)):
                if match["x"] is value and set(users) <= set(match.nodes):
                    return AttentionStep(kind.name, user.output, match)
    return None
