"""Makes Scans run along their first axis, where the rows of an iteration are contiguous in memory."""

from __future__ import annotations

from collections.abc import Sequence

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ops.control_types import scan_axes, states

from .. import value_facts
from ..base import Context


class ScanAxes:
    """Transposes inputs in front of a Scan along another axis, and outputs behind it."""

    name = "scan-axes"

    def run(self, graph: Graph, context: Context) -> bool:
        changed = False
        for node in graph.nodes:
            if node.op != "Scan" or not node.bodies:
                continue
            first = states(node)
            taken, put = scan_axes(node, len(node.outputs) - first)
            if not any((*taken, *put)):
                continue
            made = zip(node.outputs[first:], node.bodies["body"].outputs[first:], strict=True)
            orders = [_order(value_facts.rank(v), a, +1) for v, a in zip(node.inputs[first:], taken, strict=False)]
            backs = [_order(_rank(*both), a, -1) for both, a in zip(made, put, strict=True)]
            if None in orders or None in backs:
                context.log.refused(self.name, node, "the rank of what it scans or makes is not known")
                continue
            self.rewrite(graph, node, orders, backs)  # type: ignore[arg-type]
            context.log.applied(self.name, node)
            changed = True
        return changed

    def rewrite(
        self, graph: Graph, node: Node, orders: Sequence[Sequence[int]], backs: Sequence[Sequence[int]]
    ) -> None:  # fmt: skip
        first = states(node)
        inputs = list(node.inputs)
        for k, order in enumerate(orders, first):
            inputs[k] = _transposed(graph, node, inputs[k], order)
        attrs = {k: v for k, v in node.attrs.items() if k not in ("scan_input_axes", "scan_output_axes")}
        twin = graph.add(
            "Scan", inputs, attrs, outputs=len(node.outputs), types=[v.type for v in node.outputs[:first]],
            name=node.name, origin=node.origin, bodies=node.bodies, captures=node.captures,
        )  # fmt: skip
        results = list(twin.outputs)
        for k, back in enumerate(backs, first):
            results[k] = _transposed(graph, node, results[k], back)  # type: ignore[assignment]
        for old, new in zip(node.outputs, results, strict=True):
            graph.replace(old, new)
        graph.remove(node)


def _transposed(graph: Graph, node: Node, value: Value | None, order: Sequence[int]) -> Value | None:
    if value is None or list(order) == sorted(order):
        return value
    return graph.add("Transpose", [value], {"perm": list(order)}, name=f"{node.name}/axis", origin=node.origin).output


def _order(rank: int | None, axis: int, way: int) -> list[int] | None:
    """The permutation that moves an axis to the front (+1), or the first axis there (-1); None without such an axis."""
    if rank is None or not -rank <= axis < rank:
        return None
    axis %= rank
    front = [axis, *(a for a in range(rank) if a != axis)]
    return front if way > 0 else [front.index(a) for a in range(rank)]


def _rank(whole: Value, row: Value) -> int | None:
    """The rank of a scan output, from its type or from that of its rows."""
    known, of_row = value_facts.rank(whole), value_facts.rank(row)
    return known if known is not None or of_row is None else of_row + 1
