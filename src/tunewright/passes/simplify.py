"""Device-neutral clean-up: dead code, constants, shapes."""

from __future__ import annotations

from ..ir.graph import Graph
from ..ops import lookup
from ..ops.infer import CONTROL, Budget, propagate
from .base import Context


class DeadCode:
    """Nodes whose results nobody reads."""

    name = "dead-code"

    def run(self, graph: Graph, context: Context) -> bool:
        kept = set(graph.outputs)
        changed = False
        for node in reversed(graph.nodes):
            if not any(v.uses or v in kept for v in node.outputs):
                graph.remove(node)
                changed = True
        return changed


class Propagate:
    """Types and constants in one sweep (see `ops.infer`)."""

    name = "propagate"

    def run(self, graph: Graph, context: Context) -> bool:
        s = context.settings
        return propagate(graph, Budget(s.fold_bytes, s.fold_seconds, s.max_tensor_bytes))


class UnknownOps:
    """Nothing unknown may go further: the error names every operator that has no definition."""

    name = "unknown-ops"

    def run(self, graph: Graph, context: Context) -> bool:
        from ..errors import UnsupportedError

        unknown = [n for n in graph.nodes if n.op not in CONTROL and lookup(n.op) is None]
        if unknown:
            ops = sorted({n.op for n in unknown})
            raise UnsupportedError(
                f"no definition of {', '.join(ops)}", where=f"node {unknown[0].name!r}",
                hint="an extension may add one: an entry point in group tunewright.ops",
            )
        return False
