"""Tunings among good and faulty candidates: none that is faulty is ever chosen, and each is recorded for what it is."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from faults import workers
from faults.faulty.faulty import PACES, FaultyHost
from faults.workers import HOST, PROBLEM, TWELVE, faulty
from sessions import tune
from tunewright.devices.base import Target
from tunewright.knowledge.record import FAULTS
from tunewright.measure.isolated import Isolated
from tunewright.plugins.single import open_device
from tunewright.search.base import Status
from tunewright.search.space import Space
from tunewright.solvers.base import Problem
from tunewright.tuning.contest import LEAST_GAIN
from tunewright.tuning.session import Outcome

#: the worker's measurer is given so long for a candidate
TIMEOUT = 4.0


class Some(FaultyHost):
    """The same solver with a part of its space: good ones of every pace, and a few faulty ones that the seed draws."""

    def __init__(self, hows: list[str]) -> None:
        self.hows = hows

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"how": self.hows, "pace": PACES}, lambda c: c["how"] == "good" or c["pace"] == 1)


def session(measurer: Isolated, seed: int, count: int) -> tuple[Outcome, list[str]]:
    drawn = random.Random(seed).sample(TWELVE, count)
    outcome = tune(
        PROBLEM, open_device("CPU.HOST").target, faulty("CPU.HOST", "good", 2), [Some(["good", *drawn])], measurer,
        strategy="random", seconds=120.0, seed=seed,
    )  # fmt: skip
    return outcome, drawn


def check(outcome: Outcome, drawn: list[str]) -> None:
    assert outcome.chosen[1]["how"] == "good", outcome.chosen
    assert outcome.default_fault is None
    tried = {(t.candidate[1]["how"], t.candidate[1]["pace"]): t for t in outcome.trials}
    assert set(tried) == {("good", pace) for pace in PACES} | {(how, 1) for how in drawn}
    for (how, _), trial in tried.items():
        assert trial.status is (Status.OK if how == "good" else HOST[how][0]), trial
    recorded = {(f.config["how"], f.config["pace"]): f.status for f in outcome.faults}
    assert recorded == {who: trial.status for who, trial in tried.items() if trial.status in FAULTS}
    assert {m.config["how"] for m in outcome.records} == {"good"}
    assert outcome.ended
    assert not outcome.changed or (outcome.gain is not None and outcome.gain.low >= LEAST_GAIN)
    for record in outcome.records:  # nothing is confirmed without evidence
        is_default = (record.key.solver, record.config) == record.evidence.default
        assert not record.evidence.confirmed or is_default or record.evidence.gain.low >= LEAST_GAIN, record
        assert not (is_default and record.evidence.confirmed and outcome.is_open)


@pytest.mark.parametrize("seed", [pytest.param(s, marks=[] if s < 2 else pytest.mark.soak) for s in range(200)])
def test_a_faulty_candidate_is_never_chosen(tmp_path: Path, seed: int) -> None:
    with workers.measurer(tmp_path, "CPU.HOST", TIMEOUT) as measurer:
        assert isinstance(measurer, Isolated)
        check(*session(measurer, seed, 3))
