"""Boxes with strided reads and element-wise steps (`ops.internal.pieces`), all in one launch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tunewright.devices.base import Target
from tunewright.devices.cuda.device import CudaDevice, CudaQueue
from tunewright.ir.types import PLAIN, DType, TensorType
from tunewright.ops.internal.pieces import PIECES, Axis, Piece, Read, parts
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Problem
from tunewright.solvers.triton.source.cuda_kernel import Call, CudaSolver

from ..source import expr, rows
from ..source.rows import cdiv, filling, indented, tensor
from ..source.text import NAMES, computed, load, offset, physical_order


class TritonPieces(CudaSolver):
    """Pieces on plain or channels-last inputs and outputs."""

    id = "triton.pieces"
    ops = frozenset({PIECES})
    layouts = frozenset({PLAIN.name, "nhwc"})
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if problem.epilogue:
            return "has no epilogue"
        for part in parts(problem.attrs):
            for read in part.reads:
                _place(read, tensor(problem.input(read.source)))
            types = [tensor(problem.input(read.source)).dtype for read in part.reads]
            for step in part.steps:
                given = [types[i] if i >= 0 else part.steps[~i].dtype for i in step.args]
                if reason := expr.why_not(step.op, given, step.dtype):
                    return reason
            if not all(t in NAMES for t in types):
                return f"does not read {types}"
        return rows.why_not_size(problem)

    def space(self, problem: Problem, target: Target) -> Space:
        def useful(config: Mapping[str, Any]) -> bool:
            return 32 * int(config["warps"]) <= int(config["block"]) <= 32 * 32 * int(config["warps"])

        return Space({"block": [64, 128, 256, 512, 1024, 2048, 4096], "warps": [1, 2, 4, 8]}, useful, version="1")

    def default(self, problem: Problem, target: Target) -> Config:
        """A few elements per thread, fewer where they would not occupy every multiprocessor."""
        block = filling(tensor(problem.outputs[0]).size, target.units)
        return {"block": block, "warps": 4 if block > 256 else block // 64}

    def source(self, problem: Problem, config: Config, target: Target) -> str:
        return _text(problem, config)[0]

    def call(self, problem: Problem, config: Config, device: CudaDevice) -> Call:
        text, programs = _text(problem, config)
        kernel, warps = load(text), int(config["warps"])

        def call(queue: CudaQueue, inputs: Any, outputs: Any) -> None:
            kernel[programs,](*inputs, outputs[0], num_warps=warps)

        return call


def _text(problem: Problem, config: Mapping[str, Any]) -> tuple[str, int]:
    """The text of the kernel, and the number of programs."""
    block, first, found = int(config["block"]), 0, parts(problem.attrs)
    lines = ["tile = tl.program_id(0)"]
    for part in found:
        count, body = cdiv(part.size, block), _box(problem, part, block, first)
        if len(found) > 1:
            lines += [f"if (tile >= {first}) & (tile < {first + count}):", *indented(body)]
        else:
            lines += body
        first += count
    return rows.kernel([*(f"p{i}" for i in range(len(problem.inputs))), "out"], lines), first


def _box(problem: Problem, part: Piece, block: int, first: int) -> list[str]:
    """Statements for a run of a box's elements, in the order of writing."""
    out = tensor(problem.outputs[0])
    order, steps = physical_order(out, len(out.dims)), _steps(out)
    start = f"(tile - {first})" if first else "tile"
    lines = [f"at = {start} * {block} + tl.arange(0, {block})", f"inside = at < {part.size}"]
    for k, read in enumerate(part.reads):
        type = tensor(problem.input(read.source))
        begin, axes = _place(read, type)
        place = offset([factor for a in order for factor in axes[a]], "at")
        lines.append(f"r{k} = tl.load(p{read.source} + ({place} + {begin}), mask=inside).to({computed(type.dtype)})")
    for k, step in enumerate(part.steps):
        args = [f"r{i}" if i >= 0 else f"v{~i}" for i in step.args]
        lines.append(f"v{k} = {expr.expression(step.op, args, step.dtype, step.attrs)}")
    last = f"v{len(part.steps) - 1}" if part.steps else "r0"
    begin = sum(a * s for a, s in zip(part.at, steps, strict=True))
    place = offset([(part.dims[a], steps[a]) for a in order], "at")
    made = f"({last}).to({NAMES[out.dtype]})" if out.dtype is not DType.BOOL else f"({last}) != 0"
    return [*lines, f"tl.store(out + ({place} + {begin}), {made}, mask=inside)"]


def _steps(type: TensorType) -> list[int]:
    """The stride of each logical axis in memory."""
    found, step = [0] * len(type.dims), 1
    for axis in reversed(physical_order(type, len(type.dims))):
        found[axis] = step
        step *= type.dims[axis]
    return found


def _place(read: Read, type: TensorType) -> tuple[int, tuple[Axis, ...]]:
    """A read in memory order: its first element and factors. ValueError where strides cannot express it."""
    if type.layout == PLAIN:
        return read.start, read.axes
    plain, there = _steps(type.with_layout(PLAIN)), _steps(type)
    at = [read.start // plain[a] % d for a, d in enumerate(type.dims)]
    begin, last = sum(i * s for i, s in zip(at, there, strict=True)), list(at)
    made: list[Axis] = []
    for axis in read.axes:
        factors: list[tuple[int, int]] = []
        for size, stride in reversed(axis):
            factors = [*_split(size, stride, plain, there, type.dims, last), *factors]
        made.append(tuple(factors))
    if any(i >= d for i, d in zip(last, type.dims, strict=True)):
        raise ValueError("what is read goes on from one axis into another")
    return begin, tuple(made)


def _split(
    size: int, stride: int, plain: Sequence[int], there: Sequence[int], dims: Sequence[int], last: list[int]
) -> list[tuple[int, int]]:
    """Convert a factor of the plain order to factors along axes in memory. ``last`` collects the last index on each
    axis."""
    found: list[tuple[int, int]] = []
    while size > 1 and stride:
        axis = next((a for a in range(len(dims)) if stride % plain[a] == 0 and stride < plain[a] * dims[a]), None)
        if axis is None:
            raise ValueError("what is read is along no axis")
        room = math.ceil(plain[axis] * dims[axis] / stride)
        taken = min(size, room)
        if size % taken or (taken < size and plain[axis] * dims[axis] % stride):
            raise ValueError("what is read goes on from one axis into another")
        step = stride // plain[axis]
        last[axis] += (taken - 1) * step
        found.insert(0, (taken, step * there[axis]))
        size, stride = size // taken, stride * taken
    return [(size, 0), *found] if size > 1 else found


SOLVERS = (TritonPieces(),)
