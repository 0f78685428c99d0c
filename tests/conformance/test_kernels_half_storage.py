"""Halves in memory, single precision in between: weights of products, and what blocked convolutions read and store."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest

from golden import graphs
from tunewright import Core
from tunewright.ir.graph import Fused
from tunewright.ir.types import DType, blocked
from tunewright.plugins.single import open_device
from tunewright.solvers.base import solvers
from tunewright.solvers.c.product.matmul import FEW_ROWS
from tunewright.testing.kernelcheck import Case, check

BLOCK = blocked(open_device("CPU").target.vector_bytes // 4)
HALVES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
HALF = pytest.mark.parametrize("half", HALVES)
FUSED = "com.microsoft::FusedMatMul"
#: what a half cannot hold, its subnormal numbers, and ties between two of them
ODD = np.float32([65519.9, 65520, 1e6, -3e38, 6e-8, 2.98e-8, 2.99e-8, 1e-10, 2049, 2051, 257, 259, 1 + 2**-9, 0])


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def cast(half: str) -> Fused:
    return Fused("Cast", (~0,), {"to": DType(half).onnx_code})


# -- products ---------------------------------------------------------------------------------------------------------
def product(case: Case) -> list[str]:
    return check(case, "opencl.matmul", configs=1)


@HALF
@pytest.mark.parametrize("rows", [1, 3, FEW_ROWS, FEW_ROWS + 1, 40])
def test_half_weights(rng: np.random.Generator, rows: int, half: str) -> None:
    """In halves for few rows, unpacked for more; sums of one block and of several, columns that fill no vector."""
    for k, n in ((33, 70), (700, 129)):
        assert not product(
            Case("MatMul", [normal(rng, rows, k), normal(rng, k, n, dtype=HALVES[half])], constant=frozenset({1}))
        )


@HALF
def test_every_half_as_a_weight(half: str) -> None:
    """Subnormal numbers, infinities and NaNs: each weight alone in its column."""
    every = np.arange(1 << 16, dtype=np.uint16).view(HALVES[half])[None]
    with np.errstate(all="ignore"):
        case = Case("MatMul", [np.ones((1, 1), np.float32), every], constant=frozenset({1}))
        assert not product(case)


@HALF
def test_half_weights_in_every_form(rng: np.random.Generator, half: str) -> None:
    w, b = normal(rng, 70, 130, dtype=HALVES[half]), normal(rng, 70)
    gemm = {"transB": 1, "alpha": 0.5, "beta": 2.0}
    assert not product(Case("Gemm", [normal(rng, 3, 130), w, b], gemm, constant=frozenset({1, 2})))
    assert not product(Case(FUSED, [normal(rng, 2, 2, 130), w], {"transB": 1, "alpha": 3.0}, constant=frozenset({1})))
    steps = (Fused("Add", (~0, 2)), Fused("Relu", (~1,)))
    assert not product(
        Case("MatMul", [normal(rng, 5, 130), w.T.copy(), b], constant=frozenset({1, 2}), epilogue=steps, operands=1)
    )


@HALF
def test_a_product_stores_halves(rng: np.random.Generator, half: str) -> None:
    case = Case("MatMul", [normal(rng, 4, 64), normal(rng, 64, 50, dtype=HALVES[half])], constant=frozenset({1}),
                epilogue=(cast(half),))  # fmt: skip
    assert not product(case)


def test_who_takes_half_weights(rng: np.random.Generator) -> None:
    """They must be constant, and beside single precision."""
    target, w = open_device("CPU").target, normal(rng, 16, 16, dtype=np.float16)
    cases = {
        "constant": Case("MatMul", [normal(rng, 1, 16), w], constant=frozenset({1})),
        "computed": Case("MatMul", [normal(rng, 1, 16), w]),
    }
    (solver,) = [s for s in solvers() if s.id == "opencl.matmul"]
    said = {name: solver.why_not(case.problem(), target) for name, case in cases.items()}
    assert said == {"constant": None, "computed": "does not multiply float32 with float16"}


# -- convolutions -----------------------------------------------------------------------------------------------------
def conv(
    rng: np.random.Generator, x: tuple[int, ...], w: tuple[int, ...], half: str, op: str = "Conv", **attrs: Any
) -> Case:
    """With a half residual and a half result."""
    channels = w[1] if op == "ConvTranspose" else w[0]
    inputs = [normal(rng, *x), normal(rng, *w), normal(rng, channels)]
    plain = Case(op, inputs, attrs, constant=frozenset({1, 2}))
    shape = plain.problem().outputs[0].dims
    ends = Fused("Cast", (~3,), cast(half).attrs)
    steps = (Fused("Cast", (3,), {"to": 1}), Fused("Add", (~0, ~1)), Fused("Relu", (~2,)), ends)
    residual = normal(rng, *shape, dtype=HALVES[half])
    return Case(
        op, [*inputs, residual], attrs, constant=frozenset({1, 2}), epilogue=steps, operands=1, layouts=(BLOCK, BLOCK)
    )


WIDTH = BLOCK.block
CONVOLUTIONS = {
    "opencl.conv_blocked": ((1, WIDTH, 5, 7), (WIDTH + 3, WIDTH, 3, 3), {"pads": (1, 1, 1, 1)}),
    "opencl.conv_depthwise": ((1, WIDTH + 2, 9, 8), (WIDTH + 2, 1, 3, 3), {"group": WIDTH + 2, "pads": (1, 1, 1, 1)}),
    "opencl.conv_grouped": ((1, 2 * WIDTH, 6, 7), (2 * WIDTH, 4, 3, 3), {"group": WIDTH // 2, "pads": (1, 1, 1, 1)}),
    "opencl.conv_winograd": ((1, 2 * WIDTH, 12, 13), (2 * WIDTH, 2 * WIDTH, 3, 3), {"pads": (1, 1, 1, 1)}),
    "opencl.conv_transpose_blocked": ((1, WIDTH, 5, 6), (WIDTH, WIDTH + 1, 2, 2), {"strides": (2, 2)}),
}


@HALF
@pytest.mark.parametrize("family", CONVOLUTIONS)
def test_convolutions_read_and_store_halves(rng: np.random.Generator, family: str, half: str) -> None:
    x, w, attrs = CONVOLUTIONS[family]
    op = "ConvTranspose" if "transpose" in family else "Conv"
    assert not check(conv(rng, x, w, half, op, **attrs), family, configs=1)


@HALF
def test_a_convolution_rounds_once_to_the_nearest_half(half: str) -> None:
    """One tap of weight one: the result is what came in, as a half, bit by bit."""
    proto = graphs.model(f"""g (float[1,{WIDTH},1,{ODD.size}] x) => ({half}[1,{WIDTH},1,{ODD.size}] y)
    <float[{WIDTH},{WIDTH},1,1] w> {{ a = Conv(x, w) y = Cast<to={DType(half).onnx_code}>(a) }}""")
    weight = np.eye(WIDTH, dtype=np.float32)[:, :, None, None]
    proto.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weight, "w"))
    x = np.broadcast_to(ODD, (1, WIDTH, 1, ODD.size)).copy()
    model = Core().compile_model(proto, "CPU")
    y = next(iter(model([x]).values()))
    with np.errstate(over="ignore"):
        assert np.array_equal(y.view(np.uint16), x.astype(HALVES[half]).view(np.uint16))
