"""Kernels that move elements against their references.

Most cases check the kernels that take shapes as arguments, which share a few texts (`generic`). Kernels that are
compiled for a shape, and other configs, are checked on few (`every`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tunewright.ir.graph import Fused
from tunewright.ir.types import PLAIN, DType, TensorType, blocked
from tunewright.ops.internal.reorder import from_plain
from tunewright.ops.openvino.common import name
from tunewright.plugins.single import open_device
from tunewright.solvers.base import Problem, Solver, solvers
from tunewright.solvers.host.reference import HostKernel
from tunewright.testing.kernelcheck import Case, check, run_one

DTYPES = [
    np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32,
    np.int64, np.uint64, np.bool_, np.complex64, ml_dtypes.float8_e4m3fn,
]  # fmt: skip
BLOCK = blocked(8)


def array(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.integers(0, 2 if dtype is np.bool_ else 120, shape).astype(dtype)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def solver_of(family: str) -> Solver:
    return next(s for s in solvers() if s.id == f"opencl.{family}")


def generic(family: str, op: str, inputs: Sequence[np.ndarray | None], outputs: int = 1, **attrs: Any) -> None:
    """The kernel that takes its shapes as arguments, as it is by default."""
    default(family, Case(op, inputs, attrs, outputs))


def default(family: str, case: Case) -> None:
    device, solver, problem = open_device("CPU"), solver_of(family), case.problem()
    assert solver.why_not(problem, device.target) is None
    inputs = [from_plain(a, t) for a, t in zip(case.inputs, problem.inputs, strict=True)]
    want = HostKernel(problem).run(device.queue(), inputs, [None] * case.outputs)
    assert not run_one(case, problem, solver, solver.default(problem, device.target), device, want)


def every(family: str, op: str, inputs: Sequence[np.ndarray | None], outputs: int = 1, **attrs: Any) -> None:
    """All kernels of a family."""
    assert not check(Case(op, inputs, attrs, outputs), f"opencl.{family}", configs=2)


# -- Transpose --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_transpose_orders(rng: np.random.Generator, order: tuple[int, ...]) -> None:
    generic("transpose", "Transpose", [array(rng, 3, 10, 5, 9)], perm=order)


@pytest.mark.parametrize("dtype", [*DTYPES, np.complex128], ids=str)
def test_transpose_dtypes(rng: np.random.Generator, dtype: Any) -> None:
    for shape, order in (((2, 19, 33), (0, 2, 1)), ((3, 5, 7), (1, 0, 2)), ((2, 3, 4), (2, 1, 0))):
        generic("transpose", "Transpose", [array(rng, *shape, dtype=dtype)], perm=order)


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((), ()), ((1,), (0,)), ((7,), (0,)), ((1, 9, 1, 8), (3, 1, 0, 2)), ((0, 3), (1, 0)), ((3, 0, 2), (2, 1, 0)),
        ((2, 3, 2, 3, 2, 3), (5, 3, 1, 4, 2, 0)), ((2, 2, 2, 2, 2, 2, 2, 2, 2), (8, 6, 4, 2, 0, 7, 5, 3, 1)),
        ((1, 197, 12, 64), (0, 2, 1, 3)), ((1, 197, 12, 64), (0, 2, 3, 1)), ((2, 3, 160, 130), (0, 2, 3, 1)),
        ((130, 257), (1, 0)), ((3, 70000), (1, 0)), ((70000, 3), (1, 0)),
    ],
    ids=str,
)  # fmt: skip
def test_transpose_shapes(rng: np.random.Generator, shape: tuple[int, ...], order: tuple[int, ...]) -> None:
    generic("transpose", "Transpose", [array(rng, *shape)], perm=order)


def test_transpose_reverses_by_default(rng: np.random.Generator) -> None:
    generic("transpose", "Transpose", [array(rng, 2, 3, 4)])


@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=str)
def test_transpose_configs(rng: np.random.Generator, dtype: Any) -> None:
    every("transpose", "Transpose", [array(rng, 2, 35, 43, dtype=dtype)], perm=(0, 2, 1))


def test_values_are_moved_bit_by_bit() -> None:
    """Also those that arithmetic would change: quiet and signalling NaNs, denormals, negative zero."""
    bits = np.array([0x7FC00001, 0x7F800001, 0xFFC12345, 0x00000001, 0x80000000, 0x80000001, 0x7F800000], np.uint32)
    x = np.tile(bits, (11, 1)).view(np.float32)
    device, solver = open_device("CPU"), solver_of("transpose")
    problem = Case("Transpose", [x], {"perm": (1, 0)}).problem()
    queue = device.queue()
    (out,) = solver.compile(problem, solver.default(problem, device.target), device).run(queue, [x], [None])
    queue.finish()
    np.testing.assert_array_equal(out.view(np.uint32), x.T.view(np.uint32))


# -- Concat, Split ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("sizes", [(3,), (1, 2), (3, 0, 2), (5, 1, 1, 4, 2), (1,) * 11, (2,) * 8], ids=str)
def test_concat_and_split(rng: np.random.Generator, axis: int, sizes: tuple[int, ...]) -> None:
    shape = [4, 5, 6]
    parts = []
    for n in sizes:
        shape[axis] = n
        parts.append(array(rng, *shape))
    generic("concat", "Concat", parts, axis=axis)
    generic("split", "Split", [np.concatenate(parts, axis), ints(*sizes)], len(sizes), axis=axis)


@pytest.mark.parametrize("dtype", [*DTYPES, np.complex128], ids=str)
def test_concat_and_split_dtypes(rng: np.random.Generator, dtype: Any) -> None:
    generic("concat", "Concat", [array(rng, 3, 5, 2, dtype=dtype), array(rng, 3, 2, 2, dtype=dtype)], axis=1)
    generic("split", "Split", [array(rng, 3, 7, dtype=dtype)], 3, axis=1, num_outputs=3)


def test_concat_and_split_of_long_rows(rng: np.random.Generator) -> None:
    generic("concat", "Concat", [array(rng, 1, 70001), array(rng, 1, 33), array(rng, 1, 50000)], axis=1)
    generic("split", "Split", [array(rng, 2, 100003)], 2, axis=1, num_outputs=2)
    every("concat", "Concat", [array(rng, 50, 40, 9), array(rng, 50, 30, 9), array(rng, 50, 41, 9)], axis=1)
    every("split", "Split", [array(rng, 50, 99)], 4, axis=1, num_outputs=4)


def test_one_input_twice(rng: np.random.Generator) -> None:
    x = array(rng, 3, 4)
    generic("concat", "Concat", [x, x, x], axis=1)


@pytest.mark.parametrize(
    ("axis", "channels"), [(1, (16, 8, 24)), (1, (16, 8, 5)), (0, (11, 11)), (2, (11, 11)), (-1, (8, 8))], ids=str
)
def test_concat_of_blocked(rng: np.random.Generator, axis: int, channels: tuple[int, ...]) -> None:
    parts = [array(rng, 2, c, 3, 5) for c in channels]
    along = frozenset(range(len(parts)))
    case = Case("Concat", parts, {"axis": axis}, layouts=(BLOCK, BLOCK), along=along)
    default("concat", case)


def test_concat_of_blocked_needs_whole_blocks(rng: np.random.Generator) -> None:
    parts = [array(rng, 1, 5, 3, 3), array(rng, 1, 8, 3, 3)]
    case = Case("Concat", parts, {"axis": 1}, layouts=(BLOCK, BLOCK), along=frozenset({1}))
    assert "do not end with a block" in check(case, "opencl.concat")[0]


# -- Slice, Expand, Tile, DepthToSpace, SpaceToDepth ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("starts", "ends", "axes", "steps"),
    [
        ((1, 2), (5, 7), (0, 2), None), ((0, 0, 0), (9, 9, 9), None, (2, 3, 1)), ((-1,), (-(2**62),), (1,), (-1,)),
        ((20, -3), (-20, 100), (0, -1), (-2, 1)), ((1,), (2**62,), (-1,), (2,)), ((3,), (3,), (0,), None),
        ((5,), (2,), (1,), None), ((0, 1), (6, -1), (2, 1), (5, 1)), ((-100,), (100,), (1,), None),
    ],
    ids=str,
)  # fmt: skip
def test_slice(rng: np.random.Generator, starts: Any, ends: Any, axes: Any, steps: Any) -> None:
    optional = [None if v is None else ints(*v) for v in (axes, steps)]
    generic("strided", "Slice", [array(rng, 6, 7, 9), ints(*starts), ints(*ends), *optional])


@pytest.mark.parametrize("dtype", [*DTYPES, np.complex128], ids=str)
def test_slice_dtypes(rng: np.random.Generator, dtype: Any) -> None:
    for step in (1, 2, -1):
        start, end = (1, 8) if step > 0 else (8, -20)
        generic("strided", "Slice", [array(rng, 3, 11, dtype=dtype), ints(start), ints(end), ints(1), ints(step)])


def test_slice_configs(rng: np.random.Generator) -> None:
    """A focus: every second pixel of an image."""
    every("strided", "Slice", [array(rng, 1, 3, 60, 62), ints(1, 0), ints(99, 99), ints(2, 3), ints(2, 2)])


def test_slice_of_blocked(rng: np.random.Generator) -> None:
    x = array(rng, 2, 21, 7, 6)
    for start, end, axis, step in ((1, 5, 2, 1), (0, 16, 1, 1), (8, 20, 1, 1), (1, 2, 0, 1), (5, -9, 3, -2)):
        case = Case("Slice", [x, ints(start), ints(end), ints(axis), ints(step)], layouts=(BLOCK, BLOCK))
        default("strided", case)
    case = Case("Slice", [x, ints(4), ints(12), ints(1)], layouts=(BLOCK, BLOCK))
    assert "block" in check(case, "opencl.strided")[0]


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((3, 1), (3, 4)), ((1,), (2, 3, 5)), ((), (4, 2)), ((3, 1, 5), (2, 3, 4, 1)), ((4, 5), (1, 1)),
        ((3, 1), (0, 3, 4)), ((2, 1, 1, 3), (2, 2, 4, 3)), ((1, 200), (300, 200)), ((300, 1), (300, 200)),
    ],
    ids=str,
)  # fmt: skip
def test_expand(rng: np.random.Generator, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    generic("strided", "Expand", [array(rng, *shape), ints(*wanted)])
    generic("strided", "Expand", [array(rng, *shape, dtype=np.int64), ints(*wanted)])


@pytest.mark.parametrize(
    ("shape", "repeats"),
    [((2, 3), (3, 2)), ((5,), (4,)), ((1, 4, 1), (3, 1, 5)), ((2, 2), (0, 2)), ((0, 2), (3, 1))],
    ids=str,
)
def test_tile(rng: np.random.Generator, shape: tuple[int, ...], repeats: tuple[int, ...]) -> None:
    generic("strided", "Tile", [array(rng, *shape), ints(*repeats)])


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
@pytest.mark.parametrize("dtype", [np.float32, np.uint8], ids=str)
def test_depth_and_space(rng: np.random.Generator, mode: str, dtype: Any) -> None:
    generic("strided", "DepthToSpace", [array(rng, 2, 12, 5, 7, dtype=dtype)], blocksize=2, mode=mode)
    generic("strided", "DepthToSpace", [array(rng, 1, 18, 4, 33, dtype=dtype)], blocksize=3, mode=mode)
    generic("strided", "SpaceToDepth", [array(rng, 2, 3, 6, 14, dtype=dtype)], blocksize=2, mode=mode)
    generic("strided", "SpaceToDepth", [array(rng, 2, 1, 9, 3, dtype=dtype)], blocksize=3, mode=mode)


def test_openvino_layers(rng: np.random.Generator) -> None:
    generic("strided", name("ShuffleChannels"), [array(rng, 2, 12, 3, 5)], axis=1, group=3)
    generic("strided", name("ReorgYolo"), [array(rng, 2, 8, 6, 4)], stride=2)
    generic("strided", name("Tile"), [array(rng, 2, 8, 6)], axis=1, tiles=3)
    generic("strided", name("Crop"), [array(rng, 2, 8, 6, 5)], axis=(2, 3), offset=(1, 2), dim=(3, 3))


# -- views ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [*DTYPES, np.complex128], ids=str)
def test_views(rng: np.random.Generator, dtype: Any) -> None:
    x = array(rng, 2, 1, 3, 5, dtype=dtype)
    generic("view", "Identity", [x])
    generic("view", "Reshape", [x, ints(5, -1)])
    generic("view", "Flatten", [x], axis=2)
    generic("view", "Squeeze", [x, ints(1)])
    generic("view", "Unsqueeze", [x, ints(0, -1)])
    generic("view", name("Copy"), [x])


def test_views_of_any_size_and_layout(rng: np.random.Generator) -> None:
    generic("view", "Identity", [array(rng)])
    generic("view", "Identity", [array(rng, 0, 3)])
    every("view", "Identity", [array(rng, 1000, 301)])
    default("view", Case("Identity", [array(rng, 2, 9, 3, 3)], layouts=(BLOCK, BLOCK)))
    case = Case("Flatten", [array(rng, 2, 8, 3, 3)], layouts=(BLOCK, PLAIN))
    assert "under another shape" in check(case, "opencl.view")[0]


# -- Pad --------------------------------------------------------------------------------------------------------------
MODES = ["constant", "edge", "reflect", "wrap"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("shape", "pads"),
    [
        ((3, 4), (1, 2, 3, 0)), ((2, 3, 5, 4), (0, 0, 1, 2, 0, 0, 2, 1)), ((5,), (4, 3)), ((6, 5), (-1, 2, 1, -2)),
        ((2, 7, 3), (0, 2, 0, 0, 1, 0)), ((4, 5), (0, 0, 0, 0)), ((2, 3), (5, 7, 9, 6)), ((1, 4), (2, 0, 1, 0)),
        ((2, 2, 2, 2, 2, 2), (1, 0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1)),
        ((1, 90000), (0, 100, 0, 99)), ((40, 300), (3, 3, 3, 3)),
    ],
    ids=str,
)  # fmt: skip
def test_pad(rng: np.random.Generator, mode: str, shape: tuple[int, ...], pads: tuple[int, ...]) -> None:
    generic("pad", "Pad", [array(rng, *shape), ints(*pads)], mode=mode)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pad_dtypes(rng: np.random.Generator, dtype: Any) -> None:
    x = array(rng, 3, 5, dtype=dtype)
    generic("pad", "Pad", [x, ints(1, 2, 0, 1), array(rng, dtype=dtype)])
    generic("pad", "Pad", [x, ints(1, 2, 0, 1), array(rng, 1, dtype=dtype)])
    generic("pad", "Pad", [x, ints(1, 2, 0, 1)], mode="edge")


def test_pad_operands(rng: np.random.Generator) -> None:
    x = array(rng, 3, 4, 5)
    generic("pad", "Pad", [x, ints(1, 2, 3, 1), np.array(np.nan, np.float32), ints(-1, 0)])
    generic("pad", "Pad", [x, ints(2, 1), None, ints(1)])
    generic("pad", "Pad", [x, ints(2, 1), np.empty(0, np.float32), ints(1)])
    generic("pad", "Pad", [array(rng, 0, 3), ints(1, 0, 2, 0), np.array(7, np.float32)])
    generic("pad", "Pad", [x, ints(-3, 0, 0, 0, 0, 0)])
    generic("pad", "com.microsoft::Pad", [x, ints(1, 0, 2, 0, 3, 0), np.full(1, 4, np.float32)])
    every("pad", "Pad", [array(rng, 4, 30, 31), ints(0, 1, 1, 0, 1, 1), np.array(3, np.float32)])


def test_pad_of_blocked(rng: np.random.Generator) -> None:
    x = array(rng, 2, 11, 5, 6)
    for mode in MODES:
        pads = ints(0, 0, 2, 1, 0, 0, 1, 3)
        case = Case("Pad", [x, pads], {"mode": mode}, layouts=(BLOCK, BLOCK))
        default("pad", case)
    case = Case("Pad", [x, ints(0, 1, 0, 0, 0, 0, 0, 0)], layouts=(BLOCK, BLOCK))
    assert "cannot be padded" in check(case, "opencl.pad")[0]


@pytest.mark.parametrize("wanted", [(4, 9), (3, 4), (6, 7), (11, 2)], ids=str)
def test_center_crop_pad(rng: np.random.Generator, wanted: tuple[int, int]) -> None:
    generic("pad", "CenterCropPad", [array(rng, 6, 7), ints(*wanted)])
    generic("pad", "CenterCropPad", [array(rng, 6, 2, 7), ints(*wanted)], axes=(0, -1))


# -- Trilu, ReverseSequence, ConstantOfShape, EyeLike -----------------------------------------------------------------
@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("k", [None, 0, 1, -2, 9, -9, 2**40])
def test_trilu(rng: np.random.Generator, upper: int, k: int | None) -> None:
    given = [] if k is None else [np.array(k, np.int64)]
    for shape in ((4, 5), (2, 3, 7, 3), (3, 0)):
        generic("trilu", "Trilu", [array(rng, *shape), *given], upper=upper)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_every_dtype(rng: np.random.Generator, dtype: Any) -> None:
    generic("trilu", "Trilu", [array(rng, 5, 6, dtype=dtype)])
    generic("reverse", "ReverseSequence", [array(rng, 4, 3, 2, dtype=dtype), ints(4, 1, 2)])
    code = DType.of_numpy(np.dtype(dtype)).onnx_code
    if np.dtype(dtype).kind != "c":
        generic("fill", "EyeLike", [array(rng, 4, 5)], dtype=code, k=1)
    generic("fill", "ConstantOfShape", [ints(3, 4)], value=np.ones(1, dtype))


def test_reverse_sequence(rng: np.random.Generator) -> None:
    generic("reverse", "ReverseSequence", [array(rng, 5, 4), ints(5, 0, 1, 3)], time_axis=0, batch_axis=1)
    generic("reverse", "ReverseSequence", [array(rng, 4, 5, 3, 2), ints(5, 0, 1, 3)], time_axis=1, batch_axis=0)
    every("reverse", "ReverseSequence", [array(rng, 40, 50, 30), ints(*range(1, 41))], time_axis=1, batch_axis=0)


def test_fill(rng: np.random.Generator) -> None:
    for k in (0, -2, 3, 100, -100):
        generic("fill", "EyeLike", [array(rng, 4, 6)], k=k)
    generic("fill", "ConstantOfShape", [ints(300, 401)])
    generic("fill", "ConstantOfShape", [ints(0, 4)])
    generic("fill", "ConstantOfShape", [ints()], value=np.full(1, 2.5))


# -- what solvers say -------------------------------------------------------------------------------------------------
FAMILIES = ["transpose", "concat", "split", "strided", "view", "pad", "trilu", "reverse", "fill"]


@pytest.mark.parametrize("family", FAMILIES)
def test_open_shapes_are_no_obstacle(family: str) -> None:
    """Asked at the time of fusion, when dimensions are symbols."""
    target, solver = open_device("CPU").target, solver_of(family)
    x = TensorType(DType.FLOAT32, ("n", 3, None))
    for op in solver.ops:  # type: ignore[attr-defined]
        for given in (x, TensorType(DType.FLOAT32)):
            problem = Problem(op, (given,), (given,), {"axis": 1}, constant=(False,))
            assert solver.why_not(problem, target) is None
            fused = Problem(op, (given,), (given,), {}, (Fused("Relu", (~0,)),), constant=(False,))
            assert solver.why_not(fused, target) == "has no epilogue"


def test_what_to_do_must_be_known() -> None:
    target = open_device("CPU").target
    x, n = TensorType(DType.FLOAT32, (3, 4)), TensorType(DType.INT64, (2,))
    for family, op in (("strided", "Slice"), ("pad", "Pad")):
        problem = Problem(op, (x, n), (x,), {}, constant=(False, False))
        assert "not constant" in (solver_of(family).why_not(problem, target) or "")
