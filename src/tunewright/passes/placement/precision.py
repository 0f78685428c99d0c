"""Converts networks of single-precision numbers to the narrower precision in which the device computes.

Inputs and outputs keep their types: a Cast follows each input and precedes each output. Constants are rounded once. A
number that a narrow type cannot hold (-1e9 in a mask) becomes the largest number that it can.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.types import DType, TensorType
from tunewright.ops import lookup
from tunewright.ops.base import Array

from ..base import Context, Convert, convert

#: Float inputs that are parameters, not data: they keep their type.
_KEPT = {"Resize": (1, 2), "Upsample": (1,), "OneHot": (2,), "Range": (0, 1, 2), "NonMaxSuppression": (3, 4)}
#: operations whose attributes or inputs determine the type of their result
_MAKERS = frozenset({"ConstantOfShape", "EyeLike", "Range"})
#: Operations whose results depend on the last bit of their inputs, or that are defined for single precision only.
_SINGLE = ("Quantize", "Dequantize", "QLinear", "Integer", "com.microsoft::", "org.openvinotoolkit::")


class Narrow:
    """Runs once, before fusion. A graph with bodies or quantised parts keeps its precision.

    With ENABLE_FP16_FOR_QUANTIZED_MODELS = NO, the halves in a quantised graph become single precision.
    """

    name = "precision"

    def run(self, graph: Graph, context: Context) -> bool:
        have, to, why_not = DType.FLOAT32, context.precision, _why_not
        if not context.settings.enable_fp16_for_quantized_models and is_quantised(graph):
            have, to, why_not = DType.FLOAT16, DType.FLOAT32, _why_not_wider
        if to is have or context.in_body:
            return False
        reason = next((r for node in graph.nodes if (r := why_not(node)) is not None), None)
        if reason is not None:
            for node in graph.nodes[:1]:
                context.log.refused(self.name, node, reason)
            return False
        kept = {v for node in graph.nodes for i in _KEPT.get(node.op, ()) if (v := node.input(i)) is not None}
        wide = [v for v in graph.values() if v not in kept and v.tensor is not None and v.tensor.dtype is have]
        if not wide:
            return False
        leaving = [v for v in dict.fromkeys(graph.outputs) if v in set(wide)]
        for value in wide:
            assert isinstance(value.type, TensorType)
            if _is_given(graph, value):
                _behind_input(graph, value, to)
            elif value.const is not None:
                value.const = rounded(value.const, to, context.convert)
                value.type = value.type.with_dtype(to)
            else:
                value.type = value.type.with_dtype(to)
        for node in graph.nodes:
            if node.op == "Cast" and node.attrs.get("to") == have.onnx_code and node.output in set(wide):
                node.attrs["to"] = to.onnx_code
        for value in leaving:
            _before_output(graph, value, have)
        context.log.applied(self.name, graph.nodes[0])
        return True


def is_quantised(graph: Graph) -> bool:
    """Whether the graph contains quantised numbers: integers of a few bits that stand for others."""
    words = ("Quantize", "Dequantize", "QLinear", "QGemm", "QAttention", "MatMulNBits", "Integer")
    return any(word in node.op for inner in graph.walk() for node in inner.nodes for word in words)


def _why_not_wider(node: Node) -> str | None:
    if node.bodies:
        return f"{node.op} has a body"
    if node.op == "ConstantOfShape" or {"dtype", "output_dtype"} & set(node.attrs):
        return f"an attribute of {node.op} fixes the type of its result"
    return None


def _why_not(node: Node) -> str | None:
    if node.bodies:
        return f"{node.op} has a body"
    if any(part in node.op for part in _SINGLE):
        return f"{node.op} is defined in single precision"
    if lookup(node.op) is None:
        return f"no definition of {node.op} is installed"
    return None


def rounded(array: Array, to: DType, convert: Convert = convert) -> Array:
    """Constants converted to another type; finite numbers stay finite."""
    if array.size and to.itemsize <= array.dtype.itemsize:
        most = float(ml_dtypes.finfo(to.numpy).max)
        if not (array.min() >= -most and array.max() <= most):
            array = np.where(np.isfinite(array), np.clip(array, -most, most), array)
    return convert(array, to)


def _is_given(graph: Graph, value: Value) -> bool:
    """Whether the pass cannot choose the type of a value; then a Cast follows it."""
    return value in graph.inputs or (value.producer is not None and value.producer.op in _MAKERS)


def _behind_input(graph: Graph, value: Value, to: DType) -> None:
    assert isinstance(value.type, TensorType)
    narrow = graph.add("Cast", [value], {"to": to.onnx_code}, types=[value.type.with_dtype(to)]).output
    for node, i in list(value.uses):
        if node is not narrow.producer:
            graph.set_input(node, i, narrow)
    graph.outputs = [narrow if v is value else v for v in graph.outputs]


def _before_output(graph: Graph, value: Value, have: DType) -> None:
    """Adds a Cast in front of the output ``value``, which is narrow now. An input that is an output goes through both
    casts."""
    source = value
    if _is_given(graph, value):
        source = next(n.output for n in value.users if n.op == "Cast")
    assert isinstance(source.type, TensorType)
    wide = graph.add("Cast", [source], {"to": have.onnx_code}, types=[source.type.with_dtype(have)]).output
    graph.outputs = [wide if v is source else v for v in graph.outputs]
