"""The heuristic as a file: one JSON object of our own, that is data and nothing else (docs/heuristic.md describes it).

A file may come from anywhere. Every field is checked, sizes are bounded, and the nodes of a tree must be a tree: a
child stands behind its parent and has no other. Whatever is not as it should be raises `InputError`; `load` warns.

Each section has a line of its own. A model needs a few of them, so `load` reads the rest of a file at first, and a
section when it is asked: all nine that ship would take 40 ms and 8 MB of every process.
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
from .heuristic import Heuristic, Listed, Place, Section, Tree
from .heuristic_features import Column

Json: TypeAlias = Any
LOG = logging.getLogger("tunewright")

SCHEMA = "tunewright.heuristic/1"
#: bounds on what a file may make us build
MOST_BYTES, MOST_SECTIONS, MOST_TREES, MOST_NODES, DEEPEST = 16 << 20, 256, 400, 255, 12
MOST_POINTS, MOST_NUMBERS, MOST_COLUMNS, MOST_LISTED, MOST_PARAMETERS = 2000, 64, 256, 256, 64
LONGEST, LARGEST = 1000, 1e9
#: how the first line ends and how the last one is; the name behind what a section is about
BEGIN, END, BEHIND = '"sections":[', "]}", ',"processors":'
#: significant digits of numbers in trees
DIGITS = 7
#: what json makes of numbers; there are tens of thousands
_NUMBERS = frozenset({int, float})


def dump(heuristic: Heuristic) -> str:
    """The content of a file."""
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
    """The heuristic of a file's content; InputError names what is wrong."""
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
    """As `parse`, but a section is read when it is asked: until then it is unknown whether it is damaged. What has not
    the lines of `dump` is read as a whole."""
    head, *lines = text.removesuffix("\n").split("\n")
    if len(text) > MOST_BYTES or not head.endswith(BEGIN) or not lines or lines.pop() != END:
        return parse(text, path)
    heads = [_head(line) for line in lines]
    if len(heads) > MOST_SECTIONS or None in heads or len(set(heads)) < len(heads):
        return parse(text, path)
    found = zip(heads, lines, strict=True)
    unread = {at: partial(_late, line.removesuffix(","), path) for at, line in found if at is not None}
    return replace(parse(head + END, path), unread=unread)


def _head(line: str) -> tuple[str, Place] | None:
    """What the section of a line is about; None where the line does not say so first. A text has its quotes escaped:
    the first name behind the place is no part of one."""
    try:
        data = _json(line.partition(BEHIND)[0] + "}")
        given = _members(data, "the head of a section", {"kind", "place"})
        return _text(given["kind"], "kind"), _place(given["place"])
    except InputError:
        return None


def _late(line: str, path: str) -> Section | None:
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
    """The heuristic of a file; InputError when it cannot be read or is none."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        return parse(raw.decode("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {getattr(error, 'strerror', None) or error}", where=str(path)) from None
    except InputError as error:
        raise InputError(error.what, where=str(path), hint="`tunewright kb train` makes one") from None


def load(path: Path) -> Heuristic | None:
    """The heuristic of a file, read again when it changes; None, and a warning, when it is of no use."""
    try:
        at = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
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


# ---- writing --------------------------------------------------------------------------------------------------------


def _section_json(s: Section) -> dict[str, Json]:
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
    """A tree as JSON. A split is feature, threshold, left and right child; a leaf is its value."""
    rows = zip(tree.feature, tree.threshold, tree.left, tree.right, tree.value, strict=True)
    return [
        [_short(value)] if f < 0 else [int(f), _short(split), int(left), int(right)]
        for f, split, left, right, value in rows
    ]


def _short(x: float) -> float:
    return float(f"{x:.{DIGITS}g}")


# ---- reading: data from a file, never trusted ---------------------------------------------------------------------


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
    """As `_number`, of a list that is not empty; there are thousands."""
    if not set(map(type, data)) <= _NUMBERS or not -LARGEST <= min(data) <= max(data) <= LARGEST:
        raise _wrong(f"{what} is not a number")
    return data


def _section(data: Json) -> Section:
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
    return Section(
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


def _place(data: Json) -> Place:
    given = _members(data, "a place", {"device", "arch", "runtime", "options"})
    return Place(**{name: _text(text, name) for name, text in given.items()})


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
    """Every node but the root is the child of one node before it, so that paths end and meet nowhere.

    A section has thousands of nodes and is read while a caller waits: all of them are looked at together.
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
        # those that have a split below them, then two of them, ... (np.unique would import numpy.ma: 1 MB)
        found = above[splits]
        splits = np.flatnonzero(np.bincount(found[found >= 0]))
    if splits.size:
        raise _wrong("a tree is too deep")
    values = np.where(lengths == 1, numbers[at], 0.0)
    ends = np.cumsum(sizes).tolist()
    cuts = [slice(end - size, end) for end, size in zip(ends, sizes.tolist(), strict=True)]
    return tuple(Tree(feature[c], threshold[c], left[c], right[c], values[c]) for c in cuts)
