"""Conformance checks for search strategies, built-in or third-party. They raise AssertionError.

>>> import pytest
>>> from tunewright.testing import strategy
>>> @pytest.mark.parametrize("check", strategy.CHECKS, ids=lambda check: check.__name__)   # doctest: +SKIP
... def test_mine(check): ...     check("mine")
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from ..search import Config, Space, Status, Strategy, Trial, create
from ..search.space import Scalar

Answer = Callable[[Config], Trial]


def small_space() -> Space:
    """A small space with numbers (powers of two and others), words, a switch and a parameter with a single value."""
    params = {
        "tile": [1, 2, 3, 4, 6, 8],
        "block": [16, 32, 48, 64, 128],
        "order": ["ab", "ba", "none", "z"],
        "vector": [False, True],
        "fixed": [7],
    }
    return Space(params, lambda c: int(c["tile"]) * int(c["block"]) <= 256)  # type: ignore[arg-type]


def large_space() -> Space:
    """A space of a hundred million combinations, about one in eight valid: too many to enumerate."""
    return Space({name: list(range(100)) for name in "abcd"}, lambda c: sum(map(int, c.values())) % 8 == 0)  # type: ignore[arg-type]


def bowl(config: Config) -> Trial:
    """A smooth landscape with one optimum in the numeric parameters; the words do not matter."""
    cost = 1.0 + sum(math.log2(1 + abs(float(v) - 4)) for v in config.values() if isinstance(v, int | float))
    return Trial(config, Status.OK, cost * 1e-3)


def failing(config: Config) -> Trial:
    """Every config fails."""
    return Trial(config, Status.FAILED, why="on purpose")


def half_failing(config: Config) -> Trial:
    """Every config with a vector fails, in one of four ways."""
    if not config["vector"]:
        return bowl(config)
    ways = (Status.FAILED, Status.WRONG, Status.TIMEOUT, Status.CRASHED)
    return Trial(config, ways[int(config["block"]) // 16 % 4], math.inf, "on purpose")  # type: ignore[arg-type]


def drive(strategy: Strategy, answer: Answer, budget: int, batch: int = 1) -> list[Config]:
    """Ask and tell until the budget is spent or the strategy has finished. Returns the configs that it asked for."""
    asked: list[Config] = []
    while len(asked) < budget and (configs := strategy.ask(min(batch, budget - len(asked)))):
        assert len(configs) <= batch, "more configs than were asked for"
        asked += configs
        strategy.tell([answer(config) for config in configs])
    return asked


def asks_valid_configs_only(name: str, **options: Any) -> None:
    for space, budget in ((small_space(), 60), (large_space(), 40)):
        for config in drive(create(name, space, **options), bowl, budget):
            assert isinstance(config, Config) and config in space, f"{config} is not valid"


def never_repeats_and_covers_all(name: str, **options: Any) -> None:
    for answer in (bowl, half_failing):
        space = small_space()
        strategy = create(name, space, seed=3, **options)
        asked = drive(strategy, answer, 1000, batch=7)
        assert len(asked) == len(set(asked)), "a config was asked twice"
        assert set(asked) == set(space), "it ended before every config was asked"
        assert strategy.ask(5) == [], "a finished strategy asked again"


def ends_where_everything_fails(name: str, **options: Any) -> None:
    asked = drive(create(name, small_space(), **options), failing, 1000)
    assert set(asked) == set(small_space())


def ends_where_nothing_is_valid(name: str, **options: Any) -> None:
    assert create(name, Space({"a": [1, 2]}, lambda _: False), **options).ask(3) == []


def same_seed_same_asks(name: str, **options: Any) -> None:
    runs = [drive(create(name, small_space(), seed=5, **options), half_failing, 80, batch=3) for _ in range(2)]
    assert runs[0] == runs[1], "the same seed asked differently"


def seeds_come_first(name: str, **options: Any) -> None:
    space = small_space()
    wanted = [config for config in space if config["tile"] == 3][:4]
    foreign: dict[str, Scalar] = {"tile": 99, "block": 16, "order": "ab", "vector": True, "fixed": 7}
    invalid: dict[str, Scalar] = {"tile": 8, "block": 128, "order": "ab", "vector": True, "fixed": 7}
    strategy = create(name, space, seeds=[wanted[0], foreign, invalid, *wanted], **options)
    assert drive(strategy, bowl, 4) == wanted, "valid seeds come first, each once; others are left out"


def accepts_what_it_never_asked(name: str, **options: Any) -> None:
    space = small_space()
    strategy = create(name, space, **options)
    known = list(space)[::5]
    strategy.tell([bowl(config) for config in known])
    asked = drive(strategy, bowl, 1000)
    assert set(asked) == set(space) - set(known), "told configs count as asked"


def asks_ahead_of_tells(name: str, **options: Any) -> None:
    """Several workers measure at once, so results arrive late and out of order."""
    space = small_space()
    strategy = create(name, space, seed=2, **options)
    waiting: list[Config] = []
    asked: list[Config] = []
    while configs := strategy.ask(4):
        asked, waiting = asked + configs, configs + waiting
        if len(waiting) > 12:
            strategy.tell([half_failing(waiting.pop()) for _ in range(6)])
    assert len(asked) == len(set(asked)) and set(asked) == set(space)


def does_not_touch_json(name: str, **options: Any) -> None:
    """Configs survive a round trip through JSON."""
    for config in drive(create(name, small_space(), **options), bowl, 30):
        assert Config(json.loads(json.dumps(dict(config)))) == config


CHECKS: tuple[Callable[..., None], ...] = (
    asks_valid_configs_only,
    never_repeats_and_covers_all,
    ends_where_everything_fails,
    ends_where_nothing_is_valid,
    same_seed_same_asks,
    seeds_come_first,
    accepts_what_it_never_asked,
    asks_ahead_of_tells,
    does_not_touch_json,
)
