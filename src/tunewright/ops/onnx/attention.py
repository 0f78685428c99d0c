"""Attention and RotaryEmbedding. Narrow floats are multiplied and normalised in float32 and rounded at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import Dim, DType, TensorType, Type
from tunewright.ops import batch_rules

from .. import shapes
from ..base import Array, Attrs, Operands, OpSpec
from ..input_errors import check_lengths, check_rows
from ..numeric import narrow, wide
from ..samples import model as samples_model
from ..samples.base import with_samples
from .tensors.slicing import pad

#: An attribute that only the IR has. With it, a row whose keys are all hidden is NaN, like a softmax of -inf. Without
#: it, the row is zero.
NAN_ROWS = "nan_rows"


def split_heads(x: Array, heads: int) -> Array:
    """[batch, sequence, heads * size] -> [batch, heads, sequence, size]. An operand of rank 4 is returned unchanged."""
    if x.ndim == 4:
        return x
    if x.ndim != 3 or not heads or x.shape[2] % heads:
        raise ValueError(f"shape {list(x.shape)} does not split into {heads} heads")
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).transpose(0, 2, 1, 3)


def _bias(
    inputs: Sequence[Any], attrs: Attrs, queries: int, keys: int, past: int, dtype: np.dtype[Any]
) -> Array | None:
    """What is added to the scores: the mask, and -inf where causality, a window or padding hides a key. None adds
    nothing."""
    mask, valid = shapes.optional(inputs, 3), shapes.optional(inputs, 6)
    left, right = int(attrs.get("left_window_size", -1)), int(attrs.get("right_window_size", -1))
    if min(left, right) < -1:
        raise ValueError(f"window sizes {left} and {right} must be -1 or more")
    offset: Any = past if valid is None else valid.reshape(-1, 1, 1, 1) - queries
    ahead = np.arange(keys) - (np.arange(queries)[:, None] + offset)  # distance of each key ahead of its query
    allowed: Any = True
    if attrs.get("is_causal", 0):
        allowed = ahead <= 0
    if left >= 0:
        allowed = allowed & (ahead >= -left)
    if right >= 0:
        allowed = allowed & (ahead <= right)
    if valid is not None:
        allowed = allowed & (np.arange(keys) < valid.reshape(-1, 1, 1, 1))
    bias: Array | None = None
    if mask is not None:
        short = keys - mask.shape[-1]
        if short > 0:
            pairs = [(0, 0)] * (mask.ndim - 1) + [(0, short)]
            mask = pad(mask, pairs, fill=False if mask.dtype == np.bool_ else -math.inf)
        bias = np.where(mask, 0, -math.inf).astype(dtype) if mask.dtype == np.bool_ else wide(mask).astype(dtype)
    if allowed is not True:
        forbidden = np.where(allowed, 0, -math.inf).astype(dtype)
        bias = forbidden if bias is None else bias + forbidden
    return bias


def _softmax(scores: Array, bias: Array | None, nan_rows: bool = False) -> Array:
    """Softmax over the last axis. A row whose entries are all masked becomes zero, or NaN with ``nan_rows``."""
    top = scores.max(axis=-1, keepdims=True)
    y = np.exp(scores - np.where(np.isneginf(top), 0, top))
    total = y.sum(axis=-1, keepdims=True)
    y /= np.where(total == 0, 1, total)
    if bias is not None:
        masked = np.isneginf(bias.max(axis=-1, keepdims=True))
        if masked.any():
            y = np.where(masked, math.nan if nan_rows else 0, y).astype(y.dtype)
    return np.asarray(y)


def _attention(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    dtype, value_dtype = inputs[0].dtype, inputs[2].dtype
    q = split_heads(inputs[0], int(attrs.get("q_num_heads", 0)))
    k, v = (split_heads(x, int(attrs.get("kv_num_heads", 0))) for x in inputs[1:3])
    past_key, past_value, valid = (shapes.optional(inputs, i) for i in (4, 5, 6))
    if (past_key is None) != (past_value is None):
        raise ValueError("past_key and past_value come together")
    if valid is not None and past_key is not None:
        raise ValueError("nonpad_kv_seqlen and past_key exclude each other")
    past = 0
    if past_key is not None:
        past = past_key.shape[2]
        k, v = np.concatenate([past_key, k], 2), np.concatenate([past_value, v], 2)
    batch, heads, queries, size = q.shape
    groups, keys = k.shape[1], k.shape[2]
    if valid is not None:
        check_lengths(valid, keys)
    if heads % groups:
        raise ValueError(f"{heads} query heads do not divide into {groups} key heads")
    wq, wk, wv = wide(q), wide(k), wide(v)
    root = wq.dtype.type(math.sqrt(attrs.get("scale") or 1 / math.sqrt(size)))
    # Several query heads share one key head. They become rows of one product.
    rows = (wq * root).reshape(batch, groups, heads // groups * queries, size)
    scores = np.matmul(rows, (wk * root).swapaxes(-1, -2)).reshape(batch, heads, queries, keys)
    mode, cap = int(attrs.get("qk_matmul_output_mode", 0)), attrs.get("softcap", 0.0)
    shown = scores
    if cap > 0:
        scores = np.tanh(scores / scores.dtype.type(cap)) * scores.dtype.type(cap)
        shown = scores if mode == 1 else shown
    bias = _bias(inputs, attrs, queries, keys, past, scores.dtype)
    if bias is not None:
        scores = scores + bias
    shown = scores if mode == 2 else shown
    precision, nan_rows = attrs.get("softmax_precision"), bool(attrs.get(NAN_ROWS, 0))
    if precision is None:
        weights = _softmax(scores, bias, nan_rows) if keys else scores
    else:
        kind = DType.of_onnx(int(precision)).numpy
        weights = narrow(_softmax(wide(scores.astype(kind)), bias, nan_rows), kind).astype(scores.dtype)
    shown = weights if mode == 3 else shown
    width = v.shape[3]
    rows = weights.reshape(batch, groups, heads // groups * queries, keys)
    y = np.matmul(rows, wv).reshape(batch, heads, queries, width)
    if inputs[0].ndim == 3:
        y = y.transpose(0, 2, 1, 3).reshape(batch, queries, heads * width)
    results = [narrow(y, dtype), narrow(k, dtype), narrow(v, value_dtype)]
    return [*results, narrow(shown, dtype)] if n > 3 else results


def _heads(t: TensorType, heads: int) -> tuple[Dim, Dim, Dim, Dim]:
    """(batch, heads, sequence, size) of an operand of rank 3 or 4."""
    if t.shape is None:
        return (None, heads or None, None, None)
    if len(t.shape) == 4:
        return t.shape
    if len(t.shape) != 3:
        raise ValueError(f"an input has rank {len(t.shape)} instead of 3 or 4")
    if heads < 1:
        raise ValueError("inputs of rank 3 need q_num_heads and kv_num_heads")
    hidden = t.shape[2]
    if isinstance(hidden, WHOLE) and hidden % heads:
        raise ValueError(f"{hidden} features do not split into {heads} heads")
    return t.shape[0], heads, t.shape[1], hidden // heads if isinstance(hidden, WHOLE) else None


def _infer_attention(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    q, k, v = (shapes.tensor(operands, i) for i in range(3))
    batch, heads, queries, size = _heads(q, int(attrs.get("q_num_heads", 0)))
    batch_k, groups, keys, key_size = _heads(k, int(attrs.get("kv_num_heads", 0)))
    batch_v, _, _, value_size = _heads(v, int(attrs.get("kv_num_heads", 0)))
    batch = shapes.same_dim(shapes.same_dim(batch, batch_k, "batch"), batch_v, "batch")
    shapes.same_dim(size, key_size, "queries and keys differ in size")
    if isinstance(heads, WHOLE) and isinstance(groups, WHOLE) and (not groups or heads % groups):
        raise ValueError(f"{heads} query heads do not divide into {groups} key heads")
    total = keys
    if shapes.given(operands, 4):
        past = shapes.need_rank(shapes.tensor(operands, 4), 4, "past_key")[2]
        total = past + keys if isinstance(past, WHOLE) and isinstance(keys, WHOLE) else None
    y: tuple[Dim, ...] | None = None
    if q.shape is not None and len(q.shape) == 4:
        y = (batch, heads, queries, value_size)
    elif q.shape is not None:
        whole = heads * value_size if isinstance(heads, WHOLE) and isinstance(value_size, WHOLE) else None
        y = (batch, queries, whole)
    return [
        TensorType(q.dtype, y),
        TensorType(k.dtype, (batch, groups, total, key_size)),
        TensorType(v.dtype, (batch, groups, total, value_size)),
        TensorType(q.dtype, (batch, heads, queries, total)),
    ][:n]


def _flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    q, k = inputs[0], inputs[1]
    assert q is not None and k is not None
    past = inputs[4].dims[2] if len(inputs) > 4 and inputs[4] is not None else 0
    keys = past + k.dims[-2]
    # The first product combines each query element with every key, the second each result element with every value.
    return 2.0 * keys * (q.size + outputs[0].size)


# -- RotaryEmbedding --------------------------------------------------------------------------------------------------
def _rotary(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    x, cos, sin, positions = inputs[0], wide(inputs[1]), wide(inputs[2]), shapes.optional(inputs, 3)
    y = wide(split_heads(x, int(attrs.get("num_heads", 0)))).copy()
    if positions is not None:
        check_rows(positions, len(cos))
        cos, sin = cos[positions], sin[positions]
    cos, sin = cos[:, None], sin[:, None]  # all heads share one angle
    size = int(attrs.get("rotary_embedding_dim", 0)) or y.shape[-1]
    half = size // 2
    if cos.shape[-1] != half or sin.shape[-1] != half:
        raise ValueError(f"the caches hold {cos.shape[-1]} angles where {half} are needed")
    if attrs.get("interleaved", 0):
        first, second = slice(0, size, 2), slice(1, size, 2)
    else:
        first, second = slice(0, half), slice(half, size)
    a, b = y[..., first].copy(), y[..., second].copy()
    y[..., first] = cos * a - sin * b
    y[..., second] = sin * a + cos * b
    if x.ndim == 3:
        y = y.transpose(0, 2, 1, 3).reshape(x.shape)
    return [narrow(y, x.dtype)]


OPS = with_samples(
    (
        OpSpec(
            "Attention",
            _attention,
            _infer_attention,
            flops=_flops,
            heavy=True,
            batch=batch_rules.attention,
            steep=True,
            roles=("query", "key", "value", "mask", "past-key", "past-value"),
        ),
        OpSpec("RotaryEmbedding", _rotary, shapes.same_as(), batch=batch_rules.rotary),
    ),
    samples_model.ATTENTION,
)
