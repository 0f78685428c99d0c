"""Gather, GatherND and GatherElements: rows or elements picked by index.

A kernel reads the indices at run time. In place of an index out of range it takes the first one, and reports it. Where
indices are small constants, the solver checks them and refuses wrong ones.
"""

from __future__ import annotations

import math
from typing import ClassVar

from tunewright.devices.base import Target
from tunewright.ir.types import DType
from tunewright.ops.shapes import axis_of
from tunewright.solvers.base import Config, Problem, tensor

from ..source.base import CSolver, both
from ..source.element_words import MOVABLE, word, words
from ..source.emit import EmittedLaunch, In, Out, Source
from ..source.indices import LEGAL, ONE_WORD, Shares, merged, no_indices, outside, strides, table, unfit

_ROWS = """
int begin = GID(0) * SHARE, end = begin + SHARE < ROWS ? begin + SHARE : ROWS;
int from = GID(1) * PIECE, count = INNER - from < PIECE ? INNER - from : PIECE;
int row = begin % INDEX_ROWS, left = BATCH_ROWS - begin % BATCH_ROWS, batch = begin / BATCH_ROWS * BATCH;
int wrong_ones = 0, r = begin;
if (INNER == 1 && DEPTH == 1 && BATCH_ROWS < 16 && BATCH_ROWS == INDEX_ROWS) {  /* a few columns of each batch */
  for (int k = 0; k < INDEX_ROWS; k++) {
    int at = (int)legal(indices[k], bounds[0], &wrong_ones) * bounds[1];
    int first = begin + (k < row ? k - row + INDEX_ROWS : k - row);
    i64 from = first / INDEX_ROWS * BATCH + at;
    for (i64 to = first; to < end; to += INDEX_ROWS, from += BATCH) y[to] = x[from];
  }
  r = end;
} else if (INNER == 1 && DEPTH == 1)
  for (int run = 0; r < end; r += run) {  /* single elements of one batch at a time */
    run = end - r < left ? end - r : left;
    for (int j = 0; j < run; j++) {
      int at = (int)legal(indices[row + j], bounds[0], &wrong_ones) * bounds[1];
      y[r + j] = x[batch + at];
    }
    row = row + run == INDEX_ROWS ? 0 : row + run;
    left -= run;
    if (left == 0) {
      left = BATCH_ROWS;
      batch += BATCH;
    }
  }
for (; r < end; r++) {
  int at = batch;
  for (int k = 0; k < DEPTH; k++)
    at += (int)legal(indices[row * DEPTH + k], bounds[2 * k], &wrong_ones) * bounds[2 * k + 1];
  if (INNER == 1) {
    y[r] = x[at];
  } else {
    i64 source = at + from, target = r * INNER + from;  /* of 64 bits, or the loop is not vectorised */
    for (int j = 0; j < count; j++) y[target + j] = x[source + j];
  }
  if (++row == INDEX_ROWS) row = 0;
  if (--left == 0) {
    left = BATCH_ROWS;
    batch += BATCH;
  }
}
if (wrong_ones)
  for (r = begin; r < end; r++)
    for (int k = 0; k < DEPTH; k++) {
      i64 i = indices[r % INDEX_ROWS * DEPTH + k];
      if (is_outside(i, bounds[2 * k])) wrong(report, WRONG_INDEX, i, bounds[2 * k]);
    }
"""


class Gather(CSolver):
    """Picks contiguous rows: y[r] = x[batch of r, indices of r]. Gather along an axis uses the same indices in each
    batch."""

    family = "gather"
    ops = frozenset({"Gather", "GatherND", "com.microsoft::GatherND"})
    dtypes: ClassVar[frozenset[DType]] = MOVABLE
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        reason = _refuse(problem)
        if reason is not None or not problem.is_static:
            return reason
        x, y = tensor(problem.inputs[0]).dims, tensor(problem.outputs[0])
        sizes: tuple[int, ...]
        if problem.op == "Gather":
            sizes = (x[axis_of(int(problem.attrs.get("axis", 0)), len(x))],)
        else:
            batch = int(problem.attrs.get("batch_dims", 0))
            sizes = x[batch : batch + tensor(problem.inputs[1]).dims[-1]]
        if y.size and 0 in sizes:
            return "there is nothing to choose from, which the host reports"
        return outside(problem, 1, sizes)

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x, indices = tensor(problem.inputs[0]), tensor(problem.inputs[1])
        if problem.op == "Gather":
            first = axis_of(int(problem.attrs.get("axis", 0)), len(x.dims))
            depth, rows = 1, indices.size
            batches = math.prod(x.dims[:first])
            index_rows = rows
        else:
            first = int(problem.attrs.get("batch_dims", 0))
            depth = indices.dims[-1]
            batches = math.prod(x.dims[:first])
            rows = math.prod(indices.dims[first:-1])
            index_rows = batches * rows
        wide = words(x.dtype)
        inner = math.prod(x.dims[first + depth :]) * wide
        if not batches * rows * inner:
            return []
        shares = Shares.of(batches * rows, inner, 2 * word(x.dtype).itemsize, target)
        bounds = [(d, s * wide) for d, s in zip(x.dims[first : first + depth], strides(x.dims)[first:], strict=False)]
        source = Source("gather", self.specialise)
        source.function(LEGAL)
        source.buffer("x", word(x.dtype), In(0))
        source.buffer("indices", indices.dtype, In(1))
        source.buffer("bounds", DType.INT32, table(bounds))
        source.buffer("y", word(x.dtype), Out())
        source.dims(ROWS=batches * rows, INNER=inner, DEPTH=depth, INDEX_ROWS=index_rows)
        source.dims(BATCH_ROWS=rows, BATCH=math.prod(x.dims[first:]) * wide, SHARE=shares.rows, PIECE=shares.columns)
        source.add(_ROWS)
        return [source.call(shares.grid)]


_ELEMENTS = """
int begin = GID(0) * SHARE, end = begin + SHARE < ROWS ? begin + SHARE : ROWS;
int from = GID(1) * PIECE, count = LENGTH - from < PIECE ? LENGTH - from : PIECE;
for (int r = begin; r < end; r++) {
  int rest = r;
  i64 at = from * STEP, line = r * LENGTH + from;
  for (int k = 0; k < OUTER; k++) {  /* from the last axis to the first */
    at += rest % axes[2 * k] * axes[2 * k + 1];
    rest /= axes[2 * k];
  }
  int wrong_ones = 0;
  for (int j = 0; j < count; j++)
    y[line + j] = x[at + j * STEP + (int)legal(indices[line + j], SIZE, &wrong_ones) * STRIDE];
  if (wrong_ones)
    for (int j = 0; j < count; j++)
      if (is_outside(indices[line + j], SIZE)) wrong(report, WRONG_INDEX, indices[line + j], SIZE);
}
"""


class GatherElements(CSolver):
    """Picks single elements: the index tensor holds the source position of each result along the axis."""

    family = "gather_elements"
    ops = frozenset({"GatherElements"})
    dtypes: ClassVar[frozenset[DType]] = ONE_WORD
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        reason = _refuse(problem)
        if reason is not None or not problem.is_static:
            return reason
        x, y = tensor(problem.inputs[0]).dims, tensor(problem.outputs[0])
        axis = axis_of(int(problem.attrs.get("axis", 0)), len(x))
        if any(i > d for k, (i, d) in enumerate(zip(y.dims, x, strict=True)) if k != axis):
            return "the indices are larger than the data, which the host reports"
        if y.size and not x[axis]:
            return "there is nothing to choose from, which the host reports"
        return outside(problem, 1, (x[axis],))

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x, indices = tensor(problem.inputs[0]), tensor(problem.inputs[1])
        if not indices.size:
            return []
        axis = axis_of(int(problem.attrs.get("axis", 0)), len(x.dims))
        axes = merged(x.dims, indices.dims, axis)
        *outer, line = axes
        rows = indices.size // line.length
        shares = Shares.of(rows, line.length, 2 * x.dtype.itemsize + indices.dtype.itemsize, target)
        source = Source("gather_elements", self.specialise)
        source.function(LEGAL)
        source.buffer("x", word(x.dtype), In(0))
        source.buffer("indices", indices.dtype, In(1))
        # Along the chosen axis the index, not the position, selects the element of the data.
        bounds = [(a.length, 0 if a.chosen else a.data) for a in reversed(outer)]
        source.buffer("axes", DType.INT32, table(bounds))
        source.buffer("y", word(x.dtype), Out())
        source.dims(ROWS=rows, LENGTH=line.length, OUTER=len(outer), STEP=0 if line.chosen else line.data)
        source.dims(SIZE=x.dims[axis], STRIDE=strides(x.dims)[axis], SHARE=shares.rows, PIECE=shares.columns)
        source.add(_ELEMENTS)
        return [source.call(shares.grid)]


def _refuse(problem: Problem) -> str | None:
    return unfit(problem, 2) or no_indices(problem.input(1))


SOLVERS = (*both(Gather), *both(GatherElements))
