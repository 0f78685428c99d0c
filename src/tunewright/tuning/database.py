"""A knowledge base: a set of records. What it answers is derived from the set, so merging is union.

The answer for a question follows from a total order (`better`), which depends on nothing but the records:

1. Of each candidate (solver, version, config) the newest measurement counts; equal dates: the larger digest. A newer
   and worse one therefore demotes a candidate, and nothing is ever overwritten.
2. Only confirmed measurements answer: their gain was found on samples of their own.
3. What was measured cold or inside a network comes before what was measured warm, nearer keys before farther ones.
4. Then the larger lower end of the gain's interval, the larger median of it, the shorter time, the smaller digest.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .key import Match
from .record import AnyRecord, Fault, Measurement, Survey, now

LOG = logging.getLogger("tunewright")
#: knowledge bases whose damage was told in this process, by path
_told: set[str] = set()


@dataclass(frozen=True)
class Event:
    """A line of a knowledge base's log."""

    date: str
    action: str  # tuned, merged, imported, pruned, deleted, verified, repaired, ...
    what: str


class Database(ABC):
    """A set of records in some place. Safe to use from several threads."""

    #: where it is, for people
    path: str

    @property
    def read_only(self) -> str | None:
        """None where `add`, `remove` and `note` can work; else why they cannot."""
        return None

    @abstractmethod
    def add(self, records: Iterable[AnyRecord]) -> int:
        """Take records in; how many were new. When it returns they are on disk for good.

        DatabaseError when that cannot be done: then none of them counts as taken.
        """

    @abstractmethod
    def remove(self, digests: Iterable[str]) -> int:
        """Drop records; how many were there."""

    @abstractmethod
    def family(self, family: str) -> Sequence[Measurement]:
        """Every measurement of a family of problems (see `Problem.family`): the same object until it changes."""

    @abstractmethod
    def surveys(self, family: str) -> Sequence[Survey]:
        """Every survey of a family of problems: the same object until it changes."""

    @abstractmethod
    def faults(self) -> Sequence[Fault]:
        """Every fault: the same object until they change."""

    @abstractmethod
    def __iter__(self) -> Iterator[AnyRecord]:
        """Every record, in the order of digests."""

    @abstractmethod
    def note(self, action: str, what: str) -> None:
        """Write a line to the log."""

    @abstractmethod
    def events(self) -> Sequence[Event]:
        """The log, oldest first."""

    @abstractmethod
    def damage(self) -> Sequence[str]:
        """What could not be read, each with the reason: a record that does not fit its digest, a broken file."""

    def merge(self, other: Iterable[AnyRecord]) -> int:
        """Union; how many records were new."""
        return self.add(other)


class MemoryDatabase(Database):
    """Records of this process alone."""

    path = "memory"

    def __init__(self, records: Iterable[AnyRecord] = ()) -> None:
        self._lock = threading.Lock()
        self._records: dict[str, AnyRecord] = {}
        #: measurements and surveys by kind and family
        self._families: dict[tuple[str, str], list[AnyRecord]] = {}
        #: what `family`, `surveys` and `faults` gave; they give it again until something changes
        self._given: dict[tuple[str, str], Sequence[Any]] = {}
        self._events: list[Event] = []
        self.add(records)

    def add(self, records: Iterable[AnyRecord]) -> int:
        given = list(records)
        with self._lock:
            before = len(self._records)
            for record in given:
                if record.digest not in self._records:
                    self._records[record.digest] = record
                    if not isinstance(record, Fault):
                        self._families.setdefault((record.kind, record.family), []).append(record)
                    self._given.clear()
            return len(self._records) - before

    def remove(self, digests: Iterable[str]) -> int:
        wanted = list(digests)
        with self._lock:
            self._given.clear()
            gone = [record for digest in wanted if (record := self._records.pop(digest, None)) is not None]
            for record in gone:
                if not isinstance(record, Fault):
                    self._families[record.kind, record.family].remove(record)
            return len(gone)

    def family(self, family: str) -> Sequence[Measurement]:
        return self._of_family(Measurement.kind, family)

    def surveys(self, family: str) -> Sequence[Survey]:
        return self._of_family(Survey.kind, family)

    def _of_family(self, kind: str, family: str) -> Sequence[Any]:
        with self._lock:
            if (kind, family) not in self._given:
                self._given[kind, family] = tuple(self._families.get((kind, family), ()))
            return self._given[kind, family]

    def faults(self) -> Sequence[Fault]:
        with self._lock:
            if (Fault.kind, "") not in self._given:
                self._given[Fault.kind, ""] = [r for r in self._records.values() if isinstance(r, Fault)]
            return self._given[Fault.kind, ""]

    def __iter__(self) -> Iterator[AnyRecord]:
        with self._lock:
            return iter([self._records[digest] for digest in sorted(self._records)])

    def note(self, action: str, what: str) -> None:
        self._events.append(Event(now(), action, what))

    def events(self) -> Sequence[Event]:
        return list(self._events)

    def damage(self) -> Sequence[str]:
        return []


def warn_of_damage(path: str, what: str, remedy: str) -> None:
    """Tell once per process that a knowledge base does not answer, or not with everything that it should hold."""
    if path not in _told:
        _told.add(path)
        LOG.warning("%s is damaged: %s. What cannot be read is not used. %s", path, what, remedy)


def told_of_damage(path: str) -> None:
    """Suppress warnings, because the caller reports everything that is damaged there."""
    _told.add(path)


def newest(measurements: Iterable[Measurement]) -> list[Measurement]:
    """For each candidate in each place the measurement that counts."""
    found: dict[object, Measurement] = {}
    for m in sorted(measurements, key=lambda m: (m.date, m.digest)):
        found[m.key, m.config, m.evidence.regime == "warm"] = m
    return list(found.values())


def superseded(surveys: Iterable[Survey]) -> list[Survey]:
    """Surveys that say nothing which newer ones of the same default in the same place do not say."""
    found: list[Survey] = []
    seen: dict[object, set[object]] = {}
    for s in sorted(surveys, key=lambda s: (s.date, s.digest), reverse=True):
        newer = seen.setdefault((s.key, s.config, s.regime), set())
        mine = {(one.solver, one.version, one.config) for one in s.seen}
        if mine <= newer:
            found.append(s)
        newer |= mine
    return found


def better(found: Iterable[tuple[Match, Measurement]]) -> list[tuple[Match, Measurement]]:
    """Confirmed answers, the best first, in the order that the module describes."""

    def rank(pair: tuple[Match, Measurement]) -> tuple[object, ...]:
        match, m = pair
        e = m.evidence
        return (e.regime == "warm", match.distance, -e.gain.low, -e.gain.median, e.seconds, m.digest)

    return sorted(((match, m) for match, m in found if m.evidence.confirmed), key=rank)
