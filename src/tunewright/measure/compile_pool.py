"""Compile candidates ahead of time, several at once, in separate processes.

A search mostly waits for a compiler, and a compiler uses one core. Up to one process per core (`compiler`) therefore
compiles the next candidates, and the worker that checks and times them receives the programs. If the device shares the
cores of the host, nothing is compiled while something is timed. A device with its own cores allows both at once.

These processes decide nothing. The worker itself compiles each candidate that crashed the compiler, hung in it or gave
no program, and treats it like any other. Processes that turn out to be useless are given up.
"""

from __future__ import annotations

import math
import select
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..devices import build_options
from ..devices.host import free_bytes
from . import protocol
from .base import Candidate
from .child_process import ChildProcess, Lost

#: Largest number of processes, which is also the number of candidates that strategies are asked for at once. The number
#: beside a device with its own cores. Memory that must be free for each process.
MOST, MOST_BESIDE, EACH_BYTES = 8, 14, 768 << 20
#: Consecutive candidates without a program, per process, after which compiling ahead is given up.
FRUITLESS = 3
#: Candidates after which a process is replaced, because compilers leak memory.
OLD = 200
#: Seconds that a process may take to start.
START_SECONDS = 60.0


def useful(shares_cores: bool, threads: int = 0) -> int:
    """Return how many processes are worthwhile here; fewer than two are of no use.

    ``threads``: COMPILATION_NUM_THREADS.
    """
    cores = build_options.threads(threads)
    free = free_bytes()
    most = MOST if shares_cores else MOST_BESIDE
    room = most if free is None else int(free / 2 / EACH_BYTES)
    return max(0, min(cores if shares_cores else cores - 1, room, most))


@dataclass
class _Side:
    """A compiling process and its current job."""

    process: ChildProcess
    #: None while the process starts and while it is idle.
    job: tuple[protocol.Message, Candidate] | None = None
    is_ready: bool = False
    asked: int = 0

    @property
    def is_busy(self) -> bool:
        return self.job is not None or not self.is_ready


class Ahead:
    """Processes that compile candidates of one problem at a time. Not thread-safe.

    ``start`` creates a process. ``objection`` says what is wrong with the first message of a process, or returns an
    empty string.
    """

    def __init__(
        self,
        start: Callable[[], ChildProcess],
        objection: Callable[[protocol.Message], str],
        count: int,
        timeout: float,
    ) -> None:
        self._start, self._objection, self._timeout = start, objection, timeout
        #: number of processes that work at the same time; 0 once they were given up
        self.count = count
        #: number of processes started and of candidates compiled so far
        self.starts = self.compiled = 0
        self.sides: list[_Side] = []
        self._problem: protocol.Message | None = None
        self._waiting: deque[Candidate] = deque()
        self._done: dict[Candidate, protocol.Programs] = {}
        #: the same three for the problem that comes next
        self._next: protocol.Message | None = None
        self._later: deque[Candidate] = deque()
        self._foreseen: dict[Candidate, protocol.Programs] = {}
        self._fruitless, self._started = 0, False

    @property
    def is_started(self) -> bool:
        return self._started and self.count > 0

    def start(self) -> None:
        """Start the processes without waiting for them."""
        self._started = True
        self._fill(self.count)

    def pose(self, problem: protocol.Message) -> None:
        """Turn to a problem, given as the message that a worker receives."""
        if self._next is not None and self._next["problem"] == problem["problem"]:
            self._problem, self._waiting, self._done = self._next, self._later, self._foreseen
        else:
            self._problem, self._waiting, self._done = problem, deque(), {}
        self._next, self._later, self._foreseen = None, deque(), {}

    def foresee(self, problem: protocol.Message, candidates: Iterable[Candidate]) -> None:
        """Announce a problem that will be posed next. Idle processes begin with its candidates."""
        if self.is_started:
            self._next, self._later, self._foreseen = problem, deque(candidates), {}
            self._hand_out()

    def submit(self, candidates: Iterable[Candidate]) -> None:
        """Queue candidates and begin to compile them."""
        begun = {side.job[1] for side in self.sides if side.job is not None and side.job[0] is self._problem}
        for candidate in candidates:
            known = candidate in self._done or candidate in begun or candidate in self._waiting
            if self.is_started and not known:
                self._waiting.append(candidate)
        self._hand_out()

    def wait(self, candidate: Candidate | None, seconds: float = math.inf) -> bool:
        """Wait until nothing is queued or being compiled, or at least not ``candidate``.

        Returns False if that takes longer than ``seconds``; the queue is then cleared. Without ``candidate`` the busy
        processes are ended too. With one they keep running beside the timing, because restarting a process takes
        seconds and costs more than the core that it uses.
        """
        until = time.monotonic() + seconds
        while self._concerns(candidate):
            left = until - time.monotonic()
            if left <= 0:
                self._waiting.clear()
                if candidate is None:
                    self._drop([side for side in self.sides if side.is_busy])
                return False
            self._look(left)
        return True

    def take(self, candidate: Candidate) -> protocol.Programs:
        """Return the programs of a candidate; empty if there are none."""
        return self._done.pop(candidate, {})

    def close(self) -> None:
        """End all processes."""
        self._started = False
        for kept in (self._waiting, self._done, self._later, self._foreseen):
            kept.clear()
        self._drop(list(self.sides))

    def abandon(self) -> None:
        """Forget the processes in a forked child: they belong to the parent."""
        for side in self.sides:
            side.process.abandon()
        self.sides.clear()
        self._waiting.clear()
        self._later.clear()
        self._started = False

    # ---- the processes ----------------------------------------------------------------------------------------------

    def _concerns(self, candidate: Candidate | None) -> bool:
        if candidate is None:
            return bool(self._waiting) or any(side.is_busy for side in self.sides)
        running = (side.job[1] for side in self.sides if side.job is not None and side.job[0] is self._problem)
        return candidate in self._waiting or candidate in running

    def _hand_out(self) -> None:
        """Give work to idle processes, and start new ones if there are too few."""
        idle = [side for side in self.sides if not side.is_busy]
        self._drop([side for side in idle if side.asked >= OLD or not side.process.is_running])
        wanted = len(self._waiting) + len(self._later) + sum(side.is_busy for side in self.sides)
        self._fill(min(self.count, wanted))
        for problem, waiting in ((self._problem, self._waiting), (self._next, self._later)):
            for side in self.sides:
                if waiting and not side.is_busy and problem is not None:
                    side.job = problem, (candidate := waiting.popleft())
                    side.asked += 1
                    request = {"do": "build", "problem": problem["problem"], "number": side.asked}
                    request["candidates"] = protocol.candidates_json([candidate])
                    side.process.begin(request, self._timeout)

    def _fill(self, count: int) -> None:
        while len(self.sides) < count:
            try:
                side = _Side(self._start())
            except OSError:
                self.give_up()
                return
            self.sides.append(side)
            self.starts += 1
            side.process.begin(None, START_SECONDS)

    def _look(self, seconds: float) -> None:
        """Sleep until a process has an answer, and take it."""
        poll = select.poll()
        busy = [side for side in self.sides if side.is_busy]
        for side in busy:
            side.process.register(poll)
        poll.poll(math.ceil(min(seconds, 0.2) * 1e3))  # short waits, because deaths and time limits must be checked too
        for side in busy:
            if side not in self.sides:  # another process's answer made this object give up
                continue
            try:
                message = side.process.answer(0.0)
                if message is not None:
                    self._heard(side, message)
            except (Lost, protocol.Broken):
                self._lost(side)
        self._hand_out()

    def _heard(self, side: _Side, message: protocol.Message) -> None:
        if not side.is_ready:
            side.is_ready = True
            if self._objection(message):
                self.give_up()
            return
        if message.get("kind") != "answer" or message.get("number") != side.asked or side.job is None:
            raise protocol.Broken("another answer")
        found = protocol.programs(message.get("programs"))
        (problem, candidate), side.job = side.job, None
        self._count(bool(found))
        if problem is self._problem and found:
            self._done[candidate] = found
        elif problem is self._next and found:
            self._foreseen[candidate] = found

    def _lost(self, side: _Side) -> None:
        if not side.is_ready:
            self.give_up()  # it would not start the next time either
            return
        self._drop([side])
        self._count(False)

    def _count(self, was_of_use: bool) -> None:
        self.compiled += was_of_use
        self._fruitless = 0 if was_of_use else self._fruitless + 1
        if self._fruitless >= FRUITLESS * self.count:
            self.give_up()

    def give_up(self) -> None:
        """Stop compiling ahead for good; the worker compiles everything from now on."""
        self.count = 0
        self.close()

    def _drop(self, sides: Iterable[_Side]) -> None:
        for side in sides:
            side.process.end()
            self.sides.remove(side)
