"""Makes one operation of a convolution and the depthwise convolution that alone reads it, where that is faster.

In mobile networks the result of the first one is several times as large as its input. Where it is larger than the
caches, it goes to memory and back. One kernel computes a few rows at a time, which stay in the nearest cache. The pass
runs when layouts are known. Only large images gain, therefore it asks the device (`Layouts.why_apart`).
"""

from __future__ import annotations

import math
from typing import Any

from tunewright.ir.graph import Fused, Graph, Node, Value
from tunewright.ir.types import PLAIN
from tunewright.ops.internal.conv_pair import MAIN, PAIR, joined

from .. import value_facts
from ..base import Context
from ..pattern import remove_dead


class ConvPairs:
    """Joins a depthwise convolution with the convolution in front of it, where that is faster."""

    name = "conv-pair"

    def run(self, graph: Graph, context: Context) -> bool:
        found = [] if context.layouts is None else [node for node in graph.nodes if _is_depthwise(node)]
        if not found or not context.knows(PAIR):  # the host runs the model's operations
            return False
        return sum(_rewrite(graph, node, context) for node in found) > 0


def _rewrite(graph: Graph, node: Node, context: Context) -> bool:
    first = _before(graph, node)
    if first is None or context.layouts is None:
        return False
    inputs = [first.input(0), *_weights(first), *_weights(node)]
    operands = [v for v in first.inputs[len(first.main_inputs) :] if v is not None]
    last = [v for v in node.inputs[len(node.main_inputs) :] if v is not None]
    attrs = joined(first.attrs, node.attrs, _moved(first, MAIN))
    new = graph.add(
        PAIR, [*inputs, *operands, *last], attrs, types=[node.output.type], name=node.name,
        epilogue=_moved(node, MAIN + len(operands)), operands=len(last), origin=[*first.origin, *node.origin],
    )  # fmt: skip
    type = value_facts.static(node.output)
    assert type is not None
    reason = context.works_in(new, type.layout, []) or context.layouts.why_apart(first, node, new)
    if reason is not None:
        context.log.refused(ConvPairs.name, node, reason)
        graph.remove(new)
        return False
    new.output.name, node.output.name = node.output.name, new.output.name
    graph.replace(node.output, new.output)
    remove_dead(graph, [node, first])
    context.log.applied(ConvPairs.name, new)
    return True


def _is_depthwise(node: Node) -> bool:
    """Whether a node is a convolution with one filter per channel, in the blocked layout."""
    shape, type = value_facts.shape(node.input(1)), value_facts.static(node.output)
    if node.op != "Conv" or shape is None or type is None or type.layout == PLAIN:
        return False
    return tuple(shape[:2]) == (int(node.attrs.get("group", 1)), 1) and math.prod(_sizes(shape[2:])) > 1


def _sizes(shape: Any) -> list[int]:
    return [d if isinstance(d, int) else 0 for d in shape]


def _before(graph: Graph, node: Node) -> Node | None:
    """The convolution in front of it, if its other inputs are constant and no other node reads it; else None."""
    value = node.input(0)
    first = None if value is None else value.producer
    if first is None or value is None or first.op != "Conv" or int(first.attrs.get("group", 1)) != 1:
        return None
    if value.users != [node] or len(value.uses) != 1 or graph.is_output(value):
        return None
    # steps are stored in an attribute
    plain = all(isinstance(v, int | float | str) for step in first.epilogue for v in step.attrs.values())
    return first if plain and all(v is None or v.const is not None for v in first.inputs[1:]) else None


def _weights(node: Node) -> tuple[Value | None, Value | None]:
    return node.inputs[1], node.main_inputs[2] if len(node.main_inputs) > 2 else None


def _moved(node: Node, operands: int) -> tuple[Fused, ...]:
    """The epilogue of a convolution, with the numbers of operands that begin at ``operands``."""
    shift = operands - len(node.main_inputs)
    return tuple(Fused(s.op, tuple(a if a < 0 else a + shift for a in s.args), s.attrs) for s in node.epilogue)
