"""Loops, branches and sizes that come with the data, over open sizes: one plan serves them, as plans for each would."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from native.harness import native
from tunewright import Core, LimitError
from tunewright.runtime.plans.program import Program

ort = pytest.importorskip("onnxruntime")
pytestmark = native
HEAD = '<ir_version: 8, opset_import: ["" : 18]>\n'
Feeds = dict[str, np.ndarray]
Draw = Callable[[np.random.Generator], Feeds]


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def programs(program: Program) -> Iterator[Program]:
    """A program, those behind its plans, and those of bodies that the request runs."""
    yield program
    for plan in program.plans:
        if plan.rest is not None:
            yield from programs(plan.rest)
        for step in plan.steps:
            if step.control is not None and step.block is None:
                for body in step.control.bodies.values():
                    yield from programs(body)


def session(model: onnx.ModelProto) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def check(text: str, draw: Draw, count: int = 24, most: int = 4, same: bool = True, **config: Any) -> Any:
    """Results at so many random sizes are those of ONNX Runtime, and of plans for each: bit by bit, if the ``same``
    kernels run. Each program has ``most`` plans at most."""
    model = parser.parse_model(HEAD + text)
    onnx.checker.check_model(model)
    core = Core({"ENABLE_LOOP_UNROLLING": "NO", **config})
    one = core.compile_model(core.read_model(model), "CPU")
    each = core.compile_model(core.read_model(model), "CPU", {"SHAPE_TEMPLATES": "NO"})
    request, other, rng = one.create_infer_request(), session(model), np.random.default_rng(0)
    for _ in range(count):
        feeds = draw(rng)
        found, alone, expected = request.infer(feeds), each(feeds), other.run(None, feeds)
        where = str({name: a.shape for name, a in feeds.items()})
        for value, wanted in zip(model.graph.output, expected, strict=True):
            got = found[value.name]
            assert got.shape == wanted.shape and got.dtype == wanted.dtype, (value.name, where)
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5, err_msg=where)
            if same:
                np.testing.assert_array_equal(got, alone[value.name], err_msg=where)
    for program in programs(one.program):
        plans = program.plans
        assert len(plans) <= most, [plan.template and plan.template.trace.guard_texts() for plan in plans]
    assert any(plan.template is not None for plan in one.program.plans)
    return one


def blocks(one: Any) -> list[bool]:
    """Of each control-flow node in the plans: it is part of a launch."""
    return [step.block is not None for plan in one.program.plans for step in plan.steps if step.control is not None]


DECODER = """
g (float[s,8] src, float[8,16] we, float[16,16] wq, float[16,16] wo, float[16] start, int64 most)
    => (float[n,16] y, float[16] last)
{
    true = Constant <value = bool {1}> ()
    e = MatMul(src, we)
    memory = Tanh(e)
    last, y = Loop (most, true, start) <body = b (int64 i, bool go, float[16] h)
        => (bool on, float[16] h2, float[16] out)
    {
        zero = Constant <value_ints = [0]> ()
        row = Unsqueeze(h, zero)
        q = MatMul(row, wq)
        turned = Transpose <perm = [1, 0]> (memory)
        scores = MatMul(q, turned)
        shares = Softmax <axis = 1> (scores)
        mixed = MatMul(shares, memory)
        o = MatMul(mixed, wo)
        o1 = Squeeze(o, zero)
        m = ReduceMax <keepdims = 0> (o1)
        limit = Constant <value = float {0.5}> ()
        big = Greater(m, limit)
        h2 = If (big) <then_branch = large () => (float[16] c) { c = Tanh(o1) },
            else_branch = small () => (float[16] d) { sum = Add(o1, h) d = Tanh(sum) }>
        on = Identity(go)
        out = Identity(h2)
    }>
}
"""


def decoder_feeds(rng: np.random.Generator) -> Feeds:
    weights = {"we": floats(rng, 8, 16) / 3, "wq": floats(rng, 16, 16) / 4, "wo": floats(rng, 16, 16) / 4}
    most = np.array(rng.integers(0, 9))
    return {"src": floats(rng, int(rng.integers(2, 70)), 8), **weights, "start": floats(rng, 16), "most": most}


def test_a_decoder_with_loop_and_branch_over_sources_of_any_length() -> None:
    """Bits may differ: the tiles of an attention follow the number of keys at hand."""
    assert all(blocks(check(DECODER, decoder_feeds, same=False)))


WHILE = """
g (float[t,b,6] x, float[14,32] w, float[32] bias, float[b,8] h0, float[b,8] c0) => (float[n,b,8] y, float[b,8] hn)
{
    true = Constant <value = bool {1}> ()
    zero = Constant <value = int32 {0}> ()
    first = Constant <value = int64 {0}> ()
    shape = Shape(x)
    length = Gather <axis = 0> (shape, first)
    end = Cast <to = 6> (length)
    steps, hn, cn, y = Loop ("", true, zero, h0, c0)
        <body = b (int64 i, bool go, int32 k, float[b,8] h1, float[b,8] c1)
        => (bool on, int32 k2, float[b,8] h2, float[b,8] c2, float[b,8] out)
    {
        one = Constant <value = int32 {1}> ()
        k2 = Add(k, one)
        less = Less(k2, end)
        on = And(less, go)
        xt = Gather <axis = 0> (x, k)
        xh = Concat <axis = 1> (xt, h1)
        s = MatMul(xh, w)
        g = Add(s, bias)
        gi, gj, gf, go2 = Split <axis = 1, num_outputs = 4> (g)
        si = Sigmoid(gi)
        tj = Tanh(gj)
        sf = Sigmoid(gf)
        so = Sigmoid(go2)
        fc = Mul(sf, c1)
        ij = Mul(si, tj)
        c2 = Add(fc, ij)
        tc = Tanh(c2)
        h2 = Mul(so, tc)
        out = Identity(h2)
    }>
}
""".replace('("", true', "(, true")


def while_feeds(rng: np.random.Generator) -> Feeds:
    steps, batch = int(rng.integers(2, 40)), int(rng.integers(2, 6))
    given = {"x": floats(rng, steps, batch, 6), "w": floats(rng, 14, 32) / 3, "bias": floats(rng, 32)}
    return {**given, "h0": floats(rng, batch, 8), "c0": floats(rng, batch, 8)}


def test_a_while_loop_over_open_steps_and_an_open_batch() -> None:
    one = check(WHILE, while_feeds, DISABLED_PASSES="recurrent-loops")
    assert all(blocks(one))


def test_steps_of_a_loop_over_open_sizes_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = parser.parse_model(HEAD + WHILE)
    core, rng = Core({"DISABLED_PASSES": "recurrent-loops"}), np.random.default_rng(0)
    one = core.compile_model(core.read_model(model), "CPU")
    request, big = one.create_infer_request(), while_feeds(rng)
    for name, shape in {"x": (50, 6, 6), "h0": (6, 8), "c0": (6, 8)}.items():
        big[name] = floats(rng, *shape)
    request.infer(big)
    before, device = one.memory_statistics()["arenas"], one.env.device
    monkeypatch.setattr(type(device), "build", lambda self, source: pytest.fail("a kernel was compiled"))
    for _ in range(30):
        feeds = while_feeds(rng)
        if len(feeds["x"]) > 50 / 8:  # for much smaller sizes another plan is made beside
            request.infer(feeds)
    assert one.memory_statistics()["arenas"] <= 1.5 * before


GROWING = """
g (float[k,4] x, int64 n) => (float[m,4] y)
{
    t = Constant <value = bool {1}> ()
    y = Loop (n, t, x) <body = b (int64 i, bool go, float[a,4] s) => (bool on, float[c,4] z)
    {
        on = Identity(go)
        axes = Constant <value_ints = [0]> ()
        q = ReduceMean <keepdims = 1> (s, axes)
        r = Tanh(q)
        z = Concat <axis = 0> (s, r)
    }>
}
"""
GREEDY = """
g (int64[1,p] ids, float[40,16] words, float[16,16] wq, float[16,40] wo, int64 most) => (int64[1,m] y)
{
    true = Constant <value = bool {1}> ()
    y = Loop (most, true, ids) <body = b (int64 i, bool go, int64[1,a] s) => (bool on, int64[1,c] z)
    {
        e = Gather <axis = 0> (words, s)
        q = MatMul(e, wq)
        turned = Transpose <perm = [0, 2, 1]> (e)
        scores = MatMul(q, turned)
        shares = Softmax <axis = 2> (scores)
        mixed = MatMul(shares, e)
        logits = MatMul(mixed, wo)
        from = Constant <value_ints = [-1]> ()
        to = Constant <value_ints = [1000000]> ()
        axis = Constant <value_ints = [1]> ()
        last = Slice(logits, from, to, axis)
        best = ArgMax <axis = 2, keepdims = 0> (last)
        z = Concat <axis = 1> (s, best)
        on = Identity(go)
    }>
}
"""


def growing_feeds(rng: np.random.Generator) -> Feeds:
    return {"x": floats(rng, int(rng.integers(1, 40)), 4), "n": np.array(rng.integers(0, 12))}


def greedy_feeds(rng: np.random.Generator) -> Feeds:
    ids = rng.integers(0, 40, (1, int(rng.integers(1, 20))))
    weights = {"words": floats(rng, 40, 16), "wq": floats(rng, 16, 16), "wo": floats(rng, 16, 40)}
    return {"ids": ids, **weights, "most": np.array(rng.integers(0, 12))}


@pytest.mark.parametrize(("text", "draw"), [(GROWING, growing_feeds), (GREEDY, greedy_feeds)], ids=["rows", "greedy"])
def test_a_state_that_grows_makes_few_plans(text: str, draw: Draw) -> None:
    """One row is a class of its own; so there are two for the model, and for the body."""
    check(text, draw, same=text is GREEDY)


PICKED = """
g (float[n,8] x, float[8,16] w, float[16,16] w2%s) => (float[m,%s] y)
{
    h = MatMul(x, w)
    one = Constant <value_ints = [1]> ()
    zero = Constant <value_ints = [0]> ()
    sums = ReduceSum <keepdims = 0> (h, one)
    limit = Constant <value = float {0.0}> ()
    %s
}
"""
BEHIND = "r = Relu(part) p = MatMul(r, w2) y = Softmax <axis = 1> (p)"
#: how rows are picked: further inputs, columns of the result, nodes
PICKS = {
    "NonZero": ("", 16, """c = Greater(sums, limit) at2 = NonZero(c) at = Squeeze(at2, zero)
        part = Gather(h, at) """ + BEHIND),
    "Compress": ("", 16, "c = Greater(sums, limit) part = Compress <axis = 0> (h, c) " + BEHIND),
    "TopK": (", int64[1] k", 16, "v, at = TopK <axis = 0> (sums, k) part = Gather(h, at) " + BEHIND),
    "Slice": (", int64[1] k", 16, "part = Slice(h, zero, k) " + BEHIND),
    "Range": (", int64[1] k", 16, """first = Constant <value = int64 {0}> () step = Constant <value = int64 {1}> ()
        end = Squeeze(k) at = Range(first, end, step) part = Gather(h, at) """ + BEHIND),
    "two": ("", 16, """c = Greater(sums, limit) some = Compress <axis = 0> (h, c) q = MatMul(some, w2)
        s2 = ReduceSum <keepdims = 0> (q, one) c2 = Greater(s2, limit) part = Compress <axis = 0> (q, c2) """ + BEHIND),
    # q is made small: an exponential of a large score makes much of the last bit of any engine
    "with the whole": ("", 16, """c = Greater(sums, limit) part = Compress <axis = 0> (h, c) wide = MatMul(part, w2)
        small = Constant <value = float {0.05}> () q = Mul(wide, small) turned = Transpose <perm = [1, 0]> (h)
        scores = MatMul(q, turned) shares = Softmax <axis = 1> (scores) y = MatMul(shares, h)"""),
}  # fmt: skip


@pytest.mark.parametrize("how", PICKS)
def test_what_stands_behind_sizes_of_the_data_is_planned_once(how: str) -> None:
    """None and one are classes of their own, as they are for inputs."""
    more, columns, nodes = PICKS[how]

    def draw(rng: np.random.Generator) -> Feeds:
        n = int(rng.integers(2, 60))
        given = {"x": floats(rng, n, 8), "w": floats(rng, 8, 16), "w2": floats(rng, 16, 16)}
        return given | ({"k": rng.integers(0, n + 1, 1)} if more else {})

    check(PICKED % (more, columns, nodes), draw, count=40, most=6, same=False)


def test_iterations_are_bounded_at_every_size() -> None:
    model = parser.parse_model(HEAD + DECODER)
    core, rng = Core({"MAX_ITERATIONS": "50"}), np.random.default_rng(0)
    one = core.compile_model(core.read_model(model), "CPU")
    request, other = one.create_infer_request(), session(model)
    for _ in range(6):
        feeds = decoder_feeds(rng)
        with pytest.raises(LimitError, match="MAX_ITERATIONS"):
            request.infer(feeds | {"most": np.array(51)})
        found = request.infer(feeds | {"most": np.array(50)})
        expected = other.run(None, feeds | {"most": np.array(50)})
        np.testing.assert_allclose(found["y"], expected[0], rtol=1e-3, atol=1e-4)


def test_requests_of_other_sizes_beside_each_other() -> None:
    """Each has memory of its own for what a loop carries."""
    model = parser.parse_model(HEAD + DECODER)
    core, rng = Core(), np.random.default_rng(0)
    one = core.compile_model(core.read_model(model), "CPU")
    given = [decoder_feeds(rng) for _ in range(8)]
    expected = [one(feeds)["y"].copy() for feeds in given]
    wrong: list[object] = []

    def work(first: int) -> None:
        try:
            request = one.create_infer_request()
            for k in range(first, first + 40):
                if not np.array_equal(request.infer(given[k % 8])["y"], expected[k % 8]):
                    wrong.append(k)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
