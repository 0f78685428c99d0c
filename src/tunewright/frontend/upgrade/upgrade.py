"""Converts operators of any opset to their newest form, so that the rest of the engine knows one form of each.

An adapter belongs to an operator and to the opset version in which its new form began. It runs when the model's opset
is older. It returns the call in the new form or, if one node becomes several, the resulting values.

Operators that the ``upgrade_*`` modules do not name have kept their meaning. Later versions only accept more types, or
add attributes whose defaults are the earlier behaviour.
"""

from __future__ import annotations

from tunewright.ir.graph import Graph, Value

from ..node_protos import constant_array
from . import (
    attention,
    experimental,
    openvino,
    scan,
    shape,
)
from . import (
    layers as upgrade_layers,
)
from . import (
    math as upgrade_math,
)
from .base import ADAPTERS, OperatorCall, infer

#: importing these modules registers their adapters
FAMILIES = (
    upgrade_math,
    shape,
    upgrade_layers,
    attention,
    scan,
    experimental,
    openvino,
)

#: Below this version adapters need ranks and element types, so types are inferred while the graph is built.
_TYPED = 13


def upgrade(graph: Graph, call: OperatorCall, version: int) -> list[Value]:
    """Add a call to the graph in its newest form. Returns its results."""
    if call.op == "Constant":
        return [graph.constant(constant_array(call.attrs), call.outputs[0])]
    if version < 6 and "consumed_inputs" in call.attrs:
        call = call.without("consumed_inputs")
    for since, function in ADAPTERS.get(call.op, ()):
        if version < since:
            result = function(graph, call)
            if isinstance(result, list):
                return result
            call = result
    results = call.add(graph)
    if version < _TYPED and (":" not in call.op or call.op.startswith("ai.onnx.ml::")):
        infer(results)
    return results
