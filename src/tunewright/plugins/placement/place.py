"""Place nodes on devices: by the order of devices, by the least sum of costs, or by the earliest end.

Fixed nodes stay on their device, and no node goes to a device that cannot run it. Costs are the seconds of nodes on
devices (`hetero_costs`), and of transfers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ops import lookup
from tunewright.passes.placement.layout_cut import least_cut

from ..base import Support

#: Resolution of a cut in seconds; its costs are integers.
TICK = 1e-9
#: Price of an edge that no cut may contain.
FORBIDDEN = 1 << 50
#: Maximum number of edges that a flow examines; a placement is computed once and used often.
MOST_STEPS = 2_000_000
#: Maximum number of rounds over all pairs of devices, if there are more than two.
MOST_ROUNDS = 4


def by_priority(
    graph: Graph, answers: Sequence[Mapping[str, Support]], fixed: Mapping[Node, int]
) -> dict[Node, int]:  # fmt: skip
    """Choose the first device with its own kernel for a node; without one, the first that runs it at all.

    No device is best for the nodes that `followers` returns; each goes to the device of its reader.
    """
    found: dict[Node, int] = {}
    reader = followers(graph)
    for node in reversed(graph.nodes):
        if node in fixed:
            found[node] = fixed[node]
            continue
        able = [i for i, said in enumerate(answers) if said[node.name]]
        own = [i for i in able if not answers[i][node.name].on_host]
        with_reader = found[reader[node]] if node in reader else -1
        found[node] = with_reader if with_reader in able else next(iter(own or able), 0)
    return found


def followers(graph: Graph) -> dict[Node, Node]:
    """Return nodes that should be with their first reader: those over constants, and arithmetic on shapes.

    They cost almost nothing, and their reader can be planned for their values only if it sees how they are computed.
    """
    found: dict[Node, Node] = {}
    for node in graph.nodes:
        spec = lookup(node.op)
        if node.bodies or spec is None:
            continue
        asks = spec.value_from_types is not None  # the result of Shape is arithmetic on shapes, whatever its input is
        known = all(v is None or v.const is not None or v.producer in found for v in node.inputs)
        readers = [r for v in node.outputs for r in v.users]
        if readers and (asks or known):
            found[node] = readers[0]
    return found


@dataclass
class PlacementProblem:
    """A placement problem. ``seconds``: time of a node by device; math.inf if the device cannot run it."""

    graph: Graph
    seconds: Mapping[Node, Sequence[float]]
    #: transfer of a value: (from, to, bytes) -> seconds
    transfer: Callable[[int, int, int], float]
    devices: int
    #: nodes that a device runs as one kernel; they are never separated
    together: Sequence[Sequence[Node]] = field(default_factory=tuple)

    @cached_property
    def units(self) -> list[list[Node]]:
        """Groups of nodes that stay together, in order."""
        leader = {node: node for node in self.graph.nodes}

        def find(node: Node) -> Node:
            while leader[node] is not node:
                leader[node] = leader[leader[node]]
                node = leader[node]
            return node

        for group in self.together:
            for node in group[1:]:
                leader[find(node)] = find(group[0])
        found: dict[Node, list[Node]] = {}
        for node in self.graph.nodes:
            found.setdefault(find(node), []).append(node)
        return list(found.values())

    @cached_property
    def unit(self) -> dict[Node, int]:
        return {node: k for k, unit in enumerate(self.units) for node in unit}

    def cost(self, k: int, device: int) -> float:
        """Return the seconds of a unit on a device."""
        return sum(self.seconds[node][device] for node in self.units[k])

    @cached_property
    def edges(self) -> list[tuple[int, int, list[int]]]:
        """(unit that makes a value, bytes of the value, other units that read it)."""
        found = []
        for node in self.graph.nodes:
            for value in node.outputs:
                readers = {self.unit[r] for r in value.users} - {self.unit[node]}
                if readers:
                    found.append((self.unit[node], nbytes(value), sorted(readers)))
        return found

    def total(self, labels: Sequence[int]) -> float:
        """Return the sum of the seconds of all nodes and transfers."""
        found = sum(self.cost(k, device) for k, device in enumerate(labels))
        for maker, size, readers in self.edges:
            for device in {labels[r] for r in readers} - {labels[maker]}:
                found += self.transfer(labels[maker], device, size)
        return found

    def spread(self, labels: Sequence[int]) -> dict[Node, int]:
        """Convert labels of units into labels of nodes."""
        return {node: labels[k] for k, unit in enumerate(self.units) for node in unit}


def nbytes(value: Value) -> int:
    """Return the bytes of a value; an unknown size counts as small."""
    tensor = value.tensor
    return tensor.nbytes if tensor is not None and tensor.is_static else 1024


def by_cut(problem: PlacementProblem) -> list[int]:
    """Minimise the sum of costs: exactly for two devices, and by repeated cuts between pairs for more."""
    every = range(problem.devices)
    starts = [[_cheapest(problem, k, [d, *every]) for k in range(len(problem.units))] for d in every]
    best = min(starts, key=problem.total)
    for _ in range(MOST_ROUNDS if problem.devices > 2 else 1):
        before = problem.total(best)
        for one in every:
            for other in range(one):
                found = _cut_pair(problem, best, other, one)
                if problem.total(found) < problem.total(best):
                    best = found
        if problem.total(best) >= before:
            break
    return best


def _cheapest(problem: PlacementProblem, k: int, order: Sequence[int]) -> int:
    """Return the first device if it runs the unit; else the cheapest that does."""
    first = order[0]
    return first if problem.cost(k, first) < math.inf else min(order, key=lambda d: problem.cost(k, d))


def _cut_pair(problem: PlacementProblem, labels: Sequence[int], zero: int, one: int) -> list[int]:
    """Choose optimally between two devices for all units on either of them."""
    mine = [k for k, device in enumerate(labels) if device in (zero, one)]
    number = {k: n for n, k in enumerate(mine)}
    prices = [0] * len(mine)

    def charge(n: int, device: int, seconds: float) -> None:
        ticks = FORBIDDEN if seconds == math.inf else round(seconds / TICK)
        prices[n] += ticks if device == one else -ticks

    for k, n in number.items():
        for device in (zero, one):
            charge(n, device, problem.cost(k, device))
    edges: list[tuple[int, int, int]] = []
    for maker, size, readers in problem.edges:
        inside = [number[r] for r in readers if r in number]
        if maker not in number:  # the value comes from a third device
            for n in inside:
                for device in (zero, one):
                    charge(n, device, problem.transfer(labels[maker], device, size))
            continue
        for device in {labels[r] for r in readers if r not in number}:  # the value goes to a third device
            for here in (zero, one):
                charge(number[maker], here, problem.transfer(here, device, size))
        if not inside:
            continue
        # A value is transferred once for all its readers: in each direction, one vertex represents them.
        there, back = round(problem.transfer(zero, one, size) / TICK), round(problem.transfer(one, zero, size) / TICK)
        far, near = len(prices), len(prices) + 1
        prices += [0, 0]
        edges += [(number[maker], far, there), (near, number[maker], back)]
        edges += [edge for n in inside for edge in ((far, n, FORBIDDEN), (n, near, FORBIDDEN))]
    found = least_cut(prices, edges, MOST_STEPS)
    return [(one if found[number[k]] else zero) if k in number else device for k, device in enumerate(labels)]


def by_schedule(problem: PlacementProblem) -> list[int]:
    """Minimise the end with devices working in parallel: units with the longest way to the end choose first (HEFT)."""
    count = len(problem.units)
    sources: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    targets: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for maker, size, readers in problem.edges:
        for reader in readers:
            sources[reader].append((maker, size))
            targets[maker].append((reader, size))
    mean = []
    for k in range(count):
        costs = [c for c in (problem.cost(k, d) for d in range(problem.devices)) if c < math.inf]
        mean.append(sum(costs) / max(1, len(costs)))
    order = _order(sources, targets)
    rank = [0.0] * count
    for k in reversed(order):
        ahead = (rank[t] + problem.transfer(0, problem.devices - 1, size) for t, size in targets[k])
        rank[k] = mean[k] + max(ahead, default=0.0)
    labels, end, free = [0] * count, [0.0] * count, [0.0] * problem.devices
    place = {k: i for i, k in enumerate(order)}
    for k in sorted(range(count), key=lambda k: (-rank[k], place[k])):
        ends = []
        for device in range(problem.devices):
            come = (
                end[s] + (0.0 if labels[s] == device else problem.transfer(labels[s], device, size))
                for s, size in sources[k]
            )
            ends.append(max(max(come, default=0.0), free[device]) + problem.cost(k, device))
        labels[k] = min(range(problem.devices), key=lambda d: (ends[d], d))
        end[k] = ends[labels[k]]
        if end[k] < math.inf:
            free[labels[k]] = end[k]
    return labels


def _order(sources: Sequence[Sequence[tuple[int, int]]], targets: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
    """Order units so that each comes after those that it reads.

    Units in cycles, which exist because a unit may have several nodes, come last.
    """
    waiting = [len({s for s, _ in source}) for source in sources]
    found = [k for k, number in enumerate(waiting) if not number]
    for k in found:
        for t in {t for t, _ in targets[k]}:
            waiting[t] -= 1
            if not waiting[t]:
                found.append(t)
    there = set(found)
    return [*found, *(k for k in range(len(waiting)) if k not in there)]
