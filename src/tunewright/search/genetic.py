"""A genetic algorithm (GA): children of good configs, made by crossover and mutation."""

from __future__ import annotations

from .base import Strategy
from .space import Code

#: Random configs to begin with.
START = 14
#: This number of the best configs are parents.
PARENTS = 6
#: How many parameters of a child mutate on average, and the share of these that jump to any value.
MUTATIONS, JUMPS = 0.7, 0.3
#: Attempts at a valid child that was not asked before.
ATTEMPTS = 60


class Genetic(Strategy):
    """Steady state: every trial may become a parent at once, as a budget of a hundred leaves no time for generations.

    A child takes each parameter from one of two parents, then some mutate: mostly to a value that is near in one of the
    senses that the space knows, at times to any. The more attempts end in configs that are invalid or were asked
    before, the more it mutates.
    """

    name = "genetic"

    def propose(self) -> Code | None:
        parents = self.ranked()[:PARENTS]
        if len(self.costs) < START or len(parents) < 2:
            return self.safe_start()
        children: dict[Code, None] = {}
        for attempt in range(ATTEMPTS):
            child = self._child(parents, mutations=MUTATIONS + attempt / 20)
            if child not in self.seen and self.space.valid(child):
                children[child] = None
                if len(children) == self.choices:
                    break
        return self.safest(list(children)) if children else None

    def _child(self, parents: list[Code], mutations: float) -> Code:
        rng, sizes = self.rng, self.space.sizes
        # the better of two draws, twice: good parents breed more often, but no one rules
        one, other = (parents[min(rng.integers(len(parents), size=2))] for _ in range(2))
        genes = [a if coin < 0.5 else b for a, b, coin in zip(one, other, rng.random(len(sizes)), strict=True)]
        axes = [axis for axis, size in enumerate(sizes) if size > 1]
        chance = mutations / max(1, len(axes))
        for axis, luck in zip(axes, rng.random(len(axes)).tolist(), strict=True):
            if luck < chance * JUMPS:
                genes[axis] = int(rng.integers(sizes[axis]))
            elif luck < chance:
                senses = self.space.kin[axis][genes[axis]]
                near = senses[rng.integers(len(senses))]
                genes[axis] = near[rng.integers(len(near))]
        return tuple(genes)


STRATEGIES = (Genetic,)
