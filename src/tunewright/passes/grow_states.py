"""Caches that grow: ``Concat(past, new)`` of an input into a result becomes an append in place.

Where a model takes keys and values of the past as inputs and gives longer ones back, copying all of them for each token
costs more than the token. The result gets room to spare (`ops/append.py`); attention reads rows where they lie. Only in
plans for classes of shapes: the room is one of their sizes.
"""

from __future__ import annotations

from ..ir.graph import Graph, Node
from ..ir.symbolic import SymInt, sym_array
from ..ops.append import APPEND
from . import facts
from .base import Context
from .pattern import remove_dead

#: new rows of one inference; a longer prompt is copied
MOST_NEW = 16


class GrowStates:
    name = "grow-states"

    def run(self, graph: Graph, context: Context) -> bool:
        if context.layouts is None or not context.knows(APPEND):
            return False
        return sum([_rewrite(graph, node, context) for node in graph.nodes if node.op == "Concat"]) > 0


def _rewrite(graph: Graph, node: Node, context: Context) -> bool:
    if len(node.inputs) != 2 or node.epilogue or graph.outputs.count(node.output) != 1:
        return False
    past, new = node.inputs
    types = facts.static(past), facts.static(new)
    if past is None or new is None or types[0] is None or types[1] is None or past not in graph.inputs:
        return False
    axis = facts.axis(node, 0, past)
    if axis is None:
        return False
    rows, more = types[0].dims[axis], types[1].dims[axis]
    if not isinstance(rows, SymInt) or not isinstance(more, int) or not 0 < more <= MOST_NEW or rows.spare is None:
        return False
    if len(past.uses) != 1 or not node.output.uses:  # nobody saves anything
        return False
    attrs = {"axis": axis, "rows": rows + more, "capacity": rows + rows.spare + MOST_NEW}
    dims = (*types[0].dims[:axis], attrs["capacity"], *types[0].dims[axis + 1 :])
    grown = graph.add(APPEND, [past, new], attrs, types=[types[0].with_shape(dims)], name=node.name, origin=node.origin)
    bounds = [graph.constant(sym_array([value])) for value in (0, rows + more, axis)]
    present = graph.add("Slice", [grown.output, *bounds], types=[node.output.type], name=f"{node.name}_rows").output
    graph.outputs = [grown.output if value is node.output else value for value in graph.outputs]
    graph.replace(node.output, present)
    remove_dead(graph, [node])
    context.log.applied(GrowStates.name, grown)
    return True
