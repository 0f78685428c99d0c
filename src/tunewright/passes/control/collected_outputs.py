"""Loops that append tensors to a sequence, as Python exporters write them: the items become a scan output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ops.control_types import states

from .. import value_facts
from ..base import Context


@dataclass(frozen=True)
class _Sequence:
    """A state of a Loop that is a sequence: its number, the node that appends to it, the item, and the readers of the
    whole."""

    state: int
    insert: Node
    item: Value
    readers: Sequence[Node]


class CollectedRows:
    """Rewrites a sequence that begins empty, grows in each iteration and is read only by ConcatFromSequence."""

    name = "collected-rows"

    def run(self, graph: Graph, context: Context) -> bool:
        changed = False
        for node in graph.nodes:
            if node.op != "Loop" or not node.bodies:
                continue
            found = [one for k in range(states(node)) if (one := _sequence(graph, node, k)) is not None]
            if found:
                _rewrite(graph, node, found)
                context.log.applied(self.name, node)
                changed = True
        return changed


def _sequence(graph: Graph, node: Node, state: int) -> _Sequence | None:
    body, first, whole = node.bodies["body"], node.inputs[2 + state], node.outputs[state]
    if first is None or first.producer is None or first.producer.op != "SequenceEmpty":
        return None
    held, made = body.inputs[2 + state], body.outputs[1 + state]
    insert = made.producer
    if insert is None or insert.op != "SequenceInsert" or insert.inputs[0] is not held:
        return None
    if len(insert.inputs) > 2 and insert.inputs[2] is not None:
        return None
    if len(held.uses) != 1 or body.is_output(held) or made.uses or body.outputs.count(made) != 1:
        return None
    item, readers = insert.inputs[1], list(dict.fromkeys(whole.users))
    if item is None or graph.is_output(whole) or not all(_can_read(reader, item) for reader in readers):
        return None
    return _Sequence(state, insert, item, readers)


def _can_read(reader: Node, item: Value) -> bool:
    if reader.op != "ConcatFromSequence" or reader.epilogue:
        return False
    if reader.attrs.get("new_axis", 0):
        return int(reader.attrs["axis"]) == 0 or value_facts.rank(item) is not None
    dims = value_facts.shape(item)  # Tensors of different sizes can be concatenated, but not stacked as rows.
    return dims is not None and bool(dims) and all(isinstance(d, int) and d > 0 for d in dims)


def _rewrite(graph: Graph, node: Node, found: Sequence[_Sequence]) -> None:
    body, count, gone = node.bodies["body"], states(node), {one.state for one in found}
    kept = [k for k in range(count) if k not in gone]
    formal = [*node.inputs[:2], *(node.inputs[2 + k] for k in kept)]
    body.inputs = [*body.inputs[:2], *(body.inputs[2 + k] for k in kept), *body.inputs[2 + count :]]
    scans = [*body.outputs[1 + count :], *(one.item for one in found)]
    body.outputs = [body.outputs[0], *(body.outputs[1 + k] for k in kept), *scans]
    for one in found:
        body.remove(one.insert)
    twin = graph.add(
        "Loop", [*formal, *node.inputs[2 + count :]], node.attrs, outputs=len(kept) + len(scans),
        types=[node.outputs[k].type for k in kept], name=node.name, origin=node.origin, bodies=node.bodies,
        captures=node.captures,
    )  # fmt: skip
    stays = [*(node.outputs[k] for k in kept), *node.outputs[count:]]
    for old, new in zip(stays, twin.outputs, strict=False):
        new.type = old.type
        graph.replace(old, new)
    for one, rows in zip(found, twin.outputs[len(stays) :], strict=True):
        for reader in one.readers:
            graph.replace(reader.output, _joined(graph, reader, rows, one.item))
            graph.remove(reader)
    graph.remove(node)


def _joined(graph: Graph, reader: Node, rows: Value, item: Value) -> Value:
    """The result of a ConcatFromSequence, from rows along a new first axis."""
    axis, new = int(reader.attrs["axis"]), bool(reader.attrs.get("new_axis", 0))
    rank = value_facts.rank(item)
    if axis:
        assert rank is not None
        axis %= rank + 1 if new else rank
    if axis:
        assert rank is not None
        order = [*range(1, axis + 1), 0, *range(axis + 1, rank + 1)]
        rows = graph.add("Transpose", [rows], {"perm": order}, name=f"{reader.name}/axis", origin=reader.origin).output
    if new:
        return rows
    dims = [d for d in value_facts.shape(item) or () if isinstance(d, int)]
    shape = graph.constant(np.array([*dims[:axis], -1, *dims[axis + 1 :]], np.int64), "shape")
    return graph.add("Reshape", [rows, shape], name=reader.name, origin=reader.origin).output
