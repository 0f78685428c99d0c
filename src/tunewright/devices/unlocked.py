"""Launches in the calling thread that leave Python's lock to others.

PoCL's driver without threads runs a kernel inside the call that enqueues it, and pyopencl keeps the lock in that call.
The same function through `ctypes` gives it away, and takes a third of the time.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, TypeAlias

#: a kernel that takes longer gives the lock away: to get it back may take as long as another thread wants to keep it
BRIEF = 5e-6
#: launches that tell: somebody else may have had the core meanwhile
TRIALS = 3


#: enqueues what it was made for, and answers OpenCL's status: 0 is success
Enqueue: TypeAlias = Callable[[], int]


def enqueuing(
    queue: Any, kernel: Any, grid: tuple[int, ...], local: tuple[int, ...]
) -> tuple[Enqueue, Enqueue] | None:
    """What launches a kernel with the arguments that it has then: keeping the lock, and giving it away.

    The caller keeps the queue and the kernel. None where there is no such way.
    """
    functions = _functions()
    if functions is None:
        return None
    sizes = [ctypes.byref((ctypes.c_size_t * len(grid))(*each)) for each in (grid, local)]
    arguments = (
        ctypes.c_void_p(queue.int_ptr), ctypes.c_void_p(kernel.int_ptr), ctypes.c_uint(len(grid)), None, *sizes,
        ctypes.c_uint(0), None, None,
    )  # fmt: skip
    return partial(functions[0], *arguments), partial(functions[1], *arguments)


def finish(queue: Any) -> None:
    """Wait for a queue whose launches ran when they were enqueued: there is nothing to give the lock away for."""
    functions = _functions()
    assert functions is not None, "asked before"
    functions[2](ctypes.c_void_p(queue.int_ptr))


def possible() -> bool:
    """There is such a way here."""
    return _functions() is not None


class Held(ABC):
    """A launch that waits for somebody who needs it, and may be one with those of other queues."""

    #: those of one program can be
    program: Any

    @abstractmethod
    def begin(self, others: Sequence[Held] = ()) -> None:
        """Run it, in the calling thread, and others of its program behind it."""


_Function = Callable[..., int]


@cache
def _functions() -> tuple[_Function, _Function, _Function] | None:
    """OpenCL's functions as pyopencl calls them: to enqueue, keeping the lock and giving it away, and to wait.

    None where they are not found.
    """
    import pyopencl as cl

    try:
        # Libraries that this one was linked with are searched, too.
        keeping, leaving = ctypes.PyDLL(cl._cl.__file__), ctypes.CDLL(cl._cl.__file__)
        return keeping.clEnqueueNDRangeKernel, leaving.clEnqueueNDRangeKernel, keeping.clFinish
    except (AttributeError, OSError):  # not so on this system
        return None
