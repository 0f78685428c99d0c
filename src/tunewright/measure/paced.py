"""Measure at a limited pace: a `Measurer` that works for a bounded share of the time and rests in between.

Everything that costs machine time goes through `Pace.work`: compiling, checking and timing. Rests and waits for
requests do not count as search time, because `Pace.clock` stands still meanwhile. A search of five seconds therefore
works for five seconds, however long it lasts.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from ..knowledge.claims import MachineTurn
from ..solvers.base import Problem
from .base import Attempt, Candidate, Measurer, Race, Regime
from .request_activity import ActivityGate

#: Seconds of work that may accumulate while there is nothing to do.
SAVED = 0.5
#: Maximum seconds of a rest before requests to pause or stop are checked again.
REST = 0.25

T = TypeVar("T")


class Pace:
    """Limits the share of time spent on work. ``duty``: that share, up to 1."""

    def __init__(
        self,
        gate: ActivityGate,
        duty: float,
        turn: MachineTurn | None = None,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._gate, self._duty, self._turn, self._now, self._sleep = gate, duty, turn, now, sleep
        #: called before each piece of work, and while waiting for it
        self.between: Callable[[], object] = lambda: None
        #: seconds without work
        self._idle = 0.0
        self._start = now()
        #: seconds of work available now; below 0 it must rest
        self._tokens, self._at, self._worked = SAVED, self._start, 0.0

    def clock(self) -> float:
        """Seconds of work so far."""
        return self._now() - self._start - self._idle

    def work(self, job: Callable[[], T]) -> T:
        """Run a job as soon as it is allowed, and return its result."""
        self.rest()
        waited = self._gate.waited
        try:
            return job()
        finally:
            if self._turn is not None:
                self._turn.give_back()
            self._idle += self._gate.waited - waited

    def forgive(self, seconds: float) -> None:
        """Exclude these seconds from the work: a caller waited for messages."""
        self._idle += seconds

    def rest(self) -> None:
        """Sleep until work is allowed."""
        while (seconds := self._due()) > 0:
            begin = self._now()
            self.between()
            self._sleep(min(seconds, REST))
            self._idle += self._now() - begin
        self.between()

    def _due(self) -> float:
        """Return the seconds to rest; 0 if work is allowed."""
        now, worked = self._now(), self.clock()
        self._tokens += (now - self._at) * self._duty - (worked - self._worked)
        self._at, self._worked = now, worked
        self._tokens = min(self._tokens, SAVED)
        if self._gate.is_paused:
            return REST
        if self._tokens <= 0 and self._duty < 1:
            return max(-self._tokens / self._duty, 1e-3)
        return 0.01 if self._turn is not None and not self._turn.take() else 0.0


class Paced(Measurer):
    """Runs another measurer at a limited pace."""

    def __init__(self, inner: Measurer, pace: Pace) -> None:
        self.inner, self.pace = inner, pace

    def pose(self, problem: Problem, seed: int = 0, regime: str = "cold") -> str | None:
        return self.pace.work(lambda: self.inner.pose(problem, seed, regime))

    def expect(self, seconds: float) -> None:
        self.pace.work(lambda: self.inner.expect(seconds))

    def attempt(self, candidate: Candidate, limit: float = float("inf")) -> Attempt:
        def work() -> Attempt:
            self.inner.prepare([candidate])
            self.inner.ready(candidate, math.inf)
            return self.inner.attempt(candidate, limit)

        return self.pace.work(work)

    def race(self, candidates: Sequence[Candidate], rounds: int) -> Race:
        return self.pace.work(lambda: self.inner.race(candidates, rounds))

    def regime(self) -> Regime:
        return self.inner.regime()

    def alike(self, candidate: Candidate, other: Candidate) -> None:
        self.inner.alike(candidate, other)

    def programs(self, candidate: Candidate) -> Mapping[str, Mapping[str, bytes]]:
        return self.inner.programs(candidate)

    def close(self) -> None:
        self.inner.close()


def give_way(priority: str) -> None:
    """Lower the priority of this process and of those that it starts. ``priority``: IDLE, LOW or NORMAL."""
    if priority == "NORMAL":
        return
    with contextlib.suppress(OSError):
        os.nice(19)
    if priority == "IDLE" and hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(OSError):  # not available everywhere, and not allowed from every policy
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
