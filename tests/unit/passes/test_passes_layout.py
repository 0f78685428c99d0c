"""Layouts on the host, with made-up costs: the same results, the least cost, plain borders."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from golden import graphs
from tunewright.devices.host import HostDevice
from tunewright.ir.graph import Graph, Node
from tunewright.ir.types import NHWC, PLAIN, DType, Layout, TensorType, blocked
from tunewright.ir.verify import verify
from tunewright.ops.internal.reorder import REORDER, from_plain, to_plain
from tunewright.passes.base import Context, LayoutChoice, run_passes
from tunewright.passes.fusion.fuse import Fuse
from tunewright.passes.placement.layout import AssignLayouts
from tunewright.passes.placement.layout_cut import least_cut
from tunewright.runtime.plans.program import Environment, Program
from tunewright.runtime.requests.executor import Executor
from tunewright.settings import Settings
from tunewright.tuning.tuner import Tuner

NET = """g (float[2,3,6,6] x) => (float[2,5,6,6] y, float[2,5] z)
<float[5,3,3,3] w, float[5,5,3,3] v, float[5,5,3,3] u, int64[2] k = {2,3}, float h = {0.5}>
{ a = Conv<pads=[1,1,1,1]>(x, w) b = Relu(a) c = Conv<pads=[1,1,1,1]>(b, v) d = Add(c, b) e = Sigmoid(d) f = Mul(e, h)
  y = Conv<pads=[1,1,1,1]>(f, u) z = ReduceMean<keepdims=0>(f, k) }"""


@dataclass
class Made:
    """Layouts with made-up costs: convolutions want one, everything else can do with it."""

    wish: tuple[Layout, Layout]
    #: seconds of convolutions as they wish it, and plain; of anything else; of a Reorder
    wished: float = 1.0
    plain: float = 10.0
    other: float = 0.1
    move: float = 1.0
    #: what only works plain, and nodes whose plain way costs nothing
    stuck: Sequence[str] = ()
    cheap: Sequence[str] = ()

    def preferred(self, node: Node) -> tuple[Layout, Layout] | None:
        return self.wish if node.op == "Conv" else None

    def ways(
        self, node: Node, preferred: tuple[Layout, Layout] | None, layout: Layout, data: Sequence[int]
    ) -> list[LayoutChoice]:
        if preferred is not None:
            return [
                LayoutChoice(*preferred, self.wished),
                LayoutChoice(PLAIN, PLAIN, 0.0 if node.name in self.cheap else self.plain),
            ]
        plain = [LayoutChoice(PLAIN, PLAIN, self.other)]
        return plain if node.op in self.stuck else [LayoutChoice(layout, layout, self.other), *plain]

    def reorder(self, type: TensorType, layout: Layout) -> float:
        return self.move


def run(graph: Graph, arrays: list[np.ndarray], layouts: Made) -> list[np.ndarray]:
    settings = Settings.make({"VERIFY_PASSES": "YES"}, Settings())
    device = HostDevice()
    context = Context(settings, layouts=layouts)
    return Executor(device).run(Program(graph, Environment(device, Tuner(settings), settings, context)), arrays)


def assigned(text: str, layouts: Made) -> Graph:
    graph = graphs.graph(text)
    run_passes(graph, [AssignLayouts()], Context(Settings(), layouts=layouts))
    verify(graph, "layout")
    assert all(v.tensor is not None and v.tensor.layout == PLAIN for v in [*graph.inputs, *graph.outputs])
    return graph


def reorders(graph: Graph) -> list[str]:
    return [f"{n.inputs[0].name}@{n.attrs['layout']}" for n in graph.nodes if n.op == REORDER]  # type: ignore[union-attr]


@pytest.mark.parametrize("layout", [NHWC, blocked(4), blocked(16)], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_results_are_equal_in_any_layout(layout: Layout, fused: bool) -> None:
    graph = graphs.graph(NET)
    arrays = graphs.inputs(graph)
    want = graphs.run(graph, arrays)
    if fused:
        run_passes(graph, [Fuse()], Context(Settings()))
    graphs.assert_close(run(graph, arrays, Made((layout, layout), stuck=["Sigmoid"])), want, 1e-6)
    graphs.assert_close(run(graph, arrays, Made((PLAIN, layout))), want, 1e-6)
    graphs.assert_close(run(graph, arrays, Made((layout, PLAIN))), want, 1e-6)


def test_element_wise_nodes_go_along_and_borders_are_plain() -> None:
    # one at the input; the reduction, which makes a tensor without spatial axes, and the output
    assert reorders(assigned(NET, Made((NHWC, NHWC)))) == ["x@nhwc", "f@plain", "y@plain"]


def test_a_reorder_is_shared_by_its_readers() -> None:
    graph = assigned(NET, Made((NHWC, NHWC), stuck=["Relu", "Add", "Sigmoid", "Mul"]))
    # b has two plain readers and one inside; f two that differ
    assert reorders(graph) == ["x@nhwc", "a@plain", "b@nhwc", "c@plain", "f@nhwc", "y@plain"]
    readers = {n.output.name: n.output.users for n in graph.nodes if n.op == REORDER}
    assert [n.name for n in readers["a@plain"]] == ["b"]


@pytest.mark.parametrize(
    ("plain", "move", "want"),
    [(10.0, 1.0, ["x@nhwc", "f@plain", "y@plain"]), (1.5, 1.0, []), (1.5, 0.1, ["x@nhwc", "f@plain", "y@plain"])],
)
def test_costs_decide(plain: float, move: float, want: list[str]) -> None:
    assert reorders(assigned(NET, Made((NHWC, NHWC), plain=plain, move=move))) == want


def test_one_node_that_is_better_plain_makes_its_neighbours_plain_where_that_is_cheaper() -> None:
    # the last convolution costs nothing when plain: the layout is left once, somewhere in front of it, for z as well
    graph = assigned(NET, Made((NHWC, NHWC), cheap=["y"]))
    assert len(reorders(graph)) == 2 and reorders(graph)[0] == "x@nhwc"
    # and when Reorders cost more than convolutions, nothing leaves it
    assert reorders(assigned(NET, Made((NHWC, NHWC), cheap=["y"], move=20.0))) == []


def test_a_convolution_between_layouts_needs_no_reorder() -> None:
    text = "g (float[1,3,6,6] x) => (float[1,5,6,6] y) <float[5,3,1,1] w> { a = Conv(x, w) y = Relu(a) }"
    assert reorders(assigned(text, Made((PLAIN, NHWC)))) in (["a@plain"], ["y@plain"])
    assert reorders(assigned(text, Made((NHWC, PLAIN)))) == ["x@nhwc"]


def test_an_output_that_is_read_twice_stays_one_value() -> None:
    text = """g (float[1,5,6,6] x) => (float[1,5,6,6] y, float[1,5,6,6] z)
    <float[5,5,1,1] w> { y = Conv(x, w) z = Conv(y, w) }"""
    graph = graphs.graph(text)
    graph.add_output(graph.outputs[0], "again")
    run_passes(graph, [AssignLayouts()], Context(Settings(), layouts=Made((NHWC, NHWC))))
    assert reorders(graph) == ["x@nhwc", "y@plain", "z@plain"]
    assert graph.outputs[0] is graph.outputs[2] and graph.outputs[0].type == TensorType(DType.FLOAT32, (1, 5, 6, 6))


def test_all_parts_of_a_split_share_a_layout() -> None:
    text = """g (float[1,8,6,6] x) => (float[1,8,6,6] y, float[1,4,6,6] z) <float[8,8,1,1] w, float[8,4,1,1] v>
    { a = Conv(x, w) b, c = Split<axis=1, num_outputs=2>(a) y = Conv(b, v) z = Relu(c) }"""
    graph, made = graphs.graph(text), Made((blocked(4), blocked(4)))
    arrays = graphs.inputs(graph)
    want = graphs.run(graph, arrays)
    graphs.assert_close(run(graph.clone(), arrays, made), want, 1e-6)
    assert len(reorders(assigned(text, made))) == 3


def plan(rng: np.random.Generator) -> tuple[str, Made]:
    """A random small graph of convolutions and element-wise nodes, with random costs."""
    names, lines = ["x"], []
    for n in range(int(rng.integers(2, 7))):
        a, b = (names[int(rng.integers(len(names)))] for _ in range(2))
        made = [f"v{n} = Conv({a}, w)", f"v{n} = Relu({a})", f"v{n} = Add({a}, {b})"][int(rng.integers(3))]
        lines.append(made)
        names.append(f"v{n}")
    outs = sorted({names[-1], names[int(rng.integers(1, len(names)))]})
    text = f"g (float[1,5,2,2] x) => ({', '.join(f'float[1,5,2,2] {o}' for o in outs)}) <float[5,5,1,1] w>"
    wish = [(NHWC, NHWC), (PLAIN, NHWC), (NHWC, PLAIN)][int(rng.integers(3))]
    costs = [float(c) for c in rng.integers(1, 9, 4)]
    return text + " {" + " ".join(lines) + "}", Made(wish, *costs, stuck=["Relu"] if rng.random() < 0.3 else [])


def price(graph: Graph, made: Made) -> float:
    """What a graph with layouts costs."""
    total = 0.0
    for node in graph.nodes:
        if node.op == REORDER:
            total += made.move
            continue
        first, result = node.inputs[0].tensor.layout, node.output.tensor.layout  # type: ignore[union-attr]
        ways = made.ways(node, made.preferred(node), NHWC, [0])
        total += next(way.seconds for way in ways if (way.first, way.result) == (first, result))
    return total


def cheapest(graph: Graph, made: Made) -> float:
    """The least cost of all assignments, by trying each."""
    nodes, best = graph.nodes, float("inf")
    for chosen in itertools.product(*(made.ways(n, made.preferred(n), NHWC, [0]) for n in nodes)):
        way = dict(zip(nodes, chosen, strict=True))
        moves = set()
        for node in nodes:
            for i, value in enumerate(node.inputs):
                if value is None or value.const is not None:
                    continue
                mine = way[node].first if i == 0 else way[node].result
                given = way[value.producer].result if value.producer is not None else PLAIN
                moves |= {(value, mine)} if mine != given else set()
        moves |= {(v, PLAIN) for v in graph.outputs if v.producer and way[v.producer].result != PLAIN}
        best = min(best, sum(w.seconds for w in chosen) + made.move * len(moves))
    return best


def against_brute_force(count: int) -> None:
    rng = np.random.default_rng(7)
    for _ in range(count):
        text, made = plan(rng)
        graph = graphs.graph(text)
        want = cheapest(graph, made)
        run_passes(graph, [AssignLayouts()], Context(Settings(), layouts=made))
        verify(graph, "layout")
        assert price(graph, made) == pytest.approx(want), text


def test_no_assignment_is_cheaper() -> None:
    against_brute_force(150)


@pytest.mark.soak
def test_no_assignment_is_cheaper_in_many_graphs() -> None:
    against_brute_force(10_000)


def cost(prices: list[int], edges: list[tuple[int, int, int]], labels: Sequence[bool]) -> int:
    ends = sum(c for u, w, c in edges if not labels[u] and labels[w])
    return ends + sum(p for p, label in zip(prices, labels, strict=True) if label)


def test_a_cut_is_least() -> None:
    rng = np.random.default_rng(3)
    for _ in range(500):
        n = int(rng.integers(1, 8))
        prices = [int(p) for p in rng.integers(-9, 10, n)]
        ends = rng.integers(0, n, (12, 2))
        edges = [(int(u), int(w), int(rng.integers(0, 7))) for u, w in ends]
        best = min(cost(prices, edges, labels) for labels in itertools.product([False, True], repeat=n))
        assert cost(prices, edges, least_cut(prices, edges)) == best
        assert len(least_cut(prices, edges, most=0)) == n  # given up: some answer


def test_a_long_chain_is_no_trouble() -> None:
    rng = np.random.default_rng(5)
    n = 50_000
    pairs = [(u, u + 1, 4) for u in range(n - 1)]
    begin = time.process_time()
    least_cut([int(p) for p in rng.integers(-5, 6, n)], [*pairs, *((w, u, c) for u, w, c in pairs)])
    assert time.process_time() - begin < 20  # a second or less when nothing else runs


def test_nobody_prefers_anything() -> None:
    graph = graphs.graph(NET)
    before = str(graph)
    assert not run_passes(graph, [AssignLayouts()], Context(Settings()))
    assert str(graph) == before


def test_open_shapes_stay_plain() -> None:
    graph = graphs.graph("g (float[N,3,6,6] x) => (float[N,5,6,6] y) <float[5,3,1,1] w> { y = Conv(x, w) }")
    assert not run_passes(graph, [AssignLayouts()], Context(Settings(), layouts=Made((NHWC, NHWC))))


def test_a_refusal_has_a_reason() -> None:
    graph = graphs.graph("g (float[1,3,2,2] x) => (float[1,5,2,2] y) <float[5,3,1,1] w> { y = Conv(x, w) }")
    context = Context(Settings(), layouts=Made((NHWC, NHWC), wished=1e-6, plain=2e-6, move=1e-6))
    assert not run_passes(graph, [AssignLayouts()], context)
    assert [e.reason for e in context.log.entries] == [
        "plain is fastest, given the layouts of its neighbours (nhwc: 1.0 us, estimated; plain: 2.0 us, estimated)"
    ]


@pytest.mark.parametrize("shape", [(1, 3, 2), (2, 8, 3, 4), (1, 17, 2, 2, 2)])
@pytest.mark.parametrize("layout", [PLAIN, NHWC, blocked(4), blocked(8)], ids=str)
def test_layouts_hold_what_they_say(shape: tuple[int, ...], layout: Layout) -> None:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    type = TensorType(DType.FLOAT32, shape, layout)
    held = from_plain(array, type)
    assert held.shape == type.physical and held.nbytes == type.nbytes and held.flags.c_contiguous
    np.testing.assert_array_equal(to_plain(held, type), array)
    assert Layout.parse(str(layout)) == layout
    n, c, *where = (d - 1 for d in shape)
    if layout == NHWC:
        assert held[(n, *where, c)] == array[(n, c, *where)]
    elif layout.block:
        assert held[(n, c // layout.block, *where, c % layout.block)] == array[(n, c, *where)]
