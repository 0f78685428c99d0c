"""Tables of kernel steps and control rows, as the pool reads them (`launch_table.c`)."""

from __future__ import annotations

import ctypes
import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from tunewright.errors import DeviceError

from .pool import HEAD
from .pool import ROW as ROW

#: kernels count work-items in 32 bits
MOST_ITEMS = 2**31 - 1
#: the lowest address of an entry point: `launch_table.c` tells control rows from kernels by it
FIRST_ENTRY = 64
#: all bits of a word
_WORD = 0xFFFFFFFFFFFFFFFF


class RowCode(enum.IntEnum):
    """What a control row does. `launch_table.c` documents the operands."""

    MOVE = 1
    COPY = 2
    JUMP = 3
    UNLESS = 4
    LOOP = 5
    AGAIN = 6
    COMPUTE = 7


class Function(enum.IntEnum):
    """What a function of a COMPUTE row makes of two words, or how it compares one."""

    ADD = 0
    MULTIPLY = 1
    DIVIDE = 2
    REST = 3
    LEAST = 4
    MOST = 5
    IS_ZERO = 6
    IS_NEGATIVE = 7


@dataclass(eq=False)
class TableCell:
    """A word of a table outside the rows: a variable with its initial value."""

    value: int = 0
    #: number of words, if the cell is the first of several consecutive ones
    words: int = 1


@dataclass(frozen=True)
class Argument:
    """The word of an argument of a kernel row."""

    step: int
    index: int


@dataclass(eq=False)
class Label:
    """A step that is not known yet. `Listing.place` sets it."""

    step: int = -1


Operand: TypeAlias = int | TableCell | Argument | Label


@dataclass(eq=False)
class Listing:
    """A table while it is written."""

    rows: list[tuple[Operand, ...]] = field(default_factory=list)
    cells: list[TableCell] = field(default_factory=list)

    def kernel(self, entry: int, grid: Sequence[int], arguments: int) -> int:
        """Add a kernel row whose arguments are 0. Return the number of its step."""
        x, y, _ = (*grid, 1, 1)[:3]
        items = math.prod(grid)
        if items > MOST_ITEMS:
            raise DeviceError(f"a kernel over {items:,} work-items: there are {MOST_ITEMS:,} at most")
        self.rows.append((entry, x, y, items, 0, *(0,) * arguments))
        return len(self.rows) - 1

    def control(self, op: RowCode, *operands: Operand) -> int:
        """Add a control row. Return the number of its step."""
        self.rows.append((int(op), *operands))
        return len(self.rows) - 1

    def move(self, source: Operand, words: Sequence[Operand], add: int = 0) -> None:
        """Add a row that copies a word, plus a number, to other words."""
        if words:
            self.control(RowCode.MOVE, source, add & _WORD, len(words), *words)

    def cell(self, value: int = 0, words: int = 1) -> TableCell:
        """Add a variable."""
        made = TableCell(value, words)
        self.cells.append(made)
        return made

    def costs(self, linked: Linked) -> list[int]:
        """Return the position of each kernel row's cost."""
        return [begin + ROW - 1 for begin, row in zip(linked.begins, self.rows, strict=True) if _is_kernel(row)]

    def place(self, label: Label) -> None:
        """Set the label to the step that is written next."""
        label.step = len(self.rows)

    def link(self, participants: int) -> Linked:
        """Return the finished table."""
        begins, at = [], HEAD + len(self.rows)
        for row in self.rows:
            begins.append(at)
            at += len(row)
        cells: dict[TableCell, int] = {}
        for cell in self.cells:
            cells[cell] = at
            at += cell.words
        linked = Linked(np.zeros(at, np.uint64), begins, cells)
        table = linked.table
        table[:HEAD] = len(self.rows), participants
        table[HEAD : HEAD + len(self.rows)] = linked.begins
        for begin, row in zip(linked.begins, self.rows, strict=True):
            table[begin : begin + len(row)] = row if _is_kernel(row) else [linked.number(at) for at in row]
        for cell, where in cells.items():
            table[where] = cell.value & _WORD
        return linked


@dataclass(eq=False)
class Linked:
    """A table, and the positions of everything in it."""

    table: np.ndarray[Any, Any]
    #: the position of each row
    begins: list[int]
    cells: dict[TableCell, int]

    def number(self, operand: Operand) -> int:
        """Return the number of the word, or of the step, that an operand names."""
        if isinstance(operand, TableCell):
            return self.cells[operand]
        if isinstance(operand, Argument):
            return self.begins[operand.step] + ROW + operand.index
        if isinstance(operand, Label):
            assert operand.step >= 0, "a jump to nowhere"
            return operand.step
        return operand


def trips(table: np.ndarray[Any, Any], step: int) -> int | None:
    """Return the iterations of a LOOP that only its limit ends."""
    _, _, _, limit, _, _, whole = table[int(table[HEAD + step]) :][:7]
    return ctypes.c_int64.from_address(int(table[limit])).value if whole and limit else None


def times(steps: int) -> np.ndarray[Any, Any]:
    """Allocate a runner's times of its steps: ticks and executions of each begin at its second word."""
    return np.zeros(1 + 2 * steps, np.uint64)


def number(value: np.generic) -> int:
    """Return a number as a table holds it."""
    if isinstance(value, np.floating):
        return int(np.float32(value).view(np.uint32))
    return int(value) & _WORD


def _is_kernel(row: Sequence[Operand]) -> bool:
    return isinstance(row[0], int) and row[0] >= FIRST_ENTRY
