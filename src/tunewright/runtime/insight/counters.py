"""Performance counters: one row per node of the model, and one for each node that the compiler inserted."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tunewright.ir.graph import Graph

from ..control.body_rows import BodyStep
from ..plans.plan import Plan, Step
from . import timeline


class NodeStatus(enum.Enum):
    """The status of a node in the last inference."""

    EXECUTED = "EXECUTED"
    OPTIMIZED_OUT = "OPTIMIZED_OUT"  # folded, fused into another node, or nothing had to move
    NOT_RUN = "NOT_RUN"  # in a branch that was not taken, in a loop without iterations, or before the first inference


@dataclass
class CounterRow:
    """One node: the kernel that ran for it, and its time (seconds, summed over ``calls``)."""

    name: str
    type: str
    status: NodeStatus
    kernel: str = ""
    device_seconds: float = 0.0
    host_seconds: float = 0.0
    calls: int = 0
    #: kernels launched on the device, over all calls; a launch of several nodes counts at the first of them
    launches: int = 0
    #: where the choice of the kernel came from; for a node without a kernel, the node that it was fused into
    origin: str = ""
    #: the device that ran it, if the model has several
    device: str = ""
    #: the number of its part, if HETERO cut the model
    subgraph: int | None = None


@dataclass(frozen=True)
class Totals:
    """Totals of one inference."""

    seconds: float
    #: time outside of waiting for the device: Python, and steps on the host
    host_seconds: float
    #: kernels launched on the device
    launches: int
    #: time to copy inputs to the device's memory and results back; known if PERF_COUNT is on
    copy_seconds: float = 0.0


class Counters:
    """The rows of one request's last inference."""

    def __init__(self, device: str = "") -> None:
        self.device = device
        self._rows: dict[str, CounterRow] = {}
        self._seen: dict[Plan, None] = {}

    def clear(self) -> None:
        self._rows.clear()
        self._seen.clear()

    def enter(self, plan: Plan) -> None:
        """Note that a plan is about to run."""
        self._seen[plan] = None

    def record(
        self, step: Step, seconds: float, launches: int = 0, begin: float | None = None, calls: int = 1
    ) -> None:  # fmt: skip
        """Record the seconds of a step. A control-flow step includes the time of its body's steps.

        ``begin``: the start on the device's clock, for a step that has just ended.
        """
        recorder = timeline.active
        if begin is not None and recorder is not None:
            recorder.kernel(self.device, step, begin, seconds, launches)
        key = step.node.name or step.node.output.name
        row = self._rows.get(key)
        if row is None:
            kernel, origin = "control flow", ""
            if step.kernel is not None:
                kernel = step.kernel.name
            if step.choice is not None:
                origin = step.choice.why
            row = self._rows[key] = CounterRow(key, step.node.op, NodeStatus.EXECUTED, kernel, origin=origin)
        row.calls += calls
        row.launches += launches
        if step.on_host:
            row.host_seconds += seconds
        else:
            row.device_seconds += seconds

    def record_together(self, steps: Sequence[Step], times: Sequence[float], begin: float, end: float) -> None:
        """Record the steps of one launch. ``begin`` and ``end``: the host enqueued the launch, and learned of its end.
        """
        for i, (step, seconds) in enumerate(zip(steps, times, strict=True)):
            self.record(step, seconds, launches=int(i == 0))
        recorder = timeline.active
        if recorder is not None:
            recorder.kernels(self.device, steps, times, begin, end)

    def record_inside(self, times: Iterable[tuple[Any, float, int]]) -> None:
        """Record steps of bodies within a launch: for each the step, its seconds, and how often it ran."""
        for one, seconds, calls in times:
            if isinstance(one, BodyStep) and calls:
                self.enter(one.plan)
                self.record(one.step, seconds, calls=calls)

    def record_copy(self, name: str, begin: float, end: float, nbytes: int) -> None:
        """Record a copy to or from the device, by the host's clock."""
        recorder = timeline.active
        if recorder is not None:
            recorder.copy(self.device, name, begin, end - begin, nbytes)

    def table(self, model: Iterable[tuple[str, str]]) -> list[CounterRow]:
        """Return every node of ``model`` (name, op) in its order, then the inserted nodes."""
        fused = {name: step.node.name for plan in self._seen for step in plan.steps for name in step.node.origin}
        idle = {
            name
            for plan in self._seen
            for step in plan.steps
            if step.control is not None
            for program in step.control.bodies.values()
            for name in _origins(program.graph)
        }
        rows: dict[str, CounterRow] = {}
        for name, op in model:
            row = self._rows.get(name)
            if row is None:
                host = fused.get(name, "")
                unrun = not self._seen or (name in idle and not host)
                status = NodeStatus.NOT_RUN if unrun else NodeStatus.OPTIMIZED_OUT
                row = CounterRow(name, op, status, origin=f"fused into {host}" if host and host != name else "")
            rows[name] = row
        rows.update({name: row for name, row in self._rows.items() if name not in rows})
        return list(rows.values())


def _origins(graph: Graph) -> Iterable[str]:
    for g in graph.walk():
        for node in g.nodes:
            yield from node.origin
