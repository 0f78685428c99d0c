"""Moves strides of 1 x 1 convolutions up to the nodes that compute the pixels which no other node reads.

A residual network whose blocks begin with a strided 1 x 1 convolution (ResNet as first published) discards three
quarters of the previous block's result. Therefore the last convolution of that block takes the stride, and then the 3 x
3 convolution before it. A value that is added in between, and has other readers, is thinned out by a pooling of one
pixel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ops import lookup
from tunewright.ops.infer import infer_node

from .. import value_facts
from ..base import Context

Strides: TypeAlias = tuple[int, ...]
#: At most one of this number of pixels is read. With one of two, Winograd over all of them may be faster than a stride.
LEAST = 4
#: an average, because a maximum might not keep NaN
THINNING = "AveragePool"


class EarlyStrides:
    """Decides from the last node to the first, then applies the changes that reduce work."""

    name = "early-strides"

    def run(self, graph: Graph, context: Context) -> bool:
        if not any(_is_pointwise(node) and math.prod(_strides(node)) >= LEAST for node in graph.nodes):
            return False
        takers = {node: None for node in graph.nodes if _is_conv(node) or _is_elementwise(node)}
        wanted = _wanted(graph, takers)
        paying = _paying(takers, wanted)
        if not paying:
            return False
        thin: dict[tuple[Value, Strides], Value] = {}
        for node in takers:
            wants = wanted.get(node.output)
            if node.op == "Conv":
                strides = _strides(node) if wants is None else _product(_strides(node), wants)
                if _is_pointwise(node) and node.inputs[0] in paying:
                    strides = (1,) * len(strides)
                if strides != _strides(node):
                    node.attrs = {**node.attrs, "strides": strides}
                    context.log.applied(self.name, node)
            elif wants is not None and node.output in paying:
                _thin_inputs(graph, node, wants, paying, thin)
        for node in takers:
            if node.output in paying:
                # the value is no longer the model's value of that name
                node.output.name, node.output.type = graph.fresh(f"{node.output.name}_thin"), None
                spec = lookup(node.op)
                assert spec is not None
                infer_node(node, spec)
        return True


def _thin_inputs(
    graph: Graph, node: Node, wants: Strides, paying: set[Value], thin: dict[tuple[Value, Strides], Value]
) -> None:
    """Have a node read inputs that no other node makes smaller with a stride. ``thin``: the values made so far."""
    for i, value in enumerate(node.inputs):
        if value is not None and value not in paying and not _is_spread(value, node.output):
            if (value, wants) not in thin:
                thin[value, wants] = _thinned(graph, value, wants)
            graph.set_input(node, i, thin[value, wants])


def _wanted(graph: Graph, takers: dict[Node, None]) -> dict[Value, Strides]:
    """Values that all their readers could read with a stride; ``takers`` are the nodes that can take one."""
    found: dict[Value, Strides] = {}
    for node in reversed(takers):
        value = node.output
        if graph.is_output(value) or not value.uses:
            continue
        asked = {_asked(reader, i, found) if reader in takers else None for reader, i in value.uses}
        strides = asked.pop()
        if not asked and strides is not None and math.prod(strides) >= LEAST:
            found[value] = strides
    return found


def _asked(reader: Node, i: int, wanted: Mapping[Value, Strides]) -> Strides | None:
    """The stride with which a node could read its input i."""
    strides, value = wanted.get(reader.output), reader.inputs[i]
    if reader.op != "Conv":
        return None if value is None or _is_spread(value, reader.output) else strides
    if i or not _is_pointwise(reader):
        return None
    return _strides(reader) if strides is None else _product(_strides(reader), strides)


def _paying(takers: Iterable[Node], wanted: Mapping[Value, Strides]) -> set[Value]:
    """The wanted values for which some convolution has less work."""
    found: set[Value] = set()
    for node in takers:
        if node.output in wanted and (node.op == "Conv" or any(v in found for v in node.inputs)):
            found.add(node.output)
    return found


def _is_conv(node: Node) -> bool:
    """Whether a node is a convolution whose padding does not depend on its stride."""
    if node.op != "Conv" or value_facts.rank(node.output) is None or node.epilogue:
        return False
    return node.attrs.get("auto_pad", "NOTSET") in ("NOTSET", "VALID")


def _is_pointwise(node: Node) -> bool:
    """Whether a node is a convolution of one tap without padding."""
    shape = value_facts.shape(node.input(1))
    one = shape is not None and all(d == 1 for d in shape[2:])
    return _is_conv(node) and one and not any(node.attrs.get("pads", ()))


def _is_elementwise(node: Node) -> bool:
    """Whether a node is element-wise, and each input either has the result's type or one element for all pixels.

    Inputs of the result's type can be thinned out.
    """
    spec = lookup(node.op)
    if spec is None or not spec.elementwise or len(node.outputs) != 1 or node.epilogue or node.bodies:
        return False
    return all(v is None or value_facts.same_type(v, node.output) or _is_spread(v, node.output) for v in node.inputs)


def _is_spread(value: Value, result: Value) -> bool:
    """Whether a value has one element for all pixels of the result."""
    dims, whole = value_facts.shape(value), value_facts.shape(result)
    if dims is None or whole is None or len(dims) > len(whole):
        return False
    return all(d == 1 for d in ((1,) * (len(whole) - len(dims)) + tuple(dims))[2:])


def _strides(conv: Node) -> Strides:
    rank = value_facts.rank(conv.output)
    assert rank is not None
    return tuple(conv.attrs.get("strides") or (1,) * (rank - 2))


def _product(a: Strides, b: Strides) -> Strides:
    return tuple(x * y for x, y in zip(a, b, strict=True))


def _thinned(graph: Graph, value: Value, strides: Strides) -> Value:
    """A pooling of one pixel that keeps only the pixels at the strides."""
    attrs = {"kernel_shape": (1,) * len(strides), "strides": strides}
    node = graph.add(THINNING, [value], attrs, name=graph.fresh(f"{value.name}_thinned"))
    spec = lookup(THINNING)
    assert spec is not None
    infer_node(node, spec)
    return node.output
