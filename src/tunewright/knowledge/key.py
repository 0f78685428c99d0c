"""The key of a measurement: every field that can change the answer, and the meaning of a difference in each field.

Fields belong to groups. After a *hard* difference (operation, architecture, runtime, compiler option, solver) a stored
answer is useless. After a *soft* one it is still a good guess. If all differing fields belong to one soft group, the
answer is provisional; if two groups differ, it is a miss. `compare` names the differing fields.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from ..devices.base import Target
from ..solvers.base import Config, Problem, Solver

#: Bounds for a neighbouring shape: factor for each size, and doublings for all sizes together.
NEAR_EACH, NEAR_ALL = 2.0, 4.0


@dataclass(frozen=True)
class Where:
    """A target as part of a key."""

    device: str  # cpu, gpu, null
    processor: str  # name that the hardware reports
    units: int
    arch: str  # architecture, width and number of registers, missing features, language of the kernels
    runtime: str  # two runtimes on one processor are two targets
    software: str  # versions of driver, runtime, compiler
    options: str  # compiler options

    @staticmethod
    def of(target: Target) -> Where:
        names = dict(target.software)
        runtime = names.pop("runtime", "") or names.pop("opencl", "") or ",".join(sorted(names))
        arch = [target.arch, f"{target.registers} registers of {target.vector_bytes} bytes", target.language]
        return Where(
            target.device,
            target.name,
            target.units,
            "; ".join([*arch, *(f"no {name}" for name in target.lacks)]),
            runtime,
            "; ".join(f"{name} {version}" for name, version in sorted(names.items())),
            target.options,
        )


@dataclass(frozen=True)
class Key:
    """The full key of one candidate: the problem, the target, and the kernel."""

    problem: str
    where: Where
    solver: str
    version: str  # of the solver: major.minor
    source: str  # digest of the kernel's source
    space: str  # digest of the solver's space of configs

    @staticmethod
    def of(problem: Problem, target: Target, solver: Solver, config: Config) -> Key:
        source = source_digest(problem, target, solver, config)
        space = solver.space(problem, target).hash
        return Key(problem.key(), Where.of(target), solver.id, solver.version, source, space)


def source_digest(problem: Problem, target: Target, solver: Solver, config: Config) -> str:
    """Return the digest of the source that would be compiled. With open shapes, it is the digest of an empty text."""
    text = solver.source(problem, config, target) if problem.is_static else ""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Group(enum.IntEnum):
    """Soft groups from least to most harmful; provisional answers are preferred in this order."""

    REVISION = 1  # the solver's minor version, its source or its space changed
    SOFTWARE = 2  # driver, runtime or compiler of another version
    SIBLING = 3  # another device of the same architecture
    SHAPE = 4  # a neighbouring shape
    HARD = 9


_GROUPS = {
    "problem": Group.SHAPE,
    "processor": Group.SIBLING,
    "units": Group.SIBLING,
    "software": Group.SOFTWARE,
    "version": Group.REVISION,
    "source": Group.REVISION,
    "space": Group.REVISION,
}
WHERE_FIELDS = tuple(f.name for f in fields(Where))
#: Every field of a key, in order.
FIELDS = ("problem", *WHERE_FIELDS, "solver", "version", "source", "space")


class MatchKind(enum.StrEnum):
    """How well a stored answer fits a question."""

    EXACT = "exact"
    PROVISIONAL = "provisional"
    MISS = "miss"


@dataclass(frozen=True)
class KeyMatch:
    """Comparison of a stored key with the requested one."""

    kind: MatchKind
    #: names of the fields that differ
    differs: tuple[str, ...] = ()
    #: orders provisional answers: smaller is nearer
    distance: tuple[float, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}: another {', '.join(self.differs)}" if self.differs else str(self.kind)


def compare(asked: Key, stored: Key, shape_distance: float = math.inf) -> KeyMatch:
    """Compare a stored key with the requested one.

    ``shape_distance``: the `distance` of the two problems if their texts differ.
    """
    differs = tuple(name for name in FIELDS if _field(asked, name) != _field(stored, name))
    if not differs:
        return KeyMatch(MatchKind.EXACT)
    groups = {_group(name, asked, stored, shape_distance) for name in differs}
    if groups == {Group.SHAPE, Group.REVISION} and asked.version == stored.version:
        # Source and space depend on the shape, so their differences add no information.
        groups = {Group.SHAPE}
        differs = tuple(name for name in differs if name not in ("source", "space"))
    if len(groups) > 1 or Group.HARD in groups:
        return KeyMatch(MatchKind.MISS, differs)
    (group,) = groups
    return KeyMatch(MatchKind.PROVISIONAL, differs, (float(group), shape_distance if group is Group.SHAPE else 0.0))


def distance(a: Sequence[int], b: Sequence[int]) -> float:
    """Return the distance between the sizes of two problems of a family, in factors of two; infinite if not near."""
    if len(a) != len(b) or any((x == 0) != (y == 0) for x, y in zip(a, b, strict=True)):
        return math.inf
    steps = [abs(math.log2(x / y)) for x, y in zip(a, b, strict=True) if x != y]
    near = all(s <= math.log2(NEAR_EACH) for s in steps) and sum(steps) <= NEAR_ALL
    return sum(steps) if near else math.inf


def _field(key: Key, name: str) -> object:
    return getattr(key.where if name in WHERE_FIELDS else key, name)


def _group(name: str, asked: Key, stored: Key, shape_distance: float) -> Group:
    if name == "problem" and shape_distance == math.inf:
        return Group.HARD
    if name == "version" and asked.version.split(".")[0] != stored.version.split(".")[0]:
        return Group.HARD
    return _GROUPS.get(name, Group.HARD)
