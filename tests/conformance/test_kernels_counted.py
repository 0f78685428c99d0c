"""Kernels that make as many rows as the data says, against their references: NonZero, Compress, NonMaxSuppression."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tunewright.testing.kernelcheck import Case, check

DTYPES = [
    np.bool_, np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.uint8, np.int16, np.uint16, np.int32,
    np.uint32, np.int64, np.uint64,
]  # fmt: skip


def agrees(op: str, *inputs: np.ndarray | None, family: str, **attrs: Any) -> None:
    case = Case(f"tunewright::{op}", list(inputs), attrs, outputs=2)
    assert not check(case, f"opencl.{family}", 1)


def sparse(rng: np.random.Generator, *shape: int, density: float, dtype: Any = np.bool_) -> np.ndarray:
    return np.asarray(rng.random(shape) < density).astype(dtype)


# -- NonZero ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("density", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize(
    "shape", [(), (1,), (7,), (2048,), (40001,), (3, 5), (1, 9000), (9000, 1), (2, 3, 4, 5), (5, 1, 70, 30)]
)
def test_non_zero(rng: np.random.Generator, shape: tuple[int, ...], density: float) -> None:
    agrees("NonZero", sparse(rng, *shape, density=density), family="non_zero")


@pytest.mark.parametrize("dtype", DTYPES)
def test_non_zero_of_every_type(rng: np.random.Generator, dtype: Any) -> None:
    agrees("NonZero", sparse(rng, 5, 60, density=0.3, dtype=dtype), family="non_zero")


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4, 2)])
def test_non_zero_of_nothing(shape: tuple[int, ...]) -> None:
    agrees("NonZero", np.zeros(shape, np.float32), family="non_zero")


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_zeros_with_a_sign_are_zero_and_nan_is_not(dtype: Any) -> None:
    agrees("NonZero", np.array([0.0, -0.0, np.nan, np.inf, 6e-8, -1], dtype), family="non_zero")


# -- Compress ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("density", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(
    ("shape", "axis", "length"),
    [
        ((6, 4), 0, 6),
        ((6, 4), 1, 3),
        ((3, 50, 7), -2, 50),
        ((9000,), 0, 9000),
        ((2, 300, 200), 2, 200),
        ((700, 300), 0, 650),
        ((3, 7), None, 21),
        ((100, 100), None, 9000),
        ((3, 4), 0, 0),
        ((3, 0), 0, 3),
        ((0, 5), 1, 4),
    ],
)
def test_compress(
    rng: np.random.Generator, shape: tuple[int, ...], axis: int | None, length: int, density: float
) -> None:
    data, attrs = rng.standard_normal(shape).astype(np.float32), {} if axis is None else {"axis": axis}
    agrees("Compress", data, sparse(rng, length, density=density), family="compress", **attrs)


@pytest.mark.parametrize("dtype", [*DTYPES, np.complex64, np.complex128])
def test_compress_of_every_type(rng: np.random.Generator, dtype: Any) -> None:
    agrees(
        "Compress", rng.integers(0, 2, (5, 7, 3)).astype(dtype), sparse(rng, 7, density=0.5), family="compress", axis=1
    )


# -- NonMaxSuppression ------------------------------------------------------------------------------------------------
def boxes(rng: np.random.Generator, batch: int, count: int, centre: bool = False) -> np.ndarray:
    low, size = rng.uniform(0, 8, (batch, count, 2)), rng.uniform(0.5, 4, (batch, count, 2))
    return np.concatenate([low, size if centre else low + size], -1).astype(np.float32)


def scores(rng: np.random.Generator, batch: int, classes: int, count: int) -> np.ndarray:
    return rng.random((batch, classes, count)).astype(np.float32)


def numbers(*values: float, dtype: Any = np.float32) -> np.ndarray:
    return np.array(values, dtype)


def selects(box: np.ndarray, score: np.ndarray, limit: int | None, *rest: float | None, **attrs: Any) -> None:
    given = [None if v is None else numbers(v) for v in rest]
    most = None if limit is None else numbers(limit, dtype=np.int64)
    agrees("NonMaxSuppression", box, score, most, *given, family="nms", **attrs)


@pytest.mark.parametrize("centre", [0, 1])
@pytest.mark.parametrize(("batch", "classes", "count"), [(1, 1, 1), (1, 1, 1000), (2, 3, 40), (3, 20, 77), (1, 80, 5)])
def test_nms(rng: np.random.Generator, batch: int, classes: int, count: int, centre: int) -> None:
    given = boxes(rng, batch, count, bool(centre)), scores(rng, batch, classes, count)
    for limit, overlap, least in ((10, 0.5, 0.3), (count, 0.2, None), (3, 0.0, 0.0), (1000, 0.9, 0.99), (2, None, 0.5)):
        selects(*given, limit, overlap, least, center_point_box=centre)


@pytest.mark.parametrize("limit", [None, 0, -3, 2**40])
def test_limits_of_nms(rng: np.random.Generator, limit: int | None) -> None:
    selects(boxes(rng, 1, 30), scores(rng, 1, 2, 30), limit, 0.5, 0.1)


@pytest.mark.parametrize("shape", [(1, 1, 0), (1, 0, 5), (0, 2, 5)])
def test_nms_of_nothing(rng: np.random.Generator, shape: tuple[int, int, int]) -> None:
    batch, classes, count = shape
    selects(boxes(rng, batch, count), scores(rng, batch, classes, count), 5, 0.5, 0.1)


def test_equal_scores_are_in_the_order_of_their_indices(rng: np.random.Generator) -> None:
    score = rng.integers(0, 4, (2, 2, 200)).astype(np.float32) / 4
    score[score == 0] *= rng.choice([-1, 1], (score == 0).sum())  # zeros of both signs are equal
    selects(boxes(rng, 2, 200), score, 200, 0.5)
    selects(boxes(rng, 2, 200), score, 200, 0.5, 0.0)


def test_corners_may_be_given_in_any_order(rng: np.random.Generator) -> None:
    box = boxes(rng, 1, 300)
    swapped = np.where(rng.random((1, 300, 1)) < 0.5, box[..., [2, 3, 0, 1]], box[..., [0, 3, 2, 1]])
    selects(np.ascontiguousarray(swapped), scores(rng, 1, 2, 300), 100, 0.3, 0.1)


def test_numbers_that_are_none_suppress_nothing(rng: np.random.Generator) -> None:
    box, score = boxes(rng, 1, 200), scores(rng, 1, 2, 200)
    box[0, ::7, 1], box[0, ::11, 2], box[0, ::13] = np.nan, np.inf, 3.0
    score[0, 0, ::5], score[0, 1, ::9], score[0, 1, 1::9] = np.nan, np.inf, -np.inf
    for centre in (0, 1):
        selects(box, score, 200, 0.3, center_point_box=centre)
        selects(box, score, 50, 0.0, 0.2, center_point_box=centre)
        selects(box, score, 200, np.nan, np.nan, center_point_box=centre)


def test_what_overlaps_by_exactly_the_threshold_stays(rng: np.random.Generator) -> None:
    grid = np.arange(0, 60, 1, np.float32)
    box = np.stack([np.zeros(60, np.float32), grid, np.ones(60, np.float32), grid + 2], -1)[None]
    for threshold in (1 / 3, np.nextafter(np.float32(1 / 3), np.float32(0))):
        selects(box, scores(rng, 1, 2, 60), 60, float(threshold))


def test_a_box_of_no_area_is_beside_all_others(rng: np.random.Generator) -> None:
    box = np.repeat(boxes(rng, 1, 20), 3, 1)
    box[0, ::2, 2:] = box[0, ::2, :2]
    selects(box, scores(rng, 1, 1, 60), 60, 0.5)


# -- Unique -----------------------------------------------------------------------------------------------------------
def unique(x: np.ndarray, outputs: int = 4, **attrs: Any) -> None:
    case = Case("tunewright::Unique", [x], attrs, outputs=outputs + 1)
    assert not check(case, "opencl.unique", 1)


@pytest.mark.parametrize("ordered", [0, 1])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (2,), (1000,), (3, 0), (7, 5, 3), (1, 300)])
def test_unique(rng: np.random.Generator, shape: tuple[int, ...], ordered: int) -> None:
    for most in (1, 2, 20, 10**6):
        unique(rng.integers(-most, most, shape).astype(np.float32), sorted=ordered)


@pytest.mark.parametrize("ordered", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_unique_of_every_type(rng: np.random.Generator, dtype: Any, ordered: int) -> None:
    unique(rng.integers(0, 100, 400).astype(dtype), sorted=ordered)
    unique(rng.integers(0, 2, (9, 3)).astype(dtype), sorted=ordered, axis=0)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64])
def test_unique_of_extreme_integers(rng: np.random.Generator, dtype: Any) -> None:
    ends = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, 0, 1, np.iinfo(dtype).max - 1], dtype)
    unique(rng.choice(ends, 200))


@pytest.mark.parametrize("ordered", [0, 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_unique_of_extreme_floats(rng: np.random.Generator, dtype: Any, ordered: int) -> None:
    unique(rng.choice(np.array([0.0, -0.0, np.inf, -np.inf, 1, -1, 6e-8, -6e-8, 1e-40], dtype), 300), sorted=ordered)
    unique(rng.choice(np.array([3.0, np.nan, np.inf, -np.inf], dtype), 50), sorted=ordered)


@pytest.mark.parametrize("ordered", [0, 1])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((50, 3), 0), ((3, 50), 1), ((3, 50), -1), ((4, 9, 2), 1), ((0, 3), 0), ((5, 0), 0), ((1, 4), 0), ((9,), 0)],
)
def test_unique_along_an_axis(rng: np.random.Generator, shape: tuple[int, ...], axis: int, ordered: int) -> None:
    unique(rng.integers(0, 2, shape).astype(np.float32), sorted=ordered, axis=axis)
    unique(np.zeros(shape, np.int64), sorted=ordered, axis=axis)


@pytest.mark.parametrize("outputs", [1, 2, 3, 4])
def test_unique_with_some_of_its_outputs(rng: np.random.Generator, outputs: int) -> None:
    unique(rng.integers(0, 9, 60), outputs)
