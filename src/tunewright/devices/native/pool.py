"""The thread pool of this process: workers in C (`pool.c`), started before the first run that could use them."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..base import address
from . import usable_cores
from .objects import SharedObject

#: microseconds that idle workers look for work before they sleep, and that callers wait for the GIL: about the cost of
#: waking them. Under a quota of the container's time, looking costs quota too.
SPIN, SPIN_IN_QUOTA = 50, 2
#: microseconds after which a run returns to Python for a moment, so that Ctrl-C is noticed
SLICE = 50_000
#: 64-bit words before the rows of a table, and before a row's arguments
HEAD, ROW = 2, 5
_MASK_WORDS = 128
#: what `pool_run` returns in a forked child
_FORKED = 2


class _Run(ctypes.Structure):
    _fields_ = [
        ("table", ctypes.c_void_p), ("times", ctypes.c_void_p), ("slice", ctypes.c_uint64), ("slot", ctypes.c_void_p),
        ("step", ctypes.c_uint64), ("item", ctypes.c_uint64), ("generation", ctypes.c_uint64),
        ("alone", ctypes.c_uint64),
    ]  # fmt: skip


class _Made:
    """The loaded code of the pool with its memory."""

    def __init__(self, loaded: SharedObject, count: int) -> None:
        self.loaded, self.library = loaded, loaded.library
        library = self.library
        library.pool_bytes.restype = library.pool_ticks.restype = library.pool_us.restype = ctypes.c_uint64
        # Never freed: workers may read it for as long as the process lives. A forked child has a copy.
        self._memory = mmap.mmap(-1, library.pool_bytes(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.at = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)))
        library.pool_make(self.at, count)
        if count > 1:
            spin = SPIN if usable_cores.quota() is None else SPIN_IN_QUOTA
            library.pool_spin(self.at, ctypes.c_uint64(spin))


class ThreadPool:
    """Threads that share the cores of the process among all runs.

    The pool calls ``load`` for its compiled text at the first run. Until then the text may still be compiling.
    """

    def __init__(self, load: Callable[[], SharedObject], mode: str = "YES") -> None:
        self._load, self._mode, self._lock, self._started = load, mode, threading.Lock(), False
        self.cores = usable_cores.count()
        self._made: _Made | None = None
        os.register_at_fork(after_in_child=self._forked)

    def _ready(self) -> _Made:
        if self._made is None:
            loaded = self._load()
            with self._lock:
                if self._made is None:  # another thread may have made it in between
                    self._made = _Made(loaded, self.cores)
        return self._made

    @property
    def quick(self) -> ctypes.PyDLL:
        """The functions of its text, called without releasing the GIL."""
        return self._ready().loaded.quick

    def ticks(self) -> int:
        """Return the time on the clock of the pool."""
        return int(self._ready().library.pool_ticks())

    @property
    def ticks_per_us(self) -> int:
        """Ticks of this clock per microsecond."""
        made = self._ready()
        return int(made.library.pool_us(made.at))

    def _forked(self) -> None:
        """Start anew in a forked child, which has none of its parent's threads. Its runners stay valid."""
        self._lock, self._started = threading.Lock(), False
        if self._made is not None:
            self._made.library.pool_forked(self._made.at)

    def start(self) -> None:
        """Start the workers, unless they already run."""
        if self._started or self.cores < 2:
            return
        made = self._ready()
        with self._lock:
            if self._started:
                return
            # One worker for each core. If workers are bound, the one on the caller's core stays out of its runs.
            for core, usable in usable_cores.places(self._mode, self.cores):
                made.library.pool_add(made.at, _mask(usable), ctypes.c_int(core))
            self._started = True

    def rouse(self, participants: int) -> None:
        """Wake workers for a run that begins within some microseconds."""
        if participants > 1:
            self.start()
            made = self._ready()
            made.library.pool_rouse(made.at, ctypes.c_int(participants - 1))

    def bind(self, mode: str) -> None:
        """Change where workers run: each on its own core (YES), on the cores of one NUMA node (NUMA), anywhere (NO)."""
        with self._lock:
            if mode == self._mode:
                return
            self._mode = mode
            made = self._made
            if made is None or not self._started:
                return
            for worker, (core, usable) in enumerate(usable_cores.places(mode, self.cores)):
                made.library.pool_bind(made.at, ctypes.c_int(worker), _mask(usable), ctypes.c_int(core))

    def runner(self, table: np.ndarray[Any, Any], times: np.ndarray[Any, Any] | None = None) -> Runner:
        """Return a runner of a table. Both arrays must live as long as the runner.

        ``times``: for each step, from its second word on, the ticks and the number of executions, in each run.
        """
        if table[1] > 1:
            self.start()
        return Runner(self, table, times)


class Runner:
    """Runs one table in the calling thread, helped by workers. Threads do not share a runner."""

    __slots__ = ("_kept", "_pool", "_run", "again", "cancel", "expect")

    def __init__(self, pool: ThreadPool, table: np.ndarray[Any, Any], times: np.ndarray[Any, Any] | None) -> None:
        made = pool._ready()
        self._run = _Run(address(table), None if times is None else address(times), SLICE)
        self._pool, self._kept = pool, (table, times)
        arguments = (made.at, ctypes.byref(self._run))
        #: ``again`` runs the table, or the rest of it. If it does not return 0, call `resume` and then ``again``.
        #: ``cancel`` begins no further step, and waits for the running ones. Both release the GIL.
        self.again: Callable[[], int] = partial(made.library.pool_run, *arguments)
        self.cancel: Callable[[], None] = partial(made.library.pool_cancel, *arguments)
        #: wakes workers for a run of the table that begins within some microseconds, if the run is worth that
        expect = made.loaded.quick.pool_expect
        self.expect: Callable[[], None] = partial(expect, made.at, ctypes.c_void_p(address(table)))

    def resume(self, state: int) -> None:
        """Prepare to continue after `again` returned anything but 0."""
        if state == _FORKED and self._kept[0][1] > 1:
            self._pool.start()

    def __call__(self) -> None:
        try:
            while state := self.again():
                self.resume(state)
        except BaseException:  # Ctrl-C: no further step begins, running steps finish
            self.cancel()  # called directly: a second Ctrl-C could interrupt a call of a Python function
            raise


def _mask(usable: frozenset[int]) -> Any:
    words = (ctypes.c_uint64 * _MASK_WORDS)()
    for core in usable:
        if core < 64 * _MASK_WORDS:
            words[core // 64] |= 1 << core % 64
    return words
