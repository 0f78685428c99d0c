"""Process that tunes for a serving process: ``python -m tunewright.model_tuning.background_helper``.

The serving process sends it layers. The helper searches them one by one with ordinary tuning sessions, and reports the
results. It has low priority and works for a bounded share of the time, and its worker times nothing while a request
runs. It may be killed at any moment, because a result is in the knowledge base before it is reported.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..devices import build_options, kernel_cache
from ..devices.base import Device
from ..devices.kernel_cache import Gathered, KernelCache, Key
from ..errors import TunewrightError, UnsupportedError
from ..knowledge import open_databases
from ..knowledge.claims import Claims, MachineTurn
from ..knowledge.key import MatchKind
from ..measure import protocol
from ..measure.base import Candidate
from ..measure.isolated import LEAST_TIMEOUT, Isolated
from ..measure.local import compile_candidate
from ..measure.paced import Pace, Paced, give_way
from ..measure.request_activity import ActivityGate
from ..measure.worker import Channel, die_with_parent
from ..plugins.single import open_device
from ..search.space import Config
from ..settings import Settings
from ..solvers import problem_json
from ..solvers.base import Problem
from ..tuning.policy import QUIET
from ..tuning.progress import Progress
from ..tuning.session import Outcome
from ..tuning.tuner import Tuner

#: Factor for TUNE_TIMEOUT, because a process of low priority takes longer.
PATIENCE = 10.0
#: Seconds until a layer that another process tunes is checked again; between two messages about progress; and between
#: two checks for new layers.
LATER, TELLING, LOOKING = 5.0, 0.5, 0.5
#: Maximum number of searches of a layer that stays open.
MOST_TRIES = 3
#: Minimum seconds of a search.
LEAST_SECONDS = 2.0


@dataclass
class TuningTask:
    """A layer to be tuned."""

    key: str
    problem: Problem
    #: the kernel that serves it now
    present: Candidate
    #: seconds that a faster kernel might save, in a unit common to all layers
    hope: float
    #: time of the next check; infinite if the layer is done
    due: float = 0.0
    #: number of searches so far
    tries: int = 0


class _Line(Channel):
    """The helper's end of the channel, which can tell whether data is there."""

    def has(self, seconds: float) -> bool:
        """Whether a message, or its beginning, arrives within ``seconds``."""
        return bool(self._waiting) or bool(select.select([self._raw], [], [], seconds)[0])


class _Kept(Gathered):
    """Programs for the serving process, which are also stored for later loads."""

    def __init__(self, disk: KernelCache | None) -> None:
        super().__init__()
        self._disk = disk

    def put(self, key: Key, files: Mapping[str, bytes], label: str = "") -> bool:
        if self._disk is not None:
            self._disk.put(key, files, label)
        return super().put(key, files, label)


class Helper:
    """Tunes layers, the one with most hope first."""

    def __init__(self, line: _Line, wishes: Mapping[str, Any], activity: tuple[int, int], device: Device) -> None:
        self.line, self.wishes, self.device = line, wishes, device
        self.settings = Settings.make(QUIET, Settings.from_environment())
        self.gate = ActivityGate(*activity)
        folder = open_databases.user_folder(self.settings)
        self.claims = Claims(folder)
        self.pace = Pace(self.gate, float(wishes["duty"]), MachineTurn(folder))
        self.pace.between = self._between
        # one compiling process at a time, since compilers must not take cores from requests
        own = replace(self.settings, compilation_num_threads=1)
        timeout = PATIENCE * max(self.settings.tune_timeout, LEAST_TIMEOUT)
        inner = Isolated(
            device.name, timeout, settings=own, target=device.target, activity=activity,
            memory_bytes=int(wishes["memory"]) or None, apart=True,
        )  # fmt: skip
        self.measurer = Paced(inner, self.pace)
        self.tuner = Tuner(self.settings, measurer=lambda device, settings: self.measurer)
        self.tuner.clock = self.pace.clock
        self.tasks: dict[str, TuningTask] = {}
        #: candidates of finished searches, and of the current one
        self.tried, self.trying = 0, 0
        self._at = ""
        self._told = 0.0

    @property
    def budget(self) -> float:
        """Seconds of work that remain."""
        return float(self.wishes["budget"] or math.inf) - self.pace.clock()

    def run(self) -> None:
        """Work until the other side hangs up."""
        while True:
            task = self._next()
            if task is None or self.budget < LEAST_SECONDS:
                self._tell(force=True)
                self.line.send(kind="rest", left=len(self._open()), heard=len(self.tasks))
                self._listen(LATER if self._open() else None)
                continue
            self._take(task)
            self._listen(0.0)

    # ---- choice of layers --------------------------------------------------------------------------------------------

    def _open(self) -> list[TuningTask]:
        return [task for task in self.tasks.values() if task.due < math.inf]

    def _next(self) -> TuningTask | None:
        due = [task for task in self._open() if task.due <= time.monotonic()]
        return max(due, key=lambda task: task.hope, default=None)

    def _listen(self, seconds: float | None) -> None:
        """Process messages for up to ``seconds``; None waits without limit."""
        begin = self.pace.clock()
        while self.line.has(3600.0 if seconds is None else seconds):
            message = self.line.receive()
            for given in message["layers"]:
                problem = problem_json.from_json(given["problem"])
                (present,) = protocol.candidates([given["present"]])
                known = self.tasks.get(problem.key())
                if known is None:
                    self.tasks[problem.key()] = TuningTask(problem.key(), problem, present, float(given["hope"]))
                else:
                    known.hope, known.present = float(given["hope"]), present
            seconds = 0.0
        self.pace.forgive(self.pace.clock() - begin)

    def _seconds(self, task: TuningTask) -> float:
        """Return a layer's share of the remaining time by its hope; TUNE_SECONDS if the budget is infinite."""
        if self.budget == math.inf:
            return max(self.settings.tune_seconds, LEAST_SECONDS)
        hopes = sum(other.hope for other in self._open())
        return min(self.budget, max(LEAST_SECONDS, self.budget * task.hope / hopes if hopes else self.budget))

    # ---- one layer ---------------------------------------------------------------------------------------------------

    def _take(self, task: TuningTask) -> None:
        """Tune a layer unless its answer is known or another process is tuning it."""
        try:
            default = self.tuner.default(task.problem, self.device)
        except UnsupportedError as error:
            self._done(task, "nothing", str(error))
            return
        answer = self.tuner.known(task.problem, self.device, default)
        known = answer.best is not None and answer.best.match.kind is MatchKind.EXACT
        if known and answer.best is not None and not self.wishes["again"]:
            self._done(task, "known", "it is known already", (answer.best.solver.id, Config(answer.best.config)))
            return
        if not self.claims.take(task.key):
            task.due = time.monotonic() + LATER
            self.line.send(kind="layer", problem=task.key, state="claimed", reason="another process tunes it")
            return
        self._at, self.trying = task.key, 0
        outcome: Outcome | None = None
        try:
            outcome = self.tuner.tune(
                task.problem, self.device, default, answer, self._progress, self._seconds(task)
            )  # fmt: skip
        finally:
            self.claims.give_back(task.key)
            self._at = ""
        if outcome is None:
            self._done(task, "nothing", "there is nothing to choose from")
            return
        self.tried, self.trying = self.tried + outcome.attempted, 0
        task.tries += 1
        found = self.tuner.known(task.problem, self.device, default).best
        if (found is None or found.match.kind is not MatchKind.EXACT) and task.tries < MOST_TRIES:
            task.hope /= 2  # noise or a short time left it open: other layers come first now
            return
        gain = None if outcome.gain is None else outcome.gain.median
        self._done(task, "searched", outcome.reason, outcome.chosen, gain)

    def _done(
        self, task: TuningTask, state: str, reason: str, best: Candidate | None = None, gain: float | None = None
    ) -> None:
        """Report the result of a layer, with the programs of a kernel that should replace the present one."""
        task.due = math.inf
        programs: list[Any] = []
        if best is not None and best != task.present:
            programs = self._programs(task.problem, best)
        self._tell(force=True)
        self.line.send(
            kind="layer", problem=task.key, state=state, reason=reason[:1000], gain=gain, programs=programs,
            best=None if best is None else protocol.candidates_json([best])[0],
        )  # fmt: skip

    def _programs(self, problem: Problem, best: Candidate) -> list[Any]:
        """Return the compiled programs of a kernel, so that the serving process need not compile; empty on failure."""
        if not self.device.target.traits.shares_cores:
            return []
        if found := self.measurer.programs(best):
            return protocol.programs_json(found)  # the tuner put them into the kernel cache

        def build() -> list[Any]:
            gathered = _Kept(KernelCache.of(self.settings))
            with contextlib.suppress(Exception), kernel_cache.using(gathered), build_options.using(self.settings):
                compile_candidate(best, problem, self.device).prepare()
            return protocol.programs_json(gathered.groups)

        return self.pace.work(build)

    # ---- reports -----------------------------------------------------------------------------------------------------

    def _progress(self, progress: Progress) -> None:
        self.trying = progress.attempted

    def _between(self) -> None:
        """Renew claims and report progress between two pieces of work."""
        self.claims.renew()
        self._tell()

    def _tell(self, force: bool = False) -> None:
        if force or time.monotonic() > self._told + TELLING:
            self._told = time.monotonic()
            samples, interrupted = self.gate.samples
            self.line.send(
                kind="progress", problem=self._at, candidates=self.tried + self.trying,
                worked=self.pace.clock(), samples=samples, interrupted=interrupted,
            )  # fmt: skip


def main(arguments: list[str]) -> None:
    """Run the helper.

    Arguments: descriptor of the activity, its pause word, descriptors of the channel and the lifeline.
    """
    descriptor, pause, channel, lifeline = map(int, arguments)
    line = _Line(socket.socket(fileno=channel))
    die_with_parent(lifeline)
    wishes = line.receive()
    give_way(wishes["priority"])
    build_options.stay_together()
    helper: Helper | None = None
    try:
        device = open_device(wishes["device"], Settings.from_environment())
        if repr(device.target) != wishes["target"]:
            raise UnsupportedError(f"the helper opened another device: {device.target!r}, not {wishes['target']}")
        line.send(kind="ready", process=os.getpid())
        helper = Helper(line, wishes, (descriptor, pause), device)
        helper.run()
    except TunewrightError as error:
        line.send(kind="failed", why=str(error))
    finally:
        if helper is not None:
            helper.claims.close()
            helper.measurer.close()


if __name__ == "__main__":
    main(sys.argv[1:])
