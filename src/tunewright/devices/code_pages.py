"""Pages of libraries' code that nobody runs again."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from itertools import groupby

#: What a process with PoCL has loaded, and does much at once: PoCL sets up its compiler, which touches 22 MB; loading
#: OpenSSL (for hashlib) and ml_dtypes touches 4.
SET_UP = ("libpocl", "libcrypto", "_ml_dtypes_ext")


def drop_code(*libraries: str) -> None:
    """Give back the pages of libraries' code that are in memory: whoever runs it again takes them from its file.

    For libraries that do much when they are loaded, and little of that ever again. Only what nobody can have written to
    goes: code, and what lies in front of it (symbols, relocations).
    """
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            ranges = _code_ranges([line for line in maps if any(name in line.rpartition("/")[2] for name in libraries)])
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
