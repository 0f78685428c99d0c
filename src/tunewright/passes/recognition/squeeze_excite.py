"""Squeeze and excite: an average over all pixels, two pointwise convolutions, and a product with the averaged tensor.

On a GPU these are four launches, three of which have little work. They become one operation where the device has a
kernel for it, which needs known shapes. The operation takes over fused epilogues.
"""

from __future__ import annotations

from typing import Any

from tunewright.ir.graph import Fused, Graph, Node, Value
from tunewright.ir.types import PLAIN
from tunewright.ops import lookup
from tunewright.ops.infer import infer_node
from tunewright.ops.internal.squeeze_excite import EXCITE

from .. import value_facts
from ..base import Context
from ..pattern import remove_dead

_AVERAGES = frozenset({"GlobalAveragePool", "ReduceMean"})


class SqueezeExcite:
    """Tries each Mul once its shapes are known."""

    name = "squeeze-excite"

    def run(self, graph: Graph, context: Context) -> bool:
        if context.layouts is None or not context.knows(EXCITE):  # the host runs the model's operations
            return False
        return sum(_rewrite(graph, node, context) for node in graph.nodes if node.op == "Mul") > 0


def _rewrite(graph: Graph, node: Node, context: Context) -> bool:
    if len(node.inputs) - node.operands != 2:
        return False
    for data, factors in (node.inputs[:2], reversed(node.inputs[:2])):
        found = _path(graph, data, factors, node)
        if found is None or data is None:
            continue
        pool, first, second = found
        attrs: dict[str, Any] = {}
        for side, conv in (("inner", first), ("outer", second)):
            (step,) = conv.epilogue
            attrs |= {side: step.op, **{f"{side}_{k}": v for k, v in step.attrs.items()}}
        inputs = [data, first.inputs[1], first.input(2), second.inputs[1], second.input(2)]
        inputs += [None] * (5 - len(inputs))
        operands = [v for v in node.inputs[2:] if v is not None]
        new = graph.add(
            EXCITE, [*inputs, *operands], attrs, name=node.name, epilogue=_moved(node), operands=len(operands),
            origin=[name for n in (pool, first, second, node) for name in n.origin],
        )  # fmt: skip
        spec = lookup(EXCITE)
        assert spec is not None
        infer_node(new, spec)
        new.output.type = node.output.type
        reason = context.works_in(new, PLAIN, [])
        if reason is not None:
            context.log.refused(SqueezeExcite.name, node, reason)
            graph.remove(new)
            return False
        new.output.name, node.output.name = node.output.name, new.output.name
        graph.replace(node.output, new.output)
        remove_dead(graph, [node, second, first, pool])
        context.log.applied(SqueezeExcite.name, new)
        return True
    return False


def _path(graph: Graph, data: Value | None, factors: Value | None, reader: Node) -> tuple[Node, Node, Node] | None:
    """The average and the two convolutions from the data to its factors, if no other node reads them; else None."""
    made = []
    value, only = factors, reader
    for _ in range(2):
        conv = None if value is None else value.producer
        if conv is None or value is None or value.users != [only] or graph.is_output(value) or not _is_pointwise(conv):
            return None
        made.append(conv)
        value, only = conv.inputs[0], conv
    pool = None if value is None else value.producer
    if pool is None or value is None or value.users != [only] or graph.is_output(value) or not _averages(pool):
        return None
    second, first = made
    if pool.inputs[0] is not data or not value_facts.same_shape(data, reader.output):
        return None
    return pool, first, second


def _is_pointwise(node: Node) -> bool:
    """Whether a node is a pointwise convolution with constant weights and one activation without further operands."""
    weights = node.input(1)
    shape = value_facts.shape(weights)
    if node.op != "Conv" or weights is None or weights.const is None or shape is None or any(d != 1 for d in shape[2:]):
        return False
    if int(node.attrs.get("group", 1)) != 1 or node.operands or len(node.epilogue) != 1:
        return False
    bias = node.input(2)
    return (bias is None or bias.const is not None) and node.epilogue[0].args == (~0,)


def _averages(node: Node) -> bool:
    """Whether a node averages over all spatial axes and keeps them."""
    rank = value_facts.rank(node.input(0))
    if node.op not in _AVERAGES or node.epilogue or rank is None or rank < 3:
        return False
    if node.op == "GlobalAveragePool":
        return True
    axes = value_facts.int_list(node.input(1))
    spatial = axes is not None and sorted(a % rank for a in axes) == [*range(2, rank)]
    return spatial and bool(node.attrs.get("keepdims", 1))


def _moved(node: Node) -> tuple[Fused, ...]:
    """The epilogue of a Mul of two inputs, renumbered for an operation of five inputs."""
    return tuple(Fused(s.op, tuple(a if a < 0 else a + 3 for a in s.args), s.attrs) for s in node.epilogue)
