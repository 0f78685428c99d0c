"""Normalisations of com.microsoft: sums with a residual, embeddings, RMS and group normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import DType, Shape, TensorType, Type
from tunewright.ops import batch_rules

from ..base import Array, Attrs, Infer, Operands, OpSpec
from ..input_errors import check_rows
from ..numeric import sigmoid, wide
from ..shapes import axis_of, given, optional, tensor
from .common import MS, dequantize, dims


def _normalize(x: Array, epsilon: float, axes: Any = -1, centre: bool = True) -> tuple[Array, Array, Array]:
    """(normalised, mean, 1 / deviation). Without ``centre``, x is divided by the root of the mean square."""
    mean = x.mean(axes, keepdims=True) if centre else np.zeros((), x.dtype)
    shifted = x - mean
    deviation = np.sqrt((shifted * shifted).mean(axes, keepdims=True) + x.dtype.type(epsilon))
    return np.asarray(shifted / deviation), np.asarray(mean), np.asarray(1 / deviation)


def _rows(shape: Shape | None, axis: int = -1) -> Shape | None:
    """The shape of the statistics: 1 in the reduced dimensions."""
    return None if shape is None else (*shape[:axis], *[1] * (len(shape) - axis_of(axis, len(shape))))


def _skip_layer_norm(inputs: Sequence[Any], attrs: Attrs, centre: bool) -> Sequence[Any]:
    x, skip, gamma = inputs[:3]
    beta = optional(inputs, 3) if centre else None
    bias = optional(inputs, 4 if centre else 3)
    total = wide(x) + wide(skip)  # a skip of lower rank, or with one batch, is the same for all
    if bias is not None:
        total = total + wide(bias)
    y, mean, inverse = _normalize(total, attrs.get("epsilon", 1e-12), centre=centre)
    y = y * wide(gamma)
    if beta is not None:
        y = y + wide(beta)
    statistics = np.broadcast_to(mean, inverse.shape).astype(np.float32), inverse.astype(np.float32)
    return [y.astype(x.dtype, copy=False), *statistics, total.astype(x.dtype, copy=False)]


def _infer_skip_layer_norm(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    t, gamma = tensor(operands, 0), tensor(operands, 2)
    if t.shape is not None and len(t.shape) < 2:
        raise ValueError(f"input 0 has {len(t.shape)} dimensions; at least 2 are needed")
    if t.shape and gamma.shape and isinstance(t.shape[-1], int) and gamma.shape[-1] not in (t.shape[-1], None):
        raise ValueError(f"gamma has {gamma.shape[-1]} entries instead of {t.shape[-1]}")
    statistics = TensorType(DType.FLOAT32, _rows(t.shape))
    return [t, statistics, statistics, t]


def _simplified(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    x, scale = inputs[:2]
    axis = axis_of(attrs.get("axis", -1), x.ndim)
    y, _, inverse = _normalize(wide(x), attrs.get("epsilon", 1e-5), tuple(range(axis, x.ndim)), centre=False)
    return [np.asarray(y * wide(scale)).astype(scale.dtype, copy=False), inverse.astype(np.float32, copy=False)]


def _infer_simplified(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    t, scale = tensor(operands, 0), tensor(operands, 1)
    if t.shape is None:
        return [TensorType(scale.dtype), TensorType(DType.FLOAT32)]
    axis = axis_of(attrs.get("axis", -1), len(t.shape))
    return [TensorType(scale.dtype, t.shape), TensorType(DType.FLOAT32, _rows(t.shape, axis))]


def _embed(
    ids: Array,
    segments: Array | None,
    tables: Sequence[Array | None],
    gamma: Array,
    beta: Array,
    mask: Array | None,
    positions: Array | None,
    epsilon: float,
) -> Sequence[Any]:
    """The normalised sum of word, position and segment vectors, and the number of ones in each row of the mask."""
    word, position, segment = tables
    assert word is not None and position is not None
    if positions is None:
        positions = np.arange(ids.shape[1])[None]
    for table, index in ((word, ids), (position, positions), (segment, segments)):
        if table is not None and index is not None:
            check_rows(index, len(table))
    total = wide(word)[ids] + wide(position)[positions]
    if segment is not None and segments is not None:
        total = total + wide(segment)[segments]
    y, _, _ = _normalize(total, epsilon)
    y = y * wide(gamma) + wide(beta)
    count = np.zeros(ids.shape[0], np.int32) if mask is None else (mask == 1).sum(1).astype(np.int32)
    return [y.astype(word.dtype, copy=False), count, total.astype(word.dtype, copy=False)]


def _embed_layer_norm(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    ids, segments, word, position, segment, gamma, beta = inputs[:7]
    mask, positions = optional(inputs, 7), optional(inputs, 8)
    tables = (word, position, segment)
    return _embed(ids, segments, tables, gamma, beta, mask, positions, attrs.get("epsilon", 1e-12))


def _q_embed_layer_norm(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """Embedding with 8-bit tables and parameters: inputs 2 to 6, with scales from input 8 on and zero points from 13
    on."""
    parts = [(optional(inputs, k), optional(inputs, k + 6), optional(inputs, k + 11)) for k in range(2, 7)]
    floats = [None if x is None else dequantize(x, scale, zero) for x, scale, zero in parts]
    assert floats[3] is not None and floats[4] is not None
    return _embed(
        inputs[0], inputs[1], floats[:3], floats[3], floats[4], optional(inputs, 7), None, attrs.get("epsilon", 1e-12)
    )


def _infer_embed(dtype: DType | None) -> Infer:
    def infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
        batch, length = dims(operands, 0, 2)
        word = tensor(operands, 2)
        hidden = dims(operands, 2, 2)[1]
        if given(operands, 1) != given(operands, 4):
            raise ValueError("segment_ids and segment_embedding come together")
        t = TensorType(dtype or word.dtype, (batch, length, hidden))
        return [t, TensorType(DType.INT32, (batch,)), t]

    return infer


def _group_norm(inputs: Sequence[Any], attrs: Attrs, skip: bool) -> Sequence[Any]:
    """Normalise groups of channels. Channels are last unless the attribute says otherwise. SiLU follows on request."""
    x, gamma, beta = inputs[:3]
    last = attrs.get("channels_last", 1)
    total = wide(x) if last else wide(x).transpose(0, 2, 3, 1)
    if skip:
        residual = wide(inputs[3])
        if residual.ndim == 2:
            residual = residual[:, None, None, :]
        elif not last:
            residual = residual.transpose(0, 2, 3, 1)
        total = total + residual
        if optional(inputs, 4) is not None:
            total = total + wide(inputs[4])
    batch, channels = total.shape[0], total.shape[-1]
    groups = attrs["groups"]
    y, _, _ = _normalize(total.reshape(batch, -1, groups, channels // groups), attrs.get("epsilon", 1e-5), (1, 3))
    y = y.reshape(total.shape) * wide(gamma) + wide(beta)
    if attrs.get("activation", 0):
        y = y * sigmoid(np.asarray(y))
    results = [y, total] if last else [y.transpose(0, 3, 1, 2), total.transpose(0, 3, 1, 2)]
    return [np.ascontiguousarray(r).astype(x.dtype, copy=False) for r in results]


def _infer_group_norm(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    t, shape = tensor(operands, 0), dims(operands, 0, 4)
    channels = shape[-1] if attrs.get("channels_last", 1) else shape[1]
    if isinstance(channels, WHOLE) and (attrs["groups"] < 1 or channels % attrs["groups"]):
        raise ValueError(f"{channels} channels do not make {attrs['groups']} groups")
    return [t.with_shape(shape), t.with_shape(shape)]


def _gated_rms_norm(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """Normalise each run of len(scale) elements and multiply by an activated gate."""
    x, scale, gate = inputs
    rows, _, _ = _normalize(wide(x).reshape(-1, scale.size), attrs.get("epsilon", 1e-5), centre=False)
    z = wide(gate)
    active = sigmoid(z) * (1 if attrs.get("activation", "silu") == "sigmoid" else z)
    return [np.asarray((rows * wide(scale)).reshape(x.shape) * active).astype(x.dtype, copy=False)]


def _infer_first(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    return [tensor(operands, 0)]


OPS = (
    OpSpec(MS + "SkipLayerNormalization", lambda i, a, n: _skip_layer_norm(i, a, centre=True), _infer_skip_layer_norm),
    OpSpec(
        MS + "SkipSimplifiedLayerNormalization",
        lambda i, a, n: _skip_layer_norm(i, a, centre=False),
        _infer_skip_layer_norm,
    ),
    # ONNX Runtime registers this operator in ONNX's domain; some exporters write it in Microsoft's.
    OpSpec("SimplifiedLayerNormalization", _simplified, _infer_simplified, batch=batch_rules.along(-1, behind=True)),
    OpSpec(MS + "SimplifiedLayerNormalization", _simplified, _infer_simplified),
    OpSpec(MS + "EmbedLayerNormalization", _embed_layer_norm, _infer_embed(None), picks=True),
    OpSpec(MS + "QEmbedLayerNormalization", _q_embed_layer_norm, _infer_embed(DType.FLOAT32)),
    OpSpec(MS + "GroupNorm", lambda i, a, n: _group_norm(i, a, skip=False), _infer_group_norm),
    OpSpec(MS + "SkipGroupNorm", lambda i, a, n: _group_norm(i, a, skip=True), _infer_group_norm),
    OpSpec(MS + "GatedRMSNorm", _gated_rms_norm, _infer_first),
)
