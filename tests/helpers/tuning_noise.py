"""A noisy machine without hardware: times with jitter, drift, bursts of contention, autocorrelation and heavy tails."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tunewright.devices.base import Target
from tunewright.ir.types import DType, TensorType
from tunewright.measure.base import Attempt, Candidate, Measurer, Race, Regime
from tunewright.search import Space, Status
from tunewright.solvers.base import Problem, Solver


@dataclass(frozen=True)
class Noise:
    """What a machine adds to times; sizes are standard deviations of logarithms."""

    jitter: float = 0.05
    #: slow waves: clocks, heat
    drift: float = 0.0
    #: jitter that lasts: the share that the next sample keeps, and its size
    memory: float = 0.0
    lasting: float = 0.0
    #: the share of the time in which others take the machine and times double, and how many samples that lasts
    contention: float = 0.0
    burst: float = 60.0
    #: the share of samples that take much longer
    tail: float = 0.0

    def logs(self, rng: np.random.Generator, experiments: int, steps: int) -> np.ndarray:
        """Logarithms of factors on the times of samples, one after the other."""
        shape = (experiments, steps)
        found = self.jitter * rng.standard_normal(shape)
        if self.lasting:
            state = self.lasting * rng.standard_normal(experiments)
            for step in range(steps):
                fresh = rng.standard_normal(experiments) * self.lasting * math.sqrt(1 - self.memory**2)
                state = self.memory * state + fresh
                found[:, step] += state
        if self.drift:
            pace, start = rng.uniform(0.3, 3, (experiments, 1)), rng.uniform(size=(experiments, 1))
            found += self.drift * np.sin(2 * np.pi * (pace * np.arange(steps) / steps + start))
        if self.contention:
            busy = rng.uniform(size=experiments) < self.contention
            for step in range(steps):
                changes = rng.uniform(size=experiments) < 1 / self.burst
                busy = np.where(changes, rng.uniform(size=experiments) < self.contention, busy)
                found[:, step] += busy * np.maximum(0.0, math.log(2) * (1 + 0.3 * rng.standard_normal(experiments)))
        if self.tail:
            found += (rng.uniform(size=shape) < self.tail) * np.minimum(rng.exponential(1.5, shape), 4.0)
        return found

    def rounds(self, rng: np.random.Generator, experiments: int, entrants: int, rounds: int) -> np.ndarray:
        """Factors by experiment, entrant and round; the order within each round is random."""
        logs = self.logs(rng, experiments, rounds * entrants).reshape(experiments, rounds, entrants)
        return np.exp(rng.permuted(logs, axis=2)).transpose(0, 2, 1)


QUIET = Noise(0.01)
JITTER = Noise(0.05)
ALL = {
    "jitter": JITTER,
    "drift": Noise(0.03, drift=0.3),
    "bursts": Noise(0.03, contention=0.4),
    "lasting": Noise(0.02, memory=0.95, lasting=0.1),
    "tails": Noise(0.03, tail=0.05),
    "everything": Noise(0.05, drift=0.2, memory=0.9, lasting=0.05, contention=0.3, tail=0.02),
}

TYPE = TensorType(DType.FLOAT32, (4, 64))
PROBLEM = Problem("Relu", (TYPE,), (TYPE,), {}, constant=(False,))
TARGET = Target("null", "nothing", "null", 1, (("script", "1"),), language="null")


class Fake(Solver):
    """A solver with a space; nothing of it is ever compiled."""

    def __init__(
        self, id: str, space: Mapping[str, Sequence[int]] | None = None, default: Mapping[str, int] | None = None
    ) -> None:
        space = space or {}
        self.id, self._space = id, Space(space)
        self._default = default or {name: values[0] for name, values in space.items()}

    def why_not(self, problem: Problem, target: Target) -> str | None:
        return None

    def default(self, problem, target):
        return self._default

    def space(self, problem, target):
        return self._space

    def source(self, problem, config, target):
        return f"{self.id} {sorted(config.items())}"

    def compile(self, problem, config, device):
        raise AssertionError("nothing is compiled here")


class Machine(Measurer):
    """Times come from ``seconds(solver, config)`` and noise; the clock advances as compiling and timing would."""

    def __init__(
        self,
        seconds: Callable[[str, Mapping[str, int]], float | Status],
        noise: Noise = QUIET,
        seed: int = 0,
        compile_seconds: float = 0.2,
        late: Mapping[Candidate, Attempt] | None = None,
    ) -> None:
        self._seconds, self._rng = seconds, np.random.default_rng(seed)
        self._tape = noise.logs(self._rng, 40, 1500).ravel()
        self._at, self._compile = 0, compile_seconds
        self.now = 0.0
        #: each once; what is attempted again is not compiled again
        self.attempts: list[tuple[str, dict[str, int]]] = []
        #: candidates that fall in a race
        self.late = dict(late or {})
        self.races: list[tuple[int, int]] = []

    def clock(self) -> float:
        return self.now

    def pose(self, problem, seed=0, regime="cold"):
        self.kind = regime

    def regime(self):
        return Regime(self.kind, 4, 1 << 20)

    def _time(self, candidate: Candidate) -> float:
        seconds = self._seconds(*candidate)
        assert not isinstance(seconds, Status)
        self._at = (self._at + 1) % len(self._tape)
        found = seconds * math.exp(self._tape[self._at])
        self.now += abs(found) if math.isfinite(found) else 0.0
        return found

    def attempt(self, candidate, limit=float("inf")):
        if (candidate[0], dict(candidate[1])) not in self.attempts:
            self.attempts.append((candidate[0], dict(candidate[1])))
            self.now += self._compile
        seconds = self._seconds(*candidate)
        if isinstance(seconds, Status):
            return Attempt(seconds, f"it is {seconds}", compile_seconds=self._compile)
        # between attempts the machine's mood changes: the tape runs on while things compile
        self._at = (self._at + int(self._rng.integers(50))) % len(self._tape)
        probe = self._time(candidate)
        if probe > limit:
            return Attempt(Status.OK, samples=(probe,), error=1e-6, compile_seconds=self._compile, probed=True)
        samples = tuple(self._time(candidate) for _ in range(5))
        return Attempt(Status.OK, samples=samples, error=1e-6, compile_seconds=self._compile)

    def race(self, candidates, rounds):
        self.races.append((len(candidates), rounds))
        samples: list[list[float]] = [[0.0] * rounds for _ in candidates]
        for turn in range(rounds):
            for i in self._rng.permutation(len(candidates)):
                samples[i][turn] = self._time(candidates[i])
        fallen = {i: self.late[c] for i, c in enumerate(candidates) if c in self.late}
        return Race(tuple(() if i in fallen else tuple(s) for i, s in enumerate(samples)), fallen)
