"""A JSON file that several processes may read and rewrite: bounded, checked, replaced atomically.

Base of tuning files and lockfiles. Such a file is untrusted: its size is bounded, and it may not contain a member twice
or a number that is no finite float. Subclasses and readers check everything else.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from ..errors import InputError

#: Largest file that is read.
MOST_FILE_BYTES = 64 << 20
#: Seconds to wait for another process that rewrites the file.
LOCK_SECONDS = 60.0


class JsonFile:
    """A JSON file at a path. Safe for several processes and threads."""

    #: name of the file in messages, and the setting that gives its path
    title: ClassVar[str]
    setting: ClassVar[str]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.expanduser(path))

    @contextmanager
    def opened(self, flags: int = os.O_RDONLY) -> Iterator[int]:
        """Open the file and yield its descriptor.

        Raises FileNotFoundError if there is none, `InputError` for other problems.
        """
        try:
            # opening a FIFO must not wait for a writer
            descriptor = os.open(self.path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
            raise self.error(f"cannot be opened: {getattr(error, 'strerror', None) or error}") from None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise self.error("is not a file")
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Lock the current file against other writers and yield its descriptor. Creates the file if needed.

        A writer replaces the file, so a lock counts only if it is on the file that the path names now.
        """
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            with self.opened(os.O_RDWR | os.O_CREAT) as descriptor:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise self.error("another process has been extending it for too long") from None
                else:
                    try:
                        there = os.stat(self.path)
                    except FileNotFoundError:
                        continue
                    if os.path.samestat(there, os.fstat(descriptor)):
                        yield descriptor
                        return
            time.sleep(0.01)

    def load(self, descriptor: int) -> Any:
        """Return the file's content; None for an empty file, which was just created."""
        size = os.fstat(descriptor).st_size
        if size > MOST_FILE_BYTES:
            raise self.error(f"has {size:,} bytes", f"at most {MOST_FILE_BYTES:,} are read")
        try:
            text = os.pread(descriptor, size, 0).decode("utf-8")
            hooks: dict[str, Any] = {"parse_constant": _finite, "parse_float": _finite, "object_pairs_hook": _unique}
            return json.loads(text, **hooks) if text.strip() else None
        except OSError as error:
            raise self.error(f"cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise self.error(f"is not JSON: {error}", f"name another {self.setting}") from None

    def replace(self, descriptor: int, text: str) -> None:
        """Replace the file's content atomically. The caller must hold the lock, so one temporary name suffices."""
        if len(text) > MOST_FILE_BYTES:
            raise self.error(f"would have more than {MOST_FILE_BYTES:,} bytes", f"name another {self.setting}")
        path = Path(os.path.realpath(self.path))  # keeps a symbolic link a link
        temporary = path.with_name(f".{path.name}.new")
        temporary.unlink(missing_ok=True)  # left by a killed process
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
                file.write(text)
                file.flush()
                os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(descriptor).st_mode))
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def error(self, what: str, hint: str = "") -> InputError:
        """Make an error about this file."""
        return InputError(what, where=f"{self.title} {self.path}", hint=hint)


def short(text: str) -> str:
    """Shorten and escape a name from a file, for a message."""
    return ascii(text if len(text) <= 40 else text[:37] + "...")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:80]} is no number")
    return number


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):  # rewriting the file would lose one of them
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has two members {short(next(n for n in names if names.count(n) > 1))}")
    return found
