"""Large problems made of few pictures or rows: what the reference makes of them is what it makes of the large one."""

from __future__ import annotations

import numpy as np
import pytest

from tunewright.devices.host import HostDevice, HostQueue
from tunewright.ir.graph import Fused
from tunewright.ir.types import NHWC, DType, TensorType
from tunewright.measure import repeated_inputs as module
from tunewright.measure.judge import Judge
from tunewright.measure.repeated_inputs import PICTURES, ROWS, repeat
from tunewright.solvers.base import Problem
from tunewright.solvers.host.reference import HostKernel

F = DType.FLOAT16


def tensor(*dims: int, layout: object = None) -> TensorType:
    return TensorType(F, dims) if layout is None else TensorType(F, dims, NHWC)


def conv(images: int, **attrs: object) -> Problem:
    x, out = tensor(images, 6, 5, 4, layout=NHWC), tensor(images, 8, 5, 4, layout=NHWC)
    steps = (Fused("Add", (~0, 3)), Fused("Mul", (~1, 4)))
    types = (x, tensor(8, 6, 1, 1), tensor(8), out, tensor(8, 1, 1))
    return Problem("Conv", types, (out,), attrs, steps, 2, (False, True, True, False, True))


def product(*rows: int) -> Problem:
    out = tensor(*rows, 7)
    return Problem("MatMul", (tensor(*rows, 9), tensor(9, 7), out), (out,), {}, (Fused("Add", (~0, 2)),), 1,
                   (False, True, False))  # fmt: skip


def norm(rows: int, **attrs: object) -> Problem:
    x = tensor(2, rows, 8)
    return Problem("LayerNormalization", (x, tensor(8), tensor(8)), (x,), attrs, (), 0, (False, True, True))


SPREAD = Problem("Add", (tensor(700, 5), tensor(5)), (tensor(700, 5),), {}, (), 0, (False, False))
PROBLEMS = {
    "pictures": (conv(12), PICTURES),
    "rows": (product(700), ROWS),
    "rows of one matrix": (product(1, 700), ROWS),
    "rows of several": (product(2, 700), ROWS),
    "few rows of several": (product(26, 40), 13),
    "norm": (norm(700), ROWS),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_results_are_those_of_the_large_problem(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE", 1)
    problem, few = PROBLEMS[name]
    found = repeat(problem)
    assert found is not None and found.number >= 2 * few
    case = Judge(problem, HostDevice("CPU.HOST"), 3).cases[0]
    assert [a.shape for a in case.inputs if a is not None] == [
        t.physical for t in problem.inputs if isinstance(t, TensorType)
    ]
    want = HostKernel(problem).run(HostQueue(), case.inputs, [None] * len(problem.outputs))
    for mine, other in zip(case.want, want, strict=True):
        np.testing.assert_array_equal(mine, other)
    first = case.inputs[0]
    assert first is not None
    axis = found.inputs[0]
    assert axis is not None
    some = np.moveaxis(first, axis, 0)
    assert np.array_equal(some[0], some[few]) and not np.array_equal(some[0], some[1])


@pytest.mark.parametrize(
    "problem", [conv(9), product(600), norm(700, axis=1), SPREAD, Problem("Relu", (tensor(4),), (tensor(4),), {})]
)
def test_what_stays_whole(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few already; rows that are normalised together; an operand of another rank; nothing to repeat."""
    monkeypatch.setattr(module, "LARGE", 1)
    assert repeat(problem) is None


def test_small_ones_stay_whole() -> None:
    assert repeat(conv(64)) is None


def test_a_wrong_picture_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE", 1)
    judge = Judge(conv(12), HostDevice("CPU.HOST"), 3)
    made = judge.cases[0].want[0].copy()
    assert judge.compare(0, made) == ""
    made[11, 0, 0, 0] = made[10, 0, 0, 0] * 3 + 1
    assert "against" in judge.compare(0, made)
