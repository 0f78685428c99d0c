"""What a tuner chose for a problem, and where that comes from."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ..solvers.base import Config, Solver
from .key import Kind, Match
from .record import Measurement

if TYPE_CHECKING:
    from .heuristic import Advice


class Origin(enum.Enum):
    """Where a choice comes from."""

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
    """The chosen solver and config, and why."""

    solver: Solver
    config: Config
    origin: Origin
    #: asks every solver; see `rejected`
    ask: Callable[[], Mapping[str, str]] = field(repr=False, compare=False)
    #: how the stored answer fits, and the answer itself; a default has none
    match: Match | None = None
    measurement: Measurement | None = field(default=None, repr=False)
    #: of a default, and of the heuristic's: why nothing that is stored could be used
    nearest: str = ""
    #: what the heuristic said, where it was asked
    advice: Advice | None = field(default=None, repr=False, compare=False)

    @property
    def why(self) -> str:
        """The origin in words; a provisional answer is marked, and a predicted one says what is predicted."""
        if self.origin is Origin.HEURISTIC and self.advice is not None:
            return f"{self.origin.value} ({self.advice.why})"
        provisional = self.match is not None and self.match.kind is Kind.PROVISIONAL
        return f"{self.origin.value} ({self.match})" if provisional else self.origin.value

    @cached_property
    def rejected(self) -> Mapping[str, str]:
        """The reason of every solver that refused. Computed on demand, because a caller waits while plans are made."""
        return self.ask()
