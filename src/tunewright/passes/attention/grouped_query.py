"""GroupQueryAttention as ONNX's operators: rotations, a growing or filled cache, and attention over it.

It runs over a prompt (as many new rows as there are in all), or behind a past. Its sequences may end in different
places: ``seqlens_k`` gives them. Two kinds of caches exist. One grows by the new rows. The other has room for all rows
from the beginning, and new rows are written where the sequence ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunewright.ir.graph import Value
from tunewright.ir.symbolic import sym_array
from tunewright.ir.types import DType
from tunewright.ops.internal.append import APPEND, STANDS_FOR
from tunewright.ops.microsoft.common import MS
from tunewright.ops.shapes import whole

from .. import value_facts
from ..builder import NodeBuilder
from .grow_states import can_grow, grown

#: inputs that change more than this module supports
_UNKNOWN = {
    11: "it has a sink", 12: "its cache is quantised", 13: "its cache is quantised", 14: "it normalises queries",
    15: "it normalises keys",
}  # fmt: skip


def rewrite(b: NodeBuilder) -> str | None:
    """Replace a node. Returns None when it was replaced, else the reason why not."""
    reason = _why_not(b)
    if reason is not None:
        return reason
    node, graph = b.node, b.graph
    past, queries, total = _sizes(b)
    is_prompt, has_past = bool(queries == total), not (isinstance(past, int) and past == 0)
    if not is_prompt and not has_past:
        return "there are more rows in all than new ones, and no past"
    is_growing = not has_past or (not is_prompt and bool(past + queries == total))
    if not is_growing and not bool(total <= past):
        return "the cache neither grows by the new rows nor has room for all"
    if not is_prompt and not isinstance(queries, int):
        return "the number of new rows behind a past is open"
    q, k, v = _heads(b)
    ends = b.add("Cast", b.add("Reshape", node.inputs[5], b.ints(-1)), to=DType.INT64.onnx_code)
    lengths = b.add("Add", ends, b.ints(1))
    if node.attrs.get("do_rotary", 0):
        places = _places(b, ends, queries, is_prompt)
        turned = {"interleaved": int(node.attrs.get("rotary_interleaved", 0))}
        q, k = (b.add(MS + "RotaryEmbedding", x, places, node.input(7), node.input(8), **turned) for x in (q, k))
    caches = [_Cache(k, k), _Cache(v, v)]
    if is_prompt and has_past:
        room = graph.constant(sym_array([0, 0, 0, 0, 0, 0, past - total, 0]))
        caches = [_Cache(x, b.add("Pad", x, room)) for x in (k, v)]
    elif not is_prompt:
        caches = [_filled(b, at, x, lengths, is_growing) for at, x in ((3, k), (4, v))]
    y = _attend(b, (q, *(cache.read for cache in caches)), lengths, queries, is_prompt)
    b.replace(b.flat(y), *(cache.present for cache in caches))
    for cache in caches:
        if cache.grown is not None:  # the result has spare room, and its readers want the rows in use
            graph.outputs = [cache.grown if value is cache.present else value for value in graph.outputs]
    return None


@dataclass(frozen=True)
class _Cache:
    """What attention reads, what replaces the node's output, and what replaces it as the model's result."""

    read: Value
    present: Value
    grown: Value | None = None


def _why_not(b: NodeBuilder) -> str | None:
    node, graph = b.node, b.graph
    for i, reason in _UNKNOWN.items():
        if node.input(i) is not None:
            return reason
    if node.attrs.get("smooth_softmax", 0) == 1 or int(node.attrs.get("local_window_size", -1)) == 0:
        return "its softmax is smooth, or its window empty"
    if any(graph.is_read(one) for one in node.outputs[3:]):
        return "it shows its scores"
    if (node.input(1) is None) != (node.input(2) is None) or (node.input(3) is None) != (node.input(4) is None):
        return "keys and values come together"
    given = [node.inputs[0], *(x for x in node.inputs[1:6] if x is not None)]
    if any(value_facts.static(x) is None for x in given) or node.input(5) is None:
        return "shapes are not known"
    total = node.input(6)
    return "the total length does not follow from shapes" if total is None or total.const is None else None


def _sizes(b: NodeBuilder) -> tuple[Any, Any, Any]:
    """Return the rows of the past cache, the new rows, and all rows."""
    q, past, total = value_facts.static(b.node.inputs[0]), value_facts.static(b.node.input(3)), b.node.inputs[6]
    assert q is not None and total is not None and total.const is not None
    return (0 if past is None else past.dims[2]), q.dims[1], whole(total.const.reshape(-1)[0])


def _heads(b: NodeBuilder) -> tuple[Value, Value, Value]:
    """Return queries, keys and values as [batch, heads, rows, elements]."""
    q, k, v = b.node.inputs[:3]
    count, groups = int(b.node.attrs["num_heads"]), int(b.node.attrs["kv_num_heads"])
    assert q is not None
    if k is None or v is None:
        type = value_facts.static(q)
        assert type is not None
        size = type.dims[2] // (count + 2 * groups)
        widths = b.ints(count * size, groups * size, groups * size)
        q, k, v = b.several("Split", q, widths, outputs=3, axis=2)
    return b.heads(q, count), b.heads(k, groups), b.heads(v, groups)


def _places(b: NodeBuilder, ends: Value, queries: Any, is_prompt: bool) -> Value:
    """Return positions of the new rows: one number is the first row's, a matrix gives them all."""
    given = b.node.input(9)
    if is_prompt:
        return b.ints(0) if given is None else b.add("Gather", b.add("Reshape", given, b.ints(-1)), b.ints(0), axis=0)
    if given is not None:
        return given
    steps = b.graph.constant(np.arange(queries, dtype=np.int64) - (queries - 1))
    return b.add("Add", b.add("Unsqueeze", ends, b.ints(1)), steps)


def _filled(b: NodeBuilder, at: int, new: Value, lengths: Value, is_growing: bool) -> _Cache:
    """Return the cache with new rows where its sequences end."""
    node, past = b.node, b.node.inputs[at]
    assert past is not None
    type, more, total = value_facts.static(past), value_facts.static(new), _sizes(b)[2]
    assert type is not None and more is not None
    if is_growing and can_grow(b.graph, past, new, 2, node.outputs[at - 2]):
        made, used = grown(b.graph, node, past, new, 2, lengths)
        return _Cache(used, used, made)
    rows = type.dims[2] + more.dims[2] if is_growing else type.dims[2]
    made = b.add(APPEND, past, new, lengths, axis=2, rows=rows, capacity=rows, **{STANDS_FOR: node.op})
    if is_growing:
        return _Cache(made, made)
    used = b.add("Slice", made, b.ints(0), b.graph.constant(sym_array([total])), b.ints(2))
    return _Cache(used, made)


def _attend(b: NodeBuilder, operands: Sequence[Value], lengths: Value, queries: Any, is_prompt: bool) -> Value:
    node, attrs = b.node, dict[str, Any]()
    attrs["is_causal"] = int(node.attrs.get("causal", 1))
    window = int(node.attrs.get("local_window_size", -1))
    if window > 0:
        attrs["left_window_size"] = window - 1
    for name in ("scale", "softcap"):
        if node.attrs.get(name):
            attrs[name] = float(node.attrs[name])
    bias = node.input(10)
    if not is_prompt:
        return b.add("Attention", *operands, bias, None, None, lengths, **attrs)
    numbers = [b.graph.constant(_scalar(n)) for n in (0, queries, 1)]
    seen = b.add("Less", b.add("Range", *numbers), b.add("Unsqueeze", lengths, b.ints(1)))
    seen = b.add("Unsqueeze", seen, b.ints(1, 2))
    if bias is not None:
        dtype = value_facts.dtype(bias)
        assert dtype is not None
        seen = b.add("Where", seen, bias, b.graph.constant(np.array(-np.inf, dtype.numpy)))
    return b.add("Attention", *operands, seen, **attrs)


def _scalar(number: Any) -> np.ndarray[Any, Any]:
    return sym_array([number]).reshape(())
