"""Reductions over any axes.

Adjacent axes of one kind are merged, which leaves few patterns. Either the innermost axis is reduced (rows, folded in
lanes that become vectors), or it is kept (columns, folded side by side). Where few results come from many elements,
work-items fold parts into scratch memory and a second launch folds those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tunewright.devices.base import Target
from tunewright.ir.symbolic import hint
from tunewright.ir.types import DType
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Missing, Problem, tensor

from ..source import fold
from ..source.base import CSolver, both
from ..source.emit import COMPUTE, EmittedLaunch, In, Out, Scratch, Source
from ..source.fold import Fold

#: the number of results of one work-item of the second launch
_FINISH = 4096
#: the number of columns that a work-item folds side by side
SLAB = 256


@dataclass(frozen=True)
class ReductionPattern:
    """A reduction with merged axes, each (size, stride), without the innermost ones."""

    kept: tuple[tuple[int, int], ...]
    reduced: tuple[tuple[int, int], ...]
    #: the number of elements folded in one pass, and their distance
    inner: tuple[int, int]
    #: The number of contiguous results; 0: the elements of ``inner`` are contiguous, and there is one result.
    columns: int

    @staticmethod
    def of(dims: Sequence[int], axes: Sequence[int]) -> ReductionPattern:
        outputs = math.prod(d for i, d in enumerate(dims) if i not in axes)
        if not math.prod(dims):
            return ReductionPattern(((outputs, 0),), (), (0, 0), 0)
        merged: list[tuple[int, bool]] = []
        for i, d in enumerate(dims):
            if d == 1:
                continue
            if merged and merged[-1][1] == (i in axes):
                merged[-1] = (merged[-1][0] * d, i in axes)
            else:
                merged.append((d, i in axes))
        strides = [math.prod(d for d, _ in merged[i + 1 :]) for i in range(len(merged))]
        kept = [(d, s) for (d, gone), s in zip(merged, strides, strict=True) if not gone]
        reduced = [(d, s) for (d, gone), s in zip(merged, strides, strict=True) if gone]
        columns = kept.pop()[0] if merged and not merged[-1][1] else 0
        inner = reduced.pop() if reduced else (1, 1)
        return ReductionPattern(tuple(kept), tuple(reduced), inner, columns)

    @property
    def outer(self) -> int:
        """The number of kept elements before the innermost ones."""
        return math.prod(d for d, _ in self.kept)

    @property
    def rows(self) -> int:
        """The number of reduced elements before the innermost ones."""
        return math.prod(d for d, _ in self.reduced)

    @property
    def outputs(self) -> int:
        return self.outer * (self.columns or 1)

    @property
    def count(self) -> int:
        """The number of elements of one result."""
        return self.rows * self.inner[0]


@dataclass(frozen=True)
class ReductionParts:
    """A work-item folds ``rows`` x ``inner`` elements; there are ``down`` x ``across`` parts."""

    rows: int
    inner: int
    down: int
    across: int

    @staticmethod
    def of(pattern: ReductionPattern, wanted: int) -> ReductionParts:
        if wanted <= 1:
            return ReductionParts(pattern.rows, pattern.inner[0], 1, 1)
        if pattern.rows >= wanted:
            rows, down = fold.split(pattern.rows, wanted)
            return ReductionParts(rows, pattern.inner[0], down, 1)
        inner, across = fold.split(-(-pattern.inner[0] // 64), wanted)
        return ReductionParts(pattern.rows, 64 * inner, 1, across)

    @property
    def count(self) -> int:
        return self.down * self.across


def fold_of(op: str, dtype: DType) -> Fold:
    """How a Reduce operation (except ReduceLogSumExp) folds elements of a type."""
    real, value = fold.is_float(dtype), COMPUTE[dtype]
    plain = fold.total(dtype)
    if op == "ReduceSum":
        return plain
    if op == "ReduceProd":
        return fold.product(dtype)
    if op in ("ReduceMax", "ReduceMin"):
        return fold.extremum(dtype, op == "ReduceMax")
    if op == "ReduceL1":
        return fold.total(dtype, f"v < 0 ? -({plain.type})v : ({plain.type})v")
    if op == "ReduceMean":
        if real:
            return plain.finished("a / N")
        acc = DType.FLOAT64 if value[1:] == "64" else DType.INT64
        return Fold(acc, "0", "v", "a + b", f"({value})((f64)a / N)")
    if op == "ReduceLogSum":
        return plain.finished(f"{value}_log(a)" if real else f"({value})f64_log((f64)({value})a)")
    square = fold.total(dtype, f"({plain.type})v * v")
    if op == "ReduceSumSquare":
        return square
    assert op == "ReduceL2"
    return square.finished(f"{value}_sqrt(a)" if real else f"({value})f64_sqrt((f64)({value})a)")


_SIMPLE = frozenset({"ReduceSum", "ReduceProd", "ReduceL1", "ReduceSumSquare"})
_EXTREMA = frozenset({"ReduceMax", "ReduceMin"})
_FRACTIONAL = frozenset({"ReduceMean", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"})


class Reduce(CSolver):
    """All of the Reduce operations."""

    family = "reduce"
    ops = _SIMPLE | _EXTREMA | _FRACTIONAL
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if problem.epilogue:
            return "takes no epilogue"
        x = tensor(problem.inputs[0])
        axes = axes_of(problem)
        if isinstance(axes, str):
            return axes
        if x.dtype is DType.BOOL and problem.op not in _EXTREMA:
            return f"{problem.op} of bool"
        if problem.op in _FRACTIONAL and not fold.is_float(x.dtype):
            if x.dtype.itemsize < 4:
                return f"{problem.op} of {x.dtype}"
            if x.is_static and not x.size:
                return f"{problem.op} of nothing has no integer value"
        return None

    def default(self, problem: Problem, target: Target) -> Config:
        if not problem.is_static:
            return {"lanes": 64, "grain": fold.GRAIN}
        return {"lanes": fold.lanes_for(_pattern(problem).inner[0]), "grain": fold.GRAIN}

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"lanes": [16, 32, 64], "grain": [4096, fold.GRAIN, 65536]})

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x, y = tensor(problem.inputs[0]), tensor(problem.outputs[0])
        pattern = _pattern(problem)
        items = fold.work_items(x.size, target.units, int(config["grain"]))
        plan = _Plan(pattern, items, int(config["lanes"]), self.specialise)
        if problem.op != "ReduceLogSumExp":
            return plan.calls("", fold_of(problem.op, x.dtype), x.dtype, y.dtype, Out())
        value, real = COMPUTE[x.dtype], fold.is_float(x.dtype)
        acc = fold.wide(x.dtype) if real else DType.FLOAT64
        # An infinite or NaN maximum is not subtracted: the sum of exponentials is then infinite, NaN or 0 without it.
        finite = "a - a == 0 ? a : 0" if real else "a"
        top = Scratch("top", pattern.outputs * fold.wide(x.dtype).itemsize)
        highest = fold.extremum(x.dtype, largest=True).finished(finite)
        kind = COMPUTE[acc]
        sums = Fold(acc, "0", f"{kind}_exp(({kind})(v - top))", "a + b", f"({value})({kind}_log(a) + top)")
        return [
            *plan.calls("top_", highest, x.dtype, fold.wide(x.dtype), top),
            *plan.calls("", sums, x.dtype, y.dtype, Out(), top),
        ]


@dataclass(frozen=True)
class _Plan:
    """The division of a pattern into work-items."""

    pattern: ReductionPattern
    items: int
    lanes: int
    specialise: bool

    def calls(
        self, name: str, how: Fold, source: DType, result: DType, out: Out | Scratch, top: Scratch | None = None
    ) -> list[EmittedLaunch]:
        """The launches of one fold; with ``top``, elements are taken relative to the largest one of each result."""
        slabs = -(-self.pattern.columns // SLAB) or 1
        tiles = self.pattern.outer * slabs
        # A second launch pays when half of the work-items would have nothing to do.
        few = 0 < 2 * hint(tiles) < hint(self.items)
        parts = ReductionParts.of(self.pattern, -(-hint(self.items) // hint(tiles)) if few else 1)
        if parts.count == 1:
            return [self._fold(f"{name}reduce", how, source, result, out, top, parts, tiles)]
        partial = Scratch(f"{name}partial", parts.count * self.pattern.outputs * how.acc.itemsize)
        return [
            self._fold(f"{name}reduce_parts", how, source, how.acc, partial, top, parts, tiles),
            self._finish(f"{name}reduce_finish", how, source, result, out, top, partial, parts.count),
        ]

    def _fold(
        self, name: str, how: Fold, dtype: DType, result: DType, out: Out | Scratch, top: Scratch | None,
        parts: ReductionParts, tiles: int,
    ) -> EmittedLaunch:  # fmt: skip
        pattern, whole = self.pattern, parts.count == 1
        source = Source(name, self.specialise)
        source.buffer("x", dtype, In(0))
        if top is not None:
            source.buffer("tops", fold.wide(dtype), top)
        source.buffer("y", result, out)
        source.fixed(LANES=self.lanes, SLAB=SLAB)
        how.define(source, COMPUTE[dtype], COMPUTE[result] if whole else None)
        each, grid = fold.split(tiles, self.items)
        source.dims(TILES=tiles, TILES_EACH=each, OUTPUTS=pattern.outputs, COUNT=pattern.count)
        source.dims(ROWS=pattern.rows, INNER=pattern.inner[0], INNER_STRIDE=pattern.inner[1], COLUMNS=pattern.columns)
        source.dims(PART_ROWS=parts.rows, PART_INNER=parts.inner, ACROSS=parts.across)
        write = _columns if pattern.columns else _rows
        offsets = _offset(source, "outer", "K", pattern.kept), _offset(source, "row", "R", pattern.reduced)
        source.add(f"""
const int part = GID(1);
const int first = part / ACROSS * PART_ROWS, last = first + PART_ROWS < ROWS ? first + PART_ROWS : ROWS;
const int begin = part % ACROSS * PART_INNER, end = begin + PART_INNER < INNER ? begin + PART_INNER : INNER;
const int stop = (GID(0) + 1) * TILES_EACH < TILES ? (GID(0) + 1) * TILES_EACH : TILES;
for (int tile = GID(0) * TILES_EACH; tile < stop; tile++) {{
{write(source, how, top is not None, whole, *offsets)}
}}""")
        return source.call([grid, parts.count])

    def _finish(
        self, name: str, how: Fold, dtype: DType, result: DType, out: Out | Scratch, top: Scratch | None,
        partial: Scratch, parts: int,
    ) -> EmittedLaunch:  # fmt: skip
        source = Source(name, self.specialise)
        source.buffer("x", how.acc, partial)
        if top is not None:
            source.buffer("tops", fold.wide(dtype), top)
        source.buffer("y", result, out)
        how.define(source, COMPUTE[dtype], COMPUTE[result])
        source.dims(OUTPUTS=self.pattern.outputs, COUNT=self.pattern.count, PARTS=parts)
        source.fixed(CHUNK=_FINISH)
        source.add(f"""
const int stop = (GID(0) + 1) * CHUNK < OUTPUTS ? (GID(0) + 1) * CHUNK : OUTPUTS;
for (int o = GID(0) * CHUNK; o < stop; o++) {{
  {how.type} a = x[o];
  for (int p = 1; p < PARTS; p++) a = fold_join(a, x[p * OUTPUTS + o]);
  {source.store("y", "o", f"fold_finish(a, COUNT, {'0' if top is None else 'tops[o]'})")}
}}""")
        return source.call([-(-self.pattern.outputs // _FINISH)])


def _rows(source: Source, how: Fold, relative: bool, whole: bool, kept: str, reduced: str) -> str:
    """Statements for one result of contiguous elements."""
    top = "tops[tile]" if relative else "0"
    loop = f"for (int r = first; r < last; r++) {{ int row = r; {reduced}"
    if whole:
        store = source.store("y", "tile", f"fold_finish(rest, COUNT, {top})")
    else:
        store = source.store("y", "part * OUTPUTS + tile", "rest")
    return f"""
int outer = tile;
{kept}
{fold.rows(source, how, "x", "K_offset + R_offset", loop, top)}
{store}"""


def _columns(source: Source, how: Fold, relative: bool, whole: bool, kept: str, reduced: str) -> str:
    """Statements for contiguous results, folded side by side, four elements of each in one pass."""
    top = "tops[out + l]" if relative else "0"

    def element(number: int) -> str:
        return f"fold_each({source.load('x', f'at + {number} * INNER_STRIDE + l')}, {top})"

    if whole:
        store = source.store("y", "out + l", f"fold_finish(sum[l], COUNT, {top})")
    else:
        store = source.store("y", "part * OUTPUTS + out + l", "sum[l]")
    return f"""
const int slabs = (COLUMNS + SLAB - 1) / SLAB, column = tile % slabs * SLAB;
const int width = column + SLAB < COLUMNS ? SLAB : COLUMNS - column;
int outer = tile / slabs;
const int out = outer * COLUMNS + column;
{kept}
{how.type} sum[SLAB];
for (int l = 0; l < width; l++) sum[l] = fold_start();
for (int r = first; r < last; r++) {{
  int row = r;
  {reduced}
  int i = begin, at = K_offset + R_offset + column + begin * INNER_STRIDE;
  for (; i + 4 <= end; i += 4, at += 4 * INNER_STRIDE)
    for (int l = 0; l < width; l++) {{
      {how.type} a = fold_join({element(0)}, {element(1)});
      {how.type} b = fold_join({element(2)}, {element(3)});
      sum[l] = fold_join(sum[l], fold_join(a, b));
    }}
  for (; i < end; i++, at += INNER_STRIDE)
    for (int l = 0; l < width; l++) sum[l] = fold_join(sum[l], {element(0)});
}}
for (int l = 0; l < width; l++) {{ {store} }}"""


def _offset(source: Source, index: str, name: str, dims: Sequence[tuple[int, int]]) -> str:
    """Statements that compute ``<name>_offset`` from a flat index; they change the variable of the index."""
    dims = dims or [(1, 0)]
    for i, (size, stride) in enumerate(dims):
        source.dims(**{f"{name}{i}": size, f"{name}{i}_STRIDE": stride})
    return fold.unravel(index, f"{name}_offset", name, len(dims))


def axes_of(problem: Problem) -> tuple[int, ...] | str:
    """The axes that a Reduce operation reduces, or why they are unknown."""
    given, x = problem.input(1), tensor(problem.inputs[0])
    axes = problem.value(1)
    if given is not None and axes is None and not (given.is_static and not tensor(given).size):
        return Missing("the axes are not constant")
    if x.shape is None:
        return ()
    rank = len(x.shape)
    if axes is None or not axes.size:
        return () if problem.attrs.get("noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted({int(a) % rank for a in axes.reshape(-1)}))


def _pattern(problem: Problem) -> ReductionPattern:
    axes = axes_of(problem)
    assert not isinstance(axes, str)
    return ReductionPattern.of(tensor(problem.inputs[0]).dims, axes)


SOLVERS = both(Reduce)
