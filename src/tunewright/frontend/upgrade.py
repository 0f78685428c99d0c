"""Operators of any opset in their newest form, so that everything behind the front end knows one form of each.

An adapter belongs to an operator and to the opset version in which its new form began; it is applied when the model's opset
is older. It returns the call in the new form, or, where one node becomes several, the resulting values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from ..ir.graph import Graph, Value


@dataclass(frozen=True)
class Call:
    """One operator about to be added to a graph. The last ``captures`` inputs are what its bodies capture."""

    op: str
    inputs: Sequence[Value | None]
    attrs: dict[str, Any]
    outputs: Sequence[str]
    name: str
    bodies: dict[str, Graph] = field(default_factory=dict)
    captures: int = 0

    def add(self, graph: Graph) -> list[Value]:
        node = graph.add(
            self.op, self.inputs, self.attrs, outputs=self.outputs, name=self.name, bodies=self.bodies, captures=self.captures
        )
        return node.outputs

    def without(self, *keys: str) -> Call:
        """The call without some attributes."""
        return replace(self, attrs={k: v for k, v in self.attrs.items() if k not in keys})


Adapter: TypeAlias = Callable[[Graph, Call], Call | list[Value]]

#: op -> [(version at which the new form began, adapter)], ascending
ADAPTERS: dict[str, list[tuple[int, Adapter]]] = {}


def adapter(since: int, *ops: str) -> Callable[[Adapter], Adapter]:
    """Register an adapter for calls from opsets below ``since``."""

    def register(function: Adapter) -> Adapter:
        for op in ops:
            ADAPTERS.setdefault(op, []).append((since, function))
            ADAPTERS[op].sort(key=lambda pair: pair[0])
        return function

    return register


def upgrade(graph: Graph, call: Call, version: int) -> list[Value]:
    """Add a call to the graph in its newest form; its results."""
    if call.op == "Constant":
        from .onnx import constant_array

        return [graph.constant(constant_array(call.attrs), call.outputs[0])]
    for since, function in ADAPTERS.get(call.op, ()):
        if version < since:
            result = function(graph, call)
            if isinstance(result, list):
                return result
            call = result
    return call.add(graph)


def _axes_to_input(graph: Graph, call: Call) -> Call:
    """``axes`` became an input."""
    if "axes" not in call.attrs:
        return call
    axes = graph.constant(np.asarray(call.attrs["axes"], np.int64), "axes")
    return replace(call.without("axes"), inputs=[*call.inputs[:1], axes])


adapter(13, "Squeeze", "Unsqueeze", "ReduceSum")(_axes_to_input)
