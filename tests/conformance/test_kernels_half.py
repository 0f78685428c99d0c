"""Conversions of half floats in kernels: by instructions where there are such, else in plain arithmetic.

Kernels run with denormals flushed to zero; those of halves must be kept all the same.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from helpers.launches import run_call
from tunewright.devices.c_device import CDevice
from tunewright.ir.types import DType
from tunewright.plugins.single import open_device
from tunewright.solvers.c.source.emit import In, Out, Source
from tunewright.solvers.c.source.prelude import CONVERSIONS

#: the plain form by another name, whatever the processor has
PLAIN = "#undef WITH_F16\n" + re.sub(r"\b(b?)f16_", r"\1plain_", CONVERSIONS)
TYPES = {"load": (DType.UINT16, DType.FLOAT32), "store": (DType.FLOAT32, DType.UINT16)}
HALVES = np.arange(1 << 16, dtype=np.uint16)


def floats() -> np.ndarray:
    """Whatever could go wrong: halves, ties between them and what is next to those, denormals, NaNs, and any bits."""
    finite = HALVES[:0x7C00].view(np.float16).astype(np.float64)
    ties = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    largest = np.float32([65504, 65519.996, 65520, 65520.004, 65536, 1e30, np.finfo(np.float32).max, np.inf])
    small = np.uint32([0, 1, 2, 0x7FFFFF, 0x800000, 0x33000000, 0x33000001, 0x32FFFFFF, 0x337FFFFF, 0x33800000])
    odd = np.uint32([0x7F800001, 0x7F801FFF, 0x7F802000, 0x7FBFFFFF, 0x7FC00000, 0x7FC02000, 0x7FFFFFFF])
    parts = [finite.astype(np.float32), ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e9))]
    positive = np.concatenate([p.view(np.uint32) for p in [*parts, largest, small, odd]])
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, np.uint32)
    return np.concatenate([positive, positive | 0x80000000, bits]).view(np.float32)


def run(name: str, direction: str, given: np.ndarray) -> np.ndarray:
    """A conversion of many numbers by a kernel, which is a loop that the compiler may vectorise."""
    device = open_device("CPU")
    assert isinstance(device, CDevice)
    source = Source(f"convert_{name}_{direction}")
    first, second = TYPES[direction]
    source.buffer("x", first, In(0))
    source.buffer("y", second, Out())
    source.dims(COUNT=given.size)
    source.function(PLAIN)
    source.add(f"for (int i = GID(0); i < COUNT; i++) y[i] = {name}_{direction}(x[i]);")
    call, made = source.call([1]), np.empty(given.size, second.numpy)
    run_call(device, call, [given], [made])
    return made


@pytest.mark.parametrize("count", [1 << 16, 1, 7])
def test_every_half_as_a_float(count: int) -> None:
    halves = HALVES[-count:]
    chosen, plain = (run(name, "load", halves) for name in ("f16", "plain"))
    assert np.array_equal(chosen.view(np.uint32), plain.view(np.uint32))
    right, number = halves.view(np.float16).astype(np.float32), ~np.isnan(halves.view(np.float16))
    assert np.array_equal(chosen.view(np.uint32)[number], right.view(np.uint32)[number])
    assert np.isnan(chosen[~number]).all() and (chosen.view(np.uint32)[~number] & 0x400000).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_floats_as_halves() -> None:
    given = floats()
    chosen, plain = (run(name, "store", given) for name in ("f16", "plain"))
    assert np.array_equal(chosen, plain)
    right, number = given.astype(np.float16), ~np.isnan(given)
    assert np.array_equal(chosen[number], right.view(np.uint16)[number])
    payload = given.view(np.uint32)[~number] >> 13 & 0x1FF
    assert np.array_equal(chosen[~number] & 0x7FFF, 0x7E00 | payload), "the highest bits of its payload, and quiet"
    assert np.array_equal(chosen[~number] >> 15, given.view(np.uint32)[~number] >> 31)
