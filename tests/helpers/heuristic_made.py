"""Heuristics made by hand, whose predictions are known, and random ones."""

from __future__ import annotations

import random

from tunewright.devices.base import Target
from tunewright.heuristic.features import Column, columns, features, kind
from tunewright.heuristic.trees import Heuristic, HeuristicSection, Listed, SectionScope, Tree
from tunewright.knowledge.key import Where
from tunewright.solvers.base import Problem


def section(
    problem: Problem, target: Target, listed: list[Listed], trees: list[Tree], points: int = 1, radius: float = 2.0
) -> HeuristicSection:
    """About problems like one, which is its only point, or one of several that are doublings apart in every number."""
    numbers = features(problem, target)
    return HeuristicSection(
        kind(problem), SectionScope.of(Where.of(target)), (target.name,), tuple(numbers), (1.0,) * len(numbers),
        tuple(tuple(x + n for x in numbers.values()) for n in range(points)), radius,
        tuple(columns([(c.solver, c.config) for c in listed])), tuple(listed), 0.0, tuple(trees),
    )  # fmt: skip


def heuristic(*sections: HeuristicSection) -> Heuristic:
    return Heuristic(sections, "2026-11-15T12:00:00Z", "0.1", {})


def by_column(section: HeuristicSection, column: Column, *steps: tuple[float, float]) -> Tree:
    """A chain of splits on one number of a candidate: at or below a threshold that value; the last has none."""
    feature, threshold, left, right, value = [], [], [], [], []
    at = len(section.names) + section.columns.index(column)
    for limit, worth in steps[:-1]:
        n = len(feature)
        feature += [at, -1]
        threshold += [limit, 0.0]
        left += [n + 1, 0]
        right += [n + 2, 0]
        value += [0.0, worth]
    return Tree(
        (*feature, -1), (*threshold, 0.0), (*left, 0), (*right, 0), (*value, steps[-1][1])
    )  # fmt: skip


def random_tree(rng: random.Random, width: int, depth: int) -> Tree:
    """Splits and leaves at random; thresholds where logarithms of sizes are."""
    nodes: list[list[float]] = []

    def grow(level: int) -> int:
        n = len(nodes)
        nodes.append([-1, 0.0, 0, 0, rng.uniform(-1, 1)])
        if level < depth and rng.random() < 0.9:
            nodes[n] = [rng.randrange(width), rng.uniform(-1, 12), 0, 0, 0.0]
            nodes[n][2] = grow(level + 1)
            nodes[n][3] = grow(level + 1)
        return n

    grow(0)
    feature, threshold, left, right, value = zip(*nodes, strict=True)
    return Tree(tuple(map(int, feature)), tuple(threshold), tuple(map(int, left)), tuple(map(int, right)), tuple(value))


def random_section(
    seed: int, problem: Problem, target: Target, listed: list[Listed], trees: int, depth: int
) -> HeuristicSection:
    rng = random.Random(seed)
    bare = section(problem, target, listed, [])
    width = len(bare.names) + len(bare.columns)
    return section(problem, target, listed, [random_tree(rng, width, depth) for _ in range(trees)])
