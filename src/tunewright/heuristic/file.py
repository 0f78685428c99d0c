"""The heuristic as a file: one JSON object that holds only data (docs/heuristic.md describes it).

A file may come from anywhere. Every field is checked, sizes are bounded, and the nodes of a tree must form a tree.
Every violation raises `InputError`; `load` warns instead.

Each section has a line of its own. A model needs only a few sections, so `load` parses a section on its first use. All
nine shipped sections would cost every process 40 ms and 8 MB.
"""

from __future__ import annotations

import json
import logging
import math
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..errors import InputError
from ..search.space import Config, Scalar
from .features import Column
from .trees import Heuristic, HeuristicSection, Listed, SectionScope, Tree

Json: TypeAlias = Any
LOG = logging.getLogger("tunewright")

SCHEMA = "tunewright.heuristic/1"
#: Bounds on what a file can make the reader build.
MOST_BYTES, MOST_SECTIONS, MOST_TREES, MOST_NODES, DEEPEST = 16 << 20, 256, 400, 255, 12
MOST_POINTS, MOST_NUMBERS, MOST_COLUMNS, MOST_LISTED, MOST_PARAMETERS = 2000, 64, 256, 256, 64
LONGEST, LARGEST = 1000, 1e9
#: End of the first line, the last line, and the member that follows kind and place in a section.
BEGIN, END, BEHIND = '"sections":[', "]}", ',"processors":'
#: Significant digits of numbers in trees.
DIGITS = 7
#: The types that json gives to numbers. A set, because files hold tens of thousands of numbers.
_NUMBERS = frozenset({int, float})


def dump(heuristic: Heuristic) -> str:
    """Return the content of a file."""
    content = {
        "schema": SCHEMA,
        "date": heuristic.date,
        "tool": heuristic.tool,
        "about": dict(heuristic.about),
        "sections": [],
    }
    head, *sections = (
        json.dumps(each, separators=(",", ":"), allow_nan=False)
        for each in (content, *map(_section_json, heuristic.sections))
    )
    return "\n".join([head.removesuffix(END), ",\n".join(sections), END, ""])


def parse(text: str, path: str = "") -> Heuristic:
    """Parse the content of a file. Raises `InputError` naming what is wrong."""
    if len(text) > MOST_BYTES:
        raise _wrong("it is too long")
    data = _json(text)
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise _wrong(f"its schema is not {SCHEMA}: another version of Tunewright, or another file")
    given = _members(data, "the file", {"schema", "date", "tool", "about", "sections"})
    if not isinstance(given["about"], dict):
        raise _wrong("about is not an object")
    sections = tuple(_section(s) for s in _list(given["sections"], "sections", MOST_SECTIONS))
    if len({(s.kind, s.place) for s in sections}) < len(sections):
        raise _wrong("two sections are about the same")
    return Heuristic(sections, _text(given["date"], "date"), _text(given["tool"], "tool"), given["about"], path)


def parse_late(text: str, path: str = "") -> Heuristic:
    """Parse like `parse`, but parse each section on its first use; damage of a section shows only then.

    Text without the line structure of `dump` is parsed as a whole.
    """
    head, *lines = text.removesuffix("\n").split("\n")
    if len(text) > MOST_BYTES or not head.endswith(BEGIN) or not lines or lines.pop() != END:
        return parse(text, path)
    heads = [_head(line) for line in lines]
    if len(heads) > MOST_SECTIONS or None in heads or len(set(heads)) < len(heads):
        return parse(text, path)
    found = zip(heads, lines, strict=True)
    unread = {at: partial(_late, line.removesuffix(","), path) for at, line in found if at is not None}
    return replace(parse(head + END, path), unread=unread)


def _head(line: str) -> tuple[str, SectionScope] | None:
    """Return kind and place of the section in a line; None if the line does not begin with them.

    Strings have escaped quotes, so the first `BEHIND` is not part of a string.
    """
    try:
        data = _json(line.partition(BEHIND)[0] + "}")
        given = _members(data, "the head of a section", {"kind", "place"})
        return _text(given["kind"], "kind"), _place(given["place"])
    except InputError:
        return None


def _late(line: str, path: str) -> HeuristicSection | None:
    try:
        return _section(_json(line))
    except InputError as error:
        LOG.warning("a part of the heuristic is not used: %s: %s", path, error.what)
        return None


def _json(text: str) -> Json:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"it is not JSON ({error})") from None


def read(path: Path, parse: Callable[[str, str], Heuristic] = parse) -> Heuristic:
    """Read the heuristic of a file. Raises `InputError` if the file is unreadable or invalid."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        return parse(raw.decode("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {getattr(error, 'strerror', None) or error}", where=str(path)) from None
    except InputError as error:
        raise InputError(error.what, where=str(path), hint="`tunewright kb train` makes one") from None


def load(path: Path) -> Heuristic | None:
    """Load the heuristic of a file, again after each change. Warns and returns None if it is unusable."""
    try:
        at = path.stat()
    except (OSError, ValueError) as error:  # ValueError: an invalid file name
        LOG.warning("no heuristic is used: %s: %s", path, getattr(error, "strerror", None) or error)
        return None
    if not stat.S_ISREG(at.st_mode):
        LOG.warning("no heuristic is used: %s is not a file", path)
        return None
    return _load(path, at.st_mtime_ns, at.st_size)


@lru_cache(maxsize=8)
def _load(path: Path, changed: int, size: int) -> Heuristic | None:
    try:
        return read(path, parse_late)
    except InputError as error:
        LOG.warning("no heuristic is used: %s", error)
        return None


# ---- writing ---------------------------------------------------------------------------------------------------------


def _section_json(s: HeuristicSection) -> dict[str, Json]:
    return {
        "kind": s.kind,
        "place": vars(s.place),
        "processors": list(s.processors),
        "numbers": list(s.names),
        "scale": [_short(x) for x in s.scale],
        "points": [[_short(x) for x in point] for point in s.points],
        "radius": _short(s.radius),
        "columns": [[c.form, c.name, c.text] for c in s.columns],
        "shortlist": [[c.solver, c.version, dict(c.config)] for c in s.shortlist],
        "base": _short(s.base),
        "trees": [_tree_json(tree) for tree in s.trees],
    }


def _tree_json(tree: Tree) -> list[Json]:
    """Encode a tree. A split is [feature, threshold, left child, right child]; a leaf is [value]."""
    rows = zip(tree.feature, tree.threshold, tree.left, tree.right, tree.value, strict=True)
    return [
        [_short(value)] if f < 0 else [int(f), _short(split), int(left), int(right)]
        for f, split, left, right, value in rows
    ]


def _short(x: float) -> float:
    return float(f"{x:.{DIGITS}g}")


# ---- reading: files are untrusted data -------------------------------------------------------------------------------


def _wrong(what: str) -> InputError:
    return InputError(what, where="a heuristic")


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _members(data: Json, what: str, names: set[str]) -> Mapping[str, Json]:
    if not isinstance(data, dict) or set(data) != names:
        raise _wrong(f"{what} is not an object with the members {', '.join(sorted(names))}")
    return data


def _list(data: Json, what: str, most: int, least: int = 0) -> Sequence[Json]:
    if not isinstance(data, list) or not least <= len(data) <= most:
        raise _wrong(f"{what} is not a list of {least} to {most} elements")
    return data


def _text(data: Json, what: str) -> str:
    if not isinstance(data, str) or len(data) > LONGEST:
        raise _wrong(f"{what} is not a text")
    return data


def _number(data: Json, what: str) -> float:
    if type(data) not in _NUMBERS or not abs(data) <= LARGEST:
        raise _wrong(f"{what} is not a number")
    return float(data)


def _numbers(data: Sequence[Json], what: str) -> Sequence[float]:
    """Check like `_number`, but a whole list, which must not be empty; for speed, since there are thousands."""
    if not set(map(type, data)) <= _NUMBERS or not -LARGEST <= min(data) <= max(data) <= LARGEST:
        raise _wrong(f"{what} is not a number")
    return data


def _section(data: Json) -> HeuristicSection:
    names = {"kind", "place", "processors", "numbers", "scale", "points", "radius", "columns", "shortlist", "base"}
    given = _members(data, "a section", names | {"trees"})
    numbers = tuple(_text(n, "a number's name") for n in _list(given["numbers"], "numbers", MOST_NUMBERS, 1))
    width = len(numbers)
    scale = tuple(_number(x, "a scale") for x in _list(given["scale"], "scale", width, width))
    if min(scale) <= 0 or not math.isfinite(1 / min(scale)):
        raise _wrong("a scale is not above 0")
    points = tuple(
        tuple(map(float, _numbers(_list(point, "a point", width, width), "a point")))
        for point in _list(given["points"], "points", MOST_POINTS, 1)
    )
    columns = tuple(_column(c) for c in _list(given["columns"], "columns", MOST_COLUMNS, 1))
    return HeuristicSection(
        _text(given["kind"], "kind"),
        _place(given["place"]),
        tuple(_text(p, "a processor") for p in _list(given["processors"], "processors", MOST_LISTED)),
        numbers,
        scale,
        points,
        _number(given["radius"], "radius"),
        columns,
        tuple(_listed(c) for c in _list(given["shortlist"], "shortlist", MOST_LISTED, 1)),
        _number(given["base"], "base"),
        _trees(given["trees"], width + len(columns)),
    )


def _place(data: Json) -> SectionScope:
    given = _members(data, "a place", {"device", "arch", "runtime", "options"})
    return SectionScope(**{name: _text(text, name) for name, text in given.items()})


def _column(data: Json) -> Column:
    form, name, text = (_text(t, "a column") for t in _list(data, "a column", 3, 3))
    if form not in ("solver", "size", "text"):
        raise _wrong("a column is of the form solver, size or text")
    return Column(form, name, text)


def _listed(data: Json) -> Listed:
    solver, version, config = _list(data, "a candidate", 3, 3)
    if not isinstance(config, dict) or len(config) > MOST_PARAMETERS:
        raise _wrong("a config is not an object of parameters")
    for name, value in config.items():
        if not isinstance(value, Scalar) or len(name) > LONGEST or (isinstance(value, str) and len(value) > LONGEST):
            raise _wrong("a parameter is not a scalar")
        if isinstance(value, int | float) and not abs(value) <= LARGEST:
            raise _wrong("a parameter is no number")
    return Listed(_text(solver, "a solver"), _text(version, "a version"), Config(config))


def _trees(data: Json, width: int) -> tuple[Tree, ...]:
    """Parse trees.

    Every node but the root must be the child of exactly one earlier node; paths then end and never meet.

    A section has thousands of nodes and is read while a caller waits, so all are checked together with numpy.
    """
    trees = _list(data, "trees", MOST_TREES, 1)
    sizes = np.array([len(_list(tree, "a tree", MOST_NODES, 1)) for tree in trees])
    rows = [*chain.from_iterable(trees)]
    if set(map(type, rows)) != {list}:
        raise _wrong("a node of a tree is not a list")
    lengths = np.array([*map(len, rows)])
    splits = np.flatnonzero(lengths == 4)
    if len(splits) + np.count_nonzero(lengths == 1) < len(rows):
        raise _wrong("a split is not a list of 4 elements")
    given = _numbers([*chain.from_iterable(rows)], "a leaf, or a part of a split,")
    numbers, at = np.array(given, np.float64), np.cumsum(lengths) - lengths
    threshold = np.zeros(len(rows))
    threshold[splits] = numbers[at[splits] + 1]
    whole = np.zeros((3, len(rows)), np.int64)
    whole[0] = -1
    whole[:, splits] = asked = numbers[at[splits] + [[0], [2], [3]]]
    feature, left, right = whole
    if (whole[:, splits] != asked).any() or (asked[0] < 0).any() or (asked[0] >= width).any():
        raise _wrong(f"a feature is not a number from 0 to {width - 1}, or a child none at all")
    first = np.repeat(np.cumsum(sizes) - sizes, sizes)
    own, size = np.arange(len(rows)) - first, np.repeat(sizes, sizes)
    children = whole[1:, splits]
    if (children <= own[splits]).any() or (children >= size[splits]).any():
        raise _wrong("a child does not stand behind its node, in the same tree")
    parents = np.bincount((children + first[splits]).ravel(), minlength=len(rows))
    if (parents > 1).any():
        raise _wrong("a node of a tree has two parents")
    if (parents[own > 0] == 0).any():
        raise _wrong("a node of a tree belongs to none before it")
    above = np.full(len(rows), -1)
    above[children + first[splits]] = splits
    for _ in range(DEEPEST):
        # round k keeps the splits with k splits below them (np.unique would import numpy.ma: 1 MB)
        found = above[splits]
        splits = np.flatnonzero(np.bincount(found[found >= 0]))
    if splits.size:
        raise _wrong("a tree is too deep")
    values = np.where(lengths == 1, numbers[at], 0.0)
    ends = np.cumsum(sizes).tolist()
    cuts = [slice(end - size, end) for end, size in zip(ends, sizes.tolist(), strict=True)]
    return tuple(Tree(feature[c], threshold[c], left[c], right[c], values[c]) for c in cuts)
