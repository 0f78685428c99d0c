"""Statistics, comparison, advice and sweet spots on samples whose answers are known."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from tunewright.errors import InputError
from tunewright.tools.benchmark.advice import Facts, NodeKernel, advise, origin_word
from tunewright.tools.benchmark.chart import lines, nice
from tunewright.tools.benchmark.measure import BenchmarkResult
from tunewright.tools.benchmark.run import Lists, parse_latency, parse_percentiles
from tunewright.tools.benchmark.statistics import SLICES, TimeSlices, compare, difference, statistics, thinned
from tunewright.tools.benchmark.sweep import Axes, SweepPoint, doubling, frontier, sweet_spot, whole_numbers


# -- statistics -------------------------------------------------------------------------------------------------------
def test_statistics_of_known_samples():
    found = statistics([s / 1000 for s in range(1, 102)], (50, 90, 99.9))
    assert found == pytest.approx(
        {"median": 0.051, "mean": 0.051, "p90": 0.091, "p99.9": 0.1009, "min": 0.001, "max": 0.101,
         "std": float(np.std(np.arange(1, 102)) / 1000), "iqr": 0.05}
    )  # fmt: skip


def test_slices_cover_every_inference_once():
    latencies = [0.01] * 50 + [0.03] * 50
    ends = np.cumsum(latencies).tolist()
    found = TimeSlices.of(latencies, ends, 0.0)
    assert len(found.latencies) == len(found.rates) == 33
    assert found.latencies[0] == 0.01 and found.latencies[-1] == 0.03
    assert found.rates[0] == pytest.approx(100) and found.rates[-1] == pytest.approx(1 / 0.03)
    # as much work as there was: the slices' times add up
    counts = np.diff([round(k * 100 / 33) for k in range(34)])
    assert sum(counts / np.asarray(found.rates)) == pytest.approx(ends[-1])
    assert len(TimeSlices.of([0.01] * 10_000, np.cumsum([0.01] * 10_000), 0.0).rates) == SLICES
    assert TimeSlices.of([0.01], [0.01], 0.0).latencies == [0.01]
    assert thinned(list(range(5000))) == list(range(0, 5000, 5))


def test_a_difference_that_is_there_is_found_with_its_size():
    rng = np.random.default_rng(0)
    old = np.exp(rng.normal(0, 0.05, 40))
    new = 1.2 * np.exp(rng.normal(0, 0.05, 40))
    found = difference(new.tolist(), old.tolist())
    assert found is not None and found.certain and found.p < 1e-6
    assert found.low < 1.2 < found.high and 1.15 < found.ratio < 1.25
    back = difference(old.tolist(), new.tolist())
    assert back is not None and back.ratio == pytest.approx(1 / found.ratio)


def test_chance_is_called_chance():
    """Of 200 pairs of runs that do not differ, one percent may be called different."""
    rng = np.random.default_rng(1)
    wrong = covered = 0
    for _ in range(200):
        a, b = rng.lognormal(0, 0.3, 40), rng.lognormal(0, 0.3, 40)
        found = difference(a.tolist(), b.tolist())
        assert found is not None
        wrong += found.certain
        covered += found.low <= 1 <= found.high
    assert wrong <= 7 and covered >= 193
    assert difference([1.0] * 4, [2.0] * 40) is None
    same = difference([1.0] * 10, [1.0] * 10)
    assert same is not None and same.p == 1.0 and not same.certain and same.ratio == 1.0


def test_the_rank_sum_test_is_the_textbooks():
    """Against a count over all ways to deal the ranks."""
    from itertools import combinations

    new, old = [1.1, 1.9, 3.1, 4.2, 5.3], [1.0, 2.0, 2.5, 2.6, 2.7]
    ranks = sorted(new + old)
    mine = sum(ranks.index(v) for v in new)
    sums = [sum(c) for c in combinations(range(10), 5)]
    middle = np.mean(sums)
    exact = np.mean([abs(s - middle) >= abs(mine - middle) for s in sums])
    found = difference(new, old)
    assert found is not None and found.p == pytest.approx(exact, abs=0.03)
    assert found.ratio == pytest.approx(math.exp(np.median([math.log(a / b) for a in new for b in old])))


def report(latency, rate, requests=1, **more):
    slices = {"latency_ms": latency, "per_second": rate}
    return {"requests": requests, "samples": {"slices": slices}, "environment": {"cpu": "A"}, **more}


def test_comparison_judges_by_what_counts_and_names_what_differs():
    rng = np.random.default_rng(2)
    slow, fast = (10 * rng.normal(1, 0.01, 20)).tolist(), (8 * rng.normal(1, 0.01, 20)).tolist()
    one = compare(report(slow, [100.0] * 20, batch=4), report(fast, [100.0] * 20, batch=1))
    assert one.by == "latency" and one.slower == pytest.approx(0.25, abs=0.02)
    assert one.otherwise == ["batch: 1 then, 4 now"]
    many = compare(report(slow, [100.0] * 20, requests=4), report(fast, [100.0] * 20, requests=4))
    assert many.by == "throughput" and many.slower == 0.0
    halved = compare(report(fast, fast, 2), report(fast, slow, 2))
    assert halved.slower == pytest.approx(0.25, abs=0.02)
    assert compare(report(fast, fast), report(slow, slow)).slower == 0.0  # it became faster


# -- advice -----------------------------------------------------------------------------------------------------------
QUIET = Facts(streams=1, requests=1, concurrency=1.0, latency=0.01, run=0.01, host=0.0001, copy=0.0, spread=0.02,
              drift=0.0, inferences=1000)  # fmt: skip


def told(**changes):
    return {a.kind: a.text for a in advise(dataclasses.replace(QUIET, **changes))}


def test_nothing_is_said_where_all_is_well():
    assert told() == {}


def test_advice_about_streams():
    idle = told(streams=4, requests=2, concurrency=1.9)
    assert "2 of 4 streams idle" in idle["idle-streams"] and "--streams 2" in idle["idle-streams"]
    assert "--requests 4" in idle["idle-streams"]
    starved = told(streams=4, requests=8, concurrency=2.1, latency=0.01, run=0.009)
    assert starved["idle-streams"].endswith("try --streams 2")
    assert told(streams=4, requests=4, concurrency=3.6) == {}
    waits = told(streams=2, requests=8, concurrency=2.0, latency=0.04, run=0.01)
    assert "wait 75% of their latency" in waits["waiting-requests"] and "--requests 2" in waits["waiting-requests"]
    assert told(streams=2, requests=32, concurrency=2.0, latency=0.04, run=0.01, batch=8) == {}, "they run together"
    few = told(streams=2, requests=8, concurrency=1.0, batch=8)
    assert few["idle-streams"].endswith("try --requests 16")


def kernel(name, origin="shipped", on_host=False, share=None, gain=None, op="Conv"):
    return NodeKernel(name, op, "k", origin, on_host, share, gain)


def test_advice_about_kernels():
    tuned = [kernel(f"k{i}", "tuned", share=0.2, gain=g) for i, g in enumerate((1.2, 1.25, 1.6))]
    found = told(kernels=[*tuned, kernel("d", "default", share=0.4)], options=["-s", "x=4x3"])
    assert "kernels with 40% of the time are untuned" in found["untuned"]
    assert "`tunewright tune MODEL -d CPU -s x=4x3`" in found["untuned"]
    assert "1.25 times as fast" in found["untuned"] and "about 8% less time" in found["untuned"]  # 0.4 * (1 - 1 / 1.25)
    assert told(kernels=[kernel("a", share=0.9), kernel("d", "default", share=0.1)]) == {}
    uncounted = told(kernels=[kernel("a"), kernel("b", "default"), kernel("c", "default")])
    assert "2 of 3 kernels are untuned" in uncounted["untuned"] and "expect" not in uncounted["untuned"]


def test_advice_about_nodes_on_the_host():
    ran = [kernel("a", share=0.7), *(kernel(f"n{i}", "default", True, 0.15, op="NonZero") for i in range(2))]
    assert "2 nodes run on the host and take 30% of the time: 2 NonZero." in told(kernels=ran)["host-nodes"]
    one = told(kernels=[kernel("a", share=0.9), kernel("n", "default", True, 0.1, op="TopK")])["host-nodes"]
    assert one.startswith("1 node runs on the host and takes 10% of the time: TopK.")
    assert told(kernels=[kernel("a", share=0.99), kernel("n", "default", True, 0.01)]) == {}
    assert told(kernels=[kernel("a", "default", True, 1.0)]) == {}  # the device is the host


def test_advice_about_the_parts_of_an_inference():
    assert "the host takes 40% of each inference (4,000 us)" in told(host=0.004)["host-bound"]
    assert "--hint throughput" in told(host=0.004)["host-bound"]
    assert "copies take 30%" in told(copy=0.003)["copies"]
    assert "copies" not in told(copy=None)


def test_advice_about_doubtful_figures():
    assert "interquartile range is 30%" in told(spread=0.3)["noisy"]
    assert "20% slower than the first" in told(drift=0.2)["drift"]
    assert "20% faster" in told(drift=-0.2)["drift"]
    assert list(told(inferences=5, spread=0.9)) == ["few-inferences"]


def test_origins_in_one_word():
    assert origin_word("system knowledge base (provisional: another units)") == "shipped"
    assert origin_word("heuristic (predicted 1.05 times as fast as the default)") == "heuristic"
    assert [origin_word(t) for t in ("user knowledge base", "search", "lockfile", "default", "")] == [
        "tuned", "tuned", "locked", "default", "",
    ]  # fmt: skip


# -- sweep ------------------------------------------------------------------------------------------------------------
def point(label, ms, rate, batch=None):
    """A point whose every inference took so long, and so many were done in a second."""
    made = SweepPoint(1, 1, batch, label=label)
    made.result = BenchmarkResult(latencies=[ms / 1e3] * 10, seconds=10 / rate * (batch or 1))
    return made


def test_frontier_and_sweet_spot():
    points = [point("a", 5, 100), point("b", 6, 90), point("c", 10, 300), point("d", 40, 310), point("e", 80, 200)]
    assert [p.label for p in frontier(points, 50)] == ["a", "c", "d"]
    assert sweet_spot(points, 50, None).label == "c"  # within 5 % of d, and much earlier
    assert sweet_spot(points, 50, 0.05).label == "d"
    assert sweet_spot(points, 50, 0.007).label == "a"
    assert sweet_spot(points, 50, 0.001) is None
    assert point("f", 1, 80, batch=8).rate == pytest.approx(80)


def test_turns_are_added_as_if_they_had_followed_each_other():
    one = BenchmarkResult(
        latencies=[0.1, 0.1], runs=[0.1, 0.1], hosts=[0, 0], copies=[0, 0], ends=[5.1, 5.2], begin=5.0, seconds=0.2,
        launches=2,
    )  # fmt: skip
    two = BenchmarkResult(
        latencies=[0.2], runs=[0.2], hosts=[0], copies=[0], ends=[9.2], begin=9.0, seconds=0.2, launches=1
    )
    one.add(two)
    assert one.seconds == pytest.approx(0.4) and one.launches == 3 and one.begin == 5.0
    assert one.ends == pytest.approx([5.1, 5.2, 5.4])
    empty = BenchmarkResult()
    empty.add(one)
    assert empty.begin == 5.0 and empty.ends == one.ends


def test_axes():
    assert [(p.streams, p.requests, p.batch) for p in Axes([1, 2], [], [1, 4]).points()] == [
        (1, 1, 1), (1, 2, 1), (2, 2, 1), (2, 4, 1), (1, 1, 4), (1, 2, 4), (2, 2, 4), (2, 4, 4),
    ]  # fmt: skip
    assert len({p.label for p in Axes([1, 2, 3], [1, 2, 3], [None]).points()}) == 9
    assert doubling(1) == [1] and doubling(2) == [1, 2] and doubling(6) == [1, 2, 4, 6] and doubling(8) == [1, 2, 4, 8]
    with pytest.raises(InputError, match="points"):
        Axes(range(1, 100), range(1, 100), [None]).points()


def test_the_chart_in_a_terminal():
    points = [point("a", 5, 100), point("c", 10, 300), point("d", 40, 310)]
    drawn = lines(points, points[1], 50, 0.03)
    body = [line.partition("┤")[2] or line.partition("│")[2] for line in drawn]
    assert sum(line.count("*") for line in body) == 1 and any(":" in line for line in body)
    assert all(any(label in line for line in body) for label in "ad")
    assert "c" not in "".join(body)  # it is the star
    assert max(map(len, drawn)) <= 79 and drawn[0] == "inferences per second"
    row = next(i for i, line in enumerate(body) if "d" in line)
    assert row < next(i for i, line in enumerate(body) if "a" in line)  # more throughput is higher
    one = lines([point("a", 5, 100)], None, 99, None)
    assert any("a" in line for line in one[1:]) and "99 % percentile of latency, ms" in one[-1]
    wide = lines([point("a", 1, 100), point("b", 1000, 200)], None, 50, None)
    assert {"1", "10", "100", "1,000"} <= set(wide[-2].split())


def test_round_numbers():
    assert nice(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    assert nice(3, 7.4, 5) == pytest.approx([3, 4, 5, 6, 7])


# -- options ----------------------------------------------------------------------------------------------------------
def test_numbers_of_options():
    assert whole_numbers("1,2,4", "--streams") == [1, 2, 4] and whole_numbers("2-4,3", "--x") == [2, 3, 4]
    assert whole_numbers(None, "--streams") == []
    for text in ("", "0", "a", "1,", "1-", "-1", "9999", "1.5"):
        with pytest.raises(InputError, match="not a whole number"):
            whole_numbers(text, "--streams")
    assert Lists.parse("AUTO", None, None, False).auto
    with pytest.raises(InputError, match="no meaning with --sweep"):
        Lists.parse("auto", None, None, True)
    assert parse_latency("20ms") == 0.02 and parse_latency("500us") == pytest.approx(5e-4)
    assert parse_latency("0.1s") == 0.1 and parse_latency("5") == 0.005
    for text in ("", "ms", "-1ms", "nan", "inf", "0"):
        with pytest.raises(InputError, match="not a time"):
            parse_latency(text)
    assert parse_percentiles("50, 99.9") == [50, 99.9]
    for text in ("", "101", "x", "-1", "nan"):
        with pytest.raises(InputError, match="not a percentile"):
            parse_percentiles(text)
