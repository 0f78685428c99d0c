"""Replaces BatchNormalization that follows nothing linear with a product and a sum, where the device has no kernel for
it.

Both then become part of an element-wise kernel, with the activation that usually follows. The pass runs when shapes are
known: before that a device cannot tell which problems it accepts.
"""

from __future__ import annotations

import numpy as np

from tunewright.ir.graph import Graph, Node
from tunewright.ir.types import PLAIN

from .. import value_facts
from ..base import Context
from .fuse_linear import affine


class SpreadNorm:
    name = "spread-norm"

    def run(self, graph: Graph, context: Context) -> bool:
        if context.layouts is None:  # the host runs the model's operations
            return False
        found = [n for n in graph.nodes if n.op == "BatchNormalization" and not n.epilogue and len(n.outputs) == 1]
        return sum(_rewrite(graph, node, context) for node in found) > 0


def _rewrite(graph: Graph, node: Node, context: Context) -> bool:
    type = value_facts.static(node.output)
    constant = all(v is not None and v.const is not None for v in node.inputs[1:5])
    if type is None or not constant or node.attrs.get("training_mode", 0) or context.works_in(node, PLAIN, []) is None:
        return False
    x, (scale, shift) = node.inputs[0], affine(node, None, False)
    assert x is not None and scale is not None and shift is not None
    dims = (-1, *(1,) * (len(type.dims) - 2))
    factor, summand = (
        graph.constant(array.reshape(dims).astype(type.dtype.numpy), f"{node.name}_{name}")
        for array, name in ((scale, "scale"), (shift, "shift"))
    )
    if not all(v.const is not None and np.isfinite(v.const.astype(np.float32)).all() for v in (factor, summand)):
        context.log.refused(SpreadNorm.name, node, f"its scale or shift is not finite in {type.dtype}")
        return False
    product = graph.add("Mul", [x, factor], types=[type], name=f"{node.name}_mul", origin=node.origin)
    made = graph.add("Add", [product.output, summand], types=[type], name=node.name, origin=node.origin)
    made.output.name, node.output.name = node.output.name, made.output.name
    graph.replace(node.output, made.output)
    graph.remove(node)
    context.log.applied(SpreadNorm.name, made)
    return True
