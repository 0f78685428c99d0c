"""How kernels are built for a model: on how many threads, beside what else, and where their sources are written."""

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

#: how much nicer than this one processes are that give way to others
GIVES_WAY = 10
#: cores of a hybrid processor by kind, as Linux tells them
_KINDS = {"HIGH": Path("/sys/devices/cpu_core/cpus"), "LOW": Path("/sys/devices/cpu_atom/cpus")}

#: the first kernel of a text: ours are written with a macro
_ENTRY = re.compile(r"^\s*(?:KERNEL|(?:__)?kernel\b.*?\bvoid)\s+(\w+)\s*\(", re.MULTILINE)

_current: ContextVar[Settings | None] = ContextVar("building", default=None)
#: processes that build stay in the group of this one
_together: ContextVar[bool] = ContextVar("together", default=False)


class _Waited(threading.local):
    """Seconds that this thread waited for programs."""

    seconds, depth = 0.0, 0


_waited = _Waited()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """This thread waits for a program: what compiles, and not what runs it, takes this time (`waited`)."""
    begin = time.perf_counter()
    _waited.depth += 1
    try:
        yield
    finally:
        _waited.depth -= 1
        if not _waited.depth:
            _waited.seconds += time.perf_counter() - begin


def waited() -> float:
    """Seconds that this thread has waited for programs so far. Kernels compile when they are first bound, so that who
    wants to know what compiling takes has to ask before and after."""
    return _waited.seconds


@contextlib.contextmanager
def using(settings: Settings) -> Iterator[None]:
    """Builds in this thread are for a model with these settings for a while."""
    token = _current.set(settings)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Settings:
    """What `using` says, else the environment."""
    return _current.get() or Settings.from_environment()


def stay_together() -> None:
    """Keep processes that build for this thread in this process's group, because its owner ends the whole group."""
    _together.set(True)


def is_apart() -> bool:
    """Processes that build have a session of their own: then Ctrl-C is this process's to handle."""
    return not _together.get()


def threads(wanted: int) -> int:
    """COMPILATION_NUM_THREADS: what is not positive, or more than there are, means all."""
    most = cpu_count()
    return wanted if 0 < wanted <= most else most


def settle(process: int, priority: str) -> None:
    """Give a process that builds kernels its GPU_HOST_TASK_PRIORITY: the cores of its kind, and LOW gives way."""
    with contextlib.suppress(OSError, AttributeError):  # it has ended, or the system has no such thing
        if priority == "LOW":
            os.setpriority(os.PRIO_PROCESS, process, min(19, os.getpriority(os.PRIO_PROCESS, 0) + GIVES_WAY))
        cores = _kind(priority) & os.sched_getaffinity(0)
        if cores:
            os.sched_setaffinity(process, cores)


def _kind(priority: str) -> set[int]:
    """Cores of a hybrid processor that are meant; none where all are alike."""
    path = _KINDS.get(priority)
    return cpu_list(path.read_text("ascii")) if path is not None and path.exists() else set()


def cpu_list(text: str) -> set[int]:
    """Linux's ``0-3,8`` as numbers."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def write_source(text: str, suffix: str, name: str = "") -> None:
    """SOURCES_DUMPS_DIR: keep the text of what is built for a model; named by its first kernel unless ``name`` says."""
    settings = _current.get()
    if settings is None or not settings.sources_dumps_dir:
        return
    if not name:
        found = _ENTRY.search(text)
        name = found[1] if found else "program"
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    write_dump("SOURCES_DUMPS_DIR", Path(settings.sources_dumps_dir) / f"{name}-{digest}{suffix}", text)
