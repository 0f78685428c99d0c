"""The time of a tuning session: its budget, where it went, whether it should stop, and who listens."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .measure import Candidate

#: who shows how far the tuning of a load is, the newest last
_LISTENERS: list[Callable[[str], None]] = []


@contextlib.contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Report the progress of tuning during loads to a listener: a line at each step, an empty one at the end."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


def listener() -> Callable[[str], None] | None:
    """Who is told now."""
    return _LISTENERS[-1] if _LISTENERS else None


@dataclass(frozen=True)
class Progress:
    """How far a session is."""

    phase: str  # search, race, confirm
    attempted: int
    failed: int
    #: the fastest so far, and its seconds per execution; those of the default
    best: Candidate | None
    best_seconds: float
    default_seconds: float
    #: seconds used, and those that the session has
    elapsed: float
    budget: float


class Watch:
    """Time since the start against a budget. ``stop`` asks whether to end at once."""

    def __init__(
        self, budget: float, stop: Callable[[], bool] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.budget, self._stop, self._clock = budget, stop, clock
        self._start = clock()
        self._phase, self._since = "", self._start
        #: phase -> seconds
        self.spent: dict[str, float] = {}
        self.stopped = False

    @property
    def elapsed(self) -> float:
        return self._clock() - self._start

    def enter(self, phase: str) -> None:
        """From now on time is spent on a phase; an empty one ends the account."""
        now = self._clock()
        if self._phase:
            self.spent[self._phase] = self.spent.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def left(self, share: float = 1.0) -> float:
        """Seconds until a share of the budget is used; none after a stop."""
        self.stopped = self.stopped or (self._stop is not None and self._stop())
        return 0.0 if self.stopped else max(0.0, share * self.budget - self.elapsed)
