"""A tuning session on simulated machines: who is chosen, what is written down, and that the time is kept."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from helpers.tuning_noise import ALL, JITTER, PROBLEM, QUIET, TARGET, Fake, Machine, Noise
from sessions import duel, tune
from tunewright.errors import DeviceError
from tunewright.knowledge.database import MemoryDatabase
from tunewright.knowledge.record import Fault, Measurement, Ratio, from_line, to_line
from tunewright.measure.base import Attempt
from tunewright.search import Config, Status
from tunewright.tuning import candidate_search, contest

TILES = {"tile": [1, 2, 4, 8, 16], "unroll": [1, 2, 4]}
PLAIN, OTHER = Fake("plain", TILES), Fake("other", {"width": [1, 2]})
DEFAULT = ("plain", Config(tile=1, unroll=1))
BEST = ("plain", Config(tile=8, unroll=2))


def flat(solver, config):
    """Everything is equally fast."""
    return 0.001


def valley(solver, config):
    """tile=8, unroll=2 is 1.5 times as fast as the default; the other solver is far behind."""
    if solver == "other":
        return 0.01
    return 0.001 * (1 + 0.1 * abs(math.log2(config["tile"]) - 3) + 0.1 * abs(math.log2(config["unroll"]) - 1)) / 1.0


def run(machine, solvers=(PLAIN, OTHER), default=DEFAULT, **options):
    options = {"strategy": "auto", "seconds": 20.0, "clock": machine.clock, **options}
    return tune(PROBLEM, TARGET, default, list(solvers), machine, **options)


def test_the_fastest_is_found_and_confirmed():
    machine = Machine(valley)
    outcome = run(machine)
    assert outcome.changed and outcome.chosen == BEST
    assert outcome.gain and 1.35 < outcome.gain.low <= 1.4 <= outcome.gain.high < 1.45
    assert outcome.control and outcome.control.low <= 1 <= outcome.control.high
    assert "faster than the default" in outcome.reason and outcome.attempted == 17 and outcome.failed == 0
    assert set(outcome.seconds) == {"search", "race", "confirm", "compile", "check"} or "race" not in outcome.seconds


def test_records_say_everything():
    outcome = run(Machine(valley), regime="warm")
    default, winner, *others = outcome.records
    assert default.config == DEFAULT[1] and default.evidence.gain == Ratio.one() and default.evidence.confirmed
    assert winner.config == outcome.chosen[1] and winner.evidence.gain == outcome.gain and winner.evidence.confirmed
    assert all(not m.evidence.confirmed and m.evidence.gain.pairs >= 8 for m in others)
    for m in outcome.records:
        e = m.evidence
        assert from_line(to_line(m)) == m, "it can be written and read"
        assert e.default == DEFAULT and e.regime == "warm" and (e.copies, e.nbytes) == (4, 1 << 20) and e.error == 1e-6
        assert 0 < len(e.samples) <= 64 and e.lower <= e.seconds <= e.upper
        assert {"python", "platform", "cores", "load before", "load after", "numpy"} <= set(e.environment)
        assert m.family == PROBLEM.family() and m.sizes == (4, 64, 4, 64)
    assert MemoryDatabase(outcome.records).family(PROBLEM.family())


def test_equal_candidates_keep_the_default():
    for seed in range(5):
        outcome = run(Machine(flat, JITTER, seed), seed=seed)
        assert not outcome.changed and outcome.chosen == DEFAULT and outcome.gain is None, outcome.reason
        assert outcome.records[0].evidence.confirmed, "that the default is best is an answer"


def test_a_slower_one_is_never_chosen():
    def slow(solver, config):
        return 0.001 if (solver, config) == DEFAULT else 0.00102

    for noise in ALL.values():
        outcome = run(Machine(slow, noise))
        assert outcome.chosen == DEFAULT, outcome.reason


def test_wrong_crashing_and_hanging_candidates_are_recorded_and_never_chosen():
    bad = {2: Status.WRONG, 4: Status.CRASHED, 8: Status.TIMEOUT, 16: Status.FAILED}

    def faulty(solver, config):
        return bad.get(config.get("tile"), 0.001)

    outcome = run(Machine(faulty))
    assert outcome.chosen == DEFAULT and outcome.failed == 12
    assert sorted({(f.config["tile"], f.status) for f in outcome.faults}) == sorted(
        {(2, Status.WRONG), (4, Status.CRASHED), (8, Status.TIMEOUT)}
    ), "one that does not compile is no fault"
    assert all(isinstance(from_line(to_line(f)), Fault) and f.why == f"it is {f.status}" for f in outcome.faults)


@pytest.mark.parametrize("time", [0.0, -1.0, math.nan, math.inf])
def test_impossible_times_are_faults(time):
    def lying(solver, config):
        return time if config.get("tile") == 8 else 0.001

    outcome = run(Machine(lying))
    assert outcome.chosen == DEFAULT
    assert {(f.config["tile"], f.status) for f in outcome.faults} == {(8, Status.WRONG)}
    assert all("impossible" in f.why for f in outcome.faults)


def test_one_that_fails_in_the_race_is_out_and_the_next_wins():
    best = BEST
    late = {best: Attempt(Status.WRONG, "right, then wrong")}
    outcome = run(Machine(valley, late=late))
    assert outcome.changed and outcome.chosen != best and outcome.chosen[0] == "plain"
    assert [(f.config, f.why) for f in outcome.faults] == [(best[1], "right, then wrong")]
    assert all(m.config != best[1] for m in outcome.records)


def test_one_that_fails_when_it_is_measured_again_is_out():
    class Late(Machine):
        def race(self, candidates, rounds):
            if len(candidates) > 5:  # the heat
                self.late = {BEST: Attempt(Status.CRASHED, "in the heat")}
            return super().race(candidates, rounds)

    outcome = run(Late(valley))
    assert outcome.changed and outcome.chosen != BEST and [f.why for f in outcome.faults] == ["in the heat"]


@pytest.mark.parametrize("status", [Status.WRONG, Status.FAILED])
def test_a_faulty_default_is_replaced_without_a_gain(status):
    def faulty(solver, config):
        return status if (solver, config) == DEFAULT else flat(solver, config)

    outcome = run(Machine(faulty, JITTER))
    assert outcome.changed and outcome.chosen != DEFAULT and outcome.default_fault == f"it is {status}"
    assert "the default is faulty" in outcome.reason
    answer = outcome.records[0]
    assert answer.config == outcome.chosen[1] and answer.evidence.confirmed and answer.evidence.gain == Ratio.one()
    assert len(outcome.faults) == (status is Status.WRONG)


def test_a_default_that_fails_late_is_replaced_too():
    outcome = run(Machine(valley, late={DEFAULT: Attempt(Status.CRASHED, "gone")}))
    assert outcome.changed and outcome.default_fault == "gone" and [f.config for f in outcome.faults] == [DEFAULT[1]]


def test_nothing_is_correct():
    outcome = run(Machine(lambda solver, config: Status.WRONG))
    assert not outcome.changed and outcome.chosen == DEFAULT and not outcome.records
    assert "no candidate is correct" in outcome.reason and outcome.default_fault and len(outcome.faults) == 17


def test_a_problem_that_cannot_be_posed_keeps_the_default():
    class Refusing(Machine):
        def pose(self, problem, seed=0, regime="cold"):
            return "no memory"

    outcome = run(Refusing(flat))
    assert not outcome.changed and "no memory" in outcome.reason and outcome.attempted == 0


def test_barred_candidates_are_not_attempted():
    machine = Machine(valley)
    outcome = run(machine, barred=lambda solver, config: "it hung here" if config.get("tile") == 8 else None)
    assert all(config.get("tile") != 8 for _, config in machine.attempts)
    assert outcome.chosen[1]["tile"] in (4, 16) and not outcome.faults
    assert sum("it hung here" in t.why for t in outcome.trials) == 3


def test_a_barred_default_is_replaced():
    outcome = run(Machine(flat), barred=lambda solver, config: "it hung" if (solver, config) == DEFAULT else None)
    assert outcome.changed and outcome.default_fault == "barred: it hung" and not outcome.faults


def test_order_defaults_then_known_then_seeds_then_strategies():
    machine = Machine(valley)
    known = [replace(m, config=m.config) for m in run(Machine(valley)).records if m.config != DEFAULT[1]][:1]
    run(machine, known=known, seeds={"plain": [{"tile": 16, "unroll": 4}, {"tile": 99, "unroll": 1}], "gone": [{}]})
    first = [DEFAULT, ("other", {"width": 1}), ("plain", dict(known[0].config)), ("plain", {"tile": 16, "unroll": 4})]
    assert machine.attempts[:4] == first
    assert len(machine.attempts) == len({(s, *sorted(c.items())) for s, c in machine.attempts}) == 17, "nothing twice"


def test_a_solver_without_a_strategy_shows_its_default_only():
    machine = Machine(valley)
    run(machine, strategy=lambda solver: None if solver == "plain" else "random")
    assert [c for s, c in machine.attempts if s == "plain"] == [DEFAULT[1]]
    assert len([c for s, c in machine.attempts if s == "other"]) == 2


def test_far_solvers_seldom_get_turns():
    big = {"a": list(range(40)), "b": list(range(40))}
    machine = Machine(lambda s, c: 0.001 if s == "near" else 0.01, compile_seconds=0.1)
    run(machine, [Fake("near", big), Fake("far", big)], ("near", {"a": 0, "b": 0}), strategy="random")
    asked = [s for s, _ in machine.attempts]
    assert asked.count("near") > 5 * asked.count("far") > 0


def test_losers_are_only_probed():
    machine = Machine(lambda s, c: 0.001 if (s, c) == DEFAULT else 0.0018)
    outcome = run(machine)
    assert outcome.attempted == 17 and all(size <= 2 for size, _ in machine.races), "nobody came near the default"
    # a few probes each (and turns of the default, to see whether the machine is busy), never the samples of a full one
    assert outcome.seconds["search"] < 17 * 0.2 + 16 * (4 * 0.0018 * 1.1 + candidate_search.TURNS * 0.0011) + 0.05


@pytest.mark.parametrize("seconds", [0.0, 0.5, 3.0, 10.0])
@pytest.mark.parametrize("each", [1e-5, 1e-3, 0.05, 1.0])
def test_the_budget_holds(seconds, each):
    big = {"a": list(range(40)), "b": list(range(40))}
    machine = Machine(lambda s, c: each * (1 + (c["a"] + c["b"]) / 100), Noise(0.05, contention=0.2))
    outcome = run(machine, [Fake("plain", big, {"a": 39, "b": 39})], ("plain", {"a": 39, "b": 39}), seconds=seconds)
    # an attempt (a probe and five samples, most probably not all of them contended), then a round of three
    step = 0.2 + (6 + 3) * 1.8 * each * 1.5
    assert machine.now <= 1.1 * seconds + step
    phases = [outcome.seconds.get(phase, 0.0) for phase in ("search", "race", "confirm")]
    assert outcome.records and sum(phases) == pytest.approx(machine.now)


def test_stop_keeps_what_was_found():
    machine = Machine(valley)
    outcome = run(machine, stop=lambda: len(machine.attempts) >= 6)
    assert len(machine.attempts) == 6 and not outcome.changed and "stopped" in outcome.reason
    assert outcome.records and not any(m.evidence.confirmed for m in outcome.records), "the next session goes on"
    again = Machine(valley)
    second = run(again, known=outcome.records)
    assert second.chosen == BEST


def test_a_session_that_finds_less_does_not_demote_what_was_confirmed():
    records = run(Machine(valley)).records
    stopped = run(machine := Machine(valley), known=records, stop=lambda: len(machine.attempts) >= 4)
    winner = next(m for m in records if m.evidence.gain.low > 1 and m.evidence.confirmed)
    assert all(m.config != winner.config for m in stopped.records)
    slower = run(Machine(flat), known=records)
    again = next(m for m in slower.records if m.config == winner.config)
    assert not again.evidence.confirmed and again.evidence.gain.high < winner.evidence.gain.low, "that is news"


def test_progress_is_told():
    told = []
    outcome = run(Machine(valley), report=told.append)
    assert [p.attempted for p in told][:17] == list(range(1, 18)) and told[-1].phase == "confirm"
    assert told[-1].best == outcome.chosen and told[-1].best_seconds < told[-1].default_seconds
    assert all(a.elapsed <= b.elapsed for a, b in pairwise(told)) and told[0].budget == 20.0


def test_the_same_seed_decides_the_same():
    one, two = (run(Machine(valley, JITTER, 7), seed=3) for _ in range(2))
    assert (one.chosen, one.reason, one.trials, one.gain) == (two.chosen, two.reason, two.trials, two.gain)


def test_contention_does_not_make_winners_and_does_not_hide_them():
    noise = ALL["everything"]
    found = 0
    for seed in range(10):
        assert not run(Machine(flat, noise, seed), seconds=60.0, seed=seed).changed
        outcome = run(Machine(valley, noise, seed), seconds=60.0, seed=seed)
        found += outcome.changed and valley(*outcome.chosen) < 1.12e-3
    assert found >= 9


def test_too_noisy_is_said_only_when_noise_exceeds_the_gain():
    outcomes = []
    for seed in range(10):
        machine = Machine(valley, Noise(0.9), seed, compile_seconds=0.01)
        outcomes.append(run(machine, seconds=0.5, strategy=lambda s: None, seeds={"plain": [BEST[1]]}))
    said = [o for o in outcomes if "too noisy" in o.reason]
    assert said and all(not o.changed for o in said)
    for o in said:
        tried = o.records[1].evidence
        assert max(tried.control.high, 1 / tried.control.low) >= tried.gain.median
        assert not o.records[0].evidence.confirmed, "it may be tried again"


def changes(noise: Noise, count: int) -> int:
    """How often one of two equal candidates replaces the other."""
    twins = [Fake("default"), Fake("twin")]
    changed = 0
    for seed in range(count):
        machine = Machine(flat, noise, seed)
        changed += run(machine, twins, ("default", {}), seconds=30.0, seed=seed).changed
    return changed


@pytest.mark.parametrize("name", ["jitter", "everything"])
def test_twins_do_not_replace_each_other(name):
    assert changes(ALL[name], 40) == 0


@pytest.mark.soak
@pytest.mark.parametrize("name", ALL)
def test_twins_do_not_replace_each_other_often(name):
    assert changes(ALL[name], 500) <= 5


def gains_found(count: int) -> int:
    """How often a gain of 3 % is found under 5 % of jitter, from the search on."""
    pair = [Fake("default"), Fake("faster")]
    found = 0
    for seed in range(count):
        machine = Machine(lambda s, c: 0.001 if s == "default" else 0.001 / 1.03, JITTER, seed)
        found += run(machine, pair, ("default", {}), seconds=30.0, seed=seed).changed
    return found


def test_small_gains_are_found():
    assert gains_found(40) >= 35


@pytest.mark.soak
def test_small_gains_are_found_often():
    assert gains_found(500) > 450


# ---- duel ---------------------------------------------------------------------------------------------------------


def fight(machine, candidate):
    solvers = [PLAIN, OTHER]
    return duel(PROBLEM, TARGET, DEFAULT, candidate, solvers, machine, seconds=10.0, clock=machine.clock)


def test_a_duel_confirms_what_is_still_faster():
    record = fight(Machine(valley, JITTER), BEST)
    assert isinstance(record, Measurement) and record.evidence.confirmed and 1.3 < record.evidence.gain.median < 1.5
    assert from_line(to_line(record)) == record


def test_a_duel_demotes_what_is_not():
    record = fight(Machine(flat, JITTER), BEST)
    assert isinstance(record, Measurement) and not record.evidence.confirmed


def test_a_duel_of_the_default_with_itself():
    record = fight(Machine(flat, JITTER), DEFAULT)
    assert isinstance(record, Measurement) and not record.evidence.confirmed


def test_a_duel_records_faults():
    record = fight(Machine(lambda s, c: Status.WRONG if c.get("tile") == 8 else 0.001), BEST)
    assert isinstance(record, Fault) and record.status is Status.WRONG
    late = {BEST: Attempt(Status.CRASHED, "late")}
    record = fight(Machine(flat, late=late), BEST)
    assert isinstance(record, Fault) and record.why == "late"


def test_a_duel_that_cannot_be_held_says_why():
    with pytest.raises(DeviceError, match="it is FAILED"):
        fight(Machine(lambda s, c: Status.FAILED if c.get("tile") == 8 else 0.001), BEST)
    with pytest.raises(DeviceError, match="it is WRONG"):
        fight(Machine(lambda s, c: Status.WRONG if (s, c) == DEFAULT else 0.001), BEST)


def test_contended_probes_get_a_second_chance():
    """A candidate that met a burst is not taken for slow: the anchor is slow at that moment, too."""
    limits = []

    class Bursting(Machine):
        def _time(self, candidate):
            burst = len(self.attempts) == 2 and len(self.races) < 2
            return super()._time(candidate) * (2 if burst else 1)

        def attempt(self, candidate, limit=float("inf")):
            limits.append(limit)
            return super().attempt(candidate, limit)

    machine = Bursting(lambda s, c: 0.001 if s == "default" else 0.0008)
    outcome = run(machine, [Fake("default"), Fake("faster")], ("default", {}))
    assert outcome.changed and len(limits) == 2 + candidate_search.PROBES + 1 and limits[-1] > 1.7 * limits[-2]


def test_quiet_machines_need_few_rounds():
    machine = Machine(valley, QUIET)
    run(machine)
    assert sum(rounds for _, rounds in machine.races) < 17 * candidate_search.TURNS + contest.RACE_ROUNDS
