"""Element-wise kernels against their references: every operation in every type, broadcasting, chains, layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tunewright.ir.graph import Fused
from tunewright.ir.types import DType, TensorType, blocked
from tunewright.ops import lookup
from tunewright.ops.tolerance import compare
from tunewright.plugins.single import open_device
from tunewright.solvers.base import Kernel, Problem, solvers
from tunewright.solvers.host.reference import HostKernel
from tunewright.testing.kernelcheck import Case, check, run_one

FLOATS = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
EVERY = [*FLOATS, *INTEGERS, np.bool_]
BLOCK = 8
MS = "com.microsoft::"
FAKE_QUANTIZE = "org.openvinotoolkit::FakeQuantize"


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.asarray(rng.standard_normal(shape), np.float32)


def names(text: str) -> list[str]:
    return text.split()


def agree(case: Case, configs: int = 0) -> None:
    assert not check(case, "opencl.elementwise", configs)


def agree_generic(case: Case) -> None:
    """Without the specialised solver: its kernels differ in nothing but that numbers are literals."""
    device, problem = open_device("CPU"), case.problem()
    solver = next(s for s in solvers() if s.id == "opencl.elementwise")
    assert solver.why_not(problem, device.target) is None, solver.why_not(problem, device.target)
    want = HostKernel(problem).run(device.queue(), case.inputs, [None])
    assert not run_one(case, problem, solver, solver.default(problem, device.target), device, want)


def code(dtype: Any) -> int:
    return DType.of_numpy(np.dtype(dtype)).onnx_code


# -- every operation in every type ------------------------------------------------------------------------------------
@dataclass
class Patch:
    """Operations one after the other: arguments are numbers of inputs, or ~0 for the result before."""

    ops: Sequence[tuple[str, Sequence[int], Mapping[str, Any]]]
    exact: bool = False
    #: the elements that count
    where: Any = ...

    def __str__(self) -> str:
        return ", then ".join(f"{op}{tuple(args)} {dict(attrs)}" for op, args, attrs in self.ops)


@dataclass
class Patchwork:
    """Many operations as one kernel, each of which makes a row of the result; one kernel for each takes minutes."""

    inputs: Sequence[np.ndarray]
    patches: list[Patch] = field(default_factory=list)
    #: to which results are cast
    dtype: Any = None

    def add(self, op: str, *args: int, **attrs: Any) -> None:
        steps = [(op, args, attrs)]
        if self.dtype is not None:
            steps.append(("Cast", (~0,), {"to": code(self.dtype)}))
        self.patches.append(Patch(steps))

    def failures(self) -> list[str]:
        kernel, case = self._kernel(len(self.patches))
        queue = open_device("CPU").queue()
        made = kernel.run(queue, case.inputs, [None])[0]
        queue.finish()
        wrong = []
        for patch, row in zip(self.patches, made, strict=True):
            row, want = row[patch.where], np.broadcast_to(self._reference(patch), row.shape)[patch.where]
            if patch.exact:
                reason = "" if np.array_equal(row, want, equal_nan=True) else f"{row} against {want}"
            else:
                reason = compare(row, want)
            if reason:
                wrong.append(f"{patch} of {self.inputs[0].dtype}: {reason}")
        return wrong

    def _kernel(self, n: int) -> tuple[Kernel, Case]:
        """The result begins as the first input (cast where asked for) and is replaced row by row."""
        rows = [np.arange(n)[:, None] == k for k in range(n)]
        first = len(self.inputs) + 1
        everywhere = np.ones((n, 1), np.bool_)
        steps = [Fused("Cast", (~0,), {"to": code(self.dtype or self.inputs[0].dtype)})]
        result = ~1
        for k, patch in enumerate(self.patches):
            for op, args, attrs in patch.ops:
                places = (~len(steps),) if args[0] < 0 else tuple(2 + a if a else ~0 for a in args)
                steps.append(Fused(op, places, attrs))
            steps.append(Fused("Where", (1 + first + k, ~len(steps), result)))
            result = ~len(steps)
        x = self.inputs[0]
        case = Case("Where", [everywhere, x, x, *self.inputs[1:], *rows], epilogue=tuple(steps), operands=first - 2 + n)
        device = open_device("CPU")
        problem = case.problem()
        solver = next(s for s in solvers() if s.id == "opencl.elementwise")
        assert solver.why_not(problem, device.target) is None, solver.why_not(problem, device.target)
        return solver.compile(problem, solver.default(problem, device.target), device), case

    def _reference(self, patch: Patch) -> np.ndarray:
        result = self.inputs[0]
        for op, args, attrs in patch.ops:
            spec = lookup(op)
            assert spec is not None
            with np.errstate(all="ignore"):
                given = [self.inputs[a] for a in args] if args[0] >= 0 else [result]
                result = spec.reference(given, attrs, 1)[0]
        return result


SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1, -1, 0.5, -0.5, 1.5, 2.5, -2.5, 2, -2, 3, 10, -10, 60, -60, 100, -100]
SMOOTH = names(
    f"""Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor HardSwish Log Mish Neg Reciprocal Relu Round
    Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Tan Tanh Celu Elu Gelu HardSigmoid LeakyRelu Selu Shrink Swish
    ThresholdedRelu {MS}Gelu {MS}QuickGelu {MS}FastGelu"""
)
COMPARISONS = names("Equal Greater GreaterOrEqual Less LessOrEqual")


@pytest.mark.parametrize("dtype", FLOATS)
def test_functions(rng: np.random.Generator, dtype: Any) -> None:
    """Of one tensor, with default and other attributes; NaN, infinities, overflow, ties."""
    x = np.concatenate([SPECIAL, rng.normal(0, 1, 200), rng.normal(0, 20, 60)]).astype(dtype)
    if dtype is np.float16:
        x = np.concatenate([x, np.array([6e-8, -6e-8, 1e-6, 65504, -65504], np.float16)])
    work = Patchwork([x])
    for op in SMOOTH:
        work.add(op, 0)
    work.add("Celu", 0, alpha=0.5)
    work.add("Elu", 0, alpha=1.7)
    work.add("Gelu", 0, approximate="tanh")
    work.add("HardSigmoid", 0, alpha=0.5, beta=0.25)
    work.add("LeakyRelu", 0, alpha=0.3)
    work.add("Selu", 0, alpha=1.5, gamma=2.0)
    work.add("Shrink", 0, bias=0.25, lambd=1.0)
    work.add("Swish", 0, alpha=0.5)
    work.add("ThresholdedRelu", 0, alpha=0.25)
    assert not work.failures()


@pytest.mark.parametrize("dtype", FLOATS)
def test_functions_of_several(rng: np.random.Generator, dtype: Any) -> None:
    a, b = (v.ravel() for v in np.meshgrid(SPECIAL, SPECIAL))
    x = np.concatenate([a, rng.normal(0, 3, 300)]).astype(dtype)
    y = np.concatenate([b, rng.normal(0, 3, 300)]).astype(dtype)
    z = np.roll(y, 100)
    work = Patchwork([x, y, z])
    for op in names(f"Add Sub Mul Div Max Min Sum Mean Pow PRelu SwiGLU {MS}BiasGelu {MS}FastGelu {MS}BiasAdd"):
        work.add(op, 0, 1)
    for op in ("Max", "Min", "Sum", "Mean", f"{MS}GatedAdd"):
        work.add(op, 0, 1, 2)
    if np.dtype(dtype).itemsize >= 4:  # else a quotient half-way between two numbers may fall on either
        work.add("Mod", 0, 1)
        work.add("Mod", 0, 1, fmod=1)
    assert not work.failures()


@pytest.mark.parametrize("dtype", FLOATS)
def test_predicates(dtype: Any) -> None:
    a, b = (v.ravel().astype(dtype) for v in np.meshgrid(SPECIAL, SPECIAL))
    work = Patchwork([a, b], dtype=np.bool_)
    for op in COMPARISONS:
        work.patches.append(Patch([(op, (0, 1), {})]))
    for attrs in ({}, {"detect_negative": 0}, {"detect_positive": 0}, {"detect_negative": 0, "detect_positive": 0}):
        work.patches.append(Patch([("IsInf", (0,), attrs)]))
    work.patches.append(Patch([("IsNaN", (0,), {})]))
    assert not work.failures()


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers(rng: np.random.Generator, dtype: Any) -> None:
    """Overflow wraps around, the smallest number has no opposite."""
    info = np.iinfo(dtype)
    edge = np.array([info.min, info.min + 1, info.max - 1, info.max, 0, 1, 2, 3, 7, 100], dtype)
    edge = np.concatenate([edge, np.array([-1, -2, -3, -7, -100]).astype(dtype)])
    a, b = (v.ravel() for v in np.meshgrid(edge, edge))
    x = np.concatenate([a, rng.integers(info.min, info.max, 100, dtype, endpoint=True)])
    y = np.concatenate([b, rng.integers(info.min, info.max, 50, dtype), rng.integers(0, 9, 50).astype(dtype)])
    exponent = np.abs(y % 7).astype(dtype)
    divisor = np.where(y == 0, 5, y).astype(dtype)
    work = Patchwork([x, y, exponent, exponent.astype(np.float32), divisor], dtype=dtype)
    for op in names("Add Sub Mul Max Min PRelu BitwiseAnd BitwiseOr BitwiseXor") + COMPARISONS:
        work.add(op, 0, 1)
    work.add("Div", 0, 4)
    work.add("Mod", 0, 4)
    work.add("Mod", 0, 4, fmod=1)
    work.add("BitShift", 0, 1, direction="LEFT")
    work.add("BitShift", 0, 1, direction="RIGHT")
    work.add("Pow", 0, 2)
    for op in names("Abs BitwiseNot Sign Erf Shrink Relu") + (["Neg"] if info.min else []):
        work.add(op, 0)
    assert not work.failures()


def test_powers_of_other_types(rng: np.random.Generator) -> None:
    x = np.concatenate([SPECIAL, rng.normal(0, 3, 60)]).astype(np.float32)
    exponent = np.arange(len(x)) % 9 - 4
    work = Patchwork([x, exponent.astype(np.int64), exponent.astype(np.float64), np.abs(exponent).astype(np.uint8)])
    for k in (1, 2, 3):
        work.add("Pow", 0, k)
    assert not work.failures()
    whole = Patchwork([np.arange(1, 30, dtype=np.int32), (np.arange(29) % 4).astype(np.float32)])
    whole.add("Pow", 0, 1)
    assert not whole.failures()
    agree_generic(Case("Pow", [np.array([1, 2, 3, -1], np.int32), np.array([-1, -2, 3, -3], np.int64)]))


@pytest.mark.parametrize("exponent", [2, 0.5, 3, -1, 2.5, 0])
def test_power_of_one_exponent(rng: np.random.Generator, exponent: float) -> None:
    agree_generic(Case("Pow", [np.abs(normal(rng, 3, 50)), np.array(exponent, np.float32)]))


def test_logic() -> None:
    a, b = np.array([0, 0, 1, 1], np.bool_), np.array([0, 1, 0, 1], np.bool_)
    work = Patchwork([a, b])
    for op in ("And", "Or", "Xor", "Equal"):
        work.add(op, 0, 1)
    work.add("Not", 0)
    assert not work.failures()


@pytest.mark.parametrize("source", EVERY)
def test_cast(source: Any) -> None:
    """To every type; floats that a signed integer cannot hold become what the processor makes of them."""
    values = [0, 1, 2, 3, 100, 127, 128, 200, 255, 256, 1000, 32768, 65535, 70000, 2**31 - 1, 2**31]
    values += [-v for v in values]
    more = [2.0**32 + 5, 2.0**62, 0.5, -0.5, 1.5, 2.5, -1.7, 3e9, -3e9, 1e15, np.nan, np.inf, -np.inf, 1e-40, 1e-7]
    with np.errstate(all="ignore"):
        x = np.array(values, np.int64).astype(source)
        floats = np.concatenate([x, np.array(more).astype(source)])
    if np.dtype(source) in map(np.dtype, FLOATS):
        x = floats
    # numpy's own answers for what the wide unsigned ones cannot hold depend on an element's place
    wide = x.astype(np.float64)
    fits = (wide >= 0) & (wide < 2.0**32)
    work = Patchwork([x], dtype=np.float64)
    for to in EVERY:
        steps = [("Cast", (0,), {"to": code(to)}), ("Cast", (~0,), {"to": code(np.float64)})]
        unsigned = to in (np.uint32, np.uint64)
        work.patches.append(Patch(steps, exact=np.dtype(to).kind in "iub", where=fits if unsigned else ...))
    assert not work.failures()


def test_cast_like(rng: np.random.Generator) -> None:
    agree_generic(Case("CastLike", [normal(rng, 3, 4), np.zeros((7, 9, 2), np.int32)]))


@pytest.mark.parametrize("source, to", [(np.float32, np.int32), (np.int64, np.float64), (np.int8, np.uint8)])
def test_bit_cast(rng: np.random.Generator, source: Any, to: Any) -> None:
    x = rng.integers(0, 256, 24 * np.dtype(source).itemsize, np.uint8).view(source)
    case = Case("BitCast", [x], {"to": code(to)})
    if np.dtype(to).kind == "f":
        case = Case("BitCast", [np.float64(normal(rng, 9)).view(source)], {"to": code(to)})
    agree_generic(case)


# -- optional inputs, scalars -----------------------------------------------------------------------------------------
LOW, HIGH = np.array(-0.5, np.float32), np.array([0.75], np.float32)


@pytest.mark.parametrize("bounds", [[], [LOW], [LOW, HIGH], [None, HIGH], [LOW, np.array(np.nan, np.float32)]])
def test_clip(rng: np.random.Generator, bounds: list[np.ndarray | None]) -> None:
    x = np.concatenate([normal(rng, 40), np.array([np.nan, np.inf, -np.inf], np.float32)])
    agree_generic(Case("Clip", [x, *bounds]))


def test_clip_of_integers() -> None:
    agree_generic(Case("Clip", [np.arange(-9, 9, dtype=np.int8), np.array(-3, np.int8), np.array(5, np.int8)]))


@pytest.mark.parametrize("ranges", [(), (1, 3, 1, 1)])
def test_fake_quantize(rng: np.random.Generator, ranges: tuple[int, ...]) -> None:
    low, high = (np.asarray(sign * rng.uniform(0.5, 2, ranges), np.float32) for sign in (-1, 1))
    agree(Case(FAKE_QUANTIZE, [normal(rng, 2, 3, 5, 7), low, high, low, high], {"levels": 256}))


@pytest.mark.parametrize("op", ["BiasGelu", "FastGelu", "BiasAdd"])
def test_bias(rng: np.random.Generator, op: str) -> None:
    agree_generic(Case(MS + op, [normal(rng, 4, 6), normal(rng, 6)]))


# -- shapes -----------------------------------------------------------------------------------------------------------
SHAPES = [
    [(), ()],
    [(1,), (1, 1, 1)],
    [(0, 3), (1, 3)],
    [(5, 7), (7,)],
    [(5, 1), (1, 7)],
    [(7,), (3, 5, 7)],
    [(2, 3, 4, 5), (3, 1, 5)],
    [(2, 3, 4, 5), (2, 1, 4, 1)],
    [(2, 1, 4, 1, 3, 1), (1, 3, 1, 5, 1, 2)],
    [(3, 1000), (3, 1)],
    [(300, 3), (3,)],
    [(2, 40000), (2, 1)],
    [(70000, 1), (70000, 2)],
    [(1, 8, 9, 9), ()],
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_broadcast(rng: np.random.Generator, shapes: list[tuple[int, ...]]) -> None:
    case = Case("Sub", [normal(rng, *s) for s in shapes])
    (agree if shapes in SHAPES[6:9] else agree_generic)(case)


def test_broadcast_of_three(rng: np.random.Generator) -> None:
    condition, x, y = normal(rng, 3, 1, 5) > 0, normal(rng, 4, 1), normal(rng, 1, 1, 1, 1)
    agree(Case("Where", [condition, x, y]))


@pytest.mark.parametrize("shape", [(1,), (5, 7), (3, 4099), (2, 3, 64, 65)])
def test_configs(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    epilogue = (Fused("Sigmoid", (~0,)), Fused("Mul", (~1, 1)))
    agree(Case("Relu", [normal(rng, *shape), normal(rng, *shape)], epilogue=epilogue, operands=1), configs=1)


def test_configs_of_rows(rng: np.random.Generator) -> None:
    agree(Case("Mul", [normal(rng, 6, 1, 9000), normal(rng, 1, 5, 1)]), configs=3)


# -- chains -----------------------------------------------------------------------------------------------------------
def test_chain_with_operands_of_every_kind(rng: np.random.Generator) -> None:
    x, row, column, one, whole = (
        normal(rng, 4, 5, 6),
        normal(rng, 6),
        normal(rng, 5, 1),
        normal(rng, 1),
        normal(rng, 4, 5, 6),
    )
    integers, mask = np.arange(20).reshape(4, 5, 1), normal(rng, 5, 6) > 0
    epilogue = (
        Fused("Mul", (~0, 1)),
        Fused("Add", (~1, 2)),
        Fused("Greater", (~2, 3)),
        Fused("Where", (~3, ~2, 4)),
        Fused("Cast", (5,), {"to": code(np.float32)}),
        Fused("Add", (~4, ~5)),
        Fused("Where", (6, ~6, ~0)),
    )
    agree(Case("Tanh", [x, row, column, one, whole, integers, mask], epilogue=epilogue, operands=6), configs=1)


def test_chain_that_changes_types(rng: np.random.Generator) -> None:
    """A comparison between narrow floats sees them as they would have been stored."""
    x, y = normal(rng, 400).astype(np.float16), normal(rng, 400).astype(np.float16)
    product = (x.astype(np.float32) * y.astype(np.float32)).astype(np.float16)
    epilogue = (Fused("Equal", (~0, 2)), Fused("Not", (~1,)), Fused("Cast", (~2,), {"to": code(np.int8)}))
    agree(Case("Mul", [x, y, product], epilogue=epilogue, operands=1))


def test_chain_ends_in_clip(rng: np.random.Generator) -> None:
    epilogue = (Fused("Clip", (~0, 2)), Fused("Clip", (~1, 2, 3)))
    agree(Case("Add", [normal(rng, 9, 9), normal(rng, 9), LOW, HIGH], epilogue=epilogue, operands=2))


def test_in_place(rng: np.random.Generator) -> None:
    device = open_device("CPU")
    x, y = normal(rng, 3, 5000), normal(rng, 3, 1)
    problem = Case("Mul", [x, y]).problem()
    want = x * y
    for solver in solvers():
        if solver.id.startswith("opencl.elementwise"):
            queue, mine = device.queue(), x.copy()
            kernel = solver.compile(problem, solver.default(problem, device.target), device)
            kernel.run(queue, [mine, y], [mine])
            queue.finish()
            assert not compare(mine, want)


# -- layouts ----------------------------------------------------------------------------------------------------------
IN_BLOCKS = (blocked(BLOCK), blocked(BLOCK))


@pytest.mark.parametrize("channels", [16, 13])
def test_blocked(rng: np.random.Generator, channels: int) -> None:
    x = normal(rng, 2, channels, 5, 7)
    agree(Case("HardSwish", [x], layouts=IN_BLOCKS))
    agree(Case("Add", [x, normal(rng, *x.shape)], layouts=IN_BLOCKS, along=frozenset({1})))
    agree(Case("Mul", [x, normal(rng, 2, channels, 1, 1)], layouts=IN_BLOCKS, along=frozenset({1})), configs=1)
    agree(Case("Mul", [x, normal(rng, 1, channels, 5, 1)], layouts=IN_BLOCKS, along=frozenset({1})))
    agree(Case("Mul", [x, normal(rng, 1)], layouts=IN_BLOCKS))


def test_blocked_with_plain_operands(rng: np.random.Generator) -> None:
    """One channel for all; one value per channel, where the channels are whole blocks or the operand is constant."""
    x = normal(rng, 2, 16, 5, 7)
    agree(Case("Mul", [x, normal(rng, 2, 1, 5, 7)], layouts=IN_BLOCKS))
    agree(Case("Add", [x, normal(rng, 16, 1, 1)], layouts=IN_BLOCKS))
    agree(Case("Add", [normal(rng, 2, 13, 5, 7), normal(rng, 13, 1, 1)], layouts=IN_BLOCKS, constant=frozenset({1})))


@pytest.mark.parametrize(
    "other, along", [((13, 1, 1), False), ((1, 16, 5, 7), False), ((1, 1, 5, 7), True)], ids=["part", "plain", "one"]
)
def test_blocked_refusals(rng: np.random.Generator, other: tuple[int, ...], along: bool) -> None:
    channels = 13 if other[0] == 13 else 16
    case = Case("Add", [normal(rng, 2, channels, 5, 7), normal(rng, *other)], layouts=IN_BLOCKS,
                along=frozenset({1}) if along else frozenset())  # fmt: skip
    assert "no solver accepts" in check(case, "opencl.elementwise")[0]


# -- what is not known yet --------------------------------------------------------------------------------------------
def test_open_types() -> None:
    """Fusion asks before shapes are known."""
    target = open_device("CPU").target
    open_, rank = TensorType(DType.FLOAT32, ("n", 3, None)), TensorType(DType.FLOAT32)
    for a, b, out in ((open_, open_, open_), (open_, rank, rank), (rank, rank, rank)):
        problem = Problem("Add", (a, b), (out,), {}, constant=(False, False))
        assert all(s.why_not(problem, target) is None for s in solvers() if s.id.startswith("opencl.elementwise"))


def test_refusals() -> None:
    target = open_device("CPU").target
    solver = next(s for s in solvers() if s.id == "opencl.elementwise")
    strings, floats = TensorType(DType.STRING, (2,)), TensorType(DType.FLOAT32, (2,))
    bools = TensorType(DType.BOOL, (2,))
    for op, inputs, out in (("Equal", (strings, strings), bools), ("And", (floats, floats), bools)):
        problem = Problem(op, inputs, (out,), {}, constant=(False, False))
        assert solver.why_not(problem, target)
