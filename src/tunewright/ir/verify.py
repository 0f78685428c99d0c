"""Checks that a graph is legal: `violations` yields every broken rule, in words."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import TunewrightError
from .graph import Graph, Node, Value
from .types import TensorType


def violations(graph: Graph) -> Iterator[str]:
    """Yield every broken rule of this graph and its bodies."""
    for g in graph.walk():
        yield from _values(g)
        yield from _links(g)
        for node in g.nodes:
            yield from _node(node)


def verify(graph: Graph, after: str) -> None:
    """Raise TunewrightError if a rule is broken. ``after`` names the pass to blame."""
    broken = next(violations(graph), None)
    if broken is not None:
        raise TunewrightError(
            f"the graph is not legal after {after}: {broken}",
            hint=f"this is a defect of {after}; DISABLED_PASSES={after} works around it",
        )


def _values(graph: Graph) -> Iterator[str]:
    names: dict[str, Value] = {}
    for value in graph.values():
        if names.setdefault(value.name, value) is not value:
            yield f"two values are named {value.name}"
        if value.const is not None:
            if value.producer is not None:
                yield f"{value!r} is a constant and has a producer"
            if value.type != TensorType.of(value.const):
                yield f"{value!r} is a constant of another type, {TensorType.of(value.const)}"
    if len(graph.outputs) != len(graph.output_names):
        yield "outputs and their names differ in number"


def _links(graph: Graph) -> Iterator[str]:
    known: set[Value] = set(graph.inputs)
    for node in graph.nodes:
        for i, value in enumerate(node.inputs):
            if value is None:
                continue
            if (node, i) not in value.uses:
                yield f"{node!r} reads {value!r}, which does not list it as a use"
            if value.const is None and value not in known:
                yield f"{node!r} reads {value!r} before it is made, or from another graph"
        for i, value in enumerate(node.outputs):
            if value.producer is not node or value.index != i:
                yield f"{value!r} does not name {node!r} as its producer"
            if value in known:
                yield f"{value!r} is made twice"
            known.add(value)
    for value in graph.values():
        for node, i in value.uses:
            if node not in graph or node.input(i) is not value:
                yield f"{value!r} lists a use by {node!r} that is not there"
    for value in graph.outputs:
        if value.const is None and value not in known:
            yield f"output {value!r} is not made in this graph"


def _node(node: Node) -> Iterator[str]:
    if node.epilogue and len(node.outputs) != 1:
        yield f"{node!r} has an epilogue and {len(node.outputs)} outputs"
    if node.operands > len(node.inputs) or (node.operands and not node.epilogue):
        yield f"{node!r} has {node.operands} operands for an epilogue of {len(node.epilogue)} steps"
    for k, step in enumerate(node.epilogue):
        for arg in step.args:
            if not -(k + 1) <= arg < len(node.inputs):
                yield f"{node!r}: step {k} of the epilogue has no argument {arg}"
    for key, body in node.bodies.items():
        if len(body.inputs) < node.captures or len(node.inputs) < node.captures:
            yield f"{node!r}: body {key} takes fewer inputs than it captures"
    if node.captures and not node.bodies:
        yield f"{node!r} captures values and has no body"
