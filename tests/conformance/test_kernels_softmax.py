"""Softmax, LogSoftmax and Hardmax against their references."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance.short_form import every_other
from tunewright.testing.kernelcheck import Case, check

OPS = ("Softmax", "LogSoftmax", "Hardmax")


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32, scale: float = 3) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(dtype)


def failures(op: str, x: np.ndarray, axis: int, configs: int = 0) -> list[str]:
    """Of the generic solver; with ``configs`` > 0 of the specialised one and other configs too."""
    return check(Case(op, [x], {"axis": axis}), "opencl.softmax", configs, specialised=configs > 0)


@every_other(("op", OPS), ("shape, axis", [((3, 5, 49), -1), ((3, 130, 17), 1)]))
def test_shapes(rng: np.random.Generator, op: str, shape: tuple[int, ...], axis: int) -> None:
    assert not failures(op, normal(rng, *shape), axis, configs=1)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(1, 1000), (7,), (1,), (4, 0), (0, 4), (2, 2051), (1, 300, 5), (2, 3, 300)])
def test_generic(rng: np.random.Generator, op: str, shape: tuple[int, ...]) -> None:
    for axis in {0, len(shape) - 1}:
        assert not failures(op, normal(rng, *shape), axis)


@every_other(("op", OPS), ("dtype", [np.float64, np.float16, ml_dtypes.bfloat16]))
def test_types(rng: np.random.Generator, op: str, dtype: Any) -> None:
    for axis in (0, -1):
        assert not failures(op, normal(rng, 19, 33, dtype=dtype), axis)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("size", [40, 43])
def test_extremes(rng: np.random.Generator, op: str, size: int) -> None:
    """In whole vectors and in what is left of a row behind them."""
    x = normal(rng, 8, size)
    x[0] = 1e30
    x[1] = -np.inf
    x[2, 3] = np.inf
    x[3, -1] = np.nan
    x[3, 20] = np.inf
    x[4] = np.nan
    x[5, ::2] = -np.inf
    x[6] *= 1e4
    x[7] = -3e38
    for axis, array in ((1, x), (0, np.ascontiguousarray(x.T))):
        assert not failures(op, array, axis)


def test_small_exponentials() -> None:
    """Down to where they vanish: what is masked by minus infinity is 0, and so is what is too small for a float."""
    x = np.concatenate([np.linspace(-95, 0, 4001), [-1e4, -np.inf]]).astype(np.float32)[None]
    for op in ("Softmax", "LogSoftmax"):
        assert not failures(op, x, 1)
