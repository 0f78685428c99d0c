"""Which cores the threads of a runtime may use: CPU_BIND_THREADS."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from .building import cpu_list

_NODES = Path("/sys/devices/system/node")
_TASKS = Path("/proc/self/task")


def nodes(folder: Path = _NODES) -> list[set[int]]:
    """The cores of each node of memory that this process may use; none where the system does not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    mine = os.sched_getaffinity(0)
    found = [cpu_list(file.read_text("ascii")) & mine for file in sorted(folder.glob("node[0-9]*/cpulist"))]
    return [cores for cores in found if cores]


def by_core(mode: str) -> bool:
    """Threads stay on a core each: YES, and NUMA where there is one node only."""
    return mode == "YES" or (mode == "NUMA" and len(nodes()) < 2)


#: the runtime's threads, and how they are bound
_runtime: list[int] = []
_mode = ""
_lock = threading.Lock()


@contextlib.contextmanager
def beginning(mode: str) -> Iterator[None]:
    """While a runtime makes its threads, which are to be bound so. It binds them to cores by itself (`by_core`)."""
    global _mode
    if not _TASKS.is_dir():
        yield
        return
    before = threads()
    yield
    python = {thread.native_id for thread in threading.enumerate()}
    with _lock:
        _runtime[:] = sorted(threads() - before - python)
        _mode = mode
        if mode == "NUMA" and not by_core(mode):
            spread(_runtime, nodes())


def bind(mode: str) -> None:
    """Bind the runtime's threads in another way than they are: they are the process's, so it holds for all models."""
    global _mode
    with _lock:
        if mode == _mode or not _runtime:
            return
        cores = os.sched_getaffinity(0)
        spread(_runtime, [{n} for n in sorted(cores)] if by_core(mode) else nodes() if mode == "NUMA" else [cores])
        _mode = mode


def threads() -> set[int]:
    """Of this process, by their numbers."""
    return {int(task.name) for task in _TASKS.iterdir()}


def spread(new: Sequence[int], there: Sequence[set[int]]) -> None:
    """Threads to nodes: as many to each as it has cores, in order."""
    order = [cores for cores in there for _ in cores]
    for number, thread in enumerate(new):
        with contextlib.suppress(OSError):  # it has just ended
            os.sched_setaffinity(thread, order[number % len(order)])
