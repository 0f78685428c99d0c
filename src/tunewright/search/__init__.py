"""Search strategies with an ask-and-tell interface, spaces and trials. Independent of kernels, devices and databases.

>>> from tunewright import search
>>> space = search.Space({"tile": [1, 2, 4, 8], "unroll": [1, 2, 4]}, lambda c: c["tile"] * c["unroll"] <= 16)
>>> strategy = search.create("auto", space, seed=1)
>>> for config in strategy.ask(2):
...     strategy.tell([search.Trial(config, seconds=1 / config["tile"])])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from .. import discovery
from ..errors import SettingsError
from .base import Status, Strategy, Trial
from .modes import strategy_for
from .space import Config, Scalar, Space

__all__ = ["Config", "Space", "Status", "Strategy", "Trial", "create", "names", "strategy_for"]


@cache
def _strategies() -> dict[str, type[Strategy]]:
    return discovery.find("tunewright.strategies", key=lambda strategy: str(strategy.name))


def names() -> list[str]:
    """Return the names of all strategies."""
    return sorted(_strategies())


def create(
    name: str, space: Space, seed: int = 0, seeds: Iterable[Mapping[str, Scalar]] = (), **options: Any
) -> Strategy:
    """Create a strategy by name. ``seeds``: configs to try first; ``options``: further arguments of its class."""
    import numpy as np

    try:
        strategy = _strategies()[name]
    except KeyError:
        raise SettingsError(f"there is no strategy {name!r}", hint=f"one of: {', '.join(names())}") from None
    return strategy(space, np.random.default_rng(seed), seeds, **options)
