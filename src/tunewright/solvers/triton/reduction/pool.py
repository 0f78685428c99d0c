"""MaxPool, AveragePool and LpPool over one to three axes, plain or with channels last. Each thread computes some
results.

Results are numbered in memory order, so neighbouring threads read neighbouring elements. Few taps are unrolled, so that
all of their loads are in flight at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tunewright.devices.base import Target
from tunewright.devices.cuda.device import CudaDevice, CudaQueue
from tunewright.ir.types import PLAIN, DType
from tunewright.ops.windows import Windows, windows
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Problem
from tunewright.solvers.triton.source.cuda_kernel import Call, CudaSolver

from ..elementwise.elementwise import why_not_layouts
from ..source import fold, rows
from ..source.fold import TritonFold
from ..source.rows import cdiv, filling, tensor
from ..source.text import NAMES, chain, load, physical_order, why_not_chain
from .reduce import pool_fold, why_not_pool

#: taps that are unrolled
MOST_TAPS = 32
#: channels that a thread may load at once
VECTOR = 8
_NUMBERS = rows.FLOATS | {DType.INT8, DType.UINT8, DType.INT16, DType.INT32, DType.INT64}


class TritonPool(CudaSolver):
    """Sliding windows. With the output Indices the first of equal maxima counts, and NaN is never larger."""

    id = "triton.pool"
    ops = frozenset({"MaxPool", "AveragePool", "LpPool"})
    layouts = frozenset({PLAIN.name, "nhwc"})
    dtypes = _NUMBERS | {DType.BOOL}
    # One kernel; the library needs others to pad, copy or run the epilogue.
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, out = tensor(problem.input(0)), tensor(problem.outputs[0])
        if x.dtype not in _NUMBERS:
            return f"does not take {x.dtype}"
        if reason := why_not_pool(problem):
            return reason
        if not 3 <= len(x.dims) <= 5:
            return f"{len(x.dims) - 2} spatial axes, where one to three are needed"
        if x.layout != out.layout:
            return "input and output differ in layout"
        windows(x.dims[2:], problem.attrs["kernel_shape"], problem.attrs)  # raises for invalid attributes
        if len(problem.outputs) > 1:
            if x.layout != PLAIN:
                return "indices count elements of the plain layout"
            if problem.epilogue:
                return "takes no epilogue with indices"
        if problem.epilogue and (reason := why_not_chain(problem, main=False) or why_not_layouts(problem, 1)):
            return reason
        return rows.why_not_size(problem)

    def space(self, problem: Problem, target: Target) -> Space:
        def useful(config: Mapping[str, Any]) -> bool:
            return 32 * int(config["warps"]) <= int(config["block"]) <= 512 * int(config["warps"])

        return Space({"block": [64, 128, 256, 512, 1024, 2048], "warps": [1, 2, 4, 8]}, useful, version="1")

    def default(self, problem: Problem, target: Target) -> Config:
        """A few results per thread, fewer where they would not occupy every multiprocessor."""
        out = tensor(problem.outputs[0])
        block = filling(out.size, target.units)
        each = 8 if block == 1024 and out.layout != PLAIN else 4  # eight half floats fill 16 adjacent bytes
        return {"block": block, "warps": block // (32 * each)}

    def source(self, problem: Problem, config: Config, target: Target) -> str:
        return _text(problem, config)

    def call(self, problem: Problem, config: Config, device: CudaDevice) -> Call:
        kernel, size = load(_text(problem, config)), tensor(problem.outputs[0]).size
        grid, warps = (cdiv(size, int(config["block"])),), int(config["warps"])

        def call(queue: CudaQueue, inputs: Any, outputs: Any) -> None:
            if size:
                kernel[grid](*inputs, *outputs, num_warps=warps)

        return call


@dataclass(frozen=True)
class _Axis:
    """One spatial axis: tap k of result o reads element o * stride - head + k * dilation."""

    name: str
    size: int
    step: int
    kernel: int
    dilation: int
    head: int
    tail: int
    padded: bool

    def inside(self, tap: str) -> list[str]:
        at = f"({self.name} + {tap})"
        return [f"({at} >= 0) & ({at} < {self.size})"] if self.padded else []

    def counted(self, include: bool) -> str:
        """The number of taps that an average divides by, as an expression."""
        low, high = (-self.head, self.size + self.tail) if include else (0, self.size)
        if not self.padded:
            return str(self.kernel)
        # Clamped before the division, because division of negative numbers rounds towards 0.
        more = self.dilation - 1
        begin = f"(tl.maximum({low} - {self.name}, 0) + {more}) // {self.dilation}"
        end = f"tl.minimum((tl.maximum({high} - {self.name}, 0) + {more}) // {self.dilation}, {self.kernel})"
        return f"tl.maximum({end} - {begin}, 0)"


def _axes(problem: Problem) -> tuple[list[_Axis], Windows]:
    x = tensor(problem.input(0))
    win = windows(x.dims[2:], problem.attrs["kernel_shape"], problem.attrs)
    order = physical_order(x, len(x.dims))
    steps = {axis: math.prod(x.dims[a] for a in order[n + 1 :]) for n, axis in enumerate(order)}
    found = []
    for k, (head, tail) in enumerate(win.pads(x.dims[2:])):
        padded = head > 0 or tail > 0
        found.append(_Axis(f"a{k}", x.dims[k + 2], steps[k + 2], win.kernel[k], win.dilations[k], win.head[k],
                           win.tail[k], padded))  # fmt: skip
    return found, win


def _text(problem: Problem, config: Config) -> str:
    x, out = tensor(problem.input(0)), tensor(problem.outputs[0])
    axes, win = _axes(problem)
    how = pool_fold(problem.op, x.dtype, int(problem.attrs.get("p", 2)))
    real, block = fold.real(x.dtype), int(config["block"])
    order = physical_order(out, len(out.dims))
    # Adjacent channels share their window. They get an axis of their own, so that Triton recognises it.
    vector = math.gcd(out.dims[1], VECTOR) if order[-1] == 1 else 1
    number = block // vector
    lines = [f"at = tl.program_id(0) * {number} + tl.arange(0, {number})", f"inside = at < {out.size // vector}"]
    inner, base = 1, []
    for axis in reversed(order):
        size = out.dims[axis] // (vector if axis == 1 else 1)
        index = f"at // {inner}" if inner > 1 else "at"
        index = f"{index} % {size}" if axis != order[0] else index
        inner *= size
        if axis >= 2:
            k = axis - 2
            lines.append(f"a{k} = {index} * {win.strides[k]} - {win.head[k]}")
            base.append(f"a{k} * {axes[k].step}")
        else:
            behind = math.prod(x.dims[a] for a in physical_order(x, len(x.dims))[order.index(axis) + 1 :])
            base.append(f"({index}) * {behind * (vector if axis == 1 else 1)}")
    lines.append(f"base = {' + '.join(base)}")
    lines += [f"{axis.name} = wide({axis.name})" for axis in axes if axis.padded]
    if vector > 1:
        lines += [f"lane = tl.arange(0, {vector})[None, :]", f"at = at[:, None] * {vector} + lane",
                  "base = base[:, None] + lane", "inside = inside[:, None] & (lane >= 0)"]  # fmt: skip
        lines += [f"{axis.name} = {axis.name}[:, None]" for axis in axes]
    indices = len(problem.outputs) > 1
    if indices:
        lines += _with_indices(axes, x.dims[2:], x.dtype, how, int(problem.attrs.get("storage_order", 0)))
        kind = NAMES[out.dtype]
        lines += [f"tl.store(out + at, best.to({kind}), mask=inside)", "tl.store(o1 + at, chosen, mask=inside)"]
    else:
        shape = f"({number}, {vector})" if vector > 1 else f"({number},)"
        lines += [f"{name} = tl.full({shape}, {start}, {real})" for name, start in how.states.items()]
        lines += _taps(axes, lambda at, mask, _: [f"v = {fold.read(at, mask, x.dtype, how)}", *how.update])
        lines.append(f"made = {how.result}")
        if problem.op == "AveragePool":
            include = bool(problem.attrs.get("count_include_pad", 0))
            counted = " * ".join(f"({axis.counted(include)})" for axis in axes)
            lines.append(f"made = made / ({counted})")
        body, last = chain(problem, "made", "at", "inside", indent="")
        lines += [*body, f"tl.store(out + at, ({last}).to({NAMES[out.dtype]}), mask=inside)"]
    operands = [f"p{i}" for i in range(1, len(problem.inputs))]
    pointers = ["x", *operands, "out", *(["o1"] if indices else [])]
    return rows.kernel(pointers, lines)


def _taps(axes: Sequence[_Axis], body: Callable[[str, str, Sequence[str]], list[str]]) -> list[str]:
    """Statements for all taps, unrolled or in loops. ``body`` takes (pointer, mask, offsets along the axes)."""
    lines: list[str] = []

    def visit(far: Sequence[str], step: str, depth: int) -> None:
        tests = [test for d, axis in zip(far, axes, strict=True) for test in axis.inside(d)]
        inner = [f"ok = {' & '.join(['inside', *tests])}", *body(f"x + (base + {step})", "ok", far)]
        lines.extend("    " * depth + line for line in inner)

    if math.prod(axis.kernel for axis in axes) <= MOST_TAPS:
        for tap in product(*(range(axis.kernel) for axis in axes)):
            far = [k * axis.dilation for k, axis in zip(tap, axes, strict=True)]
            visit([str(d) for d in far], str(sum(d * a.step for d, a in zip(far, axes, strict=True))), 0)
        return lines
    for k, axis in enumerate(axes):
        lines.append("    " * k + f"for d{k} in range(0, {axis.kernel * axis.dilation}, {axis.dilation}):")
    names = [f"d{k}" for k in range(len(axes))]
    visit(names, " + ".join(f"{d} * {a.step}" for d, a in zip(names, axes, strict=True)), len(axes))
    return lines


def _with_indices(axes: Sequence[_Axis], dims: Sequence[int], dtype: DType, how: TritonFold, order: int) -> list[str]:
    """Statements for the maximum and its index. The taps, padding included, run in row-major order. The first tap is
    the initial maximum whatever its value."""
    steps = [math.prod(dims[i + 1 :]) if order == 0 else math.prod(dims[:i]) for i in range(len(dims))]
    own = " + ".join(f"{axis.name} * {axis.step}" for axis in axes)
    place = " + ".join(f"{axis.name} * {step}" for axis, step in zip(axes, steps, strict=True))

    def visit(at: str, mask: str, far: Sequence[str]) -> list[str]:
        index = " + ".join(f"{d} * {step}" for d, step in zip(far, steps, strict=True))
        return [
            f"v = {fold.read(at, mask, dtype, how)}", "better = v > best",
            f"chosen = tl.where(better, first + {index}, chosen)", "best = tl.where(better, v, best)",
        ]  # fmt: skip

    return [
        # first element of the plane plus position in it; a window may start in front of the plane
        f"first = (base - ({own})).to(tl.int64) + ({place})",
        f"ok = {' & '.join(['inside', *(test for axis in axes for test in axis.inside('0'))])}",
        f"best = {fold.read('x + base', 'ok', dtype, how)}", "chosen = first", *_taps(axes, visit),
    ]  # fmt: skip


SOLVERS = (TritonPool(),)
