"""`LocalMeasurer` on a scripted clock: what it times, how often, in which order, and which times are impossible."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tunewright.devices.base import Device, Queue, Target
from tunewright.devices.null import NullDevice, NullQueue
from tunewright.ir.types import DType, TensorType
from tunewright.measure import local as bench
from tunewright.measure.base import Candidate
from tunewright.measure.local import LocalMeasurer
from tunewright.search.base import Status
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Kernel, Problem, Solver
from tunewright.solvers.host.reference import HostKernel

_T = TensorType(DType.FLOAT32, (6, 7))
PROBLEM = Problem("Add", (_T, _T), (_T,), {}, constant=(False, False))
Script = Callable[[int, int], float]  # (config, number of the run) -> seconds


class Scripted(Solver):
    """Right results, in scripted time. ``log``: who ran, in order."""

    id = "test.scripted"
    language = "null"

    def __init__(self, script: Script) -> None:
        self.script, self.log = script, list[int]()

    def why_not(self, problem: Problem, target: Target) -> str | None:
        return None

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"n": list(range(8))})

    def compile(self, problem: Problem, config: Config, device: Device) -> Kernel:
        return Ticking(self, problem, config["n"])


class Ticking(Kernel):
    name = "test.ticking"

    def __init__(self, solver: Scripted, problem: Problem, number: int) -> None:
        self.solver, self.right, self.number, self.runs = solver, HostKernel(problem), number, 0

    def run(self, queue: Queue, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
        assert isinstance(queue, NullQueue)
        self.runs += 1
        self.solver.log.append(self.number)
        queue.advance(self.solver.script(self.number, self.runs))
        return self.right.run(queue, inputs, outputs)


def candidate(n: int) -> Candidate:
    return Scripted.id, {"n": n}


def posed(script: Script, regime: str = "warm", seed: int = 0) -> tuple[LocalMeasurer, Scripted]:
    solver = Scripted(script)
    local = LocalMeasurer(NullDevice(), [solver])
    assert local.pose(PROBLEM, seed, regime) is None
    return local, solver


@pytest.mark.parametrize(
    ("seconds", "turns", "executions"),
    [
        (1.0, bench.LEAST_TURNS, 1),  # however long it takes
        (11e-3, bench.LEAST_TURNS, 1),
        (5.5e-3, 6, 1),
        (1e-3, bench.MOST_TURNS, 1),
        (100e-6, bench.MOST_TURNS, 5),
        (10e-6, bench.MOST_TURNS, 50),
        (1e-9, bench.MOST_TURNS, 256),
    ],
)
def test_turns_last_long_enough_and_are_enough(seconds: float, turns: int, executions: int) -> None:
    local, solver = posed(lambda n, run: seconds)
    found = local.attempt(candidate(0))
    assert found.status is Status.OK and len(found.samples) == turns
    assert found.samples == pytest.approx([seconds] * turns)
    judged, warm_up = 4, 1
    assert len(solver.log) == judged + warm_up + executions * (1 + turns)
    assert local.timed == pytest.approx(seconds * (warm_up + executions * (1 + turns)))


def test_the_first_execution_does_not_count() -> None:
    local, _ = posed(lambda n, run: 1.0 if run <= 5 else 1e-3)
    assert local.attempt(candidate(0), limit=2e-3).samples == pytest.approx([1e-3] * 9)


def test_slower_than_the_limit_is_probed_once() -> None:
    local, solver = posed(lambda n, run: 2e-3)
    found = local.attempt(candidate(0), limit=1e-3)
    assert found.status is Status.OK and found.probed and found.samples == pytest.approx((2e-3,))
    assert len(solver.log) == 4 + 2
    # when it is worth it after all, nothing is judged again
    found = local.attempt(candidate(0))
    assert not found.probed and len(found.samples) == 9 and len(solver.log) == 4 + 2 + 11


@pytest.mark.parametrize("seconds", [0.0, -1e-3, math.inf, math.nan, 1e-13])
@pytest.mark.parametrize("run", [5, 6, 9])
def test_impossible_times_are_wrong(seconds: float, run: int) -> None:
    def script(n: int, at: int) -> float:
        return 1e-3 if at != run or n else seconds

    local, _ = posed(script)
    found = local.attempt(candidate(0))
    assert found.status is Status.WRONG and "impossible time" in found.why and found.samples == ()
    assert local.attempt(candidate(1)).status is Status.OK  # on another queue: whose clock stood still is gone


def test_impossible_times_fall_out_of_a_race() -> None:
    local, _ = posed(lambda n, run: -1e-3 if n == 1 and run > 20 else 1e-3)
    assert all(local.attempt(candidate(n)).status is Status.OK for n in range(2))
    race = local.race([candidate(0), candidate(1)], 12)
    assert set(race.fallen) == {1} and "impossible" in race.fallen[1].why
    assert len(race.samples[0]) == 12 and race.samples[1] == pytest.approx([1e-3] * len(race.samples[1]))


def test_a_race_interleaves_in_random_order_with_equal_turns() -> None:
    times = [100e-6, 50e-6, 250e-6]
    local, solver = posed(lambda n, run: times[n])
    for n in range(3):
        local.attempt(candidate(n))
    solver.log.clear()
    race = local.race([candidate(n) for n in range(3)], 30)
    assert race.samples == tuple(pytest.approx([t] * 30) for t in times)
    executions = 2  # of half a millisecond for the slowest
    turns = solver.log[3:]
    assert all(turns[i] == turns[i + 1] for i in range(0, len(turns), executions))
    orders = [tuple(turns[i : i + 6 : 2]) for i in range(0, len(turns), 6)]
    assert len(orders) == 30 and all(sorted(order) == [0, 1, 2] for order in orders)
    assert len(set(orders)) == 6


def test_decisions_follow_from_the_seed() -> None:
    def story(seed: int) -> list[int]:
        local, solver = posed(lambda n, run: 1e-3, seed=seed)
        local.race([candidate(n) for n in (0, 1, 2, 0)], 10)
        return solver.log

    assert story(1) == story(1) != story(2)


def test_a_control_runs_along_under_the_same_name() -> None:
    local, _ = posed(lambda n, run: 1e-3 + run * 1e-6)
    race = local.race([candidate(0), candidate(0)], 5)
    assert not race.fallen and len(set(race.samples[0] + race.samples[1])) == 10  # ten turns, each of its own


def test_without_a_cache_two_copies_rotate() -> None:
    local, _ = posed(lambda n, run: 1e-6, "cold")
    assert (local.regime().copies, local.regime().nbytes) == (2, 2 * 3 * 6 * 7 * 4)
    assert local.attempt(candidate(0)).status is Status.OK


def test_in_a_layer_only_constants_rotate() -> None:
    solver = Scripted(lambda n, run: 1e-6)
    seen: list[tuple[int, ...]] = []
    running = Ticking.run

    class Watched(Ticking):
        def run(self, queue: Queue, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
            seen.append(tuple(a.ctypes.data for a in (*inputs, *outputs)))
            return running(self, queue, inputs, outputs)

    solver.compile = lambda problem, config, device: Watched(solver, problem, config["n"])  # type: ignore[method-assign]
    local = LocalMeasurer(NullDevice(), [solver])
    problem = Problem("Add", (_T, _T), (_T,), {}, constant=(False, True))
    assert local.pose(problem, 0, "layer") is None
    assert (local.regime().kind, local.regime().copies, local.regime().nbytes) == ("layer", 2, (2 + 2) * 6 * 7 * 4)
    assert local.attempt(candidate(0)).status is Status.OK
    timed = set(seen[4:])
    assert [len({places[k] for places in timed}) for k in range(3)] == [1, 2, 1]
    assert local.pose(PROBLEM, 0, "layer") is None and local.regime().copies == 1, "no weights: all of it is warm"


def test_posing_again_forgets_candidates() -> None:
    local, solver = posed(lambda n, run: 1e-3)
    local.attempt(candidate(0))
    before = len(solver.log)
    assert local.pose(PROBLEM, 1) is None
    local.attempt(candidate(0))
    assert len(solver.log) == 2 * before
