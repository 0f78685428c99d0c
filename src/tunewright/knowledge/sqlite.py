"""The user's knowledge base in a SQLite file, for a folder on a local disk.

A rollback journal and full syncs make every completed `add` durable. A query holds SQLite's lock while it runs. A
writer also holds the folder's lock, so that a file is never replaced while another process writes to it.

Nothing in the file is trusted. Its tables must be exactly those defined here, and every content is checked against its
digest. A row that does not match is skipped. An unusable file gives no answers; the next write moves it aside and
copies what is still readable into a new file (`salvage`). A file of a later format, with a higher number and other
tables, is left alone.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import os
import secrets
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..errors import DatabaseError, InputError
from . import salvage
from .database import LOG, Database, Event, told_of_damage, warn_of_damage
from .files import Forkable, failed, make_folder, sync_folder, why_not_writable
from .record import LONGEST, MOST_BYTES, AnyRecord, Fault, Measurement, Survey, from_text, now

FILE = "kb.sqlite"
FORMAT = 1
_TABLES = {
    "records": "CREATE TABLE records (digest TEXT NOT NULL PRIMARY KEY, kind TEXT NOT NULL,"
    " family TEXT NOT NULL, text TEXT NOT NULL)",
    "records_of_family": "CREATE INDEX records_of_family ON records (family)",
    "events": "CREATE TABLE events (date TEXT NOT NULL, action TEXT NOT NULL, what TEXT NOT NULL)",
}
#: Schema of a valid file: the tables, and the index that SQLite makes for the digests.
_SCHEMA = {*_TABLES.items(), ("sqlite_autoindex_records_1", None)}
#: Rewrites an existing row only if it differs.
_ADD = (
    "INSERT INTO records VALUES (?, ?, ?, ?) ON CONFLICT (digest)"
    " DO UPDATE SET kind = excluded.kind, family = excluded.family, text = excluded.text"
    " WHERE kind IS NOT excluded.kind OR family IS NOT excluded.family OR text IS NOT excluded.text"
)

#: A page holds a few whole records, so that each can be found in the bytes of a broken file.
PAGE_BYTES = 8192
#: Seconds that a query waits for a writer, and for other queries of this process: together less than 5.
BUSY_SECONDS, QUEUE_SECONDS = 3.0, 1.0
#: Seconds that a writer waits for other writers, and for readers.
LOCK_SECONDS, WRITE_SECONDS = 60.0, 10.0
#: Maximum number of events that are kept, and maximum number of families whose results are kept.
MOST_EVENTS, MOST_FAMILIES = 10_000, 4096
_BROKEN = {sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT,
           sqlite3.SQLITE_TOOBIG}  # fmt: skip

_ERRORS = (*salvage.ERRORS, OSError)
_REMEDY = "`tunewright kb repair` puts the file aside and keeps what can be read of it, as the next tuning does"

T = TypeVar("T")


class _Damaged(Exception):
    """The file is unusable in its present state."""


class _Newer(Exception):
    """The file has a later format."""


class SqliteDatabase(Database, Forkable):
    """The file ``kb.sqlite`` in a folder. Reading creates nothing; the first write creates folder and file."""

    def __init__(self, path: Path) -> None:
        self._folder = path
        self._file = path / FILE
        self.path = str(self._file)
        #: the file that passed the last full check
        self._sound: tuple[int, int] | None = None
        self._connection: sqlite3.Connection | None = None
        self._inherited: list[sqlite3.Connection | None] = []
        super().__init__()

    def start_anew(self) -> None:
        self._lock = threading.Lock()
        self._inherited.append(self._connection)  # the parent must close it
        self._connection = None
        self._stamp: tuple[int, int] | None = None
        self._version: int | None = None
        #: results by family, with the version of the file
        self._known: dict[str, tuple[int | None, Sequence[AnyRecord]]] = {}
        #: why the last query gave no answer
        self._trouble: str | None = None

    def __del__(self) -> None:
        connection = getattr(self, "_connection", None)
        if connection is not None:
            connection.close()

    # ---- asking ------------------------------------------------------------------------------------------------------

    @property
    def read_only(self) -> str | None:
        try:
            self._ask_apart(lambda connection: None)
        except _Newer as newer:
            return str(newer)
        except (*_ERRORS, _Damaged):  # a write makes a new file
            pass
        if os.path.isfile(self._file) and not os.access(self._file, os.W_OK):
            return f"{self._file} cannot be written to"
        return why_not_writable(self._folder)

    def family(self, family: str) -> Sequence[Measurement]:
        def ask(connection: sqlite3.Connection) -> Sequence[Measurement]:
            return self._column(connection, _column(Measurement, family))

        return self._ask(ask, ())

    def surveys(self, family: str) -> Sequence[Survey]:
        def ask(connection: sqlite3.Connection) -> Sequence[Survey]:
            return self._column(connection, _column(Survey, family))

        return self._ask(ask, ())

    def faults(self) -> Sequence[Fault]:
        return self._ask(lambda connection: self._column(connection, ""), ())

    def _column(self, connection: sqlite3.Connection, family: str) -> Sequence[Any]:
        """Return the records with this value in their column; the same object as before if nothing changed."""
        known = self._known.get(family)
        if known is None or known[0] != self._version:
            query = "SELECT {} FROM records WHERE family = ? ORDER BY digest"
            digests = [digest for (digest,) in connection.execute(query.format("digest"), (family,))]
            if known is None or digests != [record.digest for record in known[1]]:
                rows = connection.execute(query.format("digest, text"), (family,)).fetchall()
                records = {r.digest: r for r in _records(rows) if _family(r) == family}
                if len(records) < len(rows):
                    what = f"{len(rows) - len(records)} of {len(rows)} records are damaged"
                    warn_of_damage(self.path, what, "`tunewright kb stats` counts them")
                known = (self._version, tuple(records.values()))
            if len(self._known) >= MOST_FAMILIES:
                self._known.clear()
            self._known[family] = self._version, known[1]
        return known[1]

    def __iter__(self) -> Iterator[AnyRecord]:
        rows: list[tuple[object, object]] = []

        def ask(connection: sqlite3.Connection) -> None:
            # In the table's own order, because an index may be broken. Rows read before a failure are kept.
            for row in connection.execute("SELECT digest, text FROM records NOT INDEXED"):
                rows.append(row)

        with contextlib.suppress(*_ERRORS, _Damaged, _Newer):
            self._ask_apart(ask)
        found = {record.digest: record for record in _records(rows)}
        return iter([found[digest] for digest in sorted(found)])

    def events(self) -> Sequence[Event]:
        def ask(connection: sqlite3.Connection) -> Sequence[Event]:
            rows = connection.execute("SELECT date, action, what FROM events ORDER BY rowid").fetchall()
            return [Event(*row) for row in rows if all(isinstance(text, str) for text in row)]

        return self._ask(ask, ())

    def damage(self) -> Sequence[str]:
        told_of_damage(self.path)
        rows: list[tuple[object, object, object]] = []

        found: list[str] = []

        def ask(connection: sqlite3.Connection) -> None:
            found.extend(f"{FILE}: {text}" for text in _faults_of(connection))
            for row in connection.execute("SELECT digest, text, family FROM records NOT INDEXED"):
                rows.append(row)

        try:
            self._ask_apart(ask)
        except (*_ERRORS, _Damaged, _Newer) as error:
            found.append(f"{FILE}: {_reason(error)}")
        if self._trouble is not None and f"{FILE}: {self._trouble}" not in found:
            found.append(f"{FILE}: {self._trouble}")
        for digest, text, family in rows:
            try:
                if family != _family(_record(digest, text)):
                    found.append(f"{FILE}, record {str(digest)[:16]}: it is stored under another family")
            except InputError as error:
                found.append(f"{FILE}, record {str(digest)[:16]}: {error.what}")
        return found

    def _ask_apart(self, question: Callable[[sqlite3.Connection], T]) -> T | None:
        """Run a long query on a separate connection, so that other queries do not wait for it."""
        if _stamp(self._file) is None:
            return None
        connection = _connect(self._file, "rw", BUSY_SECONDS)
        with contextlib.closing(connection), _transaction(connection, "BEGIN"):
            _check(connection)
            return question(connection)

    def _ask(self, question: Callable[[sqlite3.Connection], T], nothing: T) -> T:
        """Run a query in one short transaction, waiting for a writer at most once. Returns ``nothing`` if it fails."""
        if not self._lock.acquire(timeout=QUEUE_SECONDS):
            self._trouble = "other threads of this process took too long"
            return nothing
        try:
            connection = self._current()
            if connection is None:
                return nothing
            with _transaction(connection, "BEGIN"):
                (version,) = connection.execute("PRAGMA data_version").fetchone()
                if version != self._version:  # another process has written since
                    _check(connection)
                    self._version = version
                answer = question(connection)
            self._trouble = None
            return answer
        except _Newer as newer:
            self._trouble = str(newer)
            self._forget()
            remedy = "A newer Tunewright reads it; USER_DB_PATH may name another folder"
            warn_of_damage(self.path, self._trouble, remedy)
            return nothing
        except (*_ERRORS, _Damaged) as error:
            self._trouble = _reason(error)
            if _code(error) != sqlite3.SQLITE_BUSY:
                self._forget()
                warn_of_damage(self.path, self._trouble, _REMEDY)
            return nothing
        finally:
            self._lock.release()

    def _current(self) -> sqlite3.Connection | None:
        """Return a connection to the file that exists now; None if there is none."""
        while True:
            stamp = _stamp(self._file)
            if stamp is None:
                self._forget()
                return None
            if stamp == self._stamp and self._connection is not None:
                return self._connection
            self._forget()
            self._connection = _connect(self._file, "rw", BUSY_SECONDS)
            self._stamp = stamp  # check again: the opened file may already have been replaced

    def _forget(self) -> None:
        connection, self._connection, self._stamp, self._version = self._connection, None, None, None
        self._known.clear()
        self._sound = None
        if connection is not None:
            connection.close()

    # ---- writing -----------------------------------------------------------------------------------------------------

    def add(self, records: Iterable[AnyRecord]) -> int:
        # A record that could not be read again must not be stored: its content would be lost.
        rows = [_row(from_text(record.text, record.digest)) for record in records]

        def write(connection: sqlite3.Connection) -> int:
            before = connection.total_changes
            connection.executemany(_ADD, rows)
            return connection.total_changes - before

        return self._write(write) if rows else 0

    def remove(self, digests: Iterable[str]) -> int:
        rows = [(digest,) for digest in digests]

        def write(connection: sqlite3.Connection) -> int:
            before = connection.total_changes
            connection.executemany("DELETE FROM records WHERE digest = ?", rows)
            return connection.total_changes - before

        return self._write(write) if rows and os.path.lexists(self._file) else 0

    def note(self, action: str, what: str) -> None:
        self._write(lambda connection: _note(connection, action, what))

    def repair(self) -> Sequence[str]:
        """Move a damaged file aside and build a new one from its readable parts. Returns the damage."""
        found = self.damage()
        if found:
            try:
                with self._locked():
                    self._repair("; ".join(found))
            except (*_ERRORS, _Damaged) as error:
                raise failed(self.path, _reason(error)) from None
            self._forget()
            self._trouble = None
        return found

    def _write(self, job: Callable[[sqlite3.Connection], T]) -> T:
        """Run one transaction, which is on disk when this returns. Repairs the file first if it is unusable."""
        try:
            make_folder(self._folder)
            with self._locked():
                try:
                    return self._change(job)
                except _Damaged as damage:
                    self._repair(str(damage))
                    return self._change(job)
        except (*_ERRORS, _Damaged) as error:
            raise failed(self.path, _reason(error)) from None
        except _Newer as newer:
            hint = "use a newer Tunewright, or set USER_DB_PATH to another folder"
            raise DatabaseError(f"cannot be written: {newer}", where=self.path, hint=hint) from None

    def _change(self, job: Callable[[sqlite3.Connection], T]) -> T:
        """Run the job in its own transaction. Raises `_Damaged` if the file is missing or unusable."""
        stamp = _stamp(self._file)
        if stamp is None:
            self._build([], [])
            stamp = _stamp(self._file)
        try:
            with _opened(self._file, "rw") as connection:
                _check(connection)
                # Once per file: writing to a broken file may destroy its good parts.
                if stamp != self._sound and (faults := _faults_of(connection)):
                    raise _Damaged("; ".join(faults))
                result = job(connection)
                connection.execute("COMMIT")
        except salvage.ERRORS as error:
            # A number in the file's header says who may write. If the system allows writing, that number is damaged.
            barred = _code(error) == sqlite3.SQLITE_READONLY and self.read_only is None
            if barred or _code(error) in _BROKEN:
                raise _Damaged(_reason(error)) from None
            raise
        self._sound, self._trouble = stamp, None
        return result

    def _repair(self, reason: str) -> None:
        """Move the file aside, and copy its readable parts into a new one."""
        day = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d")
        names = (self._file.with_name(f"{FILE}.damaged-{day}-{n}") for n in range(1, 1 << 30))
        aside = next(name for name in names if not os.path.lexists(name))
        records: dict[str, AnyRecord] = {}
        events: list[Event] = []

        def save(connection: sqlite3.Connection) -> None:
            for row in salvage.rows(connection):
                if row[0] not in records:
                    records.update((r.digest, r) for r in _records([row]))
            events.extend(salvage.events(connection))

        if self._file.is_file():
            # Only with our tables: in another file a plain SELECT may run forever.
            with contextlib.suppress(*_ERRORS, _Damaged):
                self._ask_apart(save)
            for digest, text in salvage.carved(self._file.read_bytes()):
                if digest not in records:
                    records.update((r.digest, r) for r in _records([(digest, text)]))
        what = f"{reason[:500]}; {len(records)} records taken over from {aside.name}"
        self._build(records.values(), [*events, Event(now(), "repaired", what)], aside)
        LOG.warning("%s was damaged and was created again: %s", self.path, what)

    def _build(self, records: Iterable[AnyRecord], events: Iterable[Event], aside: Path | None = None) -> None:
        """Build a new file and move it into place once it is on disk. The old file, if any, moves to ``aside``."""
        for left in self._folder.glob(f"{FILE}.new-*"):  # left by a killed process; no other one can be here now
            left.unlink()
        new = self._file.with_name(f"{FILE}.new-{os.getpid()}-{secrets.token_hex(4)}")
        with _opened(new, "rwc") as connection:
            for sql in _TABLES.values():
                connection.execute(sql)
            connection.execute(f"PRAGMA user_version = {FORMAT}")
            connection.executemany(_ADD, map(_row, records))
            connection.executemany("INSERT INTO events VALUES (?, ?, ?)", ((e.date, e.action, e.what) for e in events))
            connection.execute("COMMIT")
        if aside is not None:
            try:
                os.link(self._file, aside, follow_symlinks=False)
            except OSError:  # a folder, or a file system without links
                os.rename(self._file, aside)
            for ending in ("-journal", "-wal", "-shm"):  # SQLite would apply them to the new file
                with contextlib.suppress(FileNotFoundError):
                    os.rename(f"{self._file}{ending}", f"{aside}{ending}")
        os.replace(new, self._file)
        sync_folder(self._folder)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock. It ends with its process in any case."""
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            end = time.monotonic() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise OSError(f"other processes held its lock for {LOCK_SECONDS:g} seconds") from None
                    time.sleep(0.003)
            yield
            # A child forked meanwhile shares the descriptor, so closing it here would leave the folder locked.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)


# ---- the file --------------------------------------------------------------------------------------------------------


def _stamp(file: Path) -> tuple[int, int] | None:
    """Return the identity of the existing file, or None. Raises `_Damaged` if it cannot be a database."""
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise _Damaged("it is not a file")
    if not found.st_size:
        raise _Damaged("the file is empty")
    return found.st_dev, found.st_ino


def _connect(file: Path, mode: str, seconds: float) -> sqlite3.Connection:
    """Open a file. Mode ``rw`` creates nothing, but plays back the journal of a killed process."""
    connection = sqlite3.connect(
        f"{file.absolute().as_uri()}?mode={mode}", seconds, isolation_level=None, check_same_thread=False, uri=True
    )
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 4 * MOST_BYTES)
    # EXTRA adds to FULL a sync of the folder after the journal's deletion; a power cut may otherwise restore the
    # journal.
    for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "synchronous = EXTRA", "secure_delete = ON",
                   "temp_store = MEMORY", "mmap_size = 0", f"page_size = {PAGE_BYTES}"):  # fmt: skip
        connection.execute(f"PRAGMA {pragma}")
    return connection


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection, begin: str) -> Iterator[None]:
    """Run a block in a transaction, and roll back what it did not commit."""
    connection.execute(begin)
    try:
        yield
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


@contextlib.contextmanager
def _opened(file: Path, mode: str) -> Iterator[sqlite3.Connection]:
    """Open a connection in a writing transaction; the caller commits."""
    connection = _connect(file, mode, WRITE_SECONDS)
    with contextlib.closing(connection), _transaction(connection, "BEGIN IMMEDIATE"):
        yield connection


def _check(connection: sqlite3.Connection) -> None:
    """Raise unless the file has our format and exactly our tables."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    schema = set(connection.execute("SELECT name, sql FROM sqlite_master").fetchall())
    if version > FORMAT and schema != _SCHEMA:
        raise _Newer(f"it has format {version} of a later Tunewright, and this one knows {FORMAT}")
    if schema != _SCHEMA or version != FORMAT:
        raise _Damaged("the file is not a knowledge base, or its head is damaged")
    (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    if mode != "delete":
        raise _Damaged(f"its journal is in mode {mode}")


def _faults_of(connection: sqlite3.Connection) -> list[str]:
    """Return the errors that SQLite finds in the structure of the file."""
    found = [line for (text,) in connection.execute("PRAGMA integrity_check(8)") for line in str(text).splitlines()]
    return [] if found == ["ok"] else [line for line in found if not line.startswith("***")]


def _code(error: BaseException) -> int:
    """Return SQLite's primary code of an error."""
    if isinstance(error, UnicodeDecodeError):
        return sqlite3.SQLITE_CORRUPT
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _reason(error: BaseException) -> str:
    if _code(error) == sqlite3.SQLITE_BUSY:
        return f"it was locked for more than {BUSY_SECONDS:g} seconds"
    if isinstance(error, UnicodeDecodeError):
        return "database disk image is malformed"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _column(kind: type[Measurement] | type[Survey], family: str) -> str:
    """Return the value of the column ``family``.

    Surveys have another one, because queries for measurements must be fast.
    """
    digest = hashlib.sha256(family.encode("utf-8", "surrogatepass")).hexdigest()
    return digest if kind is Measurement else f"{salvage.APART}{digest}"


def _family(record: AnyRecord) -> str:
    """Return that value for a record; it is empty for faults."""
    return "" if isinstance(record, Fault) else _column(type(record), record.family)


def _row(record: AnyRecord) -> tuple[str, str, str, str]:
    return record.digest, record.kind, _family(record), record.text


def _record(digest: object, text: object) -> AnyRecord:
    if not isinstance(digest, str) or not isinstance(text, str):
        raise InputError("a row is not made of texts", where="a record")
    return from_text(text, digest)


def _records(rows: Iterable[tuple[object, object]]) -> Iterator[AnyRecord]:
    """Yield the undamaged records of rows; `damage` reports the others."""
    for digest, text in rows:
        with contextlib.suppress(InputError):
            yield _record(digest, text)


def _note(connection: sqlite3.Connection, action: str, what: str) -> None:
    texts = [text.encode("utf-8", "replace").decode()[:LONGEST] for text in (action, what)]
    connection.execute("INSERT INTO events VALUES (?, ?, ?)", (now(), *texts))
    connection.execute("DELETE FROM events WHERE rowid <= (SELECT max(rowid) FROM events) - ?", (MOST_EVENTS,))
