"""Half networks become networks of single precision where the device computes halves in it, and results stay."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest

from golden import graphs
from tunewright import Core
from tunewright.frontend.export import to_model
from tunewright.ir.graph import Graph
from tunewright.ir.types import DType, TensorType
from tunewright.passes.base import Context, run_passes
from tunewright.passes.placement.widen import LEAST_WEIGHTS, WidenHalves
from tunewright.settings import Settings

#: a convolution, a constant, a Cast to single precision and back, movement at both ends
LAYERS = """g ({half}[1,6,6,3] x) => ({half}[1,64] y, int64[4] s) <{half}[4,3,3,3] w, {half}[1,4,1,1] c>
{{ t = Transpose<perm=[0,3,1,2]>(x) a = Conv(t, w) s = Shape(a) f = Cast<to=1>(a) r = Sigmoid(f) h = Cast<to={code}>(r)
  b = Mul(h, c) y = Flatten(b) }}"""
CODES = {"float16": 10, "bfloat16": 16}
HALF = pytest.mark.parametrize("half", CODES)


def context(**settings: object) -> Context:
    return Context(Settings(verify_passes=True, **settings), widens=True)


def widened(text: str) -> tuple[Graph, Graph]:
    """The graph before and after the pass."""
    before, after = graphs.graph(text), graphs.graph(text)
    run_passes(after, [WidenHalves()], context())
    return before, after


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


def refusal(text: str) -> str:
    graph, asked = graphs.graph(text), context()
    assert not run_passes(graph, [WidenHalves()], asked)
    (entry,) = asked.log.entries
    return entry.reason


@HALF
def test_layers_are_wide_between_two_casts(half: str) -> None:
    before, after = widened(LAYERS.format(half=half, code=CODES[half]))
    assert sorted(ops(after)) == ["Cast", "Cast", "Conv", "Flatten", "Mul", "Shape", "Sigmoid", "Transpose"]
    kinds = {node.op: node.output.tensor.dtype for node in after.nodes if node.output.tensor is not None}
    assert kinds["Conv"] is kinds["Sigmoid"] is kinds["Mul"] is DType.FLOAT32
    assert kinds["Transpose"] is kinds["Flatten"] is DType(half)
    assert [v.type for v in after.inputs + after.outputs] == [v.type for v in before.inputs + before.outputs]
    x = graphs.inputs(before)
    tolerance = 2e-3 if half == "float16" else 2e-2
    graphs.assert_close(
        [r.astype(np.float32) for r in graphs.run(after, x)], [r.astype(np.float32) for r in graphs.run(before, x)],
        tolerance,
    )  # fmt: skip


def test_results_are_nearer_to_the_truth() -> None:
    """A sum whose parts a half cannot hold beside each other: 1 + 2048 + 1 - 2048. Constants are given as bits."""
    text = """g (float16[1,1] x) => (float16[1,1] y)
    <float16[1,1] w = {15360}, float16 big = {26624}, float16 small = {15360}>
    { a = MatMul(x, w) b = Add(a, big) c = Add(b, small) y = Sub(c, big) }"""
    before, after = widened(text)
    one = [np.ones((1, 1), np.float16)]
    assert graphs.run(before, one)[0] == 0 and graphs.run(after, one)[0] == 2


def test_what_is_too_large_in_the_end_is_infinite() -> None:
    text = """g (float16[2,1] x) => (float16[2,1] y, float16[2,1] z) <float16[1,1] w = {15360}, float16 c = {16384}>
    { a = MatMul(x, w) y = Mul(a, c) z = Div(y, c) }"""
    _, after = widened(text)
    y, z = graphs.run(after, [np.array([[40000], [np.nan]], np.float16)])
    assert np.array_equal(y, np.array([[np.inf], [np.nan]], np.float16), equal_nan=True)
    assert np.array_equal(z, np.array([[40000], [np.nan]], np.float16), equal_nan=True)


def test_a_cache_stays_half() -> None:
    """What joins a cache is rounded once; the attention over it reads halves."""
    text = """g (float16[1,2,5,4] past, float16[1,2,1,4] k, float16[1,2,1,4] q) =>
      (float16[1,2,6,4] present, float16[1,2,1,4] y) <float16[4,4] w, float16[4,4] v>
    { n = MatMul(k, w) present = Concat<axis=2>(past, n) r = MatMul(q, v) a = Attention(r, present, present)
      y = MatMul(a, w) }"""
    before, after = widened(text)
    kinds = {node.op: node.output.tensor.dtype for node in after.nodes if node.output.tensor is not None}
    assert kinds["Concat"] is kinds["Attention"] is DType.FLOAT16 and kinds["MatMul"] is DType.FLOAT32
    assert all(node.inputs[0] not in after.inputs[:1] for node in after.nodes if node.op == "Cast")
    x = graphs.inputs(before)
    graphs.assert_close(graphs.run(after, x), graphs.run(before, x), tolerance=3e-3)


def test_an_embedding_table_stays_half() -> None:
    text = """g (int64[3] i) => (float16[3,4] y) <float16[9,4] table, float16[4,4] w>
    { e = Gather(table, i) y = MatMul(e, w) }"""
    _, after = widened(text)
    (gather,) = [node for node in after.nodes if node.op == "Gather"]
    table = gather.inputs[0]
    assert table is not None and table.const is not None and table.const.dtype == np.float16


def test_a_choice_between_constants_is_made_in_single_precision() -> None:
    """A mask reaches the attention without a Cast."""
    text = """g (float16[3,4] x, bool[3,4] m) => (float16[3,4] y) <float16[4,4] w, float16 a = {0}, float16 b = {64000}>
    { s = MatMul(x, w) c = Where(m, a, b) y = Add(s, c) }"""
    before, after = widened(text)
    assert ops(after).count("Cast") == 2
    x = graphs.inputs(before)
    graphs.assert_close(graphs.run(after, x), graphs.run(before, x), tolerance=2e-3)


def test_large_weights_of_products_stay_half_and_others_do_not() -> None:
    text = """g (float16[2,128] x) => (float16[2,256] y, float16[2,1] z)
    <float16[128,256] w, float16[256] b, float16[128,1] v> { y = Gemm(x, w, b) z = MatMul(x, v) }"""
    before, after = widened(text)
    constants = {n.op: [v.const for v in n.inputs if v is not None and v.const is not None] for n in after.nodes}
    assert 128 * 256 >= LEAST_WEIGHTS > 128
    assert [array.dtype for array in constants["Gemm"]] == [np.float16, np.float32]
    assert [array.dtype for array in constants["MatMul"]] == [np.float32]
    x = graphs.inputs(before)
    graphs.assert_close(graphs.run(after, x), graphs.run(before, x), tolerance=2e-3)


def test_an_exported_product_has_operands_of_one_type() -> None:
    text = "g (float16[2,128] x) => (float16[2,256] y) <float16[128,256] w> { y = MatMul(x, w) }"
    _, after = widened(text)
    model = to_model(after)
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node].count("Cast") == 3


def test_a_rounding_there_and_back_stays() -> None:
    text = """g (float[1,4] x) => (float[1,4] y) <float[4,4] w, float16[4,4] v>
    { h = Cast<to=10>(x) f = Cast<to=1>(h) a = MatMul(f, w) b = Cast<to=10>(a) c = MatMul(b, v) y = Cast<to=1>(c) }"""
    _, after = widened(text)
    assert ops(after) == ["Cast", "Cast", "MatMul", "MatMul"]


@pytest.mark.parametrize(("text", "reason"), [
    ("g (float16[4] x) => (float16[4] y) { y = Sigmoid(x) }", "no layer gains by it"),
    (
        """g (float16[1,4] x) => (float16[1,4] y) <float16[4,4] w, float16 s = {1}, int8 z = {0}>
        { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) y = MatMul(d, w) }""",
        "a quantised network keeps the floats between its integers",
    ),
])  # fmt: skip
def test_what_keeps_its_halves(text: str, reason: str) -> None:
    assert refusal(text) == reason


def test_a_body_is_given_what_it_was_given() -> None:
    text = """g (float16[1,4] x, bool c) => (float16[1,4] y) <float16[4,4] w> { a = MatMul(x, w)
      y = If(c) <then_branch = t () => (float16[1,4] p) { p = Sigmoid(a) },
                 else_branch = e () => (float16[1,4] q) { q = Neg(a) }> }"""
    before, after = widened(text)
    (branch,) = [node for node in after.nodes if node.bodies]
    assert all(isinstance(v.type, TensorType) and v.type.dtype is not DType.FLOAT32 for v in branch.inputs[1:] if v)
    for choice in (True, False):
        x = [graphs.inputs(before)[0], np.array(choice)]
        graphs.assert_close(graphs.run(after, x), graphs.run(before, x), tolerance=2e-3)


@HALF
def test_a_network_on_the_processor(half: str) -> None:
    """Widened by default, and not where the user asks for halves; both are near the truth."""
    text = LAYERS.format(half=half, code=CODES[half])
    proto = graphs.model(text)
    dtype = np.dtype(np.float16 if half == "float16" else ml_dtypes.bfloat16)
    x = np.random.default_rng(0).standard_normal((1, 6, 6, 3)).astype(dtype)
    truth = graphs.run(graphs.graph(LAYERS.format(half="double", code=11).replace("Cast<to=1>", "Cast<to=11>")),
                       [x.astype(np.float64)])[0]  # fmt: skip
    for hint in ("AUTO", "F16"):
        model = Core({"INFERENCE_PRECISION_HINT": hint}).compile_model(proto, "CPU")
        widens = any(e.rule == "widen-halves" and not e.reason for e in model.env.context.log.entries)
        assert widens == (hint == "AUTO" and model.env.device.widens)
        y = next(iter(model([x]).values()))
        assert y.dtype == dtype
        assert np.abs(y.astype(np.float64) - truth).max() <= (1e-2 if half == "float16" else 5e-2) * np.abs(truth).max()
