"""Replaces decomposed operations with one: exporters write in small steps what ONNX has single operators for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import DType
from tunewright.ops.base import Array

from .. import value_facts
from ..pattern import Const, Match, OneOf, Op, Pattern, Rule, product, scalar

Build: TypeAlias = Callable[[Graph, Match], Value]


def _number(match: Match, name: str) -> float:
    return float(match.const(name).reshape(()))


def becomes(op: str, *inputs: str, **attrs: Any) -> Build:
    """A builder that adds ``op`` over captured values."""

    def build(graph: Graph, match: Match) -> Value:
        return graph.add(op, [match[name] for name in inputs or ("x",)], attrs).output

    return build


def keeps_rank(match: Match) -> str | None:
    """Refuses constants that add axes: scalars written as [1] could make a vector of a rank-0 x, unlike the new
    operation."""
    n = value_facts.rank(match["x"])
    if n is None:
        return f"the rank of {match['x']!r} is not known"
    return None if n == value_facts.rank(match.root.output) else "a constant adds axes to the result"


# -- activations -----------------------------------------------------------------------------------------------------

_SQRT2 = math.sqrt(2.0)
_ERF = OneOf(Op("Erf", Op("Div", "x", _SQRT2)), Op("Erf", Op("Mul", "x", 1 / _SQRT2)))
_CUBE = OneOf(Op("Pow", "x", 3.0), Op("Mul", "x", Op("Mul", "x", "x")))
_ROOT_2_PI = math.sqrt(2.0 / math.pi)
_CUBIC = OneOf(
    Op("Mul", _CUBE, 0.044715), product("x", Op("Mul", "x", "x"), 0.044715),
    Op("Mul", "x", Op("Mul", "x", Op("Mul", "x", 0.044715))),
)  # fmt: skip
_SQUARE = OneOf(Op("Mul", Op("Mul", "x", "x"), 0.044715), Op("Mul", "x", Op("Mul", "x", 0.044715)))
_INNER = OneOf(
    Op("Mul", Op("Add", "x", _CUBIC), _ROOT_2_PI), product("x", Op("Add", _SQUARE, 1.0), _ROOT_2_PI),
)  # fmt: skip
_GELU_TANH = product("x", Op("Add", Op("Tanh", _INNER), 1.0), 0.5)
_RAMP = Op("Clip", Op("Add", "x", 3.0), 0.0, 6.0)


def _swish(graph: Graph, match: Match) -> Value:
    alpha = _number(match, "alpha") if "alpha" in match else 1.0
    return graph.add("Swish", [match["x"]], {} if alpha == 1.0 else {"alpha": alpha}).output


def _is_sixth_half(node: Node) -> bool:
    alpha, beta = float(node.attrs.get("alpha", 0.2)), float(node.attrs.get("beta", 0.5))
    return abs(alpha - 1 / 6) < 1e-6 and abs(beta - 0.5) < 1e-6


_SIXTH = [Op("Div", _RAMP, 6.0), Op("Mul", _RAMP, 1 / 6)]

ACTIVATIONS = (
    Rule("gelu", product("x", Op("Add", _ERF, 1.0), 0.5), becomes("Gelu"), keeps_rank),
    Rule("gelu-tanh", _GELU_TANH, becomes("Gelu", approximate="tanh"), keeps_rank),
    Rule("swish", Op("Mul", "x", Op("Sigmoid", OneOf("x", Op("Mul", "x", scalar("alpha"))))), _swish, keeps_rank),
    Rule("hard-sigmoid", OneOf(*_SIXTH), becomes("HardSigmoid", alpha=1 / 6, beta=0.5), keeps_rank),
    Rule(
        "hard-swish",
        OneOf(
            Op("Mul", "x", Op("HardSigmoid", "x", where=_is_sixth_half)),
            Op("Div", Op("Mul", "x", _RAMP), 6.0),
            product("x", _RAMP, 1 / 6),
        ),
        becomes("HardSwish"),
        keeps_rank,
    ),
    Rule("softplus", Op("Log", Op("Add", Op("Exp", "x"), 1.0)), becomes("Softplus"), keeps_rank),
    Rule("mish", Op("Mul", "x", Op("Tanh", Op("Softplus", "x"))), becomes("Mish"), keeps_rank),
)

# -- normalisations --------------------------------------------------------------------------------------------------


def reduction(op: str, x: Pattern, axes: str = "axes", **options: Any) -> Op:
    """A reduction that keeps its axes."""
    return Op(op, x, Const(axes), where=lambda node: bool(node.attrs.get("keepdims", 1)), **options)


def _square(x: Pattern) -> OneOf:
    return OneOf(Op("Pow", x, 2.0), Op("Mul", x, x))


_CENTRED = Op("Sub", "x", reduction("ReduceMean", "x"), name="centred")
_VARIANCE = Op("Add", reduction("ReduceMean", _square(_CENTRED), "axes2"), scalar("epsilon"))
_MEAN_SQUARE = Op("Add", reduction("ReduceMean", _square("x")), scalar("epsilon"))


def _over_root(x: Pattern, square: Op) -> OneOf:
    """Patterns for x divided by a square root, in all its spellings."""
    root = OneOf(Op("Sqrt", square), Op("Pow", square, 0.5))
    return OneOf(
        Op("Div", x, root),
        Op("Mul", x, Op("Reciprocal", root)),
        Op("Mul", x, Op("Div", 1.0, root)),
        Op("Mul", x, Op("Pow", square, -0.5)),
    )


def _suffix(match: Match) -> tuple[int, list[int]] | str:
    """The first normalised axis and the sizes from there on, or why this is not a normalisation over the last axes."""
    dims, axes = value_facts.shape(match["x"]), value_facts.int_list(match["axes"])
    if dims is None:
        return f"the rank of {match['x']!r} is not known"
    assert axes is not None
    at = sorted(a % len(dims) for a in axes)
    if at != list(range(len(dims) - len(at), len(dims))) or not at:
        return f"axes {axes} are not the last ones"
    sizes = [d for d in dims[at[0] :] if isinstance(d, WHOLE)]
    return (at[0], sizes) if len(sizes) == len(at) else "the normalised size is not known"


def _check_norm(match: Match) -> str | None:
    if "axes2" in match and value_facts.int_list(match["axes2"]) != value_facts.int_list(match["axes"]):
        return "mean and variance are taken over different axes"
    found = _suffix(match)
    return found if isinstance(found, str) else keeps_rank(match)


def _norm(op: str) -> Build:
    """A builder of LayerNormalization or RMSNormalization with a scale of ones, which rule `*-scale` replaces."""

    def build(graph: Graph, match: Match) -> Value:
        found = _suffix(match)
        assert not isinstance(found, str) and match["x"].tensor is not None
        axis, sizes = found
        ones = graph.constant(np.ones(sizes, match["x"].tensor.dtype.numpy), "ones")
        attrs = {"axis": axis, "epsilon": _number(match, "epsilon")}
        return graph.add(op, [match["x"], ones], attrs).output

    return build


def _all_ones(array: Array) -> bool:
    return bool((array == 1).all())


def _check_parameter(match: Match) -> str | None:
    """Refuses a scale or bias that does not broadcast to the normalised shape."""
    sizes = match.const("ones").shape
    array = match.const("c")
    if array.dtype != match.const("ones").dtype:
        return f"the constant is {array.dtype}"
    dims = array.shape[-len(sizes) :] if array.ndim >= len(sizes) else (*[1] * (len(sizes) - array.ndim), *array.shape)
    extra = array.shape[: -len(sizes)] if array.ndim > len(sizes) else ()
    if any(d != 1 for d in extra) or any(d not in (1, s) for d, s in zip(dims, sizes, strict=True)):
        return f"the constant of shape {list(array.shape)} does not lie along the normalised axes"
    if array.ndim > (value_facts.rank(match["x"]) or 0):
        return "the constant adds axes to the result"
    return None


def _parameter(graph: Graph, match: Match) -> Value:
    sizes = match.const("ones").shape
    array = match.const("c")
    dims = (*[1] * (len(sizes) - array.ndim), *array.shape[max(0, array.ndim - len(sizes)) :])
    return graph.constant(np.ascontiguousarray(np.broadcast_to(array.reshape(dims), sizes)), match["c"].name)


def _with_scale(graph: Graph, match: Match) -> Value:
    node = match.node("norm")
    return graph.add(node.op, [match["x"], _parameter(graph, match)], node.attrs).output


def _with_bias(graph: Graph, match: Match) -> Value:
    node = match.node("norm")
    return graph.add(node.op, [match["x"], match["ones"], _parameter(graph, match)], node.attrs).output


# Exporters normalise half floats in single precision; kernels do so in any case.
_WIDENED = Op("Cast", "x", shared=True)
_AROUND = Op(
    "Cast",
    Op("LayerNormalization|RMSNormalization|GroupNormalization", _WIDENED, Const("scale"), name="norm", rest=True),
)


def _check_casts(match: Match) -> str | None:
    node, kind = match.node("norm"), value_facts.dtype(match["x"])
    if kind is None or kind is not value_facts.dtype(match.root.output) or kind not in (DType.FLOAT16, DType.BFLOAT16):
        return "input and output are not both float16 or both bfloat16"
    if value_facts.dtype(node.inputs[0]) is not DType.FLOAT32:
        return "it is not normalised in single precision"
    for value in node.inputs[1:]:
        if value is None or value.const is None:
            return "scale or shift are not constant"
        if not (value.const.astype(kind.numpy).astype(value.const.dtype) == value.const).all():
            return f"{kind} does not hold {value!r}"
    return None


def _narrow_norm(graph: Graph, match: Match) -> Value:
    node, kind = match.node("norm"), value_facts.dtype(match["x"])
    assert kind is not None
    given = [v for v in node.inputs[1:] if v is not None and v.const is not None]
    constants = [graph.constant(np.asarray(v.const).astype(kind.numpy), v.name) for v in given]
    return graph.add(node.op, [match["x"], *constants], node.attrs).output


NORMALISATIONS = (
    Rule("layer-norm", _over_root(_CENTRED, _VARIANCE), _norm("LayerNormalization"), _check_norm),
    Rule("rms-norm", _over_root("x", _MEAN_SQUARE), _norm("RMSNormalization"), _check_norm),
    Rule("norm-casts", _AROUND, _narrow_norm, _check_casts),
    Rule(
        "norm-scale",
        Op("Mul", Op("LayerNormalization|RMSNormalization", "x", Const("ones", _all_ones), name="norm"), Const("c")),
        _with_scale,
        _check_parameter,
    ),
    Rule(
        "norm-bias",
        Op("Add", Op("LayerNormalization", "x", Const("ones"), name="norm"), Const("c")),
        _with_bias,
        _check_parameter,
    ),
)


# -- group normalisation ---------------------------------------------------------------------------------------------


def _check_group(match: Match) -> str | None:
    dims, inner = value_facts.shape(match["x"]), value_facts.shape(match.node("instance").inputs[0])
    if dims is None or inner is None or len(dims) < 3 or len(inner) < 3:
        return "the shapes are not known"
    groups, channels = inner[1], dims[1]
    if not value_facts.same_shape(match["x"], match.root.output):
        return "the result has not the operand's shape"
    if not isinstance(groups, WHOLE) or not isinstance(channels, WHOLE) or inner[0] != dims[0] or channels % groups:
        return f"{list(inner)} is not a grouping of the channels of {list(dims)}"
    if not (_all_ones(match.const("scale")) and not match.const("bias").any()):
        return "the groups have a scale or bias of their own"
    return None


def _group_norm(graph: Graph, match: Match) -> Value:
    x, node = match["x"], match.node("instance")
    assert x.tensor is not None and x.tensor.shape is not None
    channels, dtype = x.tensor.shape[1], x.tensor.dtype.numpy
    assert isinstance(channels, WHOLE)
    ones = graph.constant(np.ones(channels, dtype), "ones")
    zeros = graph.constant(np.zeros(channels, dtype), "zeros")
    attrs = {"num_groups": int(match.const("scale").size), "epsilon": float(node.attrs.get("epsilon", 1e-5))}
    return graph.add("GroupNormalization", [x, ones, zeros], attrs).output


def _check_group_affine(match: Match) -> str | None:
    n, size = value_facts.rank(match["x"]), match.const("scale").size
    if n is None or value_facts.per_axis(match.const("c"), n, 1, size) is None:
        return f"the constant of shape {list(match.const('c').shape)} is not one value per channel of {size}"
    return None


def _group_affine(graph: Graph, match: Match) -> Value:
    node, n = match.node("norm"), value_facts.rank(match["x"]) or 3
    scale, bias = match.const("scale"), match.const("bias")
    vector = value_facts.per_axis(match.const("c"), n, 1, scale.size)
    assert vector is not None
    wide_scale, wide_bias = scale.astype(np.float64), bias.astype(np.float64)
    if match.root.op == "Mul":
        wide_scale, wide_bias = wide_scale * vector, wide_bias * vector
    else:
        wide_bias = wide_bias + vector
    parts = [graph.constant(p.astype(scale.dtype), k) for p, k in ((wide_scale, "scale"), (wide_bias, "bias"))]
    return graph.add("GroupNormalization", [match["x"], *parts], node.attrs).output


_GROUPED = Op("InstanceNormalization", Op("Reshape", "x", rest=True), Const("scale"), Const("bias"), name="instance")
_GROUP = Op("GroupNormalization", "x", Const("scale"), Const("bias"), name="norm")

GROUPS = (
    Rule("group-norm", Op("Reshape", _GROUPED, rest=True), _group_norm, _check_group),
    Rule("group-norm-affine", Op("Mul|Add", _GROUP, Const("c")), _group_affine, _check_group_affine),
)

# -- softmax and attention -------------------------------------------------------------------------------------------

_EXP = Op("Exp", OneOf(Op("Sub", "x", reduction("ReduceMax", "x", "axes2")), "x"), name="exp")


def _check_softmax(match: Match) -> str | None:
    axes = value_facts.int_list(match["axes"])
    if axes is None or len(axes) != 1:
        return f"it sums over axes {axes}"
    if "axes2" in match and value_facts.int_list(match["axes2"]) != axes:
        return "maximum and sum are taken over different axes"
    return keeps_rank(match)


def _softmax(graph: Graph, match: Match) -> Value:
    (axis,) = value_facts.int_list(match["axes"]) or [-1]
    return graph.add("Softmax", [match["x"]], {"axis": axis}).output


def _scale(match: Match) -> float:
    scale = 1.0
    for name in ("q", "k"):
        scale *= _number(match, f"{name}*") if f"{name}*" in match else 1.0
        scale /= _number(match, f"{name}/") if f"{name}/" in match else 1.0
    return scale


# Exporters multiply queries and keys with a root of the scale, which may become constant only in a late pass.
_SCALED_QUERIES = OneOf(Op("Mul", "q", scalar("q*")), Op("Div", "q", scalar("q/")))
_SCALED = OneOf(Op("Mul", "k", scalar("k*")), Op("Div", "k", scalar("k/")))
_SCALED_KEYS = OneOf(Op("Transpose", _SCALED, name="turn"), _SCALED)
_SCALED_ATTENTION = OneOf(
    Op("Attention", _SCALED_QUERIES, OneOf(_SCALED_KEYS, "k"), "v", rest=True, name="attention"),
    Op("Attention", "q", _SCALED_KEYS, "v", rest=True, name="attention"),
)


def _check_scaled(match: Match) -> str | None:
    node, scale = match.node("attention"), _scale(match)
    if any(v is not None for v in node.inputs[4:]):
        return "past keys are not multiplied"
    if "scale" not in node.attrs or not node.attrs["scale"]:
        return "its scale follows from the size of heads"
    if not (math.isfinite(scale) and scale):
        return f"the scale would be {scale}"
    if any(value_facts.rank(match[name]) != value_facts.rank(node.output) for name in ("q", "k")):
        return "a constant adds axes to its operand"
    return None


def _scaled(graph: Graph, match: Match) -> Value:
    node, keys = match.node("attention"), match["k"]
    if "turn" in match:
        keys = graph.add("Transpose", [keys], match.node("turn").attrs).output
    attrs = {**node.attrs, "scale": float(node.attrs["scale"]) * _scale(match)}
    return graph.add("Attention", [match["q"], keys, *node.inputs[2:]], attrs).output


SOFTMAX = (Rule("softmax", Op("Div", _EXP, reduction("ReduceSum", _EXP)), _softmax, _check_softmax),)
ATTENTION = (Rule("attention-scale", _SCALED_ATTENTION, _scaled, _check_scaled),)

RULES = (*ACTIVATIONS, *NORMALISATIONS, *GROUPS, *ATTENTION)
