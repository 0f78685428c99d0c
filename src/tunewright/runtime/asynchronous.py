"""Inferences that run while their caller goes on: requests that are started, and a queue of them.

What runs them are a model's streams (`streams`), or who waits for them.
"""

from __future__ import annotations

import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .inference import Callback, Inference, Inputs
from .streams import Streams

if TYPE_CHECKING:
    from .compiled import CompiledModel, InferRequest


class Startable(ABC):
    """A request that can be started and waited for. It holds one inference at a time, and the results of the last."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._inference: Inference | None = None
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
        self._inference = started = Inference(self, inputs)
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
        if not started.done and started.process != os.getpid():
            raise InputError("it was started before this process was forked, and runs there",
                             hint="make requests behind the fork")  # fmt: skip
        if timeout is None:
            self._streams.help(started)
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

    Without ``jobs`` there are two for each stream, so that one is waiting when the other ends, or as many as the model
    or the application wants.

    >>> queue = tunewright.AsyncInferQueue(compiled)
    >>> queue.set_callback(lambda request, name: save(name, request.results["y"]))
    >>> for name, image in images:
    ...     queue.start_async({"x": image}, userdata=name)  # waits while all requests are busy
    >>> queue.wait_all()
    """

    def __init__(self, model: CompiledModel, jobs: int = 0) -> None:
        if jobs < 0:
            raise InputError(f"a queue of {jobs} requests", hint="0 asks the model how many it needs")
        if model.states:
            why = "the model has states, and nobody knows which request of a queue goes on with which"
            raise InputError(why, hint="make a request for each sequence, and start that: create_infer_request()")
        asked = jobs or model.best_requests or model.settings.performance_hint_num_requests
        count = jobs or model.optimal_requests * (1 if asked or model.streams.count == 1 else 2)
        self._requests: list[InferRequest] = [model.create_infer_request() for _ in range(count)]
        self._idle: queue.SimpleQueue[InferRequest] = queue.SimpleQueue()
        self._errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self._streams, self._waiting = model.streams, threading.Lock()
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
        self._idle.put(self._free())

    def start_async(self, inputs: Inputs, userdata: Any = None) -> None:
        """Start an inference on a request that is free; waits while there is none. Errors: see `wait_all`."""
        request = self._free()
        try:
            request.start_async(inputs, userdata)
            request.when_over(self._over)
        except BaseException:
            self._idle.put(request)
            raise

    def _free(self) -> InferRequest:
        """The next request that is free."""
        while self._idle.empty():
            ended = self._streams.help()
            if ended is None:
                break
            if isinstance(ended, Inference) and isinstance(ended.error, KeyboardInterrupt | SystemExit):
                raise ended.error  # it came to this thread
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
