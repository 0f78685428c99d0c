"""Rewrites OpenVINO's simple layers as ONNX operators, so that rules and kernels for ONNX serve them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce

import numpy as np

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.symbolic import WHOLE, sym_array
from tunewright.ops.openvino.movement import crop_window

from .. import value_facts
from ..pattern import Match, Op, Rule

DOMAIN = "org.openvinotoolkit::"
Build = Callable[[Graph, Node], Value]

#: layers with an operator of the same meaning: layer -> (operator, {attribute: default})
SAME: dict[str, tuple[str, dict[str, float]]] = {
    "Copy": ("Identity", {}),
    "ELU": ("Elu", {"alpha": 1.0}),
    "Elu": ("Elu", {"alpha": 1.0}),
    "HSwish": ("HardSwish", {}),
    "Mish": ("Mish", {}),
    "Sigmoid": ("Sigmoid", {}),
    "SoftPlus": ("Softplus", {}),
    "TanH": ("Tanh", {}),
    "Tanh": ("Tanh", {}),
}
ELTWISE = {
    "sum": "Add",
    "add": "Add",
    "mul": "Mul",
    "prod": "Mul",
    "max": "Max",
    "min": "Min",
    "sub": "Sub",
    "div": "Div",
    "pow": "Pow",
}


def _x(node: Node) -> Value:
    value = node.input(0)
    assert value is not None
    return value


def _number(graph: Graph, number: float, like: Value) -> Value:
    dtype = value_facts.dtype(like)
    assert dtype is not None
    return graph.constant(np.asarray(number, dtype.numpy), "number")


def _per_channel(graph: Graph, node: Node, i: int) -> Value:
    """A parameter per channel, in a shape that broadcasts against [n, c, ...]."""
    parameter, x = node.input(i), _x(node)
    assert parameter is not None
    dims, rank = value_facts.shape(parameter), value_facts.rank(x) or 0
    if value_facts.rank(parameter) == rank or value_facts.is_scalar(parameter) or dims is None:
        return parameter
    shape = graph.constant(np.asarray([-1] + [1] * (rank - 2), np.int64), "shape")
    return graph.add("Reshape", [parameter, shape]).output


def _same(graph: Graph, node: Node) -> Value:
    op, defaults = SAME[node.op.removeprefix(DOMAIN)]
    return graph.add(op, [_x(node)], {k: float(node.attrs.get(k, d)) for k, d in defaults.items()}).output


def _relu(graph: Graph, node: Node) -> Value:
    slope = float(node.attrs.get("negative_slope", 0.0))
    return (
        graph.add("LeakyRelu", [_x(node)], {"alpha": slope}).output if slope else graph.add("Relu", [_x(node)]).output
    )


def _clamp(graph: Graph, node: Node) -> Value:
    x = _x(node)
    bounds = (
        (0.0, float(node.attrs.get("n", 6.0))) if node.op.endswith("ReLU6") else (node.attrs["min"], node.attrs["max"])
    )
    return graph.add("Clip", [x, *(_number(graph, float(b), x) for b in bounds)]).output


def _scale_shift(graph: Graph, node: Node) -> Value:
    value = _x(node)
    if node.input(1) is not None:
        value = graph.add("Mul", [value, _per_channel(graph, node, 1)]).output
    if node.input(2) is not None:
        value = graph.add("Add", [value, _per_channel(graph, node, 2)]).output
    return value


def _prelu(graph: Graph, node: Node) -> Value:
    return graph.add("PRelu", [_x(node), _per_channel(graph, node, 1)]).output


def _power(graph: Graph, node: Node) -> Value:
    x = value = _x(node)
    for op, key, neutral in (("Mul", "scale", 1.0), ("Add", "shift", 0.0), ("Pow", "power", 1.0)):
        number = float(node.attrs.get(key, neutral))
        if number != neutral:
            value = graph.add(op, [value, _number(graph, number, x)]).output
    return value


def _eltwise(graph: Graph, node: Node) -> Value:
    op = ELTWISE[str(node.attrs.get("operation", "sum")).lower()]
    values = [v for v in node.inputs if v is not None]
    if op == "Add" and "coeff" in node.attrs:
        scaled = zip(values, node.attrs["coeff"], strict=True)
        values = [v if c == 1 else graph.add("Mul", [v, _number(graph, c, v)]).output for v, c in scaled]
    return reduce(lambda a, b: graph.add(op, [a, b]).output, values)


def _fully_connected(graph: Graph, node: Node) -> Value:
    x = _x(node)
    if value_facts.rank(x) != 2:
        x = graph.add("Flatten", [x], {"axis": 1}).output
    inputs = [x, node.input(1), *([node.input(2)] if node.input(2) is not None else [])]
    return graph.add("Gemm", inputs, {"transB": 0 if node.attrs.get("transpose") else 1}).output


def _crop(graph: Graph, node: Node) -> Value:
    """A slice with constant bounds, which the memory planner can remove."""
    x, like = _x(node), value_facts.shape(node.input(1))
    window = crop_window(node.attrs, value_facts.shape(x) or (), like)
    starts = sym_array([start for start, _ in window])
    ends = []
    for start, length in window:
        assert isinstance(length, WHOLE), "`_sizes` refuses a shape that is not known"
        ends.append(start + length)
    return graph.add("Slice", [x, graph.constant(starts, "starts"), graph.constant(sym_array(ends), "ends")]).output


def _known(match: Match) -> str | None:
    """Refuses data of unknown type or rank, and integers: ONNX's operators differ for them."""
    x = match.root.input(0)
    dtype = value_facts.dtype(x)
    if dtype is None or value_facts.rank(x) is None:
        return "the type of the data is not known"
    return None if dtype.is_float else f"the data are {dtype}"


def _parameters(match: Match) -> str | None:
    for value in match.root.inputs[1:]:
        dims = value_facts.shape(value)
        if value is not None and (dims is None or not all(isinstance(d, WHOLE) for d in dims)):
            return "the shape of a parameter is not known"
        if value_facts.dtype(value) not in (None, value_facts.dtype(match.root.input(0))):
            return "a parameter is of another type"
    return _known(match)


def _sizes(match: Match) -> str | None:
    for value in [*match.root.inputs, match.root.output]:
        if value is not None and not (value.tensor is not None and value.tensor.is_static):
            return f"the shape of {value!r} is not known"
    return None


def _matrix(match: Match) -> str | None:
    return _parameters(match) or (None if value_facts.rank(match.root.input(1)) == 2 else "the weights are no matrix")


def _simple(match: Match) -> str | None:
    word = str(match.root.attrs.get("operation", "sum")).lower()
    return _known(match) or (None if word in ELTWISE else f"{word} has no operator of its own")


def _rule(name: str, ops: Iterable[str], build: Build, check: Callable[[Match], str | None] = _known) -> Rule:
    pattern = Op([DOMAIN + op for op in ops], rest=True)
    return Rule(f"openvino-{name}", pattern, lambda graph, match: build(graph, match.root), check)


RULES = (
    _rule("activation", SAME, _same),
    _rule("relu", ["ReLU"], _relu),
    _rule("clamp", ["ReLU6", "Clamp"], _clamp),
    _rule("crop", ["Crop"], _crop, _sizes),
    _rule("scale-shift", ["ScaleShift"], _scale_shift, _parameters),
    _rule("prelu", ["PReLU"], _prelu, _parameters),
    _rule("power", ["Power"], _power),
    _rule("eltwise", ["Eltwise"], _eltwise, _simple),
    _rule("fully-connected", ["FullyConnected", "InnerProduct"], _fully_connected, _matrix),
)
