"""A read-only knowledge base: a file of JSON Lines, such as the shipped one or the output of `kb export`.

The file is read on first use, and again after each change. Damaged lines are skipped.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ..errors import DatabaseError, InputError
from .database import Database, Event, told_of_damage, warn_of_damage
from .files import Forkable, failed, replace_file
from .record import AnyRecord, Fault, Measurement, Survey, to_line
from .record_lines import Lines, read

FILE = "system.jsonl"
#: Largest file that is read.
MOST_FILE_BYTES = 1 << 30


class SystemDatabase(Database, Forkable):
    """The records of ``system.jsonl`` in a folder, or of another file there. Empty if the file does not exist."""

    #: advice for damaged records
    remedy = "`tunewright kb path` names them; put a good copy in its place"

    def __init__(self, folder: Path, file: str = FILE) -> None:
        self._file = folder / file
        self.path = str(self._file)
        self._stamp: tuple[int, ...] | None = None
        self._lines = Lines()
        super().__init__()

    def start_anew(self) -> None:
        self._lock = threading.Lock()

    @property
    def read_only(self) -> str:
        return "it is only ever replaced as a whole"

    def add(self, records: Iterable[AnyRecord]) -> int:
        raise self._refusal()

    def remove(self, digests: Iterable[str]) -> int:
        raise self._refusal()

    def note(self, action: str, what: str) -> None:
        raise self._refusal()

    def _refusal(self) -> DatabaseError:
        hint = "records belong into the user's knowledge base; `write_lines` makes such a file"
        return DatabaseError(f"cannot be written: {self.read_only}", where=self.path, hint=hint)

    def family(self, family: str) -> Sequence[Measurement]:
        with self._lock:
            lines = self._current()
            found = lines.family(family)
        if lines.bad:
            what = f"{lines.bad} of its records are damaged"
            warn_of_damage(self.path, what, self.remedy)
        return found

    def surveys(self, family: str) -> Sequence[Survey]:
        with self._lock:
            return self._current().surveys(family)

    def faults(self) -> Sequence[Fault]:
        with self._lock:
            return self._current().faults()

    def __iter__(self) -> Iterator[AnyRecord]:
        with self._lock:
            return iter(list(self._current()))

    def events(self) -> Sequence[Event]:
        return []

    def damage(self) -> Sequence[str]:
        told_of_damage(self.path)
        found = []
        try:
            data = self._read()
        except OSError as error:
            return [f"{self._file.name} cannot be read: {error.strerror or error}"]
        for number, line in enumerate(data.split(b"\n"), start=1):
            if line.strip():
                try:
                    read(line)
                except InputError as error:
                    found.append(f"{self._file.name}, line {number}: {error.what}")
        return found

    def _current(self) -> Lines:
        """Return the lines of the file as it is now."""
        try:
            now = os.stat(self._file)
            stamp = (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns)
            if stamp != self._stamp:
                self._lines, self._stamp = self._load(), stamp
        except FileNotFoundError:
            self._lines, self._stamp = Lines(), None
        except OSError as error:
            self._lines, self._stamp = Lines(), None
            warn_of_damage(self.path, str(error.strerror or error), "Put a good copy in its place")
        return self._lines

    def _load(self) -> Lines:
        lines = Lines()
        lines.bad += sum(bool(line.strip()) for line in lines.take(self._read()))
        return lines

    def _read(self) -> bytes:
        """Return the file's bytes; empty if there is no file."""
        try:
            found = os.stat(self._file)
        except FileNotFoundError:
            return b""
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for its writer
            raise OSError("it is not a file")
        if found.st_size > MOST_FILE_BYTES:
            raise OSError(f"it is larger than {MOST_FILE_BYTES >> 20} MiB")
        return self._file.read_bytes()


def write_lines(path: Path, records: Iterable[AnyRecord]) -> None:
    """Write the distinct records to a file, ordered by digest. The file is replaced atomically."""
    lines = {record.digest: to_line(record) for record in records}
    try:
        replace_file(path, "".join(f"{lines[digest]}\n" for digest in sorted(lines)).encode("ascii"))
    except OSError as error:
        raise failed(str(path), error) from None
