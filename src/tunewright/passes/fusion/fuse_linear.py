"""Folds scales and shifts per channel into the weights and bias of the linear operation next to them.

BatchNormalization, ScaleShift, mean and scale are all y = x * scale + shift with constants per channel. Arithmetic is
done in float64 and rounded once. A shift in front of a padded convolution stays: it must not reach the padding's zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.weight_memory import lasting_array
from tunewright.ops.base import Array

from .. import value_facts
from ..pattern import Const, Match, OneOf, Op, Rule

LINEAR = "Conv|ConvTranspose|Gemm|MatMul"


def _is_float(array: Array) -> bool:
    return "float" in array.dtype.name


CONSTANT = Const("c", test=_is_float)
WEIGHTS = Const("w", test=_is_float)


def affine(node: Node, constant: Value | None, flipped: bool) -> tuple[Array | None, Array | None]:
    """(scale, shift) of one node in float64, None where it has none; ``flipped``: the constant is the first operand."""
    if node.op == "BatchNormalization":
        gamma, beta, mean, var = (np.asarray(v.const, np.float64) for v in node.inputs[1:5])  # type: ignore[union-attr]
        scale = gamma / np.sqrt(var + float(node.attrs.get("epsilon", 1e-5)))
        return scale, beta - mean * scale
    assert constant is not None and constant.const is not None
    c = constant.const.astype(np.float64)
    if node.op == "Sub":
        return (np.asarray(-1.0), c) if flipped else (None, -c)
    if node.op == "Add":
        return None, c
    return (1.0 / c if node.op == "Div" else c), None


def _batch_norm(node: Node) -> bool:
    return not node.attrs.get("training_mode", 0)


def _norm(x: Op | str, **options: Any) -> Op:
    tests = [Const(test=_is_float)] * 4
    return Op("BatchNormalization", x, *tests, where=_batch_norm, **options)


# -- behind a linear operation ---------------------------------------------------------------------------------------


def _channels(node: Node, w: Array) -> tuple[int | None, int, int]:
    """The rank of the output (None: unknown), its channel axis, and the number of channels."""
    if node.op == "Conv":
        return w.ndim, 1, w.shape[0]
    if node.op == "ConvTranspose":
        return w.ndim, 1, w.shape[1] * int(node.attrs.get("group", 1))
    if node.op == "Gemm":
        return 2, 1, w.shape[0 if node.attrs.get("transB", 0) else 1]
    n = value_facts.rank(node.output)
    return n, (n or 0) - 1, w.shape[-1]


def _vectors(match: Match) -> tuple[Array | None, Array | None] | str:
    """Scale and shift over the channels of the linear operation in front, or why they cannot be folded."""
    linear, w = match.node("linear"), match.const("w")
    if w.ndim < 2:
        return "the weights are a vector"
    n, at, size = _channels(linear, w)
    if n is None:
        return "the rank of the result is not known"
    node = match.root
    constant = match.values.get("c")
    found: list[Array | None] = []
    for part in affine(node, constant, node.inputs[0] is constant):
        if part is None:
            found.append(None)
            continue
        if node.op == "BatchNormalization":
            part = part.reshape(-1, *[1] * (n - 2))
        vector = value_facts.per_axis(part, n, at, size)
        if vector is None:
            return f"the constant of shape {list(part.shape)} is not one value per channel of {size}"
        found.append(vector)
    return found[0], found[1]


def _check_after(match: Match) -> str | None:
    linear = match.node("linear")
    found = _vectors(match)
    if isinstance(found, str):
        return found
    if found[0] is not None and not np.isfinite(found[0]).all():
        return "the scale is not finite"
    if linear.op == "MatMul":
        return "a MatMul has no bias" if found[0] is None else None
    bias = linear.input(2)
    return "the bias is not constant" if bias is not None and bias.const is None else None


def _along(vector: Array, at: int, n: int) -> Array:
    """A vector shaped to broadcast over axis ``at`` of a rank-n array."""
    return vector.reshape([-1 if k == at else 1 for k in range(n)])


def _times(w: Array, factors: Array) -> Array:
    """The product in float64, rounded to the type of the weights. It never stores all weights in float64, to save
    memory."""
    made = lasting_array(w.shape, w.dtype) if w.flags.c_contiguous else np.empty_like(w)
    np.multiply(w, factors, out=made, dtype=np.float64, casting="unsafe")
    return made


def _scale_outputs(node: Node, w: Array, scale: Array) -> Array:
    if node.op == "Conv":
        return _times(w, _along(scale, 0, w.ndim))
    if node.op == "ConvTranspose":  # weights are (inputs, outputs per group, ...)
        group = int(node.attrs.get("group", 1))
        split = w.reshape(group, w.shape[0] // group, *w.shape[1:])
        factors = scale.reshape(group, 1, w.shape[1], *[1] * (w.ndim - 2))
        return _times(split, factors).reshape(w.shape)
    at = 0 if node.op == "Gemm" and node.attrs.get("transB", 0) else w.ndim - 1
    return _times(w, _along(scale, at, w.ndim))


def _with_weights(graph: Graph, node: Node, x: Value, w: Array, bias: Array | None, dtype: np.dtype) -> Value:
    """Adds the linear operation with other weights and bias; the bias already contains a Gemm's beta."""
    names = [v.name if v is not None else f"{node.name}_bias" for v in [*node.inputs, None][1:3]]
    inputs: list[Value | None] = [x, graph.constant(w.astype(dtype, copy=False), names[0])]
    if bias is not None:
        inputs.append(graph.constant(bias.astype(dtype), names[1]))
    attrs = {k: v for k, v in node.attrs.items() if not (node.op == "Gemm" and k == "beta")}
    return graph.add(node.op, inputs, attrs, name=node.name).output


def _bias(node: Node) -> Array | None:
    """The bias in float64, multiplied with beta for a Gemm."""
    given = node.input(2) if node.op != "MatMul" else None
    if given is None or given.const is None:
        return None
    return given.const.astype(np.float64) * float(node.attrs.get("beta", 1.0) if node.op == "Gemm" else 1.0)


def _fold_after(graph: Graph, match: Match) -> Value:
    linear, w = match.node("linear"), match.const("w")
    found = _vectors(match)
    assert not isinstance(found, str)
    scale, shift = found
    bias = _bias(linear)
    if scale is not None and bias is not None:
        bias = bias * scale
    if shift is not None and linear.op != "MatMul":
        bias = shift if bias is None else bias + shift
    weights = w if scale is None else _scale_outputs(linear, w, scale)
    result = _with_weights(graph, linear, match["a"], weights, bias, w.dtype)
    if shift is not None and linear.op == "MatMul":
        return graph.add("Add", [result, graph.constant(shift.astype(w.dtype), f"{linear.name}_bias")]).output
    return result


# -- in front of a linear operation ----------------------------------------------------------------------------------


def _operand_channels(node: Node, w: Array, x: Value) -> tuple[int | None, int, int]:
    """The rank, channel axis and number of channels of the linear operation's input."""
    if node.op == "Conv":
        return w.ndim, 1, w.shape[1] * int(node.attrs.get("group", 1))
    if node.op == "ConvTranspose":
        return w.ndim, 1, w.shape[0]
    if node.op == "Gemm":
        return 2, 1, w.shape[1 if node.attrs.get("transB", 0) else 0]
    n = value_facts.rank(x)
    return n, (n or 0) - 1, w.shape[-2]


def _before(match: Match) -> tuple[Array | None, Array | None] | str:
    linear, w, x = match.root, match.const("w"), match["x"]
    if w.ndim < 2:
        return "the weights are a vector"
    n, at, size = _operand_channels(linear, w, x)
    dims = value_facts.shape(x)
    if n is None or dims is None:
        return f"the shape of {x!r} is not known"
    if len(dims) != n or dims[at] != size:
        return f"{x!r} has not the {size} channels that the operation reads"
    inner = match.node("affine")
    found: list[Array | None] = []
    for part in affine(inner, match["c"], inner.inputs[0] is match["c"]):
        vector = None if part is None else value_facts.per_axis(part, n, at, size)
        if part is not None and vector is None:
            return f"the constant of shape {list(part.shape)} is not one value per channel of {size}"
        found.append(vector)
    return found[0], found[1]


def _check_before(match: Match) -> str | None:
    linear = match.root
    found = _before(match)
    if isinstance(found, str):
        return found
    if found[0] is not None and not np.isfinite(found[0]).all():
        return "the scale is not finite"
    if linear.op == "Gemm" and linear.attrs.get("transA", 0):
        return "the first operand is transposed"
    if found[1] is None:
        return None
    if linear.op == "MatMul":
        return "a MatMul has no bias"
    if linear.op == "ConvTranspose":
        return "at the border a transposed convolution reads fewer elements, so the shift is not the same everywhere"
    if any(linear.attrs.get("pads", ())) or linear.attrs.get("auto_pad", "NOTSET").startswith("SAME"):
        return "the convolution pads with zeros, which the shift must not reach"
    bias = linear.input(2)
    return "the bias is not constant" if bias is not None and bias.const is None else None


def _scale_inputs(node: Node, w: Array, scale: Array) -> Array:
    wide = w.astype(np.float64)
    if node.op == "Conv":  # weights are (outputs, inputs per group, ...)
        group = int(node.attrs.get("group", 1))
        split = wide.reshape(group, w.shape[0] // group, *w.shape[1:])
        return (split * scale.reshape(group, 1, w.shape[1], *[1] * (w.ndim - 2))).reshape(w.shape)
    if node.op == "ConvTranspose":
        return wide * _along(scale, 0, w.ndim)
    at = 1 if node.op == "Gemm" and node.attrs.get("transB", 0) else w.ndim - 2
    return wide * _along(scale, at, w.ndim)


def _reach(node: Node, w: Array, shift: Array) -> Array:
    """The sum that a shift of the operand adds to each channel of the result."""
    shifted = _scale_inputs(node, w, shift)
    if node.op == "Conv":
        total: Array = shifted.reshape(w.shape[0], -1).sum(axis=1)
        return total
    total = shifted.sum(axis=1 if node.attrs.get("transB", 0) else 0)
    return total * float(node.attrs.get("alpha", 1.0))


def _fold_before(graph: Graph, match: Match) -> Value:
    linear, w = match.root, match.const("w")
    found = _before(match)
    assert not isinstance(found, str)
    scale, shift = found
    weights = w if scale is None else _scale_inputs(linear, w, scale)
    given = linear.input(2) if linear.op != "MatMul" else None
    if shift is None:  # Without a shift the bias does not change: it may be any value, even a computed one.
        new = graph.constant(weights.astype(w.dtype), match["w"].name)
        inputs = [match["x"], new, *([given] if given is not None else [])]
        return graph.add(linear.op, inputs, linear.attrs, name=linear.name).output
    bias = _bias(linear)
    # The shift follows the scale (x * scale + shift), so that it is multiplied with the original weights.
    reach = _reach(linear, w, shift)
    return _with_weights(graph, linear, match["x"], weights, reach if bias is None else bias + reach, w.dtype)


# -- without a linear operation ----------------------------------------------------------------------------------------


def _rank_known(match: Match) -> str | None:
    return None if value_facts.rank(match["x"]) is not None else "the rank of the operand is not known"


def _to_scale_shift(graph: Graph, match: Match) -> Value:
    node, n = match.root, value_facts.rank(match["x"]) or 2
    dtype = match["x"].tensor.dtype.numpy  # type: ignore[union-attr]
    parts = [part.astype(dtype).reshape(-1, *[1] * (n - 2)) for part in affine(node, None, False) if part is not None]
    scale, shift = (graph.constant(p, f"{node.name}_{k}") for p, k in zip(parts, ("scale", "shift"), strict=True))
    scaled = graph.add("Mul", [match["x"], scale], name=node.name).output
    return graph.add("Add", [scaled, shift], name=node.name).output


def _merge(graph: Graph, match: Match) -> Value:
    a, b = match.const("a"), match.const("c")
    wide = np.multiply if match.root.op == "Mul" else np.add
    merged = wide(a.astype(np.float64), b.astype(np.float64)).astype(b.dtype)
    return graph.add(match.root.op, [match["x"], graph.constant(merged, match["c"].name)]).output


def _merge_finite(match: Match) -> str | None:
    a, c = (match.const(k).astype(np.float64) for k in ("a", "c"))
    with np.errstate(all="ignore"):
        merged = (a * c if match.root.op == "Mul" else a + c).astype(match.const("c").dtype)
    lost = bool(((merged == 0) & (a != 0) & (c != 0)).any()) and match.root.op == "Mul"
    return "the merged constant leaves the range of its type" if lost or not np.isfinite(merged).all() else None


def _around(x: Op | str, name: str) -> list[Op]:
    """Patterns for scales and shifts of x by a constant."""
    return [Op("Mul|Add|Sub|Div", x, CONSTANT, name=name), Op("Sub", CONSTANT, x, name=name)]


_LINEAR = Op(LINEAR, "a", WEIGHTS, rest=True, name="linear")

RULES = (
    Rule("linear-affine", OneOf(_norm(_LINEAR), *_around(_LINEAR, "")), _fold_after, _check_after),
    Rule("affine-linear", Op(LINEAR, OneOf(*_around("x", "affine")), WEIGHTS, rest=True), _fold_before, _check_before),
    Rule("batch-norm", _norm("x"), _to_scale_shift, _rank_known),
    Rule("merge-scales", Op("Mul", Op("Mul", "x", Const("a", _is_float)), CONSTANT), _merge, _merge_finite),
    Rule("merge-shifts", Op("Add", Op("Add", "x", Const("a", _is_float)), CONSTANT), _merge, _merge_finite),
)
