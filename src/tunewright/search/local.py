"""Iterated neighbourhood search: look around the best config, then around the next best."""

from __future__ import annotations

from .base import Strategy
from .space import Code

#: Random configs to begin with, and again each time that the neighbourhoods of the leaders are exhausted.
START = 10
#: How many of the best configs have their neighbourhoods searched.
LEADERS = 6


class Local(Strategy):
    """Moves to a better neighbour as soon as it finds one; exhausted neighbourhoods give way to the next best config's.

    The strongest strategy without a model at the first few dozen evaluations, and as cheap as random search.
    """

    name = "local"

    def propose(self) -> Code | None:
        if len(self.costs) < START:
            return self.safe_start()
        for leader in self.ranked()[:LEADERS]:
            if near := self.fresh_neighbours(leader):
                return self.safest(near)
        return self.safe_start()


STRATEGIES = (Local,)
