"""What knowledge bases on disk share: folders and files that outlast a crash, and objects that outlast a fork."""

from __future__ import annotations

import os
import secrets
import weakref
from abc import ABC, abstractmethod
from pathlib import Path

from ..errors import DatabaseError


def make_folder(folder: Path, mode: int = 0o700) -> None:
    """Make a folder that is still there after a crash, private to the user unless said otherwise."""
    if folder.is_dir():
        return
    missing = [folder, *(p for p in folder.parents if not p.exists())]
    folder.mkdir(mode, parents=True, exist_ok=True)
    for one in missing:
        sync_folder(one.parent)


def sync_folder(folder: Path) -> None:
    """Names that were made, changed or removed in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """A single write where the system takes all of it, as it does unless a disk is full."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def replace_file(path: Path, data: bytes) -> None:
    """Write so that readers see the old content or all of the new one, whenever the machine stops."""
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
    """None where files can be made in a folder, or the folder itself; else the reason."""
    there = folder
    while not os.path.exists(there) and there != there.parent:  # a folder that may not be entered hides what is in it
        there = there.parent
    if not os.path.isdir(there):
        return f"{there} is not a folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written to"


def failed(path: str, error: OSError | str) -> DatabaseError:
    """What a user is told when a write did not succeed."""
    reason = error if isinstance(error, str) else error.strerror or str(error)
    hint = "nothing that was there is lost; make room, or set USER_DB_PATH to another folder"
    return DatabaseError(f"cannot be written: {reason}", where=path, hint=hint)


class Forkable(ABC):
    """An object whose locks, connections and files belong to the process that made them."""

    def __init__(self) -> None:
        self.start_anew()
        _FORKABLE.add(self)

    @abstractmethod
    def start_anew(self) -> None:
        """Make fresh locks and forget what is open, without closing it: in a child it is still the parent's."""


_FORKABLE: weakref.WeakSet[Forkable] = weakref.WeakSet()


def _in_child() -> None:
    for one in list(_FORKABLE):
        one.start_anew()


os.register_at_fork(after_in_child=_in_child)
