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
    """What became of a node in the last inference."""

    EXECUTED = "EXECUTED"
    OPTIMIZED_OUT = "OPTIMIZED_OUT"  # folded, fused into another node, or nothing had to move
    NOT_RUN = "NOT_RUN"  # in a branch that was not taken, or a loop without iterations, or there was no inference yet


@dataclass
class CounterRow:
    """One node: what ran for it, and for how long (seconds, summed over ``calls``)."""

    name: str
    type: str
    status: NodeStatus
    kernel: str = ""
    device_seconds: float = 0.0
    host_seconds: float = 0.0
    calls: int = 0
    #: kernels launched on the device, over all calls; one launch of several nodes is counted at the first
    launches: int = 0
    #: where the choice of the kernel came from; for a node without one, what it was fused into
    origin: str = ""
    #: which device ran it, where a model has several
    device: str = ""
    #: the number of its part, where HETERO cut the model
    subgraph: int | None = None


@dataclass(frozen=True)
class Totals:
    """One inference as a whole."""

    seconds: float
    #: outside of waiting for the device: Python, and what it runs on the host
    host_seconds: float
    #: kernels launched on the device
    launches: int
    #: inputs on their way to the device's memory, results back; known where PERF_COUNT is on
    copy_seconds: float = 0.0


class Counters:
    """Rows of one request's last inference."""

    def __init__(self, device: str = "") -> None:
        self.device = device
        self._rows: dict[str, CounterRow] = {}
        self._seen: dict[Plan, None] = {}

    def clear(self) -> None:
        self._rows.clear()
        self._seen.clear()

    def enter(self, plan: Plan) -> None:
        """A plan is about to run."""
        self._seen[plan] = None

    def record(
        self, step: Step, seconds: float, launches: int = 0, begin: float | None = None, calls: int = 1
    ) -> None:  # fmt: skip
        """A step took so long on the device's clock. A control-flow step contains what its body's steps took.

        ``begin``: it began then, on that clock, and is over now.
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
        """Steps that were one launch, which was enqueued and known to be over at these times of the host."""
        for i, (step, seconds) in enumerate(zip(steps, times, strict=True)):
            self.record(step, seconds, launches=int(i == 0))
        recorder = timeline.active
        if recorder is not None:
            recorder.kernels(self.device, steps, times, begin, end)

    def record_inside(self, times: Iterable[tuple[Any, float, int]]) -> None:
        """Launches of bodies in a launch: each with its step, how long it took, and how often it ran."""
        for one, seconds, calls in times:
            if isinstance(one, BodyStep) and calls:
                self.enter(one.plan)
                self.record(one.step, seconds, calls=calls)

    def record_copy(self, name: str, begin: float, end: float, nbytes: int) -> None:
        """Bytes went to the device or came from there, by the host's clock."""
        recorder = timeline.active
        if recorder is not None:
            recorder.copy(self.device, name, begin, end - begin, nbytes)

    def table(self, model: Iterable[tuple[str, str]]) -> list[CounterRow]:
        """Every node of ``model`` (name, op) in its order, then what was inserted."""
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
