"""FakeQuantize: rounds values to ``levels`` steps of an input range and maps them to an output range."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import Type

from ..base import Array, Attrs, Operands, OpSpec, Sample
from ..numeric import wide
from ..shapes import broadcast, tensor
from .common import name, required


def _levels(attrs: Attrs) -> int:
    levels = int(required(attrs, "levels"))
    if levels < 2:
        raise ValueError(f"attribute 'levels' is {levels}; at least 2 are needed")
    return levels


def fake_quantize(inputs: Sequence[Any], attrs: Attrs, n: int) -> list[Array]:
    x, low, high, out_low, out_high = (wide(v) for v in inputs)
    steps = x.dtype.type(_levels(attrs) - 1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inner = np.rint((x - low) / (high - low) * steps) / steps * (out_high - out_low) + out_low
    result = np.where(x <= np.minimum(low, high), out_low, np.where(x > np.maximum(low, high), out_high, inner))
    return [np.asarray(result, inputs[0].dtype)]


def _infer(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    _levels(attrs)
    data = tensor(operands, 0)
    ranges = [tensor(operands, i) for i in range(1, 5)]
    for i, t in enumerate(ranges, 1):
        if t.dtype != data.dtype:
            raise ValueError(f"input {i} is {t.dtype}, but the data are {data.dtype}")
        both = broadcast(data.shape, t.shape)
        if both is not None and data.shape is not None:
            larger = len(both) > len(data.shape)
            if larger or any(d == 1 and isinstance(b, WHOLE) and b != 1 for d, b in zip(data.shape, both, strict=True)):
                raise ValueError(f"input {i}, {t}, does not fit into the data, {data}")
    return [data]


def _samples(rng: np.random.Generator) -> list[Sample]:
    samples = []
    for shape, ranges in (((2, 3, 5, 7), (1, 3, 1, 1)), ((4, 9), ()), ((1, 5, 3), (5, 1))):
        low, high = (np.asarray(sign * rng.uniform(0.5, 2, ranges), np.float32) for sign in (-1, 1))
        x = rng.normal(0, 1.5, shape).astype(np.float32)
        samples.append(Sample([x, low, high, low, high], {"levels": 256}))
    return samples


# The operator counts as element-wise: the ranges broadcast to the data (checked above) and do not change its shape.
OPS = (
    OpSpec(
        name("FakeQuantize"),
        fake_quantize,
        _infer,
        elementwise=True,
        samples=_samples,
        flops=lambda inputs, outputs, attrs: 6.0 * outputs[0].size,
    ),
)
