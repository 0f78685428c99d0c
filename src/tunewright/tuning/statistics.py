"""Who is faster, and how sure that is: intervals of ratios from interleaved turns. Pure functions over samples.

Why the intervals are honest on a noisy machine: candidates take turns, and the order within each round is drawn at
random. If two of them differ by a factor alone, then which one met the worse moment of a round is a fair coin, thrown
anew each round, whatever the noise is: drift, bursts of other load, autocorrelation, heavy tails. So the logarithm of
the ratio, less that of the factor, has a random sign in every round, independent of its size. That is all the
signed-rank interval assumes. No model of the noise is fitted, and nothing is said to be normal.

Rounds are left out by a rule that is blind to who is who (`quiet`), which keeps this argument.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from .record import Ratio

Floats = npt.NDArray[np.float64]

#: bounds of a ratio of which nothing is known; a record holds finite numbers
UNKNOWN = 1e6
#: rounds at which a sequential test looks for the first time; then at twice as many, and so on
FIRST_LOOK = 8
#: A round is quiet when both times together are within this factor of the lowest tenth. Jitter of 10 % stays inside, a
#: competitor for the core does not. A tenth of the rounds counts in any case, and at least this number.
QUIET, LEAST_QUIET = 1.35, 16
#: spread (between quartiles) of log-ratios that jitter does not make
ROUGH = 0.2
#: up to this number of rounds the distribution is computed; beyond, it is close to normal (a test compares them)
_EXACT = 100


def quiet(first: Sequence[float], second: Sequence[float]) -> tuple[Floats, Floats]:
    """The rounds of a pair that were not disturbed, judged by both times together.

    It is not about precision alone. Who is faster on a busy machine need not be on a quiet one: kernels that hand out
    work in small parts suffer less from a core that is taken away.
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
    """How many times as long the first takes as the second; the interval is wrong with a chance of at most ``alpha``.

    The samples are of the same rounds. The median is that of the means of all pairs of log-ratios (Hodges and
    Lehmann's): nearly as sharp as a mean, and no outlier moves it far.
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
    # whatever the timer says, a record holds finite numbers
    middle, low, high = (min(max(math.exp(min(float(x), 99.0)), 1 / UNKNOWN), UNKNOWN) for x in (middle, low, high))
    return Ratio(middle, low, high, count)


def unknown(found: Ratio) -> bool:
    """Whether there were too few rounds to say anything."""
    return found.high >= UNKNOWN


def relative(slower: Sequence[float], faster: Sequence[float]) -> float:
    """The median of `ratio` alone."""
    a, b = quiet(slower, faster)
    logs = np.log(a) - np.log(b)
    rows, columns = np.triu_indices(len(logs))
    return math.exp(float(np.median(logs[rows] + logs[columns])) / 2)


def rough(slower: Sequence[float], faster: Sequence[float]) -> bool:
    """Whether the ratios of a few rounds differ so much that other programs must have used the processor."""
    logs = np.log(slower) - np.log(faster)
    return bool(np.quantile(logs, 0.75) - np.quantile(logs, 0.25) > ROUGH)


def estimate(slower: Sequence[float], faster: Sequence[float]) -> float:
    """The ratio from a few rounds, without an interval: `relative`, or where rounds are `rough`, of the shortest times.

    Measured with five others at work on two cores, 25 rounds each: the two shortest times are off by 10 to 20 %,
    medians by 20 to 30 %. On a calm machine it is the other way round, 3 % against 1.5 %.
    """
    if not rough(slower, faster):
        return relative(slower, faster)
    a, b = np.sort(np.log(slower))[:2], np.sort(np.log(faster))[:2]
    return math.exp(float(np.mean(a) - np.mean(b)))


@lru_cache(maxsize=4096)
def signed_rank_reach(count: int, tail: float) -> int:
    """The largest rank sum that chance falls to or below with a probability of at most ``tail``; -1: there is none."""
    if tail <= 0 or 2.0**-count > tail:
        return -1
    if count > _EXACT:
        spread = math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
        # a little less: never more certain than the real distribution
        return math.floor(count * (count + 1) / 4 + NormalDist().inv_cdf(tail) * spread) - 3
    return int(np.searchsorted(_signed_rank(count), tail, side="right")) - 1


@lru_cache(maxsize=128)
def _signed_rank(count: int) -> Floats:
    """P(W <= w) of the signed-rank sum W for w = 0, 1, ..."""
    chances = np.zeros(count * (count + 1) // 2 + 1)
    chances[0] = 1.0
    for rank in range(1, count + 1):  # each rank counts or does not, with even odds
        chances[rank:] += chances[:-rank].copy()
        chances /= 2
    return np.cumsum(chances)


def looks(limit: int) -> Iterator[int]:
    """The numbers of rounds after which a sequential test looks: it doubles them, and ends at the limit."""
    rounds = FIRST_LOOK
    while rounds < limit:
        yield rounds
        rounds *= 2
    yield limit


@dataclass
class Spending:
    """What a sequential test may risk: ``alpha`` over all of its looks, spent in proportion to the rounds.

    The risks of the looks add up to alpha at most, so the intervals of all looks hold together. Half of it is left for
    the last look, where it is needed most; large differences are seen early all the same.
    """

    alpha: float
    spent: float = 0.0

    def at(self, rounds: int, planned: int, last: bool = False) -> float:
        """The risk to take after this number of the planned rounds. The last look takes what is left.

        The plan may change with the time that rounds take, never with what they found.
        """
        due = self.alpha if last else self.alpha * min(1.0, rounds / planned)
        risk = max(0.0, due - self.spent)
        self.spent += risk
        return risk


def leader(samples: Sequence[Sequence[float]], entrants: Sequence[int]) -> int:
    """The entrant with the shortest time, by pairs with the first row of the samples."""
    return max(entrants, key=lambda i: (relative(samples[0], samples[i]), -i))


def losers(samples: Sequence[Sequence[float]], entrants: Sequence[int], alpha: float, margin: float = 0.0) -> set[int]:
    """The entrants that can be dropped: for certain they are not faster than the leader by more than a margin."""
    first = leader(samples, entrants)
    return {i for i in entrants if i != first and ratio(samples[i], samples[first], alpha).low > 1.0 - margin}
