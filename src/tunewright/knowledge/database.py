"""A knowledge base: a set of records. Its answers follow from the set alone, so merging is union.

The answer to a question follows from a total order (`better`), which depends only on the records:

1. Of each candidate (solver, version, config) the newest measurement counts; for equal dates the larger digest. A newer
   and worse measurement therefore demotes a candidate. No record is ever overwritten.
2. Only confirmed measurements answer: separate samples confirmed their gain.
3. Measurements of other regimes come before warm ones, and nearer keys before farther ones.
4. Then come: larger lower end of the gain's interval, larger median, shorter time, smaller digest.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .key import KeyMatch
from .record import AnyRecord, Fault, Measurement, Survey, now

LOG = logging.getLogger("tunewright")
#: Paths of the knowledge bases whose damage this process has reported.
_told: set[str] = set()


@dataclass(frozen=True)
class Event:
    """A line of a knowledge base's log."""

    date: str
    action: str  # tuned, merged, imported, pruned, deleted, verified, repaired, ...
    what: str


class Database(ABC):
    """A set of records in some place. Thread-safe."""

    #: where it is, for messages
    path: str

    @property
    def read_only(self) -> str | None:
        """None if `add`, `remove` and `note` can work; else the reason why they cannot."""
        return None

    @abstractmethod
    def add(self, records: Iterable[AnyRecord]) -> int:
        """Store records and return how many were new. They are on disk durably when this returns.

        Raises `DatabaseError` if that fails; the caller must then assume that none was stored.
        """

    @abstractmethod
    def remove(self, digests: Iterable[str]) -> int:
        """Remove records and return how many existed."""

    @abstractmethod
    def family(self, family: str) -> Sequence[Measurement]:
        """Return all measurements of a family of problems (see `Problem.family`). The same object until it changes."""

    @abstractmethod
    def surveys(self, family: str) -> Sequence[Survey]:
        """Return all surveys of a family of problems. The same object until it changes."""

    @abstractmethod
    def faults(self) -> Sequence[Fault]:
        """Return all faults. The same object until they change."""

    @abstractmethod
    def __iter__(self) -> Iterator[AnyRecord]:
        """Iterate over all records, ordered by digest."""

    @abstractmethod
    def note(self, action: str, what: str) -> None:
        """Append a line to the log."""

    @abstractmethod
    def events(self) -> Sequence[Event]:
        """Return the log, oldest line first."""

    @abstractmethod
    def damage(self) -> Sequence[str]:
        """Describe what could not be read, with the reason: a record that does not match its digest, a broken file."""

    def merge(self, other: Iterable[AnyRecord]) -> int:
        """Add the records of another knowledge base and return how many were new."""
        return self.add(other)


class MemoryDatabase(Database):
    """A knowledge base in the memory of this process."""

    path = "memory"

    def __init__(self, records: Iterable[AnyRecord] = ()) -> None:
        self._lock = threading.Lock()
        self._records: dict[str, AnyRecord] = {}
        #: measurements and surveys by kind and family
        self._families: dict[tuple[str, str], list[AnyRecord]] = {}
        #: results of `family`, `surveys` and `faults`; returned again until something changes
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
    """Warn once per process that a knowledge base cannot answer, or answers without some of its records."""
    if path not in _told:
        _told.add(path)
        LOG.warning("%s is damaged: %s. What cannot be read is not used. %s", path, what, remedy)


def told_of_damage(path: str) -> None:
    """Suppress later warnings, because the caller itself reports all damage of this knowledge base."""
    _told.add(path)


def newest(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Return the measurement that counts for each candidate, separately for warm and other regimes."""
    found: dict[object, Measurement] = {}
    for m in sorted(measurements, key=lambda m: (m.date, m.digest)):
        found[m.key, m.config, m.evidence.regime == "warm"] = m
    return list(found.values())


def superseded(surveys: Iterable[Survey]) -> list[Survey]:
    """Return the surveys whose content newer surveys of the same default in the same place cover."""
    found: list[Survey] = []
    seen: dict[object, set[object]] = {}
    for s in sorted(surveys, key=lambda s: (s.date, s.digest), reverse=True):
        newer = seen.setdefault((s.key, s.config, s.regime), set())
        mine = {(one.solver, one.version, one.config) for one in s.seen}
        if mine <= newer:
            found.append(s)
        newer |= mine
    return found


def better(found: Iterable[tuple[KeyMatch, Measurement]]) -> list[tuple[KeyMatch, Measurement]]:
    """Return the confirmed answers, best first, in the order that the module's docstring defines."""

    def rank(pair: tuple[KeyMatch, Measurement]) -> tuple[object, ...]:
        match, m = pair
        e = m.evidence
        return (e.regime == "warm", match.distance, -e.gain.low, -e.gain.median, e.seconds, m.digest)

    return sorted(((match, m) for match, m in found if m.evidence.confirmed), key=rank)
