"""Range: equally spaced numbers, whose first one and distance are known or follow from sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunewright.devices.base import Target
from tunewright.devices.cuda.device import CudaDevice, CudaQueue
from tunewright.ir.symbolic import SymInt
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Missing, Problem

from ..source import rows
from ..source.cuda_kernel import Call, CudaSolver
from ..source.expr import number
from ..source.rows import cdiv, tensor
from ..source.text import NAMES, load


class TritonRange(CudaSolver):
    """Computed as the reference does: in 64 bits, then rounded to the result's type."""

    id = "triton.range"
    ops = frozenset({"Range"})
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if problem.epilogue:
            return "has no epilogue"
        if any(problem.value(i) is None for i in range(3)):
            return Missing("start, limit and delta are not constant")
        return rows.why_not_size(problem)

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"block": [128, 256, 512, 1024]}, version="1")

    def default(self, problem: Problem, target: Target) -> Config:
        return {"block": 128}

    def source(self, problem: Problem, config: Config, target: Target) -> str:
        return text(problem, config)

    def call(self, problem: Problem, config: Config, device: CudaDevice) -> Call:
        kernel, grid = load(text(problem, config)), (cdiv(tensor(problem.outputs[0]).size, int(config["block"])),)

        def call(queue: CudaQueue, inputs: Any, outputs: Any) -> None:
            if grid[0]:
                kernel[grid](outputs[0], num_warps=4)

        return call


def text(problem: Problem, config: Mapping[str, Any]) -> str:
    """The kernel for one problem."""
    out, block = tensor(problem.outputs[0]), int(config["block"])
    wide = "tl.int64" if tensor(problem.input(0)).dtype.is_integer else "tl.float64"
    start, _, delta = (_text(value.item()) for _, value in problem.values)
    return rows.kernel(["out"], [
        f"at = tl.program_id(0) * {block} + tl.arange(0, {block})", f"step = tl.full(({block},), {delta}, {wide})",
        f"first = tl.full(({block},), {start}, {wide})",
        f"tl.store(out + at, (at.to({wide}) * step + first).to({NAMES[out.dtype]}), mask=at < {out.size})",
    ])  # fmt: skip


def _text(value: Any) -> str:
    if isinstance(value, SymInt):
        return str(value)
    return number(value) if isinstance(value, float) else str(int(value))


SOLVERS = (TritonRange(),)
