"""Load Triton kernels from text, and write the pieces of text that kernels share."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tunewright.ir.graph import Fused
from tunewright.ir.types import DType, TensorType
from tunewright.solvers.base import Problem
from tunewright.solvers.epilogue_types import argument_dtypes, step_dtypes

from . import expr

#: `wide` hides the range of small numbers from the compiler. With a known range, it computes the tests at the border of
#: a picture in pairs of 16 bits. ptxas (of Triton 3.6) then drops taps of convolutions for the first row of pixels. So
#: every kernel with windows applies `wide` to the positions it tests. The module `compile` replaces its body; the
#: interpreter runs it as it is.
WIDE = "@triton.jit\ndef wide(x):\n    return x\n"
HEAD = f"import triton\nimport triton.language as tl\n\n\n{WIDE}\n\n{expr.GELU}\n\n"
#: Triton's names of element types
NAMES = {
    DType.FLOAT32: "tl.float32", DType.FLOAT16: "tl.float16", DType.BFLOAT16: "tl.bfloat16",
    DType.FLOAT64: "tl.float64", DType.BOOL: "tl.int1", DType.INT8: "tl.int8", DType.UINT8: "tl.uint8",
    DType.INT16: "tl.int16", DType.UINT16: "tl.uint16", DType.INT32: "tl.int32", DType.UINT32: "tl.uint32",
    DType.INT64: "tl.int64", DType.UINT64: "tl.uint64",
}  # fmt: skip


#: Triton kernels in the cache. A kernel in use outlives its entry.
MOST = 1024


def load(text: str, name: str = "kernel") -> Any:
    """The kernel of a text that one of our solvers wrote: ``load(text)[grid](*arguments, **constants)`` launches it."""
    from .sizes_page import loader  # which needs Triton

    return (loader() or load_alone)(text, name)


@lru_cache(MOST)
def load_alone(text: str, name: str = "kernel") -> Any:
    """The kernel of a text for fixed sizes."""
    from triton import knobs

    if knobs.runtime.interpret:
        return define(text, name)
    from .compile import Compiled  # `compile` imports this module

    return Compiled(text, name)


def define(text: str, name: str) -> Any:
    """The function that `triton.jit` makes of a text. Triton reads the source back through `linecache`."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    file = f"<tunewright {digest}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": f"tunewright.kernels.{digest}"}
    exec(compile(text, file, "exec"), namespace)  # our own text, which holds only numbers and names of known operations
    return namespace[name]


def computed(dtype: DType) -> str:
    """The type in which elements of a stored type are computed."""
    return "tl.float32" if dtype in (DType.FLOAT16, DType.BFLOAT16) else NAMES[dtype]


def strides(type: TensorType, out: TensorType) -> list[tuple[int, int]]:
    """(size, stride) of a broadcast operand along each axis of a result, in the result's physical order."""
    rank = len(out.dims)
    dims = (1,) * (rank - len(type.dims)) + type.dims
    order = physical_order(out, rank)
    mine = order if len(type.dims) == rank else list(range(rank))
    if len(type.dims) == rank and type.layout != out.layout:
        mine = physical_order(type, rank)
    step, steps = 1, [0] * rank
    for axis in reversed(mine):
        steps[axis] = 0 if dims[axis] == 1 else step
        step *= dims[axis]
    return [(out.dims[axis], steps[axis]) for axis in order]


def physical_order(type: TensorType, rank: int) -> list[int]:
    """The logical axes in memory order."""
    return [0, *range(2, rank), 1] if type.layout.name == "nhwc" else list(range(rank))


def offset(axes: Sequence[tuple[int, int]], at: str) -> str:
    """The position of an operand's element for result element ``at`` in memory order, as an expression."""
    merged: list[tuple[int, int]] = []
    for size, stride in axes:
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:  # continues where the previous axis ends, or both have stride 0
            merged[-1] = merged[-1][0] * size, stride
        else:
            merged.append((size, stride))
    terms, inner = [], 1
    for number, (size, stride) in reversed(list(enumerate(merged))):
        if stride:
            term = at if inner == 1 else f"({at} // {inner})"
            term = term if number == 0 else f"({term} % {size})"
            terms.append(term if stride == 1 else f"{term} * {stride}")
        inner *= size
    return " + ".join(terms) or f"{at} * 0"


def chain(
    problem: Problem,
    value: str | None,
    at: str,
    mask: str,
    last: str = "",
    indent: str = "    ",
    last_mask: str = "",
    early: list[str] | None = None,
) -> tuple[list[str], str]:
    """Statements of a problem's element-wise steps, and the name of the result.

    ``value`` is a variable with the main result; None where the main operation is element-wise itself. ``at`` are the
    positions of the elements in the result, in memory order. ``last`` are their positions along its last axis in
    memory, where known. ``last_mask`` masks these if they have fewer dimensions. Operand i is behind the pointer
    ``p{i}``. The loads are appended to ``early``, if given. They may stand anywhere before the statements.
    """
    dtypes = step_dtypes(problem)
    assert not isinstance(dtypes, str), dtypes
    out = problem.outputs[0]
    assert isinstance(out, TensorType)
    lines: list[str] = []
    loaded: dict[int, str] = {}

    def operand(i: int) -> str:
        if i not in loaded:
            type = problem.inputs[i]
            assert isinstance(type, TensorType)
            loaded[i] = f"e{i}"
            axes = strides(type, out)
            along = last and all(stride == 0 or size == 1 for size, stride in axes[:-1])
            place = (last if axes[-1][1] else "0") if along and axes else offset(axes, at)
            inside = last_mask if along and last_mask else mask
            # a single number for all elements takes no mask
            where = "" if place == "0" else f" + ({place}), mask={inside}"
            read = f"tl.load(p{i}{where})"
            if early is not None:  # loaded without a conversion, which would wait for the load
                early.append(f"raw{i} = {read}")
                read = f"raw{i}"
            lines.append(f"e{i} = {read}.to({computed(type.dtype)})")
        return loaded[i]

    results = [] if value is None else [value]
    for number, (step, made) in enumerate(_steps(problem, dtypes, main=value is None)):
        types = argument_dtypes(problem, step.args, dtypes)
        given = [
            results[~i] if i < 0 else None if type is None else operand(i)
            for i, type in zip(step.args, types, strict=True)
        ]
        lines.append(f"v{number} = {expr.expression(step.op, given, made, step.attrs)}")
        results.append(f"v{number}")
    return [indent + line for line in lines], results[-1]


def why_not_chain(problem: Problem, main: bool) -> str | None:
    """None when `chain` supports the problem, else the reason. ``main`` includes the main operation."""
    dtypes = step_dtypes(problem)
    if isinstance(dtypes, str):
        return dtypes
    reasons = (
        expr.why_not(step.op, argument_dtypes(problem, step.args, dtypes), made)
        for step, made in _steps(problem, dtypes, main)
    )
    return next((reason for reason in reasons if reason is not None), None)


def _steps(problem: Problem, dtypes: Sequence[DType], main: bool) -> list[tuple[Fused, DType]]:
    """The steps to write, each with its result's element type. ``main`` puts the main operation first."""
    steps = list(zip(problem.epilogue, dtypes[1:], strict=True))
    if main:
        steps.insert(0, (Fused(problem.op, tuple(range(len(problem.main_inputs))), problem.attrs), dtypes[0]))
    return steps
