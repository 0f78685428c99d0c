"""Helpers for knowledge bases on disk: durable folders and files, and objects that survive a fork."""

from __future__ import annotations

import os
import secrets
import weakref
from abc import ABC, abstractmethod
from pathlib import Path

from ..errors import DatabaseError


def make_folder(folder: Path, mode: int = 0o700) -> None:
    """Create a folder durably, so that it survives a crash. By default only the user may open it."""
    if folder.is_dir():
        return
    missing = [folder, *(p for p in folder.parents if not p.exists())]
    folder.mkdir(mode, parents=True, exist_ok=True)
    for one in missing:
        sync_folder(one.parent)


def sync_folder(folder: Path) -> None:
    """Flush a folder, so that names created, changed or removed in it are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all data; a single write unless the system takes only part of it, as on a full disk."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically: readers see the old or the new content, even after a crash."""
    new = path.with_name(f"{path.name}.new-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync_folder(path.absolute().parent)


def why_not_writable(folder: Path) -> str | None:
    """Return None if files can be created in a folder, or the folder itself can be; else the reason."""
    there = folder
    while not os.path.exists(there) and there != there.parent:  # a folder without search permission hides its content
        there = there.parent
    if not os.path.isdir(there):
        return f"{there} is not a folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written to"


def failed(path: str, error: OSError | str) -> DatabaseError:
    """Make the error that tells a user that a write failed."""
    reason = error if isinstance(error, str) else error.strerror or str(error)
    hint = "nothing that was there is lost; make room, or set USER_DB_PATH to another folder"
    return DatabaseError(f"cannot be written: {reason}", where=path, hint=hint)


class Forkable(ABC):
    """An object whose locks, connections and files belong to the process that created them."""

    def __init__(self) -> None:
        self.start_anew()
        _FORKABLE.add(self)

    @abstractmethod
    def start_anew(self) -> None:
        """Create new locks and forget open files without closing them: after a fork they belong to the parent."""


_FORKABLE: weakref.WeakSet[Forkable] = weakref.WeakSet()


def _in_child() -> None:
    for one in list(_FORKABLE):
        one.start_anew()


os.register_at_fork(after_in_child=_in_child)
