"""Results of searches for similar problems: another epilogue, another shape, another batch.

Problems are kin if operation, element types, layouts and constant inputs of the main operation agree. Sizes, other
attributes and fused steps may differ. A search first tries the candidates that were fastest for the nearest kin. They
are compiled, checked and timed like all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from ..errors import InputError
from ..ir.types import TensorType
from ..knowledge.key import Where
from ..knowledge.record import AnyRecord, Survey
from ..measure.base import Candidate
from ..solvers import problem_json
from ..solvers.base import Problem

#: Records of a knowledge base that are examined; similar problems that are used; candidates of each problem; and of
#: all.
MOST_RECORDS, NEAREST, EACH, MOST = 4000, 4, 2, 6
#: A candidate within this factor of the best one for its problem is as good.
NEAR = 1.02


@dataclass(frozen=True)
class _Lesson:
    """The fastest candidates of one search, if they were faster than the default."""

    problem: str
    sizes: tuple[int, ...]
    best: tuple[Candidate, ...]


class Kin:
    """Lessons of searches, grouped by the properties that similar problems share."""

    def __init__(self, records: Iterable[AnyRecord] = ()) -> None:
        self._lessons: dict[object, list[_Lesson]] = {}
        for record in islice(records, MOST_RECORDS):
            if isinstance(record, Survey):
                self.learn(record)

    def learn(self, survey: Survey) -> None:
        """Add the results of a search."""
        try:
            problem = problem_json.from_json(survey.problem)
        except InputError:  # from a version that described problems in another way
            return
        seen = sorted((one for one in survey.seen if one.gain > 1), key=lambda one: -one.gain)
        best = tuple((one.solver, one.config) for one in seen if one.gain * NEAR >= seen[0].gain)[:EACH]
        if best:
            lesson = _Lesson(problem.key(), _sizes(problem), best)
            self._lessons.setdefault(_likeness(problem, survey.key.where), []).append(lesson)

    def suggestions(self, problem: Problem, where: Where) -> Iterator[Candidate]:
        """Yield the candidates that were fastest for similar problems, nearest problem first."""
        mine = _sizes(problem)
        known = self._lessons.get(_likeness(problem, where), ())
        others = [lesson for lesson in known if lesson.problem != problem.key()]
        nearest = sorted(others, key=lambda lesson: (_distance(mine, lesson.sizes), lesson.problem))[:NEAREST]
        return islice(dict.fromkeys(candidate for lesson in nearest for candidate in lesson.best), MOST)


def _likeness(problem: Problem, where: Where) -> object:
    main = problem.main_inputs
    inputs = tuple(
        (t.dtype, t.rank, t.layout, constant) if isinstance(t, TensorType) else (str(t), constant)
        for t, constant in zip(main, problem.constant, strict=False)
    )
    return problem.op, inputs, where.device, where.arch, where.runtime


def _sizes(problem: Problem) -> tuple[int, ...]:
    """Return the sizes of the main inputs and of the first result; fused steps add none."""
    types = [*problem.main_inputs, *problem.outputs[:1]]
    return tuple(d for t in types if isinstance(t, TensorType) and t.is_static for d in t.dims)


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """Return the distance in factors of two, summed over all sizes."""
    if len(one) != len(other):
        return math.inf
    return sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in zip(one, other, strict=True))
