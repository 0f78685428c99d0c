"""Evaluate a heuristic on unseen networks: each network is held out once while the others train the heuristic.

For a held-out problem the speed of the pick is a share of the best known speed (the tuned speed). A pick that was never
measured for the problem counts as the default; the number of such picks is reported.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..search.space import Config
from ..solvers.base import Solver
from .train import Example, train
from .trees import Heuristic

#: Number of groups of problems that are held out if no networks are given.
GROUPS = 5


@dataclass(frozen=True)
class Network:
    """The problems of a network by their keys, with the seconds that each takes in an inference."""

    name: str
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Judged:
    """The answer of a heuristic for a problem that it was not trained on."""

    example: Example
    #: seconds in an inference
    weight: float
    #: None: the default
    pick: tuple[str, Config] | None
    why: str
    abstains: bool
    #: speed-up of the pick over the default; None if it was never measured
    gain: float | None

    @property
    def share(self) -> float:
        """Speed of the pick divided by the tuned speed."""
        return (1.0 if self.gain is None else max(self.gain, 1e-3)) / self.example.best


@dataclass
class HeldOut:
    """A network, or a group of problems, that was held out."""

    name: str
    judged: list[Judged] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Share of the tuned speed: the geometric mean over problems, weighted by their time."""
        return _mean((j.share, j.weight) for j in self.judged)

    @property
    def known(self) -> float:
        """The same over problems whose pick was measured or is the default."""
        return _mean((j.share, j.weight) for j in self.judged if j.gain is not None)

    @property
    def untuned(self) -> float:
        """The same for the defaults."""
        return _mean((1 / j.example.best, j.weight) for j in self.judged)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "problems": len(self.judged), "speed": self.speed, "known": self.known,
            "untuned": self.untuned, "abstained": sum(j.abstains for j in self.judged),
            "picked": sum(j.pick is not None for j in self.judged), "unknown": sum(j.gain is None for j in self.judged),
        }  # fmt: skip


def hold_out(
    known: Sequence[Example],
    networks: Sequence[Network],
    solvers: Sequence[Solver],
    seed: int = 0,
    tell: Callable[[str], None] = lambda name: None,
) -> list[HeldOut]:
    """Train without each network in turn, and judge the result on it.

    Without networks, groups of problems are held out, which is an easier test.
    """
    found = []
    for network in networks or _groups(known):
        mine = [e for e in known if e.problem.key() in network.seconds]
        if mine:
            tell(network.name)
            others = [e for e in known if e.problem.key() not in network.seconds]
            heuristic = train(others, {}, seed)
            found.append(
                HeldOut(network.name, [judge(heuristic, e, network.seconds[e.problem.key()], solvers) for e in mine])
            )
    return found


def _groups(known: Sequence[Example]) -> list[Network]:
    """Group problems by a digest of their keys; the result is deterministic."""
    groups: list[dict[str, float]] = [{} for _ in range(GROUPS)]
    for e in known:
        key = e.problem.key()
        groups[hashlib.sha256(key.encode()).digest()[0] % GROUPS][key] = e.seconds
    return [Network(f"group {n}", group) for n, group in enumerate(groups, 1)]


def judge(heuristic: Heuristic, e: Example, weight: float, solvers: Sequence[Solver]) -> Judged:
    """Ask a heuristic about a problem, and rate its answer."""
    mine = [s for s in solvers if s.ops is None or e.problem.op in s.ops]
    mine = [s for s in mine if not s.host and s.language in (None, e.target.language)]

    advice = heuristic.advise(e.problem, e.target, e.default, mine, lambda s, _: s.why_not(e.problem, e.target))
    if not advice.picks:
        return Judged(e, weight, None, advice.why, advice.abstains, 1.0)
    solver, config = advice.picks[0]
    return Judged(e, weight, (solver.id, config), advice.why, False, e.gain(solver.id, config))


def summary(held: Sequence[HeldOut], networks: bool) -> dict[str, Any]:
    """Return the published summary as JSON data."""
    judged = [j for one in held for j in one.judged]
    regrets = sorted(1 - j.share for j in judged)
    quantiles = {"median": 0.5, "p90": 0.9, "worst": 1.0}
    return {
        "held_out": "networks" if networks else "groups of problems",
        # all networks have the same weight
        "speed": _mean((one.speed, 1.0) for one in held),
        "known": _mean((one.known, 1.0) for one in held),
        "untuned": _mean((one.untuned, 1.0) for one in held),
        "problems": len(judged),
        "abstained": sum(j.abstains for j in judged),
        "picked": sum(j.pick is not None for j in judged),
        "unknown": sum(j.gain is None for j in judged),
        "regret": {name: float(np.quantile(regrets, q)) for name, q in quantiles.items()} if regrets else None,
        "networks": [one.to_json() for one in held],
    }


def _mean(pairs: Iterable[tuple[float, float]]) -> float:
    """Return the weighted geometric mean of (value, weight) pairs; 1 if there are none."""
    known = [(value, weight) for value, weight in pairs if weight > 0]
    total = sum(weight for _, weight in known)
    return math.exp(sum(weight * math.log(value) for value, weight in known) / total) if total else 1.0
