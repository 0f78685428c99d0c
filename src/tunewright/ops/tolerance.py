"""How far two results may differ: the one table and the one comparison for kernels, references and networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..ir.types import DType


@dataclass(frozen=True)
class Tolerance:
    """One operation: |a - b| <= absolute * scale of b + relative * |b|. A whole network: |a - b| <= network * scale."""

    relative: float
    absolute: float
    network: float


#: Per element type; what is not named must be equal. Sums are taken in different orders, hence a part of the scale.
TOLERANCES: dict[DType, Tolerance] = {
    DType.FLOAT64: Tolerance(1e-9, 1e-12, 1e-4),
    DType.FLOAT32: Tolerance(2e-5, 2e-6, 1e-4),
    DType.FLOAT16: Tolerance(2e-3, 1e-3, 1e-2),
    DType.BFLOAT16: Tolerance(1.6e-2, 8e-3, 5e-2),
    DType.COMPLEX64: Tolerance(2e-5, 2e-6, 1e-4),
    DType.COMPLEX128: Tolerance(1e-9, 1e-12, 1e-4),
}


def compare(mine: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> str:
    """Empty when two outputs agree within the table of tolerances, else how they differ."""
    if mine.shape != other.shape:
        return f"shape {list(mine.shape)} against {list(other.shape)}"
    dtype = DType.of_numpy(mine.dtype)
    if dtype is not DType.of_numpy(other.dtype):
        return f"{mine.dtype} against {other.dtype}"
    if not mine.size:
        return ""
    limit = TOLERANCES.get(dtype)
    if limit is None:
        equal = (
            mine == other if dtype is DType.STRING or dtype.is_integer or dtype is DType.BOOL else _bits(mine, other)
        )
        wrong = int(np.size(equal) - np.count_nonzero(equal))
        return f"{wrong} of {mine.size} elements differ" if wrong else ""
    kind = np.complex128 if dtype in (DType.COMPLEX64, DType.COMPLEX128) else np.float64
    a, b = mine.astype(kind), other.astype(kind)
    finite = np.isfinite(b)
    if not np.array_equal(np.isfinite(a), finite) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return "infinities or NaNs stand in different places"
    if not finite.any():
        return ""
    scale = float(np.abs(b[finite]).max())
    error = np.abs(a[finite] - b[finite])
    allowed = limit.absolute * scale + limit.relative * np.abs(b[finite])
    worst = int(np.argmax(error - allowed))
    if error[worst] <= allowed[worst]:
        return ""
    return f"{a[finite][worst]:.9g} against {b[finite][worst]:.9g} (scale {scale:.3g})"


def _bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Equality of the narrowest floats, NaN equal to itself."""
    x, y = a.astype(np.float32), b.astype(np.float32)
    return np.asarray((x == y) | (np.isnan(x) & np.isnan(y)))
