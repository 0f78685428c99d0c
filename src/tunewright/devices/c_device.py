"""Devices that compile the C of our kernels: the processor through clang, and whatever OpenCL offers."""

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

#: what the pointer to an empty tensor points to: nobody reads it, but it must be one
NOTHING = np.zeros(64, np.uint8)


class NoCompiler(ExecutionError):
    """A kernel is not in the cache, and nothing can be compiled here."""


class CLaunch(ABC):
    """A kernel over a grid, with its arguments. It belongs to one queue and is not shared between threads."""

    @abstractmethod
    def set(self, at: int, value: Any) -> None:
        """Argument ``at``: an array, whose bytes the kernel reads and writes, their address (a plain integer, where the
        device shares the host's memory), or a number of numpy's."""

    @abstractmethod
    def number(self, at: int, value: int) -> None:
        """Argument ``at``: an integer of 32 bits."""

    @abstractmethod
    def spread(self, grid: Sequence[int]) -> None:
        """Have another grid, with as many axes."""

    @abstractmethod
    def __call__(self) -> None:
        """Enqueue it."""


class CQueue(Queue):
    """An in-order queue of one request, with scratch memory that its kernels share."""

    def __init__(self) -> None:
        self.launches = 0
        self.waited = 0.0
        #: something was enqueued that nobody has waited for
        self.pending = False
        #: what must live until everything queued so far has finished
        self.kept: list[Any] = []
        #: of kernels that run later than their launch
        self.reports = QueueReports(self)
        #: scratch memory by number: kernels run one after the other, and share it while it is warm
        self.scratch: dict[int, Any] = {}

    def borrow(self, device: CDevice, number: int, nbytes: int) -> Any:
        """Scratch memory for a kernel: those of a queue run one after the other, and share what has one number. Memory
        that grows has some to spare, since sizes that change grow again."""
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
        """Let something live until everything queued so far has finished."""
        self.kept.append(owner)

    def now(self) -> float:
        self.finish()
        return time.perf_counter()


class CDevice(Device):
    """Compiles texts of one dialect and launches their kernels."""

    #: "c" or "opencl": which prelude makes a text complete
    dialect: str

    @abstractmethod
    def queue(self) -> CQueue: ...

    @abstractmethod
    def build(self, source: str) -> Any:
        """The program of a complete text; each is compiled once. ExecutionError says what the compiler says."""

    def begin_build(self, sources: Sequence[str]) -> None:
        """These programs will be wanted: a device that compiles in other processes begins."""

    def link(self, parts: Sequence[Part]) -> Executable:
        from .opencl.enqueued import Enqueued  # which needs this module

        return Enqueued(self, parts)

    def launch(
        self, queue: Queue, program: Any, name: str, grid: Sequence[int], local: Sequence[int] = ()
    ) -> CLaunch:  # fmt: skip
        """A kernel of a program over a grid of work-items, ready for its arguments; ``local``: the size of a group.

        Of devices that enqueue kernels one by one (`enqueued`)."""
        raise NotImplementedError
