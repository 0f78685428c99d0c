"""Rotary embeddings: ``x * cos + concat(-second half, first half) * sin`` becomes one RotaryEmbedding.

Exporters write angles twice, for either half, and the pass must prove that both are equal. It applies only where the
device has a kernel for it; elsewhere the steps are element-wise and stay fused.
"""

from __future__ import annotations

import numpy as np

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.symbolic import same

from .. import value_facts
from ..base import Context
from ..pattern import Match, OneOf, Op, RewritePass, Rule
from .attention import write_out
from .attention_masks import Maker

ROTARY = "RotaryEmbedding"
#: Operations that keep equal halves of the last axis equal, alone or with operands of one element there.
_VIEWS = frozenset({"Unsqueeze", "Squeeze", "Reshape", "Identity"})
_ALIKE = frozenset({"Cos", "Sin", "Cast", "Mul", "Div", "Add"}) | _VIEWS
#: the most values that are followed backwards from the angles
_DEEPEST = 16


class RecogniseRotary(RewritePass):
    """Also matches where fusion has made one node of the two products and their sum; the rest is fused again."""

    def run(self, graph: Graph, context: Context) -> bool:
        if not context.knows(ROTARY):
            return False
        for node in graph.nodes:
            if node.op in ("Mul", "Add") and node.epilogue and any(map(_is_turned, node.inputs)):
                write_out(graph, node)
        return super().run(graph, context)


def _is_turned(value: Value | None) -> bool:
    """Whether a value is halves in exchanged order, the first of them negated, perhaps with a factor."""
    node = value.producer if value is not None else None
    if node is not None and node.op == "Mul" and not node.epilogue:
        return any(v is not None and v.producer is not None and _negates(v.producer) for v in node.inputs)
    return node is not None and _negates(node)


def _negates(node: Node) -> bool:
    first = node.inputs[0].producer if node.op == "Concat" and node.inputs[0] is not None else None
    return first is not None and first.op == "Neg"


def _is_part(node: Node, start: int, size: int) -> bool:
    """Whether a node is a Slice of ``size`` elements of the last axis from ``start`` on."""
    starts, axes, steps = (value_facts.int_list(node.input(i)) for i in (1, 3, 4))
    rank, dims = value_facts.rank(node.inputs[0]), value_facts.shape(node.output)
    if not rank or dims is None or dims[-1] != size or starts is None or len(starts) != 1:
        return False
    return (axes or [0])[0] % rank == rank - 1 and starts[0] % (2 * size) == start and (steps or [1]) == [1]


def _check(match: Match) -> str | None:
    dims = value_facts.shape(match["x"])
    if dims is None or len(dims) != 4 or not isinstance(dims[3], int) or dims[3] % 2:
        return f"{match['x']!r} is not [batch, heads, length, size] of a known, even size"
    half = dims[3] // 2
    if "first" in match and not (_is_part(match.node("first"), 0, half) and _is_part(match.node("second"), half, half)):
        return "the rotation does not take the two halves of the last axis"
    if "whole" in match and value_facts.shape(match.node("whole").outputs[0]) != (*dims[:3], half):
        return "the rotation does not take the two halves of the last axis"
    if value_facts.axis(match.node("turned"), 0, match["x"]) != 3:
        return "halves are not joined along the last axis"
    for name in ("cos", "sin"):
        angles = value_facts.shape(match[name])
        if value_facts.dtype(match[name]) is not value_facts.dtype(match["x"]):
            return f"{match[name]!r} is of another type"
        if angles is None or len(angles) not in (2, 4) or angles[-1] != dims[3] or not same(angles[-2:-1], dims[2:3]):
            return f"{match[name]!r} does not hold the angles of {match['x']!r}"
        if len(angles) == 4 and not (angles[1] == 1 and (angles[0] == 1 or same(angles[:1], dims[:1]))):
            return f"{match[name]!r} differs between heads"
        if not _equal_halves(match[name], _DEEPEST):
            return f"the halves of {match[name]!r} may differ"
    return None


def _equal_halves(value: Value, depth: int) -> bool:
    """Whether both halves of the last axis are certainly equal."""
    if value.const is not None:
        half = value.const.shape[-1] // 2
        return bool(np.array_equal(value.const[..., :half], value.const[..., half:]))
    node, dims = value.producer, value_facts.shape(value)
    if node is None or dims is None or not depth:
        return False
    if node.op == "Concat":
        parts = node.inputs
        same_parts = len(parts) == 2 and parts[0] is parts[1] and not node.epilogue
        return same_parts and value_facts.axis(node, 0, parts[0]) == len(dims) - 1
    if not {node.op, *(step.op for step in node.epilogue)} <= _ALIKE:
        return False
    for operand in node.inputs[:1] if node.op in _VIEWS else node.inputs:
        given = value_facts.shape(operand)
        if operand is None or given is None:
            return False
        if given and given[-1] == 1:
            continue
        if given and (given[-1] != dims[-1] or not _equal_halves(operand, depth - 1)):
            return False
    return True


def _rotary(graph: Graph, match: Match) -> Value:
    made, dims = Maker(graph), value_facts.shape(match["x"])
    assert dims is not None and isinstance(dims[3], int)
    caches = [_angles(made, match[name], dims[3] // 2) for name in ("cos", "sin")]
    return graph.add(ROTARY, [match["x"], *caches]).output


def _angles(made: Maker, value: Value, half: int) -> Value:
    """The angles without their second half, as [batch, length, half]."""
    rank = value_facts.rank(value) or 4

    def number(n: int) -> Value:
        return made.graph.constant(np.array([n], np.int64), "n")

    first = made.node("Slice", [value, number(0), number(half), number(rank - 1)])
    return made.node("Squeeze" if rank == 4 else "Unsqueeze", [first, number(1 if rank == 4 else 0)])


_TURNED = OneOf(
    Op("Concat", Op("Neg", Op("Slice", "x", rest=True, name="second")), Op("Slice", "x", rest=True, name="first"),
       name="turned"),
    Op("Concat", Op("Neg", Op("Split", "x", rest=True, output=1, name="whole")), Op("Split", "x", rest=True),
       name="turned"),
)  # fmt: skip

RULES = (Rule("rotary", Op("Add", Op("Mul", "x", "cos"), Op("Mul", _TURNED, "sin")), _rotary, _check),)
