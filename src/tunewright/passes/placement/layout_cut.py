"""Chooses one of two labels for every vertex, at the least sum of costs: a minimum cut.

Vertices have a price for label 1 over label 0. An edge (u, w, cost) costs something when u has 0 and w has 1. Costs are
integers, so that the answer is exact and the same everywhere.

Most vertices can be decided alone. A vertex whose price exceeds the possible costs of its edges has a fixed label,
whatever its neighbours have. The resulting costs of its edges become part of the neighbours' prices. In networks few or
no vertices are left. The rest is solved as a flow (Dinic), which gives up after ``MOST_STEPS``: no model may keep the
process busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

#: The most edges that the flow may visit; after that each remaining vertex takes the label that is cheaper alone.
MOST_STEPS = 200_000


def least_cut(prices: Sequence[int], edges: Iterable[tuple[int, int, int]], most: int = MOST_STEPS) -> list[bool]:
    """The least cut: for every vertex, whether it has label 1. If both labels are equally good it has label 0."""
    problem = _Cut(prices, edges)
    problem.settle(deque(range(len(prices))))
    rest = [u for u, label in enumerate(problem.labels) if label is None]
    if rest:
        found = _Flow(rest, problem, most).labels()
        for u, label in zip(rest, found, strict=True):
            problem.labels[u] = label
    return [bool(label) for label in problem.labels]


class _Cut:
    """The decided vertices, and the prices of the others."""

    def __init__(self, prices: Sequence[int], edges: Iterable[tuple[int, int, int]]) -> None:
        self.prices = list(prices)
        self.labels: list[bool | None] = [None] * len(self.prices)
        #: edges out of and into each vertex: other end -> cost
        self.out: list[dict[int, int]] = [{} for _ in self.prices]
        self.into: list[dict[int, int]] = [{} for _ in self.prices]
        for u, w, cost in edges:
            if cost > 0 and u != w:
                self.out[u][w] = self.out[u].get(w, 0) + cost
                self.into[w][u] = self.into[w].get(u, 0) + cost
        self.leaving = [sum(d.values()) for d in self.out]
        self.coming = [sum(d.values()) for d in self.into]

    def settle(self, queue: deque[int]) -> None:
        """Decide vertices as long as there are some whose neighbours cannot change the decision."""
        while queue:
            u = queue.popleft()
            price = self.prices[u]
            if self.labels[u] is not None or -self.coming[u] < price < self.leaving[u]:
                continue
            self.labels[u] = label = price < self.leaving[u]
            # An edge u -> w costs its price when u has 0 and w has 1: a 0 here makes each 1 there more expensive.
            for w, cost in self.out[u].items():
                if self.labels[w] is None:
                    self.coming[w] -= cost
                    self.prices[w] += 0 if label else cost
                    queue.append(w)
            for w, cost in self.into[u].items():
                if self.labels[w] is None:
                    self.leaving[w] -= cost
                    self.prices[w] -= cost if label else 0
                    queue.append(w)


class _Flow:
    """Dinic's maximum flow over the remaining vertices: those that the source still reaches have label 0."""

    def __init__(self, vertices: Sequence[int], problem: _Cut, most: int) -> None:
        number = {u: n for n, u in enumerate(vertices)}
        self.source, self.sink = len(vertices), len(vertices) + 1
        self.steps = most
        self.cheaper = [problem.prices[u] < 0 for u in vertices]
        #: for every edge of a vertex, (target, index of the reverse edge), and its remaining capacity
        self.ends: list[list[tuple[int, int]]] = [[] for _ in range(len(vertices) + 2)]
        self.room: list[list[int]] = [[] for _ in self.ends]
        for n, u in enumerate(vertices):
            price = problem.prices[u]
            self.add(*((self.source, n, price) if price > 0 else (n, self.sink, -price)))
            for w, cost in problem.out[u].items():
                if w in number:
                    self.add(n, number[w], cost)

    def add(self, u: int, w: int, room: int) -> None:
        self.ends[u].append((w, len(self.ends[w])))
        self.room[u].append(room)
        self.ends[w].append((u, len(self.ends[u]) - 1))
        self.room[w].append(0)

    def labels(self) -> list[bool]:
        while True:
            level = self.levels()
            if self.steps < 0:
                return self.cheaper
            if level[self.sink] < 0:
                return [depth < 0 for depth in level[: self.source]]
            self.block(level)

    def levels(self) -> list[int]:
        """The number of edges from the source to every vertex through edges with capacity; -1: not reached."""
        level = [-1] * len(self.ends)
        level[self.source] = 0
        queue = deque([self.source])
        while queue:
            u = queue.popleft()
            self.steps -= len(self.ends[u])
            for (w, _), room in zip(self.ends[u], self.room[u], strict=True):
                if room and level[w] < 0:
                    level[w] = level[u] + 1
                    queue.append(w)
        return level

    def block(self, level: Sequence[int]) -> None:
        """Fill shortest paths until there are none. It does not recurse: a path may be as long as the network."""
        at = [0] * len(self.ends)
        path: list[tuple[int, int]] = []
        u = self.source
        while self.steps >= 0:
            self.steps -= 1
            if u == self.sink:
                flow = min(self.room[v][i] for v, i in path)
                self.steps -= len(path)
                first = len(path)
                for n, (v, i) in enumerate(path):
                    w, back = self.ends[v][i]
                    self.room[v][i] -= flow
                    self.room[w][back] += flow
                    if not self.room[v][i]:
                        first = min(first, n)
                u = path[first][0]  # continue at the first edge that is full
                del path[first:]
                continue
            while at[u] < len(self.ends[u]):
                w = self.ends[u][at[u]][0]
                if self.room[u][at[u]] and level[w] == level[u] + 1:
                    break
                at[u] += 1
            if at[u] < len(self.ends[u]):
                path.append((u, at[u]))
                u = self.ends[u][at[u]][0]
            elif path:
                u, _ = path.pop()
                at[u] += 1
            else:
                return
