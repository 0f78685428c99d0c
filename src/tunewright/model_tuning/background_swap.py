"""Replace kernels while a model serves, and go back if requests get slower.

A new plan is made beside the serving one, from kernels that are already compiled. Requests then use both plans in turns
(`runtime.requests.plan_trial`), and their latencies decide. The latency in the network counts, not the gain of a kernel
alone.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from ..devices import build_options, kernel_cache
from ..devices.base import Device
from ..devices.kernel_cache import Gathered, KernelCache
from ..errors import DatabaseError, TunewrightError
from ..ir.types import TensorType, Type
from ..knowledge.record import Evidence, Measurement, Ratio, now
from ..measure import protocol, statistics
from ..measure.base import Candidate
from ..measure.ceilings import work_of
from ..passes.base import run_passes
from ..passes.standard import SPECIALISE
from ..runtime.insight.explain import steps
from ..runtime.plans.load_phases import uncollected, yielding
from ..runtime.plans.plan import Plan
from ..runtime.requests.plan_trial import PlanTrial
from ..runtime.requests.request import DeviceModel
from ..runtime.requests.request_meter import Shapes, alive
from ..search.space import Config as Plain
from ..settings import Settings
from ..solvers.base import Kernel, Problem
from ..tuning.knowledge_layers import warn
from ..tuning.policy import QUIET
from ..tuning.tuner import Choice, Origin
from .model import Pinned

LOG = logging.getLogger("tunewright")
#: Risk that a swap is wrongly called slower or faster.
ALPHA = 0.02
#: Pairs of inferences after which a trial ends in any case, and pairs at its beginning that warm up.
MOST_PAIRS, WARM_UP = 192, 2
#: A trial ends early if the new plan is FAR_SLOWER in all of at least EARLY pairs.
FAR_SLOWER, EARLY = 1.5, 4
#: Without a certain result at the end, a plan with a lower median ratio is not kept.
SEEMS_SLOWER = 0.99
#: Assumed operations and bytes per second, only used to compare layers with each other.
FLOPS, BANDWIDTH = 2e11, 2e10


class TrialVerdict(enum.Enum):
    """Verdict of a trial on the new plan."""

    FASTER = "faster"
    ALIKE = "no difference beyond noise"
    SLOWER = "slower"
    DOUBTFUL = "seems slower, but within noise"

    @property
    def stays(self) -> bool:
        return self in (TrialVerdict.FASTER, TrialVerdict.ALIKE)


class Jury:
    """Decides a trial as early as possible, by a sequential test over pairs of latencies."""

    def __init__(self) -> None:
        self._spending = statistics.Spending(ALPHA)
        self._looks = statistics.looks(MOST_PAIRS)
        self._next = next(self._looks)

    def verdict(self, trial: PlanTrial) -> tuple[TrialVerdict, Ratio] | None:
        """Return the verdict and the speed-up of the new plan; None if more pairs are needed."""
        old, new = (seconds[WARM_UP:] for seconds in trial.pairs())
        found = None
        if EARLY <= len(old) < MOST_PAIRS and min(new) > FAR_SLOWER * max(old):
            gain = Ratio(median(old) / median(new), min(old) / max(new), max(old) / min(new), len(old))
            return TrialVerdict.SLOWER, gain
        while found is None and len(old) >= self._next:
            rounds, last = self._next, self._next >= MOST_PAIRS
            gain = statistics.ratio(old[:rounds], new[:rounds], self._spending.at(rounds, MOST_PAIRS, last))
            if gain.high < 1:
                found = TrialVerdict.SLOWER, gain
            elif gain.low > 1:
                found = TrialVerdict.FASTER, gain
            elif last:
                found = (TrialVerdict.ALIKE if gain.median >= SEEMS_SLOWER else TrialVerdict.DOUBTFUL), gain
            self._next = next(self._looks, MOST_PAIRS)
        return found


@dataclass
class PosedProblem:
    """A problem that a model poses for some shapes."""

    problem: Problem
    device: Device
    present: Candidate
    #: rough seconds of its work, summed over all nodes that pose it
    hope: float = 0.0


@dataclass(frozen=True)
class Winner:
    """A kernel that won when measured alone."""

    layer: PosedProblem
    candidate: Candidate
    programs: protocol.Programs = field(default_factory=dict, repr=False)

    @property
    def text(self) -> str:
        return f"{self.candidate[0]} {dict(self.candidate[1])}"


@dataclass
class SwapTrial:
    """Winners on trial for inputs of some types."""

    types: tuple[Type | None, ...]
    winners: Sequence[Winner]
    trial: PlanTrial
    tuner: Pinned
    jury: Jury = field(default_factory=Jury)
    #: whether the new plan poses the same problems as the old one; only then do these winners explain a loss
    is_alike: bool = True


def types_of(model: DeviceModel, shapes: Shapes) -> tuple[Type | None, ...]:
    """Return the types of the inputs for some shapes."""
    types = [value.type for value in model.graph.inputs]
    return tuple(
        type.with_shape(shape) if isinstance(type, TensorType) else type
        for type, shape in zip(types, shapes, strict=True)
    )


def plan_of(model: DeviceModel, types: Sequence[Type | None]) -> Plan | None:
    """Return the plan that serves these types now; None if another plan could not replace it."""
    if not all(isinstance(type, TensorType) and type.is_static for type in types):
        return None
    like = [np.broadcast_to(np.zeros((), t.dtype.numpy), t.dims) for t in types if isinstance(t, TensorType)]
    plan = model.program.plan_for(like)
    # growing results live on between inferences, in the memory of this plan
    return None if plan.template is not None and plan.template.states else plan


def layers_of(model: DeviceModel, types: tuple[Type | None, ...], plan: Plan) -> dict[str, PosedProblem]:
    """Return the problems that can be tuned for these types, with their present candidates."""
    found: dict[str, PosedProblem] = {}
    for device, problem, choice in _posed(model, types, plan):
        if choice.solver.host or not problem.is_static:
            continue
        present = choice.solver.id, Plain(choice.config)
        layer = found.setdefault(problem.key(), PosedProblem(problem, device, present))
        work = work_of(problem)
        layer.hope += 0.0 if isinstance(work, str) else max(work.flops / FLOPS, work.bytes / BANDWIDTH)
    return found


def _posed(model: DeviceModel, types: tuple[Type | None, ...], plan: Plan) -> Iterator[tuple[Device, Problem, Choice]]:
    if plan.template is None:
        for inner, step, _ in steps(plan):
            if step.choice is not None:
                yield inner.device, Problem.of(step.node), step.choice
        return
    # a plan for a class of shapes has the sizes that it was made for, so the problems are posed for these shapes
    graph, env = model.program.graph.clone(), model.env
    for value, type in zip(graph.inputs, types, strict=True):
        value.type = type
    run_passes(graph, SPECIALISE, env.context)
    for node in graph.nodes:
        problem = Problem.of(node)
        if not node.bodies and problem.is_static:
            with suppress(TunewrightError):  # a host reference serves it
                yield env.device, problem, env.tuner.choose(problem, env.device)


def begin(model: DeviceModel, types: tuple[Type | None, ...], winners: Sequence[Winner]) -> SwapTrial | None:
    """Make a plan with winners beside the serving one, and start a trial of both. None if the plan would not differ.

    Raises `TunewrightError` if no other plan can be made.
    """
    old = plan_of(model, types)
    if old is None:
        return None
    present = layers_of(model, types, old)
    winners = [w for w in winners if w.layer.problem.key() in present]
    pins = {key: layer.present for key, layer in present.items()}
    pins |= {w.layer.problem.key(): w.candidate for w in winners}
    tuner = Pinned(Settings.make(QUIET, model.env.settings), pins)
    with yielding(), uncollected():
        kernels = [(choice, w.layer.problem, kernel) for w in winners for choice, kernel in _built(model, tuner, w)]
        new = model.program.beside(types, model.env.beside(tuner, kernels))
        now_posed = {
            Problem.of(step.node).key(): (step.choice.solver.id, Plain(step.choice.config))
            for _, step, _ in steps(new) if step.choice is not None and not step.choice.solver.host
        }  # fmt: skip
        winners = [w for w in winners if now_posed.get(w.layer.problem.key()) == w.candidate]
        if not winners:
            return None
        if new.device.shares_memory:
            for request in alive(model.requests):
                if request.executor.has(old):
                    request.executor.prepare(new).touch()
    looks = [(t.dims, t.dtype.numpy) for t in types if isinstance(t, TensorType)] if old.template is not None else None
    swap = SwapTrial(types, winners, PlanTrial(old, new, looks=looks), tuner, is_alike=set(now_posed) == set(present))
    model.trial = swap.trial
    return swap


def _built(model: DeviceModel, tuner: Pinned, winner: Winner) -> list[tuple[Choice, Kernel]]:
    """Build the kernel of a winner from programs that the helper compiled."""
    solver = next(s for s in tuner.candidates if s.id == winner.candidate[0])
    cache = Gathered(winner.programs, closed=True) if winner.programs else KernelCache.of(model.env.settings)
    choice = Choice(solver, winner.candidate[1], Origin.SEARCH, dict)
    with build_options.using(model.env.settings), kernel_cache.using(cache):
        kernel = solver.compile(winner.layer.problem, winner.candidate[1], winner.layer.device)
        kernel.prepare()
    return [(choice, kernel)]


def end(model: DeviceModel, swap: SwapTrial, verdict: TrialVerdict, gain: Ratio) -> list[Sequence[Winner]]:
    """End a trial: keep the new plan, or go back to the old one. Returns smaller groups of winners to try next.

    A kernel that lost in the network is recorded, so that it is not tried again.
    """
    model.trial = None
    if verdict.stays:
        model.program.adopt(swap.types, swap.trial.new)
        model.env.tuner.chosen.update(swap.tuner.chosen)
        for winner in swap.winners:
            winner.layer.present = winner.candidate
        return []
    if len(swap.winners) > 1:
        half = len(swap.winners) // 2
        return [swap.winners[:half], swap.winners[half:]]
    if verdict is TrialVerdict.SLOWER and swap.is_alike:
        record_loss(model, swap.winners[0], gain)
    return []


def record_loss(model: DeviceModel, winner: Winner, gain: Ratio) -> None:
    """Record that a kernel lost in the running network, as `tune` does.

    If it ran against the default, also record that the default stays.
    """
    tuner, problem, device = model.env.tuner, winner.layer.problem, winner.layer.device
    stored = tuner.measured(problem, device)
    lost = _newest(stored, winner.candidate)
    if lost is None:
        return
    made = [_in_network(lost, Ratio(min(gain.median, 0.99), min(gain.low, 0.99), max(gain.high, 0.99), gain.pairs))]
    default = tuner.default(problem, device)
    first = (default.solver.id, Plain(default.config))
    if winner.layer.present == first and (before := _newest(stored, first)) is not None:
        made.append(_in_network(before, Ratio.one()))
    try:
        tuner.user.add(made)
        tuner.user.note("rolled back", f"{problem.key()}: {winner.text} was slower in the network")
    except DatabaseError as error:
        warn(f"that a kernel was slower in the network is lost when this process ends: {error}")


def _newest(stored: Sequence[Measurement], candidate: Candidate) -> Measurement | None:
    mine = [m for m in stored if (m.key.solver, m.config) == candidate]
    return max(mine, key=lambda m: (m.date, m.digest), default=None)


def _in_network(before: Measurement, gain: Ratio) -> Measurement:
    """Turn a candidate's own measurement into one of the network with this gain."""
    evidence: Evidence = replace(
        before.evidence, gain=gain, control=Ratio.one(), confirmed=True, regime="network", copies=1, nbytes=0
    )
    return replace(before, evidence=evidence, date=now())


class OwnRuns:
    """Runs the network in turns while no requests come, so that a trial need not wait for them."""

    def __init__(self, model: DeviceModel, values: Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]):
        self._executor = model.create_infer_request().executor
        self._program, self._values = model.program, [values[v.name] for v in model.graph.inputs]

    def pair(self, trial: PlanTrial) -> list[tuple[int, float]]:
        """Run one turn of each plan and return their numbers and seconds; empty if a request took a turn in between."""
        told: list[tuple[int, float]] = []
        for _ in range(2):
            number, plan = trial.turn()
            begin = time.perf_counter()
            self._executor.run(self._program, self._values, None, plan)
            told.append((number, time.perf_counter() - begin))
        (first, _), (second, _) = told
        return told if first % 2 == 0 and second == first + 1 else []
