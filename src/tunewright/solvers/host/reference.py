"""The reference of an operation as a solver: slow, correct, and for any shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.devices.base import Device, Queue, Target
from tunewright.errors import ExecutionError, TunewrightError
from tunewright.ir.types import PLAIN, TensorType
from tunewright.ops import lookup
from tunewright.ops.base import OpSpec
from tunewright.ops.internal.reorder import from_plain, to_plain

from ..base import Config, Kernel, Problem, Solver


class HostReference(Solver):
    """Runs on the host for every device."""

    id = "host.reference"
    rank = 1000
    host = True

    def why_not(self, problem: Problem, target: Target) -> str | None:
        if target.traits.is_scripted:
            return "the Null device runs nothing"
        for op in [problem.op, *(step.op for step in problem.epilogue)]:
            if lookup(op) is None:
                return f"no definition of {op}"
        return None

    def compile(self, problem: Problem, config: Config, device: Device) -> Kernel:
        return HostKernel(problem)


class HostKernel(Kernel):
    """Runs the reference of the main operation, then each step of the epilogue."""

    def __init__(self, problem: Problem) -> None:
        self.name = "host.reference"
        self.problem = problem
        self.spec = _spec(problem.op)
        self.steps = [(_spec(step.op), step) for step in problem.epilogue]
        self.n = len(problem.outputs)
        self.layouts = any(isinstance(t, TensorType) and t.layout != PLAIN for t in [*problem.inputs, *problem.outputs])

    def run(self, queue: Queue, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
        if self.layouts:
            inputs = [to_plain(a, t) for a, t in zip(inputs, self.problem.inputs, strict=True)]
        try:
            with np.errstate(all="ignore"):
                main = inputs[: len(inputs) - self.problem.operands]
                results = list(self.spec.reference(main, self.problem.attrs, self.n))[: self.n]
                partial = results[:1]
                for spec, step in self.steps:
                    args = [inputs[i] if i >= 0 else partial[~i] for i in step.args]
                    partial.append(spec.reference(args, step.attrs, 1)[0])
                results[:1] = partial[-1:]
        except TunewrightError:
            raise
        except Exception as error:  # References are numpy code: any exception means that the inputs do not fit.
            raise ExecutionError(str(error) or repr(error)) from error
        if len(results) < self.n:
            raise ExecutionError(f"makes {len(results)} outputs, not {self.n}")
        if self.layouts:
            results = [from_plain(a, t) for a, t in zip(results, self.problem.outputs, strict=True)]
        for i, out in enumerate(outputs):
            result = results[i]
            if out is None:
                results[i] = _detached(result, inputs)
            else:
                if not isinstance(result, np.ndarray) or (result.shape, result.dtype) != (out.shape, out.dtype):
                    made = (
                        f"{result.dtype}{list(result.shape)}"
                        if isinstance(result, np.ndarray)
                        else type(result).__name__
                    )
                    raise ExecutionError(f"made {made} instead of {out.dtype}{list(out.shape)}")
                np.copyto(out, result)
                results[i] = out
        return results


def _detached(result: Any, inputs: Sequence[Any]) -> Any:
    """The result in separate memory: an input's memory may be reused after this step."""
    # Items from an input list already have separate memory: a list that grows stays cheap.
    if isinstance(result, list):
        held = {id(item) for x in inputs if isinstance(x, list) for item in x}
        return [item if id(item) in held else _detached(item, inputs) for item in result]
    if isinstance(result, np.ndarray) and any(
        isinstance(x, np.ndarray) and np.may_share_memory(result, x) for x in inputs
    ):
        return result.copy()
    return result


def _spec(op: str) -> OpSpec:
    spec = lookup(op)
    assert spec is not None, op
    return spec


SOLVERS = (HostReference(),)
