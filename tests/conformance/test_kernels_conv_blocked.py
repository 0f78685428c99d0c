"""The direct convolution in the blocked layout, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tunewright.ir.graph import Fused
from tunewright.ir.types import PLAIN, blocked
from tunewright.plugins.single import open_device
from tunewright.solvers.base import solvers
from tunewright.testing.kernelcheck import Case, check, run_one

RNG = np.random.default_rng(0)
BLOCK = blocked(open_device("CPU").target.vector_bytes // 4)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def conv(
    shape: tuple[int, ...], out: int, kernel: tuple[int, ...], *, plain: bool = False, bias: bool = True,
    group: int = 1, epilogue: tuple[Fused, ...] = (), operands: tuple[np.ndarray, ...] = (), **attrs: Any,
) -> Case:  # fmt: skip
    inputs = [normal(*shape), normal(out, shape[1] // group, *kernel), normal(out) if bias else None, *operands]
    return Case(
        "Conv", inputs, {"kernel_shape": kernel, "group": group, **attrs}, constant=frozenset({1, 2}),
        epilogue=epilogue, operands=len(operands), layouts=(PLAIN if plain else BLOCK, BLOCK),
    )  # fmt: skip


CASES = {
    "pointwise": conv((1, 16, 5, 7), 24, (1, 1)),
    "pointwise, odd channels": conv((2, 19, 3, 3), 21, (1, 1), bias=False),
    "pointwise, strided": conv((1, 16, 7, 9), 16, (1, 1), strides=(2, 2)),
    "one pixel": conv((1, 32, 1, 1), 40, (1, 1)),
    "3x3": conv((1, 16, 9, 11), 32, (3, 3), pads=(1, 1, 1, 1)),
    "3x3, no padding": conv((2, 8, 6, 5), 8, (3, 3)),
    "3x3, odd everything": conv((3, 21, 7, 5), 13, (3, 3), pads=(1, 0, 2, 1), strides=(2, 1)),
    "dilated": conv((1, 16, 11, 12), 16, (3, 3), dilations=(2, 3), pads=(2, 3, 2, 3)),
    "same upper": conv((1, 9, 8, 7), 16, (2, 3), auto_pad="SAME_UPPER", strides=(2, 2)),
    "kernel over all": conv((1, 16, 4, 4), 24, (6, 6), pads=(1, 1, 1, 1)),
    "stem": conv((1, 3, 23, 25), 20, (7, 7), plain=True, pads=(3, 3, 3, 3), strides=(2, 2)),
    "stem, one channel, no padding": conv((2, 1, 9, 30), 16, (5, 4), plain=True),
    "plain, many channels": conv((1, 17, 6, 6), 16, (3, 3), plain=True, pads=(1, 1, 1, 1)),
    "groups of blocks": conv((1, 32, 6, 7), 64, (3, 3), group=2, pads=(1, 1, 1, 1)),
    "1D": conv((2, 16, 37), 16, (5,), pads=(2, 2)),
    "3D": conv((1, 16, 4, 5, 6), 16, (3, 2, 3), pads=(1, 0, 1, 1, 1, 1)),
    "relu": conv((1, 16, 6, 6), 24, (3, 3), pads=(1, 1, 1, 1), epilogue=(Fused("Relu", (~0,)),)),
    "residual, relu": conv(
        (2, 8, 5, 5), 13, (1, 1), epilogue=(Fused("Add", (~0, 3)), Fused("Relu", (~1,))),
        operands=(normal(2, 13, 5, 5),),
    ),
    "per channel and scalar": conv(
        (1, 8, 5, 6), 11, (3, 3), pads=(1, 1, 1, 1), epilogue=(Fused("Mul", (~0, 3)), Fused("Add", (~1, 4))),
        operands=(normal(11, 1, 1), normal(1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_reference(name: str) -> None:
    assert not check(CASES[name], "opencl.conv_blocked", configs=1)


@pytest.mark.parametrize("wrong", [0.99, 1.01])
def test_a_kernel_wrong_by_one_per_cent_fails(wrong: float) -> None:
    case = CASES["3x3"]
    problem, device = case.problem(), open_device("CPU")
    solver = next(s for s in solvers() if s.id == "opencl.conv_blocked")
    right = np.asarray(check_reference(case))
    assert not run_one(case, problem, solver, solver.default(problem, device.target), device, [right])
    assert run_one(case, problem, solver, solver.default(problem, device.target), device, [right * np.float32(wrong)])


def check_reference(case: Case) -> np.ndarray:
    """What the reference makes, as it lies in the output's layout."""
    from tunewright.ops.fused import from_plain
    from tunewright.solvers.host.reference import HostKernel

    problem = case.problem()
    inputs = [None if a is None else from_plain(a, t) for a, t in zip(case.inputs, problem.inputs, strict=True)]
    made: np.ndarray = HostKernel(problem).run(open_device("CPU.HOST").queue(), inputs, [None])[0]
    return made
