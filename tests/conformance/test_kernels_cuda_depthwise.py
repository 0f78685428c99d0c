"""Triton's depthwise and grouped convolutions, and products of single precision, in its interpreter."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from conformance.cuda_cases import Made, solver
from tunewright.ir.graph import Fused
from tunewright.ir.types import DType
from tunewright.ops.tolerance import compare
from tunewright.testing.kernelcheck import Case, check

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from tunewright.solvers.vendor import base

# The interpreter computes masked lanes too, with numpy, which warns of what becomes of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
MADE = Made()
normal, conv = MADE.normal, MADE.conv
F16, BF16, F32 = np.float16, ml_dtypes.bfloat16, np.float32


SAME = (1, 1, 1, 1)
DEPTHWISE = {
    "3x3": conv((1, 32, 6, 5), 32, 3, 3, group=32, pads=SAME),
    "odd": conv((2, 19, 7, 5), 19, 3, 3, group=19, pads=SAME, bias=False),
    "strided": conv((1, 24, 9, 8), 24, 3, 3, group=24, pads=SAME, strides=(2, 2)),
    "dilated": conv((1, 16, 9, 9), 16, 3, 3, group=16, pads=(2, 2, 2, 2), dilations=(2, 2)),
    "uneven padding": conv((1, 8, 6, 6), 8, 3, 3, group=8, pads=(0, 1, 2, 1), strides=(2, 1)),
    "5x5": conv((1, 20, 5, 5), 20, 5, 5, group=20, pads=(2, 2, 2, 2)),
    "7x7": conv((1, 16, 5, 7), 16, 7, 7, group=16, pads=(3, 3, 3, 3)),  # more taps than are written out
    "no padding": conv((1, 17, 5, 6), 17, 3, 2, group=17),
    "1x1": conv((1, 18, 3, 3), 18, 1, 1, group=18),
    "twice as many filters": conv((1, 12, 5, 5), 24, 3, 3, group=12, pads=SAME),
    "four channels each": conv((1, 32, 5, 5), 24, 3, 3, group=8, pads=SAME),
    "activation": conv(
        (1, 20, 5, 5), 20, 3, 3, group=20, pads=SAME, epilogue=(Fused("Swish", (~0,), {"alpha": 1.0}),)
    ),
    "residual": conv(
        (2, 12, 4, 5), 12, 3, 3, group=12, pads=SAME, epilogue=(Fused("Add", (~0, 3)), Fused("Relu", (~1,))),
        operands=(normal(2, 12, 4, 5, dtype=F16),),
    ),
    "per channel": conv(
        (2, 20, 3, 3), 20, 3, 3, group=20, pads=SAME, epilogue=(Fused("Mul", (~0, 3)), Fused("HardSwish", (~1,))),
        operands=(normal(20, 1, 1, dtype=F16),),
    ),
    "limits": conv(
        (1, 20, 3, 3), 20, 3, 3, group=20, pads=SAME, epilogue=(Fused("Clip", (~0, 3, 4)),),
        operands=(np.float16(0.0).reshape(()), np.float16(0.3).reshape(())),
    ),
    "single precision": conv((1, 18, 5, 5), 18, 3, 3, group=18, pads=SAME, dtype=F32),
    "bfloat16": conv((1, 18, 5, 5), 18, 3, 3, group=18, pads=SAME, dtype=BF16),
}  # fmt: skip


@pytest.mark.parametrize("name", DEPTHWISE)
def test_depthwise(name, device):
    assert check(DEPTHWISE[name], "triton.depthwise", configs=int(name == "odd"), device=device) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", DEPTHWISE)
def test_depthwise_in_many_configs(name, device):
    assert check(DEPTHWISE[name], "triton.depthwise", configs=30, device=device) == []


GROUPED = {
    "groups, limits": conv(
        (1, 32, 3, 3), 32, 1, 1, group=2, epilogue=(Fused("Clip", (~0, 3, 4)),),
        operands=(np.float16(0.0).reshape(()), np.float16(0.3).reshape(())),
    ),
    "groups, 3x3": conv((1, 36, 5, 5), 48, 3, 3, group=2, pads=SAME),
    "groups, 1x1": conv((2, 48, 3, 5), 36, 1, 1, group=2, epilogue=(Fused("Relu", (~0,)),)),
    "groups, strided": conv((1, 64, 7, 7), 64, 3, 3, group=4, pads=SAME, strides=(2, 2), bias=False),
    "groups, residual": conv(
        (1, 40, 4, 5), 40, 3, 3, group=2, pads=SAME,
        epilogue=(Fused("Add", (~0, 3)), Fused("Mul", (~1, 4)), Fused("Relu", (~2,))),
        operands=(normal(1, 40, 4, 5, dtype=F16), normal(40, 1, 1, dtype=F16)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPED)
def test_many_channels_per_group(name, device):
    assert check(GROUPED[name], "triton.conv", configs=1, device=device) == []


def single(op):
    if op == "Conv":
        return conv((1, 20, 5, 5), 24, 3, 3, group=1, pads=SAME, dtype=F32, epilogue=(Fused("Relu", (~0,)),))
    return Case("MatMul", [normal(1, 13, 48), (normal(48, 40) / 7).astype(F32)], constant=frozenset({1}))


@pytest.mark.parametrize(("op", "name"), [("Conv", "triton.conv_single"), ("MatMul", "triton.matmul_single")])
def test_single_precision(op, name, device):
    """As it is by default; rounded factors only where EXECUTION_MODE_HINT leaves them."""
    case = single(op)
    assert check(case, name, configs=1, device=device) == []
    problem, s = case.problem(), solver(name)
    default = dict(s.default(problem, device.target))
    assert 'input_precision="ieee"' in s.source(problem, default, device.target)
    assert s.inexact(problem, default) is None
    rounded = default | {"precision": "tf32"}
    assert rounded in s.space(problem, device.target)
    assert 'input_precision="tf32"' in s.source(problem, rounded, device.target)
    assert "tf32" in str(s.inexact(problem, rounded))
    # and is judged by the digits that it has
    assert s.compile(problem, default, device).like is None
    assert s.compile(problem, rounded, device).like is DType.FLOAT16


@pytest.mark.parametrize("op", ["Conv", "MatMul"])
def test_the_vendors_single_precision(op, device):
    """What cuDNN would round unless it is told not to."""
    import torch

    s, problem, seen = solver(f"vendor.{op.lower()}"), single(op).problem(), []

    def operation(inputs, outputs):
        seen.append((torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision))

    before = torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision
    default = dict(s.default(problem, device.target))
    for precision in ("ieee", "tf32"):
        config = default | {"precision": precision}
        assert config in s.space(problem, device.target)
        base._in_precision(operation, config["precision"])([], None)
    assert seen == [("ieee", "ieee"), ("tf32", "tf32")]
    assert before == (torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision)
    assert default["precision"] == "ieee" and s.inexact(problem, default) is None
    assert "tf32" in s.inexact(problem, default | {"precision": "tf32"})
    assert check(single(op), f"vendor.{op.lower()}", configs=1, device=device) == []


def test_rounded_factors_are_judged_by_their_digits():
    right = normal(50)
    for error, fits in ((5e-4, True), (2e-2, False)):
        off = (right * (1 + error)).astype(F32)
        assert compare(off, right) and (not compare(off, right, like=DType.FLOAT16)) is fits
    ints = np.arange(3)
    assert compare(ints + 1, ints, like=DType.FLOAT16)


def test_narrow_products_have_no_choice_of_precision(device):
    problem = GROUPED["groups, 3x3"].problem()
    assert "precision" not in solver("triton.conv").space(problem, device.target).params


@pytest.mark.parametrize(("channels", "size", "kernel"), [(32, 112, 3), (144, 56, 3), (240, 28, 5), (960, 7, 3)])
def test_default_fills_the_device(channels, size, kernel, device):
    """Layers of MobileNet and EfficientNet at batch 1."""
    case = conv((1, channels, size, size), channels, kernel, kernel, group=channels, pads=(kernel // 2,) * 4)
    problem, target, s = case.problem(), replace(device.target, units=132), solver("triton.depthwise")
    config = s.default(problem, target)
    assert -(-size * size // config["pixels"]) * -(-channels // config["channels"]) >= 2 * 132
    assert config in s.space(problem, target)


def test_refusals(device):
    def why(case, name="triton.depthwise"):
        return solver(name).why_not(case.problem(), device.target)

    assert why(conv((1, 8, 5, 5), 8, 3, 3, group=1)) == "takes several groups"
    assert "not 16" in why(conv((1, 32, 5, 5), 32, 3, 3, group=2))
    assert why(replace(DEPTHWISE["3x3"], constant=frozenset())) == "its weights are not constant"
    assert "is empty" in why(conv((0, 32, 5, 5), 32, 3, 3, group=32))
