"""Which candidates need no compiler: those are attempted first, around each new best."""

from __future__ import annotations

import pytest

from helpers.tuning_noise import PROBLEM, TARGET, Fake, Machine
from sessions import tune
from tunewright.search import Config


class Arguments(Fake):
    """The tile is part of the text; run and slabs are arguments of the kernel."""

    language = "c"

    def source(self, problem, config, target):
        return f"{self.id} of {config['tile']}"


class Together(Machine):
    """Compiles two at a time, and notes what it is told."""

    ahead = 2

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self.prepared: list[Config] = []
        self.same: dict[Config, Config] = {}

    def prepare(self, candidates):
        self.prepared += [config for _, config in candidates]

    def alike(self, candidate, other):
        self.same[candidate[1]] = other[1]


SPACE = {"tile": [1, 2, 4, 8], "run": [1, 2, 3, 4], "slabs": [1, 2]}
FIRST = ("some", Config(tile=1, run=1, slabs=1))


def valley(solver, config):
    """The tile of 4 is best; so is a run of 3, whatever the tile."""
    return 0.001 * (1 + 0.3 * (config["tile"] != 4) + 0.1 * abs(config["run"] - 3) + 0.05 * (config["slabs"] - 1))


def searched(solver: Fake, seconds: float = 100.0, seed: int = 0) -> Together:
    machine = Together(valley, compile_seconds=0.1)
    tune(PROBLEM, TARGET, FIRST, [solver], machine, strategy="random", seconds=seconds, clock=machine.clock, seed=seed)
    return machine


@pytest.mark.parametrize("seed", range(4))
def test_arguments_are_tried_before_anything_is_compiled(seed: int):
    machine = searched(Arguments("some", SPACE), seed=seed)
    tried = [Config(config) for _, config in machine.attempts]
    assert len(tried) == len(set(tried)) == 32
    # around the default, and then around the best of that: only run and slabs change, one at a time
    first = tried[1:6]
    assert {config["tile"] for config in first} == {1}, first
    assert not set(first) & set(machine.prepared), "they have the program of the default"
    for new, known in machine.same.items():
        assert sum(new[name] != known[name] for name in SPACE) == 1 and new["tile"] == known["tile"]
    assert not set(machine.same) & set(machine.prepared) and len(machine.same) >= 5


def test_where_every_parameter_changes_the_text_nothing_is_like_another():
    machine = searched(Fake("some", SPACE))
    assert not machine.same
    own = Arguments("some", SPACE)
    own.language = "cuda"  # what else decides about a program there, nobody can tell from the text
    assert not searched(own).same


def test_nothing_is_tried_around_what_is_far_behind():
    far = Arguments("far", SPACE)
    machine = Together(lambda solver, config: 0.001 if solver == "some" else 0.004, compile_seconds=0.1)
    solvers = [Fake("some", {"tile": [1, 2]}), far]
    tune(
        PROBLEM, TARGET, ("some", Config(tile=1)), solvers, machine, strategy="random", seconds=1.0, clock=machine.clock
    )  # fmt: skip
    assert any(solver == "far" for solver, _ in machine.attempts) and not machine.same
