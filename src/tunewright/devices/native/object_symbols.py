"""Finds undefined symbols of a shared object: a call of a function that nobody defines must not crash the process."""

from __future__ import annotations

import contextlib
import ctypes
import re
import struct
from functools import cache

#: layout of a 64-bit ELF file: offset of the sections, bytes per section, number; of a section: kind, offset, bytes,
#: link
_SECTIONS, _SECTION, _SYMBOL = "<40xQ10xHH", "<4xI16xQQI", "<IBBH16x"
_DYNAMIC_SYMBOLS = 11


def missing(binary: bytes) -> list[str]:
    """Return the names that a shared object uses, and that neither it nor the C library defines."""
    return [_plain(name) for name in undefined(binary) if not _in_c_library(name)]


def undefined(binary: bytes) -> list[str]:
    """Return the names that a shared object expects from others."""
    begin, size, count = _read(_SECTIONS, binary, 0)
    sections = [_read(_SECTION, binary, begin + k * size) for k in range(count)]
    found = []
    for kind, where, nbytes, link in sections:
        if kind != _DYNAMIC_SYMBOLS:
            continue
        texts = sections[link][1]
        for at in range(where, where + nbytes, struct.calcsize(_SYMBOL)):
            name, _, _, section = _read(_SYMBOL, binary, at)
            if name and not section:
                found.append(binary[texts + name : binary.index(b"\0", texts + name)].decode("utf-8", "replace"))
    return found


def _read(form: str, binary: bytes, at: int) -> tuple[int, ...]:
    return struct.unpack_from(form, binary, at)


@cache
def _library() -> ctypes.CDLL:
    """Return the C library's mathematics. It brings its dependency, the C library itself."""
    with contextlib.suppress(OSError):
        return ctypes.CDLL("libm.so.6")
    return ctypes.CDLL(None)  # one library contains both


def _in_c_library(name: str) -> bool:
    return hasattr(_library(), name)


def _plain(name: str) -> str:
    """Return a function's name without the types that clang appends."""
    found = re.match(r"_Z(\d+)", name)
    return name[found.end() : found.end() + int(found[1])] if found else name
