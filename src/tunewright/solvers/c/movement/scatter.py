"""ScatterElements, ScatterND, TensorScatter and MaxUnpool: a copy of the data, or zeros, then updates by index.

Where indices repeat, the result is that of the reference, which applies the updates in order. Therefore work-items
share only slices that cannot meet. An update whose index is out of range is skipped, and the index reported. Where
indices are small constants, the solver checks them and refuses wrong ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater
from tunewright.ir.types import DType, TensorType
from tunewright.ops.onnx.deform import unpooled
from tunewright.ops.shapes import axis_of
from tunewright.solvers.base import Config, Missing, Problem, tensor

from ..source import fold
from ..source.base import CSolver, both
from ..source.element_words import word
from ..source.emit import STORAGE, EmittedLaunch, In, Out, Scratch, Source
from ..source.indices import ONE_WORD, IndexAxis, Shares, merged, no_indices, outside, strides, table, unfit

#: The new value from the old one and the update; as in numpy, NaN wins.
_COMBINE = {
    "none": "update",
    "add": "old + update",
    "mul": "old * update",
    "max": "(old > update || {nan}) ? old : update",
    "min": "(old < update || {nan}) ? old : update",
}
_NARROW = frozenset({DType.FLOAT16, DType.BFLOAT16})


@dataclass(frozen=True)
class _Target:
    """Where updates are combined: the element type of the result there, that of the updates, and the memory."""

    dtype: DType
    updates: DType
    memory: Out | Scratch


def _target(x: TensorType, reduction: str) -> _Target:
    """The place where updates are combined.

    Narrow floats are summed in float32 and rounded once, integers modulo 2^n whatever their sign.
    """
    if reduction == "none":
        return _Target(word(x.dtype), word(x.dtype), Out())
    if reduction in ("add", "mul"):
        if x.dtype in _NARROW:
            return _Target(DType.FLOAT32, x.dtype, Scratch("wide", 4 * x.size))
        if x.dtype.is_integer:
            return _Target(word(x.dtype), word(x.dtype), Out())
    return _Target(x.dtype, x.dtype, Out())


class _Scatter(CSolver):
    """The base of the solvers here: copy and scatter as two launches; a third one narrows sums of a wider type."""

    dtypes: ClassVar[frozenset[DType]] = ONE_WORD
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        reason = unfit(problem, 3)
        if reason is not None:
            return reason
        x, reduction = tensor(problem.inputs[0]), problem.attrs.get("reduction", "none")
        if reduction not in _COMBINE:
            return f"does not know the reduction {reduction}"
        if reduction != "none" and x.dtype not in STORAGE:
            return f"does not compute with {x.dtype}"
        return no_indices(problem.input(1))

    def _around(
        self, problem: Problem, scatter: list[EmittedLaunch], where: _Target, target: Target
    ) -> list[EmittedLaunch]:
        x = tensor(problem.inputs[0])
        if isinstance(where.memory, Out):
            return [_copy(In(0), where.dtype, where.memory, where.dtype, x.size, target, self.specialise), *scatter]
        return [
            _copy(In(0), x.dtype, where.memory, where.dtype, x.size, target, self.specialise),
            *scatter,
            _copy(where.memory, where.dtype, Out(), x.dtype, x.size, target, self.specialise),
        ]


def _copy(
    source: In | Scratch, given: DType, target: Out | Scratch, made: DType, size: int, where: Target, specialise: bool
) -> EmittedLaunch:
    """The launch that copies elements from one type to another."""
    shares = Shares.of(1, size, given.itemsize + made.itemsize, where)
    text = Source("copy", specialise)
    text.buffer("x", given, source)
    text.buffer("y", made, target)
    text.dims(N=size, PIECE=shares.columns)
    text.add("int from = GID(0) * PIECE, to = from + PIECE < N ? from + PIECE : N;")
    text.add(f"for (int i = from; i < to; i++) {text.store('y', 'i', text.load('x', 'i'))}")
    return text.call(shares.grid[1:])


def _update(source: Source, where: _Target, reduction: str) -> str:
    """The statements that combine element ``to`` of the result with update ``i``."""
    kind = source.compute("y")
    lines = [f"{kind} update = {source.load('updates', 'i')};"]
    if reduction != "none":
        lines.append(f"{kind} old = {source.load('y', 'to')};")
    text = _COMBINE[reduction].format(nan=fold.is_nan(source.dtype("y"), "old"))
    if reduction == "mul" and where.dtype.is_integer:
        text = f"1u * {text}"  # C multiplies u16 as int, which may overflow
    return "\n".join([*lines, source.store("y", "to", text)])


_ELEMENTS = """
int begin = GID(0) * SHARE, end = begin + SHARE < SLICES ? begin + SHARE : SLICES;
int from = GID(1) * PIECE, count = INNER - from < PIECE ? INNER - from : PIECE;
for (int r = begin; r < end; r++) {
  int rest = r, at = from * STEP, first = from;
  for (int k = 0; k < OUTER; k++) {  /* from the last axis to the first */
    int c = rest % axes[3 * k];
    at += c * axes[3 * k + 1];
    first += c * axes[3 * k + 2];
    rest /= axes[3 * k];
  }
  for (int a = 0; a < LENGTH; a++)
    for (int j = 0; j < count; j++) {
      int i = first + a * ALONG + j;
      i64 given = indices[i], index = given < 0 ? given + SIZE : given;
      if (index < 0 || index >= SIZE) {
        wrong(report, WRONG_INDEX, given, SIZE);
        continue;
      }
      int to = at + j * STEP + (int)index * STRIDE;
      UPDATE
    }
}
"""


class ScatterElements(_Scatter):
    """Updates single elements along an axis. Positions that differ in another axis never meet."""

    family = "scatter_elements"
    ops = frozenset({"ScatterElements", "Scatter"})

    def refuse(self, problem: Problem, target: Target) -> str | None:
        reason = super().refuse(problem, target)
        if reason is not None or not problem.is_static:
            return reason
        x, indices, updates = (tensor(t).dims for t in problem.inputs)
        axis = axis_of(int(problem.attrs.get("axis", 0)), len(x))
        if indices != updates or len(indices) != len(x):
            return "indices and updates differ in shape, which the host reports"
        if any(i > d for k, (i, d) in enumerate(zip(indices, x, strict=True)) if k != axis):
            return "the indices are larger than the data, which the host reports"
        return outside(problem, 1, (x[axis],))

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x, indices = tensor(problem.inputs[0]), tensor(problem.inputs[1])
        reduction = problem.attrs.get("reduction", "none")
        where = _target(x, reduction)
        axis = axis_of(int(problem.attrs.get("axis", 0)), len(x.dims))
        if not indices.size:
            return self._around(problem, [], where, target)
        axes = merged(x.dims, indices.dims, axis)
        along = next(a for a in axes if a.chosen)
        inner = axes[-1] if not axes[-1].chosen else IndexAxis(1, 0, 0)
        outer = [a for a in axes if a is not along and a is not inner]
        slices = math.prod(a.length for a in outer)
        moved = 3 * x.dtype.itemsize + indices.dtype.itemsize
        shares = Shares.of(slices, inner.length, along.length * moved, target)
        source = Source("scatter_elements", self.specialise)
        source.buffer("indices", indices.dtype, In(1))
        source.buffer("updates", where.updates, In(2))
        bounds = [(a.length, a.data, a.index) for a in reversed(outer)]
        source.buffer("axes", DType.INT32, table(bounds))
        source.buffer("y", where.dtype, where.memory)
        source.dims(SLICES=slices, OUTER=len(outer), INNER=inner.length, STEP=inner.data)
        source.dims(LENGTH=along.length, ALONG=along.index, SIZE=x.dims[axis], STRIDE=along.data)
        source.dims(SHARE=shares.rows, PIECE=shares.columns)
        source.add(_ELEMENTS.replace("UPDATE", _update(source, where, reduction)))
        return self._around(problem, [source.call(shares.grid)], where, target)


_ROWS = """
int from = GID(0) * PIECE, count = INNER - from < PIECE ? INNER - from : PIECE;
for (int r = 0; r < ROWS; r++) {
  int at = from, legal = 1;
  for (int k = 0; k < DEPTH; k++) {
    i64 given = indices[r * DEPTH + k], index = given < 0 ? given + bounds[2 * k] : given;
    if (index < 0 || index >= bounds[2 * k]) {
      wrong(report, WRONG_INDEX, given, bounds[2 * k]);
      legal = 0;
      break;
    }
    at += (int)index * bounds[2 * k + 1];
  }
  if (!legal) continue;
  i64 target = at, source = r * INNER + from;  /* of 64 bits, or the loop is not vectorised */
  for (int j = 0; j < count; j++) {
    i64 to = target + j, i = source + j;
    UPDATE
  }
}
"""


#: With fewer columns, reading all indices once more does not pay.
_LEAST_COLUMNS = 64


class ScatterND(_Scatter):
    """Updates contiguous rows. Two updates may meet in a row of the result; therefore work-items share columns, not
    rows."""

    family = "scatter_nd"
    ops = frozenset({"ScatterND"})

    def refuse(self, problem: Problem, target: Target) -> str | None:
        reason = super().refuse(problem, target)
        if reason is not None or not problem.is_static:
            return reason
        x, indices, updates = (tensor(t).dims for t in problem.inputs)
        depth = indices[-1] if indices else len(x) + 1
        if depth > len(x) or updates != (*indices[:-1], *x[depth:]):
            return "data, indices and updates do not fit in shape, which the host reports"
        return outside(problem, 1, x[:depth]) if depth else None

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x, indices = tensor(problem.inputs[0]), tensor(problem.inputs[1])
        reduction = problem.attrs.get("reduction", "none")
        where = _target(x, reduction)
        depth, rows = indices.dims[-1], math.prod(indices.dims[:-1])
        inner = math.prod(x.dims[depth:])
        if not rows * inner:
            return self._around(problem, [], where, target)
        piece = greater(Shares.of(1, inner, rows * 3 * x.dtype.itemsize, target).columns, _LEAST_COLUMNS)
        source = Source("scatter_nd", self.specialise)
        source.buffer("indices", indices.dtype, In(1))
        source.buffer("updates", where.updates, In(2))
        bounds = [*zip(x.dims[:depth], strides(x.dims), strict=False)]
        source.buffer("bounds", DType.INT32, table(bounds))
        source.buffer("y", where.dtype, where.memory)
        source.dims(ROWS=rows, DEPTH=depth, INNER=inner, PIECE=piece)
        source.add(_ROWS.replace("UPDATE", _update(source, where, reduction)))
        return self._around(problem, [source.call([-(-inner // piece)])], where, target)


_CACHE = """
int begin = GID(0) * SHARE, end = begin + SHARE < ROWS ? begin + SHARE : ROWS;
for (int r = begin; r < end; r++) {
  i64 first = FIRST;
  if (first < 0 || (!CIRCULAR && first > SIZE - LENGTH)) {
    wrong(report, CIRCULAR ? WRONG_NEGATIVE : WRONG_ROW, first, SIZE - LENGTH + 1);
    continue;
  }
  first %= SIZE;
  for (int a = 0; a < LENGTH; a++) {
    i64 to = first + a < SIZE ? first + a : first + a - SIZE;
    i64 target = (r * SIZE + to) * INNER, source = ((i64)r * LENGTH + a) * INNER;
    for (int j = 0; j < INNER; j++) y[target + j] = updates[source + j];
  }
}
"""


class TensorScatter(_Scatter):
    """A cache that grows: writes rows of the update from a position on, which may differ for each batch."""

    family = "tensor_scatter"
    ops = frozenset({"TensorScatter"})

    def refuse(self, problem: Problem, target: Target) -> str | None:
        reason = unfit(problem, 2)
        if reason is not None:
            return reason
        x = tensor(problem.inputs[0])
        if problem.attrs.get("mode", "linear") not in ("linear", "circular"):
            return f"does not know the mode {problem.attrs['mode']}"
        if x.rank and axis_of(int(problem.attrs.get("axis", -2)), x.rank) == 0:
            return "scatters along the batch, which the host reports"
        return no_indices(problem.input(2))

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x, updates = tensor(problem.inputs[0]), tensor(problem.inputs[1])
        where = _target(x, "none")
        if not updates.size:
            return self._around(problem, [], where, target)
        axis = axis_of(int(problem.attrs.get("axis", -2)), len(x.dims))
        rows, inner, length = math.prod(x.dims[:axis]), math.prod(x.dims[axis + 1 :]), updates.dims[axis]
        shares = Shares.of(rows, 1, 2 * length * inner * x.dtype.itemsize, target)
        source = Source("tensor_scatter", self.specialise)
        source.buffer("updates", where.updates, In(1))
        given = problem.input(2)
        if given is not None:
            source.buffer("starts", tensor(given).dtype, In(2))
        source.buffer("y", where.dtype, where.memory)
        source.fixed(CIRCULAR=int(problem.attrs.get("mode", "linear") == "circular"))
        source.fixed(FIRST="0" if given is None else "starts[r / BATCH_ROWS]")
        source.dims(ROWS=rows, BATCH_ROWS=rows // x.dims[0], SIZE=x.dims[axis], LENGTH=length, INNER=inner)
        source.dims(SHARE=shares.rows)
        source.add(_CACHE)
        return self._around(problem, [source.call(shares.grid[:1])], where, target)


_UNPOOL = """
int begin = GID(0) * PIECE, end = begin + PIECE < N ? begin + PIECE : N;
for (int i = begin; i < end; i++) y[i] = 0;
for (int i = 0; i < COUNT; i++) {
  i64 index = indices[i];
  if (index < 0 || index >= UNPOOLED) {
    wrong(report, WRONG_ROW, index, UNPOOLED);
    continue;
  }
  int rest = (int)index, to = 0;
  for (int k = 0; k < RANK; k++) {  /* from the last axis to the first */
    to += rest % axes[2 * k] * axes[2 * k + 1];
    rest /= axes[2 * k];
  }
  if (to >= begin && to < end) y[to] = x[i];
}
"""


class MaxUnpool(CSolver):
    """Each work-item owns a part of the result and reads all indices, so that the last of equal ones wins."""

    family = "max_unpool"
    ops = frozenset({"MaxUnpool"})
    dtypes: ClassVar[frozenset[DType]] = ONE_WORD
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        reason = unfit(problem, 2)
        if reason is not None:
            return reason
        if problem.input(2) is not None and problem.value(2) is None:
            return Missing("the output's shape is not constant")
        if problem.is_static:
            made, wanted = _unpooled(problem), tensor(problem.outputs[0]).dims
            if len(made) != len(wanted) or any(m > w for m, w in zip(made, wanted, strict=True)):
                return f"{list(made)} does not fit into {list(wanted)}"
            if tensor(problem.inputs[0]).size != tensor(problem.inputs[1]).size:
                return "values and indices differ in number, which the host reports"
        return no_indices(problem.input(1))

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x, indices, y = tensor(problem.inputs[0]), tensor(problem.inputs[1]), tensor(problem.outputs[0])
        made = _unpooled(problem)
        if not y.size:
            return []
        axes = merged(y.dims, made, -1)
        shares = Shares.of(1, y.size, y.dtype.itemsize, target)
        piece = greater(shares.columns, -(-y.size // target.units))
        source = Source("max_unpool", self.specialise)
        source.buffer("x", word(x.dtype), In(0))
        source.buffer("indices", indices.dtype, In(1))
        source.buffer("axes", DType.INT32, table([(a.length, a.data) for a in reversed(axes)]))
        source.buffer("y", word(y.dtype), Out())
        source.dims(N=y.size, PIECE=piece, COUNT=x.size, UNPOOLED=math.prod(made), RANK=len(axes))
        source.add(_UNPOOL)
        return [source.call([-(-y.size // piece)])]


def _unpooled(problem: Problem) -> tuple[int, ...]:
    """The smallest output that fits; the indices count its elements."""
    dims = tensor(problem.inputs[0]).dims
    return (*dims[:2], *(int(d or 0) for d in unpooled(dims[2:], problem.attrs)))


SOLVERS = (*both(ScatterElements), *both(ScatterND), *both(TensorScatter), *both(MaxUnpool))
