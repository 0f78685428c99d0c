"""Facts about values that rules use: shapes that are certainly equal, axes, and constants that vary along one axis
only."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..ir.graph import Node, Value
from ..ir.symbolic import same
from ..ir.types import DType, Shape, TensorType
from ..ops.shapes import whole


def shape(value: Value | None) -> Shape | None:
    """The shape as far as it is known; None when even the rank is unknown."""
    return None if value is None or value.tensor is None else value.tensor.shape


def rank(value: Value | None) -> int | None:
    known = shape(value)
    return None if known is None else len(known)


def dtype(value: Value | None) -> DType | None:
    return None if value is None or value.tensor is None else value.tensor.dtype


def static(value: Value | None) -> TensorType | None:
    """The type of a tensor whose dimensions are all known; else None."""
    return None if value is None or value.tensor is None or not value.tensor.is_static else value.tensor


def same_shape(a: Value | None, b: Value | None) -> bool:
    """Whether the shapes are equal for all sizes of open dimensions."""
    x, y = shape(a), shape(b)
    return x is not None and y is not None and None not in x and same(x, y)


def same_type(a: Value | None, b: Value | None) -> bool:
    return same_shape(a, b) and dtype(a) == dtype(b)


def is_scalar(value: Value) -> bool:
    """Whether a value has one element, whatever its rank."""
    known = shape(value)
    return known is not None and all(d == 1 for d in known)


def axis(node: Node, default: int, value: Value | None) -> int | None:
    """The node's ``axis`` as a non-negative number; None when the rank is not known."""
    n = rank(value)
    return None if n is None else int(node.attrs.get("axis", default)) % max(n, 1)


def int_list(value: Value | None) -> list[int] | None:
    """The elements of a constant list of integers; None when it is absent or not constant."""
    return None if value is None or value.const is None else [whole(i) for i in value.const.reshape(-1)]


def per_axis(array: np.ndarray[Any, Any], n: int, at: int, size: int) -> np.ndarray[Any, Any] | None:
    """A constant as a float64 vector over axis ``at`` of a rank-n tensor; None when it varies along another axis."""
    if array.ndim > n:
        return None
    dims = (1,) * (n - array.ndim) + array.shape
    if any(d != 1 for k, d in enumerate(dims) if k != at) or dims[at] not in (1, size):
        return None
    return np.broadcast_to(array.astype(np.float64).reshape(-1), (size,))
