"""Inputs can be made for every operation that a kernel of a device takes, and every family's default passes on them.

The problems come from the samples of the operations; `EXTRA` has those of operations without any, and of families that
no sample reaches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tunewright.devices.host import HostQueue
from tunewright.ir.graph import Fused
from tunewright.ir.types import DType, Layout, TensorType, blocked
from tunewright.measure import random_inputs
from tunewright.measure.judge import physical
from tunewright.measure.local import LocalMeasurer
from tunewright.ops import lookup
from tunewright.ops.base import Operand
from tunewright.ops.internal.conv_pair import PAIR, joined
from tunewright.ops.internal.reorder import REORDER, to_plain
from tunewright.ops.internal.row_counts import PLAIN_OP
from tunewright.plugins.single import open_device
from tunewright.search.base import Status
from tunewright.solvers.base import Problem, Solver, is_value, solvers
from tunewright.solvers.c.source import dot
from tunewright.solvers.host.reference import HostKernel
from tunewright.testing.kernelcheck import Case

MS, OV = "com.microsoft::", "org.openvinotoolkit::"
KINDS = ("random", "edge", "tame")
DEVICE = open_device("CPU")
SOLVERS = [s for s in solvers() if s.language == "c" and not s.tuned_only]
#: as large as their results are for the inputs of a network: never measured, see test_kernels_counted.py
SELECTING = [s for s in SOLVERS if s.ops and s.ops <= PLAIN_OP.keys()]
FAMILIES = [s for s in SOLVERS if s not in SELECTING]
OPS = sorted({op for s in FAMILIES for op in s.ops or ()})
#: they need an instruction for sums of four products of bytes
QUADS = ("opencl.matmul_bytes", "opencl.recurrent_bytes")

_NAMES = {"f": "float32", "i": "int64", "j": "int32", "u8": "uint8", "i8": "int8", "i16": "int16", "b": "bool"}


def pose(op: str, *operands: Any, n: int = 1, layouts: tuple[Layout, Layout] | None = None, **attrs: Any) -> Problem:
    """A problem from inputs like "f 2,3" (a ! behind the type: a constant) or arrays, which are part of the problem."""
    given: list[Operand | None] = []
    constant = []
    for operand in operands:
        if operand is None or isinstance(operand, np.ndarray):
            given.append(None if operand is None else Operand(TensorType.of(operand), operand))
            constant.append(operand is not None)
            continue
        name, _, dims = operand.partition(" ")
        shape = tuple(int(d) for d in dims.split(",") if d)
        given.append(Operand(TensorType(DType(_NAMES[name.rstrip("!")]), shape)))
        constant.append(name.endswith("!"))
    spec = lookup(op)
    assert spec is not None, op
    outputs = tuple(spec.infer(given, attrs, n))[:n]
    types = tuple(None if g is None else g.type for g in given)
    if layouts is not None:
        types = (_in(types[0], layouts[0]), *types[1:])
        outputs = (_in(outputs[0], layouts[1]),)
    values = tuple(
        (i, g.value) for i, g in enumerate(given) if g is not None and g.value is not None and is_value(op, i, g.value)
    )
    return Problem(op, types, outputs, attrs, (), 0, tuple(constant), values)


def _in(type: Any, layout: Layout) -> TensorType:
    return TensorType(type.dtype, type.shape, layout)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


_B = blocked(DEVICE.target.vector_bytes // 4)
_Q = ("f ", "u8 ")  # a scale and a zero point
EXTRA: dict[str, list[Problem]] = {
    op: made if isinstance(made, list) else [made]
    for op, made in {
        "Attention": pose("Attention", "f 2,3,20,32", "f 2,3,24,32", "f 2,3,24,32"),
        "CenterCropPad": pose("CenterCropPad", "f 6,7", ints(4, 9)),
        "Conv": [
            pose("Conv", "f 1,20,9,9", "f! 12,20,3,3", pads=(1, 1, 1, 1), layouts=(_B, _B)),
            pose("Conv", "f 1,19,9,9", "f! 19,1,3,3", "f! 19", group=19, pads=(1, 1, 1, 1), layouts=(_B, _B)),
            pose("Conv", "f 1,20,1,1", "f! 12,20,1,1", "f! 12", layouts=(_B, _B)),
            pose("Conv", "f 1,64,28,28", "f! 64,64,3,3", pads=(1, 1, 1, 1), layouts=(_B, _B)),
        ],
        "ConvTranspose": pose("ConvTranspose", "f 1,24,5,6", "f! 24,16,2,2", strides=(2, 2), layouts=(_B, _B)),
        "QLinearConv": [
            pose(
                "QLinearConv", f"u8 1,{c},9,9", "f! ", np.array(7, np.uint8), f"i8! {c},{c // group},3,3", f"f! {c}",
                np.array(0, np.int8), "f! ", "u8! ", f"j! {c}", group=group, pads=(1, 1, 1, 1), layouts=(_B, _B),
            ) for c, group in ((19, 19), (32, 1))
        ],
        "MatMul": [pose("MatMul", "f 1,300", "f! 300,64"), pose("MatMul", "f 1,300", "f 300,64")],
        "Gemm": pose("Gemm", "f 1,300", "f! 64,300", transB=1),
        "Range": pose("Range", *(np.array(v, np.float32) for v in (3, 60, 4))),
        "Scatter": pose("Scatter", "f 5,4", "i 2,3", "f 2,3"),
        "SimplifiedLayerNormalization": pose("SimplifiedLayerNormalization", "f 3,4,5", "f 5"),
        "TensorScatter": pose("TensorScatter", "f 3,2,9,4", "f 3,2,2,4", "i 3", mode="linear"),
        PAIR: pose(
            PAIR, "f 1,20,9,12", "f! 19,20,1,1", "f! 19", "f! 19,1,3,3", "f! 19", layouts=(_B, _B),
            **joined({}, {"group": 19, "pads": (1, 1, 1, 1)}, [Fused("Relu", (~0,))]),
        ),
        REORDER: [pose(REORDER, "f 1,20,5,6", layout=to, layouts=(Layout(), Layout.parse(to)))
                  for to in (str(_B), "nhwc")],
        MS + "BiasAdd": pose(MS + "BiasAdd", "f 2,4,8", "f 8", "f 2,4,8"),
        MS + "BiasGelu": pose(MS + "BiasGelu", "f 3,8", "f 8"),
        MS + "DequantizeLinear": pose(MS + "DequantizeLinear", "u8 3,4", *_Q),
        MS + "DynamicQuantizeLSTM": pose(
            MS + "DynamicQuantizeLSTM", "f 5,3,5", "i8! 1,5,28", "i8! 1,7,28", "f! 1,56", None, "f 1,3,7", "f 1,3,7",
            "f 1,21", "f! 1", "i8! 1", "f! 1", "i8! 1", n=3, direction="forward", hidden_size=7,
        ),
        MS + "DynamicQuantizeMatMul": pose(MS + "DynamicQuantizeMatMul", "f 5,33", "i8 33,6", "f ", "i8 ", "f 6"),
        MS + "EmbedLayerNormalization": pose(
            MS + "EmbedLayerNormalization", "j 2,5", "j 2,5", "f 11,8", "f 6,8", "f 2,8", "f 8", "f 8", "j 2,5", n=2
        ),
        MS + "ExpandDims": pose(MS + "ExpandDims", "f 3,4", np.array(1, np.int32)),
        MS + "FastGelu": pose(MS + "FastGelu", "f 3,8", "f 8"),
        MS + "FusedConv": pose(MS + "FusedConv", "f 1,4,6,7", "f! 5,4,3,3", "f! 5", pads=(1, 1, 1, 1)),
        MS + "FusedMatMul": pose(MS + "FusedMatMul", "f 5,7", "f 7,3", alpha=0.5),
        MS + "GatedAdd": pose(MS + "GatedAdd", "f 3,4", "f 3,4", "f 3,1"),
        MS + "GatherND": pose(MS + "GatherND", "f 5,4,3", "i 2,3,2"),
        MS + "Gelu": pose(MS + "Gelu", "f 3,8"),
        MS + "GridSample": pose(MS + "GridSample", "f 2,3,5,6", "f 2,4,7,2"),
        MS + "MatMulInteger16": pose(MS + "MatMulInteger16", "i16 5,33", "i16 33,6"),
        MS + "MatMulIntegerToFloat": pose(
            MS + "MatMulIntegerToFloat", "u8 5,33", "i8 33,6", "f ", "f ", "u8 ", "i8 ", "f 6"
        ),
        MS + "MultiHeadAttention": pose(MS + "MultiHeadAttention", "f 2,5,24", "f 2,7,24", "f 2,7,24", num_heads=3),
        MS + "Pad": pose(MS + "Pad", "f 3,4,5", ints(1, 0, 2, 0, 3, 0), "f 1"),
        MS + "QGemm": pose(MS + "QGemm", "u8 5,33", *_Q, "i8 33,6", "f 6", "i8 6", "j 6", *_Q, transA=0, transB=0),
        MS + "QLinearAdd": pose(MS + "QLinearAdd", "u8 3,5", *_Q, "u8 5", *_Q, *_Q),
        MS + "QLinearAveragePool": pose(MS + "QLinearAveragePool", "u8 2,5,7,9", *_Q, *_Q, kernel_shape=(2, 2)),
        MS + "QLinearConcat": pose(MS + "QLinearConcat", *_Q, "u8 3,5", *_Q, "u8 2,5", *_Q, axis=0),
        MS + "QLinearConv": pose(
            MS + "QLinearConv", "u8 1,3,7,6", *_Q, "i8 4,3,3,3", "f 4", "i8 4", *_Q, "j 4", pads=(1, 1, 1, 1)
        ),
        MS + "QLinearGlobalAveragePool": pose(MS + "QLinearGlobalAveragePool", "u8 2,5,7,9", *_Q, *_Q),
        MS + "QLinearLeakyRelu": pose(MS + "QLinearLeakyRelu", "u8 3,5", *_Q, *_Q),
        MS + "QLinearMul": pose(MS + "QLinearMul", "u8 3,5", *_Q, "u8 5", *_Q, *_Q),
        MS + "QLinearSigmoid": pose(MS + "QLinearSigmoid", "u8 3,5", *_Q, *_Q),
        MS + "QLinearSoftmax": pose(MS + "QLinearSoftmax", "u8 3,33", *_Q, *_Q, axis=-1, opset=13),
        MS + "QLinearWhere": pose(MS + "QLinearWhere", "b 3,1", "u8 3,5", *_Q, "u8 3,5", *_Q, *_Q),
        MS + "QuantizeLinear": pose(MS + "QuantizeLinear", "f 3,4", *_Q),
        MS + "QuickGelu": pose(MS + "QuickGelu", "f 3,8"),
        MS + "RotaryEmbedding": [
            pose(MS + "RotaryEmbedding", "f 2,3,5,8", "i 2,5", "f 9,4", "f 9,4"),
            pose(MS + "RotaryEmbedding", "f 2,5,24", "i 1", "f 9,4", "f 9,4"),
        ],
        MS + "MatMulNBits": pose(
            MS + "MatMulNBits", "f 3,64", "u8! 24,2,16", "f! 24,2", K=64, N=24, bits=4, block_size=32
        ),
        MS + "SimplifiedLayerNormalization": pose(MS + "SimplifiedLayerNormalization", "f 3,4,5", "f 5"),
        MS + "SkipLayerNormalization": pose(MS + "SkipLayerNormalization", "f 3,4,8", "f 3,4,8", "f 8", "f 8", "f 8"),
        MS + "SkipSimplifiedLayerNormalization": pose(
            MS + "SkipSimplifiedLayerNormalization", "f 3,4,8", "f 3,4,8", "f 8", "f 8"
        ),
        MS + "TransposeMatMul": pose(MS + "TransposeMatMul", "f 7,5", "f 7,3", transA=1),
        MS + "Trilu": pose(MS + "Trilu", "f 4,5", np.array(1)),
        OV + "Copy": pose(OV + "Copy", "f 3,5"),
        OV + "Crop": pose(OV + "Crop", "f 2,8,6,5", axis=(2, 3), dim=(3, 3), offset=(1, 2)),
        OV + "ReorgYolo": pose(OV + "ReorgYolo", "f 2,8,6,4", stride=2),
        OV + "ShuffleChannels": pose(OV + "ShuffleChannels", "f 2,12,3,5", axis=1, group=3),
        OV + "Tile": pose(OV + "Tile", "f 2,8,6", axis=1, tiles=3),
    }.items()
}  # fmt: skip


def problems(op: str) -> Iterator[Problem]:
    """Problems of an operation that a kernel of the device takes, as constants and as data where it has both."""
    yield from EXTRA.get(op, [])
    spec = lookup(op)
    assert spec is not None
    for sample in spec.samples(np.random.default_rng(0)) if spec.samples is not None else ():
        for constant in (frozenset(range(1, len(sample.inputs))), frozenset[int]()):
            yield Case(op, sample.inputs, sample.attrs, sample.outputs, constant).problem()


def takers(problem: Problem) -> list[Solver]:
    asked = (s for s in FAMILIES if problem.op in (s.ops or ()))
    return [s for s in asked if s.why_not(problem, DEVICE.target) is None]


def check_inputs(problem: Problem, seed: int) -> None:
    """They are of the right types, the same for the same seed, and the reference takes random and tame ones."""
    for kind in KINDS:
        made, again = (random_inputs.make(problem, np.random.default_rng(seed), kind) for _ in range(2))
        for i, (array, twin, type) in enumerate(zip(made, again, problem.inputs, strict=True)):
            if type is None:
                assert array is None
                continue
            assert array is not None and twin is not None and isinstance(type, TensorType)
            assert (array.shape, array.dtype) == (type.dims, type.dtype.numpy), (problem.key(), kind, i)
            assert array.tobytes() == twin.tobytes()
            value = problem.value(i)
            assert value is None or np.array_equal(array, value)
        results = HostKernel(problem).run(HostQueue(), physical(problem, made), [None] * len(problem.outputs))
        for result, type in zip(results, problem.outputs, strict=True):
            plain = to_plain(result, type)
            if kind != "edge" and plain.dtype.kind == "f":
                assert np.isfinite(plain).all(), (problem.key(), kind)


def check_defaults(local: LocalMeasurer, problem: Problem, only: Sequence[Solver]) -> None:
    assert local.pose(problem, 1, "warm") is None, problem.key()
    assert len(local.judge.cases) == 2
    for solver in only:
        found = local.attempt((solver.id, solver.default(problem, DEVICE.target)))
        assert found.status is Status.OK, f"{solver.id} for {problem.key()}: {found.why}"


@pytest.mark.parametrize("op", OPS)
def test_inputs_can_be_made_for_every_operation_of_the_kernels(op: str) -> None:
    taken = 0
    for seed, problem in enumerate(problems(op)):
        if takers(problem):
            taken += 1
            check_inputs(problem, seed)
    assert taken


@pytest.mark.parametrize("family", [s.id for s in FAMILIES])
def test_the_default_of_every_family_passes(family: str) -> None:
    solver = next(s for s in FAMILIES if s.id == family)
    if family in QUADS and not dot.has_dot4(DEVICE.target):
        pytest.skip("this processor has no such instruction: pairs serve it")
    with LocalMeasurer(DEVICE) as local:
        for op in sorted(solver.ops or ()):
            problem = next((p for p in problems(op) if solver in takers(p)), None)
            if problem is not None:
                check_defaults(local, problem, [solver])
                return
    pytest.fail(f"no problem for {family}")


@pytest.mark.parametrize("solver", SELECTING, ids=lambda s: s.id)
def test_rows_that_data_selects_are_not_measured(solver: Solver) -> None:
    (op,) = solver.ops or ()
    found = [problem for problem in problems(op) if solver.why_not(problem, DEVICE.target) is None]
    assert found
    with LocalMeasurer(DEVICE) as local:
        for problem in found:
            assert "depends on input values" in str(local.pose(problem, 1, "warm"))


@pytest.mark.soak
@pytest.mark.parametrize("op", OPS)
def test_the_defaults_of_every_problem_pass(op: str) -> None:
    with LocalMeasurer(DEVICE) as local:
        for problem in problems(op):
            if takers(problem):
                check_defaults(local, problem, takers(problem))
