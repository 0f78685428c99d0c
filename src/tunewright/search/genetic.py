"""A genetic algorithm (GA): crossover and mutation of good configs."""

from __future__ import annotations

from .base import Strategy
from .space import Code

#: number of random configs at the start
START = 14
#: This number of the best configs are parents.
PARENTS = 6
#: Mean number of mutated parameters of a child, and the share of mutations that jump to any value.
MUTATIONS, JUMPS = 0.7, 0.3
#: attempts at a valid child that was not asked before
ATTEMPTS = 60


class Genetic(Strategy):
    """Steady-state GA without generations, because a budget of a hundred trials is too small for them.

    Every trial may become a parent at once. A child takes each parameter from one of two parents. Then some parameters
    mutate, mostly to a near value in one of the senses of `Space.kin`, sometimes to any value. Mutation grows with each
    attempt that gives an invalid or known config.
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
        # The better of two draws, twice: good parents are chosen more often, but none dominates.
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
