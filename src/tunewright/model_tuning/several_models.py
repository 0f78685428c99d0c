"""Tune several models, or one model for several shapes, within one time limit.

1. *Profile*: each work (a model with inputs of certain shapes) runs as it is. Nodes that pose the same problem are one
   layer, even in several works.
2. *Search*: each layer is searched once, the one with most hope first. Hopes are weighted: works of one model by their
   share of its inferences, models by their importance. A second saved in a model of ten seconds counts as much as
   a tenth of a second in a model of one second.
3. *Decide*: for each work the network decides, as in tuning one model (`tune.ModelTuning`).

Results are in the user's knowledge base after each step, so a repeated call continues an interrupted one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import InputError, TunewrightError
from ..frontend.model import Model
from ..ir.graph import Graph
from ..knowledge.key import Where
from ..knowledge.record import Ratio
from ..plugins.single import SingleDevice
from ..settings import Settings
from ..tuning.policy import QUIET
from ..tuning.session import Outcome
from .expected_gain import expected, is_left, is_waiting, overall, saved
from .layers import TunedLayer, Tuning, TuningOptions, TuningResult, TuningState, reserve
from .model import ModelTuning
from .result import ResultRecorder

LOG = logging.getLogger("tunewright")
#: Maximum share of the time for profiling models; models that are not reached are left to the next run.
PROFILE_SHARE = 1 / 3
#: Factor by which promised gains must exceed the wanted gain, because the network loses part of them.
MARGIN = 1.25
#: `Goal.stalls`: number of consecutive layers, and the share of an inference that they and the rest must be worth.
ROW, WORTH = 4, 0.01
#: A further round needs this share of the time, and time for making this number of networks.
AGAIN, NETWORKS = 0.2, 4.0
#: Reasons why a layer was not searched.
ENOUGH, STALLED = "the gain that was asked for is promised", "searching stopped paying"


@dataclass(frozen=True)
class Workload:
    """A model with inputs of certain shapes."""

    #: for users, and for the result file
    title: str
    #: reads the model on demand, so that a folder of models need not be in memory at once
    open: Callable[[], tuple[Model, Mapping[str, Any]]]
    #: name of the model, its importance, and the share of its inferences with these shapes
    model: str = ""
    importance: float = 1.0
    part: float = 1.0


@dataclass(frozen=True)
class Goal:
    """Condition for an early end: a gain is reached, or searching no longer pays."""

    gain: float = math.inf
    stalls: bool = False

    @staticmethod
    def parse(text: str, where: str = "--until") -> Goal:
        """Parse "1.2x" or "stalls" into a goal."""
        word = text.strip().lower()
        if word == "stalls":
            return Goal(stalls=True)
        try:
            gain = float(word.removesuffix("x"))
        except ValueError:
            gain = 0.0
        if not (word.endswith("x") and 1 < gain < math.inf):
            raise InputError(f"{text!r} is no goal", where=where, hint="a gain above 1 such as 1.2x, or stalls")
        return Goal(gain)


@dataclass
class _Member:
    """A work that is being tuned."""

    work: Workload
    tuning: ModelTuning
    recorder: ResultRecorder
    #: seconds of an inference; seconds of compiling and profiling; and the weight of a second of this work
    seconds: float = 0.0
    cost: float = 0.0
    value: float = 0.0
    result: TuningResult | None = None
    #: prefix of its nodes' names if there are several models
    name: str = ""


@dataclass
class _Shared(TunedLayer):
    """A layer common to several works; its seconds are weighted."""

    parts: list[tuple[_Member, TunedLayer]] = field(default_factory=list)


#: Makes the tuning of one work. It knows the plugin of the work's device and how to decide (see `tune_objective`).
Maker = Callable[[Model, Mapping[str, Any], Settings], ModelTuning]


@dataclass(frozen=True)
class SeveralTuningOptions(TuningOptions):
    """What a caller asks of tuning several models."""

    goal: Goal = Goal()
    #: the command line that continues the tuning
    command: str | None = None


def tune_many(
    works: Sequence[Workload], how: SeveralTuningOptions, make: Callable[[Model], tuple[SingleDevice, Maker]]
) -> list[TuningResult]:
    """Tune works within a time limit. Returns a result for each in order, without those that could not be begun.

    ``make``: returns, for a model, the plugin that serves it and the maker of its tuning.
    """
    end = time.monotonic() + how.budget
    recorders: dict[str, ResultRecorder] = {}
    found = _Many(works, how, make, recorders).run()
    while _goes_on(found, how, end):
        LOG.info("%.3f times as fast, and time is left: searching on", overall(found))
        more = _Many(works, replace(how, budget=end - time.monotonic()), make, recorders).run()
        if len(more) != len(found):
            break  # there was no time to profile all of them again; the results are stored
        found = [_joined(one, other) for one, other in zip(found, more, strict=True)]
    return found


def _goes_on(found: Sequence[TuningResult], how: SeveralTuningOptions, end: float) -> bool:
    """Whether another round is useful: the wanted gain is not reached, and time and layers are left."""
    left = end - time.monotonic()
    some = any(is_left(layer) or layer.skipped == ENOUGH for result in found for layer in result.layers)
    stopped = any(result.stopped for result in found)
    cost = sum(result.making for result in found)
    return not stopped and some and overall(found) < how.goal.gain and left > max(AGAIN * how.budget, NETWORKS * cost)


def _joined(first: TuningResult, then: TuningResult) -> TuningResult:
    """Join two rounds into one result."""
    before = {layer.problem.key(): layer for layer in first.layers}
    layers = [layer if layer.outcome is not None else before.get(layer.problem.key(), layer) for layer in then.layers]
    gain = then.gain or first.gain
    if first.gain is not None and then.gain is not None:
        a, b = first.gain, then.gain
        gain = Ratio(a.median * b.median, a.low * b.low, a.high * b.high, min(a.pairs, b.pairs))
    # if `gain` is unknown, the promised time
    after = then.after if any(layer.chosen is not None for layer in layers) else first.before
    after = first.before / gain.median if gain is not None else after
    seconds = {name: first.seconds.get(name, 0.0) + then.seconds.get(name, 0.0) for name in then.seconds}
    return TuningResult(
        layers, first.before, after, gain, max(first.error, then.error), [*first.undone, *then.undone], then.stopped,
        seconds, then.written, then.path, then.energy, then.making,
    )  # fmt: skip


class _Many(Tuning):
    def __init__(
        self, works: Sequence[Workload], how: SeveralTuningOptions, make: Callable[[Model], tuple[SingleDevice, Maker]],
        recorders: dict[str, ResultRecorder],
    ) -> None:  # fmt: skip
        """``recorders``: by titles of works; missing ones are added."""
        super().__init__(how, QUIET)
        self.works, self.how, self._make, self._recorders = works, how, make, recorders
        self.members: list[_Member] = []
        self.layers: list[_Shared] = []
        self._searched: list[_Shared] = []
        self._end = ""

    def run(self) -> list[TuningResult]:
        for name, phase in (("profile", self.profile), ("search", self.search), ("decide", self.decide)):
            begin = self.elapsed
            with self._any_time():
                phase()
            self.spent[name] = self.elapsed - begin
        return [self._result(member) for member in self.members]

    @contextlib.contextmanager
    def _any_time(self) -> Iterator[None]:
        """Context in which Ctrl-C ends a phase; results are already stored."""
        try:
            yield
        except KeyboardInterrupt:
            self.stopped = True

    # ---- phases ------------------------------------------------------------------------------------------------------

    def profile(self) -> None:
        """Find the layers of every work with their times, then the common layers."""
        self.tell("profile")
        errors: list[TunewrightError] = []
        for number, work in enumerate(self.works):
            if self.until(PROFILE_SHARE * self.budget) <= 0 and self.members:
                LOG.warning("no time was left to look at %s", ", ".join(one.title for one in self.works[number:]))
                break
            try:
                self.members.append(self._profiled(work))
            except TunewrightError as error:
                if len(self.works) == 1:
                    raise
                errors.append(error)
                LOG.warning("%s is left out: %s", work.title, error)
        if errors and not self.members:
            raise errors[0]
        self._weigh()
        self._share()

    def _profiled(self, work: Workload) -> _Member:
        begin = self.elapsed
        model, values = work.open()
        plugin, maker = self._make(model)
        tuning = maker(model, values, self.settings)
        recorder = self._recorders.get(work.title)
        if recorder is None:
            how = self.how
            recorder = ResultRecorder("model", work.title, plugin.device, how.settings, how.budget, None, how.command)
            self._recorders[work.title] = recorder
        member = _Member(work, tuning, recorder)
        with tuning._any_time():
            tuning.profile()
        self.stopped = self.stopped or tuning.stopped
        tuning.model = Model(Graph(model.name))  # the model is read again when the network decides
        member.seconds = sum(layer.seconds for layer in tuning.layers)
        member.cost = self.elapsed - begin
        recorder(TuningState("profile", tuning.layers, None, None, self.elapsed, self.budget))
        return member

    def _weigh(self) -> None:
        """Set the weight of a second of each work: all works of a model together weigh as much as the model."""
        totals: dict[str, float] = {}
        for member in self.members:
            totals[member.work.model] = totals.get(member.work.model, 0.0) + member.work.part * member.seconds
        for member in self.members:
            total = totals[member.work.model]
            member.value = member.work.importance * member.work.part / total if total else 0.0

    def _share(self) -> None:
        """Make one layer for each problem on a device. Its weighted seconds add up to those of all works."""
        counted = sum(member.value * member.seconds for member in self.members)
        scale = sum(member.seconds for member in self.members) / counted if counted else 0.0
        several = len({member.work.model for member in self.members}) > 1
        found: dict[tuple[str, Where], _Shared] = {}
        for member in self.members:
            member.name = f"{Path(member.work.model).stem}: " if several else ""
            for layer in member.tuning.layers:
                at = layer.problem.key(), Where.of(layer.device.target)
                one = found.setdefault(at, _Shared(layer.problem, layer.device, layer.choice, []))
                weight = scale * member.value
                one.floor = None if layer.floor is None or (one.parts and one.floor is None) else (
                    (one.floor or 0.0) + weight * layer.floor
                )  # fmt: skip
                one.seconds += weight * layer.seconds
                one.nodes += [f"{member.name}{node}" for node in layer.nodes]
                one.bound = layer.bound
                one.parts.append((member, layer))
                member.tuning._worthwhile(layer)
        self.layers = sorted(found.values(), key=lambda layer: -layer.seconds)
        for one in self.layers:
            skipped = [layer.skipped for _, layer in one.parts]
            one.skipped = skipped[0] if all(skipped) else ""

    def search(self) -> None:
        """Search for better kernels, in the layers with the largest weighted hope first."""
        decide = reserve(self.budget, self.elapsed, sum(member.tuning.making for member in self.members))
        small = all(member.tuning.nbytes <= member.tuning.cache_bytes for member in self.members)
        todo = [layer for layer in self.layers if not layer.skipped]
        self._end = "search"
        hopes, regime = [(layer, layer.hope) for layer in todo], "warm" if small else None
        self.search_all(hopes, self.budget - decide, regime)
        why, self._end = self.enough(), ""
        for layer in todo:
            if why and layer.outcome is None and not self.stopped:
                layer.skipped = why
            for member, part in layer.parts:
                part.skipped = part.skipped or layer.skipped
                member.recorder(TuningState("search", member.tuning.layers, part, None, self.elapsed, self.budget))

    def found(self, layer: TunedLayer, outcome: Outcome) -> None:
        assert isinstance(layer, _Shared)
        self._searched.append(layer)
        for member, part in layer.parts:
            part.outcome, part.budget, part.skipped = outcome, layer.budget, ""
            member.recorder(TuningState("search", member.tuning.layers, part, None, self.elapsed, self.budget))

    def until(self, end: float) -> float:
        left = super().until(end)
        return 0.0 if self._end == "search" and self.enough() else left

    def enough(self) -> str:
        """Return why no further layer should be searched; empty if the goal is not reached."""
        goal, total = self.how.goal, sum(layer.seconds for layer in self.layers)
        if not total:
            return ""
        promised = total / max(total - sum(saved(layer) for layer in self._searched), 1e-12)
        if promised - 1 >= MARGIN * (goal.gain - 1):
            return ENOUGH
        waiting = [layer for layer in self.layers if is_waiting(layer)]
        if goal.stalls and len(self._searched) >= ROW:
            lately = sum(saved(layer) for layer in self._searched[-ROW:])
            if lately < WORTH * total and expected(self.layers, waiting) < WORTH * total:
                return STALLED
        return ""

    def decide(self) -> None:
        """Let the network decide for each work, in order of weight."""
        waiting = sorted(self.members, key=lambda member: -member.value * member.seconds)
        while waiting:
            member = waiting.pop(0)
            mine = member.value * member.seconds
            total = mine + sum(other.value * other.seconds for other in waiting)
            left = self.until(self.budget)
            self.tell("network")
            self._decide(member, max(0.0, left) * (mine / total if total else 1.0))

    def _decide(self, member: _Member, seconds: float) -> None:
        tuning = member.tuning
        tuning.model, values = member.work.open()
        tuning.values = dict(values)
        tuning.start, tuning.budget = time.monotonic(), seconds
        tuning.stopped = tuning.stopped or self.stopped
        begin = tuning.elapsed
        with tuning._any_time():
            tuning.network()
        tuning.spent["network"] = tuning.elapsed - begin
        member.result = tuning.whole()
        self.stopped = self.stopped or tuning.stopped
        tuning.model = Model(Graph(tuning.model.name))
        self._result(member)

    def _result(self, member: _Member) -> TuningResult:
        """Return the result of a work. A work that was not reached has the results of its search."""
        if member.result is None:
            layers = member.tuning.layers
            member.result = TuningResult(layers, member.seconds, member.seconds, None, 0.0, [], True, {})
        result = member.result
        result.stopped, result.making = result.stopped or self.stopped, member.tuning.making
        if not result.written:
            result.seconds = {"profile": member.cost, "search": self.spent.get("search", 0.0), **result.seconds}
            member.recorder.finish(result)
        return result
