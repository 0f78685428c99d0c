"""Mixture of experts: each token goes through the few experts that its router prefers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import TensorType, Type

from ..base import Array, Attrs, Operands, OpSpec
from ..numeric import sigmoid, wide
from ..onnx.reduction import softmax
from ..shapes import given, optional, tensor
from .common import MS, fast_gelu


def _swiglu(gate: Array, linear: Array, attrs: Attrs) -> Array:
    limit = np.float32(attrs.get("swiglu_limit", np.inf))
    gate, linear = np.minimum(gate, limit), np.clip(linear, -limit, limit)
    alpha, beta = np.float32(attrs.get("activation_alpha", 1.0)), np.float32(attrs.get("activation_beta", 0.0))
    return np.asarray(gate * sigmoid(np.asarray(alpha * gate)) * (linear + beta))


def _activate(x: Array, attrs: Attrs) -> Array:
    kind = attrs.get("activation_type", "relu")
    if kind == "swiglu":
        fusion = attrs.get("swiglu_fusion", 0)
        gate, linear = (x[:, 0::2], x[:, 1::2]) if fusion == 1 else np.split(x, 2, axis=-1)
        return _swiglu(gate, linear, attrs)
    if kind == "relu":
        return np.maximum(x, 0)
    if kind == "gelu":
        return fast_gelu(x)
    return np.asarray(x * sigmoid(x)) if kind == "silu" else x


def _moe(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    x, router, w1, b1, w2, b2, w3, b3 = (optional(inputs, i) for i in range(8))
    tokens = wide(x).reshape(-1, x.shape[-1])
    shares = softmax(wide(router))
    chosen = np.argsort(-shares, axis=1, kind="stable")[:, : attrs.get("k", 1)]
    weights = np.take_along_axis(shares, chosen, 1)
    if attrs.get("normalize_routing_weights", 0):
        weights = weights / weights.sum(1, keepdims=True)
    y = np.zeros_like(tokens)
    for expert in np.unique(chosen):
        rows, place = np.nonzero(chosen == expert)
        hidden = tokens[rows] @ wide(w1[expert]).T + (0 if b1 is None else wide(b1[expert]))
        if w3 is None:
            active = _activate(hidden, attrs)
        else:
            linear = tokens[rows] @ wide(w3[expert]).T + (0 if b3 is None else wide(b3[expert]))
            separate = attrs.get("activation_type", "relu") == "swiglu"
            active = _swiglu(hidden, linear, attrs) if separate else _activate(hidden, attrs) * linear
        result = active @ wide(w2[expert]).T + (0 if b2 is None else wide(b2[expert]))
        y[rows] += weights[rows, place][:, None] * result
    return [y.reshape(x.shape).astype(x.dtype, copy=False)]


def _infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    if attrs.get("use_sparse_mixer", 0):
        raise NotImplementedError("use_sparse_mixer is not supported")
    kind, fusion = attrs.get("activation_type", "relu"), attrs.get("swiglu_fusion", 0)
    if kind not in ("relu", "gelu", "silu", "swiglu", "identity"):
        raise ValueError(f"activation_type {kind!r} is not known")
    if kind == "swiglu" and not fusion and not given(operands, 6):
        raise ValueError("swiglu needs fc3_experts_weights, or swiglu_fusion 1 or 2")
    experts = tensor(operands, 2).shape
    if experts is not None and isinstance(experts[0], WHOLE) and attrs.get("k", 1) > experts[0]:
        raise ValueError(f"k is {attrs['k']}, but there are {experts[0]} experts")
    return [tensor(operands, 0)]


def _flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    x = inputs[0]
    assert x is not None
    each = sum(w.size / max(w.dims[0], 1) for w in (optional(inputs, i) for i in (2, 4, 6)) if w is not None)
    return float(2.0 * (x.size / max(x.dims[-1], 1)) * attrs.get("k", 1) * each)


OPS = (OpSpec(MS + "MoE", _moe, _infer, flops=_flops, heavy=True),)
