"""Transposed convolutions in the blocked layout, against the reference."""

from __future__ import annotations

from typing import Any

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
FAMILY = "opencl.conv_transpose_blocked"


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def transposed(rng: np.random.Generator, 
    x: tuple[int, ...], out: int, kernel: tuple[int, ...], *, made: Layout = BLOCK, bias: bool = True,
    epilogue: tuple[Fused, ...] = (), operands: tuple[np.ndarray, ...] = (), **attrs: Any,
) -> Case:  # fmt: skip
    inputs = [normal(rng, *x), normal(rng, x[1], out, *kernel), normal(rng, out) if bias else None, *operands]
    return Case(
        "ConvTranspose", inputs, attrs, constant=frozenset({1, 2}), epilogue=epilogue, operands=len(operands),
        layouts=(BLOCK, made),
    )  # fmt: skip


RESIDUAL = (Fused("Add", (~0, 3)), Fused("Relu", (~1,)))
SCALED = (Fused("Mul", (~0, 3)), Fused("Sigmoid", (~1,)))
SIGMOID = (Fused("Sigmoid", (~0,)),)
#: channels of a plain result that the kernel still takes: fewer than half a block
FEW = min(3, BLOCK.block // 2 - 1)
CASES = {
    "kernel is stride": transposed(TABLES, (1, 24, 6, 13), 24, (2, 2), strides=(2, 2)),
    "odd channels": transposed(TABLES, (2, 19, 5, 7), 21, (2, 2), strides=(2, 2), bias=False),
    "3x3 s2": transposed(TABLES, (1, 9, 8, 9), 20, (3, 3), strides=(2, 2), pads=(1, 1, 1, 1), output_padding=(1, 1)),
    "4x4 s2": transposed(TABLES, (1, 16, 7, 9), 9, (4, 4), strides=(2, 2), pads=(1, 1, 1, 1)),
    "stride 1": transposed(TABLES, (1, 10, 8, 9), 16, (3, 3), pads=(0, 1, 2, 1)),
    "stride beyond kernel": transposed(TABLES, (1, 8, 5, 6), 8, (2, 3), strides=(4, 5), output_padding=(3, 0)),
    "dilated": transposed(TABLES, (1, 11, 5, 6), 12, (3, 3), strides=(2, 3), dilations=(3, 2), pads=(2, 1, 0, 3)),
    "output shape": transposed(TABLES, (1, 8, 5, 6), 10, (3, 3), strides=(3, 2), output_shape=(17, 12)),
    "one pixel to many": transposed(TABLES, (1, 19, 1, 1), 20, (4, 4)),
    "one row": transposed(TABLES, (2, 12, 33), 17, (8,), strides=(4,), pads=(2, 2)),
    "volume": transposed(TABLES, (1, 9, 4, 5, 3), 8, (3, 2, 2), strides=(2, 1, 3), pads=(1, 0, 0, 1, 1, 0)),
    "residual": transposed(TABLES, 
        (1, 16, 5, 6), 18, (2, 2), strides=(2, 2), epilogue=RESIDUAL, operands=(normal(TABLES, 1, 18, 10, 12),)
    ),
    "per channel": transposed(TABLES, (1, 16, 5, 6), 18, (2, 2), strides=(2, 2), epilogue=SCALED,
        operands=(normal(TABLES, 18, 1, 1),)),
    # a plain result
    "one channel": transposed(TABLES, (1, 24, 6, 29), 1, (2, 2), made=PLAIN, strides=(2, 2), epilogue=SIGMOID),
    "few channels, 3x3 s2": transposed(TABLES, (2, 9, 5, 7), FEW, (3, 3), made=PLAIN, strides=(2, 2),
        pads=(1, 1, 1, 1)),
    "phases of three": transposed(TABLES, 
        (1, 12, 5, 6), min(FEW, 2), (3, 3), made=PLAIN, strides=(3, 3), pads=(1, 1, 0, 1), bias=False
    ),
    "volume, plain": transposed(TABLES, (1, 9, 3, 5, 4), 1, (2, 2, 2), made=PLAIN, strides=(2, 1, 2),
        pads=(1, 0, 0, 0, 1, 0)),
    "plain residual": transposed(TABLES, 
        (1, 16, 5, 6), FEW, (2, 2), made=PLAIN, strides=(2, 2), epilogue=RESIDUAL,
        operands=(normal(TABLES, 1, FEW, 10, 12),)
    ),
    "plain, per channel": transposed(TABLES, 
        (2, 16, 5, 6), FEW, (2, 2), made=PLAIN, strides=(2, 2), epilogue=SCALED, operands=(normal(TABLES, FEW, 1, 1),)
    ),
}  # fmt: skip
#: these in more configs, and compiled for their shape
MORE = frozenset({"3x3 s2", "one channel"})


@pytest.mark.parametrize("name", CASES)
def test_against_reference(name: str) -> None:
    assert check(CASES[name], only=FAMILY, configs=1 if name in MORE else 0, specialised=name in MORE) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_in_many_configs(name: str) -> None:
    assert check(CASES[name], only=FAMILY, configs=12) == []


def test_says_why_not(rng: np.random.Generator) -> None:
    solver = next(s for s in solvers() if s.id == FAMILY)
    target = open_device("CPU").target

    def refused(case: Case) -> str:
        return str(solver.why_not(case.problem(), target))

    attrs = {"strides": (2, 2)}
    assert "groups" in refused(transposed(rng, (1, 16, 5, 5), 8, (2, 2), group=2, bias=False, **attrs))
    assert "few" in refused(transposed(rng, (1, 16, 5, 5), BLOCK.block, (2, 2), made=PLAIN, **attrs))
    assert "too many" in refused(transposed(rng, (1, 16, 5, 5), 1, (16, 16), made=PLAIN, strides=(16, 16)))
    assert "phases" in refused(transposed(rng, (1, 16, 1, 1), 8, (2, 2), strides=(1 << 40, 1)))
    assert "layout" in refused(Case("ConvTranspose", [normal(rng, 1, 16, 5, 5), normal(rng, 16, 8, 2, 2)], attrs))


def test_asks_for_the_layouts(rng: np.random.Generator) -> None:
    solver = next(s for s in solvers() if s.id == FAMILY)
    target = open_device("CPU").target

    def asks(inputs: int, outputs: int, operands: tuple[np.ndarray, ...] = ()) -> object:
        arrays = [normal(rng, 1, inputs, 5, 6), normal(rng, inputs, outputs, 2, 2), None, *operands]
        case = Case(
            "ConvTranspose", arrays, {"strides": (2, 2)}, constant=frozenset({1}), operands=len(operands),
            epilogue=RESIDUAL if operands else (),
        )  # fmt: skip
        return solver.preferred(case.problem(), target)

    assert asks(24, 24) == (BLOCK, BLOCK)
    assert asks(24, 24, (normal(rng, 1, 24, 10, 12),)) == (BLOCK, BLOCK)
    assert asks(24, 1) == (BLOCK, PLAIN)
    assert asks(24, 1, (normal(rng, 1, 1, 10, 12),)) == (BLOCK, PLAIN)
    assert asks(BLOCK.block // 2, 24) is None
