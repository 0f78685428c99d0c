"""PoCL's compiled programs, in the kernel cache and not in PoCL's own.

PoCL keeps what it compiles in a folder that all its users share, without bounds and without checks. Here each process
gives it a folder of its own, which is removed at exit, and the kernel cache keeps the program binaries.

PoCL compiles in two steps: a program when it is built, and machine code when a kernel is first launched (and again for
a grid of another kind). A binary is worth having when it has both, so it is taken some time later. Asked for it, PoCL
first compiles a third, generic form that is never launched here: a quarter of a second, while it holds the interpreter.
It does not when it finds that file, so it is shown the one that it made for the launch. No launch looks for it: they
all have groups of one work-item, and PoCL has (or makes) code for just those.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..settings import exported, is_exported, own_folder
from . import kernel_cache
from .host import cpu_count
from .kernel_cache import KernelCache, is_inside

#: what a user sets to change what PoCL compiles, or where it keeps it: then it is left alone
BY_HAND = ("POCL_CACHE_DIR", "POCL_KERNEL_CACHE", "POCL_WORK_GROUP_SPECIALIZATION", "POCL_WORK_GROUP_METHOD",
           "POCL_BINARY_SPECIALIZE_WG", "POCL_EXTRA_BUILD_FLAGS", "POCL_WILOOPS_MAX_UNROLL_COUNT",
           "POCL_FORCE_PARALLEL_OUTER_LOOP", "POCL_FULL_REPLICATION_THRESHOLD", "POCL_MAX_WORK_GROUP_SIZE",
           "POCL_LEAVE_KERNEL_COMPILER_TEMP_FILES")  # fmt: skip

#: how many threads it makes, in old versions and new ones
THREADS = ("POCL_MAX_PTHREAD_COUNT", "POCL_CPU_MAX_CU_COUNT")
PREFIX = "tunewright-pocl-"
#: names of a group's members; others are machine code that came later: kernel/variant/kernel.so
FOLDER, PROGRAM = "folder", "program"
#: PoCL's name for the form that fits every launch
GENERIC = "0-0-0"
#: bytes that a place for PoCL's files must have left
ROOM = 32 << 20
#: seconds without a build until binaries are taken, and the most that they wait while there are builds
QUIET, LONGEST, SLOWEST = 1.0, 5.0, 64.0
#: programs that are gone and whose files stay: PoCL does not write machine code again that it has in memory
SPARE = 256
#: the largest binary that PoCL makes
MOST_BYTES = 256 << 20
#: programs that wait for a first launch, or may get machine code for another grid
MOST = 1024

#: queues with work that may still be compiling
queues: weakref.WeakSet[Any] = weakref.WeakSet()


def by_hand() -> str | None:
    """The variable with which the user set PoCL up, if there is one."""
    return next((name for name in BY_HAND if is_exported(name)), None)


@dataclass
class Record:
    """A program whose binary belongs into a cache."""

    cache: KernelCache
    key: Mapping[str, str]
    label: str
    where: str
    #: until its binary is taken
    program: Any
    #: machine code that is in the cache; None while nothing is
    stored: set[str] | None = None


class Private:
    """A process's own folder for PoCL's files."""

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder = folder
        self.programs = folder / "programs"
        self.programs.mkdir(0o700)
        #: PoCL was seen to use it: another library may have loaded PoCL before, and its own folder is not ours to use
        self.used = False
        self._handle, self._process = lock, os.getpid()
        #: one build at a time, so that what appears in the folder is its result
        self._building = threading.RLock()
        self._storing = threading.Lock()
        self._lock = threading.Lock()
        self._records: OrderedDict[tuple[Path, str], Record] = OrderedDict()
        self._where: dict[str, str] = {}
        #: programs that use a folder, and folders of programs that are gone
        self._holders: Counter[str] = Counter()
        self._gone: deque[str] = deque()
        self._timer: threading.Timer | None = None
        self._first = self._last = 0.0
        self._pause = QUIET
        self._closed = False
        kernel_cache.on_flush(self.flush)
        atexit.register(self.close)

    def build(self, key: Mapping[str, str], make: Callable[[], Any]) -> tuple[Any, str | None]:
        """A program, and the folder in which PoCL keeps it; None where that cannot be told."""
        name = _name(key)
        with self._building:
            self._tidy()
            before = self._listing()
            program = make()
            new = self._listing() - before
            if new:
                self.used = True
            if len(new) == 1:
                self._where[name] = new.pop()
            # Else PoCL has it already, from another device over the same runtime, or from another cache.
            where = self._where.get(name)
            if where is not None:
                self._hold(program, where)
            return program, where

    def restore(
        self, key: Mapping[str, str], files: Mapping[str, bytes], make: Callable[[bytes], Any]
    ) -> tuple[Any, str]:
        """A program from what `flush` stored."""
        where = files[FOLDER].decode()
        if not is_inside(where):
            raise ValueError(f"{where!r} is no folder of a program")
        place = self.programs / where
        with self._building:
            self._tidy()
            for name, data in files.items():
                if name not in (FOLDER, PROGRAM):
                    _place(place / name, data)
            program = make(files[PROGRAM])
            self._where[_name(key)] = where
            self._hold(program, where)
            return program, where

    def _hold(self, program: Any, where: str) -> None:
        """Keep a program's folder for as long as the program."""
        self._holders[where] += 1
        # A finalizer may run anywhere, so it only takes a note.
        weakref.finalize(program, self._gone.append, where).atexit = False

    def _tidy(self) -> None:
        """Remove folders of programs that are gone (a process may try many), and be sure that there is one for all."""
        self.programs.mkdir(0o700, parents=True, exist_ok=True)  # a cleaner of /tmp came by, or we are at exit
        while len(self._gone) > SPARE:
            where = self._gone.popleft()
            self._holders[where] -= 1
            if not self._holders[where]:
                del self._holders[where]
                self._where = {name: each for name, each in self._where.items() if each != where}
                shutil.rmtree(self.programs / where, ignore_errors=True)

    def collect(self, record: Record) -> None:
        """Have a program stored once it has run."""
        if record.stored is None and record.program is None:
            record.stored = set(self._code(record.where))
        with self._lock:
            self._records[record.cache.folder, _name(record.key)] = record
            while len(self._records) > MOST:
                self._records.popitem(last=False)
            if record.stored is None:
                self._last = time.monotonic()
                self._first = self._first or self._last
                self._start(QUIET)

    def flush(self) -> None:
        """Store binaries of programs that ran, and machine code that has come since."""
        self._store(lambda record: True)

    def close(self) -> None:
        """At exit: store what is left, and remove the folder."""
        if os.getpid() != self._process:  # a fork: the folder is its parent's
            return
        self.flush()
        self._closed = True
        # Compiling into a folder that is gone would abort the process. A later one will find it and remove it.
        if not any(queue.pending for queue in list(queues)):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, seconds: float) -> None:
        if self._timer is None:
            timer = threading.Timer(seconds, self._tick)
            timer.daemon = True
            with contextlib.suppress(RuntimeError):  # no thread can be started, as at exit
                timer.start()
                self._timer = timer

    def _tick(self) -> None:
        with self._lock:
            self._timer = None
            now = time.monotonic()
            if now - self._last < QUIET and now - self._first < LONGEST:
                self._start(QUIET)
                return
            self._first = 0.0
        self._store(lambda record: record.stored is None)
        with self._lock:
            if any(record.stored is None for record in self._records.values()):
                self._pause = min(2 * self._pause, SLOWEST)  # some were never launched: do not ask all the time
                self._start(self._pause)
            else:
                self._pause = QUIET

    def _store(self, wanted: Callable[[Record], bool]) -> None:
        import pyopencl as cl

        if self._closed or os.getpid() != self._process:
            return
        with self._storing:
            with self._lock:
                records = [(at, record) for at, record in self._records.items() if wanted(record)]
            for at, record in records:
                try:
                    self._store_one(record)
                except (OSError, cl.Error):  # PoCL's files were removed, or it has another way of keeping them
                    with self._lock:
                        self._records.pop(at, None)

    def _store_one(self, record: Record) -> None:
        code = self._code(record.where)
        if record.stored is None:
            files = self._take(record, code)
            if files is None:
                return
        else:
            new = {name: path for name, path in code.items() if name not in record.stored}
            known = record.cache.peek(record.key) if new else None
            if known is None:  # nothing is new, or the entry has gone
                return
            files = known | {name: path.read_bytes() for name, path in new.items()}
        record.cache.put(record.key, files, record.label)
        record.stored, record.program = set(code), None

    def _take(self, record: Record, code: Mapping[str, Path]) -> dict[str, bytes] | None:
        """The files of a program all of whose kernels have run."""
        import pyopencl as cl

        ran = {name.partition("/")[0]: path for name, path in code.items()}
        if not ran.keys() >= set(record.program.get_info(cl.program_info.KERNEL_NAMES).split(";")):
            return None
        with mmap.mmap(-1, MOST_BYTES):  # PoCL takes that much for a moment, and crashes when it does not get it
            pass
        for kernel, path in ran.items():
            generic = self.programs / record.where / kernel / GENERIC
            generic.mkdir(exist_ok=True)
            with contextlib.suppress(FileExistsError):  # from when it was taken for another cache
                os.link(path, generic / path.name)
        (binary,) = record.program.get_info(cl.program_info.BINARIES)
        return {FOLDER: record.where.encode(), PROGRAM: binary}

    def _code(self, where: str) -> dict[str, Path]:
        """Machine code of a program: kernel/variant/kernel.so. PoCL renames it into place, so it is complete."""
        place = self.programs / where
        found = (path for path in place.glob("*/*/*.so") if path.parent.name != GENERIC)
        return {path.relative_to(place).as_posix(): path for path in found}

    def _listing(self) -> set[str]:
        """PoCL's folders of programs: two letters, and the rest of a hash."""
        found = set()
        for letters in self.programs.iterdir():
            if letters.is_dir():
                found |= {f"{letters.name}/{name}" for name in os.listdir(letters)}
        return found


def _name(key: Mapping[str, str]) -> str:
    return hashlib.sha256(kernel_cache.key_text(key).encode()).hexdigest()


def _place(path: Path, data: bytes) -> None:
    """A file that PoCL will find whole, or not at all."""
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    made = path.with_name(f"{path.name}.new")
    made.write_bytes(data)
    made.chmod(0o700)
    os.replace(made, path)


# The folder

_private: Private | None = None


def private() -> Private | None:
    """The folder of this process's PoCL, if it has one."""
    return _private


@contextmanager
def beginning(threads: int = 0) -> Iterator[None]:
    """While runtimes are loaded and list their devices (once per process): PoCL gets a folder of its own.

    It also makes its threads then: as many as there are cores, or ``threads``.
    """
    with contextlib.ExitStack() as stack:
        if threads:
            for name in THREADS:
                stack.enter_context(exported(name, str(min(threads, cpu_count()))))
        with _beginning():
            yield


@contextmanager
def _beginning() -> Iterator[None]:
    global _private
    made = None if by_hand() else _make()
    if made is None:
        yield
        return
    with exported("POCL_CACHE_DIR", str(made.programs)):  # for this process, not for those that it starts
        yield
    made.used = bool(os.listdir(made.programs))
    _private = made


def _make() -> Private | None:
    for place in _places():
        _sweep(place)
        for _ in range(3):
            try:
                folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
            except OSError:
                break
            lock = _claim(folder)
            if lock is not None:
                return Private(folder, lock)
    return None


def _places() -> Iterator[Path]:
    """Folders for a process's files, the best first: code must run from there."""
    candidates = [own_folder("cache")]
    with contextlib.suppress(OSError):
        candidates.insert(0, Path(tempfile.gettempdir()))
    for place in candidates:
        try:
            place.mkdir(0o700, parents=True, exist_ok=True)
            about = os.statvfs(place)
        except OSError:
            continue
        if not about.f_flag & os.ST_NOEXEC and about.f_bavail * about.f_frsize >= ROOM:
            yield place


def _claim(folder: Path) -> int | None:
    """A lock on a folder for as long as this process and its forks live; None when another process has it.

    It is on the folder itself: cleaners of /tmp leave such a folder alone.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(handle).st_ino == os.stat(folder).st_ino:  # else it was removed before it was locked
            return handle
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.ENOENT):  # no locks here: nobody will remove it either
            return handle
    os.close(handle)
    return None


def _sweep(place: Path) -> None:
    """Remove folders of processes that were killed: nobody holds their lock."""
    for name in os.listdir(place):
        if not name.startswith(PREFIX):
            continue
        try:
            handle = os.open(place / name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_uid == os.geteuid():
                shutil.rmtree(place / name, ignore_errors=True)
        os.close(handle)
