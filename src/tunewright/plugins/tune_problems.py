"""Tuning the problems that applications met (ENABLE_TUNE_DUMP), without their models: dump here, tune there, merge.

1. *Profile*: the kernel that each problem has now is timed by itself, the one with most work first. Where time is
   short, the rest is estimated from the device's roofline.
2. *Search*: problem by problem; each gets the part of the time left that its hope has among those to come: what a
   search might save, times the number of dumps in which it stands.

There is no network to decide in. What is found goes into the user's knowledge base at once, as in tuning a model.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ..devices.base import Device
from ..errors import DeviceError, InputError, UnsupportedError
from ..search.base import Status
from ..settings import Settings
from ..solvers.base import Problem
from ..tuning import dump
from ..tuning.ceilings import ceilings, work_of
from ..tuning.isolated import measurer_for
from ..tuning.key import Kind
from ..tuning.measure import Measurer
from ..tuning.progress import Progress
from ..tuning.tuner import Tuner, warn
from .tune import LEAST_SECONDS, Layer, Result, State

#: the part of the time in which kernels are timed that are there
PROFILE_SHARE = 0.25


@dataclass
class Posed(Layer):
    """A problem by itself."""

    #: dumps in which it stands
    count: int = 1

    @property
    def gain(self) -> float:
        """How many times as fast as before it is by itself."""
        found = self.outcome
        if self.chosen is None or found is None or found.gain is None:
            return 1.0
        # gains are over the default, which need not be what was used
        before = (m.evidence.gain.median for m in found.records if (m.key.solver, m.config) == self.present)
        return found.gain.median / next(before, 1.0)


def read(paths: Sequence[str | os.PathLike[str]]) -> tuple[dict[Problem, int], list[str]]:
    """The problems of dumps (files, or folders of them), each with the number of files that have it; what was left out.

    InputError when there is nothing to tune.
    """
    counts: dict[Problem, int] = {}
    reasons: list[str] = []
    for path in map(Path, paths):
        files = sorted(p for p in path.glob("*.jsonl") if p.is_file()) if path.is_dir() else []
        for file in files or [path]:
            problems, left_out = dump.read(file)
            reasons += left_out
            for problem in problems:
                counts[problem] = counts.get(problem, 0) + 1
    if not counts:
        why = f" ({reasons[0]})" if reasons else ""
        raise InputError(
            f"holds no problem{why}", where=", ".join(map(str, paths)), hint="ENABLE_TUNE_DUMP=YES writes a dump"
        )
    return counts, reasons


def tune_problems(
    device: Device,
    problems: Mapping[Problem, int],
    settings: Settings,
    budget: float,
    *,
    again: bool = False,
    report: Callable[[State], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Result:
    """Tune problems on a device; each has a weight. ``again``: also those whose answer is known."""
    return _Tuning(device, problems, settings, budget, again, report, stop).run()


class _Tuning:
    def __init__(
        self,
        device: Device,
        problems: Mapping[Problem, int],
        settings: Settings,
        budget: float,
        again: bool,
        report: Callable[[State], None] | None,
        stop: Callable[[], bool] | None,
    ) -> None:
        quiet = {"TUNING_MODE": "TUNING_USE_EXISTING", "FIND_ENFORCE": "1", "ENABLE_TUNE_DUMP": "NO"}
        self.settings = Settings.make(quiet | {"ENABLE_LOGGING_CMD": "NO"}, settings)
        self.device, self.budget, self.again = device, budget, again
        self._report, self._stop = report, stop
        self.tuner = Tuner(self.settings)
        self.start, self.stopped = time.monotonic(), False
        self.spent: dict[str, float] = {}
        self.layers = [layer for p, count in problems.items() if (layer := self._layer(p, count)) is not None]

    def _layer(self, problem: Problem, count: int) -> Posed | None:
        try:
            choice = self.tuner.choose(problem, self.device)
        except UnsupportedError as error:  # the dump is of another kind of device
            warn(f"left out: {error}")
            return None
        layer = Posed(problem, self.device, choice, [], count=count)
        work, most = work_of(problem), ceilings(self.device)
        if not isinstance(work, str) and not most.why:
            layer.floor, layer.bound = most.floor(work)
        return layer

    # ---- time ---------------------------------------------------------------------------------------------------

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def left(self, share: float = 1.0) -> float:
        self.stopped = self.stopped or (self._stop is not None and self._stop())
        return 0.0 if self.stopped else share * self.budget - self.elapsed

    def tell(self, phase: str, at: Layer | None = None, progress: Progress | None = None) -> None:
        if self._report is not None:
            self._report(State(phase, self.layers, at, progress, self.elapsed, self.budget))

    # ---- phases -------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        begin = 0.0
        for name, phase in (("profile", self.profile), ("search", self.search)):
            try:
                phase()
            except KeyboardInterrupt:  # what was found is stored already
                self.stopped = True
            self.spent[name], begin = self.elapsed - begin, self.elapsed
        before = sum(layer.seconds for layer in self.layers)
        after = sum(layer.seconds / layer.gain for layer in self.layers)
        layers: list[Layer] = sorted(self.layers, key=lambda layer: -layer.seconds)
        return Result(layers, before, after, None, 0.0, [], self.stopped, self.spent)

    def profile(self) -> None:
        """How long each takes now."""
        self.tell("profile")
        todo = [layer for layer in self.layers if self._worthwhile(layer)]
        todo.sort(key=lambda layer: -(layer.floor or 0.0))
        if not todo:
            return
        measurer = measurer_for(self.device, self.settings)
        for layer in todo:
            if self.left(PROFILE_SHARE) <= 0:
                break
            self._time(layer, measurer)
        known = [layer.seconds / layer.floor for layer in todo if layer.seconds and layer.floor]
        for layer in todo:
            if not layer.seconds and layer.floor and not layer.skipped:
                layer.seconds = layer.floor * (median(known) if known else 1.0)

    def _worthwhile(self, layer: Posed) -> bool:
        known = layer.choice.match is not None and layer.choice.match.kind is Kind.EXACT
        if layer.choice.solver.host or not layer.problem.is_static:
            layer.skipped = "it runs on the host"
        elif known and not self.again:
            layer.skipped = "it was tuned before"
            measured = layer.choice.measurement
            layer.seconds = measured.evidence.seconds if measured is not None else 0.0
        return not layer.skipped

    def _time(self, layer: Posed, measurer: Measurer) -> None:
        try:
            why = measurer.pose(layer.problem, self.settings.tune_seed, self.settings.tune_regime.lower())
            if why is None:
                attempt = measurer.attempt(layer.present)
                if attempt.status is Status.OK and attempt.samples:
                    layer.seconds = median(attempt.samples)
                return  # a faulty default is tuned all the same
        except DeviceError as error:
            why = str(error)
        layer.skipped = f"it cannot be measured: {why}"

    def search(self) -> None:
        """Look for better kernels, where most can be hoped for first."""
        todo = [layer for layer in self.layers if not layer.skipped]
        todo.sort(key=lambda layer: -layer.hope * layer.count)
        weights = [max(layer.hope * layer.count, 1e-9) for layer in todo]
        for n, layer in enumerate(todo):
            left = self.left()
            if left < LEAST_SECONDS:
                layer.skipped = "stopped" if self.stopped else "no time was left for it"
                continue
            layer.budget = min(left, max(LEAST_SECONDS, left * weights[n] / sum(weights[n:])))
            default = self.tuner.default(layer.problem, layer.device)
            answer = self.tuner.known(layer.problem, layer.device, default)
            layer.outcome = self.tuner.tune(
                layer.problem, layer.device, default, answer,
                report=lambda progress, layer=layer: self.tell("search", layer, progress),  # type: ignore[misc]
                seconds=layer.budget, stop=lambda: self.left() <= 0,
            )  # fmt: skip
            if layer.outcome is None:
                layer.skipped = "there is nothing to choose from"
            elif layer.outcome.changed and layer.outcome.chosen != layer.present:
                layer.chosen = layer.outcome.chosen
            self.tell("search", layer)
