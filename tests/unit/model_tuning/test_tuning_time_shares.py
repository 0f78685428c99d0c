"""How the time of a tuning is divided, on a scripted clock: profile, search, decision."""

from __future__ import annotations

import pytest

from helpers.tuning_noise import Fake
from tunewright.devices.null import NullDevice
from tunewright.ir.types import DType, TensorType
from tunewright.knowledge.record import Ratio
from tunewright.measure.base import Regime
from tunewright.model_tuning import layers as tune_search
from tunewright.model_tuning.layers import LEAST_DECIDE, NO_TIME, TunedLayer, Tuning, TuningOptions, reserve
from tunewright.search.base import Status
from tunewright.search.space import Config
from tunewright.settings import Settings
from tunewright.solvers.base import Problem
from tunewright.tuning import evidence, session
from tunewright.tuning.candidate_search import TriedCandidate
from tunewright.tuning.tuner import Choice, Origin

SOLVER = Fake("plain", {"tile": [1, 2, 4]})


@pytest.mark.parametrize("budget", [20.0, 30.0, 60.0, 600.0])
@pytest.mark.parametrize("profile", [0.05, 0.1, 0.2])
@pytest.mark.parametrize("making", [0.0, 0.02, 0.5])
def test_profile_and_decision_take_a_third_of_the_budget_at_most(budget: float, profile: float, making: float):
    """`tune --budget 30` on a cold cache once ended at 17.8 s: the profile had taken half, and the reserve the rest."""
    assert profile * budget + reserve(budget, profile * budget, making * budget) <= budget / 3 + 1e-9


@pytest.mark.parametrize("profile", [10.0, 20.0, 29.0])
def test_a_long_profile_leaves_the_search_most_of_what_is_left(profile: float):
    """It cannot be shorter; the decision takes an eighth of the budget at most then."""
    assert reserve(30.0, profile, 5.0) <= LEAST_DECIDE * 30.0


class Clock:
    now = 100.0


def layer(name: str, seconds: float) -> TunedLayer:
    type = TensorType(DType.FLOAT32, (len(name), 8))
    problem = Problem("Relu", (type,), (type,), {}, constant=(False,))
    return TunedLayer(problem, NullDevice(), Choice(SOLVER, {"tile": 1}, Origin.DEFAULT, dict), [name], seconds=seconds)


def outcome(one: TunedLayer, gain: float, count: int = 100) -> session.Outcome:
    record = evidence.measurement(
        one.problem,
        one.device.target,
        SOLVER,
        Config(tile=2),
        evidence.ContestSamples([1e-3], 0.0, Ratio(gain, 0.1, 10.0, 0), Ratio.one(), False, one.present),
        Regime("layer", 1, 1),
        {},
    )
    trials = (TriedCandidate(one.present, Status.OK, 1e-3, "", 0.0),) * count
    return session.Outcome(one.present, False, "", records=(record,), trials=trials)


def tuning(
    monkeypatch: pytest.MonkeyPatch, gains: dict[str, float], budget: float, pace: float = 0.01
) -> tuple[Tuning, list[str]]:
    """One whose searches take what they are given, and find what is written here. ``pace``: of each candidate."""
    monkeypatch.setattr(tune_search.time, "monotonic", lambda: Clock.now)
    made = Tuning(TuningOptions(Settings(), budget), {"TUNE_RESULT_PATH": ""})
    searched: list[str] = []

    def search(problem, device, *rest, seconds, **options):
        Clock.now += seconds
        found = next(one for one in made.layers if one.problem == problem)
        searched.append(found.nodes[0])
        return outcome(found, gains[found.nodes[0]], int(seconds / pace))

    monkeypatch.setattr(made.tuner, "tune", search)
    monkeypatch.setattr(made, "_posed", lambda one: (one.problem, one.device, one.choice, None))
    monkeypatch.setattr(made.tuner, "foresee", lambda *given: None)
    return made, searched


def test_time_for_decisions_is_searched_in_while_there_is_nothing_to_decide(monkeypatch: pytest.MonkeyPatch):
    """It ended with a third of its time unused, without having looked at most layers."""
    gains = {"a": 0.9, "bb": 0.9, "ccc": 1.2, "dddd": 1.3}
    run, searched = tuning(monkeypatch, gains, 12.0)
    run.layers = [layer(name, 0.001) for name in gains]
    run.search_all([(one, one.hope) for one in run.layers], 4.5, None)
    assert searched == ["a", "bb", "ccc"], "the third one found something, which is decided before anything else"
    assert run.elapsed < 12.0 and run.layers[3].skipped == NO_TIME
    assert not any(one.skipped for one in run.layers[:3])


@pytest.mark.parametrize(("pace", "count"), [(0.01, 6), (0.1, 6), (0.5, 3)])
def test_on_a_slow_machine_fewer_layers_are_searched_properly(
    monkeypatch: pytest.MonkeyPatch, pace: float, count: int
) -> None:
    """Seven of fourteen searched layers once had one candidate."""
    gains = {"abcdefgh"[:n]: 0.9 for n in range(1, 8)}
    run, searched = tuning(monkeypatch, gains, 100.0, pace)
    run.layers = [layer(name, 0.001) for name in gains]
    run.search_layers([(one, one.hope) for one in run.layers], 13.9, decide=False)
    assert len(searched) == count
    after = [one.budget for one in run.layers if one.outcome is not None][1:]
    assert all(seconds >= 12 * pace - 1e-9 for seconds in after[:-1])


def test_what_is_to_be_decided_has_its_time(monkeypatch: pytest.MonkeyPatch):
    gains = {"a": 1.2, "bb": 0.9, "ccc": 1.2}
    run, searched = tuning(monkeypatch, gains, 12.0)
    run.layers = [layer(name, 0.001) for name in gains]
    run.search_all([(one, one.hope) for one in run.layers], 4.5, None)
    assert searched == ["a", "bb"] and run.elapsed <= 4.5
    assert run.layers[2].skipped == NO_TIME
