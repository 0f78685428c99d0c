"""A portfolio of strategies. The surrogate model leads; when it stalls, other strategies propose configs too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from .base import Strategy, Trial
from .genetic import Genetic
from .local import LocalSearch
from .reinforce import Reinforce
from .space import Code, Scalar, Space
from .surrogate import Surrogate

#: trials without an improvement after which the leader has to share
STALL = 32
#: Credit: the initial credit of every strategy, the leader's extra credit, and the decay per trial.
CREDIT, LEAD, FADE = 0.25, 1.0, 0.95


class AutoSearch(Strategy):
    """The surrogate, with the other strategies in reserve.

    A fixed share for the others costs more than it gains while the model improves (measured, docs/search.md). But a
    model can be wrong about a space. After a stall, each next config comes from a strategy that is drawn by its credit.
    A strategy earns credit with the improvements that it finds. All strategies learn from every trial.
    """

    name = "auto"

    def __init__(self, space: Space, rng: np.random.Generator, seeds: Iterable[Mapping[str, Scalar]] = ()) -> None:
        seeds = list(seeds)
        super().__init__(space, rng, seeds)
        kinds: tuple[type[Strategy], ...] = (Surrogate, LocalSearch, Genetic, Reinforce)
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
        member.seen = self.seen  # shared, so that no member proposes what another one asked
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


STRATEGIES = (AutoSearch,)
