"""Explain why every layer of a compiled model runs as it does: `explain`.

A layer is a step of a plan. Its explanation names the chosen solver, the source of that choice and the alternatives. It
also says what every other solver answered, and how near the layer comes to the device's limits. `explain` tunes, stores
and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from statistics import median, quantiles
from typing import Any

from tunewright.devices import kernel_cache
from tunewright.devices.base import Device
from tunewright.devices.host import HostDevice
from tunewright.devices.kernel_cache import KernelCache
from tunewright.errors import InputError
from tunewright.measure.ceilings import ceilings, work_of
from tunewright.search.space import Config
from tunewright.solvers.base import Problem
from tunewright.tuning.tuner import Choice

from ..plans.deferred_kernels import LateKernel, ShapeKernel
from ..plans.plan import Plan, Step
from ..plans.program import Program
from ..requests.executor import Executor, Values, slot_value
from ..requests.frame import BoundSegment, Frame
from ..requests.request import DeviceModel, DeviceRequest
from .counters import Counters
from .explanation import (
    CONTROL,
    FROM_SHAPES,
    LATE,
    OPTIMIZED_OUT,
    Barred,
    Explanation,
    Opinion,
    Proof,
    Roofline,
    RunnerUp,
    State,
    Timing,
)
from .solver_verdicts import AskedProblem, unasked

__all__ = ["Barred", "Explanation", "Opinion", "Proof", "Roofline", "RunnerUp", "State", "Timing", "explain"]

#: seconds that a model is timed for, and the least and the greatest number of inferences for that
SECONDS, LEAST, MOST = 1.0, 3, 1000


def explain(
    compiled: DeviceModel,
    inputs: Mapping[str, Any] | Sequence[Any] | Any = None,
    *,
    seconds: float = SECONDS,
    count: int | None = None,
) -> list[Explanation]:
    """Explain every layer in the order of the plan. Layers of a body follow their node; those of a later segment come
    last.

    With ``inputs`` the model runs, and its layers are timed for ``seconds`` or over ``count`` inferences (0: it runs
    once, and nothing is timed). Without inputs it explains the plan that was used last, and times nothing.
    """
    run = None if inputs is None else _Run(compiled, inputs, seconds, count)
    plans = [*run.clock.plans][:1] if run is not None else compiled.program.plans[-1:]
    if not plans:
        raise InputError("no plan is made yet: the shapes of its inputs are open", hint="give inputs to explain")
    layers = _Layers(compiled, run)
    with kernel_cache.using(KernelCache.of(compiled.settings)):
        return [layers.explain(*at) for at in steps(plans[0], "", None if run is None else run.clock.plans)]


def steps(plan: Plan, inside: str = "", seen: Collection[Plan] | None = None) -> Iterator[tuple[Plan, Step, str]]:
    """Yield the steps of a plan, of its bodies and of the segments behind it. ``seen``: only plans among these."""
    below = f"{inside} / " if inside else ""
    for step in plan.steps:
        yield plan, step, inside
        if step.control is not None:
            for key, program in step.control.bodies.items():
                for inner in _plans(program, seen):
                    yield from steps(inner, f"{below}{_name(step)}.{key}", seen)
    if plan.rest is not None:
        head, _, number = inside.rpartition("segment ")
        later = f"{head}segment {int(number) + 1}" if number.isdecimal() else f"{below}segment 2"
        for inner in _plans(plan.rest, seen):
            yield from steps(inner, later, seen)


def _plans(program: Program, seen: Collection[Plan] | None) -> list[Plan]:
    return [plan for plan in program.plans if seen is None or plan in seen]


def _name(step: Step) -> str:
    return step.node.name or step.node.output.name


# ---- running and timing ---------------------------------------------------------------------------------------------


class _Clock(Counters):
    """Records the plans that ran, and the seconds of each step in each inference that counts."""

    def __init__(self) -> None:
        super().__init__()
        #: in the order in which they were first entered
        self.plans: dict[Plan, None] = {}
        self.spent: dict[Step, list[float]] = {}
        self.calls: dict[Step, int] = {}
        self._inference: dict[Step, tuple[float, int]] = {}

    def clear(self) -> None:
        super().clear()
        self._inference = {}

    def enter(self, plan: Plan) -> None:
        super().enter(plan)
        self.plans[plan] = None

    def record(
        self, step: Step, seconds: float, launches: int = 0, begin: float | None = None, calls: int = 1
    ) -> None:  # fmt: skip
        before, often = self._inference.get(step, (0.0, 0))
        self._inference[step] = before + seconds, often + calls

    def keep(self) -> None:
        """End an inference that counts."""
        for step, (seconds, calls) in self._inference.items():
            self.spent.setdefault(step, []).append(seconds)
            self.calls[step] = calls


class _Watching(Executor):
    """An executor that remembers the problems posed while steps run (see `LateKernel`)."""

    def __init__(self, compiled: DeviceModel, clock: Counters) -> None:
        super().__init__(compiled.env.device, clock, compiled.settings.max_tensor_bytes)
        self.posed: dict[Step, dict[str, Problem]] = {}

    def watch(self, frame: Frame, one: BoundSegment, values: Values) -> None:
        step = one.segment.steps[0]
        if isinstance(step.kernel, LateKernel):
            problem = step.kernel.pose(self.queue.fetch([slot_value(frame, values, i) for i in step.ins]))
            self.posed.setdefault(step, {})[problem.key()] = problem
        super().watch(frame, one, values)


class _Run:
    """Inferences of a model: one to find the plans that run, several to time them."""

    def __init__(self, compiled: DeviceModel, inputs: Any, seconds: float, count: int | None) -> None:
        self.clock = clock = _Clock()
        watching = _Watching(compiled, clock)
        request = DeviceRequest(compiled)
        request.counters, request.executor = clock, watching
        request.infer(inputs)
        self.posed = watching.posed
        if count == 0:
            return
        request.executor = Executor(compiled.env.device, clock, compiled.settings.max_tensor_bytes)
        request.infer(inputs)  # the first inference makes memory and binds arguments, so its time does not count
        begin = time.perf_counter()
        for done in range(1, (MOST if count is None else count) + 1):
            request.infer(inputs)
            clock.keep()
            if count is None and done >= LEAST and time.perf_counter() - begin >= seconds:
                break

    def timing(self, step: Step) -> Timing | None:
        spent = self.clock.spent.get(step)
        if not spent:
            return None
        lower, _, upper = quantiles(spent, n=4, method="inclusive") if len(spent) > 1 else spent * 3
        return Timing(median(spent), lower, upper, self.clock.calls[step], len(spent))


@cache
def _host() -> Device:
    return HostDevice("CPU.HOST")


# ---- what there is to say about a layer -----------------------------------------------------------------------------


class _Layers:
    """Explains steps. It keeps its findings about a problem, because layers often share one."""

    def __init__(self, compiled: DeviceModel, run: _Run | None) -> None:
        self.env, self.run = compiled.env, run
        self._asked: dict[tuple[str, Device, str, Config], AskedProblem] = {}

    def explain(self, plan: Plan, step: Step, inside: str) -> Explanation:
        node, timing = step.node, None if self.run is None else self.run.timing(step)
        problem, choice, origin, notes = self._choice(plan, step)
        bare = Explanation(
            name=_name(step), op=node.op, inside=inside, fused=tuple(each.op for each in node.epilogue),
            nodes=tuple(node.origin), device=plan.device.name,
            on_host=step.on_host and not plan.device.runs_references,
            problem="" if problem is None else problem.key(),
            kernel=step.kernel.name if step.kernel is not None else origin, solver="", config=Config(), origin=origin,
            timing=timing, note="; ".join(notes),
        )  # fmt: skip
        if problem is None or choice is None:
            return replace(bare, solvers=unasked(node.op, self.env.tuner, origin), roofline=Roofline(why=origin))
        at = (problem.key(), plan.device, choice.solver.id, Config(choice.config))
        if at not in self._asked:
            self._asked[at] = AskedProblem(self.env.tuner, problem, plan.device, choice)
        asked = self._asked[at]
        return replace(
            bare, solver=choice.solver.id, config=Config(choice.config), match=choice.match, found=asked.proof,
            runner_up=asked.runner_up(), solvers=asked.opinions(), barred=asked.barred(), nearest=choice.nearest,
            heuristic="" if choice.advice is None else choice.advice.why,
            candidates=asked.candidates(), measured=asked.measured(),
            roofline=self._roofline(plan, step, problem, timing),
        )  # fmt: skip

    def _choice(self, plan: Plan, step: Step) -> tuple[Problem | None, Choice | None, str, list[str]]:
        """Return a step's problem, the choice for it, the origin of that choice, and notes."""
        if step.optimized_out:
            return None, None, OPTIMIZED_OUT, []
        if step.control is not None:
            idle = [key for key, body in step.control.bodies.items() if not self._ran(body)]
            notes = [f"{' and '.join(idle)} did not run"] if idle else []
            if step.block is not None:
                return None, None, CONTROL, ["part of one launch with its bodies and neighbours", *notes]
            return None, None, CONTROL, [f"run by the request: {step.control.why_not_compiled}", *notes]
        if isinstance(step.kernel, ShapeKernel):
            return None, None, FROM_SHAPES, []
        if isinstance(step.kernel, LateKernel):
            posed = [] if self.run is None else [*self.run.posed.get(step, {}).values()]
            if not posed:
                return None, None, LATE, ["it did not run"]
            problem, choice = posed[-1], step.kernel.choose(posed[-1])
            notes = ["chosen as it runs: its shapes or operands come with the data"]
            if len(posed) > 1:
                notes.append(f"the last of its {len(posed)} problems in one inference")
            return problem, choice, choice.origin.value, notes
        assert step.choice is not None
        return Problem.of(step.node), step.choice, step.choice.origin.value, []

    def _ran(self, program: Program) -> bool:
        return bool(_plans(program, None if self.run is None else self.run.clock.plans))

    def _roofline(self, plan: Plan, step: Step, problem: Problem, timing: Timing | None) -> Roofline:
        work = work_of(problem)
        if isinstance(work, str):
            return Roofline(why=work)
        if timing is None:
            return Roofline(work, why="it was not timed")
        if self.run is not None and len(self.run.posed.get(step, {})) > 1:
            return Roofline(work, why="its shapes change during the inference")
        top = ceilings(_host() if step.on_host and not plan.device.runs_references else plan.device)
        if top.why:
            return Roofline(work, top, why=top.why)
        floor, bound = top.floor(work)
        floor *= timing.calls
        return Roofline(work, top, floor, bound, floor / timing.seconds if timing.seconds else None)
