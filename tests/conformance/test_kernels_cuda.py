"""Triton's kernels in its interpreter, and calls of torch, on the processor: against the reference."""

from __future__ import annotations

import math

import numpy as np
import pytest

from conformance.cuda_cases import Made, solver
from tunewright.ir.graph import Fused
from tunewright.ir.types import NHWC, PLAIN
from tunewright.measure.judge import Guarded
from tunewright.testing.kernelcheck import Case, check

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

# The interpreter computes masked lanes too, with numpy, which warns of what becomes of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
MADE = Made()
normal, conv, matmul = MADE.normal, MADE.conv, MADE.matmul
F16 = np.float16


RELU = (Fused("Relu", (~0,)),)
PRODUCTS = {
    "1x1": conv((1, 32, 5, 7), 48),
    "1x1, odd": conv((2, 19, 3, 5), 21, bias=False),
    "1x1, strided": conv((1, 24, 7, 7), 40, strides=(2, 2)),
    "3x3": conv((1, 20, 6, 5), 24, 3, 3, pads=(1, 1, 1, 1), epilogue=RELU),
    "3x3, strided": conv((2, 16, 9, 8), 17, 3, 3, pads=(1, 1, 1, 1), strides=(2, 2)),
    "dilated": conv((1, 16, 9, 9), 16, 3, 3, pads=(2, 2, 2, 2), dilations=(2, 2)),
    "uneven padding": conv((1, 8, 6, 6), 16, 3, 3, pads=(0, 1, 2, 1)),
    "stem": conv((1, 3, 15, 15), 16, 7, 7, pads=(3, 3, 3, 3), strides=(2, 2), epilogue=RELU),
    "residual": conv(
        (1, 16, 4, 5), 24, epilogue=(Fused("Add", (~0, 3)), Fused("Relu", (~1,))),
        operands=(normal(1, 24, 4, 5, dtype=F16),),
    ),
    "per channel": conv(
        (2, 16, 3, 3), 20, epilogue=(Fused("Mul", (~0, 3)), Fused("HardSwish", (~1,))),
        operands=(normal(20, 1, 1, dtype=F16),),
    ),
    "long sum": conv((1, 256, 2, 3), 16, 3, 3, pads=(1, 1, 1, 1)),
    "product": matmul((1, 13, 48), (48, 40)),
    "product, Gelu": matmul(
        (2, 9, 64), (64, 33), epilogue=(Fused("Add", (~0, 2)), Fused("Gelu", (~1,))), operands=(normal(33, dtype=F16),)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name, device):
    assert check(PRODUCTS[name], only="triton.", configs=2, device=device) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_in_many_configs(name, device):
    assert check(PRODUCTS[name], only="triton.", configs=40, device=device) == []


VENDOR = {
    **{name: PRODUCTS[name] for name in ("1x1", "3x3", "uneven padding", "residual", "product, Gelu")},
    "1D": conv((2, 8, 9), 12, 3, layout=PLAIN, dtype=np.float32),
    "3D": conv((1, 4, 3, 4, 5), 6, 3, 3, 3, layout=PLAIN, dtype=np.float32, pads=(1, 1, 1, 1, 1, 1)),
    "depthwise": conv((1, 16, 6, 6), 16, 3, 3, group=16, pads=(1, 1, 1, 1)),
    "product, bias": matmul((2, 5, 24), (24, 20), epilogue=(Fused("Add", (2, ~0)),), operands=(normal(20, dtype=F16),)),
    "product, bias and more": matmul(
        (5, 24), (24, 20), epilogue=(Fused("Add", (~0, 2)), Fused("Relu", (~1,)), Fused("Add", (~2, 3))),
        operands=(normal(20, dtype=F16), normal(5, 20, dtype=F16)),
    ),
    "batched product": matmul((2, 3, 5, 8), (2, 3, 8, 7), dtype=np.float32),
    "Gemm": Case("Gemm", [normal(3, 8), normal(5, 8), normal(5)], {"transB": 1, "alpha": 0.5, "beta": 2.0}),
    "Gemm without a third": Case("Gemm", [normal(8, 3), normal(8, 5)], {"transA": 1, "alpha": 0.5}),
    "MaxPool": Case("MaxPool", [normal(1, 6, 7, 8)], {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)},
                    layouts=(NHWC, NHWC)),
    "MaxPool, ceiling": Case("MaxPool", [normal(1, 6, 8, 8)],
                             {"kernel_shape": (3, 3), "strides": (2, 2), "ceil_mode": 1}),
    "GlobalAveragePool": Case("GlobalAveragePool", [normal(2, 6, 5, 3)], layouts=(NHWC, NHWC)),
    "Softmax": Case("Softmax", [normal(3, 4, 9)], {"axis": 1}),
    "LayerNormalization": Case("LayerNormalization", [normal(2, 5, 16), normal(16), normal(16)], {"axis": -1}),
    "ReduceMean": Case("ReduceMean", [normal(2, 5, 6), np.array([1])], {"keepdims": 0}),
    "ReduceMax": Case("ReduceMax", [normal(2, 5, 6), np.array([0, -1])]),
    "Transpose": Case("Transpose", [normal(2, 3, 4)], {"perm": (2, 0, 1)}),
    "Concat": Case("Concat", [normal(2, 3, 4), normal(2, 1, 4)], {"axis": 1}),
    "Split": Case("Split", [normal(2, 7, 3), np.array([3, 4])], {"axis": 1}, outputs=2),
    "Gather": Case("Gather", [normal(9, 4), np.array([[0, -1], [8, 3]])]),
    "Slice": Case("Slice", [normal(5, 8), np.array([1, -6]), np.array([9, -1]), np.array([0, 1]), np.array([2, 3])],
                  constant=frozenset({1, 2, 3, 4})),
    "Expand": Case("Expand", [normal(3, 1), np.array([2, 3, 4])]),
    "Attention": Case("Attention", [normal(2, 5, 24), normal(2, 7, 24), normal(2, 7, 24)],
                      {"q_num_heads": 3, "kv_num_heads": 3}),
    "Attention, mask": Case("Attention", [normal(1, 2, 5, 8), normal(1, 2, 7, 8), normal(1, 2, 7, 8), normal(5, 7)]),
    "to channels last": Case("tunewright::Reorder", [normal(2, 5, 3, 4)], {"layout": "nhwc"}, layouts=(PLAIN, NHWC)),
    "to plain": Case("tunewright::Reorder", [normal(2, 5, 3, 4)], {"layout": "plain"}, layouts=(NHWC, PLAIN)),
}  # fmt: skip


@pytest.mark.parametrize("name", VENDOR)
def test_calls_of_torch(name, device):
    assert check(VENDOR[name], only="vendor.", configs=1, device=device) == []


POWERS = np.array([-np.inf, -3, -2.5, -1, -0.5, 0, 0.5, 1, 2, 3, np.inf, np.nan], np.float32)


def unary(op, dtype=np.float32, **attrs):
    return Case(op, [normal(3, 37, dtype=dtype)], attrs)


ELEMENTWISE = {
    **{
        op: unary(op)
        for op in ("Abs", "Neg", "Exp", "Sin", "Cos", "Floor", "Ceil", "Erf", "Tanh", "Sigmoid", "Relu", "LeakyRelu",
                   "Elu", "HardSigmoid", "HardSwish", "Softplus", "Softsign", "Swish", "Gelu", "Reciprocal", "IsNaN",
                   "Sign", "Celu", "Selu", "Mish", "ThresholdedRelu", "Shrink", "com.microsoft::QuickGelu", "Tan")
    },
    "Round": Case("Round", [np.array([-2.5, -1.5, -0.5, 0.49999997, 0.5, 1.5, 2.5, 1e9, 8388609], np.float32)]),
    "IsInf": Case("IsInf", [np.array([1, np.inf, -np.inf, np.nan], np.float32)]),
    "IsInf of one sign": Case("IsInf", [np.array([1, np.inf, -np.inf, np.nan], np.float32)], {"detect_negative": 0}),
    "square": Case("Pow", [normal(5, 9), np.float32(2).reshape(())]),
    "power": Case("Pow", [np.abs(normal(5, 9)) + 0.1, normal(9)]),
    "powers": Case("Pow", [POWERS[:, None], POWERS[None]]),
    "whole power": Case("Pow", [normal(5, 9, dtype=F16), np.array(3)]),
    "half": unary("Tanh", F16),
    "Gelu by tanh": unary("Gelu", approximate="tanh"),
    "Sqrt": Case("Sqrt", [np.abs(normal(5, 9))]),
    "Log": Case("Log", [np.abs(normal(5, 9)) + 0.1]),
    "rows": Case("Add", [normal(4, 5, 6), normal(6)]),
    "columns": Case("Mul", [normal(4, 5, 6), normal(5, 1)]),
    "both": Case("Sub", [normal(4, 1, 6), normal(5, 1)]),
    "one": Case("Div", [normal(4, 5), np.float32(3).reshape(())]),
    "channels last": Case("Add", [normal(2, 5, 3, 4), normal(2, 5, 3, 4)], layouts=(NHWC, NHWC), along=frozenset({1})),
    "per channel, last": Case("Mul", [normal(2, 5, 3, 4), normal(5, 1, 1)], layouts=(NHWC, NHWC)),
    "Where": Case("Where", [normal(3, 4) > 0, normal(3, 4), normal(4)]),
    "Equal": Case("Equal", [np.arange(12).reshape(3, 4), np.arange(4)]),
    "Not": Case("Not", [normal(3, 4) > 0]),
    "Clip": Case("Clip", [normal(3, 40), np.float32(-0.5), np.float32(0.5)]),
    "Mean": Case("Mean", [normal(3, 4), normal(4), normal(3, 1)]),
    "Max": Case("Max", [normal(3, 4), normal(4), normal(3, 1)]),
    "Cast": Case("Cast", [normal(3, 50)], {"to": 10}),
    "integers": Case("Add", [np.arange(12, dtype=np.int64), np.arange(12, dtype=np.int64)]),
    "chain": Case(
        "Add", [normal(2, 6, 5), normal(6, 1), normal(5)], epilogue=(Fused("Relu", (~0,)), Fused("Mul", (~1, 2))),
        operands=1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name, device):
    assert check(ELEMENTWISE[name], only="triton.elementwise", configs=1, device=device) == []


def test_gelu_of_half_floats(device):
    """A polynomial there: no further off than the rounding of its results, also far from zero."""
    x = np.concatenate([np.linspace(-12, 12, 801), [-65504, -1000, 0, 1000, 65504]]).astype(np.float16)
    problem, queue = Case("Gelu", [x]).problem(), device.queue()
    s = solver("triton.elementwise")
    kernel = s.compile(problem, s.default(problem, device.target), device)
    given, made = (Guarded.holding(device, queue, array) for array in (x, np.zeros_like(x)))
    kernel.run(queue, [given.view], [made.view])
    (buffer,) = queue.fetch([made.buffer])
    got, wide = made.tensor(buffer).astype(np.float64), x.astype(np.float64)
    want = np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in wide])
    assert np.all(np.abs(got - want) <= 2e-5 + np.abs(want) * 2.0**-11)
    assert np.all(got[wide == 0] == 0)


@pytest.mark.parametrize("precision", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("network", ["convolutions", "transformer"])
def test_networks(network, precision, device, tmp_path):
    """Whole networks: passes, layouts and plans for a device with memory of its own."""
    import onnx

    from tunewright import Core
    from tunewright.plugins.single import SingleDevice
    from tunewright.settings import Settings
    from tunewright.testing import models

    made = (
        models.transformer(layers=1, hidden=32, heads=4, length=9)
        if network == "transformer"
        else models.resnet(width=8, size=32)
    )
    onnx.save(made, tmp_path / "model.onnx")
    model = Core().read_model(tmp_path / "model.onnx")
    settings = Settings.make({"INFERENCE_PRECISION_HINT": precision, "USER_DB_PATH": str(tmp_path)})
    compiled = SingleDevice(device).compile(model, settings)
    feed = {name: normal(*type.dims) for name, type in compiled.inputs.items()}
    want = Core().compile_model(model, "CPU.HOST")(feed)
    got = compiled(feed)
    limit = {"F32": 1e-4, "F16": 1e-2, "BF16": 5e-2}[precision]
    for name, array in want.items():
        assert got[name].dtype == array.dtype
        assert np.abs(got[name] - array).max() <= limit * np.abs(array).max()
    assert not any(step.on_host for plan in compiled.program.plans for step in plan.steps)
