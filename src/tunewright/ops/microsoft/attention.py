"""Attention operators of com.microsoft: Attention, QAttention, MultiHeadAttention, their packed and decoder forms.

Letters: B batch, S queries, L new keys, P past keys, T = P + L keys, N heads, H head size, D = N * H, W beams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import Dim, Shape, TensorType, Type

from ..base import Array, Attrs, Infer, Operands
from ..numeric import integer_matmul, wide
from ..onnx.reduction import softmax
from ..shapes import given, optional, tensor, times
from .common import along, dims, heavy, part, plus


def heads(x: Array, n: int) -> Array:
    """(B, S, N * H) -> (B, N, S, H)"""
    batch, length, width = x.shape
    return x.reshape(batch, length, n, width // n).transpose(0, 2, 1, 3)


def merge(x: Array) -> Array:
    """(B, N, S, H) -> (B, S, N * H)"""
    batch, n, length, size = x.shape
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(batch, length, n * size)


def attend(q: Array, k: Array, v: Array, attrs: Attrs, *masks: Array | None) -> tuple[Array, Array]:
    """softmax(scale * q k' + masks) v as (B, S, N * H), and the scores that enter the softmax."""
    scale = attrs.get("scale", 0.0) or 1.0 / np.sqrt(q.shape[-1])
    scores = np.matmul(q, k.swapaxes(-1, -2)) * q.dtype.type(scale)
    for mask in masks:
        if mask is not None:
            scores = scores + mask.astype(scores.dtype, copy=False)
    return merge(np.matmul(softmax(scores), v)), scores


def mask_of(index: Array | None, batch: int, length: int, past: int, total: int, attrs: Attrs) -> Array | None:
    """What is added to the scores, (B, 1, S or 1, T), from a mask in any form that ONNX Runtime accepts.

    The forms are ends per sequence (B) or (3B + 2), ends and starts (2B), or ones and zeros (B, T), (B, S, T).
    """
    low = np.float32(attrs.get("mask_filter_value", -10000.0))
    mask = None
    if index is not None:
        if index.ndim == 1:
            place = np.arange(total)
            masked = place >= index[:batch, None]
            if len(index) == 2 * batch:
                masked = masked | (place < index[batch:, None])
            masked = masked[:, None, None]
        elif index.ndim in (2, 3):
            masked = (index <= 0)[:, None, None] if index.ndim == 2 else (index <= 0)[:, None]
        else:
            raise ValueError(f"a mask of {index.ndim} dimensions is not supported")
        mask = np.where(masked, low, np.float32(0))
    if attrs.get("unidirectional", 0) and length > 1:
        causal = np.arange(total) > past + np.arange(length)[:, None]
        causal[-1] = False  # the last query sees every key, even where there are more keys than queries
        mask = np.where(causal, np.finfo(np.float32).min, np.float32(0) if mask is None else mask)
    return mask


def _refuse(attrs: Attrs, *keys: str) -> None:
    for key in keys:
        if attrs.get(key):
            raise NotImplementedError(f"attribute {key} = {attrs[key]!r} is not supported")


# ---- Attention, QAttention, PackedAttention: the projection is part of the op ----


def _sizes(width: int, attrs: Attrs) -> tuple[int, int, int]:
    """The widths of Q, K and V in the projection."""
    given_sizes = tuple(attrs.get("qkv_hidden_sizes", ()))
    if given_sizes and (len(given_sizes) != 3 or sum(given_sizes) != width):
        raise ValueError(f"qkv_hidden_sizes {list(given_sizes)} do not add up to {width}")
    return given_sizes or (width // 3, width // 3, width // 3)


def _self_attention(
    qkv: Array, attrs: Attrs, index: Array | None, past: Array | None, bias: Array | None
) -> tuple[Array, Array]:
    """The output and the present state (2, B, N, T, H) from the projection (B, S, D + D + Dv)."""
    n = attrs["num_heads"]
    sizes = _sizes(qkv.shape[-1], attrs)
    q, k, v = (heads(x, n) for x in np.split(qkv, [sizes[0], sizes[0] + sizes[1]], axis=-1))
    if past is not None:
        k, v = np.concatenate([wide(past[0]), k], 2), np.concatenate([wide(past[1]), v], 2)
    mask = mask_of(index, q.shape[0], q.shape[2], k.shape[2] - q.shape[2], k.shape[2], attrs)
    y, _ = attend(q, k, v, attrs, None if bias is None else wide(bias), mask)
    present = np.stack([k, v]) if k.shape == v.shape else np.zeros(0, k.dtype)
    return y, present


def _attention(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    x = inputs[0]
    qkv = np.matmul(wide(x), wide(inputs[1]))
    if optional(inputs, 2) is not None:
        qkv = qkv + wide(inputs[2])
    y, present = _self_attention(qkv, attrs, optional(inputs, 3), optional(inputs, 4), optional(inputs, 5))
    return [y.astype(x.dtype, copy=False), present.astype(x.dtype, copy=False)]


def _infer_projected(past_at: int, bias_at: int) -> Infer:
    def infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
        _refuse(attrs, "do_rotary", "past_present_share_buffer")
        batch, length, _ = dims(operands, 0, 3)
        width = dims(operands, 1, 2)[1]
        dtype = tensor(operands, bias_at).dtype if given(operands, bias_at) else tensor(operands, 0).dtype
        value: Dim = _sizes(width, attrs)[2] if isinstance(width, WHOLE) else None
        total = plus(dims(operands, past_at, 5)[3] if given(operands, past_at) else 0, length)
        present = (2, batch, attrs["num_heads"], total, part(value, attrs["num_heads"], "the width of V"))
        return [TensorType(dtype, (batch, length, value)), TensorType(dtype, present)]

    return infer


def _q_attention(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """QAttention: the projection runs in integers, the rest in float32."""
    x, w, bias, x_scale, w_scale = inputs[:5]
    x_zero, w_zero = optional(inputs, 6), optional(inputs, 7)
    a = x.astype(np.int32) - (0 if x_zero is None else x_zero.astype(np.int32).reshape(()))
    b = w.astype(np.int32) - (0 if w_zero is None else along(w_zero.astype(np.int32), 2, 1))
    scale = x_scale.reshape(()) * along(w_scale, 2, 1)
    qkv = integer_matmul(a, b).astype(np.float32) * scale + bias
    return list(_self_attention(np.asarray(qkv, np.float32), attrs, optional(inputs, 5), optional(inputs, 8), None))


def _packed_rows(offsets: Array, count: Array) -> tuple[Array, Array]:
    """Positions of the real tokens in (B * S), and which positions of (B, S) are real."""
    real = np.arange(offsets.shape[1]) < np.diff(count)[:, None]
    return offsets.reshape(-1)[: int(count[-1])], real


def _unpack(x: Array, offsets: Array, rows: Array) -> Array:
    """(tokens, D) -> (B, S, D), with zeros at the padding."""
    full = np.zeros((offsets.size, x.shape[-1]), x.dtype)
    full[rows] = x
    return full.reshape(*offsets.shape, x.shape[-1])


def _packed(q: Array, k: Array, v: Array, offsets: Array, count: Array, bias: Array | None, attrs: Attrs) -> Array:
    """Attention over sequences stored without padding: q, k, v are (tokens, D)."""
    rows, real = _packed_rows(offsets, count)
    n = attrs["num_heads"]
    mask = np.where(real, np.float32(0), np.finfo(np.float32).min)[:, None, None]
    q, k, v = (heads(_unpack(x, offsets, rows), n) for x in (q, k, v))
    y, _ = attend(q, k, v, attrs, None if bias is None else wide(bias), mask)
    return np.asarray(y.reshape(-1, y.shape[-1])[rows])


def _packed_attention(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    x, w, bias, offsets, count = inputs[:5]
    qkv = np.matmul(wide(x), wide(w)) + wide(bias)
    sizes = _sizes(qkv.shape[-1], attrs)
    q, k, v = np.split(qkv, [sizes[0], sizes[0] + sizes[1]], axis=-1)
    return [_packed(q, k, v, offsets, count, optional(inputs, 5), attrs).astype(x.dtype, copy=False)]


def _infer_packed_attention(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    width = dims(operands, 1, 2)[1]
    value: Dim = _sizes(width, attrs)[2] if isinstance(width, WHOLE) else None
    return [TensorType(tensor(operands, 0).dtype, (dims(operands, 0, 2)[0], value))]


def _packed_multi_head(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    x, k, v, bias, offsets, count = inputs[:6]
    if k is None:  # (tokens, N, 3, H)
        q, k, v = (wide(x[:, :, j]).reshape(len(x), -1) for j in range(3))
    else:
        q, k, v = wide(x), wide(k), wide(v)
    if bias is not None:
        parts = np.split(wide(bias), [q.shape[1], 2 * q.shape[1]])
        q, k, v = q + parts[0], k + parts[1], v + parts[2]
    return [_packed(q, k, v, offsets, count, optional(inputs, 6), attrs).astype(x.dtype, copy=False)]


def _infer_packed_multi_head(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    q = tensor(operands, 0)
    if not given(operands, 1):
        tokens, count, _, size = dims(operands, 0, 4)
        return [TensorType(q.dtype, (tokens, times(count, size)))]
    return [TensorType(q.dtype, (dims(operands, 0, 2)[0], dims(operands, 2, 2)[1]))]


# ---- MultiHeadAttention and its decoder form: projected inputs, separate caches ----


def _split_heads(
    query: Array, key: Array | None, value: Array | None, bias: Array | None, n: int
) -> tuple[Array, Array, Array]:
    """Q, K and V as (B, N, S, H) from any of the packings, with the biases added."""
    if query.ndim == 5:  # (B, S, N, 3, H)
        q, k, v = (wide(query[:, :, :, j]).reshape(*query.shape[:2], -1) for j in range(3))
    elif key is None:  # (B, 1, 3 * N * H), in the decoder form
        q, k, v = np.split(wide(query), 3, axis=-1)
    elif key.ndim == 5:  # (B, L, N, 2, H)
        q, (k, v) = wide(query), (wide(key[:, :, :, j]).reshape(*key.shape[:2], -1) for j in range(2))
    else:
        assert value is not None
        q, k, v = wide(query), wide(key), wide(value)
    if bias is not None:
        width = q.shape[-1]
        q = q + wide(bias)[:width]
        if k.ndim == 3:  # keys and values in cache form already include the bias
            k, v = k + wide(bias)[width : 2 * width], v + wide(bias)[2 * width :]
    return heads(q, n), k if k.ndim == 4 else heads(k, n), v if v.ndim == 4 else heads(v, n)


def _append(past: Array | None, new: Array, length: Array | None) -> tuple[Array, Array]:
    """(keys to attend to, new cache). With ``length``, the cache is filled from there on. Otherwise it grows."""
    if past is None:
        return new, new
    if length is None:
        grown = np.concatenate([wide(past), new], 2)
        return grown, grown
    begin = int(length.reshape(-1)[0])
    end = begin + new.shape[2]
    if not 0 <= begin <= end <= past.shape[2]:
        raise ValueError(f"keys {begin} to {end} do not fit a cache of {past.shape[2]}")
    cache = wide(past).copy()
    cache[:, :, begin:end] = new
    return cache[:, :, :end], cache


def _follow_beams(keys: Array, beams: Array) -> Array:
    """Keys (B * W, N, T, H) of each beam's own history: entry t is that of beam ``beams[b, w, t]`` in the batch."""
    batch, width, _ = beams.shape
    count, past = keys.shape[2], keys.shape[2] - 1
    source = np.arange(batch * width)[:, None].repeat(count, 1)
    source[:, :past] = (beams[:, :, :past] + width * np.arange(batch)[:, None, None]).reshape(batch * width, past)
    return keys[source, :, np.arange(count)].transpose(0, 2, 1, 3)


def _multi_head(
    query: Array,
    key: Array | None,
    value: Array | None,
    bias: Array | None,
    index: Array | None,
    extra: Array | None,
    past: tuple[Array | None, Array | None],
    length: Array | None,
    beams: Array | None,
    attrs: Attrs,
) -> Sequence[Any]:
    q, k, v = _split_heads(query, key, value, bias, attrs["num_heads"])
    new = k.shape[2]
    k, present_k = _append(past[0], k, length)
    v, present_v = _append(past[1], v, length)
    if beams is not None and past[0] is not None:
        k, v = _follow_beams(k, beams), _follow_beams(v, beams)
        if extra is not None and extra.shape[0] != 1:
            extra = extra[np.arange(len(q)) // beams.shape[1]]
    mask = mask_of(index, q.shape[0], q.shape[2], k.shape[2] - new, k.shape[2], attrs)
    y, scores = attend(q, k, v, attrs, None if extra is None else wide(extra), mask)
    return [x.astype(query.dtype, copy=False) for x in (y, present_k, present_v, scores)]


def _multi_head_attention(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    found = [optional(inputs, i) for i in range(10)]
    query, key, value, bias, index, extra, past_key, past_value, length, beams = found
    return _multi_head(query, key, value, bias, index, extra, (past_key, past_value), length, beams, attrs)


def _decoder_attention(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    found = [optional(inputs, i) for i in range(11)]
    query, key, value, index, extra, past_key, past_value, length, _, beams, bias = found
    shared = length if attrs.get("past_present_share_buffer", 0) else None
    return _multi_head(query, key, value, bias, index, extra, (past_key, past_value), shared, beams, attrs)


def _infer_multi_head(past_at: int, length_at: int, share_key: str | None) -> Infer:
    def infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
        t, count = tensor(operands, 0), attrs["num_heads"]
        query = t.shape
        if query is None:
            return [TensorType(t.dtype)] * 4
        if len(query) not in (3, 5):
            raise ValueError(f"query has {len(query)} dimensions instead of 3 or 5")
        batch, length = query[:2]
        new, width = length, times(query[2], query[4]) if len(query) == 5 else query[2]
        value = width
        if given(operands, 1):
            key = tensor(operands, 1).shape
            new = None if key is None else key[2] if len(key) == 4 else key[1]
            if given(operands, 2):
                last = tensor(operands, 2).shape
                value = None if last is None else times(last[1], last[3]) if len(last) == 4 else last[2]
        elif len(query) == 3:
            width = value = part(width, 3, "the width of a packed query")
        if given(operands, past_at):
            room = dims(operands, past_at, 4)[2]
            shared = given(operands, length_at) and (share_key is None or bool(attrs.get(share_key, 0)))
            kept, total = (room, None) if shared else (plus(room, new),) * 2
        else:
            kept = total = new
        size, value_size = part(width, count, "the width of Q"), part(value, count, "the width of V")
        cache: Shape = (batch, count, kept)
        shapes: list[Shape] = [
            (batch, length, value),
            (*cache, size),
            (*cache, value_size),
            (batch, count, length, total),
        ]
        return [TensorType(t.dtype, shape) for shape in shapes]

    return infer


def _flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    """Flops of the projection (where the second input is a matrix) and both products, for as many keys as queries."""
    x, w = inputs[0], inputs[1] if len(inputs) > 1 else None
    assert x is not None
    length = x.dims[1] if len(x.dims) > 2 else x.dims[0]
    products = 4.0 * outputs[0].size * length
    return products + (2.0 * x.size * w.dims[1] if w is not None and len(w.dims) == 2 else 0.0)


OPS = (
    heavy("Attention", _attention, _infer_projected(past_at=4, bias_at=2), _flops),
    heavy("QAttention", _q_attention, _infer_projected(past_at=8, bias_at=2), _flops),
    heavy("PackedAttention", _packed_attention, _infer_packed_attention, _flops),
    heavy("MultiHeadAttention", _multi_head_attention, _infer_multi_head(6, 8, None), _flops, steep=True),
    heavy(
        "DecoderMaskedMultiHeadAttention",
        _decoder_attention,
        _infer_multi_head(5, 7, "past_present_share_buffer"),
        _flops,
    ),
    heavy("PackedMultiHeadAttention", _packed_multi_head, _infer_packed_multi_head, _flops),
)
