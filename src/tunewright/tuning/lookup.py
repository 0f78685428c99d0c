"""What is known about a problem: the layers of knowledge bases, asked in order, and the candidates that are barred.

Layers stand above each other: the tuning file, the user's knowledge base, the system's. What is found is checked again
(the solver exists, accepts the problem, has the config in its space, is not barred), because a stored answer may be
older than the code. Of one candidate the nearest match counts, in the highest layer that has it: that is how a newer
and worse measurement of the user demotes what the system recommends. An exact answer of any layer comes before a
provisional one; a candidate that was not found faster than the default never answers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..devices.base import Target
from ..search.space import Space
from ..solvers.base import Config, Problem, Solver
from .database import Database, better, newest
from .key import Key, Kind, Match, Where, compare, distance
from .record import Fault, Measurement

#: the number of other problems, the nearest ones, whose answers are looked at
NEIGHBOURS = 8


@dataclass(frozen=True)
class Layer:
    """A knowledge base with the name under which its answers are known."""

    name: str
    database: Database


@dataclass(frozen=True)
class Found:
    """A stored answer that can be used here."""

    solver: Solver
    config: Config
    layer: str
    match: Match
    measurement: Measurement


@dataclass(frozen=True)
class Answer:
    """What the layers say: the best answer first, and why the nearest other record is none."""

    found: tuple[Found, ...] = ()
    nearest: str = ""

    @property
    def best(self) -> Found | None:
        return self.found[0] if self.found else None


class Lookup:
    """Asks layers, the first one first."""

    def __init__(self, layers: Sequence[Layer] = (), accurate: bool = False) -> None:
        self.layers = tuple(layers)
        #: EXECUTION_MODE_HINT = ACCURACY
        self.accurate = accurate
        #: measurements by problem, of each layer and family, with the sequence that they were grouped out of
        self._grouped: dict[tuple[str, str], tuple[Sequence[Measurement], dict[str, list[Measurement]]]] = {}
        #: faults by solver, of each layer, with the sequence that they were sorted out of
        self._sorted: dict[str, tuple[Sequence[Fault], dict[str, list[Fault]]]] = {}

    def ask(
        self,
        problem: Problem,
        target: Target,
        solvers: Iterable[Solver],
        why_not: Callable[[Solver], str | None],
        default: tuple[str, Config] | None = None,
    ) -> Answer:
        """Answers for a static problem among ``solvers``; ``why_not`` says which of them may be used."""
        known = {s.id: s for s in solvers}
        keys = _Keys(problem, target)
        order = {layer.name: n for n, layer in enumerate(self.layers)}
        candidates: dict[tuple[str, Config], tuple[str, Match, Measurement]] = {}
        misses: list[tuple[int, str]] = []
        for layer in self.layers:
            for m in self._near(layer, problem):
                reason, match = self._fits(m, problem, target, known, keys, why_not, default)
                if reason:
                    who = f"{m.key.solver} {dict(m.config)} of the {layer.name}"
                    misses.append((len(match.differs), f"{who}: {reason}"))
                    continue
                before = candidates.get((m.key.solver, m.config))
                if before is None or _nearer((layer.name, match, m), before, order):
                    candidates[m.key.solver, m.config] = layer.name, match, m
        if not candidates and not misses:
            return Answer(nearest="nothing is known of problems like this one")
        usable = {m.digest: (name, match) for name, match, m in candidates.values() if m.evidence.gain.low >= 1}
        ranked = better((match, m) for name, match, m in candidates.values() if m.digest in usable)
        # sorted() keeps the order among equals: within a kind and a layer it is that of the module `database`
        ranked.sort(key=lambda pair: (pair[0].kind is not Kind.EXACT, order[usable[pair[1].digest][0]]))
        found = tuple(
            Found(known[m.key.solver], m.config, usable[m.digest][0], match, m) for match, m in ranked
        )
        return Answer(found, min(misses)[1] if misses else "")

    def _near(self, layer: Layer, problem: Problem) -> list[Measurement]:
        """What a layer has of a problem and of those that are nearest to it."""
        groups = self._groups(layer, problem)
        far = ((distance(problem.sizes, ms[0].sizes), text) for text, ms in groups.items() if text != problem.key())
        texts = [problem.key(), *(text for _, text in heapq.nsmallest(NEIGHBOURS, far))]
        return [m for text in texts for m in groups.get(text, ())]

    def _groups(self, layer: Layer, problem: Problem) -> Mapping[str, Sequence[Measurement]]:
        """What counts of a problem's family in a layer, by problem."""
        stored = layer.database.family(problem.family())
        if not stored:
            return {}
        at = (layer.name, problem.family())
        known = self._grouped.get(at)
        if known is None or known[0] is not stored:
            groups: dict[str, list[Measurement]] = {}
            for m in newest(stored):
                groups.setdefault(m.key.problem, []).append(m)
            known = self._grouped[at] = stored, groups
        return known[1]

    def measured_sizes(self, problem: Problem, target: Target) -> frozenset[tuple[int, ...]]:
        """Sizes of problems of the same family for which something was measured on a target's processor."""
        here, found = Where.of(target), set[tuple[int, ...]]()
        for layer in self.layers:
            for group in self._groups(layer, problem).values():
                found |= {m.sizes for m in group if _same_processor(m.key.where, here)}
        return frozenset(found)

    def fastest(self, problem: Problem, where: Where) -> float | None:
        """Seconds of the fastest candidate that was measured for exactly a problem on a processor; None: none was."""
        groups = [group for layer in self.layers if (group := self._groups(layer, problem))]
        there = (m for group in groups for m in group.get(problem.key(), ()))
        return min((m.evidence.seconds for m in there if _same_processor(m.key.where, where)), default=None)

    def worse(self, problem: Problem, target: Target) -> set[tuple[str, Config]]:
        """Candidates that were measured for a problem on a target's processor, and were slower than the default."""
        here = Where.of(target)
        found: dict[tuple[str, Config], Measurement] = {}
        for layer in self.layers:
            for m in self._groups(layer, problem).get(problem.key(), ()):
                at = (m.key.solver, m.config)
                if _same_processor(m.key.where, here) and (at not in found or m.date > found[at].date):
                    found[at] = m
        return {at for at, m in found.items() if m.evidence.gain.median < 1}

    def _fits(
        self,
        m: Measurement,
        problem: Problem,
        target: Target,
        known: Mapping[str, Solver],
        keys: _Keys,
        why_not: Callable[[Solver], str | None],
        default: tuple[str, Config] | None,
    ) -> tuple[str, Match]:
        """Empty and how it matches; or why a stored measurement is no answer here."""
        missed = Match(Kind.MISS)
        solver = known.get(m.key.solver)
        if solver is None:
            return "there is no such solver here", missed
        far = 0.0 if m.key.problem == problem.key() else distance(problem.sizes, m.sizes)
        # cheap first: the text of a kernel is written only where all else fits
        like = replace(m.key, problem=problem.key(), where=keys.where, version=solver.version)
        rough = compare(like, m.key, far)
        if rough.kind is Kind.MISS:
            return str(rough), rough
        reason = why_not(solver)
        if reason is not None:
            return reason, missed
        candidate = (m.key.solver, m.config)
        if candidate == m.evidence.default and default is not None and candidate != default:
            return "it was the default when it was measured, and is not any more", missed
        if m.config not in keys.space(solver):
            return "its config is not in the solver's space", missed
        barred = self.barred(solver, m.config, problem, target, default)
        if barred is not None:
            return barred, missed
        # where the shape differs, the text and the space say nothing more
        match = rough if m.key.problem != problem.key() else compare(keys.key(solver, m.config), m.key, far)
        return (str(match) if match.kind is Kind.MISS else ""), match

    def barred(
        self,
        solver: Solver,
        config: Config,
        problem: Problem,
        target: Target,
        default: tuple[str, Config] | None = None,
    ) -> str | None:
        """Why a candidate must not run on a target; None when nothing speaks against it.

        Every way to an answer asks here: what is stored, searched, locked, and the default.
        """
        found = self.quarantined(solver, config, problem, target, default)
        return self.inexact(solver, config, problem) if found is None else found

    def inexact(self, solver: Solver, config: Config, problem: Problem) -> str | None:
        """Why a candidate is not accurate enough for EXECUTION_MODE_HINT."""
        why = solver.inexact(problem, config) if self.accurate else None
        return None if why is None else f"excluded by EXECUTION_MODE_HINT = ACCURACY: {why}"

    def quarantined(
        self,
        solver: Solver,
        config: Config,
        problem: Problem,
        target: Target,
        default: tuple[str, Config] | None = None,
    ) -> str | None:
        """The fault for which a candidate must not run on a target; None when there is none.

        A candidate that crashed, hung or was wrong once is out for every problem on that device and driver, but for the
        default, which is out for that problem alone: without it there would be none.
        """
        where = Where.of(target)
        for layer in self.layers:
            for fault in self._faults(layer, solver):
                if fault.config != config or not _same_place(fault, where, solver):
                    continue
                if (solver.id, config) == default and fault.key.problem != problem.key():
                    continue
                return f"barred: {fault.status.lower()} on {fault.date[:10]} ({fault.why})"
        return None

    def _faults(self, layer: Layer, solver: Solver) -> Sequence[Fault]:
        faults = layer.database.faults()
        known = self._sorted.get(layer.name)
        if known is None or known[0] is not faults:
            by_solver: dict[str, list[Fault]] = {}
            for fault in faults:
                by_solver.setdefault(fault.key.solver, []).append(fault)
            known = self._sorted[layer.name] = faults, by_solver
        return known[1].get(solver.id, ())


def _same_processor(there: Where, here: Where) -> bool:
    return (there.device, there.processor, there.runtime) == (here.device, here.processor, here.runtime)


def _same_place(fault: Fault, where: Where, solver: Solver) -> bool:
    there = fault.key.where
    same = (there.device, there.processor, there.runtime, there.software) == (
        where.device, where.processor, where.runtime, where.software
    )  # fmt: skip
    return same and fault.key.version == solver.version


def _nearer(
    one: tuple[str, Match, Measurement], other: tuple[str, Match, Measurement], order: Mapping[str, int]
) -> bool:
    def rank(entry: tuple[str, Match, Measurement]) -> tuple[object, ...]:
        name, match, m = entry
        return match.kind is not Kind.EXACT, order[name], m.evidence.regime == "warm", match.distance

    return rank(one) < rank(other)


class _Keys:
    """The keys that candidates would have now; spaces and texts are made once."""

    def __init__(self, problem: Problem, target: Target) -> None:
        self.problem, self.target, self.where = problem, target, Where.of(target)
        self._keys: dict[tuple[str, Config], Key] = {}
        self._spaces: dict[str, Space] = {}

    def space(self, solver: Solver) -> Space:
        if solver.id not in self._spaces:
            self._spaces[solver.id] = solver.space(self.problem, self.target)
        return self._spaces[solver.id]

    def key(self, solver: Solver, config: Config) -> Key:
        at = (solver.id, config)
        if at not in self._keys:
            self._keys[at] = Key.of(self.problem, self.target, solver, config)
        return self._keys[at]
