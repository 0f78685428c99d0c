"""A child process behind a channel, with limits on its time and output, that is certain to end.

The parent sleeps until something happens. A process that hangs, floods its output, dies or sends invalid data is ended
together with all processes that it started. `Lost` describes what happened.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence

from ..search.base import Status
from . import protocol

#: Bytes that a process may print during one request; bytes of its last output that are kept; and characters shown.
MOST_OUTPUT, KEPT_OUTPUT, SHOWN_OUTPUT = 8 << 20, 4096, 200
#: Seconds that a process has to disappear after it hung up or was killed.
GONE = 2.0


class Lost(Exception):
    """The process is gone or had to be ended. ``code``: its exit status if it died, or the negative signal number."""

    def __init__(self, status: Status, why: str, code: int | None = None) -> None:
        super().__init__(why)
        self.status, self.why, self.code = status, why, code


class ChildProcess:
    """One process from start to end.

    Its command gets two more arguments: the descriptors of the channel and of the lifeline.

    The lifeline is a pipe that reports only the end of the parent.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], activity: int | None = None) -> None:
        """``activity``: descriptor of an `Activity`, for a process that works beside requests.

        Such a process stays in this session. Linux first divides the processor among sessions (autogroups). In a
        session of its own even a process of least priority would get as much as the whole serving session.
        """
        self._owner, self._open = os.getpid(), True
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        listening, self._lifeline = os.pipe()
        self._output, printing = os.pipe()
        os.set_blocking(self._output, False)
        self._reader, self._waiting = protocol.Reader(), deque[protocol.Message]()
        self._tail, self._printed, self._outgoing = b"", 0, b""
        self._began = self._heard = self._step = self._whole = 0.0
        self._late = False
        inherited = () if activity is None else (activity,)
        try:
            self._child = subprocess.Popen(
                [*command, str(theirs.fileno()), str(listening)], stdin=subprocess.DEVNULL, stdout=printing,
                stderr=printing, env=environment, pass_fds=(theirs.fileno(), listening, *inherited),
                start_new_session=activity is None, process_group=None if activity is None else 0,
            )  # fmt: skip
        except BaseException:
            self._close()
            raise
        finally:
            theirs.close()
            os.close(listening)
            os.close(printing)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def is_running(self) -> bool:
        """Whether the process runs and belongs to this process, not to the parent that this one was forked from."""
        return self._open and self._owner == os.getpid() and not self._has_died()

    @property
    def has_sent(self) -> bool:
        """Whether the last request is completely sent."""
        return not self._outgoing

    def ask(self, request: protocol.Message | None, step: float, whole: float = math.inf) -> protocol.Message:
        """Send a request and return the answer; with None, wait for the first message.

        ``step``: maximum seconds between signs of life. ``whole``: maximum seconds until the answer.
        """
        self.begin(request, step, whole)
        while (message := self.answer(math.inf)) is None:
            pass
        return message

    def begin(self, request: protocol.Message | None, step: float, whole: float = math.inf) -> None:
        """Send a request without waiting; `answer` returns the result."""
        self._outgoing = b"" if request is None else protocol.pack(request)
        self._printed = 0
        self._began = self._heard = time.monotonic()
        self._step, self._whole, self._late = step, whole, False

    def answer(self, seconds: float) -> protocol.Message | None:
        """Return the answer to the current request; None if nothing came within ``seconds``."""
        try:
            return self._answer(time.monotonic() + seconds)
        except protocol.Broken as error:
            self.end()
            raise Lost(Status.CRASHED, f"its process sent {error}{self._said()}") from None
        except BaseException:  # also on Ctrl-C: a late answer must not be mistaken for the next one
            self.end()
            raise

    def _answer(self, until: float) -> protocol.Message | None:
        looked = False
        while True:
            while self._waiting:
                message, self._heard = self._waiting.popleft(), time.monotonic()
                if message.get("kind") != "alive":
                    return message
            now = time.monotonic()
            left = min(self._heard + self._step, self._began + self._whole) - now
            if self._late and left <= 0:
                self.end()
                in_all = self._heard + self._step > self._began + self._whole
                limit = f"{self._whole:.4g} s in all" if in_all else f"{self._step:.4g} s"
                raise Lost(Status.TIMEOUT, f"took longer than {limit}{self._said()}")
            if looked and now >= until:
                return None
            self._late = left <= 0  # this process may have slept itself, so it checks once more
            self._wait(max(min(left, until - now), 0.0))
            looked = True

    def register(self, poll: select.poll) -> None:
        """Register the process's descriptors with a poll object."""
        poll.register(self._channel, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        if self._output >= 0:
            poll.register(self._output, select.POLLIN)

    def _wait(self, seconds: float) -> None:
        """Sleep until something happens, and process it."""
        poll = select.poll()
        self.register(poll)
        # A process that inherited the other end of the channel may outlive the child, so the child's death is checked
        # too.
        events = dict(poll.poll(math.ceil(min(seconds, 1.0) * 1e3)))
        if self._output in events:
            self._listen()
            if self._printed > MOST_OUTPUT:
                self.end()
                raise Lost(Status.CRASHED, f"flooded its output with {self._printed} bytes")
        try:
            self._talk(events.get(self._channel.fileno(), 0))
        except (ConnectionResetError, BrokenPipeError):
            raise self._loss() from None

    def _talk(self, event: int) -> None:
        if event & select.POLLIN:
            data = self._channel.recv(1 << 20)
            if not data:
                raise ConnectionResetError
            self._waiting.extend(self._reader.feed(data))
        elif event & (select.POLLHUP | select.POLLERR) or self._has_died():
            raise ConnectionResetError
        elif event & select.POLLOUT:
            self._outgoing = self._outgoing[self._channel.send(self._outgoing) :]

    def _listen(self) -> None:
        """Read what the process printed."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._output, 1 << 16)
            if not data:
                os.close(self._output)
                self._output = -1
            self._printed += len(data)
            self._tail = (self._tail + data)[-KEPT_OUTPUT:]

    def _said(self) -> str:
        """Return the last line that the process printed.

        Only one line, because reasons are stored and shared, and tracebacks contain paths.
        """
        lines = self._tail.decode("utf-8", "replace").strip().splitlines()
        text = "".join(c for c in lines[-1][-SHOWN_OUTPUT:] if c.isprintable()) if lines else ""
        return f" (it printed: {text})" if text else ""

    # ---- its end -----------------------------------------------------------------------------------------------------

    def _has_died(self) -> bool:
        """Whether the process has died. Does not reap it, so that no other process can get its number yet."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def _loss(self) -> Lost:
        """Determine how the process ended after it hung up."""
        late = time.monotonic() + GONE
        while not (died := self._has_died()) and time.monotonic() < late:
            time.sleep(0.005)
        before = -1
        while self._output >= 0 and before < self._printed <= MOST_OUTPUT:
            before = self._printed
            self._listen()
        self.end()
        code = self._child.returncode
        if not died or code is None:
            return Lost(Status.CRASHED, f"its process hung up{self._said()}")
        name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return Lost(Status.CRASHED, f"its process ended with {name}{self._said()}", code)

    def end(self, patience: float = 0.0) -> None:
        """End the process and everything that it started.

        With ``patience``, an idle one gets these seconds to end by itself.
        """
        if not self._open:
            return
        if self._owner != os.getpid():
            self.abandon()
            return
        if patience:
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)
            late = time.monotonic() + patience
            while not self._has_died() and time.monotonic() < late:
                time.sleep(0.005)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(GONE)
        self._close()

    def abandon(self) -> None:
        """Forget the process in a forked child of its owner."""
        self._child.returncode = 0  # it is not a child of this process, so there is nothing to wait for
        self._close()

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._channel.close()
            os.close(self._lifeline)
            if self._output >= 0:
                os.close(self._output)
                self._output = -1
