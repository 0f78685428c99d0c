"""Loops around more than one plain cell: stacks, heads, layers of one step, products in front, first states."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest

import tunewright
from tunewright.frontend.onnx import load
from tunewright.ir.graph import Graph
from tunewright.passes.base import Context, run_passes
from tunewright.passes.standard import NEUTRAL
from tunewright.settings import Settings

ort = pytest.importorskip("onnxruntime")
LSTM = """{p}x = Concat<axis=-1>({x}, {h}) {p}m = MatMul({p}x, {p}W) {p}g = Add({p}m, {p}b)
    {p}gi, {p}gj, {p}gf, {p}go = Split<axis=-1, num_outputs=4>({p}g) {p}sf = Sigmoid({p}gf) {p}k = Mul({c}, {p}sf)
    {p}si = Sigmoid({p}gi) {p}tj = Tanh({p}gj) {p}n = Mul({p}si, {p}tj) {p}c = Add({p}k, {p}n) {p}tc = Tanh({p}c)
    {p}so = Sigmoid({p}go) {p}h = Mul({p}tc, {p}so)"""
RNN = "a = MatMul(xt, W) r = MatMul({h}, R) s = Add(r, a) {n} = Tanh(s)"


def cell(p: str, x: str, h: str, c: str) -> str:
    return LSTM.format(p=p, x=x, h=h, c=c)


def model(text: str, **arrays: Any) -> onnx.ModelProto:
    """Weights are shapes or arrays."""
    made = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 18]> {text}')
    rng = np.random.default_rng(len(text))
    for name, array in arrays.items():
        if isinstance(array, tuple):
            array = (rng.standard_normal(array) * 0.4).astype(np.float32)
        made.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    return made


def optimised(made: onnx.ModelProto) -> tuple[Graph, list[str]]:
    context = Context(Settings.make({"VERIFY_PASSES": "YES"}, Settings()))
    graph = load(made, context.settings).graph
    run_passes(graph, NEUTRAL, context)
    return graph, [e.reason for e in context.log.entries if e.rule == "recurrent-loops" and e.reason]


def check(made: onnx.ModelProto, *layers: str, loop: bool = False, **shapes: tuple[int, ...]) -> Graph:
    """The layers that the loop becomes (none: it stays a loop), and ONNX Runtime's results, or those of our loop."""
    graph, reasons = optimised(made)
    recurrent = [n.op for n in graph.nodes if n.op in ("LSTM", "GRU", "RNN")]
    assert recurrent == list(layers), (reasons, str(graph))
    assert bool(layers) != any(n.op in ("Loop", "Scan") for n in graph.nodes)
    rng = np.random.default_rng(0)
    inputs = {k: rng.standard_normal(shape).astype(np.float32) for k, shape in shapes.items()}
    same(made, inputs, loop)
    return graph


def same(made: onnx.ModelProto, inputs: dict[str, Any], loop: bool = False) -> None:
    got, names = tunewright.Core().compile_model(made, "CPU.HOST")(inputs), [o.name for o in made.graph.output]
    if loop:
        plain = tunewright.Core({"DISABLED_PASSES": "recurrent-loops"}).compile_model(made, "CPU.HOST")(inputs)
        wanted = [plain[name] for name in names]
    else:
        session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
        wanted = session.run(None, inputs)
    for name, want in zip(names, wanted, strict=True):
        np.testing.assert_allclose(got[name], want, rtol=1e-5, atol=2e-6, err_msg=name)


WEIGHTS = {"aW": (9, 16), "ab": (16,)}
FROM_ZERO = "sh = Shape(x) n = Slice(sh, v1, v2, v0) dims = Concat<axis=0>(n, v4) z = ConstantOfShape(dims)"
NUMBERS = {"v0": np.asarray([0]), "v1": np.asarray([1]), "v2": np.asarray([2]), "v4": np.asarray([4])}


def test_a_stack_of_cells_with_a_head_becomes_layers() -> None:
    made = model(
        f"""g (float[T,N,5] x) => (float[T,N,3] y, float[N,4] last) {{ {FROM_ZERO}
        h1, c1, last, c2, y = Scan<num_scan_inputs=1, body = b (float[N,4] h, float[N,4] c, float[N,4] k, float[N,4] d,
            float[N,5] xt) => (float[N,4] ah, float[N,4] ac, float[N,4] bh, float[N,4] bc, float[N,3] o)
            {{ {cell("a", "xt", "h", "c")} {cell("b", "ah", "k", "d")} q = Concat<axis=1>(bh, xt) p = Gemm(q, V, vb)
               o = Relu(p) }}>(z, z, z, z, x) }}""",
        **WEIGHTS, bW=(8, 16), bb=(16,), V=(9, 3), vb=(3,), **NUMBERS,
    )  # fmt: skip
    check(made, "LSTM", "LSTM", x=(7, 3, 5))
    check(made, "LSTM", "LSTM", x=(1, 1, 5))


def test_states_in_one_value_become_two() -> None:
    """tf.nn.rnn_cell.BasicLSTMCell with state_is_tuple=False."""
    made = model(
        f"""g (float[T,N,5] x, float[N,8] s0) => (float[T,N,4] y, float[N,8] last)
        {{ last, y = Scan<num_scan_inputs=1, body = b (float[N,8] s, float[N,5] xt) => (float[N,8] sn, float[N,4] o)
            {{ c, h = Split<axis=1, num_outputs=2>(s) {cell("a", "xt", "h", "c")} sn = Concat<axis=1>(ac, ah)
               o = Identity(ah) }}>(s0, x) }}""",
        **WEIGHTS,
    )  # fmt: skip
    check(made, "LSTM", x=(5, 2, 5), s0=(2, 8))


def test_states_with_an_axis_of_one_element() -> None:
    made = model(
        """g (float[T,N,5] x, float[1,N,4] h0) => (float[T,1,N,4] y, float[1,N,4] last) { last, y =
          Scan<num_scan_inputs=1, body = b (float[1,N,4] h, float[N,5] xt) => (float[1,N,4] hn, float[1,N,4] o)
            { u = Unsqueeze(xt, v0) a = MatMul(u, W) r = MatMul(h, R) s = Add(r, a) hn = Tanh(s) o = Identity(hn) }>
          (h0, x) }""",
        W=(5, 4), R=(4, 4), **NUMBERS,
    )  # fmt: skip
    check(made, "RNN", x=(5, 2, 5), h0=(1, 2, 4))


@pytest.mark.parametrize(("op", "reset"), [("LSTM", 0), ("GRU", 0), ("GRU", 1), ("RNN", 0)])
def test_a_layer_of_one_step_becomes_one_of_all(op: str, reset: int) -> None:
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    states = ["h", "c"] if op == "LSTM" else ["h"]
    first, once = ", ".join(f"{s}0" for s in states), ", ".join(f"u{s}" for s in states)
    attrs = f"hidden_size=4{', linear_before_reset=1' if reset else ''}"
    body = " ".join(f"u{s} = Unsqueeze({s}, v0)" for s in states)
    made = model(
        f"""g (float[T,N,5] x, {", ".join(f"float[N,4] {s}0" for s in states)}) => (float[T,N,4] y, float[N,4] last)
        {{ shape = Shape(x) steps = Gather(shape, i0) e = SequenceEmpty<dtype=1>()
          last, {"cell," if op == "LSTM" else ""} all = Loop(steps, true, {first}, e) <body = b (int64 i, bool go,
            {", ".join(f"float[N,4] {s}" for s in states)}, seq(float[N,4]) q) => (bool on,
            {", ".join(f"float[N,4] {s}n" for s in states)}, seq(float[N,4]) qn)
            {{ on = Identity(go) xt = Gather(x, i) ux = Unsqueeze(xt, v0) {body}
               Y, {", ".join(f"Y{s}" for s in states)} = {op}<{attrs}>(ux, W, R, B, , {once})
               {" ".join(f"{s}n = Squeeze(Y{s}, v0)" for s in states)} yy = Squeeze(Y, v01)
               qn = SequenceInsert(q, yy) }}>
          y = ConcatFromSequence<axis=0, new_axis=1>(all) }}""",
        W=(1, gates * 4, 5), R=(1, gates * 4, 4), B=(1, gates * 8), i0=np.asarray(0), true=np.asarray(True),
        v01=np.asarray([0, 1]), **NUMBERS,
    )  # fmt: skip
    check(made, op, x=(6, 2, 5), **{f"{s}0": (2, 4) for s in states})


@pytest.mark.parametrize("loop", ["Loop", "If"])
def test_a_loop_inside_a_body(loop: str) -> None:
    """Names of dimensions mean nothing there: sizes are compared by where they come from."""
    scan = f"""hT, y = Scan<num_scan_inputs=1, body = b (float[N,4] h, float[N,5] xt) => (float[N,4] hn, float[N,4] o)
        {{ {RNN.format(h="h", n="hn")} o = Identity(hn) }}>(z, x)"""
    inner = {
        "Loop": f"""hs, yl = Loop(two, , z0) <body = l (int64 i, bool go, float[N,4] z) => (bool on, float[N,4] hT,
            float[T,N,4] y) {{ on = Identity(go) {scan} }}>""",
        "If": f"""yl, hs = If(sunny) <then_branch = t () => (float[T,N,4] y, float[N,4] hT)
            {{ {FROM_ZERO.replace("sh", "sx").replace("n ", "m ").replace("(n,", "(m,").replace("dims", "d")} {scan} }},
            else_branch = e () => (float[T,N,4] y2, float[N,4] h2) {{ y2 = MatMul(x, W) h2 = Neg(z0) }}>""",
    }[loop]
    made = model(
        f"""g (float[T,N,5] x, float one) => (float[K,N,4] flat, float[N,4] hs)
        {{ sh = Shape(x) n = Slice(sh, v1, v2, v0) dims = Concat<axis=0>(n, v4) z0 = ConstantOfShape(dims)
           sunny = Less(one, big) {inner} flat = Reshape(yl, flatten) }}""",
        W=(5, 4), R=(4, 4), two=np.asarray(2), big=np.float32(9), flatten=np.asarray([-1, 2, 4]), **NUMBERS,
    )  # fmt: skip
    graph, reasons = optimised(made)
    bodies = [body for g in graph.walk() for node in g.nodes for body in node.bodies.values()]
    assert any(n.op == "RNN" for body in bodies for n in body.nodes) == (loop == "If"), reasons
    x = np.random.default_rng(0).standard_normal((3, 2, 5)).astype(np.float32)
    inputs = {"x": x, "one": np.asarray(1, np.float32)}
    same(made, inputs)


def scan(first: str, body: str, outputs: str = "float[T,N,4] y", x: str = "x", before: str = "") -> str:
    return f"""g (float[T,N,5] x) => ({outputs}) {{ {before} last, y = Scan<num_scan_inputs=1,
        body = b (float[N,4] h, float[N,5] xt) => (float[N,4] hn, float[N,4] o) {{ {body} o = Identity(hn) }}>
        ({first}, {x}) }}"""


STEP = RNN.format(h="h", n="hn")


@pytest.mark.parametrize("batch", [1, 3])
def test_one_first_state_for_every_sample(batch: int) -> None:
    """It is spread where nobody can see that a loop over nothing would not have done so."""
    weights: dict[str, Any] = {"W": (5, 4), "R": (4, 4)}
    for first in (np.zeros((1, 4), np.float32), np.linspace(-1, 1, 4, dtype=np.float32)[None]):
        check(model(scan("h0", STEP), **weights, h0=first), "RNN", loop=True, x=(5, batch, 5))
        seen = scan("h0", STEP, outputs="float[T,N,4] y, float[N,4] last")
        check(model(seen, **weights, h0=first), loop=True, x=(5, batch, 5))
        check(model(seen.replace("T,N,5] x", "5,N,5] x"), **weights, h0=first), "RNN", loop=True, x=(5, batch, 5))


def test_a_product_in_front_of_the_loop_goes_into_the_weights() -> None:
    text = """g (float[T,N,7] x, float[N,4] h0) => (float[T,N,4] y) { m = MatMul(x, W) p = Add(m, b)
        last, y = Scan<num_scan_inputs=1, body = b (float[N,4] h, float[N,12] xt) => (float[N,4] hn, float[N,4] o)
        { xz, xr, xn = Split<axis=1, num_outputs=3>(xt) mh = MatMul(h, R) mz, mr = Split<axis=1, num_outputs=2>(mh)
          z0 = Add(xz, mz) z = Sigmoid(z0) r0 = Add(xr, mr) r = Sigmoid(r0) rh = Mul(r, h) mn = MatMul(rh, Rn)
          n0 = Add(xn, mn) n = Tanh(n0) z1 = Sub(one, z) a = Mul(z1, n) k = Mul(z, h) hn = Add(a, k)
          o = Identity(hn) }>(h0, p) }"""
    made = model(text, W=(7, 12), b=(12,), R=(4, 8), Rn=(4, 4), one=np.float32(1))
    graph = check(made, "GRU", x=(5, 3, 7), h0=(3, 4))
    assert not any(n.op in ("MatMul", "Gemm") for n in graph.nodes)


def test_a_carried_result_that_repeats_the_state() -> None:
    """Keras carries the last output beside the states; where nothing is scanned it is something else."""
    text = """g (float[{T},N,5] x) => (float[N,4] last) {{ {before} h, last = Scan<num_scan_inputs=1,
        body = b (float[N,4] h, float[N,4] out, float[N,5] xt) => (float[N,4] hn, float[N,4] on)
        {{ {step} on = Identity(hn) }}>(z, {first}, x) }}"""
    parts = {"before": FROM_ZERO, "step": STEP}
    weights: dict[str, Any] = {"W": (5, 4), "R": (4, 4), **NUMBERS}
    check(model(text.format(T=20, first="z", **parts), **weights), "RNN", x=(20, 3, 5))
    check(model(text.format(T="T", first="z", **parts), **weights), "RNN", x=(6, 3, 5))
    parts["before"] += " ones = Exp(z)"
    check(model(text.format(T=20, first="ones", **parts), **weights), "RNN", x=(20, 3, 5))
    check(model(text.format(T="T", first="ones", **parts), **weights), x=(6, 3, 5))


def test_short_loops_of_known_length_become_layers_too() -> None:
    """They would be unrolled otherwise."""
    text = scan("z", STEP, before=FROM_ZERO).replace("T,N,5] x", "3,N,5] x")
    check(model(text, W=(5, 4), R=(4, 4), **NUMBERS), "RNN", x=(3, 2, 5))


def test_slices_of_a_sequence() -> None:
    """for xt in x.unbind(0)"""
    made = model(
        f"""g (float[T,N,5] x, float[N,4] h0) => (float[T,N,4] y)
        {{ parts = SplitToSequence<axis=0, keepdims=0>(x, i1) steps = SequenceLength(parts)
          last, y = Loop(steps, true, h0) <body = b (int64 i, bool go, float[N,4] h) => (bool on, float[N,4] hn,
          float[N,4] o) {{ on = Identity(go) xt = SequenceAt(parts, i) {STEP} o = Identity(hn) }}> }}""",
        W=(5, 4), R=(4, 4), i1=np.asarray(1), true=np.asarray(True),
    )  # fmt: skip
    check(made, "RNN", x=(5, 3, 5), h0=(3, 4))


def test_two_inputs_scanned_at_once() -> None:
    made = model(
        """g (float[T,N,5] x, float[T,N,2] e, float[N,4] h0) => (float[T,N,4] y) { last, y = Scan<num_scan_inputs=2,
        body = b (float[N,4] h, float[N,5] xt, float[N,2] et) => (float[N,4] hn, float[N,4] o)
        { q = Concat<axis=1>(et, h, xt) s = Gemm(q, W, b) hn = Tanh(s) o = Identity(hn) }>(h0, x, e) }""",
        W=(11, 4), b=(4,),
    )  # fmt: skip
    check(made, "RNN", x=(5, 3, 5), e=(5, 3, 2), h0=(3, 4))
    other = onnx.ModelProto.FromString(made.SerializeToString())
    other.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "U"
    check(other, x=(5, 3, 5), e=(5, 3, 2), h0=(3, 4))


def test_weights_that_the_loop_carries() -> None:
    """Exporters that know no captures carry them, and never change them."""
    made = model(
        """g (float[T,N,5] x, float[N,4] h0) => (float[T,N,4] y, float[5,4] w) { last, w, r, y = Scan<num_scan_inputs=1,
        body = b (float[N,4] h, float[5,4] wi, float[4,4] ri, float[N,5] xt)
               => (float[N,4] hn, float[5,4] wo, float[4,4] ro, float[N,4] o)
        { wo = Identity(wi) ro = Identity(ri) a = MatMul(xt, wi) b = MatMul(h, ri) s = Add(a, b) hn = Tanh(s)
          o = Identity(hn) }>
        (h0, W, R, x) }""",
        W=(5, 4), R=(4, 4),
    )  # fmt: skip
    check(made, "RNN", x=(5, 3, 5), h0=(3, 4))


@pytest.mark.parametrize("batch", ["N", "1", "M"])
def test_a_context_that_every_step_sees(batch: str) -> None:
    made = model(
        f"""g (float[T,N,5] x, float[{batch},3] e, float[N,4] h0) => (float[T,N,4] y) {{ ctx = Tanh(e)
        last, y = Scan<num_scan_inputs=1, body = b (float[N,4] h, float[N,5] xt) => (float[N,4] hn, float[N,4] o)
        {{ p = MatMul(ctx, V) a = Gemm(xt, W, b) r = MatMul(h, R) s = Add(a, r) q = Add(s, p) hn = Tanh(q)
           o = Identity(hn) }}>(h0, x) }}""",
        W=(5, 4), b=(4,), R=(4, 4), V=(3, 4),
    )  # fmt: skip
    rows = 3 if batch == "N" else 1
    check(made, *([] if batch == "M" else ["RNN"]), loop=batch != "N", x=(5, 3, 5), e=(rows, 3), h0=(3, 4))


def test_a_hostile_body_is_refused_in_time() -> None:
    """Sums that double with every step, and a chain of thousands of activations."""
    double = " ".join(f"a{i} = Tanh(v{i}) b{i} = Sigmoid(v{i}) v{i + 1} = Add(a{i}, b{i})" for i in range(200))
    chain = " ".join(f"w{i + 1} = Tanh(w{i})" for i in range(3000))
    for body in (f"v0 = Identity(xt) {double} p, q = Split<axis=1>(v200, two) hn = Add(h, p)",
                 f"w0 = Identity(h) {chain} hn = Add(w3000, xt)"):  # fmt: skip
        text = f"""g (float[T,N,4] x, float[N,4] h0) => (float[N,4] last) {{ last = Scan<num_scan_inputs=1,
            body = b (float[N,4] h, float[N,4] xt) => (float[N,4] hn) {{ {body} }}>(h0, x) }}"""
        _, reasons = optimised(model(text, two=np.asarray([4, 0])))
        assert reasons
