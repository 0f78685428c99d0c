"""Grouped convolutions in the blocked layout, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tunewright.ir.graph import Fused
from tunewright.ir.types import blocked
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
    shape: tuple[int, ...], out: int, kernel: tuple[int, ...], group: int, *, bias: bool = True,
    epilogue: tuple[Fused, ...] = (), operands: tuple[np.ndarray, ...] = (), **attrs: Any,
) -> Case:  # fmt: skip
    inputs = [
        normal(rng, *shape),
        normal(rng, out, shape[1] // group, *kernel),
        normal(rng, out) if bias else None,
        *operands,
    ]
    return Case(
        "Conv", inputs, {"kernel_shape": kernel, "group": group, **attrs}, constant=frozenset({1, 2}),
        epilogue=epilogue, operands=len(operands), layouts=(BLOCK, BLOCK),
    )  # fmt: skip


CASES = {
    "groups end inside blocks": conv(TABLES, (1, 136, 6, 7), 136, (1, 1), 4),
    "more outputs than inputs": conv(TABLES, (2, 24, 5, 5), 112, (1, 1), 4, bias=False),
    "more inputs than outputs": conv(TABLES, (1, 60, 5, 3), 20, (1, 1), 4),
    "many groups in a block": conv(TABLES, (1, 18, 5, 6), 27, (1, 1), 9),
    "one input each": conv(TABLES, (1, 7, 5, 6), 21, (3, 3), 7, pads=(1, 1, 1, 1)),
    "groups of whole blocks": conv(TABLES, (1, 32, 6, 7), 64, (3, 3), 2, pads=(1, 1, 1, 1)),
    "fewer channels than a block": conv(TABLES, (1, 4, 5, 5), 6, (3, 3), 2),
    "odd everything": conv(TABLES, (3, 22, 7, 5), 26, (3, 2), 2, pads=(1, 0, 2, 1), strides=(2, 1)),
    "dilated": conv(TABLES, (1, 20, 11, 12), 20, (3, 3), 2, dilations=(2, 3), pads=(2, 3, 2, 3)),
    "strided points": conv(TABLES, (1, 20, 7, 9), 12, (1, 1), 2, strides=(2, 2)),
    "1D": conv(TABLES, (2, 20, 37), 12, (5,), 2, pads=(2, 2)),
    "3D": conv(TABLES, (1, 12, 4, 5, 6), 20, (3, 2, 3), 2, pads=(1, 0, 1, 1, 1, 1)),
    "one pixel": conv(TABLES, (1, 34, 1, 1), 34, (1, 1), 2),
    "residual, relu": conv(TABLES, 
        (2, 20, 5, 5), 28, (1, 1), 4, epilogue=(Fused("Add", (~0, 3)), Fused("Relu", (~1,))),
        operands=(normal(TABLES, 2, 28, 5, 5),),
    ),
    "per channel and scalar": conv(TABLES, 
        (1, 20, 5, 6), 22, (3, 3), 2, pads=(1, 1, 1, 1), epilogue=(Fused("Mul", (~0, 3)), Fused("Add", (~1, 4))),
        operands=(normal(TABLES, 22, 1, 1), normal(TABLES, 1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_against_reference(name):
    few = name in ("groups end inside blocks", "odd everything")
    assert check(CASES[name], only="opencl.conv_grouped", configs=2 if few else 0, specialised=few) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_in_many_configs(name):
    assert check(CASES[name], only="opencl.conv_grouped", configs=6) == []


def test_asks_for_the_layout_unless_groups_are_tiny(rng):
    solver = next(s for s in solvers() if s.id == "opencl.conv_grouped")
    target = open_device("CPU").target

    def plain(channels: int, group: int) -> Case:
        inputs = [normal(rng, 1, channels, 9, 9), normal(rng, channels, channels // group, 1, 1)]
        return Case("Conv", inputs, {"group": group}, constant=frozenset({1}))

    assert solver.preferred(plain(136, 4).problem(), target) == (BLOCK, BLOCK)
    if BLOCK.block >= 8:
        assert solver.preferred(plain(136, 68).problem(), target) is None, "of 8 products 6 would be in vain"
    assert solver.preferred(plain(136, 1).problem(), target) is None
