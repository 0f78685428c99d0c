"""Cast, CastLike and BitCast between all element types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.types import DType, TensorType, Type
from tunewright.ops import batch_rules

from .. import shapes
from ..base import Array, Attrs, Operands, OpSpec
from ..numeric import saturate, wide
from ..samples import base
from ..samples.base import with_samples

_SATURATED = frozenset({DType.FLOAT8E4M3FN, DType.FLOAT8E4M3FNUZ, DType.FLOAT8E5M2, DType.FLOAT8E5M2FNUZ})


def convert(x: Array, to: DType, saturating: bool = True, round_mode: str = "up") -> Array:
    """``x`` converted as by ONNX's Cast. With ``saturating``, float8 types take the nearest finite value."""
    if to is DType.STRING:
        return x if x.dtype == object else x.astype(np.str_).astype(object)
    if x.dtype.kind in "OUS":
        return _parse(x, to)
    if to in _SATURATED and saturating:
        return saturate(wide(x), to.numpy)
    if to is DType.FLOAT8E8M0:
        return _exponent_only(x, saturating, round_mode).view(to.numpy)
    return x.astype(to.numpy)


def _parse(x: Array, to: DType) -> Array:
    """Parse strings as numbers. An integer written as a float is truncated."""
    texts = [v.decode() if isinstance(v, bytes) else str(v) for v in x.reshape(-1).tolist()]
    if to.is_integer:
        numbers: list[Any] = [int(t) if t.lstrip("+-").isdigit() else int(float(t)) for t in texts]
        return np.array(numbers, object).reshape(x.shape).astype(to.numpy)
    return np.array([float(t) for t in texts], np.float64).reshape(x.shape).astype(to.numpy)


def _exponent_only(x: Array, saturating: bool, round_mode: str) -> Array:
    """The biased exponent of float32 as a byte, rounded up, down or to nearest. 255 stands for NaN and infinity."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    exponent = ((bits >> 23) & 0xFF).astype(np.uint16)
    special = exponent == 0xFF
    fraction = bits & 0x7FFFFF
    if round_mode == "up":
        up = fraction > 0
    elif round_mode == "nearest":
        # Halves round to even: up, unless the exponent is zero and no bit follows the first one.
        up = ((fraction & 0x400000) > 0) & (((fraction & 0x3FFFFF) > 0) | (exponent > 0))
    elif round_mode == "down":
        up = np.zeros(exponent.shape, np.bool_)
    else:
        raise ValueError(f"round_mode {round_mode!r} is not up, down or nearest")
    up = up & ~special
    if saturating:
        up &= exponent != 0xFE
    return np.where(special, 0xFF, exponent + up).astype(np.uint8)


def _cast(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    to = _target(attrs)
    return [convert(inputs[0], to, bool(attrs.get("saturate", 1)), attrs.get("round_mode", "up"))]


def _cast_like(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    to = DType.of_numpy(inputs[1].dtype)
    return [convert(inputs[0], to, bool(attrs.get("saturate", 1)), attrs.get("round_mode", "up"))]


def _bit_cast(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    return [inputs[0].view(_target(attrs).numpy)]


def _target(attrs: Attrs) -> DType:
    return shapes.dtype_of(attrs.get("to"), "attribute to")


def _infer_cast(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    return [TensorType(_target(attrs), shapes.tensor(operands, 0).shape)]


def _infer_cast_like(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    return [TensorType(shapes.tensor(operands, 1).dtype, shapes.tensor(operands, 0).shape)]


def _infer_bit_cast(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    x, to = shapes.tensor(operands, 0), _target(attrs)
    if to is DType.STRING or x.dtype is DType.STRING or to.itemsize != x.dtype.itemsize:
        raise ValueError(f"{x.dtype} and {to} differ in width")
    return [TensorType(to, x.shape)]


OPS = with_samples(
    (
        OpSpec("Cast", _cast, _infer_cast, batch=batch_rules.kept()),
        OpSpec("CastLike", _cast_like, _infer_cast_like),
        OpSpec("BitCast", _bit_cast, _infer_bit_cast),
    ),
    base.ELEMENTWISE,
)
