"""The parts of a table that belong to a request, or depend on sizes if the plan is for a class of shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tunewright.ir.symbolic import SymInt, Whole, hint

from ..base import address
from ..c_device import NOTHING, CQueue
from ..c_kernel import CKernel, ConstantTable, In, Out, ReportArgument, Scratch
from ..executable import Kernel, Sizes
from . import table_format as steps
from .formulas import Words
from .table_format import Argument, Linked, Operand

if TYPE_CHECKING:
    from .device import NativeDevice


@dataclass(eq=False)
class OwnRegion:
    """Memory that each request has of its own: that of a block, or a constant whose ``elements`` are sizes."""

    nbytes: Whole
    elements: Sequence[Whole] = ()
    dtype: np.dtype[Any] | None = None

    @property
    def moves(self) -> bool:
        """Whether the region is larger for other sizes, and then has another address."""
        return self.dtype is None and is_open(self.nbytes)


@dataclass(eq=False)
class PlacedKernel:
    """A kernel in a table: the steps of its launches, and by name the words for addresses of its scratch memory."""

    kernel: CKernel
    steps: list[int] = field(default_factory=list)
    scratch: dict[str, list[Operand]] = field(default_factory=dict)


@dataclass(eq=False)
class OpenTable:
    """The parts of a table that are unknown when it is written."""

    placed: list[PlacedKernel] = field(default_factory=list)
    #: words that are a number
    words: list[tuple[Operand, Whole]] = field(default_factory=list)
    #: words that hold an address: an offset from the beginning of a region, or from another address
    addresses: list[tuple[Operand, OwnRegion | int, Whole]] = field(default_factory=list)
    #: words that hold the address of a kernel's constant
    tables: list[tuple[Operand, ConstantTable]] = field(default_factory=list)
    regions: list[OwnRegion] = field(default_factory=list)

    def kernel(self, placed: PlacedKernel, word_is: Callable[[Operand, Whole], None]) -> None:
        """Add a kernel whose launches are written. ``word_is`` records the number that a word will be."""
        self.placed.append(placed)
        if placed.kernel.open is not None:
            for launch, word, value in placed.kernel.open.words:
                word_is(word_of(placed.steps[launch], word), value)
            for launch, at, table in placed.kernel.open.tables:
                if table.is_late:
                    continue  # the constant consists of words of the launch table
                self.tables.append((Argument(placed.steps[launch], at), table))


def word_of(step: int, word: int) -> Argument:
    """Return a word of a row."""
    return Argument(step, word - steps.ROW)


class _Constant:
    """A kernel's constant in a request's table."""

    def __init__(self, at: int, table: ConstantTable) -> None:
        self._at, self._table, self._array = at, table, table.array
        self._sizes: tuple[int, ...] | None = None
        #: positions of its sizes among a plan's values, computed on first use
        self._places: list[int] | None = None

    def fit(self, table: np.ndarray[Any, Any], sizes: Sizes) -> None:
        if self._places is None:
            self._places = [sizes.place(size) for size in self._table.sizes]
        numbers = tuple([sizes.values[at] for at in self._places])
        if numbers != self._sizes:
            assert self._table.make is not None
            self._array, self._sizes = self._table.make(*numbers), numbers
        table[self._at] = address(self._array if self._array.size else NOTHING)


@dataclass(frozen=True, eq=False)
class _Found:
    """For everything that depends on sizes, its positions among a plan's values."""

    words: Words
    #: regions that change, each with the positions of its size and of its elements, and its base
    regions: list[tuple[OwnRegion, int, list[int], int]]
    #: scratch memory: its number, and the position of its size
    scratch: list[tuple[int, int]]


#: factor by which a launch may exceed its known cost, if that was learned at unknown sizes
_FAR = 8.0
#: upper bound of a launch's expected cost: the cost of a launch that does not run would grow without end
_MOST_COST = 2.0**40
#: growth of sizes from which the costs of launches are corrected
_GROWN = 1.25
#: bases of words: nothing, and the beginning of the arena; the other bases are those of regions
_NOTHING, _ARENA = 0, 1


class OwnMemory:
    """A request's memory besides its table (regions, scratch memory), and everything in it that depends on sizes."""

    def __init__(
        self, open: OpenTable, linked: Linked, table: np.ndarray[Any, Any], device: NativeDevice, queue: CQueue
    ) -> None:  # fmt: skip
        self._table, self._device, self._queue, self._open = table, device, queue, open
        self._words = [(linked.number(at), number) for at, number in open.words]
        self._addresses = [(linked.number(at), base, offset) for at, base, offset in open.addresses]
        self._tables = [_Constant(linked.number(at), table) for at, table in open.tables]
        #: where the arguments of each launch of a kernel begin
        self._begins = {one: [linked.number(Argument(step, 0)) for step in one.steps] for one in open.placed}
        #: positions of the costs of all launches, and the sizes at which they were learned
        self._costs = np.array([b - 1 for begins in self._begins.values() for b in begins], np.intp)
        self._learned_at: tuple[int, ...] = ()
        #: the number of each scratch memory, and the positions of its address; all kernels share the numbers
        self._scratch = {
            (one, name): (number, [linked.number(at) for at in places])
            for one in open.placed for number, (name, places) in enumerate(one.scratch.items())
        }  # fmt: skip
        self._regions: dict[OwnRegion, np.ndarray[Any, Any]] = {}
        #: borrowed scratch memory
        self._borrowed: dict[tuple[PlacedKernel, str], Any] = {}
        #: the same by number, as of the last change of sizes
        self._lent: dict[int, Any] = {}
        #: kernels whose rows hold other kernels for the sizes at hand
        self._posed: Mapping[Kernel, Kernel] = {}
        #: what depends on sizes, computed on first use
        self._found: _Found | None = None
        for region in open.regions:
            self._hold(region, int(hint(region.nbytes)), [int(hint(size)) for size in region.elements])
        for at, base, offset in self._addresses:
            table[at] = self._begin(base) + hint(offset)
        for one in open.placed:
            self._borrow_all(one, one.kernel)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that blocks have now."""
        blocks = [held for region, held in self._regions.items() if region.dtype is None and held is not NOTHING]
        return sum(int(held.nbytes) for held in blocks)

    def begins(self, placed: PlacedKernel) -> list[int]:
        """Return where the arguments of each launch of a kernel begin."""
        return self._begins[placed]

    def fit(self, sizes: Sizes, arena: int, words: Sequence[tuple[int, int]]) -> None:
        """Write everything for other sizes. ``words`` hold addresses in the arena: each comes with the position of its
        offset among the values. They are the same at each call."""
        values = sizes.values
        if self._found is None:
            self._found = self._find(sizes, words)
        found = self._found
        for one in self._open.placed if self._posed else ():
            if one.kernel in self._posed and one.kernel not in sizes.posed:
                self._write(one, one.kernel)
        found.words.bases[_ARENA] = arena
        for region, nbytes, elements, base in found.regions:
            self._hold(region, values[nbytes], [values[at] for at in elements])
            found.words.bases[base] = self._begin(region)
        found.words.write(values)
        for constant in self._tables:
            constant.fit(self._table, sizes)
        for one in self._open.placed if sizes.posed else ():
            instead = sizes.posed.get(one.kernel)
            if instead is not None:
                assert isinstance(instead, CKernel)
                self._write(one, instead)
        self._posed = sizes.posed
        self._expect(sizes.of)
        self._borrow_more(found.scratch, values)

    def _expect(self, sizes: tuple[int, ...]) -> None:
        """Correct the costs of launches for larger sizes, because the pool only ever lowers them. If a cost is too low,
        the pool neither calls workers nor divides the work well."""
        before, growth = self._learned_at, 1.0
        for size, known in zip(sizes, before, strict=False):
            growth *= max(1.0, size / known)
        if before and growth < _GROWN:
            self._learned_at = tuple(map(min, sizes, before))
            return
        costs = np.minimum(self._table[self._costs] * (growth if before else _FAR), _MOST_COST)
        self._table[self._costs], self._learned_at = costs.astype(np.uint64), sizes

    def _find(self, sizes: Sizes, words: Sequence[tuple[int, int]]) -> _Found:
        place = sizes.place
        changing = [r for r in self._open.regions if r.dtype is not None or is_open(r.nbytes)]
        bases = {region: number for number, region in enumerate(changing, _ARENA + 1)}
        found = [(at, place(number), _NOTHING) for at, number in self._words]
        found += [(at, value, _ARENA) for at, value in words]
        fixed: dict[int, int] = {}
        for at, base, offset in self._addresses:
            moves = isinstance(base, OwnRegion) and base.moves
            if moves or is_open(offset):
                number = bases.get(base) if isinstance(base, OwnRegion) else None
                if number is None:  # the region keeps its place
                    number = fixed.setdefault(self._begin(base), _ARENA + 1 + len(changing) + len(fixed))
                found.append((at, place(offset), number))
        made = Words(self._device.pool.quick, self._table, found, _ARENA + 1 + len(changing) + len(fixed))
        for begin, number in fixed.items():
            made.bases[number] = begin
        regions = [
            (r, place(r.nbytes if r.dtype is None else 0), [place(size) for size in r.elements], bases[r])
            for r in changing
        ]  # fmt: skip
        scratch = {
            (self._scratch[one, name][0], place(nbytes))
            for one in self._open.placed if one.kernel.open is not None
            for name, nbytes in one.kernel.open.scratch.items()
        }  # fmt: skip
        return _Found(made, regions, sorted(scratch))

    def _hold(self, region: OwnRegion, nbytes: int, elements: Sequence[int]) -> None:
        """Make room for a region and write its elements."""
        held = self._regions.get(region, NOTHING)
        if region.dtype is not None:
            if held is NOTHING:
                held = np.empty(len(elements), region.dtype)
            held[:] = elements
        elif nbytes and (held is NOTHING or held.nbytes < nbytes):
            held = self._device.alloc(nbytes if held is NOTHING else nbytes * 5 // 4)
        self._regions[region] = held

    def _begin(self, base: OwnRegion | int) -> int:
        if isinstance(base, int):
            return base
        held = self._regions[base]
        return address(held if held.size else NOTHING)

    def _write(self, placed: PlacedKernel, kernel: CKernel) -> None:
        """Write everything in a kernel's rows except the addresses of tensors. It has as many launches as the kernel
        before."""
        table = self._table
        for begin, call, program in zip(self._begins[placed], kernel.calls, kernel.programs, strict=True):
            x, y, _ = (*call.grid, 1, 1)[:3]
            table[begin - steps.ROW : begin - 1] = program.entry(call.name), x, y, math.prod(call.grid)
            for at, arg in enumerate(call.args, begin):
                if isinstance(arg, ConstantTable):
                    table[at] = address(arg.array if arg.array.size else NOTHING)
                elif not isinstance(arg, In | Out | ReportArgument | Scratch):
                    table[at] = steps.number(arg)  # type: ignore[arg-type]
        self._borrow_all(placed, kernel)

    def _borrow_all(self, placed: PlacedKernel, kernel: CKernel) -> None:
        for call in kernel.calls:
            for arg in call.args:
                if isinstance(arg, Scratch):
                    self._borrow(placed, arg.name, int(hint(kernel.most_scratch.get(arg.name, arg.nbytes))))

    def _borrow(self, placed: PlacedKernel, name: str, nbytes: int) -> None:
        number, places = self._scratch[placed, name]
        memory = self._queue.borrow(self._device, number, nbytes)
        if memory is not self._borrowed.get((placed, name)):
            self._borrowed[placed, name] = memory
            self._table[places] = address(memory)

    def _borrow_more(self, wanted: Sequence[tuple[int, int]], values: Sequence[int]) -> None:
        """Borrow scratch memory for other sizes: for each number, as many bytes as its value says."""
        for number, at in wanted:
            memory = self._queue.borrow(self._device, number, values[at])
            if memory is self._lent.get(number):
                continue
            self._lent[number] = memory
            for (placed, name), (own, _) in self._scratch.items():
                if own == number:
                    self._borrow(placed, name, 0)


def is_open(number: Whole) -> bool:
    """Whether a number depends on sizes."""
    return isinstance(number, SymInt)
