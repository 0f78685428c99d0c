"""Tune the problems that applications met (ENABLE_TUNE_DUMP) without their models: dump here, tune there, merge.

1. *Profile*: the present kernel of each problem is timed alone, in order of work. If time is short, the rest is
   estimated from the device's roofline.
2. *Search*: each problem gets a share of the remaining time according to its hope. That is the time that a search
   might save, multiplied by the number of dumps with this problem.

No network decides here. Results go into the user's knowledge base at once, as in tuning a model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ..devices.base import Device
from ..errors import DeviceError, InputError, UnsupportedError
from ..knowledge.key import MatchKind
from ..measure.base import Measurer
from ..measure.ceilings import ceilings, work_of
from ..measure.isolated import measurer_for
from ..search.base import Status
from ..solvers.base import Problem
from ..tuning.knowledge_layers import warn
from ..tuning.offline import dump
from ..tuning.policy import QUIET
from ..tuning.session import Outcome
from .layers import TunedLayer, Tuning, TuningOptions, TuningResult

#: Maximum share of the time for timing the present kernels.
PROFILE_SHARE = 0.25


@dataclass
class Posed(TunedLayer):
    """A single problem."""

    #: number of dumps that contain it
    count: int = 1

    @property
    def gain(self) -> float:
        """Speed-up of the problem measured alone."""
        found = self.outcome
        if self.chosen is None or found is None or found.gain is None:
            return 1.0
        # gains are over the default, which may not be the kernel used before
        before = (m.evidence.gain.median for m in found.records if (m.key.solver, m.config) == self.present)
        return found.gain.median / next(before, 1.0)


def read(paths: Sequence[str | os.PathLike[str]]) -> tuple[dict[Problem, int], list[str]]:
    """Read the problems of dumps (files or folders), the number of files with each, and what was left out.

    Raises `InputError` if there is nothing to tune.
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


def tune_problems(device: Device, problems: Mapping[Problem, int], options: TuningOptions) -> TuningResult:
    """Tune problems on a device; each has a weight."""
    return _Tuning(device, problems, options).run()


class _Tuning(Tuning):
    def __init__(self, device: Device, problems: Mapping[Problem, int], options: TuningOptions) -> None:
        super().__init__(options, QUIET | {"ENABLE_TUNE_DUMP": "NO", "ENABLE_LOGGING_CMD": "NO"})
        self.device = device
        posed = (self._layer(problem, count) for problem, count in problems.items())
        self.layers: list[Posed] = [layer for layer in posed if layer is not None]

    def _layer(self, problem: Problem, count: int) -> Posed | None:
        try:
            choice = self.tuner.choose(problem, self.device)
        except UnsupportedError as error:  # the dump comes from another kind of device
            warn(f"left out: {error}")
            return None
        layer = Posed(problem, self.device, choice, [], count=count)
        work, most = work_of(problem), ceilings(self.device)
        if not isinstance(work, str) and not most.why:
            layer.floor, layer.bound = most.floor(work)
        return layer

    # ---- phases ------------------------------------------------------------------------------------------------------

    def run(self) -> TuningResult:
        begin = 0.0
        for name, phase in (("profile", self.profile), ("search", self.search)):
            try:
                phase()
            except KeyboardInterrupt:  # results are already stored
                self.stopped = True
            self.spent[name], begin = self.elapsed - begin, self.elapsed
        before = sum(layer.seconds for layer in self.layers)
        after = sum(layer.seconds / layer.gain for layer in self.layers)
        layers: list[TunedLayer] = sorted(self.layers, key=lambda layer: -layer.seconds)
        return TuningResult(layers, before, after, None, 0.0, [], self.stopped, self.spent)

    def profile(self) -> None:
        """Measure the present time of each problem."""
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
        known = layer.choice.match is not None and layer.choice.match.kind is MatchKind.EXACT
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
                return  # a problem with a faulty default is tuned all the same
        except DeviceError as error:
            why = str(error)
        layer.skipped = f"it cannot be measured: {why}"

    def search(self) -> None:
        """Search for better kernels, in the problems with the largest hope first."""
        self.search_layers([(p, p.hope * p.count) for p in self.layers if not p.skipped], self.budget)

    def found(self, layer: TunedLayer, outcome: Outcome) -> None:
        if outcome.changed and outcome.chosen != layer.present:
            layer.chosen = outcome.chosen
