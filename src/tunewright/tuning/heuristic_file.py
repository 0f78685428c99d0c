"""The heuristic as a file: one JSON object of our own, that is data and nothing else (docs/heuristic.md describes it).

A file may come from anywhere. Every field is checked, sizes are bounded, and the nodes of a tree must be a tree: a
child stands behind its parent and has no other. Whatever is not as it should be raises `InputError`; `load` warns.
"""

from __future__ import annotations

import json
import logging
import math
import stat
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

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
        "sections": [_section_json(s) for s in heuristic.sections],
    }
    return json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n"


def parse(text: str, path: str = "") -> Heuristic:
    """The heuristic of a file's content; InputError names what is wrong."""
    if len(text) > MOST_BYTES:
        raise _wrong("it is too long")
    try:
        data = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"it is not JSON ({error})") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise _wrong(f"its schema is not {SCHEMA}: another version of Tunewright, or another file")
    given = _members(data, "the file", {"schema", "date", "tool", "about", "sections"})
    if not isinstance(given["about"], dict):
        raise _wrong("about is not an object")
    sections = tuple(_section(s) for s in _list(given["sections"], "sections", MOST_SECTIONS))
    if len({(s.kind, s.place) for s in sections}) < len(sections):
        raise _wrong("two sections are about the same")
    return Heuristic(sections, _text(given["date"], "date"), _text(given["tool"], "tool"), given["about"], path)


def read(path: Path) -> Heuristic:
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
        return read(path)
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
    """Of a split: feature, threshold, left and right child; of a leaf: its value."""
    rows = zip(tree.feature, tree.threshold, tree.left, tree.right, tree.value, strict=True)
    return [[_short(value)] if f < 0 else [f, _short(split), left, right] for f, split, left, right, value in rows]


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


def _section(data: Json) -> Section:
    names = {"kind", "place", "processors", "numbers", "scale", "points", "radius", "columns", "shortlist", "base"}
    given = _members(data, "a section", names | {"trees"})
    place = _members(given["place"], "a place", {"device", "arch", "runtime", "options"})
    numbers = tuple(_text(n, "a number's name") for n in _list(given["numbers"], "numbers", MOST_NUMBERS, 1))
    width = len(numbers)
    scale = tuple(_number(x, "a scale") for x in _list(given["scale"], "scale", width, width))
    if min(scale) <= 0 or not math.isfinite(1 / min(scale)):
        raise _wrong("a scale is not above 0")
    points = tuple(
        tuple(_number(x, "a point") for x in _list(point, "a point", width, width))
        for point in _list(given["points"], "points", MOST_POINTS, 1)
    )
    columns = tuple(_column(c) for c in _list(given["columns"], "columns", MOST_COLUMNS, 1))
    trees = _list(given["trees"], "trees", MOST_TREES, 1)
    return Section(
        _text(given["kind"], "kind"),
        Place(**{name: _text(text, name) for name, text in place.items()}),
        tuple(_text(p, "a processor") for p in _list(given["processors"], "processors", MOST_LISTED)),
        numbers,
        scale,
        points,
        _number(given["radius"], "radius"),
        columns,
        tuple(_listed(c) for c in _list(given["shortlist"], "shortlist", MOST_LISTED, 1)),
        _number(given["base"], "base"),
        tuple(_tree(tree, width + len(columns)) for tree in trees),
    )


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


def _tree(data: Json, width: int) -> Tree:
    """Every node but the root is the child of one node before it, so that paths end and meet nowhere."""
    rows = _list(data, "a tree", MOST_NODES, 1)
    depth: dict[int, int] = {0: 0}
    nodes = []
    for n, row in enumerate(rows):  # tens of thousands in a file, read while somebody waits: no calls in here
        if n not in depth:
            raise _wrong("a node of a tree belongs to none before it")
        if type(row) is list and len(row) == 1:
            (leaf,) = row
            if type(leaf) not in _NUMBERS or not -LARGEST <= leaf <= LARGEST:
                raise _wrong("a leaf is not a number")
            nodes.append((-1, 0.0, 0, 0, float(leaf)))
            continue
        if type(row) is not list or len(row) != 4:
            raise _wrong("a split is not a list of 4 elements")
        feature, threshold, left, right = row
        if type(feature) is not int or not 0 <= feature < width:
            raise _wrong(f"a feature is not a number from 0 to {width - 1}")
        if type(threshold) not in _NUMBERS or not -LARGEST <= threshold <= LARGEST:
            raise _wrong("a threshold is not a number")
        below = depth[n] + 1
        for child in (left, right):
            if type(child) is not int or not n < child < len(rows):
                raise _wrong(f"a child is not a number from {n + 1} to {len(rows) - 1}")
            if child in depth or below > DEEPEST:
                raise _wrong("a node of a tree has two parents, or the tree is too deep")
            depth[child] = below
        nodes.append((feature, float(threshold), left, right, 0.0))
    return Tree(*zip(*nodes, strict=True))
