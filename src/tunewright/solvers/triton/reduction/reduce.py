"""Reductions over any axes, and poolings with a single window over the whole input.

Programs that share a row write their parts to scratch memory. The last program to arrive combines them in order and
finishes the row. This takes one launch, and every run has the same result.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from tunewright.devices.base import Target
from tunewright.devices.cuda.device import CudaDevice, CudaQueue
from tunewright.ir.types import PLAIN, DType
from tunewright.ops.windows import windows
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Missing, Problem
from tunewright.solvers.triton.source.cuda_kernel import Call, CudaSolver

from ..elementwise.elementwise import why_not_layouts
from ..source import fold, rows
from ..source.fold import TritonFold
from ..source.rows import RowView, Tile, indented, real_text, tensor
from ..source.text import NAMES, chain, load, why_not_chain

_EXTREMA = frozenset({"ReduceMax", "ReduceMin"})
_FRACTIONAL = frozenset({"ReduceMean", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"})
_WHOLE = frozenset({"ReduceSum", "ReduceProd", "ReduceL1", "ReduceSumSquare"})
_INTEGERS = frozenset({DType.INT8, DType.UINT8, DType.INT16, DType.INT32, DType.INT64})
#: largest power that is computed by repeated multiplication
MOST_POWER = 8


def fold_of(op: str, dtype: DType, count: int) -> TritonFold:
    """The fold of a Reduce operation for rows of ``count`` elements."""
    if op in _EXTREMA:
        return fold.extremum(dtype, op == "ReduceMax")
    if op == "ReduceProd":
        return fold.product(dtype)
    if op == "ReduceLogSumExp":
        return fold.exponentials(finite=True)
    if op == "ReduceL1":
        return fold.total(dtype, "tl.abs(v)")
    plain, square = fold.total(dtype), fold.total(dtype, "v * v")
    return {
        "ReduceSum": plain,
        "ReduceMean": plain.finished(f"total / {real_text(count)}"),
        "ReduceLogSum": plain.finished("tl.log(total)"),
        "ReduceSumSquare": square,
        "ReduceL2": square.finished("tl.sqrt(total)"),
    }[op]


def pool_fold(op: str, dtype: DType, p: int) -> TritonFold:
    """The fold of a pooling. An average still has to be divided."""
    if op.endswith("MaxPool"):
        return fold.extremum(dtype, largest=True)
    if op.endswith("AveragePool"):
        return fold.total(dtype)
    if p == 1:
        return fold.total(dtype, "tl.abs(v)")
    if p == 2:
        return fold.total(dtype, "v * v").finished("tl.sqrt(total)")
    root = f"tl.exp2(tl.log2(total) * {1 / p!r})"
    return fold.total(dtype, " * ".join(["tl.abs(v)"] * p)).finished(root)


def why_not_pool(problem: Problem) -> str | None:
    """None when `pool_fold` supports the operation for these elements, else the reason."""
    dtype, p = tensor(problem.input(0)).dtype, int(problem.attrs.get("p", 2))
    if not problem.op.endswith("MaxPool") and dtype not in rows.FLOATS:
        return f"{problem.op} of {dtype}"
    if problem.op.endswith("LpPool") and not 1 <= p <= MOST_POWER:
        return f"p {p} is not 1 to {MOST_POWER}"
    return None


class Folding(CudaSolver):
    """The common base of `TritonReduce` and `TritonGlobalPool`: it sees a problem as a view and a fold."""

    layouts = frozenset({PLAIN.name, "nhwc"})

    @abstractmethod
    def view(self, problem: Problem) -> RowView:
        """The view whose rows become one number each."""

    @abstractmethod
    def fold(self, problem: Problem) -> TritonFold:
        """The fold of the rows."""

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, out = tensor(problem.input(0)), tensor(problem.outputs[0])
        if x.layout != out.layout:
            return "input and output differ in layout"
        if len(problem.outputs) > 1:
            return "makes one output"
        if x.layout != PLAIN and len(out.dims) != len(x.dims):
            return "axes have to stay in this layout"
        if problem.epilogue:
            first = len(problem.main_inputs)
            if reason := why_not_chain(problem, main=False) or why_not_layouts(problem, first):
                return reason
        return rows.why_not_size(problem)

    def space(self, problem: Problem, target: Target) -> Space:
        return rows.space(self.view(problem), target)

    def default(self, problem: Problem, target: Target) -> Config:
        return rows.default(self.view(problem), target)

    def source(self, problem: Problem, config: Config, target: Target) -> str:
        return _text(problem, Tile(self.view(problem), config), self.fold(problem))

    def call(self, problem: Problem, config: Config, device: CudaDevice) -> Call:
        view, how = self.view(problem), self.fold(problem)
        tile = Tile(view, config)
        kernel = load(_text(problem, tile, how))
        warps, first = int(config["warps"]), len(problem.main_inputs)
        parts, real = len(how.states) * tile.split * view.rows, fold.real(view.x.dtype)

        def call(queue: CudaQueue, inputs: Any, outputs: Any) -> None:
            if not view.rows:
                return
            given = [inputs[0], *inputs[first:], outputs[0]]
            if tile.split > 1:
                given += [rows.scratch(queue, parts, real), queue.zeros(tile.grid[0])]
            kernel[tile.grid](*given, num_warps=warps)

        return call


class TritonReduce(Folding):
    """All Reduce operations."""

    id = "triton.reduce"
    ops = _EXTREMA | _FRACTIONAL | _WHOLE
    # One kernel; the library needs a second one to copy or to run the epilogue.
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x = tensor(problem.input(0))
        axes = _axes(problem)
        if isinstance(axes, str):
            return axes
        if x.dtype not in rows.FLOATS:
            if problem.op in _FRACTIONAL or (x.dtype is DType.BOOL and problem.op not in _EXTREMA):
                return f"{problem.op} of {x.dtype}"
            if x.dtype not in _INTEGERS | {DType.BOOL}:
                return f"does not take {x.dtype}"
        return super().refuse(problem, target)

    def view(self, problem: Problem) -> RowView:
        axes = _axes(problem)
        assert not isinstance(axes, str), axes
        return RowView(tensor(problem.input(0)), frozenset(axes))

    def fold(self, problem: Problem) -> TritonFold:
        return fold_of(problem.op, tensor(problem.input(0)).dtype, self.view(problem).count)


class TritonGlobalPool(Folding):
    """Poolings over all spatial axes: global ones, and those with a window as large as the input."""

    id = "triton.pool_global"
    ops = frozenset({"GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool", "AveragePool", "MaxPool", "LpPool"})
    # ahead of the sliding window, which uses a program of few threads per result
    rank = 49

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x = tensor(problem.input(0))
        if reason := why_not_pool(problem):
            return reason
        if not problem.op.startswith("Global"):
            win = windows(x.dims[2:], problem.attrs["kernel_shape"], problem.attrs)
            if win.kernel != x.dims[2:] or any(d != 1 for d in win.output) or any(win.head) or any(win.tail):
                return "the window is not all of the input"
            if any(d != 1 for d in win.dilations):
                return "the window is dilated"
        if problem.op.endswith("MaxPool") and not self.view(problem).count:
            return "nothing has no maximum"
        return super().refuse(problem, target)

    def view(self, problem: Problem) -> RowView:
        x = tensor(problem.input(0))
        return RowView(x, frozenset(range(2, len(x.dims))))

    def fold(self, problem: Problem) -> TritonFold:
        how = pool_fold(problem.op, tensor(problem.input(0)).dtype, int(problem.attrs.get("p", 2)))
        average = problem.op.endswith("AveragePool")
        return how.finished(f"total / {real_text(self.view(problem).count)}") if average else how


def _axes(problem: Problem) -> tuple[int, ...] | str:
    """The axes of a Reduce operation, or the reason why they are unknown."""
    given, x = problem.input(1), tensor(problem.input(0))
    axes, rank = problem.value(1) if given is not None else None, len(x.dims)
    if given is not None and axes is None and tensor(given).size:
        return Missing("the axes are not constant")
    if axes is None or not axes.size:
        return () if problem.attrs.get("noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted({int(a) % rank for a in axes.reshape(-1)}))


def _text(problem: Problem, tile: Tile, how: TritonFold) -> str:
    view, out = tile.view, tensor(problem.outputs[0])
    real = fold.real(view.x.dtype)
    lines = tile.head()
    lines += [f"{name} = tl.full(({tile.rows}, {tile.block}), {start}, {real})" for name, start in how.states.items()]
    lines += tile.sweep(f"v = {fold.read('x + at', 'ok', view.x.dtype, how)}", *how.update)
    lines += how.collapse
    body, last = chain(problem, "made", "row", "inside", indent="")
    kind = NAMES[out.dtype]
    final = f"({last}).to({kind})" if out.dtype is not DType.BOOL else f"({last}) != 0"
    finish = [f"made = {how.result}", *body, f"tl.store(out + row, {final}, mask=inside)"]
    if tile.split == 1:
        lines += finish
    else:
        many = tile.split * view.rows
        lines.append(f"here = parts + part * {view.rows} + row")
        lines += [f"tl.store(here + {k * many}, {name}, mask=inside)" for k, name in enumerate(how.states)]
        lines += ["tl.debug_barrier()", 'arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")',
                  f"if arrived == {tile.split - 1}:"]  # fmt: skip
        there = f"parts + tl.arange(0, {tile.split})[None, :] * {view.rows} + row[:, None]"
        again = ["tl.store(counters + tile, 0)", f"there = {there}"]
        again += [
            f'{name} = tl.load(there + {k * many}, mask=inside[:, None], other={start}, cache_modifier=".cg")'
            for k, (name, start) in enumerate(how.states.items())
        ]
        lines += indented([*again, *how.collapse, *finish])
    operands = [f"p{i}" for i in range(len(problem.main_inputs), len(problem.inputs))]
    pointers = ["x", *operands, "out", *(["parts", "counters"] if tile.split > 1 else [])]
    return rows.kernel(pointers, lines, how.functions)


SOLVERS = (TritonReduce(), TritonGlobalPool())
