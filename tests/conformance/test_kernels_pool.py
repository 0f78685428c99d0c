"""Poolings, plain and blocked, against their references."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance.short_form import every_other
from tunewright.ir.graph import Fused
from tunewright.ir.types import PLAIN, Layout, blocked
from tunewright.plugins.single import open_device
from tunewright.testing.kernelcheck import Case, check

BLOCKED = blocked(open_device("CPU").target.vector_bytes // 4)
LAYOUTS = pytest.mark.parametrize("layout", [PLAIN, BLOCKED], ids=str)

K33 = {"kernel_shape": (3, 3)}
WINDOWS: tuple[dict[str, Any], ...] = (
    K33,
    {**K33, "strides": (2, 2), "pads": (1, 1, 1, 1)},
    {**K33, "strides": (2, 3), "pads": (0, 1, 1, 0), "ceil_mode": 1},
    {"kernel_shape": (2, 4), "dilations": (2, 2), "strides": (1, 2)},
    {**K33, "auto_pad": "SAME_UPPER", "strides": (2, 2)},
    {"kernel_shape": (2, 2), "auto_pad": "SAME_LOWER"},
    {"kernel_shape": (1, 1), "strides": (2, 2)},
    {"kernel_shape": (5, 5), "pads": (2, 2, 2, 2)},
)


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def failures(
    op: str, x: np.ndarray, attrs: dict[str, Any], layout: Layout = PLAIN, outputs: int = 1, specialised: bool = False
) -> list[str]:
    case = Case(op, [x], attrs, outputs, layouts=(layout, layout))
    return check(case, "opencl.pool", configs=int(specialised), specialised=specialised)


@every_other(("layout", [PLAIN, BLOCKED]), ("attrs", WINDOWS))
def test_windows(rng: np.random.Generator, attrs: dict[str, Any], layout: Layout) -> None:
    x = normal(rng, 2, 19, 9, 11)
    assert not failures("MaxPool", x, attrs, layout, specialised=attrs is WINDOWS[2])
    include = int(layout == PLAIN) ^ WINDOWS.index(attrs) % 2
    assert not failures("AveragePool", x, {**attrs, "count_include_pad": include}, layout)


@LAYOUTS
def test_other_ranks(rng: np.random.Generator, layout: Layout) -> None:
    one, three = normal(rng, 2, 5, 13), normal(rng, 1, 9, 5, 6, 7)
    for op in ("MaxPool", "AveragePool"):
        assert not failures(op, one, {"kernel_shape": (3,), "strides": (2,), "pads": (1, 1)}, layout)
        attrs = {"kernel_shape": (2, 3, 2), "strides": (2, 1, 2), "pads": (1, 0, 1, 0, 1, 1), "ceil_mode": 1}
        assert not failures(op, three, attrs, layout)


@LAYOUTS
def test_ceiling_beyond_the_padding(rng: np.random.Generator, layout: Layout) -> None:
    attrs = {**K33, "pads": (1, 1, 1, 1), "count_include_pad": 1, "strides": (3, 3), "ceil_mode": 1}
    assert not failures("AveragePool", normal(rng, 1, 3, 9, 11), attrs, layout)


@every_other(("layout", [PLAIN, BLOCKED]), ("p", [1, 2, 3]))
def test_powers(rng: np.random.Generator, p: int, layout: Layout) -> None:
    assert not failures(
        "LpPool", normal(rng, 2, 3, 9, 11), {**K33, "p": p, "strides": (2, 2), "pads": (1, 1, 1, 1)}, layout
    )
    assert not failures("GlobalLpPool", normal(rng, 2, 3, 9, 11), {"p": p}, layout)


@pytest.mark.parametrize("order", [0, 1])
def test_indices(rng: np.random.Generator, order: int) -> None:
    few = rng.integers(0, 3, (2, 3, 9, 11)).astype(np.float32)
    for attrs in (WINDOWS[1], WINDOWS[3]):
        assert not failures("MaxPool", few, {**attrs, "storage_order": order}, outputs=2, specialised=order == 1)
    three = rng.integers(0, 3, (1, 2, 5, 6, 7)).astype(np.float32)
    assert not failures("MaxPool", three, {"kernel_shape": (2, 3, 2), "storage_order": order}, outputs=2)


@every_other(("layout", [PLAIN, BLOCKED]), ("dtype", [np.float64, np.float16, ml_dtypes.bfloat16]))
def test_floats(rng: np.random.Generator, dtype: Any, layout: Layout) -> None:
    x = normal(rng, 1, 10, 7, 8, dtype=dtype)
    assert not failures("MaxPool" if layout == PLAIN else "AveragePool", x, WINDOWS[1], layout)
    assert not failures("GlobalAveragePool", x, {}, layout)
    if dtype == np.float64:
        assert not failures("LpPool", x, {**K33, "p": 3}, layout)


@every_other(("layout", [PLAIN, BLOCKED]), ("dtype", [np.int8, np.uint8]))
def test_integers(rng: np.random.Generator, dtype: Any, layout: Layout) -> None:
    x = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, (1, 10, 7, 8), dtype=dtype)
    assert not failures("MaxPool", x, WINDOWS[1], layout)
    assert not failures("MaxPool", x, {**WINDOWS[1], "pads": (2, 2, 2, 2), "dilations": (2, 2)}, layout)


@LAYOUTS
def test_infinities_and_nan(rng: np.random.Generator, layout: Layout) -> None:
    x = normal(rng, 1, 3, 9, 11)
    x[0, 0, 3, 4], x[0, 0, 8, 10], x[0, 1, 2, 2], x[0, 1, 6, 6], x[0, 2] = np.nan, -np.nan, np.inf, -np.inf, -np.inf
    for op in ("MaxPool", "AveragePool"):
        assert not failures(op, x, WINDOWS[1], layout)
    for op in ("GlobalMaxPool", "GlobalAveragePool"):
        assert not failures(op, x, {}, layout)


def test_wide_rows(rng: np.random.Generator) -> None:
    assert not failures("MaxPool", normal(rng, 1, 1, 3, 5000), WINDOWS[1])
    assert not failures(
        "MaxPool", normal(rng, 1, 1, 3000), {"kernel_shape": (3,), "dilations": (1200,), "pads": (900, 800)}
    )
    assert not failures("AveragePool", normal(rng, 1, 2, 700), {"kernel_shape": (600,), "pads": (300, 300)})
    assert not failures("MaxPool", normal(rng, 0, 3, 9, 9), K33)


@every_other(("layout", [PLAIN, BLOCKED]), ("op", ["GlobalMaxPool", "GlobalAveragePool"]))
def test_global(rng: np.random.Generator, op: str, layout: Layout) -> None:
    for shape in ((2, 19, 7, 7), (1, 3, 50), (1, 9, 3, 4, 5), (3, 8, 1, 1)):
        assert not failures(op, normal(rng, *shape), {}, layout, specialised=len(shape) == 3)


@pytest.mark.parametrize("op", ["ReduceMean", "ReduceMax"])
def test_blocked_reductions(rng: np.random.Generator, op: str) -> None:
    case = Case(op, [normal(rng, 2, 19, 7, 6), np.array([-1, 2])], constant=frozenset({1}), layouts=(BLOCKED, BLOCKED))
    assert not check(case, "opencl.pool_global", configs=0)


@every_other(("layout", [PLAIN, BLOCKED]), ("op", ["MaxPool", "AveragePool", "GlobalAveragePool"]))
def test_epilogues(rng: np.random.Generator, op: str, layout: Layout) -> None:
    attrs: dict[str, Any] = {} if op.startswith("Global") else WINDOWS[1]
    shape = (2, 11, 1, 1) if op.startswith("Global") else (2, 11, 5, 6)
    steps = (Fused("Relu", (~0,)), Fused("Mul", (~1, 1)), Fused("Add", (~2, 2)), Fused("Sigmoid", (~3,)))
    inputs = [normal(rng, 2, 11, 9, 11), normal(rng, 11, 1, 1), normal(rng, *shape)]
    case = Case(op, inputs, attrs, epilogue=steps, operands=2, layouts=(layout, layout))
    assert not check(case, "opencl.pool", configs=0)
