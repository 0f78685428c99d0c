"""Numeric helpers of several families: intermediate precision, erf, saturation, exact integer products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from ..ir.types import DType
from .base import Array

_NARROW = frozenset(
    np.dtype(t)
    for t in (np.float16, *(getattr(ml_dtypes, d.value, None) for d in DType if d.is_float))
    if t is not None and np.dtype(t).itemsize < 4
)


def wide(x: Array) -> Array:
    """Convert floats below 32 bits to float32, the type of intermediate results. Other arrays stay unchanged."""
    return x.astype(np.float32) if x.dtype in _NARROW else x


def narrow(x: Any, dtype: np.dtype[Any]) -> Array:
    """An ndarray of ``dtype``. numpy returns scalars for rank 0."""
    array: Array = np.asarray(x)
    return array if array.dtype == dtype else array.astype(dtype)


@cache
def limits(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """The smallest and largest finite value of a numeric type, as Python numbers."""
    kind = DType.of_numpy(dtype)
    if kind.is_integer:
        info = ml_dtypes.iinfo(dtype)
        return int(info.min), int(info.max)
    finfo = ml_dtypes.finfo(dtype)
    return float(finfo.min), float(finfo.max)


def saturate(x: Array, dtype: np.dtype[Any]) -> Array:
    """Clip ``x`` to the range of ``dtype``, then convert it."""
    low, high = limits(dtype)
    return np.asarray(np.clip(x, low, high)).astype(dtype)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)). exp may overflow to infinity, which correctly gives 0."""
    return np.asarray(1 / (1 + np.exp(-x)))


def softplus(x: Array) -> Array:
    """log(1 + exp(x)) without overflow."""
    return np.asarray(np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))


# -- erf --------------------------------------------------------------------------------------------------------------
#: erf(x) = x P(x^2) / Q(x^2) on |x| < 4 in single precision; highest power first
_P32 = (-2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05,
        -7.34990630326855e-04, -2.95459980854025e-03, -1.60960333262415e-02)  # fmt: skip
_Q32 = (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03,
        -1.42647390514189e-02)  # fmt: skip

# Sun's rational approximations (fdlibm) in double precision; lowest power first
_PP = (1.28379167095512558561e-01, -3.25042107247001499370e-01, -2.84817495755985104766e-02,
       -5.77027029648944159157e-03, -2.37630166566501626084e-05)  # fmt: skip
_QQ = (1.0, 3.97917223959155352819e-01, 6.50222499887672944485e-02, 5.08130628187576562776e-03,
       1.32494738004321644526e-04, -3.96022827877536812320e-06)  # fmt: skip
_ERX = 8.45062911510467529297e-01
_PA = (-2.36211856075265944077e-03, 4.14856118683748331666e-01, -3.72207876035701323847e-01,
       3.18346619901161753674e-01, -1.10894694282396677476e-01, 3.54783043256182359371e-02,
       -2.16637559486879084300e-03)  # fmt: skip
_QA = (1.0, 1.06420880400844228286e-01, 5.40397917702171048937e-01, 7.18286544141962662868e-02,
       1.26171219808761642112e-01, 1.36370839120290507362e-02, 1.19844998467991074170e-02)  # fmt: skip
_RA = (-9.86494403484714822705e-03, -6.93858572707181764372e-01, -1.05586262253232909814e+01,
       -6.23753324503260060396e+01, -1.62396669462573470355e+02, -1.84605092906711035994e+02,
       -8.12874355063065934246e+01, -9.81432934416914548592e+00)  # fmt: skip
_SA = (1.0, 1.96512716674392571292e+01, 1.37657754143519042600e+02, 4.34565877475229228821e+02,
       6.45387271733267880336e+02, 4.29008140027567833386e+02, 1.08635005541779435134e+02,
       6.57024977031928170135e+00, -6.04244152148580987438e-02)  # fmt: skip
_RB = (-9.86494292470009928597e-03, -7.99283237680523006574e-01, -1.77579549177547519889e+01,
       -1.60636384855821916062e+02, -6.37566443368389627722e+02, -1.02509513161107724954e+03,
       -4.83519191608651397019e+02)  # fmt: skip
_SB = (1.0, 3.03380607434824582924e+01, 3.25792512996573918826e+02, 1.53672958608443695994e+03,
       3.19985821950859553908e+03, 2.55305040643316442583e+03, 4.74528541206955367215e+02,
       -2.24409524465858183362e+01)  # fmt: skip


def erf(x: Array) -> Array:
    """The error function, to a few units in the last place of float32 or float64. Integers are computed in float64."""
    x = wide(x)
    if x.dtype == np.float32:
        return blockwise(_erf32, x)
    y = np.empty(x.shape, np.float64)
    flat_in, flat_out = np.abs(np.asarray(x, np.float64)).ravel(), y.reshape(-1)
    small, large = flat_in < 0.84375, flat_in >= 1.25
    for mask, function in ((small, _erf_small), (~(small | large), _erf_middle), (large, _erf_large)):
        if mask.any():
            flat_out[mask] = function(flat_in[mask])
    return narrow(np.copysign(y, x), x.dtype)


def _polynomial(x: Array, coefficients: tuple[float, ...]) -> Array:
    """Horner's scheme, lowest power first."""
    y = np.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        y *= x
        y += c
    return y


def _erf32(x: Array) -> Array:
    """erf in single precision, to one unit in the last place. Horner's scheme in float32 would cost six more."""
    x = np.clip(x, np.float32(-4), np.float32(4)).astype(np.float64)
    square = x * x
    y = _polynomial(square, _P32[::-1])
    y /= _polynomial(square, _Q32[::-1])
    y *= x
    return np.clip(y, -1, 1).astype(np.float32)


def _erf_small(x: Array) -> Array:
    z = x * x
    return x + x * (_polynomial(z, _PP) / _polynomial(z, _QQ))


def _erf_middle(x: Array) -> Array:
    s = x - 1
    return _ERX + _polynomial(s, _PA) / _polynomial(s, _QA)


def _erf_large(x: Array) -> Array:
    x = np.minimum(x, 6.0)
    s = 1 / (x * x)
    near = x < 1 / 0.35
    ratio = np.where(near, _polynomial(s, _RA) / _polynomial(s, _SA), _polynomial(s, _RB) / _polynomial(s, _SB))
    z = x.astype(np.float32).astype(np.float64)  # two factors for exp(-x^2) keep its last digits
    return 1 - np.exp(-z * z - 0.5625) * np.exp((z - x) * (z + x) + ratio) / x


def blockwise(function: Any, x: Array, block: int = 1 << 15) -> Array:
    """Apply an element-wise function in blocks that fit the cache. This is several times faster for many passes."""
    if x.size <= block:
        return np.asarray(function(x))
    x = np.ascontiguousarray(x)
    y = np.empty_like(x)
    source, target = x.reshape(-1), y.reshape(-1)
    for at in range(0, x.size, block):
        target[at : at + block] = function(source[at : at + block])
    return y


# -- exact products of integers ---------------------------------------------------------------------------------------
def product_type(a: Array, b: Array, length: int) -> np.dtype[Any]:
    """The fastest type that sums ``length`` products of elements of a and b exactly.

    BLAS multiplies floats only. Its sums of integers are exact within 24 or 53 bits.
    """
    bound = _magnitude(a) * _magnitude(b) * max(length, 1)
    if bound < 1 << 24:
        return np.dtype(np.float32)
    return np.dtype(np.float64 if bound < 1 << 53 else np.int64)


def _magnitude(x: Array) -> int:
    if x.size == 0:
        return 0
    if x.dtype.itemsize == 1:  # scanning the values costs as much as it saves
        low, high = limits(x.dtype)
        return int(max(-low, high))
    return max(-int(x.min()), int(x.max()))


def integer_matmul(a: Array, b: Array) -> Array:
    """numpy's matmul of integer arrays, by BLAS where that is exact. The result is int64 and wraps like numpy's."""
    dtype = product_type(a, b, a.shape[-1])
    return np.asarray(np.matmul(a.astype(dtype), b.astype(dtype))).astype(np.int64)


def chunks(total: int, size: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of consecutive parts."""
    size = max(1, size)
    for begin in range(0, total, size):
        yield begin, min(total, begin + size)
