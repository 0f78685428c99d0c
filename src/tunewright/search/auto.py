"""A portfolio: the model leads, and where it stops finding improvements, evaluations go to those that do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from .base import Strategy, Trial
from .genetic import Genetic
from .local import Local
from .reinforce import Reinforce
from .space import Code, Scalar, Space
from .surrogate import Surrogate

#: Trials without an improvement after which the leader has to share.
STALL = 32
#: Credit: what every strategy starts with, what the leader starts with besides, and how fast the past fades.
CREDIT, LEAD, FADE = 0.25, 1.0, 0.95


class Auto(Strategy):
    """The surrogate, with the others in reserve.

    Measured (docs/search.md): a fixed share for the others costs more than it brings, as long as the model improves.
    But a model can be wrong about a space. After a stall each next config comes from a strategy drawn by its credit,
    the improvements that it found; all of them learn from every trial.
    """

    name = "auto"

    def __init__(self, space: Space, rng: np.random.Generator, seeds: Iterable[Mapping[str, Scalar]] = ()) -> None:
        seeds = list(seeds)
        super().__init__(space, rng, seeds)
        kinds: tuple[type[Strategy], ...] = (Surrogate, Local, Genetic, Reinforce)
        self._members = [kind(space, rng, seeds) for kind in kinds]
        self._credit = np.full(len(kinds), CREDIT)
        self._credit[0] += LEAD
        self._author: dict[Code, int] = {}
        self._stalled = 0

    def propose(self) -> Code | None:
        author = 0
        if self._stalled >= STALL:
            author = int(self.rng.choice(len(self._members), p=self._credit / self._credit.sum()))
        member = self._members[author]
        member.seen = self.seen  # shared: no member proposes what another one asked
        code = member.propose()
        if code is not None:
            self._author[code] = author
        return code

    def tell(self, trials: Iterable[Trial]) -> None:
        trials = list(trials)
        super().tell(trials)
        for member in self._members:
            member.tell(trials)

    def learn(self, code: Code, cost: float) -> None:
        improved = code == self.best
        self._stalled = 0 if improved else self._stalled + 1
        if (author := self._author.pop(code, None)) is not None:
            self._credit[author] = CREDIT + FADE * (self._credit[author] - CREDIT) + improved


STRATEGIES = (Auto,)
