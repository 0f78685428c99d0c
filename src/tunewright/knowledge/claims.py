"""Claims beside a knowledge base, so that no two processes tune the same layer at the same time.

A claim is a small file. Its owner renews it, and it expires by itself, so a killed process blocks others only for a
short time. Claims are advisory. If two processes take a claim at the same instant, or the folder is read-only, a layer
is tuned twice, which does no harm. Claims need no locks and therefore work in a network folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

from .files import make_folder

#: Seconds for which a claim holds unless renewed, and seconds after which its owner renews it.
EXPIRY, RENEWAL = 120.0, 20.0
#: Largest file that is read as a claim.
MOST_BYTES = 4096


class Claims:
    """The claims of one owner in a folder. Not thread-safe."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = folder / "claims", clock
        self.owner = f"{socket.gethostname()[:64]}-{os.getpid()}-{secrets.token_hex(4)}"
        #: what this owner has claimed, and when each claim was last written
        self._mine: dict[str, float] = {}

    def take(self, what: str) -> bool:
        """Claim something. Returns False if another process has claimed it."""
        path = self._path(what)
        try:
            make_folder(self._folder)
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileExistsError:
                if self._holder(path) not in (None, self.owner):
                    return False
                self._replace(path)
            else:
                with open(descriptor, "w", encoding="ascii") as file:
                    file.write(self._text())
        except OSError:  # the folder is not writable, so no other process can be told
            pass
        self._mine[what] = self._clock()
        return True

    def renew(self) -> None:
        """Renew all claims that are due."""
        now = self._clock()
        for what, since in self._mine.items():
            if now - since >= RENEWAL:
                self._mine[what] = now
                with contextlib.suppress(OSError):
                    self._replace(self._path(what))

    def give_back(self, what: str) -> None:
        """Give up one claim."""
        if self._mine.pop(what, None) is not None:
            path = self._path(what)
            if self._holder(path) == self.owner:
                with contextlib.suppress(OSError):
                    path.unlink()

    def close(self) -> None:
        """Give up all claims."""
        for what in list(self._mine):
            self.give_back(what)

    def _path(self, what: str) -> Path:
        return self._folder / f"{hashlib.sha256(what.encode('utf-8', 'replace')).hexdigest()[:32]}.json"

    def _text(self) -> str:
        return json.dumps({"owner": self.owner, "until": self._clock() + EXPIRY})

    def _replace(self, path: Path) -> None:
        new = path.with_name(f"{path.name}.{self.owner}")
        try:
            new.write_text(self._text(), encoding="ascii")
            os.replace(new, path)
        except OSError:
            new.unlink(missing_ok=True)
            raise

    def _holder(self, path: Path) -> str | None:
        """Return the owner of a claim, or None. An unreadable claim counts as another process's until it expires."""
        try:
            with path.open("rb") as file:
                data, written = file.read(MOST_BYTES), os.fstat(file.fileno()).st_mtime
        except OSError:
            return None
        now = self._clock()
        try:
            found = json.loads(data)
            owner, until = str(found["owner"]), float(found["until"])
        except (ValueError, TypeError, KeyError, RecursionError):
            owner, until = "another process", written + EXPIRY
        # a date far in the future comes from a wrong clock or a damaged file; it must not block other processes forever
        return owner if now < until <= now + 2 * EXPIRY else None


class MachineTurn:
    """A lock with which the processes that share a knowledge base's folder take turns to measure on this machine."""

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            make_folder(folder)
            self._descriptor = os.open(folder / "measuring.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def take(self) -> bool:
        """Try to take the lock; True on success. Always True where the folder supports no locks."""
        if self._descriptor is None:
            return True
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            self._descriptor = None
        return True

    def give_back(self) -> None:
        """Release the lock for another process."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
