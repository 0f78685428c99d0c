"""Programs of the CPU device: each text is compiled once, in a process of its own, and stored in the kernel cache."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from contextvars import copy_context

from ...errors import DeviceError, ExecutionError
from .. import building, kernel_cache
from ..kernel_cache import KernelCache
from . import isa
from .compiler import FLAGS, REMEDY, STRICT, Compiler
from .objects import Loaded

#: programs in memory; those that a kernel uses live on without it
MOST = 512
#: files of an entry of the cache: what is loaded, and what compiled it
OBJECT, COMPILER = "object", "compiler"
_NAME = re.compile(r"^EXPORT void (\w+)\(", re.MULTILINE)
#: a user's text is OpenCL C, which clang compiles as such
OPENCL_C = "/* OpenCL C */"


class Program:
    """A loaded text."""

    def __init__(self, binary: bytes, name: str) -> None:
        #: to store it in another cache, too
        self.binary = binary
        self.loaded = Loaded(binary, name)

    def entry(self, name: str) -> int:
        """The address of a kernel."""
        return self.loaded.address(name)


class Programs:
    """What `build` returns stays valid as long as someone holds it. Safe to use from several threads."""

    def __init__(self, flags: Sequence[str], compiler: Compiler | None, title: str) -> None:
        self._flags, self._compiler, self._title = [*flags], compiler, title
        self._kept: OrderedDict[str, Future[Program]] = OrderedDict()
        #: in which caches a program is
        self._stored: dict[str, list[KernelCache]] = {}
        self._start()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._start)

    def _start(self) -> None:
        """A fork has no threads that would finish what they compile, nor release a lock."""
        self._lock = threading.Lock()
        self._turns = threading.BoundedSemaphore(building.threads(0))
        for source in [s for s, future in self._kept.items() if not future.done()]:
            del self._kept[source]

    def __len__(self) -> int:
        return len(self._kept)

    def build(self, source: str) -> Program:
        """The loaded program of a text."""
        future = self.begin(source)
        with contextlib.suppress(ExecutionError):
            self._store(source, future.result())
        return future.result()

    def begin(self, source: str) -> Future[Program]:
        """The same, some time: compiling happens beside."""
        building.write_source(source, ".c", name_of(source))
        with self._lock:
            future = self._kept.get(source)
            if future is not None and future.done() and future.exception() is not None:
                future = None  # it may have been a full disk
            if future is None:
                future = self._obtain(source)
                self._kept[source] = future  # not before: who is interrupted leaves nothing that nobody will finish
                while len(self._kept) > MOST:
                    gone, _ = self._kept.popitem(last=False)
                    self._stored.pop(gone, None)
            self._kept.move_to_end(source)
            return future

    def _obtain(self, source: str) -> Future[Program]:
        future: Future[Program] = Future()
        found = self._load(source)
        if found is not None:
            future.set_result(found)
        else:
            context = copy_context()
            threading.Thread(target=context.run, args=(self._compile, source, future), daemon=True).start()
        return future

    def _key(self, source: str) -> dict[str, str]:
        return {
            "container": kernel_cache.MAGIC.decode().strip(), "machine": isa.machine(),
            "flags": " ".join((*FLAGS, *STRICT, *self._flags)), "source": source,
        }  # fmt: skip

    def _load(self, source: str) -> Program | None:
        wanted = kernel_cache.current()
        if wanted is None:
            return None
        key = self._key(source)
        files = wanted.get(key)
        if files is None:
            return None
        if self._compiler is not None and files.get(COMPILER, b"").decode() != self._compiler.identity:
            return None  # another compiler's work is replaced; without any it is better than nothing
        try:
            program = Program(files[OBJECT], name_of(source))
        except (KeyError, OSError, DeviceError):  # the system does not take it, whatever the key says
            wanted.reject(key)
            return None
        self._stored.setdefault(source, []).append(wanted)
        return program

    def _compile(self, source: str, future: Future[Program]) -> None:
        try:
            if self._compiler is None:
                raise ExecutionError("there is no C compiler, and no compiled kernel in the cache", hint=REMEDY)
            with self._turns:
                language = "cl" if source.startswith(OPENCL_C) else "c"
                binary = self._compiler.build(source, [*STRICT, *self._flags], name_of(source), language)
            future.set_result(Program(binary, name_of(source)))
        except BaseException as error:  # it is raised where somebody waits for the program
            future.set_exception(error)

    def _store(self, source: str, program: Program) -> None:
        wanted = kernel_cache.current()
        if wanted is None or wanted.closed or self._compiler is None:
            return
        with self._lock:
            caches = self._stored.setdefault(source, [])
            if wanted in caches:
                return
            caches.append(wanted)
        files = {OBJECT: program.binary, COMPILER: self._compiler.identity.encode()}
        wanted.put(self._key(source), files, f"{self._title}: {name_of(source)}")


def name_of(source: str) -> str:
    """The first kernel of a text."""
    found = _NAME.search(source)
    return found[1] if found else "program"
