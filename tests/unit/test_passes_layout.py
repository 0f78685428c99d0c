"""Layouts on the host, with made-up preferences: the same results, few Reorders, plain borders."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from golden import graphs
from tunewright.devices.host import HostDevice
from tunewright.ir.graph import Graph, Node
from tunewright.ir.types import NHWC, PLAIN, DType, Layout, TensorType, blocked
from tunewright.ir.verify import verify
from tunewright.ops.fused import REORDER, from_plain, to_plain
from tunewright.passes.base import Context, run_passes
from tunewright.passes.fuse import Fuse
from tunewright.passes.layout import AssignLayouts
from tunewright.runtime.executor import Executor
from tunewright.runtime.program import Environment, Program
from tunewright.settings import Settings
from tunewright.tuning.tuner import Tuner

NET = """g (float[2,3,6,6] x) => (float[2,5,6,6] y, float[2,5] z)
<float[5,3,3,3] w, float[5,5,3,3] v, float[5,5,3,3] u, int64[2] k = {2,3}, float h = {0.5}>
{ a = Conv<pads=[1,1,1,1]>(x, w) b = Relu(a) c = Conv<pads=[1,1,1,1]>(b, v) d = Add(c, b) e = Sigmoid(d) f = Mul(e, h)
  y = Conv<pads=[1,1,1,1]>(f, u) z = ReduceMean<keepdims=0>(f, k) }"""


Prefers = Callable[[Node], tuple[Layout, Layout] | None]


def convolutions(layout: Layout) -> Prefers:
    return lambda node: (layout, layout) if node.op == "Conv" else None


def run(graph: Graph, arrays: list[np.ndarray], prefers: Prefers) -> list[np.ndarray]:
    settings = Settings.make({"VERIFY_PASSES": "YES"}, Settings())
    device = HostDevice()
    context = Context(settings, preferred_layout=prefers)
    return Executor(device).run(Program(graph, Environment(device, Tuner(settings), settings, context)), arrays)


@pytest.mark.parametrize("layout", [NHWC, blocked(4), blocked(16)], ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_results_are_equal_in_any_layout(layout: Layout, fused: bool) -> None:
    graph = graphs.graph(NET)
    arrays = graphs.inputs(graph)
    want = graphs.run(graph, arrays)
    if fused:
        run_passes(graph, [Fuse()], Context(Settings()))
    graphs.assert_close(run(graph, arrays, convolutions(layout)), want, 1e-6)


def test_element_wise_nodes_go_along_and_borders_are_plain() -> None:
    graph = graphs.graph(NET)
    context = Context(Settings(), preferred_layout=convolutions(NHWC))
    assert run_passes(graph, [AssignLayouts()], context)
    verify(graph, "layout")
    reorders = [n for n in graph.nodes if n.op == REORDER]
    # One at the input, one for each reader outside: the reduction and the output.
    assert [n.attrs["layout"] for n in reorders] == ["nhwc", "plain", "plain"]
    assert all(v.tensor is not None and v.tensor.layout == PLAIN for v in [*graph.inputs, *graph.outputs])


def test_two_layouts_are_joined_by_one_reorder() -> None:
    graph = graphs.graph(NET)
    arrays = graphs.inputs(graph)
    want = graphs.run(graph, arrays)

    def mixed(node: Node) -> tuple[Layout, Layout] | None:
        wishes = {"a": (PLAIN, NHWC), "c": (blocked(4), blocked(4)), "y": (blocked(4), blocked(4))}
        return wishes.get(node.name)

    graphs.assert_close(run(graph.clone(), arrays, mixed), want, 1e-6)
    run_passes(graph, [AssignLayouts()], Context(Settings(), preferred_layout=mixed))
    conv = next(n for n in graph.nodes if n.name == "c")
    reorder = conv.inputs[0].producer  # type: ignore[union-attr]
    assert reorder is not None and reorder.op == REORDER
    assert reorder.inputs[0].type == TensorType(DType.FLOAT32, (2, 5, 6, 6), NHWC)  # type: ignore[union-attr]


def test_nobody_prefers_anything() -> None:
    graph = graphs.graph(NET)
    before = str(graph)
    assert not run_passes(graph, [AssignLayouts()], Context(Settings()))
    assert str(graph) == before


def test_open_shapes_stay_plain() -> None:
    graph = graphs.graph("g (float[N,3,6,6] x) => (float[N,5,6,6] y) <float[5,3,1,1] w> { y = Conv(x, w) }")
    assert not run_passes(graph, [AssignLayouts()], Context(Settings(), preferred_layout=convolutions(NHWC)))


def test_a_refusal_has_a_reason() -> None:
    graph = graphs.graph("g (float[2,3] x) => (float[2,3] y) { y = Relu(x) }")
    context = Context(Settings(), preferred_layout=lambda node: (NHWC, NHWC))
    assert not run_passes(graph, [AssignLayouts()], context)
    assert [e.reason for e in context.log.entries] == ["%y: float32[2,3] has no spatial axes"]


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
