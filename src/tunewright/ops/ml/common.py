"""Helpers of the ai.onnx.ml operators: labels, scores of classes, and post transforms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.types import Dim, DType, TensorType, Type

from ..base import Array, Attrs, Operands
from ..shapes import tensor

DOMAIN = "ai.onnx.ml::"


def strings(values: Sequence[Any]) -> Array:
    """A vector of strings."""
    result = np.empty(len(values), object)
    result[:] = list(values)
    return result


def labels(attrs: Attrs, number_key: str) -> Array:
    """The labels of the classes: strings or numbers."""
    names = attrs.get("classlabels_strings", ())
    return strings(names) if names else np.asarray(attrs.get(number_key, ()), np.int64)


def label_type(attrs: Attrs) -> DType:
    return DType.STRING if attrs.get("classlabels_strings", ()) else DType.INT64


def rows(operands: Operands) -> Dim:
    """The number of samples. A vector is one sample."""
    x = tensor(operands, 0)
    if x.shape is None:
        return None
    return x.shape[0] if len(x.shape) > 1 else 1


def matrix(x: Array) -> Array:
    """The input as [N, C] in floating point. A vector is one sample."""
    flat = x.reshape(1, -1) if x.ndim == 1 else x.reshape(x.shape[0], math.prod(x.shape[1:]))
    return flat if flat.dtype in (np.float32, np.float64) else flat.astype(np.float32)


def classified(operands: Operands, attrs: Attrs, columns: Dim) -> Sequence[Type | None]:
    """Types of a classifier's outputs: a label and ``columns`` scores per sample."""
    n = rows(operands)
    return [TensorType(label_type(attrs), (n,)), TensorType(DType.FLOAT32, (n, columns))]


def logistic(x: Array) -> Array:
    e = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1 / (1 + e), e / (1 + e)))


def probit(x: Array) -> Array:
    """The inverse of the cumulative normal distribution, in Winitzki's approximation."""
    y = 2 * x - 1
    log = np.log((1 - y) * (1 + y))
    v = 2 / (np.pi * 0.147) + 0.5 * log
    return np.asarray(np.sqrt(2.0) * np.sign(y) * np.sqrt(-v + np.sqrt(v * v - log / 0.147)))


def softmax(x: Array, skip_zero: bool = False) -> Array:
    """Softmax over the last axis. With ``skip_zero``, zero scores stay zero and are left out of the sum."""
    e = np.exp(x - x.max(-1, keepdims=True))
    if skip_zero:
        e = np.where(np.abs(x) > 1e-7, e, 0)
        total = e.sum(-1, keepdims=True)
        return np.asarray(e / np.where(total == 0, 1, total))
    return np.asarray(e / e.sum(-1, keepdims=True))


def transform(scores: Array, post: str) -> Array:
    """Apply the post transform to two or more scores per sample."""
    if post == "SOFTMAX":
        return softmax(scores)
    if post == "SOFTMAX_ZERO":
        return softmax(scores, skip_zero=True)
    if post == "LOGISTIC":
        return logistic(scores)
    return probit(scores) if post == "PROBIT" else scores
