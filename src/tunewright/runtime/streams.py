"""A model's streams: threads that run what was started, each one inference at a time.

A model has as many as NUM_STREAMS says. Waking a thread takes longer than a small inference, so whoever waits takes
part: it runs what no thread has begun yet. Never do more run at a time than there are streams.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

#: what streams run; it raises nothing
Task = Callable[[], object]

#: seconds that the end of the process waits for what was started
LAST_SECONDS = 10.0
#: seconds of a task: a shorter one is worth less than waking a thread
BRIEF = 1e-3
#: Seconds after which a thread looks for a task by itself while those who wait take part. It is not woken for what they
#: may run: it would fight with them for the GIL (9 us for each inference).
DOZE = 1e-3


class Streams:
    """So many threads for the tasks of a model. They start when they are needed and end with the model."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._end: weakref.finalize[[], Streams] | None = None
        self.start_anew()
        _STREAMS.add(self)

    def start_anew(self) -> None:
        """As streams that were not used yet. A fork has no threads, and nobody who would release a lock."""
        if self._end is not None:
            self._end.detach()
        self._work = Work(self.count)
        self._end = weakref.finalize(self, self._work.end)
        self._end.atexit = False

    def submit(self, task: Task) -> None:
        """Run a task on the next stream that is free."""
        self._work.put(task)

    def help(self, wanted: Task | None = None) -> Task | None:
        """Run a task in this thread, if a stream is free for it and has not begun it. None: there was no such task.

        Without ``wanted`` the next task, if tasks are brief.
        """
        return self._work.help(wanted) if wanted is not None or self.is_brief else None

    @property
    def is_brief(self) -> bool:
        """The last task was."""
        return self._work.seconds <= BRIEF

    def resize(self, count: int) -> None:
        """So many from now on. Threads of before finish what they have."""
        self.count = count
        work = self._work
        self.start_anew()
        work.end()

    def end(self, deadline: float) -> None:
        """Finish what was submitted, until ``deadline`` (`time.monotonic`); then there are no threads."""
        threads = list(self._work.threads)
        self.resize(self.count)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


class Work:
    """Tasks, and the threads that run them. The threads know nothing else, so they keep no model alive."""

    def __init__(self, count: int) -> None:
        self.count = count
        # Of all that follows. Whoever holds it may collect garbage, and so come to `end`.
        self.lock = threading.RLock()
        self.tasks: deque[Task] = deque()
        self.threads: list[threading.Thread] = []
        #: tasks that run now, in whatever thread
        self.running = 0
        #: seconds of the last one
        self.seconds = float("inf")
        #: somebody who waited has run one since a thread last looked
        self.helped = False
        #: threads that sleep, each on its own lock; those of them that look by themselves in a while; and threads that
        #: were woken and have not looked yet
        self.asleep: list[threading.Lock] = []
        self.dozing: set[threading.Lock] = set()
        self.woken: set[threading.Lock] = set()
        self.ended = False

    def put(self, task: Task) -> None:
        with self.lock:
            self.tasks.append(task)
            try:
                self._call()
            except BaseException:  # no thread can be made
                self.tasks.remove(task)
                raise

    def help(self, wanted: Task | None) -> Task | None:
        """Run a task in the calling thread."""
        task = None
        try:
            with self.lock:
                task = self._take(wanted)
            if task is not None:
                self._run(task)
        finally:
            if task is not None:
                with self.lock:
                    self.running, self.helped = self.running - 1, True
                    self._call()
        return task

    def serve(self, sleep: threading.Lock) -> None:
        """What a thread does, until nothing is left to do. It sleeps on a lock of its own."""
        while True:
            with self.lock:
                self.woken.discard(sleep)
                task = self._take(None)
                if task is not None:
                    self._call()
                else:
                    self.asleep.append(sleep)  # first: to collect garbage here may be to come to `end`
                    if self.ended and not self.tasks:
                        self._forget(sleep)
                        return self.end()
                    dozes, self.helped = self.helped, False
                    if dozes:
                        self.dozing.add(sleep)
            if task is None:
                self._sleep(sleep, DOZE if dozes else -1.0)
                continue
            self._run(task)
            del task  # it would keep its request, and so the model, until the next one comes
            with self.lock:
                self.running -= 1

    def _forget(self, sleep: threading.Lock) -> None:
        """This thread ends: a task that comes late must not wait for it."""
        self.threads.remove(threading.current_thread())
        self.woken.discard(sleep)
        if sleep in self.asleep:
            self.asleep.remove(sleep)

    def end(self) -> None:
        """Threads end when nothing is left to do."""
        with self.lock:
            self.ended = True
            while self.asleep:
                self._wake()

    def _take(self, wanted: Task | None) -> Task | None:
        """A task that is running from now on, if one more may run."""
        if not self.tasks or self.running >= self.count:
            return None
        if wanted is None:
            wanted = self.tasks.popleft()
        elif wanted in self.tasks:
            self.tasks.remove(wanted)
        else:  # a thread has begun it
            return None
        self.running += 1
        return wanted

    def _run(self, task: Task) -> None:
        begin = time.perf_counter()
        task()
        self.seconds = time.perf_counter() - begin

    def _call(self) -> None:
        """Have a thread look for a task, if one more would find one."""
        if self.ended and not self.tasks:
            self.end()
        # One that dozes means that somebody takes part, and that one looks soon if nobody does.
        coming = len(self.woken) + bool(self.dozing)
        if min(len(self.tasks), self.count - self.running) <= coming:
            return
        if self.asleep:
            self._wake()
        elif len(self.threads) < self.count:
            self._start()

    def _wake(self) -> None:
        sleep = self.asleep.pop()
        self.dozing.discard(sleep)
        self.woken.add(sleep)
        sleep.release()

    def _sleep(self, sleep: threading.Lock, seconds: float) -> None:
        """Until it is woken, or for so many seconds."""
        if sleep.acquire(timeout=seconds):
            return
        with self.lock:
            if sleep in self.woken:  # just then
                sleep.acquire()
            else:
                self.asleep.remove(sleep)
                self.dozing.discard(sleep)

    def _start(self) -> None:
        if not self.threads:
            # Behind everything that was imported before: what kernels need is still there when it waits for them.
            atexit.unregister(_at_exit)
            atexit.register(_at_exit)
        sleep = threading.Lock()
        sleep.acquire()
        # Daemons, because the interpreter waits for others before it asks anybody to end.
        name = f"tunewright-stream-{len(self.threads)}"
        thread = threading.Thread(target=self.serve, args=(sleep,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no more of them: those that are there will do
            if not self.threads:
                raise
            return
        self.woken.add(sleep)
        self.threads.append(thread)


_STREAMS: weakref.WeakSet[Streams] = weakref.WeakSet()


def _at_exit() -> None:
    """Threads that are in a kernel while a runtime is taken apart would crash the process."""
    deadline = time.monotonic() + LAST_SECONDS
    for streams in list(_STREAMS):
        streams.end(deadline)


def _in_child() -> None:
    for streams in list(_STREAMS):
        streams.start_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
