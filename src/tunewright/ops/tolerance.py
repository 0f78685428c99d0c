"""How far two results may differ: the one table and the one comparison for kernels, references and networks."""

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


#: Sums of up to this many terms are covered by the table. Beyond, the error of a right sum in another order grows with
#: the square root of its length, and the absolute part with it, up to a length where 1 % is still far off.
SHORT, LONGEST = 100, 10**8
#: What it grows from: sums are taken in single precision at least, also of narrower types.
_GROWTH = {
    DType.FLOAT64: 1e-12,
    DType.FLOAT32: 2e-6,
    DType.FLOAT16: 2e-6,
    DType.BFLOAT16: 2e-6,
    DType.COMPLEX64: 2e-6,
    DType.COMPLEX128: 1e-12,
}


#: What a factor common to all elements of a bfloat16 result may be off by: a unit in the last place of one.
BIAS = 2**-7 + 2**-11


def absolute(dtype: DType, terms: float = 1) -> float:
    """The absolute tolerance for results that are sums of this number of terms, in parts of the scale."""
    longer = math.sqrt(min(max(terms, SHORT), LONGEST) / SHORT) - 1
    return TOLERANCES[dtype].absolute + _GROWTH[dtype] * longer


def compare(
    mine: np.ndarray[Any, Any], other: np.ndarray[Any, Any], terms: float = 1, like: DType | None = None
) -> str:
    """Empty when two outputs agree within the table of tolerances, else how they differ.

    ``terms``: how many summands an element has (see `SHORT`). ``like``: a type with as few digits as factors were
    rounded to before they were multiplied; its tolerances count for floats then.
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
    """How two results of finite numbers differ: the scale of the other, the largest difference, how far any difference
    goes beyond the relative part of the tolerance, and the elements where it does so most."""

    scale: float
    worst: float
    excess: float
    mine: float
    other: float


#: elements that are compared at a time, so that they stay near; and of results that several threads compare
CHUNK, MANY = 1 << 17, 1 << 22


def _extent(mine: np.ndarray[Any, Any], other: np.ndarray[Any, Any], relative: float) -> _Extent | None:
    """None where numbers are complex, or not all of them finite. The differences of narrow floats are taken in single
    precision: it has more digits than they need by far."""
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
    """Largest difference relative to the largest number of the other; 0 for what must be equal."""
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
    """Empty, or by which factor a result of coarse elements is off as a whole: one of them may be, by more than 1 %."""
    if DType.of_numpy(mine.dtype) is not DType.BFLOAT16:  # in finer types `compare` sees it in each element
        return ""
    a, b = mine.astype(np.float64), other.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    square = float((b[finite] ** 2).sum())
    factor = float((a[finite] * b[finite]).sum()) / square if square else 1.0
    return f"it is {factor:.4f} times what it should be" if abs(factor - 1) > BIAS else ""


def _bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Equality of the narrowest floats, NaN equal to itself."""
    x, y = a.astype(np.float32), b.astype(np.float32)
    return np.asarray((x == y) | (np.isnan(x) & np.isnan(y)))
