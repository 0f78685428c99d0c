"""Matrix products (MatMul, Gemm, FusedMatMul): register tiles and dot products against their references."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance.short_form import every_other
from tunewright.ir.graph import Fused
from tunewright.plugins.single import open_device
from tunewright.solvers.base import solvers
from tunewright.solvers.host.reference import HostKernel
from tunewright.testing.kernelcheck import Case, check, run_one

FUSED = "com.microsoft::FusedMatMul"
B = frozenset({1})


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def generic(case: Case, family: str = "opencl.matmul") -> str:
    """What is wrong with the solver that takes shapes as arguments, in its default config: nothing new to compile."""
    device, problem = open_device("CPU"), case.problem()
    solver = next(s for s in solvers() if s.id == family)
    assert solver.why_not(problem, device.target) is None
    want = HostKernel(problem).run(device.queue(), case.inputs, [None])
    return run_one(case, problem, solver, solver.default(problem, device.target), device, want)


def solver_of(case: Case) -> str:
    """The family that is chosen untuned."""
    device, problem = open_device("CPU"), case.problem()
    return next(s.id for s in solvers() if s.language == "c" and s.why_not(problem, device.target) is None)


@every_other(
    ("constant", [frozenset(), B]),
    ("m, k, n", [
        (1, 1, 1), (1, 7, 33), (2, 5, 3), (3, 64, 65), (4, 0, 5), (5, 9, 16), (6, 16, 8), (7, 100, 31), (13, 33, 100),
        (50, 17, 1), (1, 300, 300), (128, 96, 40), (0, 3, 4),
    ]),
)  # fmt: skip
def test_sizes(rng: np.random.Generator, m: int, k: int, n: int, constant: frozenset[int]) -> None:
    assert not generic(Case("MatMul", [normal(rng, m, k), normal(rng, k, n)], constant=constant))


@pytest.mark.parametrize("configs", [1, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("constant", [frozenset(), B])
def test_configs(rng: np.random.Generator, constant: frozenset[int], configs: int) -> None:
    case = Case("MatMul", [normal(rng, 2, 25, 700), normal(rng, 700, 67)], constant=constant)
    assert not check(case, "opencl.matmul", configs=configs)


@pytest.mark.parametrize("rows", [1, 4, 6])
def test_uneven_rows(rng: np.random.Generator, rows: int) -> None:
    """Tiles of one row less where rows do not come out even; sums in one block or several; fetching ahead or not."""
    device = open_device("CPU")
    solver = next(s for s in solvers() if s.id == "opencl.matmul")
    for m, k, prefetch in ((2, 20, False), (7, 300, True), (11, 20, True), (32, 300, True), (33, 257, False)):
        inputs = [normal(rng, m, k), normal(rng, k, 67), normal(rng, 67)]
        case = Case("MatMul", inputs, constant=frozenset({1, 2}), epilogue=(Fused("Add", (~0, 2)),), operands=1)
        problem = case.problem()
        config = {"rows": rows, "vectors": 2, "k_block": 128, "split": 2, "direct": False, "prefetch": prefetch}
        assert config in solver.space(problem, device.target)
        want = HostKernel(problem).run(device.queue(), case.inputs, [None])
        assert not run_one(case, problem, solver, config, device, want), (m, k)


def test_gelu(rng: np.random.Generator) -> None:
    """The epilogue of a transformer's first product."""
    epilogue = (Fused("Add", (~0, 2)), Fused("Gelu", (~1,)))
    for n in (48, 50):
        inputs = [normal(rng, 2, 9, 40), normal(rng, 40, n), normal(rng, n)]
        assert not generic(Case("MatMul", inputs, constant=frozenset({1, 2}), epilogue=epilogue, operands=1))


@pytest.mark.parametrize("epilogue", [(), (Fused("Add", (~0, 2)), Fused("Relu", (~1,)))])
def test_blocked_sums(rng: np.random.Generator, epilogue: tuple[Fused, ...]) -> None:
    """Sums so long that they are taken in blocks; the error must not grow with them."""
    operands = [normal(rng, 9, 20)] if epilogue else []
    case = Case("MatMul", [normal(rng, 9, 120_001), normal(rng, 120_001, 20), *operands], constant=B, epilogue=epilogue,
                operands=len(operands))  # fmt: skip
    assert not generic(case)


def test_blocked_sums_of_columns(rng: np.random.Generator) -> None:
    assert not generic(Case("Gemm", [normal(rng, 5000, 14), normal(rng, 5000, 33)], {"transA": 1}))


@every_other(
    ("constant", [frozenset(), B]),
    ("a, b", [
        ((5,), (5,)), ((5,), (5, 3)), ((4, 5), (5,)), ((2, 3, 4, 5), (5,)), ((5,), (2, 3, 5, 4)),  # rank 1
        ((3, 4, 5), (3, 5, 6)), ((2, 3, 4, 5), (5, 6)), ((2, 3, 4, 5), (2, 3, 5, 6)), ((4, 5), (2, 3, 5, 6)),
        ((2, 1, 4, 5), (3, 5, 6)), ((2, 1, 3, 4, 5), (1, 7, 1, 5, 20)), ((2, 3, 1, 5), (5, 20)), ((0, 4, 5), (5, 6)),
        ((2, 3, 1, 5), (2, 3, 5, 20)), ((300, 2, 2), (300, 2, 2)),
    ]),
)  # fmt: skip
def test_broadcasts(rng: np.random.Generator, a: tuple[int, ...], b: tuple[int, ...], constant: frozenset[int]) -> None:
    assert not generic(Case("MatMul", [normal(rng, *a), normal(rng, *b)], constant=constant))


def test_many_products(rng: np.random.Generator) -> None:
    """More of them than a grid may have work-items."""
    assert not generic(Case("MatMul", [normal(rng, 70000, 2, 2), normal(rng, 70000, 2, 3)]))


@every_other(("trans_a", [0, 1]), ("trans_b", [0, 1]), ("c", [None, (), (1,), (19,), (1, 19), (9, 1), (9, 19)]))
def test_gemm(rng: np.random.Generator, trans_a: int, trans_b: int, c: tuple[int, ...] | None) -> None:
    a, b = normal(rng, *((21, 9) if trans_a else (9, 21))), normal(rng, *((19, 21) if trans_b else (21, 19)))
    attrs = {"transA": trans_a, "transB": trans_b, "alpha": 0.5, "beta": 2.0}
    addend = [] if c is None else [normal(rng, *c)]
    for constant in (frozenset[int](), frozenset({1, 2})):
        assert not generic(Case("Gemm", [a, b, *addend], attrs, constant=constant))


@pytest.mark.parametrize("c", [(1,), (3, 1), (1, 40), (3, 40)])
def test_gemm_few_rows(rng: np.random.Generator, c: tuple[int, ...]) -> None:
    attrs = {"transB": 1, "alpha": 0.5, "beta": 2.0}
    case = Case("Gemm", [normal(rng, 3, 130), normal(rng, 40, 130), normal(rng, *c)], attrs)
    assert not generic(case, "opencl.gemv")
    if c == (3, 40):
        assert not check(case, "opencl.gemv", configs=2)


def test_gemm_ignores_addend(rng: np.random.Generator) -> None:
    a, b, c = normal(rng, 3, 4), normal(rng, 4, 5), np.full((3, 5), np.nan, np.float32)
    assert not generic(Case("Gemm", [a, b, c], {"beta": 0.0}))


@pytest.mark.parametrize("attrs", [
    {"transA": 1, "transB": 1, "alpha": 0.25}, {"transBatchA": 1, "transBatchB": 1}, {"transBatchA": 1, "transA": 1},
])  # fmt: skip
def test_fused_matmul(rng: np.random.Generator, attrs: dict[str, Any]) -> None:
    def operand(batch: int, rows: int, columns: int, name: str) -> np.ndarray:
        shape = [batch, rows, columns] if not attrs.get(f"transBatch{name}") else [rows, batch, columns]
        if attrs.get(f"trans{name}"):  # the matrix comes last whichever way the batch lies
            shape = [batch, columns, rows] if not attrs.get(f"transBatch{name}") else [columns, batch, rows]
        return normal(rng, *shape)

    case = Case(FUSED, [operand(3, 8, 10, "A"), operand(3, 10, 18, "B")], attrs)
    assert not generic(case)
    assert not generic(Case(FUSED, [normal(rng, 4, 10), normal(rng, 12, 10)], {"transB": 1}), "opencl.gemv")


FLOATS = [np.float64, np.float16, ml_dtypes.bfloat16]
INTEGERS = [np.int32, np.uint32, np.int64, np.uint64]


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats(rng: np.random.Generator, dtype: Any) -> None:
    for constant in (frozenset[int](), B):
        case = Case("MatMul", [normal(rng, 7, 30, dtype=dtype), normal(rng, 30, 21, dtype=dtype)], constant=constant)
        assert not generic(case)
    inputs = [normal(rng, 2, 50, dtype=dtype), normal(rng, 9, 50, dtype=dtype), normal(rng, 9, dtype=dtype)]
    assert not generic(Case("Gemm", inputs, {"transB": 1}), "opencl.gemv")


@every_other(("dtype", INTEGERS), ("form", ["product", "addend", "column"]))
def test_integers(rng: np.random.Generator, dtype: Any, form: str) -> None:
    """Sums wrap."""
    info = np.iinfo(dtype)
    a, b, c = (rng.integers(info.min, info.max, s, dtype) for s in ((7, 30), (30, 21), (21,)))
    with np.errstate(over="ignore"):
        if form == "product":
            assert not generic(Case("MatMul", [a, b]))
        elif form == "addend":
            assert not generic(Case("Gemm", [a // 4, b // 4, c // 4]))
        else:
            assert not generic(Case("MatMul", [a, b[:, 0].copy()]), "opencl.gemv")


def test_infinities(rng: np.random.Generator) -> None:
    a, b = normal(rng, 6, 20), normal(rng, 20, 40)
    a[1, 3], a[2, 4], b[5, 6] = np.inf, np.nan, -np.inf
    with np.errstate(invalid="ignore"):
        for constant in (frozenset[int](), B):
            assert not generic(Case("MatMul", [a, b], constant=constant))


@pytest.mark.parametrize("m", [1, 3, 20])
def test_epilogue(rng: np.random.Generator, m: int) -> None:
    """A bias per column, a residual and an activation in one go."""
    epilogue = (Fused("Add", (~0, 2)), Fused("Add", (~1, 3)), Fused("Relu", (~2,)))
    inputs = [normal(rng, m, 24), normal(rng, 24, 37), normal(rng, 37), normal(rng, m, 37)]
    for family in ("opencl.matmul", "opencl.gemv") if m < 5 else ("opencl.matmul",):
        constant = B if family == "opencl.matmul" else frozenset[int]()
        weights = {"transB": 1} if family == "opencl.gemv" else {}
        given = [inputs[0], inputs[1].T.copy(), *inputs[2:]] if weights else inputs
        case = Case("Gemm", given, weights, constant=constant, epilogue=epilogue, operands=2)
        assert not generic(case, family)
        assert m == 1 or not check(case, family, configs=0)


def test_epilogue_of_column(rng: np.random.Generator) -> None:
    """A product with one column is turned round; what is added still finds its place."""
    inputs = [normal(rng, 40, 24), normal(rng, 24, 1), normal(rng, 40, 1), normal(rng, 40, 1)]
    assert not generic(Case("Gemm", inputs, epilogue=(Fused("Mul", (~0, 3)),), operands=1), "opencl.gemv")


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 32, 1), (1, 100, 7), (1, 257, 400), (2, 5000, 105), (1, 300, 4001), (1, 9000, 3)]
)
def test_rows_are_streamed(rng: np.random.Generator, m: int, n: int, k: int) -> None:
    """A matrix that lies by rows and is not constant: in strips, in parts of the sum, and whole."""
    assert not generic(Case("MatMul", [normal(rng, m, k), normal(rng, k, n)]), "opencl.gemv_rows")


def test_rows_are_streamed_with_more(rng: np.random.Generator) -> None:
    """In batches, transposed on the left, with an addend and an epilogue, in other configs and types."""
    assert not generic(Case("MatMul", [normal(rng, 5, 1, 30), normal(rng, 5, 30, 70)]), "opencl.gemv_rows")
    assert not generic(Case("MatMul", [normal(rng, 6, 1, 1, 9), normal(rng, 3, 9, 40)]), "opencl.gemv_rows")
    for m, k in ((1, 50), (2, 9000)):
        inputs = [normal(rng, k, m), normal(rng, k, 90), normal(rng, 90), normal(rng, m, 90)]
        epilogue = (Fused("Mul", (~0, 3)), Fused("Relu", (~1,)))
        case = Case("Gemm", inputs, {"transA": 1, "alpha": 0.5}, epilogue=epilogue, operands=1)
        assert not (check(case, "opencl.gemv_rows", configs=1) if k == 50 else generic(case, "opencl.gemv_rows"))
    for dtype in (np.float64, np.float16):
        inputs = [normal(rng, 1, 50, dtype=dtype), normal(rng, 50, 64, dtype=dtype)]
        assert not generic(Case("MatMul", inputs), "opencl.gemv_rows")
    with np.errstate(over="ignore"):
        a, b = (rng.integers(-(2**31), 2**31 - 1, s, np.int32) for s in ((1, 30), (30, 40)))
        assert not generic(Case("MatMul", [a, b]), "opencl.gemv_rows")


@pytest.mark.parametrize(("m", "n", "k"), [(1, 3, 70001), (2, 1, 40000), (1, 1, 200000)])
def test_long_sums(rng: np.random.Generator, m: int, n: int, k: int) -> None:
    """Few results: the sum itself is split among work-items. (Sums of mixed signs would cancel to a small result, in
    which the reference's own last digits show.)"""
    for constant in (frozenset[int](), B):
        inputs = [np.abs(normal(rng, m, k)), np.abs(normal(rng, n, k)), normal(rng, n)]
        case = Case("Gemm", inputs, {"transB": 1}, constant=constant, epilogue=(Fused("Relu", (~0,)),))
        assert solver_of(case) == "opencl.gemv"
        assert not generic(case, "opencl.gemv")


def test_choice(rng: np.random.Generator) -> None:
    """Constant weights and many rows go through panels, few rows straight past a matrix, whichever way it lies."""
    a, b = normal(rng, 1, 64), normal(rng, 64, 48)
    assert solver_of(Case("MatMul", [a, b], constant=B)) == "opencl.matmul"
    assert solver_of(Case("MatMul", [normal(rng, 3, 64), b])) == "opencl.matmul"
    assert solver_of(Case("MatMul", [a, b])) == "opencl.gemv_rows"
    assert solver_of(Case("Gemm", [a, b.T.copy()], {"transB": 1})) == "opencl.gemv"
    assert solver_of(Case("MatMul", [normal(rng, 48, 64), normal(rng, 64)])) == "opencl.gemv"


def test_a_row_that_reads_much_is_divided_among_units(rng: np.random.Generator) -> None:
    """One row has little to compute, and waits for its weights: units read them together."""
    device = open_device("CPU")
    solver = next(s for s in solvers() if s.id == "opencl.matmul")
    for depth, columns, items in ((32, 64, 1), (256, 1024, 2), (1024, 256, 2)):
        problem = Case("MatMul", [normal(rng, 1, depth), normal(rng, depth, columns)], constant=B).problem()
        target = replace(device.target, units=2)
        (call,) = solver.calls(problem, solver.default(problem, target), target)
        assert min(math.prod(call.grid), 2) == items


def test_refusals() -> None:
    device = open_device("CPU")
    problem = Case("Gemm", [np.ones((2, 2), np.int32), np.ones((2, 2), np.int32)], {"alpha": 0.5}).problem()
    reasons = [s.why_not(problem, device.target) for s in solvers() if s.id in ("opencl.matmul", "opencl.matmul.shape")]
    assert reasons and all(r is not None and "fraction" in r for r in reasons)
