"""Kernels that move elements by index, against their references: gather, scatter, one-hot, rotary embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance.short_form import every_other
from tunewright.devices.base import Queue
from tunewright.devices.reports import KernelError
from tunewright.ir.types import TensorType
from tunewright.plugins.single import open_device
from tunewright.solvers.base import Kernel, Problem, solvers
from tunewright.testing.kernelcheck import Case, check

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
#: one for each size of an element, and what numpy itself does not know
MOVED = [
    np.uint8, np.float16, BFLOAT16, np.float32, np.int64, np.bool_, ml_dtypes.float8_e4m3fn, np.complex64, np.complex128
]  # fmt: skip


def data(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.asarray(rng.integers(-9, 9, shape)).astype(dtype)


def indices(rng: np.random.Generator, size: int, *shape: int, dtype: Any = np.int64) -> np.ndarray:
    return np.asarray(rng.integers(-size, size, shape)).astype(dtype)


def agrees(op: str, *inputs: np.ndarray | None, family: str, specialised: bool = False, **attrs: Any) -> None:
    case = Case(op, list(inputs), attrs)
    assert not check(case, f"opencl.{family}", 1, specialised=specialised)


# -- gather -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("shape", "index", "axis"),
    [
        ((7,), (), 0),
        ((5, 1), (1,), 1),
        ((300, 129), (3, 50), 0),
        ((3, 17, 5), (2, 3), 1),
        ((3, 17, 5), (4,), -1),
        ((2, 3, 70000), (), 1),
        ((5, 4001), (7000,), 1),
        ((0, 5, 3), (2,), 1),
        ((4, 5), (0,), 0),
    ],
)
def test_gather(rng: np.random.Generator, shape: tuple[int, ...], index: tuple[int, ...], axis: int) -> None:
    inputs = data(rng, *shape), indices(rng, shape[axis], *index)
    agrees("Gather", *inputs, axis=axis, family="gather", specialised=shape == (3, 17, 5))


@pytest.mark.parametrize("dtype", MOVED)
def test_gather_types(rng: np.random.Generator, dtype: Any) -> None:
    agrees("Gather", data(rng, 6, 33, dtype=dtype), indices(rng, 6, 9, dtype=np.int32), family="gather")


def test_gather_keeps_bits(rng: np.random.Generator) -> None:
    x = np.array([np.nan, -0.0, np.inf, 1e-45, -1e-40], np.float32)
    solver = next(s for s in solvers() if s.id == "opencl.gather")
    device = open_device("CPU")
    case = Case("Gather", [x, indices(rng, 5, 70)])
    (y,) = solver.compile(case.problem(), {}, device).run(queue := device.queue(), case.inputs, [None])
    queue.finish()
    assert (y.view(np.uint32) == x[case.inputs[1]].view(np.uint32)).all()


def run(kernel: Kernel, queue: Queue, inputs: Sequence[np.ndarray], y: np.ndarray) -> None:
    """And wait for what it reports."""
    kernel.run(queue, inputs, [y])
    queue.check()


def test_gather_index_out_of_range(rng: np.random.Generator) -> None:
    """The host says what it can see beforehand; else the kernel reads the first element, and reports the index."""
    x, wrong = data(rng, 4, 3), np.array([5])
    types = tuple(TensorType.of(a) for a in (x, wrong))
    out = (TensorType(types[0].dtype, (1, 3)),)
    seen = Problem("Gather", types, out, {}, constant=(False, True), values=((1, wrong),))
    solver, device = next(s for s in solvers() if s.id == "opencl.gather"), open_device("CPU")
    assert "outside of 4 elements" in str(solver.why_not(seen, device.target))
    unseen = Problem("Gather", types, out, {}, constant=(False, False))
    queue, kernel = device.queue(), solver.compile(unseen, {}, device)
    for index in (4, 2**62, -5, -(2**62)):
        y = np.zeros((1, 3), np.float32)
        with pytest.raises(KernelError, match=f"an index is out of range: {index} for an axis of 4$"):
            run(kernel, queue, [x, np.array([index])], y)
        assert (y == x[0]).all()


def test_gather_from_nothing_is_refused(rng: np.random.Generator) -> None:
    types = (TensorType.of(data(rng, 0, 3)), TensorType.of(indices(rng, 1, 2)))
    problem = Problem("Gather", types, (TensorType.of(data(rng, 2, 3)),), {}, constant=(False, False))
    solver = next(s for s in solvers() if s.id == "opencl.gather")
    assert "nothing to choose" in str(solver.why_not(problem, open_device("CPU").target))


@pytest.mark.parametrize(
    ("shape", "index", "axis"),
    [
        ((7,), (5,), 0),
        ((40000,), (30000,), -1),
        ((5, 9), (3, 9), 0),
        ((5, 9), (5, 20), 1),
        ((5, 9, 4), (3, 6, 4), 1),
        ((5, 9, 4), (2, 9, 3), 0),
        ((3, 4, 5, 6), (2, 3, 7, 5), 2),
        ((3, 4, 5, 6), (3, 1, 5, 1), 1),
        ((3, 4), (0, 4), 0),
    ],
)
def test_gather_elements(rng: np.random.Generator, shape: tuple[int, ...], index: tuple[int, ...], axis: int) -> None:
    inputs = data(rng, *shape), indices(rng, shape[axis], *index)
    agrees("GatherElements", *inputs, axis=axis, family="gather_elements", specialised=len(shape) == 3)


@pytest.mark.parametrize("dtype", MOVED[:5])
def test_gather_elements_types(rng: np.random.Generator, dtype: Any) -> None:
    agrees(
        "GatherElements", data(rng, 6, 5, dtype=dtype), indices(rng, 6, 9, 5, dtype=np.int32), family="gather_elements"
    )


@pytest.mark.parametrize(
    ("shape", "index", "batch"),
    [
        ((5, 4, 3), (2, 3, 2), 0),
        ((5, 4, 3), (6, 3), 0),
        ((2, 4, 3), (2, 2), 1),
        ((2, 4, 3), (2, 5, 1), 1),
        ((2, 3, 4, 5), (2, 3, 7, 1), 2),
        ((2, 3, 4, 5), (2, 3, 1), 2),
        ((4, 5000), (9, 1), 0),
        ((4, 5), (0, 1), 0),
    ],
)
def test_gather_nd(rng: np.random.Generator, shape: tuple[int, ...], index: tuple[int, ...], batch: int) -> None:
    size = min(shape[batch : batch + index[-1]])
    agrees("GatherND", data(rng, *shape), indices(rng, size, *index), batch_dims=batch, family="gather")
    agrees("com.microsoft::GatherND", data(rng, *shape), indices(rng, size, *index), batch_dims=batch, family="gather")


# -- scatter ----------------------------------------------------------------------------------------------------------
REDUCTIONS = ["none", "add", "mul", "max", "min"]
ELEMENTS = [
    ((7,), (5,), 0),
    ((50, 3000), (9, 3000), 0),
    ((5, 9), (5, 20), 1),
    ((5, 9, 4), (3, 6, 4), 1),
    ((3, 4, 5, 6), (2, 3, 7, 5), -2),
    ((3, 4), (0, 4), 0),
]


@every_other(("shape, index, axis", ELEMENTS), ("reduction", ["none", "add"]))
def test_scatter_elements(
    rng: np.random.Generator, shape: tuple[int, ...], index: tuple[int, ...], axis: int, reduction: str
) -> None:
    inputs = data(rng, *shape), indices(rng, shape[axis], *index), data(rng, *index)
    attrs = {"axis": axis, "reduction": reduction}
    agrees("ScatterElements", *inputs, family="scatter_elements", specialised=len(shape) == 3, **attrs)


@every_other(
    ("dtype", [np.float32, np.float64, np.float16, BFLOAT16, np.int8, np.uint16, np.bool_]), ("reduction", REDUCTIONS)
)
def test_scatter_types(rng: np.random.Generator, dtype: Any, reduction: str) -> None:
    inputs = data(rng, 6, 5, dtype=dtype), indices(rng, 6, 19, 5, dtype=np.int32), data(rng, 19, 5, dtype=dtype)
    agrees("ScatterElements", *inputs, reduction=reduction, family="scatter_elements")


def test_scatter_sums_of_narrow_floats_are_rounded_once() -> None:
    x, ones = np.zeros(1, np.float16), np.ones(5000, np.float16)
    agrees("ScatterElements", x, np.zeros(5000, np.int64), ones, reduction="add", family="scatter_elements")


def test_scatter_nan() -> None:
    x = np.array([np.nan, 1, -np.inf, 0, 5], np.float32)
    at, updates = np.array([0, 1, 2, 3, 4, 4]), np.array([1, np.nan, np.inf, -0.0, np.nan, 7], np.float32)
    for reduction in REDUCTIONS:
        agrees("ScatterElements", x, at, updates, reduction=reduction, family="scatter_elements")


@pytest.mark.parametrize(
    ("shape", "index"),
    [((5, 4), (3, 1)), ((5, 4, 3), (2, 3, 2)), ((5, 4), (9, 2)), ((40, 9000), (11, 1)), ((4, 5), (0, 1))],
)
@pytest.mark.parametrize("reduction", ["none", "mul"])
def test_scatter_nd(rng: np.random.Generator, shape: tuple[int, ...], index: tuple[int, ...], reduction: str) -> None:
    inputs = data(rng, *shape), indices(rng, min(shape), *index), data(rng, *index[:-1], *shape[index[-1] :])
    agrees("ScatterND", *inputs, reduction=reduction, family="scatter_nd", specialised=len(shape) == 3)


@every_other(("reduction", REDUCTIONS), ("dtype", [np.float16, np.int32]))
def test_scatter_nd_types(rng: np.random.Generator, reduction: str, dtype: Any) -> None:
    inputs = data(rng, 7, 5, dtype=dtype), indices(rng, 7, 30, 1), data(rng, 30, 5, dtype=dtype)
    agrees("ScatterND", *inputs, reduction=reduction, family="scatter_nd")


def test_scatter_leaves_out_what_is_out_of_range(rng: np.random.Generator) -> None:
    x, updates, wrong = data(rng, 4, 3), data(rng, 2, 3), np.array([[2**40], [1]])
    types = tuple(TensorType.of(a) for a in (x, wrong, updates))
    problem = Problem("ScatterND", types, types[:1], {}, constant=(False,) * 3)
    solver, device = next(s for s in solvers() if s.id == "opencl.scatter_nd"), open_device("CPU")
    queue, y = device.queue(), np.zeros_like(x)
    with pytest.raises(KernelError, match=f"an index is out of range: {2**40} for an axis of 4$"):
        run(solver.compile(problem, {}, device), queue, [x, wrong, updates], y)
    x[1] = updates[1]
    assert (y == x).all()


@pytest.mark.parametrize("mode", ["linear", "circular"])
def test_tensor_scatter(rng: np.random.Generator, mode: str) -> None:
    for dtype in (np.float32, np.float16):
        cache, update = data(rng, 3, 2, 9, 4, dtype=dtype), data(rng, 3, 2, 2, 4, dtype=dtype)
        starts = np.array([0, 7, 4]) if mode == "linear" else np.array([8, 7, 11])
        agrees("TensorScatter", cache, update, starts, mode=mode, family="tensor_scatter", specialised=True)
    agrees("TensorScatter", data(rng, 3, 9, 4), data(rng, 3, 2, 4), mode=mode, axis=1, family="tensor_scatter")


@pytest.mark.parametrize("wanted", [None, (2, 3, 8, 7), (2, 3, 9, 10), (3, 3, 8, 7)])
def test_max_unpool(rng: np.random.Generator, wanted: tuple[int, ...] | None) -> None:
    at = rng.integers(0, 2 * 3 * 8 * 7, (2, 3, 4, 3))
    inputs = [data(rng, 2, 3, 4, 3), at, *([] if wanted is None else [np.array(wanted)])]
    agrees("MaxUnpool", *inputs, kernel_shape=(2, 3), strides=(2, 2), family="max_unpool")
    inputs = [data(rng, 1, 1, 5), np.array([[[0, 2, 7, 2, 9]]])]
    agrees("MaxUnpool", *inputs, kernel_shape=(2,), strides=(2,), family="max_unpool")


# -- one-hot ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("shape", "axis"), [((5,), -1), ((2, 3), 0), ((2, 3), 1), ((2, 3), -1), ((), 0), ((0, 3), 1), ((4000,), 0)]
)
def test_one_hot(rng: np.random.Generator, shape: tuple[int, ...], axis: int) -> None:
    inputs = data(rng, *shape, dtype=np.int64), np.array(7), np.array([0.25, 2.5], np.float32)
    agrees("OneHot", *inputs, axis=axis, family="one_hot", specialised=axis == 1)


@pytest.mark.parametrize(
    ("index", "dtype"),
    [(np.float32, np.float64), (np.int32, np.bool_), (np.uint8, np.int8), (np.float16, np.float16)],
)
def test_one_hot_types(index: Any, dtype: Any) -> None:
    at = np.array([0, 3, 2, 6, 7, 1, 200]).astype(index)
    agrees("OneHot", at, np.array(7), np.array([0, 1]).astype(dtype), family="one_hot")


def test_one_hot_fractions() -> None:
    at = np.array([0.5, -1, 3, -0.0, 6.999, np.nan, np.inf, -np.inf, 1e30], np.float32)
    case = Case("OneHot", [at, np.array([7.0], np.float32), np.array([3, 4])], constant=frozenset({1}))
    assert not check(case, "opencl.one_hot", 1, specialised=False)


# -- rotary embeddings ------------------------------------------------------------------------------------------------
def normal(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


@every_other(("interleaved", [0, 1]), ("dtype", [np.float32, np.float64, np.float16, BFLOAT16]))
def test_rotary(rng: np.random.Generator, interleaved: int, dtype: Any) -> None:
    cache = [normal(rng, 9, 4, dtype=dtype), normal(rng, 9, 4, dtype=dtype)]
    positions = rng.integers(0, 9, (2, 5))
    x = normal(rng, 2, 3, 5, 8, dtype=dtype)
    agrees("RotaryEmbedding", x, *cache, positions, interleaved=interleaved, family="rotary")
    agrees("com.microsoft::RotaryEmbedding", x, positions, *cache, interleaved=interleaved, family="rotary")


def test_rotary_forms(rng: np.random.Generator) -> None:
    cache = [normal(rng, 9, 4), normal(rng, 9, 4)]
    own = [normal(rng, 2, 5, 2), normal(rng, 2, 5, 2)]
    partly = {"num_heads": 3, "rotary_embedding_dim": 4}
    agrees("RotaryEmbedding", normal(rng, 2, 5, 24), *own, family="rotary", specialised=True, **partly)
    agrees("RotaryEmbedding", normal(rng, 2, 5, 12), *(a[:1] for a in own), num_heads=3, family="rotary")
    op = "com.microsoft::RotaryEmbedding"
    agrees(op, normal(rng, 2, 5, 24), np.array([3]), *cache, family="rotary")
    agrees(op, normal(rng, 2, 5, 30), np.arange(5)[None], *cache, num_heads=3, family="rotary")
    agrees(
        op,
        normal(rng, 2, 40, 60, 64),
        np.arange(120).reshape(2, 60),
        normal(rng, 120, 32),
        normal(rng, 120, 32),
        family="rotary",
    )
