"""Recognises attention by structure: softmax(q k' * scale + bias) v becomes one Attention, whatever its spelling.

`attention_steps` lists the steps that may lie between the products. This pass decides whether the steps mean an
attention. It builds one with exactly the meaning of the graph, including rows in which every key is hidden:

- a constant far below zero in place of hidden scores makes such a row the mean of all values. It becomes an addend so
  low that nothing remains of the score beside it;
- -inf makes the row NaN (attribute ``nan_rows``), or zero where the graph replaces NaN by zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tunewright.errors import ModelError
from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import Dim, Shape
from tunewright.ops.onnx.attention import NAN_ROWS

from .. import value_facts
from ..base import Context
from ..pattern import Match, OneOf, Op, matches, remove_dead, scalar
from .attention_masks import Maker, Masks
from .attention_steps import AttentionStep, Path, scores, weights


class RecogniseAttention:
    """Tries each softmax that has a product before or behind it."""

    name = "attention"

    def run(self, graph: Graph, context: Context) -> bool:
        changed = False
        for node in graph.nodes:
            if node.op != "Softmax" or node.epilogue or node not in graph:
                continue
            before, behind = scores(graph, node), weights(graph, node)
            if before is None and isinstance(behind, str):
                continue  # the softmax of a classifier
            reason = self._rewrite(graph, node, before, behind)
            if reason is not None:
                context.log.refused(self.name, node, reason)
                continue
            context.log.applied(self.name, node)
            changed = True
        return changed

    def _rewrite(self, graph: Graph, node: Node, before: Path | None, behind: Path | str) -> str | None:
        if before is None:
            return "no product of queries and keys makes its scores"
        if isinstance(behind, str):
            return behind
        reason = _leak(graph, node, before, behind) or _other_axis(node)
        if reason is not None:
            return reason
        found = _read(before, behind)
        return found if isinstance(found, str) else _replace(graph, node, found)


def _leak(graph: Graph, softmax: Node, before: Path, behind: Path) -> str | None:
    """Why nodes between the products cannot be removed."""
    covered: dict[Node, bool] = {before.product: False, softmax: False}
    for step in (*before.steps, *behind.steps):
        covered.update(step.match.nodes)
    return Match(graph, behind.product, {}, {**covered, behind.product: False}).leak()


def _other_axis(node: Node) -> str | None:
    rank, axis = value_facts.rank(node.output), int(node.attrs.get("axis", -1))
    if rank is None:
        return "the rank of its scores is not known"
    return None if axis in (-1, rank - 1) else f"it goes along axis {axis}, not along keys"


# -- meaning ----------------------------------------------------------------------------------------------------------


@dataclass
class _Found:
    """Both products, and the steps between them. Every shape is [batch and heads in any form, queries, keys]."""

    before: Path
    behind: Path
    #: batch and heads in the Attention: two axes, or one where heads have no axis
    lead: tuple[Dim, ...]

    @property
    def operands(self) -> tuple[Value, Value, Value]:
        q, kt, v = *self.before.product.inputs[:2], self.behind.product.inputs[1]
        assert q is not None and kt is not None and v is not None
        return q, kt, v


def _read(before: Path, behind: Path) -> _Found | str:
    made = value_facts.shape(before.product.output)
    if made is None or len(made) < 2:
        return f"the shape of the scores {before.product.output!r} is not known"
    stages = [s.result for s in before.steps] + [s.result for s in behind.steps]
    shapes: list[Shape] = [made]
    for value in stages:
        shape = value_facts.shape(value)
        if shape is None or not _same(shape[-2:], made[-2:]):
            return f"{value!r} may not have the queries and keys of the scores {before.product.output!r}"
        if len(shape) == len(shapes[-1]) and not _same(shape, shapes[-1]) and not _is_view(value):
            return f"{value!r} may be larger than the scores {before.product.output!r}"
        shapes.append(shape)
    for node in (before.product, behind.product):
        left, right = (value_facts.shape(v) for v in node.inputs[:2])
        if left is None or right is None or len(left) != len(right):
            return "queries, keys and values must have as many axes"
    lead = next((s[:2] for s in shapes if len(s) == 4), None) or _lead(made)
    if lead is None:
        return f"batch and heads of the scores {before.product.output!r} are not known"
    return (
        _same_leads(_Found(before, behind, lead), made, shapes[-1])
        or _narrows(before, behind)
        or _Found(before, behind, lead)
    )


def _lead(shape: Shape) -> tuple[Dim, ...] | None:
    """Batch and heads of scores whose shape in the graph does not have four axes."""
    if len(shape) == 3:
        return shape[:1]
    if len(shape) == 2:
        return (1, 1)
    outer = [d for d in shape[:-3] if isinstance(d, WHOLE)]
    return (math.prod(outer), shape[-3]) if len(outer) == len(shape) - 3 else None


def _same_leads(found: _Found, made: Shape, last: Shape) -> str | None:
    """Why queries, keys and values may differ in batch or heads, or None. With four axes, keys may share one head."""
    q, kt, v = (value_facts.shape(x) for x in found.operands)
    assert q is not None and kt is not None and v is not None
    rank = len(made) - 2
    plain = len(made) == 4 and len(v) == 4 and _same(made[:2], found.lead)
    shared = plain and kt[1] == 1 and v[1] == 1 and _same(kt[:1], q[:1]) and _same(v[:1], q[:1])
    same = shared or (_same(kt[:rank], q[:rank]) and _same(v[:-2], last[:-2]))
    if same and None not in q[:rank] and _same(q[:rank], made[:rank]):
        return None
    return "batch and heads of queries, keys and values may differ"


def _narrows(before: Path, behind: Path) -> str | None:
    """Refuses scores in fewer digits than queries and keys have: the Attention would not round them."""
    kinds = [value_facts.dtype(before.product.output), *(value_facts.dtype(s.result) for s in before.steps)]
    sizes = [k.itemsize for k in kinds if k is not None]
    if len(sizes) != len(kinds) or sizes != sorted(sizes):
        return "scores are rounded to fewer digits in front of the softmax"
    return None


def _same(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    return len(a) == len(b) and None not in a and all(x is y or x == y for x, y in zip(a, b, strict=True))


def _is_view(value: Value) -> bool:
    return value.producer is not None and value.producer.op in ("Reshape", "Squeeze", "Unsqueeze", "Flatten")


# -- the Attention -----------------------------------------------------------------------------------------------------


def _replace(graph: Graph, softmax: Node, found: _Found) -> str | None:
    """Replaces the matched nodes with the Attention; returns the reason where that is impossible."""
    with graph.recording() as added:
        try:
            made = _build(graph, found)
        except ModelError as error:  # An error in a branch does not matter, because the branch may never run.
            made = str(error)
    if isinstance(made, str):
        remove_dead(graph, reversed(added))
        return made
    last, sources = found.behind.product, [*found.operands, *_asides(found)]
    covered = [n for s in (*found.before.steps, *found.behind.steps) for n in s.match.nodes]
    nodes = [found.before.product, *covered, softmax, last]
    origin = tuple(dict.fromkeys(name for n in nodes for name in n.origin))
    for node in added:
        node.name, node.origin = node.name or softmax.name, origin
    old = last.output
    made.name, old.name = old.name, made.name
    graph.replace(old, made)
    remove_dead(graph, [last, *(n for s in reversed(found.behind.steps) for n in reversed(s.match.nodes)), softmax,
                        *(n for s in reversed(found.before.steps) for n in reversed(s.match.nodes)),
                        found.before.product])  # fmt: skip
    _remove_above(graph, sources)
    graph.sort()
    return None


def _asides(found: _Found) -> list[Value]:
    """Masks and biases as values of the original graph."""
    return [v for s in (*found.before.steps, *found.behind.steps) for n, v in s.match.values.items() if n != "x"]


def _remove_above(graph: Graph, values: list[Value]) -> None:
    """Removes nodes that are no longer read, because the Attention reads other values."""
    while values:
        node = values.pop().producer
        if node is not None and node in graph and not any(graph.is_read(v) for v in node.outputs):
            values += [v for v in node.inputs if v is not None]
            graph.remove(node)


def _build(graph: Graph, found: _Found) -> Value | str:
    made = Maker(graph)
    q, kt, v = found.operands
    masks = _masks(made, found)
    if isinstance(masks, str):
        return masks
    mask, nan_rows = masks.result(any(s.kind == "guarded" for s in found.behind.steps))
    v = _without_widening(v, q)
    q, times = _without_scale(q)
    k, over = _keys(made, kt)
    lead, dims = found.lead, value_facts.shape(mask) or ()
    # the first axis of the mask is the batch: add an axis for heads
    if len(lead) == 1 and mask is not None and len(dims) == 3 and dims[0] != 1:
        lead, mask = (*lead, 1), made.shaped(mask, (dims[0], 1, *dims[1:]))
        if mask is None:
            return "the shape of its mask is not known"
    operands = [made.lead(x, lead) for x in (q, k, v)]
    if any(x is None for x in operands):
        return "the sizes of batch and heads are not known"
    attrs: dict[str, Any] = {"scale": masks.factor * times * over}
    if not (math.isfinite(attrs["scale"]) and attrs["scale"]):
        return f"the scale would be {attrs['scale']}"
    attrs |= {"softcap": masks.cap} if masks.cap else {}
    attrs |= {NAN_ROWS: 1} if nan_rows else {}
    attrs |= {"q_num_heads": 1, "kv_num_heads": 1} if len(lead) == 1 else {}
    result = made.node("Attention", [*operands, *([] if mask is None else [mask])], attrs)
    old = found.behind.product.output
    if value_facts.dtype(old) is not value_facts.dtype(result):
        kind = value_facts.dtype(old)
        result = made.node("Cast", [result], {"to": kind.onnx_code if kind else 1})
    wanted = value_facts.shape(old)
    if wanted is not None and len(wanted) == len(lead) + 2:
        return result
    shaped = None if wanted is None else made.shaped(result, wanted)
    return shaped if shaped is not None else "the shape of its result is not known"


def _masks(made: Maker, found: _Found) -> Masks | str:
    """Applies the steps of the scores from the product on."""
    zeroed = {_condition(s) for s in found.behind.steps if s.kind in ("seen", "hidden")}
    masks = Masks(made, value_facts.shape(found.before.product.output) or (), found.lead, zeroed)
    for step in found.before.steps:
        reason = masks.follow(step)
        if reason is not None:
            return reason
    if zeroed - masks.conditions:
        return "the mask of its weights does not come from its scores"
    return masks


def _condition(step: AttentionStep) -> tuple[Value, bool]:
    return step.match["seen"], step.kind == "seen"


_SCALE = OneOf(Op("Mul", "x", scalar("times"), shared=True), Op("Div", "x", scalar("over"), shared=True))


def _without_scale(value: Value) -> tuple[Value, float]:
    """Queries or keys without the constants that scale them, and the product of these constants."""
    factor = 1.0
    for _ in range(4):
        node = value.producer
        match = None if node is None else next(matches(_SCALE, value, Match(None, node)), None)  # type: ignore[arg-type]
        if match is None or value_facts.rank(match["x"]) != value_facts.rank(value):
            break
        value = match["x"]
        factor = factor * number(match, "times") if "times" in match else factor / number(match, "over")
    return value, factor


def _without_widening(value: Value, like: Value) -> Value:
    """Values before a Cast from the queries' type to one with more digits."""
    node = value.producer
    before = node.inputs[0] if node is not None and node.op == "Cast" and not node.epilogue else None
    kinds = value_facts.dtype(before), value_facts.dtype(value)
    wider = None not in kinds and kinds[0] is value_facts.dtype(like) and kinds[0].itemsize < kinds[1].itemsize  # type: ignore[union-attr]
    return before if before is not None and wider else value


def number(match: Match, name: str) -> float:
    return float(match.const(name).reshape(()))


def _keys(made: Maker, kt: Value) -> tuple[Value, float]:
    """The keys whose transpose the product reads, and their factor."""
    rank = value_facts.rank(kt) or 4
    perm = (*range(rank - 2), rank - 1, rank - 2)
    value, factor = _without_scale(kt)
    while (node := value.producer) is not None and node.op == "Transpose" and node.inputs[0] is not None:
        inner = node.attrs.get("perm") or tuple(reversed(range(rank)))
        perm = tuple(int(inner[p]) for p in perm)
        value, more = _without_scale(node.inputs[0])
        factor *= more
    return (value if perm == tuple(range(rank)) else made.node("Transpose", [value], {"perm": perm})), factor
