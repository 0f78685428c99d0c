"""One started inference. The first thread that calls it runs it, and waiting threads learn when it ends."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tunewright.errors import RequestCancelled

if TYPE_CHECKING:
    from .asynchronous import Startable

LOG = logging.getLogger("tunewright")

Inputs = Mapping[str, Any] | Sequence[Any] | Any
#: called after an inference with the request and the ``userdata`` of `start_async`
Callback = Callable[[Any, Any], object]


class Inference:
    """An inference of a request, with its inputs."""

    __slots__ = ("_after", "_begun", "_guard", "_inputs", "_over", "_request", "cancelled", "done", "error", "process")

    def __init__(self, request: Startable, inputs: Inputs) -> None:
        self._request: Startable | None = request
        self._inputs = inputs
        #: the process that started it
        self.process = os.getpid()
        #: guards the attributes below
        self._guard = threading.Lock()
        self._begun = self.done = self.cancelled = False
        self.error: BaseException | None = None
        self._after: Callback | None = None
        #: Held until the inference is over. Cheaper than an Event, and mostly no thread waits.
        self._over = threading.Lock()
        self._over.acquire()

    def __call__(self) -> None:
        """Run the inference and its callback, unless it has begun or was cancelled. Errors go to `error`."""
        with self._guard:
            if self._begun:
                return
            self._begun = True
        request = self._request
        assert request is not None
        error: BaseException | None = None
        try:
            request.run(self._inputs)
            if self.cancelled:
                request.results, error = {}, _cancelled()
            elif request._callback is not None:
                request._callback(request, request.userdata)
        except BaseException as raised:  # `wait` raises it again in the waiting thread
            error = raised
        self._finish(error)

    def cancel(self) -> None:
        """Do not begin the inference. If it has begun, drop its results."""
        with self._guard:
            if self.done:
                return
            self.cancelled = True
            if self._begun:
                return
            self._begun = True
        self._finish(_cancelled())

    def _finish(self, error: BaseException | None) -> None:
        with self._guard:
            self.error, self.done = error, True
        # A stream may keep a cancelled inference for a while; its request and inputs must not stay alive with it.
        request, self._request, self._inputs = self._request, None, None
        self._over.release()
        if self._after is not None:
            self._tell(self._after, request)

    def then(self, call: Callback, request: Startable) -> None:
        """Call ``call`` with the request and the error, if any, once the inference is over; now if it is."""
        with self._guard:
            if not self.done:
                assert self._after is None, "only one function is called after an inference"
                self._after = call
                return
        self._tell(call, request)

    def _tell(self, call: Callback, request: Startable | None) -> None:
        told = None if self.cancelled and isinstance(self.error, RequestCancelled) else self.error
        try:
            call(request, told)
        except Exception:  # no caller waits for it here
            LOG.exception("a function that is called after an inference failed")

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end, at most ``timeout`` seconds; whether it is over. Several threads may wait."""
        if not self.done:
            seconds = -1.0 if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX)
            if not self._over.acquire(timeout=seconds):
                return self.done
            self._over.release()
        return True


def _cancelled() -> RequestCancelled:
    return RequestCancelled("the request was cancelled")
