"""Layers to be tuned and their search within a time limit; common to tuning models and tuning problems."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..devices.base import Device
from ..knowledge.record import Ratio
from ..measure.base import Candidate
from ..search.space import Config as Plain
from ..settings import Settings
from ..solvers.base import Problem
from ..tuning import session
from ..tuning.lookup import LookupAnswer
from ..tuning.progress import Progress
from ..tuning.tuner import Choice, Tuner

#: DECIDE_SHARE: share of the time after the profile for decisions in networks. NETWORKS: minimum time for them, in
#: units of the time for making a network, because several are made.
DECIDE_SHARE, NETWORKS = 0.3, 4.0
#: Profile and decision together take at most the first share of the budget. The decision may have the second share,
#: however long the profile took.
MOST_FIXED, LEAST_DECIDE = 1 / 3, 1 / 8
#: Share of a layer's time that may always be saved, however near to the roofline it is.
LEAST_HOPE = 0.2
#: Minimum seconds of a search; a shorter one finds nothing. A candidate takes half a second to compile. On a
#: device that opens slowly (a GPU) layers are large: the reference takes a second, and the first candidates another
#: second until they are compiled and checked.
LEAST_SECONDS, LEAST_SLOW_SECONDS = 2.0, 4.0
#: Number of candidates for which a search should have time, judged by the previous search; on a slow or busy machine
#: fewer layers are searched.
PROPER = 12
#: Reason why a layer was not searched.
NO_TIME = "no time was left for it"


@dataclass
class TunedLayer:
    """All nodes that pose one problem."""

    problem: Problem
    device: Device
    choice: Choice
    nodes: list[str]
    #: seconds per inference before tuning, all nodes together
    seconds: float = 0.0
    #: minimum seconds according to the device's ceilings, and their limit (arithmetic or memory); None if unknown
    floor: float | None = None
    bound: str = ""
    #: seconds for its search, and the outcome
    budget: float = 0.0
    outcome: session.Outcome | None = None
    skipped: str = ""
    #: candidates that ran inside the network, with their speed-up over the default
    network: dict[Candidate, Ratio] = field(default_factory=dict)
    #: the final candidate; None if it is unchanged
    chosen: Candidate | None = None

    @property
    def present(self) -> Candidate:
        """The candidate before tuning."""
        return self.choice.solver.id, Plain(self.choice.config)

    @property
    def gain(self) -> float:
        """Speed-up in the network."""
        if self.chosen is None:
            return 1.0
        return self.network[self.chosen].median / self.network[self.present].median

    @property
    def hope(self) -> float:
        """Seconds of an inference that a search might save: those above the roofline, but at least `LEAST_HOPE` of all.

        A fast algorithm needs less arithmetic than the roofline counts.
        """
        least = self.seconds * LEAST_HOPE
        return least if self.floor is None else max(self.seconds - self.floor, least)


@dataclass(frozen=True)
class TuningState:
    """Progress of a tuning, for the caller."""

    phase: str  # profile, search, network, whole
    layers: Sequence[TunedLayer]
    #: the layer that is searched, and the progress of its search
    at: TunedLayer | None
    progress: Progress | None
    elapsed: float
    budget: float


@dataclass
class TuningResult:
    """Result of tuning a model."""

    layers: list[TunedLayer]
    #: seconds of an inference before and after tuning: medians of the last contest
    before: float
    after: float
    #: ratio of the time before to the time after, in pairs; None if nothing changed or nothing was measured
    gain: Ratio | None
    #: largest difference between the outputs before and after, relative to the largest element
    error: float
    #: layers whose change was taken back
    undone: list[TunedLayer]
    #: whether it was stopped before the end
    stopped: bool
    seconds: dict[str, float]
    #: content and path of the result file; None if TUNE_RESULT_PATH is empty
    written: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None
    #: joules of an inference before and after, if they were compared
    energy: tuple[float, float] | None = None
    #: seconds for making its network with compiled kernels
    making: float = 0.0


@dataclass(frozen=True)
class TuningOptions:
    """What a caller asks of a tuning."""

    settings: Settings
    #: seconds
    budget: float
    #: whether layers whose answer is known are tuned as well
    again: bool = False
    #: called with the state after each step
    report: Callable[[TuningState], None] | None = None
    #: asked before each step whether to stop
    stop: Callable[[], bool] | None = None


class Tuning:
    """Base of tuning models and tuning problems: time, progress and search."""

    def __init__(self, options: TuningOptions, quiet: Mapping[str, str]) -> None:
        """``quiet``: settings that differ from the given ones while tuning."""
        self.settings = Settings.make(quiet, options.settings)
        self.budget, self.again = options.budget, options.again
        self._report, self._stop = options.report, options.stop
        self.tuner = Tuner(self.settings)
        self.layers: Sequence[TunedLayer] = []
        self.start, self.stopped = time.monotonic(), False
        #: True: a search ends as soon as one layer seems to have a faster kernel
        self.until_found = False
        #: seconds per candidate in the last search
        self.pace = 0.0
        self.spent: dict[str, float] = {}

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def until(self, end: float) -> float:
        """Return the seconds until time ``end``; 0 after a stop."""
        self.stopped = self.stopped or (self._stop is not None and self._stop())
        is_over = self.stopped or (self.until_found and any(_seems_faster(layer) for layer in self.layers))
        return 0.0 if is_over else end - self.elapsed

    def tell(self, phase: str, at: TunedLayer | None = None, progress: Progress | None = None) -> None:
        if self._report is not None:
            self._report(TuningState(phase, self.layers, at, progress, self.elapsed, self.budget))

    def search_all(self, hopes: Sequence[tuple[TunedLayer, float]], end: float, regime: str | None) -> None:
        """Search until a time. If nothing was found by then, continue into the time for the decision."""
        self.search_layers(hopes, end, regime, decide=False)
        rest = [(layer, hope) for layer, hope in hopes if layer.outcome is None and layer.skipped == NO_TIME]
        self.until_found = True
        if rest and self.until(self.budget) > 0:
            for layer, _ in rest:
                layer.skipped = ""
            self.search_layers(rest, self.budget, regime, decide=False)
        self.until_found = False

    def search_layers(
        self, hopes: Sequence[tuple[TunedLayer, float]], end: float, regime: str | None = None, decide: bool = True
    ) -> None:
        """Search for better kernels until a time, largest hope first. Calls `found` for each layer."""
        todo = sorted(hopes, key=lambda pair: -pair[1])
        weights = [max(hope, 1e-9) for _, hope in todo]
        for n, (layer, _) in enumerate(todo):
            left = self.until(end)
            shortest = LEAST_SLOW_SECONDS if layer.device.target.traits.opens_slowly else LEAST_SECONDS
            least = min(max(shortest, PROPER * self.pace), max(left, shortest))
            if left < least:
                layer.skipped = "stopped" if self.stopped else NO_TIME
                continue
            # few layers are searched well rather than all badly, so the least promising ones get no time
            layer.budget = min(left, max(least, left * weights[n] / sum(weights[n:])))
            if n + 1 < len(todo) and left - layer.budget >= least:
                self.tuner.foresee(*self._posed(todo[n + 1][0]))
            began = self.elapsed
            layer.outcome = self.tuner.tune(
                *self._posed(layer),
                report=lambda progress, layer=layer: self.tell("search", layer, progress),  # type: ignore[misc]
                seconds=layer.budget, stop=lambda: self.until(self.budget) <= 0, regime=regime, decide=decide,
            )  # fmt: skip
            if layer.outcome is None:
                layer.skipped = "there is nothing to choose from"
            else:
                if layer.outcome.attempted:
                    self.pace = (self.elapsed - began) / layer.outcome.attempted
                self.found(layer, layer.outcome)
            self.tell("search", layer)

    def _posed(self, layer: TunedLayer) -> tuple[Problem, Device, Choice, LookupAnswer]:
        """Return a layer's problem with device, default and known answers."""
        default = self.tuner.default(layer.problem, layer.device)
        return layer.problem, layer.device, default, self.tuner.known(layer.problem, layer.device, default)

    def found(self, layer: TunedLayer, outcome: session.Outcome) -> None:
        """Process the outcome of a layer's search. By default it is only a proposal."""


def reserve(budget: float, profile: float, making: float) -> float:
    """Return the seconds of a budget for decisions in networks.

    ``profile``: seconds that profiling took. ``making``: seconds for making the networks again without compiling, since
    a search leaves the programs of its proposals in the kernel cache.
    """
    most = max(MOST_FIXED * budget - profile, LEAST_DECIDE * budget)
    return min(max(DECIDE_SHARE * (budget - profile), NETWORKS * making), most)


def _seems_faster(layer: TunedLayer) -> bool:
    """Whether the layer's search proposes a candidate."""
    return layer.outcome is not None and any(m.evidence.gain.median > 1 for m in layer.outcome.records)
