"""Compiling ahead: several candidates at the same time, in processes of their own, while nothing is timed that they
could disturb.

A search mostly waits for a compiler, which uses one core. So the candidates that are attempted next are compiled by as
many processes as there are cores (`compiler`), and the worker that checks and times them gets the programs. On a device
that shares the cores of the host nothing is compiled while something is timed; on one with cores of its own it is.

None of it decides anything. A candidate that crashes the compiler, hangs in it or gives no program is compiled by the
worker like any other, with all that follows; where these processes are of no use, they are not used any more.
"""

from __future__ import annotations

import math
import select
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..devices import building
from ..devices.host import free_bytes
from . import wire
from .measure import Candidate
from .process import Lost, Process

#: most processes (strategies are asked for as many candidates at once), also beside a device with cores of its own, and
#: the memory that each should find free
MOST, MOST_BESIDE, EACH_BYTES = 8, 14, 768 << 20
#: candidates without a program, in a row and for each process, after which there is no point in going on
FRUITLESS = 3
#: a process is replaced after this number of candidates, because compilers leak
OLD = 200
#: seconds that a process has to start in
START_SECONDS = 60.0


def useful(shares_cores: bool, threads: int = 0) -> int:
    """How many processes are worth having here; fewer than two are none. ``threads``: COMPILATION_NUM_THREADS."""
    cores = building.threads(threads)
    free = free_bytes()
    most = MOST if shares_cores else MOST_BESIDE
    room = most if free is None else int(free / 2 / EACH_BYTES)
    return max(0, min(cores if shares_cores else cores - 1, room, most))


@dataclass
class _Side:
    """A process, and what it is at."""

    process: Process
    #: None until it is ready, and while it is idle
    job: tuple[wire.Message, Candidate] | None = None
    is_ready: bool = False
    asked: int = 0

    @property
    def is_busy(self) -> bool:
        return self.job is not None or not self.is_ready


class Ahead:
    """Processes that compile candidates of one problem at a time. Not safe to use from several threads.

    ``start`` makes a process, ``objection`` says what is wrong with its first message (empty: nothing).
    """

    def __init__(
        self, start: Callable[[], Process], objection: Callable[[wire.Message], str], count: int, timeout: float
    ) -> None:
        self._start, self._objection, self._timeout = start, objection, timeout
        #: how many work at the same time; none: it turned out to be of no use
        self.count = count
        #: processes that were started so far, and candidates that were compiled
        self.starts = self.compiled = 0
        self.sides: list[_Side] = []
        self._problem: wire.Message | None = None
        self._waiting: deque[Candidate] = deque()
        self._done: dict[Candidate, wire.Programs] = {}
        #: the same of the problem that comes next
        self._next: wire.Message | None = None
        self._later: deque[Candidate] = deque()
        self._foreseen: dict[Candidate, wire.Programs] = {}
        self._fruitless, self._started = 0, False

    @property
    def is_started(self) -> bool:
        return self._started and self.count > 0

    def start(self) -> None:
        """Start the processes, without waiting for them."""
        self._started = True
        self._fill(self.count)

    def pose(self, problem: wire.Message) -> None:
        """Turn to a problem, in the form in which a worker is told of it."""
        if self._next is not None and self._next["problem"] == problem["problem"]:
            self._problem, self._waiting, self._done = self._next, self._later, self._foreseen
        else:
            self._problem, self._waiting, self._done = problem, deque(), {}
        self._next, self._later, self._foreseen = None, deque(), {}

    def foresee(self, problem: wire.Message, candidates: Iterable[Candidate]) -> None:
        """A problem that will be posed: idle processes begin with its candidates."""
        if self.is_started:
            self._next, self._later, self._foreseen = problem, deque(candidates), {}
            self._hand_out()

    def submit(self, candidates: Iterable[Candidate]) -> None:
        """Begin with candidates."""
        begun = {side.job[1] for side in self.sides if side.job is not None and side.job[0] is self._problem}
        for candidate in candidates:
            known = candidate in self._done or candidate in begun or candidate in self._waiting
            if self.is_started and not known:
                self._waiting.append(candidate)
        self._hand_out()

    def wait(self, candidate: Candidate | None, seconds: float = math.inf) -> bool:
        """Wait until nothing is under way, or at least not a certain candidate. False if that takes longer than
        ``seconds``: then nothing more begins. What is under way ends as well, unless others are timed beside it:
        processes that take seconds to start are worth more than a core.
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

    def take(self, candidate: Candidate) -> wire.Programs:
        """The programs of a candidate, if there are any."""
        return self._done.pop(candidate, {})

    def close(self) -> None:
        """End all processes."""
        self._started = False
        for kept in (self._waiting, self._done, self._later, self._foreseen):
            kept.clear()
        self._drop(list(self.sides))

    def abandon(self) -> None:
        """In a process that was just forked: they are those of the other."""
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
        """Give work to idle processes; start new ones if there are too few."""
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
                    request["candidates"] = wire.candidates_json([candidate])
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
        """Sleep until one of them has something to say, and take it."""
        poll = select.poll()
        busy = [side for side in self.sides if side.is_busy]
        for side in busy:
            side.process.register(poll)
        poll.poll(math.ceil(min(seconds, 0.2) * 1e3))  # deaths and time limits are looked for as well
        for side in busy:
            if side not in self.sides:  # another one made it give up
                continue
            try:
                message = side.process.answer(0.0)
                if message is not None:
                    self._heard(side, message)
            except (Lost, wire.Broken):
                self._lost(side)
        self._hand_out()

    def _heard(self, side: _Side, message: wire.Message) -> None:
        if not side.is_ready:
            side.is_ready = True
            if self._objection(message):
                self.give_up()
            return
        if message.get("kind") != "answer" or message.get("number") != side.asked or side.job is None:
            raise wire.Broken("another answer")
        found = wire.programs(message.get("programs"))
        (problem, candidate), side.job = side.job, None
        self._count(bool(found))
        if problem is self._problem and found:
            self._done[candidate] = found
        elif problem is self._next and found:
            self._foreseen[candidate] = found

    def _lost(self, side: _Side) -> None:
        if not side.is_ready:
            self.give_up()  # it would not start the next time
            return
        self._drop([side])
        self._count(False)

    def _count(self, was_of_use: bool) -> None:
        self.compiled += was_of_use
        self._fruitless = 0 if was_of_use else self._fruitless + 1
        if self._fruitless >= FRUITLESS * self.count:
            self.give_up()

    def give_up(self) -> None:
        """From now on the worker compiles everything."""
        self.count = 0
        self.close()

    def _drop(self, sides: Iterable[_Side]) -> None:
        for side in sides:
            side.process.end()
            self.sides.remove(side)

