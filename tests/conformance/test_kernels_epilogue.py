"""Epilogues at the store of another kernel: written lane by lane into a small kernel that makes a tile of a row."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tunewright.devices.base import Target
from tunewright.ir.graph import Fused
from tunewright.ir.types import PLAIN, DType, Layout, TensorType, blocked
from tunewright.plugins.single import open_device
from tunewright.solvers.base import Config, Problem
from tunewright.solvers.c.source import epilogue
from tunewright.solvers.c.source.base import CSolver, tensor
from tunewright.solvers.c.source.emit import COMPUTE, EmittedLaunch, In, Out, Source
from tunewright.solvers.epilogue_types import main_type
from tunewright.solvers.host.reference import HostKernel
from tunewright.testing.kernelcheck import Case, _physical, run_one

#: draws the tables of this module, once, when it is imported; tests draw from their own (the fixture rng)
TABLES = np.random.default_rng(1)
SEED = 1001
BLOCK = 8


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.asarray(rng.standard_normal(shape), np.float32)


def code(dtype: Any) -> int:
    return DType.of_numpy(np.dtype(dtype)).onnx_code


class Tiles(CSolver):
    """Neg of [n, c, w] in tiles of eight lanes: along w when plain, over a block of channels when blocked."""

    family = "tiles"
    ops = frozenset({"Neg"})
    layouts = frozenset({PLAIN.name, "blocked"})

    def refuse(self, problem: Problem, target: Target) -> str | None:
        return epilogue.why_not(problem)

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x, out = tensor(problem.inputs[0]), tensor(problem.outputs[0])
        source = Source("tiles", self.specialise)
        source.buffer("x", x.dtype, In(0))
        tail = epilogue.Epilogue(source, problem)
        source.buffer("y", out.dtype, Out())
        n, c, w = out.dims
        inner = out.layout.name == "blocked"
        source.dims(C=c, W=w)
        source.fixed(LANES=BLOCK)
        main = COMPUTE[main_type(problem).dtype]
        source.add("int r = GID(0), t = GID(1);")
        if inner:
            channel, offset, lanes = "r % ((C + LANES - 1) / LANES) * LANES + l", "(r * W + t) * LANES + l", "LANES"
            grid = [n * -(-c // BLOCK), w]
        else:
            channel, offset, lanes = "r % C", "r * W + t * LANES + l", "(W - t * LANES < LANES ? W - t * LANES : LANES)"
            grid = [n * c, -(-w // BLOCK)]
        source.add(f"{main} tile[LANES];")
        source.add(f"for (int l = 0; l < {lanes}; l++) tile[l] = -{source.load('x', offset)};")
        source.add(f"for (int l = 0; l < {lanes}; l++) {{")
        if inner:
            source.add(f"if ({channel} >= C) continue;")
        source.add(f"{main} v = tile[l];")
        lines, result = tail.apply("v", channel, offset)
        source.add(lines)
        source.add(source.store("y", offset, result) + "}")
        return [source.call(grid)]


def agree(
    x: np.ndarray,
    operands: list[np.ndarray],
    steps: tuple[Fused, ...],
    layout: Layout = PLAIN,
    specialise: bool = False,
) -> None:
    case = Case("Neg", [x, *operands], epilogue=steps, operands=len(operands), layouts=(layout, layout))
    device, problem, solver = open_device("CPU"), case.problem(), Tiles(specialise)
    assert solver.why_not(problem, device.target) is None
    want = HostKernel(problem).run(device.queue(), _physical(case, problem), [None])
    assert not run_one(case, problem, solver, {}, device, want)


X = normal(TABLES, 2, 11, 19)
CHANNEL, ONE, WHOLE = normal(TABLES, 11, 1), normal(TABLES, 1), normal(TABLES, 2, 11, 19)
LOW, HIGH = np.array(-0.5, np.float32), np.array(0.75, np.float32)
FAKE_QUANTIZE = "org.openvinotoolkit::FakeQuantize"


@pytest.mark.parametrize("layout", [PLAIN, blocked(BLOCK)], ids=str)
@pytest.mark.parametrize("specialise", [False, True])
def test_operands_of_every_kind(layout: Layout, specialise: bool) -> None:
    steps = (
        Fused("Mul", (~0, 1)),
        Fused("Add", (~1, 2)),
        Fused("Add", (~2, 3)),
        Fused("Relu", (~3,)),
        Fused("Sub", (~4, ~0)),
        Fused("Mul", (~5, 1)),
    )
    agree(X, [CHANNEL, ONE, WHOLE], steps, layout, specialise)


def test_types_change_and_change_back() -> None:
    steps = (
        Fused("Cast", (~0,), {"to": code(np.float16)}),
        Fused("Cast", (~1,), {"to": code(np.float64)}),
        Fused("Mul", (~2, 1)),
        Fused("Cast", (~3,), {"to": code(np.int32)}),
        Fused("Add", (~4, 2)),
        Fused("Greater", (~5, 3)),
        Fused("Not", (~6,)),
    )
    operands = [np.array(100.0), np.arange(11, dtype=np.int32)[:, None], np.array(7, np.int32)]
    agree(X, operands, steps)


def test_boolean_operands() -> None:
    steps = (Fused("Less", (~0, 1)), Fused("And", (~1, 2)), Fused("Where", (~2, ~0, 3)))
    agree(X, [CHANNEL, WHOLE > 0, ONE], steps)


@pytest.mark.parametrize("bounds", [(), (1,), (1, 2)])
def test_clip(bounds: tuple[int, ...]) -> None:
    agree(X, [LOW, HIGH][: len(bounds)], (Fused("Clip", (~0, *bounds)), Fused("Abs", (~1,))))


def test_fake_quantize() -> None:
    low, high = -np.abs(CHANNEL) - 0.5, np.abs(CHANNEL) + 0.5
    agree(X, [low, high], (Fused(FAKE_QUANTIZE, (~0, 1, 2, 1, 2), {"levels": 256}),))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64, np.int32, np.int8])
def test_other_types(dtype: Any) -> None:
    x, other = (3 * X).astype(dtype), (3 * CHANNEL).astype(dtype)
    agree(x, [other], (Fused("Mul", (~0, 1)), Fused("Max", (~1, ~0)), Fused("Add", (~2, 1))))


def test_activations() -> None:
    ops = ("HardSwish", "Sigmoid", "Tanh", "Gelu", "Mish", "Softplus", "LeakyRelu")
    agree(X, [], tuple(Fused(op, (~k,)) for k, op in enumerate(ops)))


def test_kinds() -> None:
    """What lies in no such way is refused, before shapes are known too."""

    def problem(operand: TensorType, shape: tuple[Any, ...], layout: Layout = PLAIN) -> Problem:
        out = TensorType(DType.FLOAT32, shape, layout)
        return Problem("Neg", (out, operand), (out,), {}, (Fused("Add", (~0, 1)),), 1, (False, False))

    def of(*shape: Any) -> TensorType:
        return TensorType(DType.FLOAT32, shape)

    shape = (2, 3, 4)
    assert [epilogue.kind(problem(t, shape), 1, 1) for t in (of(), of(1, 1), of(3, 1), of(1, 3, 1), of(*shape))] == [
        "scalar", "scalar", "channel", "channel", "full"
    ]  # fmt: skip
    assert epilogue.kind(problem(of(4), shape), 1, -1) == "channel"
    assert epilogue.kind(problem(of(4), shape), 1, 1) is None
    assert epilogue.kind(problem(of("n", 3, 4), ("n", 3, 4)), 1, 1) == "full"
    assert epilogue.kind(problem(of(*shape), shape, blocked(8)), 1, 1) is None
    assert "neither one value" in str(epilogue.why_not(problem(of(4), shape)))
    assert epilogue.why_not(problem(TensorType(DType.STRING, (1,)), shape)) is not None
