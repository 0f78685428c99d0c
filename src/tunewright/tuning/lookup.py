"""Answers for a problem: the layers of knowledge bases, asked in order, and the candidates that are barred.

The layers are the tuning file, the user's knowledge base and the system's, in this order. A stored answer may be older
than the code, so it is checked. The solver must exist and accept the problem. Its space must contain the config, and
the candidate must not be barred.

Of each candidate the nearest match counts, from the highest layer that has it. A newer and worse measurement of the
user thereby demotes a recommendation of the system. An exact answer of any layer comes before a provisional one. A
candidate that was not found faster than the default never answers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..devices.base import Target
from ..knowledge.database import Database, better, newest
from ..knowledge.key import Key, KeyMatch, MatchKind, Where, compare, distance
from ..knowledge.record import Fault, Measurement
from ..search.space import Space
from ..solvers.base import Config, Problem, Solver

#: Number of other problems, nearest first, whose answers are considered.
NEIGHBOURS = 8


@dataclass(frozen=True)
class KnowledgeLayer:
    """A knowledge base with a name for its answers."""

    name: str
    database: Database


@dataclass(frozen=True)
class StoredAnswer:
    """A stored answer that is usable here."""

    solver: Solver
    config: Config
    layer: str
    match: KeyMatch
    measurement: Measurement


@dataclass(frozen=True)
class LookupAnswer:
    """The usable answers, best first, and why the nearest other record is not usable."""

    found: tuple[StoredAnswer, ...] = ()
    nearest: str = ""

    @property
    def best(self) -> StoredAnswer | None:
        return self.found[0] if self.found else None


class Lookup:
    """Asks the layers in order."""

    def __init__(self, layers: Sequence[KnowledgeLayer] = (), accurate: bool = False) -> None:
        self.layers = tuple(layers)
        #: whether EXECUTION_MODE_HINT is ACCURACY
        self.accurate = accurate
        #: per layer and family: the stored sequence, and its measurements grouped by problem
        self._grouped: dict[tuple[str, str], tuple[Sequence[Measurement], dict[str, list[Measurement]]]] = {}
        #: per layer: the stored sequence, and its faults grouped by solver
        self._sorted: dict[str, tuple[Sequence[Fault], dict[str, list[Fault]]]] = {}

    def ask(
        self,
        problem: Problem,
        target: Target,
        solvers: Iterable[Solver],
        why_not: Callable[[Solver], str | None],
        default: tuple[str, Config] | None = None,
    ) -> LookupAnswer:
        """Return the answers for a static problem among ``solvers``.

        ``why_not`` returns why a solver may not be used, or None.
        """
        known = {s.id: s for s in solvers}
        keys = _Keys(problem, target)
        order = {layer.name: n for n, layer in enumerate(self.layers)}
        candidates: dict[tuple[str, Config], tuple[str, KeyMatch, Measurement]] = {}
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
            return LookupAnswer(nearest="nothing is known of problems like this one")
        usable = {m.digest: (name, match) for name, match, m in candidates.values() if m.evidence.gain.low >= 1}
        ranked = better((match, m) for name, match, m in candidates.values() if m.digest in usable)
        # the sort is stable: within a kind and a layer the order of module `database` remains
        ranked.sort(key=lambda pair: (pair[0].kind is not MatchKind.EXACT, order[usable[pair[1].digest][0]]))
        found = tuple(StoredAnswer(known[m.key.solver], m.config, usable[m.digest][0], match, m) for match, m in ranked)
        return LookupAnswer(found, min(misses)[1] if misses else "")

    def _near(self, layer: KnowledgeLayer, problem: Problem) -> list[Measurement]:
        """Return the measurements that a layer has of a problem and of its nearest neighbours."""
        groups = self._groups(layer, problem)
        far = ((distance(problem.sizes, ms[0].sizes), text) for text, ms in groups.items() if text != problem.key())
        texts = [problem.key(), *(text for _, text in heapq.nsmallest(NEIGHBOURS, far))]
        return [m for text in texts for m in groups.get(text, ())]

    def _groups(self, layer: KnowledgeLayer, problem: Problem) -> Mapping[str, Sequence[Measurement]]:
        """Return the measurements of a problem's family that count in a layer, grouped by problem."""
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
        """Return the sizes of problems of the same family that were measured on the target's processor."""
        here, found = Where.of(target), set[tuple[int, ...]]()
        for layer in self.layers:
            for group in self._groups(layer, problem).values():
                found |= {m.sizes for m in group if _same_processor(m.key.where, here)}
        return frozenset(found)

    def fastest(self, problem: Problem, where: Where) -> float | None:
        """Return the seconds of the fastest candidate measured for exactly this problem on a processor, or None."""
        groups = [group for layer in self.layers if (group := self._groups(layer, problem))]
        there = (m for group in groups for m in group.get(problem.key(), ()))
        return min((m.evidence.seconds for m in there if _same_processor(m.key.where, where)), default=None)

    def worse(self, problem: Problem, target: Target) -> set[tuple[str, Config]]:
        """Return the candidates measured for a problem on the target's processor that were slower than the default."""
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
    ) -> tuple[str, KeyMatch]:
        """Return "" and the match; or the reason why a stored measurement is not usable here."""
        missed = KeyMatch(MatchKind.MISS)
        solver = known.get(m.key.solver)
        if solver is None:
            return "there is no such solver here", missed
        far = 0.0 if m.key.problem == problem.key() else distance(problem.sizes, m.sizes)
        # cheap checks first: a kernel's source is generated only if everything else fits
        like = replace(m.key, problem=problem.key(), where=keys.where, version=solver.version)
        rough = compare(like, m.key, far)
        if rough.kind is MatchKind.MISS:
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
        # if the shape differs, source and space add no information
        match = rough if m.key.problem != problem.key() else compare(keys.key(solver, m.config), m.key, far)
        return (str(match) if match.kind is MatchKind.MISS else ""), match

    def barred(
        self,
        solver: Solver,
        config: Config,
        problem: Problem,
        target: Target,
        default: tuple[str, Config] | None = None,
    ) -> str | None:
        """Return why a candidate must not run on a target; None if it may.

        Every source of answers asks here: stored records, searches, lockfiles, and the default.
        """
        found = self.quarantined(solver, config, problem, target, default)
        return self.inexact(solver, config, problem) if found is None else found

    def inexact(self, solver: Solver, config: Config, problem: Problem) -> str | None:
        """Return why a candidate is not accurate enough for EXECUTION_MODE_HINT; else None."""
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
        """Return the fault for which a candidate must not run on a target; None if there is none.

        A candidate that crashed, hung or gave a wrong result is barred for every problem on that device and driver. The
        default is barred only for the problem of the fault, because otherwise no candidate would remain.
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

    def _faults(self, layer: KnowledgeLayer, solver: Solver) -> Sequence[Fault]:
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
    one: tuple[str, KeyMatch, Measurement], other: tuple[str, KeyMatch, Measurement], order: Mapping[str, int]
) -> bool:
    def rank(entry: tuple[str, KeyMatch, Measurement]) -> tuple[object, ...]:
        name, match, m = entry
        return match.kind is not MatchKind.EXACT, order[name], m.evidence.regime == "warm", match.distance

    return rank(one) < rank(other)


class _Keys:
    """The keys that candidates have now. Spaces and sources are computed once."""

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
