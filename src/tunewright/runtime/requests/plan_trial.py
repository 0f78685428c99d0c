"""A trial of two plans for the same inputs: the plan that serves now, and one that may replace it. Requests take turns.

The latencies of real requests decide. Turns come in pairs, and a random draw decides which plan is first in a pair. So
drift and bursts of load affect both plans alike (see `measure.statistics`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..plans.plan import Plan
from ..plans.program import ArraySignature, like

#: the most pairs of turns in a trial, with spare ones for turns that fail
MOST_PAIRS = 4096


@dataclass(eq=False)
class PlanTrial:
    """A trial of one plan against another. Safe to use from several threads, without a lock."""

    old: Plan
    new: Plan
    seed: int = 0
    #: shapes and types of the inputs on trial, if the old plan serves others as well; None: all inputs
    looks: ArraySignature | None = None
    #: the number and the seconds of each turn; `pairs` separates them by plan
    told: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self._first = [rng.getrandbits(1) for _ in range(MOST_PAIRS)]
        self._numbers = itertools.count()

    def concerns(self, plan: Plan, values: Sequence[Any]) -> bool:
        """Whether the trial includes inferences of this plan with these values."""
        return plan is self.old and (self.looks is None or like(values, self.looks))

    def turn(self) -> tuple[int, Plan]:
        """Begin a turn. Return its number and the plan to run."""
        number = next(self._numbers)
        return number, self.new if self.is_new(number) else self.old

    def is_new(self, number: int) -> bool:
        """Whether the new plan runs in a turn."""
        return bool((number & 1) ^ self._first[(number >> 1) % MOST_PAIRS])

    def tell(self, number: int, seconds: float) -> None:
        """Record how long a turn took."""
        self.told.append((number, seconds))

    def pairs(self) -> tuple[list[float], list[float]]:
        """Return the seconds of the old and of the new plan in complete pairs, in order."""
        seconds = dict(list(self.told))
        whole = [n for n in range(0, max(seconds, default=-1), 2) if n in seconds and n + 1 in seconds]
        pairs = [(n, n + 1) if self.is_new(n + 1) else (n + 1, n) for n in whole]
        return [seconds[old] for old, _ in pairs], [seconds[new] for _, new in pairs]
