"""One inference that was started: whoever calls it first runs it, and whoever waits for it is told."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import RequestCancelled

if TYPE_CHECKING:
    from .asynchronous import Startable

LOG = logging.getLogger("tunewright")

Inputs = Mapping[str, Any] | Sequence[Any] | Any
#: what is called when an inference is over: with the request and what was given to `start_async`
Callback = Callable[[Any, Any], object]


class Inference:
    """An inference of a request, with its inputs."""

    __slots__ = ("_after", "_begun", "_guard", "_inputs", "_over", "_request", "cancelled", "done", "error", "process")

    def __init__(self, request: Startable, inputs: Inputs) -> None:
        self._request: Startable | None = request
        self._inputs = inputs
        #: in which it was started
        self.process = os.getpid()
        #: of what follows
        self._guard = threading.Lock()
        self._begun = self.done = self.cancelled = False
        self.error: BaseException | None = None
        self._after: Callback | None = None
        #: held until it is over; cheaper than an Event, and most have nobody waiting
        self._over = threading.Lock()
        self._over.acquire()

    def __call__(self) -> None:
        """Run it with its callback, unless that was begun or it was cancelled. Raises nothing: see `error`."""
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
        except BaseException as raised:  # it is raised again where somebody waits for it
            error = raised
        self._finish(error)

    def cancel(self) -> None:
        """Do not begin it; drop its results if it was begun already."""
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
        # A stream may hold this for a while, if it was cancelled: not the request, and what it was given.
        request, self._request, self._inputs = self._request, None, None
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


def _cancelled() -> RequestCancelled:
    return RequestCancelled("the request was cancelled")
