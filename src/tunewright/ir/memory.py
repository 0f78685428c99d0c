"""Memory that goes back to the system: of weights as soon as they are freed, of code that nobody runs again."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import numpy as np

#: bytes from which on an array has pages of its own
LARGE = 1 << 18
#: bytes from which on these are pages of 2 MB, where the system has them: to touch 64 MB takes 5 ms instead of 34
HUGE = 4 << 20


def lasting(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes with any content, that go back to the system at once when nobody holds them any more.

    Of what `malloc` is given back it keeps some for later, also of pieces as large as a layer's weights: behind a load
    of ResNet-18 that were 10 MB at the peak and 20 at the end. What is made anew for each inference had better not come
    from here: pages that were never touched take long to touch.
    """
    if nbytes < LARGE:
        return np.empty(nbytes, np.uint8)
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"there are no {nbytes:,} bytes of memory") from error
    if nbytes >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


def lasting_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An array in such memory."""
    return np.ndarray(shape, dtype, lasting(math.prod(shape) * dtype.itemsize))


def drop_code(library: str) -> None:
    """Give back the pages of a library's code that are in memory: whoever runs it again takes them from its file.

    For a library that does much when it is loaded, and little of that ever again. Only what nobody can have written to
    goes: code, and what lies in front of it (symbols, relocations).
    """
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            ranges = _code_ranges([line for line in maps if library in line.rpartition("/")[2]])
        advise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):  # another system
        return
    for begin, end in ranges:
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def _code_ranges(lines: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Addresses of what a library can be without, from its lines of /proc/self/maps. Behind the code comes data: the
    loader has written to some that cannot be written to any more."""
    for path, mapped in groupby((line.split(maxsplit=5) for line in lines), key=lambda fields: fields[5]):
        segments = [(fields[0], fields[1]) for fields in mapped]
        last = max((at for at, (_, may) in enumerate(segments) if may == "r-xp"), default=-1)
        for addresses, may in segments[: last + 1]:
            if path.startswith("/") and may in ("r-xp", "r--p"):
                begin, _, end = addresses.partition("-")
                yield int(begin, 16), int(end, 16)
