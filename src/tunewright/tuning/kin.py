"""What searches of similar problems found: another epilogue, another shape, another batch.

Problems are kin when operation, element types, layouts and constant inputs of the main operation agree; sizes, other
attributes and what is fused may differ. What was fastest for the nearest of them is tried first. That a config is
worth a try is all that is concluded: it is compiled, checked and timed like any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from ..errors import InputError
from ..ir.types import TensorType
from ..solvers import serial
from ..solvers.base import Problem
from .key import Where
from .measure import Candidate
from .record import AnyRecord, Survey

#: records of a knowledge base that are looked through, similar problems that are asked, candidates of each, and of all
MOST_RECORDS, NEAREST, EACH, MOST = 4000, 4, 2, 6
#: a candidate within this factor of the best one of its problem is as good
NEAR = 1.02


@dataclass(frozen=True)
class _Lesson:
    """The fastest candidates of one search, where they were faster than the default."""

    problem: str
    sizes: tuple[int, ...]
    best: tuple[Candidate, ...]


class Kin:
    """Lessons of searches in one place, by what makes problems similar."""

    def __init__(self, records: Iterable[AnyRecord] = ()) -> None:
        self._lessons: dict[object, list[_Lesson]] = {}
        for record in islice(records, MOST_RECORDS):
            if isinstance(record, Survey):
                self.learn(record)

    def learn(self, survey: Survey) -> None:
        """Take in what a search saw."""
        try:
            problem = serial.from_json(survey.problem)
        except InputError:  # it is of a version that described problems in another way
            return
        seen = sorted((one for one in survey.seen if one.gain > 1), key=lambda one: -one.gain)
        best = tuple((one.solver, one.config) for one in seen if one.gain * NEAR >= seen[0].gain)[:EACH]
        if best:
            lesson = _Lesson(problem.key(), _sizes(problem), best)
            self._lessons.setdefault(_likeness(problem, survey.key.where), []).append(lesson)

    def suggestions(self, problem: Problem, where: Where) -> Iterator[Candidate]:
        """What was fastest for similar problems, the nearest first."""
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
    """Those of the main inputs and the first result: what is fused adds none."""
    types = [*problem.main_inputs, *problem.outputs[:1]]
    return tuple(d for t in types if isinstance(t, TensorType) and t.is_static for d in t.dims)


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """In factors of two over all sizes."""
    if len(one) != len(other):
        return math.inf
    return sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in zip(one, other, strict=True))
