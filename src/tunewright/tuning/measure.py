"""What measures candidates: a `Measurer`. `bench.Local` does it in this process, `isolated.Isolated` in a worker.

A measurer serves one device and one problem at a time (`pose`). It compiles, checks and times; it decides nothing about
who is better: that is `session`, from the samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ..search.base import Status
from ..solvers.base import Config, Problem

#: a solver's id and a config of its space
Candidate: TypeAlias = tuple[str, Config]


@dataclass(frozen=True)
class Attempt:
    """What came of one candidate by itself."""

    status: Status
    #: why it is not OK
    why: str = ""
    #: seconds per execution, of each turn; a single probe where more was not worth it
    samples: tuple[float, ...] = ()
    #: largest deviation from the reference relative to the result's largest element, over every input it was checked on
    error: float = 0.0
    #: how long compiling and checking took
    compile_seconds: float = 0.0
    check_seconds: float = 0.0
    #: it was slower than `limit`, and only probed
    probed: bool = False


@dataclass(frozen=True)
class Race:
    """Interleaved turns: ``samples[i]`` are the seconds per execution of candidate i, one for each round."""

    samples: tuple[tuple[float, ...], ...]
    #: candidates that fell out (index -> what became of them); their samples end there
    fallen: dict[int, Attempt] = field(default_factory=dict)


@dataclass(frozen=True)
class Regime:
    """How data was fed: copies rotate so that it comes from memory (cold), or there is one (warm)."""

    kind: str  # cold, warm
    copies: int
    nbytes: int


class Measurer(ABC):
    """Compiles, checks and times candidates for the posed problem."""

    @abstractmethod
    def pose(self, problem: Problem, seed: int = 0, regime: str = "cold") -> str | None:
        """Turn to a problem: make inputs and the reference's results. None, or why it cannot be measured."""

    @abstractmethod
    def attempt(self, candidate: Candidate, limit: float = float("inf")) -> Attempt:
        """Compile, check, probe; measure unless the probe is slower than ``limit`` seconds."""

    @abstractmethod
    def race(self, candidates: Sequence[Candidate], rounds: int) -> Race:
        """Time candidates that passed `attempt`, in turns of random order; results are checked again afterwards.

        The same candidate may stand in the list twice: that is how a control of noise is made.
        """

    def expect(self, seconds: float) -> None:  # noqa: B027 (there may be nothing to do)
        """A search of this many seconds begins: start what `prepare` will need, if that pays."""

    @property
    def ahead(self) -> int:
        """How many candidates `prepare` takes at a time with profit."""
        return 1

    @property
    def beside(self) -> bool:
        """What is prepared is compiled while others are timed."""
        return False

    def prepare(self, candidates: Sequence[Candidate]) -> None:  # noqa: B027 (there may be nothing to do)
        """These will be attempted next: compile them at the same time, where that can be done."""

    def foresee(self, problem: Problem, candidates: Sequence[Candidate]) -> None:  # noqa: B027 (as above)
        """This problem is posed next, and these will be attempted first: compile them when nothing else is to be."""

    def ready(self, candidate: Candidate, seconds: float) -> bool:
        """Wait for what `prepare` began with a candidate; False if that is not done in time."""
        return True

    def alike(self, candidate: Candidate, other: Candidate) -> None:  # noqa: B027 (there may be nothing to know)
        """A candidate differs in arguments alone from another one that was compiled: it has the same programs."""

    def programs(self, candidate: Candidate) -> Mapping[str, Mapping[str, bytes]]:
        """What was compiled for a candidate of the posed problem, by a process in which no candidate ever ran: files
        by the key of each program in the kernel cache."""
        return {}

    @abstractmethod
    def regime(self) -> Regime:
        """How the posed problem is measured."""

    def close(self) -> None:  # noqa: B027 (nothing to close is a fine default)
        """Give back memory and processes."""

    def __enter__(self) -> Measurer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
