"""Inferences that run while their caller goes on: started requests, a model's streams, and a queue of requests.

A stream is a thread that runs one inference at a time; a model has as many as NUM_STREAMS says, each with its share of
the device. While kernels run, nobody holds Python's lock.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InputError, RequestCancelled

if TYPE_CHECKING:
    from .compiled import CompiledModel, InferRequest

LOG = logging.getLogger("tunewright")

Inputs = Mapping[str, Any] | Sequence[Any] | Any
#: what is called when an inference is over: with the request and what was given to `start_async`
Callback = Callable[[Any, Any], object]
#: what streams run; None ends the thread that gets it
_Tasks = queue.SimpleQueue[Callable[[], object] | None]

#: seconds that the end of the process waits for what was started
LAST_SECONDS = 10.0


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
        self._lock = threading.Lock()
        self._tasks: _Tasks = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        #: inferences that were submitted and are not over
        self.going = 0
        self.process = os.getpid()

    def submit(self, task: Callable[[], object]) -> None:
        """Run it on the next stream that is free. It raises nothing."""
        if len(self._threads) < self.count:
            self._grow()
        if isinstance(task, _Inference):
            task.streams = self
            with self._lock:
                self.going += 1
        self._tasks.put(task)

    def _grow(self) -> None:
        with self._lock:
            number = len(self._threads)
            if number == self.count:
                return
            if not number:
                weakref.finalize(self, _end, self._tasks, self.count).atexit = False
                # Behind everything that was imported before: what kernels need is still there when it waits for them.
                atexit.unregister(_at_exit)
                atexit.register(_at_exit)
            # Daemons, because the interpreter waits for others before it asks anybody to end.
            thread = threading.Thread(
                target=_serve, args=(self._tasks,), name=f"tunewright-stream-{number}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # the system has no more of them: those that are there will do
                if not number:
                    raise
                return
            self._threads.append(thread)

    def end(self, deadline: float) -> None:
        """Finish what was started, until ``deadline`` (`time.monotonic`); then there are no threads."""
        with self._lock:
            threads, tasks = self._threads, self._tasks
            self._threads, self._tasks = [], queue.SimpleQueue()
        _end(tasks, len(threads))
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


_STREAMS: weakref.WeakSet[Streams] = weakref.WeakSet()


def _serve(tasks: _Tasks) -> None:
    while True:
        task = tasks.get()
        if task is None:
            return
        task()
        del task  # it would keep its request, and so the model, until the next one comes


def _end(tasks: _Tasks, threads: int) -> None:
    for _ in range(threads):
        tasks.put(None)


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
        """Run it, on a stream's thread, which is busy until it is over."""
        if not self._run():  # somebody else does, or it was cancelled
            self.wait(None)

    def help(self) -> None:
        """Run it in this thread, which has nothing else to do, if a stream is free for it but has not begun it yet:
        waking one, and then being woken, takes longer than a small inference."""
        streams = self.streams
        if streams is not None and streams.going <= streams.count:
            self._run()

    def _run(self) -> bool:
        with self._guard:
            if self._begun:
                return False
            self._begun = True
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
        self._finish(error)
        return True

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
        streams, self.streams = self.streams, None
        if streams is not None:
            with streams._lock:
                streams.going -= 1
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
        if timeout is None:
            started.help()
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
        self._waiting = threading.Lock()
        for request in self._requests:
            self._idle.put(request)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[InferRequest]:
        return iter(self._requests)

    def set_callback(self, callback: Callback | None) -> None:
        """As `InferRequest.set_callback`, for all of them; wait for all before you change it."""
        for request in self._requests:
            request.set_callback(callback)

    def is_ready(self) -> bool:
        """`start_async` would not wait."""
        return not self._idle.empty()

    def wait_ready(self) -> None:
        """Wait until `start_async` would not, unless another thread starts inferences, too."""
        self._idle.put(self._idle.get())

    def start_async(self, inputs: Inputs, userdata: Any = None) -> None:
        """Start an inference on a request that is free; waits while there is none. Errors: see `wait_all`."""
        request = self._idle.get()
        try:
            request.start_async(inputs, userdata)
            request.when_over(self._over)
        except BaseException:
            self._idle.put(request)
            raise

    def _over(self, request: InferRequest, error: BaseException | None) -> None:
        if error is not None:
            self._errors.put(error)
        self._idle.put(request)

    def wait_all(self) -> None:
        """Wait until nothing runs. The first error since the last call is raised; the others ran on all the same."""
        with self._waiting:
            for request in [self._idle.get() for _ in self._requests]:
                self._idle.put(request)
        errors = []
        while not self._errors.empty():
            errors.append(self._errors.get())
        if errors:
            raise errors[0]
