"""Replaces one node with several, including their types, for rewrites that a rule cannot express."""

from __future__ import annotations

from typing import Any

from ..ir.graph import Graph, Node, Value
from ..ir.symbolic import sym_array
from ..ops import lookup
from ..ops.infer import infer_node
from . import value_facts

#: [batch, rows, heads, elements] -> [batch, heads, rows, elements], and back
_TURN = [0, 2, 1, 3]


class NodeBuilder:
    """Adds typed nodes in place of one node."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.node = graph, node

    def add(self, op: str, *inputs: Value | None, **attrs: Any) -> Value:
        return self.several(op, *inputs, **attrs)[0]

    def several(self, op: str, *inputs: Value | None, outputs: int = 1, **attrs: Any) -> list[Value]:
        made = self.graph.add(op, inputs, attrs, outputs=outputs, name=self.node.name, origin=self.node.origin)
        spec = lookup(op)
        assert spec is not None
        infer_node(made, spec)
        return made.outputs

    def ints(self, *numbers: int) -> Value:
        return self.graph.constant(sym_array(numbers))

    def heads(self, x: Value, count: int) -> Value:
        """[batch, rows, heads * elements] as [batch, heads, rows, elements], which a tensor of rank 4 is already."""
        if value_facts.rank(x) == 4:
            return x
        return self.add("Transpose", self.add("Reshape", x, self.ints(0, 0, count, -1)), perm=_TURN)

    def flat(self, x: Value) -> Value:
        """The inverse of `heads`: [batch, heads, rows, elements] as [batch, rows, heads * elements]."""
        return self.add("Reshape", self.add("Transpose", x, perm=_TURN), self.ints(0, 0, -1))

    def replace(self, *values: Value | None) -> None:
        """Replace the outputs of the node; each new value takes the name of the old one."""
        for old, new in zip(self.node.outputs, values, strict=False):
            if new is not None and self.graph.is_read(old):
                old.name, new.name = new.name, old.name
                self.graph.replace(old, new)
