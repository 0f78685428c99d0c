"""Costs of nodes on devices, and of transfers between devices.

The seconds of a node on a device are those of its kernel in the plan of the whole model there. They come from a request
(`profiled`), or from the knowledge bases (`known`). For nodes without a measurement they are estimated from the work,
scaled by the ratio of the device's measured kernels to their estimates.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunewright.devices.base import Device
from tunewright.ir.graph import Graph, Node
from tunewright.ir.types import DType, TensorType
from tunewright.knowledge.key import MatchKind
from tunewright.measure.ceilings import work_of
from tunewright.ops import lookup
from tunewright.runtime.plans.plan import Step
from tunewright.runtime.requests.request import DeviceModel, DeviceRequest
from tunewright.runtime.several.hetero_split import OVERHEAD
from tunewright.solvers.base import Problem
from tunewright.tuning.layout_costs import STEP, VECTORS

#: Of numpy references: operations and bytes per second, and seconds of a call.
HOST_FLOPS, HOST_BANDWIDTH, HOST_STEP = 5e9, 2e9, 30e-6
#: Seconds for open shapes: of the operations with most of a network's work, and of all others.
HEAVY, LIGHT = 1e-3, 2e-6
#: Costs count as known if this share of the estimated time was measured.
ENOUGH = 0.5
#: Bytes of transfers that are timed, and number of repetitions.
SMALL, LARGE, TIMES = 1 << 12, 1 << 22, 5


@dataclass
class NodeCosts:
    """Costs of all nodes on one device."""

    seconds: dict[Node, float]
    #: nodes that are one kernel there
    together: list[list[Node]]
    #: share of the estimated time that was measured
    share: float

    @property
    def is_known(self) -> bool:
        return self.share >= ENOUGH


def estimate(problem: Problem, device: Device) -> float | None:
    """Estimate the seconds of a static problem on a device of this kind; None if its work is unknown."""
    work = work_of(problem)
    if isinstance(work, str):
        return None
    units = max(1, device.target.units)
    if device.runs_references:
        return HOST_STEP + max(work.flops / HOST_FLOPS, work.bytes / HOST_BANDWIDTH)
    traits = device.target.traits
    flops = traits.unit_flops or 2.0 * max(1, device.target.vector_bytes // 4) * VECTORS
    return STEP + max(work.flops / (units * flops), work.bytes / (units * traits.unit_bandwidth))


def roughly(node: Node, device: Device) -> float:
    """Estimate the seconds of a single node, also if its shapes are unknown."""
    if not node.bodies:
        found = estimate(Problem.of(node), device)
        if found is not None:
            return found
    spec = lookup(node.op)
    inner = (n for body in node.bodies.values() for graph in body.walk() for n in graph.nodes)
    heavy = (spec is not None and spec.heavy) or any((s := lookup(n.op)) is not None and s.heavy for n in inner)
    return HEAVY if heavy else LIGHT


def known(graph: Graph, model: DeviceModel) -> NodeCosts | None:
    """Return costs from exact measurements of the kernels in the whole model's plan; None if there is no plan yet."""
    plans = model.program.plans
    if not plans:
        return None

    def measured(step: Step) -> float | None:
        choice = step.choice
        if choice is None or choice.measurement is None or choice.match is None:
            return None
        return choice.measurement.evidence.seconds if choice.match.kind is MatchKind.EXACT else None

    return _costs(graph, [step for plan in plans for step in plan.steps], model.env.device, measured)


def profiled(graph: Graph, request: DeviceRequest, values: Mapping[str, Any], times: int = 3) -> NodeCosts:
    """Return costs from a request's counters: the minimum seconds of each step in some inferences. Needs PERF_COUNT."""
    least: dict[str, float] = {}
    for lap in range(times + 1):
        request.run(values)
        for row in request.get_profiling_info():
            if lap and row.calls:
                spent = row.device_seconds + row.host_seconds
                least[row.name] = min(spent, least.get(row.name, math.inf))
    steps = [step for plan in request.model.program.plans for step in plan.steps]

    def measured(step: Step) -> float | None:
        return least.get(step.node.name or step.node.output.name)

    return _costs(graph, steps, request.model.env.device, measured)


def _costs(
    graph: Graph, steps: Sequence[Step], device: Device, measured: Callable[[Step], float | None]
) -> NodeCosts:  # fmt: skip
    by_name: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for name in dict.fromkeys((node.name, *node.origin)):
            by_name.setdefault(name, []).append(node)
    seconds = dict.fromkeys(graph.nodes, 0.0)
    together: list[list[Node]] = []
    rows: list[tuple[list[Node], float | None, float]] = []
    for step in steps:
        if step.optimized_out:
            continue
        nodes = list(dict.fromkeys(n for name in (step.node.name, *step.node.origin) for n in by_name.get(name, ())))
        guess = HEAVY if step.control is not None else estimate(Problem.of(step.node), device)
        rows.append((nodes, measured(step), LIGHT if guess is None else guess))
        if len(nodes) > 1:
            together.append(nodes)
    found = [(real, guess) for _, real, guess in rows if real is not None]
    scale = sum(real for real, _ in found) / max(sum(guess for _, guess in found), 1e-12) if found else 1.0
    whole = sum(guess for *_, guess in rows)
    stray = 0.0
    for nodes, real, guess in rows:
        spent = real if real is not None else scale * guess
        if nodes:
            seconds[nodes[0]] += spent
        else:  # inserted steps, such as those between layouts, are distributed over all nodes
            stray += spent
    total = sum(seconds.values())
    if stray and total:
        seconds = {node: spent * (1 + stray / total) for node, spent in seconds.items()}
    return NodeCosts(seconds, together, sum(guess for _, guess in found) / whole if whole else 0.0)


@dataclass(frozen=True)
class Link:
    """Speed of transfers between the memories of host and device, in one direction."""

    latency: float = 0.0
    #: seconds per byte
    byte: float = 0.0

    def seconds(self, nbytes: int) -> float:
        return self.latency + self.byte * nbytes


_LINKS: dict[Device, tuple[Link, Link]] = {}
_LOCK = threading.Lock()


def links(device: Device) -> tuple[Link, Link]:
    """Return the links to and from a device, measured once per process. With shared memory, nothing is moved."""
    if device.shares_memory:
        return Link(), Link()
    with _LOCK:
        if device not in _LINKS:
            _LINKS[device] = _measured(device)
        return _LINKS[device]


def _measured(device: Device) -> tuple[Link, Link]:
    queue = device.queue()
    times: list[tuple[float, float]] = []
    for size in (SMALL, LARGE):
        type = TensorType(DType.UINT8, (size,))
        there, here = device.view(device.alloc(size), 0, type), np.ones(size, np.uint8)

        def put(there: Any = there, here: Any = here) -> None:
            queue.put(here, there)
            queue.finish()

        times.append((_least(put), _least(lambda there=there: queue.fetch([there]))))  # type: ignore[misc]
    (put_small, get_small), (put_large, get_large) = times
    step = LARGE - SMALL
    return (
        Link(put_small, max(0.0, put_large - put_small) / step),
        Link(get_small, max(0.0, get_large - get_small) / step),
    )


def _least(call: Callable[[], object]) -> float:
    call()
    best = math.inf
    for _ in range(TIMES):
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best


def transfer(devices: Sequence[Device]) -> Callable[[int, int, int], float]:
    """Return a function (from, to, bytes) -> seconds for a transfer through the host."""
    known = [links(device) for device in devices]

    def seconds(source: int, target: int, nbytes: int) -> float:
        return OVERHEAD + known[source][1].seconds(nbytes) + known[target][0].seconds(nbytes)

    return seconds
