"""Every kind of knowledge base keeps the promises of the suite; one that breaks them is caught."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tunewright.knowledge.database import Database, MemoryDatabase
from tunewright.knowledge.record import AnyRecord
from tunewright.knowledge.shared import SharedDatabase
from tunewright.knowledge.sqlite import SqliteDatabase
from tunewright.knowledge.system import SystemDatabase, write_lines
from tunewright.testing import database as suite


class Memory(suite.Place):
    def __init__(self, folder: Path) -> None:
        pass

    def create(self, records: Iterable[AnyRecord] = ()) -> Database:
        return MemoryDatabase(records)

    def reopen(self, database: Database) -> Database:
        return database


class Folders(suite.Place):
    """A folder for each."""

    kind: Callable[[Path], Database]

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.opened: dict[Database, Path] = {}

    def create(self, records: Iterable[AnyRecord] = ()) -> Database:
        self.count += 1
        folder = self.folder / f"kb{self.count}"
        self.fill(folder, records)
        made = type(self).kind(folder)
        self.opened[made] = folder
        return made

    def fill(self, folder: Path, records: Iterable[AnyRecord]) -> None:
        type(self).kind(folder).add(records)

    def reopen(self, database: Database) -> Database:
        return type(self).kind(self.opened[database])


class Sqlite(Folders):
    kind = SqliteDatabase


class Shared(Folders):
    kind = SharedDatabase


class System(Folders):
    kind = SystemDatabase

    def fill(self, folder: Path, records: Iterable[AnyRecord]) -> None:
        folder.mkdir()
        write_lines(folder / "system.jsonl", records)


@pytest.mark.parametrize("check", suite.CHECKS, ids=lambda check: check.__name__)
def test_database_in_memory(check: Callable[[suite.Place], None], tmp_path: Path) -> None:
    check(Memory(tmp_path))


@pytest.mark.parametrize("check", suite.DISK_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("place", [Sqlite, Shared], ids=lambda place: place.__name__.lower())
def test_database_on_disk(place: type[Folders], check: Callable[[suite.Place], None], tmp_path: Path) -> None:
    check(place(tmp_path))


@pytest.mark.parametrize("check", suite.READ_CHECKS, ids=lambda check: check.__name__)
def test_database_that_is_only_read(check: Callable[[suite.Place], None], tmp_path: Path) -> None:
    check(System(tmp_path))


class Forgetful(MemoryDatabase):
    """Loses every seventh record, and has the others in the order in which they came."""

    def add(self, records: Iterable[AnyRecord]) -> int:
        return super().add(r for r in records if int(r.digest[:8], 16) % 7)

    def __iter__(self) -> Iterator[AnyRecord]:
        return iter(list(self._records.values()))

    def remove(self, digests: Iterable[str]) -> int:
        return len(list(digests))


def test_the_suite_catches_a_bad_database(tmp_path: Path) -> None:
    class Bad(Memory):
        def create(self, records: Iterable[AnyRecord] = ()) -> Database:
            return Forgetful(records)

    for check in (suite.holds_what_it_was_given, suite.adding_counts_what_is_new, suite.removing_removes,
                  suite.union_is_commutative, suite.may_be_used_by_threads):  # fmt: skip
        with pytest.raises(AssertionError):
            check(Bad(tmp_path))
