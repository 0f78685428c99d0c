"""The one place that picks a solver: `Tuner.choose` returns a `Choice` with its origin and every refusal."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..devices.base import Device
from ..errors import UnsupportedError
from ..settings import Settings
from ..solvers.base import Config, Problem, Solver, solvers


class Origin(enum.Enum):
    """Where a choice comes from."""

    USER = "user knowledge base"
    SYSTEM = "system knowledge base"
    HEURISTIC = "heuristic"
    SEARCH = "search"
    DEFAULT = "default"


@dataclass(frozen=True)
class Choice:
    """The chosen solver and config, why, and what every other solver said."""

    solver: Solver
    config: Config
    origin: Origin
    rejected: Mapping[str, str]


class Tuner:
    """Chooses among the solvers that accept a problem."""

    def __init__(self, settings: Settings, candidates: Sequence[Solver] | None = None) -> None:
        self.settings = settings
        self.candidates = solvers() if candidates is None else tuple(candidates)

    def choose(self, problem: Problem, device: Device) -> Choice:
        """The solver to use. UnsupportedError with every solver's reason when there is none."""
        rejected: dict[str, str] = {}
        chosen: Solver | None = None
        for solver in self.candidates:
            reason = self.why_not(solver, problem, device)
            if reason is not None:
                rejected[solver.id] = reason
            elif chosen is None:
                chosen = solver
        if chosen is None:
            reasons = "; ".join(f"{k}: {v}" for k, v in rejected.items()) or "there are no solvers"
            raise UnsupportedError(f"no solver for {problem.op} on {device.name}: {reasons}")
        return Choice(chosen, chosen.default(problem, device.target), Origin.DEFAULT, rejected)

    def why_not(self, solver: Solver, problem: Problem, device: Device) -> str | None:
        """None when the solver may be used for the problem on the device; else the reason."""
        if solver.host and device.family != "host" and not self.settings.host_fallback:
            return "HOST_FALLBACK is NO"
        return solver.why_not(problem, device.target)
