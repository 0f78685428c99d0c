"""Defects of tuning that were found by using it, each with the way it showed."""

from __future__ import annotations

import pytest

from tunewright.search import Config
from tunewright.tuning.session import tune
from unit.tuning_noise import PROBLEM, TARGET, Fake, Machine

TILES = Fake("plain", {"tile": [1, 2, 4, 8]})
DEFAULT = ("plain", Config(tile=1))


def session(machine: Machine, seconds: float):
    return tune(
        PROBLEM, TARGET, DEFAULT, [TILES], machine, strategy="exhaustive", seconds=seconds, clock=machine.clock
    )


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3])
def test_a_time_too_short_for_anything_else_does_not_confirm_the_default(seconds: float):
    """TUNE_SECONDS = 0 once made "the default: nothing is faster" the exact answer of every problem, for ever."""
    outcome = session(Machine(lambda solver, config: 0.001 / config["tile"], compile_seconds=0.2), seconds)
    assert outcome.chosen == DEFAULT and outcome.attempted == 1
    assert "too short" in outcome.reason
    assert not any(m.evidence.confirmed for m in outcome.records), "nobody has looked at anything else"


def test_the_last_of_a_space_is_an_answer_however_short_the_time():
    """Where there was time for all that there is, the default is confirmed."""
    outcome = session(Machine(lambda solver, config: 0.001 * config["tile"], compile_seconds=0.2), 20.0)
    assert outcome.attempted == 4 and outcome.records[0].evidence.confirmed, outcome.reason
