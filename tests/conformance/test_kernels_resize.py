"""Resize and sampling kernels against their references."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance.short_form import every_other
from tunewright.ir.types import PLAIN, Layout, blocked
from tunewright.ops import lookup
from tunewright.plugins.single import open_device
from tunewright.testing.kernelcheck import Case, check

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
BLOCKED = blocked(open_device("CPU").target.vector_bytes // 4)
MODES = ["half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners", "half_pixel_symmetric"]


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.asarray(rng.standard_normal(shape) * 9).astype(dtype)


def case_of(
    x: np.ndarray,
    scales: tuple[float, ...] = (),
    sizes: tuple[int, ...] = (),
    roi: tuple[float, ...] = (),
    layout: Layout = PLAIN,
    **attrs: Any,
) -> Case:
    inputs = [
        x,
        np.array(roi, np.float32) if roi else None,
        np.array(scales, np.float32) if scales else None,
        np.array(sizes) if sizes else None,
    ]
    constant = frozenset(i for i in (1, 2, 3) if inputs[i] is not None)
    return Case("Resize", inputs, attrs, constant=constant, layouts=(layout, layout))


def resizes(x: np.ndarray, *, specialised: bool = False, **given: Any) -> None:
    assert not check(case_of(x, **given), "opencl.resize", 1, specialised=specialised)


@every_other(("mode", ["nearest", "linear", "cubic"]), ("layout", [PLAIN, BLOCKED]), ("coordinates", MODES))
def test_modes(rng: np.random.Generator, mode: str, layout: Layout, coordinates: str) -> None:
    for sizes in ((1, 11, 14, 13), (1, 11, 3, 5), (1, 11, 1, 9), (1, 11, 7, 2)):
        attrs = {"mode": mode, "coordinate_transformation_mode": coordinates, "layout": layout}
        resizes(normal(rng, 1, 11, 7, 9), sizes=sizes, **attrs)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("layout", [PLAIN, BLOCKED])
def test_modes_specialised(rng: np.random.Generator, mode: str, layout: Layout) -> None:
    resizes(normal(rng, 2, 5, 7, 9), scales=(1, 1, 1.7, 2.3), mode=mode, layout=layout, specialised=True)


@pytest.mark.parametrize("rounding", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
def test_nearest_modes(rng: np.random.Generator, rounding: str) -> None:
    for coordinates in MODES:
        resizes(
            normal(rng, 2, 3, 10), scales=(1, 1, 1.7), nearest_mode=rounding, coordinate_transformation_mode=coordinates
        )


def test_samples(rng: np.random.Generator) -> None:
    spec = lookup("Resize")
    assert spec is not None and spec.samples is not None
    for sample in spec.samples(rng):
        constant = frozenset(i for i in (2, 3) if i < len(sample.inputs))
        case = Case("Resize", sample.inputs, sample.attrs, constant=constant)
        assert not check(case, "opencl.resize", 1, specialised=False)


@every_other(("mode", ["nearest", "linear"]), ("factor", [2, 4]), ("layout", [PLAIN, BLOCKED]))
def test_whole_factors(rng: np.random.Generator, mode: str, factor: int, layout: Layout) -> None:
    """The case of detectors and segmenters: what lies between the borders is written without a table."""
    for coordinates in ("half_pixel", "asymmetric"):
        for rounding in ("floor", "round_prefer_floor"):
            attrs = {"mode": mode, "coordinate_transformation_mode": coordinates, "nearest_mode": rounding}
            resizes(normal(rng, 1, 13, 5, 33), scales=(1, 1, factor, factor), layout=layout, **attrs)
    resizes(normal(rng, 2, 9, 40, 100), scales=(1, 1, factor, factor), layout=layout, mode=mode, specialised=True)


@every_other(
    ("dtype", [np.float64, np.float16, BFLOAT16, np.uint8, np.int8, np.int16, np.int32, np.int64]),
    ("mode", ["nearest", "linear", "cubic", "antialias"]),
)
def test_types(rng: np.random.Generator, dtype: Any, mode: str) -> None:
    x = normal(rng, 2, 3, 6, 20, dtype=np.float32)
    x = (np.abs(x) if np.dtype(dtype).kind == "u" else x).astype(dtype)
    if mode == "antialias":
        resizes(x, sizes=(2, 3, 3, 5), mode="linear", antialias=1)
    else:
        resizes(x, scales=(1, 1, 2.5, 2), mode=mode)


def test_integers_saturate(rng: np.random.Generator) -> None:
    x = rng.choice(np.array([-128, 127], np.int8), (1, 1, 8, 8))
    resizes(x, scales=(1, 1, 2.5, 1.3), mode="cubic")


def test_only_moved_types(rng: np.random.Generator) -> None:
    for dtype in (np.bool_, ml_dtypes.float8_e5m2, np.complex64):
        resizes(normal(rng, 1, 2, 5, 7).astype(dtype), scales=(1, 1, 2, 3))


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("layout", [PLAIN, BLOCKED])
def test_antialias_and_outside(rng: np.random.Generator, mode: str, layout: Layout) -> None:
    x = normal(rng, 1, 9, 23, 31)
    for attrs in ({"antialias": 1}, {"exclude_outside": 1}, {"antialias": 1, "exclude_outside": 1}):
        for sizes in ((1, 9, 4, 5), (1, 9, 4, 31), (1, 9, 40, 6)):
            resizes(x, sizes=sizes, mode=mode, layout=layout, cubic_coeff_a=-0.5, **attrs)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_crop(rng: np.random.Generator, mode: str) -> None:
    crop = {"mode": mode, "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 10.5}
    x = normal(rng, 1, 9, 6, 7)
    resizes(x, sizes=(1, 9, 5, 4), roi=(0, 0, 0.4, -0.3, 1, 1, 0.8, 1.2), **crop)
    resizes(x, sizes=(5, 4), roi=(0.6, -0.2, 1.4, 0.9), axes=(3, 2), **crop)
    resizes(x.astype(np.int8), sizes=(5, 4), roi=(0.6, -0.2, 1.4, 0.9), axes=(3, 2), **crop)
    for layout in (PLAIN, BLOCKED):
        resizes(x, sizes=(5,), roi=(-0.3, 1.3), axes=(2,), layout=layout, **crop)


@pytest.mark.parametrize(
    ("shape", "axes", "sizes"),
    [
        ((7,), (0,), (11,)),
        ((3, 7), (1,), (5,)),
        ((2, 5, 6, 3), (1, 2), (9, 4)),
        ((2, 3, 4, 5, 6), (2, 3, 4), (5, 3, 9)),
        ((2, 3, 4, 5), (0, 1, 2, 3), (3, 4, 5, 4)),
        ((2, 3, 4, 5), (1, 3), (5, 8)),
        ((1, 1, 1, 1), (2, 3), (4, 3)),
        ((2, 3, 4, 5), (2, 3), (4, 5)),
        ((2, 3, 4, 5), (2, 3), (0, 5)),
        ((1, 2, 3, 40000), (2,), (2,)),
    ],
)
def test_ranks_and_axes(
    rng: np.random.Generator, shape: tuple[int, ...], axes: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    for mode in ("nearest", "linear"):
        resizes(normal(rng, *shape), sizes=sizes, axes=axes, mode=mode)
    resizes(normal(rng, *shape, dtype=np.int16), sizes=sizes, axes=axes, mode="linear")


def test_volume_in_blocks(rng: np.random.Generator) -> None:
    resizes(normal(rng, 1, 10, 3, 4, 5), sizes=(1, 10, 5, 7, 6), mode="linear", layout=BLOCKED)


def test_aspect_ratio(rng: np.random.Generator) -> None:
    for policy in ("not_larger", "not_smaller"):
        resizes(normal(rng, 1, 2, 7, 9), sizes=(14, 20), axes=(2, 3), keep_aspect_ratio_policy=policy, mode="linear")


def test_infinities(rng: np.random.Generator) -> None:
    x = normal(rng, 1, 1, 20, 20)
    x[0, 0, 3, 4], x[0, 0, 9, 9], x[0, 0, 15, 1] = np.inf, np.nan, -np.inf
    for mode in ("nearest", "linear"):
        resizes(x, scales=(1, 1, 2, 2), mode=mode)
        resizes(x, scales=(1, 1, 1.6, 0.7), mode=mode)


# -- sampling ---------------------------------------------------------------------------------------------------------
def samples(op: str, inputs: list[np.ndarray], family: str, specialised: bool = False, **attrs: Any) -> None:
    assert not check(Case(op, inputs, attrs), f"opencl.{family}", 1, specialised=specialised)


@every_other(("mode", ["linear", "nearest", "cubic"]), ("rank", [1, 2, 3]))
def test_grid_sample(rng: np.random.Generator, mode: str, rank: int) -> None:
    x = normal(rng, 2, 3, *(5, 6, 4)[:rank])
    grid = rng.uniform(-2.6, 2.6, (2, *(4, 7, 5)[:rank], rank)).astype(np.float32)
    grid.reshape(-1)[:3] = (-1, 0, 1)
    for padding in ("zeros", "border", "reflection"):
        for corners in (0, 1):
            samples("GridSample", [x, grid], "grid_sample", mode=mode, padding_mode=padding, align_corners=corners)


def test_grid_sample_ties(rng: np.random.Generator) -> None:
    """Points between two pixels: the last bit decides which one is nearest."""
    grid = np.stack(np.meshgrid(np.linspace(-1.5, 1.5, 61), np.linspace(-1, 1, 33)), -1)[None].astype(np.float32)
    for corners in (0, 1):
        samples("GridSample", [normal(rng, 1, 1, 10, 6), grid], "grid_sample", mode="nearest", align_corners=corners)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, BFLOAT16])
def test_grid_sample_types(rng: np.random.Generator, dtype: Any) -> None:
    grid = rng.uniform(-1.2, 1.2, (1, 30, 5, 2))
    samples("GridSample", [normal(rng, 1, 5, 6, 7, dtype=dtype), grid.astype(dtype)], "grid_sample", specialised=True)
    samples(
        "com.microsoft::GridSample", [normal(rng, 1, 5, 6, 7), grid.astype(np.float32)], "grid_sample", mode="bicubic"
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_roi_align(rng: np.random.Generator, dtype: Any) -> None:
    corner = rng.uniform(-3, 8, (9, 2))
    rois = np.concatenate([corner, corner + rng.uniform(-2, 9, (9, 2))], -1)
    rois[0] = (-40, -40, -30, -30)
    inputs = [normal(rng, 2, 70, 9, 11, dtype=dtype), rois.astype(dtype), rng.integers(0, 2, 9)]
    for attrs in (
        {"output_height": 3, "output_width": 2, "sampling_ratio": 2},
        {"output_height": 2, "output_width": 2, "spatial_scale": 0.5},
        {"output_height": 2, "output_width": 3, "coordinate_transformation_mode": "output_half_pixel"},
        {"output_height": 2, "output_width": 2, "mode": "max", "sampling_ratio": 3},
    ):
        samples("RoiAlign", inputs, "roi_align", specialised=dtype is np.float32 and "mode" in attrs, **attrs)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_affine_grid(rng: np.random.Generator, dtype: Any) -> None:
    for corners in (0, 1):
        flat, volume = [normal(rng, 2, 2, 3, dtype=dtype), np.array([2, 3, 4, 5])], [normal(rng, 2, 3, 4, dtype=dtype)]
        samples("AffineGrid", flat, "affine_grid", align_corners=corners)
        samples("AffineGrid", [*volume, np.array([2, 3, 4, 1, 3])], "affine_grid", align_corners=corners)
