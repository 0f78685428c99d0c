"""Every strategy that discovery finds keeps the promises of the suite; one that breaks them is caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tunewright import search
from tunewright.search.base import Strategy
from tunewright.search.space import Code
from tunewright.testing import strategy as suite


@pytest.mark.parametrize("check", suite.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", search.names())
def test_strategy(name: str, check: Callable[..., None]) -> None:
    check(name)


class Forgetful(Strategy):
    """Asks the first config for ever and never ends."""

    name = "forgetful"

    def propose(self) -> Code | None:
        return None

    def _next(self) -> Code | None:
        return (0,) * len(self.space.sizes)


def test_the_suite_catches_a_bad_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(name: str, space: search.Space, seed: int = 0, seeds: Any = (), **options: Any) -> Strategy:
        import numpy as np

        return Forgetful(space, np.random.default_rng(seed), seeds)

    monkeypatch.setattr(suite, "create", create)
    for check in (suite.never_repeats_and_covers_all, suite.seeds_come_first, suite.ends_where_nothing_is_valid):
        with pytest.raises(AssertionError):
            check("forgetful")
