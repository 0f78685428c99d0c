"""Triton's squeeze and excite against its reference, and the pass that finds it, in the interpreter or on a GPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance.cuda_cases import Made
from tunewright.ir.graph import Fused
from tunewright.ir.types import NHWC, PLAIN, Layout
from tunewright.ops.internal.squeeze_excite import EXCITE
from tunewright.testing.kernelcheck import Case, check

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from tunewright.devices.cuda.device import CudaDevice

# The interpreter computes masked lanes too, with numpy, which warns of what becomes of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
normal = Made(np.float16).normal
F16, BF16, F32 = np.float16, ml_dtypes.bfloat16, np.float32
SILU = {"inner": "Swish", "inner_alpha": 1.0, "outer": "Sigmoid"}
HARD = {"inner": "Relu", "outer": "HardSigmoid", "outer_alpha": 1 / 6, "outer_beta": 0.5}


def excite(
    shape: tuple[int, ...], hidden: int, attrs: Any = SILU, *, layout: Layout = NHWC, dtype: Any = F16,
    bias: bool = True, epilogue: Any = (), operands: Any = (),
) -> Case:  # fmt: skip
    ones = (1,) * (len(shape) - 2)
    inputs = [
        normal(*shape, dtype=dtype), normal(hidden, shape[1], *ones, dtype=dtype),
        normal(hidden, dtype=dtype) if bias else None, normal(shape[1], hidden, *ones, dtype=dtype),
        normal(shape[1], dtype=dtype) if bias else None, *operands,
    ]  # fmt: skip
    return Case(
        EXCITE, inputs, attrs, constant=frozenset({1, 2, 3, 4}), epilogue=epilogue, operands=len(operands),
        layouts=(layout, layout),
    )  # fmt: skip


EXCITED = {
    "small": excite((1, 32, 5, 6), 8),
    "odd": excite((2, 19, 7, 5), 3),
    "many channels": excite((1, 150, 3, 3), 12),
    "many pixels": excite((1, 16, 17, 19), 4),
    "one hidden": excite((1, 24, 4, 4), 1, HARD),
    "no bias": excite((2, 20, 3, 4), 5, bias=False),
    "plain": excite((2, 20, 3, 4), 5, layout=PLAIN),
    "one axis": excite((1, 20, 9), 5),
    "single precision": excite((1, 20, 5, 5), 6, HARD, dtype=F32),
    "bfloat16": excite((1, 20, 5, 5), 6, dtype=BF16),
    "residual": excite(
        (2, 20, 3, 4), 5, epilogue=(Fused("Add", (~0, 5)), Fused("Relu", (~1,))), operands=(normal(2, 20, 3, 4),)
    ),
}


@pytest.mark.parametrize("name", EXCITED)
def test_squeeze(name: str, device: CudaDevice) -> None:
    assert check(EXCITED[name], "triton.squeeze", configs=int(name == "odd"), device=device) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", EXCITED)
def test_squeeze_in_many_configs(name: str, device: CudaDevice) -> None:
    assert check(EXCITED[name], "triton.squeeze", configs=20, device=device) == []
