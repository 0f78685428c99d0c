"""Measure in another process: a candidate may crash, hang, fill memory or report false times without harm.

`Isolated` is a `Measurer` that forwards requests to a worker (`worker`), which runs a `bench.LocalMeasurer`. One worker
serves many candidates and problems. It is replaced after every fault, so that no candidate is blamed for what another
left behind. The caller's process is idle meanwhile, and its clock checks the worker's. If the device compiles kernels,
further processes compile the next candidates (`ahead`).
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, TypeVar

from ..devices.base import Device, Target
from ..devices.host import cpu_count
from ..errors import DeviceError, InputError
from ..knowledge.record import FAULTS
from ..search.base import Status
from ..search.space import Config
from ..settings import Settings, child_environment
from ..solvers import problem_json
from ..solvers.base import Problem
from . import compile_pool as ahead
from . import protocol
from .base import Attempt, Candidate, Measurer, Race, Regime
from .child_process import ChildProcess, Lost
from .compile_pool import Ahead
from .local import LEAST_TURNS, LocalMeasurer

#: Maximum seconds until a worker is ready, and until a problem is posed. No candidate causes them, so they are
#: generous.
START_SECONDS, POSE_SECONDS = 60.0, 120.0
#: Seconds that an idle worker has to end by itself.
PATIENCE = 0.5
#: Growth of a worker's memory since its problem was posed, after which it is replaced. With a device that has its own
#: memory the limit is at least half of the worker's allowance, since results pass through pinned memory.
MOST_GROWTH = 1 << 30
#: Minimum memory that a process is allowed. By default a worker gets half of Tunewright's limit, and the compiling
#: processes together as much. Beside a device with its own cores each must load torch and a driver.
LEAST_MEMORY, LEAST_BESIDE = 1 << 30, 4 << 30
#: TUNE_TIMEOUT applies to each step of an attempt (compiling and checking, every turn); the whole gets this many.
STEPS = 3
#: A shorter timeout would measure the machine and not the candidate.
LEAST_TIMEOUT = 1.0
#: Expected seconds of a search from which on compiling ahead is worthwhile.
WORTHWHILE = 3.0
#: A race may take this many times the expected time of its turns, plus TUNE_TIMEOUT.
PATIENCE_IN_RACES = 20
#: Candidates of a problem whose programs are kept until the next problem.
MOST_PROGRAMS = 1000
#: Minimum seconds of a turn, with preparation and checks.
LEAST_TURN = 0.010

T = TypeVar("T")


class Unposed(DeviceError):
    """Raised if the worker does not survive posing the problem. No candidate is to blame."""


class Doubt(enum.Enum):
    """What a fault means for a candidate if it does not repeat."""

    OF_ITS_GUILT = "it may have done it: it is not to be used, and not to be blamed for ever"
    OF_THE_MACHINE = "it cannot have done it"


class Worker:
    """A worker process and its state."""

    def __init__(self, process: ChildProcess) -> None:
        self.process = process
        #: the request that posed the problem, and the worker's refusal
        self.posed: protocol.Message | None = None
        self.refusal: str | None = None
        #: candidates that this process found right
        self.known: set[tuple[str, Config]] = set()
        #: bytes of memory when the problem was posed, and now
        self.base = self.resident = 0
        self._asked = 0

    def ask(
        self, request: protocol.Message, step: float, whole: float = math.inf
    ) -> tuple[protocol.Message, str | None]:
        """Send a request; return the answer, and an objection to the worker's clock, if any. Raises `Lost`."""
        self._asked += 1
        began = time.monotonic()
        answer = self.process.ask({**request, "number": self._asked}, step, whole)
        took = time.monotonic() - began
        try:
            if answer.get("kind") != "answer" or answer.get("number") != self._asked:
                raise protocol.Broken(f"{str(answer)[:80]} where an answer belongs")
            self.resident = protocol.whole(answer.get("resident"))
            objection = protocol.Clock.of(answer.get("clock")).objection(took)
        except protocol.Broken as error:
            self.process.end()
            raise Lost(Status.CRASHED, f"its process sent {error}") from None
        return answer, objection

    def read(self, parse: Callable[[Any], T], answer: protocol.Message) -> T:
        """Parse the value of an answer. Raises `Lost` if it is malformed."""
        try:
            return parse(answer.get("value"))
        except protocol.Broken as error:
            self.process.end()
            raise Lost(Status.CRASHED, f"its process sent {error}") from None


class Isolated(Measurer):
    """Measures in a worker process, which starts on first use.

    ``timeout``: seconds for each step of a candidate. ``memory_bytes``: maximum memory that the worker may allocate.
    ``target``: target that the worker's device must have, if it is to be checked. ``activity``: descriptor of an
    `Activity` and the number of its pause word; the worker times nothing while a request runs, however long that takes.
    ``apart``: compile even single candidates in a separate process that runs no kernels, so that their programs may be
    kept.
    """

    def __init__(
        self,
        device_name: str,
        timeout: float,
        *,
        settings: Settings | None = None,
        python: str = sys.executable,
        memory_bytes: int | None = None,
        target: Target | None = None,
        activity: tuple[int, int] | None = None,
        apart: bool = False,
    ) -> None:
        self._activity, self._apart = activity, apart
        self.device_name, self.timeout, self.python, self.target = device_name, timeout, python or "python3", target
        self.settings = Settings.from_environment() if settings is None else settings
        self._shares_cores = target is None or target.traits.shares_cores
        least = LEAST_MEMORY if self._shares_cores else LEAST_BESIDE
        self.memory_bytes = memory_bytes or max(least, self.settings.max_memory_bytes // 2)
        #: number of workers started so far
        self.starts = 0
        self._lock = threading.RLock()
        #: at most one; a list, so that the finaliser can refer to it without keeping this object alive
        self._workers: list[Worker] = []
        #: The next worker, started while this one works, because torch and a GPU's context take seconds. Not used if it
        #: would take cores from timed kernels.
        self._spare: list[Worker] = []
        self._problem: protocol.Message | None = None
        self._regime: Regime | None = None
        #: seconds of candidates of the posed problem
        self._seconds: dict[tuple[str, Config], float] = {}
        self._programs: dict[tuple[str, Config], protocol.Programs] = {}
        written = target is not None and target.language is not None
        count = ahead.useful(self._shares_cores, self.settings.compilation_num_threads) if written else 0
        memory = max(least, self.memory_bytes // max(count, 1))
        start = partial(_start, self._command("compile_worker", memory), self.settings)
        if apart and written:
            count = max(count, 1)
        self._ahead = Ahead(start, partial(_objection, target), count if count > 1 or apart else 0, timeout)
        self._finalizer = weakref.finalize(self, _end, self._workers, self._spare, self._ahead)
        _LIVE.add(self)

    # ---- methods of a measurer ---------------------------------------------------------------------------------------

    def pose(self, problem: Problem, seed: int = 0, regime: str = "cold") -> str | None:
        with self._lock:
            self._regime = None
            self._seconds.clear()
            self._programs.clear()
            try:
                self._problem = {"do": "pose", "problem": problem_json.to_json(problem), "seed": seed, "regime": regime}
                protocol.pack(self._problem)
                self._ahead.pose(self._problem)
            except (InputError, protocol.Broken) as error:
                self._problem = None
                return str(error)
            try:
                return self._posed().refusal
            except Unposed as error:
                return error.what

    def alike(self, candidate: Candidate, other: Candidate) -> None:
        with self._lock:
            programs = self._programs.get(_plain(other))
            if programs:
                self._programs[_plain(candidate)] = programs

    def programs(self, candidate: Candidate) -> protocol.Programs:
        with self._lock:
            return self._programs.get(_plain(candidate), {})

    def regime(self) -> Regime:
        with self._lock:
            if self._regime is None:
                raise RuntimeError("no problem was posed")
            return self._regime

    def expect(self, seconds: float) -> None:
        with self._lock:
            if seconds >= WORTHWHILE or not self._shares_cores:  # such processes take no cores from timed kernels
                self._ahead.start()
            if not (self._shares_cores or self._workers or self._spare):
                with contextlib.suppress(OSError):  # it is started when it is needed
                    self._spare.append(self._started())

    @property
    def ahead(self) -> int:
        if not self._ahead.is_started:
            return 1
        # With a device that has its own cores, one batch compiles while another is timed.
        return self._ahead.count if self._shares_cores else 2 * self._ahead.count

    @property
    def beside(self) -> bool:
        return self._ahead.is_started and not self._shares_cores

    def prepare(self, candidates: Sequence[Candidate]) -> None:
        with self._lock:
            known = self._workers[0].known if self._workers else set()
            new = [who for who in map(_plain, candidates) if who not in known]
            if len(new) > 1 or self._apart:  # the worker compiles a single candidate just as fast
                self._ahead.submit(new)

    def foresee(self, problem: Problem, candidates: Sequence[Candidate]) -> None:
        with self._lock, contextlib.suppress(InputError):  # the caller gets the error when it poses the problem
            if self.beside:
                self._ahead.foresee({"problem": problem_json.to_json(problem)}, map(_plain, candidates[: self.ahead]))

    def ready(self, candidate: Candidate, seconds: float) -> bool:
        with self._lock:
            return self._ahead.wait(None if self._shares_cores else _plain(candidate), seconds)

    def attempt(self, candidate: Candidate, limit: float = math.inf) -> Attempt:
        with self._lock:
            self._calm()
            compiled = self._ahead.take(_plain(candidate))
            if compiled and len(self._programs) < MOST_PROGRAMS:
                self._programs[_plain(candidate)] = compiled
            programs = protocol.programs_json(compiled)
            found, doubt = self._attempt(candidate, limit, programs)
            if doubt is None:
                return found
            # Other programs can also kill or delay a process, so the fault counts only if it happens again.
            again, still = self._attempt(candidate, limit, programs)
            if again.status is Status.OK and doubt is Doubt.OF_ITS_GUILT:
                return Attempt(Status.FAILED, f"{found.why}; a second attempt succeeded")
            return self._unjudged(again) if still is Doubt.OF_THE_MACHINE else again

    def race(self, candidates: Sequence[Candidate], rounds: int) -> Race:
        with self._lock:
            self._calm()
            try:
                return self._race(candidates, rounds)
            except _Spoilt:
                pass
            # The culprit is unknown: run each candidate alone, then those that pass together.
            alone = {who: self._alone(who, rounds) for who in dict.fromkeys(map(_plain, candidates))}
            fallen = {i: bad for i, who in enumerate(candidates) if (bad := alone[_plain(who)]) is not None}
            staying = [i for i in range(len(candidates)) if i not in fallen]
            try:
                found = self._race([candidates[i] for i in staying], rounds) if staying else Race(())
            except _Spoilt as spoilt:
                bad = Attempt(Status.FAILED, f"only when measured together with other candidates: {spoilt.attempt.why}")
                found = Race(((),) * len(staying), dict.fromkeys(range(len(staying)), bad))
            rows: list[tuple[float, ...]] = [()] * len(candidates)
            for i, row in zip(staying, found.samples, strict=True):
                rows[i] = row
            return Race(tuple(rows), fallen | {staying[k]: bad for k, bad in found.fallen.items()})

    def close(self) -> None:
        with self._lock:
            _end(self._workers, self._spare, self._ahead)

    def _calm(self) -> None:
        """Wait for compilation to end if it shares cores with timed kernels."""
        if self._shares_cores:
            self._ahead.wait(None)

    # ---- one request -------------------------------------------------------------------------------------------------

    def _attempt(self, candidate: Candidate, limit: float, programs: list[Any]) -> tuple[Attempt, Doubt | None]:
        """Attempt a candidate once. Also return a `Doubt` if something else may have caused the fault."""
        worker = self._posed()
        if worker.refusal is not None:
            return Attempt(Status.FAILED, worker.refusal), None
        who = protocol.candidates_json([candidate])
        request = {"do": "attempt", "candidates": who, "limit": limit, "programs": programs}
        try:
            answer, objection = worker.ask(request, self.timeout, self._whole(STEPS * self.timeout))
            found = worker.read(protocol.attempt, answer)
        except Lost as lost:
            failed = Attempt(lost.status, lost.why)
            return self._unjudged(failed) if lost.status is Status.TIMEOUT else failed, _doubt(lost)
        doubt = None
        if found.status is Status.OK:
            if not _is_plausible(found.samples, 1 if found.probed else LEAST_TURNS):
                found = _without(found, f"impossible times: {list(found.samples[:4])}")
            elif objection is not None:
                found, doubt = _without(found, objection), Doubt.OF_THE_MACHINE
            else:
                worker.known.add(_plain(candidate))
                self._seconds[_plain(candidate)] = median(found.samples)
        self._look_after(worker, found.status)
        return found, doubt

    def _race(self, candidates: Sequence[Candidate], rounds: int) -> Race:
        worker = self._posed()
        if worker.refusal is not None:
            refused = Attempt(Status.FAILED, worker.refusal)
            return Race(((),) * len(candidates), dict.fromkeys(range(len(candidates)), refused))
        who = [_plain(candidate) for candidate in candidates]
        turns = sum(max(self._seconds.get(c, self.timeout), LEAST_TURN) for c in who)
        new = len(set(who) - worker.known)  # unknown to this process, so they are attempted first
        whole = self.timeout * (1 + STEPS * new) + PATIENCE_IN_RACES * (rounds + 1) * turns
        request = {"do": "race", "candidates": protocol.candidates_json(candidates), "rounds": rounds}
        try:
            answer, objection = worker.ask(request, self.timeout, self._whole(whole))
            found = worker.read(lambda data: protocol.race(data, len(candidates)), answer)
        except Lost as lost:
            raise _Spoilt(Attempt(lost.status, lost.why)) from None
        fallen = dict(found.fallen)
        for i, row in enumerate(found.samples):
            if i not in fallen and (len(row) != rounds or not _is_plausible(row, 0)):
                fallen[i] = Attempt(Status.WRONG, f"impossible times: {list(row[:4])} in {rounds} rounds")
        if objection is not None:
            worker.process.end()
            raise _Spoilt(self._unjudged(Attempt(Status.WRONG, objection)))
        worker.known |= {c for i, c in enumerate(who) if i not in fallen}
        for attempt in fallen.values():
            self._look_after(worker, attempt.status)
        return replace(found, fallen=fallen)

    def _unjudged(self, attempt: Attempt) -> Attempt:
        """Weaken a verdict based on clocks if requests have priority: they may have used the processor meanwhile."""
        if self._activity is None:
            return attempt
        return replace(attempt, status=Status.FAILED, why=f"{attempt.why} (requests came first: not judged)")

    def _whole(self, seconds: float) -> float:
        """Return the time limit of a request; infinite if the worker may have to wait for other requests."""
        return seconds if self._activity is None else math.inf

    def _alone(self, candidate: Candidate, rounds: int) -> Attempt | None:
        """Race a candidate alone; return its failed attempt, or None."""
        try:
            return self._race([candidate], rounds).fallen.get(0)
        except _Spoilt as spoilt:
            return spoilt.attempt

    def _look_after(self, worker: Worker, status: Status) -> None:
        """Replace a worker whose memory may be corrupted or has grown too much."""
        most = MOST_GROWTH if self._shares_cores else max(MOST_GROWTH, self.memory_bytes // 2)
        if status in FAULTS or worker.resident > worker.base + most:
            worker.process.end()

    # ---- the worker --------------------------------------------------------------------------------------------------

    def _posed(self) -> Worker:
        """Return a worker to which the problem was posed."""
        if self._problem is None:
            raise RuntimeError("no problem was posed")
        for last in (False, True):
            worker = self._running()
            if worker.posed is self._problem:
                return worker
            worker.known.clear()
            try:
                answer, _ = worker.ask(self._problem, POSE_SECONDS)
                worker.refusal, regime = worker.read(protocol.pose, answer)
            except Lost as lost:
                if last or lost.status is Status.TIMEOUT:
                    what = f"inputs or the reference's results cannot be made: {lost.why}"
                    raise Unposed(what, where=f"the worker of {self.device_name}") from None
                continue
            worker.posed, worker.base = self._problem, worker.resident
            self._regime = regime
            break
        return worker

    def _running(self) -> Worker:
        """Return the running worker, or start a new one."""
        if self._workers and self._workers[0].process.is_running:
            return self._workers[0]
        _end(self._workers)
        why = ""
        for _ in range(2):
            try:
                worker, why = self._new_worker()
                if not why:
                    return worker
            except Lost as lost:
                why = lost.why
            except OSError as error:
                why = str(error)
            _end(self._workers)
        raise DeviceError(
            f"cannot start: {why}", where=f"the worker of {self.device_name}",
            hint="TUNING_MODE = TUNING_DISABLED does without it",
        )  # fmt: skip

    def _new_worker(self) -> tuple[Worker, str]:
        """Take the spare worker, or start one. Returns it with the objection to its first message, empty if none."""
        worker = self._spare.pop() if self._spare else self._started()
        self._workers.append(worker)
        why = _objection(self.target, worker.process.ask(None, START_SECONDS))
        if not why and not self._shares_cores:
            with contextlib.suppress(OSError):  # the next one is then started when it is needed
                self._spare.append(self._started())
        return worker, why

    def _started(self) -> Worker:
        self.starts += 1
        command = self._command("worker", self.memory_bytes)
        if self._activity is None:
            return Worker(_start(command, self.settings))
        return Worker(_start([*command, *map(str, self._activity)], self.settings, self._activity[0]))

    def _command(self, module: str, memory: int) -> list[str]:
        # -P keeps the caller's folder off the path of the process
        return [self.python, "-P", "-m", f"{__package__}.{module}", self.device_name, str(memory)]


class _Spoilt(Exception):
    """A race without a result, with the attempt that spoilt it."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt.why)
        self.attempt = attempt


def _start(command: Sequence[str], settings: Settings, activity: int | None = None) -> ChildProcess:
    return ChildProcess(command, child_environment(settings), activity)


def _objection(target: Target | None, ready: protocol.Message) -> str:
    """Return the objection to a process's first message; empty if there is none."""
    if ready.get("kind") != "ready":
        return str(ready.get("why", ready))[:1000]
    if target is not None and ready.get("target") != repr(target):
        return f"the worker opened another device: {str(ready.get('target'))[:1000]}, not {target!r}"
    return ""


def _plain(candidate: Candidate) -> tuple[str, Config]:
    """Return the candidate with a config that can be hashed."""
    return candidate[0], Config(candidate[1])


def _doubt(lost: Lost) -> Doubt | None:
    if lost.code is None:
        return None
    # A candidate does not send SIGKILL to itself: the system was short of memory, or a person sent it.
    return Doubt.OF_THE_MACHINE if lost.code == -signal.SIGKILL else Doubt.OF_ITS_GUILT


def _is_plausible(samples: Sequence[float], least: int) -> bool:
    return len(samples) >= least and all(math.isfinite(s) and s > 0 for s in samples)


def _without(attempt: Attempt, why: str) -> Attempt:
    """Return the attempt as wrong and without its times."""
    return replace(attempt, status=Status.WRONG, why=why, samples=(), probed=False)


# ---- clean-up --------------------------------------------------------------------------------------------------------

_LIVE: weakref.WeakSet[Isolated] = weakref.WeakSet()
_SHARED: dict[str, Isolated] = {}


def _end(workers: list[Worker], spare: list[Worker] | None = None, ahead: Ahead | None = None) -> None:
    if ahead is not None:
        ahead.close()
    while spare:
        spare.pop().process.end()
    while workers:
        workers.pop().process.end(PATIENCE)


def _forked() -> None:
    """Forget workers in a forked child: they belong to the parent."""
    for isolated in list(_LIVE):
        isolated._lock = threading.RLock()
        for worker in (*isolated._workers, *isolated._spare):
            worker.process.abandon()
        isolated._workers.clear()
        isolated._spare.clear()
        isolated._ahead.abandon()


os.register_at_fork(after_in_child=_forked)


def measurer_for(device: Device, settings: Settings) -> Measurer:
    """Return the measurer of a device: one worker per device name, which ends with this process.

    Raises `DeviceError` if the device cannot compile kernels.
    """
    if not device.compiles:
        raise DeviceError("there is no C compiler, so no kernel can be measured", where=device.name,
                          hint="install one: pip install ziglang")  # fmt: skip
    if device.target.traits.is_scripted:
        return LocalMeasurer(
            device
        )  # its script cannot be sent to another process, and it runs nothing that could crash
    if device.target.traits.shares_cores and device.target.units < (settings.cpu_threads_num or cpu_count()):
        # the device of one of several streams, which share the cores
        settings = replace(settings, cpu_threads_num=device.target.units)
    shared = _SHARED.get(device.name)
    if shared is None or shared.settings != settings:
        if shared is not None:
            shared.close()
        timeout = max(settings.tune_timeout, LEAST_TIMEOUT)
        shared = _SHARED[device.name] = Isolated(device.name, timeout, settings=settings, target=device.target)
    return shared
