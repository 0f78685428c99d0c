"""Executables of devices whose kernels C code enqueues one by one: OpenCL."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from tunewright.ir.types import TensorType

from ..base import Queue
from ..c_device import CDevice, CLaunch, CQueue
from ..c_kernel import CKernel, ConstantTable, In, Out, ReportArgument, Scratch
from ..executable import Bound, Executable, Part, Sizes
from ..reports import ReportRecord
from .enqueued_sizes import OpenArguments


class Enqueued(Executable):
    """Kernels that are enqueued one after another."""

    def __init__(self, device: CDevice, parts: Sequence[Part]) -> None:
        self.device, self.parts = device, parts
        self.takes_addresses = device.shares_memory

    def bind(
        self, queue: Queue, memory: Sequence[Any], fitted: Collection[int] = (), clocked: bool = False
    ) -> BoundLaunches:  # fmt: skip
        assert isinstance(queue, CQueue)
        return BoundLaunches(self, queue, memory, fitted)


class BoundKernel:
    """The launches of one kernel, with the arguments of one request."""

    def __init__(self, part: Part, queue: CQueue, device: CDevice, owner: BoundLaunches) -> None:
        assert isinstance(part.kernel, CKernel)
        self.kernel, self._queue, self._device = part.kernel, queue, device
        self.launches: list[CLaunch] = []
        #: argument positions of each tensor by number: (launch, argument)
        self.tensors: dict[int, list[tuple[int, int]]] = {}
        #: tensors that are constants of the kernel
        self.lasting: set[int] = set()
        #: argument positions of scratch memory by name, and the borrowed memory
        self._scratch: dict[str, list[tuple[int, int]]] = {}
        self._borrowed: dict[str, Any] = {}
        #: errors that kernels report about their inputs
        self.record: ReportRecord | None = None
        for number, call in enumerate(part.kernel.calls):
            for at, arg in enumerate(call.args):
                if isinstance(arg, In | Out):
                    tensor = (part.ins if isinstance(arg, In) else part.outs)[arg.index]
                    self.tensors.setdefault(tensor, []).append((number, at))
                    if isinstance(arg, In) and part.kernel.problem.constant[arg.index]:
                        self.lasting.add(tensor)
                elif isinstance(arg, Scratch):
                    self._scratch.setdefault(arg.name, []).append((number, at))
                elif isinstance(arg, ReportArgument) and self.record is None:
                    self.record = queue.reports.take(owner, device)
        #: the size-dependent parts of its own launches; for the current sizes, launches of another kernel may be in use
        of_class, grids = part.kernel.open, [call.grid for call in part.kernel.calls]
        self._open = None if of_class is None else OpenArguments(of_class, grids, device)
        self._posed: CKernel | None = None
        self._own = self.launches = self._made(part.kernel)

    def _made(self, kernel: CKernel) -> list[CLaunch]:
        """Return the launches of a kernel with all arguments except tensors and scratch memory."""
        made = []
        for program, call in zip(kernel.programs, kernel.calls, strict=True):
            launch = self._device.launch(self._queue, program, call.name, call.grid, call.local)
            for at, arg in enumerate(call.args):
                if isinstance(arg, ConstantTable):
                    launch.set(at, self._device.constant(arg.array))
                elif isinstance(arg, ReportArgument):
                    assert self.record is not None
                    launch.set(at, self.record.memory)
                elif not isinstance(arg, In | Out | Scratch):
                    launch.set(at, arg)
            made.append(launch)
        self.launches, self._borrowed = made, {}
        for call in kernel.calls:
            for arg in call.args:
                if isinstance(arg, Scratch):
                    self._borrow(arg.name, arg.nbytes)
        return made

    def _borrow(self, name: str, nbytes: int) -> None:
        """Borrow scratch memory, which has one number in all kernels of the queue."""
        memory = self._queue.borrow(self._device, [*self._scratch].index(name), nbytes)
        if memory is not self._borrowed.get(name):
            self._borrowed[name] = memory
            for launch, at in self._scratch[name]:
                self.launches[launch].set(at, memory)

    def set(self, number: int, value: Any) -> None:
        """Set the address of a tensor."""
        for launch, at in self.tensors[number]:
            self.launches[launch].set(at, value)

    def is_posed(self, sizes: Sizes) -> bool:
        """Whether it holds the launches for these sizes."""
        return sizes.posed.get(self.kernel) is self._posed

    def pose(self, sizes: Sizes) -> None:
        """Select the launches for some sizes. They hold no tensors yet."""
        posed = sizes.posed.get(self.kernel)
        if posed is None:
            self.launches, self._borrowed = self._own, {}
            for name in self._scratch:
                self._borrow(name, 0)
        else:
            assert isinstance(posed, CKernel)
            self._made(posed)
        self._posed = posed

    def fit(self, sizes: Sizes) -> None:
        """Set the arguments that depend on sizes, except tensors."""
        if self._posed is None and self._open is not None:
            self._open.fit(self.launches, sizes)
            for name, nbytes in self._open.scratch(sizes):
                self._borrow(name, nbytes)


class BoundLaunches(Bound):
    """The launches of kernels, with the arguments of one request."""

    def __init__(self, executable: Enqueued, queue: CQueue, memory: Sequence[Any], fitted: Collection[int]) -> None:
        self._device, self._queue, self._memory = executable.device, queue, memory
        #: device copies of host arrays, by the tensor's number
        self._copies: dict[int, Any] = {}
        self._kernels = [BoundKernel(part, queue, self._device, self) for part in executable.parts]
        #: kernels whose launches changed and do not hold their tensors yet
        self._posing: set[BoundKernel] = set()
        #: where kernels report bad inputs, and the tag of the part that each report belongs to
        self._records = [
            (kernel.record, part.tag)
            for kernel, part in zip(self._kernels, executable.parts, strict=True) if kernel.record is not None
        ]  # fmt: skip
        #: kernels that take each tensor, and kernels that take tensors of each inference
        self._takers: dict[int, list[BoundKernel]] = {}
        self._given: dict[int, list[BoundKernel]] = {}
        #: places of tensors that do not come with each inference
        self._places: dict[int, Any] = {}
        for kernel in self._kernels:
            for number in kernel.tensors:
                self._takers.setdefault(number, []).append(kernel)
                if number in fitted:
                    continue
                if memory[number] is None:
                    self._given.setdefault(number, []).append(kernel)
                else:
                    self._places[number] = self._place(number, memory[number], number in kernel.lasting)
                    kernel.set(number, self._places[number])
        #: tensors whose places depend on sizes
        self._fitted = [number for number in self._takers if number in fitted]
        self._flatten()

    def _flatten(self) -> None:
        """Collect what each inference enqueues, and which arguments take the tensors that come with it."""
        self._launches = [launch for kernel in self._kernels for launch in kernel.launches]
        self._arguments = [
            (number, [(kernel.launches[launch], at) for kernel in kernels for launch, at in kernel.tensors[number]])
            for number, kernels in self._given.items()
        ]

    def _place(self, number: int, value: Any, lasts: bool) -> Any:
        """Return where kernels find a tensor; ``lasts``: nobody writes to it."""
        if not isinstance(value, np.ndarray) or self._device.shares_memory:
            return value
        return self._device.constant(value) if lasts else self._copy(number, value)

    def _copy(self, number: int, array: np.ndarray[Any, Any]) -> Any:
        """Return the device copy of a host array."""
        copy = self._copies.get(number)
        if copy is None or (copy.shape, copy.dtype) != (array.shape, array.dtype):
            type = TensorType.of(array)
            copy = self._copies[number] = self._device.view(self._device.alloc(type.nbytes), 0, type)
        self._queue.put(array, copy)
        return copy

    def invoke(self, values: MutableMapping[int, Any]) -> None:
        for number, places in self._arguments:
            value = values[number]
            if isinstance(value, np.ndarray) and not self._device.shares_memory:
                value = self._copy(number, value)
            for launch, at in places:
                launch.set(at, value)
        for launch in self._launches:
            launch()
        for record, tag in self._records:
            self._queue.reports.watched[record.place] = tag

    def fit(self, sizes: Sizes, arena: int, offsets: Mapping[int, int]) -> None:
        values = sizes.values
        self._fit(sizes, {number: arena + values[offsets[number]] for number in self._fitted})

    def refit(self, sizes: Sizes, room: Sizes, layout: Hashable) -> None:
        memory = self._memory
        self._fit(sizes, {number: self._place(number, memory[number], False) for number in self._fitted})

    def _fit(self, sizes: Sizes, places: Mapping[int, Any]) -> None:
        """Set all arguments that depend on sizes, and the places of the fitted tensors."""
        others = [kernel for kernel in self._kernels if not kernel.is_posed(sizes)]
        self._posing.update(others)
        for kernel in others:
            kernel.pose(sizes)
        for kernel in self._kernels:
            kernel.fit(sizes)
        self.place(places)
        if self._posing:
            for kernel in self._posing:
                for number in kernel.tensors:
                    if number in self._places:
                        kernel.set(number, self._places[number])
            self._flatten()
            self._posing.clear()

    def place(self, places: Mapping[int, Any]) -> None:
        """Set places of tensors by number, for all later inferences: no inference brings these tensors."""
        known = self._places
        for number, place in places.items():
            if known.get(number) is place or (type(place) is int and known.get(number) == place):
                continue
            for kernel in self._takers.get(number, ()):
                kernel.set(number, place)
            known[number] = place
            if self._given.pop(number, None) is not None:
                self._flatten()

    def words(self, part: int, names: Sequence[str]) -> tuple[Any, list[int]]:
        kernel = self._kernels[part]
        (call,) = kernel.kernel.calls
        given = [param.split()[-1] for param in call.params]
        return _Numbers(kernel), [given.index(name) for name in names]


class _Numbers:
    """The numbers among the arguments of a single-launch kernel: writing one sets it."""

    def __init__(self, kernel: BoundKernel) -> None:
        self._kernel = kernel

    def __setitem__(self, at: int, value: int) -> None:
        self._kernel.launches[0].number(at, int(value))
