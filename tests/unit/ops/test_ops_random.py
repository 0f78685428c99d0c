"""Convolutions, poolings, slices and resizes with random attributes against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from helpers.op_oracle import ort, run_ort
from tunewright.ops import lookup
from tunewright.ops.base import Sample
from tunewright.testing.opcheck import violations

pytestmark = pytest.mark.skipif(ort is None, reason="onnxruntime is not installed")

Rng = np.random.Generator


def pick(rng: Rng, low: int, high: int, count: int) -> tuple[int, ...]:
    return tuple(int(v) for v in rng.integers(low, high + 1, count))


def normal(rng: Rng, *shape: int) -> Any:
    return rng.standard_normal(shape).astype(np.float32)


def padding(rng: Rng, rank: int, kernel: tuple[int, ...]) -> dict[str, Any]:
    kind = rng.integers(4)
    if kind == 0:
        return {"auto_pad": str(rng.choice(["SAME_UPPER", "SAME_LOWER", "VALID"]))}
    limits = kernel * 2
    return {"pads": tuple(int(rng.integers(0, k)) for k in limits)} if kind > 1 else {}


def conv(rng: Rng) -> Sample:
    rank = int(rng.integers(1, 4))
    group = int(rng.choice([1, 1, 2, 3]))
    inner, outer = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    if rng.integers(3) == 0:
        inner = 1
    kernel = pick(rng, 1, 3, rank)
    dilations = pick(rng, 1, 2, rank)
    spatial = tuple((k - 1) * d + 1 + int(rng.integers(0, 6)) for k, d in zip(kernel, dilations, strict=True))
    attrs = {"group": group, "strides": pick(rng, 1, 3, rank), **padding(rng, rank, kernel)}
    if attrs.get("auto_pad", "VALID") == "VALID":
        attrs["dilations"] = dilations
    inputs = [normal(rng, int(rng.integers(1, 3)), group * inner, *spatial), normal(rng, group * outer, inner, *kernel)]
    if rng.integers(2):
        inputs.append(normal(rng, group * outer))
    return Sample(inputs, attrs)


def conv_transpose(rng: Rng) -> Sample:
    rank = int(rng.integers(1, 4))
    group = int(rng.choice([1, 1, 2]))
    inner, outer = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    kernel, strides = pick(rng, 1, 3, rank), pick(rng, 1, 3, rank)
    dilations = pick(rng, 1, 2, rank)
    attrs: dict[str, Any] = {"group": group, "strides": strides, "dilations": dilations}
    attrs["output_padding"] = tuple(int(rng.integers(0, s)) for s in strides)
    if rng.integers(2):
        attrs["pads"] = tuple(int(rng.integers(0, k)) for k in kernel * 2)
    inputs = [
        normal(rng, int(rng.integers(1, 3)), group * inner, *pick(rng, 3, 6, rank)),
        normal(rng, group * inner, outer, *kernel),
    ]
    if rng.integers(2):
        inputs.append(normal(rng, group * outer))
    return Sample(inputs, attrs)


def pool(rng: Rng) -> Sample:
    rank = int(rng.integers(1, 4))
    kernel = pick(rng, 1, 3, rank)
    strides = tuple(min(s, k) for s, k in zip(pick(rng, 1, 3, rank), kernel, strict=True))  # no gaps between windows
    attrs = {"kernel_shape": kernel, "strides": strides, **padding(rng, rank, kernel)}
    if "auto_pad" not in attrs:
        attrs["ceil_mode"] = int(rng.integers(2))
    return Sample([normal(rng, 2, 3, *pick(rng, 5, 9, rank))], attrs)


def max_pool(rng: Rng) -> Sample:
    sample = pool(rng)
    attrs = dict(sample.attrs)
    if "auto_pad" not in attrs:
        attrs["dilations"] = pick(rng, 1, 2, len(attrs["kernel_shape"]))
    return Sample(sample.inputs, attrs, int(rng.integers(1, 3)))


def average_pool(rng: Rng) -> Sample:
    sample = pool(rng)
    return Sample(sample.inputs, {**sample.attrs, "count_include_pad": int(rng.integers(2))})


def slices(rng: Rng) -> Sample:
    rank = int(rng.integers(1, 5))
    count = int(rng.integers(1, rank + 1))
    axes = rng.permutation(rank)[:count]
    axes = np.where(rng.integers(0, 2, count) == 1, axes - rank, axes)
    steps = rng.choice([-3, -2, -1, 1, 1, 2, 3], count)
    return Sample(
        [normal(rng, *pick(rng, 1, 7, rank)), rng.integers(-9, 9, count), rng.integers(-9, 9, count), axes, steps], {}
    )


def resize(rng: Rng) -> Sample:
    mode = str(rng.choice(["nearest", "linear", "cubic"]))
    transform = str(rng.choice(["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"]))
    x = normal(rng, 1, 2, *pick(rng, 2, 9, 2))
    sizes = np.array([1, 2, *pick(rng, 2, 17, 2)])
    attrs = {"mode": mode, "coordinate_transformation_mode": transform}
    if mode == "nearest":
        attrs["nearest_mode"] = "floor" if transform == "asymmetric" else "round_prefer_floor"
    return Sample([x, None, None, sizes], attrs)


CASES: dict[str, Callable[[Rng], Sample]] = {
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "MaxPool": max_pool,
    "AveragePool": average_pool,
    "LpPool": pool,
    "Slice": slices,
    "Resize": resize,
}


@pytest.mark.parametrize("name", CASES)
def test_random_attributes(name: str) -> None:
    spec = lookup(name)
    assert spec is not None
    rng = np.random.default_rng(7)
    samples = [CASES[name](rng) for _ in range(80)]
    answered = []

    def oracle(_: Any, sample: Sample) -> Any:
        found = run_ort(name, sample)
        answered.append(found is not None)
        return found

    found = list(violations(spec, samples, oracle))
    assert not found, (found[:3], samples[int(found[0].split()[1].rstrip(":"))].attrs)
    assert sum(answered) > len(samples) // 2
