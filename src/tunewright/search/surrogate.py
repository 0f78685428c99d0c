"""Search with a model: predicts every candidate from the trials so far and tries the most promising one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from .base import Strategy
from .gaussian import GaussianProcess, Singles
from .space import Code, Codes, Floats, Scalar, Space

#: Number of random configs before the model is used. Seeds replace them.
START = 8
#: For each seed the model assumes this number of configs that are slower than all that were tried.
WORSE = 0.5
#: Number of candidates predicted at a time. A larger space is searched through changing samples of this size.
POOL = 1 << 15
#: Candidates that the model updates after each trial. When the model has learnt its lengths again, it screens the pool
#: for a new shortlist. If candidates times trials exceed the second number, it screens only a random part.
SHORTLIST, SCREEN = 1 << 11, 1 << 19
#: The model learns its lengths again when the number of trials has grown by this factor.
RELEARN = 1.3
#: A failed trial gets this quantile, like the slowest fortieth of trials. The chance to work is raised to this power.
FAILED, CAUTION = 2.0, 3
#: If the candidates are only a part of the space, all neighbours of this number of the best configs are among them.
ELITE = 8


class Surrogate(Strategy):
    """A Gaussian process and the expected improvement over the best.

    The model uses the rank of each time, as a normal quantile. It must only know which config is faster; the slow half
    of a space, which may be slower by factors, must not dictate the scale. A failed trial counts as a slow one.
    Otherwise the regions where nothing works would stay the most uncertain and attract the search forever. The expected
    improvement is also weighted with the chance to work, which a simpler model learns.
    """

    name = "surrogate"

    def __init__(self, space: Space, rng: np.random.Generator, seeds: Iterable[Mapping[str, Scalar]] = ()) -> None:
        super().__init__(space, rng, seeds)
        self._seeded = len(self._queue)
        self._model: GaussianProcess | None = None
        self._learn_at = 0
        self._condition = True
        self._shortlist: npt.NDArray[np.int64] = np.arange(0)
        self._expected: set[Code] = set()
        self._scale = _Ranks(np.zeros(1))
        self._candidates = _Candidates(space, np.zeros((0, len(space.sizes)), dtype=np.int16))

    def propose(self) -> Code | None:
        worked = self.ranked()
        if len(self.costs) < (self._seeded or START) or len(worked) < 3:
            return self.safe_start()
        self._candidates.take(self.seen)
        self._update(worked)
        assert self._model is not None
        for code in self.seen:
            if code not in self.costs and code not in self._expected:  # asked in this batch, not told yet
                self._model.expect(self.space.features(np.array([code], dtype=np.int16))[0])
                self._expected.add(code)
        if not self._candidates.free[self._shortlist].any():
            return None
        at = int(np.argmax(self._gains(self.costs[worked[0]])))
        return self._candidates.code(int(self._shortlist[at]))

    def _gains(self, best: float) -> Singles:
        """Return the weighted expected improvement of every candidate of the shortlist."""
        assert self._model is not None
        deviation, chosen = self._model.deviation(), self._shortlist
        gain = expected_improvement(self._model.mean, deviation, self._scale(best)) + np.float32(1e-12) * deviation
        return np.asarray(gain * self._candidates.free[chosen] * self._candidates.works(chosen) ** CAUTION)

    def learn(self, code: Code, cost: float) -> None:
        self._candidates.tell(code, cost == math.inf)
        if self._model is None or self._condition:
            return
        if code == self.best and self._candidates.partial:
            self._condition = True  # the neighbours of a new best config become candidates
        else:
            self._model.add(self.space.features(np.array([code], dtype=np.int16))[0], self._scale(cost))
            self._expected.clear()

    def _update(self, worked: list[Code]) -> None:
        """Bring the model up to date. This is cheap unless the number of trials has grown much."""
        relearn = self._model is None or len(worked) >= self._learn_at
        if not relearn and not self._condition and self._candidates.free[self._shortlist].any():
            return
        if relearn:
            # Seeds are better than average. Treating their mean as the average would drive the search away from them.
            self._scale = _Ranks(np.array([self.costs[code] for code in worked]), worse=WORSE * self._seeded)
        told = worked + [code for code, cost in self.costs.items() if cost == math.inf]
        points = self.space.features(np.array(told, dtype=np.int16))
        values = np.array([self._scale(self.costs[code]) for code in told])
        if relearn:
            self._model = self._model or GaussianProcess(self.space.coordinate_groups)
            # Learn only from trials that worked, best first: the lengths should fit the region where the search
            # continues.
            self._model.learn(points[: len(worked)], values[: len(worked)])
            self._learn_at = max(len(worked) + 2, int(len(worked) * RELEARN))
        assert self._model is not None
        self._renew_candidates(worked)
        self._candidates.take(self.seen)
        self._shortlist = self._screen(worked)
        self._model.condition(points, values, self._candidates.features[self._shortlist])
        self._condition = False
        self._expected.clear()
        if len(self._shortlist) > SHORTLIST:
            best = np.sort(np.argpartition(self._gains(self.costs[worked[0]]), -SHORTLIST)[-SHORTLIST:])
            self._shortlist = self._shortlist[best]
            self._model.focus(best)

    def _screen(self, worked: list[Code]) -> npt.NDArray[np.int64]:
        """Return the candidates from which a new shortlist is chosen."""
        free = np.flatnonzero(self._candidates.free)
        size = max(SHORTLIST, SCREEN // len(self.costs))
        if len(free) <= size:
            return free
        near = (self._candidates.find(n) for code in worked[:ELITE] for n in self.fresh_neighbours(code))
        drawn = free[self.rng.integers(len(free), size=size)]
        return np.unique(np.concatenate([drawn, np.array([at for at in near if at is not None], dtype=np.int64)]))

    def _renew_candidates(self, worked: list[Code]) -> None:
        rows = self.space.rows
        if rows is not None and len(rows) <= POOL:
            if not len(self._candidates.codes):
                self._candidates = _Candidates(self.space, rows, self.costs)
            return
        near = dict.fromkeys(n for code in worked[:ELITE] for n in self.fresh_neighbours(code))
        room = max(POOL - len(near), POOL // 4)
        if rows is not None:
            others = map(tuple, rows[self.rng.choice(len(rows), room, replace=False)].tolist())
            near.update(dict.fromkeys(others))
        else:  # sampling by trial and error may be slow, so the pool grows step by step
            kept = (code for code in map(tuple, self._candidates.codes.tolist()) if code not in self.seen)
            near.update(dict.fromkeys(list(kept)[-room:]))
            near.update(dict.fromkeys(c for c in (self.space.sample_code(self.rng) for _ in range(128)) if c))
        self._candidates = _Candidates(self.space, np.array(list(near), dtype=np.int16), self.costs, partial=True)


class _Candidates:
    """The pool: its codes, which of them are free, and how likely each is to fail."""

    def __init__(
        self, space: Space, codes: Codes, costs: Mapping[Code, float] | None = None, partial: bool = False
    ) -> None:
        self.codes, self.partial = codes, partial
        self.features: Floats = space.features(codes)
        self.free: npt.NDArray[np.bool_] = np.ones(len(codes), dtype=np.bool_)
        self._index = {tuple(code): i for i, code in enumerate(codes.tolist())}
        self._taken: set[Code] = set()
        self._columns = np.ascontiguousarray(codes.T)
        self._likeness = np.float32(4.0) ** -np.arange(codes.shape[1] + 1, dtype=np.float32)
        self._failed = np.zeros(len(codes), dtype=np.float32)
        self._told = np.full(len(codes), 4.0**-3, dtype=np.float32)  # a slight prior towards working
        self._costs = dict(costs or {})
        self._any_failed = any(cost == math.inf for cost in self._costs.values())
        if self._any_failed:
            for code, cost in self._costs.items():
                self._weigh(code, cost == math.inf)

    def code(self, index: int) -> Code:
        return tuple(self.codes[index].tolist())

    def find(self, code: Code) -> int | None:
        return self._index.get(code)

    def take(self, asked: Iterable[Code]) -> None:
        """Mark codes as asked."""
        for code in asked:
            if code not in self._taken:
                self._taken.add(code)
                if (at := self._index.get(code)) is not None:
                    self.free[at] = False

    def tell(self, code: Code, failed: bool) -> None:
        self._costs[code] = math.inf if failed else 0.0
        if failed and not self._any_failed:  # before the first failure there is nothing to weigh
            self._any_failed = True
            for other in self._costs:
                self._weigh(other, other == code)
        elif self._any_failed:
            self._weigh(code, failed)

    def works(self, chosen: npt.NDArray[np.int64]) -> Singles | float:
        """Return the chance of candidates to work, from their similarity to trials that worked and that failed."""
        return 1.0 - self._failed[chosen] / self._told[chosen] if self._any_failed else 1.0

    def _weigh(self, code: Code, failed: bool) -> None:
        differ = np.zeros(len(self.codes), dtype=np.uint8)
        for column, value in zip(self._columns, code, strict=True):
            differ += column != value
        likeness = self._likeness[differ]
        self._told += likeness
        if failed:
            self._failed += likeness


class _Ranks:
    """Maps costs to normal quantiles of their ranks, as if there were ``worse`` more slow ones.

    Costs below the best continue by their ratio, so that an improvement still counts.
    """

    def __init__(self, costs: Floats, worse: float = 0.0) -> None:
        self._logs = np.sort(np.log(np.maximum(costs, 1e-300)))
        normal = NormalDist()
        n = len(costs)
        self._quantiles = np.array([normal.inv_cdf((i + 0.5) / (n + worse)) for i in range(n)])
        self._spread = float(self._logs.std()) or 1.0

    def __call__(self, cost: float) -> float:
        if cost == math.inf:
            return FAILED
        log = math.log(cost)
        below = max(0.0, float(self._logs[0]) - log) / self._spread
        return float(np.interp(log, self._logs, self._quantiles)) - below


def expected_improvement(mean: Singles, deviation: Singles, best: float) -> Singles:
    """Return the expected amount by which each candidate is below the best, counting 0 where it is not."""
    z = (np.float32(best) - mean) / deviation
    density = np.exp(-0.5 * z * z) * 0.3989422804014327
    # The normal distribution function after Abramowitz and Stegun 26.2.17. It loses precision in the lower tail; there
    # the leading term of the asymptotic series keeps the order of the candidates right.
    t = 1.0 / (1.0 + 0.2316419 * np.abs(z))
    tail = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    below = np.where(z > 0, 1.0 - density * tail, density * tail)
    return np.asarray(deviation * np.where(z < -4.0, density / (z * z + 3.0), z * below + density))


STRATEGIES = (Surrogate,)
