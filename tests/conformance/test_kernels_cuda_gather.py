"""Triton's Gather in its interpreter, or on a GPU, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance.cuda_cases import Made
from tunewright.ir.graph import Fused
from tunewright.solvers.base import solvers
from tunewright.testing.kernelcheck import Case, check

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from tunewright.devices.cuda.device import CudaDevice

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
RNG = Made().rng
F16, BF16 = np.float16, ml_dtypes.bfloat16


def data(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.asarray(RNG.integers(-9, 9, shape)).astype(dtype)


def indices(size: int, *shape: int, dtype: Any = np.int64) -> np.ndarray:
    return np.asarray(RNG.integers(-size, size, shape)).astype(dtype)


SHAPES: list[tuple[tuple[int, ...], tuple[int, ...], int]] = [
    ((7,), (), 0), ((5, 1), (1,), 1), ((30, 129), (3, 5), 0), ((3, 17, 5), (2, 3), 1), ((3, 17, 5), (4,), -1),
    ((2, 3, 700), (), 1), ((5, 41), (70,), 1), ((0, 5, 3), (2,), 1), ((4, 5), (0,), 0), ((9, 4, 2, 3), (2, 2), 0),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "index", "axis"), SHAPES)
def test_shapes(shape: tuple[int, ...], index: tuple[int, ...], axis: int, device: CudaDevice) -> None:
    case = Case("Gather", [data(*shape), indices(shape[axis], *index)], {"axis": axis})
    assert not check(case, "triton.gather", configs=2, device=device)


@pytest.mark.parametrize("dtype", [np.uint8, F16, BF16, np.float64, np.int64, np.bool_])
def test_types(dtype: Any, device: CudaDevice) -> None:
    case = Case("Gather", [data(6, 33, dtype=dtype), indices(6, 9, dtype=np.int32)])
    assert not check(case, "triton.gather", configs=1, device=device)


_TABLE = [data(50, 40, dtype=F16), indices(50, 2, 7), data(7, 40, dtype=F16), data(40, dtype=F16)]
EPILOGUES = {
    "embeddings": Case("Gather", _TABLE, operands=2, epilogue=(
        Fused("Add", (-1, 2)), Fused("Add", (3, -2)), Fused("Cast", (-3,), {"to": 1}))),
    "inner axis": Case("Gather", [data(3, 6, 5), indices(6, 4), data(3, 4, 5), data(4, 1)], {"axis": 1}, operands=2,
                       epilogue=(Fused("Mul", (-1, 2)), Fused("Sub", (-2, 3)), Fused("Relu", (-3,)))),
    "elements": Case("Gather", [data(3, 6), indices(6, 4), data(4)], {"axis": 1}, operands=1,
                     epilogue=(Fused("Add", (2, -1)),)),
}  # fmt: skip


@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues(name: str, device: CudaDevice) -> None:
    """Positions and a token's type are added, and the sum may go out in another type."""
    assert not check(EPILOGUES[name], "triton.gather", configs=4, device=device)


def test_refusals_and_defaults(device: CudaDevice) -> None:
    solver = next(s for s in solvers() if s.id == "triton.gather")
    wrong = Case("Gather", [data(5, 4), np.array([5])], constant=frozenset({1}))
    with pytest.raises(Exception, match="out of range"):  # the host says so
        wrong.problem()
    right = Case("Gather", [data(6, 4), np.array([5])], constant=frozenset({1})).problem()
    smaller = right.__class__(right.op, (right.inputs[0].with_shape((5, 4)), *right.inputs[1:]), right.outputs,
                              right.attrs, constant=right.constant, values=right.values)  # fmt: skip
    assert "out of range" in str(solver.why_not(smaller, device.target))
    bert = Case("Gather", [data(300, 768, dtype=F16), indices(300, 1, 128)]).problem()
    config = solver.default(bert, replace(device.target, units=132))
    assert -(-128 // config["rows"]) * -(-768 // config["block"]) >= 128
