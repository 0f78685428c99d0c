"""The reference of an op as a solver: slow, always right, takes any shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...devices.base import Device, Queue, Target
from ...errors import ExecutionError, TunewrightError
from ...ops import lookup
from ...ops.base import OpSpec
from ..base import Config, Kernel, Problem, Solver


class HostReference(Solver):
    """Runs on the host for every device."""

    id = "host.reference"
    rank = 1000
    host = True

    def why_not(self, problem: Problem, target: Target) -> str | None:
        if target.device == "null":
            return "the Null device runs nothing"
        for op in [problem.op, *(step.op for step in problem.epilogue)]:
            if lookup(op) is None:
                return f"no definition of {op}"
        return None

    def compile(self, problem: Problem, config: Config, device: Device) -> Kernel:
        return HostKernel(problem)


class HostKernel(Kernel):
    """The reference, then each step of the epilogue."""

    def __init__(self, problem: Problem) -> None:
        self.name = "host.reference"
        self.problem = problem
        self.spec = _spec(problem.op)
        self.steps = [(_spec(step.op), step) for step in problem.epilogue]
        self.n = len(problem.outputs)

    def run(self, queue: Queue, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
        try:
            with np.errstate(all="ignore"):
                results = list(self.spec.reference(inputs, self.problem.attrs, self.n))[: self.n]
                partial = results[:1]
                for spec, step in self.steps:
                    args = [inputs[i] if i >= 0 else partial[~i] for i in step.args]
                    partial.append(spec.reference(args, step.attrs, 1)[0])
                results[:1] = partial[-1:]
        except TunewrightError:
            raise
        except Exception as error:  # references are numpy code: any of its exceptions means that the inputs do not fit
            raise ExecutionError(str(error) or repr(error)) from error
        for i, out in enumerate(outputs):
            if out is not None:
                result = results[i]
                if not isinstance(result, np.ndarray) or result.shape != out.shape:
                    raise ExecutionError(f"made shape {list(np.shape(result))} instead of {list(out.shape)}")
                if result is not out:
                    np.copyto(out, result, casting="no")
                results[i] = out
        return results


def _spec(op: str) -> OpSpec:
    spec = lookup(op)
    assert spec is not None, op
    return spec


SOLVERS = (HostReference(),)
