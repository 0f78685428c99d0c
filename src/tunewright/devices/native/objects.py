"""Shared objects in this process. The loaded bytes are the checked ones, and are unloaded after their last use."""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import itertools
import os
import stat
import tempfile
import weakref
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path

from tunewright.errors import DeviceError, ExecutionError, SettingsError
from tunewright.settings import own_folder

from .. import build_options

_HANDLES = "/proc/self/fd"
_NUMBERS = itertools.count()


class SharedObject:
    """A shared object. It is unloaded with the last reference to it."""

    def __init__(self, binary: bytes, name: str = "kernel") -> None:
        self._handle = _load(binary, name)
        weakref.finalize(self, _ctypes.dlclose, self._handle).atexit = False

    @cached_property
    def library(self) -> ctypes.CDLL:
        """The library whose functions can be called."""
        return ctypes.CDLL("", handle=self._handle)

    @cached_property
    def quick(self) -> ctypes.PyDLL:
        """The same for functions that take some microseconds: their calls keep the GIL."""
        return ctypes.PyDLL("", handle=self._handle)

    def address(self, name: str) -> int:
        """Return the address of a function."""
        try:
            return _ctypes.dlsym(self._handle, name)
        except OSError:
            raise ExecutionError(f"the compiled text has no kernel {name!r}") from None


def _load(binary: bytes, name: str) -> int:
    """Load an object and return the loader's handle."""
    _mathematics()
    kept = build_options.current().kernel_symbols_dir
    if kept:
        return _load_kept(binary, name, Path(kept))
    failed: OSError | None = None
    for place in places():
        try:
            with file_of(binary, name, place) as (path, _):
                return _ctypes.dlopen(path, os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:  # no such files here, read-only, full, or code may not run from there
            failed = error
    raise DeviceError(
        f"compiled kernels cannot be loaded: {failed}",
        hint="TMPDIR must name a folder on a file system from which code may be executed",
    )


def places() -> Iterator[Path | None]:
    """Yield where a file that holds an object can be: in memory (None), then folders."""
    yield None
    with contextlib.suppress(OSError):  # there is no folder for temporary files
        yield Path(tempfile.gettempdir())
    yield own_folder("cache") / "loaded"


@contextlib.contextmanager
def file_of(binary: bytes, name: str, place: Path | None = None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Make a file that holds an object and that nobody else can change: its path, and the handles that a child needs to
    open it. Raise OSError if it cannot be there.

    The file has no name, so nobody can replace it. On a system that does not show handles as files (no /proc), it has a
    name inside the context.
    """
    shown, named = os.path.exists(_HANDLES), ""
    if place is None:
        if not hasattr(os, "memfd_create"):  # Python was built for an old system
            raise OSError("there are no files in memory")
        written = os.memfd_create(f"tunewright-{name}", os.MFD_CLOEXEC)
    else:
        place.mkdir(0o700, parents=True, exist_ok=True)
        written, named = tempfile.mkstemp(".so", f"tunewright-{name}-", place)
        os.fchmod(written, 0o700)  # a program must be executable, an object need not
    handle = -1
    try:
        with open(written, "wb") as file:
            file.write(binary)
            file.flush()
            # A file that is open for writing cannot run as a program.
            handle = os.open(f"{_HANDLES}/{written}" if shown else named, os.O_RDONLY | os.O_CLOEXEC)
        if not shown:
            yield named, ()
            return
        if named:
            os.unlink(named)
            named = ""
        # The loader reuses what it loaded by the same path, and the system reuses handles. So every path is different.
        number = "".join("/." if bit == "1" else "/" for bit in f"{next(_NUMBERS):b}")
        yield f"{_HANDLES}{number}/{handle}", (handle,)
    finally:
        if handle >= 0:
            os.close(handle)
        if named:
            os.unlink(named)


def _load_kept(binary: bytes, name: str, folder: Path) -> int:
    """Load an object from a file that stays: perf and gdb look it up by its path."""
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        about = os.stat(folder)
        others = about.st_mode & 0o022 and not about.st_mode & stat.S_ISVTX
        if others or about.st_uid not in (os.geteuid(), 0):
            raise PermissionError("others than you may write there")
        handle, path = tempfile.mkstemp(".so", f"{name}-", folder.absolute())
        with open(handle, "wb") as file:
            file.write(binary)
        return _ctypes.dlopen(path, os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        raise SettingsError(
            f"compiled kernels cannot be kept in {folder}: {error.strerror or error}", where="KERNEL_SYMBOLS_DIR"
        ) from None


@cache
def _mathematics() -> None:
    """Load the C library's mathematics for double-precision kernels: the process may not have loaded it."""
    for name in ("libm.so.6", "libm.so"):
        with contextlib.suppress(OSError):
            ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
            return
