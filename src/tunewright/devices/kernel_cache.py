"""Compiled kernels on disk: private to a user, checked when read, bounded in size, shared by processes.

An entry is a group of named files under a key that names everything they were made from. It is one file, written under
another name and then renamed. So a reader sees a whole group or none, even if a writer is killed:

    tunewright kernel 1 | label | length, header (key and names as JSON) | the files | HMAC-SHA256 of all before it

Compiled code runs in the reader's process, so the cache reads only what this user wrote. The HMAC's key is a file of
the user's config folder, and the cache refuses a folder that others could write to. An entry that is torn, changed or
of another key is a miss, and is removed. The cache never fails a build: it counts errors and reports them once per
process.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath

from ..settings import Settings, own_folder

Key = Mapping[str, str] | str

MAGIC = b"tunewright kernel 1\n"
SUFFIX, UNFINISHED = ".kernel", ".unfinished"
#: names of our own files; the cache leaves all other files of the folder alone
_OURS = re.compile(r"[0-9a-f]{64}\.kernel|[0-9a-f]{16}\.unfinished")
_LENGTH = struct.Struct("<I")
_TAG = hashlib.sha256().digest_size
#: the most bytes of an entry's label, with its newline
_LABEL = 256
#: seconds after which an unfinished file is garbage
_STALE = 600
#: seconds for which a process trusts its count of the folder's size while other processes write to the folder
_TRUST = 1.0

_log = logging.getLogger("tunewright")


@dataclass
class CacheCounters:
    """Counts of cache events in this process."""

    hits: int = 0
    misses: int = 0
    stores: int = 0
    evictions: int = 0
    rejected: int = 0  # invalid entries; each counts as a miss too
    errors: int = 0  # errors of the file system

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    def __sub__(self, earlier: CacheCounters) -> CacheCounters:
        return CacheCounters(**{name: count - getattr(earlier, name) for name, count in self.as_dict().items()})


@dataclass(frozen=True)
class CacheEntry:
    """An entry as listings show it."""

    path: Path
    nbytes: int
    used: float  # seconds since 1970
    label: str


class KernelCache:
    """Groups of files in one folder. Safe to use from several threads and processes."""

    #: builds store nothing here
    closed = False

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self.counters = CacheCounters()
        self._lock = threading.Lock()
        self._secret: bytes | None = None
        self._off = False
        #: known bytes in the folder, and when they were counted
        self._total, self._counted = 0, -_TRUST

    @staticmethod
    def of(settings: Settings) -> KernelCache | None:
        """Return the cache that the settings name, one per folder and process, or None if it is switched off."""
        if settings.cache_dir == "":
            return None
        folder = default_folder() if settings.cache_dir is None else Path(settings.cache_dir).expanduser().absolute()
        with _OPEN:
            cache = _caches.get(folder)
            if cache is None:
                cache = _caches[folder] = KernelCache(folder, settings.cache_bytes)
            cache.limit_bytes = settings.cache_bytes
            return cache

    def counted(self) -> CacheCounters:
        """Return the counters as they are now."""
        with self._lock:
            return replace(self.counters)

    def get(self, key: Key) -> dict[str, bytes] | None:
        """Return the files under a key, or None if there are none that can be trusted."""
        files = self._read(key_text(key))
        self._count("misses" if files is None else "hits")
        return files

    def peek(self, key: Key) -> dict[str, bytes] | None:
        """Like `get`, for a caller that adds to an entry: counts neither a hit nor a miss."""
        return self._read(key_text(key))

    def put(self, key: Key, files: Mapping[str, bytes], label: str = "") -> bool:
        """Store files under a key and replace an existing entry. Return False if that failed.

        ``label`` says in listings what the files are for.
        """
        text = key_text(key)
        secret = self._ready()
        if secret is None:
            return False
        data = pack(text, files, secret, label)
        if len(data) > self.limit_bytes:
            return False
        unfinished = self.folder / f"{secrets.token_hex(8)}{UNFINISHED}"
        try:
            _write(unfinished, data)
            os.replace(unfinished, self._path(text))
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            self._failed(error, "compiled kernels cannot be kept")
            return False
        self._count("stores")
        self._bound(len(data))
        return True

    def reject(self, key: Key) -> None:
        """Remove an entry that its reader could not use."""
        self._count("rejected")
        self._remove(self._path(key_text(key)))

    def entries(self) -> list[CacheEntry]:
        """Return the entries of the folder, the least recently used first."""
        found = []
        for path, nbytes, used in self._scan():
            if path.suffix == SUFFIX:
                found.append(CacheEntry(path, nbytes, used, _label(path)))
        return found

    def clear(self, wanted: Callable[[CacheEntry], bool] = lambda entry: True) -> list[CacheEntry]:
        """Remove the ``wanted`` entries and return the removed ones."""
        gone = [entry for entry in self.entries() if wanted(entry) and self._remove(entry.path)]
        self._sweep()
        with self._lock:
            self._counted = -_TRUST
        return gone

    # The folder

    def _ready(self) -> bytes | None:
        """Return the secret once the folder exists and is private, else None for good."""
        with self._lock:
            if self._secret is None and not self._off:
                try:
                    self.folder.mkdir(0o700, parents=True, exist_ok=True)
                    _check_private(self.folder, os.stat(self.folder))
                    self._secret = _secret()
                except OSError as error:
                    self._off = True
                    self.counters.errors += 1
                    _warn(error, "there is no kernel cache")
            return self._secret

    def _path(self, text: str) -> Path:
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()}{SUFFIX}"

    def _read(self, text: str) -> dict[str, bytes] | None:
        secret = self._ready()
        if secret is None:
            return None
        path = self._path(text)
        try:
            data = _read(path, self.limit_bytes)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._failed(error, "compiled kernels cannot be read")
            return None
        files = None if data is None else unpack(data, text, secret)
        if files is None:
            self._count("rejected")
            self._remove(path)
            return None
        with contextlib.suppress(OSError):  # the folder may belong to another user, or be read-only
            os.utime(path)
        return files

    def _bound(self, written: int) -> None:
        """Remove the least recently used entries if the folder has become too large."""
        with self._lock:
            self._total += written
            if self._total <= self.limit_bytes and time.monotonic() - self._counted < _TRUST:
                return
            self._sweep()
            found = self._scan()
            total = sum(nbytes for _, nbytes, _ in found)
            if total > self.limit_bytes:
                # Remove a little more than necessary: otherwise every later entry would have to count the folder again.
                for path, nbytes, _ in found:
                    if total <= self.limit_bytes - self.limit_bytes // 16:
                        break
                    if path.suffix == SUFFIX and self._remove(path):
                        self.counters.evictions += 1
                        total -= nbytes
            self._total, self._counted = total, time.monotonic()

    def _sweep(self) -> None:
        """Remove the files of killed writers."""
        for path, _, used in self._scan():
            if path.suffix == UNFINISHED and used < time.time() - _STALE:
                self._remove(path)

    def _scan(self) -> list[tuple[Path, int, float]]:
        """Return our files in the folder with size and time of last use, the oldest first."""
        found = []
        with contextlib.suppress(OSError), os.scandir(self.folder) as listing:
            for item in filter(lambda item: _OURS.fullmatch(item.name), listing):
                with contextlib.suppress(FileNotFoundError):  # another process removed it
                    about = item.stat(follow_symlinks=False)
                    found.append((Path(item.path), about.st_size, about.st_mtime))
        return sorted(found, key=lambda row: (row[2], row[0]))

    def _remove(self, path: Path) -> bool:
        try:
            os.unlink(path)
        except OSError:
            return False
        return True

    def _count(self, name: str) -> None:
        with self._lock:
            setattr(self.counters, name, getattr(self.counters, name) + 1)

    def _failed(self, error: OSError, what: str) -> None:
        self._count("errors")
        _warn(error, what)


class Gathered(KernelCache):
    """Groups in memory: what one process compiled for another. A ``closed`` one is read-only."""

    def __init__(self, groups: Mapping[str, Mapping[str, bytes]] | None = None, closed: bool = False) -> None:
        super().__init__(Path("gathered"), 0)
        self.closed = closed
        #: by key
        self.groups = {key: dict(files) for key, files in (groups or {}).items()}

    def get(self, key: Key) -> dict[str, bytes] | None:
        return self.peek(key)

    def peek(self, key: Key) -> dict[str, bytes] | None:
        return self.groups.get(key_text(key))

    def put(self, key: Key, files: Mapping[str, bytes], label: str = "") -> bool:
        self.groups[key_text(key)] = dict(files)
        return True

    def reject(self, key: Key) -> None:
        self.groups.pop(key_text(key), None)


_caches: dict[Path, KernelCache] = {}
_OPEN = threading.Lock()


def _in_child() -> None:
    """Replace the locks after a fork: the threads that held them exist only in the parent."""
    global _OPEN
    _OPEN = threading.Lock()
    for cache in _caches.values():
        cache._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def default_folder() -> Path:
    """Return the folder for kernels when CACHE_DIR is not set."""
    return own_folder("cache") / "kernels"


# The container


def pack(key: str, files: Mapping[str, bytes], secret: bytes, label: str = "") -> bytes:
    """Return an entry's bytes."""
    for name in files:
        if not is_inside(name):
            raise ValueError(f"{name!r} is not the name of a file in a group")
    header = json.dumps({"key": key, "files": [[name, len(data)] for name, data in files.items()]}).encode()
    line = " ".join(label.split()).encode("utf-8", "replace")[: _LABEL - 1] + b"\n"
    body = b"".join([MAGIC, line, _LENGTH.pack(len(header)), header, *files.values()])
    return body + hmac.digest(secret, body, "sha256")


def unpack(data: bytes, key: str, secret: bytes) -> dict[str, bytes] | None:
    """Return the files of an entry if it is whole, written with this secret, and for this key."""
    body, tag = memoryview(data)[:-_TAG], data[-_TAG:]
    # Check the signature first: nothing is parsed that this user did not write.
    if not data.startswith(MAGIC) or not hmac.compare_digest(hmac.digest(secret, body, "sha256"), tag):
        return None
    at = data.index(b"\n", len(MAGIC)) + 1
    (length,) = _LENGTH.unpack_from(body, at)
    at += _LENGTH.size
    header = json.loads(bytes(body[at : at + length]))
    at += length
    if header["key"] != key:
        return None
    files = {}
    for name, size in header["files"]:
        if not is_inside(name):
            return None
        files[name] = bytes(body[at : at + size])
        at += size
    return files


def is_inside(name: str) -> bool:
    """Whether a name is a relative path that stays inside its folder."""
    path = PurePosixPath(name)
    clean = not path.is_absolute() and ".." not in path.parts and "\0" not in name and "\\" not in name
    return clean and bool(path.parts) and str(path) == name


def key_text(key: Key) -> str:
    """Return a key as text. Equal texts are the same key."""
    return key if isinstance(key, str) else json.dumps(dict(key), sort_keys=True)


def _label(path: Path) -> str:
    """Return an entry's label. It is not checked, so it is only for people."""
    try:
        with open(path, "rb") as file:
            head = file.read(len(MAGIC) + _LABEL)
    except OSError:
        return ""
    text = head.removeprefix(MAGIC).partition(b"\n")[0].decode("utf-8", "replace") if head.startswith(MAGIC) else ""
    return "".join(c for c in text if c.isprintable())


def _read(path: Path, most: int) -> bytes | None:
    """Return the bytes of a plain file, or None if it is anything else or longer than ``most``."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(file.fileno())
        return file.read() if stat.S_ISREG(about.st_mode) and about.st_size <= most else None


def _write(path: Path, data: bytes) -> None:
    """Write a new file that only its owner can read."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)


# Who may be trusted


def _secret() -> bytes:
    """Return the user's key. The first process that needs it creates it."""
    path = own_folder("config") / "kernel-cache.key"
    for _ in range(3):
        found = _read_secret(path)
        if found is not None:
            return found
        _make_secret(path)
    raise OSError(f"{path} cannot be made")


def _read_secret(path: Path) -> bytes | None:
    try:
        with open(path, "rb") as file:
            _check_private(path, os.fstat(file.fileno()), readable=False)
            found = file.read(_TAG + 1)
    except FileNotFoundError:
        return None
    if len(found) == _TAG:
        return found
    os.unlink(path)  # truncated or overwritten: entries signed with the old key are lost
    return None


def _make_secret(path: Path) -> None:
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    made = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    _write(made, secrets.token_bytes(_TAG))
    try:
        os.link(made, path)  # unlike a rename, a link never replaces another process's key
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        os.replace(made, path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(made)


def _check_private(path: Path, about: os.stat_result, readable: bool = True) -> None:
    """Raise if others could change a file or folder, or read it although they should not."""
    if about.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user")
    if about.st_mode & (0o022 if readable else 0o077):
        raise PermissionError(f"others than its owner have access to {path}; take it from them or remove it")


_told = False


def _warn(error: OSError, what: str) -> None:
    global _told
    with _OPEN:
        first, _told = not _told, True
    if first:
        _log.warning("%s (%s); results are the same, only later. CACHE_DIR names another folder", what, error)


# Which cache a build uses

_UNSET = object()
_forgone = False
_current: ContextVar[object] = ContextVar("kernel cache", default=_UNSET)


@contextlib.contextmanager
def using(cache: KernelCache | None) -> Iterator[None]:
    """Have builds in this thread use a cache (None: no cache) inside the context."""
    token = _current.set(cache)
    try:
        yield
    finally:
        _current.reset(token)


def forgo() -> None:
    """Keep no kernels in this process from now on, except inside `using`: most that it compiles have no later use."""
    global _forgone
    _forgone = True


def current() -> KernelCache | None:
    """Return the cache for a build: that of `using`, else the environment's."""
    cache = _current.get()
    if cache is _UNSET:
        return None if _forgone else KernelCache.of(Settings.from_environment())
    assert cache is None or isinstance(cache, KernelCache)
    return cache
