"""Record which requests of a process run at the moment, in memory that its helper processes read.

The serving process owns an `Activity`. Each request has one 64-bit word in it: odd while the request runs, even between
two inferences. Only one thread at a time writes a word. The request path therefore takes no lock, and a write takes
about 100 ns.

A process that measures opens the same memory as a `ActivityGate`. It waits until no request runs, and checks afterwards
whether a request has begun during the measurement.
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

#: Number of words for requests. Further requests share the last word, which then shows less exactly when all of them
#: rest.
MOST_REQUESTS = 2000
#: Words at the start of the memory: number of words in use, nanoseconds that measurements waited for requests, samples
#: taken, samples that a request interrupted.
_USED, _WAITED, _SAMPLES, _INTERRUPTED = range(4)
#: Value of a pause word, which belongs to no request: measuring processes must pause.
_PAUSED = 2
_HEAD = 8
_BYTES = 8 * (_HEAD + MOST_REQUESTS)
#: Seconds without a request after which the machine counts as idle.
QUIET = 100e-6
#: Seconds between two checks for requests: at first, after `PATIENCE`, and while measuring is paused.
LOOK, LATER_LOOK, PAUSED_LOOK = 0.3e-3, 2e-3, 50e-3
#: Seconds of waiting after which checks become rarer.
PATIENCE = 20e-3


class Activity:
    """The words of this process's requests. Helper processes may inherit `descriptor`."""

    def __init__(self) -> None:
        self.descriptor = _memory()
        os.ftruncate(self.descriptor, _BYTES)
        self._map = mmap.mmap(self.descriptor, _BYTES)
        self.words = memoryview(self._map).cast("Q")
        self._free: list[int] = []
        self._lock = threading.Lock()

    def take(self) -> int:
        """Reserve a word for one more request and return its number."""
        with self._lock:
            if self._free:
                return self._free.pop()
            used = self.words[_USED]
            if used < MOST_REQUESTS:
                self.words[_USED] = used + 1
            return _HEAD + min(used, MOST_REQUESTS - 1)

    def give_back(self, word: int) -> None:
        """Free the word of a request that no longer exists."""
        self.words[word] = 0
        if word < _HEAD + MOST_REQUESTS - 1:
            with self._lock:
                self._free.append(word)

    def begin(self, word: int) -> None:
        """Note that the request of a word begins an inference."""
        self.words[word] = time.perf_counter_ns() | 1

    def end(self, word: int) -> None:
        """Note that the request of a word has ended its inference."""
        self.words[word] = time.perf_counter_ns() & ~1

    def pause(self, word: int, is_paused: bool) -> None:
        """Stop or resume measuring in the processes whose `ActivityGate` watches this word. No request may use the
        word."""
        self.words[word] = _PAUSED if is_paused else 0

    def close(self) -> None:
        """Release the memory. The object must not be used afterwards."""
        self.words.release()
        self._map.close()
        os.close(self.descriptor)


class ActivityGate:
    """Another process's view of an `Activity`: when it may measure, and whether a request interrupted a sample."""

    def __init__(self, descriptor: int, pause: int | None = None) -> None:
        """``pause``: number of the word that asks this process to pause."""
        self._pause = pause
        self._words = np.frombuffer(mmap.mmap(descriptor, _BYTES), np.uint64)

    # ---- state of the serving process --------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        return self._pause is not None and int(self._words[self._pause]) == _PAUSED

    @property
    def last(self) -> float:
        """Time at which a request last began or ended, on `time.perf_counter`; 0 if none ever did."""
        return float(self._requests().max(initial=0)) * 1e-9

    @property
    def is_serving(self) -> bool:
        """Whether a request runs."""
        return bool((self._requests() & np.uint64(1)).any())

    # ---- samples -----------------------------------------------------------------------------------------------------

    @property
    def waited(self) -> float:
        """Total seconds that measurements have waited for requests."""
        return float(self._words[_WAITED]) * 1e-9

    @property
    def samples(self) -> tuple[int, int]:
        """Number of samples so far, and how many of them were interrupted and discarded."""
        return int(self._words[_SAMPLES]), int(self._words[_INTERRUPTED])

    def wait(self, alive: Callable[[], object] = lambda: None) -> None:
        """Sleep until no request runs. Calls ``alive`` from time to time while it waits."""
        if self._is_free():
            return
        begin = time.perf_counter()
        while not self._is_free():
            alive()
            waited = time.perf_counter() - begin
            time.sleep(PAUSED_LOOK if self.is_paused else LOOK if waited < PATIENCE else LATER_LOOK)
        self._words[_WAITED] += np.uint64((time.perf_counter() - begin) * 1e9)

    @contextmanager
    def sample(self) -> Iterator[TimedSample]:
        """Context of a timed stretch. Afterwards `TimedSample.interrupted` says whether a request began during it."""
        before, made = self._requests().copy(), TimedSample()
        yield made
        now = self._requests()
        made.interrupted = len(now) != len(before) or bool((now != before).any())
        self._words[_SAMPLES] += np.uint64(1)
        self._words[_INTERRUPTED] += np.uint64(made.interrupted)

    def _is_free(self) -> bool:
        return not (self.is_paused or self.is_serving) and time.perf_counter() > self.last + QUIET

    def _requests(self) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return self._words[_HEAD : _HEAD + int(self._words[_USED])]


class TimedSample:
    """A timed stretch."""

    interrupted = False


def _memory() -> int:
    """Create anonymous memory and return its descriptor. The memory lives as long as a process holds the descriptor."""
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # some sandboxes forbid this system call
            return os.memfd_create("tunewright-activity", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


_activity: Activity | None = None
_MAKING = threading.Lock()


def of_process() -> Activity:
    """Return the `Activity` of this process. All models share it: a request of one disturbs samples of another."""
    global _activity
    with _MAKING:
        if _activity is None:
            _activity = Activity()
        return _activity


def _in_child() -> None:
    """Start without an `Activity` after a fork: the child must not write to its parent's words."""
    global _activity, _MAKING
    _activity, _MAKING = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
