"""The tuner, the only place that picks a solver. `Tuner.choose` returns a `Choice` with its origin and all refusals.

Measurements answer first (`lookup`), then the `heuristic`, then the default. If the policy demands it, an unknown
problem is searched (`session`), and the stored result of the search answers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING

from ..devices.base import Device
from ..errors import DatabaseError, DeviceError, InputError, UnsupportedError
from ..heuristic.find import open_heuristic
from ..ir.types import Layout
from ..knowledge import open_databases
from ..knowledge.database import Database, MemoryDatabase
from ..knowledge.key import MatchKind, Where
from ..knowledge.record import AnyRecord, Measurement, Survey
from ..settings import Settings
from ..solvers.base import Config, Missing, Problem, Solver, solvers
from . import evidence
from .choice import Choice as Choice
from .choice import Origin as Origin
from .knowledge_layers import knowledge_layers, warn
from .lookup import KnowledgeLayer, Lookup, LookupAnswer, StoredAnswer
from .policy import Candidates, Search, decide
from .similar_problems import Kin

if TYPE_CHECKING:  # modules for searches are imported when one begins: most processes only use known answers
    from ..heuristic.trees import Heuristic, HeuristicAdvice
    from ..measure.base import Measurer
    from .lockfile import Locked
    from .online import Searches
    from .progress import Progress
    from .session import Outcome

LOG = logging.getLogger("tunewright")
#: Number of the heuristic's picks that a search attempts first.
GUESSES = 3
#: A device's measurer serves one problem at a time, and parallel searches would disturb each other.
_SEARCHING = threading.RLock()
#: Maximum number of choices that a tuner remembers (see `Tuner.chosen`).
MOST_CHOSEN = 10_000


def _measurer(device: Device, settings: Settings) -> Measurer:
    from ..measure.isolated import measurer_for

    return measurer_for(device, settings)


def _locked(settings: Settings) -> Locked | None:
    if not settings.lock_file and not settings.frozen:
        return None
    from .lockfile import Locked

    return Locked.of(settings, warn)


def _custom(settings: Settings) -> dict[str, Solver]:
    from ..solvers.custom import CustomSolver, read  # imported late, because custom layers are rare

    return {name: CustomSolver(layer, settings) for name, layer in read(settings.config_file).items()}


class Tuner:
    """Chooses among the solvers that accept a problem."""

    def __init__(
        self,
        settings: Settings,
        candidates: Sequence[Solver] | None = None,
        user: Database | None = None,
        system: Database | None = None,
        measurer: Callable[[Device, Settings], Measurer] = _measurer,
        heuristic: Heuristic | None = None,
    ) -> None:
        self.settings, self._heuristic = settings, heuristic
        #: kernels of CONFIG_FILE by operation; they come before all others
        self.custom = _custom(settings) if settings.config_file else {}
        self._given = candidates
        self._candidates, self._defaults = cache(self._asked), cache(self._untuned)
        self.policy = decide(settings)
        self.user = open_databases.open_user(settings) if user is None else user
        #: records that could not be written to the user's knowledge base
        self._unsaved = MemoryDatabase()
        layers = knowledge_layers(settings, self.policy, self.user, system)
        accurate = settings.execution_mode_hint == "ACCURACY"
        self.lookup = Lookup([KnowledgeLayer(Origin.SEARCH.value, self._unsaved), *layers], accurate)
        #: LOCK_FILE; it comes before all layers
        self.locked = _locked(settings)
        #: the choice for each problem on each device, oldest first; `lock` writes them down
        self.chosen: dict[tuple[str, Where], tuple[Problem, Device, Choice]] = {}
        self._choosing = threading.Lock()
        self._measurer, self.clock = measurer, time.monotonic
        #: problems that this tuner has searched or forgotten, which happens once
        self._done: set[tuple[str, Where]] = set()
        #: digests that are in TUNING_FILE
        self._filed: set[str] = set()
        for text in self.policy.warnings:
            warn(text)

    def carry(self, records: Database) -> None:
        """Add the records embedded in the model as a layer behind the user's knowledge base (USE_EMBEDDED)."""
        layers = list(self.lookup.layers)
        at = next(n for n, layer in enumerate(layers) if layer.name == Origin.SYSTEM.value)
        self.lookup = Lookup(
            [*layers[:at], KnowledgeLayer(Origin.MODEL.value, records), *layers[at:]], self.lookup.accurate
        )

    @property
    def serves_classes(self) -> bool:
        """Whether one choice may serve a whole class of shapes: nothing is searched, locked or noted for each."""
        noted = self.settings.enable_tune_dump or self.settings.enable_logging_cmd or self.policy.extend_tuning_file
        return self.policy.search is Search.NEVER and not (noted or self.custom or self.locked or self.policy.delete)

    @cached_property
    def searches(self) -> Searches:
        """The searches of this model during loads and for new shapes."""
        from .online import Searches

        return Searches(self.settings)

    @cached_property
    def heuristic(self) -> Heuristic | None:
        """The heuristic. Read on first use, because a fully tuned model does not need it."""
        return open_heuristic(self.settings) if self._heuristic is None else self._heuristic

    @cached_property
    def candidates(self) -> tuple[Solver, ...]:
        """All solvers for all devices, in order of rank."""
        return (*self.custom.values(), *(solvers() if self._given is None else self._given))

    def _asked(self, op: str, language: str) -> list[Solver]:
        """Return the solvers for an operation and a language, in order of rank."""
        known = (*self.custom.values(), *(solvers(language, op) if self._given is None else self._given))
        return [s for s in known if (s.ops is None or op in s.ops) and s.language in (None, language)]

    def _untuned(self, op: str, language: str) -> list[Solver]:
        """Return those of them that may be chosen without a measurement."""
        return [s for s in self._candidates(op, language) if not s.tuned_only]

    def choose(self, problem: Problem, device: Device) -> Choice:
        """Return the solver to use. Raises `UnsupportedError` with every solver's reason if there is none."""
        if self.settings.enable_tune_dump or self.settings.enable_logging_cmd:
            from .offline import dump

            dump.record(problem, device, self.settings)
        choice = self._locked(problem, device) or self._choose(problem, device)
        with self._choosing:
            self.chosen[problem.key(), Where.of(device.target)] = problem, device, choice
            if len(self.chosen) > MOST_CHOSEN:
                del self.chosen[next(iter(self.chosen))]
        return choice

    def _locked(self, problem: Problem, device: Device) -> Choice | None:
        """Return the choice of LOCK_FILE, if any. Raises `LockError` if a frozen model meets anything else."""
        if self.locked is None:
            return None

        def barred(solver: Solver, config: Config) -> str | None:
            try:
                default = self.default(problem, device)
            except UnsupportedError:  # the locked kernel may be the only one left
                return self.lookup.barred(solver, config, problem, device.target)
            mine = (default.solver.id, default.config)
            return self.lookup.barred(solver, config, problem, device.target, mine)

        asked = self._candidates(problem.op, device.target.language)
        found = self.locked.ask(problem, device.target, asked, lambda s: self.why_not(s, problem, device), barred)
        if found is None:
            return None
        if self.policy.delete:
            with _SEARCHING:
                self._forget(problem, device)
        return Choice(*found, Origin.LOCK, partial(self._refusals, problem, device))

    def _choose(self, problem: Problem, device: Device) -> Choice:
        mine = self._custom(problem, device)
        if mine is not None:
            return Choice(mine, {}, Origin.DEFAULT, partial(self._refusals, problem, device))
        try:
            default = self.default(problem, device)
        except UnsupportedError:
            known = self._known_alone(problem, device)
            if known is None:
                raise
            return known
        if not problem.is_static or (default.solver.host and not self._on_device(problem, device)):
            return default
        answer = self.known(problem, device, default)
        origin = None
        if self.policy.delete or self._wants(problem, device, default, answer):
            with _SEARCHING:
                if self.policy.delete:
                    self._forget(problem, device)
                elif self._search(problem, device, default):
                    origin = Origin.SEARCH
            answer = self.known(problem, device, default)
        if (best := answer.best) is None:
            advice = self.advise(problem, device, default)
            if advice is not None and advice.picks:
                return Choice(
                    *advice.picks[0], Origin.HEURISTIC, default.ask, nearest=answer.nearest, advice=advice
                )  # fmt: skip
            if default.solver.host:
                why = self._bars(problem, device)
                warn(f"{problem.op} runs on the host, because its kernel on {device.name} is {why}")
            return replace(default, nearest=answer.nearest, advice=advice)
        if self.policy.extend_tuning_file:
            self._extend(best)
        origin = origin or Origin(best.layer)
        return Choice(best.solver, best.config, origin, default.ask, best.match, best.measurement)

    def _custom(self, problem: Problem, device: Device) -> Solver | None:
        """Return the kernel of CONFIG_FILE if it accepts the problem."""
        mine = self.custom.get(problem.op)
        if mine is None or mine.language != device.target.language or self.why_not(mine, problem, device) is not None:
            return None
        return mine

    def default(self, problem: Problem, device: Device) -> Choice:
        """Return the choice without any measurement."""
        barred: dict[str, str] = {}
        for solver in self._defaults(problem.op, device.target.language):
            # Host kernels learn shapes when they run; other kernels need static shapes.
            if (solver.host or problem.is_static) and self.why_not(solver, problem, device) is None:
                config = solver.default(problem, device.target)
                why = self.lookup.barred(solver, config, problem, device.target, (solver.id, config))
                if why is None:
                    return Choice(solver, config, Origin.DEFAULT, lambda: self._refusals(problem, device) | barred)
                barred[solver.id] = why
        accepting, rejected = self.ask(problem, device)
        late, measured = "shapes are not known before it runs", "it is used only where it was measured"
        rejected |= {s.id: measured if s.tuned_only and problem.is_static else late for s in accepting} | barred
        raise UnsupportedError(f"no solver for {problem.op} on {device.name}: {reasons(rejected)}")

    def _bars(self, problem: Problem, device: Device) -> str:
        """Return why none of the device's own kernels is the default although some accept the problem."""
        for solver in self._defaults(problem.op, device.target.language):
            if not solver.host and self.why_not(solver, problem, device) is None:
                config = solver.default(problem, device.target)
                return str(self.lookup.barred(solver, config, problem, device.target, (solver.id, config)))
        return "used only where it was measured"

    def known(self, problem: Problem, device: Device, default: Choice) -> LookupAnswer:
        """Ask the knowledge bases about a static problem."""
        asked = self._candidates(problem.op, device.target.language)
        # a host default replaces one of the device's own that is barred
        mine = None if default.solver.host and not device.runs_references else (default.solver.id, default.config)
        return self.lookup.ask(problem, device.target, asked, lambda s: self.why_not(s, problem, device), mine)

    def _known_alone(self, problem: Problem, device: Device) -> Choice | None:
        """Ask the knowledge bases for a problem without a default, which may be barred."""
        if not problem.is_static:
            return None
        asked = self._candidates(problem.op, device.target.language)
        best = self.lookup.ask(problem, device.target, asked, lambda s: self.why_not(s, problem, device)).best
        if best is None:
            return None
        refusals = partial(self._refusals, problem, device)
        return Choice(best.solver, best.config, Origin(best.layer), refusals, best.match, best.measurement)

    def _refusals(self, problem: Problem, device: Device) -> dict[str, str]:
        return self.ask(problem, device)[1]

    def advise(self, problem: Problem, device: Device, default: Choice, most: int = 1) -> HeuristicAdvice | None:
        """Return the heuristic's advice for a static problem, with up to ``most`` picks; None if it does not apply."""
        if self.heuristic is None or default.solver.host:
            return None
        mine = (default.solver.id, default.config)
        worse = self.lookup.worse(problem, device.target)

        def why_not(solver: Solver, config: Config) -> str | None:
            if (solver.id, config) in worse:
                return "it was measured, and is slower than the default"
            reason = self.why_not(solver, problem, device)
            return reason or self.lookup.barred(solver, config, problem, device.target, mine)

        asked = [s for s in self._candidates(problem.op, device.target.language) if not s.host]
        return self.heuristic.advise(problem, device.target, mine, asked, why_not, most)

    def _wants(self, problem: Problem, device: Device, default: Choice, answer: LookupAnswer) -> bool:
        if answer.best is not None:
            return self.policy.wanted(answer.best.match.kind)
        if self.policy.search is not Search.MISSING:  # independent of the heuristic
            return self.policy.wanted(None)
        advice = self.advise(problem, device, default)
        wanted = self.policy.wanted(None, from_heuristic=advice is not None and bool(advice.picks))
        return wanted and not evidence.is_given_up(self.measured(problem, device), (default.solver.id, default.config))

    def _forget(self, problem: Problem, device: Device) -> None:
        """Delete what the user's knowledge base has about a problem on this device."""
        where = Where.of(device.target)
        if (problem.key(), where) in self._done:
            return
        self._done.add((problem.key(), where))
        mine = [m.digest for m in self.measured(problem, device)]
        seen = [s.digest for s in self.user.surveys(problem.family()) if s.key.problem == problem.key()]
        if mine or seen:
            self.user.remove([*mine, *seen])  # errors reach the user, because deleting was the whole request
            self.user.note("deleted", f"{len(mine)} measurements of {problem.key()}: FIND_ENFORCE = 5")

    def measured(self, problem: Problem, device: Device) -> list[Measurement]:
        """Return the user's measurements of a problem on this device, for any version of the software."""
        here = Where.of(device.target)

        def is_here(there: Where) -> bool:
            return (there.device, there.processor, there.runtime) == (here.device, here.processor, here.runtime)

        stored = self.user.family(problem.family())
        return [m for m in stored if m.key.problem == problem.key() and is_here(m.key.where)]

    def _search(self, problem: Problem, device: Device, default: Choice) -> bool:
        """Tune a problem. Returns False if there is no choice, or if it was done already, here or by another thread."""
        answer = self.known(problem, device, default)
        if not self._is_missing(problem, device, default, answer):
            return False
        tune = partial(self.tune, problem, device, default, answer)
        try:
            outcome = self.searches.run(
                problem, device, default, self.policy.strategy(problem.op),
                lambda seconds, report: tune(report, seconds),
            )  # fmt: skip
        except DeviceError as error:
            warn(f"nothing can be tuned, so stored answers and defaults are used: {error}")
            outcome = None
        if self.searches.left[-1:] == [problem.key()]:
            return False  # the next load continues with it
        self._done.add((problem.key(), Where.of(device.target)))
        return outcome is not None

    def is_missing(self, problem: Problem, device: Device) -> bool:
        """Whether `choose` would search for this problem."""
        with suppress(UnsupportedError):
            default = self.default(problem, device)
            is_fixed = not problem.is_static or default.solver.host
            return not is_fixed and self._is_missing(problem, device, default, self.known(problem, device, default))
        return False

    def _is_missing(self, problem: Problem, device: Device, default: Choice, answer: LookupAnswer) -> bool:
        """Whether the problem should be searched and this tuner has not done so."""
        is_done = (problem.key(), Where.of(device.target)) in self._done
        return not is_done and self._wants(problem, device, default, answer)

    def expect(self, device: Device, seconds: float) -> None:
        """Announce a search of this many seconds, so that slow processes may start beside the first steps."""
        if not device.target.traits.shares_cores:
            self._measurer(device, self.settings).expect(seconds)

    def foresee(self, problem: Problem, device: Device, default: Choice, answer: LookupAnswer) -> None:
        """Announce the search after the one about to begin; its first candidates may be compiled during that one."""
        measurer = self._measurer(device, self.settings)
        if measurer.beside:
            from . import session

            taking_part = self._taking_part(problem, device, default, answer)
            mine, seeds = (default.solver.id, default.config), self._seeds(problem, device, default, answer)
            measurer.foresee(problem, session.opening(problem, device.target, mine, taking_part, seeds))

    @cached_property
    def kin(self) -> Kin:
        """Results of searches for similar problems."""
        return Kin(self.user)

    def _seeds(
        self, problem: Problem, device: Device, default: Choice, answer: LookupAnswer
    ) -> dict[str, list[Config]]:
        """Return configs to try first, by solver: known ones, the heuristic's picks, and those of similar problems."""
        seeds: dict[str, list[Config]] = {}
        for found in answer.found:
            seeds.setdefault(found.solver.id, []).append(found.config)
        advice = self.advise(problem, device, default, most=GUESSES)
        for solver, config in advice.picks if advice is not None else ():
            seeds.setdefault(solver.id, []).append(config)
        for id, worked in self.kin.suggestions(problem, Where.of(device.target)):
            seeds.setdefault(id, []).append(worked)
        return seeds

    def tune(
        self,
        problem: Problem,
        device: Device,
        default: Choice,
        answer: LookupAnswer,
        report: Callable[[Progress], None] | None = None,
        seconds: float | None = None,
        stop: Callable[[], bool] | None = None,
        regime: str | None = None,
        decide: bool = True,
    ) -> Outcome | None:
        """Tune a problem even if it is known, and store the result. Returns None if there is no choice.

        ``seconds`` and ``regime`` default to the settings. If ``decide`` is False, the results do not answer yet.
        """
        with _SEARCHING:
            return self._tune(problem, device, default, answer, report, seconds, stop, regime, decide)

    def _tune(
        self,
        problem: Problem,
        device: Device,
        default: Choice,
        answer: LookupAnswer,
        report: Callable[[Progress], None] | None,
        seconds: float | None,
        stop: Callable[[], bool] | None,
        regime: str | None,
        decide: bool,
    ) -> Outcome | None:
        from . import keep_programs, session

        strategy = self.policy.strategy(problem.op)
        taking_part = self._taking_part(problem, device, default, answer)
        choices = sum(s.space(problem, device.target).combinations for s in taking_part)
        if strategy is None or choices < 2:
            return None
        mine = (default.solver.id, default.config)
        by_id = {s.id: s for s in self.candidates}
        outcome = session.tune(
            session.SessionSubject(problem, device.target, mine, taking_part),
            self._measurer(device, self.settings),
            session.SearchPlan(
                self.settings.tune_seconds if seconds is None else seconds,
                self.settings.tune_seed,
                regime or self.settings.tune_regime.lower(),
                strategy,
                lambda solver, config: self._barred(by_id[solver], config, problem, device, mine),
                decide,
            ),
            session.EarlierResults(
                self._seeds(problem, device, default, answer), self.measured(problem, device), self._surveys(problem)
            ),
            session.SessionHooks(partial(self._store, problem), report, stop, self.clock),
        )
        self._store(problem, outcome)
        if outcome.survey is not None:
            self.kin.learn(outcome.survey)
        keep_programs.keep_programs(self._measurer(device, self.settings), outcome, device, self.settings)
        return outcome

    def _surveys(self, problem: Problem) -> list[Survey]:
        """Return the surveys of a problem from all layers."""
        found = (s for layer in self.lookup.layers for s in layer.database.surveys(problem.family()))
        return [s for s in found if s.key.problem == problem.key()]

    def _barred(
        self, solver: Solver, config: Config, problem: Problem, device: Device, default: tuple[str, Config]
    ) -> str | None:
        """Return why a candidate is not attempted; None if it is."""
        most = self.settings.tune_max_workspace
        if most and (solver.id, config) != default:  # the default runs in any case
            needed = solver.workspace(problem, config, device) or 0
            if needed > most:
                return f"it needs {needed:,} bytes of workspace, and TUNE_MAX_WORKSPACE is {most:,}"
        return self.lookup.barred(solver, config, problem, device.target, default)

    def _store(self, problem: Problem, outcome: Outcome) -> None:
        """Store the result of a session."""
        LOG.info("tuned %s: %s", problem.key(), outcome.reason)
        records: list[AnyRecord] = [*outcome.records, *outcome.faults]
        records += [outcome.survey] if outcome.survey is not None else []
        try:
            self.user.add(records)
            self.user.note("tuned", f"{problem.key()}: {outcome.reason}")
        except DatabaseError as error:
            warn(f"results of tuning are used, but lost when this process ends: {error}")
            self._unsaved.add(records)

    def _extend(self, found: StoredAnswer) -> None:
        """Add an answer to TUNING_FILE if it is missing there."""
        exact = found.match.kind is MatchKind.EXACT and found.layer != Origin.FILE.value
        if exact and found.measurement.digest not in self._filed:
            from ..knowledge.tuning_file import TuningFile

            self._filed.add(found.measurement.digest)
            try:
                _, skipped = TuningFile(self.settings.tuning_file).extend([found.measurement])
            except InputError as error:
                skipped = [str(error)]
            for text in skipped:
                warn(text)

    def _taking_part(self, problem: Problem, device: Device, default: Choice, answer: LookupAnswer) -> list[Solver]:
        """Return the solvers that take part in a search, as FIND_MODE demands."""
        if self.policy.candidates is Candidates.IMMEDIATE:
            advice = None if answer.best is not None else self.advise(problem, device, default)
            guessed = advice.picks[0][0] if advice is not None and advice.picks else default.solver
            return [answer.best.solver if answer.best is not None else guessed]
        asked = self._candidates(problem.op, device.target.language)
        generic = self.policy.candidates is Candidates.GENERIC
        return [
            s
            for s in asked
            if not s.host and not (generic and s.tuned_only) and self.why_not(s, problem, device) is None
        ]

    def is_late(self, problem: Problem, device: Device) -> bool:
        """Whether only a kernel that needs known shapes or a known operand may solve the problem later."""
        if self.settings.host_fallback or device.runs_references:
            return False
        asked = self._defaults(problem.op, device.target.language)
        answers = [s.why_not(problem, device.target) for s in asked if not s.host]
        if None in answers:
            return not problem.is_static
        return any(isinstance(answer, Missing) for answer in answers)

    def ask(self, problem: Problem, device: Device) -> tuple[list[Solver], dict[str, str]]:
        """Return the solvers that accept a problem, default first, and the reasons of the others."""
        asked = self._candidates(problem.op, device.target.language)
        answers = {solver: self.why_not(solver, problem, device) for solver in asked}
        accepting = [solver for solver, reason in answers.items() if reason is None]
        return accepting, {solver.id: reason for solver, reason in answers.items() if reason is not None}

    def why_not_fused(self, fused: Problem, plain: Problem, device: Device) -> str | None:
        """Return None if fusing loses nothing: a solver runs it fused, on the device if the plain one ran there."""
        own = [op for op in (fused.op, *(step.op for step in fused.epilogue)) if op in self.custom]
        if own:
            return f"CONFIG_FILE has a kernel for {own[0]}"
        if self._on_device(fused, device, by_default=True):
            return None
        accepting, rejected = self.ask(fused, device)
        if not accepting:
            return reasons(rejected)
        mine = [s for s in accepting if not s.host and self._may_default(s, fused, device)]
        if not device.runs_references and not mine and self._on_device(plain, device, by_default=True):
            return f"fused, only the host could run it: {reasons(rejected)}"
        return None

    def why_not(self, solver: Solver, problem: Problem, device: Device) -> str | None:
        """Return None if the solver may be used for the problem on the device; else the reason."""
        if solver.host and not device.runs_references and not self.settings.host_fallback:
            return "HOST_FALLBACK is NO"
        return solver.why_not(problem, device.target)

    def why_not_layout(self, problem: Problem, device: Device) -> str | None:
        """Return None if one of the device's own kernels solves a problem in a layout; else the reason."""
        if problem.op in self.custom:
            return f"CONFIG_FILE has a kernel for {problem.op}, which takes plain tensors"
        if self._on_device(problem, device, by_default=True):
            return None
        return f"the device cannot work in it: {reasons(self.ask(problem, device)[1])}"

    def knows(self, op: str, device: Device) -> bool:
        """Whether a solver that names the operation makes kernels for the device."""
        return any(not s.host and s.ops is not None for s in self._defaults(op, device.target.language))

    def _on_device(self, problem: Problem, device: Device, by_default: bool = False) -> bool:
        """Whether a device kernel solves it; ``by_default``: one whose default config EXECUTION_MODE_HINT allows."""
        asked = self._defaults(problem.op, device.target.language)
        taking = (s for s in asked if not s.host and s.why_not(problem, device.target) is None)
        return any(not by_default or self._may_default(s, problem, device) for s in taking)

    def _may_default(self, solver: Solver, problem: Problem, device: Device) -> bool:
        """Whether EXECUTION_MODE_HINT allows the default config of a solver that accepts the problem."""
        if not self.lookup.accurate or not problem.is_static:  # configs need static shapes
            return True
        return self.lookup.inexact(solver, solver.default(problem, device.target), problem) is None

    def layouts(self, problem: Problem, device: Device) -> tuple[Layout, Layout] | None:
        """Return the layouts (first input, output) that the device's solvers prefer for a plain problem."""
        for solver in self._defaults(problem.op, device.target.language):
            found = solver.preferred(problem, device.target)
            if found is not None:
                return found
        return None


def reasons(rejected: Mapping[str, str]) -> str:
    """Join the reasons of all solvers in one line."""
    return "; ".join(f"{k}: {v}" for k, v in rejected.items()) or "there are no solvers"
