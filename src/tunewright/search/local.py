"""Iterated neighbourhood search: look around the best config, then around the next best."""

from __future__ import annotations

from .base import Strategy
from .space import Code

#: number of random configs at the start, and whenever the neighbourhoods of the leaders are exhausted
START = 10
#: number of the best configs whose neighbourhoods are searched
LEADERS = 6


class LocalSearch(Strategy):
    """Moves to a better neighbour as soon as it finds one, and from an exhausted neighbourhood to the next best one.

    It is the strongest model-free strategy in the first few dozen evaluations, and as cheap as random search.
    """

    name = "local"

    def propose(self) -> Code | None:
        if len(self.costs) < START:
            return self.safe_start()
        for leader in self.ranked()[:LEADERS]:
            if near := self.fresh_neighbours(leader):
                return self.safest(near)
        return self.safe_start()


STRATEGIES = (LocalSearch,)
