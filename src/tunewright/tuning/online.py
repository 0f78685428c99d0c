"""Tuning while models are loaded or meet new shapes: time limits, progress messages, and the result file.

A model has TUNE_SECONDS for each problem that it meets, and TUNE_BUDGET in total. Time that a search takes beyond its
share (a step that cannot be interrupted, a worker that starts) is deducted from the following searches. The total is
thereby bounded. Problems that were not reached are named and left to the next load.

Progress goes to the listener that the command line installs (`progress.listening`). Without a listener it goes to the
logger and, if stderr is a terminal, to a line there.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..devices.base import Device
from ..settings import Settings
from ..solvers.base import Problem
from . import progress
from .progress import Progress
from .result_file import ResultFile, candidate_json, choice_json, head, outcome_json, problem_json
from .session import Outcome

if TYPE_CHECKING:
    from .tuner import Choice, Tuner

LOG = logging.getLogger("tunewright")
#: A shorter search finds nothing and is left to the next load.
LEAST_SECONDS = 0.5
#: Seconds of tuning before a terminal shows progress; between two updates there; and between two lines of the log.
PATIENCE, REDRAWN, LOGGED = 2.0, 0.25, 5.0
#: Characters of a problem's name; and the number of unreached problems that are named.
LONGEST, NAMED = 40, 5


@dataclass(frozen=True)
class News:
    """Progress of the tuning during a load."""

    problem: str
    #: number of this problem, and of all problems to be tuned that are known so far
    number: int
    total: int
    progress: Progress
    #: seconds used so far, and maximum seconds that remain
    elapsed: float
    left: float

    def __str__(self) -> str:
        p, name = self.progress, self.problem.partition(" -> ")[0]
        name = name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}..."
        gain = p.default_seconds / p.best_seconds if p.best is not None and p.best_seconds > 0 else 0.0
        found = f", {gain:.2f}x so far" if math.isfinite(gain) and gain > 1 else ""
        how = f"{p.phase}, {p.attempted} tried{found}"
        return f"tuning {self.number} of {self.total}, at most {self.left:.0f} s left ({how}): {name}"


def coming(tuner: Tuner, problems: Iterable[Problem], device: Device) -> contextlib.AbstractContextManager[None]:
    """Context for the choices of a plan with these problems: they share their time, and progress counts them."""
    return tuner.searches.load(lambda: sum(tuner.is_missing(problem, device) for problem in dict.fromkeys(problems)))


class Searches:
    """The searches of one loaded model, one after the other."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings, self._clock = settings, clock
        #: seconds used by searches, number of problems met, keys of the problems left
        self.spent, self.met = 0.0, 0
        self.left: list[str] = []
        #: for the current load: number of known problems to be tuned, and depth, since loads may be nested
        self._total = self._depth = 0
        self._lock = threading.Lock()
        self._tuned, self._begun = 0, 0.0
        self._shown = self._logged = -math.inf

    @contextlib.contextmanager
    def load(self, wanted: Callable[[], int]) -> Iterator[None]:
        """Context of a load. ``wanted`` returns the number of problems that will be searched."""
        count = wanted()
        with self._lock:
            if not self._depth:
                self._total, self._tuned, self._begun, self.left = self.met + count, 0, self._clock(), []
            self._depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                is_over = not self._depth
            if is_over:
                self._end()

    def seconds(self) -> float | None:
        """Return the time for the next problem; None if too little remains, so that the next load must continue."""
        each, most = self.settings.tune_seconds, self.settings.tune_budget
        left = min(each, each * (self.met + 1) - self.spent, most - self.spent if most else math.inf)
        return left if left >= min(each / 2, LEAST_SECONDS) else None

    def run(
        self, problem: Problem, device: Device, default: Choice, strategy: str | None,
        search: Callable[[float, Callable[[Progress], None]], Outcome | None],
    ) -> Outcome | None:  # fmt: skip
        """Search within the available time. Returns None if no time is left or there is no choice."""
        seconds = self.seconds()
        self.left = [key for key in self.left if key != problem.key()]
        self.met += 1
        self._total = max(self._total, self.met)
        if seconds is None:
            self.left.append(problem.key())
            return None
        file, begin = online(self.settings, device), self._clock()
        file.begin(problem, device, default, strategy, seconds)
        outcome = None
        try:
            outcome = search(seconds, lambda far: self._tell(problem, far, begin))
            self._tuned += outcome is not None
        finally:
            self.spent += self._clock() - begin
            file.end(outcome)
        return outcome

    def _tell(self, problem: Problem, far: Progress, begin: float) -> None:
        now = self._clock()
        following = max(0, self._total - self.met) * self.settings.tune_seconds
        most = self.settings.tune_budget
        left = max(0.0, far.budget - far.elapsed) + following
        left = min(left, max(0.0, most - self.spent - (now - begin))) if most else left
        news = News(problem.key(), self.met, self._total, far, now - self._begun, left)
        listener = progress.listener()
        if listener is not None:
            listener(str(news))
        elif now - self._logged >= LOGGED:
            self._logged = now
            LOG.info("%s", news)
        if listener is None and now - self._begun >= PATIENCE and now - self._shown >= REDRAWN and sys.stderr.isatty():
            self._shown = now
            sys.stderr.write(f"\r\x1b[K{str(news)[:79]}")
            sys.stderr.flush()

    def _end(self) -> None:
        """End a load: clear the line and report."""
        if math.isfinite(self._shown):
            sys.stderr.write("\r\x1b[K")
            self._shown = -math.inf
        listener = progress.listener()
        if listener is not None and (self._tuned or self.left):
            listener("")
        if self.left:
            most, spent = self.settings.tune_budget, self.spent
            used_up = bool(most) and most - spent < LEAST_SECONDS
            why = f"TUNE_BUDGET = {most:g} is used up" if used_up else "searches took longer than TUNE_SECONDS allows"
            names = "; ".join(key[:80] for key in self.left[:NAMED]) + ("; ..." if self.left[NAMED:] else "")
            count = len(self.left)
            LOG.warning(
                "%s after %.1f s: %d problem%s left to the next load (%s)", why, spent, count,
                "s are" if count > 1 else " is", names,
            )  # fmt: skip
        elif self._tuned:
            LOG.info("tuned %d problems in %.1f s", self._tuned, self._clock() - self._begun)


class Online:
    """The result file of everything that this process tunes while it loads or runs models."""

    def __init__(self, settings: Settings, device: Device) -> None:
        named = {"AUTO_TUNE_MODE": settings.auto_tune_mode, "FIND_MODE": settings.find_mode}
        named |= {"TUNE_REGIME": settings.tune_regime, "EXECUTION_MODE_HINT": settings.execution_mode_hint}
        limits: Mapping[str, Any] = {"TUNE_SECONDS": settings.tune_seconds, "TUNE_BUDGET": settings.tune_budget}
        budget = settings.tune_budget or None
        self._file = ResultFile(settings.tune_result_path, head("online", None, device, {**limits, **named}, budget))
        if self._file.path is not None:
            LOG.info("the progress of tuning is written to %s", self._file.path)
        self._settings = settings
        self._layers: list[dict[str, Any]] = []
        self._since, self._tuning = 0.0, 0.0

    def begin(
        self, problem: Problem, device: Device, default: Choice, strategy: str | None, seconds: float
    ) -> None:  # fmt: skip
        """Note that a search begins."""
        self._layers.append({
            **problem_json(problem, device.name, self._settings), "device": device.name, "nodes": [],
            "strategy": strategy, "seconds": None, "after": None, "floor": None, "bound": "", "hope": None,
            "before": choice_json(default), "budget": seconds, "skipped": "", "network": [], "chosen": None,
            **outcome_json(None),
        })  # fmt: skip
        self._since = time.monotonic()
        self._file.write(state="search", layers=self._layers)

    def end(self, outcome: Outcome | None) -> None:
        """Note that a search has ended. ``outcome`` is None if there was no choice or the search failed."""
        entry = self._layers[-1]
        self._tuning += time.monotonic() - self._since
        before = (entry["before"]["solver"], entry["before"]["config"])
        if outcome is None:
            entry["skipped"] = "nothing could be searched"
        else:
            entry.update(outcome_json(outcome))
            times = [t.seconds for t in outcome.trials if (t.candidate[0], dict(t.candidate[1])) == before]
            seconds = next((s for s in times if math.isfinite(s)), None)
            gain = outcome.gain.median if outcome.gain is not None else 1.0
            entry["seconds"], entry["after"] = seconds, seconds / gain if seconds is not None else None
            entry["chosen"] = candidate_json(outcome.chosen) if outcome.changed else None
        self._file.write(
            state="finished", layers=self._layers, elapsed=self._tuning, phases={"search": self._tuning}
        )  # fmt: skip


#: By folder and process: a forked child has its own file.
_ONLINE: dict[tuple[str, int], Online] = {}


def online(settings: Settings, device: Device) -> Online:
    """Return the result file of this process."""
    at = settings.tune_result_path, os.getpid()
    if at not in _ONLINE:
        _ONLINE[at] = Online(settings, device)
    return _ONLINE[at]
