"""Writes tables of steps: kernels with their arguments, and blocks of control flow (`devices/control_rows.py`) as
control rows.

An address that a loop changes stands in a variable of the table, and in every argument that refers to that tensor.
`Set` becomes a MOVE that writes all of them. The written table lacks what each request has of its own: addresses of its
tensors, scratch memory, memory of blocks. The writer records where these belong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tunewright.ir.launch_symbols import is_late, newest
from tunewright.ir.symbolic import Whole, hint

from ..base import address
from ..c_device import NOTHING
from ..c_kernel import CKernel, ConstantTable, In, Out, ReportArgument, Scratch
from ..control_rows import (
    Block,
    Branch,
    Cases,
    Compute,
    CopyRow,
    Counter,
    Fixed,
    Late,
    LaunchRow,
    LoopRow,
    Outer,
    Own,
    Ref,
    Row,
    Set,
    SizeList,
    Tell,
    Variable,
    refs,
    walk,
)  # fmt: skip
from ..executable import Part
from . import table_format
from .late_table import LateWords
from .table_format import Argument, Function, Label, Linked, Operand, RowCode, TableCell
from .table_sizes import OpenTable, OwnRegion, PlacedKernel, is_open, word_of

#: position of the cost, relative to a row's first argument
_COST = -1


@dataclass(eq=False)
class _Places:
    """The words that hold a variable's address, and for each offset the words that hold the address plus it."""

    cell: TableCell
    words: dict[Whole, list[Operand]] = field(default_factory=dict)
    #: for each offset, the word that control rows read
    read: dict[Whole, TableCell] = field(default_factory=dict)


@dataclass(eq=False)
class TableWriter:
    """Writes the table of one executable."""

    #: maximum number of threads
    participants: int
    listing: table_format.Listing = field(default_factory=table_format.Listing)
    #: objects that must live as long as the table
    kept: list[Any] = field(default_factory=list)
    #: for each step, the kernel or block that it belongs to, and the tag of a launch in a block
    owners: list[int] = field(default_factory=list)
    tags: list[object] = field(default_factory=list)
    #: for each tensor, the words that hold its address
    places: dict[int, list[Operand]] = field(default_factory=dict)
    #: for each kernel, where the costs of its launches stand, once per use in the table
    costs: dict[CKernel, list[list[Operand]]] = field(default_factory=dict)
    #: iterations that the loops of a run may take, then the iterations left, then the loop that found none left
    bound: TableCell | None = None
    left: TableCell | None = None
    #: for each counter of iterations, its word
    counters: dict[Counter, TableCell] = field(default_factory=dict)
    #: the step that says where a run begins, if the request may run a block instead of the table
    entrance: int | None = None
    #: parts of the table that belong to a request, or depend on sizes
    open: OpenTable = field(default_factory=OpenTable)
    #: for each kernel outside blocks, its place
    placed: dict[int, PlacedKernel] = field(default_factory=dict)
    #: tags of kernels that report faults of their inputs, and the words that hold the addresses of their records
    reports: list[tuple[Any, list[Operand]]] = field(default_factory=list)
    _numbers: list[tuple[Operand, int]] = field(default_factory=list)
    _variables: dict[Variable, _Places] = field(default_factory=dict)
    _moves: list[tuple[int, _Places, Whole, Operand, Whole]] = field(default_factory=list)
    #: words that hold the address of a cell
    pointers: list[tuple[Operand, TableCell]] = field(default_factory=list)
    _constants: dict[int, TableCell] = field(default_factory=dict)
    _sizes: dict[SizeList, OwnRegion] = field(default_factory=dict)
    _late: list[LateWords] = field(default_factory=list)

    def begin(self, blocks: Sequence[Block]) -> None:
        """Begin a table. ``blocks``: the blocks that follow. Each run begins with its full number of allowed
        iterations."""
        if blocks:
            self.bound, self.left = self.listing.cell(), self.listing.cell(0, 2)
            self.listing.move(self.bound, [self.left])
            if any(block.escapes for block in blocks):
                self.entrance = self.listing.control(RowCode.JUMP, len(self.listing.rows) + 1)
            self._own(0)

    def part(self, number: int, part: Part) -> None:
        """Write a kernel whose tensors are the plan's own, or a block of control flow."""
        if isinstance(part.kernel, Block):
            region = OwnRegion(part.kernel.nbytes)
            self.open.regions.append(region)
            writer = _BlockWriter(self, part, region)
            writer.meet(part.kernel.rows)
            writer.rows(part.kernel.rows)
            writer.end()
        else:
            assert isinstance(part.kernel, CKernel)

            def bind(arg: In | Out, at: Operand) -> None:
                self.tensor(part, isinstance(arg, Out), arg.index, at)

            self.placed[number] = self.launches(part.kernel, bind, part.tag)
        self._own(number)

    def tensor(self, part: Part, output: bool, index: int, at: Operand) -> None:
        """Record that a word is the address of a part's tensor."""
        slot = (part.outs if output else part.ins)[index]
        if slot >= 0:
            self.places.setdefault(slot, []).append(at)

    def word_is(self, at: Operand, number: Whole) -> None:
        """Record that a word will be this number."""
        if is_open(number):
            self.open.words.append((at, number))

    def words(self, numbers: Sequence[Whole], word_is: Callable[[Operand, Whole], None]) -> TableCell:
        """Add consecutive words for these numbers and return the first."""
        cells = [self.listing.cell(int(hint(number))) for number in numbers]
        for cell, number in zip(cells, numbers, strict=True):
            word_is(cell, number)
        return cells[0]

    def link(self) -> Linked:
        """Return the table with everything that is known now."""
        for late in self._late:
            late.write()
        for step, places, offset, source, add in self._moves:
            words = places.words.get(offset, [])
            self.listing.rows[step] = (
                int(RowCode.MOVE),
                source,
                int(hint(add)) & 0xFFFFFFFFFFFFFFFF,
                len(words),
                *words,
            )
        linked = self.listing.link(self.participants)
        for at, number in self._numbers:
            linked.table[linked.number(at)] = number
        return linked

    def _own(self, number: int) -> None:
        """Assign the steps written since the last call to this kernel or block."""
        count = len(self.listing.rows)
        self.owners += [number] * (count - len(self.owners))
        self.tags += [None] * (count - len(self.tags))

    def launches(
        self, kernel: CKernel, bind: Callable[[In | Out, Operand], None], tag: object, counted: bool = False,
        word_is: Callable[[Operand, Whole], None] | None = None,
    ) -> PlacedKernel:  # fmt: skip
        """Write the rows of a kernel. ``tag``: the owner of its failures and, if ``counted``, of its times. ``word_is``
        records the number of a word that depends on sizes."""
        costs: list[Operand] = []
        record: list[Operand] = []
        placed = PlacedKernel(kernel)
        for call, program in zip(kernel.calls, kernel.programs, strict=True):
            step = self.listing.kernel(program.entry(call.name), call.grid, len(call.args))
            self.tags += [None] * (step - len(self.tags)) + [tag if counted else None]
            self.kept.append(program)
            costs.append(Argument(step, _COST))
            placed.steps.append(step)
            for index, arg in enumerate(call.args):
                at = Argument(step, index)
                if isinstance(arg, In | Out):
                    bind(arg, at)
                elif isinstance(arg, Scratch):
                    placed.scratch.setdefault(arg.name, []).append(at)
                elif isinstance(arg, ConstantTable) and arg.is_late:
                    self.pointers.append((at, self.words(arg.words, word_is or self.word_is)))
                elif isinstance(arg, ConstantTable):
                    self.kept.append(arg.array)
                    self._numbers.append((at, address(arg.array if arg.array.size else NOTHING)))
                elif isinstance(arg, ReportArgument):
                    record.append(at)
                else:
                    self._numbers.append((at, table_format.number(arg)))  # type: ignore[arg-type]
        self.open.kernel(placed, word_is or self.word_is)
        if record:
            self.reports.append((tag, record))
        self.costs.setdefault(kernel, []).append(costs)
        return placed

    def region_of(self, sizes: SizeList) -> OwnRegion:
        """Return the region of a constant of sizes."""
        if sizes not in self._sizes:
            elements = sizes.array.reshape(-1).tolist()
            region = self._sizes[sizes] = OwnRegion(len(elements) * sizes.dtype.itemsize, elements, sizes.dtype)
            self.open.regions.append(region)
        return self._sizes[sizes]

    def _constant(self, number: int) -> TableCell:
        if number not in self._constants:
            self._constants[number] = self.listing.cell(number)
        return self._constants[number]


@dataclass(eq=False)
class _BlockWriter:
    """Writes the rows of one block."""

    table: TableWriter
    part: Part
    #: the block's own memory
    region: OwnRegion
    #: numbers that the launch computes, by the late symbol that they wait for
    late: dict[int, LateWords] = field(default_factory=dict)
    #: variables of this block
    variables: dict[Variable, _Places] = field(default_factory=dict)
    #: the word that says where the block's memory begins
    base: TableCell | None = None

    def meet(self, rows: Sequence[Row]) -> None:
        """Note the offsets at which rows read variables. A row that sets a variable writes all of these addresses."""
        for row in walk(rows):
            for ref in refs(row):
                if isinstance(ref.base, Variable):
                    self._places(ref.base).words.setdefault(ref.offset, [])

    def rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            _WRITERS[type(row)](self, row)

    def launch(self, row: LaunchRow) -> None:
        assert isinstance(row.kernel, CKernel)

        def bind(arg: In | Out, at: Operand) -> None:
            ref = (row.outs if isinstance(arg, Out) else row.ins)[arg.index]
            if ref is not None:
                self._argument(ref, at)

        self.table.launches(row.kernel, bind, row.tag, counted=True, word_is=self.word_is)

    def set(self, row: Set) -> None:
        places = self._places(row.variable)
        self._move(places, 0, *self._source(row.to))
        for offset in places.words:
            if is_open(offset) or offset:
                self._move(places, offset, places.cell, offset)

    def copy(self, row: CopyRow) -> None:
        nbytes, words = row.nbytes, (self._word(row.to), self._word(row.source))
        if is_open(nbytes) or nbytes:
            step = self.table.listing.control(RowCode.COPY, *words, int(hint(nbytes)))
            self.word_is(word_of(step, 3), nbytes)

    def loop(self, row: LoopRow) -> None:
        listing, out, counter = self.table.listing, Label(), self._counter(row.counter)
        listing.move(self.table._constant(0), [counter])
        for body in row.first:
            self.head(row, out)
            self.rows(body)
            following = Label()
            listing.control(RowCode.AGAIN, following, counter)
            listing.place(following)
        head = self.head(row, out)
        self.computed(row.late)
        self.rows(row.body)
        listing.control(RowCode.AGAIN, head, counter)
        listing.place(out)
        if row.at_end is not None:
            before = self.late.get(row.at_end.atom)
            self.computed(row.at_end)
            self.rows(row.behind)
            if before is not None:
                self.late[row.at_end.atom] = before

    def head(self, row: LoopRow, out: Label) -> int:
        """Write where an iteration begins or the loop ends."""
        table, limit = self.table, 0 if row.limit is None else self._word(row.limit)
        assert table.left is not None
        counter, condition = self._counter(row.counter), self._word(row.condition)
        head = table.listing.control(RowCode.LOOP, out, counter, limit, condition, table.left, int(row.whole), 0)
        table.tags += [None] * (head - len(table.tags)) + [row.tag]
        return head

    def compute(self, row: Compute) -> None:
        self.computed(row.late)

    def cases(self, row: Cases) -> None:
        table, end = self.table, Label()
        assert table.left is not None
        labels = {number: Label() for number in row.cases}
        for number, label in labels.items():  # all bytes of a word are 0 if the counter equals this number
            word, pointer = table.listing.cell(), table.listing.cell()
            table.pointers.append((pointer, word))
            apart = (int(Function.ADD), word, self._counter(row.counter), table._constant(-number))
            least = (int(Function.LEAST), word, word, table._constant(1))
            most = (int(Function.MOST), word, word, table._constant(-1))
            table.listing.control(RowCode.COMPUTE, table.left, 3, *apart, *least, *most)
            table.listing.control(RowCode.UNLESS, label, pointer)
        self.rows(row.otherwise)
        for number, label in labels.items():
            table.listing.control(RowCode.JUMP, end)
            table.listing.place(label)
            self.rows(row.cases[number])
        table.listing.place(end)

    def tell(self, row: Tell) -> None:
        for counter, number in row.told:
            if is_late(number):
                self.word_is(self._counter(counter), number)
            else:
                source = self.table.listing.cell(int(hint(number)))
                self.table.word_is(source, number)
                self.table.listing.move(source, [self._counter(counter)])

    def computed(self, late: Late | None) -> None:
        """Write a row that computes late numbers. Later rows use them."""
        if late is None:
            return
        table = self.table
        step = table.listing.control(RowCode.COMPUTE, 0, 0)
        table.tags += [None] * (step - len(table.tags)) + [late]
        symbols: dict[int, Operand] = {late.atom: self._counter(late.counter)}
        symbols |= {atom: words.symbols[atom] for atom, words in self.late.items() if atom != late.atom}
        assert table.left is not None
        self.late[late.atom] = LateWords(late, step, symbols, table.listing, table.left, table._constant, table.word_is)
        table._late.append(self.late[late.atom])

    def word_is(self, at: Operand, number: Whole) -> None:
        """Record that a word will be this number."""
        if is_late(number):
            self.late[newest(number)].set(at, number)
        else:
            self.table.word_is(at, number)

    def end(self) -> None:
        """Complete addresses that variables got before a late number was known: add that number."""
        for places in self.variables.values():
            for offset, words in places.words.items():
                if is_late(offset):
                    self.late[newest(offset)].add(places.cell, offset, words)

    def branch(self, row: Branch) -> None:
        listing, otherwise, end = self.table.listing, Label(), Label()
        listing.control(RowCode.UNLESS, otherwise, self._word(row.condition))
        self.rows(row.then)
        if row.otherwise:
            listing.control(RowCode.JUMP, end)
        listing.place(otherwise)
        self.rows(row.otherwise)
        listing.place(end)

    def _argument(self, ref: Ref, at: Operand) -> None:
        """Record that the argument is this tensor's address."""
        table, base = self.table, ref.base
        if isinstance(base, Outer):
            assert ref.is_all_of(base)
            table.tensor(self.part, base.output, base.index, at)
        elif isinstance(base, Variable):
            self._places(base).words.setdefault(ref.offset, []).append(at)
        elif isinstance(base, SizeList) and any(map(is_late, base.array.flat)):
            table.pointers.append((at, self._elements(base)))
        elif isinstance(base, Counter):
            table.pointers.append((at, self._counter(base)))
        elif isinstance(base, Fixed) and not is_open(ref.offset):
            table._numbers.append((at, self._begin(base) + hint(ref.offset)))
        else:
            begin = self.region if isinstance(base, Own) else (
                table.region_of(base) if isinstance(base, SizeList) else self._begin(base)
            )  # fmt: skip
            if is_late(ref.offset):
                self.late[newest(ref.offset)].add(self._begins(begin), ref.offset, [at])
            else:
                table.open.addresses.append((at, begin, ref.offset))

    def _elements(self, sizes: SizeList) -> TableCell:
        """Return the first of the words that are the elements of a constant."""
        assert sizes.dtype == np.int64
        return self.table.words(sizes.array.reshape(-1).tolist(), self.word_is)

    def _begins(self, begin: OwnRegion | int) -> TableCell:
        """Return a word that says where memory of the block or a constant begins."""
        if isinstance(begin, int):
            return self.table._constant(begin)
        assert begin is self.region
        if self.base is None:
            self.base = self.table.listing.cell()
            self.table.open.addresses.append((self.base, begin, 0))
        return self.base

    def _word(self, ref: Ref) -> TableCell:
        """Return a word that holds this address, for control rows."""
        base = ref.base
        if isinstance(base, Variable):
            places = self._places(base)
            if ref.is_all_of(base):
                return places.cell
            if ref.offset not in places.read:
                places.read[ref.offset] = cell = self.table.listing.cell()
                places.words.setdefault(ref.offset, []).append(cell)
            return places.read[ref.offset]
        if isinstance(base, Fixed) and not is_open(ref.offset):
            return self.table._constant(self._begin(base) + hint(ref.offset))
        cell = self.table.listing.cell()
        self._argument(ref, cell)
        return cell

    def _source(self, ref: Ref) -> tuple[Operand, Whole]:
        """Return a word, and the number to add to it."""
        if isinstance(ref.base, Variable | Outer):
            return self._word(Ref(ref.base)), ref.offset
        return self._word(ref), 0

    def _move(self, places: _Places, offset: Whole, source: Operand, add: Whole) -> None:
        """Write a MOVE row. Its words are filled in when all words of the variable are known."""
        step = self.table.listing.control(RowCode.MOVE, 0, 0, 0)
        self.table._moves.append((step, places, offset, source, add))
        if not is_late(add) or newest(add) in self.late:  # else the number is not known yet: see `end`
            self.word_is(word_of(step, 2), add)

    def _begin(self, base: Fixed) -> int:
        """Return where a constant begins."""
        self.table.kept.append(base.array)
        return address(base.array if base.array.size else NOTHING)

    def _places(self, variable: Variable) -> _Places:
        if variable not in self.table._variables:
            cell = self.table.listing.cell()
            self.table._variables[variable] = _Places(cell, {0: [cell]})
        self.variables[variable] = self.table._variables[variable]
        return self.table._variables[variable]

    def _counter(self, counter: Counter) -> TableCell:
        if counter not in self.table.counters:
            self.table.counters[counter] = self.table.listing.cell()
        return self.table.counters[counter]


_WRITERS: dict[type, Callable[[_BlockWriter, Any], None]] = {
    LaunchRow: _BlockWriter.launch, Set: _BlockWriter.set, CopyRow: _BlockWriter.copy, LoopRow: _BlockWriter.loop,
    Branch: _BlockWriter.branch, Compute: _BlockWriter.compute, Cases: _BlockWriter.cases, Tell: _BlockWriter.tell,
}  # fmt: skip
