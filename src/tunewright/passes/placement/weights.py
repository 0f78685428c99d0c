"""Weights that products read by columns: large ones are not transposed, because packing can do that too.

Small ones were transposed when constants were folded (FOLD_BYTES).
"""

from __future__ import annotations

import numpy as np

from tunewright.ir.graph import Graph, Node
from tunewright.ops.infer import is_turned

from ..base import Context
from ..pattern import remove_dead

FUSED = "com.microsoft::FusedMatMul"


class TurnedWeights:
    name = "turned-weights"

    def run(self, graph: Graph, context: Context) -> bool:
        changed = False
        for node in graph.nodes:
            weights = node.inputs[1] if node.op in ("MatMul", "Gemm") and not node.epilogue else None
            turn = weights.producer if weights is not None else None
            if turn is None or not is_turned(turn) or turn.inputs[0] is None or turn.inputs[0].const is None:
                continue
            if node.op == "MatMul" and not context.knows(FUSED):
                self._transpose(graph, turn)
            elif turn.inputs[0].const.ndim == 2:
                self._turn(graph, node, turn)
            context.log.applied(self.name, node)
            changed = True
        return changed

    def _turn(self, graph: Graph, node: Node, turn: Node) -> None:
        """Replaces the product with one that reads the weights in their order."""
        if node.op == "Gemm":
            op, attrs = "Gemm", {**node.attrs, "transB": 1 - int(node.attrs.get("transB", 0))}
        else:
            op, attrs = FUSED, {"transB": 1}
        inputs = [node.inputs[0], turn.inputs[0], *node.inputs[2:]]
        made = graph.add(op, inputs, attrs, types=[node.output.type], name=node.name, origin=node.origin)
        made.output.name, node.output.name = node.output.name, made.output.name
        graph.replace(node.output, made.output)
        remove_dead(graph, [node, turn])

    def _transpose(self, graph: Graph, turn: Node) -> None:
        """Transposes the weights once, for a device without a product that reads columns."""
        assert turn.inputs[0] is not None and turn.inputs[0].const is not None
        array = np.ascontiguousarray(turn.inputs[0].const.T)
        graph.replace(turn.output, graph.constant(array, turn.output.name))
        graph.remove(turn)
