"""Reports of kernels about faults of their inputs that only the kernels see, while they run.

A kernel never leaves its tensors: it continues with something legal, and writes the error into a record. The record is
zero as long as nothing is wrong. The first work-item that finds an error fills it. The thread that waits for the kernel
reads and clears the record, and raises `KernelError`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ExecutionError
from ..ir.types import DType, TensorType
from ..ops.input_errors import ReportedFault, describe
from .base import Device, Queue

#: 64-bit words of a record: a `ReportedFault`, the value, the limit
WORDS = 3
#: records that a queue allocates at a time
MANY = 64
_RECORD, _RECORDS = TensorType(DType.INT64, (WORDS,)), TensorType(DType.INT64, (MANY, WORDS))

Array = np.ndarray[Any, Any]


class KernelError(ExecutionError):
    """A kernel got values that it cannot work with.

    ``subject``: the kernel's number among those of one launch, or what its queue was `launching`.
    """

    def __init__(self, what: str, *, subject: Any = None, where: str = "", hint: str = "") -> None:
        super().__init__(what, where=where, hint=hint)
        self.subject = subject

    def at(self, where: str) -> ExecutionError:
        """Return the error for users: the same, with the node."""
        return ExecutionError(self.what, where=where, hint=self.hint)


def _error(record: Array, subject: Any) -> KernelError:
    fault, value, limit = record.tolist()
    return KernelError(describe(ReportedFault(fault), value, limit), subject=subject)


class Reports:
    """Records of kernels that run within the call that launches them, in the host's memory."""

    def __init__(self, kernels: Sequence[int]) -> None:
        """``kernels``: numbers of the kernels that have a record."""
        self.kernels = list(kernels)
        #: comparing these bytes takes 0.05 us for a hundred records; asking an array takes 2 us for one
        self._bytes = bytearray(len(self.kernels) * _RECORD.nbytes)
        self._clean = bytes(self._bytes)
        self.records = np.frombuffer(self._bytes, np.int64).reshape(-1, WORDS)

    def record(self, kernel: int) -> Array:
        """Return the record that kernel number ``kernel`` writes."""
        found: Array = self.records[self.kernels.index(kernel)]
        return found

    def clear(self) -> None:
        self.records[:] = 0

    def check(self) -> None:
        """Raise KernelError if a kernel reported something, and clear all records then. The kernels must have ended."""
        if self._bytes != self._clean:
            at = int(np.flatnonzero(self.records[:, 0])[0])
            error = _error(self.records[at], self.kernels[at])
            self.clear()
            raise error


class ReportRecord:
    """One record of a queue. It lives as long as its owner."""

    __slots__ = ("memory", "place")

    def __init__(self, place: tuple[int, int], memory: Any) -> None:
        #: the block of the queue and the position there, and the memory
        self.place, self.memory = place, memory


class QueueReports:
    """Records of kernels that a queue runs later, in the device's memory."""

    def __init__(self, queue: Queue) -> None:
        # Weak, because the queue owns this object.
        self._queue = weakref.ref(queue)
        self._blocks: list[Any] = []
        self._free: list[tuple[int, int]] = []
        #: places whose owners are gone; nobody has read the reports of their last launches yet
        self._left: list[tuple[int, int]] = []
        #: places that kernels may have written to, and what was launching then
        self.watched: dict[tuple[int, int], Any] = {}

    def take(self, owner: Any, device: Device) -> ReportRecord:
        """Return a record for the launches of ``owner``."""
        if not self._free:
            block = device.view(device.alloc(_RECORDS.nbytes), 0, _RECORDS)
            self._clear(block)
            self._free = [(len(self._blocks), n) for n in range(MANY)]
            self._blocks.append(block)
        place = self._free.pop()
        weakref.finalize(owner, self._left.append, place).atexit = False
        held, number = self._blocks[place[0]], place[1]
        if isinstance(held, np.ndarray):
            return ReportRecord(place, held[number])
        return ReportRecord(place, device.view(held, number * _RECORD.nbytes, _RECORD))

    def _clear(self, block: Any) -> None:
        queue = self._queue()
        assert queue is not None
        queue.put(np.zeros(_RECORDS.dims, np.int64), block)

    def check(self) -> None:
        """Wait for all launched kernels. Raise KernelError if one reported something, and clear all records then."""
        queue = self._queue()
        assert queue is not None
        watched, self.watched = self.watched, {}
        found: KernelError | None = None
        blocks = sorted({block for block, _ in watched})
        for block, records in zip(blocks, queue.fetch([self._blocks[b] for b in blocks]), strict=True):
            for number in np.flatnonzero(records[:, 0]).tolist():
                if found is None and (block, number) in watched:
                    found = _error(records[number], watched[block, number])
            if records[:, 0].any():
                self._clear(self._blocks[block])
        while self._left:
            self._free.append(self._left.pop())
        if found is not None:
            raise found
