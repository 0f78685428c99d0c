"""Softmax, normalisations and reductions of CUDA devices, in Triton's interpreter, against their references."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance.cuda_cases import Made, solver
from tunewright.ir.graph import Fused
from tunewright.ir.types import NHWC, PLAIN
from tunewright.measure.judge import physical
from tunewright.solvers.base import solvers
from tunewright.solvers.host.reference import HostKernel
from tunewright.testing.kernelcheck import Case, check, run_one

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from tunewright.devices.base import Target
from tunewright.devices.cuda.device import CudaDevice

# The interpreter computes masked lanes too, with numpy, which warns of what becomes of them.
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.filterwarnings("ignore:Mean of empty slice")
]  # fmt: skip
RNG = Made().rng
F16, BF16 = np.float16, ml_dtypes.bfloat16
MS = "com.microsoft::"
H200 = Target("gpu", "H200", "sm_90", 132, (), "cuda")
Array = np.ndarray[Any, Any]


def normal(*shape: int, dtype: Any = np.float32, scale: float = 1) -> Array:
    return (RNG.standard_normal(shape) * scale).astype(dtype)


def case(op: str, *inputs: Array | None, outputs: int = 1, layout: Any = PLAIN, steps: Any = (), operands: int = 0,
         **attrs: Any) -> Case:  # fmt: skip
    return Case(op, inputs, attrs, outputs, layouts=(layout, layout), epilogue=steps, operands=operands)


def failure(given: Case, name: str, config: dict[str, int], device: CudaDevice) -> str:
    """What is wrong with a solver in one config: of a large device, or smaller than it would pay anywhere."""
    problem = given.problem()
    mine = solver(name)
    assert mine.why_not(problem, device.target) is None
    want = HostKernel(problem).run(device.queue(), physical(problem, given.inputs), [None] * given.outputs)
    return run_one(given, problem, mine, config, device, want)


# -- softmax ----------------------------------------------------------------------------------------------------------
SOFTMAX = {
    "rows": case("Softmax", normal(3, 3, 49, scale=3), axis=-1),
    "columns": case("Softmax", normal(3, 13, 17, scale=3), axis=1),
    "first axis": case("LogSoftmax", normal(6, 3, 20), axis=0),
    "one element": case("Softmax", normal(1), axis=0),
    "a vector": case("LogSoftmax", normal(7), axis=0),
    "no rows": case("Softmax", normal(0, 4), axis=1),
    "empty rows": case("LogSoftmax", normal(4, 0), axis=1),
    "half": case("Softmax", normal(19, 33, dtype=F16), axis=-1),
    "half, columns": case("LogSoftmax", normal(19, 33, dtype=F16), axis=0),
    "bfloat16": case("Softmax", normal(19, 33, dtype=BF16), axis=-1),
    "double": case("LogSoftmax", normal(9, 33, dtype=np.float64), axis=-1),
    "channels last": case("Softmax", normal(2, 5, 3, 4), layout=NHWC, axis=1),
    "epilogue": case(
        "Softmax", normal(2, 5, 33, dtype=F16), normal(33, dtype=F16), normal(2, 5, 33, dtype=F16), axis=-1,
        steps=(Fused("Mul", (~0, 1)), Fused("Add", (~1, 2))), operands=2,
    ),
    "small exponentials": case(
        "Softmax", np.concatenate([np.linspace(-95, 0, 501), [-1e4, -np.inf]]).astype(np.float32)[None], axis=1
    ),
}  # fmt: skip


def odd_rows(size: int) -> Array:
    x = normal(8, size, scale=3)
    x[0], x[1], x[4], x[7] = 1e30, -np.inf, np.nan, -3e38
    x[2, 3], x[3, -1], x[3, 20] = np.inf, np.nan, np.inf
    x[5, ::2] = -np.inf
    x[6] *= 1e4
    return x


@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax(name: str, device: CudaDevice) -> None:
    assert check(SOFTMAX[name], only="triton.softmax", configs=1, device=device) == []


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize(
    "config",
    [{"rows": 4, "block": 64, "split": 1}, {"rows": 8, "block": 16, "split": 1}, {"rows": 8, "block": 16, "split": 2}],
    ids=["at once", "in a loop", "in parts"],
)
def test_softmax_of_odd_numbers(op: str, config: dict[str, int], device: CudaDevice) -> None:
    """Rows of infinities and NaN, and masks of minus infinity, in the three ways in which a row is read."""
    x, config = odd_rows(43), {**config, "warps": 1}
    assert failure(case(op, x, axis=1), "triton.softmax", config, device) == ""
    across = {**config, "rows": 8}
    assert failure(case(op, np.ascontiguousarray(x.T), axis=0), "triton.softmax", across, device) == ""


# -- normalisations ---------------------------------------------------------------------------------------------------
def odd_norm() -> Array:
    x = normal(6, 40)
    x[0, 3], x[1, 5], x[2, 7] = np.nan, np.inf, -np.inf
    x[3] = 7.0
    x[4] *= 1e18
    return x


def layer(*shape: int, axis: int = -1, dtype: Any = np.float32, outputs: int = 3, **attrs: Any) -> Case:
    scale, bias = (normal(*shape[axis:], dtype=dtype) for _ in range(2))
    return case("LayerNormalization", normal(*shape, dtype=dtype), scale, bias, outputs=outputs, axis=axis, **attrs)


def channels(op: str, *shape: int, dtype: Any = np.float32, **attrs: Any) -> Case:
    x, scale, bias = (normal(*s, dtype=dtype) for s in (shape, shape[1:2], shape[1:2]))
    return case(op, x, scale, bias, **attrs)


NORMS = {
    "layer": layer(3, 5, 37),
    "layer, two axes": layer(3, 5, 7, axis=1, epsilon=1e-2),
    "layer, everything": layer(3, 5, 7, axis=0),
    "layer, half": layer(3, 5, 37, dtype=F16),
    "layer, bfloat16": layer(3, 5, 37, dtype=BF16, outputs=1),
    "layer, double": layer(3, 37, dtype=np.float64, outputs=1),
    "layer, one element": layer(1, 1),
    "layer, no rows": layer(0, 4),
    "layer, no bias": case("LayerNormalization", normal(3, 21), normal(21)),
    "layer, stash": case("LayerNormalization", normal(3, 8, dtype=F16), normal(8, dtype=F16), outputs=3, stash_type=10),
    "layer, broadcast": case("LayerNormalization", normal(3, 4, 5), normal(4, 1), normal(3, 1, 1), axis=1),
    "layer, a scalar": case("LayerNormalization", normal(3, 4, 5), np.float32(2).reshape(()), normal(1), axis=1),
    "layer, large mean": case("LayerNormalization", normal(4, 1000) + 30, normal(1000), normal(1000), outputs=3),
    "layer, odd": case("LayerNormalization", odd_norm(), normal(40), normal(40), outputs=3),
    "layer, epilogue": case(
        "LayerNormalization", normal(6, 33, dtype=F16), normal(33, dtype=F16), normal(33, dtype=F16),
        normal(6, 33, dtype=F16), steps=(Fused("Add", (~0, 3)), Fused("Gelu", (~1,))), operands=1,
    ),
    "rms": case("RMSNormalization", normal(3, 4, 65, dtype=F16), normal(65, dtype=np.float32)),
    "rms, odd": case("RMSNormalization", odd_norm(), normal(40)),
    "simplified": case("SimplifiedLayerNormalization", normal(7, 33), normal(33), outputs=2, axis=-1),
    "skip": case(MS + "SkipLayerNormalization", normal(2, 5, 48), normal(5, 48), normal(48), normal(48), normal(48),
                 outputs=4, epsilon=1e-5),
    "skip, half": case(MS + "SkipLayerNormalization", *(normal(*s, dtype=F16) for s in ((2, 5, 48), (2, 5, 48), (48,))),
                       epsilon=1e-5),
    "skip, simplified": case(MS + "SkipSimplifiedLayerNormalization", normal(2, 5, 48), normal(1, 5, 48), normal(48),
                             normal(48), outputs=4, epsilon=1e-5),
    "instance": channels("InstanceNormalization", 2, 6, 7, 9),
    "instance, last": channels("InstanceNormalization", 2, 6, 7, 9, layout=NHWC, dtype=F16),
    "instance, a pixel": channels("InstanceNormalization", 2, 3, 1, 1),
    "group": channels("GroupNormalization", 2, 6, 7, 9, num_groups=2, epsilon=1e-2),
    "group, last": channels("GroupNormalization", 2, 6, 5, 7, num_groups=2, layout=NHWC, dtype=F16),
    "group, no pixels": channels("GroupNormalization", 3, 6, num_groups=3),
    "group, each": channels("GroupNormalization", 3, 6, 5, num_groups=6),
    "group, nothing": channels("GroupNormalization", 0, 6, 5, num_groups=2),
    "group, SiLU": case(
        "GroupNormalization", normal(1, 8, 3, 3), normal(8), normal(8), layout=NHWC, num_groups=2,
        steps=(Fused("Sigmoid", (~0,)), Fused("Mul", (~0, ~1))),
    ),
    "mean-variance": case("MeanVarianceNormalization", normal(3, 4, 5, 6)),
    "mean-variance, last": case("MeanVarianceNormalization", normal(3, 4, 5, 6), layout=NHWC),
    "mean-variance, axes": case("MeanVarianceNormalization", normal(3, 4, 5, 6), axes=(1, 3)),
    "mean-variance, columns": case("MeanVarianceNormalization", normal(2, 3, 30), axes=(-2, 0)),
    "l1": case("LpNormalization", np.concatenate([normal(3, 5, 7), np.zeros((1, 5, 7), np.float32)]), p=1, axis=1),
    "l2": case("LpNormalization", np.concatenate([normal(3, 5, 7), np.zeros((1, 5, 7), np.float32)]), p=2, axis=-1),
    "l2, odd": case("LpNormalization", odd_norm()),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_norm(name: str, device: CudaDevice) -> None:
    assert check(NORMS[name], only="triton.norm", configs=0, device=device) == []


PARTED = ("layer", "layer, two axes", "layer, large mean", "layer, odd", "rms, odd", "skip", "skip, simplified",
          "group", "instance", "mean-variance", "l1", "l2")  # fmt: skip


@pytest.mark.parametrize("split", [1, 4])
@pytest.mark.parametrize("name", PARTED)
def test_norm_in_a_loop_and_in_parts(name: str, split: int, device: CudaDevice) -> None:
    """Rows longer than a tile; in parts of which the last ones may be short, or empty."""
    block = 256 if "large" in name else 16
    config = {"rows": 8, "block": block, "warps": 1, "split": split}
    assert failure(NORMS[name], "triton.norm", config, device) == ""


# -- reductions -------------------------------------------------------------------------------------------------------
OPS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare",
       "ReduceLogSum", "ReduceLogSumExp")  # fmt: skip
WHOLE = ("ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceSumSquare")


def values(op: str, *shape: int, dtype: Any = np.float32) -> Array:
    if op == "ReduceProd":
        return (RNG.uniform(0.9, 1.1, shape) * np.where(RNG.random(shape) < 0.5, -1, 1)).astype(dtype)
    return (RNG.uniform(0.5, 2, shape) if op == "ReduceLogSum" else RNG.standard_normal(shape)).astype(dtype)


def reduction(op: str, x: Array, axes: tuple[int, ...] | None, layout: Any = PLAIN, more: tuple[Array, ...] = (),
              steps: Any = (), **attrs: int) -> Case:  # fmt: skip
    given = [x, None if axes is None else np.array(axes, np.int64), *more]
    return Case(op, given, attrs, constant=frozenset({1}), layouts=(layout, layout), epilogue=steps, operands=len(more))


def reduces(device: CudaDevice, *given: Any, configs: int = 0, **attrs: Any) -> bool:
    failures = check(reduction(*given, **attrs), only="triton.reduce", configs=configs, device=device)
    assert not failures, failures
    return True


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((3, 70), (-1,)), ((2, 3, 5, 7), (2, 3)), ((5, 9, 11), (1,)), ((4, 3, 5, 6), (0, 2)), ((3, 4, 2, 5), (1, 3)),
     ((2, 3, 2, 3, 2, 3), (0, 2, 4)), ((2, 3, 2, 3, 2, 3, 2), (-1, 0, 2, 4)), ((7, 1, 30), (0, 1)), ((129,), None)],
)  # fmt: skip
@pytest.mark.parametrize("keepdims", [0, 1])
def test_patterns(shape: tuple[int, ...], axes: tuple[int, ...] | None, keepdims: int, device: CudaDevice) -> None:
    assert reduces(device, "ReduceSum", values("ReduceSum", *shape), axes, keepdims=keepdims)


REDUCTIONS = {
    f"{op} {name}": reduction(op, values(op, *shape, dtype=dtype), axes, layout)
    for op in OPS
    for name, shape, dtype, axes, layout in (
        ("of rows", (3, 5, 17), np.float32, (2,), PLAIN),
        ("of columns", (3, 13, 5), np.float32, (1,), PLAIN),
        ("of doubles", (3, 20), np.float64, (1,), PLAIN),
        ("of halves", (3, 20), F16, (0,), PLAIN),
        ("of pixels", (2, 5, 3, 4), BF16, (2, 3), NHWC),
    )
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_operations(name: str, device: CudaDevice) -> None:
    assert check(REDUCTIONS[name], only="triton.reduce", configs=0, device=device) == []


@pytest.mark.parametrize("op", OPS)
def test_of_nothing_and_everything(op: str, device: CudaDevice) -> None:
    assert reduces(device, op, np.zeros((2, 0, 3), np.float32), (1,))
    assert reduces(device, op, np.zeros((0, 4), np.float32), (1,))
    assert reduces(device, op, values(op, 3, 4), (), noop_with_empty_axes=1)
    assert reduces(device, op, values(op, 3, 4), ())
    assert reduces(device, op, np.array(0.75, np.float32), None)
    assert reduces(device, op, np.ones((1, 1), np.float32), (0,), keepdims=0)


@pytest.mark.parametrize("op", OPS)
def test_infinities_and_nan(op: str, device: CudaDevice) -> None:
    """Of rows in a loop, and of columns in parts that the last program joins."""
    x = values(op, 8, 35)
    x[0, 34], x[1, 3], x[2, 32], x[2, 5] = np.nan, np.inf, -np.inf, np.inf
    x[3, 8], x[4, 30], x[4, 31], x[5] = -np.nan, np.inf, np.nan, -np.inf
    for split, axes, array in ((1, (1,), x), (2, (0,), np.ascontiguousarray(x.T))):
        config = {"rows": 8, "block": 16, "warps": 1, "split": split}
        assert failure(reduction(op, array, axes), "triton.reduce", config, device) == ""


@pytest.mark.parametrize("op", WHOLE)
def test_integers_wrap(op: str, device: CudaDevice) -> None:
    for dtype, axis in ((np.int8, 0), (np.uint8, 1), (np.int32, 0), (np.int64, 1)):
        x = RNG.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, (4, 9), dtype=dtype)
        assert reduces(device, op, x, (axis,))
    assert reduces(device, op, np.zeros((3, 0), np.int32), (1,))
    if op in ("ReduceMax", "ReduceMin"):
        assert reduces(device, op, normal(5, 9) > 0, (1,))


#: few long rows, which a large device cuts into parts
LONG = {
    "Softmax": case("Softmax", normal(2, 9001, dtype=F16, scale=2), axis=1),
    "LogSoftmax": case("LogSoftmax", normal(5000, 3, scale=2), axis=0),
    "LayerNormalization": case(
        "LayerNormalization", normal(1, 9000, dtype=F16), normal(9000, dtype=F16), normal(9000, dtype=F16), outputs=3
    ),
    "ReduceMean": reduction("ReduceMean", normal(1, 30_001) + np.float32(0.5), (1,)),
    "ReduceMax": reduction("ReduceMax", normal(2, 9001, dtype=F16), (1,)),
    "ReduceLogSumExp": reduction("ReduceLogSumExp", normal(4000, 3), (0,)),
}


@pytest.mark.parametrize("op", LONG)
def test_few_long_rows(op: str, device: CudaDevice) -> None:
    problem = LONG[op].problem()
    name = "triton.softmax" if "Softmax" in op else "triton.reduce" if op in OPS else "triton.norm"
    config = solver(name).default(problem, H200)
    assert config["split"] > 1 and config in solver(name).space(problem, H200)
    assert failure(LONG[op], name, config, device) == ""
    assert failure(LONG[op], name, {**config, "split": 1}, device) == ""


@pytest.mark.parametrize("split", [1, 2])
def test_epilogue_of_a_reduction(split: int, device: CudaDevice) -> None:
    steps = (Fused("Relu", (~0,)), Fused("Add", (~1, 2)), Fused("Mul", (~2, 3)))
    given = reduction("ReduceMean", normal(2, 5, 7, 6), (2, 3), steps=steps, more=(normal(2, 5, 1, 1), normal(5, 1, 1)))
    config = {"rows": 16, "block": 16, "warps": 1, "split": split}
    assert failure(given, "triton.reduce", config, device) == ""


# -- what they refuse, and where they come first ----------------------------------------------------------------------
def refusal(name: str, given: Case) -> str:
    reason = solver(name).why_not(given.problem(), H200)
    assert reason is not None
    return str(reason)


def test_refusals() -> None:
    whole = np.ones((3, 4), np.int32)
    assert refusal("triton.reduce", reduction("ReduceMean", whole, (1,))) == "ReduceMean of int32"
    assert refusal("triton.reduce", reduction("ReduceSum", normal(2, 3, 4, 4), (2, 3), layout=NHWC, keepdims=0))
    assert refusal("triton.norm", case("LayerNormalization", normal(3, 0), normal(0))) == "normalises nothing"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (case("Softmax", normal(3, 4)), "triton.softmax"),
        (NORMS["layer"], "triton.norm"),
        (reduction("ReduceMean", normal(3, 4), (1,)), "triton.reduce"),
    ],
)
def test_ours_is_the_default(given: Case, name: str) -> None:
    problem = given.problem()
    first = next(s for s in solvers() if s.language == "cuda" and s.why_not(problem, H200) is None)
    assert first.id == name


ALL = [*((c, "triton.softmax") for c in SOFTMAX.values()), *((c, "triton.norm") for c in NORMS.values())]


@pytest.mark.soak
@pytest.mark.parametrize("number", range(len(ALL)))
def test_many_configs(number: int, device: CudaDevice) -> None:
    given, name = ALL[number]
    assert check(given, only=name, configs=20, device=device) == []


@pytest.mark.soak
@pytest.mark.parametrize("op", OPS)
def test_many_configs_of_reductions(op: str, device: CudaDevice) -> None:
    for shape, axes in (((1, 600), (1,)), ((200, 3), (0,)), ((4, 30, 5), (1,)), ((2, 6, 3, 5), (1, 3))):
        assert reduces(device, op, values(op, *shape), axes, configs=4 if op == "ReduceProd" else 20)
