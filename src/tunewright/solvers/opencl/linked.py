"""Many kernels as one call: a table of steps that the thread pool goes through.

Each kernel is a program of its own; the table holds its address, its grid and its arguments. So any kernels of the
device are one call, in any order, and a plan for another shape compiles nothing that is there already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...devices.base import Chained, Queue, address
from ...devices.c_device import NOTHING
from ...devices.native import steps
from ...devices.native.device import NativeDevice, NativeQueue
from ...devices.reports import Reports
from ...ir.symbolic import Whole
from ..base import Kernel, Launcher, Linker
from ..rows import Block, Counter, Late
from .base import CKernel
from .control_table import TableWriter
from .table_sizes import TableSizes

#: the step behind the entrance of a table
FIRST = 2


@dataclass(frozen=True)
class Linked(Linker):
    """Links any kernels of a device."""

    device: NativeDevice

    @property
    def timed(self) -> bool:
        return self.device.tick > 0

    def link(self, kernels: Sequence[Kernel | Block], queue: Queue) -> LinkedLauncher:
        assert isinstance(queue, NativeQueue)
        return LinkedLauncher(self.device, [k for k in kernels if isinstance(k, CKernel | Block)], queue)


class LinkedLauncher(Launcher, Chained):
    """One request's table."""

    def __init__(self, device: NativeDevice, kernels: Sequence[CKernel | Block], queue: NativeQueue) -> None:
        writer = TableWriter(device, queue)
        writer.begin([one for one in kernels if isinstance(one, Block)])
        for number, one in enumerate(kernels):
            (writer.block if isinstance(one, Block) else writer.kernel)(number, one)  # type: ignore[arg-type]
        linked = writer.link()
        self.queue, self._table, self._device, self._made_of = queue, linked.table, device, kernels
        #: arrays that live as long as it does
        self.fixed: Sequence[Any] = ()
        #: where each tensor's address stands
        self._places = {use: [linked.number(at) for at in places] for use, places in writer.places.items()}
        self._kept = writer.kept
        #: of each step
        self._kernels, self._tags = writer.owners, writer.tags
        self._bound, self._left = (linked.cells.get(cell, -1) if cell else -1 for cell in (writer.bound, writer.left))
        self._counters = {counter: linked.cells[cell] for counter, cell in writer.counters.items()}
        #: the word that says where a run begins
        self._entrance = None if writer.entrance is None else linked.begins[writer.entrance] + 1
        #: how long each step takes, where somebody asks
        self._times = steps.times(len(self._kernels))
        self._costs = np.array(writer.listing.costs(linked), np.intp)
        self._sizes, self._placed = TableSizes(writer.open, linked, device, queue), writer.placed
        #: what kernels say of their inputs; None: none of them says anything
        self._reports = Reports([subject for subject, _ in writer.reports]) if writer.reports else None
        for number, (_, places) in enumerate(writer.reports):
            assert self._reports is not None
            for at in places:
                self._table[linked.number(at)] = address(self._reports.records[number])
        self._runner = device.pool.runner(self._table)

    def set(self, kernel: int, output: bool, index: int, array: Any) -> None:
        self.setter([(kernel, output, index)])(array)

    def places(self, uses: Sequence[tuple[int, bool, int]]) -> tuple[Any, list[int]]:
        # A memoryview takes a number sooner than an array does.
        return self._table.data, [at for use in uses for at in self._places.get(use, ())]

    def words(self, kernel: int, names: Sequence[str]) -> tuple[Any, list[int]]:
        made = self._made_of[kernel]
        assert isinstance(made, CKernel)
        (begin,), (call,) = self._sizes.begins(self._placed[kernel]), made.calls
        given = [param.split()[-1] for param in call.params]
        return self._table.data, [begin + given.index(name) for name in names]

    def setter(self, uses: Sequence[tuple[int, bool, int]]) -> Callable[[Any], None]:
        table, places = self.places(uses)

        def set(array: Any) -> None:
            where = address(array if array.size else NOTHING)
            for at in places:
                table[at] = where

        return set

    def fit(self, values: Sequence[int], place: Callable[[Whole], int], posed: Mapping[Kernel, Kernel]) -> None:
        self._sizes.fit(values, place, posed)

    def costs(self) -> list[int]:
        """What the pool has learned of each step so far (see `base.Costs`)."""
        return [int(cost) for cost in self._table[self._costs]]

    def clock(self) -> None:
        self._runner = self._device.pool.runner(self._table, self._times)

    def chain(self, others: Sequence[Callable[[], object]]) -> LinkedLauncher | None:
        row = [self, *(o for o in others if isinstance(o, LinkedLauncher) and o._device is self._device)]
        if len(row) <= len(others) or any(one.loops or one._sizes for one in row):
            return None
        made = LinkedLauncher(self._device, [kernel for one in row for kernel in one._made_of], self.queue)
        first = 0
        for one in row:
            for (kernel, output, index), places in one._places.items():
                for at, to in zip(places, made._places[first + kernel, output, index], strict=True):
                    made._table[to] = one._table[at]
            first += len(one._made_of)
        made._kept.append(row)
        return made

    def __call__(self) -> None:
        reports = self._reports
        if reports is None:
            self.queue.run(self._runner)
            return
        try:
            self.queue.run(self._runner)
        except BaseException:  # Ctrl-C: what kernels said until then is not of the next inference
            reports.clear()
            raise
        reports.check()

    @property
    def loops(self) -> bool:
        return self._left >= 0

    def bound(self, iterations: int, anew: bool = True) -> None:
        if self._left >= 0:
            self._table[self._bound], self._table[self._left + 1] = iterations, 0
        if anew and self._entrance is not None:
            self._table[self._entrance] = FIRST

    @property
    def nbytes(self) -> int:
        return self._sizes.nbytes

    def iterated(self) -> tuple[int, Any, int | None]:
        if self._left < 0:
            return 0, None, None
        failed = int(self._table[self._left + 1])
        taken = int(self._table[self._bound]) - int(self._table[self._left])
        return taken, *((self._tags[failed - 1], steps.trips(self._table, failed - 1)) if failed else (None, None))

    def escaped(self) -> int | None:
        if self._entrance is None:
            return None
        failed = int(self._table[self._left + 1])
        if not failed or not isinstance(self._tags[failed - 1], Late):
            return None
        number = self._kernels[failed - 1]
        behind = (at for at in range(failed, len(self._kernels)) if self._kernels[at] != number)
        self._table[self._entrance] = next(behind, len(self._kernels))
        return number

    def counted(self, counter: Counter) -> int:
        return int(self._table[self._counters[counter]])

    def seconds(self) -> list[float]:
        count = len(self._made_of)
        return np.bincount(self._kernels, self._ticks(), count).tolist() if self._kernels else [0.0] * count

    def inside(self) -> list[tuple[Any, float, int]]:
        found: dict[Any, tuple[float, int]] = {}
        for tag, seconds, count in zip(self._tags, self._ticks(), self._times[2::2].tolist(), strict=True):
            if tag is not None:
                before, most = found.get(tag, (0.0, 0))
                found[tag] = before + seconds, max(most, count)  # a kernel of several launches ran once
        return [(tag, seconds, count) for tag, (seconds, count) in found.items()]

    def _ticks(self) -> Any:
        """Seconds of each step."""
        return self._times[1::2].astype(np.int64).clip(0) * self._device.tick


class OneKernel:
    """A kernel's launches for one request, as one call; else as `Bound`."""

    def __init__(self, kernel: CKernel, queue: Queue) -> None:
        assert isinstance(kernel.device, NativeDevice) and isinstance(queue, NativeQueue)
        self.kernel, self.launcher = kernel, LinkedLauncher(kernel.device, [kernel], queue)
        counts = ((False, len(kernel.problem.inputs)), (True, len(kernel.problem.outputs)))
        self._setters = [[self.launcher.setter([(0, output, i)]) for i in range(count)] for output, count in counts]
        self.kept: Sequence[Any] = ()

    def fix(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[[], object]:
        """With these arguments for good."""
        self._set(inputs, outputs)
        self.launcher.fixed = (inputs, outputs)  # the table holds addresses alone
        return self.launcher

    def __call__(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
        """With these arguments now; outputs that are None are made."""
        outputs = [self.kernel.new(i) if out is None else out for i, out in enumerate(outputs)]
        self._set(inputs, outputs)
        self.launcher()
        return outputs

    def _set(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        for setters, arrays in zip(self._setters, (inputs, outputs), strict=True):
            for set, array in zip(setters, arrays, strict=False):
                if array is not None:
                    set(array)
        self.kept = (inputs, outputs)  # a launch is asynchronous: the bytes must live until it is over
