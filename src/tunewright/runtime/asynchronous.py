"""Inferences that run while their caller goes on: started requests, a model's streams, and a queue of requests.

A stream is a thread that runs one inference at a time; a model has as many as NUM_STREAMS says, each with its share of
the device. While kernels run, nobody holds Python's lock.

To wake a thread, and then to be woken by it, takes longer than a small inference. So whoever waits for one takes part:
it runs what no stream has begun yet, and never are there more at a time than streams.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InputError, RequestCancelled

if TYPE_CHECKING:
    from .compiled import CompiledModel, InferRequest

LOG = logging.getLogger("tunewright")

Inputs = Mapping[str, Any] | Sequence[Any] | Any
#: what is called when an inference is over: with the request and what was given to `start_async`
Callback = Callable[[Any, Any], object]
#: what streams run
Task = Callable[[], object]

#: seconds that the end of the process waits for what was started
LAST_SECONDS = 10.0
#: Seconds of an inference, its callback included: a shorter one is worth less than waking a thread. One shorter still
#: loses more when Python's lock goes from thread to thread than another core gains: one thread runs them all (two cores
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


class _Work:
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

    def call(self, lazily: bool = False) -> bool:
        """Have a thread look for a task, if one more would find one. False: there is none that sleeps.

        ``lazily``: not if some thread will look anyway, and who calls is going to run a task itself.
        """
        busy = self.running + self.looking
        if busy >= self.count or self.looking >= len(self.tasks):
            return True
        few = len(self.tasks) == 1 or self.is_tiny
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

    def helped(self) -> None:
        """A task was run by who waits."""
        self.running -= 1
        self.helping -= 1
        self.helper, self.until = threading.get_ident(), time.perf_counter() + LINGER

    @property
    def is_helped(self) -> bool:
        """Somebody takes part, or is expected to come back."""
        return bool(self.helping) or time.perf_counter() < self.until

    def next(self, is_helped: bool) -> Task | None:
        """A task for a thread that looks for one."""
        if not self.tasks or self.running >= self.count or (self.is_tiny and is_helped):
            return None
        self.running += 1
        task = self.tasks.popleft()
        self.call()
        return task


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
        self._work = _Work(self.count)
        self.process = os.getpid()

    def submit(self, task: Task) -> None:
        """Run it on the next stream that is free. It raises nothing."""
        if isinstance(task, _Inference):
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

    def _call(self, work: _Work, lazily: bool = False) -> None:
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
        with work.lock:
            if not work.tasks or work.running >= work.count:
                return False
            if wanted is None:
                wanted = work.tasks[0]
                if work.seconds > BRIEF or not isinstance(wanted, _Inference):
                    return False
            try:
                work.tasks.remove(wanted)
            except ValueError:  # somebody has begun it
                return False
            work.running += 1
            work.helping += 1
        try:
            wanted()
        finally:
            with work.lock:
                work.helped()
                self._call(work, lazily=True)
        if isinstance(wanted, _Inference) and isinstance(wanted.error, KeyboardInterrupt | SystemExit):
            raise wanted.error  # they were this thread's
        return True

    def is_sample(self) -> bool:
        """Ask how much processor time this inference uses: the system takes a microsecond to answer, so not each."""
        self._work.number += 1
        return self.count > 1 and not self._work.number % SAMPLE

    def took(self, seconds: float, used: float | None) -> None:
        """An inference is over, in which its thread used so many seconds of a processor, if it was asked for."""
        work = self._work
        work.seconds = min(seconds, GROWTH * work.seconds)
        if used is None:
            return
        work.used = min(used, GROWTH * work.used)
        work.is_tiny = work.used <= (STAYS * TINY if work.is_tiny else TINY) and work.seconds <= WAITING * TINY

    @property
    def fall_asleep(self) -> bool:
        """Inferences are so brief that streams do before the next one comes, though they run side by side."""
        return self._work.seconds <= BRIEF and not self._work.is_tiny

    def end(self, deadline: float) -> None:
        """Finish what was started, until ``deadline`` (`time.monotonic`); then there are no threads."""
        work, self._work = self._work, _Work(self.count)
        work.end()
        for thread in work.threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


_STREAMS: weakref.WeakSet[Streams] = weakref.WeakSet()


def _serve(work: _Work) -> None:
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
            task = work.next(is_helped)
            if task is None:
                work.asleep.append(sleep)
                if is_helped:
                    work.dozing.add(sleep)
                    seconds = DOZE
                if work.ended and not work.tasks:
                    work.end()  # others, who had to wait for a task
                    return
        ran = task is not None
        if task is not None:
            task()
            del task  # it would keep its request, and so the model, until the next one comes
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


class _Inference:
    """One inference that was started: how far it is, and who is to be told."""

    __slots__ = (
        "_after", "_begun", "_guard", "_inputs", "_over", "_request", "cancelled", "done", "error", "process", "streams"
    )  # fmt: skip

    def __init__(self, request: Startable, inputs: Inputs, process: int) -> None:
        self._request: Startable | None = request
        self._inputs = inputs
        #: whose threads will run it, and in which process; None: others than those of a model
        self.streams: Streams | None = None
        self.process = process
        #: of what follows
        self._guard = threading.Lock()
        self._begun = self.done = self.cancelled = False
        self.error: BaseException | None = None
        self._after: Callback | None = None
        #: held until it is over; cheaper than an Event, and most have nobody waiting
        self._over = threading.Lock()
        self._over.acquire()

    def __call__(self) -> None:
        """Run it, unless it was cancelled."""
        with self._guard:
            if self._begun:
                return
            self._begun = True
        streams = self.streams
        before = time.thread_time() if streams is not None and streams.is_sample() else None
        begin = time.perf_counter()
        request = self._request
        error: BaseException | None = None
        assert request is not None
        try:
            request.run(self._inputs)
            if self.cancelled:
                request.results = {}
                error = RequestCancelled("the request was cancelled")
            elif request._callback is not None:
                request._callback(request, request.userdata)
        except BaseException as found:  # it is raised where somebody waits for it
            error = found
        if streams is not None:
            streams.took(time.perf_counter() - begin, None if before is None else time.thread_time() - before)
        self._finish(error)

    def cancel(self) -> None:
        with self._guard:
            if self.done:
                return
            self.cancelled = True
            if self._begun:
                return
            self._begun = True
        self._finish(RequestCancelled("the request was cancelled"))

    def _finish(self, error: BaseException | None) -> None:
        with self._guard:
            self.error, self.done = error, True
        # The stream's queue may hold this for a while, if it was cancelled: not the request, and what it was given.
        request, self._request, self._inputs = self._request, None, None
        self.streams = None
        self._over.release()
        if self._after is not None:
            self._tell(self._after, request)

    def then(self, call: Callback, request: Startable) -> None:
        """Call it with the request and the error, if any, when it is over: at once, if it is."""
        with self._guard:
            if not self.done:
                assert self._after is None, "one is told"
                self._after = call
                return
        self._tell(call, request)

    def _tell(self, call: Callback, request: Startable | None) -> None:
        told = None if self.cancelled and isinstance(self.error, RequestCancelled) else self.error
        try:
            call(request, told)
        except Exception:  # nobody waits here
            LOG.exception("what was to be called after an inference failed")

    def wait(self, timeout: float | None) -> bool:
        """False: it was not over within so many seconds. Several may wait."""
        if not self.done:
            seconds = -1.0 if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX)
            if not self._over.acquire(timeout=seconds):
                return self.done
            self._over.release()
        return True


class Startable(ABC):
    """A request that can be started and waited for. It holds one inference at a time, and the results of the last."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._inference: _Inference | None = None
        self._callback: Callback | None = None
        #: what was given to `start_async`, for the callback
        self.userdata: Any = None
        #: outputs of the last inference by name
        self.results: dict[str, Any] = {}

    @abstractmethod
    def run(self, inputs: Inputs) -> dict[str, Any]:
        """An inference, here and now."""

    def start_async(self, inputs: Inputs = None, userdata: Any = None) -> None:
        """Begin an inference on one of the model's streams, or as soon as one is free; see `wait`.

        The inputs are read while it runs: do not change them before it is over.

        >>> request.start_async({"x": image})
        >>> request.wait()
        >>> request.results["y"]
        """
        self.check_idle()
        self.userdata, self.results = userdata, {}
        self._inference = started = _Inference(self, inputs, self._streams.process)
        try:
            self._streams.submit(started)
        except BaseException:  # no thread can be made
            self._inference = None
            raise

    def check_idle(self) -> None:
        """InputError when it is running."""
        if self._inference is not None and not self._inference.done:
            raise InputError("the request is running", hint="wait for it, or use another one: create_infer_request()")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the inference that was started is over, its callback included. False: not within so many seconds.

        What went wrong in it (or in the callback) is raised here. RequestCancelled: it was cancelled.
        """
        started = self._inference
        if started is None:
            raise InputError("nothing was started", hint="start_async begins an inference")
        if not started.done and started.process != self._streams.process:
            raise InputError("it was started before this process was forked, and runs there",
                             hint="make requests behind the fork")  # fmt: skip
        streams = started.streams
        if timeout is None and streams is not None:
            streams.help(started)
        if not started.wait(timeout):
            return False
        if started.error is not None:
            raise started.error
        return True

    def when_over(self, call: Callable[[Any, BaseException | None], object]) -> None:
        """Call it with the request and its error, if any, once the inference that was started is over.

        One that was cancelled has no error.
        """
        assert self._inference is not None
        self._inference.then(call, self)

    def set_callback(self, callback: Callback | None) -> None:
        """What is called with (request, userdata) when an inference that was started is over, on the stream's thread.

        The results are in ``request.results``. An inference that failed or was cancelled calls nothing: `wait` says so.
        """
        self._callback = callback

    def cancel(self) -> None:
        """Give up the inference that was started. One that runs already ends first, and its results are dropped."""
        if self._inference is not None:
            self._inference.cancel()


class AsyncInferQueue:
    """Requests of one model that are started as they become free: keeps every stream busy, and no more in memory.

    Without ``jobs`` there are as many as the model needs; up to as many again are made while inferences are so brief
    that a stream would fall asleep before the next one comes.

    >>> queue = tunewright.AsyncInferQueue(compiled)
    >>> queue.set_callback(lambda request, name: save(name, request.results["y"]))
    >>> for name, image in images:
    ...     queue.start_async({"x": image}, userdata=name)  # waits while all requests are busy
    >>> queue.wait_all()
    """

    def __init__(self, model: CompiledModel, jobs: int = 0) -> None:
        if jobs < 0:
            raise InputError(f"a queue of {jobs} requests", hint="0 asks the model how many it needs")
        count = jobs or model.optimal_requests
        self._requests: list[InferRequest] = [model.create_infer_request() for _ in range(count)]
        self._idle: queue.SimpleQueue[InferRequest] = queue.SimpleQueue()
        self._errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self._model, self._streams = model, model.streams
        self._callback: Callback | None = None
        asked = jobs or model.best_requests or model.settings.performance_hint_num_requests
        #: requests that may be made still
        self._spare = 0 if asked or model.streams.count == 1 else count
        self._waiting, self._growing = threading.Lock(), threading.Lock()
        for request in self._requests:
            self._idle.put(request)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[InferRequest]:
        return iter(self._requests)

    def set_callback(self, callback: Callback | None) -> None:
        """As `InferRequest.set_callback`, for all of them; wait for all before you change it."""
        self._callback = callback
        for request in self._requests:
            request.set_callback(callback)

    def is_ready(self) -> bool:
        """`start_async` would not wait."""
        return not self._idle.empty()

    def wait_ready(self) -> None:
        """Wait until `start_async` would not, unless another thread starts inferences, too."""
        self._idle.put(self._free())

    def start_async(self, inputs: Inputs, userdata: Any = None) -> None:
        """Start an inference on a request that is free; waits while there is none. Errors: see `wait_all`."""
        request = self._another() if self._spare and self._idle.empty() else None
        request = self._free() if request is None else request
        try:
            request.start_async(inputs, userdata)
            request.when_over(self._over)
        except BaseException:
            self._idle.put(request)
            raise

    def _another(self) -> InferRequest | None:
        """One request more, where that pays."""
        with self._growing:
            if not self._spare or not self._streams.fall_asleep:
                return None
            self._spare -= 1
            request = self._model.create_infer_request()
            request.set_callback(self._callback)
            self._requests.append(request)
            return request

    def _free(self) -> InferRequest:
        """The next request that is free."""
        while self._idle.empty() and self._streams.help():
            pass
        return self._idle.get()

    def _over(self, request: InferRequest, error: BaseException | None) -> None:
        if error is not None:
            self._errors.put(error)
        self._idle.put(request)

    def wait_all(self) -> None:
        """Wait until nothing runs. The first error since the last call is raised; the others ran on all the same."""
        taken: list[InferRequest] = []
        with self._waiting:
            try:
                while len(taken) < len(self._requests):
                    taken.append(self._free())
            finally:  # Ctrl-C may come
                for request in taken:
                    self._idle.put(request)
        errors = []
        while not self._errors.empty():
            errors.append(self._errors.get())
        if errors:
            raise errors[0]
