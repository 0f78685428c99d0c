"""Tuning the problems that applications met (ENABLE_TUNE_DUMP), without their models: dump here, tune there, merge.

1. *Profile*: the kernel that each problem has now is timed by itself, the one with most work first. Where time is
   short, the rest is estimated from the device's roofline.
2. *Search*: problem by problem; each gets the part of the time left that its hope has among those to come: what a
   search might save, times the number of dumps in which it stands.

There is no network to decide in. What is found goes into the user's knowledge base at once, as in tuning a model.
"""

from __future__ import annotations

import os
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
from ..tuning.session import Outcome
from ..tuning.tuner import warn
from .tune_search import QUIET, Layer, Result, State, Tuning

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


class _Tuning(Tuning):
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
        quiet = QUIET | {"ENABLE_TUNE_DUMP": "NO", "ENABLE_LOGGING_CMD": "NO"}
        super().__init__(Settings.make(quiet, settings), budget, again, report, stop)
        self.device = device
        posed = (self._layer(problem, count) for problem, count in problems.items())
        self.layers: list[Posed] = [layer for layer in posed if layer is not None]

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
            if self.until(PROFILE_SHARE * self.budget) <= 0:
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
        self.search_layers([(p, p.hope * p.count) for p in self.layers if not p.skipped], self.budget)

    def found(self, layer: Layer, outcome: Outcome) -> None:
        if outcome.changed and outcome.chosen != layer.present:
            layer.chosen = outcome.chosen
