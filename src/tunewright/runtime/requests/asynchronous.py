"""Asynchronous inferences: requests that can be started, and a queue of requests.

The streams of the model run them (`streams`), or a thread that waits for them.
"""

from __future__ import annotations

import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tunewright.errors import InputError

from .inference import Callback, Inference, Inputs
from .streams import Streams

if TYPE_CHECKING:
    from .compiled import CompiledModel, InferRequest


class Startable(ABC):
    """A request that can be started and waited for. It holds one inference at a time, and the last results."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._inference: Inference | None = None
        self._callback: Callback | None = None
        #: the ``userdata`` of `start_async`, for the callback
        self.userdata: Any = None
        #: outputs of the last inference by name
        self.results: dict[str, Any] = {}

    @abstractmethod
    def run(self, inputs: Inputs) -> dict[str, Any]:
        """Run an inference in the calling thread."""

    def start_async(self, inputs: Inputs = None, userdata: Any = None) -> None:
        """Start an inference on one of the model's streams as soon as one is free; see `wait`.

        The inference reads its inputs while it runs: do not change them before it is over.

        >>> request.start_async({"x": image})
        >>> request.wait()
        >>> request.results["y"]
        """
        self.check_idle()
        self.userdata, self.results = userdata, {}
        self._inference = started = Inference(self, inputs)
        try:
            self._streams.submit(started)
        except BaseException:  # the system cannot start a thread
            self._inference = None
            raise

    def check_idle(self) -> None:
        """Raise InputError if an inference is running."""
        if self._inference is not None and not self._inference.done:
            raise InputError("the request is running", hint="wait for it, or use another one: create_infer_request()")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the started inference and its callback are over. False: ``timeout`` seconds were not enough.

        Raises the error of the inference or of its callback, and RequestCancelled if it was cancelled.
        """
        started = self._inference
        if started is None:
            raise InputError("no inference was started", hint="start_async begins an inference")
        if not started.done and started.process != os.getpid():
            raise InputError("the inference was started before this process was forked, and runs in the parent",
                             hint="make requests after the fork")  # fmt: skip
        if timeout is None:
            self._streams.help(started)
        if not started.wait(timeout):
            return False
        if started.error is not None:
            raise started.error
        return True

    def when_over(self, call: Callable[[Any, BaseException | None], object]) -> None:
        """Call ``call`` with the request and its error, if any, once the started inference is over.

        A cancelled inference has no error.
        """
        assert self._inference is not None
        self._inference.then(call, self)

    def set_callback(self, callback: Callback | None) -> None:
        """Call ``callback(request, userdata)`` after each started inference, on the thread of the stream.

        The results are in ``request.results``. It is not called after a failed or cancelled inference: see `wait`.
        """
        self._callback = callback

    def cancel(self) -> None:
        """Cancel the started inference. If it already runs, it ends first and its results are dropped."""
        if self._inference is not None:
            self._inference.cancel()


class AsyncInferQueue:
    """A queue of requests of one model, which keeps every stream busy with as few requests as possible.

    Without ``jobs`` each stream has two requests, so that one waits when the other ends. The model or the application
    may ask for another number.

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
            why = "the model has states, and a queue does not know which request continues which sequence"
            raise InputError(why, hint="make a request for each sequence and start it: create_infer_request()")
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
        """Set the callback of all requests, as `InferRequest.set_callback`. Call `wait_all` before changing it."""
        for request in self._requests:
            request.set_callback(callback)

    def is_ready(self) -> bool:
        """Whether `start_async` would start an inference without waiting."""
        return not self._idle.empty()

    def wait_ready(self) -> None:
        """Wait until a request is free. Another thread that starts inferences may take it."""
        self._idle.put(self._free())

    def start_async(self, inputs: Inputs, userdata: Any = None) -> None:
        """Start an inference on a free request; wait while all are busy. `wait_all` raises its error."""
        request = self._free()
        try:
            request.start_async(inputs, userdata)
            request.when_over(self._over)
        except BaseException:
            self._idle.put(request)
            raise

    def _free(self) -> InferRequest:
        """Take the next free request; wait while all are busy."""
        while self._idle.empty():
            ended = self._streams.help()
            if ended is None:
                break
            if isinstance(ended, Inference) and isinstance(ended.error, KeyboardInterrupt | SystemExit):
                raise ended.error  # this thread raised it
        return self._idle.get()

    def _over(self, request: InferRequest, error: BaseException | None) -> None:
        if error is not None:
            self._errors.put(error)
        self._idle.put(request)

    def wait_all(self) -> None:
        """Wait until no inference runs. Raise the first error since the last call, after all others have run."""
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
