"""Uniform sampling without repeats: the baseline for every other strategy."""

from __future__ import annotations

from .base import Strategy
from .space import Code


class Random(Strategy):
    """Asks valid configs in random order."""

    name = "random"

    def propose(self) -> Code | None:
        return self.fresh()


STRATEGIES = (Random,)
