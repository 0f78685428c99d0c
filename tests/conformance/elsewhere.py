"""Launches whose buffers are copied to where the kernel then runs: what the devices of `guarded` and `qemu` share."""

from __future__ import annotations

import ctypes
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunewright.devices.base import address
from tunewright.devices.c_device import CLaunch, CQueue
from tunewright.devices.native import table_format

_PARAMETERS = re.compile(r"^static void (\w+)_item\(const int g0 UNUSED, .*?g2 UNUSED(?:, )?(.*)\) \{$", re.MULTILINE)


@dataclass
class Region:
    """Bytes of one or more arguments: those that overlap share one."""

    begin: int
    data: np.ndarray[Any, Any]
    names: list[str]


@dataclass(frozen=True)
class Word:
    """An argument: a number, a place in a region, or where an empty tensor would lie."""

    value: int
    region: int | None = None
    is_empty: bool = False


class ImmediateQueue(CQueue):
    """Kernels run inside the call that launches them."""

    def finish(self) -> None:
        if self.pending:
            self.pending = False
            self.kept.clear()


class Elsewhere(CLaunch):
    """Gathers its arguments; what they are is known when it is called."""

    def __init__(self, queue: CQueue, name: str, source: str, grid: Sequence[int]) -> None:
        self.queue, self.name, self.grid = queue, name, (*grid, 1, 1)[:3]
        found = next((m[2] for m in _PARAMETERS.finditer(source) if m[1] == name), "")
        self.names = [part.rpartition("UNUSED")[0].split()[-1] for part in found.split(", ") if part]
        self.arguments: dict[int, Any] = {}

    def set(self, at: int, value: Any) -> None:
        self.arguments[at] = value

    def number(self, at: int, value: int) -> None:
        self.set(at, np.int32(value))

    def spread(self, grid: Sequence[int]) -> None:
        self.grid = (*grid, 1, 1)[:3]

    def __call__(self) -> None:
        self.queue.launches += 1
        self.queue.pending = True
        arrays = [(at, value) for at, value in sorted(self.arguments.items()) if not isinstance(value, np.generic)]
        regions: list[Region] = []
        spans = sorted((address(value), value.nbytes, at) for at, value in arrays if value.size)
        where: dict[int, Word] = {at: Word(0, is_empty=True) for at, value in arrays if not value.size}
        ends = 0
        for begin, nbytes, at in spans:
            if regions and begin < ends:
                regions[-1].names.append(self.names[at])
                ends = max(ends, begin + nbytes)
            else:
                regions.append(Region(begin, np.empty(0, np.uint8), [self.names[at]]))
                ends = begin + nbytes
            regions[-1].data = _bytes_at(regions[-1].begin, ends - regions[-1].begin)
            where[at] = Word(begin - regions[-1].begin, len(regions) - 1)
        words = [
            where[at] if at in where else Word(table_format.number(self.arguments[at]))
            for at in range(len(self.arguments))
        ]
        self.run(regions, words)

    @abstractmethod
    def run(self, regions: Sequence[Region], words: Sequence[Word]) -> None:
        """Run all work-items, and leave the results in the regions."""


def _bytes_at(begin: int, nbytes: int) -> np.ndarray[Any, Any]:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(begin), np.uint8)
