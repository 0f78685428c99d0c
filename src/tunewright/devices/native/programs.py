"""Programs of the CPU device. A separate process compiles each text once, and the kernel cache stores the result."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from weakref import WeakSet

from tunewright.errors import DeviceError, ExecutionError

from .. import build_options, kernel_cache
from ..c_device import NoCompiler
from ..kernel_cache import KernelCache
from . import isa, object_symbols, usable_cores
from .compiler import FLAGS, OPENCL_C, OPENCL_C_FLAGS, REMEDY, STRICT, ClangCommands
from .objects import SharedObject

#: programs kept in memory; a program that a kernel uses lives on after its removal
MOST = 512
#: files of a cache entry: the object to load, and the compiler that made it
OBJECT, COMPILER = "object", "compiler"
_EXPORT = "\nEXPORT void "
_NAME = re.compile(rf"^EXPORT void (\w+)\(|^{re.escape(OPENCL_C)} /\* (\w+) \*/", re.MULTILINE)


class LoadedProgram:
    """A compiled and loaded text."""

    def __init__(self, binary: bytes, name: str) -> None:
        #: kept so that other caches can store it too
        self.binary = binary
        self.loaded = SharedObject(binary, name)

    def entry(self, name: str) -> int:
        """Return the address of a kernel."""
        return self.loaded.address(name)


class NativePrograms:
    """Compiles and loads programs. A program from `build` stays valid as long as someone holds it.

    Safe to use from several threads, and in a fork.
    """

    def __init__(self, flags: Sequence[str], compiler: ClangCommands | None, title: str, entry: str = "") -> None:
        """``entry``: see `ClangCommands.build`."""
        self._flags, self._compiler, self._title, self._entry = [*flags], compiler, title, entry
        self._kept: OrderedDict[str, LoadedProgram] = OrderedDict()
        #: the caches that have a program
        self._stored: dict[str, list[KernelCache]] = {}
        #: programs of a cache that the loader refused
        self._refused: set[str] = set()
        self._renew()
        _ALIVE.add(self)

    def _renew(self) -> None:
        """Reset locks and compilations. A fork has no threads that would finish a compilation or release a lock."""
        self._lock = threading.Lock()
        #: programs being compiled, and failed ones until the failure is reported
        self._begun: dict[str, Future[LoadedProgram]] = {}
        #: number of running compilers, and the lengths of texts that wait for one
        self._running, self._waiting, self._turns = 0, list[int](), threading.Condition()

    def __len__(self) -> int:
        return len(self._kept)

    def build(self, source: str) -> LoadedProgram:
        """Return the loaded program of a text."""
        made = self._kept_or_begun(source)
        if isinstance(made, Future):
            try:
                program = made.result()
            except Exception:
                with self._lock:  # the next caller tries again: the cause may have been a full disk
                    if self._begun.get(source) is made:
                        del self._begun[source]
                raise
        else:
            program = made
        self._store(source, program)
        return program

    def begin(self, source: str) -> bool:
        """Begin to compile a text in the background. Return whether its program is ready. Raise `NoCompiler` if it
        cannot be compiled here."""
        with self._lock:
            before = self._begun.get(source)
            if before is not None and before.done():  # it failed to compile, and no caller asked for it
                del self._begun[source]
        return isinstance(self._kept_or_begun(source), LoadedProgram)

    def _kept_or_begun(self, source: str) -> LoadedProgram | Future[LoadedProgram]:
        build_options.write_source(source, ".c", name_of(source))
        with self._lock:
            if source in self._kept:
                self._kept.move_to_end(source)
                return self._kept[source]
            if source in self._begun:
                return self._begun[source]
            program = self._load(source)
            if program is not None:
                self._keep(source, program)
                return program
            if self._compiler is None:
                raise NoCompiler("there is no C compiler, and no compiled kernel in the cache", hint=REMEDY)
            future = self._begun[source] = Future[LoadedProgram]()
        work = partial(self._compile, source, self._compiler, future)
        try:
            threading.Thread(target=copy_context().run, args=(work,), daemon=True).start()
        except RuntimeError:  # the process may start no further threads
            work()
        return future

    def _keep(self, source: str, program: LoadedProgram) -> None:
        self._kept[source] = program
        while len(self._kept) > MOST:
            gone, _ = self._kept.popitem(last=False)
            self._stored.pop(gone, None)

    def _key(self, source: str) -> dict[str, str]:
        opencl_c = OPENCL_C_FLAGS if is_opencl_c(source) else ()
        return {
            "container": kernel_cache.MAGIC.decode().strip(), "machine": isa.machine(),
            "flags": " ".join((*FLAGS, *STRICT, *self._flags, *opencl_c, self._entry)),
            "source": source,
        }  # fmt: skip

    def _load(self, source: str) -> LoadedProgram | None:
        wanted = kernel_cache.current()
        files = None if wanted is None else wanted.get(self._key(source))
        if wanted is None or files is None:
            return None
        if self._compiler is not None and files.get(COMPILER) != self._compiler.identity.encode():
            return None  # replace another compiler's program; without a compiler, use it
        try:
            program = LoadedProgram(files[OBJECT], name_of(source))
        # no program may be loaded here; or the entry is bad, if a newly compiled program loads
        except (KeyError, DeviceError):
            self._refused.add(source)
            return None
        self._stored.setdefault(source, []).append(wanted)
        return program

    def _compile(self, source: str, compiler: ClangCommands, future: Future[LoadedProgram]) -> None:
        try:
            with self._turn(len(source)):
                binary = compiler.build(source, [*STRICT, *self._flags], name_of(source), self._entry)
            missing = object_symbols.missing(binary) if is_opencl_c(source) else []
            if missing:
                raise ExecutionError(f"{name_of(source)} uses {', '.join(missing)}, which is not defined")
            program = LoadedProgram(binary, name_of(source))
        except BaseException as error:  # the thread that waits for the program raises it
            future.set_exception(error)
            return
        with self._lock:
            self._begun.pop(source, None)
            self._keep(source, program)
        future.set_result(program)

    @contextlib.contextmanager
    def _turn(self, length: int) -> Iterator[None]:
        """Wait until a compiler may start. COMPILATION_NUM_THREADS of the model limits how many run at a time.

        Long texts come first. They mostly take longest, and the last one to begin should be short.
        """
        most = min(build_options.threads(build_options.current().compilation_num_threads), usable_cores.count())
        with self._turns:
            self._waiting.append(length)
            try:
                self._turns.wait_for(lambda: self._running < most and length == max(self._waiting))
            finally:
                self._waiting.remove(length)
            self._running += 1
            self._turns.notify_all()  # there may be room for the next one, too
        try:
            yield
        finally:
            with self._turns:
                self._running -= 1
                self._turns.notify_all()

    def _store(self, source: str, program: LoadedProgram) -> None:
        wanted = kernel_cache.current()
        if wanted is None or wanted.closed or self._compiler is None:
            return
        with self._lock:
            caches = self._stored.setdefault(source, [])
            if wanted in caches:
                return
            caches.append(wanted)
        if source in self._refused:
            self._refused.discard(source)
            wanted.reject(self._key(source))
        files = {OBJECT: program.binary, COMPILER: self._compiler.identity.encode()}
        wanted.put(self._key(source), files, self._title)


def is_opencl_c(source: str) -> bool:
    """Whether a text is a user's OpenCL C, see `opencl_c`."""
    return source.startswith(OPENCL_C)


#: all live instances
_ALIVE: WeakSet[NativePrograms] = WeakSet()


def _in_child() -> None:
    for programs in list(_ALIVE):
        programs._renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def name_of(source: str) -> str:
    """Return the name of the first kernel of a text."""
    # Skip the prelude in front of the first kernel: a pattern takes 0.4 ms to search it.
    begin = 0 if is_opencl_c(source) else max(source.find(_EXPORT), 0)
    found = _NAME.search(source, begin)
    return found[1] or found[2] if found else "program"
