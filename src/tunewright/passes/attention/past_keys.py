"""Attention with past keys and values: their caches become values of their own.

An operator that joins past and new keys inside copies all of them for every token. Most such operators have no kernel
on any device. This pass writes them as an attention over a cache that a Concat grows. Then the cache grows in place
(`grow_states`), and attention reads it where it lies (`strided`). The pass runs when shapes are known, which gives the
number of queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.symbolic import SymInt, same, sym_array
from tunewright.ir.types import DType
from tunewright.ops.internal.append import APPEND, STANDS_FOR
from tunewright.ops.internal.strided_attention import MULTI_HEAD
from tunewright.ops.microsoft.common import MS

from .. import value_facts
from ..base import Context
from ..builder import NodeBuilder
from ..cleanup.simplify import CommonSubexpressions
from ..pattern import remove_dead
from . import grouped_query

GROUPED = MS + "GroupQueryAttention"
#: attributes that do not matter for a single query, or for heads that are apart
_OF_SEVERAL = frozenset({"is_causal", "right_window_size", "q_num_heads", "kv_num_heads"})


class PastKeys:
    name = "past-keys"

    def run(self, graph: Graph, context: Context) -> bool:
        if context.layouts is None:  # the host runs the model's own operator
            return False
        changed = False
        for node in graph.nodes:
            if node.op == MULTI_HEAD and not node.epilogue:
                changed |= _try(graph, node, context, multi_head)
            elif node.op == "TensorScatter" and not node.epilogue and context.knows(APPEND):
                changed |= _try(graph, node, context, cache)
            elif node.op == GROUPED and not node.epilogue and context.knows(APPEND):
                changed |= _try(graph, node, context, grouped_query.rewrite)
        for node in graph.nodes:
            if node.op == "Attention" and not node.epilogue and node.input(4) is not None:
                changed |= _try(graph, node, context, in_cache)
        if changed:  # layers share positions, lengths and masks
            graph.sort()
            CommonSubexpressions().run(graph, context)
        return changed


def _try(graph: Graph, node: Node, context: Context, rewrite: Callable[[NodeBuilder], str | None]) -> bool:
    reason = rewrite(NodeBuilder(graph, node))
    if reason:
        context.log.refused(PastKeys.name, node, reason)
        return False
    context.log.applied(PastKeys.name, node)
    remove_dead(graph, [node])
    return True


def multi_head(b: NodeBuilder) -> str | None:
    """Rewrite MultiHeadAttention with a bias, a padding mask, a past or a causal mask as ONNX's Attention."""
    reason = _why_not_multi_head(b)
    if reason is not None:
        return reason
    node = b.node
    q, k, v, bias = node.inputs[0], node.inputs[1], node.inputs[2], node.input(3)
    past_k, past_v, count = node.input(6), node.input(7), int(node.attrs["num_heads"])
    assert q is not None and k is not None and v is not None
    if bias is not None and bias.const is not None:
        parts = np.split(bias.const, np.cumsum([_width(x) for x in (q, k)]))
        q, k, v = (b.add("Add", x, b.graph.constant(part)) for x, part in zip((q, k, v), parts, strict=True))
    causal = int(node.attrs.get("unidirectional", 0))
    attrs: dict[str, Any] = {"q_num_heads": count, "kv_num_heads": count, "is_causal": causal}
    if node.attrs.get("scale"):
        attrs["scale"] = float(node.attrs["scale"])
    mask = _masked(b)
    if past_k is None:
        y = b.add("Attention", q, k, v, mask, **attrs)
        b.replace(y, *(b.heads(x, count) for x, old in zip((k, v), node.outputs[1:3], strict=False)))
    else:
        b.replace(*b.several("Attention", q, k, v, mask, past_k, past_v, outputs=3, **attrs))
    return None


def _why_not_multi_head(b: NodeBuilder) -> str | None:
    node = b.node
    q, k, v, bias, padding, _, past_k, past_v = (node.input(i) for i in range(8))
    causal = int(node.attrs.get("unidirectional", 0))
    if bias is None and padding is None and past_k is None and not causal:
        return "nothing would be saved"
    shapes = [value_facts.shape(x) for x in (q, k, v)]
    if any(shape is None or len(shape) != 3 or not isinstance(shape[2], int) for shape in shapes):
        return "queries, keys and values must all be given, of rank 3 and a known width"
    if causal and shapes[0] is not None and shapes[1] is not None and shapes[0][:2] != shapes[1][:2]:
        return "the last query sees every key, of which there are others than queries"
    if node.input(8) is not None or node.input(9) is not None or (past_k is None) != (past_v is None):
        return "its cache is shared, or follows beams"
    if any(b.graph.is_read(one) for one in node.outputs[3:]):
        return "it shows its scores"
    if value_facts.dtype(q) is not DType.FLOAT32:
        return "it is not float32"
    if bias is not None and (bias.const is None or bias.const.shape != (sum(_width(x) for x in (q, k, v)),)):
        return "the bias is not constant"
    return (
        "the padding is not told by ones and zeros" if padding is not None and value_facts.rank(padding) != 2 else None
    )


def _width(value: Value | None) -> int:
    shape = value_facts.shape(value)
    assert shape is not None and isinstance(shape[2], int)
    return shape[2]


def _masked(b: NodeBuilder) -> Value | None:
    """Return the value added to the scores: the model's bias, and a low number where there is padding."""
    padding, extra = b.node.input(4), b.node.input(5)
    if padding is None:
        return extra
    dtype = value_facts.dtype(padding)
    assert dtype is not None
    low = np.array(b.node.attrs.get("mask_filter_value", -10000.0), np.float32)
    seen = b.add("Greater", padding, b.graph.constant(np.zeros((), dtype.numpy)))
    hidden = b.add("Where", seen, b.graph.constant(np.zeros((), np.float32)), b.graph.constant(low))
    hidden = b.add("Unsqueeze", hidden, b.ints(1, 2))
    return hidden if extra is None else b.add("Add", extra, hidden)


def cache(b: NodeBuilder) -> str | None:
    """Rewrite TensorScatter of an input into a result: a cache with room, which a request may drop
    (`runtime/plans/growing_buffers.py`)."""
    graph, node = b.graph, b.node
    past, new, starts = node.inputs[0], node.inputs[1], node.input(2)
    types = [value_facts.static(x) for x in (past, new)]
    axis = value_facts.axis(node, -2, past)
    if past is None or new is None or types[0] is None or types[1] is None or not axis:
        return "shapes are not known"
    if past not in graph.inputs or len(past.uses) != 1 or graph.outputs.count(node.output) != 1:
        return "it is no cache that a result continues"
    if starts is None or node.attrs.get("mode", "linear") != "linear":
        return "it begins at the first row, or anew when it is full"
    if not same(types[0].dims[:axis], types[1].dims[:axis]) or types[1].dims[axis] > types[0].dims[axis]:
        return "the new rows do not fit"
    ends = b.add("Add", starts, b.graph.constant(sym_array([types[1].dims[axis]])))
    rows = types[0].dims[axis]
    b.replace(b.add(APPEND, past, new, ends, axis=axis, rows=rows, capacity=rows, **{STANDS_FOR: node.op}))
    return None


def in_cache(b: NodeBuilder) -> str | None:
    """Rewrite one query over a past of any length: Concat grows keys and values, and attention reads the result."""
    graph, node = b.graph, b.node
    mask, past_k, past_v = (node.input(i) for i in range(3, 6))
    types = [value_facts.static(x) for x in (*node.inputs[:3], past_k, past_v)]
    q, k, v, past, _ = types
    if past_k is None or past_v is None or q is None or k is None or v is None or past is None or types[4] is None:
        return "shapes are not known"
    if not isinstance(past.dims[2], SymInt):
        return "the past has one length"
    if q.dims[-2] != 1 or k.dims[-2] != 1:
        return "there are several queries"
    if int(node.attrs.get("left_window_size", -1)) >= 0 or any(graph.is_read(x) for x in node.outputs[3:]):
        return "queries see a window of the keys, or scores are shown"
    count, groups = (int(node.attrs.get(name, 0)) for name in ("q_num_heads", "kv_num_heads"))
    # the single query comes after all keys, so it sees them all
    attrs = {key: value for key, value in node.attrs.items() if key not in _OF_SEVERAL}
    if value_facts.rank(node.inputs[0]) == 3:
        attrs |= {"scale": attrs.get("scale") or 1 / np.sqrt(q.dims[2] // count)}
    queries, keys, values = (
        b.heads(x, n) for x, n in zip(node.inputs[:3], (count, groups, groups), strict=True) if x is not None
    )
    keys, values = b.add("Concat", past_k, keys, axis=2), b.add("Concat", past_v, values, axis=2)
    y = b.add("Attention", queries, keys, values, mask, **attrs)
    b.replace(y if value_facts.rank(node.inputs[0]) == 4 else b.flat(y), keys, values)
    return None
