"""Tries every config in order: for small spaces, and to record a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product

import numpy as np

from .base import Strategy
from .space import Code, Scalar, Space


class Exhaustive(Strategy):
    """Asks every valid config once, in the order of the space."""

    name = "exhaustive"

    def __init__(self, space: Space, rng: np.random.Generator, seeds: Iterable[Mapping[str, Scalar]] = ()) -> None:
        super().__init__(space, rng, seeds)
        everything = product(*map(range, space.sizes))
        self._rest = (code for code in everything if code not in self.seen and space.valid(code))

    def propose(self) -> Code | None:
        return next(self._rest, None)


STRATEGIES = (Exhaustive,)
