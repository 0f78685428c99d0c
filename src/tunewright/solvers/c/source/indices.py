"""Parts of kernels that move elements by index: legal indices, merged axes, and the division of work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater, hint, lesser
from tunewright.ir.types import DType, TensorType, Type
from tunewright.solvers.base import Problem

from .element_words import MOVABLE, words
from .emit import ConstantTable

#: types whose elements are moved as one word
ONE_WORD = frozenset(d for d in MOVABLE if words(d) == 1)
INDEX_TYPES = frozenset({DType.INT32, DType.INT64})

#: `legal` always returns an index inside the axis, and records whether the given one was outside. A loop collects these
#: flags, and the kernel searches for the wrong index behind the loop. A call of `wrong` in the loop would cost
#: registers and keep the loop scalar.
LEGAL = """
INLINE i64 legal(i64 i, int size, int* wrong_ones) {
  i64 at = i < 0 ? i + size : i;
  int outside = (u64)at >= (u64)size;
  *wrong_ones |= outside;
  return outside ? 0 : at;
}
INLINE int is_outside(i64 i, int size) { return i < -(i64)size || i >= size; }
"""
#: Row ``i + more``. An index outside of the rows is reported, and the nearest row takes its place.
ROW = """
INLINE int row_of(i64 i, int more, int rows, GLOBAL i64* report) {
  if (i >= 0 && i < rows - more) return (int)i + more;
  wrong(report, WRONG_ROW, (i64)((u64)i + (u64)more), rows);
  return i < 0 ? 0 : rows - 1;
}
"""

#: the least number of bytes that a work-item should move: about 5 microseconds
LEAST_BYTES = 1 << 16
#: Work-items per unit where there is enough work: a slow one then delays the others little.
PER_UNIT = 8


@dataclass(frozen=True)
class Shares:
    """Rows and columns of each work-item, for work on ``rows`` times ``columns`` elements."""

    rows: int
    columns: int
    grid: tuple[int, int]

    @staticmethod
    def of(rows: int, columns: int, nbytes: float, target: Target, least: int = LEAST_BYTES) -> Shares:
        """Whole rows for each work-item where there are enough rows, else parts of rows. ``nbytes``: bytes moved per
        element."""
        # The division uses the sizes at hand; any division gives correct results.
        high, wide, nbytes = hint(rows), hint(columns), hint(nbytes)
        wanted = greater(1, lesser(int(high * wide * nbytes) // least, PER_UNIT * target.units))
        row = greater(1, high // wanted)
        column = columns if high >= wanted else -(-columns // -(-wanted // greater(high, 1)))
        return Shares(row, column, (-(-rows // row), -(-columns // greater(column, 1))))


def strides(dims: Sequence[int]) -> list[int]:
    """Strides of a contiguous array, in elements."""
    return [*accumulate(reversed(dims[1:]), lambda a, b: a * b, initial=1)][::-1] if dims else []


@dataclass(frozen=True)
class IndexAxis:
    """One axis of an index tensor: its length, and its strides in the data and in the index tensor."""

    length: int
    data: int
    index: int
    chosen: bool = False


def merged(data: Sequence[int], index: Sequence[int], axis: int) -> list[IndexAxis]:
    """The axes of an index tensor, merged where they are contiguous in both tensors; ``axis`` stays separate."""
    found: list[IndexAxis] = []
    for k, (length, s, i) in enumerate(zip(index, strides(data), strides(index), strict=True)):
        if length == 1 and k != axis:
            continue
        last = found[-1] if found else None
        if last is None or k == axis or last.chosen or (last.data, last.index) != (length * s, length * i):
            found.append(IndexAxis(length, s, i, k == axis))
        else:
            found[-1] = IndexAxis(last.length * length, s, i)
    return found


def outside(problem: Problem, i: int, sizes: Sequence[int]) -> str | None:
    """Why constant indices leave their axis (the host reports it), else None. Their last axis indexes ``sizes``."""
    value = problem.value(i)
    if value is None or not value.size:
        return None
    rows = value.reshape(-1, len(sizes)) if len(sizes) > 1 else value.reshape(-1, 1)
    for column, size in zip(rows.T, sizes, strict=True):
        if not -size <= column.min() <= column.max() < size:
            return f"an index is outside of {size} elements, which the host reports"
    return None


def unfit(problem: Problem, needed: int) -> str | None:
    """Why the problem does not suit: an epilogue, or one of the first ``needed`` inputs without a type."""
    if problem.epilogue:
        return "takes no epilogue"
    types = [*(problem.input(i) for i in range(needed)), problem.outputs[0]]
    return None if all(isinstance(t, TensorType) for t in types) else "the type of an operand is unknown"


def no_indices(type: Type | None) -> str | None:
    """Why a tensor cannot serve as indices, else None."""
    if isinstance(type, TensorType) and type.dtype not in INDEX_TYPES:
        return f"does not take indices of {type.dtype}"
    return None


def table(rows: Sequence[Sequence[int]]) -> ConstantTable:
    """The numbers of a loop whose length is not part of the text; never empty."""
    return ConstantTable.list([number for row in rows for number in row] or [0])
