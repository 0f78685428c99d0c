"""Convolutions whose result is one pixel, against the reference."""

from __future__ import annotations

import numpy as np
import pytest

from tunewright.ir.graph import Fused
from tunewright.ir.types import PLAIN, Layout, blocked
from tunewright.plugins.single import open_device
from tunewright.solvers.base import solvers
from tunewright.testing.kernelcheck import Case, check

#: draws the tables of this module, once, when it is imported; tests draw from their own (the fixture rng)
TABLES = np.random.default_rng(0)
SEED = 1000
BLOCK = blocked(open_device("CPU").target.vector_bytes // 4)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def conv(rng: np.random.Generator, 
    shape: tuple[int, ...], out: int, *, bias: bool = True, first: Layout = BLOCK, last: Layout = BLOCK,
    epilogue: tuple[Fused, ...] = (), operands: tuple[np.ndarray, ...] = (), **attrs: object,
) -> Case:  # fmt: skip
    inputs = [normal(rng, *shape), normal(rng, out, *shape[1:]), normal(rng, out) if bias else None, *operands]
    return Case(
        "Conv", inputs, attrs, constant=frozenset({1, 2}), epilogue=epilogue, operands=len(operands),
        layouts=(first, last),
    )  # fmt: skip


CASES = {
    "blocks": conv(TABLES, (1, 64, 1, 1), 256),
    "no whole blocks": conv(TABLES, (2, 19, 1, 1), 21, bias=False),
    "plain": conv(TABLES, (3, 19, 1, 1), 21, first=PLAIN, last=PLAIN),
    "blocks to plain": conv(TABLES, (2, 40, 1, 1), 13, last=PLAIN),
    "plain to blocks": conv(TABLES, (2, 13, 1, 1), 40, first=PLAIN),
    "many": conv(TABLES, (1, 512, 1, 1), 1000),
    "few": conv(TABLES, (1, 3, 1, 1), 1),
    "the whole image": conv(TABLES, (2, 16, 3, 5), 24),
    "the whole image, plain": conv(TABLES, (2, 7, 3, 5), 24, first=PLAIN, last=PLAIN),
    "1D": conv(TABLES, (2, 16, 9), 20),
    "3D": conv(TABLES, (1, 16, 2, 3, 2), 20),
    "stride without a step": conv(TABLES, (1, 16, 2, 2), 20, strides=(2, 2)),
    "hard sigmoid": conv(TABLES, (1, 24, 1, 1), 72, epilogue=(Fused("HardSigmoid", (~0,),
        {"alpha": 0.2, "beta": 0.5}),)),
    "residual, per channel": conv(TABLES, 
        (2, 20, 1, 1), 27, epilogue=(Fused("Add", (~0, 3)), Fused("Mul", (~1, 4))),
        operands=(normal(TABLES, 2, 27, 1, 1), normal(TABLES, 27, 1, 1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_against_reference(name):
    few = name in ("blocks", "no whole blocks")
    assert check(CASES[name], only="opencl.conv_vector", configs=2 if few else 1, specialised=few) == []


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (conv(TABLES, (1, 16, 3, 3), 8, pads=(1, 1, 1, 1)), "more than one pixel"),
        (conv(TABLES, (1, 13, 2, 2), 8), "the last block of the input is not full"),
    ],
)
def test_refuses(rng, case, reason):
    solver = next(s for s in solvers() if s.id == "opencl.conv_vector")
    assert reason in str(solver.why_not(case.problem(), open_device("CPU").target))
