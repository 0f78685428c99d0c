"""What a device says that layouts cost, estimated and measured, and what follows for a graph."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from golden import graphs
from helpers import kb_records
from tunewright.ir.graph import Graph, Node
from tunewright.ir.types import PLAIN, DType, Layout, TensorType, blocked
from tunewright.knowledge.database import MemoryDatabase
from tunewright.knowledge.record import Measurement
from tunewright.ops.internal.reorder import REORDER
from tunewright.passes.base import Context, run_passes
from tunewright.passes.placement.layout import AssignLayouts
from tunewright.plugins.single import open_device
from tunewright.settings import Settings
from tunewright.solvers.base import Problem
from tunewright.tuning.layout_costs import LayoutCosts
from tunewright.tuning.tuner import Tuner

NET = """g (float[1,64,28,28] x) => (float[1,64,28,28] y)
<float[64,64,3,3] w> { a = Conv<pads=[1,1,1,1]>(x, w) y = Conv<pads=[1,1,1,1]>(a, w) }"""


def costs(records: Sequence[Measurement] = ()) -> LayoutCosts:
    tuner = Tuner(Settings(), user=MemoryDatabase(records), system=MemoryDatabase())
    return LayoutCosts(tuner, open_device("CPU"))


def block() -> Layout:
    return blocked(open_device("CPU").target.vector_bytes // 4)


def assigned(text: str, layouts: LayoutCosts) -> tuple[Graph, Context]:
    graph, context = graphs.graph(text), Context(Settings(), layouts=layouts)
    run_passes(graph, [AssignLayouts()], context)
    return graph, context


def reorders(graph: Graph) -> int:
    return sum(node.op == REORDER for node in graph.nodes)


def measured(node: Node, layout: Layout, seconds: float) -> Measurement:
    where = kb_records.here("CPU")
    return kb_records.measurement(Problem.of(node).in_layout(layout, [0]), where, "opencl.some", seconds=seconds)


def test_convolutions_are_in_blocks_by_estimate() -> None:
    layouts = costs()
    node = graphs.graph(NET).nodes[0]
    wish = layouts.preferred(node)
    assert wish == (block(), block())
    ways = {(way.first, way.result): way for way in layouts.ways(node, wish, block(), [0])}
    assert set(ways) == {(block(), block()), (PLAIN, block()), (PLAIN, PLAIN)}
    assert ways[wish].seconds < ways[PLAIN, block()].seconds < ways[PLAIN, PLAIN].seconds
    assert not any(way.measured for way in ways.values())
    assert reorders(assigned(NET, layouts)[0]) == 2


def test_measurements_of_both_layouts_change_it() -> None:
    node = graphs.graph(NET).nodes[0]
    slow, fast = measured(node, block(), 1e-3), measured(node, PLAIN, 1e-4)
    graph, context = assigned(NET, costs([slow, fast]))
    assert not reorders(graph)
    assert "plain: 100.0 us, measured" in context.log.entries[0].reason
    assert f"{block()}: 1000.0 us, measured" in context.log.entries[0].reason
    assert reorders(assigned(NET, costs([measured(node, block(), 1e-4), measured(node, PLAIN, 1e-3)]))[0]) == 2
    # one of them alone says nothing about the other, and estimates decide
    assert reorders(assigned(NET, costs([slow]))[0]) == 2


def test_a_measurement_elsewhere_does_not_count() -> None:
    node = graphs.graph(NET).nodes[0]
    there = [
        kb_records.measurement(Problem.of(node).in_layout(layout, [0]), kb_records.FOREIGN, seconds=seconds)
        for layout, seconds in ((block(), 1.0), (PLAIN, 1e-6))
    ]
    assert reorders(assigned(NET, costs(there))[0]) == 2


def test_reorders_of_one_pixel_are_free() -> None:
    layouts = costs()
    b = block().block
    assert layouts.reorder(TensorType(DType.FLOAT32, (1, 4 * b, 1, 1)), block()) == 0
    few, many = (layouts.reorder(TensorType(DType.FLOAT32, (1, b, n, n)), block()) for n in (2, 200))
    assert 0 < few < many


@pytest.mark.parametrize(
    ("text", "want"),
    [
        # a few results of many channels: the last convolution stays in blocks, and what is reordered is small
        ("y = Conv(a, v)", 2),
        # a Transpose takes its input out of blocks itself
        ("y = Transpose<perm=[0,2,3,1]>(a)", 1),
        # Squeeze and Transpose
        ("s = Reshape(a, k) y = Transpose<perm=[0,2,1]>(s)", 1),
        ("b, c = Split<axis=1, num_outputs=2>(a) d = Add(b, c) y = Relu(d)", 2),
    ],
)
def test_neighbours_absorb_reorders(text: str, want: int) -> None:
    whole = """g (float[1,64,28,28] x) => (y) <float[64,64,3,3] w, float[1,64,1,1] v, int64[3] k = {1, 64, 784}>
    { a = Conv<pads=[1,1,1,1]>(x, w) """
    assert reorders(assigned(whole + text + " }", costs())[0]) == want
