"""What kernels that move elements by index share: legal indices, axes joined, and how work is divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ...devices.base import Target
from ...ir.symbolic import greater, hint, lesser
from ...ir.types import DType, TensorType, Type
from ..base import Problem
from .emit import Table
from .words import MOVABLE, words

#: types whose elements are moved as one word
ONE_WORD = frozenset(d for d in MOVABLE if words(d) == 1)
INDEX_TYPES = frozenset({DType.INT32, DType.INT64})

#: Legal whatever the index is, and whether it was before. A loop collects that, and who finds something looks for the
#: index that is wrong behind the loop: a call of `wrong` in it would cost registers, and keep it scalar.
LEGAL = """
INLINE i64 legal(i64 i, int size, int* wrong_ones) {
  i64 at = i < 0 ? i + size : i;
  int outside = (u64)at >= (u64)size;
  *wrong_ones |= outside;
  return outside ? 0 : at;
}
INLINE int is_outside(i64 i, int size) { return i < -(i64)size || i >= size; }
"""
#: Row ``i + more``, counted from 0 and limited to the rows there are: the nearest one, where that is reported.
ROW = """
INLINE int row_of(i64 i, int more, int rows, GLOBAL i64* report) {
  if (i >= 0 && i < rows - more) return (int)i + more;
  wrong(report, WRONG_ROW, (i64)((u64)i + (u64)more), rows);
  return i < 0 ? 0 : rows - 1;
}
"""

#: bytes that a work-item should at least move: about 5 microseconds
LEAST_BYTES = 1 << 16
#: work-items for each unit, where there is work enough: a slow one then delays the others little
PER_UNIT = 8


@dataclass(frozen=True)
class Shares:
    """Rows and columns of each work-item, for work of ``rows`` times ``columns`` elements."""

    rows: int
    columns: int
    grid: tuple[int, int]

    @staticmethod
    def of(rows: int, columns: int, nbytes: float, target: Target, least: int = LEAST_BYTES) -> Shares:
        """Whole rows where there are enough of them, else pieces of rows. ``nbytes``: what one element moves."""
        # decided for the sizes at hand; any shares are right
        high, wide, nbytes = hint(rows), hint(columns), hint(nbytes)
        wanted = greater(1, lesser(int(high * wide * nbytes) // least, PER_UNIT * target.units))
        row = greater(1, high // wanted)
        column = columns if high >= wanted else -(-columns // -(-wanted // greater(high, 1)))
        return Shares(row, column, (-(-rows // row), -(-columns // greater(column, 1))))


def strides(dims: Sequence[int]) -> list[int]:
    """Strides of a contiguous array, in elements."""
    return [*accumulate(reversed(dims[1:]), lambda a, b: a * b, initial=1)][::-1] if dims else []


@dataclass(frozen=True)
class Axis:
    """One axis of an index tensor beside that of the data: its length and the strides of both."""

    length: int
    data: int
    index: int
    chosen: bool = False


def merged(data: Sequence[int], index: Sequence[int], axis: int) -> list[Axis]:
    """The axes of an index tensor, joined where they lie contiguously in both; ``axis`` stays alone."""
    found: list[Axis] = []
    for k, (length, s, i) in enumerate(zip(index, strides(data), strides(index), strict=True)):
        if length == 1 and k != axis:
            continue
        last = found[-1] if found else None
        if last is None or k == axis or last.chosen or (last.data, last.index) != (length * s, length * i):
            found.append(Axis(length, s, i, k == axis))
        else:
            found[-1] = Axis(last.length * length, s, i)
    return found


def outside(problem: Problem, i: int, sizes: Sequence[int]) -> str | None:
    """Whether constant indices leave their axis: the host then reports it. Their last dimension has ``sizes``."""
    value = problem.value(i)
    if value is None or not value.size:
        return None
    rows = value.reshape(-1, len(sizes)) if len(sizes) > 1 else value.reshape(-1, 1)
    for column, size in zip(rows.T, sizes, strict=True):
        if not -size <= column.min() <= column.max() < size:
            return f"an index is outside of {size} elements, which the host reports"
    return None


def unfit(problem: Problem, needed: int) -> str | None:
    """What no kernel of this kind takes: an epilogue, or one of the first ``needed`` inputs without a type."""
    if problem.epilogue:
        return "takes no epilogue"
    types = [*(problem.input(i) for i in range(needed)), problem.outputs[0]]
    return None if all(isinstance(t, TensorType) for t in types) else "the type of an operand is unknown"


def no_indices(type: Type | None) -> str | None:
    """Why a tensor cannot serve as indices."""
    if isinstance(type, TensorType) and type.dtype not in INDEX_TYPES:
        return f"does not take indices of {type.dtype}"
    return None


def table(rows: Sequence[Sequence[int]]) -> Table:
    """Numbers of a loop whose length is no part of the text; never empty."""
    return Table.list([number for row in rows for number in row] or [0])
