"""The parts of background tuning where time decides, on scripted clocks: activity, pace, claims, trials, verdicts."""

from __future__ import annotations

import itertools
import json
import os
import threading

import numpy as np
import pytest

from tunewright.knowledge.claims import EXPIRY, RENEWAL, Claims, MachineTurn
from tunewright.measure import request_activity
from tunewright.measure.paced import SAVED, Pace
from tunewright.measure.request_activity import MOST_REQUESTS, Activity, ActivityGate
from tunewright.model_tuning.background_swap import EARLY, MOST_PAIRS, WARM_UP, Jury, TrialVerdict
from tunewright.runtime.requests.plan_trial import PlanTrial
from tunewright.runtime.requests.request_meter import MOST_SHAPES, Histogram, ModelMeter

# ---- activity -------------------------------------------------------------------------------------------------------


@pytest.fixture
def watched():
    made = Activity()
    yield made, ActivityGate(made.descriptor)
    made.close()


def test_a_gate_sees_requests_of_the_other_side(watched):
    made, gate = watched
    one, other = made.take(), made.take()
    assert not gate.is_serving and gate.last == 0
    made.begin(one)
    made.begin(other)
    made.end(one)
    assert gate.is_serving
    made.end(other)
    assert not gate.is_serving and gate.last > 0


def test_a_sample_that_a_request_interrupts_is_known(watched):
    made, gate = watched
    word = made.take()
    with gate.sample() as quiet:
        pass
    with gate.sample() as begun:
        made.begin(word)
    with gate.sample() as ended:
        made.end(word)
    with gate.sample() as short:  # begun and ended in between
        made.begin(word)
        made.end(word)
    with gate.sample() as new:  # also one whose request has only just got a word
        made.begin(made.take())
    assert [s.interrupted for s in (quiet, begun, ended, short, new)] == [False, True, True, True, True]
    assert gate.samples == (5, 4)


def test_measuring_waits_for_requests_and_for_a_pause(watched):
    made, other = watched
    word, wish = made.take(), made.take()
    gate = ActivityGate(made.descriptor, wish)
    made.begin(word)
    calls = itertools.count()

    def alive():
        number = next(calls)
        if number == 2:
            made.pause(wish, True)
            made.end(word)
            assert gate.is_paused and not other.is_paused and not other.is_serving  # it is one's own wish
        if number == 4:
            made.pause(wish, False)

    gate.wait(alive)
    assert next(calls) > 4 and gate.waited > 0 and not gate.is_paused


def test_words_are_used_again_and_never_run_out(watched):
    made, gate = watched
    words = [made.take() for _ in range(MOST_REQUESTS + 5)]
    assert len(set(words)) == MOST_REQUESTS
    for word in words:
        made.begin(word)
        made.end(word)
    assert not gate.is_serving
    made.begin(words[3])
    made.give_back(words[3])
    assert not gate.is_serving and made.take() == words[3]


def test_a_forked_child_has_words_of_its_own():
    mine = request_activity.of_process()
    word = mine.take()
    child = os.fork()
    if not child:
        code = 1
        try:
            theirs = request_activity.of_process()
            theirs.begin(theirs.take())
            code = 0 if theirs is not mine else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert not ActivityGate(mine.descriptor).is_serving
    mine.give_back(word)


# ---- pace -----------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.time = 0.0

    def __call__(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds


class Open:
    """A gate without requests."""

    is_paused, waited = False, 0.0


@pytest.mark.parametrize("duty", [0.02, 0.1, 0.5, 1.0])
def test_the_duty_cycle_is_honoured(duty):
    clock, rng = Clock(), np.random.default_rng(0)
    pace = Pace(Open(), duty, now=clock, sleep=clock.sleep)
    total = 0.0
    while clock.time < 2000:
        seconds = float(rng.exponential(0.3))
        total += seconds
        pace.work(lambda seconds=seconds: clock.sleep(seconds))
    assert pace.clock() == pytest.approx(total, rel=1e-6)
    assert duty * 0.97 * clock.time - 5 <= total <= duty * clock.time + SAVED + 3


def test_what_was_not_worked_is_not_saved_up_for_ever():
    clock = Clock()
    pace = Pace(Open(), 0.1, now=clock, sleep=clock.sleep)
    clock.sleep(10_000)
    pace.forgive(10_000)
    begin, worked = clock.time, 0.0
    while clock.time < begin + 100:
        pace.work(lambda: clock.sleep(0.1))
        worked += 0.1
    assert worked <= 0.1 * 100 + SAVED + 0.2


def test_waiting_for_requests_is_no_work_and_a_pause_stops_all():
    clock, gate = Clock(), Open()
    pace = Pace(gate, 1.0, now=clock, sleep=clock.sleep)

    def job():
        clock.sleep(3.0)
        gate.waited += 2.0  # of the three

    pace.work(job)
    assert pace.clock() == pytest.approx(1.0)
    gate.is_paused = True
    pace.between = lambda: setattr(gate, "is_paused", clock.time < 60)
    begin = clock.time
    pace.work(lambda: None)
    assert clock.time >= 60 > begin and pace.clock() == pytest.approx(1.0)


# ---- claims ---------------------------------------------------------------------------------------------------------


def test_a_claim_is_one_processs(tmp_path):
    clock = Clock()
    clock.time = 1e9
    one, other = Claims(tmp_path, clock), Claims(tmp_path, clock)
    assert one.take("a") and not other.take("a") and other.take("b")
    assert one.take("a")  # its own
    one.give_back("a")
    assert other.take("a")
    other.close()
    assert one.take("a") and one.take("b")


def test_a_claim_expires_unless_it_is_renewed(tmp_path):
    clock = Clock()
    clock.time = 1e9
    one, other = Claims(tmp_path, clock), Claims(tmp_path, clock)
    one.take("kept")
    one.take("given up")
    for _ in range(int(3 * EXPIRY / RENEWAL)):
        clock.sleep(RENEWAL)
        one._mine.pop("given up", None)  # as if its owner had been killed
        one.renew()
    assert not other.take("kept") and other.take("given up")
    one.give_back("given up")
    assert not Claims(tmp_path, clock).take("given up")  # it is the other's now


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'{"owner": 1}',
        b'{"owner": "x", "until": "soon"}',
        b"\xff" * 5000,
        b"[" * 4000,
        b'{"owner": "x", "until": 1e300}',
        b'{"owner": "x", "until": NaN}',
    ],
)
def test_a_damaged_claim_blocks_nobody_for_long(tmp_path, data):
    clock = Clock()
    claims = Claims(tmp_path, clock)
    path = claims._path("a")
    path.parent.mkdir()
    path.write_bytes(data)
    clock.time = os.stat(path).st_mtime + EXPIRY + 1
    assert claims.take("a")
    assert json.loads(path.read_text())["owner"] == claims.owner


def test_a_folder_that_cannot_be_written_to_stops_nobody(tmp_path):
    (tmp_path / "claims").write_text("a file where the folder belongs")
    assert Claims(tmp_path).take("a")
    assert MachineTurn(tmp_path / "claims").take()


def test_one_process_at_a_time_measures(tmp_path):
    one, other = MachineTurn(tmp_path), MachineTurn(tmp_path)
    assert one.take() and not other.take()
    one.give_back()
    assert other.take()


# ---- trials ---------------------------------------------------------------------------------------------------------


def run(trial, old, new, pairs, rng, spread=0.05):
    for _ in range(2 * pairs):
        number, plan = trial.turn()
        trial.tell(number, (old if plan == "old" else new) * float(rng.lognormal(0, spread)))


def verdict(old, new, seed, spread=0.05):
    """What a jury says, and after how many pairs."""
    trial, jury, rng = PlanTrial("old", "new", seed), Jury(), np.random.default_rng(seed)
    for pairs in range(1, MOST_PAIRS + WARM_UP + 1):
        run(trial, old, new, 1, rng, spread)
        found = jury.verdict(trial)
        if found is not None:
            return found[0], pairs
    return None, MOST_PAIRS


def test_both_plans_have_as_many_turns_in_an_order_of_chance():
    trial = PlanTrial("old", "new", 3)
    turns = [trial.turn()[1] for _ in range(400)]
    assert turns.count("old") == 200
    firsts = turns[::2]
    assert 60 < firsts.count("old") < 140


def test_pairs_are_whole_and_turns_of_threads_get_lost_nowhere():
    trial = PlanTrial("old", "new")

    def work():
        for _ in range(500):
            number, plan = trial.turn()
            trial.tell(number, 1.0 if plan == "old" else 2.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    old, new = trial.pairs()
    assert len(old) == len(new) == 1000 and set(old) == {1.0} and set(new) == {2.0}
    trial.turn()  # a turn that failed tells nothing, and its pair does not count
    number, _ = trial.turn()
    trial.tell(number, 9.0)
    assert len(trial.pairs()[0]) == 1000


def test_what_is_slower_is_found_out_and_what_is_not_stays():
    for seed in range(20):
        assert verdict(1.0, 1.1, seed)[0] is TrialVerdict.SLOWER
        assert verdict(1.0, 0.9, seed)[0] is TrialVerdict.FASTER
    same = [verdict(1.0, 1.0, seed)[0] for seed in range(100)]
    assert same.count(TrialVerdict.SLOWER) + same.count(TrialVerdict.DOUBTFUL) <= 6
    assert all(found is not None for found in same)


def test_what_is_far_slower_has_few_requests():
    found, pairs = verdict(1.0, 3.0, 1)
    assert found is TrialVerdict.SLOWER and pairs <= EARLY + WARM_UP
    noisy = [verdict(1.0, 1.0, seed, spread=0.6)[0] for seed in range(60)]
    assert noisy.count(TrialVerdict.SLOWER) <= 3


# ---- histograms of shapes -------------------------------------------------------------------------------------------


def test_a_histogram_is_bounded_and_loses_no_count():
    histogram = Histogram()
    for n in range(10 * MOST_SHAPES):
        histogram.add(((n, 3),), 1, 0.5)
        histogram.add(((7, 7),), 1, 2.0)  # what takes most time never makes room
    assert len(histogram.rows) == MOST_SHAPES and ((7, 7),) in histogram.rows
    counts = sum(count for count, _ in histogram.rows.values()) + histogram.others[0]
    assert counts == 20 * MOST_SHAPES


def test_what_requests_met_outlives_them():
    meter = ModelMeter(["x", "y"])
    mine = meter.of_request()
    for shape in ((2, 3), (2, 3), (4, 5)):
        mine.measured(dict, lambda shape=shape: [(shape, "f"), ((1,), "f")])
    del mine
    other = meter.of_request()
    other.measured(dict, lambda: [((4, 5), "f"), ((1,), "f")])
    found = {met.shapes["x"]: met.count for met in meter.met()}
    assert found == {(2, 3): 2, (4, 5): 2} and meter.met()[0].shapes["y"] == (1,)
    assert {met.shapes["x"]: met.count for met in meter.continued(None).met()} == found


def test_an_inference_that_fails_is_over_and_not_counted():
    made = Activity()
    meter = ModelMeter(["x"], made)
    mine = meter.of_request()

    def fail():
        assert ActivityGate(made.descriptor).is_serving
        raise ValueError

    with pytest.raises(ValueError):
        mine.measured(fail, lambda: [((1,), "f")])
    assert not ActivityGate(made.descriptor).is_serving and not meter.met()
