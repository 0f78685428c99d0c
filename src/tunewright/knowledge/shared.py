"""The user's knowledge base in a network folder: one file per writer, and no locks.

Locks of network file systems are unreliable, so no process ever writes to another's file. A writer creates its own file
in ``writers`` and only appends to it. Readers take the union of all lines of all files, in any order. A line is
``{"digest":D,"record":...}`` for a record. It is ``{"digest":D,"note":...}`` with the note's digest for one of these
notes:

* ``{"removed":R,"turn":n}``: record R was removed,
* ``{"restored":R,"turn":n}``: record R was added again after that,
* ``{"event":[date, action, what, nanoseconds]}``: a line of the log.

A record exists if its line exists and its last turn is not a removal. It begins in turn 1. A removal names the turn
that it saw, and adding the record again begins the next turn. A removal therefore beats a writer that adds the same
record concurrently without knowing of it, and a later explicit `add` brings the record back. The order in which files
are read, or merged by `compact`, does not matter.

An incomplete last line belongs to a writer that is still writing or was killed; it is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import DatabaseError, InputError
from .database import Database, Event, told_of_damage, warn_of_damage
from .files import Forkable, failed, make_folder, sync_folder, why_not_writable, write_all
from .record import LONGEST, AnyRecord, Fault, Measurement, Survey, from_text, now, to_line
from .record_lines import Lines, fits, read, split

FOLDER = "writers"
ENDING = ".jsonl"
#: Seconds after its last line in which a writer continues its file, and seconds in which `compact` leaves a file alone.
#: They lie far apart because clocks may differ, and a file must never be taken from an active writer.
IDLE_SECONDS, STALE_SECONDS = 3600.0, 86400.0
#: From this number of files on, a new writer first calls `compact`.
MANY_FILES = 64
MOST_EVENTS = 10_000
#: Maximum number of times that the folder is read again while others change it.
TRIES = 5
#: Longest line that is parsed as a note, and maximum bytes of a file that are read.
MOST_LINE, MOST_FILE_BYTES = 4 << 20, 1 << 30
_NOTE = re.compile(rb'\{"digest":"([0-9a-f]{64})","note":(\{.*\})\}')
_DIGEST = re.compile(r"[0-9a-f]{64}")

T = TypeVar("T")


@dataclass
class _File:
    """Reading state of a writer's file."""

    node: int
    changed: int
    size: int = 0
    #: position after the last complete line
    offset: int = 0
    #: why it cannot be read
    trouble: str | None = None


@dataclass
class _Writer:
    """The file that this object writes to."""

    path: Path
    descriptor: int
    node: int
    last: float


class SharedDatabase(Database, Forkable):
    """A folder that several machines write to. ``host`` names this machine in the names of its files."""

    def __init__(self, folder: Path, host: str | None = None) -> None:
        self._folder = folder / FOLDER
        self._host = re.sub(r"[^A-Za-z0-9.]", "_", host or os.uname().nodename)[:40] or "host"
        self.path = str(folder)
        super().__init__()

    def start_anew(self) -> None:
        #: one lock for the state of reading, held briefly; one for writing, which waits for disks
        self._lock, self._writing = threading.RLock(), threading.RLock()
        self._writer: _Writer | None = None
        self._trouble: str | None = None
        self._clear()

    def _clear(self) -> None:
        self._files: dict[str, _File] = {}
        self._lines = Lines()
        #: the last turn in which a record was removed, and restored
        self._removed: dict[str, int] = {}
        self._restored: dict[str, int] = {}
        self._events: set[tuple[int, Event]] = set()
        #: results by kind and family, with the sequences that they were made from
        self._given: dict[tuple[str, str], tuple[Sequence[Any], Sequence[Any]]] = {}

    def __del__(self) -> None:
        try:  # noqa: SIM105 (at the end of a process modules go first, and the system closes what is open)
            self._close()
        except AttributeError:
            pass

    # ---- asking ------------------------------------------------------------------------------------------------------

    @property
    def read_only(self) -> str | None:
        return why_not_writable(self._folder)

    def family(self, family: str) -> Sequence[Measurement]:
        with self._lock:
            self._refresh()
            found = self._present((Measurement.kind, family), self._lines.family(family))
            what = self._trouble or f"{self._lines.bad} of its records are damaged"
            if self._trouble or self._lines.bad:
                warn_of_damage(self.path, what, "`tunewright kb path` names the files")
            return found

    def surveys(self, family: str) -> Sequence[Survey]:
        with self._lock:
            self._refresh()
            return self._present((Survey.kind, family), self._lines.surveys(family))

    def faults(self) -> Sequence[Fault]:
        with self._lock:
            self._refresh()
            return self._present((Fault.kind, ""), self._lines.faults())

    def __iter__(self) -> Iterator[AnyRecord]:
        with self._lock:
            self._refresh()
            return iter([record for record in self._lines if not self._is_removed(record.digest)])

    def events(self) -> Sequence[Event]:
        with self._lock:
            self._refresh()
            ordered = sorted(self._events, key=lambda e: (e[0], e[1].date, e[1].action, e[1].what))
            return [event for _, event in ordered[-MOST_EVENTS:]]

    def damage(self) -> Sequence[str]:
        told_of_damage(self.path)
        with self._lock:
            self._refresh()
            found = [] if self._trouble is None else [f"{FOLDER}: {self._trouble}"]
            names = sorted(self._files)
            found += [f"{name}: {file.trouble}" for name, file in sorted(self._files.items()) if file.trouble]
        for name in names:
            with contextlib.suppress(OSError):
                bad, torn = _bad_lines(self._folder / name)
                found += [f"{name}, {text}" for text in bad]
                if torn:
                    found.append(f"{name}: the last line is not complete; its writer was killed, or is at work")
        return found

    def _present(self, at: tuple[str, str], records: Sequence[T]) -> Sequence[T]:
        """Return the records that were not removed; the same object until they change."""
        source, given = self._given.get(at, (None, ()))
        if source is not records:
            given = tuple(r for r in records if not self._is_removed(r.digest))  # type: ignore[attr-defined]
            self._given[at] = records, given
        return given

    def _is_removed(self, digest: str) -> bool:
        return self._removed.get(digest, 0) >= self._restored.get(digest, 1)

    # ---- reading files -----------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Read what was written since the last time. Unreadable parts are skipped."""
        for _ in range(TRIES):
            before = self._folder_time()
            self._take_in()
            if self._folder_time() == before:
                return  # otherwise files came or went meanwhile, and a line may have moved from one to another

    def _folder_time(self) -> int:
        try:
            return os.stat(self._folder).st_mtime_ns
        except OSError:
            return 0

    def _take_in(self) -> None:
        found: dict[str, os.stat_result] = {}
        self._trouble = None
        try:
            found = _stats(self._folder)
        except FileNotFoundError:  # nobody has written yet
            pass
        except OSError as error:
            self._trouble = f"cannot be read: {error.strerror or error}"
        if any(self._is_other(file, found.get(name)) for name, file in self._files.items()):
            self._clear()
        for name, status in found.items():
            file = self._files.setdefault(name, _File(status.st_ino, status.st_mtime_ns))
            if status.st_size != file.size:
                self._read(name, file, status.st_size)
            file.changed = status.st_mtime_ns

    @staticmethod
    def _is_other(file: _File, status: os.stat_result | None) -> bool:
        """Whether a file is not the one that was read: it is gone, replaced, truncated or changed in place."""
        if status is None or status.st_ino != file.node or status.st_size < file.size:
            return True
        return status.st_size == file.size and status.st_mtime_ns != file.changed

    def _read(self, name: str, file: _File, size: int) -> None:
        """Read the new lines of a file."""
        try:
            with open(self._folder / name, "rb") as stream:
                stream.seek(file.offset)
                data = stream.read(min(size, MOST_FILE_BYTES) - file.offset)
        except OSError as error:
            file.trouble = f"cannot be read: {error.strerror or error}"
            return
        file.trouble = f"only its first {MOST_FILE_BYTES >> 20} MiB count" if size > MOST_FILE_BYTES else None
        whole = data[: data.rfind(b"\n") + 1]
        for line in self._lines.take(whole):
            self._heed(_note(line) or {})
        file.size, file.offset = size, file.offset + len(whole)

    def _heed(self, note: dict[str, Any]) -> None:
        for name, turns in (("removed", self._removed), ("restored", self._restored)):
            if name in note:
                digest = note[name]
                turns[digest] = max(turns.get(digest, 0), note["turn"])
                self._given.clear()
        if "event" in note:
            *texts, at = note["event"]
            self._events.add((at, Event(*texts)))

    # ---- writing -----------------------------------------------------------------------------------------------------

    def add(self, records: Iterable[AnyRecord]) -> int:
        # a record that could not be read again must not be stored
        given = {record.digest: from_text(record.text, record.digest) for record in records}
        with self._writing:
            lines, new = [], 0
            with self._lock:
                self._refresh()
                for digest, record in given.items():
                    removed = self._is_removed(digest)
                    if removed or self._lines.get(digest) is None:
                        new += 1
                        lines.append(to_line(record))
                    if removed:
                        lines.append(_framed({"restored": digest, "turn": self._removed[digest] + 1}))
            self._append(lines)
            return new

    def remove(self, digests: Iterable[str]) -> int:
        wanted = list(dict.fromkeys(digests))
        with self._writing:
            with self._lock:
                self._refresh()
                gone = [d for d in wanted if self._lines.get(d) is not None and not self._is_removed(d)]
                lines = [_framed({"removed": d, "turn": self._restored.get(d, 1)}) for d in gone]
            self._append(lines)
            return len(gone)

    def note(self, action: str, what: str) -> None:
        texts = [text.encode("utf-8", "replace").decode()[:LONGEST] for text in (action, what)]
        with self._writing:
            self._append([_framed({"event": [now(), *texts, time.time_ns()]})])

    def _append(self, lines: Sequence[str]) -> None:
        """Append lines to this object's own file. They are on disk when this returns."""
        if not lines:
            return
        try:
            writer = self._own()
            try:
                write_all(writer.descriptor, "".join(f"{line}\n" for line in lines).encode("ascii"))
                os.fsync(writer.descriptor)
            except OSError:
                self._close()  # the file's content is unknown now, and half a line must remain its last
                raise
            writer.last = time.time()
        except OSError as error:
            raise failed(self.path, error) from None

    def _own(self) -> _Writer:
        """Return the own file; a new one if there is none or the old one may be gone."""
        writer = self._writer
        if writer is not None:
            with contextlib.suppress(OSError):
                if os.stat(writer.path).st_ino == writer.node and abs(time.time() - writer.last) < IDLE_SECONDS:
                    return writer
            self._close()
        make_folder(self._folder, 0o777)  # the parent folder's permissions decide who may share it
        if len(_stats(self._folder)) >= MANY_FILES:
            with contextlib.suppress(DatabaseError):  # merging can wait
                self.compact()
        path = self._folder / self._name()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._writer = writer = _Writer(path, descriptor, os.fstat(descriptor).st_ino, time.time())
        sync_folder(self._folder)
        return writer

    def _name(self) -> str:
        return f"{self._host}-{os.getpid()}-{secrets.token_hex(8)}{ENDING}"

    def _close(self) -> None:
        writer = getattr(self, "_writer", None)
        self._writer = None
        if writer is not None:
            os.close(writer.descriptor)

    def compact(self, stale_seconds: float = STALE_SECONDS) -> int:
        """Merge the files that were not changed for ``stale_seconds`` into one, and return how many were removed.

        The new file is complete and on disk before an old one is removed, so no line is ever missing. Several machines
        may merge at once, because duplicate lines count once. The content of removed records is dropped.
        """
        with self._writing:
            with self._lock:
                self._refresh()
            try:
                return self._compact(stale_seconds) if self._folder.is_dir() else 0
            except OSError as error:
                raise failed(self.path, error) from None

    def _compact(self, stale_seconds: float) -> int:
        new = self._folder / f"{self._name()}.new"
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            limit = os.fstat(descriptor).st_mtime - stale_seconds  # by the clock of the file system
            self._tidy(limit, new)
            own = None if self._writer is None else self._writer.path.name
            old = {n: s for n, s in _stats(self._folder).items() if s.st_mtime <= limit and n != own}
            if len(old) < 2:
                return 0
            data = b"".join((self._folder / name).read_bytes().rpartition(b"\n")[0] + b"\n" for name in sorted(old))
            kept = [line for line in dict.fromkeys(data.split(b"\n")) if self._is_wanted(line)]
            write_all(descriptor, b"".join(line + b"\n" for line in kept))
            os.fsync(descriptor)
            os.rename(new, new.with_suffix(""))
            sync_folder(self._folder)
        finally:
            os.close(descriptor)
            new.unlink(missing_ok=True)
        return sum(self._retire(name, status) for name, status in old.items())

    def _is_wanted(self, line: bytes) -> bool:
        parts = split(line)
        return _note(line) is not None if parts is None else fits(line) and not self._is_removed(parts[0])

    def _tidy(self, limit: float, mine: Path) -> None:
        """Delete unfinished files of other processes that were killed while merging."""
        for left in self._folder.glob(f"*{ENDING}.new"):
            with contextlib.suppress(FileNotFoundError):
                if left != mine and left.stat().st_mtime <= limit:
                    left.unlink()

    def _retire(self, name: str, before: os.stat_result) -> int:
        """Remove a merged file; a file with damage is renamed instead."""
        path = self._folder / name
        with contextlib.suppress(FileNotFoundError):  # another machine removed it first
            status = path.stat()
            if (status.st_size, status.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                return 0
            if _bad_lines(path)[0]:
                path.rename(path.with_name(f"{name}.damaged"))
            else:
                path.unlink()
            return 1
        return 0


def _stats(folder: Path) -> dict[str, os.stat_result]:
    """Return the files of all writers."""
    found = {}
    with os.scandir(folder) as entries:
        for entry in filter(lambda entry: entry.name.endswith(ENDING), entries):
            with contextlib.suppress(FileNotFoundError):
                found[entry.name] = entry.stat()
    return {name: status for name, status in found.items() if stat.S_ISREG(status.st_mode)}


def _framed(note: dict[str, object]) -> str:
    text = json.dumps(note, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f'{{"digest":"{hashlib.sha256(text.encode("ascii")).hexdigest()}","note":{text}}}'


def _note(line: bytes) -> dict[str, Any] | None:
    """Parse a line that holds a note; None if it is no note or damaged."""
    found = _NOTE.fullmatch(line) if len(line) <= MOST_LINE else None
    if found is None or hashlib.sha256(found[2]).hexdigest().encode() != found[1]:
        return None
    try:
        note = json.loads(found[2])
    except (ValueError, RecursionError):
        return None
    members = set(note)
    if members == {"event"}:
        event = note["event"]
        right = isinstance(event, list) and [type(x) for x in event] == [str, str, str, int]
    else:
        about = note.get("removed", note.get("restored"))
        right = members in ({"removed", "turn"}, {"restored", "turn"}) and type(note["turn"]) is int
        right = right and 0 < note["turn"] < 1 << 53 and isinstance(about, str) and _DIGEST.fullmatch(about) is not None
    return dict(note) if right else None


def _bad_lines(path: Path) -> tuple[list[str], bool]:
    """Return the damaged lines of a file, each with the reason, and whether the last line is incomplete."""
    bad = []
    with open(path, "rb") as stream:
        whole, _, torn = stream.read(MOST_FILE_BYTES).rpartition(b"\n")
    for number, line in enumerate(whole.split(b"\n") if whole else (), start=1):
        if _note(line) is None:
            try:
                read(line)
            except InputError as error:
                bad.append(f"line {number}: {error.what}")
    return bad, bool(torn)
