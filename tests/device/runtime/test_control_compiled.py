"""Loop, Scan and If inside a launch, as ONNX Runtime computes them."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from onnx import parser

from helpers.control_models import (
    HEAD,
    NESTED,
    RAGGED,
    SIMPLE,
    check,
    compiled,
    control_steps,
    count,
    floats,
    model,
    native,
    scalar,
)  # fmt: skip

pytestmark = native


def test_trip_counts() -> None:
    check(SIMPLE, *({"x": floats(5), "n": count(n)} for n in (0, 1, 2, 3, 100, -3)))


@pytest.mark.parametrize("start", [True, False])
def test_early_exit(start: bool) -> None:
    text = """
    g (float[5] x, int64 n, bool t, float limit) => (float[5] y, float z)
    {
        y = Loop (n, t, x) <body = b (int64 i, bool go, float[5] s) => (bool on, float[5] r)
        {
            two = Constant <value = float {2}> ()
            r = Mul(s, two)
            a = Abs(r)
            m = ReduceMax <keepdims = 0> (a)
            on = Less(m, limit)
        }>
        z = ReduceSum <keepdims = 0> (y)
    }
    """
    feeds = [
        {"x": floats(5), "n": count(n), "t": np.array(start), "limit": scalar(limit)}
        for n in (0, 1, 5, 50) for limit in (0, 10, 1e6)
    ]  # fmt: skip
    check(text, *feeds)


def test_a_condition_alone_ends_a_loop() -> None:
    """And the body reads the condition that it is given."""
    text = """
    g (float[5] x, bool t) => (float[5] y)
    {
        y = Loop ("", t, x) <body = b (int64 i, bool go, float[5] s) => (bool on, float[5] r)
        {
            one = Constant <value = float {1}> ()
            five = Constant <value = int64 {5}> ()
            c = Cast <to = 1> (go)
            d = Add(s, c)
            r = Mul(d, one)
            less = Less(i, five)
            on = And(less, go)
        }>
    }
    """.replace('""', "")
    check(text, {"x": floats(5), "t": np.array(True)}, {"x": floats(5), "t": np.array(False)})


def test_states_are_swapped_and_passed_through() -> None:
    """Fibonacci; a state that stays, one that becomes a capture, one that becomes a constant, one that is another."""
    text = """
    g (float[3] a, float[3] b, float[3] c, float[3] d, float[3] e, float[3] f, float[3] k, int64 n)
        => (float[3] va, float[3] vb, float[3] vc, float[3] vd, float[3] ve, float[3] vf)
    {
        t = Constant <value = bool {1}> ()
        va, vb, vc, vd, ve, vf = Loop (n, t, a, b, c, d, e, f)
        <body = b (int64 i, bool go, float[3] a0, float[3] b0, float[3] c0, float[3] d0, float[3] e0, float[3] f0)
            => (bool on, float[3] a1, float[3] b1, float[3] c1, float[3] d1, float[3] e1, float[3] f1)
        {
            on = Identity(go)
            a1 = Identity(b0)
            b2 = Add(a0, b0)
            q = Constant <value = float {0.5}> ()
            b1 = Mul(b2, q)
            c1 = Identity(c0)
            d1 = Identity(k)
            e1 = Constant <value_floats = [1.0, 2.0, 3.0]> ()
            f1 = Identity(a0)
        }>
    }
    """
    names = "abcdefk"
    feeds = [{name: floats(3, seed=i) for i, name in enumerate(names)} | {"n": count(n)} for n in (0, 1, 2, 3, 4, 9)]
    check(text, *feeds)


def test_two_states_swap_places() -> None:
    text = """
    g (float[3] a, float[3] b, int64 n) => (float[3] va, float[3] vb, float[3] s)
    {
        t = Constant <value = bool {1}> ()
        va, vb = Loop (n, t, a, b) <body = b (int64 i, bool go, float[3] a0, float[3] b0)
            => (bool on, float[3] a1, float[3] b1)
        {
            on = Identity(go)
            x = Neg(b0)
            a1 = Neg(x)
            b1 = Identity(a0)
        }>
        s = Add(va, vb)
    }
    """
    check(text, *({"a": floats(3), "b": floats(3, seed=1), "n": count(n)} for n in (0, 1, 2, 3, 8)))


def test_outputs_that_are_one_value() -> None:
    """Two states and two scan outputs that are the same tensor, and parts of one tensor."""
    text = """
    g (float[2,4] a, float[2,4] b, float[1,4] c) => (float[2,4] va, float[2,4] vb, float[1,4] vc, float[n,2,4] p,
        float[n,2,4] q, float[n,1,4] r)
    {
        t = Constant <value = bool {1}> ()
        m = Constant <value = int64 {6}> ()
        va, vb, vc, p, q, r = Loop (m, t, a, b, c)
            <body = b (int64 i, bool go, float[2,4] a0, float[2,4] b0, float[1,4] c0)
                => (bool on, float[2,4] a1, float[2,4] b1, float[1,4] c1, float[2,4] p1, float[2,4] q1, float[1,4] r1)
        {
            on = Identity(go)
            s = Add(a0, b0)
            h = Tanh(s)
            w = Add(h, c0)
            a1 = Identity(w)
            b1 = Identity(w)
            p1 = Identity(w)
            q1 = Identity(a0)
            c1, r1 = Split <axis = 0> (w)
        }>
    }
    """
    check(text, {"a": floats(2, 4), "b": floats(2, 4, seed=1), "c": floats(1, 4)}, reference=False)


@pytest.mark.parametrize("trips", [1, 2, 17])
def test_scan_outputs(trips: int) -> None:
    """The reference of onnx is no help: it joins rows along their own first axis."""
    text = f"""
    g (float[3,4] x, float[4,4] w) => (float[3,4] y, float[n,3,4] h, float[n,3] m, int64[n] k)
    {{
        t = Constant <value = bool {{1}}> ()
        n = Constant <value = int64 {{{trips}}}> ()
        y, h, m, k = Loop (n, t, x) <body = b (int64 i, bool go, float[3,4] s)
            => (bool on, float[3,4] z, float[3,4] z1, float[3] r, int64 j)
        {{
            on = Identity(go)
            p = MatMul(s, w)
            z = Tanh(p)
            z1 = Identity(z)
            axis = Constant <value_ints = [1]> ()
            r = ReduceSum <keepdims = 0> (p, axis)
            j = Identity(i)
        }}>
    }}
    """
    check(text, {"x": floats(3, 4), "w": floats(4, 4, seed=1)}, reference=False)


EARLY = "m = Cast <to = 7> (limit) on = LessOrEqual(i, m)"


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("constant", [False, True])
def test_scan_outputs_as_long_as_the_loop(early: bool, constant: bool) -> None:
    """A trip count that is an input; a condition that ends a loop before its constant trip count."""
    text = RAGGED.replace("on = Identity(go)", EARLY) if early else RAGGED
    if constant:
        text = text.replace("int64 n, ", "").replace("b = Neg(h)", "b = Neg(h)\n", 1)
        text = text.replace("    y, h, r =", "    n = Constant <value = int64 {9}> ()\n    y, h, r =")
    feeds = [
        {"x": floats(3, 4), "limit": scalar(limit)} | ({} if constant else {"n": count(n)})
        for n in ((9,) if constant else (0, 1, 2, 70)) for limit in (-1, 0, 3, 100)
    ]  # fmt: skip
    check(text, *feeds, rows=constant or not early, reference=False)


SCAN = """
g (float[5] s, float[7,5] x, float[7,2] u) => (float[5] y, float[7,5] p, float[7,2] q)
{
    y, p, q = Scan <num_scan_inputs = 2, scan_input_directions = [%d, %d], scan_output_directions = [%d, %d],
        body = b (float[5] s0, float[5] x0, float[2] u0) => (float[5] s1, float[5] p1, float[2] q1)
        {
            a = Add(s0, x0)
            s1 = Tanh(a)
            p1 = Identity(s1)
            q1 = Neg(u0)
        }> (s, x, u)
}
"""


@pytest.mark.parametrize("directions", [(0, 0, 0, 0), (1, 0, 0, 1), (0, 1, 1, 0), (1, 1, 1, 1)])
def test_scan_directions(directions: tuple[int, ...]) -> None:
    feed = {"s": floats(5), "x": floats(7, 5, seed=1), "u": floats(7, 2, seed=2)}
    check(SCAN % directions, feed, reference=directions == (0, 0, 0, 0))


def test_a_scan_along_another_axis() -> None:
    text = """
    g (float[2,3] s, float[2,7,3] x) => (float[2,3] y, float[2,7,3] p)
    {
        y, p = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1],
            body = b (float[2,3] s0, float[2,3] x0) => (float[2,3] s1, float[2,3] p1)
            {
                a = Add(s0, x0)
                s1 = Tanh(a)
                p1 = Neg(s1)
            }> (s, x)
    }
    """
    check(text, {"s": floats(2, 3), "x": floats(2, 7, 3)}, reference=False)
    check(text.replace("[2,", "[k,"), *({"s": floats(k, 3), "x": floats(k, 7, 3)} for k in (1, 4)), reference=False)
    text = text.replace("input_axes = [1], scan_output_axes = [1]", "input_axes = [-2], scan_output_axes = [-1]")
    text = text.replace("float[2,7,3] p", "float[2,3,7] p")
    check(text, {"s": floats(2, 3), "x": floats(2, 7, 3)}, reference=False)


IF = """
g (float[4] x, bool c) => (float[4] y, float[4] z, float[4] w)
{
    y, z, w = If (c) <then_branch = a () => (float[4] p, float[4] q, float[4] r)
    {
        p = Tanh(x)
        q = Identity(x)
        r = Constant <value_floats = [1.0, 2.0, 3.0, 4.0]> ()
    }, else_branch = b () => (float[4] u, float[4] v, float[4] o)
    {
        u = Neg(x)
        v = Add(u, x)
        o = Identity(u)
    }>
}
"""


def test_if() -> None:
    check(IF, *({"x": floats(4), "c": np.array(c)} for c in (True, False, True)))


def test_parts_of_what_a_branch_makes_are_written_in_place() -> None:
    text = """
    g (float[2,4] x, bool c) => (float[4,4] y)
    {
        y = If (c) <then_branch = a () => (float[4,4] p)
        {
            q = Tanh(x)
            r = Neg(x)
            p = Concat <axis = 0> (q, r)
        }, else_branch = b () => (float[4,4] v)
        {
            u = Exp(x)
            v = Concat <axis = 0> (u, u)
        }>
    }
    """
    check(text, *({"x": floats(2, 4), "c": np.array(c)} for c in (True, False)))


def test_large_branches_are_planned_when_they_run() -> None:
    chain = "".join(f"a{k + 1} = Softmax(a{k}) " for k in range(110))
    text = f"""
    g (float[4] x, bool c, int64 n) => (float[4] y)
    {{
        y = If (c) <then_branch = a () => (float[4] a110) {{ a0 = Neg(x) {chain} }},
            else_branch = b () => (float[4] u) {{ u = Neg(x) }}>
    }}
    """
    one = check(text, {"x": floats(4), "c": np.array(False), "n": count(2)}, rows=False)
    (step,) = control_steps(one)
    assert [len(body.plans) for body in step.control.bodies.values()] == [0, 1]
    loop = "t = Constant <value = bool {1}> () y = Loop (n, t, x) <body = l (int64 i, bool go, float[4] s)"
    text = text.replace("y = If (c)", loop + " => (bool on, float[4] z) { on = Identity(go) z = If (c)")
    text = text.replace("{ u = Neg(x) }>", "{ u = Neg(s) }> }>")
    check(text, *({"x": floats(4), "c": np.array(c), "n": count(3)} for c in (True, False)))


def test_nested() -> None:
    feeds = [
        {"x": floats(4), "n": count(n), "limit": scalar(limit)}
        for n in (0, 1, 2, 9) for limit in (0, 3, 1e9)
    ]  # fmt: skip
    check(NESTED, *feeds)


def test_what_kernels_compute_decides() -> None:
    """The trip count and the condition are results of the launch itself."""
    text = """
    g (float[4] x, int64[3] k, bool[2] flags) => (float[4] y, int64 n)
    {
        n = ReduceMax <keepdims = 0> (k)
        c = Constant <value_ints = [1]> ()
        f = Gather(flags, c)
        zero = Constant <value_ints = [0]> ()
        t = Squeeze(f, zero)
        v = Neg(x)
        y = Loop (n, t, v) <body = b (int64 i, bool go, float[4] s) => (bool on, float[4] z)
        {
            on = Identity(go)
            a = Add(s, x)
            z = Tanh(a)
        }>
    }
    """
    feeds = [
        {"x": floats(4), "k": np.array([1, n, 0], np.int64), "flags": np.array([False, flag])}
        for n in (0, 1, 6) for flag in (True, False)
    ]  # fmt: skip
    check(text, *feeds)


def test_other_shapes_later() -> None:
    text = SIMPLE.replace("[5]", "[k]")
    check(text, *({"x": floats(k), "n": count(n)} for k in (1, 5, 1000) for n in (0, 3)))


def test_empty_tensors() -> None:
    check(SIMPLE.replace("[5]", "[k]"), {"x": floats(0), "n": count(3)})


def test_large_bodies_are_shared_between_threads() -> None:
    text = """
    g (float[64,96] x, float[96,96] w, int64 n) => (float[64,96] y)
    {
        t = Constant <value = bool {1}> ()
        y = Loop (n, t, x) <body = b (int64 i, bool go, float[64,96] s) => (bool on, float[64,96] z)
        {
            on = Identity(go)
            p = MatMul(s, w)
            z = Softmax(p)
        }>
    }
    """
    feed = {"x": floats(64, 96), "w": floats(96, 96), "n": count(40)}
    one = check(text, feed, reference=False)
    request = one.create_infer_request()
    first = request.infer(feed)["y"].copy()
    for _ in range(20):
        assert (request.infer(feed)["y"] == first).all()


def test_requests_beside_each_other() -> None:
    made = model(NESTED)
    one = compiled(made)
    feeds = [{"x": floats(4, seed=k), "n": count(k), "limit": scalar(2)} for k in range(8)]
    expected = [one.create_infer_request().infer(feed)["y"].copy() for feed in feeds]
    wrong: list[object] = []

    def work(k: int) -> None:
        try:
            request = one.create_infer_request()
            for _ in range(50):
                if not (request.infer(feeds[k])["y"] == expected[k]).all():
                    wrong.append(k)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# What stays with the request


def test_changing_shapes_stay_with_the_request() -> None:
    text = """
    g (float[k] x) => (float[m] y)
    {
        t = Constant <value = bool {1}> ()
        n = Constant <value = int64 {3}> ()
        y = Loop (n, t, x) <body = b (int64 i, bool go, float[a] s) => (bool on, float[c] z)
        {
            on = Identity(go)
            z = Concat <axis = 0> (s, s)
        }>
    }
    """
    one = check(text, {"x": floats(3)}, rows=False)
    assert all(step.control.why_not_compiled for step in control_steps(one))


def test_a_declared_length_is_not_believed() -> None:
    """A model says that there are two rows, and there may be any number: that is no place to write to."""
    text = """
    g (float[3] x, int64 n) => (float[3] y, float[2,3] h)
    {
        t = Constant <value = bool {1}> ()
        y, h = Loop (n, t, x) <body = b (int64 i, bool go, float[3] s) => (bool on, float[3] z, float[3] z1)
        {
            on = Identity(go)
            z = Tanh(s)
            z1 = Neg(s)
        }>
    }
    """
    one = compiled(model(text))
    for n in (2, 50, 0):
        found = one.create_infer_request().infer({"x": floats(3), "n": count(n)})
        assert found["h"].shape == (n, 3)
        np.testing.assert_allclose(found["h"][:1], -floats(1, 3)[:n], rtol=1e-6)


def test_a_branch_that_is_wrong_may_stay_untaken() -> None:
    text = """
    g (float[4] x, bool c) => (float[4] y)
    {
        y = If (c) <then_branch = a () => (float[4] p) { p = Tanh(x) }, else_branch = b () => (float[4] u)
        {
            k = Constant <value_floats = [1.0, 2.0, 3.0]> ()
            u = Add(x, k)
        }>
    }
    """
    one = compiled(parser.parse_model(HEAD + text))
    x = floats(4)
    assert np.allclose(one.create_infer_request().infer({"x": x, "c": np.array(True)})["y"], np.tanh(x), atol=1e-6)
