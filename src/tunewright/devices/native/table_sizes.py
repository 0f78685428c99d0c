"""What of a table is each request's own, or depends on sizes where its plan is for a class of shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...ir.symbolic import SymInt, Whole, hint
from ..base import address
from ..c_device import NOTHING, CDevice, CQueue
from ..c_kernel import CKernel, In, Out, Report, Scratch, Table
from ..executable import Kernel, Sizes
from . import steps
from .steps import Argument, Linked, Operand

_WORD = 0xFFFFFFFFFFFFFFFF


@dataclass(eq=False)
class Region:
    """Memory that each request has of its own: that of a block, or a constant whose ``elements`` are sizes."""

    nbytes: Whole
    elements: Sequence[Whole] = ()
    dtype: np.dtype[Any] | None = None

    @property
    def moves(self) -> bool:
        """It is larger for other sizes, and lies elsewhere then."""
        return self.dtype is None and is_open(self.nbytes)


@dataclass(eq=False)
class Placed:
    """A kernel in a table: the steps of its launches, and where addresses of its scratch memory stand, by name."""

    kernel: CKernel
    steps: list[int] = field(default_factory=list)
    scratch: dict[str, list[Operand]] = field(default_factory=dict)


@dataclass(eq=False)
class OpenTable:
    """What is not known when a table is written."""

    placed: list[Placed] = field(default_factory=list)
    #: words that are a number
    words: list[tuple[Operand, Whole]] = field(default_factory=list)
    #: words that hold an address: an offset behind the beginning of a region, or behind another address
    addresses: list[tuple[Operand, Region | int, Whole]] = field(default_factory=list)
    #: words that are the address of a kernel's constant
    tables: list[tuple[Operand, Table]] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)

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

    def fit(self, table: np.ndarray[Any, Any], sizes: Sizes) -> None:
        if self._places is None:
            self._places = [sizes.place(size) for size in self._table.sizes]
        numbers = tuple([sizes.values[at] for at in self._places])
        if numbers != self._sizes:
            assert self._table.make is not None
            self._array, self._sizes = self._table.make(*numbers), numbers
        table[self._at] = address(self._array if self._array.size else NOTHING)


class OwnMemory:
    """A request's memory behind its table (regions, scratch memory), and all that depends on sizes in it."""

    def __init__(
        self, open: OpenTable, linked: Linked, table: np.ndarray[Any, Any], device: CDevice, queue: CQueue
    ) -> None:  # fmt: skip
        self._table, self._device, self._queue, self._open = table, device, queue, open
        self._words = np.array([linked.number(at) for at, _ in open.words], np.intp)
        addresses = [(linked.number(at), base, offset) for at, base, offset in open.addresses]
        self._addresses = [
            one for one in addresses if is_open(one[2]) or (isinstance(one[1], Region) and one[1].moves)
        ]  # fmt: skip
        self._tables = [_Constant(linked.number(at), table) for at, table in open.tables]
        #: where the arguments of each launch of a kernel begin
        self._begins = {one: [linked.number(Argument(step, 0)) for step in one.steps] for one in open.placed}
        #: where the addresses of its scratch memory stand, which share one number in all kernels
        self._scratch = {
            (one, name): (number, [linked.number(at) for at in places])
            for one in open.placed for number, (name, places) in enumerate(one.scratch.items())
        }  # fmt: skip
        self._regions: dict[Region, np.ndarray[Any, Any]] = {}
        #: what was borrowed, by its number
        self._borrowed: dict[tuple[Placed, str], Any] = {}
        #: kernels in whose rows others are for the sizes at hand
        self._posed: Mapping[Kernel, Kernel] = {}
        #: which of a plan's values each number is, once somebody asks
        self._places: tuple[list[int], list[int]] | None = None
        for region in open.regions:
            self._hold(region, int(hint(region.nbytes)), [int(hint(size)) for size in region.elements])
        for at, base, offset in addresses:
            table[at] = self._begin(base) + hint(offset)
        for one in open.placed:
            self._borrow_all(one, one.kernel)

    @property
    def nbytes(self) -> int:
        """Memory that blocks have now."""
        blocks = [held for region, held in self._regions.items() if region.dtype is None and held is not NOTHING]
        return sum(int(held.nbytes) for held in blocks)

    def begins(self, placed: Placed) -> list[int]:
        """Where the arguments of each launch of a kernel begin."""
        return self._begins[placed]

    def fit(self, sizes: Sizes) -> None:
        """Write everything for other sizes."""
        open, table, values, place = self._open, self._table, sizes.values, sizes.place
        if self._places is None:
            offsets = [place(offset) for _, _, offset in self._addresses]
            self._places = [place(value) for _, value in open.words], offsets
        words, offsets = self._places
        for one in open.placed:
            if one.kernel in self._posed and one.kernel not in sizes.posed:
                self._write(one, one.kernel)
        table[self._words] = [values[at] & _WORD for at in words]
        for region in open.regions:
            if region.dtype is not None or is_open(region.nbytes):
                elements = [values[place(size)] for size in region.elements]
                nbytes = values[place(region.nbytes)] if region.dtype is None else 0
                self._hold(region, nbytes, elements)
        for (at, base, _), offset in zip(self._addresses, offsets, strict=True):
            table[at] = self._begin(base) + values[offset]
        for constant in self._tables:
            constant.fit(table, sizes)
        for one in open.placed:
            instead = sizes.posed.get(one.kernel)
            if instead is not None:
                assert isinstance(instead, CKernel)
                self._write(one, instead)
            elif one.kernel.open is not None:
                for name, nbytes in one.kernel.open.scratch.items():
                    self._borrow(one, name, values[place(nbytes)])
        self._posed = sizes.posed

    def _hold(self, region: Region, nbytes: int, elements: Sequence[int]) -> None:
        """Have room for a region, with what belongs into it."""
        held = self._regions.get(region, NOTHING)
        if region.dtype is not None:
            if held is NOTHING:
                held = np.empty(len(elements), region.dtype)
            held[:] = elements
        elif nbytes and (held is NOTHING or held.nbytes < nbytes):
            held = self._device.alloc(nbytes if held is NOTHING else nbytes * 5 // 4)
        self._regions[region] = held

    def _begin(self, base: Region | int) -> int:
        if isinstance(base, int):
            return base
        held = self._regions[base]
        return address(held if held.size else NOTHING)

    def _write(self, placed: Placed, kernel: CKernel) -> None:
        """Everything of a kernel's rows but the addresses of tensors: it has as many launches as the one before."""
        table = self._table
        for begin, call, program in zip(self._begins[placed], kernel.calls, kernel.programs, strict=True):
            x, y, _ = (*call.grid, 1, 1)[:3]
            table[begin - steps.ROW : begin - 1] = program.entry(call.name), x, y, math.prod(call.grid)
            for at, arg in enumerate(call.args, begin):
                if isinstance(arg, Table):
                    table[at] = address(arg.array if arg.array.size else NOTHING)
                elif not isinstance(arg, In | Out | Report | Scratch):
                    table[at] = steps.number(arg)  # type: ignore[arg-type]
        self._borrow_all(placed, kernel)

    def _borrow_all(self, placed: Placed, kernel: CKernel) -> None:
        for call in kernel.calls:
            for arg in call.args:
                if isinstance(arg, Scratch):
                    self._borrow(placed, arg.name, int(hint(kernel.most_scratch.get(arg.name, arg.nbytes))))

    def _borrow(self, placed: Placed, name: str, nbytes: int) -> None:
        number, places = self._scratch[placed, name]
        memory = self._queue.borrow(self._device, number, nbytes)
        if memory is not self._borrowed.get((placed, name)):
            self._borrowed[placed, name] = memory
            self._table[places] = address(memory)


def is_open(number: Whole) -> bool:
    """A number depends on sizes."""
    return isinstance(number, SymInt)
