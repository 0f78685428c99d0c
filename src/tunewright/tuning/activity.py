"""Which requests of a process run at the moment, in memory that its helper processes read.

The serving process owns an `Activity`. Each of its requests has a word of its own there: an odd number while it
runs, an even one between two inferences. One thread at a time writes a word, so there is no lock on the request's path,
and writing takes some 100 ns. A process that measures opens the same memory as a `Gate`: it waits until none runs,
and learns afterwards whether one has begun meanwhile.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

#: words for requests; those beyond share the last one, which then tells less exactly when all of them rest
MOST_REQUESTS = 2000
#: words in front of them: how many are in use, nanoseconds that measuring waited, samples, and samples that a request
#: interrupted
_USED, _WAITED, _SAMPLES, _INTERRUPTED = range(4)
#: what a word says that is no request's, but a wish to pause
_PAUSED = 2
_HEAD = 8
_BYTES = 8 * (_HEAD + MOST_REQUESTS)
#: seconds without a request after which the machine counts as idle
QUIET = 100e-6
#: seconds between two looks at requests, at first and after some time, and while measuring is paused
LOOK, LATER_LOOK, PAUSED_LOOK = 0.3e-3, 2e-3, 50e-3
#: seconds of waiting after which looks become rarer
PATIENCE = 20e-3


class Activity:
    """The words of this process's requests. `descriptor` may be inherited by helper processes."""

    def __init__(self) -> None:
        self.descriptor = _memory()
        os.ftruncate(self.descriptor, _BYTES)
        self._map = mmap.mmap(self.descriptor, _BYTES)
        self.words = memoryview(self._map).cast("Q")
        self._free: list[int] = []
        self._lock = threading.Lock()

    def take(self) -> int:
        """The number of a word for one more request."""
        with self._lock:
            if self._free:
                return self._free.pop()
            used = self.words[_USED]
            if used < MOST_REQUESTS:
                self.words[_USED] = used + 1
            return _HEAD + min(used, MOST_REQUESTS - 1)

    def give_back(self, word: int) -> None:
        """The request of a word is gone."""
        self.words[word] = 0
        if word < _HEAD + MOST_REQUESTS - 1:
            with self._lock:
                self._free.append(word)

    def begin(self, word: int) -> None:
        """The request of a word begins an inference."""
        self.words[word] = time.perf_counter_ns() | 1

    def end(self, word: int) -> None:
        """It has ended."""
        self.words[word] = time.perf_counter_ns() & ~1

    def pause(self, word: int, is_paused: bool) -> None:
        """Let nobody begin a sample who was given this word for that; it is no request's."""
        self.words[word] = _PAUSED if is_paused else 0

    def close(self) -> None:
        """Give the memory back; nobody is to use this object again."""
        self.words.release()
        self._map.close()
        os.close(self.descriptor)


class Gate:
    """What another process sees of an `Activity`: when it may measure, and whether a sample was interrupted."""

    def __init__(self, descriptor: int, pause: int | None = None) -> None:
        """``pause``: the word that says so."""
        self._pause = pause
        self._words = np.frombuffer(mmap.mmap(descriptor, _BYTES), np.uint64)

    # ---- of the serving process's wishes --------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        return self._pause is not None and int(self._words[self._pause]) == _PAUSED

    @property
    def last(self) -> float:
        """When a request last began or ended, on `time.perf_counter`; 0: never."""
        return float(self._requests().max(initial=0)) * 1e-9

    @property
    def is_serving(self) -> bool:
        """Whether some request runs."""
        return bool((self._requests() & np.uint64(1)).any())

    # ---- of samples -----------------------------------------------------------------------------------------------

    @property
    def waited(self) -> float:
        """Seconds that measuring has waited for requests so far."""
        return float(self._words[_WAITED]) * 1e-9

    @property
    def samples(self) -> tuple[int, int]:
        """Samples so far, and how many of them were interrupted and thrown away."""
        return int(self._words[_SAMPLES]), int(self._words[_INTERRUPTED])

    def wait(self, alive: Callable[[], object] = lambda: None) -> None:
        """Sleep until no request runs. ``alive`` is called now and then meanwhile."""
        if self._is_free():
            return
        begin = time.perf_counter()
        while not self._is_free():
            alive()
            waited = time.perf_counter() - begin
            time.sleep(PAUSED_LOOK if self.is_paused else LOOK if waited < PATIENCE else LATER_LOOK)
        self._words[_WAITED] += np.uint64((time.perf_counter() - begin) * 1e9)

    @contextmanager
    def sample(self) -> Iterator[Sample]:
        """Around a timed stretch; afterwards `Sample.interrupted` says whether a request has begun in it."""
        before, made = self._requests().copy(), Sample()
        yield made
        now = self._requests()
        made.interrupted = len(now) != len(before) or bool((now != before).any())
        self._words[_SAMPLES] += np.uint64(1)
        self._words[_INTERRUPTED] += np.uint64(made.interrupted)

    def _is_free(self) -> bool:
        return not (self.is_paused or self.is_serving) and time.perf_counter() > self.last + QUIET

    def _requests(self) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return self._words[_HEAD : _HEAD + int(self._words[_USED])]


class Sample:
    """A timed stretch."""

    interrupted = False


def _memory() -> int:
    """A descriptor of memory without a name, which is gone with the last process that has it."""
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # a system call that some sandboxes forbid
            return os.memfd_create("tunewright-activity", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


_activity: Activity | None = None
_MAKING = threading.Lock()


def of_process() -> Activity:
    """The one of this process: its models share it, since a request of one disturbs samples of another."""
    global _activity
    with _MAKING:
        if _activity is None:
            _activity = Activity()
        return _activity


def _in_child() -> None:
    """A forked child has requests of its own: the words of its parent are not its to write."""
    global _activity, _MAKING
    _activity, _MAKING = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
