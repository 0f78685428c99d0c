"""Reductions, arguments of extrema, scans and TopK against their references."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance.short_form import every_other
from tunewright.testing.kernelcheck import Case, check

OPS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare",
       "ReduceLogSum", "ReduceLogSumExp")  # fmt: skip
WHOLE = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare")


def values(rng: np.random.Generator, op: str, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    kind = np.dtype(dtype).kind
    if not shape:
        return np.array(0.75, dtype)
    if kind in "iub":
        return rng.integers(-7 if kind == "i" and op != "ReduceL2" else 0, 8, shape).astype(dtype)
    if op == "ReduceProd":
        return (rng.uniform(0.9, 1.1, shape) * np.where(rng.random(shape) < 0.5, -1, 1)).astype(dtype)
    if op == "ReduceLogSum":
        return rng.uniform(0.5, 2, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def failures(op: str, x: np.ndarray, axes: tuple[int, ...] | None, configs: int = 0, **attrs: int) -> list[str]:
    """Of the generic solver; with ``configs`` > 0 of the specialised one and other configs too."""
    given = [x] if axes is None else [x, np.array(axes, np.int64)]
    return check(Case(op, given, attrs, constant=frozenset({1})), "opencl.reduce", configs, specialised=configs > 0)


# -- reductions -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((3, 70), (-1,)),
        ((2, 3, 5, 7), (2, 3)),
        ((5, 9, 11), (1,)),
        ((4, 3, 5, 6), (0, 2)),
        ((3, 4, 2, 5), (1, 3)),
        ((2, 3, 2, 3, 2, 3), (0, 2, 4)),
        ((2, 3, 2, 3, 2, 3, 2), (-1, 0, 2, 4)),
        ((7, 1, 300), (0, 1)),
        ((129,), None),
    ],
)
@pytest.mark.parametrize("keepdims", [0, 1])
def test_patterns(
    rng: np.random.Generator, shape: tuple[int, ...], axes: tuple[int, ...] | None, keepdims: int
) -> None:
    assert not failures("ReduceSum", values(rng, "ReduceSum", *shape), axes, keepdims=keepdims)


@every_other(("op", OPS), ("shape, axis", [((6, 13, 37), 1), ((6, 5, 77), 2)]))
def test_operations(rng: np.random.Generator, op: str, shape: tuple[int, ...], axis: int) -> None:
    assert not failures(op, values(rng, op, *shape), (axis,))


@pytest.mark.parametrize(("shape", "axis"), [((6, 13, 37), 1), ((6, 5, 77), 2)])
def test_configs(rng: np.random.Generator, shape: tuple[int, ...], axis: int) -> None:
    assert not failures("ReduceMean", values(rng, "ReduceMean", *shape), (axis,), configs=1)


@pytest.mark.parametrize("op", OPS)
def test_doubles(rng: np.random.Generator, op: str) -> None:
    assert not failures(op, values(rng, op, 9, 40, dtype=np.float64), (1,))


@every_other(
    ("dtype", [np.float16, ml_dtypes.bfloat16]),
    ("op", ["ReduceMean", "ReduceMax", "ReduceL2", "ReduceLogSumExp"]),
)  # fmt: skip
def test_narrow_floats(rng: np.random.Generator, op: str, dtype: Any) -> None:
    assert not failures(op, values(rng, op, 9, 40, dtype=dtype), (0,) if dtype == np.float16 else (1,))


@every_other(("op", WHOLE), ("dtype", [np.int32, np.int64]))
def test_integers(rng: np.random.Generator, op: str, dtype: Any) -> None:
    assert not failures(op, values(rng, op, 4, 5, 20, dtype=dtype), (1,) if dtype == np.int64 else (2,))


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_unsigned(rng: np.random.Generator, dtype: Any) -> None:
    for op in ("ReduceMean", "ReduceL2"):
        assert not failures(op, values(rng, op, 4, 5, 20, dtype=dtype), (2,))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, bool])
def test_narrow_integers(rng: np.random.Generator, dtype: Any) -> None:
    whole = dtype is not bool
    x = rng.integers(np.iinfo(dtype).min if whole else 0, np.iinfo(dtype).max if whole else 2, (5, 90), dtype=dtype)
    for op in ("ReduceMin", "ReduceL1") if whole else ("ReduceMax", "ReduceMin"):
        assert not failures(op, x, (1,))


def test_integers_wrap(rng: np.random.Generator) -> None:
    for dtype in (np.int32, np.int64):
        x = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, (7, 33), dtype=dtype)
        for op in ("ReduceSum", "ReduceProd", "ReduceL1", "ReduceSumSquare", "ReduceMax"):
            assert not failures(op, x, (1,) if dtype is np.int32 else (0,))
    assert not failures("ReduceLogSumExp", values(rng, "", 4, 9, dtype=np.int64), (1,))
    assert not failures("ReduceLogSum", values(rng, "ReduceL2", 4, 9, dtype=np.int32) + np.int32(1), (1,))


@pytest.mark.filterwarnings("ignore:Mean of empty slice")
@pytest.mark.parametrize("op", OPS)
def test_of_nothing_and_everything(rng: np.random.Generator, op: str) -> None:
    assert not failures(op, np.zeros((2, 0, 3), np.float32), (1,))
    assert not failures(op, np.zeros((0, 4), np.float32), (1,))
    assert not failures(op, values(rng, op, 3, 4), (), noop_with_empty_axes=1)
    assert not failures(op, values(rng, op, 3, 4), ())
    assert not failures(op, values(rng, op), None)
    assert not failures(op, np.ones((1, 1), np.float32), (0,), keepdims=0)


def test_empty_integers() -> None:
    for op in ("ReduceMax", "ReduceMin", "ReduceSum", "ReduceProd"):
        assert not failures(op, np.zeros((3, 0), np.int32), (1,))


@pytest.mark.parametrize("op", OPS)
def test_infinities_and_nan(rng: np.random.Generator, op: str) -> None:
    x = values(rng, op, 8, 70)
    x[0, 69], x[1, 3], x[2, 64], x[2, 5] = np.nan, np.inf, -np.inf, np.inf
    x[3, 8], x[4, 30], x[4, 31], x[5] = -np.nan, np.inf, np.nan, -np.inf
    for axes, array in (((1,), x), ((0,), np.ascontiguousarray(x.T))):
        assert not failures(op, array, axes)


@pytest.mark.parametrize("op", ["ReduceMean", "ReduceLogSumExp"])
def test_many_elements_of_few_results(rng: np.random.Generator, op: str) -> None:
    for shape, axes in (
        ((1, 300_001), (1,)), ((2, 100_003), (1,)), ((40_000, 3), (0,)), ((1000, 300), (0,)), ((70_000, 2, 3), (0, 2))
    ):  # fmt: skip
        assert not failures(op, values(rng, op, *shape) + np.float32(0.5), axes)


# -- arguments of extrema ---------------------------------------------------------------------------------------------
def arg_failures(op: str, x: np.ndarray, configs: int = 0, **attrs: int) -> list[str]:
    return check(Case(op, [x], attrs), "opencl.arg", configs, specialised=configs > 0)


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("last", [0, 1])
def test_arg(rng: np.random.Generator, op: str, last: int) -> None:
    for axis in (-1, 1):
        for keepdims in (0, 1):
            few = rng.integers(0, 4, (3, 7, 75)).astype(np.float32)
            attrs = {"axis": axis, "select_last_index": last, "keepdims": keepdims}
            assert not arg_failures(op, few, keepdims * last * (op == "ArgMax"), **attrs)
        odd = rng.integers(0, 4, (6, 40, 70) if axis == 1 else (6, 5, 70)).astype(np.float32)
        odd[0, :, 33], odd[1, 4], odd[2, 3, 1::7], odd[3] = np.nan, np.inf, np.nan, -np.inf
        assert not arg_failures(op, odd, axis=axis, select_last_index=last)
    assert not arg_failures(op, np.zeros((1,), np.float32), axis=0)
    assert not arg_failures(op, np.zeros((0, 3), np.float32), axis=1)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.uint8, np.int32, np.int64])
def test_arg_types(rng: np.random.Generator, dtype: Any) -> None:
    x = rng.integers(0, 9, (5, 70)).astype(dtype)
    assert not arg_failures("ArgMax", x, axis=1 if np.dtype(dtype).itemsize > 2 else 0)


# -- scans ------------------------------------------------------------------------------------------------------------
@every_other(
    ("op", ["CumProd", "CumSum"]),
    ("attrs", [{}, {"exclusive": 1}, {"reverse": 1}, {"exclusive": 1, "reverse": 1}]),
)
def test_scan(rng: np.random.Generator, op: str, attrs: dict[str, int]) -> None:
    for axis in (0, 1, -1):
        x = rng.uniform(0.8, 1.25, (4, 9, 300)).astype(np.float32)
        case = Case(op, [x, np.array(axis)], attrs, constant=frozenset({1}))
        assert not check(case, "opencl.scan", specialised=axis == 1 and op == "CumSum" and len(attrs) == 2)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.int64, np.uint8])
def test_scan_types(rng: np.random.Generator, dtype: Any) -> None:
    for x in (rng.integers(0, 9, (5, 30)).astype(dtype), np.zeros((0, 3), dtype), np.ones((1,), dtype)):
        case = Case("CumSum", [x, np.array([0])], constant=frozenset({1}))
        assert not check(case, "opencl.scan", specialised=False)


# -- TopK -------------------------------------------------------------------------------------------------------------
def topk_failures(x: np.ndarray, k: int, outputs: int = 2, **attrs: int) -> list[str]:
    case = Case("TopK", [x, np.array([k])], attrs, outputs, constant=frozenset({1}))
    return check(case, "opencl.topk", specialised=k == 9)


@pytest.mark.parametrize("largest", [0, 1])
def test_topk(rng: np.random.Generator, largest: int) -> None:
    x = rng.integers(-20, 20, (3, 50, 7)).astype(np.float32)
    x[1, 5:25:3, 2], x[2, 3, 1], x[2, 4, 1], x[0, 1] = np.nan, np.inf, -np.inf, np.nan
    for axis, k in ((1, 9), (1, 50), (2, 1), (-1, 7), (0, 0)):
        assert not topk_failures(x, k, axis=axis, largest=largest)
    assert not topk_failures(rng.standard_normal((2, 5003)).astype(np.float32), 100, largest=largest, sorted=0)
    assert not topk_failures(np.zeros((0, 5), np.float32), 2, largest=largest)
    assert not topk_failures(x, 4, outputs=1, axis=1)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.uint8, np.int32, np.int64])
def test_topk_types(rng: np.random.Generator, dtype: Any) -> None:
    assert not topk_failures(rng.integers(0, 99, (5, 70)).astype(dtype), 11)
