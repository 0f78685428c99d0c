"""Two plans for the same inputs, which requests take in turns: what serves now, and one that may replace it.

The latencies of real requests decide. Turns come in pairs, and which plan is first in a pair is drawn at random, so
drift and bursts of load meet both alike (see `measure.statistics`).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..plans.plan import Plan
from ..plans.program import ArraySignature, like

#: pairs of turns in a trial at most, with some to spare for turns that fail
MOST_PAIRS = 4096


@dataclass(eq=False)
class PlanTrial:
    """One plan against another. Safe to use from several threads, without a lock."""

    old: Plan
    new: Plan
    seed: int = 0
    #: shapes and types of the inputs, where the old plan serves others as well
    looks: ArraySignature | None = None
    #: number of a turn, and its seconds; taken apart by `pairs`
    told: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self._first = [rng.getrandbits(1) for _ in range(MOST_PAIRS)]
        self._numbers = itertools.count()

    def concerns(self, plan: Plan, values: Sequence[Any]) -> bool:
        """An inference that this plan serves is one of those on trial."""
        return plan is self.old and (self.looks is None or like(values, self.looks))

    def turn(self) -> tuple[int, Plan]:
        """The next turn's number, and the plan to run."""
        number = next(self._numbers)
        return number, self.new if self.is_new(number) else self.old

    def is_new(self, number: int) -> bool:
        """A turn is one of the new plan's."""
        return bool((number & 1) ^ self._first[(number >> 1) % MOST_PAIRS])

    def tell(self, number: int, seconds: float) -> None:
        """How long a turn took."""
        self.told.append((number, seconds))

    def pairs(self) -> tuple[list[float], list[float]]:
        """Seconds of the old and the new plan in pairs that are complete, in their order."""
        seconds = dict(list(self.told))
        whole = [n for n in range(0, max(seconds, default=-1), 2) if n in seconds and n + 1 in seconds]
        pairs = [(n, n + 1) if self.is_new(n + 1) else (n + 1, n) for n in whole]
        return [seconds[old] for old, _ in pairs], [seconds[new] for _, new in pairs]
