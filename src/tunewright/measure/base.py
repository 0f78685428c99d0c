"""The interface for measuring candidates: `Measurer`.

`bench.Local` measures in this process, `isolated.Isolated` in a worker.

A measurer serves one device, and one problem at a time (`pose`). It compiles, checks and times candidates. `session`
decides from the samples which candidate is better.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ..search.base import Status
from ..solvers.base import Config, Problem

#: A solver's id and a config of its space.
Candidate: TypeAlias = tuple[str, Config]


@dataclass(frozen=True)
class Attempt:
    """Result of one candidate measured alone."""

    status: Status
    #: reason if the status is not OK
    why: str = ""
    #: seconds per execution of each turn; one value if the candidate was only probed
    samples: tuple[float, ...] = ()
    #: largest deviation from the reference over all cases, relative to the largest element of the result
    error: float = 0.0
    #: seconds of compiling and of checking
    compile_seconds: float = 0.0
    check_seconds: float = 0.0
    #: True if the candidate was slower than `limit` and only probed
    probed: bool = False


@dataclass(frozen=True)
class Race:
    """Interleaved turns: ``samples[i]`` holds the seconds per execution of candidate i, one value for each round."""

    samples: tuple[tuple[float, ...], ...]
    #: failed attempts of candidates that dropped out, by index; their samples end there
    fallen: dict[int, Attempt] = field(default_factory=dict)


@dataclass(frozen=True)
class Regime:
    """How data is supplied.

    cold: copies rotate, so that data comes from memory. layer: only weights rotate. warm: there is one copy.
    """

    kind: str  # layer, cold, warm
    copies: int
    nbytes: int


class Measurer(ABC):
    """Compiles, checks and times candidates for the posed problem."""

    @abstractmethod
    def pose(self, problem: Problem, seed: int = 0, regime: str = "cold") -> str | None:
        """Turn to a problem: make inputs and the reference's results. Returns why it cannot be measured, or None."""

    @abstractmethod
    def attempt(self, candidate: Candidate, limit: float = float("inf")) -> Attempt:
        """Compile, check and probe a candidate. Measure it unless the probe is slower than ``limit`` seconds."""

    @abstractmethod
    def race(self, candidates: Sequence[Candidate], rounds: int) -> Race:
        """Time candidates that passed `attempt`, in turns of random order, and check their results afterwards.

        The same candidate may be listed twice; its second row serves as a control of noise.
        """

    def expect(self, seconds: float) -> None:  # noqa: B027 (there may be nothing to do)
        """Announce a search of this many seconds. The measurer may start processes for `prepare`."""

    @property
    def ahead(self) -> int:
        """Number of candidates that `prepare` can usefully take at a time."""
        return 1

    @property
    def beside(self) -> bool:
        """Whether prepared candidates are compiled while others are timed."""
        return False

    def prepare(self, candidates: Sequence[Candidate]) -> None:  # noqa: B027 (there may be nothing to do)
        """Announce the next candidates; the measurer may compile them in parallel."""

    def foresee(self, problem: Problem, candidates: Sequence[Candidate]) -> None:  # noqa: B027 (as above)
        """Announce the next problem and its first candidates; the measurer may compile them when otherwise idle."""

    def ready(self, candidate: Candidate, seconds: float) -> bool:
        """Wait until `prepare` has finished with a candidate. Returns False if that takes longer than ``seconds``."""
        return True

    def alike(self, candidate: Candidate, other: Candidate) -> None:  # noqa: B027 (there may be nothing to know)
        """Note that ``candidate`` has the same programs as the compiled ``other``: they differ only in arguments."""

    def programs(self, candidate: Candidate) -> Mapping[str, Mapping[str, bytes]]:
        """Return the compiled programs of a candidate: files by the key of each program in the kernel cache.

        Only programs from a process that never ran a candidate are returned.
        """
        return {}

    @abstractmethod
    def regime(self) -> Regime:
        """Return the regime of the posed problem."""

    def close(self) -> None:  # noqa: B027 (nothing to close is a fine default)
        """Release memory and processes."""

    def __enter__(self) -> Measurer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
