"""Element types along a problem's epilogue: that of the main result, and that of each step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ..ir.types import DType, TensorType, Type
from ..ops import lookup
from ..ops.base import Operand
from ..ops.tolerance import TOLERANCES
from .base import Problem

_KNOWN: dict[Hashable, list[DType] | str] = {}
MOST_KNOWN = 4096


def main_type(problem: Problem) -> TensorType:
    """The type of the main operation's result: that of the output, except for the element type, which a Cast may
    change."""
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
    """The element types of the main result and of each step of the epilogue, or a message about a step without one."""
    # The result is cached: it does not depend on shapes, and callers wait for plans of new shapes.
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


def coarsest(problem: Problem) -> DType | None:
    """The float type with the fewest digits among the intermediate results; None if it is that of the output.

    A Cast after a product of half floats does not add digits.
    """
    out = problem.outputs[0] if problem.epilogue else None
    dtypes = step_dtypes(problem) if isinstance(out, TensorType) and out.dtype in TOLERANCES else ""
    floats = [dtype for dtype in dtypes if isinstance(dtype, DType) and dtype in TOLERANCES]
    found = max(floats, key=lambda dtype: TOLERANCES[dtype].relative, default=None)
    return found if isinstance(out, TensorType) and found is not out.dtype else None


def argument_dtypes(problem: Problem, args: Sequence[int], dtypes: Sequence[DType]) -> list[DType | None]:
    """The element types of a step's arguments, with None for an absent input; ``dtypes`` are those of `step_dtypes`."""
    found: list[DType | None] = []
    for i in args:
        type = problem.inputs[i] if i >= 0 else None
        found.append(dtypes[~i] if i < 0 else type.dtype if isinstance(type, TensorType) else None)
    return found
