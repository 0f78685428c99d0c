"""Queries knowledge bases for a device of this machine, and explains why a record does not answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tunewright.errors import InputError

if TYPE_CHECKING:
    from tunewright.knowledge.database import Database
    from tunewright.knowledge.key import Where
    from tunewright.knowledge.record import Measurement
    from tunewright.measure.base import Candidate
    from tunewright.settings import Settings
    from tunewright.solvers.base import Problem, Solver
    from tunewright.tuning.lookup import Lookup, LookupAnswer


def pose(m: Measurement) -> Problem:
    """Return the problem of a measurement. Raises InputError if it is not the one that the key names."""
    from tunewright.solvers.problem_json import from_json

    problem = from_json(m.problem)
    if problem.key() != m.key.problem:
        raise InputError(f"the stored problem differs from its key: {problem.key()[:200]}", where=m.digest[:10])
    return problem


class AskedDevice:
    """A device, and the knowledge bases that are queried for it."""

    def __init__(self, name: str, layers: Mapping[str, Database], settings: Settings) -> None:
        from tunewright.knowledge.key import Where
        from tunewright.plugins.single import of_device, open_device
        from tunewright.tuning.lookup import KnowledgeLayer, Lookup
        from tunewright.tuning.tuner import Tuner

        # with the threads that one stream would have
        self.device = of_device(open_device(name, settings), settings).device
        self.name, self.where = self.device.name, Where.of(self.device.target)
        self.layers = [KnowledgeLayer(layer, database) for layer, database in layers.items()]
        self._tuner, self._lookup = Tuner(settings), Lookup(self.layers)

    def answer(self, problem: Problem) -> LookupAnswer:
        """Return the answers that apply now, best first."""
        return self._ask(problem, self._lookup)

    def verdict(self, problem: Problem, layer: str, m: Measurement) -> str:
        """Return how one measurement alone matches (exact, or provisional and which fields differ), or why not."""
        from tunewright.knowledge.database import MemoryDatabase
        from tunewright.tuning.lookup import KnowledgeLayer, Lookup

        faults = [fault for each in self.layers for fault in each.database.faults()]
        answer = self._ask(problem, Lookup([KnowledgeLayer(layer, MemoryDatabase([m, *faults]))]))
        if answer.best is not None:
            return str(answer.best.match)
        # the reason comes after the name of the record
        return answer.nearest.partition(f" of the {layer}: ")[2] or answer.nearest

    def default(self, problem: Problem) -> Candidate | None:
        """Return the candidate that runs without any answer."""
        from tunewright.search.space import Config

        accepting = self._tuner.ask(problem, self.device)[0]
        solver = next((s for s in accepting if not s.tuned_only), None)
        return None if solver is None else (solver.id, Config(solver.default(problem, self.device.target)))

    def solvers(self, problem: Problem) -> list[Solver]:
        """Return the solvers that accept a problem."""
        return self._tuner.ask(problem, self.device)[0]

    def is_here(self, where: Where) -> bool:
        """Whether a measurement is of this device, possibly with other versions."""
        return self.is_like(where) and where.processor == self.where.processor

    def is_like(self, where: Where) -> bool:
        """Whether measurements of that place may apply here."""
        mine = self.where
        return (where.device, where.arch, where.runtime) == (mine.device, mine.arch, mine.runtime)

    def _ask(self, problem: Problem, lookup: Lookup) -> LookupAnswer:
        accepting, rejected = self._tuner.ask(problem, self.device)

        def why_not(solver: Solver) -> str | None:
            return None if solver in accepting else rejected.get(solver.id, "the device does not compile its kernels")

        default = self.default(problem)
        return lookup.ask(problem, self.device.target, self._tuner.candidates, why_not, default)
