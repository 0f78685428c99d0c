"""The precision that a device computes in: a network of single-precision numbers becomes one of narrower ones.

Inputs and outputs keep their types: a Cast stands behind each input and in front of each output. Constants are rounded
once; what a narrow type cannot hold (-1e9 in a mask) becomes the largest number that it can.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from ..ir.graph import Graph, Node, Value
from ..ir.types import DType, TensorType
from ..ops import lookup
from .base import Context

#: float inputs that say what to do, not what it is done to: they stay as they are
_KEPT = {"Resize": (1, 2), "Upsample": (1,), "OneHot": (2,), "Range": (0, 1, 2), "NonMaxSuppression": (3, 4)}
#: their results depend on the last bit of what they are given, or are defined for single precision alone
_SINGLE = ("Quantize", "Dequantize", "QLinear", "Integer", "com.microsoft::", "org.openvinotoolkit::")


class Narrow:
    """Runs once, before fusion. A graph with bodies or quantised parts keeps its precision."""

    name = "precision"

    def run(self, graph: Graph, context: Context) -> bool:
        to = context.precision
        if to is DType.FLOAT32 or context.in_body:
            return False
        reason = next((r for node in graph.nodes if (r := _why_not(node)) is not None), None)
        if reason is not None:
            for node in graph.nodes[:1]:
                context.log.refused(self.name, node, reason)
            return False
        kept = {v for node in graph.nodes for i in _KEPT.get(node.op, ()) if (v := node.input(i)) is not None}
        wide = [v for v in graph.values() if v not in kept and v.tensor is not None and v.tensor.dtype is DType.FLOAT32]
        if not wide:
            return False
        leaving = [v for v in dict.fromkeys(graph.outputs) if v in set(wide)]
        for value in wide:
            assert isinstance(value.type, TensorType)
            if value in graph.inputs:
                _behind_input(graph, value, to)
            elif value.const is not None:
                value.const = rounded(value.const, to)
                value.type = value.type.with_dtype(to)
            else:
                value.type = value.type.with_dtype(to)
        for node in graph.nodes:
            if node.op == "Cast" and node.attrs.get("to") == DType.FLOAT32.onnx_code and node.output in set(wide):
                node.attrs["to"] = to.onnx_code
        for value in leaving:
            _before_output(graph, value)
        context.log.applied(self.name, graph.nodes[0])
        return True


def _why_not(node: Node) -> str | None:
    if node.bodies:
        return f"{node.op} has a body"
    if any(part in node.op for part in _SINGLE):
        return f"{node.op} is defined by single precision"
    if lookup(node.op) is None:
        return f"nothing is known of {node.op}"
    return None


def rounded(array: np.ndarray[Any, Any], to: DType) -> np.ndarray[Any, Any]:
    """Constants as a narrower type holds them, finite ones finite."""
    most = float(ml_dtypes.finfo(to.numpy).max)
    bounded = np.where(np.isfinite(array), np.clip(array, -most, most), array)
    return bounded.astype(to.numpy, order="C")  # numpy's ascontiguousarray makes rows of scalars


def _behind_input(graph: Graph, value: Value, to: DType) -> None:
    assert isinstance(value.type, TensorType)
    narrow = graph.add("Cast", [value], {"to": to.onnx_code}, types=[value.type.with_dtype(to)]).output
    for node, i in list(value.uses):
        if node is not narrow.producer:
            graph.set_input(node, i, narrow)
    graph.outputs = [narrow if v is value else v for v in graph.outputs]


def _before_output(graph: Graph, value: Value) -> None:
    """``value`` is narrow by now; an input that is an output goes through both casts."""
    source = value
    if value in graph.inputs:
        source = next(n.output for n in value.users if n.op == "Cast")
    assert isinstance(source.type, TensorType)
    wide = graph.add(
        "Cast", [source], {"to": DType.FLOAT32.onnx_code}, types=[source.type.with_dtype(DType.FLOAT32)]
    ).output
    graph.outputs = [wide if v is source else v for v in graph.outputs]
