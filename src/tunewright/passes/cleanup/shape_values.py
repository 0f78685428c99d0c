"""Shape arithmetic with open dimensions: the elements of small integer vectors, as far as types tell.

Exporters compute the target of a Reshape from the shapes of other tensors. Once every dimension is known, folding
removes that. Before, `evaluate` finds which elements are numbers and which are named dimensions. Then a Reshape can get
a constant target, and the names reach the types behind it.
"""

from __future__ import annotations

import numpy as np

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.symbolic import WHOLE, sym_array
from tunewright.ir.types import Dim, DType

from .. import value_facts
from ..pattern import Match, Op, Rule

#: Longer vectors are not shapes, and deeper expressions are not followed.
LONGEST, DEEPEST = 16, 24

#: operations that keep the elements of a vector in order
_SAME = frozenset({"Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape", "Flatten"})
_PICKS = "Gather|Slice|Concat|Cast|Squeeze|Unsqueeze|Reshape|Shape"


def evaluate(value: Value | None, depth: int = 0) -> list[Dim] | None:
    """The elements of an integer vector or scalar: numbers, names, or None for an unknown element."""
    if value is None or depth > DEEPEST or value_facts.dtype(value) not in (DType.INT64, DType.INT32):
        return None
    if value.const is not None:
        return [int(i) for i in value.const.reshape(-1)] if value.const.size <= LONGEST else None
    node = value.producer
    if node is None or node.epilogue or not node.inputs:
        return None
    if node.op == "Shape":
        dims = value_facts.shape(node.inputs[0])
        end = node.attrs.get("end")
        return None if dims is None else list(dims[int(node.attrs.get("start", 0)) : None if end is None else int(end)])
    if node.op == "Concat":
        parts = [evaluate(v, depth + 1) for v in node.inputs]
        return [d for p in parts if p is not None for d in p] if all(p is not None for p in parts) else None
    vector = evaluate(node.inputs[0], depth + 1)
    if vector is None or node.op in _SAME:
        return vector
    if node.op == "Gather" and value_facts.rank(node.inputs[0]) == 1:
        index = value_facts.int_list(node.inputs[1])
        inside = index is not None and all(-len(vector) <= i < len(vector) for i in index)
        return [vector[i] for i in index or ()] if inside else None
    return _slice(node, vector) if node.op == "Slice" and value_facts.rank(node.inputs[0]) == 1 else None


def _slice(node: Node, vector: list[Dim]) -> list[Dim] | None:
    given = [value_facts.int_list(v) for v in node.inputs[1:]]
    if any(g is None or len(g) != 1 for g, v in zip(given, node.inputs[1:], strict=True) if v is not None):
        return None
    start, end = given[0], given[1]
    step = given[3] if len(given) > 3 and given[3] is not None else [1]
    return None if start is None or end is None else vector[slice(start[0], end[0], step[0])]


def _holds_shape(node: Node) -> bool:
    n = value_facts.rank(node.output)
    return n is not None and n <= 1 and evaluate(node.output) is not None


def _all_known(match: Match) -> str | None:
    vector = evaluate(match.root.output) or [None]
    return None if all(isinstance(d, int) for d in vector) else "one of the dimensions is open"


def _constant(graph: Graph, match: Match) -> Value:
    out = match.root.output
    vector = evaluate(out)
    assert vector is not None and out.tensor is not None and out.tensor.shape is not None
    array = np.asarray(vector, out.tensor.dtype.numpy)
    return graph.constant(array.reshape(()) if out.tensor.shape == () else array, out.name)


def _open_target(node: Node) -> bool:
    shape = node.input(1)
    return shape is not None and shape.const is None and not node.attrs.get("allowzero", 0)


def _target(match: Match) -> list[int] | str:
    """A constant target with numbers, 0 where x has the same dimension in the same place, and at most one -1."""
    vector, dims = evaluate(match["shape"]), value_facts.shape(match["x"])
    if vector is None:
        return "nothing is known of the target shape"
    target: list[int] = []
    for k, d in enumerate(vector):
        if isinstance(d, WHOLE):
            target.append(d)
        elif isinstance(d, str) and dims is not None and k < len(dims) and dims[k] == d:
            target.append(0)
        else:
            target.append(-1)
    return target if target.count(-1) <= 1 else "more than one dimension of the target is open"


def _check_target(match: Match) -> str | None:
    found = _target(match)
    return found if isinstance(found, str) else None


def _reshape(graph: Graph, match: Match) -> Value:
    target = sym_array(_target(match))
    return graph.add("Reshape", [match["x"], graph.constant(target, "shape")]).output


def _own_shape(match: Match) -> str | None:
    vector, dims = evaluate(match["shape"]), value_facts.shape(match["x"])
    if vector is not None and dims is not None and None not in dims and vector == list(dims):
        return None
    return f"the target may not be the shape of {match['x']!r}"


RULES = (
    Rule("known-dimensions", Op(_PICKS, rest=True, where=_holds_shape), _constant, _all_known),
    Rule("reshape-target", Op("Reshape", "x", "shape", where=_open_target), _reshape, _check_target),
    Rule("expand-to-itself", Op("Expand", "x", "shape"), lambda graph, match: match["x"], _own_shape),
)
