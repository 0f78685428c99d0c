"""Pad in all its modes, and CenterCropPad: copies the part of each row inside the input, and fills the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater
from tunewright.ir.types import TensorType
from tunewright.ops import shapes
from tunewright.ops.microsoft import common
from tunewright.ops.onnx.tensors import slicing
from tunewright.search.space import Config as Point
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Missing, Problem, tensor

from ..source.base import CSolver, both
from ..source.element_words import SINGLE, word
from ..source.emit import STORAGE, EmittedLaunch, In, Out, Source
from ..source.strided_access import Access
from .move import COPY_ROW, SLICE, SLICES, advance, decode, slices

#: Statements that map position i, which may be outside, to an index into an axis of n elements.
_INDEX = {
    "constant": "return i;",
    "edge": "return i < 0 ? 0 : i < n ? i : n - 1;",
    "reflect": "int period = n > 1 ? 2 * n - 2 : 1, r = i % period; r = r < 0 ? r + period : r;\n"
    "return r < n ? r : period - r;",
    "wrap": "int r = i % n; return r < 0 ? r + n : r;",
}


@dataclass(frozen=True)
class _Axis:
    """``size`` elements of the result: ``before`` of them, then ``kept`` elements of the input, then the rest.

    The kept elements of the input begin at ``start`` and are ``stride`` apart.
    """

    size: int
    before: int
    kept: int
    start: int
    stride: int


class Pad(CSolver):
    """Negative pads cut elements off. In the blocked layout channels cannot be padded."""

    family = "pad"
    ops = frozenset({"Pad", common.MS + "Pad", "CenterCropPad"})
    dtypes = SINGLE
    layouts = frozenset({"plain", "blocked"})
    rank = 60

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, y, fill = tensor(problem.inputs[0]), tensor(problem.outputs[0]), problem.input(2)
        if problem.epilogue:
            return "has no epilogue"
        if x.layout != y.layout:
            return "the layouts of input and output differ"
        if _mode(problem) not in _INDEX:
            return f"mode {_mode(problem)!r}"
        for i in (1, 3):
            if problem.input(i) is not None and problem.value(i) is None:
                return Missing(f"input {i}, which says what to pad, is not constant")
        if isinstance(fill, TensorType) and fill.dtype is not x.dtype:
            return f"{fill.dtype} to fill {x.dtype}"
        if not problem.is_static:
            return None
        if x.layout.name == "blocked" and _pairs(problem)[1] != (0, 0):
            return "channels in blocks cannot be padded"
        if _mode(problem) != "constant" and y.size and any(not a.kept for a in _axes(problem)):
            return f"nothing is left of {x} that could go on"
        return None

    def default(self, problem: Problem, target: Target) -> Config:
        return Point(slice=SLICE)

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"slice": SLICES})

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        y, mode = tensor(problem.outputs[0]), _mode(problem)
        if not y.size:
            return []
        axes = _merged(_axes(problem), mode == "constant")
        rank = next(r for r in (3, 7, 31) if r >= len(axes) - 1)
        axes = [_Axis(1, 0, 1, 0, 0)] * (rank + 1 - len(axes)) + axes
        source, dtype = Source(f"pad_{mode}", self.specialise), word(y.dtype)
        c = STORAGE[dtype]
        source.buffer("x", dtype, In(0))
        source.buffer("y", dtype, Out())
        for k, axis in enumerate(axes):
            source.dims(**{f"D{k}": axis.size, f"B{k}": axis.before, f"K{k}": axis.kept, f"S{k}": axis.stride})
        rows, row = math.prod(a.size for a in axes[:-1]), axes[-1].size
        items = slices(rows * row * dtype.itemsize, target, config["slice"])
        per_item, part = -(-rows // items), -(-row // greater(1, items // rows))
        source.dims(XO=sum(a.start for a in axes), ROWS=rows, ITEM=per_item, PART=part)
        source.fixed(D=f"D{rank}", B=f"B{rank}", K=f"K{rank}")
        source.function(COPY_ROW.replace("WORD", c))
        source.function(f"INLINE int padded(int i, int n UNUSED) {{ {_INDEX[mode]} }}")
        outside = "x[at + padded(j - B, K)]"
        if mode == "constant":
            fill = problem.input(2)
            filled = isinstance(fill, TensorType) and fill.size > 0
            source.buffer("fill", dtype, In(2) if filled else In(0))
            source.dims(FILLED=int(filled))
            source.add(f"const {c} value = FILLED ? fill[0] : 0;")
            outside = "value"
        source.add("int first = GID(0) * ITEM, last = first + ITEM < ROWS ? first + ITEM : ROWS;")
        source.add("int from = GID(1) * PART, to = from + PART < D ? from + PART : D;")
        source.add(decode(rank, "first"))
        source.add("for (int row = first; row < last; row++) {")
        source.add("int at = XO, inside = 1;")
        for k in range(rank):
            source.add(f"{{ int i = padded(i{k} - B{k}, K{k}); at += i * S{k}; inside &= i >= 0 && i < K{k}; }}")
        source.add(f"""
GLOBAL {c}* d = y + row * D;
int begin = inside ? B : D, end = inside ? B + K : D;
begin = begin < from ? from : begin < to ? begin : to;
end = end < from ? from : end < to ? end : to;
for (int j = from; j < begin; j++) d[j] = {outside};
if (begin < end) copy_row(x + at + begin - B, d + begin, end - begin);
for (int j = end; j < to; j++) d[j] = {outside};
{advance(rank)} }}""")
        return [source.call([-(-rows // per_item), -(-row // part)])]


def _mode(problem: Problem) -> str:
    return str(problem.attrs.get("mode", "constant"))


def _pairs(problem: Problem) -> list[tuple[int, int]]:
    """(before, after) for every axis."""
    pads, axes = problem.value(1), problem.value(3)
    assert pads is not None
    dims = tensor(problem.inputs[0]).dims
    rank = len(dims)
    if problem.op == "CenterCropPad":
        pairs = [(0, 0)] * rank
        chosen = shapes.axes_of(problem.attrs.get("axes", range(rank)), rank)
        for axis, wanted in zip(chosen, pads.reshape(-1).tolist(), strict=True):
            change = wanted - dims[axis]
            before = change // 2 if change > 0 else -(-change // 2)  # an odd element is added or cut off at the end
            pairs[axis] = (before, change - before)
        return pairs
    return slicing.pad_pairs(pads.reshape(-1).tolist(), None if axes is None else axes.reshape(-1).tolist(), rank)


def _axes(problem: Problem) -> list[_Axis]:
    """The axes in memory; the lanes of a block come last and are not padded."""
    dims = tensor(problem.inputs[0]).physical
    pairs = [*_pairs(problem), (0, 0)][: len(dims)]
    axes = []
    for d, stride, (before, after) in zip(dims, Access.of(dims).strides, pairs, strict=True):
        start = greater(0, -before)
        kept = greater(0, d - start - greater(0, -after))
        axes.append(_Axis(d + before + after, greater(0, before), kept, start * stride, stride))
    return axes


def _merged(axes: Sequence[_Axis], constant: bool) -> list[_Axis]:
    """As few axes as possible. A whole axis joins the outer one, if that is also whole or the filling is constant."""
    found: list[_Axis] = []
    for axis in axes:
        outer = found[-1] if found else None
        if (
            outer
            and axis.size == axis.kept
            and outer.stride == axis.stride * axis.size
            and (constant or outer.size == outer.kept)
        ):
            n = axis.size
            found[-1] = _Axis(outer.size * n, outer.before * n, outer.kept * n, outer.start + axis.start, axis.stride)
        else:
            found.append(axis)
    return found


SOLVERS = both(Pad)
