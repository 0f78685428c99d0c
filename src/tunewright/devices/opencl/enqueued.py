"""Executables of devices that enqueue kernels in C one by one: OpenCL's."""

from __future__ import annotations

from collections.abc import Collection, MutableMapping, Sequence
from typing import Any

import numpy as np

from tunewright.ir.types import TensorType

from ..base import Queue
from ..c_device import CDevice, CLaunch, CQueue
from ..c_kernel import CKernel, ConstantTable, In, Out, ReportArgument, Scratch
from ..executable import Bound, Executable, Part
from ..reports import ReportRecord


class Enqueued(Executable):
    """Kernels that are enqueued one after the other."""

    def __init__(self, device: CDevice, parts: Sequence[Part]) -> None:
        self.device, self.parts = device, parts

    def bind(
        self, queue: Queue, memory: Sequence[Any], fitted: Collection[int] = (), clocked: bool = False
    ) -> BoundLaunches:  # fmt: skip
        assert isinstance(queue, CQueue)
        return BoundLaunches(self, queue, memory)


class BoundLaunches(Bound):
    """The launches of kernels, with the arguments of one request."""

    def __init__(self, executable: Enqueued, queue: CQueue, memory: Sequence[Any]) -> None:
        self._device, self._queue, self._memory = executable.device, queue, memory
        self._launches: list[CLaunch] = []
        #: tensors that come with each inference: the arguments that each of them is
        self._given: dict[int, list[tuple[CLaunch, int]]] = {}
        #: memory of the device for arrays of the host, by the tensor's number
        self._copies: dict[int, Any] = {}
        #: where kernels say what is wrong with their inputs, and whose failure that is
        self._records: list[tuple[ReportRecord, object]] = []
        for part in executable.parts:
            self._bind(part)

    def _bind(self, part: Part) -> None:
        kernel, queue, device = part.kernel, self._queue, self._device
        assert isinstance(kernel, CKernel)
        scratch: dict[str, Any] = {}
        record: ReportRecord | None = None
        for program, call in zip(kernel.programs, kernel.calls, strict=True):
            launch = device.launch(queue, program, call.name, call.grid, call.local)
            for at, arg in enumerate(call.args):
                if isinstance(arg, In | Out):
                    number = (part.ins if isinstance(arg, In) else part.outs)[arg.index]
                    lasts = isinstance(arg, In) and kernel.problem.constant[arg.index]
                    self._tensor(launch, at, number, lasts)
                elif isinstance(arg, Scratch):
                    if arg.name not in scratch:
                        scratch[arg.name] = queue.borrow(device, len(scratch), arg.nbytes)
                    assert scratch[arg.name].nbytes >= arg.nbytes, f"{arg.name} is of two sizes"
                    launch.set(at, scratch[arg.name])
                elif isinstance(arg, ConstantTable):
                    launch.set(at, device.constant(arg.array))
                elif isinstance(arg, ReportArgument):
                    record = record or queue.reports.take(self, device)
                    launch.set(at, record.memory)
                else:
                    launch.set(at, arg)
            self._launches.append(launch)
        if record is not None:
            self._records.append((record, part.tag))

    def _tensor(self, launch: CLaunch, at: int, number: int, lasts: bool) -> None:
        """An argument; ``lasts``: it is a constant of the kernel."""
        value = self._memory[number]
        if value is None:
            self._given.setdefault(number, []).append((launch, at))
        elif not isinstance(value, np.ndarray) or self._device.shares_memory:
            launch.set(at, value)
        elif lasts:
            launch.set(at, self._device.constant(value))
        else:
            launch.set(at, self._copy(number, value))

    def _copy(self, number: int, array: np.ndarray[Any, Any]) -> Any:
        """An array of the host in the device's memory."""
        copy = self._copies.get(number)
        if copy is None or (copy.shape, copy.dtype) != (array.shape, array.dtype):
            type = TensorType.of(array)
            copy = self._copies[number] = self._device.view(self._device.alloc(type.nbytes), 0, type)
        self._queue.put(array, copy)
        return copy

    def invoke(self, values: MutableMapping[int, Any]) -> None:
        for number, places in self._given.items():
            value = values[number]
            if isinstance(value, np.ndarray) and not self._device.shares_memory:
                value = self._copy(number, value)
            for launch, at in places:
                launch.set(at, value)
        for launch in self._launches:
            launch()
        for record, tag in self._records:
            self._queue.reports.watched[record.place] = tag
