"""Reads files beside a model. Only regular files inside the model's folder are read, whatever path the model names.

Each component of a path is opened relative to the one before it, without following links. The opened file is then
examined through its descriptor, so that nobody can swap it between the check and the read.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ..errors import LimitError, ModelError
from ..settings import Settings
from . import weight_reader

#: parts of a file up to this size are copied; larger ones stay mapped
COPY_BYTES = 1 << 20


def read_file(path: Path, settings: Settings) -> weight_reader.SplitModel:
    """Read a model file. Raises ModelError if it cannot be read, and LimitError if it is too large."""
    try:
        descriptor = os.open(
            path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        )  # opening a fifo must not wait for a writer
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ModelError("is not a file", where=str(path))
            check_file_size(status.st_size, str(path), settings)
            return weight_reader.read(file, status.st_size)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot be read: {getattr(error, 'strerror', None) or error}", where=str(path)) from None


def check_file_size(size: int, where: str, settings: Settings) -> None:
    if size > settings.max_file_bytes:
        raise LimitError(
            f"has {size:,} bytes", where=where, hint=f"the limit is MAX_FILE_BYTES = {settings.max_file_bytes:,}"
        )


class ExternalFiles:
    """The files of one model's folder, each mapped read-only on first use. Without a folder every read fails."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._maps: dict[str, np.ndarray[Any, np.dtype[np.uint8]]] = {}

    def read(self, location: str, offset: int, length: int, where: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return ``length`` bytes from ``offset`` of the file that a tensor names."""
        where = f"{where}, external data {location!r}"
        if self.folder is None:
            raise ModelError(
                "the model was not read from a file, so it has no folder", where=where, hint="pass the file's path"
            )
        if location not in self._maps:
            self._maps[location] = _map(self.folder, _parts(location, where), where)
        whole = self._maps[location]
        if not 0 <= offset <= whole.size or length > whole.size - offset:
            raise ModelError(
                f"the file has {whole.size:,} bytes, the tensor takes {length:,} from offset {offset:,}",
                where=where,
                hint="the file belongs to another model, or is incomplete",
            )
        part = whole[offset : offset + length]
        return part.copy() if length <= COPY_BYTES else part


def _parts(location: str, where: str) -> tuple[str, ...]:
    """Split a path into its components. Raises ModelError if it leads out of the folder."""
    path = PurePosixPath(location)
    if not path.parts or "\0" in location:
        raise ModelError("is not a file name", where=where)
    if path.is_absolute() or ".." in path.parts:
        raise ModelError("leads out of the model's folder", where=where, hint="only files inside that folder are read")
    return path.parts


def _map(folder: Path, parts: tuple[str, ...], where: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    opened: list[int] = []
    try:
        opened.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        for part in parts[:-1]:
            opened.append(os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=opened[-1]))
        opened.append(os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=opened[-1]))
        status = os.fstat(opened[-1])
        if not stat.S_ISREG(status.st_mode):
            raise ModelError("is not a regular file", where=where)
        if status.st_nlink > 1:
            raise ModelError(
                "is a hard link: it may be a file from outside the model's folder",
                where=where,
                hint="copy the file instead",
            )
        if status.st_size == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(mmap.mmap(opened[-1], status.st_size, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        link = any((folder / Path(*parts[: k + 1])).is_symlink() for k in range(len(parts)))
        what = "is a symbolic link, or lies behind one" if link else f"cannot be read: {error.strerror or error}"
        raise ModelError(what, where=where, hint="copy the file into the model's folder" if link else "") from None
    finally:
        for descriptor in opened:
            os.close(descriptor)
