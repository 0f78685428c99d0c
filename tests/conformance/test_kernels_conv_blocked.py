"""The direct convolution in the blocked layout, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conformance.short_form import needs_results
from tunewright.devices.base import Target
from tunewright.ir.graph import Fused
from tunewright.ir.types import PLAIN, DType, TensorType, blocked
from tunewright.plugins.single import open_device
from tunewright.solvers.base import Problem, solvers
from tunewright.testing.kernelcheck import Case, check, run_one

#: draws the tables of this module, once, when it is imported; tests draw from their own (the fixture rng)
TABLES = np.random.default_rng(0)
SEED = 1000
TARGET = open_device("CPU").target
BLOCK = blocked(TARGET.vector_bytes // 4)
SOLVER = next(s for s in solvers() if s.id == "opencl.conv_blocked")


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def conv(rng: np.random.Generator, 
    shape: tuple[int, ...], out: int, kernel: tuple[int, ...], *, plain: bool = False, bias: bool = True,
    group: int = 1, epilogue: tuple[Fused, ...] = (), operands: tuple[np.ndarray, ...] = (), **attrs: Any,
) -> Case:  # fmt: skip
    inputs = [
        normal(rng, *shape),
        normal(rng, out, shape[1] // group, *kernel),
        normal(rng, out) if bias else None,
        *operands,
    ]
    return Case(
        "Conv", inputs, {"kernel_shape": kernel, "group": group, **attrs}, constant=frozenset({1, 2}),
        epilogue=epilogue, operands=len(operands), layouts=(PLAIN if plain else BLOCK, BLOCK),
    )  # fmt: skip


CASES = {
    "pointwise": conv(TABLES, (1, 16, 5, 7), 24, (1, 1)),
    "pointwise, odd channels": conv(TABLES, (2, 19, 3, 3), 21, (1, 1), bias=False),
    "pointwise, strided": conv(TABLES, (1, 16, 7, 9), 16, (1, 1), strides=(2, 2)),
    "one pixel": conv(TABLES, (1, 32, 1, 1), 40, (1, 1)),
    "three pixels": conv(TABLES, (2, 24, 1, 3), 64, (1, 1)),
    "pointwise, strided, odd channels": conv(TABLES, (2, 13, 9, 8), 27, (1, 1), strides=(3, 2)),
    "pointwise, padded": conv(TABLES, (1, 16, 3, 4), 16, (1, 1), pads=(1, 0, 2, 1)),
    "3x3": conv(TABLES, (1, 16, 9, 11), 32, (3, 3), pads=(1, 1, 1, 1)),
    "3x3, no padding": conv(TABLES, (2, 8, 6, 5), 8, (3, 3)),
    "3x3, odd everything": conv(TABLES, (3, 21, 7, 5), 13, (3, 3), pads=(1, 0, 2, 1), strides=(2, 1)),
    "dilated": conv(TABLES, (1, 16, 11, 12), 16, (3, 3), dilations=(2, 3), pads=(2, 3, 2, 3)),
    "same upper": conv(TABLES, (1, 9, 8, 7), 16, (2, 3), auto_pad="SAME_UPPER", strides=(2, 2)),
    "windows in the padding": conv(TABLES, (2, 10, 3, 4), 24, (3, 3), pads=(5, 4, 3, 5)),
    "kernel over all": conv(TABLES, (1, 16, 4, 4), 24, (6, 6), pads=(1, 1, 1, 1)),
    "stem": conv(TABLES, (1, 3, 23, 25), 20, (7, 7), plain=True, pads=(3, 3, 3, 3), strides=(2, 2)),
    "stem, one channel, no padding": conv(TABLES, (2, 1, 9, 30), 16, (5, 4), plain=True),
    "stem, padded on one side": conv(TABLES, (2, 3, 8, 19), 24, (2, 5), plain=True, pads=(0, 2, 3, 0), strides=(1, 2)),
    "stem, cropped": conv(TABLES, (1, 2, 11, 12), 16, (3, 3), plain=True, pads=(-1, 2, -2, -3)),
    "stem, 3D": conv(TABLES, (2, 1, 4, 5, 6), 16, (3, 3, 3), plain=True, pads=(1, 1, 1, 1, 1, 1)),
    "cropped": conv(TABLES, (1, 8, 11, 12), 16, (3, 3), pads=(-1, 2, -2, -3)),
    "plain, many channels": conv(TABLES, (1, 17, 6, 6), 16, (3, 3), plain=True, pads=(1, 1, 1, 1)),
    "groups of blocks": conv(TABLES, (1, 32, 6, 7), 64, (3, 3), group=2, pads=(1, 1, 1, 1)),
    "groups of several slabs": conv(TABLES, (2, 48, 5, 5), 144, (3, 3), group=3, pads=(1, 1, 1, 1)),
    "1D": conv(TABLES, (2, 16, 37), 16, (5,), pads=(2, 2)),
    "3D": conv(TABLES, (1, 16, 4, 5, 6), 16, (3, 2, 3), pads=(1, 0, 1, 1, 1, 1)),
    "1 x 1 with a stride, many weights": conv(TABLES, (2, 515, 7, 8), 520, (1, 1), strides=(2, 3), bias=False),
    "1D, with a stride, many weights": conv(TABLES, (1, 512, 9), 513, (1,), strides=(2,),
        epilogue=(Fused("Relu", (~0,)),)),
    "3D, with a stride, many weights": conv(TABLES, (1, 512, 3, 4, 5), 512, (1, 1, 1), strides=(2, 1, 2)),
    "relu": conv(TABLES, (1, 16, 6, 6), 24, (3, 3), pads=(1, 1, 1, 1), epilogue=(Fused("Relu", (~0,)),)),
    "residual, relu": conv(TABLES, 
        (2, 8, 5, 5), 13, (1, 1), epilogue=(Fused("Add", (~0, 3)), Fused("Relu", (~1,))),
        operands=(normal(TABLES, 2, 13, 5, 5),),
    ),
    "per channel and scalar": conv(TABLES, 
        (1, 8, 5, 6), 11, (3, 3), pads=(1, 1, 1, 1), epilogue=(Fused("Mul", (~0, 3)), Fused("Add", (~1, 4))),
        operands=(normal(TABLES, 11, 1, 1), normal(TABLES, 1)),
    ),
}  # fmt: skip


#: these compiled for their shape too: the text is the same, with sizes as literals
SPECIALISED = frozenset({
    "pointwise, odd channels", "3x3, odd everything", "windows in the padding", "stem, padded on one side",
    "groups of several slabs", "3D", "1 x 1 with a stride, many weights", "residual, relu",
})  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_reference(name: str) -> None:
    assert not check(CASES[name], "opencl.conv_blocked", configs=0, specialised=name in SPECIALISED)


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in CASES if name not in SPECIALISED])
def test_compiled_for_every_shape(name: str) -> None:
    assert not check(CASES[name], "opencl.conv_blocked.shape", configs=0)


RESIDUAL = (Fused("Add", (~0, 3)), Fused("Relu", (~1,)))
#: the last tile and the last slab are not full
RAGGED = {
    "window": conv(TABLES, 
        (2, 20, 7, 5), 45, (3, 3), pads=(1, 1, 1, 1), strides=(1, 2), epilogue=RESIDUAL,
        operands=(normal(TABLES, 2, 45, 7, 3),),
    ),
    "pointwise": conv(TABLES, (2, 20, 7, 5), 45, (1, 1), epilogue=RESIDUAL, operands=(normal(TABLES, 2, 45, 7, 5),)),
    "plain": conv(TABLES, (2, 3, 9, 7), 45, (3, 3), plain=True, pads=(1, 1, 1, 1), epilogue=(Fused("Relu", (~0,)),)),
}  # fmt: skip
CONFIGS = {name: list(SOLVER.space(case.problem(), TARGET)) for name, case in RAGGED.items()}
TILED = sorted({(name, c["nb"], c["ur"]) for name, configs in CONFIGS.items() for c in configs})
FEW = {(1, 8), (3, 4), (4, 3)}


@pytest.mark.parametrize(
    "name, nb, ur",
    [pytest.param(*t, marks=[] if t[0] == "window" or t[1:] in FEW else pytest.mark.soak) for t in TILED],
)
def test_every_tile_is_the_reference(name: str, nb: int, ur: int) -> None:
    """Work-items do as little and as much as they may."""
    case, configs = RAGGED[name], [c for c in CONFIGS[name] if (c["nb"], c["ur"]) == (nb, ur)]
    problem, want = case.problem(), [check_reference(case)]
    for config in (configs[0], configs[-1]):
        assert not run_one(case, problem, SOLVER, config, open_device("CPU"), want)


def test_a_plain_input_is_not_copied_with_far_more_padding(rng: np.random.Generator) -> None:
    """A stride over it makes the result small whatever the padding."""
    case = conv(rng, (1, 3, 8, 8), 16, (3, 3), plain=True, pads=(4096,) * 4, strides=(4096, 4096))
    assert "with its padding" in str(SOLVER.why_not(case.problem(), TARGET))


WIDE = replace(TARGET, vector_bytes=64, registers=32, units=8)
NARROW = replace(TARGET, vector_bytes=16, registers=16, units=1)


@pytest.mark.parametrize("target", [TARGET, WIDE, NARROW], ids=["here", "wide", "narrow"])
def test_the_default_is_in_the_space(target: Target) -> None:
    """Whatever the shape; and no space is too large to be searched."""
    rng, block = np.random.default_rng(1), blocked(target.vector_bytes // 4)
    for _ in range(200):
        batch, size, kernel = int(rng.integers(1, 4)), int(rng.integers(1, 60)), int(rng.integers(1, 4))
        channels, filters = (int(n) for n in rng.integers(block.block, 2048, 2))
        made = size + 2 - kernel + 1
        x = TensorType(DType.FLOAT32, (batch, channels, size, size), block)
        w = TensorType(DType.FLOAT32, (filters, channels, kernel, kernel))
        y = TensorType(DType.FLOAT32, (batch, filters, made, made), block)
        problem = Problem("Conv", (x, w), (y,), {"pads": (1, 1, 1, 1)}, (), 0, (False, True))
        assert SOLVER.why_not(problem, target) is None
        space = SOLVER.space(problem, target)
        assert SOLVER.default(problem, target) in space
        assert space.rows is not None and len(space.rows) <= 400
        for nb, ur in {(int(str(c["nb"])), int(str(c["ur"]))) for c in space}:
            assert nb * ur + min(nb, ur) < target.registers


@needs_results
@pytest.mark.parametrize("wrong", [0.99, 1.01])
def test_a_kernel_wrong_by_one_per_cent_fails(wrong: float) -> None:
    case = CASES["3x3"]
    problem, device = case.problem(), open_device("CPU")
    right = np.asarray(check_reference(case))
    config = SOLVER.default(problem, TARGET)
    assert not run_one(case, problem, SOLVER, config, device, [right])
    assert run_one(case, problem, SOLVER, config, device, [right * np.float32(wrong)])


def check_reference(case: Case) -> np.ndarray:
    """What the reference makes, as it lies in the output's layout."""
    from tunewright.ops.internal.reorder import from_plain
    from tunewright.solvers.host.reference import HostKernel

    problem = case.problem()
    inputs = [None if a is None else from_plain(a, t) for a, t in zip(case.inputs, problem.inputs, strict=True)]
    made: np.ndarray = HostKernel(problem).run(open_device("CPU.HOST").queue(), inputs, [None])[0]
    return made
