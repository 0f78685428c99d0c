"""The heuristic: gradient-boosted trees that predict a fast candidate for a problem that was never measured.

It has a section for each `kind` of problem and each architecture. The trees of a section rate a problem with a
candidate: the base-two logarithm of its speed, up to a constant of the problem. The default and a shortlist are rated.
The shortlist holds candidates that were among the best of some training problem on devices of the same architecture.
Every pick was therefore measured there, with correct results. A pick must be predicted faster than the default by a
margin.

The heuristic abstains, with a reason in words, in three cases:

- it has no section for the problem;
- a feature of the problem lies outside the range of the training data;
- the nearest training problem is farther away than training problems are from each other.

A section answers in well under a millisecond. A leaf applies if all splits on its path hold. Splits on candidates have
fixed answers for the shortlist, and splits on the problem are answered once for all candidates. The rest is one product
of a matrix and a vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..devices.base import Target
from ..knowledge.key import Where
from ..measure.base import Candidate
from ..search.space import Config
from ..solvers.base import Problem, Solver
from .features import TOTALS, Column, Floats, features, kind, one_image

#: MARGIN: minimum predicted gain of a pick over the default, since predictions err by more than a few per cent.
#: SPECIAL: minimum gain of a kernel made for this shape alone over one that is not, because it costs a compilation.
MARGIN, SPECIAL = 1.08, 1.05
#: Doublings by which a feature of a problem may lie outside the range of the training data.
BEYOND = 1.5
#: Some training problem must lie within this many doublings in every feature, except in totals of other features. The
#: radius, a mean over all features, is not enough: it would place a product of 9 rows between those of 1 and 20 rows.
WITHIN = 2.5
#: Maximum number of problems whose ratings are kept.
KEPT = 1024


Integers: TypeAlias = tuple[int, ...] | npt.NDArray[np.int64]
Numbers: TypeAlias = tuple[float, ...] | Floats


@dataclass(frozen=True, eq=False)
class Tree:
    """Nodes in the order of their numbers, root first.

    A child stands behind its only parent. A node with a ``feature`` below 0 is a leaf.
    """

    feature: Integers
    #: values up to the threshold go to the left child
    threshold: Numbers
    left: Integers
    right: Integers
    value: Numbers


@dataclass(frozen=True)
class SectionScope:
    """The devices that a section applies to: the fields of a key that must match."""

    device: str
    arch: str
    runtime: str
    options: str

    @staticmethod
    def of(where: Where) -> SectionScope:
        # Byte instructions do not matter for other types, and element types distinguish the kinds of problems.
        level, _, registers = where.arch.partition(";")
        return SectionScope(where.device, f"{level.partition('+')[0]};{registers}", where.runtime, where.options)


@dataclass(frozen=True)
class Listed:
    """A candidate of a shortlist."""

    solver: str
    version: str
    config: Config


@dataclass(frozen=True, eq=False)
class HeuristicSection:
    """What was learnt about one kind of problem on one architecture."""

    kind: str
    place: SectionScope
    #: names of the processors in the training data
    processors: tuple[str, ...]
    #: names of a problem's features, and the unit of distance for each
    names: tuple[str, ...]
    scale: tuple[float, ...]
    #: the training problems, and the distance from the nearest one up to which the section answers
    points: tuple[tuple[float, ...], ...]
    radius: float
    columns: tuple[Column, ...]
    shortlist: tuple[Listed, ...]
    base: float
    trees: tuple[Tree, ...]

    def why_far(self, numbers: Mapping[str, float]) -> str | None:
        """Return why a problem is too unlike the training data; None if it is not."""
        if tuple(numbers) != self.names:
            return "it was trained on other numbers of a problem than this version computes"
        x = np.array([*numbers.values()])
        points = self._points
        low, high = points.min(axis=0), points.max(axis=0)
        outside = np.maximum(low - x, x - high)
        if outside.max(initial=0) > BEYOND:
            i = int(outside.argmax())
            return f"far from its data: {self.names[i]} is {x[i]:.1f}, and it has seen {low[i]:.1f} to {high[i]:.1f}"
        steps = (points - x) / np.array(self.scale)
        away = math.sqrt(float(np.einsum("ij,ij->i", steps, steps).min()))
        if away > self.radius:
            return f"far from its data: the nearest problem is {away:.1f} away, and it answers up to {self.radius:.1f}"
        doublings = np.abs(points - x) * [name not in TOTALS for name in self.names]
        nearest = doublings[int(doublings.max(axis=1).argmin())]
        if nearest.max(initial=0) > WITHIN + 1e-6:  # the file stores seven digits
            i = int(nearest.argmax())
            return f"far from its data: {self.names[i]} is {nearest[i]:.1f} away from that of the nearest problem"
        return None

    def rate(self, numbers: Mapping[str, float], default: Candidate) -> tuple[Floats, float]:
        """Return the ratings of the shortlist, and the rating of the default."""
        holds = self._holding(np.array([*numbers.values()]), of_problem=True)
        rated = self.base + self._worth @ holds
        mine = self._reached([Listed(default[0], "", Config(default[1]))]) @ holds
        return np.asarray(rated, np.float64), float(self.base + mine[0])

    # ---- the trees as one matrix -------------------------------------------------------------------------------------

    @cached_property
    def _points(self) -> Floats:
        return np.array(self.points, np.float64).reshape(len(self.points), len(self.names))

    @cached_property
    def _splits(self) -> tuple[npt.NDArray[np.int64], Floats]:
        """Feature and threshold of every node of every tree; those of leaves are not used."""
        feature = np.concatenate([[], *(tree.feature for tree in self.trees)]).astype(np.int64)
        return feature, np.concatenate([[], *(tree.threshold for tree in self.trees)])

    @cached_property
    def _leaves(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """For every leaf: the answers that it needs about the problem and about the candidate, and its value.

        The answers "yes" come first, indexed by node. The answers "no" follow, offset by the number n of nodes. Index 2
        n stands for no question.
        """
        feature = self._splits[0]
        total, splits = len(feature), np.flatnonzero(feature >= 0)
        # for every node: the split above it, and the answer of that split that leads to the node; -1 for a root
        above, answer = np.full(total, -1), np.full(total, 2 * total)
        sizes = np.array([len(tree.feature) for tree in self.trees], np.int64)
        first = np.repeat(np.cumsum(sizes) - sizes, sizes)
        for name, told in (("left", 0), ("right", total)):
            child = np.concatenate([[], *(getattr(tree, name) for tree in self.trees)]).astype(np.int64) + first
            above[child[splits]], answer[child[splits]] = splits, splits + told
        leaves = node = np.flatnonzero(feature < 0)
        about: tuple[list[npt.NDArray[np.int64]], list[npt.NDArray[np.int64]]] = [], []
        while (above[node] >= 0).any():
            of_problem = feature[above[node]] < len(self.names)
            about[0].append(np.where(of_problem, answer[node], 2 * total))
            about[1].append(np.where(of_problem, 2 * total, answer[node]))
            node = np.where(above[node] >= 0, above[node], node)
        problem, candidate = (np.array(rows, np.int64).reshape(-1, len(leaves)).T for rows in about)
        values = np.concatenate([[], *(tree.value for tree in self.trees)])[leaves]
        return problem, candidate, values.astype(np.float32)

    def _holding(self, x: Floats, of_problem: bool) -> npt.NDArray[np.float32]:
        """Return 1 for every leaf whose splits on the problem (or on the candidate) hold for features ``x``."""
        feature, threshold = self._splits
        offset = 0 if of_problem else len(self.names)
        # splits on the other side are not used, so any value will do
        yes = np.take(x, feature - offset, mode="clip") <= threshold
        answers = np.concatenate([yes, ~yes, [True]])
        needed = self._leaves[0 if of_problem else 1]
        return np.asarray(answers[needed].all(axis=1), np.float32)

    def _reached(self, candidates: Sequence[Listed]) -> npt.NDArray[np.float32]:
        """Return a row for each candidate: the value of each leaf that it may reach, 0 for other leaves."""
        numbers = [np.array([c.of(one.solver, one.config) for c in self.columns]) for one in candidates]
        rows = [self._holding(x, of_problem=False) * self._leaves[2] for x in numbers]
        return np.array(rows, np.float32).reshape(len(candidates), len(self._leaves[2]))

    @cached_property
    def _worth(self) -> npt.NDArray[np.float32]:
        return self._reached(self.shortlist)


@dataclass(frozen=True)
class HeuristicAdvice:
    """The heuristic's answer for a problem: the candidates to use, best first. Empty means the default."""

    #: in words: the prediction, or why the heuristic abstains
    why: str
    picks: tuple[tuple[Solver, Config], ...] = ()
    #: predicted speed-up of the first pick over the default
    gain: float = 1.0
    #: whether the heuristic knows too little for an answer
    abstains: bool = False


@dataclass(frozen=True, eq=False)
class Heuristic:
    """Sections, and the results of their training."""

    sections: tuple[HeuristicSection, ...]
    date: str
    tool: str
    #: how good the heuristic is, and on what data: see docs/heuristic.md
    about: Mapping[str, object]
    #: the file that it was read from
    path: str = ""
    #: loaders of further sections, called on first use; None if a section is damaged, which the loader has reported
    unread: Mapping[tuple[str, SectionScope], Callable[[], HeuristicSection | None]] = field(
        default_factory=dict, repr=False
    )
    _ratings: dict[tuple[str, Target, Candidate], tuple[HeuristicSection, Floats, float] | str] = field(
        default_factory=dict, repr=False
    )

    @cached_property
    def _by_kind(self) -> dict[tuple[str, SectionScope], HeuristicSection | None]:
        return {(s.kind, s.place): s for s in self.sections}

    def _section(self, kind: str, place: SectionScope) -> HeuristicSection | None:
        if (kind, place) not in self._by_kind and (kind, place) in self.unread:
            self._by_kind[kind, place] = self.unread[kind, place]()
        return self._by_kind.get((kind, place))

    def advise(
        self,
        problem: Problem,
        target: Target,
        default: Candidate,
        solvers: Iterable[Solver],
        why_not: Callable[[Solver, Config], str | None],
        most: int = 1,
    ) -> HeuristicAdvice:
        """Choose for a static problem up to ``most`` candidates that are allowed and predicted to be faster.

        ``why_not`` returns why a candidate from the space of one of the ``solvers`` may not be used, else None.
        """
        rated = self._rated(problem, target, default)
        if isinstance(rated, str):
            return HeuristicAdvice(rated, abstains=True)
        section, ratings, own = rated
        known = {s.id: s for s in solvers}
        margin, special = math.log2(MARGIN), math.log2(SPECIAL)
        # a kernel for one shape only is rated lower by the gain that it must bring
        cost = [special if (s := known.get(c.solver)) is not None and s.tuned_only else 0.0 for c in section.shortlist]
        worth = ratings - np.array(cost)
        usable: list[tuple[float, Solver, Config]] = []
        for i in np.argsort(-worth, kind="stable").tolist():
            rating, listed = float(ratings[i]), section.shortlist[i]
            if len(usable) >= most:
                break
            if rating <= own + margin:
                continue
            solver = known.get(listed.solver)
            if solver is None or solver.version != listed.version or (solver.id, listed.config) == default:
                continue
            if listed.config in solver.space(problem, target) and why_not(solver, listed.config) is None:
                usable.append((rating, solver, listed.config))
        if not usable:
            return HeuristicAdvice("it predicts nothing that is faster than the default")
        gain = 2.0 ** (usable[0][0] - own)
        elsewhere = "" if target.name in section.processors else f", trained on {', '.join(section.processors[:3])}"
        why = f"predicted {gain:.2f} times as fast as the default{elsewhere}"
        return HeuristicAdvice(why, tuple((solver, config) for _, solver, config in usable[:most]), gain)

    def _rated(
        self, problem: Problem, target: Target, default: Candidate
    ) -> tuple[HeuristicSection, Floats, float] | str:
        """Return the section for a problem with its ratings, from a cache; or why there is none."""
        at = (problem.key(), target, (default[0], Config(default[1])))
        found = self._ratings.get(at)
        if found is None:
            if len(self._ratings) >= KEPT:  # a race with other threads is harmless
                self._ratings.clear()
            found = self._ratings[at] = self._rate(problem, target, default)
        return found

    def _rate(
        self, problem: Problem, target: Target, default: Candidate
    ) -> tuple[HeuristicSection, Floats, float] | str:
        place = SectionScope.of(Where.of(target))
        section = self._section(kind(problem), place)
        if section is None:
            if place not in {known for _, known in (*self._by_kind, *self.unread)}:
                return "it knows no device like this one"
            return f"it has not learned about {kind(problem)} here"
        numbers = features(problem, target)
        far = section.why_far(numbers)
        # the training data has single images; where batches do not pay, a few images are processed one by one
        alone = one_image(problem) if far is not None and not target.traits.batches_pay else None
        if alone is not None:
            numbers = features(alone, target)
            far = section.why_far(numbers)
        return far if far is not None else (section, *section.rate(numbers, default))
