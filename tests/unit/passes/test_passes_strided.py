"""Attention that reads queries, keys and values where they lie: the same results, fewer nodes, and only where asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.inliner
import pytest
from onnx.reference import ReferenceEvaluator

from golden import graphs
from tunewright.frontend.export import to_model
from tunewright.ir.graph import Graph
from tunewright.ir.types import NHWC, DType
from tunewright.ir.verify import verify
from tunewright.ops.internal.strided_attention import STRIDED
from tunewright.passes.attention.strided import StrideAttention
from tunewright.passes.base import Context, run_passes
from tunewright.passes.fusion.fuse import Fuse
from tunewright.passes.placement.precision import Narrow
from tunewright.passes.placement.views import view
from tunewright.passes.standard import NEUTRAL
from tunewright.settings import Settings
from unit.passes.test_passes_layout import Made

#: a device that has layouts, so that it is asked what it takes; nothing in these graphs wants one
DEVICE = Made((NHWC, NHWC))
HEADS = "q_num_heads=2, kv_num_heads=2"
SPLIT = "r = {0,0,2,4}"  # [batch, length, 8] -> heads of 4 elements


def three(mask: str = "", attrs: str = HEADS, bias: str = "qkv") -> str:
    """Three products of one tensor, some of them with a bias."""
    sizes = {"q": 8, "k": 8 if "kv_num_heads=2" in attrs else 4, "v": 8 if "kv_num_heads=2" in attrs else 4}
    weights = ", ".join(f"float[6,{n}] w{name}, float[{n}] b{name}" for name, n in sizes.items())
    lines = [f"{n}0 = MatMul(x, w{n}) {n} = {f'Add({n}0, b{n})' if n in bias else f'Identity({n}0)'}" for n in "qkv"]
    given = "float[2,5,6] x" + (", float[5,5] m" if mask else "")
    return f"g ({given}) => (float[2,5,8] y) <{weights}> {{ {' '.join(lines)} y = Attention<{attrs}>(q, k, v{mask}) }}"


TURNED = """g (float[2,5,6] x) => (float[2,5,8] y)
<float[6,24] w, float[24] b, int64[5] five = {0,0,3,2,4}, int64[3] parts = {1,1,1}, int64[1] zero = {0},
 int64[3] flat = {0,0,8}>
{ a0 = MatMul(x, w) a = Add(a0, b) h = Reshape(a, five) t = Transpose<perm=[2,0,3,1,4]>(h)
  q1, k1, v1 = Split<axis=0>(t, parts) q = Squeeze(q1, zero) k = Squeeze(k1, zero) v = Squeeze(v1, zero)
  o = Attention(q, k, v) p = Transpose<perm=[0,2,1,3]>(o) y = Reshape(p, flat) }"""
# torch's nn.MultiheadAttention: rows lie outside of the batch, batch and heads are one axis for a while
ROWS_FIRST = """g (float[5,2,6] x) => (float[10,8] y)
<float[6,24] w, int64[5] five = {1,5,2,3,8}, int64[1] gone = {3}, int64 i = {0}, int64 j = {1}, int64 l = {-1},
 int64[3] s = {5,4,4}, int64[4] t = {2,2,5,4}, int64[2] f = {10,8}>
{ a = MatMul(x, w) b = Reshape(a, five) c = Transpose<perm=[3,1,2,0,4]>(b) d = Squeeze(c, gone)
  q0 = Gather(d, i) k0 = Gather(d, j) v0 = Gather(d, l)
  q1 = Reshape(q0, s) k1 = Reshape(k0, s) v1 = Reshape(v0, s)
  q2 = Transpose<perm=[1,0,2]>(q1) k2 = Transpose<perm=[1,0,2]>(k1) v2 = Transpose<perm=[1,0,2]>(v1)
  q = Reshape(q2, t) k = Reshape(k2, t) v = Reshape(v2, t)
  o = Attention(q, k, v) p = Transpose<perm=[2,0,1,3]>(o) y = Reshape(p, f) }"""
SPLITS = f"""g (float[2,5,6] x) => (float[2,5,8] y) <float[6,24] w, int64[3] parts = {{8,8,8}}>
{{ a = MatMul(x, w) q, k, v = Split<axis=-1>(a, parts) y = Attention<{HEADS}, is_causal=1>(q, k, v) }}"""
SLICES = f"""g (float[2,5,6] x) => (float[2,5,8] y)
<float[6,24] w, int64[1] e = {{8}}, int64[1] f = {{16}}, int64[1] z = {{0}}, int64[1] n = {{99}}, int64[1] ax = {{2}}>
{{ a = MatMul(x, w) q = Slice(a, f, n, ax) k = Slice(a, z, e, ax) v = Slice(a, e, f, ax)
  y = Attention<{HEADS}>(q, k, v) }}"""
CROSS = f"""g (float[2,5,6] x, float[2,7,6] z) => (float[2,5,8] y)
<float[6,8] wq, float[6,8] wk, float[6,8] wv, float[8] b>
{{ q0 = MatMul(x, wq) q = Add(q0, b) k = MatMul(z, wk) v0 = MatMul(z, wv) v = Add(v0, b)
  y = Attention<{HEADS}>(q, k, v) }}"""
SCALED = f"""g (float[2,5,6] x) => (float[2,5,8] y)
<float[6,8] wq, float[6,8] wk, float[6,8] wv, float[8] b, float[8] c, float s = {{0.25}}>
{{ q0 = MatMul(x, wq) q1 = Add(q0, b) q = Mul(q1, s) k = MatMul(x, wk) v0 = MatMul(x, wv) v = Add(v0, c)
  y = Attention<{HEADS}, scale=1.0>(q, k, v) }}"""
# a matrix of all rows, with a Gemm's own bias, and an activation of each
GEMMS = f"""g (float[10,6] x) => (float[2,5,8] y)
<float[8,6] wq, float[8,6] wk, float[8,6] wv, float[8] bq, float[8] bk, float[8] bv, int64[3] r = {{2,5,8}}>
{{ q0 = Gemm<transB=1>(x, wq, bq) k0 = Gemm<transB=1>(x, wk, bk) v0 = Gemm<transB=1>(x, wv, bv)
  q1 = Tanh(q0) k1 = Tanh(k0) v1 = Tanh(v0) q = Reshape(q1, r) k = Reshape(k1, r) v = Reshape(v1, r)
  y = Attention<{HEADS}>(q, k, v) }}"""
# keys and values that are repeated for the heads that share them
REPEATED = """g (float[2,5,6] x) => (float[2,5,16] y)
<float[6,16] wq, float[6,8] wk, float[6,8] wv, int64[4] r = {0,0,4,4}, int64[4] s = {0,0,2,4}, int64[1] two = {2},
 int64[5] e = {2,2,2,5,4}, int64[4] h = {2,4,5,4}, int64[3] f = {0,0,16}>
{ q0 = MatMul(x, wq) q1 = Reshape(q0, r) q = Transpose<perm=[0,2,1,3]>(q1)
  k0 = MatMul(x, wk) k1 = Reshape(k0, s) k2 = Transpose<perm=[0,2,1,3]>(k1) k3 = Unsqueeze(k2, two) k4 = Expand(k3, e)
  v0 = MatMul(x, wv) v1 = Reshape(v0, s) v2 = Transpose<perm=[0,2,1,3]>(v1) v3 = Unsqueeze(v2, two) v4 = Expand(v3, e)
  k = Reshape(k4, h) v = Reshape(v4, h)
  o = Attention(q, k, v) p = Transpose<perm=[0,2,1,3]>(o) y = Reshape(p, f) }"""
MULTI_HEAD = """g (float[2,5,6] x, float[1,2,5,5] m) => (float[2,5,8] y) <float[6,8] wq, float[6,8] wk, float[6,8] wv>
{ q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)
  y = com.microsoft.MultiHeadAttention<num_heads=2>(q, k, v, , , m) }"""
APART = """g (float[2,2,5,4] q, float[2,2,5,4] k, float[2,2,5,4] v) => (float[2,5,2,4] y)
{ o = Attention(q, k, v) y = Transpose<perm=[0,2,1,3]>(o) }"""

#: the graph, the products that are left of it, and heads of keys
CASES = {
    "three": (three(), 1, 2), "masked": (three(", m"), 1, 2), "causal": (three("", HEADS + ", is_causal=1"), 1, 2),
    "shared heads": (three("", "q_num_heads=2, kv_num_heads=1"), 1, 1),
    "some have a bias": (three("", HEADS, "qv"), 1, 2),
    "no bias": (three("", HEADS, ""), 1, 2), "turned": (TURNED, 1, 2), "rows first": (ROWS_FIRST, 1, 2),
    "split": (SPLITS, 1, 2), "slices": (SLICES, 1, 2), "cross": (CROSS, 2, 2), "scaled": (SCALED, 1, 2),
    "gemms": (GEMMS, 1, 2), "repeated": (REPEATED, 1, 2), "multi head": (MULTI_HEAD, 1, 2), "apart": (APART, 0, 2),
}  # fmt: skip
FREE = {"Reshape", "Squeeze", "Unsqueeze", "Identity"}


def read(text: str) -> Graph:
    """With weights that differ even where their shapes are the same: equal products would become one at once."""
    graph = graphs.graph(text)
    for n, value in enumerate(graph.constants()):
        if value.const is not None and value.const.dtype == np.float32:
            value.const = np.random.default_rng(n).standard_normal(value.const.shape).astype(np.float32)
    return graph


def prepared(text: str) -> Graph:
    graph = read(text)
    run_passes(graph, [*NEUTRAL, Fuse()], Context(Settings.make({"VERIFY_PASSES": "YES"}, Settings())))
    return graph


def strided(text: str, **more: Any) -> tuple[Graph, Context]:
    graph = prepared(text)
    context = Context(Settings(), layouts=DEVICE, **more)
    run_passes(graph, [StrideAttention()], context)
    verify(graph, "strided")
    return graph, context


@pytest.mark.parametrize("name", CASES)
def test_results_stay_and_nothing_is_moved(name: str) -> None:
    text, products, groups = CASES[name]
    plain = read(text)
    arrays = graphs.inputs(plain)
    graph, _ = strided(text)
    ops = [node.op for node in graph.nodes if node.op not in FREE]
    assert sorted(set(ops) - {"MatMul", "Gemm"}) == [STRIDED], ops
    assert len(ops) == products + 1
    attention = next(n for n in graph.nodes if n.op == STRIDED)
    assert attention.attrs["sizes"][2] == groups
    graphs.assert_close(graphs.run(graph, arrays), graphs.run(plain, arrays), 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_it_can_be_exported(name: str) -> None:
    graph, _ = strided(CASES[name][0])
    arrays = graphs.inputs(graph)
    proto = to_model(graph)
    onnx.checker.check_model(proto)
    if name == "multi head":  # nobody else here runs it
        return
    inlined = onnx.shape_inference.infer_shapes(onnx.inliner.inline_local_functions(proto))
    names = [v.name for v in inlined.graph.input]
    got = ReferenceEvaluator(inlined).run(None, dict(zip(names, arrays, strict=True)))
    graphs.assert_close(got, graphs.run(graph, arrays), 1e-5)


STAYS = {
    "queries are read elsewhere": three().replace("(float[2,5,8] y)", "(float[2,5,8] y, float[2,5,8] q)")
    .replace("bias", "q"),
    "weights are not constant": """g (float[2,5,6] x, float[6,8] w, float[6,8] u, float[6,8] v) => (float[2,5,8] y)
{ a = MatMul(x, w) b = MatMul(x, u) c = MatMul(x, v) y = Attention<q_num_heads=2, kv_num_heads=2>(a, b, c) }""",
    "different tensors": f"""g (float[2,5,6] x, float[2,5,6] z, float[2,5,6] u) => (float[2,5,8] y)
<float[6,8] wq, float[6,8] wk, float[6,8] wv>
{{ q = MatMul(x, wq) k = MatMul(z, wk) v = MatMul(u, wv) y = Attention<{HEADS}>(q, k, v) }}""",
    "open shapes": three().replace("[2,5,6] x", "[N,5,6] x").replace("[2,5,8] y", "[N,5,8] y"),
    "nothing to save": f"""g (float[2,5,8] q, float[2,5,8] k, float[2,5,8] v) => (float[2,5,8] y)
{{ y = Attention<{HEADS}>(q, k, v) }}""",
    "more outputs": three().replace("y = Attention", "y, e, f = Attention")
    .replace("(float[2,5,8] y)", "(float[2,5,8] y, float[2,2,5,4] e)"),
}  # fmt: skip


@pytest.mark.parametrize("name", STAYS)
def test_what_stays(name: str) -> None:
    before = prepared(STAYS[name])
    graph, _ = strided(STAYS[name])
    if name == "queries are read elsewhere":  # the two others are joined all the same
        assert sum(n.op == "MatMul" for n in graph.nodes) == 2
        arrays = graphs.inputs(graph)
        graphs.assert_close(graphs.run(graph, arrays), graphs.run(before, arrays), 1e-5)
    else:
        assert str(graph) == str(before)


def test_the_device_is_asked() -> None:
    graph, context = strided(three(), works_in=lambda node, layout, inputs: f"no {node.op} here")
    assert str(graph) == str(prepared(three()))
    assert [(e.rule, e.reason) for e in context.log.entries] == [("attention-strides", f"no {STRIDED} here")]
    host = prepared(three())
    assert not run_passes(host, [StrideAttention()], Context(Settings()))  # the host does what the model says


def test_weights_are_joined_once() -> None:
    graph = prepared(three())
    context = Context(Settings(), layouts=DEVICE)
    found = []
    for _ in range(2):
        copy = graph.clone()
        run_passes(copy, [StrideAttention()], context)
        found.append(next(n for n in copy.nodes if n.op == "MatMul").inputs[1])
    assert found[0].const is found[1].const and found[0].const.shape == (6, 24)


def test_views_that_strides_cannot_say_begin_anew() -> None:
    graph = graphs.graph("""g (float[4,6] x) => (float[8,3] y) <int64[2] s = {8,3}>
    { t = Transpose<perm=[1,0]>(x) y = Reshape(t, s) }""")
    y, t = graph.outputs[0], graph.nodes[0].output
    one, other = view(y), view(t)
    assert one is not None and one.value is y and other is not None
    assert (other.value, other.axes) == (graph.inputs[0], (((6, 1),), ((4, 6),)))


def test_what_says_its_own_type_gets_a_cast_when_networks_are_narrowed() -> None:
    """A causal mask that an exporter makes from a shape."""
    graph = graphs.graph("""g (float[N,L] x) => (float[N,L] y, float[L] z) <int64[1] i = {1}, float f = {0.5}>
    { s = Shape(x) n = Gather(s, i) z = ConstantOfShape<value = float[1] {7.0}>(n) a = Mul(x, f) y = Add(a, z) }""")
    arrays = [np.ones((2, 3), np.float32)]
    want = graphs.run(graph, arrays)
    assert run_passes(graph, [Narrow()], Context(Settings(), precision=DType.BFLOAT16))
    verify(graph, "precision")
    graphs.assert_close(graphs.run(graph, arrays), want, 1e-2)
