"""Programs of one OpenCL device: each text is compiled once, kept in memory, and stored in the kernel cache."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import re
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import ExecutionError
from . import building, kernel_cache, pocl, pocl_header
from .host import cpu_flags, cpu_name
from .kernel_cache import KernelCache
from .quiet import quietly

#: programs in memory; those that a kernel uses live on without it
MOST = 512
#: Around a text, where LLVM holds that vectors of 256 bits are better for the processor: it would split those of 512,
#: and what was made for 32 registers of 64 bytes does not fit into as many of 32. (Not where PoCL puts a kernel into a
#: function of its own, which forgets what is said of the kernel's; it does not do that with a network in one launch.)
#: Tuned as the same core without AVX-512 it uses whole vectors, in loops that it vectorises too, and all instructions.
WHOLE = """#pragma clang attribute push(__attribute__((target("tune=skylake"))), apply_to = function)
#line 1
{source}
#pragma clang attribute pop
"""
#: libraries of runtimes, by a word of the platform's name: an update that keeps its version is told by the file
_LIBRARIES = {"portable": "libpocl", "pocl": "libpocl", "intel": "libintelocl", "nvidia": "libnvidia-opencl"}


@dataclass
class _Kept:
    program: Any
    #: PoCL's folder of it
    where: str | None = None
    #: in which caches it is, or will be
    caches: list[KernelCache] = field(default_factory=list)


class Programs:
    """What `build` returns stays valid as long as someone holds it."""

    def __init__(self, name: str, context: Any, raw: Any, options: str, whole: bool = False) -> None:
        self._name, self._context, self._raw, self._options = name, context, raw, options.split()
        #: texts are compiled as in `WHOLE`
        self._whole = whole
        self._identity = identity(raw, options) | ({"around": WHOLE} if whole else {})
        self._label = f"{raw.platform.name}: {raw.name}"
        self._is_pocl = _library_of(raw) == "libpocl"
        self._private = pocl.private() if self._is_pocl else None
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def build(self, source: str) -> Any:
        """The compiled program of a source."""
        building.write_source(source, ".cl")
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
                self._store(source, kept, wanted)
            return kept.program

    def _key(self, source: str) -> dict[str, str]:
        return {**self._identity, "source": source}

    def _usable(self) -> bool:
        """The kernel cache may serve this device: PoCL only when its folder is our own."""
        return not self._is_pocl or (self._private is not None and self._private.used)

    def _load(self, source: str, wanted: KernelCache | None) -> _Kept | None:
        import pyopencl as cl

        if wanted is None or not self._usable():
            return None
        key = self._key(source)
        files = wanted.get(key)
        if files is None:
            return None
        try:
            if self._private is None:
                return _Kept(self._from_binary(files[pocl.PROGRAM]), caches=[wanted])
            program, where = self._private.restore(key, files, self._from_binary)
        except (cl.Error, KeyError, ValueError, OSError):  # the runtime does not take it, whatever the key says
            wanted.reject(key)
            return None
        self._private.collect(pocl.Record(wanted, key, self._label, where, program=None))
        return _Kept(program, where, [wanted])

    def _compile(self, source: str) -> _Kept:
        import pyopencl as cl

        text = WHOLE.replace("{source}", source) if self._whole else source

        def make() -> Any:
            short = self._shorter(text)
            if short is not None:
                with contextlib.suppress(cl.Error):  # else it says what is wrong when it is built as it is
                    return self._built(cl.Program(self._context, short), pocl_header.LEFT_OUT)
            return self._built(cl.Program(self._context, text))

        try:
            if self._private is None:
                return _Kept(make())
            return _Kept(*self._private.build(self._key(source), make))
        except cl.Error as error:
            raise ExecutionError(f"{self._name} cannot compile a kernel: {error}") from error

    def _shorter(self, source: str) -> str | None:
        """A source with what it names of PoCL's header; not where the user set PoCL up."""
        if not self._is_pocl or pocl.by_hand() is not None:
            return None
        libraries = _files("libpocl")
        return pocl_header.shorter(source, libraries[0]) if len(libraries) == 1 else None

    def _from_binary(self, binary: bytes) -> Any:
        import pyopencl as cl

        return self._built(cl.Program(self._context, [self._raw], [binary]))

    def _built(self, program: Any, *more: str) -> Any:
        import pyopencl as cl

        with quietly(cl.CompilerWarning):  # Intel's compiler always says something
            return program.build(options=[*self._options, *more], cache_dir=False)

    def _store(self, source: str, kept: _Kept, wanted: KernelCache) -> None:
        import pyopencl as cl

        if not self._usable():
            return
        key = self._key(source)
        if self._private is not None:
            if kept.where is not None:
                self._private.collect(pocl.Record(wanted, key, self._label, kept.where, kept.program))
            return
        try:
            (binary,) = kept.program.get_info(cl.program_info.BINARIES)
        except cl.Error:  # it gives none
            return
        wanted.put(key, {pocl.PROGRAM: binary}, self._label)


def identity(raw: Any, options: str) -> dict[str, str]:
    """Everything that a compiled program depends on beside its source."""
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
    """The files of a library that this process has loaded: name, size and time of change of each."""
    found = set()
    try:
        for path in _files(library):
            about = path.stat()
            found.add(f"{path.name} {about.st_size} {about.st_mtime_ns}")
    except OSError:
        return ""
    return ", ".join(sorted(found))


@cache
def _files(library: str) -> tuple[Path, ...]:
    if not library:
        return ()
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = {match[1] for line in maps if (match := re.search(rf" (/.*/{library}[^/]*)$", line.rstrip()))}
    except OSError:
        return ()
    return tuple(Path(path) for path in sorted(paths))


__all__ = ["MOST", "Programs", "identity"]
