"""Triton's products and convolutions in forms of their own: few channels, few rows, Gemm, products of activations."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from conformance.cuda_cases import Made, solver
from conformance.interpreter import RAW
from tunewright.ir.graph import Fused
from tunewright.ir.types import DType
from tunewright.testing.kernelcheck import Case, check, run_one

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from tunewright.devices.cuda.device import CudaDevice
from tunewright.solvers.host.reference import HostKernel
from tunewright.solvers.triton.product.product_cost import Gpu, best, possible
from tunewright.solvers.triton.product.product_shape import ProductShape

# The interpreter computes masked lanes too, with numpy, which warns of what becomes of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
MADE = Made(np.float16)
normal, conv, matmul = MADE.normal, MADE.conv, MADE.matmul
F16, BF16, F32 = np.float16, ml_dtypes.bfloat16, np.float32


RELU = (Fused("Relu", (~0,)),)
FOLDED = {
    "7x7": conv((1, 3, 18, 16), 24, 7, 7, pads=(3, 3, 3, 3), strides=(2, 2), epilogue=RELU),
    "7x7, odd width": conv((2, 3, 11, 13), 17, 7, 7, pads=(3, 3, 3, 3), strides=(2, 2), bias=False),
    "6x6": conv((1, 3, 16, 20), 16, 6, 6, pads=(2, 2, 2, 2), strides=(2, 2)),
    "3x3": conv((2, 3, 9, 10), 32, 3, 3, pads=(1, 1, 1, 1), strides=(2, 2)),
    "uneven padding": conv((1, 3, 8, 8), 16, 3, 3, pads=(0, 0, 1, 1), strides=(2, 2)),
    "no padding": conv((1, 3, 9, 12), 16, 5, 3, strides=(1, 2)),
    "not strided": conv((1, 3, 7, 8), 20, 3, 3, pads=(1, 1, 1, 1)),
    "one channel": conv((2, 1, 12, 12), 16, 5, 5, pads=(2, 2, 2, 2)),
    "one channel, 3x3": conv((1, 1, 9, 8), 16, 3, 3, pads=(1, 1, 1, 1)),
    "four channels": conv((1, 4, 9, 8), 16, 3, 3, pads=(1, 1, 1, 1), strides=(2, 2)),
    "six channels": conv((1, 6, 9, 8), 18, 3, 3, pads=(1, 1, 1, 1), strides=(2, 2)),
    "a long row": conv((1, 12, 5, 9), 16, 3, 5, pads=(1, 2, 1, 2)),
    "a row of taps": conv((1, 3, 4, 16), 16, 1, 7, pads=(0, 3, 0, 3)),
    "dilated along the height": conv((1, 3, 11, 8), 16, 3, 3, pads=(2, 1, 2, 1), dilations=(2, 1)),
    "dilated along the width": conv((1, 3, 8, 11), 16, 3, 3, pads=(1, 2, 1, 2), dilations=(1, 2)),
    "residual": conv(
        (1, 3, 6, 6), 16, 3, 3, pads=(1, 1, 1, 1), epilogue=(Fused("Add", (~0, 3)), Fused("Relu", (~1,))),
        operands=(normal(1, 16, 6, 6),),
    ),
    "single precision": conv((1, 3, 9, 8), 16, 3, 3, pads=(1, 1, 1, 1), strides=(2, 2), dtype=F32),
    "bfloat16": conv((1, 3, 9, 8), 16, 3, 3, pads=(1, 1, 1, 1), strides=(2, 2), dtype=BF16),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDED)
def test_few_channels(name, device):
    assert check(FOLDED[name], "triton.conv", configs=1, device=device) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", FOLDED)
def test_few_channels_in_many_configs(name, device):
    assert check(FOLDED[name], "triton.conv", configs=40, device=device) == []


@pytest.mark.parametrize("fold", ["flat", "row"])
@pytest.mark.parametrize("align", [1, 2])
@pytest.mark.parametrize("split", [1, 2])
def test_what_lies_beside_a_window_has_no_part_in_it(fold, align, split, device):
    """Rows of a window are loaded with what is beside them: infinities there must not become part of the sum."""
    case = FOLDED["7x7"]
    picture = np.array(case.inputs[0])
    picture[0, 2, 9, 7] = np.inf  # the last channel of a pixel
    picture[0, 0, 4, 12] = -np.inf  # the first one
    case = replace(case, inputs=[picture, *case.inputs[1:]], epilogue=())
    problem, s = case.problem(), solver("triton.conv")
    config = dict(s.default(problem, device.target)) | {"fold": fold, "align": align, "split": split, "bk": 32}
    (want,) = HostKernel(problem).run(device.queue(), physical(case, problem), [None])
    assert 0 < np.isfinite(want).sum() < want.size
    assert run_one(case, problem, s, config, device, [want]) == ""


def physical(case, problem):
    from tunewright.measure.judge import physical

    return physical(problem, case.inputs)


def test_few_channels_are_folded_by_default(device):
    for name in ("7x7", "6x6", "3x3"):
        problem = FOLDED[name].problem()
        config = solver("triton.conv").default(problem, device.target)
        assert (config["fold"], config["align"]) == ("flat", 2)
    assert "fold" not in solver("triton.conv").default(FOLDED["dilated along the width"].problem(), device.target)


def gemm(rows, depth, columns, *third, dtype=F16, epilogue=(), operands=(), weights=True, **attrs):
    a = normal(*((depth, rows) if attrs.get("transA") else (rows, depth)), dtype=dtype)
    b = (normal(*((columns, depth) if attrs.get("transB") else (depth, columns))) / np.sqrt(depth)).astype(dtype)
    c = [normal(*third[0], dtype=dtype)] if third else [None] if operands else []
    return Case(
        "Gemm", [a, b, *c, *operands], attrs, constant=frozenset({1}) if weights else frozenset(), epilogue=epilogue,
        operands=len(operands),
    )  # fmt: skip


GEMM = {
    "as it is": gemm(19, 40, 33),
    "turned": gemm(20, 64, 48, (48,), transB=1),
    "factors": gemm(17, 33, 21, (21,), transB=1, alpha=0.5, beta=2.0),
    "a factor alone": gemm(9, 32, 16, alpha=-1.5),
    "one number": gemm(9, 32, 16, (), transB=1),
    "a row": gemm(9, 32, 20, (1, 20)),
    "a column": gemm(9, 32, 20, (9, 1), beta=0.5),
    "a matrix": gemm(9, 32, 20, (9, 20)),
    "activation": gemm(18, 32, 20, (20,), epilogue=RELU),
    "operand": gemm(
        7, 32, 24, (24,), epilogue=(Fused("Mul", (~0, 3)), Fused("Relu", (~1,))), operands=(normal(24),), transB=1
    ),
    "no weights": gemm(18, 32, 20, weights=False),
    "a vector that is turned": gemm(1, 40, 24, transA=1),
    "single precision": gemm(18, 40, 20, (20,), dtype=F32, transB=1),
    "bfloat16": gemm(18, 40, 20, (20,), dtype=BF16, transB=1),
}  # fmt: skip


@pytest.mark.parametrize("name", GEMM)
def test_gemm(name, device):
    assert check(GEMM[name], "triton.gem", configs=1, device=device) == []


ACTIVATIONS = {
    "two matrices": matmul((17, 24), (24, 19), weights=False),
    "each its own": matmul((3, 17, 24), (3, 24, 19), weights=False),
    "heads": matmul((2, 3, 9, 16), (2, 3, 16, 33), epilogue=RELU, weights=False),
    "the right one spread": matmul((3, 4, 9, 16), (4, 16, 20), weights=False),
    "the left one spread": matmul((9, 16), (5, 16, 20), weights=False),
    "both spread": matmul((3, 1, 9, 16), (1, 4, 16, 20), weights=False),
    "one for all": matmul((3, 2, 9, 16), (1, 16, 20), weights=False),
    "weights of each": matmul((3, 9, 16), (3, 16, 20)),
    "operand": matmul(
        (2, 9, 16), (2, 16, 20), weights=False, epilogue=(Fused("Add", (~0, 2)),), operands=(normal(2, 1, 20),)
    ),
    "single precision, each its own": matmul((2, 9, 16), (2, 16, 20), dtype=F32, weights=False),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_products_of_activations(name, device):
    assert check(ACTIVATIONS[name], "triton.matmul", configs=int("spread" in name), device=device) == []


FEW = {
    "a row": matmul((1, 100), (100, 70)),
    "three rows": matmul((1, 3, 96), (96, 33), epilogue=RELU),
    "deep": matmul((1, 1100), (1100, 5)),
    "narrow": matmul((2, 40), (40, 1)),
    "shallow": matmul((1, 3), (3, 40)),
    "operands": matmul(
        (2, 64), (64, 40), epilogue=(Fused("Add", (~0, 2)), Fused("Mul", (~1, 3)), Fused("Gelu", (~2,))),
        operands=(normal(40), normal(2, 40)),
    ),
    "Gemm": gemm(1, 100, 30, (30,), transB=1, alpha=0.5, beta=2.0),
    "Gemm, a column": gemm(3, 64, 30, (3, 1)),
    "Gemm, one number": gemm(2, 64, 30, ()),
    "pixel": conv((1, 40, 1, 1), 24, 1, 1, epilogue=(Fused("Sigmoid", (~0,)),)),
    "pixels": conv((2, 40, 1, 2), 24, 1, 1, bias=False),
    "per channel": conv((2, 16, 1, 1), 20, 1, 1, epilogue=(Fused("Mul", (~0, 3)),), operands=(normal(20, 1, 1),)),
    "single precision": matmul((2, 100), (100, 30), dtype=F32),
    "bfloat16": matmul((2, 100), (100, 30), dtype=BF16),
}  # fmt: skip


@pytest.mark.parametrize("name", FEW)
def test_few_rows(name, device):
    assert check(FEW[name], "triton.gemv", configs=1, device=device) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", [*GEMM, *ACTIVATIONS, *FEW])
def test_others_in_many_configs(name, device):
    case = {**GEMM, **ACTIVATIONS, **FEW}[name]
    assert check(case, "triton.", configs=30, device=device) == []


LARGE = {
    "product": matmul((40, 40), (40, 48), epilogue=RELU),
    "1x1": conv((1, 24, 7, 7), 40, 1, 1),
    "3x3": conv((1, 16, 7, 6), 24, 3, 3, pads=(1, 1, 1, 1)),
}


@pytest.mark.parametrize("form", ["descriptors", "specialised"])
@pytest.mark.parametrize("name", LARGE)
def test_several_tiles_for_a_program(name, form, device):
    """They are for many tiles on few multiprocessors."""
    case = LARGE[name]
    one = replace(device.target, units=1)
    problem, s = case.problem(), solver("triton.matmul" if case.op == "MatMul" else "triton.conv")
    config = {"bm": 16, "bn": 16, "bk": 16, "split": 1, "warps": 4, "stages": 3, "group": 8, "form": form}
    (want,) = HostKernel(problem).run(device.queue(), physical(case, problem), [None])
    few = CudaDevice("GPU.0", raw=RAW)
    few.target = one
    assert s.shape(problem).tiles(16, 16) > 2 * 2
    assert run_one(case, problem, s, config, few, [want]) == ""


UNEVEN = {
    "product": matmul(
        (70, 40), (40, 384), epilogue=(Fused("Add", (~0, 2)), Fused("Gelu", (~1,)), Fused("Add", (~2, 3))),
        operands=(normal(384), normal(70, 384)),
    ),
    "3x3": conv((1, 16, 7, 6), 192, 3, 3, pads=(1, 1, 1, 1), epilogue=RELU),
    "groups": conv((1, 32, 9, 8), 384, 1, 1, group=2),
}  # fmt: skip


@pytest.mark.parametrize("name", UNEVEN)
def test_tiles_of_192_columns(name, device):
    """They are multiplied as 128 and 64."""
    case = UNEVEN[name]
    problem, s = case.problem(), solver("triton.matmul" if case.op == "MatMul" else "triton.conv")
    config = {"bm": 64, "bn": 192, "bk": 32, "split": 1, "warps": 4, "stages": 3, "group": 8}
    (want,) = HostKernel(problem).run(device.queue(), physical(case, problem), [None])
    assert run_one(case, problem, s, config, device, [want]) == ""


def test_refusals(device):
    def why(case, name):
        return solver(name).why_not(case.problem(), device.target)

    assert why(matmul((5, 8), (8, 8)), "triton.gemv") == "takes up to 4 rows, not 5"
    assert why(matmul((2, 8), (8, 8), weights=False), "triton.gemv") == "its weights are not constant"
    assert "one pixel" in why(conv((1, 8, 2, 2), 8, 2, 2), "triton.gemv")
    assert why(matmul((8,), (8, 8)), "triton.matmul") == "takes matrices"
    assert why(gemm(5, 8, 8, transA=1), "triton.gemm") == "takes rows of the first matrix"
    assert why(gemm(5, 8, 8, transB=1, weights=False), "triton.gemm") == "turns constant weights alone"
    assert "float32" in why(GEMM["single precision"], "triton.gemm")
    assert "float16" in why(GEMM["turned"], "triton.gemm_single")


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (conv((1, 3, 32, 32), 64, 7, 7, pads=(3, 3, 3, 3), strides=(2, 2)), "triton.conv"),
        (conv((1, 64, 28, 28), 64, 3, 3, pads=(1, 1, 1, 1)), "triton.conv"),
        (conv((64, 64, 28, 28), 256, 1, 1), "triton.conv"),
        (matmul((128, 768), (768, 768)), "triton.matmul"),
        (gemm(1, 2048, 1000, (1000,), transB=1), "triton.gemv"),
    ],
)
def test_defaults_on_a_large_device(case, name, device):
    """They are in their space, and leave no multiprocessor without work where there is enough of it."""
    problem, target, s = case.problem(), replace(device.target, units=132), solver(name)
    config = s.default(problem, target)
    assert config in s.space(problem, target)
    likely = s.likely(problem, target)
    assert len(likely) > 3 or name == "triton.gemv"
    assert sum(c in s.space(problem, target) for c in likely) >= min(3, len(likely))
    if name == "triton.gemv":
        assert -(-1000 // config["bn"]) >= 132
    else:
        assert s.shape(problem).tiles(config["bm"], config["bn"]) * config["split"] >= 8


@pytest.mark.parametrize("units", [1, 8, 132])
def test_every_shape_has_a_default(units: int) -> None:
    draw = np.random.default_rng(units)
    gpu = Gpu(units, 227 << 10, True)
    for _ in range(60):
        rows, depth, columns = (int(2 ** draw.uniform(0, top)) for top in (15, 12, 15))
        kernel = int(draw.choice([1, 1, 3, 7]))
        side = int(2 ** draw.uniform(2, 8))
        shapes = [ProductShape(1, 1, rows, depth, 1, rows, columns)]
        shapes += [ProductShape(1, side, side, depth, side, side, columns, (kernel,) * 2, padded=kernel > 1)]
        for shape in shapes:
            for dtype in (DType.FLOAT16, DType.FLOAT32):
                config, seconds = best(shape, gpu, dtype)
                assert possible(shape, dict(config), gpu, dtype) and seconds > 0
