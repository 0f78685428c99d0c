"""Mathematics of kernels in single precision (`prelude`): how far each function is from the right number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from helpers.launches import run_call
from tunewright.devices.c_device import CDevice
from tunewright.ir.types import DType
from tunewright.plugins.single import open_device
from tunewright.solvers.c.source.emit import In, Out, Source

Reference = Callable[[Any], Any]
FAR = 1e30
#: a function, where it is defined, and its reference in double precision
FUNCTIONS: dict[str, tuple[float, float, Reference]] = {
    "exp": (-86.9, 88, np.exp), "expm1": (-FAR, 0, np.expm1), "log": (0, FAR, np.log), "log1p": (-1, FAR, np.log1p),
    "sigmoid": (-86, FAR, lambda x: 1 / (1 + np.exp(-x))), "softplus": (-86, FAR, lambda x: np.logaddexp(0, x)),
    "tanh": (-FAR, FAR, np.tanh), "mish": (-80, FAR, lambda x: x * np.tanh(np.logaddexp(0, x))),
    "erf": (-FAR, FAR, np.vectorize(math.erf, [float])), "sinh": (-88, 88, np.sinh), "cosh": (-88, 88, np.cosh),
    "asinh": (-FAR, FAR, np.arcsinh), "acosh": (1, FAR, np.arccosh), "atanh": (-1, 1, np.arctanh),
    "sin": (-1e6, 1e6, np.sin), "cos": (-1e6, 1e6, np.cos), "tan": (-1e6, 1e6, np.tan), "asin": (-1, 1, np.arcsin),
    "acos": (-1, 1, np.arccos), "atan": (-FAR, FAR, np.arctan),
    "pow": (0, 1e14, lambda x: np.power(x, float(np.float32(2.7)))),
}  # fmt: skip
#: units in the last place; more without fused products and sums, and where a result is next to 1
BOUND, BOUNDS = 5, {"erf": 7, "tanh": 7}


def points(low: float, high: float) -> np.ndarray:
    """Numbers of every size in a range, and those next to its ends and to 1."""
    rng = np.random.default_rng(0)
    sizes = np.exp2(rng.uniform(-40, math.log2(max(abs(low), abs(high))), 1 << 16))
    near = np.exp2(rng.uniform(-4, 4, 1 << 17))
    ends = np.abs(np.array([low, high, 1]))[:, None] * (1 - np.exp2(rng.uniform(-23, -1, (1, 1 << 12))))
    size = np.concatenate([sizes, near, ends.ravel()])
    x = np.concatenate([size, -size]).astype(np.float32)
    return x[(x > low) & (x < high)]


def run(name: str, x: np.ndarray) -> np.ndarray:
    device = open_device("CPU")
    assert isinstance(device, CDevice)
    source = Source(f"apply_{name}")
    source.buffer("x", DType.FLOAT32, In(0))
    source.buffer("y", DType.FLOAT32, Out())
    source.dims(COUNT=x.size)
    more = ", 2.7f" if name == "pow" else ""
    source.add(f"for (int i = GID(0); i < COUNT; i++) y[i] = f32_{name}(x[i]{more});")
    call, y = source.call([1]), np.empty_like(x)
    run_call(device, call, [x], [y])
    return y


@pytest.mark.parametrize("name", FUNCTIONS)
def test_units_in_the_last_place(name: str) -> None:
    low, high, reference = FUNCTIONS[name]
    x = points(low, high)
    got, want = run(name, x), reference(x.astype(np.float64))
    away = np.abs(got - want) / np.spacing(np.maximum(np.abs(want), 2.0**-126).astype(np.float32))
    worst = int(np.argmax(away))
    assert away[worst] <= BOUNDS.get(name, BOUND), f"{away[worst]:.2f} units at {x[worst]!r}"
