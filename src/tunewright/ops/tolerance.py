"""How far two results may differ: one table and one comparison for kernels, references and networks."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..ir.types import DType


@dataclass(frozen=True)
class Tolerance:
    """Limits for one operation and for a network.

    One operation: |a - b| <= absolute * scale of b + relative * |b|. A whole network: |a - b| <= network * scale.
    """

    relative: float
    absolute: float
    network: float


#: Tolerances per element type. Other types must be equal. Sums run in different orders, hence a part of the scale.
TOLERANCES: dict[DType, Tolerance] = {
    DType.FLOAT64: Tolerance(1e-9, 1e-12, 1e-4),
    DType.FLOAT32: Tolerance(2e-5, 2e-6, 1e-4),
    DType.FLOAT16: Tolerance(2e-3, 1e-3, 1e-2),
    DType.BFLOAT16: Tolerance(1.6e-2, 8e-3, 5e-2),
    DType.COMPLEX64: Tolerance(2e-5, 2e-6, 1e-4),
    DType.COMPLEX128: Tolerance(1e-9, 1e-12, 1e-4),
}


#: The table covers sums of up to SHORT terms. For longer sums the error of another order grows with the square root of
#: the length, and the absolute part grows with it. At LONGEST terms it is still far below 1 %.
SHORT, LONGEST = 100, 10**8
#: The start of this growth. Sums are taken in at least single precision, also for narrower types.
_GROWTH = {
    DType.FLOAT64: 1e-12,
    DType.FLOAT32: 2e-6,
    DType.FLOAT16: 2e-6,
    DType.BFLOAT16: 2e-6,
    DType.COMPLEX64: 2e-6,
    DType.COMPLEX128: 1e-12,
}


#: The largest allowed common factor of all elements of a bfloat16 result: one unit in the last place of 1.
BIAS = 2**-7 + 2**-11


def absolute(dtype: DType, terms: float = 1) -> float:
    """The absolute tolerance of a sum of ``terms`` terms, as a part of the scale."""
    longer = math.sqrt(min(max(terms, SHORT), LONGEST) / SHORT) - 1
    return TOLERANCES[dtype].absolute + _GROWTH[dtype] * longer


def compare(
    mine: np.ndarray[Any, Any], other: np.ndarray[Any, Any], terms: float = 1, like: DType | None = None
) -> str:
    """Empty when two outputs agree within the table of tolerances, else a text that says how they differ.

    ``terms``: the number of summands of an element (see `SHORT`). ``like``: a type with as few digits as the factors
    had before the multiplication. Its tolerances then apply to floats.
    """
    if mine.shape != other.shape:
        return f"shape {list(mine.shape)} against {list(other.shape)}"
    dtype = DType.of_numpy(mine.dtype)
    if dtype is not DType.of_numpy(other.dtype):
        return f"{mine.dtype} against {other.dtype}"
    if not mine.size:
        return ""
    narrow = like if like is not None and dtype in TOLERANCES else dtype
    limit = TOLERANCES.get(narrow)
    if limit is None:
        equal = (
            mine == other if dtype is DType.STRING or dtype.is_integer or dtype is DType.BOOL else _bits(mine, other)
        )
        wrong = int(np.size(equal) - np.count_nonzero(equal))
        return f"{wrong} of {mine.size} elements differ" if wrong else ""
    found = _extent(mine, other, limit.relative)
    if found is not None:
        if found.excess <= absolute(narrow, terms) * found.scale:
            return ""
        return f"{found.mine:.9g} against {found.other:.9g} (scale {found.scale:.3g})"
    kind = np.complex128 if dtype in (DType.COMPLEX64, DType.COMPLEX128) else np.float64
    a, b = mine.astype(kind), other.astype(kind)
    finite = np.isfinite(b)
    if not np.array_equal(np.isfinite(a), finite) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return "infinities or NaNs stand in different places"
    if not finite.any():
        return ""
    scale = float(np.abs(b[finite]).max())
    error = np.abs(a[finite] - b[finite])
    allowed = absolute(narrow, terms) * scale + limit.relative * np.abs(b[finite])
    worst = int(np.argmax(error - allowed))
    if error[worst] <= allowed[worst]:
        return ""
    return f"{a[finite][worst]:.9g} against {b[finite][worst]:.9g} (scale {scale:.3g})"


@dataclass(frozen=True)
class _Extent:
    """The difference of two finite results.

    ``scale`` is the largest element of ``other``, ``worst`` the largest difference. ``excess`` is the largest
    difference beyond the relative tolerance, and ``mine`` and ``other`` are the elements there.
    """

    scale: float
    worst: float
    excess: float
    mine: float
    other: float


#: CHUNK elements are compared at a time, so that they stay in cache. From MANY elements on, several threads compare.
CHUNK, MANY = 1 << 17, 1 << 22


def _extent(mine: np.ndarray[Any, Any], other: np.ndarray[Any, Any], relative: float) -> _Extent | None:
    """The extent of the difference; None where numbers are complex or not all finite.

    Differences of half and bfloat16 numbers are taken in single precision, which has many more digits than they need.
    """
    dtype = DType.of_numpy(mine.dtype)
    if dtype in (DType.COMPLEX64, DType.COMPLEX128):
        return None
    kind: type[Any] = np.float32 if dtype in (DType.FLOAT16, DType.BFLOAT16) else np.float64
    x, y = (np.ascontiguousarray(array).reshape(-1) for array in (mine, other))

    def part(start: int) -> _Extent | None:
        a, b = (array[start : start + CHUNK].astype(kind) for array in (x, y))
        with np.errstate(all="ignore"):
            off = np.abs(a - b)
            size = np.abs(b)
            scale, worst = float(size.max()), float(off.max())
            if not (math.isfinite(scale) and math.isfinite(worst)):
                return None
            off -= size * kind(relative)
        at = int(np.argmax(off))
        return _Extent(scale, worst, float(off[at]), float(a[at]), float(b[at]))

    starts = range(0, x.size, CHUNK)
    if x.size >= MANY:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            found = list(pool.map(part, starts))
    else:
        found = [part(start) for start in starts]
    parts = [one for one in found if one is not None]
    if len(parts) < len(found):
        return None
    last = max(parts, key=lambda one: one.excess)
    return replace(last, scale=max(one.scale for one in parts), worst=max(one.worst for one in parts))


def deviation(mine: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """The largest difference relative to the largest element of ``other``; 0 for types that must be equal."""
    dtype = DType.of_numpy(mine.dtype)
    if dtype not in TOLERANCES or not mine.size:
        return 0.0
    if (found := _extent(mine, other, 0.0)) is not None:
        return found.worst / found.scale if found.scale else found.worst
    kind = np.complex128 if dtype in (DType.COMPLEX64, DType.COMPLEX128) else np.float64
    a, b = mine.astype(kind), other.astype(kind)
    finite = np.isfinite(a) & np.isfinite(b)
    if not finite.any():
        return 0.0
    scale = float(np.abs(b[finite]).max())
    worst = float(np.abs(a[finite] - b[finite]).max())
    return worst / scale if scale else worst


def bias(mine: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> str:
    """A text with the common factor by which a bfloat16 result is wrong, else empty.

    A single element may be off by more than 1 %, so `compare` does not see such a factor.
    """
    if DType.of_numpy(mine.dtype) is not DType.BFLOAT16:  # in finer types `compare` sees the factor in each element
        return ""
    a, b = mine.astype(np.float64), other.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    square = float((b[finite] ** 2).sum())
    factor = float((a[finite] * b[finite]).sum()) / square if square else 1.0
    return f"it is {factor:.4f} times what it should be" if abs(factor - 1) > BIAS else ""


def _bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Compare the narrowest floats for equality. NaN equals NaN."""
    x, y = a.astype(np.float32), b.astype(np.float32)
    return np.asarray((x == y) | (np.isnan(x) & np.isnan(y)))
