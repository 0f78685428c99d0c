"""Attention whose dimensions lose their names on the way is recognised once shapes are known."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import tunewright

TEXT = """<ir_version: 10, opset_import: ["" : 18]>
g (float[N,L,32] x, float[N,1,1,L] mask) => (float[N,K,32] y)
<int64 zero = {0}, int64 one = {1}, int64[4] heads = {0,0,4,8}, int64[3] whole = {0,0,32}, float root = {2.83}>
{ s = Shape(x) n = Gather(s, one) places = Range(zero, n, one) p = Gather(table, places) h = Add(x, p)
  q0 = MatMul(h, wq) k0 = MatMul(h, wk) v0 = MatMul(h, wv)
  q1 = Reshape(q0, heads) k1 = Reshape(k0, heads) v1 = Reshape(v0, heads)
  q = Transpose<perm=[0,2,1,3]>(q1) t = Transpose<perm=[0,2,3,1]>(k1) v = Transpose<perm=[0,2,1,3]>(v1)
  a = MatMul(q, t) b = Div(a, root) c = Add(b, mask) d = Softmax<axis=-1>(c) e = MatMul(d, v)
  f = Transpose<perm=[0,2,1,3]>(e) y = Reshape(f, whole) }"""


def model() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    made = onnx.parser.parse_model(TEXT)
    for name, shape in (("table", (64, 32)), ("wq", (32, 32)), ("wk", (32, 32)), ("wv", (32, 32))):
        array = (rng.standard_normal(shape) / 4).astype(np.float32)
        made.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return made


def operations(compiled: tunewright.CompiledModel) -> list[str]:
    return [s.node.op for s in compiled.program.plans[-1].steps if not s.optimized_out]


@pytest.mark.parametrize(("batch", "length"), [(1, 7), (3, 16)])
def test_recognised_when_shapes_are_known(batch: int, length: int) -> None:
    rng = np.random.default_rng(length)
    inputs = {
        "x": rng.standard_normal((batch, length, 32)).astype(np.float32),
        "mask": np.where(rng.random((batch, 1, 1, length)) < 0.3, -1e4, 0).astype(np.float32),
    }
    compiled = tunewright.Core().compile_model(model(), "CPU")
    assert not any(node.op == "Attention" for node in compiled.graph.nodes)  # not yet
    got = compiled(inputs)["y"]
    ran = operations(compiled)
    assert ran.count("Attention") == 1 and "Softmax" not in ran and "Transpose" not in ran, ran
    off = {"DISABLED_PASSES": "attention,attention-heads,scores-apart"}
    plain = tunewright.Core(off).compile_model(model(), "CPU.HOST")
    want = plain(inputs)["y"]
    assert "Attention" not in operations(plain)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_what_is_not_attention_is_fused_again() -> None:
    """Scores that are taken apart in vain: the product keeps its scale."""
    text = TEXT.replace("e = MatMul(d, v)", "o = Neg(d) e0 = MatMul(d, v) e1 = MatMul(o, v) e = Add(e0, e1)")
    made = model()
    other = onnx.parser.parse_model(text)
    other.graph.initializer.extend(made.graph.initializer[-4:])
    compiled = tunewright.Core().compile_model(other, "CPU")
    inputs = {"x": np.ones((1, 7, 32), np.float32), "mask": np.zeros((1, 1, 1, 7), np.float32)}
    np.testing.assert_allclose(compiled(inputs)["y"], 0, atol=1e-6)
    ran = operations(compiled)
    assert "Attention" not in ran and "Div" not in ran and "Softmax" in ran, ran
