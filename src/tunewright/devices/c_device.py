"""Devices that compile the C of our kernels: the processor through clang, and OpenCL devices."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ..errors import ExecutionError
from .base import Device, Queue
from .executable import Executable, Part
from .reports import KernelError, QueueReports

#: target of the pointer of an empty tensor: nobody reads it, but the pointer must be valid
NOTHING = np.zeros(64, np.uint8)


class NoCompiler(ExecutionError):
    """A kernel is not in the cache, and nothing can be compiled here."""


class CLaunch(ABC):
    """A kernel over a grid, with its arguments. It belongs to one queue and is not shared between threads."""

    @abstractmethod
    def set(self, at: int, value: Any) -> None:
        """Set argument ``at``: an array that the kernel reads and writes, its address, or a numpy number. An address is
        a plain integer, and needs a device that shares the host's memory."""

    @abstractmethod
    def number(self, at: int, value: int) -> None:
        """Set argument ``at`` to an integer of 32 bits."""

    @abstractmethod
    def spread(self, grid: Sequence[int]) -> None:
        """Set another grid with as many axes."""

    @abstractmethod
    def __call__(self) -> None:
        """Enqueue the kernel."""


class CQueue(Queue):
    """An in-order queue of one request, with scratch memory that its kernels share."""

    def __init__(self) -> None:
        self.launches = 0
        self.waited = 0.0
        #: whether enqueued work exists that nobody has waited for
        self.pending = False
        #: objects that must live until everything queued so far has finished
        self.kept: list[Any] = []
        #: reports of kernels that run later than their launch
        self.reports = QueueReports(self)
        #: scratch memory by number: kernels run in sequence, and share it while it is in the caches
        self.scratch: dict[int, Any] = {}

    def borrow(self, device: CDevice, number: int, nbytes: int) -> Any:
        """Return scratch memory for a kernel. Kernels of a queue run in sequence, so they share the memory of a number.
        Memory that grows gets spare room, since sizes that change grow again."""
        held = self.scratch.get(number)
        if held is None or held.nbytes < nbytes:
            held = self.scratch[number] = device.alloc(nbytes if held is None else nbytes * 5 // 4)
        return held

    @property
    def scratch_bytes(self) -> int:
        return sum(held.nbytes for held in self.scratch.values())

    @property
    def watching(self) -> bool:
        return bool(self.reports.watched)

    def check(self) -> None:
        self.reports.check()

    def forget(self) -> None:
        with suppress(KernelError):
            self.reports.check()

    def keep(self, owner: object) -> None:
        """Keep an object alive until everything queued so far has finished."""
        self.kept.append(owner)

    def now(self) -> float:
        self.finish()
        return time.perf_counter()


class CDevice(Device):
    """Compiles texts of one dialect and launches their kernels."""

    #: "c" or "opencl": the prelude that completes a text
    dialect: str

    @abstractmethod
    def queue(self) -> CQueue: ...

    @abstractmethod
    def build(self, source: str) -> Any:
        """Return the program of a complete text, compiled once. ExecutionError has the compiler's message."""

    def begin_build(self, sources: Sequence[str]) -> None:
        """Begin to build programs that will be needed, if the device compiles in other processes."""

    def link(self, parts: Sequence[Part]) -> Executable:
        from .opencl.enqueued import Enqueued  # Enqueued imports this module

        return Enqueued(self, parts)

    def launch(
        self, queue: Queue, program: Any, name: str, grid: Sequence[int], local: Sequence[int] = ()
    ) -> CLaunch:  # fmt: skip
        """Return a kernel of a program over a grid of work-items, ready for its arguments. ``local``: the size of a
        group.

        For devices that enqueue kernels one by one (`enqueued`).
        """
        raise NotImplementedError
