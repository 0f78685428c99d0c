"""Checks kernels of solvers against the reference: `check` runs every solver that accepts a case, in several configs.

`measure.judge` decides whether a kernel is right, in tests as well as for measured candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..devices.base import Device
from ..ir.graph import Fused
from ..ir.types import PLAIN, Layout, TensorType, Type
from ..measure.judge import examine, physical
from ..ops import lookup
from ..ops.base import Operand
from ..plugins.single import open_device
from ..solvers.base import Array, Config, Problem, Solver, is_value, solvers
from ..solvers.host.reference import HostKernel


@dataclass(frozen=True)
class Case:
    """An operation on given arrays. ``constant``: indices of weight inputs; shape operands are always constant."""

    op: str
    inputs: Sequence[Array | None]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1
    constant: frozenset[int] = frozenset()
    epilogue: tuple[Fused, ...] = ()
    operands: int = 0
    #: layouts of the first input, and of the output and its same-shaped operands
    layouts: tuple[Layout, Layout] = (PLAIN, PLAIN)
    #: other inputs that use the output's layout
    along: frozenset[int] = frozenset()

    def problem(self) -> Problem:
        """Return the problem that lowering would pose. The reference's results give the output types."""
        values = tuple(
            (i, a)
            for i, a in enumerate(self.inputs)
            if a is not None
            and (i in self.constant or a.dtype.kind in "iub")
            and is_value(self.op, i, a)
            and i in (self.constant | _shape_operands(self))
        )
        constant = tuple(
            a is not None and (i in self.constant or any(i == k for k, _ in values)) for i, a in enumerate(self.inputs)
        )
        types: list[Type | None] = [None if a is None else TensorType.of(a) for a in self.inputs]
        plain = Problem(
            self.op, tuple(types), (None,) * self.outputs, self.attrs, self.epilogue, self.operands, constant, values
        )
        made = HostKernel(plain).run(open_device("CPU.HOST").queue(), self.inputs, [None] * self.outputs)
        outs = [TensorType.of(a) for a in made]
        first, rest = self.layouts
        for i, type in enumerate(types):
            if isinstance(type, TensorType):
                follows = i in self.along or (i >= len(types) - self.operands and type.shape == outs[0].shape)
                types[i] = _with(type, first if i == 0 else rest if follows else PLAIN)
        return Problem(
            self.op, tuple(types), tuple(_with(t, rest) for t in outs), self.attrs, self.epilogue, self.operands,
            constant, values,
        )  # fmt: skip


def _with(type: TensorType, layout: Layout) -> TensorType:
    return TensorType(type.dtype, type.shape, layout)


def _shape_operands(case: Case) -> frozenset[int]:
    """Return the integer inputs whose value is needed to infer the shape of the result."""
    spec = lookup(case.op)
    assert spec is not None, case.op
    open_ = [None if a is None else Operand(TensorType.of(a)) for a in case.inputs[: len(case.inputs) - case.operands]]
    try:
        made = spec.infer(open_, case.attrs, case.outputs)
    except ValueError:
        made = [None]
    if all(isinstance(t, TensorType) and t.is_static for t in made):
        return frozenset()
    return frozenset(i for i, a in enumerate(case.inputs) if a is not None and a.dtype.kind in "iub" and i > 0)


def check(
    case: Case, only: str | None = None, configs: int = 2, device: Device | None = None, specialised: bool = True
) -> list[str]:
    """Return one text for each solver and config that fails. An empty list means that all of them agree.

    ``only``: a prefix of the ids of solvers to check; the case fails when none of them accepts it.
    ``specialised=False`` leaves out solvers that compile anew for every shape, because they dominate the time of a test
    of many shapes.
    """
    device = device or open_device("CPU")
    problem = case.problem()
    want = HostKernel(problem).run(device.queue(), _physical(case, problem), [None] * case.outputs)
    failures, tried, refusals = [], 0, []
    for solver in solvers():
        if solver.host or solver.language not in (None, device.target.language):
            continue
        if (only is not None and not solver.id.startswith(only)) or (not specialised and solver.id.endswith(".shape")):
            continue
        reason = solver.why_not(problem, device.target)
        if reason is not None:
            refusals.append(f"{solver.id}: {reason}")
            continue
        for config in candidates(solver, problem, device, configs):
            tried += 1
            failure = run_one(case, problem, solver, config, device, want)
            if failure:
                failures.append(f"{solver.id} {dict(config)} for {problem.key()}: {failure}")
    if not tried:
        failures.append(f"no solver accepts {problem.key()}: {'; '.join(refusals)}")
    return failures


def candidates(solver: Solver, problem: Problem, device: Device, count: int) -> list[Config]:
    """Return the default config and some random others of the space."""
    default = solver.default(problem, device.target)
    space = solver.space(problem, device.target)
    if default not in space:
        raise AssertionError(f"{solver.id}: the default {dict(default)} is not in its space for {problem.key()}")
    found: list[Config] = [default]
    rng = np.random.default_rng(0)
    for _ in range(4 * count):
        config = space.sample(rng)
        if config is not None and len(found) <= count and all(dict(config) != dict(other) for other in found):
            found.append(config)
    return found


def run_one(case: Case, problem: Problem, solver: Solver, config: Config, device: Device, want: Sequence[Any]) -> str:
    """Run one kernel. Returns what is wrong, or an empty text. ``want``: the right results (`judge.examine`)."""
    kernel = solver.compile(problem, config, device)
    return examine(kernel, problem, device, device.queue(), _physical(case, problem), want).wrong


def _physical(case: Case, problem: Problem) -> list[Array | None]:
    return physical(problem, case.inputs)
