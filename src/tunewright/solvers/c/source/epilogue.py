"""Writes the epilogue of a fused node into the kernel of its main operation, where that kernel stores a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tunewright.ir.types import DType, TensorType
from tunewright.solvers.base import Problem
from tunewright.solvers.epilogue_types import argument_dtypes, step_dtypes

from . import expr
from .emit import COMPUTE, In, Source

#: floats that kernels compute in f32
NARROW = frozenset({DType.FLOAT16, DType.BFLOAT16})


def kind(problem: Problem, i: int, axis: int) -> str | None:
    """How operand i lies in the result: "scalar", "channel" (it varies only along ``axis``), "full", or None for any
    other."""
    type, out = problem.inputs[i], problem.outputs[0]
    if not isinstance(type, TensorType) or not isinstance(out, TensorType) or type.shape is None or out.shape is None:
        return None
    if all(d == 1 for d in type.shape):
        return "scalar"
    if type.shape == out.shape and None not in type.shape:
        return "full" if type.layout == out.layout else None
    axis %= len(out.shape)
    padded = (1,) * (len(out.shape) - len(type.shape)) + tuple(type.shape)
    if (
        len(padded) == len(out.shape)
        and padded[axis] == out.shape[axis]
        and all(d == 1 for k, d in enumerate(padded) if k != axis)
    ):
        return "channel"
    return None


def why_not(problem: Problem, axis: int = 1) -> str | None:
    """None when an `Epilogue` can be written for the problem, else the reason; ``axis`` is the axis of the channels."""
    for i in range(len(problem.main_inputs), len(problem.inputs)):
        if kind(problem, i, axis) is None:
            return f"operand {problem.inputs[i]} is neither one value, one per channel nor of the result's shape"
    return why_not_steps(problem) or divides(problem)


def divides(problem: Problem) -> str | None:
    """Refuses divisions of integers: the padding of a tile or a block may be zero, and the kernel would report it."""
    dtypes = step_dtypes(problem)
    ops = [problem.op, *(step.op for step in problem.epilogue)]
    if isinstance(dtypes, str):
        return None
    if any(op in expr.DIVISIONS and dtype.is_integer for op, dtype in zip(ops, dtypes, strict=True)):
        return "divides integers, perhaps by the zeros that fill up a block"
    return None


def why_not_steps(problem: Problem) -> str | None:
    """None when `chain` can write the epilogue's steps, wherever their operands lie."""
    if not problem.epilogue:
        return None
    dtypes = step_dtypes(problem)
    if isinstance(dtypes, str):
        return dtypes
    for step, out in zip(problem.epilogue, dtypes[1:], strict=True):
        reason = expr.why_not(step.op, argument_dtypes(problem, step.args, dtypes), out, step.attrs)
        if reason is not None:
            return reason
    return None


def chain(problem: Problem, dtypes: Sequence[DType], value: str, load: Callable[[int], str]) -> tuple[str, str]:
    """Statements of all steps for one element, and the name of the last result.

    ``dtypes`` are those of `step_dtypes`. ``value`` is a variable with the main result. ``load`` returns the expression
    of an operand's element. Between steps, narrow floats are rounded as if they had been stored, so that a comparison
    sees the same values.
    """
    lines: list[str] = []
    loaded: dict[int, str] = {}
    results = [value]
    last = len(problem.epilogue)
    if last and dtypes[0] in NARROW:
        results = [f"{value}_0"]
        lines.append(f"f32 {value}_0 = {expr.rounded(value, dtypes[0])};")
    for number, step in enumerate(problem.epilogue, start=1):
        args = []
        for i in expr.used(step.op, step.args):
            if i >= 0 and i not in loaded:
                type = problem.inputs[i]
                assert isinstance(type, TensorType)
                loaded[i] = f"{value}_e{i}"
                lines.append(f"{COMPUTE[type.dtype]} {loaded[i]} = {load(i)};")
            args.append(loaded[i] if i >= 0 else results[~i])
        out = dtypes[number]
        text = expr.expression(step.op, args, argument_dtypes(problem, step.args, dtypes), out, step.attrs)
        if number < last and step.op not in expr.EXACT:
            text = expr.rounded(text, out)
        name = f"{value}_{number}"
        lines.append(f"{COMPUTE[out]} {name} = {text};")
        results.append(name)
    return "\n".join(lines), results[-1]


class Epilogue:
    """Adds the operands' buffers to a source.  then writes the steps, once for each stored result."""

    def __init__(self, source: Source, problem: Problem, axis: int = 1) -> None:
        self.source, self.problem = source, problem
        self.kinds = {i: kind(problem, i, axis) for i in range(len(problem.main_inputs), len(problem.inputs))}
        for i in self.kinds:
            type = problem.inputs[i]
            assert isinstance(type, TensorType)
            source.buffer(f"e{i}", type.dtype, In(i))
        dtypes = step_dtypes(problem)
        assert not isinstance(dtypes, str), dtypes
        self.dtypes = dtypes

    def apply(self, value: str, channel: str, offset: str) -> tuple[str, str]:
        """Statements for one element, and the name of the result. A loop over lanes that contains them is vectorised.

        ``value`` is a variable with the main result, ``channel`` the index into operands per channel. ``offset`` is the
        index of the element in the output's memory, and also in operands of the output's shape and layout.
        """
        at = {"scalar": "0", "channel": channel, "full": offset}

        def load(i: int) -> str:
            return self.source.load(f"e{i}", at[str(self.kinds[i])])

        return chain(self.problem, self.dtypes, value, load)
