"""Position operators of com.microsoft: rotary embeddings and relative position biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.types import Dim, TensorType, Type

from ..base import Array, Attrs, Operands, OpSpec
from ..input_errors import check_rows
from ..numeric import sigmoid, wide
from ..shapes import optional, tensor, value
from .attention import heads
from .common import MS, dims


def rotate(x: Array, positions: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Rotate the first 2 * cos.shape[1] elements of each head of (B, N, S, H); positions are (B or 1, S)."""
    check_rows(positions, len(cos))
    half = cos.shape[1]
    c, s = wide(cos)[positions][:, None], wide(sin)[positions][:, None]
    y = wide(x).copy()
    first, second = slice(0, half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    real, imaginary = wide(x)[..., first], wide(x)[..., second]
    y[..., first] = real * c - imaginary * s
    y[..., second] = real * s + imaginary * c
    return y.astype(x.dtype, copy=False)


def spread(positions: Array, batch: int, length: int) -> Array:
    """Positions per token. One number is the position of the first token; a matrix holds all positions."""
    if positions.size == 1 and batch * length != 1:
        return np.asarray(positions.reshape(1, 1) + np.arange(length))
    return positions.reshape(-1, length)


def _rotary(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    x, positions, cos, sin = inputs
    interleaved = bool(attrs.get("interleaved", 0))
    if x.ndim == 4:
        return [rotate(x, spread(positions, x.shape[0], x.shape[2]), cos, sin, interleaved)]
    count = attrs.get("num_heads", 0) or x.shape[-1] // (2 * cos.shape[1])
    y = rotate(heads(x, count), spread(positions, x.shape[0], x.shape[1]), cos, sin, interleaved)
    return [np.ascontiguousarray(y.transpose(0, 2, 1, 3)).reshape(x.shape)]


def _infer_rotary(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    t = tensor(operands, 0)
    if t.shape is not None and len(t.shape) not in (3, 4):
        raise ValueError(f"input 0 has {len(t.shape)} dimensions instead of 3 or 4")
    return [t]


def _gemma_rotary(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """Gemma's rotary embedding. Sine and cosine are rounded to the type of q, as in the pattern that the operator
    replaces."""
    angles, q, q_rotated, k, k_rotated = inputs
    cos, sin = (wide(g(wide(angles)).astype(q.dtype))[:, None] for g in (np.cos, np.sin))
    return [
        np.asarray(wide(a) * cos + wide(b) * sin).astype(q.dtype, copy=False)
        for a, b in ((q, q_rotated), (k, k_rotated))
    ]


def _infer_gemma_rotary(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    return [tensor(operands, 1), tensor(operands, 3)]


def _buckets(queries: int, keys: int, count: int, distance: int, both: bool) -> Array:
    """Relative position buckets of T5: exact for near positions, logarithmic for far ones, the last beyond
    ``distance``."""
    relative = np.arange(keys)[None] - np.arange(queries)[:, None]
    offset: Array = np.zeros(relative.shape, np.int64)
    if both:
        count //= 2
        offset = np.where(relative > 0, count, 0)
        relative = np.abs(relative)
    else:
        relative = np.maximum(-relative, 0)
    exact = count // 2
    steps = np.log(np.maximum(relative, 1).astype(np.float32) / np.float32(exact)) / np.log(
        np.float32(distance / exact)
    )
    far = exact + (steps * (count - exact)).astype(np.int64)
    return np.asarray(offset + np.where(relative < exact, relative, np.minimum(far, count - 1)))


def _relative_position_bias(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """Relative position bias. The table's shape is (buckets, heads), but its elements are stored head by head."""
    table = inputs[0]
    buckets, rows = table.shape
    queries, keys = (int(np.asarray(x).reshape(-1)[0]) for x in inputs[1:3])
    index = _buckets(queries, keys, buckets, attrs["max_distance"], bool(attrs.get("is_bidirectional", 0)))
    return [table.reshape(rows, buckets)[:, index][None]]


def _infer_relative_position_bias(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    lengths: list[Dim] = [None if (v := value(operands, i)) is None else int(v.reshape(-1)[0]) for i in (1, 2)]
    return [TensorType(tensor(operands, 0).dtype, (1, dims(operands, 0, 2)[1], *lengths))]


def _gated_relative_position_bias(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    query, query_bias, relative, weight, bias, eco = inputs[:6]
    if optional(inputs, 6) is not None:
        raise ValueError("token_offset (packed sequences) is not supported")
    q = heads(np.asarray(wide(query) + wide(query_bias)), attrs["num_heads"])
    gates = np.matmul(q, wide(weight)) + wide(bias)
    update, reset = np.moveaxis(sigmoid(gates.reshape(*gates.shape[:3], 2, -1).sum(-1)), -1, 0)[..., None]
    return [np.asarray((update * (reset * wide(eco) - 1) + 2) * wide(relative)).astype(query.dtype, copy=False)]


def _infer_gated_relative_position_bias(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    batch, length, _ = dims(operands, 0, 3)
    return [TensorType(tensor(operands, 0).dtype, (batch, attrs["num_heads"], length, length))]


OPS = (
    OpSpec(MS + "RotaryEmbedding", _rotary, _infer_rotary),
    OpSpec(MS + "GemmaRotaryEmbedding", _gemma_rotary, _infer_gemma_rotary),
    OpSpec(MS + "RelativePositionBias", _relative_position_bias, _infer_relative_position_bias),
    OpSpec(MS + "GatedRelativePositionBias", _gated_relative_position_bias, _infer_gated_relative_position_bias),
)
