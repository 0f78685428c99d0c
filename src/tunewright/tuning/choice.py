"""The choice of a tuner for a problem, and the origin of that choice."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ..knowledge.key import KeyMatch, MatchKind
from ..knowledge.record import Measurement
from ..solvers.base import Config, Solver

if TYPE_CHECKING:
    from ..heuristic.trees import HeuristicAdvice


class Origin(enum.Enum):
    """Origin of a choice."""

    LOCK = "lockfile"
    FILE = "tuning file"
    USER = "user knowledge base"
    MODEL = "model file"
    SYSTEM = "system knowledge base"
    HEURISTIC = "heuristic"
    SEARCH = "search"
    DEFAULT = "default"


@dataclass(frozen=True)
class Choice:
    """The chosen solver and config, and the reason."""

    solver: Solver
    config: Config
    origin: Origin
    #: asks every solver for its objection; see `rejected`
    ask: Callable[[], Mapping[str, str]] = field(repr=False, compare=False)
    #: how well the stored record matches, and the record itself; None for a default
    match: KeyMatch | None = None
    measurement: Measurement | None = field(default=None, repr=False)
    #: for a default or a heuristic choice: why no stored record could be used
    nearest: str = ""
    #: the heuristic's advice, if it was asked
    advice: HeuristicAdvice | None = field(default=None, repr=False, compare=False)

    @property
    def why(self) -> str:
        """The origin in words. Marks a provisional answer; for a prediction it gives the heuristic's reason."""
        if self.origin is Origin.HEURISTIC and self.advice is not None:
            return f"{self.origin.value} ({self.advice.why})"
        provisional = self.match is not None and self.match.kind is MatchKind.PROVISIONAL
        return f"{self.origin.value} ({self.match})" if provisional else self.origin.value

    @cached_property
    def rejected(self) -> Mapping[str, str]:
        """The reason of every solver that refused the problem.

        Computed on demand, because a caller waits for its plans.
        """
        return self.ask()
