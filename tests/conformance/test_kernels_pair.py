"""A convolution and the depthwise one behind it as one kernel, against the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tunewright.ir.graph import Fused
from tunewright.ir.types import PLAIN, Layout, blocked
from tunewright.ops.internal.conv_pair import MAIN, PAIR, joined
from tunewright.plugins.single import open_device
from tunewright.solvers.base import solvers
from tunewright.testing.kernelcheck import Case, check

#: draws the tables of this module, once, when it is imported; tests draw from their own (the fixture rng)
TABLES = np.random.default_rng(0)
SEED = 1000
BLOCK = blocked(open_device("CPU").target.vector_bytes // 4)
RELU, HARD = (Fused("Relu", (~0,)),), (Fused("HardSwish", (~0,)),)
SILU = (Fused("Sigmoid", (~0,)), Fused("Mul", (~0, ~1)))


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def pair(rng: np.random.Generator, 
    shape: tuple[int, ...], channels: int, *, k: int = 3, s: int = 1, p: int | None = None, first: int = 1,
    stride: int = 1, inside: tuple[Fused, ...] = (), between: tuple[np.ndarray, ...] = (),
    epilogue: tuple[Fused, ...] = (), operands: tuple[np.ndarray, ...] = (), bias: bool = True,
    layout: Layout = BLOCK, **attrs: object,
) -> Case:  # fmt: skip
    """``first``: size of the first window; ``k``, ``s``, ``p``: size, stride and padding of the depthwise one."""
    p = k // 2 if p is None else p
    inputs = [
        normal(rng, *shape), normal(rng, channels, shape[1], first, first), normal(rng, channels) if bias else None,
        normal(rng, channels, 1, k, k), normal(rng, channels) if bias else None, *between, *operands,
    ]  # fmt: skip
    one = {"kernel_shape": (first, first), "strides": (stride, stride), "pads": (first // 2,) * 4}
    two = {"group": channels, "kernel_shape": (k, k), "strides": (s, s), "pads": (p,) * 4, **attrs}
    return Case(
        PAIR, inputs, joined(one, two, inside), constant=frozenset(range(1, MAIN + len(between))), epilogue=epilogue,
        operands=len(operands), layouts=(layout, BLOCK),
    )  # fmt: skip


def scalar(value: float) -> np.ndarray:
    return np.array(value, np.float32)


B = BLOCK.block
CLIP = (Fused("Clip", (~0, MAIN, MAIN + 1)),)
CASES = {
    "whole blocks": pair(TABLES, (1, 2 * B, 12, 20), 4 * B, inside=RELU, epilogue=RELU),
    "odd sizes": pair(TABLES, (2, 11, 7, 9), 29, bias=False),
    "5 x 5": pair(TABLES, (1, 9, 11, 17), 2 * B + 3, k=5, inside=HARD, epilogue=HARD),
    "5 x 5, stride 2": pair(TABLES, (1, B, 14, 15), 3 * B, k=5, s=2, inside=SILU, epilogue=SILU),
    "no padding": pair(TABLES, (1, B, 9, 14), 2 * B, p=0, inside=(Fused("LeakyRelu", (~0,), {"alpha": 0.3}),)),
    "stride 2, padding on one side": pair(TABLES, (1, 2 * B, 13, 21), 3 * B, s=2, pads=(0, 0, 1, 1), inside=RELU),
    "more padding than the window": pair(TABLES, (1, 5, 6, 8), B, p=4),
    "padding is cut off": pair(TABLES, (1, 5, 9, 12), B, pads=(-1, -2, -1, 0)),
    "stride above the window": pair(TABLES, (1, B, 13, 17), B, s=4),
    "two strides": pair(TABLES, (1, B, 15, 16), 2 * B, strides=(1, 2), pads=(1, 2, 1, 0)),
    "several strips and slabs": pair(TABLES, (2, 17, 70, 12), 7 * B, inside=RELU),
    "panels of columns": pair(TABLES, (1, 3, 5, 1100), 2 * B, inside=RELU, epilogue=RELU),
    "panels, stride 2": pair(TABLES, (1, 3, 7, 1501), 2 * B + 1, k=5, s=2),
    "narrow": pair(TABLES, (1, 7, 20, 3), 2 * B, inside=RELU),
    "one row": pair(TABLES, (1, 7, 1, 30), 2 * B),
    # sums reach 27: bounds far below that would compare their rounding with a small number
    "clip": pair(TABLES, (1, B, 9, 11), 2 * B, inside=CLIP, between=(scalar(0), scalar(6)),
                 epilogue=(Fused("Clip", (~0, MAIN + 2, MAIN + 3)),), operands=(scalar(-10), scalar(10))),
    "values per channel": pair(TABLES, (1, B, 9, 11), 19, inside=(Fused("Mul", (~0, MAIN)),),
        between=(normal(TABLES, 19, 1, 1),),
                               epilogue=(Fused("Add", (~0, MAIN + 1)),), operands=(normal(TABLES, 1, 19, 1, 1),)),
    "residual": pair(TABLES, (2, B, 8, 13), 21, inside=RELU, epilogue=(Fused("Add", (~0, MAIN)), Fused("Relu", (~1,))),
                     operands=(normal(TABLES, 2, 21, 8, 13),)),
    "stem": pair(TABLES, (1, 3, 33, 41), 2 * B, first=3, stride=2, layout=PLAIN, inside=RELU, epilogue=RELU),
    "stem, 5 x 5 to 5 x 5": pair(TABLES, (2, 1, 21, 26), 13, first=5, k=5, s=2, layout=PLAIN, inside=HARD),
    "1 x 1 over a plain input": pair(TABLES, (1, 4, 12, 15), 2 * B, layout=PLAIN),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_against_reference(name: str) -> None:
    few = name in ("odd sizes", "stem")
    assert check(CASES[name], only="opencl.conv_pair", configs=2 if few else 0, specialised=few) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", ["whole blocks", "odd sizes", "5 x 5, stride 2", "panels, stride 2", "stem"])
def test_many_configs(name: str) -> None:
    assert check(CASES[name], only="opencl.conv_pair", configs=16) == []


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (pair(TABLES, (1, B, 9, 9), B, dilations=(2, 2)), "takes no dilation"),
        (pair(TABLES, (1, B, 9, 9), B, first=3), "neither 1 x 1 nor over a plain input"),
        (pair(TABLES, (1, 40, 9, 9), B, layout=PLAIN), "more than 8 channels"),
        (pair(TABLES, (1, B, 9, 2), B), "too narrow"),
    ],
)
def test_refuses(rng: np.random.Generator, case: Case, reason: str) -> None:
    solver = next(s for s in solvers() if s.id == "opencl.conv_pair")
    assert reason in str(solver.why_not(case.problem(), open_device("CPU").target))


def test_wide_vectors_get_wide_tiles(rng: np.random.Generator) -> None:
    """The default follows registers and vectors of the processor, and is in the space everywhere."""
    solver = next(s for s in solvers() if s.id == "opencl.conv_pair")
    target = open_device("CPU").target
    for width, registers in ((16, 16), (32, 16), (64, 32)):
        there = replace(target, vector_bytes=width, registers=registers)
        problem = pair(rng, (1, 64, 60, 80), 192, inside=RELU).problem().in_layout(blocked(width // 4), [0])
        assert solver.why_not(problem, there) is None
        config = solver.default(problem, there)
        assert config in solver.space(problem, there)
        assert int(config["nb"]) * int(config["ur"]) >= registers // 2
