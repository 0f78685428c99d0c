"""Range: every type, directions, fractions, none at all, and enough for several work-items."""

import ml_dtypes
import numpy as np
import pytest

from tunewright.plugins.single import open_device
from tunewright.testing.kernelcheck import Case, check

pytestmark = pytest.mark.skipif(open_device("CPU").family == "host", reason="needs a CPU device with kernels")


def case(start, limit, delta, dtype):
    inputs = [np.asarray(value, dtype) for value in (start, limit, delta)]
    return Case("Range", inputs, constant=frozenset({0, 1, 2}))


@pytest.mark.parametrize(
    "dtype",
    [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int16, np.int32, np.int64],
    ids=lambda dtype: dtype.__name__,
)
def test_every_type(dtype):
    assert not check(case(3, 60, 4, dtype), "opencl.range")
    assert not check(case(9, -30, -5, dtype), "opencl.range", specialised=False)


@pytest.mark.parametrize(
    ("start", "limit", "delta"), [(0, 1, 0.1), (1, -1, -0.3), (0.5, 0.5, 1), (2, 1, 1), (-1e30, 1e30, 1e29)]
)
def test_fractions_and_nothing(start, limit, delta):
    assert not check(case(start, limit, delta, np.float32), "opencl.range", specialised=False)


def test_large_integers():
    assert not check(case(2**62, 2**62 + 9, 2, np.int64), "opencl.range", specialised=False)
    assert not check(case(-(2**31), 2**31 - 1, 2**29, np.int32), "opencl.range", specialised=False)


def test_many():
    assert not check(case(-5, 1_000_003, 1, np.int64), "opencl.range")
