"""Rules for attention that need known shapes: the shape arithmetic of exporters often hides the pattern before.

`recognise` finds attention where dimensions, or at least their names, are known. Otherwise fusion has already put scale
and mask into the product of queries and keys when concrete shapes arrive. `ScoresApart` writes them out again, so that
the same rule can match. `HEADS` then lets an attention read heads where projections leave them, and saves transposes.
"""

from __future__ import annotations

from typing import Any

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.symbolic import WHOLE, same, sym_array
from tunewright.ir.types import Dim
from tunewright.ops import lookup
from tunewright.ops.infer import infer_node

from .. import value_facts
from ..base import Context
from ..pattern import Match, OneOf, Op, Rule

#: operations on scores in front of a softmax, and on weights behind it
_STEPS = frozenset({"Add", "Sub", "Mul", "Div", "Where", "Cast", "Tanh", "IsNaN"})
_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
_MAINS = frozenset({"MatMul"}) | _STEPS | _VIEWS
#: the most operations between a softmax and the product of queries and keys
_DEEPEST = 6


class ScoresApart:
    """Writes out epilogues between a product of activations and its softmax; fusion later restores the unused ones."""

    name = "scores-apart"

    def run(self, graph: Graph, context: Context) -> bool:
        before = len(graph)
        for node in graph.nodes:
            if node.op == "Softmax" and _leads_to_product(node.output, _DEEPEST):
                self._apart(graph, node.inputs[0], _DEEPEST)
                self._behind(graph, node)
        return len(graph) != before

    def _apart(self, graph: Graph, value: Value | None, depth: int) -> bool:
        """Whether a product of activations makes a value. If so, the steps from there on become separate nodes."""
        node = value.producer if value is not None else None
        if value is None or node is None or node.op not in _MAINS or not depth or len(value.users) != 1:
            return False
        if graph.is_output(value) or any(step.op not in _STEPS for step in node.epilogue):
            return False
        if node.op == "MatMul":
            reached = not any(v is not None and v.const is not None for v in node.main_inputs)
        else:
            reached = sum([self._apart(graph, v, depth - 1) for v in list(node.main_inputs)]) > 0
        if reached and node.epilogue:
            write_out(graph, node)
        return reached

    def _behind(self, graph: Graph, softmax: Node) -> None:
        """Writes out a node behind the softmax that replaces NaN in weights, or hides some."""
        users = softmax.output.users
        steps = [step.op for user in users for step in user.epilogue]
        if len(users) == 1 and users[0].op in _STEPS and steps and set(steps) <= _STEPS:
            write_out(graph, users[0])


def _leads_to_product(value: Value, depth: int) -> bool:
    """Whether only permitted nodes lie between this value, derived from a softmax, and the product with values."""
    return depth > 0 and any(
        user.op == "MatMul" or (user.op in _STEPS | _VIEWS and _leads_to_product(user.output, depth - 1))
        for user in value.users
    )


def write_out(graph: Graph, node: Node) -> None:
    """Replace a node with its main operation and one separate node for each step of its epilogue."""
    with graph.recording() as added:
        results = [graph.add(node.op, node.main_inputs, node.attrs, name=node.name, origin=node.origin).output]
        for step in node.epilogue:
            inputs = [node.inputs[i] if i >= 0 else results[~i] for i in step.args]
            results.append(graph.add(step.op, inputs, step.attrs, name=node.name, origin=node.origin).output)
    for new in added:
        spec = lookup(new.op)
        if spec is not None:
            infer_node(new, spec)
    results[-1].name, node.output.name = node.output.name, results[-1].name
    results[-1].type = results[-1].type or node.output.type
    graph.replace(node.output, results[-1])
    graph.remove(node)


# -- heads in place --------------------------------------------------------------------------------------------------


def _swaps_heads(node: Node) -> bool:
    return tuple(node.attrs.get("perm", ())) == (0, 2, 1, 3)


def _heads(name: str) -> Op:
    """A transpose of [batch, length, heads, size] to the order of an attention of rank 4."""
    return Op("Transpose", name, where=_swaps_heads, shared=True)


def _check_heads(match: Match) -> str | None:
    node = match.node("attention")
    if any(v is not None for v in node.inputs[4:]) or any(match.graph.is_read(v) for v in node.outputs[1:]):
        return "it has a past, or shows more than its result"
    q, v, out = (value_facts.shape(x) for x in (match["q"], match["v"], match.root.output))
    for name in ("q", "k", "v"):
        dims = value_facts.shape(match[name])
        if dims is None or not (isinstance(dims[2], WHOLE) and isinstance(dims[3], WHOLE)):
            return f"heads and their size are not known of {match[name]!r}"
    assert q is not None and v is not None and isinstance(q[2], WHOLE) and isinstance(v[3], WHOLE)
    if out is None or None in q[:2] or out != (q[0], q[1], q[2] * v[3]):
        return f"{match.root.output!r} may not have the heads of {match['q']!r} side by side"
    return None


def _side_by_side(graph: Graph, value: Value) -> Value:
    """[batch, length, heads, size] as [batch, length, heads * size], which mostly is an existing value."""
    dims, node = value_facts.shape(value), value.producer
    assert dims is not None and isinstance(dims[2], WHOLE) and isinstance(dims[3], WHOLE)
    size = dims[2] * dims[3]
    if node is not None and node.op == "Reshape":
        before = node.inputs[0]
        known = value_facts.shape(before)
        if before is not None and known is not None and known == (dims[0], dims[1], size) and None not in known:
            return before
    return graph.add("Reshape", [value, graph.constant(sym_array([0, 0, size]), "heads")]).output


def _in_place(graph: Graph, match: Match) -> Value:
    node = match.node("attention")
    heads, groups = value_facts.shape(match["q"]), value_facts.shape(match["k"])
    assert heads is not None and groups is not None
    attrs: dict[str, Any] = {**node.attrs, "q_num_heads": heads[2], "kv_num_heads": groups[2]}
    inputs = [*(_side_by_side(graph, match[name]) for name in ("q", "k", "v")), *node.inputs[3:4]]
    return graph.add("Attention", inputs, attrs).output


_ATTENTION = Op("Attention", _heads("q"), _heads("k"), _heads("v"), rest=True, name="attention")

HEADS = (
    Rule(
        "attention-heads",
        Op("Reshape", Op("Transpose", _ATTENTION, where=_swaps_heads), rest=True),
        _in_place,
        _check_heads,
    ),
)


# -- keys and values for groups of queries ----------------------------------------------------------------------------


def _repeated(name: str) -> OneOf:
    """A pattern for heads of keys or values, each repeated several times in a row."""
    apart = Op("Unsqueeze|Reshape", name, rest=True, shared=True)
    spread = Op("Reshape", Op("Expand", apart, name=f"{name}+", rest=True, shared=True), rest=True, shared=True)
    return OneOf(Op("Transpose", spread, where=_swaps_heads, name=f"{name}turn", shared=True), spread)


def _groups(match: Match, name: str) -> tuple[Dim, Dim] | str:
    """The number of heads of keys or values and their repetitions, or why this is no repetition of heads."""
    at = 2 if f"{name}turn" in match else 1  # the axis of heads
    before, spread, whole = value_facts.shape(match[name]), value_facts.shape(match[f"{name}+"]), None
    node = match.node(f"{name}+")
    inner = value_facts.shape(node.inputs[0])
    whole = value_facts.shape(node.output.users[0].output) if node.output.users else None
    if before is None or spread is None or inner is None or whole is None or None in (*before, *spread, *whole):
        return f"the shape of {match[name]!r} is not known"
    if len(before) != 4 or len(spread) != 5 or len(whole) != 4 or len(inner) != 5 or inner[at + 1] != 1:
        return f"{match[f'{name}+']!r} does not repeat heads"
    heads, times = spread[at], spread[at + 1]
    if not (isinstance(heads, int) and isinstance(times, int)):
        return f"heads are not known of {match[name]!r}"
    kept = [d for i, d in enumerate(spread) if i != at + 1]
    merged = [*before[:at], heads * times, *before[at + 1 :]]
    if not same(kept, before) or not same(merged, whole):
        return f"{match[f'{name}+']!r} does not repeat heads"
    return heads, times


def _check_groups(match: Match) -> str | None:
    node = match.node("attention")
    if any(v is not None for v in node.inputs[4:]) or any(match.graph.is_read(v) for v in node.outputs[1:]):
        return "it has a past, or shows more than its result"
    k, v = _groups(match, "k"), _groups(match, "v")
    if isinstance(k, str) or isinstance(v, str):
        return k if isinstance(k, str) else str(v)
    return None if k == v else "keys and values are repeated differently"


def _in_groups(graph: Graph, match: Match) -> Value:
    node = match.node("attention")
    sources = [
        graph.add("Transpose", [match[name]], {"perm": (0, 2, 1, 3)}).output if f"{name}turn" in match else match[name]
        for name in ("k", "v")
    ]
    return graph.add("Attention", [match["q"], *sources, *node.inputs[3:]], node.attrs).output


GROUPS = (
    Rule(
        "attention-groups",
        Op("Attention", "q", _repeated("k"), _repeated("v"), rest=True, name="attention"),
        _in_groups,
        _check_groups,
    ),
)
