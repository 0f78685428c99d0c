"""Layouts: nodes that prefer one get it, others go along where they can, and a Reorder stands at every border.

One forward sweep. A value with another layout has a plain twin behind a Reorder, which everybody reads at first; a
later node that wants a layout is connected to the original again, and Reorders that nobody needs are removed at last.
Shapes stay logical throughout (see `TensorType.physical`).
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.graph import Graph, Node, Value
from ..ir.types import PLAIN, Layout, TensorType
from ..ops import lookup
from ..ops.fused import REORDER
from . import facts
from .base import Context, indifferent
from .pattern import remove_dead

#: element-wise operations on two quantised tensors, each with its scale and zero point behind it
PAIRS = frozenset({"com.microsoft::QLinearAdd", "com.microsoft::QLinearMul"})


class AssignLayouts:
    """Runs when shapes are known: preferences depend on them."""

    name = "layout"

    def run(self, graph: Graph, context: Context) -> bool:
        if context.preferred_layout is indifferent or not all(_planned(v) for v in graph.values()):
            return False
        sweep = _Sweep(graph)
        for node in graph.nodes:
            layouts, reason = context.preferred_layout(node), None
            if layouts is None:
                inherited = sweep.inherited(node)
                if inherited is None or inherited == PLAIN:
                    continue
                layouts, reason = (inherited, inherited), context.works_in(node, inherited, sweep.data(node))
            reason = reason or _why_not(node)
            if reason is not None:
                context.log.refused(self.name, node, reason)
                continue
            sweep.assign(node, *layouts)
            context.log.applied(self.name, node)
        remove_dead(graph, [n for n in reversed(graph.nodes) if n.op == REORDER])
        return bool(sweep.original)


def _planned(value: Value) -> bool:
    """What is cut into segments at run time meets plain arrays there: such graphs keep the plain layout."""
    return value.tensor is not None and value.tensor.is_static


def _why_not(node: Node) -> str | None:
    x = node.input(0)
    if len(node.outputs) != 1 or node.bodies:
        return "only nodes with one output and no body have a layout"
    if (facts.rank(x) or 0) < 3 or (facts.rank(node.output) or 0) < 3:
        return f"{node.output!r} has no spatial axes"
    return None


def _alongside(value: Value | None, result: Value) -> bool:
    """Of the result's rank and channels, so that both broadcast in a layout as they do when plain."""
    mine, whole = facts.shape(value), facts.shape(result)
    return mine is not None and whole is not None and len(mine) == len(whole) > 2 and mine[1] == whole[1]


class _Sweep:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        #: plain twin -> the value in a layout of its own
        self.original: dict[Value, Value] = {}
        self.reordered: dict[tuple[Value, Layout], Value] = {}

    def data(self, node: Node) -> list[int]:
        """Inputs that follow the node's layout: the data, and whatever its element-wise part reads along with it."""
        spec = lookup(node.op)
        if node.op == "Concat":
            return list(range(len(node.inputs)))
        if node.op in PAIRS:
            return [0, 3]
        if spec is not None and spec.elementwise:
            return [i for i in range(len(node.inputs)) if _alongside(node.inputs[i], node.output)]
        rest = range(len(node.main_inputs), len(node.inputs))
        return [0, *(i for i in rest if facts.same_shape(node.inputs[i], node.output))]

    def inherited(self, node: Node) -> Layout | None:
        """The layout in which all data comes, whatever it reads along (a constant can be brought into it)."""
        if len(node.outputs) != 1 or node.bodies or node.op == REORDER:
            return None
        data, found = self.data(node), set[Layout]()
        spec = lookup(node.op)
        for i, value in enumerate(node.inputs):
            if value is None or value.const is not None or facts.is_scalar(value):
                continue
            twin = self.original.get(value) if i in data else None
            if twin is not None and twin.tensor is not None:
                found.add(twin.tensor.layout)
            elif i in data or (spec is not None and spec.elementwise):
                return None
        return found.pop() if len(found) == 1 else None

    def assign(self, node: Node, first: Layout, layout: Layout) -> None:
        for i in self.data(node):
            value = node.inputs[i]
            assert value is not None
            self.graph.set_input(node, i, self.get(value, first if i == 0 else layout))
        out = node.output
        assert isinstance(out.type, TensorType)
        plain = self.reorder(out, PLAIN)
        self.graph.replace(out, plain)
        assert plain.producer is not None
        self.graph.set_input(plain.producer, 0, out)
        out.type = replace(out.type, layout=layout)
        self.original[plain] = out

    def get(self, value: Value, layout: Layout) -> Value:
        """The value in a layout: the original, or behind a Reorder that several readers share."""
        source = self.original.get(value, value)
        if source.tensor is not None and source.tensor.layout == layout:
            return source
        key = (value, layout)
        if key not in self.reordered:
            self.reordered[key] = self.reorder(source, layout)
        return self.reordered[key]

    def reorder(self, value: Value, layout: Layout) -> Value:
        assert isinstance(value.type, TensorType)
        return self.graph.add(
            REORDER, [value], {"layout": str(layout)}, types=[replace(value.type, layout=layout)],
            outputs=[f"{value.name}@{layout}"], name=f"{value.name}@{layout}",
        ).output
