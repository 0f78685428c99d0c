"""Loops whose states grow: they run inside a launch, bit by bit as the request runs them, and as ONNX Runtime does."""

from __future__ import annotations

import os
import random
import threading
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper, parser

from native.harness import native
from tunewright import Core, LimitError
from tunewright.devices.control_rows import LaunchRow, walk
from tunewright.runtime.control import growing_rows
from tunewright.runtime.plans.plan import Step

ort = pytest.importorskip("onnxruntime")
pytestmark = native
HEAD = '<ir_version: 8, opset_import: ["" : 18]>\n'
Feeds = dict[str, np.ndarray]


def session(model: onnx.ModelProto) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def compiled(model: onnx.ModelProto, **config: Any) -> Any:
    core = Core({"ENABLE_LOOP_UNROLLING": "NO", **config})
    return core.compile_model(core.read_model(model), "CPU")


def steps(one: Any) -> list[Step]:
    return [step for plan in one.program.plans for step in plan.steps if step.control is not None]


def check(model: onnx.ModelProto, *feeds: Feeds, rows: bool = True, exact: bool = True, **config: Any) -> Any:
    """The results are ONNX Runtime's, and bit by bit those of a request that runs the loops itself."""
    one, apart, other = compiled(model, **config), compiled(model, JOIN_LAUNCHES="NO", **config), session(model)
    request = one.create_infer_request()
    for feed in (*feeds, *feeds):
        found, alone = request.infer(feed), apart(feed)
        for value, wanted in zip(model.graph.output, other.run(None, feed), strict=True):
            got, where = found[value.name], f"{value.name}, {[np.shape(v) for v in feed.values()]}"
            if not len(wanted) and not len(got):
                continue  # no iteration: ONNX Runtime knows no sizes of what it would have collected
            assert got.shape == wanted.shape and got.dtype == wanted.dtype, where
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5, err_msg=where)
            if exact:
                np.testing.assert_array_equal(got, alone[value.name], err_msg=where)
    assert steps(one)
    for step in steps(one):
        assert (step.block is not None) == rows, step.control.why_not_compiled
    return one


def count(n: int) -> np.ndarray:
    return np.array(n, np.int64)


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


ROWS = """
g (float[%s,4] x, int64 n) => (float[m,4] y, float[2,4] last)
{
    t = Constant <value = bool {1}> ()
    zeros = ConstantOfShape(twoFour)
    y, last = Loop (n, t, x, zeros) <body = b (int64 i, bool go, float[a,4] s, float[2,4] before)
        => (bool on, float[c,4] z, float[2,4] now)
    {
        on = Identity(go)
        axes = Constant <value_ints = [0]> ()
        q = ReduceMax <keepdims = 1> (s, axes)
        c = Cast <to = 1> (i)
        d = Mul(q, half)
        r = Add(d, c)
        w = Tanh(r)
        z = Concat <axis = 0> (s, w)
        both = Concat <axis = 0> (w, w)
        now = Add(both, before)
    }>
}
"""


def rows_model(size: str) -> onnx.ModelProto:
    model = parser.parse_model(HEAD + ROWS % size)
    model.graph.initializer.append(numpy_helper.from_array(np.array([2, 4], np.int64), "twoFour"))
    model.graph.initializer.append(numpy_helper.from_array(np.array(0.5, np.float32), "half"))
    onnx.checker.check_model(model)
    return model


@pytest.mark.parametrize("size", [0, 1, 2, 7])
def test_from_any_size_for_any_number_of_iterations(size: int) -> None:
    rng = np.random.default_rng(0)
    if not size:
        pytest.skip("nothing has a largest element")
    check(rows_model(str(size)), *({"x": floats(rng, size, 4), "n": count(n)} for n in (0, 1, 2, 3, 17, 60, 5, -1)))


def test_over_open_sizes() -> None:
    rng = np.random.default_rng(0)
    sizes = [(3, 5), (1, 9), (30, 2), (2, 0), (8, 40), (1, 0), (5, 1)]
    check(rows_model("k"), *({"x": floats(rng, k, 4), "n": count(n)} for k, n in sizes))


def test_more_iterations_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request goes on by itself, and what is behind the loop is right as well."""
    monkeypatch.setattr(growing_rows, "ROOMS", (24,))
    rng = np.random.default_rng(0)
    one = check(rows_model("3"), *({"x": floats(rng, 3, 4), "n": count(n)} for n in (5, 24, 25, 90, 3)))
    assert all(step.block.escapes for step in steps(one))


BEHIND = """
g (float[3,4] x, float[4,8] w, int64 n) => (float[m,4] y, float[3,8] first, float[3,8] p, float[8] q)
{
    t = Constant <value = bool {1}> ()
    v = MatMul(x, w)
    first = Tanh(v)
    y = Loop (n, t, x) <body = b (int64 i, bool go, float[a,4] s) => (bool on, float[c,4] z)
    {
        on = Identity(go)
        axes = Constant <value_ints = [0]> ()
        r = ReduceMax <keepdims = 1> (s, axes)
        u = Sin(r)
        z = Concat <axis = 0> (s, u)
    }>
    p = Sigmoid(v)
    rows = Constant <value_ints = [0]> ()
    q = ReduceMax <keepdims = 0> (first, rows)
}
"""


def test_what_stands_behind_a_loop_that_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_rows, "ROOMS", (8,))
    rng = np.random.default_rng(0)
    model = parser.parse_model(HEAD + BEHIND)
    feeds = [{"x": floats(rng, 3, 4), "w": floats(rng, 4, 8), "n": count(n)} for n in (4, 30, 8, 9)]
    check(model, *feeds)
    check(model, *feeds, PERF_COUNT="YES")


def test_iterations_are_bounded() -> None:
    rng, model = np.random.default_rng(0), rows_model("3")
    request = compiled(model, MAX_ITERATIONS="50").create_infer_request()
    for _ in range(3):
        with pytest.raises(LimitError, match="MAX_ITERATIONS"):
            request.infer({"x": floats(rng, 3, 4), "n": count(51)})
        assert request.infer({"x": floats(rng, 3, 4), "n": count(50)})["y"].shape == (53, 4)


def test_results_are_the_callers() -> None:
    """What a caller holds does not change with the next inference, however much of its room was used."""
    rng, request = np.random.default_rng(0), compiled(rows_model("3")).create_infer_request()
    first = {"x": floats(rng, 3, 4), "n": count(3000)}
    held = request.infer(first)["y"]
    before = held.copy()
    request.infer({"x": floats(rng, 3, 4), "n": count(3000)})
    np.testing.assert_array_equal(held, before)


def test_requests_beside_each_other() -> None:
    rng, one = np.random.default_rng(0), compiled(rows_model("k"))
    given = [{"x": floats(rng, int(k), 4), "n": count(int(n))} for k, n in rng.integers(1, 40, (8, 2))]
    expected = [one(feed)["y"].copy() for feed in given]
    wrong: list[object] = []

    def work(first: int) -> None:
        try:
            request = one.create_infer_request()
            for k in range(first, first + 24):
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


CACHED = """
g (int64[b,1] first, float[b,0,8] nothing, int64 most) => (int64[b,1] last, float[b,q,8] keys, int64[m,b,1] y)
{
    true = Constant <value = bool {1}> ()
    last, keys, y = Loop (most, true, first, nothing)
        <body = b (int64 i, bool go, int64[b,1] token, float[b,a,8] k1)
        => (bool on, int64[b,1] token2, float[b,c,8] k2, int64[b,1] out)
    {
        e = Gather <axis = 0> (words, token)
        k = MatMul(e, wk)
        k2 = Concat <axis = 1> (k1, k)
        turned = Transpose <perm = [0, 2, 1]> (k2)
        scores = MatMul(e, turned)
        shares = Softmax <axis = 2> (scores)
        mixed = MatMul(shares, k2)
        logits = MatMul(mixed, wo)
        token2 = ArgMax <axis = 2, keepdims = 0> (logits)
        out = Identity(token2)
        end = Constant <value_ints = [29]> ()
        same = Equal(token2, end)
        any = Cast <to = 1> (same)
        most1 = ReduceMax <keepdims = 0> (any)
        half = Constant <value = float {0.5}> ()
        on = Less(most1, half)
    }>
}
"""


@pytest.mark.parametrize("batch", [1, 3])
def test_a_decoder_that_keeps_keys_and_ends_by_itself(batch: int) -> None:
    rng = np.random.default_rng(batch)
    model = parser.parse_model(HEAD + CACHED)
    weights = {"words": floats(rng, 30, 8) * 3, "wk": floats(rng, 8, 8), "wo": floats(rng, 8, 30)}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    feeds = [
        {"first": rng.integers(0, 29, (batch, 1)), "nothing": np.zeros((batch, 0, 8), np.float32), "most": count(n)}
        for n in (0, 1, 2, 5, 30)
    ]
    check(model, *feeds, exact=False)


NESTED = {
    "branch": """
        largest = ReduceMax <keepdims = 0> (r)
        big = Greater(largest, half)
        v = If (big) <then_branch = large () => (float[a,4] c) { c = Sin(s) },
            else_branch = small () => (float[a,4] d) { e = Neg(s) d = Tanh(e) }>""",
    "loop as long as the state": """
        shape = Shape(s)
        first = Constant <value = int64 {0}> ()
        rows = Gather <axis = 0> (shape, first)
        w0 = Sin(r)
        w = Loop (rows, go, w0) <body = inner (int64 j, bool go2, float[1,4] h) => (bool on2, float[1,4] h2)
        {
            on2 = Identity(go2)
            row = Gather <axis = 0> (s, j)
            sum = Add(h, row)
            h2 = Tanh(sum)
        }>
        v = Mul(s, w)""",
    "scan of the state": """
        w0 = Sin(r)
        w, v = Scan <num_scan_inputs = 1, body = inner (float[1,4] h, float[4] row) => (float[1,4] h2, float[4] y2)
        {
            sum = Add(h, row)
            h2 = Tanh(sum)
            axis = Constant <value_ints = [0]> ()
            y2 = Squeeze(h2, axis)
        }> (w0, s)""",
    "last rows": """
        from = Constant <value_ints = [-2]> ()
        to = Constant <value_ints = [9223372036854775807]> ()
        two = Slice(s, from, to, axes)
        m = ReduceMax <keepdims = 1> (two, axes)
        v = Mul(s, m)""",
    "positions": """
        shape = Shape(s)
        first = Constant <value = int64 {0}> ()
        one = Constant <value = int64 {1}> ()
        length = Gather <axis = 0> (shape, first)
        numbers = Range(first, length, one)
        places = Cast <to = 1> (numbers)
        column = Unsqueeze(places, one1)
        ends = Sub(column, tenth)
        t2 = Sin(ends)
        v = Add(s, t2)""",
}


AROUND = """
g (float[%s,4] x, int64 n) => (float[m,4] y)
{
    t = Constant <value = bool {1}> ()
    half = Constant <value = float {0.5}> ()
    tenth = Constant <value = float {0.1}> ()
    one1 = Constant <value_ints = [1]> ()
    y = Loop (n, t, x) <body = b (int64 i, bool go, float[a,4] s) => (bool on, float[c,4] z)
    {
        on = Identity(go)
        axes = Constant <value_ints = [0]> ()
        r = ReduceMax <keepdims = 1> (s, axes)
        %s
        q = Cos(r)
        z = Concat <axis = 0> (v, q)
    }>
}
"""


@pytest.mark.parametrize("how", NESTED)
@pytest.mark.parametrize("size", ["3", "k"])
def test_what_depends_on_the_length_of_the_state(how: str, size: str) -> None:
    rng = np.random.default_rng(0)
    model = parser.parse_model(HEAD + AROUND % (size, NESTED[how]))
    onnx.checker.check_model(model)
    sizes = [(3, 5), (3, 0), (3, 1), (3, 25)] if size == "3" else [(3, 5), (1, 4), (9, 20), (2, 0), (30, 3)]
    # which configs run may differ from those of plans for single sizes, and so may last bits
    check(model, *({"x": floats(rng, k, 4), "n": count(n)} for k, n in sizes), exact=how != "positions")


class Writer:
    """Random loops over states of which some grow."""

    def __init__(self, seed: int, open: bool) -> None:
        self.rng, self.open, self.nodes, self.number = random.Random(seed), open, [], 0

    def node(self, op: str, *ins: str, **attrs: object) -> str:
        self.number += 1
        name = f"v{self.number}"
        self.nodes.append(helper.make_node(op, [*ins], [name], **attrs))
        return name

    def constant(self, *values: int) -> str:
        return self.node("Constant", value=numpy_helper.from_array(np.array(values, np.int64)))

    def shrunk(self, state: str) -> str:
        """Some rows of a state, as one row."""
        axes = self.constant(1)
        kind = self.rng.choice(["max", "min", "last", "first", "two"])
        if kind in ("max", "min"):
            return self.node("ReduceMax" if kind == "max" else "ReduceMin", state, axes, keepdims=1)
        if kind == "two":
            first = self.node("Slice", state, self.constant(0), self.constant(1), axes)
            last = self.node("Slice", state, self.constant(-1), self.constant(2**62), axes)
            return self.node("Sub", first, last)
        begin, end = (-1, 2**62) if kind == "last" else (0, 1)
        return self.node("Slice", state, self.constant(begin), self.constant(end), axes)

    def mixed(self, state: str) -> str:
        """A state with other values, as long as before."""
        made = self.node(self.rng.choice(["Tanh", "Sin", "Neg", "Abs"]), state)
        if self.rng.random() < 0.4:
            made = self.node("Mul", made, self.shrunk(made))
        if self.rng.random() < 0.3:
            turned = self.node("Transpose", made, perm=[0, 2, 1])
            shares = self.node("Softmax", self.node("MatMul", made, turned), axis=2)
            made = self.node("MatMul", shares, made)
        return self.node("Tanh", made)  # sums of sums would not be finite

    def model(self) -> onnx.ModelProto:
        rng, width = self.rng, self.rng.choice([1, 3, 8])
        growing, fixed = rng.randint(1, 3), rng.randint(0, 1)
        sizes = [rng.choice([1, 1, 2, 5]) for _ in range(growing)]
        states = [f"s{k}" for k in range(growing)]
        steady = [f"f{k}" for k in range(fixed)]
        outs, rows = [], []
        for state in states:
            source = self.mixed(state) if rng.random() < 0.5 else state
            new = [self.node("Sin", self.shrunk(rng.choice([source, *states]))) for _ in range(rng.choice([1, 1, 2]))]
            number = self.node("Cast", "i", to=T.FLOAT)
            rows.append(self.node("Cos", self.node("Add", new[0], number)))
            parts = [source, *new] if rng.random() < 0.7 else [*new, source]
            outs.append(self.node("Concat", *parts, axis=1))
        kept = [self.node("Tanh", self.node("Add", name, rows[0])) for name in steady]
        scans = [self.node("Identity", rng.choice(rows)) for _ in range(rng.randint(0, 1))]
        on = self.node("Identity", "go")
        if rng.random() < 0.4:
            largest = self.node("ReduceMax", rows[0], keepdims=0)
            bound = self.node("Constant", value=numpy_helper.from_array(np.array(rng.uniform(0.2, 0.99), np.float32)))
            on = self.node("Less", largest, bound)
        results = [self.node("Identity", v) for v in (*outs, *kept, *scans)]
        value = helper.make_tensor_value_info
        batch = "b" if self.open else 1
        body = helper.make_graph(
            self.nodes, "body",
            [value("i", T.INT64, ()), value("go", T.BOOL, ())]
            + [value(name, T.FLOAT, (batch, None, width)) for name in states]
            + [value(name, T.FLOAT, (batch, 1, width)) for name in steady],
            [value(on, T.BOOL, ())] + [value(v, T.FLOAT, (batch, None, width)) for v in results],
        )  # fmt: skip
        self.nodes = []
        first = [f"x{k}" for k in range(growing + fixed)]
        made = [f"y{k}" for k in range(len(results))]
        loop = helper.make_node("Loop", ["n", "", *first], made, body=body, name="loop")
        shapes = [(batch, f"k{k}" if self.open else size, width) for k, size in enumerate(sizes)]
        shapes += [(batch, 1, width)] * fixed
        inputs = [value(name, T.FLOAT, shape) for name, shape in zip(first, shapes, strict=True)]
        graph = helper.make_graph(
            [loop], "g", [*inputs, value("n", T.INT64, ())],
            [value(name, T.FLOAT, [None] * (3 if k < growing + fixed else 4)) for k, name in enumerate(made)],
        )  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def check_random(seed: int, open: bool) -> bool:
    """Whether the loop of a random model is part of a launch; the results are right either way."""
    model = Writer(seed, open).model()
    onnx.checker.check_model(model)
    one, apart, other = compiled(model), compiled(model, JOIN_LAUNCHES="NO"), session(model)
    request, rng = one.create_infer_request(), np.random.default_rng(seed)
    for _ in range(5):
        named = {name: int(size) for name, size in zip(("b", "k0", "k1", "k2"), rng.integers(1, 6, 4), strict=True)}
        feed: Feeds = {"n": count(int(rng.choice([0, 1, 2, 3, 9, 24])))}
        for value in model.graph.input[:-1]:
            dims = [named[d.dim_param] if d.dim_param else d.dim_value for d in value.type.tensor_type.shape.dim]
            feed[value.name] = rng.uniform(-1, 1, dims).astype(np.float32)
        try:
            expected = other.run(None, feed)
        except Exception:  # sizes that do not fit each other
            continue
        found, alone = request.infer(feed), apart(feed)
        for value, wanted in zip(model.graph.output, expected, strict=True):
            got, where = found[value.name], f"seed {seed}, {value.name}, {[v.shape for v in feed.values()]}"
            if not len(wanted) and not len(got):
                continue  # no iteration: ONNX Runtime knows no sizes of what it would have collected
            assert got.shape == wanted.shape, where
            np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4, err_msg=where)
            assert np.allclose(got, alone[value.name], rtol=1e-4, atol=1e-5), where
    return any(step.block is not None for step in steps(one))


#: TUNEWRIGHT_TEST_GROWING=FIRST:LAST runs any others
FIRST, LAST = map(int, os.environ.get("TUNEWRIGHT_TEST_GROWING", "0:24").split(":"))


@pytest.mark.parametrize("open", [False, True], ids=["fixed", "open"])
def test_random_loops_whose_states_grow(open: bool) -> None:
    done = [check_random(seed, open) for seed in range(FIRST, LAST)]
    assert sum(done) > 0.7 * len(done), done


@pytest.mark.soak
@pytest.mark.parametrize("open", [False, True], ids=["fixed", "open"])
def test_many_random_loops_whose_states_grow(open: bool) -> None:
    for seed in range(24, 1500):
        check_random(seed, open)


def test_equal_kernels_of_a_body_share_room_for_all_iterations() -> None:
    """Two attentions over states of the same size are one kernel, whose scratch memory grows with them."""
    model = Writer(742, False).model()
    assert check_random(742, False)
    one = compiled(model)
    one({"x0": np.zeros((1, 1, 3), np.float32), "x1": np.zeros((1, 1, 3), np.float32), "n": count(24)})
    rows = [row for step in steps(one) if step.block is not None for row in walk(step.block.rows)]
    kernels = [row.kernel for row in rows if isinstance(row, LaunchRow)]
    grown = [kernel for kernel in kernels if kernel.name.endswith("attention") and kernel.open is not None]
    assert len(grown) == 2 and all(kernel.most_scratch["memory"] for kernel in grown)
