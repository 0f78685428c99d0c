"""Where the time of a load goes."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Seconds by what they were spent on. A phase inside another one counts for itself alone; threads add up."""

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
    """No search for garbage meanwhile. A load makes tens of thousands of objects that stay: Python would look through
    all of the process for them, torch's included (0.1 to 0.2 s)."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
