"""Tables instead of arithmetic: a whole layer becomes one, with indices that are no row; infinities stay products."""

from __future__ import annotations

import numpy as np

from golden import graphs
from tunewright.passes.base import Context, run_passes
from tunewright.passes.standard import NEUTRAL
from tunewright.settings import Settings

LAYER = """g (int32[N,3,1] x) => (float[N,3,2] y)
<int32[1,1,4] n = {0,1,2,3}, float[4,2] w, float[2] b, float k = {0.044715}, float r = {0.7978845608}, float o = {1},
 float h = {0.5}>
{ a = Equal(n, x) c = Cast<to=1>(a) d = MatMul(c, w) e = Add(d, b) p = Mul(k, e) q = Mul(e, p) s = Mul(e, q)
  t = Add(e, s) u = Mul(r, t) v = Tanh(u) f = Add(o, v) i = Mul(h, f) y = Mul(e, i) }"""


def test_a_layer_over_one_hot_rows_is_a_table() -> None:
    """Whatever the indices are: those that are no row count for none."""
    before, after = graphs.graph(LAYER), graphs.graph(LAYER)
    run_passes(after, NEUTRAL, Context(Settings()))
    ops = [node.op for node in after.nodes]
    assert ops == ["Squeeze", "Cast", "Clip", "Add", "Gather"]
    x = np.array([[0, 1, 2], [3, 4, 5], [-1, -4, 2**31 - 1], [-(2**31), 257, 3]], np.int32)[..., None]
    graphs.assert_close(graphs.run(after, [x]), graphs.run(before, [x]), tolerance=1e-6)


def test_a_matrix_with_an_infinity_stays_a_product() -> None:
    """Zero times infinity is NaN in every other row."""
    text = """g (int32[3,1] x) => (float[3,2] y) <int32[1,2] n = {0,1}, float[2,2] v = {1,0,1,1}>
    { a = Equal(x, n) b = Cast<to=1>(a) w = Log(v) y = MatMul(b, w) }"""
    graph = graphs.graph(text)
    run_passes(graph, NEUTRAL, Context(Settings()))
    assert [node.op for node in graph.nodes] == ["Equal", "Cast", "MatMul"]
