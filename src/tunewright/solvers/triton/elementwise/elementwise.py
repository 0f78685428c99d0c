"""Kernels for element-wise operations and chains of them, and for the epilogue behind a library call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunewright.devices.base import Target
from tunewright.devices.cuda.device import CudaDevice, CudaQueue
from tunewright.ir.types import PLAIN, TensorType
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Problem
from tunewright.solvers.triton.source.cuda_kernel import Call, CudaSolver

from ..source import expr
from ..source.text import HEAD, NAMES, chain, load, why_not_chain


class TritonElementwise(CudaSolver):
    """Element-wise operations on shapes that broadcast. All tensors of the result's rank must share one layout."""

    id = "triton.elementwise"
    ops = frozenset(expr.EXPRESSIONS)
    layouts = frozenset({PLAIN.name, "nhwc"})
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        return why_not_chain(problem, main=True) or why_not_layouts(problem, 0)

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"block": [128, 256, 512, 1024, 2048, 4096], "warps": [1, 2, 4, 8]})

    def default(self, problem: Problem, target: Target) -> Config:
        return default_block(problem, target)

    def source(self, problem: Problem, config: Config, target: Target) -> str:
        return text(problem, config, main=True)

    def call(self, problem: Problem, config: Config, device: CudaDevice) -> Call:
        return launch(problem, config, main=True)


def default_block(problem: Problem, target: Target) -> Config:
    """Enough programs for every multiprocessor, unless that leaves a program too little work."""
    wanted = max(1, _size(problem) // (4 * max(target.units, 1)))
    return {"block": min(1024, max(128, 1 << max(0, wanted.bit_length() - 1))), "warps": 4}


def why_not_layouts(problem: Problem, first: int) -> str | None:
    """None where each input from ``first`` on has the result's layout, or varies along one axis; else the reason."""
    out = problem.outputs[0]
    assert isinstance(out, TensorType)
    for type in problem.inputs[first:]:
        if isinstance(type, TensorType) and type.layout != out.layout and type.size > max(type.dims, default=1):
            return f"an operand is {type.layout}, the result {out.layout}"
    return None


def _size(problem: Problem) -> int:
    out = problem.outputs[0]
    assert isinstance(out, TensorType)
    return out.size


def text(problem: Problem, config: Mapping[str, Any], main: bool) -> str:
    """The text of the kernel. Without ``main``, it reads the main operation's result from the pointer ``made``."""
    out = problem.outputs[0]
    assert isinstance(out, TensorType)
    first = 0 if main else len(problem.main_inputs)
    pointers = [f"p{i}" for i in range(first, len(problem.inputs)) if problem.inputs[i] is not None]
    if not main:
        pointers.insert(0, "made")
    body, last = chain(problem, None if main else "m", "at", "inside")
    given = [] if main else ["    m = tl.load(made + at, mask=inside).to(tl.float32)"]
    lines = [
        "@triton.jit",
        f"def kernel({', '.join([*pointers, 'out', 'BLOCK: tl.constexpr'])}):",
        "    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
        f"    inside = at < {out.size}",
        *given,
        *body,
        f"    tl.store(out + at, {last}.to({NAMES[out.dtype]}), mask=inside)",
    ]
    return HEAD + "\n".join(lines) + "\n"


def launch(problem: Problem, config: Mapping[str, Any], main: bool) -> Call:
    """The launch of the kernel. Without ``main``, the inputs are the main operation's result and the epilogue's
    operands."""
    kernel, size, block = load(text(problem, config, main)), _size(problem), int(config["block"])
    grid, warps = (-(-size // block),), int(config["warps"])
    first = 0 if main else len(problem.main_inputs)
    used = [i for i in range(first, len(problem.inputs)) if problem.inputs[i] is not None]

    def call(queue: CudaQueue, inputs: Any, outputs: Any) -> None:
        if size:
            given = [inputs[i] for i in used] if main else inputs
            kernel[grid](*given, outputs[0], BLOCK=block, num_warps=warps)

    return call


SOLVERS = (TritonElementwise(),)
