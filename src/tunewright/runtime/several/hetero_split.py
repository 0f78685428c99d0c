"""Cut a graph into few parts, each for one device, without cycles between the parts.

Every node has a label, the number of its device. Two parts of one device must not be joined if a part of another device
stands between them: each would wait for the other. The cut takes two steps.

1. A part is a set of nodes of one device. All of them wait for the same results of other devices, and lead to the same
   results for other devices. Along an edge the first set of results never shrinks, and it grows where the device
   changes. The second never grows. So no path leads back into a part, and no node waits for results that it does not
   need.
2. Parts of one device are joined if nothing stands between them and no other part has to wait long for that. Joining
   saves time, because each part has a cost of its own.

A model that changes devices very often is cut by levels instead, in one pass over the edges.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.types import TensorType, Type

#: With more results than this for other devices, the graph is cut by levels.
MOST_CROSSINGS = 256
#: With more parts than this, none are joined, because joining looks at every pair.
MOST_PARTS = 256
#: seconds that a part costs beside its kernels: a request, and the exchange of values
OVERHEAD = 50e-6


@dataclass(eq=False)
class GraphPart:
    """Nodes of one device, as a graph of their own. Values keep the names that they have in the whole graph."""

    device: int
    nodes: list[Node]
    graph: Graph
    #: parts whose results it reads
    before: list[int] = field(default_factory=list)

    @property
    def inputs(self) -> list[str]:
        return [value.name for value in self.graph.inputs]

    @property
    def outputs(self) -> list[str]:
        return self.graph.output_names


def split(graph: Graph, labels: Mapping[Node, int], seconds: Mapping[Node, float]) -> list[GraphPart]:
    """Return the parts in an order in which they can run. ``seconds``: the approximate time of each node."""
    groups = clusters(graph, labels, seconds)
    home = {node: number for number, group in enumerate(groups) for node in group}
    parts = [_part(graph, group, labels[group[0]], number) for number, group in enumerate(groups)]
    for number, part in enumerate(parts):
        makers = {home[p] for node in part.nodes for p in _producers(node)}
        part.before = sorted(makers - {number})
    return parts


def clusters(graph: Graph, labels: Mapping[Node, int], seconds: Mapping[Node, float]) -> list[list[Node]]:
    """Return the nodes of each part. Where the order leaves a choice, the part with the longest path behind it comes
    first."""
    nodes = graph.nodes
    crossing = [n for n in nodes if any(labels[r] != labels[n] for v in n.outputs for r in v.users)]
    if len(crossing) > MOST_CROSSINGS:
        return _levels(nodes, labels)
    groups = _by_signature(nodes, labels, {n: 1 << i for i, n in enumerate(crossing)})
    net = _Net(groups, labels, seconds)
    if len(groups) <= MOST_PARTS:
        net.join()
    place = {node: i for i, node in enumerate(nodes)}
    return [sorted(net.groups[k], key=place.__getitem__) for k in net.order()]


def _producers(node: Node) -> Iterable[Node]:
    return (v.producer for v in node.inputs if v is not None and v.producer is not None)


def _levels(nodes: Sequence[Node], labels: Mapping[Node, int]) -> list[list[Node]]:
    """Cut by levels: devices take turns, and a node joins the first turn of its device in which its inputs exist."""
    count = max(labels.values()) + 1
    level: dict[Node, int] = {}
    found: dict[int, list[Node]] = {}
    for node in nodes:
        least = max((level[p] for p in _producers(node)), default=0)
        level[node] = least + (labels[node] - least) % count
        found.setdefault(level[node], []).append(node)
    return [found[key] for key in sorted(found)]


def _by_signature(
    nodes: Sequence[Node], labels: Mapping[Node, int], bits: Mapping[Node, int]
) -> list[list[Node]]:  # fmt: skip
    """Group the nodes as in step 1. An integer represents a set of crossing results, with one bit for each."""
    waits: dict[Node, int] = {}
    for node in nodes:
        waits[node] = 0
        for p in _producers(node):
            waits[node] |= waits[p] | (bits[p] if labels[p] != labels[node] else 0)
    serves: dict[Node, int] = {}
    for node in reversed(nodes):
        serves[node] = bits.get(node, 0)
        for reader in (r for v in node.outputs for r in v.users):
            serves[node] |= serves[reader]
    found: dict[tuple[int, int, int], list[Node]] = {}
    for node in nodes:
        found.setdefault((labels[node], waits[node], serves[node]), []).append(node)
    return list(found.values())


class _Net:
    """Groups of nodes, and the groups that wait for each. An integer represents a set of groups, with one bit for each.
    """

    def __init__(self, groups: list[list[Node]], labels: Mapping[Node, int], seconds: Mapping[Node, float]) -> None:
        self.groups: dict[int, list[Node]] = dict(enumerate(groups))
        self.labels = [labels[group[0]] for group in groups]
        self.seconds = [sum(seconds.get(n, 0.0) for n in group) for group in groups]
        home = {node: k for k, group in self.groups.items() for node in group}
        self.next: dict[int, set[int]] = {k: set() for k in self.groups}
        for node, k in home.items():
            for p in _producers(node):
                if home[p] != k:
                    self.next[home[p]].add(k)
        self.close()

    def order(self) -> list[int]:
        """Return a topological order. Of the groups that may come next, it takes the one with the longest path to the
        end."""
        waiting = dict.fromkeys(self.groups, 0)
        for targets in self.next.values():
            for k in targets:
                waiting[k] += 1
        rank: dict[int, float] = {}
        for k in reversed(self.topological()):
            rank[k] = self.seconds[k] + max((rank[t] for t in self.next[k]), default=0.0)
        ready = [(-rank[k], k) for k, count in waiting.items() if not count]
        heapq.heapify(ready)
        found = []
        while ready:
            k = heapq.heappop(ready)[1]
            found.append(k)
            for t in self.next[k]:
                waiting[t] -= 1
                if not waiting[t]:
                    heapq.heappush(ready, (-rank[t], t))
        assert len(found) == len(self.groups), "parts wait for each other"
        return found

    def topological(self) -> list[int]:
        waiting = dict.fromkeys(self.groups, 0)
        for targets in self.next.values():
            for k in targets:
                waiting[k] += 1
        found = [k for k, count in waiting.items() if not count]
        for k in found:  # the loop extends the list
            for t in self.next[k]:
                waiting[t] -= 1
                if not waiting[t]:
                    found.append(t)
        return found

    def close(self) -> None:
        """Find all groups behind and before each group."""
        order = self.topological()
        self.behind = dict.fromkeys(order, 0)
        self.ahead = dict.fromkeys(order, 0)
        for k in reversed(order):
            for t in self.next[k]:
                self.behind[k] |= self.behind[t] | 1 << t
        for k in order:
            for t in self.next[k]:
                self.ahead[t] |= self.ahead[k] | 1 << k

    def join(self) -> None:
        """Join groups as in step 2: neighbours first, then any two."""
        for neighbours in (True, False):
            for p in list(self.groups):
                while p in self.groups:
                    pool = self.next[p] if neighbours else self.groups
                    mate = next((q for q in sorted(pool) if q != p and self.may_join(p, q)), None)
                    if mate is None:
                        break
                    self.unite(p, mate)

    def may_join(self, p: int, q: int) -> bool:
        """Whether two groups are on one device, with nothing between them, and joining delays other devices only
        briefly."""
        if self.labels[p] != self.labels[q]:
            return False
        if self.behind[p] & self.ahead[q] or self.behind[q] & self.ahead[p]:
            return False
        others = sum(1 << k for k in self.groups if self.labels[k] != self.labels[p])
        lost = 0.0
        for one, other in ((p, q), (q, p)):
            if self.behind[one] & ~self.behind[other] & others:  # other devices would wait for the second group, too
                lost += self.seconds[other]
            # the first group would wait for results that only the second needs
            if self.ahead[other] & ~self.ahead[one] & others:
                lost += self.seconds[one]
        return lost < OVERHEAD

    def unite(self, p: int, q: int) -> None:
        self.groups[p] += self.groups.pop(q)
        self.seconds[p] += self.seconds[q]
        self.next[p] |= self.next.pop(q)
        for targets in self.next.values():
            if q in targets:
                targets.discard(q)
                targets.add(p)
        self.next[p].discard(p)
        self.close()


def _part(whole: Graph, nodes: list[Node], device: int, number: int) -> GraphPart:
    """Make a graph of some nodes of another graph. The graphs share constants; values from outside become inputs."""
    made = Graph(f"{whole.name}/{number}")
    inside = set(nodes)
    here: dict[Value, Value] = {}
    for value in dict.fromkeys(v for node in nodes for v in node.inputs if v is not None):
        if value.producer in inside:
            continue
        if value.const is not None:
            here[value] = made.constant(value.const, value.name)
        else:
            here[value] = made.add_input(value.name, value.type if value.producer is None else _open(value.type))
    for node in nodes:
        twin = made.add_copy(
            node, [None if v is None else here[v] for v in node.inputs], [v.type for v in node.outputs]
        )
        here |= dict(zip(node.outputs, twin.outputs, strict=True))
        for value in node.outputs:
            if whole.is_output(value) or any(reader not in inside for reader in value.users):
                made.add_output(here[value], value.name)
    return GraphPart(device, nodes, made)


def _open(type: Type | None) -> Type | None:
    """Open the type of a value between parts: named dimensions accept any size. Only the whole model checks names."""
    if not isinstance(type, TensorType) or type.shape is None:
        return type
    return type.with_shape(tuple(d if isinstance(d, int) else None for d in type.shape))
