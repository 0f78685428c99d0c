"""What of a launch table depends on sizes, where its plan is for a class of shapes, and how it is brought to others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...devices.base import address
from ...devices.c_device import NOTHING
from ...devices.native import steps
from ...devices.native.device import NativeDevice, NativeQueue
from ...devices.native.steps import Argument, Linked, Operand
from ...ir.symbolic import SymInt, Whole, hint
from ..base import Kernel
from .base import CKernel
from .emit import In, Out, Report, Scratch, Table

_WORD = 0xFFFFFFFFFFFFFFFF


@dataclass(eq=False)
class Memory:
    """Memory of a block, which grows with the sizes."""

    device: NativeDevice
    nbytes: Whole
    held: Any = field(default_factory=lambda: NOTHING)

    def __post_init__(self) -> None:
        self.hold(int(hint(self.nbytes)))

    def hold(self, nbytes: int) -> None:
        """Have room for so many bytes."""
        if nbytes and (self.held is NOTHING or self.held.nbytes < nbytes):
            self.held = self.device.alloc(nbytes if self.held is NOTHING else nbytes * 5 // 4)


@dataclass(eq=False)
class Placed:
    """A kernel in a table: the steps of its launches, and its scratch memory by name."""

    kernel: CKernel
    steps: list[int] = field(default_factory=list)
    #: where its address stands, by which number it is shared
    scratch: dict[str, tuple[list[Operand], int]] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class OpenTable:
    """What of a table depends on sizes, as it is found while the table is written."""

    placed: list[Placed] = field(default_factory=list)
    #: words that are a number
    words: list[tuple[Operand, Whole]] = field(default_factory=list)
    #: words that are an address so many bytes behind the beginning of a block's memory, or behind another address
    addresses: list[tuple[Operand, Memory | int, Whole]] = field(default_factory=list)
    #: words that are the address of a kernel's constant
    tables: list[tuple[Operand, Table]] = field(default_factory=list)
    #: of blocks
    memories: list[Memory] = field(default_factory=list)
    #: constants of blocks that consist of sizes
    arrays: list[tuple[np.ndarray[Any, Any], Sequence[Whole]]] = field(default_factory=list)

    def kernel(self, placed: Placed, word_is: Callable[[Operand, Whole], None]) -> None:
        """A kernel's launches are written. ``word_is``: says what a word will be."""
        self.placed.append(placed)
        if placed.kernel.open is not None:
            for launch, word, value in placed.kernel.open.words:
                word_is(word_of(placed.steps[launch], word), value)
            for launch, at, table in placed.kernel.open.tables:
                if table.is_late:
                    continue  # it is words of the launch table
                self.tables.append((Argument(placed.steps[launch], at), table))


def word_of(step: int, word: int) -> Argument:
    """A word of a row."""
    return Argument(step, word - steps.ROW)


class _Constant:
    """A kernel's constant in a request's table."""

    def __init__(self, at: int, table: Table) -> None:
        self._at, self._table, self._array = at, table, table.array
        self._sizes: tuple[int, ...] | None = None
        #: which of a plan's values its sizes are, once somebody asks
        self._places: list[int] | None = None

    def fit(self, table: np.ndarray[Any, Any], values: Sequence[int], place: Callable[[Whole], int]) -> None:
        if self._places is None:
            self._places = [place(size) for size in self._table.sizes]
        sizes = tuple([values[at] for at in self._places])
        if sizes != self._sizes:
            assert self._table.make is not None
            self._array, self._sizes = self._table.make(*sizes), sizes
        table[self._at] = address(self._array if self._array.size else NOTHING)


class TableSizes:
    """Brings a request's table to other sizes of its plan's class of shapes."""

    def __init__(self, open: OpenTable, linked: Linked, device: NativeDevice, queue: NativeQueue) -> None:
        self._table, self._device, self._queue, self._open = linked.table, device, queue, open
        self._words = np.array([linked.number(at) for at, _ in open.words], np.intp)
        self._addresses = [linked.number(at) for at, _, _ in open.addresses]
        self._tables = [_Constant(linked.number(at), table) for at, table in open.tables]
        #: where the arguments of each launch of a kernel begin, and where the addresses of its scratch memory stand
        self._begins = {one: [linked.number(Argument(step, 0)) for step in one.steps] for one in open.placed}
        self._scratch = {
            (one, name): [linked.number(at) for at in places]
            for one in open.placed for name, (places, _) in one.scratch.items()
        }  # fmt: skip
        #: kernels in whose rows others are for the sizes at hand
        self._posed: Mapping[Kernel, Kernel] = {}
        #: which of a plan's values each number is, once somebody asks
        self._places: tuple[list[int], list[int], list[list[int]]] | None = None

    def __bool__(self) -> bool:
        """Anything depends on sizes."""
        open = self._open
        return bool(open.words or open.addresses or any(one.kernel.open is not None for one in open.placed))

    @property
    def nbytes(self) -> int:
        """Memory that blocks have now."""
        return sum(int(memory.held.nbytes) for memory in self._open.memories if memory.held is not NOTHING)

    def begins(self, placed: Placed) -> list[int]:
        """Where the arguments of each launch of a kernel begin."""
        return self._begins[placed]

    def fit(self, values: Sequence[int], place: Callable[[Whole], int], posed: Mapping[Kernel, Kernel]) -> None:
        """Write everything for other sizes. ``place``: which value an expression is. ``posed``: kernels that others
        stand in for."""
        open, table = self._open, self._table
        if self._places is None:
            self._places = (
                [place(value) for _, value in open.words], [place(offset) for _, _, offset in open.addresses],
                [[place(value) for value in elements] for _, elements in open.arrays],
            )  # fmt: skip
        words, offsets, arrays = self._places
        for one in open.placed:
            if one.kernel in self._posed and one.kernel not in posed:
                self._write(one, one.kernel)
        table[self._words] = [values[at] & _WORD for at in words]
        for memory in open.memories:
            memory.hold(values[place(memory.nbytes)])
        for at, (_, base, _), offset in zip(self._addresses, open.addresses, offsets, strict=True):
            table[at] = (address(base.held) if isinstance(base, Memory) else base) + values[offset]
        for constant in self._tables:
            constant.fit(table, values, place)
        for (array, _), elements in zip(open.arrays, arrays, strict=True):
            array[...] = np.array([values[at] for at in elements], array.dtype).reshape(array.shape)
        for one in open.placed:
            instead = posed.get(one.kernel)
            if instead is not None:
                assert isinstance(instead, CKernel)
                self._write(one, instead)
            elif one.kernel.open is not None:
                for name, nbytes in one.kernel.open.scratch.items():
                    self._borrow(one, name, values[place(nbytes)])
        self._posed = posed

    def _write(self, placed: Placed, kernel: CKernel) -> None:
        """Everything of a kernel's rows but the addresses of tensors: it has as many launches as the one before."""
        table = self._table
        for begin, call, program in zip(self._begins[placed], kernel.calls, kernel.programs, strict=True):
            x, y, _ = (*call.grid, 1, 1)[:3]
            table[begin - steps.ROW : begin - 1] = program.entry(call.name), x, y, math.prod(call.grid)
            for at, arg in enumerate(call.args, begin):
                if isinstance(arg, Scratch):
                    self._borrow(placed, arg.name, arg.nbytes)
                elif isinstance(arg, Table):
                    table[at] = address(arg.array if arg.array.size else NOTHING)
                elif not isinstance(arg, In | Out | Report):
                    table[at] = steps.number(arg)  # type: ignore[arg-type]

    def _borrow(self, placed: Placed, name: str, nbytes: int) -> None:
        memory = self._queue.borrow(self._device, placed.scratch[name][1], nbytes)
        if memory is not placed.held[name]:
            placed.held[name] = memory
            self._table[self._scratch[placed, name]] = address(memory)


def is_open(number: Whole) -> bool:
    """A number depends on sizes."""
    return isinstance(number, SymInt)
