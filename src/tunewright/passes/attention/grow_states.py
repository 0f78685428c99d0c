"""Caches that grow: ``Concat(past, new)`` of an input into a result becomes an append in place.

Some models take past keys and values as inputs and return longer ones. Copying all of them for each token costs more
than the token. This pass gives the result spare room (`ops/internal/append.py`); attention reads rows where they lie.
It runs only in plans for classes of shapes: the room is one of their sizes.
"""

from __future__ import annotations

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.launch_symbols import is_late
from tunewright.ir.symbolic import SymInt, sym_array
from tunewright.ops.internal.append import APPEND, STANDS_FOR

from .. import value_facts
from ..base import Context
from ..pattern import remove_dead

#: new rows of one inference; a longer prompt is copied
MOST_NEW = 16


class GrowStates:
    name = "grow-states"

    def run(self, graph: Graph, context: Context) -> bool:
        if context.layouts is None or not context.knows(APPEND):
            return False
        return sum([_rewrite(graph, node, context) for node in graph.nodes if node.op == "Concat"]) > 0


def _rewrite(graph: Graph, node: Node, context: Context) -> bool:
    if len(node.inputs) != 2 or node.epilogue or value_facts.static(node.output) is None:
        return False
    past, new = node.inputs
    axis = value_facts.axis(node, 0, past)
    if past is None or new is None or axis is None or not can_grow(graph, past, new, axis, node.output):
        return False
    if not node.output.uses:  # nothing reads the result in the graph, so nothing is saved
        return False
    present, rows = grown(graph, node, past, new, axis)
    graph.replace(node.output, rows)
    graph.outputs = [present if value is rows else value for value in graph.outputs]
    remove_dead(graph, [node])
    assert present.producer is not None
    context.log.applied(GrowStates.name, present.producer)
    return True


def can_grow(graph: Graph, past: Value, new: Value, axis: int, present: Value) -> bool:
    """Whether a few rows follow those of an input, in a result with an open number of rows: there may be spare room."""
    types = value_facts.static(past), value_facts.static(new)
    if types[0] is None or types[1] is None or past not in graph.inputs or len(past.uses) != 1:
        return False
    rows, more = types[0].dims[axis], types[1].dims[axis]
    if not isinstance(rows, SymInt) or is_late(rows) or rows.spare is None:  # late: a state of a loop
        return False
    if not isinstance(more, int) or not 0 < more <= MOST_NEW:
        return False
    return graph.outputs.count(present) == 1


def grown(
    graph: Graph, node: Node, past: Value, new: Value, axis: int, ends: Value | None = None
) -> tuple[Value, Value]:
    """Insert an append with spare room in place of a node. Returns its result, and the rows of it that are in use.

    ``ends``: how many rows each sequence of a batch has.
    """
    types = value_facts.static(past), value_facts.static(new)
    assert types[0] is not None and types[1] is not None
    rows = types[0].dims[axis] + types[1].dims[axis]
    spare = types[0].dims[axis].spare  # type: ignore[attr-defined]
    attrs = {"axis": axis, "rows": rows, "capacity": types[0].dims[axis] + spare + MOST_NEW, STANDS_FOR: node.op}
    dims = list(types[0].dims)
    dims[axis] = attrs["capacity"]
    inputs = [past, new] if ends is None else [past, new, ends]
    made = graph.add(APPEND, inputs, attrs, types=[types[0].with_shape(tuple(dims))], name=node.name,
                     origin=node.origin).output  # fmt: skip
    bounds = [graph.constant(sym_array([value])) for value in (0, rows, axis)]
    dims[axis] = rows
    used = types[0].with_shape(tuple(dims))
    return made, graph.add("Slice", [made, *bounds], types=[used], name=f"{node.name}_rows").output
