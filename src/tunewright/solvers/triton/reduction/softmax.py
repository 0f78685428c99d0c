"""Softmax and LogSoftmax along any axis.

Results are computed in float32 and rounded once. ONNX's own definition rounds narrow floats after each of its steps.
The difference is within the table of tolerances.
"""

from __future__ import annotations

from typing import Any

from tunewright.devices.base import Target
from tunewright.devices.cuda.device import CudaDevice, CudaQueue
from tunewright.ir.types import PLAIN
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Problem
from tunewright.solvers.triton.source.cuda_kernel import Call, CudaSolver

from ..elementwise.elementwise import why_not_layouts
from ..source import fold, rows
from ..source.rows import RowView, Tile, tensor
from ..source.text import NAMES, chain, load, why_not_chain


class TritonSoftmax(CudaSolver):
    """Softmax. A row is read once, or twice in a loop. Few long rows are split into parts, in two launches."""

    id = "triton.softmax"
    ops = frozenset({"Softmax", "LogSoftmax"})
    layouts = frozenset({PLAIN.name, "nhwc"})
    # One kernel; the library needs a second one to copy or to run the epilogue.
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, out = tensor(problem.input(0)), tensor(problem.outputs[0])
        if x.dtype not in rows.FLOATS:
            return f"does not take {x.dtype}"
        if x.layout != out.layout:
            return "input and output differ in layout"
        if problem.epilogue and (reason := why_not_chain(problem, main=False) or why_not_layouts(problem, 1)):
            return reason
        return rows.why_not_size(problem)

    def space(self, problem: Problem, target: Target) -> Space:
        return rows.space(_view(problem), target)

    def default(self, problem: Problem, target: Target) -> Config:
        return rows.default(_view(problem), target)

    def source(self, problem: Problem, config: Config, target: Target) -> str:
        return "".join(_texts(problem, Tile(_view(problem), config)))

    def call(self, problem: Problem, config: Config, device: CudaDevice) -> Call:
        view = _view(problem)
        tile = Tile(view, config)
        kernels = [load(text) for text in _texts(problem, tile)]
        grid, warps, real = tile.grid, int(config["warps"]), fold.real(view.x.dtype)

        def call(queue: CudaQueue, inputs: Any, outputs: Any) -> None:
            if not view.x.size:
                return
            given = [inputs[0], *inputs[1:], outputs[0]]
            if tile.split == 1:
                kernels[0][grid](*given, num_warps=warps)
                return
            parts = rows.scratch(queue, 2 * tile.split * view.rows, real)
            kernels[0][grid](inputs[0], parts, num_warps=warps)
            kernels[1][grid](*given, parts, num_warps=warps)

        return call


def _view(problem: Problem) -> RowView:
    x = tensor(problem.input(0))
    rank = len(x.dims)
    return RowView(x, frozenset({int(problem.attrs.get("axis", -1)) % rank}) if rank else frozenset())


def _texts(problem: Problem, tile: Tile) -> list[str]:
    if tile.split == 1:
        return [_finish(problem, tile)]
    return [_parts(tile), _finish(problem, tile)]


def _states(tile: Tile, how: fold.TritonFold, real: str) -> list[str]:
    return [f"{name} = tl.full(({tile.rows}, {tile.block}), {start}, {real})" for name, start in how.states.items()]


def _read(tile: Tile, real: str) -> str:
    return f"v = tl.load(x + at, mask=ok, other={fold.LOWEST}).to({real})"


def _parts(tile: Tile) -> str:
    """The text of the kernel that computes each part's largest element and sum of exponentials."""
    how, real, many = fold.exponentials(finite=False), fold.real(tile.view.x.dtype), tile.split * tile.view.rows
    lines = [
        *tile.head(), *_states(tile, how, real), *tile.sweep(_read(tile, real), *how.update), *how.collapse,
        f"here = parts + part * {tile.view.rows} + row",
        "tl.store(here, best, mask=inside)", f"tl.store(here + {many}, total, mask=inside)",
    ]  # fmt: skip
    return rows.kernel(["x", "parts"], lines)


def _finish(problem: Problem, tile: Tile) -> str:
    view, out = tile.view, tensor(problem.outputs[0])
    how, real, many = fold.exponentials(finite=False), fold.real(view.x.dtype), tile.split * view.rows
    log = problem.op == "LogSoftmax"
    lines = tile.head()
    if tile.whole:
        lines += [
            _read(tile, real), "best = tl.max(v, 1)", "e = tl.exp(v - best[:, None])", "total = tl.sum(e, 1)",
        ]  # fmt: skip
    elif tile.split == 1:
        lines += [*_states(tile, how, real), *tile.sweep(_read(tile, real), *how.update), *how.collapse]
    else:
        lines += [
            f"there = parts + tl.arange(0, {tile.split})[None, :] * {view.rows} + row[:, None]",
            f"best = tl.load(there, mask=inside[:, None], other={fold.LOWEST})",
            f"total = tl.load(there + {many}, mask=inside[:, None], other=0.0)", *how.collapse,
        ]  # fmt: skip
    lines.append("factor = tl.log(total)" if log else "factor = 1.0 / total")
    if log:
        result = "v - best[:, None] - factor[:, None]"
    else:
        result = "e * factor[:, None]" if tile.whole else "tl.exp(v - best[:, None]) * factor[:, None]"
    body, last = chain(problem, "y", "at", "ok", last=tile.last, indent="")
    lines += tile.sweep(
        *([] if tile.whole else [_read(tile, real)]), f"y = {result}", *body,
        f"tl.store(out + at, {last}.to({NAMES[out.dtype]}), mask=ok)",
    )  # fmt: skip
    operands = [f"p{i}" for i in range(1, len(problem.inputs))]
    pointers = ["x", *operands, "out", *(["parts"] if tile.split > 1 else [])]
    return rows.kernel(pointers, lines)


SOLVERS = (TritonSoftmax(),)
