"""The verdict of every solver of an operation about a problem, with its measurements."""

from __future__ import annotations

from functools import cached_property

from tunewright.devices.base import Device
from tunewright.knowledge.database import newest
from tunewright.knowledge.key import Key, MatchKind, Where, compare
from tunewright.search.space import Config
from tunewright.solvers.base import Problem, Solver
from tunewright.tuning.lookup import LookupAnswer
from tunewright.tuning.tuner import Choice, Tuner

from .explanation import CONTROL, FROM_SHAPES, LATE, OPTIMIZED_OUT, Barred, Opinion, Proof, RunnerUp, State

_UNASKED = {
    OPTIMIZED_OUT: "nothing has to run: the result lies where its input does, or was written in place",
    CONTROL: "control flow has no kernel of its own",
    FROM_SHAPES: "nothing has to run: the result follows from shapes",
    LATE: "its shapes are known only when it runs, and it did not run",
}


def unasked(op: str, tuner: Tuner, origin: str) -> tuple[Opinion, ...]:
    """Return verdicts for a layer that needed no choice."""
    return tuple(Opinion(s.id, State.UNASKED, _UNASKED[origin]) for s in _concerned(op, tuner))


def _concerned(op: str, tuner: Tuner) -> list[Solver]:
    """Return every solver that may be asked about an operation on some device, in order of rank."""
    return [s for s in tuner.candidates if s.ops is None or op in s.ops]


class AskedProblem:
    """A problem on a device for which a solver was chosen."""

    def __init__(self, tuner: Tuner, problem: Problem, device: Device, choice: Choice) -> None:
        self.tuner, self.problem, self.device, self.choice = tuner, problem, device, choice
        self.default = tuner.default(problem, device)
        self.chosen = (choice.solver.id, Config(choice.config))
        #: whether measurements may answer, by the rule of `Tuner.choose`
        self.tunable = problem.is_static and not self.default.solver.host

    @cached_property
    def answer(self) -> LookupAnswer:
        return self.tuner.known(self.problem, self.device, self.default) if self.tunable else LookupAnswer()

    @cached_property
    def stored(self) -> list[Proof]:
        """Measurements of this problem on this device, also with other software, by gain, the largest first."""
        here = _place(Where.of(self.device.target))
        found = []
        for layer in self.tuner.lookup.layers if self.tunable else ():
            for m in newest(layer.database.family(self.problem.family())):
                if m.key.problem == self.problem.key() and _place(m.key.where) == here:
                    found.append(Proof(layer.name, m))
        return sorted(found, key=lambda p: (-p.measurement.evidence.gain.median, p.measurement.digest))

    @property
    def proof(self) -> Proof | None:
        """The measurement that the choice rests on."""
        m = self.choice.measurement
        if m is None:
            return None
        layers = [f.layer for f in self.answer.found if f.measurement == m]
        return Proof(layers[0] if layers else self.choice.origin.value, m)

    def candidates(self) -> int:
        """Count the candidates that a search could choose from; 0 if the problem cannot be tuned."""
        if not self.tunable:
            return 0
        accepting = self.tuner.ask(self.problem, self.device)[0]
        return sum(s.space(self.problem, self.device.target).combinations for s in accepting if not s.host)

    def measured(self) -> int:
        """Count the candidates that were measured."""
        return len({(p.measurement.key.solver, p.measurement.config) for p in self.stored})

    def barred(self) -> tuple[Barred, ...]:
        """Return the candidates that must not run here."""
        known = {s.id: s for s in _concerned(self.problem.op, self.tuner)}
        default = (self.default.solver.id, self.default.config)
        found: dict[tuple[str, Config], Barred] = {}
        for layer in self.tuner.lookup.layers:
            for fault in layer.database.faults():
                at = (fault.key.solver, fault.config)
                if at in found or fault.key.solver not in known:
                    continue
                why = self.tuner.lookup.quarantined(
                    known[fault.key.solver], fault.config, self.problem, self.device.target, default
                )
                if why is not None:
                    found[at] = Barred(*at, why)
        return tuple(found[at] for at in sorted(found, key=lambda at: (at[0], sorted(at[1].items(), key=str))))

    def runner_up(self) -> RunnerUp | None:
        """Return the next best candidate, as far as it is known. None: no other solver accepts the problem."""
        for found in self.answer.found:
            if (found.solver.id, found.config) != self.chosen:
                why = f"the next answer, {found.layer} ({found.match})"
                return RunnerUp(found.solver.id, Config(found.config), why, Proof(found.layer, found.measurement))
        for proof in self.stored:
            m = proof.measurement
            if (m.key.solver, m.config) != self.chosen:
                why = f"the next that was measured, {self._unused(proof)}"
                return RunnerUp(m.key.solver, m.config, why, proof)
        default = (self.default.solver.id, Config(self.default.config))
        if default != self.chosen:
            return RunnerUp(*default, "the default")
        for solver in self.tuner.ask(self.problem, self.device)[0]:
            if solver.id != self.chosen[0] and self._refusal(solver, None) is None:
                config = Config(solver.default(self.problem, self.device.target))
                if self._refusal(solver, config) is None:
                    return RunnerUp(solver.id, config, "the next solver that accepts it, not measured")
        return None

    def opinions(self) -> tuple[Opinion, ...]:
        """Return the verdict of every solver of the operation, the chosen one first."""
        found = [self._opinion(s) for s in _concerned(self.problem.op, self.tuner)]
        return tuple(sorted(found, key=lambda o: list(State).index(o.state)))

    def _opinion(self, solver: Solver) -> Opinion:
        """Return the verdict of one solver: chosen, measured, barred, accepts or refuses, with the reason."""
        mine = [p for p in self.stored if p.measurement.key.solver == solver.id]
        measured = len({p.measurement.config for p in mine})
        if solver.id == self.chosen[0]:
            return Opinion(solver.id, State.CHOSEN, self.choice.why, self.chosen[1], self.proof, measured)
        reason = self._refusal(solver, None)
        if reason is not None:
            return Opinion(solver.id, State.REFUSES, reason, measured=measured)
        for number, found in enumerate(self.answer.found, 1):
            if found.solver.id == solver.id:
                why = f"number {number} of {len(self.answer.found)} answers, {found.layer} ({found.match})"
                proof = Proof(found.layer, found.measurement)
                return Opinion(solver.id, State.MEASURED, why, Config(found.config), proof, measured)
        if mine:
            best = mine[0]
            return Opinion(solver.id, State.MEASURED, self._unused(best), best.measurement.config, best, measured)
        config = Config(solver.default(self.problem, self.device.target))
        barred = self._refusal(solver, config)
        if barred is not None:
            return Opinion(solver.id, State.BARRED, barred, config)
        against = self.choice.measurement
        if against is not None and against.evidence.default == (solver.id, config):
            return Opinion(solver.id, State.MEASURED, "the default that the chosen one was measured against", config)
        return Opinion(solver.id, State.ACCEPTS, f"accepts it, not measured{self._order(solver)}", config)

    def _order(self, solver: Solver) -> str:
        if solver.host:
            return ": it would run on the host"
        if solver.tuned_only:
            return ": chosen only where it was"
        return ": it is the default" if solver is self.default.solver else f": {self.default.solver.id} comes first"

    def _refusal(self, solver: Solver, config: Config | None) -> str | None:
        """Return why a solver cannot solve the problem, or cannot use a config. None: it can."""
        language = self.device.target.language
        if solver.language not in (None, language):
            compiles = f"compiles {language}" if language else "compiles nothing"
            return f"for devices that compile {solver.language}, and {self.device.name} {compiles}"
        reason = self.tuner.why_not(solver, self.problem, self.device)
        if reason is None and not solver.host and not self.problem.is_static:
            return "shapes are not known before it runs"
        if reason is not None or config is None:
            return reason
        default = (self.default.solver.id, self.default.config)
        return self.tuner.lookup.barred(solver, config, self.problem, self.device.target, default)

    def _unused(self, proof: Proof) -> str:
        """Return why a measurement of this problem is not used as an answer."""
        m = proof.measurement
        if m.evidence.gain.low < 1:
            return "not faster than the default beyond noise"
        if not m.evidence.confirmed:
            return "not confirmed on samples of its own"
        solver = next((s for s in _concerned(self.problem.op, self.tuner) if s.id == m.key.solver), None)
        if solver is None:
            return "there is no such solver here"
        reason = self._refusal(solver, None)
        if reason is None and m.config not in solver.space(self.problem, self.device.target):
            return "its config is not in the solver's space"
        reason = reason or self._refusal(solver, m.config)
        if reason is not None:
            return reason
        match = compare(Key.of(self.problem, self.device.target, solver, m.config), m.key)
        return str(match) if match.kind is MatchKind.MISS else "a nearer measurement of this candidate counts"


def _place(where: Where) -> tuple[str, str, str]:
    return where.device, where.processor, where.runtime
