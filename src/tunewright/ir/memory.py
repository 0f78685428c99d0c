"""Memory of weights, which goes back to the system as soon as they are freed."""

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

#: bytes from which on an array has pages of its own
LARGE = 1 << 16
#: bytes from which on these are pages of 2 MB, where the system has them: to touch 64 MB takes 5 ms instead of 34
HUGE = 4 << 20


#: bytes of the memory that smaller arrays share, which begin where such a page does
SHELF, PAGE = 32 << 20, 2 << 20
#: where each of them begins
_LINE = 64


class Pages(mmap.mmap):
    """Pages of the system's own."""

    #: what their content was read from, where that is known (see `stored`)
    origin: object = None


def lasting(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes with any content, that go back to the system at once when nobody holds them any more.

    Of what `malloc` is given back it keeps some for later, also of pieces as large as a layer's weights: behind a load
    of ResNet-18 that were 10 MB at the peak and 20 at the end. What is made anew for each inference had better not come
    from here: pages that were never touched take long to touch.
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
        with contextlib.suppress(OSError):  # a system without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def lasting_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An array in such memory."""
    return np.ndarray(shape, dtype, lasting(math.prod(shape) * dtype.itemsize))


class _Shelf:
    """Memory in which arrays lie one behind the other, in pages of 2 MB."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: the piece that has room, as long as some array is in it, and where its room begins
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
        """New memory, and where the first page of 2 MB begins."""
        pages = _pages(max(SHELF, nbytes) + PAGE)
        self._pages = weakref.ref(pages)
        return pages, -ctypes.addressof(ctypes.c_char.from_buffer(pages)) % PAGE

    def in_child(self) -> None:
        """Who held the lock in the parent of a fork is not here."""
        self._lock = threading.Lock()


_SHELF = _Shelf()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_SHELF.in_child)


def shared_pages(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes like those of `lasting`, in pages of 2 MB that others share.

    For what is read in each inference: with pages of 4 KB, weights of 16 MB fill the processor's table of pages, and in
    a virtual machine each page that is not in it costs several accesses to memory.
    """
    return np.empty(nbytes, np.uint8) if nbytes < LARGE else _SHELF.take(nbytes)
