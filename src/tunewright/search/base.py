"""The interface of a strategy: callers ask it for configs and tell it the results.

A strategy is one file: a subclass of `Strategy` with a ``name`` and `propose`, listed in the module's ``STRATEGIES``.
The base class keeps the promises that every strategy makes: it asks seeds first, no config twice, and ends when no
config is left.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import numpy as np

from .space import Code, Codes, Config, Scalar, Space

#: `propose` may return a config that was asked before; after this number in a row the base class draws a fresh one.
PATIENCE = 16
#: draws for each config that is asked, once a trial has failed
CHOICES = 4
#: how many configs are passed on to a similar problem
ELITE = 8


class Status(StrEnum):
    """The outcome of a trial."""

    OK = "OK"  #: ran with the right output
    FAILED = "FAILED"  #: rejected by the compiler or the device
    WRONG = "WRONG"  #: ran with a wrong output
    TIMEOUT = "TIMEOUT"  #: exceeded its time limit
    CRASHED = "CRASHED"  #: crashed its process


@dataclass(frozen=True)
class Trial:
    """One measured config. ``seconds`` is valid only for status OK; ``why`` explains any other status."""

    config: Mapping[str, Scalar]
    status: Status = Status.OK
    seconds: float = math.inf
    why: str = ""

    @property
    def cost(self) -> float:
        """Seconds, or infinity if the trial gave no usable time."""
        usable = self.status is Status.OK and math.isfinite(self.seconds) and self.seconds > 0
        return float(self.seconds) if usable else math.inf  # the measurement may be a numpy number


class Strategy(ABC):
    """Proposes configs and learns from their results. Equal inputs, generator states and trials give equal configs.

    Trials may be told in any order. They may also be of configs that were never asked, such as those that another
    strategy or an earlier session measured. The strategy learns from them and does not ask for them again.
    """

    name: ClassVar[str]

    def __init__(self, space: Space, rng: np.random.Generator, seeds: Iterable[Mapping[str, Scalar]] = ()) -> None:
        self.space, self.rng = space, rng
        #: codes that were asked or told, in order
        self.seen: dict[Code, None] = {}
        #: codes that were told, with their cost
        self.costs: dict[Code, float] = {}
        self.best: Code | None = None
        # A seed may come from another device or version of the space: invalid ones are left out.
        valid = (space.find(seed) for seed in seeds if seed in space)
        self._queue: deque[Code] = deque(dict.fromkeys(code for code in valid if code is not None))
        self._order: list[int] = []
        self._failures = 0

    # ---- what callers use -------------------------------------------------------------------------------------

    def ask(self, n: int = 1) -> list[Config]:
        """Return up to n configs that were never asked before; none when the space is exhausted."""
        configs: list[Config] = []
        while len(configs) < n and (code := self._next()) is not None:
            self.seen[code] = None
            configs.append(self.space.config(code))
        return configs

    def tell(self, trials: Iterable[Trial]) -> None:
        """Learn from trials."""
        for trial in trials:
            code, cost = self.space.code(trial.config), trial.cost
            self.seen[code] = None
            self._failures += (cost == math.inf) - (self.costs.get(code) == math.inf)
            self.costs[code] = cost
            if cost < (math.inf if self.best is None else self.costs[self.best]):
                self.best = code
            self.learn(code, cost)

    def elite(self, n: int = ELITE) -> list[Config]:
        """Return the best configs so far, best first, as seeds for a similar problem (see `varied`)."""
        return [self.space.config(code) for code in varied(self.ranked(), n)]

    # ---- what a strategy writes -------------------------------------------------------------------------------

    @abstractmethod
    def propose(self) -> Code | None:
        """Return a valid code worth trying, or None for any fresh one. A code that was asked before is dropped."""

    def learn(self, code: Code, cost: float) -> None:  # noqa: B027
        """Called for every told trial. The cost is in seconds, or infinite if the trial failed."""

    # ---- what a strategy may use ------------------------------------------------------------------------------

    def fresh(self) -> Code | None:
        """Return a random valid code that was never asked, or None when none is left."""
        rows = self.space.rows
        if rows is None:
            for _ in range(PATIENCE):
                code = self.space.sample_code(self.rng)
                if code is None or code not in self.seen:
                    return code
            return next((c for c in map(self.space.code, self.space) if c not in self.seen), None)
        while True:
            while self._order:
                code = tuple(rows[self._order.pop()].tolist())
                if code not in self.seen:
                    return code
            # codes that were drawn but not asked remain to be asked
            left = [i for i, code in enumerate(map(tuple, rows.tolist())) if code not in self.seen]
            if not left:
                return None
            self._order = self.rng.permutation(left).tolist()

    def safe_start(self) -> Code | None:
        """Like `fresh`, but prefers codes unlike those that failed."""
        found = [code for code in (self.fresh() for _ in range(self.choices)) if code is not None]
        return self.safest(found) if found else None

    @property
    def choices(self) -> int:
        """How many codes to draw for one that `safest` picks: more than one once a trial has failed."""
        return CHOICES if self._failures else 1

    def fresh_neighbours(self, code: Code, step: int | None = None) -> list[Code]:
        """Return the neighbours of a code that were never asked."""
        return [near for near in self.space.neighbour_codes(code, step) if near not in self.seen]

    def ranked(self) -> list[Code]:
        """Return the codes that worked, best first."""
        worked = [code for code, cost in self.costs.items() if cost < math.inf]
        return sorted(worked, key=self.costs.__getitem__)

    def risk(self, codes: Sequence[Code]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Estimate the probability that each code fails, from its similarity to the trials so far."""
        if not self._failures:
            return np.zeros(len(codes))
        told: Codes = np.array(list(self.costs), dtype=np.int16)
        failed = np.fromiter((cost == math.inf for cost in self.costs.values()), dtype=np.float64)
        differ = (np.array(codes, dtype=np.int16)[:, None, :] != told[None, :, :]).sum(axis=2)
        likeness = 4.0 ** -differ.astype(np.float64)
        # A slight prior towards working: a code unlike any trial is worth a try.
        return np.asarray((likeness @ failed) / (likeness.sum(axis=1) + 4.0**-3))

    def safest(self, codes: Sequence[Code]) -> Code:
        """Draw one of the codes by its chance to work, so that a failing region becomes rare but stays reachable."""
        if len(codes) == 1 or not self._failures:
            return codes[int(self.rng.integers(len(codes)))]
        works = np.maximum(1.0 - self.risk(codes), 1e-3) ** 2
        return codes[int(self.rng.choice(len(codes), p=works / works.sum()))]

    def _next(self) -> Code | None:
        while self._queue:
            if (code := self._queue.popleft()) not in self.seen:
                return code
        for _ in range(PATIENCE):
            proposed = self.propose()
            if proposed is None:
                break
            if proposed not in self.seen:
                return proposed
        return self.fresh()


def varied(ranked: Sequence[Code], n: int) -> list[Code]:
    """Choose at most n codes to pass on to a similar problem. ``ranked`` and the result are sorted best first.

    Half of them are the best. The best codes are often alike and fail together on another problem. The others are
    therefore the best of the better third that differ in two parameters from every code chosen so far.
    """
    chosen = list(ranked[: (n + 1) // 2])
    for code in ranked[len(chosen) : max(n, len(ranked) // 3)]:
        if len(chosen) == n:
            break
        if all(sum(a != b for a, b in zip(code, other, strict=True)) >= 2 for other in chosen):
            chosen.append(code)
    return chosen
