"""One inference that was started: run by a stream or by who waits for it, alone or together with others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..devices.base import Queue
from ..errors import RequestCancelled

if TYPE_CHECKING:
    from .asynchronous import Startable
    from .streams import Streams

LOG = logging.getLogger("tunewright")

Inputs = Mapping[str, Any] | Sequence[Any] | Any
#: what is called when an inference is over: with the request and what was given to `start_async`
Callback = Callable[[Any, Any], object]

#: how far an inference is: not begun; begun, with a launch that is held back; which is over; its end has begun
WAITS, RUNS, RAN, ENDS = range(4)


class Inference:
    """One inference that was started: how far it is, and who is to be told."""

    __slots__ = (
        "_after", "_guard", "_inputs", "_over", "_request", "_stage", "cancelled", "done", "error", "joins", "process",
        "streams",
    )  # fmt: skip

    def __init__(self, request: Startable, inputs: Inputs, process: int) -> None:
        self._request: Startable | None = request
        self._inputs = inputs
        #: whose threads will run it, and in which process; None: others than those of a model
        self.streams: Streams | None = None
        self.process = process
        #: its last launch can be one with those of others
        self.joins = request.can_prepare
        #: of what follows
        self._guard = threading.Lock()
        self._stage = WAITS
        self.done = self.cancelled = False
        self.error: BaseException | None = None
        self._after: Callback | None = None
        #: held until it is over; cheaper than an Event, and most have nobody waiting
        self._over = threading.Lock()
        self._over.acquire()

    def __call__(self) -> None:
        """Run it, unless it was cancelled."""
        if not self._enter(WAITS, ENDS):
            return
        streams = self.streams
        before = time.thread_time() if streams is not None and streams.is_sample() else None
        begin = time.perf_counter()
        assert self._request is not None
        error = self._ended(self._request.run)
        if streams is not None:
            streams.took(time.perf_counter() - begin, None if before is None else time.thread_time() - before)
        self._finish(error)

    def begin(self) -> Queue | None:
        """Run it up to its last launch, which the queue holds back. None: it is over, or was cancelled."""
        if not self._enter(WAITS, RUNS):
            return None
        assert self._request is not None
        try:
            queue = self._request.prepare(self._inputs)
        except Exception as error:  # it is raised where somebody waits for it
            self.fail(error)
            return None
        if queue is None and self._enter(RUNS, ENDS):
            self._finish(self._ended(self._request.run))
        return queue

    def ran(self) -> bool:
        """The last launch of what was begun is over: whoever calls `end` first ends it. False: there is no need to."""
        return self._enter(RUNS, RAN)

    def end(self) -> bool:
        """Behind its last launch. False: another thread does it, or it has not come to that yet."""
        if not self._enter(RAN, ENDS):
            return False
        assert self._request is not None
        self._finish(self._ended(self._request.complete))
        return True

    def fail(self, error: BaseException) -> None:
        """It is given up, if it has not ended."""
        with self._guard:
            if self._stage == ENDS:
                return
            self._stage = ENDS
        self._finish(error)

    def _enter(self, before: int, then: int) -> bool:
        """The next stage, unless it is in another one than ``before``."""
        with self._guard:
            if self._stage != before:
                return False
            self._stage = then
            return True

    def _ended(self, rest: Callable[..., object]) -> BaseException | None:
        """With what is left to do, and its callback; its error."""
        request = self._request
        assert request is not None
        try:
            rest(self._inputs)
            if self.cancelled:
                request.results = {}
                return RequestCancelled("the request was cancelled")
            if request._callback is not None:
                request._callback(request, request.userdata)
        except BaseException as error:  # it is raised where somebody waits for it
            return error
        return None

    def cancel(self) -> None:
        with self._guard:
            if self.done:
                return
            self.cancelled = True
            if self._stage != WAITS:
                return
            self._stage = ENDS
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
