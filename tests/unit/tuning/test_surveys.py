"""Surveys: what a session saw is kept, however it ends, and the next one goes on from there."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace

import pytest

from helpers.tuning_noise import PROBLEM, TARGET, Fake, Machine
from sessions import tune
from tunewright import tools
from tunewright.knowledge.database import MemoryDatabase, superseded
from tunewright.knowledge.open_databases import open_user
from tunewright.knowledge.record import MOST_BYTES, Sighting, Survey, from_line, to_line
from tunewright.measure.statistics import unknown
from tunewright.search import Config, Status
from tunewright.settings import Settings
from tunewright.tuning import candidate_search
from tunewright.tuning.session import Outcome

TILES = {"tile": [1, 2, 4, 8, 16], "unroll": [1, 2, 4], "order": [0, 1, 2]}
PLAIN, OTHER = Fake("plain", TILES), Fake("other", {"width": [1, 2, 4]})
DEFAULT = ("plain", Config(tile=1, unroll=1, order=0))


def valley(solver, config):
    if solver == "other":
        return Status.FAILED if config["width"] == 4 else 0.01
    wrong = Status.WRONG if (config["tile"], config["order"]) == (16, 2) else None
    return wrong or 0.001 * (1 + 0.1 * abs(math.log2(config["tile"]) - 3) + 0.1 * config["unroll"] + config["order"])


def run(machine, solvers=(PLAIN, OTHER), **options):
    options = {"strategy": "local", "seconds": 300.0, "clock": machine.clock, "regime": "layer", **options}
    return tune(PROBLEM, TARGET, DEFAULT, list(solvers), machine, **options)


def attempts(machine):
    return Counter((solver, Config(config)) for solver, config in machine.attempts)


def seen(survey):
    return {(s.solver, s.config): s.gain for s in survey.seen}


def test_a_survey_holds_what_was_seen():
    machine = Machine(valley)
    survey = run(machine).survey
    assert survey is not None and from_line(to_line(survey)) == survey
    assert (survey.key.solver, survey.config, survey.regime) == (*DEFAULT, "layer")
    assert survey.key.problem == PROBLEM.key() and survey.family == PROBLEM.family()
    found = seen(survey)
    assert found[DEFAULT] == pytest.approx(1.0) and found["other", Config(width=4)] == 0.0
    assert found["plain", Config(tile=8, unroll=1, order=0)] == pytest.approx(1.4 / 1.1, rel=0.05)
    faulty = {c for c in attempts(machine) if c[0] == "plain" and (c[1]["tile"], c[1]["order"]) == (16, 2)}
    assert faulty and set(found) == set(attempts(machine)) - faulty, "faults have records of their own"
    assert MemoryDatabase([survey]).surveys(PROBLEM.family()) == (survey,)


def test_where_only_the_default_was_looked_at_there_is_none():
    assert run(Machine(valley), seconds=0.1).survey is None
    assert run(Machine(lambda solver, config: Status.WRONG)).survey is None


class Interrupted(Machine):
    """Ctrl-C comes in the middle of an attempt."""

    def __init__(self, after: int) -> None:
        super().__init__(valley)
        self.left = after

    def attempt(self, candidate, limit=float("inf")):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().attempt(candidate, limit)


@pytest.mark.parametrize("after", [1, 5, 20])
@pytest.mark.parametrize("strategy", ["auto", "local", "random", "exhaustive"])
def test_an_interrupted_search_goes_on_and_repeats_nothing(after: int, strategy: str):
    kept: list[Outcome] = []
    broken = Interrupted(after)
    with pytest.raises(KeyboardInterrupt):
        run(broken, keep=kept.append, strategy=strategy)
    assert len(kept) == 1 and kept[0].chosen == DEFAULT and "KeyboardInterrupt" in kept[0].reason
    before, survey = attempts(broken), kept[0].survey
    surveys = [survey] if survey is not None else []
    faults = {(f.key.solver, f.config) for f in kept[0].faults}
    known = seen(survey) if survey is not None else {DEFAULT: 1.0}
    unfinished = set(before) - set(known) - faults
    assert len(unfinished) <= 1 and len(known) >= after / 5, "a slow one is probed up to four times"
    machine = Machine(valley)
    outcome = run(machine, surveys=surveys, strategy=strategy,
                  barred=lambda s, c: "faulty" if (s, c) in faults else None)  # fmt: skip
    again = attempts(machine)
    whole = Machine(valley)
    uninterrupted = run(whole, strategy=strategy)
    repeated = set(before) & set(again) - {DEFAULT} - unfinished
    assert len(repeated) <= 2 * candidate_search.KNOWN, "the best of each solver run again, and nothing else"
    assert all(known[c] >= max(known.values()) / candidate_search.HEAT_NEAR for c in repeated)
    assert set(before) | set(again) == set(attempts(whole)), "together they tried what one session tries"
    assert sum(before.values()) + sum(again.values()) <= sum(attempts(whole).values()) + 2 + 2 * candidate_search.KNOWN
    assert outcome.chosen == uninterrupted.chosen and outcome.changed


def test_a_stopped_search_keeps_its_survey():
    machine = Machine(valley)
    outcome = run(machine, stop=lambda: len(machine.attempts) >= 6)
    assert "stopped" in outcome.reason and outcome.survey is not None and len(outcome.survey.seen) == 6


@pytest.mark.parametrize("change", ["where", "default", "regime", "version"])
def test_what_was_seen_elsewhere_does_not_count(change: str):
    survey = run(Machine(valley)).survey
    assert survey is not None
    if change == "where":
        survey = replace(survey, key=replace(survey.key, where=replace(survey.key.where, software="2")))
    elif change == "default":
        survey = replace(survey, config=Config(survey.config, tile=2))
    elif change == "regime":
        survey = replace(survey, regime="warm")
    else:
        survey = replace(survey, seen=tuple(replace(s, version="0.9") for s in survey.seen))
    machine, fresh = Machine(valley), Machine(valley)
    run(machine, surveys=[survey])
    run(fresh)
    assert attempts(machine) == attempts(fresh)


def test_all_seen_is_only_raced():
    first = run(Machine(valley), strategy="exhaustive")
    machine = Machine(valley)
    outcome = run(machine, surveys=[first.survey], strategy="exhaustive",
                  barred=lambda s, c: "faulty" if (c.get("tile"), c.get("order")) == (16, 2) else None)  # fmt: skip
    assert len(machine.attempts) <= 1 + candidate_search.KNOWN and outcome.chosen == first.chosen
    assert outcome.gain is not None and not unknown(outcome.gain)


def test_too_much_is_cut_to_what_a_record_holds():
    wide = Fake("wide", {f"parameter {'x' * 200} {n}": [0, 1] for n in range(12)})
    default = ("wide", Config(wide.default(PROBLEM, TARGET)))
    machine = Machine(lambda solver, config: 0.001 * (1 + sum(config.values())), compile_seconds=0.001)
    outcome = tune(PROBLEM, TARGET, default, [wide], machine, strategy="random", seconds=15.0, clock=machine.clock)
    survey = outcome.survey
    assert survey is not None and len(survey.text) <= MOST_BYTES and from_line(to_line(survey)) == survey
    assert 0 < len(survey.seen) < outcome.attempted and survey.seen[0].gain == max(s.gain for s in survey.seen)


def test_surveys_that_say_nothing_new_are_superseded():
    survey = run(Machine(valley)).survey
    assert survey is not None
    older = replace(survey, date="2026-01-01T00:00:00Z", seen=survey.seen[:3])
    other = replace(older, regime="cold")
    more = replace(older, seen=(*older.seen, Sighting("plain", "9.9", Config(tile=1), 1.0)))
    assert superseded([survey, older, other, more]) == [older]


# ---- the command line ----------------------------------------------------------------------------------------------


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TUNEWRIGHT_USER_DB_PATH", str(tmp_path / "user"))
    monkeypatch.setenv("TUNEWRIGHT_SYSTEM_DB_PATH", str(tmp_path / "system"))

    def run(*arguments):
        code = tools.execute(["kb", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_kb_knows_surveys(call, tmp_path):
    survey = run(Machine(valley)).survey
    assert survey is not None
    older = replace(survey, date="2026-01-01T00:00:00Z")
    user = open_user(Settings.from_environment())
    user.add([survey, older])
    found = json.loads(call("stats", "--json")[1])["layers"]["user"]
    assert (found["surveys"], found["candidates_seen"]) == (2, 2 * len(survey.seen))
    code, out, _ = call("show", "Relu", "--device", "CPU.HOST")
    assert code == 0 and f"{len(survey.seen)} candidates seen in 2 surveys" in out and survey.digest[:10] in out
    code, out, _ = call("show", survey.digest[:12])
    assert (
        code == 0
        and f"{len(survey.seen)} candidates, 1 not usable" in out
        and re.search(r"1\.2\dx  plain order=0 tile=8", out)
    )
    assert json.loads(call("show", survey.digest, "--json")[1])["records"][0]["kind"] == "survey"
    assert "0 measurements, 0 faults, 2 surveys in" in call("export", tmp_path / "x.jsonl")[1]
    assert call("prune", "--superseded")[0] == 0 and set(user) == {survey}
    code, out, _ = call("import", tmp_path / "x.jsonl", "--any-processor")
    assert code == 0 and "1 record added" in out and set(user) == {survey, older}
    assert "2 " in call("diff", "user", tmp_path / "x.jsonl")[1]
    assert call("prune", "--older-than", 0)[0] == 0 and not list(user)
    assert isinstance(survey, Survey)


# ---- batches, and time ---------------------------------------------------------------------------------------------


class Batching(Machine):
    """Compiles several at a time, in the time of one."""

    ahead = 3

    def __init__(self, *arguments, slow=None, **options) -> None:
        super().__init__(*arguments, **options)
        self.batches: list[list[object]] = []
        self.slow = slow or (lambda candidate: self._compile)
        self.began: dict[object, float] = {}

    def prepare(self, candidates):
        self.batches.append(list(candidates))
        self.began |= {c: self.now + self.slow(c) for c in candidates}

    def ready(self, candidate, seconds):
        until = max((self.began.get(c, 0.0) for c in (self.batches or [[]])[-1]), default=0.0)
        self.now = min(max(self.now, until), self.now + seconds)
        return self.now >= until

    def attempt(self, candidate, limit=float("inf")):
        if candidate in self.began and (candidate[0], dict(candidate[1])) not in self.attempts:
            self.now -= self._compile  # it is done already
        return super().attempt(candidate, limit)


def test_batches_find_the_same_in_less_time_and_repeat_exactly():
    one, several, again = Machine(valley), Batching(valley), Batching(valley)
    alone, first, second = run(one), run(several), run(again)
    assert first.chosen == alone.chosen and set(attempts(several)) == set(attempts(one))
    assert first.seconds["search"] < 0.6 * alone.seconds["search"]
    assert several.batches == again.batches and first.trials == second.trials
    assert max(map(len, several.batches)) == 3 and sum(map(len, several.batches)) == len(several.attempts) - 1
    order = [c for batch in several.batches for c in batch]
    assert [(s, dict(c)) for s, c in order] == several.attempts[1:], "attempts are in the order of the batches"


@pytest.mark.parametrize("machine", [Machine, Batching])
@pytest.mark.parametrize("compiling", [0.05, 0.3, 0.7, 1.5, 3.0])
@pytest.mark.parametrize("decide", [True, False])
def test_nothing_begins_that_cannot_end_in_time(machine, compiling: float, decide: bool):
    made = machine(valley, compile_seconds=compiling)
    run(made, seconds=6.0, decide=decide)
    assert made.now <= 6.0 + 0.1
    assert len(made.attempts) >= min(45, int(0.5 * 6.0 / compiling))


def test_one_that_compiles_for_ever_is_not_waited_for():
    def slow(candidate):
        return 1000.0 if candidate[1].get("tile") == 4 else 0.2

    made = Batching(valley, slow=slow)
    outcome = run(made, seconds=8.0)
    assert made.now <= 8.0 + 0.1 and outcome.records
