"""Data of timed executions: a ring of copies, so that a kernel sees the cache state that it would see in a network.

In the cold regime a slot of the ring holds a copy of every input, and its own outputs. Executions use the slots in
turn, and the position continues from candidate to candidate. The data of an execution was therefore last used a whole
revolution ago, and the last-level cache no longer holds it. If even the largest ring is too small for that, another
buffer is read between revolutions.

In a network only weights are that old; the previous layer has just written the rest. In the layer regime each slot
therefore has its own weights, and everything else is shared. The warm regime uses one slot again and again.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..devices.base import Device, Queue
from ..devices.host import free_bytes
from ..ir.types import TensorType
from ..solvers.base import Array, Kernel, Problem
from .base import Regime
from .judge import POISONS, Guarded, JudgedCase

#: Size of a ring as a multiple of the last-level cache, and bounds on the number of slots.
CACHES, MOST_SLOTS, LEAST_SLOTS = 2, 256, 2
#: Shares of free memory that a ring may use, and that all copies of a problem may use.
MOST_MEMORY, ALL_MEMORY = 1 / 4, 1 / 2
#: The regimes.
KINDS = ("layer", "cold", "warm")
#: Cache lines of random offset; otherwise tensors of one size would have the same alignment in all slots.
STAGGER = 32


class BufferCopies:
    """One input with a copy for each slot."""

    def __init__(self, ring: Ring, array: Array, count: int) -> None:
        self.array = array
        self.nbytes = array.nbytes * count
        ring.reserve(self.nbytes)
        first = Guarded.holding(ring.device, ring.queue, array, ring.stagger())
        if ring.queue.compares:  # copied on the device
            others = [first.twin(ring.queue) for _ in range(count - 1)]
        else:
            others = [Guarded.holding(ring.device, ring.queue, array, ring.stagger()) for _ in range(count - 1)]
        self._slots = [first, *others]
        #: a copy that no kernel sees
        self._kept = first.twin(ring.queue) if ring.queue.compares else None

    def is_intact(self, queue: Queue, slot: int) -> bool:
        """Whether a slot is unchanged, bands included. Needs a queue that compares buffers itself."""
        assert self._kept is not None
        return queue.equal(self.at(slot).buffer, self._kept.buffer)

    def at(self, slot: int) -> Guarded:
        """Return the copy that an execution on a slot reads; a single copy serves all slots."""
        return self._slots[slot % len(self._slots)]


class Ring:
    """Slots for one problem. Not thread-safe."""

    def __init__(self, problem: Problem, device: Device, queue: Queue, case: JudgedCase, kind: str, seed: int) -> None:
        self.problem, self.device, self.queue, self.case, self.kind = problem, device, queue, case, kind
        self._rng = np.random.default_rng(seed)
        types = [t for t in problem.outputs if isinstance(t, TensorType)]
        #: per input: whether each slot has its own copy
        self.own = [kind == "cold" or (kind == "layer" and constant) for constant in problem.constant]
        self.slot_bytes = sum(a.nbytes for a, own in zip(case.inputs, self.own, strict=True) if a is not None and own)
        results = sum(t.nbytes for t in types)
        self.slot_bytes += results if kind == "cold" else 0
        wanted = CACHES * device.cache_bytes if self.slot_bytes else 0
        self.slots = _slots(self.slot_bytes, wanted, _memory(device)) if self.slot_bytes else 1
        #: bytes of another buffer to read between revolutions
        self.rest = max(wanted - self.slots * self.slot_bytes, 0) if kind == "cold" else 0
        self._sweeper: Sweeper | None = None
        self.position = 0
        self._copies: weakref.WeakValueDictionary[tuple[int, str, int], BufferCopies] = weakref.WeakValueDictionary()
        #: unpacked inputs, made on demand
        self._plain: list[BufferCopies | None] = [None] * len(case.inputs)
        count = self.slots if kind == "cold" else 1
        self.reserve(count * results)
        made = [[Guarded(device, t, self.stagger()) for t in types] for _ in range(count)]
        self.outputs = [made[slot % count] for slot in range(self.slots)]
        self.poison(range(self.slots))

    @property
    def regime(self) -> Regime:
        case, kind = self.case, self.kind
        shared = sum(a.nbytes for a, own in zip(case.inputs, self.own, strict=True) if a is not None and not own)
        shared += 0 if kind == "cold" else sum(out.view.nbytes for out in self.outputs[0])
        return Regime(kind, self.slots, self.slots * self.slot_bytes + self.rest + shared)

    def stagger(self) -> int:
        """Return a random offset. 0 if the device compares whole buffers; alignment matters little to a GPU."""
        return 0 if self.queue.compares else int(self._rng.integers(STAGGER))

    def reserve(self, nbytes: int) -> None:
        """Raise MemoryError if this many bytes would take memory that other processes need."""
        most = _memory(self.device) * ALL_MEMORY
        if nbytes > most:
            raise MemoryError(f"copies for timing need {nbytes:,} bytes more, of {int(most):,} that may be taken")

    def has_room(self) -> bool:
        """Whether packed inputs of another candidate may be kept."""
        return sum(c.nbytes for c in self._copies.values()) < _memory(self.device) * MOST_MEMORY

    def inputs(self, kernel: Kernel, twin: int) -> list[BufferCopies | None]:
        """Return the inputs packed for a kernel. Equal packings share their copies, but a twin gets its own."""
        found: list[BufferCopies | None] = []
        for i, array in enumerate(self.case.inputs):
            packing = kernel.packings.get(i)
            if array is None:
                found.append(None)
            elif packing is None:
                there = self._plain[i]
                if there is None:
                    there = self._plain[i] = BufferCopies(self, array, self.slots if self.own[i] else 1)
                found.append(there)
            else:
                key = i, packing.key, twin
                copies = self._copies.get(key)
                if copies is None:
                    copies = self._copies[key] = BufferCopies(
                        self, packing.pack(array), self.slots if self.own[i] else 1
                    )
                found.append(copies)
        return found

    def take(self, count: int) -> list[int]:
        """Return the slots of the next executions."""
        if self.rest and self.position + count > self.slots:
            self.sweep()
            self.position = 0
        slots = [(self.position + n) % self.slots for n in range(count)]
        self.position = (self.position + count) % self.slots
        return slots

    def most(self) -> int:
        """Return the maximum number of executions of a turn: with cold data no more than there are slots."""
        return self.slots if self.slot_bytes else MOST_SLOTS

    def sweep(self) -> None:
        """Evict everything from the caches, in the cold regime."""
        if self.kind == "cold" and self.device.cache_bytes:
            if self._sweeper is None:
                self._sweeper = Sweeper(self.device, self.queue, CACHES * self.device.cache_bytes)
            self._sweeper()

    def poison(self, slots: Sequence[int]) -> None:
        for outputs in {id(self.outputs[slot]): self.outputs[slot] for slot in slots}.values():
            for out in outputs:
                out.poison(self.queue, POISONS[0])


class Sweeper:
    """Reads a buffer larger than the caches; on a device with its own memory it writes the buffer."""

    def __init__(self, device: Device, queue: Queue, nbytes: int) -> None:
        self.queue, self.device = queue, device
        if device.shares_memory:
            # Cores have private caches, so one thread per core reads its part. Ones, since zero pages may share one
            # physical page.
            parts = max(device.target.units, 1)
            self.parts = [np.ones(-(-nbytes // parts // 8), np.uint64) for _ in range(parts)]
        else:
            self.buffer = device.alloc(nbytes)

    def __call__(self) -> None:
        if not self.device.shares_memory:
            self.queue.fill(self.buffer, 0)
            self.queue.finish()
            return
        threads = [threading.Thread(target=np.bitwise_or.reduce, args=(part,)) for part in self.parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _slots(slot_bytes: int, wanted: int, memory: float) -> int:
    enough = -(-wanted // max(slot_bytes, 1))
    affordable = int(min(memory * MOST_MEMORY / max(slot_bytes, 1), MOST_SLOTS))
    return max(min(enough, affordable), LEAST_SLOTS)


def _memory(device: Device) -> float:
    """Return the bytes that may be used: free memory of the host, or all memory of a separate device.

    Infinite if unknown.
    """
    free = free_bytes() if device.shares_memory else device.memory_bytes
    return math.inf if free is None else float(free)


def views(copies: Sequence[BufferCopies | None], slot: int) -> list[Any]:
    """Return the inputs of one execution."""
    return [None if c is None else c.at(slot).view for c in copies]
