"""The CPU device with every buffer at the edge of what may be accessed.

A kernel runs twice: once each buffer ends at a page that cannot be accessed, once it begins at one. What it reads or
writes outside is a fault, which the test is told of, with the argument that is next to it. `SanitisedDevice` also
compiles traps for what C leaves undefined into the kernels.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import signal
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from conformance import strict
from conformance.elsewhere import Elsewhere, ImmediateQueue, Region, Word
from tunewright.devices.base import Queue
from tunewright.devices.c_device import NOTHING, CDevice, CQueue
from tunewright.devices.native.device import NativeDevice
from tunewright.devices.native.objects import SharedObject
from tunewright.devices.native.processor import find_compiler
from tunewright.devices.native.programs import LoadedProgram

#: bytes that cannot be accessed, on either side of a buffer
FAR = 1 << 20
PAGE = mmap.PAGESIZE
TRAPS = (
    "-fsanitize=undefined", "-fsanitize-trap=undefined",
    # a float beyond the integers is undefined in C, too: kernels must not convert one
    "-fsanitize=float-cast-overflow", "-fsanitize-trap=float-cast-overflow",
)  # fmt: skip
_ONE_AT_A_TIME = threading.Lock()
_LIBC = ctypes.CDLL(None, use_errno=True)


class GuardedDevice(CDevice):
    family = "guarded"
    dialect = "c"
    flags: tuple[str, ...] = ()

    @classmethod
    def available(cls) -> list[str] | str:
        found = NativeDevice.available()
        return found if isinstance(found, str) else [f"CPU.{cls.family.upper()}"]

    def __init__(self, name: str = "") -> None:
        self.name = name
        native = NativeDevice("CPU")
        self.target = native.target
        self._programs = strict.programs(native.level, "", self.flags)

    def queue(self) -> ImmediateQueue:
        return ImmediateQueue()

    def build(self, source: str) -> tuple[str, LoadedProgram]:
        return source, self._programs.build(source)

    def begin_build(self, sources: Sequence[str]) -> None:
        for source in sources:
            self._programs.begin(source)

    def launch(
        self, queue: Queue, program: Any, name: str, grid: Sequence[int], local: Sequence[int] = ()
    ) -> GuardedLaunch:  # fmt: skip
        assert isinstance(queue, CQueue)
        return GuardedLaunch(queue, name, program[0], grid, program[1])


class SanitisedDevice(GuardedDevice):
    family = "sanitised"
    flags = TRAPS


class GuardedLaunch(Elsewhere):
    def __init__(self, queue: CQueue, name: str, source: str, grid: Sequence[int], program: LoadedProgram) -> None:
        super().__init__(queue, name, source, grid)
        self.entry = program.entry(name)

    def run(self, regions: Sequence[Region], words: Sequence[Word]) -> None:
        found = []
        for at_end in (False, True):
            areas = [Area(region.data, at_end) for region in regions]
            table = np.array([self._word(word, areas) for word in words] or [0], np.uint64)
            where = ctypes.c_uint64()
            with _ONE_AT_A_TIME:
                caught = _runner().library.run_caught(
                    ctypes.c_void_p(self.entry), ctypes.c_void_p(table.ctypes.data), math.prod(self.grid),
                    *self.grid[:2], ctypes.byref(where),
                )  # fmt: skip
            assert not caught, self._explain(caught, where.value, regions, areas)
            found.append(areas)
        for region, before, area in zip(regions, *found, strict=True):
            same = np.array_equal(before.data, area.data)
            assert same, f"{self.name}: {', '.join(region.names)} depends on where it lies"
            region.data[:] = area.data

    @staticmethod
    def _word(word: Word, areas: Sequence[Area]) -> int:
        if word.region is None:
            return NOTHING.ctypes.data if word.is_empty else word.value
        return areas[word.region].begin + word.value

    def _explain(self, caught: int, where: int, regions: Sequence[Region], areas: Sequence[Area]) -> str:
        said = f"{self.name}: {signal.Signals(caught).name}"
        for region, area in zip(regions, areas, strict=True):
            if area.low <= where < area.high:
                beyond = where - area.begin - area.data.size
                place = f"{beyond} bytes behind the end" if beyond >= 0 else f"{area.begin - where} bytes in front"
                return f"{said}, {place} of {', '.join(region.names)} ({area.data.size} bytes)"
        return f"{said} at {where:#x}"


class Area:
    """A copy of a buffer between pages that cannot be accessed."""

    def __init__(self, given: np.ndarray[Any, Any], at_end: bool) -> None:
        whole = -(-given.size // PAGE) * PAGE
        self._memory = mmap.mmap(-1, 2 * FAR + whole, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view = np.frombuffer(self._memory, np.uint8)
        self.low, self.high = view.ctypes.data, view.ctypes.data + view.size
        first = FAR + (whole - given.size if at_end else 0)
        self.data, self.begin = view[first : first + given.size], self.low + first
        self.data[:] = given
        for begin in (self.low, self.low + FAR + whole):
            if _LIBC.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(FAR), 0):
                raise OSError(ctypes.get_errno(), "mprotect")


@cache
def _runner() -> SharedObject:
    compiler = find_compiler()
    assert compiler is not None
    text = Path(__file__).with_suffix(".c").read_text("utf-8")
    loaded = SharedObject(compiler.build(text, ["-Wall", "-Wextra", "-Werror"], "run_caught"), "run_caught")
    loaded.library.run_caught.restype = ctypes.c_int
    return loaded
