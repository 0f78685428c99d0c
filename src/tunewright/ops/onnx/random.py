"""Operators that draw random numbers. Without a seed each run draws anew; with a seed each run draws the same numbers.

ONNX specifies distributions, not streams, so the numbers are numpy's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tunewright.ir.types import DType, Shape, TensorType, Type

from ..base import Array, Attrs, Infer, Operands, OpSpec, Reference
from ..shapes import tensor


def _generator(attrs: Attrs) -> np.random.RandomState:
    """numpy's legacy generator, because onnx's own tests of training mode rely on its stream."""
    seed = attrs.get("seed")
    return np.random.RandomState(None if seed is None else int(seed) & 0xFFFFFFFF)


def _normal(random: np.random.RandomState, shape: tuple[int, ...], attrs: Attrs) -> Array:
    return np.asarray(random.normal(attrs.get("mean", 0.0), attrs.get("scale", 1.0), shape))


def _uniform(random: np.random.RandomState, shape: tuple[int, ...], attrs: Attrs) -> Array:
    return np.asarray(random.uniform(attrs.get("low", 0.0), attrs.get("high", 1.0), shape))


def _type(attrs: Attrs, default: DType) -> DType:
    code = attrs.get("dtype")
    return default if code is None else DType.of_onnx(int(code))


Draw = Callable[["np.random.RandomState", tuple[int, ...], Attrs], Array]


def _of_shape(draw: Draw) -> Reference:
    def reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
        values = draw(_generator(attrs), tuple(attrs["shape"]), attrs)
        return [values.astype(_type(attrs, DType.FLOAT32).numpy)]

    return reference


def _like(draw: Draw) -> Reference:
    def reference(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
        (x,) = inputs
        return [draw(_generator(attrs), x.shape, attrs).astype(_type(attrs, DType.of_numpy(x.dtype)).numpy)]

    return reference


def _infer_shape(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    shape = tuple(int(d) for d in attrs["shape"])
    if any(d < 0 for d in shape):
        raise ValueError(f"shape {list(shape)} has a negative dimension")
    return [TensorType(_type(attrs, DType.FLOAT32), shape)]


def _infer_like(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = tensor(operands, 0)
    return [TensorType(_type(attrs, x.dtype), x.shape)]


def _bernoulli(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    (p,) = inputs
    drawn = _generator(attrs).uniform(size=p.shape) < p
    return [np.asarray(drawn).astype(_type(attrs, DType.of_numpy(p.dtype)).numpy)]


def _multinomial(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """Draw classes by the logarithms of their weights. Each row of the input makes one row of draws."""
    (x,) = inputs
    count = int(attrs.get("sample_size", 1))
    weights = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    edges = np.cumsum(weights, axis=1)
    drawn = _generator(attrs).uniform(size=(x.shape[0], count)) * edges[:, -1:]
    classes = [np.searchsorted(edge, row, side="right") for edge, row in zip(edges, drawn, strict=True)]
    result = np.asarray(classes, np.int64).reshape(x.shape[0], count)
    return [np.minimum(result, x.shape[1] - 1).astype(_type(attrs, DType.INT32).numpy)]


def _infer_multinomial(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = tensor(operands, 0)
    if x.rank not in (None, 2):
        raise ValueError(f"input 0 has rank {x.rank} instead of 2")
    count = int(attrs.get("sample_size", 1))
    return [TensorType(_type(attrs, DType.INT32), (None if x.shape is None else x.shape[0], count))]


def _dropout(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Any]:
    """Dropout. A copy of the input unless training is requested and the ratio is not zero."""
    x, ratio, training = [*inputs, None, None][:3]
    share = 0.5 if ratio is None else float(ratio)
    if training is None or not bool(training) or share == 0:
        return [x.copy(), np.ones(x.shape, np.bool_)]
    if not 0 <= share < 1:
        raise ValueError(f"ratio {share} is not in [0, 1)")
    mask = np.asarray(_generator(attrs).uniform(0, 1.0, x.shape) >= share)
    return [np.asarray(mask * x * (1.0 / (1.0 - share))).astype(x.dtype), mask]


def _infer_dropout(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x = tensor(operands, 0)
    shape: Shape | None = x.shape
    return [TensorType(x.dtype, shape), TensorType(DType.BOOL, shape)][:n]


def _spec(name: str, reference: Reference, infer: Infer) -> OpSpec:
    return OpSpec(name, reference, infer, pure=False)


OPS = (
    _spec("RandomNormal", _of_shape(_normal), _infer_shape),
    _spec("RandomUniform", _of_shape(_uniform), _infer_shape),
    _spec("RandomNormalLike", _like(_normal), _infer_like),
    _spec("RandomUniformLike", _like(_uniform), _infer_like),
    _spec("Bernoulli", _bernoulli, _infer_like),
    _spec("Multinomial", _multinomial, _infer_multinomial),
    _spec("Dropout", _dropout, _infer_dropout),
)
