"""Converts a Loop or Scan that provably is an LSTM, a GRU or an RNN to that layer; it leaves others unchanged."""

from __future__ import annotations

from tunewright.ir.graph import Graph

from ..base import Context


class RecurrentLoops:
    """Replaces loops over recurrent cells with layers (see `loops.proof`)."""

    name = "recurrent-loops"

    def run(self, graph: Graph, context: Context) -> bool:
        nodes = [n for n in graph.nodes if n.op in ("Loop", "Scan") and n.bodies]
        if not nodes:
            return False
        from ..loops import build, proof  # most models have no loops

        changed = False
        for node in nodes:
            found = proof.prove(graph, node, names=not context.in_body)
            if isinstance(found, str):
                context.log.refused(self.name, node, found)
                continue
            context.log.applied(self.name, node)
            build.replace_loop(graph, found)
            changed = True
        return changed
