"""Time of a tuning session: budget, time per phase, requests to stop, and listeners for progress."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..measure.base import Candidate

#: Listeners for the progress of tuning during loads, the newest last.
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
    """Return the current listener, or None."""
    return _LISTENERS[-1] if _LISTENERS else None


@dataclass(frozen=True)
class Progress:
    """Progress of a session."""

    phase: str  # search, race, confirm
    attempted: int
    failed: int
    #: the fastest candidate so far with its seconds per execution, and those of the default
    best: Candidate | None
    best_seconds: float
    default_seconds: float
    #: seconds used, and seconds of the whole session
    elapsed: float
    budget: float


class Watch:
    """Time since the start against a budget. ``stop`` returns whether to end at once."""

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
        """Count time from now on for a phase; an empty name ends counting."""
        now = self._clock()
        if self._phase:
            self.spent[self._phase] = self.spent.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now

    def left(self, share: float = 1.0) -> float:
        """Return the seconds until a share of the budget is used; 0 after a stop."""
        self.stopped = self.stopped or (self._stop is not None and self._stop())
        return 0.0 if self.stopped else max(0.0, share * self.budget - self.elapsed)
