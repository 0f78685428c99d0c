"""Removes or merges operations that change nothing, alone or together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.symbolic import WHOLE, same, sym_array

from .. import value_facts
from ..pattern import Const, Match, OneOf, Op, Rule

VIEWS = "Reshape|Squeeze|Unsqueeze|Flatten"


def _x(graph: Graph, match: Match) -> Value:
    """The rewrite of an identity: its operand."""
    return match["x"]


def _may_keep_shape(node: Node) -> bool:
    """Whether the shape may stay the same, as far as it is known. A Slice must not run backwards."""
    x, out = value_facts.shape(node.input(0)), value_facts.shape(node.output)
    if x is None or out is None or len(x) != len(out):
        return False
    steps = value_facts.int_list(node.input(4))
    if node.op == "Slice" and node.input(4) is not None and (steps is None or min(steps, default=1) < 1):
        return False
    return all(a == b or not (isinstance(a, WHOLE) and isinstance(b, WHOLE)) for a, b in zip(x, out, strict=True))


def _unchanged(match: Match) -> str | None:
    """Refuses an operand whose type may differ from that of the result."""
    x, out = match["x"], match.root.output
    return None if value_facts.same_type(x, out) else f"{out!r} may differ from {x!r}"


def _all(number: float) -> Callable[[np.ndarray], bool]:
    def test(array: np.ndarray) -> bool:
        return array.dtype.kind in "fiu" and array.size > 0 and bool(np.all(array == number))

    return test


ZERO, ONE = Const(test=_all(0.0)), Const(test=_all(1.0))


def _neutral(match: Match) -> str | None:
    """Refuses a constant that may enlarge x in x + 0. A scalar cannot, unless x has no axes."""
    if value_facts.same_type(match["x"], match.root.output):
        return None
    n = value_facts.rank(match["x"])
    constant = next(v for v in reversed(match.root.inputs) if v is not None and v.const is not None)
    if n is not None and value_facts.is_scalar(constant) and (value_facts.rank(constant) or 0) <= n:
        return None
    return f"{constant!r} may enlarge {match['x']!r}"


def _dropout(match: Match) -> str | None:
    training = match.root.input(2)
    if training is None or (training.const is not None and not training.const.any()):
        return None
    return "it may run in training mode"


def _same_dtype(node: Node) -> bool:
    return value_facts.dtype(node.input(0)) == value_facts.dtype(node.output)


def _known_dtype(match: Match) -> str | None:
    return None if value_facts.dtype(match["x"]) is not None else "the operand's type is not known"


def _permutation(node: Node) -> list[int] | None:
    given = node.attrs.get("perm")
    if given is not None:
        return [int(p) for p in given]
    n = value_facts.rank(node.input(0))
    return None if n is None else list(range(n))[::-1]


def _keeps_order(node: Node) -> bool:
    perm = _permutation(node)
    return perm is None or perm == sorted(perm)


def _known_rank(match: Match) -> str | None:
    return None if _permutation(match.root) is not None else "the rank is not known"


def _transpose_pair(match: Match) -> str | None:
    unknown = _permutation(match.root) is None or _permutation(match.node("inner")) is None
    return "the rank is not known" if unknown else None


def _compose(graph: Graph, match: Match) -> Value:
    outer, inner = _permutation(match.root), _permutation(match.node("inner"))
    assert outer is not None and inner is not None
    return graph.add("Transpose", [match["x"]], {"perm": tuple(inner[p] for p in outer)}).output


def _axes_apart(match: Match) -> list[int] | str:
    """The permutation that replaces Reshape, Transpose and Reshape, or why there is none.

    The first axis between the Reshapes stands for several axes.
    """
    perm, turned = _permutation(match.node("turn")), match.node("turn").inputs[0]
    outer, inner, out = value_facts.shape(match["x"]), value_facts.shape(turned), value_facts.shape(match.root.output)
    if perm is None or outer is None or inner is None or out is None:
        return "the shapes are not known"
    last = len(inner) - 1
    kept = len(out) - last
    if not last or perm[0] != 0 or kept < 1 or len(outer) <= last:
        return "the first axis is moved, or axes get lost"
    sizes = [*zip(outer[-last:], inner[1:], strict=True), *zip(out[kept:], (inner[p] for p in perm[1:]), strict=True)]
    if any(a is None or not same([a], [b]) for a, b in sizes):
        return f"{match.root.output!r} may have other axes than {match['x']!r}"
    if len(outer) != len(out) and not all(isinstance(d, WHOLE) for d in (*out[:kept], *outer[-last:])):
        return "the first axes are not known"
    if len(outer) == len(out) and not (None not in outer[:kept] and same(outer[:kept], out[:kept])):
        return f"the first axes of {match.root.output!r} may differ from those of {match['x']!r}"
    return [*range(kept), *(kept - 1 + p for p in perm[1:])]


def _check_apart(match: Match) -> str | None:
    found = _axes_apart(match)
    return found if isinstance(found, str) else None


def _turn_apart(graph: Graph, match: Match) -> Value:
    perm, x = _axes_apart(match), match["x"]
    outer, out = value_facts.shape(x), value_facts.shape(match.root.output)
    assert outer is not None and out is not None and not isinstance(perm, str)
    if len(outer) != len(out):
        last = len(value_facts.shape(match.node("turn").output) or ()) - 1
        dims = [*out[: len(out) - last], *outer[-last:]]
        x = graph.add("Reshape", [x, graph.constant(sym_array(dims), "shape")], {"allowzero": 1}).output
    return graph.add("Transpose", [x], {"perm": tuple(perm)}).output


def _moves_only_ones(node: Node) -> bool:
    perm, dims = _permutation(node), value_facts.shape(node.input(0))
    moved = [p for p in perm if dims[p] != 1] if perm is not None and dims is not None else [1, 0]
    return moved == sorted(moved)


def _known_target(match: Match) -> str | None:
    return None if _target(match.root.output) is not None else "more than one dimension is open"


def _target(value: Value) -> list[int] | None:
    """A shape for a Reshape to the value's shape, or None: at most one dimension may be open."""
    dims = value_facts.shape(value)
    if dims is None or sum(not isinstance(d, WHOLE) for d in dims) > 1:
        return None
    target = [d if isinstance(d, WHOLE) else -1 for d in dims]
    return None if 0 in target else target


def _reshape(graph: Graph, match: Match) -> Value:
    target = _target(match.root.output)
    if target is None:  # The outer Reshape's shape suffices: it does not refer to the shape of the removed value.
        return graph.add("Reshape", [match["x"], match.root.inputs[1]], match.root.attrs).output
    return graph.add("Reshape", [match["x"], graph.constant(sym_array(target), "shape")]).output


def _view_chain(match: Match) -> str | None:
    if _target(match.root.output) is not None:
        return None
    if match.root.op == "Reshape":
        wanted = match.root.inputs[1]
        dims = value_facts.int_list(wanted)
        if dims is not None and 0 not in dims:
            return None
    return "the resulting shape has more than one open dimension"


def _lossless(match: Match) -> str | None:
    source, middle = value_facts.dtype(match["x"]), value_facts.dtype(match["inner"])
    if source is None or middle is None:
        return "the operand's type is not known"
    if np.can_cast(source.numpy, middle.numpy, "safe") and source.numpy.kind in "fiub" and middle.numpy.kind in "fiu":
        return None
    return f"{middle} does not hold every {source}"


def _cast_once(graph: Graph, match: Match) -> Value:
    return graph.add("Cast", [match["x"]], match.root.attrs).output


def _cast_to(graph: Graph, match: Match) -> Value:
    dtype = value_facts.dtype(match["like"])
    assert dtype is not None
    return graph.add("Cast", [match["x"]], {**match.root.attrs, "to": dtype.onnx_code}).output


def _known_like(match: Match) -> str | None:
    return None if value_facts.dtype(match["like"]) is not None else "the type to cast to is not known"


def _resizes_nothing(node: Node) -> bool:
    """Whether a Resize changes nothing: every scale is one, or the sizes are those of the input, and no region is
    selected."""
    if node.attrs.get("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        return False
    scales, sizes = node.input(2), node.input(3)
    if scales is not None and scales.const is not None and scales.const.size:
        return bool(np.all(scales.const == 1))
    return sizes is not None and value_facts.same_type(node.input(0), node.output)


def _min(graph: Graph, match: Match) -> Value:
    return graph.add("Min", [match["x"], match["high"]]).output


def _same_op(match: Match) -> str | None:
    return None if match.root.op == match.node("inner").op else "the operations differ"


IDEMPOTENT = "Relu|Abs|Ceil|Floor|Round|Sign"

RULES = (
    Rule("identity", Op("Identity", "x"), _x),
    Rule("dropout", Op("Dropout", "x", rest=True), _x, _dropout),
    Rule("add-zero", OneOf(Op("Add|Sum", "x", ZERO), Op("Sub", "x", ZERO)), _x, _neutral),
    Rule("mul-one", OneOf(Op("Mul", "x", ONE), Op("Div|Pow", "x", ONE)), _x, _neutral),
    Rule("cast-same", Op("Cast", "x", where=_same_dtype), _x, _known_dtype),
    Rule("cast-like", Op("CastLike", "x", "like"), _cast_to, _known_like),
    Rule("cast-cast", Op("Cast", Op("Cast", "x", name="inner", shared=True)), _cast_once, _lossless),
    Rule("same-shape", Op(f"{VIEWS}|Expand|Slice", "x", rest=True, where=_may_keep_shape), _x, _unchanged),
    Rule("resize-nothing", Op("Resize", "x", rest=True, where=_resizes_nothing), _x),
    Rule("tile-once", Op("Tile", "x", Const(test=_all(1))), _x),
    Rule("pad-nothing", Op("Pad", "x", Const(test=_all(0)), rest=True), _x),
    Rule("single-input", Op("Concat|Sum|Max|Min|Mean", "x"), _x),
    Rule("clip-nothing", Op("Clip", "x"), _x),
    Rule("clip-to-min", Op("Clip", "x", None, "high"), _min),
    Rule("double-inverse", OneOf(Op("Neg", Op("Neg", "x", shared=True)), Op("Not", Op("Not", "x", shared=True))), _x),
    Rule(
        "idempotent",
        Op(IDEMPOTENT, Op(IDEMPOTENT, "x", name="inner", shared=True)),
        lambda graph, match: match["inner"],
        _same_op,
    ),
    Rule("transpose-identity", Op("Transpose", "x", where=_keeps_order), _x, _known_rank),
    Rule("transpose-pair", Op("Transpose", Op("Transpose", "x", name="inner", shared=True)), _compose, _transpose_pair),
    Rule(
        "transpose-apart",
        Op(VIEWS, Op("Transpose", Op(VIEWS, "x", rest=True, shared=True), name="turn", shared=True), rest=True),
        _turn_apart,
        _check_apart,
    ),
    Rule("transpose-to-reshape", Op("Transpose", "x", where=_moves_only_ones), _reshape, _known_target),
    Rule("view-chain", Op(VIEWS, Op(VIEWS, "x", shared=True, rest=True), rest=True), _reshape, _view_chain),
)
