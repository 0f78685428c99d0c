"""Memory for weights that goes back to the system as soon as it is freed."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import threading
import weakref
from typing import Any

import numpy as np

#: arrays of at least this many bytes get pages of their own
LARGE = 1 << 16
#: Arrays of at least this many bytes get pages of 2 MB where the system offers them. Touching 64 MB then takes 5 ms
#: instead of 34.
HUGE = 4 << 20


#: bytes of each block that several arrays share, and the page size to which blocks are aligned
SHELF, PAGE = 32 << 20, 2 << 20
#: alignment of each array in a block: a cache line
_LINE = 64


class Pages(mmap.mmap):
    """Pages mapped from the system for one allocation."""

    #: the file range that the content was read from, or None if unknown (see `stored`)
    origin: object = None


def lasting(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Allocate uninitialised bytes that go back to the system as soon as nobody holds them.

    `malloc` keeps part of the freed memory, even blocks as large as a layer's weights. After a load of ResNet-18 this
    was 10 MB at the peak and 20 MB at the end. Do not use this function for buffers that every inference allocates:
    touching new pages for the first time is slow.
    """
    if nbytes < LARGE:
        return np.empty(nbytes, np.uint8)
    return np.frombuffer(_pages(nbytes), np.uint8)


def _pages(nbytes: int) -> Pages:
    try:
        pages = Pages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"there are no {nbytes:,} bytes of memory") from error
    if nbytes >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def lasting_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Allocate an array with `lasting`."""
    return np.ndarray(shape, dtype, lasting(math.prod(shape) * dtype.itemsize))


class _Shelf:
    """Allocates arrays one behind the other in shared pages of 2 MB."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: the current block while some array uses it, and the offset of its free room
        self._pages: weakref.ref[Pages] | None = None
        self._at = 0

    def take(self, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        with self._lock:
            pages = None if self._pages is None else self._pages()
            begin = -(-self._at // _LINE) * _LINE
            if pages is None or len(pages) - begin < nbytes:
                pages, begin = self._more(nbytes)
            self._at = begin + nbytes
        held = (ctypes.c_uint8 * nbytes).from_buffer(pages, begin)
        size = mmap.PAGESIZE
        first, end = -(-begin // size) * size, (begin + nbytes) // size * size
        if end > first and hasattr(mmap, "MADV_DONTNEED"):
            weakref.finalize(held, pages.madvise, mmap.MADV_DONTNEED, first, end - first).atexit = False
        return np.frombuffer(memoryview(held), np.uint8)

    def _more(self, nbytes: int) -> tuple[Pages, int]:
        """Map a new block. Returns it with the offset of its first page of 2 MB."""
        pages = _pages(max(SHELF, nbytes) + PAGE)
        self._pages = weakref.ref(pages)
        return pages, -ctypes.addressof(ctypes.c_char.from_buffer(pages)) % PAGE

    def in_child(self) -> None:
        """Replace the lock after a fork: the thread that may have held it does not exist in the child."""
        self._lock = threading.Lock()


_SHELF = _Shelf()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_SHELF.in_child)


def shared_pages(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Allocate bytes like `lasting`, but in pages of 2 MB that several arrays share.

    Use it for data that every inference reads. With pages of 4 KB, 16 MB of weights fill the processor's TLB, and in a
    virtual machine each TLB miss costs several memory accesses.
    """
    return np.empty(nbytes, np.uint8) if nbytes < LARGE else _SHELF.take(nbytes)
