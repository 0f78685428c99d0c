"""Defects of tuning that were found by using it, each with the way it showed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.tuning_noise import PROBLEM, TARGET, Fake, Machine
from sessions import tune
from tunewright.devices.null import NullDevice
from tunewright.knowledge import open_databases
from tunewright.knowledge.database import MemoryDatabase
from tunewright.knowledge.record import Measurement, Ratio
from tunewright.knowledge.tuning_file import TuningFile
from tunewright.measure.base import Regime
from tunewright.search import Config
from tunewright.settings import Settings
from tunewright.tuning import evidence
from tunewright.tuning.evidence import ENOUGH, EXTENT
from tunewright.tuning.tuner import Tuner

TILES = Fake("plain", {"tile": [1, 2, 4, 8]})
DEFAULT = ("plain", Config(tile=1))


def session(machine: Machine, seconds: float):
    return tune(PROBLEM, TARGET, DEFAULT, [TILES], machine, strategy="exhaustive", seconds=seconds, clock=machine.clock)


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3])
def test_a_time_too_short_for_anything_else_does_not_confirm_the_default(seconds: float):
    """TUNE_SECONDS = 0 once made "the default: nothing is faster" the exact answer of every problem, for ever."""
    outcome = session(Machine(lambda solver, config: 0.001 / config["tile"], compile_seconds=0.2), seconds)
    assert outcome.chosen == DEFAULT and outcome.attempted == 1
    assert outcome.is_open and outcome.reason == "open: the time was too short, 1 of 4 candidates were compared"
    assert not any(m.evidence.confirmed for m in outcome.records), "nobody has looked at anything else"


def test_the_last_of_a_space_is_an_answer_however_short_the_time():
    """Where there was time for all that there is, the default is confirmed."""
    outcome = session(Machine(lambda solver, config: 0.001 * config["tile"], compile_seconds=0.2), 20.0)
    assert outcome.attempted == 4 and outcome.records[0].evidence.confirmed, outcome.reason


WIDE = Fake("plain", {"tile": [1, 2, 4, 8, 16, 32], "unroll": [1, 2, 3, 4, 5, 6, 7, 8]})
FIRST = ("plain", Config(tile=1, unroll=1))


def test_short_sessions_add_up_and_none_settles_a_problem_by_itself():
    """The second session of 3 s once said "nothing else is near" after one candidate, as the answer for good."""
    known = MemoryDatabase()
    counts: list[int] = []
    while True:
        machine = Machine(lambda solver, config: 0.001 if config["tile"] == config["unroll"] == 1 else 0.0015)
        outcome = tune(
            PROBLEM, TARGET, FIRST, [WIDE], machine, strategy="random", seconds=1.2, clock=machine.clock,
            known=known.family(PROBLEM.family()), surveys=known.surveys(PROBLEM.family()),
        )  # fmt: skip
        known.add([*outcome.records, *([outcome.survey] if outcome.survey else [])])
        default = outcome.records[0]
        counts.append(int(default.evidence.environment[EXTENT].split()[0]))
        assert default.config == FIRST[1] and default.evidence.confirmed is not outcome.is_open
        assert outcome.is_open is (counts[-1] < ENOUGH), outcome.reason
        if not outcome.is_open:
            break
        assert outcome.reason.startswith("open: ") and f" {counts[-1]} of 48 candidates" in outcome.reason
    assert len(counts) > 3 and counts == sorted(set(counts)), "each goes on where the one before ended"


@pytest.mark.parametrize("decide", [True, False])
def test_time_that_no_candidate_fits_into_is_no_verdict(decide: bool):
    """A search that begins nothing more, because nothing would end in time, is not at its end."""
    machine = Machine(lambda solver, config: 0.001, compile_seconds=0.5)
    outcome = tune(
        PROBLEM, TARGET, FIRST, [WIDE], machine, strategy="random", seconds=1.0, clock=machine.clock, decide=decide
    )  # fmt: skip
    assert machine.clock() < 0.65, "time was left"
    assert outcome.attempted == 1 and outcome.is_open and outcome.reason.startswith("open: ")
    assert not outcome.records[0].evidence.confirmed


def left_open(*counts: int) -> list[Measurement]:
    """What sessions write down that compared so many candidates, one after the other."""
    measured = evidence.measurement(
        PROBLEM,
        TARGET,
        WIDE,
        FIRST[1],
        evidence.ContestSamples([1e-3], 0.0, Ratio.one(), Ratio.one(), False, FIRST),
        Regime("warm", 1, 1),
        {},
    )
    return [
        replace(
            measured, date=f"2026-01-02T03:04:{n:02}Z",
            evidence=replace(measured.evidence, environment={EXTENT: f"{count} of 48 candidates were compared"}),
        )
        for n, count in enumerate(counts)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "again"),
    [((), True), ((1, 1), True), ((1, 2, 3), True), ((1, 3, 3), True), ((3, 3, 3), False), ((30, 40, 48), False)],
)
def test_loads_go_on_while_that_leads_somewhere(counts: tuple[int, ...], again: bool):
    """A search without evidence stores no answer, and later loads do not search for ever."""
    settings = Settings.make({"FIND_ENFORCE": "3", "TUNE_RESULT_PATH": ""}, Settings())
    device = NullDevice()
    device.target = TARGET
    one = Tuner(settings, [WIDE], MemoryDatabase(left_open(*counts)), MemoryDatabase())
    assert one.is_missing(PROBLEM, device) is again


def test_what_is_ignored_in_a_tuning_file_is_told_with_the_files_name(tmp_path: Path):
    """A load once warned "2, 'abc': has no key beside it", and nobody could tell of what."""
    (tmp_path / "tuned.json").write_text('{"2": {"abc": ["opencl.matmul", 3]}}')
    (told,) = TuningFile(tmp_path / "tuned.json").as_database().damage()
    assert told.startswith("tuned.json, 2, 'abc': ")


@pytest.mark.parametrize("mode", ["SQLITE", "SHARED"])
def test_a_folder_that_may_not_be_entered_is_no_traceback(mode: str, tmp_path: Path):
    """`kb path`, which is there to say what is the matter, died of it."""
    database = open_databases.open_user(Settings.make({"USER_DB_PATH": str(tmp_path / "kb"), "USER_DB_MODE": mode}))
    (tmp_path / "kb").mkdir(0o000)
    is_root = os.geteuid() == 0  # to whom nothing is forbidden
    if is_root:
        os.setresuid(65534, 65534, 0)
    try:
        why = database.read_only
        assert why and "cannot be written to" in why
        assert not list(database) and database.damage()
    finally:
        if is_root:
            os.setresuid(0, 0, 0)
        (tmp_path / "kb").chmod(0o700)


def test_the_default_is_not_confirmed_by_a_few_turns_of_the_search():
    """A burst of other load during its attempt once kept a faster candidate out, and the default was the answer."""

    class Unlucky(Machine):
        """While it searches (three attempts and a heat), another candidate seems 1.3 times as slow as it is."""

        def race(self, candidates, rounds):
            found = super().race(candidates, rounds)
            if len(self.races) > 4:
                return found
            slow = [
                row if who == DEFAULT else tuple(1.3 * s for s in row)
                for who, row in zip(candidates, found.samples, strict=True)
            ]
            return replace(found, samples=tuple(slow))

    outcome = session(Unlucky(lambda solver, config: 0.001 if config["tile"] == 1 else 0.0009), 20.0)
    assert outcome.changed and outcome.gain and outcome.gain.median > 1.1, outcome.reason
