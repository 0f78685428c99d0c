"""Convolutions in the plain layout, transposed ones, and depthwise ones in the blocked layout, against references."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tunewright.ir.graph import Fused
from tunewright.ir.types import Layout, TensorType, blocked
from tunewright.plugins.single import open_device
from tunewright.solvers.base import Problem
from tunewright.solvers.c.convolution import conv_depthwise, conv_plain
from tunewright.solvers.c.source.window import Window
from tunewright.testing.kernelcheck import Case, check

RELU_OF_SUM = (Fused("Add", (~0, 3)), Fused("Relu", (~1,)))
SCALE = (Fused("Mul", (~0, 3)), Fused("Sigmoid", (~1,)))


def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def conv(rng: np.random.Generator, 
    x: tuple[int, ...], w: tuple[int, ...], bias: bool = True, constant: bool = True, dtype: Any = np.float32,
    op: str = "Conv", **attrs: Any,
) -> Case:  # fmt: skip
    filters = w[0] if op == "Conv" else w[1] * attrs.get("group", 1)
    inputs = [
        normal(rng, *x, dtype=dtype),
        normal(rng, *w, dtype=dtype),
        normal(rng, filters, dtype=dtype) if bias else None,
    ]
    return Case(op, inputs, attrs, constant=frozenset({1, 2} if constant else ()))


def fused(case: Case, operand: np.ndarray, epilogue: tuple[Fused, ...], layout: Layout | None = None) -> Case:
    layouts = case.layouts if layout is None else (layout, layout)
    return Case(case.op, [*case.inputs, operand], case.attrs, 1, case.constant, epilogue, 1, layouts)


#: these are also compiled for their shape
SPECIALISED = frozenset({"3x3", "small plane", "dilated and strided", "volume", "2x2 s2", "dilated", "3x3 s2"})


def generic(case: Case, family: str) -> list[str]:
    """What is wrong with the default kernel that takes its shapes at run time."""
    return check(case, f"opencl.{family}", configs=0, specialised=False)


def some(case: Case, family: str, name: str) -> list[str]:
    """The same, and for some cases what is wrong with the one that is compiled for the shape."""
    return check(case, f"opencl.{family}", configs=0, specialised=name in SPECIALISED)


def output(case: Case) -> tuple[int, ...]:
    out = case.problem().outputs[0]
    assert isinstance(out, TensorType)
    return out.dims


GEOMETRIES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1x1": ((2, 5, 9, 11), (7, 5, 1, 1), {}),
    "1x1 strided": ((1, 5, 9, 11), (7, 5, 1, 1), {"strides": (2, 3)}),
    "1x1 on one pixel": ((3, 37, 1, 1), (45, 37, 1, 1), {}),
    "3x3": ((2, 3, 13, 17), (10, 3, 3, 3), {"pads": (1, 1, 1, 1)}),
    "3x3 asymmetric": ((1, 4, 13, 17), (6, 4, 3, 3), {"pads": (0, 2, 1, 0), "strides": (2, 1)}),
    "small plane": ((1, 12, 5, 6), (33, 12, 3, 3), {"pads": (1, 1, 1, 1)}),
    "stride beyond kernel": ((1, 3, 20, 23), (5, 3, 2, 3), {"strides": (5, 4)}),
    "dilated": ((1, 3, 21, 19), (5, 3, 3, 3), {"dilations": (2, 5), "pads": (2, 5, 2, 5)}),
    "dilated and strided": ((1, 3, 21, 19), (5, 3, 3, 2), {"dilations": (3, 2), "strides": (2, 3)}),
    "kernel beyond input": ((1, 3, 3, 2), (5, 3, 5, 5), {"pads": (2, 2, 2, 2)}),
    "padding only": ((1, 2, 2, 2), (3, 2, 2, 2), {"pads": (3, 4, 3, 4), "strides": (2, 2)}),
    "negative padding": ((1, 2, 9, 9), (3, 2, 3, 3), {"pads": (-1, 0, -2, 1)}),
    "same upper": ((1, 3, 10, 11), (4, 3, 4, 4), {"auto_pad": "SAME_UPPER", "strides": (2, 2)}),
    "same lower": ((1, 3, 10, 11), (4, 3, 4, 4), {"auto_pad": "SAME_LOWER", "strides": (3, 1)}),
    "groups of 3 and 5": ((2, 6, 11, 10), (10, 3, 3, 3), {"group": 2, "pads": (1, 1, 1, 1)}),
    "groups of 1 and 2": ((1, 9, 11, 10), (18, 1, 3, 3), {"group": 9, "pads": (1, 1, 1, 1)}),
    "depthwise": ((1, 11, 18, 10), (11, 1, 3, 3), {"group": 11, "pads": (1, 1, 1, 1), "strides": (2, 2)}),
    "one row": ((2, 4, 70), (9, 4, 5), {"pads": (2, 2)}),
    "one row, dilated": ((1, 4, 70), (9, 4, 7), {"dilations": (6,), "strides": (2,)}),
    "long row": ((1, 40, 3000), (3, 40, 3), {"pads": (1, 1)}),
    "long kernel": ((1, 1, 900), (5, 1, 200), {"strides": (50,)}),
    "volume": ((1, 3, 6, 7, 8), (5, 3, 3, 2, 3), {"pads": (1, 0, 1, 1, 1, 1), "strides": (1, 2, 1)}),
    "volume, dilated groups": ((2, 4, 7, 6, 5), (6, 2, 2, 2, 3), {"group": 2, "dilations": (3, 2, 1)}),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_plain(rng: np.random.Generator, name: str) -> None:
    x, w, attrs = GEOMETRIES[name]
    assert not some(conv(rng, x, w, **attrs), "conv_plain", name)


@pytest.mark.parametrize("configs", [1, pytest.param(5, marks=pytest.mark.soak)])
def test_plain_in_many_configs(rng: np.random.Generator, configs: int) -> None:
    x, w, attrs = GEOMETRIES["3x3 asymmetric"]
    assert not check(conv(rng, x, w, **attrs), "opencl.conv_plain", configs=configs)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_plain_types(rng: np.random.Generator, dtype: Any) -> None:
    x, w, attrs = GEOMETRIES["3x3 asymmetric"]
    for constant in (True, False):
        assert not generic(conv(rng, x, w, constant=constant, dtype=dtype, **attrs), "conv_plain")


@pytest.mark.parametrize("name", ["3x3", "groups of 3 and 5", "volume", "small plane"])
def test_plain_weights_that_vary(rng: np.random.Generator, name: str) -> None:
    x, w, attrs = GEOMETRIES[name]
    assert not generic(conv(rng, x, w, bias=False, constant=False, **attrs), "conv_plain")


def test_plain_epilogues(rng: np.random.Generator) -> None:
    case = conv(rng, (2, 5, 9, 11), (7, 5, 3, 3), pads=(1, 1, 1, 1))
    assert not check(fused(case, normal(rng, *output(case)), RELU_OF_SUM), "opencl.conv_plain", configs=0)
    assert not generic(fused(case, normal(rng, 1, 7, 1, 1), SCALE), "conv_plain")
    cast = (Fused("Cast", (~0,), {"to": 10}),)
    assert not generic(Case(case.op, case.inputs, case.attrs, epilogue=cast), "conv_plain")


@pytest.mark.parametrize("shape", [(0, 3, 5, 5), (1, 3, 5, 5)])
def test_plain_empty(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    filters = 0 if shape[0] else 4
    assert not generic(conv(rng, shape, (filters, 3, 3, 3)), "conv_plain")


def test_plain_not_finite(rng: np.random.Generator) -> None:
    """Infinities and NaNs reach the windows that they lie in and no others."""
    case = conv(rng, (1, 2, 8, 9), (3, 2, 3, 3), pads=(1, 1, 1, 1))
    x, w = case.inputs[0], case.inputs[1]
    assert x is not None and w is not None
    x[0, 1, 3, 4], x[0, 0, 0, 0] = np.inf, np.nan
    assert not generic(case, "conv_plain")


@pytest.mark.parametrize("activation", ["", "Relu", "LeakyRelu"])
def test_fused_conv(rng: np.random.Generator, activation: str) -> None:
    attrs: dict[str, Any] = {"pads": (1, 1, 1, 1)}
    if activation:
        attrs |= {"activation": activation}
    if activation == "LeakyRelu":
        attrs |= {"activation_params": (0.3,)}
    inputs = [normal(rng, 1, 4, 6, 7), normal(rng, 5, 4, 3, 3), normal(rng, 5), normal(rng, 1, 5, 6, 7)]
    case = Case("com.microsoft::FusedConv", inputs, attrs, constant=frozenset({1, 2}))
    assert not generic(case, "conv_plain")
    tail = (Fused("Sigmoid", (~0,)), Fused("Mul", (~0, ~1)))
    assert not generic(Case(case.op, inputs[:3], attrs, epilogue=tail), "conv_plain")


def test_clip_in_fused_conv_is_refused_in_words(rng: np.random.Generator) -> None:
    attrs = {"activation": "Clip", "activation_params": (0.0, 6.0)}
    problem = Case("com.microsoft::FusedConv", [normal(rng, 1, 4, 6, 7), normal(rng, 5, 4, 3, 3)], attrs).problem()
    reason = conv_plain.SOLVERS[0].why_not(problem, open_device("CPU").target)
    assert reason is not None and "Clip" in reason


# -- transposed -------------------------------------------------------------------------------------------------------
TRANSPOSED: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "2x2 s2": ((2, 5, 9, 11), (5, 7, 2, 2), {"strides": (2, 2)}),
    "4x4 s2": ((1, 6, 13, 9), (6, 9, 4, 4), {"strides": (2, 2), "pads": (1, 1, 1, 1)}),
    "3x3 s2": ((1, 6, 8, 9), (6, 5, 3, 3), {"strides": (2, 2), "pads": (1, 1, 1, 1), "output_padding": (1, 1)}),
    "3x3 s1": ((1, 6, 8, 9), (6, 5, 3, 3), {"pads": (0, 1, 2, 1)}),
    "1x1 on one pixel": ((2, 19, 1, 1), (19, 40, 1, 1), {}),
    "one pixel to many": ((1, 19, 1, 1), (19, 20, 4, 4), {}),
    "stride beyond kernel": ((1, 4, 5, 6), (4, 3, 2, 3), {"strides": (4, 5), "output_padding": (3, 0)}),
    "dilated": ((1, 4, 5, 6), (4, 3, 3, 3), {"strides": (2, 3), "dilations": (3, 2), "pads": (2, 1, 0, 3)}),
    "output shape": ((1, 4, 5, 6), (4, 3, 3, 3), {"strides": (3, 2), "output_shape": (17, 12)}),
    "output shape beyond": ((1, 4, 5, 6), (4, 3, 2, 2), {"strides": (2, 2), "output_shape": (13, 14)}),
    "same upper": ((1, 4, 5, 6), (4, 3, 3, 3), {"strides": (2, 2), "auto_pad": "SAME_UPPER"}),
    "same lower": ((1, 4, 5, 6), (4, 3, 4, 3), {"strides": (3, 2), "auto_pad": "SAME_LOWER"}),
    "groups": ((2, 6, 7, 5), (6, 5, 3, 2), {"group": 3, "strides": (2, 2)}),
    "depthwise": ((1, 9, 7, 5), (9, 1, 4, 4), {"group": 9, "strides": (2, 2), "pads": (1, 1, 1, 1)}),
    "one row": ((2, 4, 33), (4, 3, 8), {"strides": (4,), "pads": (2, 2)}),
    "volume": ((1, 3, 4, 5, 3), (3, 4, 3, 2, 2), {"strides": (2, 1, 3), "pads": (1, 0, 0, 1, 1, 0)}),
}


@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed(rng: np.random.Generator, name: str) -> None:
    x, w, attrs = TRANSPOSED[name]
    assert not some(conv(rng, x, w, op="ConvTranspose", **attrs), "conv_transpose", name)


def test_transposed_in_many_configs(rng: np.random.Generator) -> None:
    x, w, attrs = TRANSPOSED["3x3 s2"]
    assert not check(conv(rng, x, w, op="ConvTranspose", **attrs), "opencl.conv_transpose", configs=2)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_transposed_weights_that_vary(rng: np.random.Generator, dtype: Any) -> None:
    x, w, attrs = TRANSPOSED["groups"]
    case = conv(rng, x, w, op="ConvTranspose", constant=False, dtype=dtype, **attrs)
    assert not generic(case, "conv_transpose")


def test_transposed_epilogues(rng: np.random.Generator) -> None:
    case = conv(rng, (1, 6, 8, 9), (6, 5, 3, 3), op="ConvTranspose", strides=(2, 2))
    assert not generic(fused(case, normal(rng, *output(case)), RELU_OF_SUM), "conv_transpose")
    assert not generic(fused(case, normal(rng, 1, 5, 1, 1), SCALE), "conv_transpose")


# -- depthwise --------------------------------------------------------------------------------------------------------
DEPTHWISE: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "3x3": ((2, 16, 13, 21), (3, 3), {"pads": (1, 1, 1, 1)}),
    "3x3 s2": ((1, 19, 17, 30), (3, 3), {"pads": (1, 1, 1, 1), "strides": (2, 2)}),
    "5x5 asymmetric": ((1, 8, 13, 21), (5, 5), {"pads": (2, 1, 0, 3)}),
    "5x5 s2": ((1, 24, 14, 14), (5, 5), {"pads": (2, 2, 2, 2), "strides": (2, 2)}),
    "7x7 on 7x7": ((1, 9, 7, 7), (7, 7), {"pads": (3, 3, 3, 3)}),
    "beyond input": ((1, 8, 2, 3), (5, 7), {"pads": (2, 3, 2, 3)}),
    "dilated": ((1, 8, 15, 29), (3, 3), {"dilations": (3, 2), "pads": (1, 2, 3, 0), "strides": (1, 3)}),
    "one row": ((2, 12, 77), (9,), {"pads": (4, 4)}),
    "1xk": ((1, 8, 3, 40), (1, 5), {"pads": (0, 2, 0, 2)}),
    "1x1": ((1, 8, 3, 40), (1, 1), {"strides": (2, 3)}),
    "volume": ((1, 10, 5, 6, 18), (2, 3, 3), {"pads": (1, 1, 1, 1, 1, 1), "dilations": (2, 1, 1)}),
    "14 wide": ((2, 19, 5, 14), (3, 3), {"pads": (1, 1, 1, 1)}),
    "28 wide of 57": ((1, 8, 9, 57), (3, 3), {"pads": (1, 0, 1, 0), "strides": (2, 2)}),
    "7 wide, far taps": ((1, 8, 9, 7), (3, 3), {"dilations": (2, 9), "pads": (2, 9, 2, 9)}),
    "many taps in a row": ((1, 8, 3, 28), (2, 11), {"pads": (0, 5, 1, 5)}),
}


def depthwise(rng: np.random.Generator, name: str, bias: bool = True) -> Case:
    x, kernel, attrs = DEPTHWISE[name]
    layout = blocked(open_device("CPU").target.vector_bytes // 4)
    case = conv(rng, x, (x[1], 1, *kernel), bias=bias, group=x[1], **attrs)
    return Case(case.op, case.inputs, case.attrs, constant=case.constant, layouts=(layout, layout))


@pytest.mark.parametrize("name", DEPTHWISE)
def test_depthwise(rng: np.random.Generator, name: str) -> None:
    assert not some(depthwise(rng, name), "conv_depthwise", name)


@pytest.mark.parametrize("configs", [1, pytest.param(5, marks=pytest.mark.soak)])
def test_depthwise_in_many_configs(rng: np.random.Generator, configs: int) -> None:
    assert not check(depthwise(rng, "3x3 s2", bias=False), "opencl.conv_depthwise", configs=configs)
    assert not check(depthwise(rng, "14 wide"), "opencl.conv_depthwise", configs=configs)


def test_depthwise_shares_texts_but_of_small_widths(rng: np.random.Generator) -> None:
    target = open_device("CPU").target
    solver = conv_depthwise.SOLVERS[0]

    def text(channels: int, height: int, width: int) -> str:
        layout = blocked(target.vector_bytes // 4)
        case = conv(rng, (1, channels, height, width), (channels, 1, 3, 3), group=channels, pads=(1, 1, 1, 1))
        problem = case.problem().in_layout(layout, [0])
        return solver.source(problem, solver.default(problem, target), target)

    assert text(16, 20, 30) == text(32, 21, 40)
    assert text(16, 7, 14) == text(32, 9, 14) != text(16, 7, 28)


def test_depthwise_epilogues(rng: np.random.Generator) -> None:
    case = depthwise(rng, "3x3 s2")
    layout = case.layouts[0]
    assert not generic(fused(case, normal(rng, *output(case)), RELU_OF_SUM, layout), "conv_depthwise")
    assert not generic(fused(case, normal(rng, 1, 19, 1, 1), SCALE, layout), "conv_depthwise")


def test_depthwise_wants_blocks_of_channels(rng: np.random.Generator) -> None:
    target = open_device("CPU").target
    layout = blocked(target.vector_bytes // 4)
    solver = conv_depthwise.SOLVERS[0]
    few, many = layout.block // 2, 2 * layout.block

    def posed(channels: int, filters: int, constant: bool) -> Problem:
        return conv(rng, (1, channels, 9, 9), (filters, 1, 3, 3), group=channels, constant=constant).problem()

    assert solver.preferred(posed(many, many, True), target) == (layout, layout)
    assert solver.preferred(posed(few, few, True), target) is None
    assert solver.preferred(posed(many, many, False), target) is None
    assert solver.preferred(posed(many, 2 * many, True), target) is None


# -- geometry ---------------------------------------------------------------------------------------------------------
def test_window_has_three_axes(rng: np.random.Generator) -> None:
    window = Window.of(conv(rng, (1, 4, 9, 8), (6, 4, 3, 3), pads=(1, 1, 0, 1), strides=(2, 1)).problem())
    assert window.kernel == (1, 3, 3) and window.stride == (1, 2, 1) and window.head == (0, 1, 1)
    assert window.input == (1, 9, 8) and window.output == (1, 4, 8)
    assert [window.inside(axis) for axis in range(3)] == [(0, 1), (1, 4), (1, 7)]
    pooled = Window.of(Case("GlobalAveragePool", [normal(rng, 1, 4, 9, 8)]).problem())
    assert pooled.kernel == (1, 9, 8) and pooled.output == (1, 1, 1)
