"""Memory of weights, which goes back to the system as soon as they are freed."""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import Any

import numpy as np

#: bytes from which on an array has pages of its own
LARGE = 1 << 16
#: bytes from which on these are pages of 2 MB, where the system has them: to touch 64 MB takes 5 ms instead of 34
HUGE = 4 << 20


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
    try:
        pages = Pages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"there are no {nbytes:,} bytes of memory") from error
    if nbytes >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


def lasting_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An array in such memory."""
    return np.ndarray(shape, dtype, lasting(math.prod(shape) * dtype.itemsize))
