"""Programs of one OpenCL device: each source is compiled once, kept in memory, and stored in the kernel cache."""

from __future__ import annotations

import hashlib
import platform
import re
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tunewright.errors import ExecutionError

from .. import build_options, kernel_cache
from ..host import cpu_flags, cpu_name
from ..kernel_cache import KernelCache

#: Results are compared with references of their own arithmetic, so options must not change values. The one exception
#: flushes denormals to zero: they cost 30 to 50 times. Kernels ask for reassociation where they sum.
OPTIONS = "-cl-denorms-are-zero -w"
#: programs in memory; programs in use by a kernel live on without it
MOST = 512
#: the file name in a cache entry
BINARY = "program"
#: runtime libraries by a word of the platform's name: the file reveals an update that keeps its version
_LIBRARIES = {"portable": "libpocl", "pocl": "libpocl", "intel": "libintelocl", "nvidia": "libnvidia-opencl"}
#: warning filters belong to the process, not a thread: the first thread to leave would undo the filters of another
_WARNINGS = threading.RLock()


@contextmanager
def quietly() -> Iterator[None]:
    """Ignore warnings inside the block, one thread at a time: pyopencl warns of all compiler output, even harmless
    output."""
    with _WARNINGS, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass
class _Kept:
    program: Any
    #: the caches that hold it
    caches: list[KernelCache] = field(default_factory=list)


class OpenCLPrograms:
    """Compiles and caches programs. The result of `build` stays valid while someone holds it. Safe to use from several
    threads."""

    def __init__(self, name: str, context: Any, raw: Any, options: str) -> None:
        self._name, self._context, self._raw, self._options = name, context, raw, options.split()
        self._identity = identity(raw, options)
        #: the name in listings of the kernel cache
        self.label = f"{raw.platform.name}: {raw.name}"
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def build(self, source: str) -> Any:
        """Return the compiled program of a source."""
        build_options.write_source(source, ".cl")
        with self._lock:
            kept = self._kept.get(source)
            wanted = kernel_cache.current()
            if kept is None:
                kept = self._kept[source] = self._load(source, wanted) or self._compile(source)
                while len(self._kept) > MOST:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(source)
            if wanted is not None and not wanted.closed and wanted not in kept.caches:
                kept.caches.append(wanted)
                self._store(source, kept.program, wanted)
            return kept.program

    def _key(self, source: str) -> dict[str, str]:
        return {**self._identity, "source": source}

    def _load(self, source: str, wanted: KernelCache | None) -> _Kept | None:
        import pyopencl as cl

        if wanted is None:
            return None
        key = self._key(source)
        files = wanted.get(key)
        if files is None:
            return None
        try:
            program = self._built(cl.Program(self._context, [self._raw], [files[BINARY]]))
        except (cl.Error, KeyError, ValueError):  # the runtime rejects it, whatever the key says
            wanted.reject(key)
            return None
        return _Kept(program, [wanted])

    def _compile(self, source: str) -> _Kept:
        import pyopencl as cl

        try:
            return _Kept(self._built(cl.Program(self._context, source)))
        except cl.Error as error:
            raise ExecutionError(f"{self._name} cannot compile a kernel: {error}") from error

    def _built(self, program: Any) -> Any:
        with quietly():
            return program.build(options=self._options, cache_dir=False)

    def _store(self, source: str, program: Any, wanted: KernelCache) -> None:
        import pyopencl as cl

        try:
            (binary,) = program.get_info(cl.program_info.BINARIES)
        except cl.Error:  # the runtime gives no binary
            return
        wanted.put(self._key(source), {BINARY: binary}, self.label)


def identity(raw: Any, options: str) -> dict[str, str]:
    """Return everything that a compiled program depends on besides its source."""
    return {
        "container": kernel_cache.MAGIC.decode().strip(),
        "device": raw.name,
        "vendor": raw.vendor,
        "driver": raw.driver_version,
        "version": raw.version,
        "platform": f"{raw.platform.name} {raw.platform.version}",
        "library": _loaded(_library_of(raw)),
        "machine": platform.machine(),
        "processor": f"{cpu_name()} {hashlib.sha256(' '.join(sorted(cpu_flags())).encode()).hexdigest()}",
        "options": options,
    }


def _library_of(raw: Any) -> str:
    name = raw.platform.name.lower()
    return next((library for word, library in _LIBRARIES.items() if word in name), "")


@cache
def _loaded(library: str) -> str:
    """Return the files of a library that this process has loaded: name, size and change time of each."""
    if not library:
        return ""
    found = set()
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = {match[1] for line in maps if (match := re.search(rf" (/.*/{library}[^/]*)$", line.rstrip()))}
        for path in map(Path, paths):
            about = path.stat()
            found.add(f"{path.name} {about.st_size} {about.st_mtime_ns}")
    except OSError:
        return ""
    return ", ".join(sorted(found))
