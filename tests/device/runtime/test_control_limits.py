"""Control flow inside a launch: bounded, interruptible, counted, explained."""

from __future__ import annotations

import signal
import time
from typing import Any

import numpy as np
import pytest

from helpers.control_models import (
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
from tunewright import Core
from tunewright.errors import LimitError
from tunewright.plugins.single import open_device
from tunewright.runtime.insight.explain import explain

pytestmark = native

ENDLESS = """
g (float[3] x, bool t) => (float[3] y)
{
    y = Loop (, t, x) <body = forever (int64 i, bool go, float[3] s) => (bool on, float[3] z)
    {
        zero = Constant <value = int64 {0}> ()
        on = GreaterOrEqual(i, zero)
        z = Tanh(s)
    }>
}
"""


def test_a_loop_that_does_not_end() -> None:
    made = model(ENDLESS)
    made.graph.node[0].name = "the loop"
    one = compiled(made, MAX_ITERATIONS=1000)
    request = one.create_infer_request()
    for _ in range(2):
        with pytest.raises(LimitError, match=r"'the loop' \(Loop\).*do not end.*MAX_ITERATIONS = 1,000"):
            request.infer({"x": floats(3), "t": np.array(True)})
        assert (request.infer({"x": floats(3), "t": np.array(False)})["y"] == floats(3)).all()
    assert control_steps(one)[0].block is not None


def test_a_loop_that_is_too_long() -> None:
    made = model(SIMPLE)
    one = compiled(made, MAX_ITERATIONS=1000)
    request = one.create_infer_request()
    with pytest.raises(LimitError, match=r"runs 1,001 times"):
        request.infer({"x": floats(5), "n": count(1001)})
    request.infer({"x": floats(5), "n": count(1000)})
    with pytest.raises(LimitError, match=r"runs 9,223,372,036,854,775,807 times"):
        request.infer({"x": floats(5), "n": count(2**63 - 1)})


def test_iterations_of_nested_loops_add_up() -> None:
    one = compiled(model(NESTED), MAX_ITERATIONS=9 + 45)
    feed = {"x": floats(4), "n": count(9), "limit": scalar(2)}
    one.create_infer_request().infer(feed)
    one = compiled(model(NESTED), MAX_ITERATIONS=9 + 44)
    with pytest.raises(LimitError):
        one.create_infer_request().infer(feed)


def test_ctrl_c_ends_a_loop() -> None:
    one = compiled(model(ENDLESS), MAX_ITERATIONS=2**40)
    request = one.create_infer_request()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        begin = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            request.infer({"x": floats(3), "t": np.array(True)})
        assert time.perf_counter() - begin < 5
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert (request.infer({"x": floats(3), "t": np.array(False)})["y"] == floats(3)).all()


def test_counters() -> None:
    made = model(NESTED)
    one = compiled(made, PERF_COUNT="YES")
    request = one.create_infer_request()
    request.infer({"x": floats(4), "n": count(5), "limit": scalar(1e9)})
    rows = request.get_profiling_info()
    calls = {row.type: row.calls for row in rows if row.calls}
    assert calls["Loop"] >= 1
    loops = [row for row in rows if row.type == "Loop" and row.calls]
    outside = max(row.device_seconds for row in loops)
    inside = [row for row in rows if row.calls > 1]
    assert {row.calls for row in inside} >= {5, 15}
    assert 0 < sum(row.device_seconds for row in inside) <= outside


def test_counters_of_an_uneven_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed inside a launch then: the request runs control flow, and writes to memory that is planned."""
    made = model(RAGGED.replace("float[m,4] after", "float[m,4] after, float[3,4] w").replace(
        "    b = Neg(h)", "    w = Neg(y)\n    b = Neg(h)"))  # fmt: skip
    feed = {"x": floats(3, 4), "n": count(5), "limit": scalar(0)}
    expected = compiled(made)(feed)
    device = open_device("CPU")
    one = compiled(made, PERF_COUNT="YES")
    for variant in {one.env.device, device}:
        monkeypatch.setitem(variant.__dict__, "tick", 0.0)
    request = one.create_infer_request()
    found = request.infer(feed)
    assert all((found[name] == value).all() for name, value in expected.items())
    assert any(row.type == "Tanh" and row.calls == 5 for row in request.get_profiling_info())
    assert all(len(one.segment.steps) == 1 for _, frame in request.executor.frames() for one in frame.segments)


def test_explain_says_who_runs_it() -> None:
    core = Core({"ENABLE_LOOP_UNROLLING": "NO"})
    feed = {"x": floats(5), "n": count(3)}
    apart = {"JOIN_LAUNCHES": "NO"}
    for config, said in ({}, "part of one launch"), (apart, "run by the request: JOIN_LAUNCHES is NO"):
        one = core.compile_model(core.read_model(model(SIMPLE)), "CPU", config)
        layers = explain(one, feed, count=0)
        assert any(said in layer.note for layer in layers if layer.op == "Loop")
        assert any(layer.inside for layer in layers)


def test_one_launch() -> None:
    one = compiled(model(NESTED))
    request = one.create_infer_request()
    feed = {"x": floats(4), "n": count(5), "limit": scalar(1e9)}
    request.infer(feed)
    before = request.executor.launches
    request.infer(feed)
    assert request.executor.launches == before + 1


@pytest.mark.parametrize("config", [{"JOIN_LAUNCHES": "NO"}, {"CPU_THREADS_NUM": 1}, {"CPU_THREADS_NUM": 5}])
def test_settings(config: dict[str, Any]) -> None:
    feed = {"x": floats(4), "n": count(5), "limit": scalar(2)}
    check(NESTED, feed, rows="JOIN_LAUNCHES" not in config, **config)


def test_room_for_rows_is_bounded() -> None:
    one = compiled(model(RAGGED), MAX_ITERATIONS=1000)
    request = one.create_infer_request()
    for n in (1001, 2**62):
        with pytest.raises(LimitError, match=r"runs .* times.*MAX_ITERATIONS = 1,000"):
            request.infer({"x": floats(3, 4), "n": count(n), "limit": scalar(0)})
    assert request.infer({"x": floats(3, 4), "n": count(1000), "limit": scalar(0)})["h"].shape == (1000, 3, 4)
    one = compiled(model(RAGGED), MAX_TENSOR_BYTES=1000)
    with pytest.raises(LimitError, match="MAX_TENSOR_BYTES = 1,000"):
        one.create_infer_request().infer({"x": floats(3, 4), "n": count(100), "limit": scalar(0)})
