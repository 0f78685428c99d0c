"""Loops that a counter ends: the number of iterations is what ONNX Runtime runs."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import parser

from tunewright import Core
from tunewright.ops.control_types import goes_on

ort = pytest.importorskip("onnxruntime")

TEXT = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[3] x{outer}) => (float[3] y, {dtype} last, float[n,3] rows)
{{
    {trips}
    t = Constant <value = bool {{1}}> ()
    c = Constant <value = {dtype} {{{begin}}}> ()
    y, last, rows = Loop ({m}, t, x, c) <body = b (int64 i, bool go, float[3] s, {dtype} c0)
        => (bool on, float[3] z, {dtype} c1, float[3] r)
    {{
        step = Constant <value = {dtype} {{{step}}}> ()
        end = Constant <value = {dtype} {{{end}}}> ()
        c1 = {op}(c0, step)
        {condition}
        z = Tanh(s)
        r = Neg(z)
    }}>
}}
"""
INT64_MAX = 2**63 - 1


def check(exact: bool | None = True, feed: dict | None = None, computed: bool = False, **parts: object) -> None:
    """``exact``: the condition is gone; None: the loop is as it was. ``computed``: its trip count is no constant."""
    parts = {"begin": 0, "step": 1, "end": 20, "op": "Add", "trips": "", "m": "", "dtype": "int64", "outer": ""} | parts
    if isinstance(parts["trips"], int):
        parts |= {"trips": f"times = Constant <value = int64 {{{parts['trips']}}}> ()", "m": "times"}
    model = parser.parse_model(TEXT.format(**parts))
    core = Core({"ENABLE_LOOP_UNROLLING": "NO"})
    one = core.compile_model(core.read_model(model), "CPU")
    feed = {"x": np.array([0.5, -3, 1], np.float32)} | (feed or {})
    found = one(feed)
    expected = ort.InferenceSession(model.SerializeToString()).run(None, feed)
    for name, value in zip(("y", "last", "rows"), expected, strict=True):
        assert found[name].shape == value.shape
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)
    (loop,) = [node for node in one.program.graph.nodes if node.op == "Loop"]
    assert goes_on(loop.bodies["body"]) == bool(exact)
    assert exact is None or (loop.inputs[0] is not None and (loop.inputs[0].const is None) == computed)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("trips", ["", 0, 7, 2000, INT64_MAX])
@pytest.mark.parametrize(
    "condition",
    [
        "on = Less(c1, end)", "on = LessOrEqual(c1, end)", "on = Greater(end, c1)", "on = Less(c0, end)",
        "a = GreaterOrEqual(c1, end) on = Not(a)", "a = Less(c1, end) on = And(a, go)",
        "a = Less(c1, end) d = Constant <value = int64 {9}> () b = LessOrEqual(i, d) on = And(b, a)",
        "a = Add(c0, step) e = Add(a, step) on = Less(e, end)",
    ],
)  # fmt: skip
def test_counters(condition: str, trips: object, dtype: str) -> None:
    check(condition=condition, trips=trips, dtype=dtype)


@pytest.mark.parametrize(
    "begin, step, end, op, compare",
    [
        (3, 4, 21, "Add", "Less"), (3, 4, 19, "Add", "Less"), (3, 4, 19, "Add", "LessOrEqual"),
        (10, 3, -5, "Sub", "Greater"),
        (10, 3, -5, "Sub", "GreaterOrEqual"), (10, -3, -5, "Add", "Greater"), (50, 1, 20, "Add", "Less"),
        (0, 1, 1, "Add", "Less"), (-7, 5, 8, "Add", "LessOrEqual"),
    ],
)  # fmt: skip
def test_steps_and_directions(begin: int, step: int, end: int, op: str, compare: str) -> None:
    check(begin=begin, step=step, end=end, op=op, condition=f"on = {compare}(c1, end)")


def test_the_iteration_itself() -> None:
    check(condition="on = Less(i, end)")
    check(condition="one = Constant <value = int64 {1}> () j = Add(i, one) on = Less(j, end)")
    check(condition="j = Cast <to = 6> (i) e = Cast <to = 6> (end) on = Less(j, e)")


def test_another_reason_to_stop_leaves_a_bound() -> None:
    condition = (
        "a = Less(c1, end) m = ReduceMax <keepdims = 0> (s) q = Constant <value = float {%s}> () "
        "b = Greater(m, q) on = And(a, b)"
    )
    for limit in (0.4, 0.1, 0.0):
        check(exact=False, condition=condition % limit)
        check(exact=False, condition=condition % limit, trips=500)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("end", [-7, 0, 1, 2, 30])
def test_a_bound_from_outside_of_the_loop(end: int, dtype: str) -> None:
    parts = {"dtype": dtype, "outer": f", {dtype} k", "feed": {"k": np.array(end, dtype)}, "computed": True}
    check(condition="on = Less(c1, k)", **parts)
    check(condition="on = Greater(k, c1)", begin=-3, **parts)
    check(condition="on = Greater(c1, k)", begin=9, op="Sub", **parts)
    check(condition="a = Less(c1, k) b = Less(c1, end) on = And(a, b)", **parts)
    check(condition="a = Less(c1, k) on = And(a, go)", trips=5, **parts)
    check(condition="j = Cast <to = 7> (k) on = Less(i, j)", **parts)


def test_what_is_no_counter() -> None:
    largest = "m = ReduceMax <keepdims = 0> (s) q = Constant <value = float {0.4}> () on = Greater(m, q)"
    check(exact=None, condition=largest)
    check(exact=None, condition="on = Less(c1, end)", op="Mul", begin=1, step=2)
    check(exact=None, condition="on = LessOrEqual(c1, k)", outer=", int64 k", feed={"k": np.array(5)})
    check(exact=None, condition="on = Less(c1, k)", step=2, outer=", int64 k", feed={"k": np.array(5)})
    check(exact=None, condition="on = Less(c1, end)", outer=", int64 times", m="times", feed={"times": np.array(5)})
    # moves away from its end, until an int32 runs over: as many iterations as there may be
    check(exact=None, condition="on = Greater(c1, end)", end=-5, trips=30)
