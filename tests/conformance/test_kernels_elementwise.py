"""Element-wise kernels against their references."""

from __future__ import annotations

import numpy as np
import pytest

from tunewright.ir.graph import Fused
from tunewright.testing.kernelcheck import Case, check

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(1,), (5, 7), (3, 4099), (2, 3, 64, 65)])
def test_chain(shape: tuple[int, ...]) -> None:
    epilogue = (Fused("Sigmoid", (~0,)), Fused("Mul", (~1, 1)))
    case = Case("Relu", [normal(*shape), normal(*shape)], epilogue=epilogue, operands=1)
    assert not check(case, "opencl.elementwise")
