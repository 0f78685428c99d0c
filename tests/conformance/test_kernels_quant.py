"""Kernels that convert between floats and small integers against their references."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance.short_form import every_other
from tunewright.ir.types import PLAIN, DType, blocked
from tunewright.testing.kernelcheck import Case, check

INTEGERS = [np.int8, np.uint8, np.int16, np.uint16]
NARROW = [ml_dtypes.int4, ml_dtypes.uint4]
FLOATS = [np.float32, np.float16, ml_dtypes.bfloat16]
MS = "com.microsoft::"


def right(case: Case, family: str) -> None:
    """In the generic solver's default config: it compiles once for all shapes."""
    assert not check(case, family, configs=0, specialised=False)


def floats(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Values on ties, beyond what saturates, and in between."""
    x = rng.standard_normal(shape) * 40
    ties = np.rint(x * 2) / 2
    return np.asarray(np.where(rng.random(shape) < 0.5, ties, x * 8)).astype(dtype)


def integers(rng: np.random.Generator, *shape: int, dtype: Any) -> np.ndarray:
    info = ml_dtypes.iinfo(dtype)
    return rng.integers(int(info.min), int(info.max) + 1, shape).astype(dtype)


def scales(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.asarray(rng.choice([0.25, 0.5, 1.0, 0.37, 3.1], shape)).astype(dtype)


@pytest.mark.parametrize("to", [*INTEGERS, *NARROW])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5, 7), (2, 3, 150, 111), (0, 4)])
def test_quantize_tensor(rng: np.random.Generator, to: Any, shape: tuple[int, ...]) -> None:
    right(Case("QuantizeLinear", [floats(rng, *shape), scales(rng), integers(rng, dtype=to)]), "opencl.quantize")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("to", [np.int8, np.uint16])
def test_quantize_precision(rng: np.random.Generator, dtype: Any, to: Any) -> None:
    case = Case(
        "QuantizeLinear", [floats(rng, 3, 5, 33, dtype=dtype), scales(rng, 5, dtype=dtype), integers(rng, 5, dtype=to)]
    )
    right(case, "opencl.quantize")


@pytest.mark.parametrize("precision", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
def test_quantize_mixed(rng: np.random.Generator, precision: DType) -> None:
    attrs = {"precision": precision.onnx_code, "output_dtype": DType.INT8.onnx_code}
    right(Case("QuantizeLinear", [floats(rng, 64, 65), scales(rng, dtype=np.float16)], attrs), "opencl.quantize")
    x = rng.integers(-3000, 3000, (7, 9)).astype(np.int32)
    right(Case("QuantizeLinear", [x, scales(rng)], attrs), "opencl.quantize")


@every_other(("dtype", [*INTEGERS, *NARROW, np.int32]), ("shape", [(1,), (3, 5, 7), (2, 3, 150, 111)]))
def test_dequantize_tensor(rng: np.random.Generator, dtype: Any, shape: tuple[int, ...]) -> None:
    case = Case("DequantizeLinear", [integers(rng, *shape, dtype=dtype), scales(rng), integers(rng, dtype=dtype)])
    right(case, "opencl.quantize")
    right(Case("DequantizeLinear", [integers(rng, *shape, dtype=dtype), scales(rng)]), "opencl.quantize")


@every_other(("dtype", FLOATS), ("to", FLOATS))
def test_dequantize_floats(rng: np.random.Generator, dtype: Any, to: Any) -> None:
    attrs = {"output_dtype": DType.of_numpy(np.dtype(to)).onnx_code}
    case = Case("DequantizeLinear", [integers(rng, 5, 77, dtype=np.int8), scales(rng, 77, dtype=dtype)], attrs)
    right(case, "opencl.quantize")


@pytest.mark.parametrize("axis", [0, 1, -1, 2])
@pytest.mark.parametrize("shape", [(4, 5, 6, 7), (1, 64, 33, 65), (3, 200, 3, 111)])
def test_axis(rng: np.random.Generator, axis: int, shape: tuple[int, ...]) -> None:
    count, attrs = shape[axis], {"axis": axis}
    case = Case("QuantizeLinear", [floats(rng, *shape), scales(rng, count), integers(rng, count, dtype=np.int8)], attrs)
    right(case, "opencl.quantize")
    x = integers(rng, *shape, dtype=np.uint8)
    right(
        Case("DequantizeLinear", [x, scales(rng, count), integers(rng, count, dtype=np.uint8)], attrs),
        "opencl.quantize",
    )


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("block", [1, 2, 3, 7, 32])
def test_block(rng: np.random.Generator, axis: int, block: int) -> None:
    shape = [6, 64, 35]
    parameters = [-(-d // block) if k == axis % 3 else d for k, d in enumerate(shape)]
    attrs = {"axis": axis, "block_size": block}
    zero = integers(rng, *parameters, dtype=np.uint8)
    case = Case("QuantizeLinear", [floats(rng, *shape), scales(rng, *parameters), zero], attrs)
    right(case, "opencl.quantize")
    case = Case("DequantizeLinear", [integers(rng, *shape, dtype=np.uint8), scales(rng, *parameters), zero], attrs)
    right(case, "opencl.quantize")


@every_other(
    ("shape", [(1, 3, 5, 7), (2, 64, 31, 33), (3, 17, 1, 1), (1, 9, 300)]),
    ("channels", [False, True]),
    ("block", [8, 16]),
)  # fmt: skip
def test_blocked_layout(rng: np.random.Generator, shape: tuple[int, ...], channels: bool, block: int) -> None:
    count = (shape[1],) if channels else ()
    layouts = (blocked(block), blocked(block))
    zero = integers(rng, *count, dtype=np.int8)
    right(Case("QuantizeLinear", [floats(rng, *shape), scales(rng, *count), zero], layouts=layouts), "opencl.quantize")
    x = integers(rng, *shape, dtype=np.int8)
    right(Case("DequantizeLinear", [x, scales(rng, *count), zero], layouts=layouts), "opencl.quantize")


def test_configs(rng: np.random.Generator) -> None:
    """Other sizes of work-items, and shapes as literals."""
    shape = (2, 17, 40, 61)
    for axis, count in ((0, ()), (1, (17,)), (-1, (61,))):
        case = Case(
            "QuantizeLinear",
            [floats(rng, *shape), scales(rng, *count), integers(rng, *count, dtype=np.int8)],
            {"axis": axis},
        )
        assert not check(case, "opencl.quantize")
    layouts, zero = (blocked(8), blocked(8)), integers(rng, 17, dtype=np.int8)
    x = integers(rng, *shape, dtype=np.int8)
    assert not check(Case("DequantizeLinear", [x, scales(rng, 17), zero], layouts=layouts), "opencl.quantize")
    assert not check(Case("DynamicQuantizeLinear", [floats(rng, 50_003)], outputs=3), "opencl.dynamic_quantize")


def test_layouts_that_differ_are_refused(rng: np.random.Generator) -> None:
    case = Case("QuantizeLinear", [floats(rng, 1, 8, 2, 2), scales(rng)], layouts=(blocked(8), PLAIN))
    assert "different layouts" in check(case, "opencl.quantize")[0]


@pytest.mark.parametrize("to", INTEGERS)
@pytest.mark.parametrize("op", ["QuantizeLinear", MS + "QuantizeLinear"])
def test_numbers_that_are_none(rng: np.random.Generator, op: str, to: Any) -> None:
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e38, -1e38, 0.5, 1.5, 2.5, np.nan] * 3, np.float32)
    right(Case(op, [x, scales(rng), np.asarray(3, to)]), "opencl.quantize")


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16])
def test_contrib(rng: np.random.Generator, dtype: Any) -> None:
    scale, zero = scales(rng, 5), integers(rng, 5, dtype=dtype)
    right(Case(MS + "QuantizeLinear", [floats(rng, 3, 5, 33), scale, zero]), "opencl.quantize")
    x = integers(rng, 3, 5, 33, dtype=dtype)
    right(Case(MS + "DequantizeLinear", [x, scale, zero]), "opencl.quantize")


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5, 7), (2, 3, 150, 111), (0,), (1 << 18,)])
def test_dynamic(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    for shift, factor in ((0, 1), (500, 1), (-500, 1), (0, 0), (0, 1e-20), (0, 1e30)):
        x = np.asarray((floats(rng, *shape) + np.float32(shift)) * np.float32(factor))
        right(Case("DynamicQuantizeLinear", [x], outputs=3), "opencl.dynamic_quantize")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 3000, 99_999])
def test_dynamic_numbers_that_are_none(rng: np.random.Generator, value: float, at: int) -> None:
    x = floats(rng, 100_000)
    x[at] = value
    right(Case("DynamicQuantizeLinear", [x], outputs=3), "opencl.dynamic_quantize")


# -- operations on quantised tensors ----------------------------------------------------------------------------------
def parameters(rng: np.random.Generator, dtype: Any) -> list[np.ndarray]:
    return [np.asarray(rng.uniform(0.01, 0.1)).astype(np.float32), integers(rng, dtype=dtype)]


@every_other(
    ("dtype", [np.uint8, np.int8]), ("op", ["QLinearAdd", "QLinearMul"]),
    ("shapes", [
        ((3, 5, 7), (3, 5, 7)), ((2, 4, 5, 6), (4, 1, 1)), ((1, 5), (4, 1)), ((), (9,)), ((30_011,), (30_011,)),
    ]),
)  # fmt: skip
def test_binary(rng: np.random.Generator, op: str, dtype: Any, shapes: tuple[Any, Any]) -> None:
    a, b = (integers(rng, *shape, dtype=dtype) for shape in shapes)
    inputs = [a, *parameters(rng, dtype), b, *parameters(rng, dtype), *parameters(rng, dtype)]
    right(Case(MS + op, inputs), "opencl.qlinear_elementwise")
    right(Case(MS + op, inputs[:7]), "opencl.qlinear_elementwise")


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("op", ["QLinearSigmoid", "QLinearLeakyRelu"])
def test_unary(rng: np.random.Generator, op: str, dtype: Any) -> None:
    attrs = {"alpha": 0.3} if "Relu" in op else {}
    y = [np.asarray(0.004, np.float32), integers(rng, dtype=dtype)]
    inputs = [integers(rng, 3, 5, 777, dtype=dtype), *parameters(rng, dtype), *y]
    assert not check(Case(MS + op, inputs, attrs), "opencl.qlinear_elementwise", configs=1)


def test_where(rng: np.random.Generator) -> None:
    condition = rng.random((3, 1, 6)) < 0.5
    x, y = integers(rng, 4, 6, dtype=np.int8), integers(rng, 3, 4, 1, dtype=np.int8)
    inputs = [condition, x, *parameters(rng, np.int8), y, *parameters(rng, np.int8), *parameters(rng, np.int8)]
    assert not check(Case(MS + "QLinearWhere", inputs), "opencl.qlinear_elementwise", configs=0)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concat(rng: np.random.Generator, axis: int) -> None:
    same = parameters(rng, np.uint8)
    inputs: list[np.ndarray | None] = [*same]
    other, third = parameters(rng, np.uint8), parameters(rng, np.uint8)
    parts: list[tuple[int, list[np.ndarray]]] = [(3, same), (1, other), (0, same), (17, third)]
    for n, given in parts:
        shape = [4, 5, 6]
        shape[axis] = n
        inputs += [integers(rng, *shape, dtype=np.uint8), given[0], given[1]]
    right(Case(MS + "QLinearConcat", inputs, {"axis": axis}), "opencl.qlinear_concat")


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("opset", [12, 13])
def test_softmax(rng: np.random.Generator, axis: int, opset: int) -> None:
    for shape in ((3, 5, 33), (2, 1, 400), (4, 6, 1)):
        x = integers(rng, *shape, dtype=np.uint8)
        y = [np.asarray(1 / 256, np.float32), np.asarray(0, np.uint8)]
        case = Case(MS + "QLinearSoftmax", [x, *parameters(rng, np.uint8), *y], {"axis": axis, "opset": opset})
        right(case, "opencl.qlinear_softmax")


@pytest.mark.parametrize("last", [0, 1])
def test_pools(rng: np.random.Generator, last: int) -> None:
    for shape in ((2, 5, 7, 9), (1, 19, 6), (1, 2, 3, 4, 5)):
        x = integers(rng, *shape, dtype=np.uint8)
        inputs = [x, *parameters(rng, np.uint8), *parameters(rng, np.uint8)]
        case = Case(MS + "QLinearGlobalAveragePool", inputs, {"channels_last": last})
        right(case, "opencl.qlinear_pool")
        rank = len(shape) - 2
        pads = {"pads": [1] * 2 * rank}
        for more in ({}, pads, {**pads, "count_include_pad": 1, "strides": [2] * rank}):
            attrs = {"kernel_shape": [2] * rank, "channels_last": last, **more}
            case = Case(MS + "QLinearAveragePool", inputs, attrs)
            right(case, "opencl.qlinear_pool")
