"""Statistics of a benchmark: percentiles, time slices, and the test whether two runs differ. Pure functions on samples.

Successive latencies are correlated, because a disturbance lasts longer than one inference. Runs are therefore compared
by slices of time, each of which counts as one sample, and not by their thousands of inferences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Any

#: number of slices of a run, and minimum number of inferences in each
SLICES, LEAST = 40, 3
#: number of latencies that a report keeps, evenly over the run
KEPT = 1000
#: probability of reporting a difference between equal runs
ALPHA = 0.01
#: minimum number of slices on each side of a comparison
FEWEST = 5


def percentile_name(percent: float, unit: str = "") -> str:
    """Return the name of a percentile: median, p99, p99.9."""
    return ("median" if percent == 50 else f"p{percent:g}") + unit


def statistics(latencies: Sequence[float], percentiles: Sequence[float] = (90, 95, 99)) -> dict[str, float]:
    """Return median, mean, percentiles, extremes, standard deviation and interquartile range, in seconds."""
    import numpy as np

    times = np.asarray(latencies, np.float64)
    low, high = np.percentile(times, [25, 75])
    found = {"median": np.median(times), "mean": times.mean()}
    wanted = sorted({p for p in percentiles if p != 50})
    found |= {percentile_name(p): value for p, value in zip(wanted, np.percentile(times, wanted), strict=True)}
    found |= {"min": times.min(), "max": times.max(), "std": times.std(), "iqr": high - low}
    return {key: float(value) for key, value in found.items()}


def percentile(latencies: Sequence[float], percent: float) -> float:
    """Return a percentile of the latencies."""
    import numpy as np

    return float(np.percentile(np.asarray(latencies, np.float64), percent))


@dataclass(frozen=True)
class TimeSlices:
    """A run in slices of equally many inferences: the median latency of each, and its inferences per second."""

    latencies: list[float]
    rates: list[float]

    def as_dict(self) -> dict[str, list[float]]:
        return {
            "latency_ms": [short(s * 1e3) for s in self.latencies],
            "per_second": [short(r) for r in self.rates],
        }

    @staticmethod
    def of(latencies: Sequence[float], ends: Sequence[float], begin: float) -> TimeSlices:
        """Slice latencies given in the order of their ends. ``ends`` and ``begin`` are times of the same clock."""
        import numpy as np

        count = len(latencies)
        slices = max(1, min(SLICES, count // LEAST))
        edges = [round(k * count / slices) for k in range(slices + 1)]
        medians, rates, last = [], [], begin
        for a, b in pairwise(edges):
            if a == b:
                continue
            medians.append(float(np.median(latencies[a:b])))
            rates.append((b - a) / max(ends[b - 1] - last, 1e-9))
            last = ends[b - 1]
        return TimeSlices(medians, rates)


def short(value: float) -> float:
    """Round to six significant digits. More are noise and enlarge reports."""
    return float(f"{value:.6g}")


def thinned(latencies: Sequence[float]) -> list[float]:
    """Return at most `KEPT` latencies, evenly over the run."""
    step = max(1, math.ceil(len(latencies) / KEPT))
    return list(latencies[::step])


@dataclass(frozen=True)
class RunDifference:
    """The ratio of one run's samples to the other's, its confidence interval, and the probability of chance.

    ``p``: the probability of a difference at least this large between two equal runs (rank-sum test).
    """

    ratio: float
    low: float
    high: float
    p: float

    @property
    def certain(self) -> bool:
        return self.p < ALPHA and not self.low <= 1.0 <= self.high

    def as_dict(self) -> dict[str, Any]:
        return {"ratio": self.ratio, "low": self.low, "high": self.high, "p": self.p, "significant": self.certain}


def difference(new: Sequence[float], old: Sequence[float], alpha: float = ALPHA) -> RunDifference | None:
    """Compare new samples with old ones. Returns None if there are too few samples.

    The ratio is the median of all ratios between a new and an old sample (Hodges-Lehmann). Its interval is that of the
    rank-sum test (Mann-Whitney). Outliers hardly move them, and no normal distribution is assumed.
    """
    import numpy as np

    n, m = len(new), len(old)
    if min(n, m) < FEWEST:
        return None
    logs = np.subtract.outer(np.log(np.asarray(new, np.float64)), np.log(np.asarray(old, np.float64))).ravel()
    logs.sort()
    mean = n * m / 2
    _, ties = np.unique(np.concatenate([new, old]), return_counts=True)
    total = n + m
    spread = math.sqrt(n * m / 12 * (total + 1 - float((ties**3 - ties).sum()) / (total * (total - 1))))
    wins = float((logs > 0).sum() + 0.5 * (logs == 0).sum())
    z = max(0.0, abs(wins - mean) - 0.5) / spread if spread else 0.0
    reach = max(0, math.floor(mean - NormalDist().inv_cdf(1 - alpha / 2) * math.sqrt(n * m * (total + 1) / 12)))
    low, high = logs[reach], logs[len(logs) - 1 - reach]
    return RunDifference(
        math.exp(float(np.median(logs))), math.exp(float(low)), math.exp(float(high)), 2 * (1 - NormalDist().cdf(z))
    )


@dataclass(frozen=True)
class Comparison:
    """The comparison of a run with an earlier one: latency, throughput, and other differences between the runs."""

    latency: RunDifference | None
    throughput: RunDifference | None
    #: differences in how the two runs were measured, in words
    otherwise: list[str]
    #: the decisive figure: latency for one request, throughput for several
    by: str

    @property
    def slower(self) -> float:
        """The part by which the new run is certainly slower; 0 if it is not, or if that is unknown."""
        if self.by == "latency":
            found = self.latency
            return max(0.0, found.ratio - 1) if found is not None and found.certain else 0.0
        found = self.throughput
        return max(0.0, 1 / found.ratio - 1) if found is not None and found.certain else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "latency": None if self.latency is None else self.latency.as_dict(),
            "throughput": None if self.throughput is None else self.throughput.as_dict(),
            "judged_by": self.by,
            "slower_by": self.slower,
            "differences": self.otherwise,
        }


#: key in a report -> its name in messages
_SAME = {"model": "model", "device": "device", "inputs": "inputs", "api": "API", "streams": "streams",
         "requests": "requests", "batch": "batch", "config": "config"}  # fmt: skip
_SAME_MACHINE = {"cpu": "processor", "cores": "cores", "platform": "platform", "tunewright": "version of Tunewright"}


def compare(new: Mapping[str, Any], old: Mapping[str, Any]) -> Comparison:
    """Compare two reports."""
    otherwise = [
        f"{name}: {_say(old.get(key))} then, {_say(new.get(key))} now"
        for key, name in _SAME.items()
        if old.get(key) != new.get(key)
    ]
    then, now = old.get("environment") or {}, new.get("environment") or {}
    otherwise += [
        f"{name}: {_say(then.get(key))} then, {_say(now.get(key))} now"
        for key, name in _SAME_MACHINE.items()
        if then.get(key) != now.get(key)
    ]
    mine, theirs = new["samples"]["slices"], old["samples"]["slices"]
    return Comparison(
        difference(mine["latency_ms"], theirs["latency_ms"]),
        difference(mine["per_second"], theirs["per_second"]),
        otherwise,
        "latency" if new["requests"] == 1 else "throughput",
    )


def _say(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={v}" for k, v in value.items()) or "none"
    return "unknown" if value is None else str(value)
