"""The epilogue of a fused node, written into the kernel of its main operation at the point where it stores a result."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from ...ir.types import DType, TensorType, Type
from ...ops import lookup
from ...ops.base import Operand
from ..base import Problem
from . import expr
from .emit import COMPUTE, In, Source

_KNOWN: dict[Hashable, list[DType] | str] = {}
MOST_KNOWN = 4096
#: floats that are computed in f32
NARROW = frozenset({DType.FLOAT16, DType.BFLOAT16})


def main_type(problem: Problem) -> TensorType:
    """The type that the main operation makes: as the output, but for the element type that a Cast may change."""
    out = problem.outputs[0]
    assert isinstance(out, TensorType)
    if not problem.epilogue:
        return out
    spec = lookup(problem.op)
    first = problem.inputs[0]
    assert spec is not None and isinstance(first, TensorType)
    operands = [None if t is None else Operand(t, problem.value(i)) for i, t in enumerate(problem.main_inputs)]
    try:
        made = spec.infer(operands, problem.attrs, len(problem.outputs))[0]
    except ValueError:
        made = None
    return out.with_dtype(made.dtype if isinstance(made, TensorType) else first.dtype)


def step_dtypes(problem: Problem) -> list[DType] | str:
    """Element type of the main result and of each step of the epilogue; or which step has none."""
    # They do not depend on shapes, and plans for new shapes are made while somebody waits.
    dtypes = tuple(t.dtype if isinstance(t, TensorType) else None for t in problem.inputs)
    chosen = tuple(problem.attrs.get(name) for name in ("to", "dtype", "output_dtype"))
    key = (problem.op, dtypes, problem.epilogue, problem.outputs[0] is None, chosen)
    if key not in _KNOWN:
        if len(_KNOWN) >= MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = _step_dtypes(problem)
    return _KNOWN[key]


def _step_dtypes(problem: Problem) -> list[DType] | str:
    main = main_type(problem)
    made = [main]
    for step in problem.epilogue:
        spec = lookup(step.op)
        if spec is None:
            return f"no definition of {step.op}"
        types: list[Type | None] = [problem.inputs[i] if i >= 0 else made[~i] for i in step.args]
        try:
            type = spec.infer([None if t is None else Operand(t) for t in types], step.attrs, 1)[0]
        except ValueError as error:
            return f"{step.op}: {error}"
        if not isinstance(type, TensorType):
            return f"{step.op} makes {type}"
        made.append(type)
    return [t.dtype for t in made]


def kind(problem: Problem, i: int, axis: int) -> str | None:
    """How operand i lies in the result: "scalar", "channel" (varies along ``axis`` alone), "full"; None: otherwise."""
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
    """None when an `Epilogue` can be written for the problem; ``axis`` is that of the channels."""
    for i in range(len(problem.main_inputs), len(problem.inputs)):
        if kind(problem, i, axis) is None:
            return f"operand {problem.inputs[i]} is neither one value, one per channel nor of the result's shape"
    return why_not_steps(problem)


def why_not_steps(problem: Problem) -> str | None:
    """None when `chain` can write the epilogue's steps, wherever their operands lie."""
    if not problem.epilogue:
        return None
    dtypes = step_dtypes(problem)
    if isinstance(dtypes, str):
        return dtypes
    for step, out in zip(problem.epilogue, dtypes[1:], strict=True):
        reason = expr.why_not(step.op, _types(problem, step.args, dtypes), out, step.attrs)
        if reason is not None:
            return reason
    return None


def _types(problem: Problem, args: Sequence[int], dtypes: Sequence[DType]) -> list[DType]:
    found = []
    for i in args:
        type = problem.inputs[i] if i >= 0 else None
        found.append(type.dtype if isinstance(type, TensorType) else dtypes[~i])
    return found


def chain(problem: Problem, dtypes: Sequence[DType], value: str, load: Callable[[int], str]) -> tuple[str, str]:
    """Statements of all steps, and the name of the last result, for one element.

    ``dtypes``: those of `step_dtypes`; ``value``: a variable with the main result; ``load``: the expression of an
    operand's element. Between steps narrow floats are rounded as if they had been stored: a comparison sees the same.
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
        text = expr.expression(step.op, args, _types(problem, step.args, dtypes), out, step.attrs)
        if number < last and step.op not in expr.EXACT:
            text = expr.rounded(text, out)
        name = f"{value}_{number}"
        lines.append(f"{COMPUTE[out]} {name} = {text};")
        results.append(name)
    return "\n".join(lines), results[-1]


class Epilogue:
    """Adds the operands' buffers to a source; `apply` then writes the steps, once for each place that stores."""

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
        """Statements, and the name of the result, for one element; a loop over lanes that holds them is vectorised.

        ``value``: a variable with the main result; ``channel``: index into operands per channel; ``offset``: index of
        the element in the output's memory, and so in operands of its shape and layout.
        """
        at = {"scalar": "0", "channel": channel, "full": offset}

        def load(i: int) -> str:
            return self.source.load(f"e{i}", at[str(self.kinds[i])])

        return chain(self.problem, self.dtypes, value, load)
