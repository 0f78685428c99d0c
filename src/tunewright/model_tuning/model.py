"""Tune a whole model within a time limit: search where it pays, and decide inside the running network.

1. *Profile*: the model runs as it is, and the time of every layer (all nodes that pose the same problem) is measured.
2. *Search*: layers are searched in order of hope. Each gets its share of the time that is left for the layers to come.
   Results go into the user's knowledge base at once, so stopping loses nothing.
3. *Network*: networks with the best, second and third candidate of every layer run in turns with the present one, timed
   per layer. A kernel that wins alone but loses here, between its neighbours, no longer answers.
4. *Whole*: the network with all winners runs against the present one, without counters. If it is not faster, changes
   are taken back by halves until it is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..devices import build_options
from ..devices.base import Device
from ..errors import DatabaseError, TunewrightError
from ..frontend.model import Model
from ..knowledge.database import newest
from ..knowledge.key import Key, MatchKind
from ..knowledge.record import Measurement, Ratio
from ..measure import statistics
from ..measure.base import Candidate, Regime
from ..measure.ceilings import ceilings, work_of
from ..plugins.single import SingleDevice
from ..runtime.insight.counters import Counters
from ..runtime.insight.explain import steps
from ..runtime.plans.plan import Step
from ..runtime.requests.request import DeviceRequest
from ..search.space import Config as Plain
from ..settings import Settings
from ..solvers.base import Config, Problem
from ..tuning import evidence
from ..tuning.knowledge_layers import warn
from ..tuning.policy import QUIET
from ..tuning.tuner import Choice, Origin, Tuner
from .agreement import agree, coarsest
from .layers import TunedLayer, Tuning, TuningOptions, TuningResult, reserve

#: Share of the decision's time for comparing whole networks; before that, candidates race in the network.
WHOLE_SHARE = 0.5
#: Layers that together take less than this share of the network's time are left alone.
TAIL = 0.01
#: Maximum number of networks that run against the present one.
RIVALS = 3
#: Inferences of the profile: minimum number, maximum number, and seconds.
PROFILE_RUNS, MOST_RUNS, PROFILE_SECONDS = 5, 30, 1.5
#: Maximum number of rounds of contests.
NETWORK_ROUNDS, WHOLE_ROUNDS = 150, 200
#: A network of up to this many times the last-level cache runs once untimed before it is timed.
CACHES = 4
#: Minimum number of rounds of a contest, whatever the time: fewer rounds are meaningless.
LEAST_ROUNDS = 16
#: Risk that an interval is wrong, for each layer and for the whole network. Layers are not corrected for their number:
#: a candidate that passes by chance is about as fast as the default. The whole network decides in the end.
ALPHA = 0.02


class Pinned(Tuner):
    """A tuner that chooses given candidates for some problems, and known ones for the others."""

    def __init__(self, settings: Settings, pins: Mapping[str, Candidate]) -> None:
        super().__init__(settings)
        self.pins = pins

    def choose(self, problem: Problem, device: Device) -> Choice:
        found = super().choose(problem, device)
        pin = self.pins.get(problem.key())
        if pin is None or found.solver.host:
            return found
        solver = next(s for s in self.candidates if s.id == pin[0])
        return Choice(solver, pin[1], Origin.SEARCH, found.ask)


def tune(
    plugin: SingleDevice,
    model: Model,
    values: Mapping[str, Any],
    options: TuningOptions,
) -> TuningResult:
    """Tune a model for inputs like ``values`` on a plugin's device."""
    return ModelTuning(plugin, model, values, options).run()


class ModelTuning(Tuning):
    def __init__(
        self, plugin: SingleDevice, model: Model, values: Mapping[str, Any], options: TuningOptions
    ) -> None:  # fmt: skip
        super().__init__(options, QUIET)
        self.plugin, self.model, self.values = plugin, model, dict(values)
        self.layers: list[TunedLayer] = []
        self.rng = np.random.default_rng(self.settings.tune_seed)
        #: bytes of weights and of values between layers; and size of the last-level cache
        self.nbytes = self.cache_bytes = 0
        #: seconds for making a network whose kernels are compiled already
        self.making = 0.0
        self.before = evidence.environment()

    def end(self, phase: str) -> float:
        """Return the time at which a phase should end, in seconds since the start."""
        decide = reserve(self.budget, self.spent.get("profile", 0.0), self.making)
        return self.budget - {"search": decide, "network": WHOLE_SHARE * decide, "whole": 0.0}[phase]

    def left(self, phase: str = "whole") -> float:
        """Return the seconds until a phase should end; 0 after a stop."""
        return self.until(self.end(phase))

    # ---- phases ------------------------------------------------------------------------------------------------------

    def run(self) -> TuningResult:
        for name, phase in (("profile", self.profile), ("search", self.search), ("network", self.network)):
            begin = self.elapsed
            with self._any_time():
                phase()
            self.spent[name] = self.elapsed - begin
        return self.whole()

    @contextlib.contextmanager
    def _any_time(self) -> Iterator[None]:
        """Context in which tuning may be interrupted: results are already stored.

        If Ctrl-C hits a compiler in this process, its program stays unfinished; that is no failure either.
        """
        try:
            yield
        except KeyboardInterrupt:
            self.stopped = True
        except TunewrightError:
            self.left()
            if not self.stopped:
                raise

    def compile(self, pins: Mapping[str, Candidate], counters: bool) -> DeviceRequest:
        settings = Settings.make({"PERF_COUNT": "YES" if counters else "NO"}, self.settings)
        compiled = self.plugin.compile(self.model, settings, Pinned(settings, pins))
        request = compiled.create_infer_request()
        if counters:
            request.counters = request.executor.counters = _Clock()
        request.infer(self.values)  # plans and kernels are made now
        return request

    def profile(self) -> None:
        """Find the layers and measure their times."""
        self.tell("profile")
        self.tuner.expect(self.plugin.device, self.budget)
        began, waited = time.monotonic(), build_options.waited()
        request = self.compile({}, counters=True)
        self.making = max(0.0, time.monotonic() - began - (build_options.waited() - waited))
        found: dict[str, TunedLayer] = {}
        walked = [at for plan in request.model.program.plans for at in steps(plan)]
        plans = {id(plan): plan for plan, _, _ in walked}.values()
        weights = {id(slot.const): slot.const.nbytes for plan in plans for slot in plan.slots if slot.const is not None}
        self.nbytes = sum(weights.values()) + sum(plan.arena_bytes for plan in plans)
        self.cache_bytes = max((plan.device.cache_bytes for plan in plans), default=0)
        for plan, step, _ in walked:
            if step.choice is None:
                continue
            problem = Problem.of(step.node)
            layer = found.setdefault(problem.key(), TunedLayer(problem, plan.device, step.choice, []))
            layer.nodes.append(step.node.name or step.node.output.name)
        runs: list[dict[str, float]] = []
        begin = time.monotonic()
        while len(runs) < PROFILE_RUNS or (len(runs) < MOST_RUNS and time.monotonic() - begin < PROFILE_SECONDS):
            runs.append(times(request, self.values))
        for key, layer in found.items():
            # the lower quartile, because the first runs after compiling are slow, and only ratios matter
            layer.seconds = float(np.quantile([run.get(key, 0.0) for run in runs], 0.25))
        self.layers = sorted(found.values(), key=lambda layer: -layer.seconds)
        for layer in self.layers:
            work, most = work_of(layer.problem), ceilings(layer.device)
            if not isinstance(work, str) and not most.why:
                floor, layer.bound = most.floor(work)
                layer.floor = floor * len(layer.nodes)

    def search(self) -> None:
        """Search for better kernels, in the layers with the largest hope first."""
        # weights of a small network are still in the cache when their layer runs again
        regime = "warm" if self.nbytes <= self.cache_bytes else None
        hopes = [(layer, layer.hope) for layer in self.layers if self._worthwhile(layer)]
        self.search_all(hopes, self.end("search"), regime)

    def _worthwhile(self, layer: TunedLayer) -> bool:
        total = sum(other.seconds for other in self.layers)
        smaller = sum(other.seconds for other in self.layers if other.seconds <= layer.seconds)
        if layer.choice.solver.host or not layer.problem.is_static:
            layer.skipped = "it runs on the host"
        elif smaller < TAIL * total:
            layer.skipped = "it takes next to no time"
        elif not self.again and layer.choice.match is not None and layer.choice.match.kind is MatchKind.EXACT:
            layer.skipped = "it was tuned before"
        return not layer.skipped

    def network(self) -> None:
        """Decide between candidates inside the running network."""
        entrants = {layer.problem.key(): self._entrants(layer) for layer in self.layers}
        raced = [layer for layer in self.layers if len(entrants[layer.problem.key()]) > 1]
        if not raced or self.left("network") <= 0:
            return
        self.tell("network")
        requests: list[DeviceRequest] = []
        for k in range(max(map(len, entrants.values()))):
            begin = self.elapsed
            pins = {key: found[k] if k < len(found) else found[0] for key, found in entrants.items()}
            requests.append(self.compile(pins, counters=True))
            rounds = LEAST_ROUNDS * len(requests) * sum(layer.seconds for layer in self.layers)
            if k and self.left("network") < self.elapsed - begin + rounds:
                break  # another network would leave no time to run them
        samples: list[list[dict[str, float]]] = [[] for _ in requests]
        for lap in range(NETWORK_ROUNDS):
            if self.left("network") <= 0 and (self.stopped or lap >= LEAST_ROUNDS):
                break
            for k in self.rng.permutation(len(requests)).tolist():
                self._warm_up(requests[k])
                samples[k].append(times(requests[k], self.values))
            self.tell("network")
        if len(samples[0]) < LEAST_ROUNDS:
            return  # stopped; so few rounds are meaningless
        for layer in raced:
            default, *others = entrants[layer.problem.key()]
            seconds = [[row[layer.problem.key()] for row in rows] for rows in samples]
            layer.network = {default: Ratio.one()}
            for candidate, theirs in zip(others, seconds[1:], strict=False):
                layer.network[candidate] = statistics.ratio(seconds[0], theirs, ALPHA)
                self._record(layer, candidate, theirs, default)
            self._decide(layer, default, seconds[0])

    def _entrants(self, layer: TunedLayer) -> list[Candidate]:
        """Return the candidates that run in the network: the default, the present one, and those that seem faster.

        Only one is returned if there is no choice, or if the network has decided before.
        """
        if layer.choice.solver.host or not layer.problem.is_static:
            return [layer.present]
        known = layer.choice.measurement
        if layer.outcome is None and known is not None and known.evidence.regime == "network":
            return [layer.present]
        default = self.tuner.default(layer.problem, layer.device)
        if default.solver.host:  # the device's own default is faulty, so there is no baseline
            return [layer.present]
        first = (default.solver.id, Plain(default.config))
        stored = [m for m in newest(self.tuner.measured(layer.problem, layer.device)) if self._usable(layer, m)]
        if layer.outcome is None and known is None and not stored:
            return [layer.present]
        stored.sort(key=lambda m: (not m.evidence.confirmed, -m.evidence.gain.median))
        found: list[Candidate] = [first, layer.present, *((m.key.solver, m.config) for m in stored)]
        return list(dict.fromkeys(found))[: RIVALS + 1]

    def _usable(self, layer: TunedLayer, m: Measurement) -> bool:
        """Whether a measurement shows a candidate that seems faster than the default, under the present software."""
        solver = next((s for s in self.tuner.candidates if s.id == m.key.solver), None)
        if solver is None or m.evidence.gain.median <= 1:
            return False
        return m.key == Key.of(layer.problem, layer.device.target, solver, m.config)

    def _decide(self, layer: TunedLayer, default: Candidate, seconds: Sequence[float]) -> None:
        """Choose the fastest candidate in the network that certainly gains over the default; else the default.

        Candidates that noise leaves open keep their state.
        """
        others = {c: ratio for c, ratio in layer.network.items() if c != default}
        sure = [c for c, ratio in others.items() if ratio.low >= 1 or (ratio.median > 1 and self._sure(layer, c))]
        best = max(sure, key=lambda c: layer.network[c].median, default=default)
        if best == default:
            if any(ratio.median > 1 for ratio in others.values()):
                return
            if _is_judged(layer):
                self._record(layer, default, seconds, default)
        layer.chosen = best if best != layer.present else None

    def _sure(self, layer: TunedLayer, candidate: Candidate) -> bool:
        """Whether a search confirmed the candidate."""
        records = self.tuner.measured(layer.problem, layer.device)
        return any(m.evidence.confirmed and _is(m, candidate) and m.evidence.regime != "network" for m in records)

    def _record(self, layer: TunedLayer, candidate: Candidate, samples: Sequence[float], default: Candidate) -> None:
        """Record the result of a candidate in the network, unless the network left it open."""
        ratio = layer.network[candidate]
        if ratio.low < 1 <= ratio.median:
            return  # the search's result remains
        solver = next(s for s in self.tuner.candidates if s.id == candidate[0])
        mine = [m for m in self.tuner.measured(layer.problem, layer.device) if _is(m, candidate)]
        error = max((m.evidence.error for m in mine), default=0.0)
        made = evidence.measurement(
            layer.problem,
            layer.device.target,
            solver,
            candidate[1],
            evidence.ContestSamples(samples, error, ratio, Ratio.one(), True, default),
            Regime("network", 1, 0),
            self.before,
        )
        self._add([made])

    def _add(self, records: Sequence[Measurement]) -> None:
        try:
            self.tuner.user.add(records)
        except DatabaseError as error:
            warn(f"results of tuning are lost when this process ends: {error}")

    def whole(self) -> TuningResult:
        """Compare the network with all changes to the one without; take changes back while it seems slower."""
        begin = self.elapsed
        undone: list[TunedLayer] = []
        gain, before, after, error = None, float("nan"), float("nan"), 0.0
        before_it = {layer.problem.key(): layer.present for layer in self.layers}
        old: DeviceRequest | None = None
        with self._any_time():
            while (changed := [layer for layer in self.layers if layer.chosen is not None]) and not self.stopped:
                self.tell("whole")
                old = old or self.compile(before_it, counters=False)
                pins = {layer.problem.key(): layer.chosen for layer in changed if layer.chosen is not None}
                new = self.compile({**before_it, **pins}, counters=False)
                right, error = self._compare(old, new, coarsest(old, new))
                a, b = self._duel(old, new)
                if len(a) >= LEAST_ROUNDS:  # fewer rounds, after a stop, are meaningless
                    quiet = statistics.quiet(a, b)
                    gain = statistics.ratio(a, b, ALPHA)
                    before, after = float(np.median(quiet[0])), float(np.median(quiet[1]))
                if right and (self.stopped or (gain is not None and gain.median >= 1)):
                    break
                # take back the half with the least certain gains; all if no further comparison follows
                gain, half = None, (len(changed) + 1) // 2
                for layer in sorted(changed, key=lambda layer: layer.gain)[: len(changed) if self.stopped else half]:
                    self._take_back(layer)
                    undone.append(layer)
        changed = [layer for layer in self.layers if layer.chosen is not None]
        if not changed and before == before:
            after = before
        elif gain is None:  # nothing was changed or compared: use the profile's times and the layers' gains
            before = sum(layer.seconds for layer in self.layers)
            after = sum(layer.seconds / layer.gain for layer in self.layers)
        self.spent["whole"] = self.elapsed - begin
        return TuningResult(
            self.layers, before, after, gain, error if changed else 0.0, undone, self.stopped, self.spent
        )

    def _compare(self, old: DeviceRequest, new: DeviceRequest, inside: float) -> tuple[bool, float]:
        """Compare the outputs with `agree`.

        A network with random numbers always passes, because it disagrees with itself.
        """
        once = old.infer(self.values)
        right, error = agree(once, new.infer(self.values), inside)
        return right or not agree(once, old.infer(self.values), inside)[0], error

    def _duel(self, old: DeviceRequest, new: DeviceRequest) -> tuple[list[float], list[float]]:
        """Return the seconds of inferences of both networks, in turns."""
        both = (old, new)

        def turn(k: int) -> float:
            self._warm_up(both[k])
            begin = time.perf_counter()
            both[k].infer(self.values)
            return time.perf_counter() - begin

        return self._turns(turn)

    def _turns(self, turn: Callable[[int], float]) -> tuple[list[float], list[float]]:
        """Run turns of the old and the new network in random order while there is time, and return their values."""
        samples: tuple[list[float], list[float]] = ([], [])
        for lap in range(WHOLE_ROUNDS):
            if self.left() <= 0 and (self.stopped or lap >= LEAST_ROUNDS):
                break
            for k in self.rng.permutation(2).tolist():
                samples[k].append(turn(k))
        return samples

    def _warm_up(self, request: DeviceRequest) -> None:
        """Run a network once if it may stay in the cache, because others have just evicted it."""
        if self.nbytes <= CACHES * self.cache_bytes:
            request.infer(self.values)

    def _take_back(self, layer: TunedLayer) -> None:
        """Take back a change that does not pay in the whole network.

        It answers again only if a later search finds it better.
        """
        assert layer.chosen is not None
        default = next(iter(layer.network))
        ratio = layer.network[layer.chosen]
        layer.network[layer.chosen] = Ratio(min(ratio.median, 0.99), min(ratio.low, 0.99), ratio.high, ratio.pairs)
        if layer.chosen != default:
            self._record(layer, layer.chosen, [layer.seconds / max(ratio.median, 1e-9)] * 3, default)
        layer.chosen = None


def _is_judged(layer: TunedLayer) -> bool:
    """Whether this or an earlier search was long enough to state that nothing else is faster."""
    if layer.outcome is not None:
        return not layer.outcome.is_open
    return layer.choice.match is not None and layer.choice.match.kind is MatchKind.EXACT


class _Clock(Counters):
    """Seconds of each problem in one inference.

    Keyed by problem, because nodes may share a name, and several nodes may pose one problem.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}
        self._keys: dict[Step, str] = {}

    def clear(self) -> None:
        self.seconds = {}

    def record(
        self, step: Step, seconds: float, launches: int = 0, begin: float | None = None, calls: int = 1
    ) -> None:  # fmt: skip
        key = self._keys.get(step)
        if key is None:
            key = self._keys[step] = Problem.of(step.node).key() if step.choice is not None else ""
        self.seconds[key] = self.seconds.get(key, 0.0) + seconds


def times(request: DeviceRequest, values: Mapping[str, Any]) -> dict[str, float]:
    """Run one inference and return the seconds of each problem."""
    request.infer(values)
    assert isinstance(request.counters, _Clock)
    return request.counters.seconds


def _is(m: Measurement, candidate: tuple[str, Config]) -> bool:
    return (m.key.solver, m.config) == candidate
