"""The shapes that models met, how often, and how long they took: a file beside the user's knowledge base.

Only shapes, counts and seconds are kept, never data. Each process that records writes an entry of its own, whose counts
only grow. Merging takes the larger entry of each process, so it does not matter how often, in which order or over which
ways files are merged: nothing is counted twice. Nothing in a file is trusted.
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
from . import places
from .disk import make_folder
from .json_file import JsonFile

LOG = logging.getLogger("tunewright")

FILE = "traffic.json"
SCHEMA = "tunewright.traffic/1"
#: models, entries of each, shapes of an entry, inputs and dimensions that are kept; the oldest entries go first
MOST_MODELS, MOST_ENTRIES, MOST_SHAPES, MOST_INPUTS, MOST_DIMENSIONS = 200, 64, 256, 256, 32
#: the longest name, and a larger size or count than that is a damaged file
LONGEST, LARGEST = 500, 1 << 53

#: shapes of a model's inputs, in its order
Shapes: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Entry:
    """What one process met of one model: counts and seconds by shapes."""

    date: str
    rows: Mapping[Shapes, tuple[int, float]]

    @property
    def count(self) -> int:
        """Inferences in all."""
        return sum(count for count, _ in self.rows.values())


@dataclass(frozen=True)
class ModelTraffic:
    """What all processes met of one model."""

    #: for people, and the names of its inputs
    name: str
    inputs: tuple[str, ...]
    #: by the process that wrote it
    entries: Mapping[str, Entry] = field(default_factory=dict)


@dataclass(frozen=True)
class Weighted:
    """Shapes of a model's inputs, and the part of the time that they took, between 0 and 1."""

    shapes: Mapping[str, tuple[int, ...]]
    weight: float
    count: int
    seconds: float


#: by the digest of a model's structure (`streams.digest`)
Traffic: TypeAlias = Mapping[str, ModelTraffic]


def merged(one: Traffic, other: Traffic) -> dict[str, ModelTraffic]:
    """Both. Of each process the entry that counts more is the later one."""
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
    """The shapes that a model met, those first that took most time; the ``most`` of them, whose weights make 1."""
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
    """The traffic of one folder, or a file of it that was written elsewhere."""

    title, setting = "recorded traffic", "USER_DB_PATH"

    @staticmethod
    def of(settings: Settings) -> TrafficFile:
        """The one beside the user's knowledge base."""
        return TrafficFile(places.user_folder(settings) / FILE)

    def read(self) -> dict[str, ModelTraffic]:
        """All of it. InputError where the file is damaged as a whole; entries that are damaged are left out."""
        try:
            with self.opened() as descriptor:
                return self._parsed(descriptor)
        except FileNotFoundError:
            return {}

    def add(self, traffic: Traffic) -> None:
        """Merge what was met into the file. InputError where that cannot be done: nothing that was there is lost."""
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
        """Drop models, and say which."""
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
    """The content of a file; what is beyond the bounds of one is left out, the oldest first."""
    models = {
        key: {
            "name": model.name[:LONGEST], "inputs": list(model.inputs),
            "entries": {writer: {"date": entry.date, "rows": _rows(entry)} for writer, entry in model.entries.items()},
        }
        for key, model in _bounded(traffic).items()
    }  # fmt: skip
    return json.dumps({"schema": SCHEMA, "models": models}, separators=(",", ":"), sort_keys=True) + "\n"


def _rows(entry: Entry) -> list[Any]:
    """Lists of shapes, count and seconds."""
    return [[[list(shape) for shape in shapes], *numbers] for shapes, numbers in entry.rows.items()]


def find(settings: Settings, digest: str, model: str) -> ModelTraffic:
    """What was recorded of a model; InputError, which says what to do, where that is nothing."""
    file = TrafficFile.of(settings)
    found = file.read().get(digest)
    if found is None or not any(entry.rows for entry in found.entries.values()):
        hint = "serve it with RECORD_TRAFFIC = YES first; `tunewright kb traffic` lists what there is"
        raise InputError("no traffic was recorded for this model", where=model, hint=hint)
    return found


def today() -> str:
    """The date of an entry that is written now."""
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


# ---- reading: data from a file, never trusted -----------------------------------------------------------------------


def _model(data: Any) -> ModelTraffic | None:
    """A model out of a file; None where it is none."""
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


def _entry(data: Any, inputs: int) -> Entry | None:
    rows = data.get("rows") if isinstance(data, dict) else None
    if not isinstance(rows, list) or len(rows) > MOST_SHAPES or not _is_date(data.get("date")):
        return None
    try:
        found = dict(_row(row, inputs) for row in rows)
    except (TypeError, ValueError):
        return None
    return Entry(data["date"], found)


def _row(data: Any, inputs: int) -> tuple[Shapes, tuple[int, float]]:
    """ValueError or TypeError where it is none."""
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
    """Merge files of others; what they had. InputError where one is missing or no such file: then nothing is taken."""
    found: dict[str, ModelTraffic] = {}
    for path in paths:
        if not path.exists():
            raise InputError("there is no such file", where=str(path))
        found = merged(found, TrafficFile(path).read())
    into.add(found)
    return found
