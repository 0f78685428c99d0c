"""Lets a normalisation compute the sum that it normalises: a product, its bias, and the input that bypasses the
product.

On a GPU the normalisation waits for memory, so that the sum costs almost nothing. The product then has no epilogue, and
a vendor's library may compute it as well. On a CPU a product's sum is in registers in any case. The pass runs before
element-wise operations become parts of products.
"""

from __future__ import annotations

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ops.internal.pieces import PIECES

from .. import value_facts
from ..base import Context
from ..pattern import remove_dead

NORM = "com.microsoft::SkipLayerNormalization"
_PRODUCTS = frozenset({"MatMul", "Gemm"})


class SkipNorm:
    name = "skip-norm"

    def run(self, graph: Graph, context: Context) -> bool:
        # only GPUs have kernels that gather pieces
        if context.layouts is None or not (context.knows(PIECES) and context.knows(NORM)):
            return False
        return sum([_rewrite(graph, n, context) for n in graph.nodes if n.op == "LayerNormalization"]) > 0


def _rewrite(graph: Graph, node: Node, context: Context) -> bool:
    total, scale, shift = (*node.inputs, None)[:3]
    rank, add = value_facts.rank(total), total.producer if total is not None else None
    if total is None or scale is None or add is None or add.op != "Add" or not _is_only_for(graph, total, node):
        return False
    last = rank is not None and value_facts.axis(node, -1, total) == rank - 1 and value_facts.rank(scale) == 1
    if (
        not last
        or node.epilogue
        or any(v.uses for v in node.outputs[1:])
        or value_facts.dtype(scale) != value_facts.dtype(total)
    ):
        return False
    for product, other in (add.inputs, add.inputs[::-1]):
        if (
            product is None
            or other is None
            or not (value_facts.same_type(product, total) and value_facts.same_type(other, total))
        ):
            continue
        if not _is_only_for(graph, product, add):
            continue
        bias, gone = None, [add]
        if product.producer is not None and product.producer.op == "Add":  # a product and its bias
            gone.append(product.producer)
            product, bias = _parts(graph, product.producer)
        if product is None or product.producer is None or product.producer.op not in _PRODUCTS:
            continue
        attrs = {"epsilon": float(node.attrs.get("epsilon", 1e-5))}
        origin = dict.fromkeys(name for n in (*reversed(gone), node) for name in n.origin)
        new = graph.add(NORM, [product, other, scale, shift, bias], attrs, types=[node.output.type], name=node.name,
                        origin=origin)  # fmt: skip
        new.output.name, node.output.name = node.output.name, new.output.name
        graph.replace(node.output, new.output)
        remove_dead(graph, [node, *gone])
        context.log.applied(SkipNorm.name, new)
        return True
    return False


def _is_only_for(graph: Graph, value: Value, node: Node) -> bool:
    return list(value.users) == [node] and len(value.uses) == 1 and not graph.is_output(value)


def _parts(graph: Graph, add: Node) -> tuple[Value | None, Value | None]:
    """A product that only the sum reads, and the constant along the last axis that it adds; else None."""
    for product, bias in (add.inputs, add.inputs[::-1]):
        if product is None or bias is None or bias.const is None or value_facts.rank(bias) != 1:
            continue
        if value_facts.same_type(product, add.output) and _is_only_for(graph, product, add):
            return product, bias
    return None, None
