"""Strides of 1 x 1 convolutions move into what makes their input, and nothing else changes."""

from __future__ import annotations

import pytest

from golden import graphs
from tunewright.ir.graph import Graph
from tunewright.passes.base import Context, run_passes
from tunewright.passes.fusion.early_strides import EarlyStrides
from tunewright.settings import Settings

#: the end of a residual block (a is read by a convolution and by the sum) and the beginning of the next one
BLOCKS = """g (float[N,4,{size}] x) => (float[N,2,{to}] y, float[N,3,{to}] z)
<float[4,4,1,1] v, float[5,4,1,1] p, float[5,5,3,3] q, float[4,5,1,1] r, float[4] b, float[2,4,1,1] s, float[3,4,1,1] t>
{{ a = Conv(x, v) c = Conv(a, p) d = Relu(c) e = Conv<pads=[1,1,1,1]>(d, q) f = Relu(e) h = Conv(f, r, b)
  i = Add(h, a) k = Relu(i) y = Conv<strides=[{by}]>(k, s) z = Conv<strides=[{by}]>(k, t) }}"""


def moved(text: str) -> Graph:
    graph = graphs.graph(text)
    run_passes(graph, [EarlyStrides()], Context(Settings(verify_passes=True)))
    return graph


def strides(graph: Graph) -> list[tuple[int, ...]]:
    return [tuple(n.attrs.get("strides", (1, 1))) for n in graph.nodes if n.op == "Conv"]


@pytest.mark.parametrize(
    ("size", "to", "by"), [("8,8", "4,4", (2, 2)), ("7,9", "4,5", (2, 2)), ("10,7", "4,2", (3, 4))]
)
def test_a_stride_goes_up_through_a_residual_block(size: str, to: str, by: tuple[int, int]) -> None:
    """Into the 3 x 3 convolution; what the sum reads beside it is thinned out, and stays whole for its other reader."""
    text = BLOCKS.format(size=size, to=to, by=f"{by[0]},{by[1]}")
    before, after = graphs.graph(text), moved(text)
    assert strides(after) == [(1, 1), (1, 1), by, (1, 1), (1, 1), (1, 1)]
    assert [tuple(n.attrs["strides"]) for n in after.nodes if n.op == "AveragePool"] == [by]
    x = graphs.inputs(before)
    graphs.assert_close(graphs.run(after, x), graphs.run(before, x), tolerance=1e-6)


def test_a_stride_multiplies_one_that_is_there() -> None:
    text = """g (float[1,3,13,13] x) => (float[1,2,4,4] y) <float[4,3,3,3] w, float[4] b, float[2,4,1,1] v, float c={6}>
    { a = Conv<pads=[1,1,1,1], strides=[2,2]>(x, w, b) s = Sigmoid(a) m = Mul(a, s) n = Min(m, c)
      y = Conv<strides=[2,2]>(n, v) }"""
    before, after = graphs.graph(text), moved(text)
    assert strides(after) == [(4, 4), (1, 1)] and len(after.nodes) == len(before.nodes)
    x = graphs.inputs(before)
    graphs.assert_close(graphs.run(after, x), graphs.run(before, x), tolerance=1e-6)


def test_a_value_is_thinned_out_for_each_stride() -> None:
    text = """g (float[1,4,9,9] x) => (float[1,2,5,5] y, float[1,2,3,3] z) <float[4,4,1,1] w, float[2,4,1,1] v>
    { a = Conv(x, w) b = Conv(x, w) c = Add(a, x) d = Add(b, x)
      y = Conv<strides=[2,2]>(c, v) z = Conv<strides=[4,4]>(d, v) }"""
    before, after = graphs.graph(text), moved(text)
    assert strides(after) == [(2, 2), (4, 4), (1, 1), (1, 1)]
    assert [tuple(n.attrs["strides"]) for n in after.nodes if n.op == "AveragePool"] == [(2, 2), (4, 4)]
    x = graphs.inputs(before)
    graphs.assert_close(graphs.run(after, x), graphs.run(before, x), tolerance=1e-6)


def test_factors_of_channels_are_left_alone() -> None:
    """A convolution that makes one factor for all pixels of a channel has nothing to save."""
    text = """g (float[1,3,8,8] x) => (float[1,2,4,4] y) <float[4,3,1,1] w, float[2,4,1,1] v, int64[2] axes={2,3}>
    { a = Conv(x, w) m = ReduceMean(x, axes) e = Conv(m, w) s = Sigmoid(e) p = Mul(a, s)
      y = Conv<strides=[2,2]>(p, v) }"""
    before, after = graphs.graph(text), moved(text)
    assert strides(after) == [(2, 2), (1, 1), (1, 1)] and len(after.nodes) == len(before.nodes)
    x = graphs.inputs(before)
    graphs.assert_close(graphs.run(after, x), graphs.run(before, x), tolerance=1e-6)


@pytest.mark.parametrize(
    "text",
    [
        # another reader wants all pixels
        "=> (float[1,2,4,4] y, float[1,2,8,8] z) { a = Conv(x, w) y = Conv<strides=[2,2]>(a, v) z = Conv(a, v) }",
        "=> (float[1,2,4,4] y, float[1,4,8,8] a) { a = Conv(x, w) y = Conv<strides=[2,2]>(a, v) }",
        # another stride; half of the pixels are left; padding that depends on the stride, or is read
        """=> (float[1,2,4,4] y, float[1,2,2,2] z)
        { a = Conv(x, w) y = Conv<strides=[2,2]>(a, v) z = Conv<strides=[4,4]>(a, v) }""",
        "=> (float[1,2,4,8] y) { a = Conv(x, w) y = Conv<strides=[2,1]>(a, v) }",
        '=> (float[1,2,4,4] y) { a = Conv<auto_pad="SAME_UPPER">(x, w) y = Conv<strides=[2,2]>(a, v) }',
        "=> (float[1,2,5,5] y) { a = Conv(x, w) y = Conv<strides=[2,2], pads=[1,1,1,1]>(a, v) }",
        # truth values cannot be thinned out
        "=> (float[1,2,4,4] y) { a = Conv(x, w) b = IsNaN(a) c = Where(b, a, a) y = Conv<strides=[2,2]>(c, v) }",
        # no convolution would have less to do
        "=> (float[1,2,4,4] y) { a = Relu(x) b = Concat<axis=1>(a, x) y = Conv<strides=[2,2]>(b, u) }",
    ],
)
def test_what_stays(text: str) -> None:
    outputs, nodes = text.split("{")
    text = f"g (float[1,3,8,8] x) {outputs} <float[4,3,1,1] w, float[2,4,1,1] v, float[2,6,1,1] u> {{{nodes}"
    assert strides(moved(text)) == strides(graphs.graph(text))
