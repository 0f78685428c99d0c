"""A model's streams: a pool of threads that run what was started, each one inference at a time.

NUM_STREAMS says how many threads there are. A caller that waits takes part: it runs a task that no thread has begun.
At no time do more tasks run than there are streams.
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


class Work:
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
        #: A sleeping thread waits for its bell, a lock that whoever calls it releases. These were not called yet.
        self.bells: list[threading.Lock] = []
        #: ``asleep``: threads that have not looked yet since they fell asleep; ``called``: those of them that were
        #: called; ``dozing``: those of them that look by themselves soon.
        self.called = self.dozing = self.asleep = 0
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

    def serve(self, bell: threading.Lock) -> None:
        """Run tasks until the streams end. The body of each thread, which begins asleep."""
        dozes, ran = False, 0
        while True:
            if not ran:
                self._sleep(bell, dozes)
            with self.lock:
                self.running -= ran
                task = self._take(None)
                ran = int(task is not None)
                if task is not None:
                    self._call()
                else:
                    dozes, self.helped = self.helped and self.is_brief, False
                    bell = self._lie_down(dozes)  # first, because a garbage collection here may call `end`
                    if self.ended or len(self.threads) > self.count:
                        self.threads.remove(threading.current_thread())
                        self._get_up(bell, dozes)
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
        if self.bells:
            bell = self.bells.pop()
            self.called += 1
            bell.release()

    def _lie_down(self, dozes: bool) -> threading.Lock:
        """Count a thread as asleep. What it is to wait for."""
        bell = threading.Lock()
        bell.acquire()
        self.asleep, self.dozing = self.asleep + 1, self.dozing + dozes
        self.bells.append(bell)
        return bell

    def _sleep(self, bell: threading.Lock, dozes: bool) -> None:
        """Sleep until called; a thread that ``dozes`` wakes after DOZE seconds at the latest."""
        # Not a queue: with a timeout, `queue.SimpleQueue.get` may sleep forever where another thread was faster.
        bell.acquire(timeout=DOZE if dozes else -1)
        with self.lock:
            self._get_up(bell, dozes)

    def _get_up(self, bell: threading.Lock, dozes: bool) -> None:
        self.asleep, self.dozing = self.asleep - 1, self.dozing - dozes
        try:
            self.bells.remove(bell)
        except ValueError:  # it was called
            self.called -= 1

    def _start(self) -> bool:
        """Start one more thread. False: the system refuses, and the existing threads do the work."""
        if not self.threads:
            # Handlers run in reverse order: this one waits for kernels before anything imported earlier is taken down.
            atexit.unregister(_at_exit)
            atexit.register(_at_exit)
        # Daemons, because the interpreter would wait for other threads before it calls `_at_exit`.
        bell, name = self._lie_down(False), f"tunewright-stream-{len(self.threads)}"
        thread = threading.Thread(target=self.serve, args=(bell,), name=name, daemon=True)
        try:
            thread.start()
        except BaseException as error:
            self._get_up(bell, False)
            if not self.threads or not isinstance(error, RuntimeError):
                raise
            return False
        self.threads.append(thread)
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
