"""The shapes that models met, with counts and seconds, in a file beside the user's knowledge base.

The file holds only shapes, counts and seconds, never data. Each recording process writes its own entry, whose counts
only grow. Merging takes the larger entry of each process. Files can therefore be merged in any order and repeatedly,
and nothing is counted twice. Nothing in a file is trusted.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import InputError
from ..settings import Settings
from . import open_databases
from .files import make_folder
from .json_file import JsonFile

LOG = logging.getLogger("tunewright")

FILE = "traffic.json"
SCHEMA = "tunewright.traffic/1"
#: Limits: models, entries of a model, shapes of an entry, inputs, dimensions. The oldest entries are dropped first.
MOST_MODELS, MOST_ENTRIES, MOST_SHAPES, MOST_INPUTS, MOST_DIMENSIONS = 200, 64, 256, 256, 32
#: Longest name, and the largest valid size or count of a file.
LONGEST, LARGEST = 500, 1 << 53

#: Shapes of a model's inputs, in the model's order.
Shapes: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class TrafficEntry:
    """The traffic of one model in one process: counts and seconds by shapes."""

    date: str
    rows: Mapping[Shapes, tuple[int, float]]

    @property
    def count(self) -> int:
        """Total number of inferences."""
        return sum(count for count, _ in self.rows.values())


@dataclass(frozen=True)
class ModelTraffic:
    """The traffic of one model in all processes."""

    #: name for readers, and the names of the model's inputs
    name: str
    inputs: tuple[str, ...]
    #: by the process that wrote the entry
    entries: Mapping[str, TrafficEntry] = field(default_factory=dict)


@dataclass(frozen=True)
class Weighted:
    """Shapes of a model's inputs, and their share of the time, between 0 and 1."""

    shapes: Mapping[str, tuple[int, ...]]
    weight: float
    count: int
    seconds: float


#: Models by the digest of their structure (`streams.digest`).
Traffic: TypeAlias = Mapping[str, ModelTraffic]


def merged(one: Traffic, other: Traffic) -> dict[str, ModelTraffic]:
    """Merge two sets of traffic. Of each process the entry with more inferences is the later one."""
    found = dict(one)
    for key, model in other.items():
        mine = found.get(key)
        if mine is None or mine.inputs != model.inputs:
            found[key] = model if mine is None or _newest(model) > _newest(mine) else mine
            continue
        entries = dict(mine.entries)
        for writer, entry in model.entries.items():
            before = entries.get(writer)
            if before is None or (entry.count, entry.date) > (before.count, before.date):
                entries[writer] = entry
        found[key] = ModelTraffic(max(mine.name, model.name), mine.inputs, entries)
    return found


def weighted(model: ModelTraffic, most: int | None = None) -> list[Weighted]:
    """Return the ``most`` shapes of a model with the most time, in descending order. Their weights add up to 1."""
    rows: dict[Shapes, tuple[int, float]] = {}
    for entry in model.entries.values():
        for shapes, (count, seconds) in entry.rows.items():
            before = rows.get(shapes, (0, 0.0))
            rows[shapes] = before[0] + count, before[1] + seconds
    ranked = sorted(rows.items(), key=lambda row: (-row[1][1], row[0]))[:most]
    total = sum(seconds for _, (_, seconds) in ranked)
    return [
        Weighted(
            dict(zip(model.inputs, shapes, strict=True)), seconds / total if total else 1 / len(ranked), count, seconds
        )
        for shapes, (count, seconds) in ranked
    ]  # fmt: skip


class TrafficFile(JsonFile):
    """The traffic file of a folder, or a copy of one from elsewhere."""

    title, setting = "recorded traffic", "USER_DB_PATH"

    @staticmethod
    def of(settings: Settings) -> TrafficFile:
        """Return the file beside the user's knowledge base."""
        return TrafficFile(open_databases.user_folder(settings) / FILE)

    def read(self) -> dict[str, ModelTraffic]:
        """Read all traffic without damaged entries. Raises `InputError` if the whole file is damaged."""
        try:
            with self.opened() as descriptor:
                return self._parsed(descriptor)
        except FileNotFoundError:
            return {}

    def add(self, traffic: Traffic) -> None:
        """Merge traffic into the file. Raises `InputError` if writing fails; the old content then remains."""
        try:
            make_folder(self.path.parent)
            with self.locked() as descriptor:
                try:
                    known = self._parsed(descriptor)
                except InputError as error:
                    LOG.warning("%s; it is begun anew", error)
                    known = {}
                self.replace(descriptor, to_text(merged(known, traffic)))
        except OSError as error:
            raise self.error(f"cannot be written: {error.strerror or error}") from None

    def forget(self, which: Callable[[str, ModelTraffic], bool]) -> dict[str, ModelTraffic]:
        """Remove models and return them."""
        if not self.path.exists():
            return {}
        with self.locked() as descriptor:
            known = self._parsed(descriptor)
            gone = {key: model for key, model in known.items() if which(key, model)}
            if gone:
                self.replace(descriptor, to_text({k: v for k, v in known.items() if k not in gone}))
            return gone

    def _parsed(self, descriptor: int) -> dict[str, ModelTraffic]:
        content = self.load(descriptor)
        if content is None:
            return {}
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise self.error(f"is not of {SCHEMA}", "`tunewright kb traffic --export` writes such files")
        models = content.get("models")
        found = {key: _model(data) for key, data in models.items()} if isinstance(models, dict) else {}
        return _bounded({key[:LONGEST]: model for key, model in found.items() if model is not None})


def to_text(traffic: Traffic) -> str:
    """Return the content of a file. Entries beyond its limits are left out, oldest first."""
    models = {
        key: {
            "name": model.name[:LONGEST], "inputs": list(model.inputs),
            "entries": {writer: {"date": entry.date, "rows": _rows(entry)} for writer, entry in model.entries.items()},
        }
        for key, model in _bounded(traffic).items()
    }  # fmt: skip
    return json.dumps({"schema": SCHEMA, "models": models}, separators=(",", ":"), sort_keys=True) + "\n"


def _rows(entry: TrafficEntry) -> list[Any]:
    """Return rows of shapes, count and seconds."""
    return [[[list(shape) for shape in shapes], *numbers] for shapes, numbers in entry.rows.items()]


def find(settings: Settings, digest: str, model: str) -> ModelTraffic:
    """Return the recorded traffic of a model. Raises `InputError` with advice if there is none."""
    file = TrafficFile.of(settings)
    found = file.read().get(digest)
    if found is None or not any(entry.rows for entry in found.entries.values()):
        hint = "serve it with RECORD_TRAFFIC = YES first; `tunewright kb traffic` lists what there is"
        raise InputError("no traffic was recorded for this model", where=model, hint=hint)
    return found


def today() -> str:
    """Return the date for a new entry."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _newest(model: ModelTraffic) -> str:
    return max((entry.date for entry in model.entries.values()), default="")


def _bounded(traffic: Traffic) -> dict[str, ModelTraffic]:
    kept = sorted(traffic.items(), key=lambda item: (_newest(item[1]), item[0]))[-MOST_MODELS:]
    found = {}
    for key, model in kept:
        entries = sorted(model.entries.items(), key=lambda item: (item[1].date, item[0]))[-MOST_ENTRIES:]
        found[key] = ModelTraffic(model.name, model.inputs, dict(entries))
    return found


# ---- reading: files are untrusted data -------------------------------------------------------------------------------


def _model(data: Any) -> ModelTraffic | None:
    """Parse a model from a file; None if it is invalid."""
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return None
    inputs, entries = data.get("inputs"), data.get("entries")
    if not isinstance(inputs, list) or len(inputs) > MOST_INPUTS or not isinstance(entries, dict):
        return None
    if not all(isinstance(name, str) and len(name) <= LONGEST for name in inputs) or len(set(inputs)) != len(inputs):
        return None
    found = {writer[:LONGEST]: _entry(entry, len(inputs)) for writer, entry in entries.items()}
    kept = {writer: entry for writer, entry in found.items() if entry is not None}
    return ModelTraffic(data["name"][:LONGEST], tuple(inputs), kept)


def _entry(data: Any, inputs: int) -> TrafficEntry | None:
    rows = data.get("rows") if isinstance(data, dict) else None
    if not isinstance(rows, list) or len(rows) > MOST_SHAPES or not _is_date(data.get("date")):
        return None
    try:
        found = dict(_row(row, inputs) for row in rows)
    except (TypeError, ValueError):
        return None
    return TrafficEntry(data["date"], found)


def _row(data: Any, inputs: int) -> tuple[Shapes, tuple[int, float]]:
    """Parse a row. Raises ValueError or TypeError if it is invalid."""
    shapes, count, seconds = data
    if len(shapes) != inputs or any(type(shape) is not list or len(shape) > MOST_DIMENSIONS for shape in shapes):
        raise ValueError
    if not all(_is_whole(size) for shape in shapes for size in shape) or not _is_whole(count):
        raise ValueError
    if type(seconds) not in (int, float) or not 0 <= seconds <= LARGEST or not math.isfinite(seconds):
        raise ValueError
    return tuple(tuple(shape) for shape in shapes), (count, float(seconds))


def _is_whole(value: object) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _is_date(value: object) -> bool:
    if not isinstance(value, str) or len(value) > 40:
        return False
    try:
        datetime.datetime.fromisoformat(value)
    except ValueError:
        return False
    return True


def merge_files(into: TrafficFile, paths: Iterable[Path]) -> dict[str, ModelTraffic]:
    """Merge other files and return their content.

    Raises `InputError`, before anything is merged, if a file is missing or invalid.
    """
    found: dict[str, ModelTraffic] = {}
    for path in paths:
        if not path.exists():
            raise InputError("there is no such file", where=str(path))
        found = merged(found, TrafficFile(path).read())
    into.add(found)
    return found
