"""The host itself: numpy runs the references. Always there; other devices fall back to it."""

from __future__ import annotations

import os
import platform
import time
from functools import cache

import numpy as np

from .base import Device, Queue, Target


class HostQueue(Queue):
    """Nothing is asynchronous on the host."""

    def now(self) -> float:
        return time.perf_counter()


class HostDevice(Device):
    """The processor through numpy."""

    family = "host"
    priority = 0

    @classmethod
    def available(cls) -> list[str] | str:
        return ["CPU", "CPU.HOST"]

    def __init__(self, name: str = "CPU") -> None:
        self.name = name
        self.target = Target("cpu", cpu_name(), platform.machine(), cpu_count(), (("numpy", np.__version__),))
        self.memory_bytes = memory_bytes()

    def queue(self) -> Queue:
        return HostQueue()


def cpu_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Memory of the machine, where the system tells it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def cpu_name() -> str:
    """The processor's own name."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """What instructions the processor has, as Linux names them."""
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
