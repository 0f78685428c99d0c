"""Measures where the time of a load goes, and limits what making a plan costs other threads."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

#: Switch interval of Python's threads while a plan is made. By default it is 5 ms, and requests would wait that long.
INTERVAL = 0.3e-3
_SWITCHING = threading.Lock()


class Phases:
    """Seconds per phase. The time of an inner phase does not count for the outer one. Threads add up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = threading.local()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        outer = getattr(self._inner, "spent", 0.0)
        self._inner.spent = 0.0
        begin = time.perf_counter()
        try:
            yield
        finally:
            whole = time.perf_counter() - begin
            self.seconds[name] = self.seconds.get(name, 0.0) + whole - self._inner.spent
            self._inner.spent = outer + whole


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn garbage collection off in this context.

    A load makes tens of thousands of objects that stay. For them Python would search the whole process, including
    torch's objects (0.1 to 0.2 s). The next request does not search them either: they join the oldest generation
    without a search.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # otherwise objects that the application has frozen would thaw
            gc.freeze()
            gc.unfreeze()
        gc.enable()


@contextmanager
def yielding() -> Iterator[None]:
    """Let requests of other threads get the interpreter quickly while this thread makes a plan.

    Making a plan runs much Python code. One thread at a time.
    """
    with _SWITCHING:
        before = sys.getswitchinterval()
        sys.setswitchinterval(min(before, INTERVAL))
        try:
            yield
        finally:
            sys.setswitchinterval(before)
