"""How kernels are built for a model: number of threads, priority, and the folder for their sources."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path

from ..settings import Settings, write_dump
from .host import cpu_count

#: how much the nice value of a low-priority process exceeds this process's
GIVES_WAY = 10
#: cores of a hybrid processor by kind, from Linux
_KINDS = {"HIGH": Path("/sys/devices/cpu_core/cpus"), "LOW": Path("/sys/devices/cpu_atom/cpus")}

#: the first kernel of a text: our own kernels begin with a macro
_ENTRY = re.compile(r"^\s*(?:KERNEL|(?:__)?kernel\b.*?\bvoid)\s+(\w+)\s*\(", re.MULTILINE)

_current: ContextVar[Settings | None] = ContextVar("building", default=None)
#: building processes stay in this process's group
_together: ContextVar[bool] = ContextVar("together", default=False)


class _Waited(threading.local):
    """Seconds that this thread has waited for programs."""

    seconds, depth = 0.0, 0


_waited = _Waited()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Count the time inside the context as waiting for a program (`waited`): compiling takes it, not running."""
    begin = time.perf_counter()
    _waited.depth += 1
    try:
        yield
    finally:
        _waited.depth -= 1
        if not _waited.depth:
            _waited.seconds += time.perf_counter() - begin


def waited() -> float:
    """Return the seconds that this thread has waited for programs so far. Kernels compile when they are first bound, so
    a caller that measures compiling asks before and after."""
    return _waited.seconds


@contextlib.contextmanager
def using(settings: Settings) -> Iterator[None]:
    """Have builds in this thread use the settings of a model inside the context."""
    token = _current.set(settings)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Settings:
    """Return the settings of `using`, else the environment's."""
    return _current.get() or Settings.from_environment()


def stay_together() -> None:
    """Keep processes that build for this thread in this process's group, because its owner ends the whole group."""
    _together.set(True)


def is_apart() -> bool:
    """Whether building processes have a session of their own. Then this process must handle Ctrl-C."""
    return not _together.get()


def threads(wanted: int) -> int:
    """Return the threads for COMPILATION_NUM_THREADS. A number that is not positive, or exceeds the cores, means all
    cores."""
    most = cpu_count()
    return wanted if 0 < wanted <= most else most


def settle(process: int, priority: str) -> None:
    """Apply GPU_HOST_TASK_PRIORITY to a process that builds kernels: set cores of its kind; LOW lowers its priority."""
    with contextlib.suppress(OSError, AttributeError):  # the process has ended, or the system lacks these calls
        if priority == "LOW":
            os.setpriority(os.PRIO_PROCESS, process, min(19, os.getpriority(os.PRIO_PROCESS, 0) + GIVES_WAY))
        cores = _kind(priority) & os.sched_getaffinity(0)
        if cores:
            os.sched_setaffinity(process, cores)


def _kind(priority: str) -> set[int]:
    """Return the cores of a hybrid processor for a priority, or none if all cores are alike."""
    path = _KINDS.get(priority)
    return cpu_list(path.read_text("ascii")) if path is not None and path.exists() else set()


def cpu_list(text: str) -> set[int]:
    """Parse a Linux core list like ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def write_source(text: str, suffix: str, name: str = "") -> None:
    """Write the text of a model's program to SOURCES_DUMPS_DIR, named by ``name`` or its first kernel."""
    settings = _current.get()
    if settings is None or not settings.sources_dumps_dir:
        return
    if not name:
        found = _ENTRY.search(text)
        name = found[1] if found else "program"
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    write_dump("SOURCES_DUMPS_DIR", Path(settings.sources_dumps_dir) / f"{name}-{digest}{suffix}", text)
