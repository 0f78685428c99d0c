"""Intervals of ratios: exact where they can be computed, and honest on simulated machines that are not quiet at all."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.tuning_noise import ALL, JITTER, Noise
from tunewright.measure import statistics
from tunewright.measure.statistics import (
    UNKNOWN,
    Spending,
    estimate,
    leader,
    looks,
    losers,
    quiet,
    ratio,
    relative,
    rough,
)


def test_the_distribution_of_rank_sums_is_counted_right():
    for count in range(1, 11):
        sums = [sum(kept) for signs in itertools.product((0, 1), repeat=count)
                for kept in [[r for r, s in zip(range(1, count + 1), signs, strict=True) if s]]]  # fmt: skip
        for tail in (0.3, 0.1, 0.05, 0.01, 0.001):
            fits = [w for w in range(max(sums) + 1) if sum(s <= w for s in sums) / len(sums) <= tail]
            assert statistics.signed_rank_reach(count, tail) == max(fits, default=-1)


@pytest.mark.parametrize("count", [101, 150, 300])
@pytest.mark.parametrize("tail", [0.1, 0.005, 0.0005, 1e-5])
def test_the_approximation_is_never_more_certain_and_hardly_less(count, tail):
    exact = int(np.searchsorted(statistics._signed_rank(count), tail, side="right")) - 1
    assert 0.97 * exact - 2 <= statistics.signed_rank_reach(count, tail) <= exact


def test_few_rounds_say_nothing():
    few = ratio([2.0] * 7, [1.0] * 7, 0.01)
    assert (few.low, few.high, few.pairs) == (pytest.approx(1 / UNKNOWN), pytest.approx(UNKNOWN), 7)
    assert few.median == pytest.approx(2)
    enough = ratio([2.0] * 8, [1.0] * 8, 0.01)
    assert enough.low == enough.high == pytest.approx(2)
    assert ratio([], [], 0.01).pairs == 0


@given(
    st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=60),
    st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=60),
    st.floats(1e-6, 0.5),
)
def test_an_interval_has_its_median_inside_and_turns_round_with_its_pair(a, b, alpha):
    one, other = ratio(a, b, alpha), ratio(b, a, alpha)
    assert 0 < one.low <= one.median <= one.high < math.inf
    rounds = min(len(a), len(b))
    assert min(rounds, 16) <= one.pairs <= rounds
    assert one.low == pytest.approx(1 / other.high) and one.median == pytest.approx(1 / other.median)
    assert relative(a, b) == pytest.approx(one.median) or one.median in (1 / UNKNOWN, UNKNOWN)


def test_disturbed_rounds_do_not_count():
    a, b = quiet([1.0, 1.1, 4.0, 1.0, *[1.0] * 20], [1.0, 1.0, 1.0, 9.0, *[1.1] * 20])
    assert a.tolist() == [1.0, 1.1, *[1.0] * 20] and b.tolist() == [1.0, 1.0, *[1.1] * 20]
    rising = [2.0**i for i in range(40)]
    assert quiet(rising, rising)[0].tolist() == rising[:16], "some always count"
    assert len(quiet([1.0, 9.0, 1.0], [1.0, 1.0, 1.0])[0]) == 3, "and so do all where there are few"


def test_who_wins_on_a_busy_machine_need_not_win_on_a_quiet_one():
    """A tenth of the rounds is quiet, and there the first is faster; in the others it suffers more."""
    rng = np.random.default_rng(0)
    busy = np.arange(400) % 8 != 0
    first = np.where(busy, 6.0, 0.9) * np.exp(0.05 * rng.standard_normal(400))
    second = np.where(busy, 3.0, 1.0) * np.exp(0.05 * rng.standard_normal(400))
    found = ratio(second, first, 0.01)
    assert 1.0 < found.low < 1 / 0.9 < found.high and found.pairs == 50


def test_a_quick_estimate_minds_what_is_rough():
    calm, fast = [1.0, 1.1, 1.05, 1.0, 1.02], [0.5, 0.55, 0.5, 0.52, 0.51]
    assert not rough(calm, fast) and estimate(calm, fast) == relative(calm, fast)
    torn = [1.0, 9.0, 7.0, 1.0, 8.0, 6.0]
    assert rough(torn, [0.5, 0.5, 3.0, 4.0, 0.5, 5.0])
    assert estimate(torn, [0.5, 0.5, 3.0, 4.0, 0.5, 5.0]) == pytest.approx(2.0)


def misses(noise: Noise, experiments: int, rounds: int, alpha: float, gain: float = 1.0, seed: int = 0) -> float:
    """How often the interval of a pair does not hold the true ratio."""
    found = noise.rounds(np.random.default_rng(seed), experiments, 3, rounds)
    outside = 0
    for times in found:
        interval = ratio(times[0] * gain, times[1], alpha)
        outside += not interval.low <= gain <= interval.high
    return outside / experiments


@pytest.mark.parametrize("name", ALL)
def test_intervals_hold_what_they_promise(name):
    for rounds in (12, 60):
        assert misses(ALL[name], 1000, rounds, 0.01) <= 0.02
    assert misses(ALL[name], 300, 60, 0.01, gain=1.2, seed=1) <= 0.027


@pytest.mark.soak
@pytest.mark.parametrize("name", ALL)
def test_intervals_hold_what_they_promise_often(name):
    """Within three standard deviations of the promise; 1 % is an upper bound, so it is one-sided."""
    count = 20_000
    for rounds in (9, 16, 64):
        assert misses(ALL[name], count, rounds, 0.01) <= 0.01 + 3 * math.sqrt(0.01 * 0.99 / count)
    assert misses(ALL[name], 3000, 256, 0.01) <= 0.01 + 3 * math.sqrt(0.01 * 0.99 / 3000)


def test_the_check_of_coverage_can_fail():
    """An interval of means over unpaired samples, as one would naively make it, is wrong far too often under drift."""
    found = ALL["drift"].logs(np.random.default_rng(0), 500, 120)
    a, b = found[:, :60], found[:, 60:]  # one after the other instead of in turns
    intervals = [ratio(np.exp(x), np.exp(y), 0.01) for x, y in zip(a, b, strict=True)]
    outside = sum(not r.low <= 1 <= r.high for r in intervals)
    assert outside / 500 > 0.3


def test_looks_double_and_end_at_the_limit():
    assert list(looks(100)) == [8, 16, 32, 64, 100] and list(looks(8)) == [8] and list(looks(3)) == [3]


def test_the_risks_of_all_looks_add_up_to_alpha():
    spending = Spending(0.01)
    risks = [spending.at(n, 512, n == 512) for n in looks(512)]
    assert sum(risks) == pytest.approx(0.01) and risks[-1] == pytest.approx(0.005) and risks == sorted(risks)
    early = Spending(0.01)
    early.at(64, 512)
    assert early.at(70, 512, last=True) == pytest.approx(0.01 * (1 - 64 / 512)), "the last look takes what is left"
    changed = Spending(0.01)  # rounds turn out to take longer than planned, then shorter
    assert sum(changed.at(n, planned) for n, planned in [(8, 512), (16, 20), (32, 400), (400, 400)]) <= 0.01 + 1e-12


@pytest.mark.parametrize("name", ALL)
def test_all_looks_together_hold(name):
    """The interval misses at no look, in all but 1 % of experiments."""
    count, outside = 300, 0
    for times in ALL[name].rounds(np.random.default_rng(3), count, 3, 128):
        spending = Spending(0.01)
        found = [ratio(times[0][:n], times[1][:n], spending.at(n, 128, n == 128)) for n in looks(128)]
        outside += any(not r.low <= 1 <= r.high for r in found)
    assert outside / count <= 0.027


def test_three_per_cent_are_found_under_five_per_cent_of_jitter():
    """Above the least gain of 1 %, within the rounds of a confirmation, at a risk of 1 % over all looks."""
    found = 0
    for times in JITTER.rounds(np.random.default_rng(4), 100, 3, 512):
        spending = Spending(0.01)
        gains = (ratio(times[0][:n] * 1.03, times[1][:n], spending.at(n, 512, n == 512)) for n in looks(512))
        found += any(gain.low >= 1.01 for gain in gains)
    assert found > 90


def test_a_race_drops_the_slow_and_keeps_the_fast():
    rng = np.random.default_rng(5)
    wrong = 0
    for times in JITTER.rounds(rng, 100, 5, 64):
        rows = [times[0] * 1.2, times[1] * 1.2, times[2], times[3] * 1.1, times[4]]
        assert leader(rows, [2, 3, 4]) in (2, 4)
        gone = losers(rows, [2, 3, 4], 0.01)
        wrong += 3 not in gone or bool(gone & {2, 4})
    assert wrong <= 5


def test_what_cannot_be_better_by_a_margin_is_dropped():
    same = [[1.0] * 20] * 4
    assert leader(same, [2, 3]) == 2 and losers(same, [2, 3], 0.01) == set()
    assert losers(same, [2, 3], 0.01, margin=0.005) == {3}
