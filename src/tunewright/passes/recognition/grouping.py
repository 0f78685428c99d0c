"""Replaces Split + convolutions + Concat with one convolution with groups."""

from __future__ import annotations

import numpy as np

from tunewright.ir.graph import Graph, Node, Value, freeze

from .. import value_facts
from ..pattern import Const, Each, Match, Op, Rule


def _convolutions(match: Match) -> list[Node]:
    return [match.node(f"conv.{i}") for i in range(len(match.root.inputs))]


def _check(match: Match) -> str | None:
    split, convolutions = match.node("part.0"), _convolutions(match)
    if len(convolutions) < 2:
        return "there is only one convolution"
    if value_facts.axis(split, 0, match["x"]) != 1 or value_facts.axis(match.root, 0, match.root.output) != 1:
        return "the split or the concatenation is not along the channels"
    parts = [conv.inputs[0] for conv in convolutions]
    if parts != split.outputs:
        return "the convolutions do not read all parts of the split in order"
    first = convolutions[0]
    for i, conv in enumerate(convolutions):
        same = freeze(conv.attrs) == freeze(first.attrs) and match.const(f"w.{i}").shape == match.const("w.0").shape
        if not same or match.const(f"w.{i}").dtype != match.const("w.0").dtype:
            return f"the parameters of {conv.name!r} and {first.name!r} differ"
        bias = conv.input(2)
        if (bias is None) != (first.input(2) is None) or (bias is not None and bias.const is None):
            return f"the bias of {conv.name!r} is not constant, or only some have one"
    return None


def _build(graph: Graph, match: Match) -> Value:
    convolutions = _convolutions(match)
    first, count = convolutions[0], len(convolutions)
    weights = np.concatenate([match.const(f"w.{i}") for i in range(count)])
    inputs: list[Value | None] = [match["x"], graph.constant(weights, match["w.0"].name)]
    biases = [bias.const for conv in convolutions if (bias := conv.input(2)) is not None and bias.const is not None]
    if biases:
        inputs.append(graph.constant(np.concatenate(biases), f"{first.name}_bias"))
    attrs = {**first.attrs, "group": int(first.attrs.get("group", 1)) * count}
    return graph.add("Conv", inputs, attrs, name=first.name).output


_PART = Op("Split", "x", rest=True, output=None, name="part")

RULES = (
    Rule(
        "group-convolutions",
        Op("Concat", Each(Op("Conv", _PART, Const("w"), rest=True, name="conv"), common=("x",))),
        _build,
        _check,
    ),
)
