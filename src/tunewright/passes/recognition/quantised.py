"""Converts layers between DequantizeLinear and QuantizeLinear to layers of integers.

::

    QuantizeLinear(Conv(DequantizeLinear(x), DequantizeLinear(w), b))   ->  QLinearConv(x, w, b)
    QuantizeLinear(MatMul(DequantizeLinear(a), DequantizeLinear(b)))    ->  QLinearMatMul(a, b)
    QuantizeLinear(Add(DequantizeLinear(a), DequantizeLinear(b)))       ->  com.microsoft QLinearAdd(a, b)
    QuantizeLinear(Gemm(DequantizeLinear(a), DequantizeLinear(b), c))   ->  com.microsoft QGemm(a, b, c)
    QuantizeLinear(Sigmoid(DequantizeLinear(x)))                        ->  com.microsoft QLinearSigmoid(x)
    QuantizeLinear(Concat(DequantizeLinear(a), DequantizeLinear(b)))    ->  Concat(a, b), rescaled
    QuantizeLinear(MaxPool(DequantizeLinear(x)))                        ->  MaxPool(x)

A Relu or Clip in front of QuantizeLinear is removed where saturation has the same effect. The last rule holds for all
operations that only move elements, when both sides have the same scale and zero point. It and the two before it change
no number. In the others the sums are exact instead of rounded to floats. They are multiplied once with the quotient of
the scales, instead of being divided. A result near the middle between two steps may become the other step. Therefore
results are within one step of those with floats, and nearly all of them are equal. A bias becomes a number of steps of
the products when that moves no result by more than `BIAS_ERROR` of its own step.

Rules apply only where a kernel of the device takes the integer layer; the host computes faster in floats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import PLAIN, DType
from tunewright.ops import lookup
from tunewright.ops.base import Array
from tunewright.ops.infer import infer_node

from .. import value_facts
from ..base import Context
from ..pattern import Const, Match, OneOf, Op, Pattern, RewritePass, Rule

MS = "com.microsoft::"
#: the largest error from rounding a bias, in steps of the result
BIAS_ERROR = 2.0**-10
INTEGERS = (DType.INT8, DType.UINT8, DType.INT32)
#: operations that only move elements of their first input, or pick some of them
MOVES = "MaxPool|Reshape|Transpose|Flatten|Squeeze|Unsqueeze|Slice|DepthToSpace|SpaceToDepth|Expand|Tile|Gather"


@dataclass(frozen=True)
class Steps:
    """A scale and a zero point, each one number or one for each channel."""

    scale: Array
    zero: Array

    @property
    def single(self) -> bool:
        return bool(self.scale.size == 1 and self.zero.size == 1)

    def same(self, other: Steps) -> bool:
        return bool(
            self.single and other.single and self.zero.dtype == other.zero.dtype
            and self.scale.reshape(-1)[0] == other.scale.reshape(-1)[0]
            and self.zero.reshape(-1)[0] == other.zero.reshape(-1)[0]
        )  # fmt: skip

    def scalars(self) -> tuple[Array, Array]:
        return self.scale.reshape(()), self.zero.reshape(())


def steps_of(node: Node, axis: int | None = None) -> Steps | str:
    """The steps of a QuantizeLinear or DequantizeLinear, or why they are not supported; ``axis`` may have channels."""
    scale, given = node.input(1), node.input(2)
    whole = node.output if node.op == "QuantizeLinear" else node.inputs[0]
    if scale is None or scale.const is None or (given is not None and given.const is None):
        return "its scale or zero point is not constant"
    if whole is None or whole.tensor is None or whole.tensor.dtype not in INTEGERS:
        return "is not of bytes"
    floats = node.inputs[0] if node.op == "QuantizeLinear" else node.output
    if value_facts.dtype(scale) is not DType.FLOAT32 or value_facts.dtype(floats) is not DType.FLOAT32:
        return "its floats are not float32"
    if not (np.isfinite(scale.const).all() and (scale.const > 0).all()):
        return "its scale is not a positive number"
    zero = np.zeros_like(scale.const, whole.tensor.dtype.numpy) if given is None or given.const is None else given.const
    if scale.const.size > 1:
        rank = value_facts.rank(whole)
        if axis is None or rank is None or int(node.attrs.get("axis", 1)) % rank != axis % rank:
            return "has a scale for each channel"
        if node.attrs.get("block_size", 0) or scale.const.ndim != 1:
            return "has a scale for each block"
    return Steps(scale.const, zero)


@dataclass(frozen=True)
class QuantisedLayer:
    """A node that replaces others. Its inputs are values of the graph, new constants, other layers, or absent."""

    op: str
    inputs: Sequence[Value | Array | QuantisedLayer | None]
    attrs: Mapping[str, Any] = field(default_factory=dict)

    def add(self, graph: Graph, name: str) -> Value:
        given: list[Value | None] = []
        for i, v in enumerate(self.inputs):
            if isinstance(v, QuantisedLayer):
                given.append(v.add(graph, f"{name}_{i}"))
            else:
                given.append(graph.constant(v, f"{name}_{i}") if isinstance(v, np.ndarray) else v)
        while given and given[-1] is None:
            given.pop()
        return graph.add(self.op, given, self.attrs, name=name).output

    def why_not(self, node: Node, context: Context) -> str | None:
        """Why no kernel of the device takes the layer, or None; infers the types of ``node``, its node, first."""
        for given, v in zip(node.inputs, self.inputs, strict=False):
            if isinstance(v, QuantisedLayer):
                assert given is not None and given.producer is not None
                reason = v.why_not(given.producer, context)
                if reason is not None:
                    return reason
        spec = lookup(self.op)
        assert spec is not None
        infer_node(node, spec)
        return context.works_in(node, PLAIN, [])

    def remove(self, node: Node, graph: Graph) -> None:
        inner = [
            g.producer for g, v in zip(node.inputs, self.inputs, strict=False) if isinstance(v, QuantisedLayer) and g
        ]
        graph.remove(node)
        for v, producer in zip((v for v in self.inputs if isinstance(v, QuantisedLayer)), inner, strict=True):
            assert producer is not None
            v.remove(producer, graph)


def _result(match: Match) -> Steps | str:
    """The steps of the root QuantizeLinear, if saturation covers the bound in front of it; else the reason."""
    found = steps_of(match.root)
    if isinstance(found, str):
        return f"what it makes {found}"
    if not found.single:
        return "what it makes has a scale for each channel"
    if match.root.attrs.get("precision"):
        return "the quotient is rounded to another type"
    if "bound" not in match:
        return found
    node = match.node("bound")
    low, high = 0.0, np.inf
    if node.op == "Clip":
        ends = [node.input(1), node.input(2)]
        if any(end is not None and end.const is None for end in ends):
            return "the bounds of Clip are not constant"
        low, high = (d if v is None else float(v.const) for v, d in zip(ends, (-np.inf, np.inf), strict=True))  # type: ignore[arg-type]
    info = np.iinfo(found.zero.dtype)
    scale, zero = (float(v) for v in found.scalars())
    if np.rint(low / scale) + zero > info.min or np.rint(high / scale) + zero < info.max:
        return f"{node.op} bounds more than saturation does"
    return found


def _conv(match: Match) -> QuantisedLayer | str:
    node, y = match.node("main"), _result(match)
    x, w = steps_of(match.node("x_dq")), steps_of(match.node("w_dq"), axis=0)
    for name, found in (("the input", x), ("the weight", w)):
        if isinstance(found, str):
            return f"{name} {found}"
    if isinstance(y, str):
        return y
    assert isinstance(x, Steps) and isinstance(w, Steps)
    weights = match["w"].const
    if weights is None or weights.dtype.itemsize != 1 or x.zero.dtype.itemsize != 1:
        return "weights and input are not constant bytes and bytes"
    bias = _bias(node.input(2), x, w, y, weights.shape[0])
    if isinstance(bias, str):
        return bias
    (xs, xz), (ys, yz) = x.scalars(), y.scalars()
    ws, wz = (v.reshape(()) if v.size == 1 else v for v in (w.scale, w.zero))
    if (wz == wz.reshape(-1)[0]).all():  # Kernels need one number, whatever the number of channels.
        wz = wz.reshape(-1)[:1].reshape(())
    return QuantisedLayer("QLinearConv", [match["x"], xs, xz, match["w"], ws, wz, ys, yz, bias], node.attrs)


def _bias(value: Value | None, x: Steps, w: Steps, y: Steps, channels: int) -> Array | str | None:
    """A bias in steps of the products, None without a bias, or the reason against it."""
    if value is None:
        return None
    given, producer = value.const, value.producer
    if given is None and producer is not None and producer.op == "DequantizeLinear":
        found, whole = steps_of(producer, axis=0), producer.inputs[0]
        if not isinstance(found, str) and whole is not None and whole.const is not None:
            given = (whole.const.astype(np.float64) - found.zero) * found.scale.astype(np.float64)
    if given is None:
        return "the bias is not constant"
    step = np.broadcast_to(x.scale.astype(np.float64).reshape(()) * w.scale.astype(np.float64).reshape(-1), channels)
    exact = given.astype(np.float64).reshape(-1) / step
    whole_steps = np.rint(exact)
    if not (np.abs(whole_steps) < 2.0**30).all():
        return "the bias is too large for 32-bit sums"
    if (np.abs(exact - whole_steps) * step / float(y.scale.reshape(())) > BIAS_ERROR).any():
        return f"the bias is not within {BIAS_ERROR} of a step of the result"
    return whole_steps.astype(np.int32)


def _matmul(match: Match) -> QuantisedLayer | str:
    y, a, b = _result(match), steps_of(match.node("a_dq")), steps_of(match.node("b_dq"), axis=-1)
    for name, found in (("the left operand", a), ("the right operand", b)):
        if isinstance(found, str):
            return f"{name} {found}"
    if isinstance(y, str):
        return y
    assert isinstance(a, Steps) and isinstance(b, Steps)
    if a.zero.dtype.itemsize != 1 or b.zero.dtype.itemsize != 1:
        return "its operands are not bytes"
    if not b.single and value_facts.rank(match["b"]) != 2:
        return "columns of several matrices have scales of their own"
    if b.zero.size == 1 < b.scale.size:
        b = replace(b, zero=np.broadcast_to(b.zero.reshape(()), b.scale.shape).copy())
    (as_, az), (ys, yz) = a.scalars(), y.scalars()
    bs, bz = b.scalars() if b.single else (b.scale, b.zero)
    return QuantisedLayer("QLinearMatMul", [match["a"], as_, az, match["b"], bs, bz, ys, yz])


def _gemm(match: Match) -> QuantisedLayer | str:
    node, y, a = match.node("main"), _result(match), steps_of(match.node("a_dq"))
    turned = bool(node.attrs.get("transB", 0))
    b = steps_of(match.node("b_dq"), axis=0 if turned else 1)
    for name, found in (("the left operand", a), ("the right operand", b)):
        if isinstance(found, str):
            return f"{name} {found}"
    if isinstance(y, str):
        return y
    assert isinstance(a, Steps) and isinstance(b, Steps)
    if a.zero.dtype.itemsize != 1 or b.zero.dtype.itemsize != 1 or value_facts.rank(match["b"]) != 2:
        return "its operands are not bytes"
    columns = (value_facts.shape(match["b"]) or (0, 0))[0 if turned else 1]
    if node.attrs.get("alpha", 1.0) != 1.0 or node.attrs.get("beta", 1.0) != 1.0 or not isinstance(columns, WHOLE):
        return "it scales its operands"
    given = node.input(2)
    if given is not None and value_facts.shape(given) not in ((columns,), (1, columns)):
        return "the bias is not one number for each column"
    bias = _bias(given, a, b, y, columns)
    if isinstance(bias, str):
        return bias
    if b.zero.size == 1 < b.scale.size:
        b = replace(b, zero=np.broadcast_to(b.zero.reshape(()), b.scale.shape).copy())
    (as_, az), (ys, yz) = a.scalars(), y.scalars()
    bs, bz = b.scalars() if b.single else (b.scale, b.zero)
    attrs = {name: node.attrs[name] for name in ("transA", "transB") if name in node.attrs}
    return QuantisedLayer(MS + "QGemm", [match["a"], as_, az, match["b"], bs, bz, bias, ys, yz], {"alpha": 1.0} | attrs)


def _unary(match: Match) -> QuantisedLayer | str:
    node, y, x = match.node("main"), _result(match), steps_of(match.node("x_dq"))
    if isinstance(y, str):
        return y
    if isinstance(x, str) or not x.single or x.zero.dtype != y.zero.dtype:
        return "its input is not of one scale, and bytes as its result"
    return QuantisedLayer(MS + f"QLinear{node.op}", [match["x"], *x.scalars(), *y.scalars()], node.attrs)


def _concat(match: Match) -> QuantisedLayer | str:
    node, y = match.node("main"), _result(match)
    if isinstance(y, str):
        return y
    parts: list[Value | Array | QuantisedLayer | None] = []
    for value in node.inputs:
        producer = None if value is None else value.producer
        if producer is None or producer.op != "DequantizeLinear":
            return "a part is not dequantised"
        x = steps_of(producer)
        if isinstance(x, str) or not x.single or x.zero.dtype != y.zero.dtype or x.zero.dtype.itemsize != 1:
            return "a part is not of one scale, and bytes as the result"
        # With alpha 1 the LeakyRelu changes no number: it only converts the scale.
        other = QuantisedLayer(
            MS + "QLinearLeakyRelu", [producer.inputs[0], *x.scalars(), *y.scalars()], {"alpha": 1.0}
        )
        parts.append(producer.inputs[0] if x.same(y) else other)
    return QuantisedLayer("Concat", parts, node.attrs)


def _add(match: Match) -> QuantisedLayer | str:
    y, a, b = _result(match), steps_of(match.node("a_dq")), steps_of(match.node("b_dq"))
    for name, found in (("an operand", a), ("an operand", b)):
        if isinstance(found, str):
            return f"{name} {found}"
    if isinstance(y, str):
        return y
    assert isinstance(a, Steps) and isinstance(b, Steps)
    if not a.zero.dtype == b.zero.dtype == y.zero.dtype or not value_facts.same_shape(match["a"], match["b"]):
        return "its operands and its result are not of one type and shape"
    return QuantisedLayer(MS + "QLinearAdd", [match["a"], *a.scalars(), match["b"], *b.scalars(), *y.scalars()])


def _move(match: Match) -> QuantisedLayer | str:
    node, y, x = match.node("main"), steps_of(match.root), steps_of(match.node("x_dq"))
    if isinstance(x, str) or isinstance(y, str) or not x.same(y):
        return "scales and zero points differ, or are not one constant each"
    if len(node.outputs) > 1:
        return "it has a second output"
    return QuantisedLayer(node.op, [match["x"], *node.inputs[1:]], node.attrs)


def _dequantised(name: str) -> Op:
    return Op("DequantizeLinear", name, Const(), rest=True, shared=True, name=f"{name}_dq")


def _quantised(inner: Pattern) -> Pattern:
    bounded = OneOf(inner, Op("Relu|Clip", inner, rest=True, name="bound"))
    return Op("QuantizeLinear", bounded, Const(), rest=True)


_LAYERS: tuple[tuple[str, Pattern, Callable[[Match], QuantisedLayer | str]], ...] = (
    ("quantised-conv", _quantised(Op("Conv", _dequantised("x"), _dequantised("w"), rest=True, name="main")), _conv),
    ("quantised-matmul", _quantised(Op("MatMul", _dequantised("a"), _dequantised("b"), name="main")), _matmul),
    ("quantised-gemm", _quantised(Op("Gemm", _dequantised("a"), _dequantised("b"), rest=True, name="main")), _gemm),
    (
        "quantised-unary",
        Op("QuantizeLinear", Op("Sigmoid|LeakyRelu", _dequantised("x"), name="main"), Const(), rest=True),
        _unary,
    ),
    (
        "quantised-concat",
        Op("QuantizeLinear", Op("Concat", rest=True, name="main"), Const(), rest=True),
        _concat,
    ),
    ("quantised-add", _quantised(Op("Add", _dequantised("a"), _dequantised("b"), name="main")), _add),
    (
        "quantised-move",
        Op("QuantizeLinear", Op(MOVES, _dequantised("x"), rest=True, name="main"), Const(), rest=True),
        _move,
    ),
)


class Quantised:
    """Applies the rules above on devices whose kernels take the resulting layers."""

    name = "quantised"
    #: for the list of rule names
    rules = tuple(Rule(name, pattern, lambda graph, match: match.root.output) for name, pattern, _ in _LAYERS)

    def run(self, graph: Graph, context: Context) -> bool:
        if context.layouts is None:  # the host
            return False
        rules = [
            Rule(name, pattern, partial(_build, layer), partial(_check, context, layer))
            for name, pattern, layer in _LAYERS
        ]
        return RewritePass(self.name, rules).run(graph, context)


def _check(context: Context, layer: Callable[[Match], QuantisedLayer | str], match: Match) -> str | None:
    """Why the layer cannot be made, or no kernel of the device takes it; None if it can be used."""
    made = layer(match)
    if isinstance(made, str):
        return made
    node = made.add(match.graph, match.root.name).producer
    assert node is not None
    reason = made.why_not(node, context)
    made.remove(node, match.graph)
    return reason


def _build(layer: Callable[[Match], QuantisedLayer | str], graph: Graph, match: Match) -> Value:
    made = layer(match)
    assert isinstance(made, QuantisedLayer)
    return made.add(graph, match.root.name)
