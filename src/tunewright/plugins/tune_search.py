"""The layers of what is tuned, and the search of them within a time: what tuning models and tuning problems share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..devices.base import Device
from ..search.space import Config as Plain
from ..settings import Settings
from ..solvers.base import Problem
from ..tuning import session
from ..tuning.lookup import Answer
from ..tuning.measure import Candidate
from ..tuning.progress import Progress
from ..tuning.record import Ratio
from ..tuning.tuner import Choice, Tuner

#: The part of the time behind the profile that is for deciding in networks, and what that has at least, in times that
#: making a network takes: several are made for it.
DECIDE_SHARE, NETWORKS = 0.3, 4.0
#: Profile and decision together take no more than the first part of the budget; however long the profile took, the
#: decision may have the second.
MOST_FIXED, LEAST_DECIDE = 1 / 3, 1 / 8
#: the part of a layer's time that may always be saved, however near to the roofline it is
LEAST_HOPE = 0.2
#: what tunes searches by itself: compiling a model must not
QUIET = {"TUNING_MODE": "TUNING_USE_EXISTING", "FIND_ENFORCE": "1"}
#: A search shorter than this finds nothing: a candidate takes half a second to compile. On a GPU layers are large: it
#: takes a second until the reference is there, and another one until the first candidates are compiled and checked.
LEAST_SECONDS, LEAST_GPU_SECONDS = 2.0, 4.0
#: candidates for which a search should have time, going by the one before: fewer layers, on a slow or busy machine
PROPER = 12
#: why a layer was not searched
NO_TIME = "no time was left for it"


@dataclass
class Layer:
    """All nodes that pose one problem."""

    problem: Problem
    device: Device
    choice: Choice
    nodes: list[str]
    #: per inference, all nodes together, as it was before
    seconds: float = 0.0
    #: what it would take at least, from the device's ceilings, and what binds it then; None: unknown
    floor: float | None = None
    bound: str = ""
    #: what it was given, and what came of it
    budget: float = 0.0
    outcome: session.Outcome | None = None
    skipped: str = ""
    #: candidates that ran inside the network: how many times as fast as the default
    network: dict[Candidate, Ratio] = field(default_factory=dict)
    #: what it uses in the end; None: what it used before
    chosen: Candidate | None = None

    @property
    def present(self) -> Candidate:
        """What it used before."""
        return self.choice.solver.id, Plain(self.choice.config)

    @property
    def gain(self) -> float:
        """How many times as fast as before it is in the network."""
        if self.chosen is None:
            return 1.0
        return self.network[self.chosen].median / self.network[self.present].median

    @property
    def hope(self) -> float:
        """Seconds of an inference that a search might save: what lies above the roofline, and a part of the rest.

        A fast algorithm needs less arithmetic than the roofline counts.
        """
        least = self.seconds * LEAST_HOPE
        return least if self.floor is None else max(self.seconds - self.floor, least)


@dataclass(frozen=True)
class State:
    """What a caller is told while it works."""

    phase: str  # profile, search, network, whole
    layers: Sequence[Layer]
    #: the layer being searched, and how far that is
    at: Layer | None
    progress: Progress | None
    elapsed: float
    budget: float


@dataclass
class Result:
    """What became of a model."""

    layers: list[Layer]
    #: seconds of an inference before and after, medians of the last contest
    before: float
    after: float
    #: before through after, in pairs; None when nothing changed or nothing was measured
    gain: Ratio | None
    #: largest difference between the outputs of both, relative to the largest element; what the layers promised holds
    error: float
    #: layers whose change was taken back
    undone: list[Layer]
    #: it was stopped before the end
    stopped: bool
    seconds: dict[str, float]
    #: what the result file holds, and where it is; None where TUNE_RESULT_PATH is empty
    written: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None
    #: joules of an inference before and after, where that was compared
    energy: tuple[float, float] | None = None
    #: seconds that making its network takes whose kernels are compiled
    making: float = 0.0


class Tuning:
    """What tuning a model and tuning problems share: the time, who is told of it, and the search."""

    def __init__(
        self,
        settings: Settings,
        budget: float,
        again: bool,
        report: Callable[[State], None] | None,
        stop: Callable[[], bool] | None,
    ) -> None:
        self.settings, self.budget, self.again = settings, budget, again
        self._report, self._stop = report, stop
        self.tuner = Tuner(settings)
        self.layers: Sequence[Layer] = []
        self.start, self.stopped = time.monotonic(), False
        #: a search ends as soon as one layer seems to have a faster kernel
        self.until_found = False
        #: seconds that a candidate of the last search took
        self.pace = 0.0
        self.spent: dict[str, float] = {}

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def until(self, end: float) -> float:
        """Seconds that are left of these; none after a stop."""
        self.stopped = self.stopped or (self._stop is not None and self._stop())
        is_over = self.stopped or (self.until_found and any(_seems_faster(layer) for layer in self.layers))
        return 0.0 if is_over else end - self.elapsed

    def tell(self, phase: str, at: Layer | None = None, progress: Progress | None = None) -> None:
        if self._report is not None:
            self._report(State(phase, self.layers, at, progress, self.elapsed, self.budget))

    def search_all(self, hopes: Sequence[tuple[Layer, float]], end: float, regime: str | None) -> None:
        """Search until a time; where nothing was found by then, on into the time in which that would be decided."""
        self.search_layers(hopes, end, regime, decide=False)
        rest = [(layer, hope) for layer, hope in hopes if layer.outcome is None and layer.skipped == NO_TIME]
        self.until_found = True
        if rest and self.until(self.budget) > 0:
            for layer, _ in rest:
                layer.skipped = ""
            self.search_layers(rest, self.budget, regime, decide=False)
        self.until_found = False

    def search_layers(
        self, hopes: Sequence[tuple[Layer, float]], end: float, regime: str | None = None, decide: bool = True
    ) -> None:
        """Search better kernels until a time, where most can be hoped for first; `found` is told of each."""
        todo = sorted(hopes, key=lambda pair: -pair[1])
        weights = [max(hope, 1e-9) for _, hope in todo]
        for n, (layer, _) in enumerate(todo):
            left = self.until(end)
            shortest = LEAST_GPU_SECONDS if layer.device.target.device == "gpu" else LEAST_SECONDS
            least = min(max(shortest, PROPER * self.pace), max(left, shortest))
            if left < least:
                layer.skipped = "stopped" if self.stopped else NO_TIME
                continue
            # few layers well rather than all of them badly: those that promise least get nothing
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

    def _posed(self, layer: Layer) -> tuple[Problem, Device, Choice, Answer]:
        """A layer's problem, and what is known of it."""
        default = self.tuner.default(layer.problem, layer.device)
        return layer.problem, layer.device, default, self.tuner.known(layer.problem, layer.device, default)

    def found(self, layer: Layer, outcome: session.Outcome) -> None:
        """What a search says of a layer: a proposal, unless the caller decides by it."""


def reserve(budget: float, profile: float, making: float) -> float:
    """Seconds of a budget that are for deciding in networks.

    ``profile``: seconds that looking at the models took. ``making``: seconds in which their networks are made anew,
    without compiling: a search leaves the programs of what it proposes in the kernel cache.
    """
    most = max(MOST_FIXED * budget - profile, LEAST_DECIDE * budget)
    return min(max(DECIDE_SHARE * (budget - profile), NETWORKS * making), most)


def _seems_faster(layer: Layer) -> bool:
    """Whether its search proposes something."""
    return layer.outcome is not None and any(m.evidence.gain.median > 1 for m in layer.outcome.records)
