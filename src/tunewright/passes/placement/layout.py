"""Assigns layouts: each value gets the one that minimises the total time of kernels and the Reorders between them.

A device has one layout besides the plain one. `Context.layouts` has the costs of a node in either, or between the two.
It also has the cost of a Reorder, which several readers share. The best of all assignments is a minimum cut
(`layout_cut`), in which label 1 is the device's layout. Inputs and outputs of the graph are plain. Shapes stay logical
throughout (see `TensorType.physical`).

The pass asks only about nodes that prefer the layout, and nodes that are connected with them through nodes that can use
it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tunewright.ir.graph import Graph, Node, Value
from tunewright.ir.types import PLAIN, Layout, TensorType
from tunewright.ops import lookup
from tunewright.ops.internal.reorder import REORDER

from .. import value_facts
from ..base import Context, LayoutChoice, Layouts
from .layout_cut import least_cut

#: Element-wise operations on two quantised tensors, each followed by its scale and zero point.
PAIRS = frozenset({"com.microsoft::QLinearAdd", "com.microsoft::QLinearMul"})
#: Costs are in picoseconds, and an impossible choice costs as much as hours.
SECOND, NEVER = 10**12, 10**16


class AssignLayouts:
    """Assigns layouts when shapes are known: costs depend on them."""

    name = "layout"

    def run(self, graph: Graph, context: Context) -> bool:
        layouts = context.layouts
        if layouts is None or not all(_planned(v) for v in graph.values()):
            return False
        wishes = {node: wish for node in graph.nodes if (wish := layouts.preferred(node)) is not None}
        for node in list(wishes):
            reason = _why_not(node)
            if reason is not None:
                context.log.refused(self.name, node, reason)
                del wishes[node]
        # nodes that prefer a different layout than the first preference stay as they are
        layout = next((one for wish in wishes.values() for one in wish if one != PLAIN), PLAIN)
        if layout == PLAIN:
            return False
        found = _Choices(graph, layouts, layout)
        found.explore({node: wish for node, wish in wishes.items() if {*wish} <= {PLAIN, layout}})
        found.decide()
        for choice in found.choices.values():
            if choice.first or choice.result:
                context.log.applied(self.name, choice.node)
            else:
                context.log.refused(self.name, choice.node, _why_plain(choice.ways))
        return found.assign()


def _planned(value: Value) -> bool:
    """Whether a value has a known shape. Graphs that are cut into segments at run time keep the plain layout."""
    return value.tensor is not None and value.tensor.is_static


def _why_not(node: Node) -> str | None:
    if node.bodies:
        return "a node with a body has no layout"
    for value in (node.input(0), *node.outputs):
        if (value_facts.rank(value) or 0) < 3:
            return f"{value!r} has no spatial axes"
    return None


def _why_plain(ways: Sequence[LayoutChoice]) -> str:
    """The reason for a plain node, with the compared times."""
    shown = (
        f"{way.first}" + (f" to {way.result}" if way.result != way.first else "")
        + f": {1e6 * way.seconds:.1f} us, {'measured' if way.measured else 'estimated'}"
        for way in ways
    )  # fmt: skip
    return f"plain is fastest, given the layouts of its neighbours ({'; '.join(shown)})"


def _alongside(value: Value | None, result: Value) -> bool:
    """Whether a value has the result's rank and channels, so that both broadcast in a layout as they do when plain.

    Constants per channel stay plain: kernels read them unchanged, or pack them once.
    """
    mine, whole = value_facts.shape(value), value_facts.shape(result)
    if value is None or mine is None or whole is None or not len(mine) == len(whole) > 2 or mine[1] != whole[1]:
        return False
    return value.const is None or any(d != 1 for d in mine[2:])


def _data(node: Node) -> list[int]:
    """The inputs that follow the node's layout: the data, and the operands that its element-wise part reads along with
    it."""
    spec = lookup(node.op)
    if node.op == "Concat":
        return list(range(len(node.inputs)))
    if node.op in PAIRS:
        return [0, 3]
    if spec is not None and spec.elementwise:
        return [i for i in range(len(node.inputs)) if _alongside(node.inputs[i], node.output)]
    rest = range(len(node.main_inputs), len(node.inputs))
    return [0, *(i for i in rest if value_facts.same_shape(node.inputs[i], node.output))]


@dataclass
class _Choice:
    """A node with a choice of layouts."""

    node: Node
    data: list[int]
    ways: Sequence[LayoutChoice]
    #: its vertices: that of the first input, and that of the results; often they are the same
    at: tuple[int, int] = (-1, -1)
    #: the decisions: True is the device's layout, False plain
    first: bool = False
    result: bool = False

    def vertex(self, i: int) -> int | None:
        """The vertex whose label is the layout of input i; None: the input stays plain."""
        return None if i not in self.data else self.at[0 if i == 0 else 1]


class _Choices:
    def __init__(self, graph: Graph, layouts: Layouts, layout: Layout) -> None:
        self.graph, self.layouts, self.layout = graph, layouts, layout
        self.choices: dict[Node, _Choice] = {}
        #: the price of label 1 at each vertex of the cut, and its edges (see `least_cut`)
        self.prices: list[int] = []
        self.edges: list[tuple[int, int, int]] = []

    # -- nodes with a choice
    # ---------------------------------------------------------------------------------------------
    def explore(self, wishes: dict[Node, tuple[Layout, Layout]]) -> None:
        """Ask the nodes that prefer the layout, and the neighbours of nodes that have a choice."""
        asked, queue = set(wishes), deque(wishes)
        while queue:
            node = queue.popleft()
            if node.op == REORDER or _why_not(node) is not None:
                continue
            data = _data(node)
            ways = self.layouts.ways(node, wishes.get(node), self.layout, data)
            if not any(layout != PLAIN for way in ways for layout in (way.first, way.result)):
                continue
            self.choices[node] = choice = _Choice(node, data, ways)
            for other in _neighbours(choice):
                if other not in asked:
                    asked.add(other)
                    queue.append(other)

    # -- the cut ------------------------------------------------------------------------------------------------------
    def decide(self) -> None:
        for choice in self.choices.values():
            self.place(choice)
        for value in self.values():
            self.connect(value)
        labels = least_cut(self.prices, self.edges)
        for choice in self.choices.values():
            choice.first, choice.result = (labels[u] for u in choice.at)

    def place(self, choice: _Choice) -> None:
        """Add the vertices of a node, and the costs of its ways."""
        costs = {(way.first != PLAIN, way.result != PLAIN): round(SECOND * way.seconds) for way in choice.ways}
        plain, inside = (costs.get((side, side), NEVER) for side in (False, True))
        into, back = (costs.get((side, not side), NEVER) for side in (False, True))
        if into == back == NEVER:
            at = self.vertex(inside - plain)
            choice.at = (at, at)
            return
        # A cut can express that different layouts at two ends cost something, not that they gain something. If both
        # mixed ways together are cheaper than the others, the less relevant one gets the lowest cost that a cut can
        # express.
        if into + back < plain + inside:
            source = choice.node.inputs[0]
            inner = source is not None and source.producer in self.choices
            if into == NEVER or (inner and back != NEVER):
                into = plain + inside - back
            else:
                back = plain + inside - into
        choice.at = (self.vertex(back - plain), self.vertex(inside - back))
        self.edges.append((*choice.at, into + back - plain - inside))

    def connect(self, value: Value) -> None:
        """Add the costs of a value's Reorders: at most one into the layout and one out of it, for all readers."""
        made = self.choices.get(value.producer) if value.producer is not None else None
        readers = dict.fromkeys(self.reader(*use) for use in value.uses)
        if self.graph.is_output(value):
            readers[None] = None
        inside = [u for u in readers if u is not None]
        assert isinstance(value.type, TensorType)
        cost = round(SECOND * self.layouts.reorder(value.type, self.layout))
        if inside:
            # label 1 if some reader has it
            into = inside[0] if len(inside) == 1 else self.vertex(0)
            self.edges += [(into, u, NEVER) for u in inside if u != into]
            if made is None:
                self.prices[into] += cost
            else:
                self.edges.append((made.at[1], into, cost))
        if made is None:
            return
        if None in readers:
            self.prices[made.at[1]] += cost
        elif inside:
            # label 0 if some reader has it
            back = inside[0] if len(inside) == 1 else self.vertex(0)
            self.edges += [(u, back, NEVER) for u in inside if u != back]
            self.edges.append((back, made.at[1], cost))

    def vertex(self, price: int) -> int:
        self.prices.append(price)
        return len(self.prices) - 1

    def reader(self, node: Node, i: int) -> int | None:
        choice = self.choices.get(node)
        return None if choice is None else choice.vertex(i)

    def values(self) -> list[Value]:
        """The values that nodes with a choice read and make, each once."""
        found: dict[Value, None] = {}
        for choice in self.choices.values():
            found.update((v, None) for i in choice.data if (v := choice.node.inputs[i]) is not None)
            found.update((v, None) for v in choice.node.outputs)
        return list(found)

    # -- the graph ----------------------------------------------------------------------------------------------------
    def assign(self) -> bool:
        """Give values their layouts, and add a Reorder where a reader has another one. Returns whether any node
        changed."""
        values = self.values()
        for choice in self.choices.values():
            for value in choice.node.outputs if choice.result else ():
                assert isinstance(value.type, TensorType)
                value.type = value.type.with_layout(self.layout)
        moved = {value: twin for value in values if (twin := self.reorder(value)) is not None}
        self.graph.outputs = [moved.get(v, v) for v in self.graph.outputs]
        return any(choice.first or choice.result for choice in self.choices.values())

    def reorder(self, value: Value) -> Value | None:
        """Add one Reorder for all readers of a value that have the other layout; returns its result if it is a graph
        output."""
        type, uses, is_output = value.type, list(value.uses), self.graph.is_output(value)
        assert isinstance(type, TensorType)
        other = PLAIN if type.layout != PLAIN else self.layout
        astray = [(node, i) for node, i in uses if self.wanted(node, i) == other]
        if not astray and not (is_output and other == PLAIN):
            return None
        twin = self.graph.add(
            REORDER, [value], {"layout": str(other)}, types=[type.with_layout(other)],
            outputs=[f"{value.name}@{other}"], name=f"{value.name}@{other}",
        ).output  # fmt: skip
        for node, i in astray:
            self.graph.set_input(node, i, twin)
        return twin if is_output and other == PLAIN else None

    def wanted(self, node: Node, i: int) -> Layout:
        choice = self.choices.get(node)
        if choice is None or i not in choice.data:
            return PLAIN
        return self.layout if (choice.first if i == 0 and choice.at[0] != choice.at[1] else choice.result) else PLAIN


def _neighbours(choice: _Choice) -> Iterator[Node]:
    """The nodes that make its data, and those that read its results."""
    for i in choice.data:
        value = choice.node.inputs[i]
        if value is not None and value.producer is not None:
            yield value.producer
    for value in choice.node.outputs:
        yield from value.users
