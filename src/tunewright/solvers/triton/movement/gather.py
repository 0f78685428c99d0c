"""Gather: rows picked by index, with an epilogue (embeddings and what is added to them). One kernel.

The reference raises for an index that is out of range; a kernel cannot, so it takes the nearest legal one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunewright.devices.base import Target
from tunewright.devices.cuda.device import CudaDevice, CudaQueue
from tunewright.ir.types import DType
from tunewright.ops.shapes import axis_of
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Problem
from tunewright.solvers.triton.source.cuda_kernel import Call, CudaSolver

from ..elementwise.elementwise import why_not_layouts
from ..source import rows
from ..source.rows import cdiv, power, tensor
from ..source.text import NAMES, chain, computed, load, why_not_chain

_INDICES = frozenset({DType.INT32, DType.INT64})


@dataclass(frozen=True)
class GatherForm:
    """Row r of the result, of ``inner`` elements, is row index[r % count] of part r // count of the data."""

    outer: int
    size: int
    count: int
    inner: int

    @property
    def rows(self) -> int:
        return self.outer * self.count


def form_of(problem: Problem) -> GatherForm:
    x, indices = tensor(problem.inputs[0]), tensor(problem.inputs[1])
    axis = axis_of(int(problem.attrs.get("axis", 0)), len(x.dims))
    return GatherForm(math.prod(x.dims[:axis]), x.dims[axis], indices.size, math.prod(x.dims[axis + 1 :]))


class TritonGather(CudaSolver):
    """A program copies some rows, or a part of each."""

    id = "triton.gather"
    ops = frozenset({"Gather"})
    # one kernel, where the library's are several: indices are brought into range, rows are picked, then copied
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        form, indices = form_of(problem), tensor(problem.inputs[1])
        if indices.dtype not in _INDICES:
            return f"does not take indices of {indices.dtype}"
        if not form.size and tensor(problem.outputs[0]).size:
            return "there is nothing to choose from, which the host reports"
        known = problem.value(1)
        if known is not None and known.size and not -form.size <= known.min() <= known.max() < form.size:
            return "an index is out of range, which the host reports"
        if problem.epilogue and (reason := why_not_chain(problem, main=False) or why_not_layouts(problem, 2)):
            return reason
        return rows.why_not_size(problem)

    def space(self, problem: Problem, target: Target) -> Space:
        form = form_of(problem)

        def useful(config: Mapping[str, Any]) -> bool:
            many, block, warps = (int(config[k]) for k in ("rows", "block", "warps"))
            fits = block <= power(form.inner) and many <= power(form.rows)
            return fits and many * block <= 64 * 32 * warps and (warps == 1 or many * block >= 32 * warps)

        params = {"rows": [1, 2, 4, 8, 16, 32, 64], "block": [1 << i for i in range(13)], "warps": [1, 2, 4, 8]}
        return Space(params, useful, version="1")

    def default(self, problem: Problem, target: Target) -> Config:
        """A kilo-element for each program, less where there are not enough of them for every multiprocessor."""
        form, units = form_of(problem), max(target.units, 1)
        block = min(power(form.inner), 1024)
        many = min(power(form.rows), 64, max(1, 1024 // block))
        while many > 1 and cdiv(form.rows, many) * cdiv(form.inner, block) < 2 * units:
            many //= 2
        while block > 128 and many == 1 and form.rows * cdiv(form.inner, block) < units:
            block //= 2
        return {"rows": many, "block": block, "warps": min(4, max(1, many * block // 256))}

    def source(self, problem: Problem, config: Config, target: Target) -> str:
        return text(problem, config)

    def call(self, problem: Problem, config: Config, device: CudaDevice) -> Call:
        form, kernel, warps = form_of(problem), load(text(problem, config)), int(config["warps"])
        grid = (cdiv(form.rows, int(config["rows"])), cdiv(form.inner, int(config["block"])))

        def call(queue: CudaQueue, inputs: Any, outputs: Any) -> None:
            if form.rows * form.inner:
                kernel[grid](*inputs, outputs[0], num_warps=warps)

        return call


def text(problem: Problem, config: Mapping[str, Any]) -> str:
    """The kernel for one problem."""
    form, out = form_of(problem), tensor(problem.outputs[0])
    x = tensor(problem.inputs[0])
    many, block = int(config["rows"]), int(config["block"])
    lines = [
        f"r = tl.program_id(0) * {many} + tl.arange(0, {many})", f"inside = r < {form.rows}",
        f"c = tl.program_id(1) * {block} + tl.arange(0, {block})",
        f"ok = inside[:, None] & (c < {form.inner})[None, :]",
        f"index = tl.load(p1 + {'r' if form.outer == 1 else f'r % {form.count}'}, mask=inside, other=0)",
        f"index = tl.where(index < 0, index + {form.size}, index)",
        f"index = tl.minimum(tl.maximum(index, 0), {form.size - 1}).to(tl.int32)",
    ]  # fmt: skip
    if form.outer > 1:
        lines.append(f"index += r // {form.count} * {form.size}")
    lines += [
        f"at = (r * {form.inner})[:, None] + c[None, :]",
        f"v = tl.load(p0 + (index * {form.inner})[:, None] + c[None, :], mask=ok)",
    ]
    last = "v"
    if problem.epilogue:
        lines.append(f"v = v.to({computed(x.dtype)})")
        along = "(c[None, :] + r[:, None] * 0)" if out.dims and out.dims[-1] == form.inner else ""
        body, last = chain(problem, "v", "at", "ok", last=along, indent="")
        lines += body
    lines.append(f"tl.store(out + at, {last}.to({NAMES[out.dtype]}), mask=ok)")
    return rows.kernel([*(f"p{i}" for i in range(len(problem.inputs))), "out"], lines)


SOLVERS = (TritonGather(),)
