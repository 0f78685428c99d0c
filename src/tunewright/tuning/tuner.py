"""The one place that picks a solver: `Tuner.choose` returns a `Choice` with its origin and every refusal."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..devices.base import Device
from ..errors import UnsupportedError
from ..ir.types import Layout
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
        accepting, rejected = self.ask(problem, device)
        if not problem.is_static:
            rejected.update({s.id: "shapes are not known before it runs" for s in accepting if not s.host})
            accepting = [s for s in accepting if s.host]
        if not accepting:
            raise UnsupportedError(f"no solver for {problem.op} on {device.name}: {reasons(rejected)}")
        chosen = accepting[0]
        return Choice(chosen, chosen.default(problem, device.target), Origin.DEFAULT, rejected)

    def ask(self, problem: Problem, device: Device) -> tuple[list[Solver], dict[str, str]]:
        """The solvers that accept a problem, the default first, and what each of the others said."""
        answers = {solver: self.why_not(solver, problem, device) for solver in self.candidates}
        accepting = [solver for solver, reason in answers.items() if reason is None]
        return accepting, {solver.id: reason for solver, reason in answers.items() if reason is not None}

    def why_not_fused(self, fused: Problem, plain: Problem, device: Device) -> str | None:
        """None when fusing loses nothing: somebody runs the fused problem, the device if it ran the plain one."""
        accepting, rejected = self.ask(fused, device)
        if not accepting:
            return reasons(rejected)
        if (
            device.family != "host"
            and all(s.host for s in accepting)
            and not all(s.host for s in self.ask(plain, device)[0])
        ):
            return f"fused, only the host could run it: {reasons(rejected)}"
        return None

    def why_not(self, solver: Solver, problem: Problem, device: Device) -> str | None:
        """None when the solver may be used for the problem on the device; else the reason."""
        if solver.host and device.family != "host" and not self.settings.host_fallback:
            return "HOST_FALLBACK is NO"
        return solver.why_not(problem, device.target)

    def why_not_layout(self, problem: Problem, device: Device) -> str | None:
        """None when a kernel of the device's own solves a problem that is in some layout."""
        accepting, rejected = self.ask(problem, device)
        return None if any(not s.host for s in accepting) else f"the device cannot work in it: {reasons(rejected)}"

    def layouts(self, problem: Problem, device: Device) -> tuple[Layout, Layout] | None:
        """The layouts (first input, output) that the device's solvers would rather have for a plain problem."""
        for solver in self.candidates:
            found = solver.preferred(problem, device.target)
            if found is not None:
                return found
        return None


def reasons(rejected: Mapping[str, str]) -> str:
    """What every solver said, in one line."""
    return "; ".join(f"{k}: {v}" for k, v in rejected.items()) or "there are no solvers"
