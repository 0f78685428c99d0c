"""Sums of four products of bytes: convolutions and matrix products against their references, which are exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conformance.short_form import every_other
from tunewright.devices.base import Target
from tunewright.devices.executable import Part
from tunewright.devices.native.device import NativeDevice
from tunewright.ir.graph import Fused
from tunewright.ir.types import PLAIN, Layout, blocked
from tunewright.plugins.single import open_device
from tunewright.solvers.base import solvers
from tunewright.solvers.c.convolution import conv_bytes
from tunewright.solvers.c.source import dot
from tunewright.testing.kernelcheck import Case, check

CONV, MATMUL, DEPTHWISE = "opencl.conv_bytes", "opencl.matmul_bytes", "opencl.conv_bytes_depthwise"


def right(case: Case, family: str) -> None:
    """In the generic solver's default config: it compiles once for all shapes."""
    assert not check(case, family, configs=0, specialised=False)


def block() -> Layout:
    return blocked(open_device("CPU").target.vector_bytes // 4)


def integers(rng: np.random.Generator, *shape: int, dtype: Any = np.uint8) -> np.ndarray:
    info = np.iinfo(dtype)
    return rng.integers(info.min, int(info.max) + 1, shape).astype(dtype)


def scales(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.asarray(rng.uniform(0.001, 0.1, shape)).astype(np.float32)


#: odd sizes: channels that fill no block, few of them, borders on some sides, strides, dilations, one to three axes
CONVS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((1, 13, 9, 11), (21, 13, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((2, 16, 14, 14), (33, 16, 1, 1), {}),
    ((1, 7, 13, 12), (18, 7, 3, 2), {"pads": [0, 2, 1, 1], "strides": [2, 3], "dilations": [2, 1]}),
    ((2, 5, 31), (19, 5, 4), {"pads": [3, 0], "dilations": [2]}),
    ((1, 3, 5, 6, 7), (18, 3, 2, 3, 2), {"pads": [1, 0, 1, 0, 1, 1], "strides": [1, 2, 1]}),
    ((1, 9, 8, 8), (17, 9, 3, 3), {"pads": [-1, -2, -1, 1]}),
]


def qlinear(
    rng: np.random.Generator, case: Any, x_type: Any, w_type: Any, middle: bool, y_type: Any = None
) -> tuple[list[np.ndarray], Any]:
    """Inputs of a QLinearConv whose results reach both ends of their range; ``middle``: the zero points of weights."""
    x_shape, w_shape, attrs = case
    filters = w_shape[0]
    w_zero = integers(rng, filters, dtype=w_type)
    if middle:
        w_zero = np.asarray(128 if w_type is np.uint8 else 0, w_type)
    y_scale = np.asarray(1.5 * np.prod(w_shape[1:]) ** 0.5, np.float32)
    inputs = [
        integers(rng, *x_shape, dtype=x_type),
        scales(rng),
        integers(rng, dtype=x_type),
        integers(rng, *w_shape, dtype=w_type),
    ]
    inputs += [scales(rng, filters), w_zero, y_scale, integers(rng, dtype=y_type or x_type)]
    return [*inputs, rng.integers(-5000, 5000, filters).astype(np.int32)], attrs


CONSTANT = frozenset(range(1, 9))


@every_other(("case", CONVS), ("x_type", [np.uint8, np.int8]))
def test_in_blocks(rng: np.random.Generator, case: Any, x_type: Any) -> None:
    inputs, attrs = qlinear(rng, case, x_type, np.int8, middle=True)
    right(Case("QLinearConv", inputs, attrs, constant=CONSTANT, layouts=(block(), block())), CONV)


@pytest.mark.parametrize("case", CONVS[::2], ids=str)
def test_in_blocks_and_copied(rng: np.random.Generator, case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a layer with much to multiply is: with its padding, its bytes unsigned."""
    monkeypatch.setattr(conv_bytes, "COPIED", 0)
    inputs, attrs = qlinear(rng, case, np.int8, np.int8, middle=True)
    right(Case("QLinearConv", inputs, attrs, constant=CONSTANT, layouts=(block(), block())), CONV)


@pytest.mark.parametrize("case", CONVS, ids=str)
def test_plain_and_any_zero_point_of_weights(rng: np.random.Generator, case: Any) -> None:
    """What is plain may have zero points that are known only at run time."""
    inputs, attrs = qlinear(rng, case, np.int8, np.uint8, middle=False)
    right(Case("QLinearConv", inputs, attrs, constant=frozenset({3})), CONV)
    right(Case("QLinearConv", inputs[:8], attrs, constant=CONSTANT, layouts=(PLAIN, block())), CONV)


@pytest.mark.parametrize("types", [(np.uint8, np.uint8), (np.int8, np.int8)], ids=str)
def test_conv_integer_and_what_follows(rng: np.random.Generator, types: tuple[Any, Any]) -> None:
    (x_shape, w_shape, attrs), (x_type, w_type) = CONVS[0], types
    x, w = integers(rng, *x_shape, dtype=x_type), integers(rng, *w_shape, dtype=w_type)
    inputs = [x, w, integers(rng, dtype=x_type), integers(rng, dtype=w_type)]
    right(Case("ConvInteger", inputs, attrs, constant=frozenset({1})), CONV)
    right(Case("ConvInteger", inputs[:2], attrs, constant=frozenset({1})), CONV)
    steps = (Fused("Cast", (~0,), {"to": 1}), Fused("Mul", (~1, 4)), Fused("Add", (~2, 5)), Fused("Relu", (~3,)))
    more = [*inputs, scales(rng), rng.standard_normal((1, 21, 9, 11)).astype(np.float32)]
    for layouts in ((PLAIN, PLAIN), (PLAIN, block())):
        case = Case(
            "ConvInteger", more, attrs, constant=frozenset({1}), epilogue=steps, operands=2, layouts=layouts
        )  # fmt: skip
        right(case, CONV)


def test_ends_of_the_ranges() -> None:
    """Largest and smallest bytes against each other: pairs would overflow 16 bits, results saturate on both sides."""
    for x_value, w_value in ((255, -128), (255, 127), (0, -128)):
        x, w = np.full((1, 40, 6, 6), x_value, np.uint8), np.full((9, 40, 3, 3), w_value, np.int8)
        f = np.asarray(1e-3, np.float32)
        zeros = (np.asarray(3, np.uint8), np.asarray(0, np.int8), np.asarray(100, np.uint8))
        inputs = [x, f, zeros[0], w, f, zeros[1], np.asarray(1e-5, np.float32), zeros[2]]
        case = Case("QLinearConv", inputs, {"pads": [1] * 4}, constant=CONSTANT, layouts=(block(), block()))
        right(case, CONV)
        right(Case("ConvInteger", [x, w], {"pads": [1] * 4}, constant=frozenset({1})), CONV)


def test_halves_go_to_the_even_number() -> None:
    x = np.arange(-40, 40, dtype=np.int8).reshape(1, 8, 10, 1)
    w = np.zeros((8, 8, 1, 1), np.int8)
    w[range(8), range(8)] = 1
    one, half = np.asarray(1, np.float32), np.asarray(2, np.float32)
    zero = np.asarray(0, np.int8)
    inputs = [x, one, zero, w, one, zero, half, zero]
    for layouts in ((block(), block()), (PLAIN, PLAIN)):
        right(Case("QLinearConv", inputs, constant=CONSTANT, layouts=layouts), CONV)


#: a filter for each channel: windows of one to two quads of rows, borders on some sides, strides, dilations
DEPTHWISE_CONVS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 19, 9, 11), (19, 1, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((1, 16, 13, 14), (16, 1, 5, 5), {"pads": [2, 2, 2, 2], "strides": [2, 2]}),
    ((1, 8, 12, 9), (8, 1, 2, 3), {"pads": [0, 2, 3, 1], "strides": [1, 3], "dilations": [2, 1]}),
    ((1, 24, 6, 7), (24, 1, 1, 1), {}),
]


@every_other(("case", DEPTHWISE_CONVS), ("types", [(np.uint8, np.int8), (np.int8, np.uint8)]))
def test_depthwise(rng: np.random.Generator, case: Any, types: tuple[Any, Any]) -> None:
    inputs, attrs = qlinear(rng, case, *types, middle=True)
    attrs = {**attrs, "group": case[1][0]}
    right(Case("QLinearConv", inputs, attrs, constant=CONSTANT, layouts=(block(), block())), DEPTHWISE)
    right(Case("QLinearConv", inputs[:8], attrs, constant=CONSTANT, layouts=(block(), block())), DEPTHWISE)


def test_depthwise_configs_and_refusals(rng: np.random.Generator) -> None:
    x_shape, w_shape, attrs = DEPTHWISE_CONVS[0]
    layouts = (block(), block())
    inputs, attrs = qlinear(rng, (x_shape, w_shape, attrs), np.uint8, np.int8, middle=True)
    case = Case("QLinearConv", inputs, {**attrs, "group": 19}, constant=CONSTANT, layouts=layouts)
    assert not check(case, DEPTHWISE, configs=3)
    solver = next(s for s in solvers() if s.id == DEPTHWISE)
    target = open_device("CPU").target
    plain = Case("QLinearConv", inputs, {**attrs, "group": 19}, constant=CONSTANT).problem()
    assert "blocks" in str(solver.why_not(plain, target))
    assert solver.preferred(plain, target) == layouts
    cropped = {"pads": [-1, 0, 0, 0], "group": 19}
    why = solver.why_not(Case("QLinearConv", inputs, cropped, constant=CONSTANT, layouts=layouts).problem(), target)
    assert why == "its padding is not negative"
    odd, more = qlinear(rng, DEPTHWISE_CONVS[0], np.uint8, np.int8, middle=False)
    case = Case("QLinearConv", odd, {**more, "group": 19}, constant=CONSTANT, layouts=layouts)
    assert "middle" in str(solver.why_not(case.problem(), target))


def test_tiles(rng: np.random.Generator) -> None:
    inputs, attrs = qlinear(rng, CONVS[0], np.int8, np.int8, middle=True)
    assert not check(Case("QLinearConv", inputs, attrs, constant=CONSTANT, layouts=(block(), block())), CONV, configs=2)


def has_dot4() -> bool:
    return dot.has_dot4(open_device("CPU").target)


@every_other(
    ("shapes", [
        ((13, 65), (65, 33)), ((2, 3, 9, 17), (17, 40)), ((6, 1), (1, 1)), ((20, 64), (64, 130)), ((1, 70), (70, 65)),
    ]),
    ("types", [(np.uint8, np.uint8), (np.int8, np.int8), (np.uint8, np.int8)]),
)  # fmt: skip
def test_matmul(rng: np.random.Generator, shapes: tuple[Any, Any], types: tuple[Any, Any]) -> None:
    if not has_dot4():
        pytest.skip("this processor has no such instruction: pairs serve it")
    (a_shape, b_shape), (a_type, b_type) = shapes, types
    a, b, n = integers(rng, *a_shape, dtype=a_type), integers(rng, *b_shape, dtype=b_type), b_shape[1]
    right(
        Case(
            "MatMulInteger", [a, b, integers(rng, dtype=a_type), integers(rng, dtype=b_type)], constant=frozenset({1})
        ),
        MATMUL,
    )
    right(Case("MatMulInteger", [a, b], constant=frozenset({1})), MATMUL)
    inputs = [
        a,
        scales(rng),
        integers(rng, dtype=a_type),
        b,
        scales(rng, n),
        integers(rng, n, dtype=b_type),
        scales(rng),
        integers(rng, dtype=a_type),
    ]
    right(Case("QLinearMatMul", inputs, constant=frozenset({3, 5})), MATMUL)


@pytest.mark.parametrize("way", ["pairs", "shifts"])
def test_other_processors_compute_the_same(rng: np.random.Generator, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the instruction: pairs of 16 bits where there are such, else shifts."""
    monkeypatch.setattr(dot, "has_dot4", lambda target: False)
    if way == "shifts":
        monkeypatch.setattr(dot, "MADD", "")
    for case, x_type in ((CONVS[0], np.uint8), (CONVS[2], np.int8)):
        inputs, attrs = qlinear(rng, case, x_type, np.int8, middle=True)
        right(Case("QLinearConv", inputs, attrs, constant=CONSTANT, layouts=(block(), block())), CONV)
    inputs, attrs = qlinear(rng, DEPTHWISE_CONVS[0], np.uint8, np.int8, middle=True)
    attrs = {**attrs, "group": 19}
    right(Case("QLinearConv", inputs, attrs, constant=CONSTANT, layouts=(block(), block())), DEPTHWISE)


@pytest.mark.parametrize(("feature", "vector_bytes"), [("avxvnni", 32), ("avx512vnni", 64), ("dotprod", 16)])
def test_a_feature_counts_for_vectors_of_its_own_width(feature: str, vector_bytes: int) -> None:
    for width in (8, 16, 32, 64):
        assert dot.has_dot4(Target("cpu", "a", f"any+{feature}", 2, vector_bytes=width)) == (width == vector_bytes)
        assert not dot.has_dot4(Target("cpu", "a", feature, 2, vector_bytes=width))


def test_blocks_need_known_zero_points(rng: np.random.Generator) -> None:
    inputs, attrs = qlinear(rng, CONVS[0], np.uint8, np.uint8, middle=False)
    problem = Case("QLinearConv", inputs, attrs, constant=CONSTANT, layouts=(block(), block())).problem()
    (solver,) = (s for s in solvers() if s.id == CONV)
    assert "in their middle" in str(solver.why_not(problem, open_device("CPU").target))


def test_kernels_of_several_types_are_one_launch(rng: np.random.Generator) -> None:
    """Their texts declare names of types that differ: each is a program of its own, and one table holds them all."""
    device, kernels = open_device("CPU"), []
    if not isinstance(device, NativeDevice):
        pytest.skip("this device launches kernels one by one")
    found = {s.id: s for s in solvers()}
    for x_type, w_type in ((np.int8, np.int8), (np.uint8, np.uint8)):
        inputs, attrs = qlinear(rng, CONVS[0], x_type, w_type, middle=False)
        problem = Case("QLinearConv", inputs, attrs, constant=CONSTANT).problem()
        for name in (CONV, "opencl.integer_conv"):
            solver = found[name]
            kernels.append(solver.compile(problem, solver.default(problem, device.target), device))
    parts = [Part.alone(kernel, len(kernel.problem.inputs), 1) for kernel in kernels]
    whole, apart = device.link(parts).linked.table, [device.link([part]).linked.table for part in parts]
    assert whole[0] == sum(table[0] for table in apart) >= len(kernels)
    entries = {int(table[int(table[2])]) for table in apart}
    assert len(entries) == len(kernels), "no two have a kernel in common"


def test_packed_weights_keep_every_number(rng: np.random.Generator) -> None:
    w = integers(rng, 5, 6, 2, 3)
    packed = conv_bytes.pack(w, 8, 8)
    parts = packed[: 6 * 8 * 8].reshape(6, 2, 8, 4).transpose(2, 1, 3, 0).reshape(8, 8, 6)
    assert (
        (parts[:5, :6].reshape(w.shape) == w.astype(int) - 128).all() and not parts[5:].any() and not parts[:, 6:].any()
    )
    assert (packed[6 * 8 * 8 :].view(np.int32)[:5] == (w.astype(int) - 128).sum((1, 2, 3))).all()
