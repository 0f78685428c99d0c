"""Many kernels as one call: a table of steps that the thread pool goes through.

Each kernel is a program of its own; the table holds its address, its grid and its arguments. So any kernels of the
device are one call, in any order, and a plan for another shape compiles nothing that is there already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...devices.base import Chained, Queue, address
from ...devices.c_device import NOTHING
from ...devices.native import steps
from ...devices.native.device import NativeDevice, NativeQueue
from ..base import Kernel, Launcher, Linker
from .base import CKernel
from .emit import In, Out, Scratch, Table


@dataclass(frozen=True)
class Linked(Linker):
    """Links any kernels of a device."""

    device: NativeDevice

    @property
    def timed(self) -> bool:
        return self.device.tick > 0

    def link(self, kernels: Sequence[Kernel], queue: Queue) -> LinkedLauncher:
        assert isinstance(queue, NativeQueue)
        return LinkedLauncher(self.device, [k for k in kernels if isinstance(k, CKernel)], queue)


class LinkedLauncher(Launcher, Chained):
    """One request's table."""

    def __init__(self, device: NativeDevice, kernels: Sequence[CKernel], queue: NativeQueue) -> None:
        calls = [(k, call, program) for k, kernel in enumerate(kernels)
                 for call, program in zip(kernel.calls, kernel.programs, strict=True)]  # fmt: skip
        rows = [(program.entry(call.name), call.grid, len(call.args)) for _, call, program in calls]
        table, begins = steps.table(rows, device.target.units)
        self.queue, self._table, self._device, self._made_of = queue, table, device, kernels
        #: arrays that live as long as it does
        self.fixed: Sequence[Any] = ()
        #: where each tensor's address stands
        self._places: dict[tuple[int, bool, int], list[int]] = {}
        self._kept: list[Any] = [program for _, _, program in calls]
        held: dict[tuple[int, str], Any] = {}
        numbers = [0] * len(kernels)
        for (kernel, call, _), begin in zip(calls, begins, strict=True):
            for at, arg in enumerate(call.args, begin):
                if isinstance(arg, In | Out):
                    self._places.setdefault((kernel, isinstance(arg, Out), arg.index), []).append(at)
                elif isinstance(arg, Scratch):
                    if (kernel, arg.name) not in held:
                        held[kernel, arg.name] = queue.borrow(device, numbers[kernel], arg.nbytes)
                        numbers[kernel] += 1
                    table[at] = address(held[kernel, arg.name])
                elif isinstance(arg, Table):
                    self._kept.append(arg.array)
                    table[at] = address(arg.array if arg.array.size else NOTHING)
                else:
                    table[at] = steps.number(arg)
        self._kept += held.values()
        self._kernels = [kernel for kernel, _, _ in calls]
        #: how long each launch takes, where somebody asks
        self._times = steps.times(len(calls))
        self._costs = np.array(begins, np.intp) - 1
        for one, places in _places_of_costs(kernels, begins).items():
            one.costs.pass_on(table, np.array(places, np.intp))
        self._runner = device.pool.runner(table)

    def set(self, kernel: int, output: bool, index: int, array: Any) -> None:
        self.setter([(kernel, output, index)])(array)

    def places(self, uses: Sequence[tuple[int, bool, int]]) -> tuple[Any, list[int]]:
        # A memoryview takes a number sooner than an array does.
        return self._table.data, [at for use in uses for at in self._places.get(use, ())]

    def setter(self, uses: Sequence[tuple[int, bool, int]]) -> Callable[[Any], None]:
        table, places = self.places(uses)

        def set(array: Any) -> None:
            where = address(array if array.size else NOTHING)
            for at in places:
                table[at] = where

        return set

    def costs(self) -> list[int]:
        """What the pool has learned of each step so far (see `base.Costs`)."""
        return [int(cost) for cost in self._table[self._costs]]

    def clock(self) -> None:
        self._runner = self._device.pool.runner(self._table, self._times)

    def chain(self, others: Sequence[Callable[[], object]]) -> LinkedLauncher | None:
        row = [self, *(o for o in others if isinstance(o, LinkedLauncher) and o._device is self._device)]
        if len(row) <= len(others):
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
        self.queue.run(self._runner)

    def seconds(self) -> list[float]:
        times = self._times[1::2].astype(np.int64).clip(0) * self._device.tick
        count = len(self._made_of)
        return np.bincount(self._kernels, times, count).tolist() if self._kernels else [0.0] * count


def _places_of_costs(kernels: Sequence[CKernel], begins: Sequence[int]) -> dict[CKernel, list[list[int]]]:
    """For each kernel where a table has the costs of its launches, each time that it stands there."""
    found: dict[CKernel, list[list[int]]] = {}
    at = iter(begins)
    for kernel in kernels:
        found.setdefault(kernel, []).append([next(at) - 1 for _ in kernel.calls])
    return found


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
