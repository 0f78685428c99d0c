"""What pyopencl warns of in vain, kept from users."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

#: filters of warnings are the process's, not a thread's: who leaves first would put back those of who is still inside
_LOCK = threading.RLock()


@contextmanager
def quietly(category: type[Warning] = Warning) -> Iterator[None]:
    """No such warning inside; one thread at a time."""
    with _LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore", category)
        yield
