"""Executables of the processor: a table of steps that the thread pool runs.

Each kernel is a program of its own. The table holds its address, its grid and its arguments. So one call runs any
kernels of the device in any order, and a plan for another shape reuses programs that are already compiled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base import Queue, address
from ..c_device import NOTHING, CQueue
from ..c_kernel import CKernel
from ..control_rows import Block, Counter, Late
from ..executable import Bound, Executable, Loops, Part, Sizes
from ..reports import Reports
from . import table_format
from .table_sizes import OwnMemory
from .table_writer import TableWriter

if TYPE_CHECKING:
    from .device import NativeDevice

#: the first step after the entrance of a table
FIRST = 2


class LaunchTable(Executable):
    """The table of a plan's parts, without the parts that belong to each request."""

    takes_addresses = True

    def __init__(self, device: NativeDevice, parts: Sequence[Part]) -> None:
        self.device, self.parts = device, parts
        writer = self.writer = TableWriter(device.target.units)
        writer.begin([part.kernel for part in parts if isinstance(part.kernel, Block)])
        for number, part in enumerate(parts):
            writer.part(number, part)
        linked = self.linked = writer.link()
        #: for each tensor, the words that hold its address
        self.places = {number: [linked.number(at) for at in places] for number, places in writer.places.items()}
        #: words that hold the address of another word
        self.pointers = [(linked.number(at), linked.cells[cell]) for at, cell in writer.pointers]
        #: for each kernel, the positions of its launches' costs, once per use in the table
        self.costs = [
            (kernel, np.array([[linked.number(at) for at in one] for one in costs], np.intp))
            for kernel, costs in writer.costs.items()
        ]
        #: for each kernel that reports faults of its inputs: its tag, and the words that hold the address of its record
        self.reports = [(tag, [linked.number(at) for at in places]) for tag, places in writer.reports]

    @property
    def timed(self) -> bool:  # type: ignore[override]
        return self.device.tick > 0

    def bind(
        self, queue: Queue, memory: Sequence[Any], fitted: Collection[int] = (), clocked: bool = False
    ) -> BoundTable:  # fmt: skip
        assert isinstance(queue, CQueue)
        return BoundTable(self, queue, memory, fitted, clocked)


class BoundTable(Bound):
    """A table with the memory of one request."""

    def __init__(
        self, executable: LaunchTable, queue: CQueue, memory: Sequence[Any], fitted: Collection[int], clocked: bool
    ) -> None:
        linked, places = executable.linked, executable.places
        self._executable, self._queue = executable, queue
        self.table = table = linked.table.copy()
        # A memoryview sets a number faster than an array does.
        self._words = table.data
        for at, to in executable.pointers:
            table[at] = address(table) + 8 * to
        for kernel, costs in executable.costs:
            kernel.costs.pass_on(table, costs)
        self._own_memory = OwnMemory(executable.writer.open, linked, table, executable.device, queue)
        #: objects that must live as long as this one: the table holds only addresses
        self._kept = [memory[number] for number in places if memory[number] is not None]
        for number, words in places.items():
            if memory[number] is not None:
                table[words] = address(memory[number] if memory[number].size else NOTHING)
        #: words that hold addresses in the arena that change with sizes
        self._fitted = [(at, number) for number in fitted for at in places.get(number, ())]
        self._in_arena: list[tuple[int, int]] | None = None
        #: tensors that come with each inference
        self._given = [(n, words) for n, words in places.items() if memory[n] is None and n not in fitted]
        self.loops = TableLoops(executable, table, self._words) if executable.writer.left is not None else None
        #: reports of kernels about their inputs; None: no kernel reports
        self._reports = Reports([tag for tag, _ in executable.reports]) if executable.reports else None
        for record, (_, words) in enumerate(executable.reports):
            assert self._reports is not None
            table[words] = address(self._reports.records[record])
        #: times of each step, if the caller asked for them
        self._times = table_format.times(len(executable.writer.owners)) if clocked else None
        self._runner = executable.device.pool.runner(table, self._times)
        self._again = self._runner.again

    def invoke(self, values: MutableMapping[int, Any]) -> None:
        table = self._words
        for number, words in self._given:
            value = values[number]
            where = value if type(value) is int else address(value)
            for at in words:
                table[at] = where
        queue, again = self._queue, self._again
        queue.launches += 1
        begin = perf_counter()
        try:
            while state := again():
                self._runner.resume(state)
        except BaseException:  # Ctrl-C: no further step begins, running steps finish
            self._runner.cancel()  # called from here, see `Runner`
            if self._reports is not None:  # reports up to now do not belong to the next inference
                self._reports.clear()
            raise
        queue.waited += perf_counter() - begin
        if self._reports is not None:
            self._reports.check()

    def expect(self) -> None:
        self._runner.expect()

    def fit(self, sizes: Sizes, arena: int, offsets: Mapping[int, int]) -> None:
        if self._in_arena is None:
            self._in_arena = [(at, offsets[number]) for at, number in self._fitted]
        self._own_memory.fit(sizes, arena, self._in_arena)

    def place(self, addresses: Mapping[int, int]) -> None:
        table, places = self._words, self._executable.places
        for number, where in addresses.items():
            for at in places.get(number, ()):
                table[at] = where
        self._given = [one for one in self._given if one[0] not in addresses]

    def words(self, part: int, names: Sequence[str]) -> tuple[Any, list[int]]:
        executable = self._executable
        kernel = executable.parts[part].kernel
        assert isinstance(kernel, CKernel)
        (begin,), (call,) = self._own_memory.begins(executable.writer.placed[part]), kernel.calls
        given = [param.split()[-1] for param in call.params]
        return self._words, [begin + given.index(name) for name in names]

    @property
    def nbytes(self) -> int:
        return self._own_memory.nbytes

    def costs(self) -> list[int]:
        """Return the costs of each kernel's launches that the pool has learned so far (see `LaunchCosts`)."""
        return [int(cost) for _, costs in self._executable.costs for cost in self.table[costs].reshape(-1)]

    def seconds(self) -> list[float]:
        count, owners = len(self._executable.parts), self._executable.writer.owners
        return np.bincount(owners, self._ticks(), count).tolist() if owners else [0.0] * count

    def inside(self) -> list[tuple[Any, float, int]]:
        assert self._times is not None
        found: dict[Any, tuple[float, int]] = {}
        tags = self._executable.writer.tags
        for tag, seconds, count in zip(tags, self._ticks(), self._times[2::2].tolist(), strict=True):
            if tag is not None:
                before, most = found.get(tag, (0.0, 0))
                found[tag] = before + seconds, max(most, count)  # a kernel of several launches ran once
        return [(tag, seconds, count) for tag, (seconds, count) in found.items()]

    def _ticks(self) -> Any:
        """Return the seconds of each step."""
        assert self._times is not None
        return self._times[1::2].astype(np.int64).clip(0) * self._executable.device.tick


class TableLoops(Loops):
    """The loops in a table. The table's own words count their iterations."""

    def __init__(self, executable: LaunchTable, table: np.ndarray[Any, Any], words: memoryview) -> None:
        writer, cells = executable.writer, executable.linked.cells
        assert writer.bound is not None and writer.left is not None
        self._table, self._words, self._tags = table, words, writer.tags
        self._bound, self._left = cells[writer.bound], cells[writer.left]
        self._counters = {counter: cells[cell] for counter, cell in writer.counters.items()}
        #: the word that says where a run begins, and the part that each step belongs to
        self._entrance = None if writer.entrance is None else executable.linked.begins[writer.entrance] + 1
        self._owners = writer.owners

    def allow(self, iterations: int, anew: bool = True) -> None:
        self._words[self._bound], self._words[self._left + 1] = iterations, 0
        if anew and self._entrance is not None:
            self._words[self._entrance] = FIRST

    def left(self) -> int | None:
        step = self._words[self._left + 1]
        if self._entrance is None or not step or not isinstance(self._tags[step - 1], Late):
            return None
        number = self._owners[step - 1]
        behind = (at for at in range(step, len(self._owners)) if self._owners[at] != number)
        self._words[self._entrance] = next(behind, len(self._owners))
        return number

    def taken(self) -> int:
        return self._words[self._bound] - self._words[self._left]

    def failed(self) -> tuple[Any, int | None] | None:
        step = self._words[self._left + 1]
        return (self._tags[step - 1], table_format.trips(self._table, step - 1)) if step else None

    def counted(self, counter: Counter) -> int:
        return self._words[self._counters[counter]]
