"""The one place that picks a solver: `Tuner.choose` returns a `Choice` with its origin and every refusal."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

from ..devices.base import Device
from ..errors import UnsupportedError
from ..ir.types import Layout
from ..settings import Settings
from ..solvers.base import Config, Missing, Problem, Solver, solvers


class Origin(enum.Enum):
    """Where a choice comes from."""

    USER = "user knowledge base"
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
    #: asks everybody; see `rejected`
    ask: Callable[[], Mapping[str, str]] = field(repr=False, compare=False)

    @cached_property
    def rejected(self) -> Mapping[str, str]:
        """What every solver said that refused. Found out when it is wanted: plans are made while somebody waits."""
        return self.ask()


class Tuner:
    """Chooses among the solvers that accept a problem."""

    def __init__(self, settings: Settings, candidates: Sequence[Solver] | None = None) -> None:
        self.settings = settings
        self.candidates = solvers() if candidates is None else tuple(candidates)
        self._candidates, self._defaults = cache(self._asked), cache(self._untuned)

    def _asked(self, op: str, language: str) -> list[Solver]:
        """The solvers that have a say, in order of rank."""
        asked = [s for s in self.candidates if s.ops is None or op in s.ops]
        return [s for s in asked if s.language in (None, language)]

    def _untuned(self, op: str, language: str) -> list[Solver]:
        """Those that may be chosen without a measurement."""
        return [s for s in self._candidates(op, language) if not s.tuned_only]

    def choose(self, problem: Problem, device: Device) -> Choice:
        """The solver to use. UnsupportedError with every solver's reason when there is none."""
        asked = self._defaults(problem.op, device.target.language)
        for solver in asked:
            # On the host a kernel finds out shapes as it runs; others are made for those that are known.
            if (solver.host or problem.is_static) and self.why_not(solver, problem, device) is None:
                config = solver.default(problem, device.target)
                return Choice(solver, config, Origin.DEFAULT, lambda: self.ask(problem, device)[1])
        accepting, rejected = self.ask(problem, device)
        rejected |= {s.id: "shapes are not known before it runs" for s in accepting}
        raise UnsupportedError(f"no solver for {problem.op} on {device.name}: {reasons(rejected)}")

    def is_late(self, problem: Problem, device: Device) -> bool:
        """Nobody can solve it before its shapes or an operand's value are known; a kernel of the device may then."""
        if self.settings.host_fallback or device.family == "host":
            return False
        asked = self._defaults(problem.op, device.target.language)
        answers = [s.why_not(problem, device.target) for s in asked if not s.host]
        if None in answers:
            return not problem.is_static
        return any(isinstance(answer, Missing) for answer in answers)

    def ask(self, problem: Problem, device: Device) -> tuple[list[Solver], dict[str, str]]:
        """The solvers that accept a problem, the default first, and what each of the others said."""
        asked = self._candidates(problem.op, device.target.language)
        answers = {solver: self.why_not(solver, problem, device) for solver in asked}
        accepting = [solver for solver, reason in answers.items() if reason is None]
        return accepting, {solver.id: reason for solver, reason in answers.items() if reason is not None}

    def why_not_fused(self, fused: Problem, plain: Problem, device: Device) -> str | None:
        """None when fusing loses nothing: somebody runs the fused problem, the device if it ran the plain one."""
        if self._on_device(fused, device):
            return None
        accepting, rejected = self.ask(fused, device)
        if not accepting:
            return reasons(rejected)
        if device.family != "host" and all(s.host for s in accepting) and self._on_device(plain, device):
            return f"fused, only the host could run it: {reasons(rejected)}"
        return None

    def why_not(self, solver: Solver, problem: Problem, device: Device) -> str | None:
        """None when the solver may be used for the problem on the device; else the reason."""
        if solver.host and device.family != "host" and not self.settings.host_fallback:
            return "HOST_FALLBACK is NO"
        return solver.why_not(problem, device.target)

    def why_not_layout(self, problem: Problem, device: Device) -> str | None:
        """None when a kernel of the device's own solves a problem that is in some layout."""
        if self._on_device(problem, device):
            return None
        return f"the device cannot work in it: {reasons(self.ask(problem, device)[1])}"

    def _on_device(self, problem: Problem, device: Device) -> bool:
        """Some kernel of the device's own solves it."""
        asked = self._defaults(problem.op, device.target.language)
        return any(not s.host and s.why_not(problem, device.target) is None for s in asked)

    def layouts(self, problem: Problem, device: Device) -> tuple[Layout, Layout] | None:
        """The layouts (first input, output) that the device's solvers would rather have for a plain problem."""
        for solver in self._defaults(problem.op, device.target.language):
            found = solver.preferred(problem, device.target)
            if found is not None:
                return found
        return None


def reasons(rejected: Mapping[str, str]) -> str:
    """What every solver said, in one line."""
    return "; ".join(f"{k}: {v}" for k, v in rejected.items()) or "there are no solvers"
