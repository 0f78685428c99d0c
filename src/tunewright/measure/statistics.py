"""Compare candidates by intervals of ratios from interleaved turns. Pure functions over samples.

The intervals are valid on a noisy machine for this reason. Candidates take turns, and the order within each round is
random. If two of them differ only by a factor, a fair coin decides in each round which one meets the worse moment. This
holds for any noise: drift, bursts of other load, autocorrelation, heavy tails. The logarithm of the ratio, minus that
of the factor, therefore has a random sign in every round, independent of its size. The signed-rank interval assumes
nothing else. No model of the noise is fitted, and no distribution is assumed to be normal.

The rule that leaves out rounds (`quiet`) does not know which candidate is which, so the argument still holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from ..knowledge.record import Ratio

Floats = npt.NDArray[np.float64]

#: Bounds of an unknown ratio; a record holds only finite numbers.
UNKNOWN = 1e6
#: Rounds before the first look of a sequential test; each later look comes after twice as many.
FIRST_LOOK = 8
#: A round is quiet if both times together lie within this factor of the lowest tenth. Jitter of 10 % stays inside, a
#: competitor for the core does not. At least a tenth of the rounds counts, and at least this number.
QUIET, LEAST_QUIET = 1.35, 16
#: Spread between the quartiles of log-ratios that jitter alone does not cause.
ROUGH = 0.2
#: Up to this number of rounds the exact distribution is used; beyond it is nearly normal (a test compares them).
_EXACT = 100


def quiet(first: Sequence[float], second: Sequence[float]) -> tuple[Floats, Floats]:
    """Return the undisturbed rounds of a pair, judged by both times together.

    This affects more than precision: the faster candidate on a busy machine may be the slower one on a quiet machine.
    Kernels that distribute work in small parts suffer less when a core is taken away.
    """
    count = min(len(first), len(second))
    a, b = np.asarray(first[:count], np.float64), np.asarray(second[:count], np.float64)
    if count <= LEAST_QUIET:
        return a, b
    level = np.log(a) + np.log(b)
    in_any_case = np.sort(level)[max(LEAST_QUIET - 1, count // 10)]
    kept = level <= max(float(np.quantile(level, 0.1)) + 2 * math.log(QUIET), float(in_any_case))
    return a[kept], b[kept]


def ratio(slower: Sequence[float], faster: Sequence[float], alpha: float) -> Ratio:
    """Return the ratio of ``slower`` to ``faster``; its interval is wrong with a probability of at most ``alpha``.

    Both samples come from the same rounds. The median is the Hodges-Lehmann estimate over all pairs of log-ratios. It
    is nearly as precise as a mean, and an outlier hardly changes it.
    """
    a, b = quiet(slower, faster)
    count = len(a)
    if not count:
        return Ratio(1.0, 1 / UNKNOWN, UNKNOWN, 0)
    logs = np.log(a) - np.log(b)
    rows, columns = np.triu_indices(count)
    means = np.sort((logs[rows] + logs[columns]) / 2)
    middle = float(np.median(means))
    reach = signed_rank_reach(count, alpha / 2)
    low, high = (means[reach], means[-1 - reach]) if reach >= 0 else (-math.inf, math.inf)
    # whatever the timer reports, a record must hold finite numbers
    middle, low, high = (min(max(math.exp(min(float(x), 99.0)), 1 / UNKNOWN), UNKNOWN) for x in (middle, low, high))
    return Ratio(middle, low, high, count)


def unknown(found: Ratio) -> bool:
    """Whether there were too few rounds for a statement."""
    return found.high >= UNKNOWN


def relative(slower: Sequence[float], faster: Sequence[float]) -> float:
    """Return only the median of `ratio`."""
    a, b = quiet(slower, faster)
    logs = np.log(a) - np.log(b)
    rows, columns = np.triu_indices(len(logs))
    return math.exp(float(np.median(logs[rows] + logs[columns])) / 2)


def rough(slower: Sequence[float], faster: Sequence[float]) -> bool:
    """Whether the ratios of a few rounds differ so much that other programs must have used the processor."""
    logs = np.log(slower) - np.log(faster)
    return bool(np.quantile(logs, 0.75) - np.quantile(logs, 0.25) > ROUGH)


def estimate(slower: Sequence[float], faster: Sequence[float]) -> float:
    """Return the ratio from a few rounds without an interval.

    This is `relative`, or the ratio of the shortest times if the rounds are `rough`. Measured with five other processes
    on two cores, 25 rounds each. The two shortest times err by 10 to 20 %, medians by 20 to 30 %. On an idle machine
    they err by 3 % and 1.5 %.
    """
    if not rough(slower, faster):
        return relative(slower, faster)
    a, b = np.sort(np.log(slower))[:2], np.sort(np.log(faster))[:2]
    return math.exp(float(np.mean(a) - np.mean(b)))


@lru_cache(maxsize=4096)
def signed_rank_reach(count: int, tail: float) -> int:
    """Return the largest rank sum whose cumulative probability is at most ``tail``; -1 if there is none."""
    if tail <= 0 or 2.0**-count > tail:
        return -1
    if count > _EXACT:
        spread = math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
        # slightly lower, so that it never claims more certainty than the exact distribution
        return math.floor(count * (count + 1) / 4 + NormalDist().inv_cdf(tail) * spread) - 3
    return int(np.searchsorted(_signed_rank(count), tail, side="right")) - 1


@lru_cache(maxsize=128)
def _signed_rank(count: int) -> Floats:
    """Return P(W <= w) of the signed-rank sum W for w = 0, 1, ..."""
    chances = np.zeros(count * (count + 1) // 2 + 1)
    chances[0] = 1.0
    for rank in range(1, count + 1):  # each rank is included or not, with equal probability
        chances[rank:] += chances[:-rank].copy()
        chances /= 2
    return np.cumsum(chances)


def looks(limit: int) -> Iterator[int]:
    """Yield the numbers of rounds at which a sequential test looks: doubling, and finally the limit."""
    rounds = FIRST_LOOK
    while rounds < limit:
        yield rounds
        rounds *= 2
    yield limit


@dataclass
class Spending:
    """Divides the risk ``alpha`` of a sequential test among its looks, in proportion to the rounds.

    The risks of all looks add up to at most alpha, so the intervals of all looks hold together. Half of it remains for
    the last look, where it is needed most. Large differences still show early.
    """

    alpha: float
    spent: float = 0.0

    def at(self, rounds: int, planned: int, last: bool = False) -> float:
        """Return the risk to take after this number of the planned rounds. The last look takes what is left.

        The plan may depend on the duration of rounds, but never on their results.
        """
        due = self.alpha if last else self.alpha * min(1.0, rounds / planned)
        risk = max(0.0, due - self.spent)
        self.spent += risk
        return risk


def leader(samples: Sequence[Sequence[float]], entrants: Sequence[int]) -> int:
    """Return the entrant with the shortest time, compared in pairs with the first row of the samples."""
    return max(entrants, key=lambda i: (relative(samples[0], samples[i]), -i))


def losers(samples: Sequence[Sequence[float]], entrants: Sequence[int], alpha: float, margin: float = 0.0) -> set[int]:
    """Return the entrants to drop: those that are certainly not faster than the leader by more than a margin."""
    first = leader(samples, entrants)
    return {i for i in entrants if i != first and ratio(samples[i], samples[first], alpha).low > 1.0 - margin}
