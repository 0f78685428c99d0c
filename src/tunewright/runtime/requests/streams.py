"""A model's streams: a pool of threads that run what was started, each one inference at a time.

NUM_STREAMS says how many threads there are. A caller that waits takes part: it runs a task that no thread has begun.
At no time do more tasks run than there are streams.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

#: a task for streams; it raises no error
Task = Callable[[], object]

#: seconds that the process, at its end, waits for started tasks
LAST_SECONDS = 10.0
#: BRIEF: waking a thread takes about as long as a task of less than these seconds. No thread is woken for such tasks
#: while waiting callers run them; instead a thread looks for work by itself every DOZE seconds.
BRIEF, DOZE = 2e-4, 1e-3


class Streams:
    """``count`` threads for the tasks of a model. They start when they are needed and end with the model."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._end: weakref.finalize[[], Streams] | None = None
        self.start_anew()
        _STREAMS.add(self)

    def start_anew(self) -> None:
        """Return to the state before the first task. A forked child has no threads that would release a lock."""
        if self._end is not None:
            self._end.detach()
        self._work = TaskQueue(self.count)
        self._end = weakref.finalize(self, self._work.end)
        self._end.atexit = False

    def submit(self, task: Task) -> None:
        """Run a task on the next stream that is free."""
        self._work.put(task)

    def help(self, wanted: Task | None = None) -> Task | None:
        """Run a task in this thread, if a stream is free for it and has not begun it. None: there was no such task.

        Without ``wanted`` the next task, if tasks are brief.
        """
        return self._work.help(wanted) if wanted is not None or self._work.is_brief else None

    def resize(self, count: int) -> None:
        """Change the number of threads. Surplus threads end when they find nothing to do."""
        self.count = count
        self._work.resize(count)

    def end(self, deadline: float) -> None:
        """Finish the submitted tasks and end the threads. Wait for them until ``deadline`` (`time.monotonic`)."""
        threads = list(self._work.threads)
        self._work.end()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


class TaskQueue:
    """Tasks, and the threads that run them. The threads know nothing else, so they keep no model alive."""

    def __init__(self, count: int) -> None:
        self.count = count
        # Guards all attributes below. Reentrant: a garbage collection while it is held may call `end`.
        self.lock = threading.RLock()
        self.tasks: deque[Task] = deque()
        self.threads: list[threading.Thread] = []
        #: tasks that run now, in streams and in waiting callers
        self.running = 0
        #: the last task took less than BRIEF
        self.is_brief = False
        #: a waiting caller has run a task since a thread last looked
        self.helped = False
        #: The bells of sleeping threads: locks, rung by releasing them. They are not one queue for all threads, because
        #: `SimpleQueue.get` with a timeout may wait for ever if another thread takes the entry.
        self.bells: list[threading.Lock] = []
        #: threads whose bell was rung and that are not awake yet; threads that soon wake by themselves
        self.called = self.dozing = 0
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

    @property
    def asleep(self) -> int:
        """Threads that sleep, dozing and called ones included."""
        return len(self.bells) + self.called

    def serve(self, bell: threading.Lock) -> None:
        """Run tasks until the streams end. The body of each thread."""
        dozes, ran, rung = False, 0, False
        while True:
            if not ran:
                rung = bell.acquire(timeout=DOZE if dozes else -1)
            with self.lock:
                if not ran:
                    self._awake(bell, rung, dozes)
                self.running -= ran
                task = self._take(None)
                ran = int(task is not None)
                if task is not None:
                    self._call()
                else:
                    dozes, self.helped = self.helped and self.is_brief, False
                    self.dozing += dozes
                    self.bells.append(bell)  # first, because a garbage collection here may call `end`
                    if self.ended or len(self.threads) > self.count:
                        self._awake(bell, False, dozes)
                        self.threads.remove(threading.current_thread())
                        return
            if task is not None:
                self._run(task)
                del task  # it would keep its request and the model alive until the next task

    def resize(self, count: int) -> None:
        with self.lock:
            self.count = count
            self._call()
            self._call_all()

    def end(self) -> None:
        """Have the threads end when no task is left."""
        with self.lock:
            self.ended = True
            self._call_all()

    def _take(self, wanted: Task | None) -> Task | None:
        """Take a task out of the queue and count it as running. None: no more tasks may run, or there is none."""
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
        self.is_brief = time.perf_counter() - begin <= BRIEF

    def _call(self) -> None:
        """Wake or start a thread if one more thread would find a task."""
        # Threads doze only while callers take part, and look soon in case callers stop to do so.
        if min(len(self.tasks), self.count - self.running) <= min(self.called + self.dozing, self.asleep):
            return
        if self.bells or (len(self.threads) < self.count and self._start()):
            self._ring()

    def _call_all(self) -> None:
        while self.bells:
            self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(IndexError):  # a garbage collection has just called `end`, which rings all bells
            self.bells.pop().release()
            self.called += 1

    def _awake(self, bell: threading.Lock, rung: bool, dozed: bool) -> None:
        """Count a thread as awake: its bell was ``rung``, or it has ``dozed`` long enough."""
        self.dozing -= dozed
        with contextlib.suppress(ValueError):
            self.bells.remove(bell)
            return
        self.called -= 1
        if not rung:  # it was rung after the thread had woken by itself
            bell.acquire()

    def _start(self) -> bool:
        """Start one more thread. False: the system refuses, and the existing threads do the work."""
        if not self.threads:
            # Handlers run in reverse order: this one waits for kernels before anything imported earlier is taken down.
            atexit.unregister(_at_exit)
            atexit.register(_at_exit)
        # Daemons, because the interpreter would wait for other threads before it calls `_at_exit`.
        bell = threading.Lock()
        bell.acquire()
        name = f"tunewright-stream-{len(self.threads)}"
        thread = threading.Thread(target=self.serve, args=(bell,), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self.threads:
                raise
            return False
        self.threads.append(thread)
        self.bells.append(bell)
        return True


_STREAMS: weakref.WeakSet[Streams] = weakref.WeakSet()


def _at_exit() -> None:
    """End all streams: a thread in a kernel while the interpreter shuts down would crash the process."""
    deadline = time.monotonic() + LAST_SECONDS
    for streams in list(_STREAMS):
        streams.end(deadline)


def _in_child() -> None:
    for streams in list(_STREAMS):
        streams.start_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
