"""Uniform sampling without repeats: the measure that every other strategy has to beat."""

from __future__ import annotations

from .base import Strategy
from .space import Code


class Random(Strategy):
    """Asks valid configs in random order."""

    name = "random"

    def propose(self) -> Code | None:
        return self.fresh()


STRATEGIES = (Random,)
