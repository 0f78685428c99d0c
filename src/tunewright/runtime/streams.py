"""A model's streams: threads that run what was started, each one inference at a time.

A model has as many as NUM_STREAMS says, each with its share of the device. While kernels run, nobody holds Python's
lock.

To wake a thread, and then to be woken by it, takes longer than a small inference. So whoever waits for one takes part:
it runs what no stream has begun yet, and never are there more at a time than streams. And a thread that finds Python's
lock taken has to be woken, too: inferences shorter than that are prepared one after the other, and run as one launch.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from .inference import Inference

#: what streams run
Task = Callable[[], object]

#: seconds that the end of the process waits for what was started
LAST_SECONDS = 10.0
#: Seconds of an inference, its callback included: a shorter one is worth less than waking a thread. A few shorter still
#: lose more when Python's lock goes from thread to thread than another core gains: one thread runs them all (two cores
#: of an AMD EPYC, us per inference in a queue of four on one thread and on two: silero 65 and 72, thai2rom 83 and 48).
BRIEF, TINY = 1e-3, 60e-6
#: What is tiny is told by the processor time of the thread that runs it, and stays so until that is so many times as
#: long: threads that fight for Python's lock use more. And by the clock, with time to wait for the lock or a core: what
#: takes longer is run by others than this thread.
STAYS, WAITING = 2, 5
#: how fast the time that is expected may grow: one took long because somebody else had the core
GROWTH = 1.25
#: of so many inferences the processor time of one is asked for
SAMPLE = 8
#: Seconds for which who has run one is expected to come back: no thread is woken for what it starts then, when another
#: one is at work, or looks every so many seconds whether it has to do it after all.
LINGER, DOZE = 50e-6, 1e-3
#: Inferences that take so many seconds of a processor at most are begun together, as many as take ``SPAN`` seconds:
#: Python's lock changes hands twice for all of them, and a thread that finds it taken has to be woken (50 us).
SHORT, SPAN, MOST = 150e-6, 1e-3, 16
#: seconds of tiny inferences that are worth a thread of their own, since it begins them together
WORTH = 200e-6


class Work:
    """What is to be run, and who is at it. The threads of streams know this alone: they keep no model alive."""

    def __init__(self, count: int) -> None:
        self.count = count
        # Of all that follows. Whoever holds it may collect garbage, and end these very threads.
        self.lock = threading.RLock()
        self.tasks: deque[Task] = deque()
        self.threads: list[threading.Thread] = []
        #: what threads that sleep wait for, each for its own
        self.asleep: list[threading.Lock] = []
        #: those who look by themselves in a while
        self.dozing: set[threading.Lock] = set()
        #: threads that are awake and have no task yet
        self.looking = 0
        #: tasks that are run now, and how many of them by others than the threads
        self.running = self.helping = 0
        #: who was the last of those, and how long it is expected to come back
        self.helper, self.until = 0, 0.0
        #: of inferences lately, by the clock and by their threads, and whether one thread runs them all
        self.seconds = self.used = float("inf")
        self.is_tiny = False
        #: of inferences so far
        self.number = 0
        self.ended = False
        #: inferences that have run together and are not told yet: whoever has time does it
        self.over: deque[Inference] = deque()

    def call(self, lazily: bool = False) -> bool:
        """Have a thread look for a task, if one more would find one. False: there is none that sleeps.

        ``lazily``: not if some thread will look anyway, and who calls is going to run a task itself.
        """
        busy = self.running + self.looking
        if busy >= self.count or self.looking >= len(self.tasks):
            return True
        few = len(self.tasks) == 1 or (self.is_tiny and self.few)
        if lazily and self.seconds <= BRIEF and (busy > self.helping or (self.dozing and few)):
            return True
        if not self.asleep:
            return False
        self._wake()
        return True

    def end(self) -> None:
        """Threads end when nothing is left to do."""
        with self.lock:
            self.ended = True
            while self.asleep:
                self._wake()

    def _wake(self) -> None:
        sleep = self.asleep.pop()
        self.dozing.discard(sleep)
        self.looking += 1
        sleep.release()

    def took(self, seconds: float, used: float | None) -> None:
        """An inference is over, in which its thread used so many seconds of a processor, if it was asked for."""
        self.seconds = min(seconds, GROWTH * self.seconds)
        if used is None:
            return
        self.used = min(used, GROWTH * self.used)
        self.is_tiny = self.used <= (STAYS * TINY if self.is_tiny else TINY) and self.seconds <= WAITING * TINY

    def end_some(self) -> list[Inference]:
        """End what has run together, as long as there is some: what this thread has ended."""
        ended = []
        while self.over:
            try:
                each = self.over.popleft()
            except IndexError:  # another thread was sooner
                break
            if each.end():
                ended.append(each)
        return ended

    def helped(self) -> None:
        """A task was run by who waits."""
        self.running -= 1
        self.helping -= 1
        self.helper, self.until = threading.get_ident(), time.perf_counter() + LINGER

    @property
    def is_helped(self) -> bool:
        """Somebody takes part, or is expected to come back."""
        return bool(self.helping) or time.perf_counter() < self.until

    def next(self, is_helped: bool) -> list[Task]:
        """Tasks for a thread that looks for some."""
        if not self.tasks or self.running >= self.count or (self.is_tiny and is_helped and self.few):
            return []
        self.running += 1
        taken = self.take()
        self.call()
        return taken

    def take(self, helps: bool = False) -> list[Task]:
        """The first task, with its share of those behind it where their launches may be one.

        Who ``helps`` starts the next ones, too, and leaves a share to each stream: one that is at work would find
        nothing when it comes back.
        """
        tasks = self.tasks
        free = self.count if helps else self.count - self.running + 1
        share = len(tasks) if self.is_tiny and self.few else -(-len(tasks) // free)
        taken = [tasks.popleft()]
        if _joins(taken[0]):
            share = min(share, self.most)
            while len(taken) < share and _joins(tasks[0]):
                taken.append(tasks.popleft())
        return taken

    @property
    def few(self) -> bool:
        """So few tasks that are tiny that one thread should run them all."""
        return len(self.tasks) * self.seconds < WORTH

    @property
    def most(self) -> int:
        """Inferences that one thread begins together."""
        return min(MOST, int(SPAN / max(self.used, SPAN / MOST))) if self.used <= SHORT and self.seconds <= BRIEF else 1


class Streams:
    """The threads that run what was started. They are made as they are needed, and end with the models that use them.

    A thread knows the queue of tasks alone: it keeps no model alive while it has nothing to do.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.start_anew()
        _STREAMS.add(self)

    def start_anew(self) -> None:
        """As one that was not used yet: a fork has no threads, and nobody who would release a lock."""
        self._work = Work(self.count)
        self.process = os.getpid()

    def submit(self, task: Task) -> None:
        """Run it on the next stream that is free. It raises nothing."""
        if isinstance(task, Inference):
            task.streams = self
        work = self._work
        with work.lock:
            work.tasks.append(task)
            lazily = work.helper == threading.get_ident() and time.perf_counter() < work.until
            try:
                self._call(work, lazily)
            except BaseException:
                work.tasks.remove(task)
                raise

    def _call(self, work: Work, lazily: bool = False) -> None:
        """Have a thread look for a task, where that is needed; one is made if all are busy, and there may be more."""
        if work.call(lazily) or len(work.threads) == work.count:
            return
        if not work.threads:
            weakref.finalize(self, work.end).atexit = False
            # Behind everything that was imported before: what kernels need is still there when it waits for them.
            atexit.unregister(_at_exit)
            atexit.register(_at_exit)
        # Daemons, because the interpreter waits for others before it asks anybody to end.
        name = f"tunewright-stream-{len(work.threads)}"
        thread = threading.Thread(target=_serve, args=(work,), name=name, daemon=True)
        work.looking += 1
        try:
            thread.start()
        except RuntimeError:  # the system has no more of them: those that are there will do
            work.looking -= 1
            if not work.threads:
                raise
            return
        work.threads.append(thread)

    def help(self, wanted: Task | None = None) -> bool:
        """Run a task in this thread, which has nothing else to do, if a stream is free for it but has not begun it yet.

        Without ``wanted`` the inference that was submitted first, if they are brief. False: there was none to run.
        """
        work = self._work
        if wanted is None and (others := work.end_some()):
            _raise_interruption(others)
            return True
        with work.lock:
            if not work.tasks or work.running >= work.count:
                return False
            if wanted is None:
                wanted = work.tasks[0]
                if work.seconds > BRIEF or not isinstance(wanted, Inference):
                    return False
                work.running += 1
                taken = work.take(helps=True)
            else:
                try:
                    work.tasks.remove(wanted)
                except ValueError:  # somebody has begun it
                    return False
                work.running += 1
                taken = [wanted]
            work.helping += 1
        try:
            ended = _run(taken, work)
        finally:
            with work.lock:
                work.helped()
                self._call(work, lazily=True)
        _raise_interruption(ended)
        return True

    def is_sample(self) -> bool:
        """Ask how much processor time this inference uses: the system takes a microsecond to answer, so not each."""
        self._work.number += 1
        return self.count > 1 and not self._work.number % SAMPLE

    def took(self, seconds: float, used: float | None) -> None:
        """See `Work.took`."""
        self._work.took(seconds, used)

    def best_requests(self, joins: bool) -> int:
        """How many keep streams busy: inferences may be so brief that they fall asleep before the next one comes."""
        work = self._work
        if joins and work.most > 1:
            return work.most * self.count
        return 2 * self.count if work.seconds <= BRIEF and not work.is_tiny else self.count

    def end(self, deadline: float) -> None:
        """Finish what was started, until ``deadline`` (`time.monotonic`); then there are no threads."""
        work, self._work = self._work, Work(self.count)
        work.end()
        for thread in work.threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


_STREAMS: weakref.WeakSet[Streams] = weakref.WeakSet()


def _joins(task: Task) -> bool:
    return isinstance(task, Inference) and task.joins


def _run(tasks: Sequence[Task], work: Work) -> Sequence[Task]:
    """Run them in this thread: several are inferences, whose last launches are one. Answers what has ended here."""
    if len(tasks) == 1:
        tasks[0]()
        return tasks
    clock, used = time.perf_counter(), time.thread_time()
    inferences = [task for task in tasks if isinstance(task, Inference)]
    try:
        queues = [queue for each in inferences if (queue := each.begin()) is not None]
        if queues:
            with contextlib.suppress(Exception):  # it comes again when each of them ends, by itself
                queues[0].begin(queues[1:])
        ended = [each for each in inferences if not each.ran()]
        work.over.extend([each for each in inferences if not each.done])
        ended += work.end_some()
    except BaseException as error:  # Ctrl-C
        for each in inferences:
            each.fail(error)
        raise
    count = len(inferences)
    work.took((time.perf_counter() - clock) / count, (time.thread_time() - used) / count)
    return ended


def _raise_interruption(ended: Sequence[Task]) -> None:
    """What should end the thread in which they have ended."""
    for task in ended:
        if isinstance(task, Inference) and isinstance(task.error, KeyboardInterrupt | SystemExit):
            raise task.error


def _serve(work: Work) -> None:
    """A thread of a stream."""
    sleep = threading.Lock()
    sleep.acquire()
    ran = False
    while True:
        seconds = -1.0  # to sleep: for ever
        with work.lock:
            if ran:
                work.running -= 1
            else:
                work.looking -= 1
            is_helped = work.is_helped  # asked once: who leaves a task to another one looks again
            tasks = work.next(is_helped)
            if not tasks:
                work.asleep.append(sleep)
                if is_helped:
                    work.dozing.add(sleep)
                    seconds = DOZE
                if work.ended and not work.tasks:
                    work.end()  # others, who had to wait for a task
                    return
        ran = bool(tasks)
        if tasks:
            _run(tasks, work)
            del tasks  # they would keep their requests, and so the model, until the next ones come
        elif not sleep.acquire(timeout=seconds):
            with work.lock:
                if sleep in work.asleep:
                    work.asleep.remove(sleep)
                    work.dozing.discard(sleep)
                    work.looking += 1
                else:  # it was woken just then: whoever did it counted it
                    sleep.acquire()


def _at_exit() -> None:
    """Threads that are in a kernel while a runtime is taken apart would crash the process."""
    deadline = time.monotonic() + LAST_SECONDS
    for streams in list(_STREAMS):
        streams.end(deadline)


def _in_child() -> None:
    for streams in list(_STREAMS):
        streams.start_anew()


os.register_at_fork(after_in_child=_in_child)
