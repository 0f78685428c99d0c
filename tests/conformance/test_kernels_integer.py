"""Products of integers against their references: exact, whatever the zero points, shapes and tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conformance.short_form import every_other
from tunewright.ir.graph import Fused
from tunewright.ir.types import DType
from tunewright.testing.kernelcheck import Case, check

MS = "com.microsoft::"
MATMUL = "opencl.integer_matmul"


def right(case: Case, family: str) -> None:
    """In the generic solver's default config: it compiles once for all shapes."""
    assert not check(case, family, configs=0, specialised=False)


def integers(rng: np.random.Generator, *shape: int, dtype: Any = np.uint8) -> np.ndarray:
    info = np.iinfo(dtype)
    return rng.integers(info.min, int(info.max) + 1, shape).astype(dtype)


def scales(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.asarray(rng.uniform(0.001, 0.1, shape)).astype(np.float32)


SHAPES: list[tuple[Any, Any]] = [
    ((1, 7), (7, 5)), ((1, 512), (512, 130)), ((13, 64), (64, 33)), ((2, 3, 9, 17), (17, 40)), ((6, 1), (1, 1))
]  # fmt: skip
BATCHED: list[tuple[Any, Any]] = [
    ((2, 5, 9), (2, 9, 11)), ((3, 1, 4, 6), (2, 6, 8)), ((5, 9), (2, 9, 11)), ((2, 1, 33), (2, 33, 17))
]  # fmt: skip


@every_other(("a_type", [np.uint8, np.int8]), ("b_type", [np.uint8, np.int8]), ("constant", [False, True]))
def test_matmul_integer(rng: np.random.Generator, a_type: Any, b_type: Any, constant: bool) -> None:
    for a, b in SHAPES:
        inputs = [integers(rng, *a, dtype=a_type), integers(rng, *b, dtype=b_type)]
        inputs += [integers(rng, dtype=a_type), integers(rng, dtype=b_type)]
        case = Case("MatMulInteger", inputs, constant=frozenset({1, 3} if constant else ()))
        right(case, MATMUL)


CONV = "opencl.integer_conv"
CONVS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((1, 3, 9, 11), (5, 3, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((2, 16, 14, 14), (33, 16, 1, 1), {}),
    ((1, 7, 13, 12), (18, 7, 3, 2), {"pads": [0, 2, 1, 1], "strides": [2, 3], "dilations": [2, 1]}),
    ((2, 8, 10, 9), (24, 4, 3, 3), {"group": 2, "auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    ((1, 12, 9, 40), (12, 1, 3, 3), {"group": 12, "pads": [1, 1, 1, 1]}),
    ((2, 6, 9, 11), (12, 1, 5, 3), {"group": 6, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ((1, 8, 9, 9), (8, 4, 3, 3), {"group": 2, "strides": [1, 3]}),
    ((2, 5, 31), (9, 5, 4), {"pads": [3, 0], "dilations": [2]}),
    ((1, 3, 5, 6, 7), (10, 3, 2, 3, 2), {"pads": [1, 0, 1, 0, 1, 1], "strides": [1, 2, 1]}),
    ((1, 4, 8, 8), (3, 4, 3, 3), {"pads": [-1, -2, -1, 1]}),
    ((1, 2, 1, 1), (1, 2, 1, 1), {}),
]


@every_other(("case", CONVS), ("types", [(np.uint8, np.int8), (np.int8, np.uint8)]))
def test_conv_integer(rng: np.random.Generator, case: tuple[Any, Any, dict[str, Any]], types: tuple[Any, Any]) -> None:
    x_shape, w_shape, attrs = case
    x, w = integers(rng, *x_shape, dtype=types[0]), integers(rng, *w_shape, dtype=types[1])
    x_zero, w_zero = integers(rng, dtype=types[0]), integers(rng, dtype=types[1])
    right(Case("ConvInteger", [x, w, x_zero, w_zero], attrs), CONV)
    right(Case("ConvInteger", [x, w, x_zero], attrs, constant=frozenset({1})), CONV)


@every_other(("case", CONVS[:6]), ("per_filter", [False, True]))
def test_qlinear_conv(rng: np.random.Generator, case: tuple[Any, Any, dict[str, Any]], per_filter: bool) -> None:
    x_shape, w_shape, attrs = case
    filters = w_shape[0]
    x, w = integers(rng, *x_shape), integers(rng, *w_shape, dtype=np.int8)
    bias = rng.integers(-5000, 5000, filters).astype(np.int32)
    y_scale = np.asarray(3.0 * np.prod(w_shape[1:]) ** 0.5, np.float32)
    count = (filters,) if per_filter else ()
    inputs = [
        x,
        scales(rng),
        integers(rng),
        w,
        scales(rng, *count),
        integers(rng, *count, dtype=np.int8),
        y_scale,
        integers(rng),
    ]
    inputs.append(bias)
    right(Case("QLinearConv", inputs, attrs), CONV)
    right(Case("QLinearConv", inputs[:8], attrs, constant=frozenset({3, 5})), CONV)
    inputs[5] = np.zeros(count, np.int8)
    right(Case("QLinearConv", inputs, attrs, constant=frozenset({3, 5})), CONV)


@pytest.mark.parametrize("b_type", [np.uint8, np.int8])
def test_zero_points_that_are_not_known_when_packing(rng: np.random.Generator, b_type: Any) -> None:
    a, b, columns = integers(rng, 13, 31), integers(rng, 31, 70, dtype=b_type), integers(rng, 70, dtype=b_type)
    constant = frozenset({1, 3})
    right(Case("MatMulInteger", [a, b, integers(rng), columns], constant=constant), MATMUL)
    right(Case("MatMulInteger", [a[:1], b, integers(rng), columns], constant=constant), MATMUL)
    x, w = integers(rng, 1, 5, 6, 7), integers(rng, 70, 5, 3, 3, dtype=b_type)
    case = Case("ConvInteger", [x, w, integers(rng), columns], {"pads": [1, 1, 1, 1]}, constant=constant)
    right(case, CONV)


def test_conv_tiles(rng: np.random.Generator) -> None:
    x, w = integers(rng, 2, 6, 15, 14), integers(rng, 40, 6, 3, 3, dtype=np.int8)
    case = Case("ConvInteger", [x, w, integers(rng)], {"pads": [1, 1, 1, 1]}, constant=frozenset({1}))
    assert not check(case, CONV, configs=2)
    a, b = integers(rng, 37, 50), integers(rng, 50, 75, dtype=np.int8)
    assert not check(Case("MatMulInteger", [a, b, integers(rng)], constant=frozenset({1})), MATMUL, configs=2)


@pytest.mark.parametrize("shapes", BATCHED, ids=str)
def test_matmul_batches(rng: np.random.Generator, shapes: tuple[Any, Any]) -> None:
    a, b = (integers(rng, *shape) for shape in shapes)
    right(Case("MatMulInteger", [a, b, integers(rng), integers(rng)]), MATMUL)
    right(Case("MatMulInteger", [a, b], constant=frozenset({1})), MATMUL)


@pytest.mark.parametrize(
    "shapes", [((9,), (9, 4)), ((3, 9), (9,)), ((9,), (9,)), ((0, 4), (4, 3)), ((3, 0), (0, 5))], ids=str
)
def test_matmul_odd_ranks(rng: np.random.Generator, shapes: tuple[Any, Any]) -> None:
    a, b = (integers(rng, *shape) for shape in shapes)
    right(Case("MatMulInteger", [a, b, integers(rng), integers(rng)]), MATMUL)


def test_matmul_zero_points_along_rows_and_columns(rng: np.random.Generator) -> None:
    a, b = integers(rng, 7, 20), integers(rng, 20, 9)
    right(Case("MatMulInteger", [a, b, integers(rng, 7), integers(rng, 9)]), MATMUL)
    right(Case("MatMulInteger", [a, b, None, integers(rng, 9)], constant=frozenset({1, 3})), MATMUL)


def test_extremes() -> None:
    """Sums that wrap, as the reference does."""
    for value in (0, 255):
        a, b = np.full((5, 70_001), 255 - value, np.uint8), np.full((70_001, 9), value, np.uint8)
        zero = np.asarray(value, np.uint8)
        right(Case("MatMulInteger", [a, b, zero, np.asarray(255 - value, np.uint8)]), MATMUL)


@every_other(("case", SHAPES + BATCHED[:1]), ("y_type", [np.uint8, np.int8]))
def test_qlinear_matmul(rng: np.random.Generator, case: tuple[Any, Any], y_type: Any) -> None:
    a, b = integers(rng, *case[0]), integers(rng, *case[1], dtype=np.int8)
    y_scale = np.asarray(4.0 * case[0][-1] ** 0.5, np.float32)
    inputs = [
        a,
        scales(rng),
        integers(rng),
        b,
        scales(rng),
        integers(rng, dtype=np.int8),
        y_scale,
        integers(rng, dtype=y_type),
    ]
    right(Case("QLinearMatMul", inputs), MATMUL)
    right(Case("QLinearMatMul", inputs, constant=frozenset({3, 5})), MATMUL)
    columns = case[1][-1]
    inputs[4] = scales(rng, columns)
    right(Case("QLinearMatMul", inputs, constant=frozenset({3, 5})), MATMUL)


def test_epilogue(rng: np.random.Generator) -> None:
    """What dynamic quantisation leaves behind a product: a cast, the scale, a bias, an activation."""
    cast = Fused("Cast", (~0,), {"to": DType.FLOAT32.onnx_code})
    steps = (cast, Fused("Mul", (~1, 3)), Fused("Add", (~2, 4)), Fused("Relu", (~3,)))
    scale, constant = np.asarray(0.01, np.float32), frozenset({1, 4})
    x, w = integers(rng, 2, 6, 9, 9), integers(rng, 20, 6, 3, 3, dtype=np.int8)
    bias = rng.standard_normal((20, 1, 1)).astype(np.float32)
    for group, weights in ((1, w), (2, w[:, :3]), (6, np.ascontiguousarray(w[:12, :1]))):
        inputs = [x, np.ascontiguousarray(weights), integers(rng), scale, bias[: len(weights)]]
        right(Case("ConvInteger", inputs, {"group": group}, 1, constant, steps, 2), CONV)
    a, b, bias = integers(rng, 13, 31), integers(rng, 31, 70, dtype=np.int8), rng.standard_normal(70).astype(np.float32)
    for rows in (1, 13):
        inputs = [a[:rows], b, integers(rng), scale, bias]
        right(Case("MatMulInteger", inputs, {}, 1, constant, steps, 2), MATMUL)


def test_epilogue_with_residual(rng: np.random.Generator) -> None:
    """An operand of the result's shape lies as the result does; a value is used twice."""
    cast = Fused("Cast", (~0,), {"to": DType.FLOAT32.onnx_code})
    steps = (cast, Fused("Mul", (~1, 3)), Fused("Sigmoid", (~2,)), Fused("Mul", (~2, ~3)), Fused("Add", (~4, 4)))
    x, w, scale = integers(rng, 1, 4, 7, 9), integers(rng, 19, 4, 3, 3, dtype=np.int8), np.asarray(0.01, np.float32)
    residual = rng.standard_normal((1, 19, 5, 7)).astype(np.float32)
    right(Case("ConvInteger", [x, w, integers(rng), scale, residual], {}, 1, frozenset({1}), steps, 2), CONV)
    floats, b = rng.standard_normal((5, 33)).astype(np.float32), integers(rng, 33, 21, dtype=np.int8)
    more = rng.standard_normal((5, 21)).astype(np.float32)
    steps = (Fused("Relu", (~0,)), Fused("Add", (~1, 3)))
    right(Case(MS + "DynamicQuantizeMatMul", [floats, b, scales(rng), more], {}, 1, frozenset({1}), steps, 1), MATMUL)


@every_other(("rows", [1, 14]), ("columns", [(), (21,)]), ("constant", [frozenset(), frozenset({1})]))
def test_contrib_products(
    rng: np.random.Generator, rows: int, columns: tuple[int, ...], constant: frozenset[int]
) -> None:
    a, b, bias = (
        integers(rng, rows, 33),
        integers(rng, 33, 21, dtype=np.int8),
        rng.standard_normal(21).astype(np.float32),
    )
    floats = rng.standard_normal((rows, 33)).astype(np.float32)
    zero = integers(rng, *columns, dtype=np.int8)
    to_float = [a, b, scales(rng), scales(rng, *columns), integers(rng), zero, bias]
    right(Case(MS + "MatMulIntegerToFloat", to_float, constant=constant), MATMUL)
    dynamic = [floats, b, scales(rng, *columns), zero, bias]
    right(Case(MS + "DynamicQuantizeMatMul", dynamic, constant=constant), MATMUL)


@pytest.mark.parametrize("rows", [1, 14])
def test_contrib_products_of_few_inputs(rng: np.random.Generator, rows: int) -> None:
    floats, b = rng.standard_normal((rows, 33)).astype(np.float32), integers(rng, 33, 21, dtype=np.int8)
    right(Case(MS + "DynamicQuantizeMatMul", [floats, b, scales(rng)]), MATMUL)
    shorts = [integers(rng, rows, 33, dtype=np.int16), integers(rng, 33, 21, dtype=np.int16)]
    right(Case(MS + "MatMulInteger16", shorts), MATMUL)


@pytest.mark.parametrize("trans", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_gemm(rng: np.random.Generator, trans: tuple[int, int]) -> None:
    a, b = integers(rng, 13, 33), integers(rng, 33, 21, dtype=np.int8)
    a, b = (np.ascontiguousarray(m.T) if t else m for m, t in zip((a, b), trans, strict=True))
    attrs = {"transA": trans[0], "transB": trans[1], "alpha": 0.7}
    c = rng.integers(-9000, 9000, 21).astype(np.int32)
    inputs = [a, scales(rng), integers(rng), b, scales(rng, 21), integers(rng, 21, dtype=np.int8), c]
    right(Case(MS + "QGemm", inputs, attrs), MATMUL)
    quantised = [*inputs, np.asarray(30.0, np.float32), integers(rng)]
    right(Case(MS + "QGemm", quantised, attrs, constant=frozenset({3, 5})), MATMUL)
