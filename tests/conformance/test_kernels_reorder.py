"""Kernels that change a tensor's layout against the definition of the layouts."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import tunewright
from conformance.short_form import every_other
from tunewright.ir.types import NHWC, PLAIN, DType, Layout, TensorType, blocked
from tunewright.ops.internal.reorder import REORDER, from_plain
from tunewright.ops.tolerance import compare
from tunewright.plugins.single import open_device
from tunewright.solvers.base import Problem, solvers
from tunewright.solvers.host.reference import HostKernel
from tunewright.testing.kernelcheck import Case, check, run_one

DTYPES = [np.float32, np.float16, np.int8]
BLOCK = blocked(8)
WIDE = blocked(16)
SHAPES = [
    (1, 16, 5, 5), (2, 19, 7, 9), (3, 3, 33, 31), (1, 5, 2, 3), (2, 40, 1), (1, 1, 1, 1), (1, 9, 3, 4, 5), (2, 8, 0, 4),
]  # fmt: skip


def array(rng: np.random.Generator, *shape: int, dtype: type = np.float32) -> np.ndarray:
    return rng.integers(-100, 100, shape).astype(dtype)


def case(x: np.ndarray, source: Layout, target: Layout) -> Case:
    return Case(REORDER, [x], {"layout": str(target)}, layouts=(source, target))


def generic(case: Case) -> None:
    """The kernel that takes its shapes as arguments: few texts, so that many cases cost little."""
    device, problem = open_device("CPU"), case.problem()
    solver = next(s for s in solvers() if s.id.startswith("opencl.reorder") and not s.why_not(problem, device.target))
    assert not solver.id.endswith(".shape")
    inputs = [from_plain(case.inputs[0], problem.inputs[0])]
    want = HostKernel(problem).run(device.queue(), inputs, [None])
    assert not run_one(case, problem, solver, solver.default(problem, device.target), device, want)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("source", "target"),
    [(PLAIN, BLOCK), (BLOCK, PLAIN), (PLAIN, NHWC), (NHWC, PLAIN), (NHWC, BLOCK), (BLOCK, NHWC)],
    ids=str,
)
def test_layouts(rng: np.random.Generator, source: Layout, target: Layout, shape: tuple[int, ...]) -> None:
    if shape == (2, 19, 7, 9):
        assert not check(case(array(rng, *shape), source, target), "opencl.reorder")
    generic(case(array(rng, *shape), source, target))


@every_other(
    ("dtype", [np.float16, ml_dtypes.bfloat16, np.int8, np.bool_, np.float64, np.int64]),
    ("source, target", [(PLAIN, BLOCK), (BLOCK, PLAIN), (PLAIN, NHWC)]),
)  # fmt: skip
def test_dtypes(rng: np.random.Generator, source: Layout, target: Layout, dtype: type) -> None:
    for shape in ((2, 19, 7, 9), (1, 33, 4, 5)):
        generic(case(array(rng, *shape, dtype=dtype), source, target))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_sixteen(rng: np.random.Generator, dtype: type) -> None:
    x = array(rng, 2, 37, 9, 5, dtype=dtype)
    generic(case(x, PLAIN, WIDE))
    generic(case(x, WIDE, PLAIN))


def test_large(rng: np.random.Generator) -> None:
    """Several work-items, whose stretches of pixels meet inside a channel."""
    x = array(rng, 1, 20, 129, 127)
    for source, target in ((PLAIN, BLOCK), (BLOCK, PLAIN), (PLAIN, NHWC), (NHWC, PLAIN)):
        generic(case(x, source, target))


@pytest.mark.parametrize("source", [PLAIN, NHWC], ids=str)
def test_a_last_block_is_filled_with_zeros(rng: np.random.Generator, source: Layout) -> None:
    device = open_device("CPU")
    for pixels in ((3, 5), (1, 2)):
        x = array(rng, 2, 11, *pixels)
        given = TensorType(DType.FLOAT32, x.shape, source)
        wanted = TensorType(DType.FLOAT32, x.shape, BLOCK)
        problem = Problem(REORDER, (given,), (wanted,), {"layout": str(BLOCK)}, constant=(False,))
        solver = next(s for s in solvers() if s.id == "opencl.reorder.blocked")
        out = device.view(device.alloc(wanted.nbytes), 0, wanted)
        out.fill(np.nan)
        queue = device.queue()
        kernel = solver.compile(problem, solver.default(problem, device.target), device)
        kernel.run(queue, [from_plain(x, given)], [out])
        queue.finish()
        np.testing.assert_array_equal(out, from_plain(x, wanted))


@pytest.mark.parametrize("batch", [1, 2])
def test_network_between_reorders(rng: np.random.Generator, batch: int) -> None:
    """Concat, Slice and Pad between convolutions, in place and not: they work in the layout of the convolutions."""
    constants: list[onnx.TensorProto] = []

    def constant(value: np.ndarray) -> str:
        constants.append(numpy_helper.from_array(value, f"c{len(constants)}"))
        return constants[-1].name

    def weight(*shape: int) -> str:
        return constant(rng.standard_normal(shape).astype(np.float32) / np.float32(np.sqrt(np.prod(shape[1:]))))

    def ints(*values: int) -> str:
        return constant(np.array(values, np.int64))

    node, same = helper.make_node, [1, 1, 1, 1]
    nodes = [
        node("Conv", ["x", weight(16, 3, 3, 3)], ["a"], pads=same),
        node("Conv", ["a", weight(32, 16, 1, 1)], ["b"]),
        node("Conv", ["a", weight(24, 16, 3, 3)], ["c"], pads=same),
        node("Concat", ["b", "c"], ["joined"], axis=1),
        node("Conv", ["joined", weight(40, 56, 3, 3)], ["d"], pads=same),
        node("Slice", ["d", ints(8), ints(32), ints(1)], ["some"]),
        node("Conv", ["some", weight(21, 24, 1, 1)], ["e"]),
        node("Pad", ["e", ints(0, 0, 1, 2, 0, 0, 2, 1)], ["padded"]),
        node("Slice", ["padded", ints(batch - 1, 1), ints(batch, 9), ints(0, 2)], ["rows"]),
        node("Conv", ["rows", weight(8, 21, 3, 3)], ["y"]),
    ]
    outputs = [helper.make_tensor_value_info(name, 1, None) for name in ("joined", "padded", "rows", "y")]
    x = rng.standard_normal((batch, 3, 12, 11)).astype(np.float32)
    inputs = [helper.make_tensor_value_info("x", 1, x.shape)]
    model = helper.make_model(
        helper.make_graph(nodes, "blocked", inputs, outputs, constants), opset_imports=[helper.make_opsetid("", 18)]
    )
    core = tunewright.Core()
    mine, other = (core.compile_model(model, device)({"x": x}) for device in ("CPU", "CPU.HOST"))
    for name, want in other.items():
        assert not compare(mine[name], want), name
