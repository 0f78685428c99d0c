"""OpenVINO's normalisations: Normalize, NormalizeL2, GRN, MVN, GroupNorm, ExperimentalDetectronGroupNorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import Type

from ..base import Array, Attrs, Operands, OpSpec
from ..numeric import wide
from ..shapes import same_as, tensor
from .common import choice, flag, name, required


def _l2(x: Array, axes: tuple[int, ...], eps: float, mode: str) -> Array:
    if not axes:  # without axes, every element is divided by its own magnitude
        return np.asarray(x != 0, x.dtype)
    total = np.sum(x * x, axis=axes, keepdims=True)
    floor = x.dtype.type(eps)
    with np.errstate(divide="ignore", invalid="ignore"):
        result: Array = x / np.sqrt(total + floor if mode == "add" else np.maximum(total, floor))
    return result


def normalize(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    x, weights = wide(inputs[0]), wide(inputs[1])
    axes = tuple(range(1, x.ndim)) if flag(attrs, "across_spatial") else (1,)
    if not flag(attrs, "channel_shared"):
        weights = weights.reshape(-1, *(1,) * (x.ndim - 2))
    return [(_l2(x, axes, float(attrs.get("eps", 0.0)), "add") * weights).astype(inputs[0].dtype, copy=False)]


def _infer_normalize(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    data, weights = tensor(operands, 0), tensor(operands, 1)
    if data.rank is not None and data.rank < 2:
        raise ValueError(f"the data (input 0) have rank {data.rank}; at least 2 is needed")
    if flag(attrs, "channel_shared") and weights.is_static and weights.size != 1:
        raise ValueError(f"one weight (input 1) is shared by the channels, but there are {weights.size}")
    return [data]


def normalize_l2(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    x = wide(inputs[0])
    axes = tuple(int(a) % x.ndim for a in np.atleast_1d(inputs[1]))
    mode = choice(attrs, "eps_mode", "add", ("add", "max"))
    return [_l2(x, axes, float(attrs.get("eps", 0.0)), mode).astype(inputs[0].dtype, copy=False)]


def grn(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    return [_l2(wide(inputs[0]), (1,), float(required(attrs, "bias")), "add").astype(inputs[0].dtype, copy=False)]


def mvn(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    """MVN. MVN-6 has the axes as second input. MVN-1 uses the spatial axes and, on request, the channels."""
    x = wide(inputs[0])
    if len(inputs) > 1 and inputs[1] is not None:
        axes = tuple(int(a) % x.ndim for a in np.atleast_1d(inputs[1]))
    else:
        axes = tuple(range(1 if flag(attrs, "across_channels") else 2, x.ndim))
    result = x - x.mean(axis=axes, keepdims=True)
    if flag(attrs, "normalize_variance", True):
        eps = x.dtype.type(attrs.get("eps", 1e-9))
        variance = np.mean(result * result, axis=axes, keepdims=True)
        inside = choice(attrs, "eps_mode", "inside_sqrt", ("inside_sqrt", "outside_sqrt")) == "inside_sqrt"
        result = result / (np.sqrt(variance + eps) if inside else np.sqrt(variance) + eps)
    return [np.asarray(result).astype(inputs[0].dtype, copy=False)]


def group_norm(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    x, scale, bias = (wide(v) for v in inputs[:3])
    groups = int(required(attrs, "num_groups"))
    rows = x.reshape(x.shape[0], groups, -1)
    rows = rows - rows.mean(axis=2, keepdims=True)
    eps = x.dtype.type(attrs.get("eps", 1e-6))
    rows = rows / np.sqrt(np.mean(rows * rows, axis=2, keepdims=True) + eps)
    channel = (-1, *(1,) * (x.ndim - 2))
    return [
        (rows.reshape(x.shape) * scale.reshape(channel) + bias.reshape(channel)).astype(inputs[0].dtype, copy=False)
    ]


def _infer_group_norm(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    data, groups = tensor(operands, 0), int(required(attrs, "num_groups"))
    if data.shape is not None:
        channels = data.shape[1] if len(data.shape) > 1 else 1
        if groups < 1 or (isinstance(channels, WHOLE) and channels % groups):
            raise ValueError(f"{channels} channels do not fall into {groups} groups")
        for i in (1, 2):
            t = tensor(operands, i)
            if t.is_static and isinstance(channels, WHOLE) and t.size != channels:
                raise ValueError(f"input {i} has {t.size} values for {channels} channels")
    return [data]


OPS = (
    OpSpec(name("Normalize"), normalize, _infer_normalize),
    OpSpec(name("NormalizeL2"), normalize_l2, same_as()),
    OpSpec(name("GRN"), grn, same_as()),
    OpSpec(name("MVN"), mvn, same_as()),
    OpSpec(name("GroupNorm"), group_norm, _infer_group_norm),
    OpSpec(name("ExperimentalDetectronGroupNorm"), group_norm, _infer_group_norm),
)
