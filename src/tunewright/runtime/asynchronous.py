"""Inferences that run while their caller goes on: started requests, a model's streams, and a queue of requests.

A stream is a thread that runs one inference at a time; a model has as many as NUM_STREAMS says, each with its share of
the device. While kernels run, nobody holds Python's lock.
"""

from __future__ import annotations

import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ..errors import InputError, RequestCancelled

if TYPE_CHECKING:
    from .compiled import CompiledModel, InferRequest

Inputs = Mapping[str, Any] | Sequence[Any] | Any
#: what is called when an inference is over: with the request and what was given to `start_async`
Callback = Callable[[Any, Any], object]


class Streams:
    """The threads that run what was started. The first inference makes them; they end with the model."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._process = 0

    def submit(self, task: Callable[[], dict[str, Any]]) -> Future[dict[str, Any]]:
        """Run it on the next stream that is free."""
        with self._lock:
            if self._threads is None or self._process != os.getpid():  # a fork has no threads
                self._threads, self._process = ThreadPoolExecutor(self.count, "tunewright-stream"), os.getpid()
            return self._threads.submit(task)


class Startable(ABC):
    """A request that can be started and waited for. It holds one inference at a time, and the results of the last."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._future: Future[dict[str, Any]] | None = None
        self._callback: Callback | None = None
        self._cancelled = False
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
        self.userdata, self.results, self._cancelled = userdata, {}, False
        self._future = self._streams.submit(lambda: self._started(inputs))

    def _started(self, inputs: Inputs) -> dict[str, Any]:
        found = self.run(inputs)
        if self._cancelled:
            self.results = {}
            raise CancelledError
        if self._callback is not None:
            self._callback(self, self.userdata)
        return found

    def check_idle(self) -> None:
        """InputError when it is running."""
        if self._future is not None and not self._future.done():
            raise InputError("the request is running", hint="wait for it, or use another one: create_infer_request()")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the inference that was started is over, its callback included. False: not within so many seconds.

        What went wrong in it (or in the callback) is raised here. RequestCancelled: it was cancelled.
        """
        if self._future is None:
            raise InputError("nothing was started", hint="start_async begins an inference")
        try:
            self._future.result(timeout)
        except CancelledError:
            raise RequestCancelled("the request was cancelled") from None
        except TimeoutError:
            if not self._future.done():
                return False
            raise  # the inference's own
        return True

    def when_over(self, call: Callable[[Any, BaseException | None], object]) -> None:
        """Call it with the request and its error, if any, once the inference that was started is over."""

        def over(future: Future[dict[str, Any]]) -> None:
            error = None if future.cancelled() else future.exception()
            call(self, None if isinstance(error, CancelledError) else error)

        assert self._future is not None
        self._future.add_done_callback(over)

    def set_callback(self, callback: Callback | None) -> None:
        """What is called with (request, userdata) when an inference that was started is over, on the stream's thread.

        The results are in ``request.results``. An inference that failed or was cancelled calls nothing: `wait` says so.
        """
        self._callback = callback

    def cancel(self) -> None:
        """Give up the inference that was started. One that runs already ends first, and its results are dropped."""
        if self._future is not None:
            self._cancelled = True
            self._future.cancel()


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
