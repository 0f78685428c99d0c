"""Shared objects in this process: what is loaded is what was checked, and goes when nobody uses it any more."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import tempfile
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ...errors import DeviceError
from ...settings import Settings, own_folder

_Handle = int
_NUMBERS = itertools.count()


class Loaded:
    """A shared object. It is unloaded with the last reference to it."""

    def __init__(self, binary: bytes, name: str = "kernel") -> None:
        self.library = _load(binary, name)
        weakref.finalize(self, _unload, self.library._handle).atexit = False

    def address(self, name: str) -> int:
        """Where a function begins."""
        return ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value or 0


def _load(binary: bytes, name: str) -> ctypes.CDLL:
    _mathematics()
    kept = Settings.from_environment().kernel_symbols_dir
    if kept:
        return _through_file(binary, name, [Path(kept)], keep=True)
    try:
        with file_of(binary, name) as (path, _):
            return ctypes.CDLL(path)
    except OSError:  # the system has no such files, code may not be run from them, or there is no /proc
        return _through_file(binary, name, _folders())


@contextlib.contextmanager
def file_of(binary: bytes, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A file in memory that holds an object: its path, and the handles that a child needs to open it."""
    handle = os.memfd_create(f"tunewright-{name}", os.MFD_CLOEXEC)
    try:
        with open(handle, "wb", closefd=False) as file:
            file.write(binary)
        # The loader takes what it has loaded by the same path, and handles are used again: no two paths are the same.
        number = "".join("/." if bit == "1" else "/" for bit in f"{next(_NUMBERS):b}")
        yield f"/proc/self/fd{number}/{handle}", (handle,)
    finally:
        os.close(handle)


def _through_file(binary: bytes, name: str, folders: list[Path], keep: bool = False) -> ctypes.CDLL:
    """By a file that only this user can write to, and that this process has just written. ``keep``: for perf and gdb,
    which look it up later."""
    failed: OSError | None = None
    for folder in folders:
        path = ""
        try:
            folder.mkdir(0o700, parents=True, exist_ok=True)
            handle, path = tempfile.mkstemp(".so", f"{name}-", folder)
            with open(handle, "wb") as file:
                file.write(binary)
            return ctypes.CDLL(path)
        except OSError as error:  # read-only, full, or nothing may be executed there
            failed = error
        finally:
            if path and not keep:
                with contextlib.suppress(OSError):
                    os.unlink(path)
    raise DeviceError(
        f"compiled kernels cannot be loaded: {failed}",
        hint="TMPDIR must name a folder on a file system from which code may be executed",
    )


def _folders() -> list[Path]:
    made = _temporary()
    return ([made] if made is not None else []) + [own_folder("cache") / "loaded"]


@cache
def _temporary() -> Path | None:
    """A private folder of this process; it goes with the process."""
    with contextlib.suppress(OSError):
        folder = tempfile.TemporaryDirectory(prefix=f"tunewright-{os.getpid()}-")
        _KEPT.append(folder)
        return Path(folder.name)
    return None


#: at most one: removed when the process ends
_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@cache
def _mathematics() -> None:
    """The C library's mathematics for kernels of double precision: the process may not have loaded it."""
    for name in ("libm.so.6", "libm.so"):
        with contextlib.suppress(OSError):
            ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
            return


def _unload(handle: _Handle) -> None:
    import _ctypes

    with contextlib.suppress(OSError):
        _ctypes.dlclose(handle)
