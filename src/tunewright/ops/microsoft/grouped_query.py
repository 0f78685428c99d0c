"""GroupQueryAttention: several query heads share a key head, over a cache that may have spare room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE, greater
from tunewright.ir.types import Dim, Shape, TensorType, Type

from ..base import Array, Attrs, Operands, OpSpec
from ..numeric import wide
from ..onnx.reduction import softmax
from ..shapes import given, optional, tensor, value
from ..shapes import whole as symbolic
from .attention import heads
from .common import MS, dims, part
from .position import rotate, spread


def _visible(total: int, past: int, length: int, attrs: Attrs) -> Array:
    """(S, T): the keys that a query may see. Queries are past, past + 1, ...; queries behind the end are padding."""
    last = np.minimum(past + np.arange(length) + 1, total) if attrs.get("causal", 1) else np.full(length, total)
    window = attrs.get("local_window_size", -1)
    first = np.maximum(last - window, 0) if window >= 0 else np.zeros(length, np.int64)
    place = np.arange(total)
    return np.asarray((place < last[:, None]) & (place >= first[:, None]))


def _probabilities(scores: Array, seen: Array, sink: Array | None, smooth: bool) -> Array:
    """Softmax over the visible keys. A sink is an extra entry of the row, which has no value vector."""
    scores = np.where(seen, scores, -np.inf)
    if sink is None and not smooth:
        return softmax(scores)
    extra = np.zeros((scores.shape[0], 1, 1), scores.dtype) if sink is None else sink.reshape(-1, 1, 1)
    top = np.maximum(scores.max(-1, keepdims=True), extra)
    e = np.exp(scores - top)
    return np.asarray(e / (e.sum(-1, keepdims=True) + np.exp(extra - top)))


def _rms(x: Array, weight: Array, epsilon: float) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(epsilon)) * wide(weight))


def _group_query_attention(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    query, key, val, past_key, past_value, ends, total = (optional(inputs, i) for i in range(7))
    cos, sin, positions, bias, sink = (optional(inputs, i) for i in range(7, 12))
    count, kv_count = attrs["num_heads"], attrs["kv_num_heads"]
    if key is None:
        size = query.shape[-1] // (count + 2 * kv_count)
        q, k, v = np.split(query, [count * size, (count + kv_count) * size], axis=-1)
    else:
        q, k, v = query, key, val
    q, k, v = heads(wide(q), count), heads(wide(k), kv_count), heads(wide(v), kv_count)
    batch, _, length, size = q.shape
    lengths = ends.reshape(-1).astype(np.int64) + 1
    whole = int(np.asarray(total).reshape(-1)[0])
    prompt = length == whole
    past = np.zeros(batch, np.int64) if prompt or past_key is None else lengths - length
    if optional(inputs, 14) is not None:
        epsilon = attrs.get("qk_norm_epsilon", 1e-6)
        q, k = _rms(q, inputs[14], epsilon), _rms(k, inputs[15], epsilon)
    if attrs.get("do_rotary", 0):
        if prompt:
            start = np.zeros(1, np.int64) if positions is None else positions.reshape(-1)[:1]
            places = start[:, None] + np.arange(length)
        else:
            places = past[:, None] + np.arange(length) if positions is None else spread(positions, batch, length)
        turned = bool(attrs.get("rotary_interleaved", 0))
        q = rotate(q, places, cos, sin, turned)
        k = rotate(k, places, cos, sin, turned) if k.shape[2] else k
    room = max(whole, 0 if past_key is None else past_key.shape[2])
    caches = [_fill(p, x, past, lengths, room) for p, x in ((past_key, k), (past_value, v))]
    y = np.zeros((batch, length, count * size), q.dtype)
    logits = np.zeros((batch, count, length, whole), q.dtype)
    scale = q.dtype.type(attrs.get("scale", 0.0) or 1.0 / np.sqrt(size))
    cap = attrs.get("softcap", 0.0)
    sinks = None if sink is None else wide(sink)
    for b in range(batch):
        here = int(lengths[b])
        keys, values = (c[b, :, :here].repeat(count // kv_count, 0) for c in caches)
        scores = np.matmul(q[b], keys.swapaxes(-1, -2)) * scale
        if cap:
            scores = np.tanh(scores / q.dtype.type(cap)) * q.dtype.type(cap)
        if bias is not None:
            scores = scores + wide(bias)[b if len(bias) > 1 else 0, :, :, :here]
        seen = _visible(here, int(past[b]), length, attrs)
        weights = _probabilities(scores, seen, sinks, attrs.get("smooth_softmax", 0) == 1)
        y[b] = np.matmul(weights, values).transpose(1, 0, 2).reshape(length, -1)
        logits[b, :, :, :here] = np.where(seen, scores, 0) if attrs.get("qk_output", 0) == 1 else weights
    return [x.astype(query.dtype, copy=False) for x in (y, *caches, logits)]


def _fill(past: Array | None, new: Array, begins: Array, lengths: Array, room: int) -> Array:
    """The cache with the new rows written behind the past rows. Unused rows stay zero."""
    cache = np.zeros((*new.shape[:2], room, new.shape[3]), new.dtype)
    for b, begin in enumerate(begins):
        kept = int(lengths[b]) if new.shape[2] == 0 else int(begin)
        if past is not None:
            cache[b, :, :kept] = wide(past[b, :, :kept])
        cache[b, :, begin : begin + new.shape[2]] = new[b]
    return cache


def _infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    for k in ("k_quant_type", "v_quant_type"):
        if attrs.get(k, "NONE") != "NONE":
            raise NotImplementedError(f"a quantised cache ({k} = {attrs[k]}) is not supported")
    if attrs.get("sliding_window_cache", 0):
        raise NotImplementedError("sliding_window_cache is not supported")
    t, (batch, length, width) = tensor(operands, 0), dims(operands, 0, 3)
    count, kv_count = attrs["num_heads"], attrs["kv_num_heads"]
    if count % kv_count:
        raise ValueError(f"{count} query heads cannot share {kv_count} key heads")
    if bool(attrs.get("do_rotary", 0)) and not (given(operands, 7) and given(operands, 8)):
        raise ValueError("do_rotary needs cos_cache and sin_cache")
    size = part(width, count if given(operands, 1) else count + 2 * kv_count, "the width of the query")
    total = value(operands, 6)
    whole: Dim = None if total is None else symbolic(total.reshape(-1)[0])
    past: Dim = dims(operands, 3, 4)[2] if given(operands, 3) else 0
    room = greater(whole, past) if isinstance(whole, WHOLE) and isinstance(past, WHOLE) else None
    cache: Shape = (batch, kv_count, room, size)
    shapes: list[Shape] = [
        (batch, length, None if size is None else count * size),
        cache,
        cache,
        (batch, count, length, whole),
    ]
    return [TensorType(t.dtype, shape) for shape in shapes]


def _flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    keys = outputs[1].dims[2] if len(outputs) > 1 else outputs[0].dims[1]
    return 4.0 * outputs[0].size * keys


OPS = (OpSpec(MS + "GroupQueryAttention", _group_query_attention, _infer, flops=_flops, heavy=True),)
