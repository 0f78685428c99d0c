"""NonZero and Compress with a count: elements are counted, then each work-item writes behind the earlier ones."""

from __future__ import annotations

import math
from typing import ClassVar

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater, hint
from tunewright.ir.types import DType
from tunewright.ops.internal.row_counts import COUNTED
from tunewright.ops.shapes import axis_of
from tunewright.solvers.base import Config, Problem, tensor

from ..source.base import CSolver
from ..source.element_words import MOVABLE, word, words
from ..source.emit import STORAGE, EmittedLaunch, In, Out, Scratch, Source
from ..source.indices import PER_UNIT, Shares, table

#: elements whose places are collected at a time: the list stays in the fastest cache
PIECE = 2048

#: Lists the nonzero elements from ``begin`` on. Only the place in the list depends on data.
_LISTED = """
INLINE int listed(GLOBAL const S* x, int begin, int end, i32* found) {
  int count = 0;
  for (int i = begin; i < end; i++) {
    found[count] = i;
    count += IS_SET(x[i]);
  }
  return count;
}
"""
_COUNT = """
int begin = GID(0) * EACH, end = begin + EACH < SIZE ? begin + EACH : SIZE;
int set = 0;
for (int i = begin; i < end; i++) set += IS_SET(x[i]);
counts[GID(0)] = set;"""

#: ``at``: elements found by earlier work-items; ``all``: elements found by all
SUMMED = """
int at = 0, all = 0;
for (int k = 0; k < PARTS; k++) {
  const int one = counts[k];
  all += one;
  at += k < GID(0) ? one : 0;
}"""

_COORDINATES = """
  for (int j = 0; j < count; j++) {
    const int place = found[j];
    if (place - base >= WIDTH) {
      int row = place / WIDTH;
      base = row * WIDTH;
      for (int d = RANK - 2; d >= 0; d--) {
        outer[d] = row % dims[d];
        row /= dims[d];
      }
    }
    for (int d = 0; d < RANK - 1; d++) y[d * (i64)all + at + j] = outer[d];
    y[(RANK - 1) * (i64)all + at + j] = place - base;
  }"""
_NON_ZERO = (
    SUMMED
    + """
if (GID(0) == 0) total[0] = all;
int begin = GID(0) * EACH, end = begin + EACH < SIZE ? begin + EACH : SIZE;
i32 found[PIECE];
BEGIN
for (; begin < end; begin += PIECE) {
  const int count = listed(x, begin, begin + PIECE < end ? begin + PIECE : end, found);
WRITE
  at += count;
}"""
)


class NonZero(CSolver):
    """Work-items take ranges of elements in memory order."""

    family = "non_zero"
    ops = frozenset({COUNTED["NonZero"]})
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        return "takes no epilogue" if problem.epilogue else None

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x = tensor(problem.inputs[0])
        dims = x.dims or (1,)
        pieces = -(-x.size // PIECE)
        each = PIECE * greater(1, -(-hint(pieces) // (PER_UNIT * target.units)))
        parts = greater(1, -(-x.size // each))
        counts = Scratch("counts", 4 * parts)
        first, second = Source("non_zero_count", self.specialise), Source("non_zero", self.specialise)
        for source in (first, second):
            source.buffer("x", x.dtype, In(0))
            source.buffer("counts", DType.INT32, counts)
            source.dims(SIZE=x.size, EACH=each, PARTS=parts)
            _define(source)
        first.add(_COUNT)
        second.buffer("y", DType.INT64, Out(0))
        second.buffer("total", DType.INT64, Out(1))
        second.fixed(PIECE=PIECE, RANK=len(dims))
        second.function(_LISTED)
        if len(dims) == 1:
            begin, write = "", "  for (int j = 0; j < count; j++) y[at + j] = found[j];"
        else:
            second.buffer("dims", DType.INT32, table([dims]))
            second.dims(WIDTH=dims[-1])
            begin, write = "int outer[RANK - 1] = {0}, base = -WIDTH;", _COORDINATES
        second.add(_NON_ZERO.replace("BEGIN", begin).replace("WRITE", write))
        return [first.call([parts]), second.call([parts])]


def _define(source: Source) -> None:
    """Define the test of an element in a text."""
    element = source.load("x", "0").replace("x[0]", "(s)")
    source.fixed(S=STORAGE[source.dtype("x")])
    source.function(f"#define IS_SET(s) ({element} != 0)")


_COMPRESS = (
    SUMMED
    + """
const int row = GID(1) * ROWS, stop = row + ROWS < OUTER ? row + ROWS : OUTER;
if (GID(0) == 0 && GID(1) == 0) total[0] = all;
int begin = GID(0) * EACH, end = begin + EACH < SIZE ? begin + EACH : SIZE;
i32 found[PIECE];
for (; begin < end; begin += PIECE) {
  const int count = listed(x, begin, begin + PIECE < end ? begin + PIECE : end, found);
  for (int r = row; r < stop; r++) {
    GLOBAL W* to = y + (r * all + at) * INNER;
    GLOBAL const W* from = data + r * LENGTH * INNER;
    for (int j = 0; j < count; j++)
      for (int i = 0; i < INNER; i++) to[j * INNER + i] = from[found[j] * INNER + i];
  }
  at += count;
}"""
)


class Compress(CSolver):
    """Work-items take ranges of the condition, for some of the rows in front of its axis."""

    family = "compress"
    ops = frozenset({COUNTED["Compress"]})
    dtypes: ClassVar[frozenset[DType]] = MOVABLE
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        data, condition = problem.inputs[0], problem.input(1)
        if problem.epilogue or condition is None:
            return "takes no epilogue, and a condition"
        if tensor(condition).dtype is not DType.BOOL:
            return f"a condition of {tensor(condition).dtype}"
        if tensor(condition).is_static and tensor(data).is_static and tensor(condition).size > _length(problem):
            return "the condition is longer than what it selects from"
        return None

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        data, condition, axis = tensor(problem.inputs[0]), tensor(problem.inputs[1]), problem.attrs.get("axis")
        at = None if axis is None else axis_of(int(axis), len(data.dims))
        outer = 1 if at is None else math.prod(data.dims[:at])
        inner = (1 if at is None else math.prod(data.dims[at + 1 :])) * words(data.dtype)
        shares = Shares.of(outer, condition.size, inner * word(data.dtype).itemsize, target)
        each = greater(1, shares.columns)
        parts, across = greater(1, -(-condition.size // each)), greater(1, -(-outer // shares.rows))
        first, second = Source("compress_count", self.specialise), Source("compress", self.specialise)
        for source in (first, second):
            source.buffer("x", DType.BOOL, In(1))
            source.buffer("counts", DType.INT32, Scratch("counts", 4 * parts))
            source.dims(SIZE=condition.size, EACH=each, PARTS=parts)
            _define(source)
        first.add(_COUNT)
        second.buffer("data", word(data.dtype), In(0))
        second.buffer("y", word(data.dtype), Out(0))
        second.buffer("total", DType.INT64, Out(1))
        second.fixed(PIECE=PIECE, W=STORAGE[word(data.dtype)], **({"INNER": 1} if at is None else {}))
        second.dims(OUTER=outer, ROWS=shares.rows, LENGTH=_length(problem))
        second.dims(**({} if at is None else {"INNER": inner}))
        second.function(_LISTED)
        second.add(_COMPRESS)
        return [first.call([parts]), second.call([parts, across])]


def _length(problem: Problem) -> int:
    """Return the number of elements, or rows along the axis, that may be selected."""
    data, axis = tensor(problem.inputs[0]), problem.attrs.get("axis")
    return data.size if axis is None else data.dims[axis_of(int(axis), len(data.dims))]


SOLVERS = (NonZero(), Compress())
