"""The host device: numpy runs the references. It always exists; other devices fall back to it."""

from __future__ import annotations

import os
import pathlib
import platform
import time
from functools import cache

import numpy as np

from .base import Device, Queue, Target

#: assumed size of the last-level cache if the system does not tell
CACHE_BYTES = 32 << 20
_CONTAINER = "/sys/fs/cgroup/memory"
_CACHES = pathlib.Path("/sys/devices/system/cpu/cpu0/cache")


class HostQueue(Queue):
    """A queue without asynchronous work."""

    def now(self) -> float:
        return time.perf_counter()


class HostDevice(Device):
    """The processor through numpy."""

    family = "host"
    priority = 0
    kinds = ("CPU",)
    stand_in = "in numpy, which takes many times as long"
    runs_references = True

    @classmethod
    def available(cls) -> list[str] | str:
        return ["CPU", "CPU.HOST"]

    def __init__(self, name: str = "CPU") -> None:
        self.name = name
        self.target = Target("cpu", cpu_name(), platform.machine(), cpu_count(), (("numpy", np.__version__),))
        self.memory_bytes = memory_bytes()
        self.cache_bytes = cache_bytes()

    def queue(self) -> Queue:
        return HostQueue()

    @property
    def free_bytes(self) -> int | None:
        return free_bytes()


def cpu_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Return the bytes of the machine's memory, if the system tells."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def free_bytes() -> int | None:
    """Return the bytes that this process could still take, within the machine's and its container's memory, if the
    system tells."""
    found = []
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found += [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")]
        most, used = (int(pathlib.Path(_CONTAINER + end).read_text("ascii")) for end in (".max", ".current"))
        found.append(max(most - used, 0))
    except (OSError, ValueError, IndexError):  # there is no container, or its memory is unlimited ("max")
        pass
    return min(found, default=memory_bytes())


@cache
class Others:
    """Measures how much of the processor other programs use during a measurement."""

    def __init__(self, file: pathlib.Path = pathlib.Path("/proc/stat")) -> None:
        self._file = file
        self._begin = self._now()

    def share(self) -> float | None:
        """Return the part of all cores that others have used since the beginning, from 0 to 1, or None if unknown."""
        if self._begin is None or (end := self._now()) is None:
            return None
        total, busy, own = (after - before for before, after in zip(self._begin, end, strict=True))
        return min(1.0, max(0.0, busy - own) / total) if total > 0 else None

    def _now(self) -> tuple[float, float, float] | None:
        """Return the seconds of all cores so far: total, busy, and our own."""
        try:
            ticks = [int(text) for text in self._file.read_text("ascii").split("\n", 1)[0].split()[1:9]]
            total, idle = sum(ticks), ticks[3] + ticks[4]
        except (OSError, ValueError, IndexError):
            return None
        per_second = os.sysconf("SC_CLK_TCK")
        used = os.times()
        own = used.user + used.system + used.children_user + used.children_system
        return total / per_second, (total - idle) / per_second, own


def cache_bytes() -> int:
    """Return the size of the last-level cache, or a common size if the system does not tell."""
    return max(cache_sizes().values(), default=0) or CACHE_BYTES


def cache_sizes(folder: pathlib.Path = _CACHES) -> dict[int, int]:
    """Return the bytes of the first core's data caches by level, as far as the system tells."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    found = {}
    for index in sorted(folder.glob("index*")):
        try:
            level, kind, size = ((index / name).read_text("ascii").strip() for name in ("level", "type", "size"))
            if kind != "Instruction":
                found[int(level)] = int(size.rstrip("KMG")) * units.get(size[-1:], 1)
        except (OSError, ValueError):
            continue
    return found


def cpu_name() -> str:
    """Return the processor's own name."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """Return the features of the processor, by Linux's names."""
    return frozenset(_cpuinfo("flags").split())


@cache
def _cpuinfo(field: str) -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith(field):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return ""


DEVICES = (HostDevice,)
