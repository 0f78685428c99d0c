"""Models with control flow, and what compares them with ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator

from tunewright import Core
from tunewright.plugins.single import open_device
from tunewright.runtime.plans.plan import Step

ort = pytest.importorskip("onnxruntime")
native = pytest.mark.skipif(open_device("CPU").family != "native", reason="needs the native CPU device")

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'


def model(text: str) -> onnx.ModelProto:
    made = parser.parse_model(HEAD + text)
    onnx.checker.check_model(made)
    return made


def compiled(made: onnx.ModelProto, **config: Any) -> Any:
    core = Core({"ENABLE_LOOP_UNROLLING": "NO", **config})
    return core.compile_model(core.read_model(made), "CPU")


def control_steps(one: Any) -> list[Step]:
    return [step for plan in one.program.plans for step in plan.steps if step.control is not None]


def check(text: str, *feeds: dict[str, Any], rows: bool = True, reference: bool = True, **config: Any) -> Any:
    """The results of each feed are those of ONNX Runtime and of the reference; ``rows``: in a launch."""
    made = model(text)
    one = compiled(made, **config)
    others = [ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])]
    others += [ReferenceEvaluator(made)] if reference else []
    request = one.create_infer_request()
    for feed in feeds:
        for _ in range(3):
            found = request.infer(feed)
            for other in others:
                for name, value in zip((o.name for o in made.graph.output), other.run(None, feed), strict=True):
                    assert found[name].shape == np.shape(value) and found[name].dtype == value.dtype, name
                    np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-6, err_msg=name)
            for array in found.values():  # what a caller does with it is nobody else's
                if array.flags.writeable and array.dtype != bool:
                    array[...] = 77
    steps = control_steps(one)
    assert steps
    for step in steps:
        assert (step.block is not None) == rows, step.control.why_not_compiled
    return one


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def scalar(value: float) -> np.ndarray:
    return np.array(value, np.float32)


def count(n: int) -> np.ndarray:
    return np.array(n, np.int64)


SIMPLE = """
g (float[5] x, int64 n) => (float[5] y)
{
    t = Constant <value = bool {1}> ()
    y = Loop (n, t, x) <body = b (int64 i, bool go, float[5] s) => (bool on, float[5] z)
    {
        on = Identity(go)
        c = Cast <to = 1> (i)
        q = Add(s, c)
        z = Tanh(q)
    }>
}
"""
RAGGED = """
g (float[3,4] x, int64 n, float limit) => (float[3,4] y, float[m,3,4] h, float[m,3] r, float[m,4] after)
{
    t = Constant <value = bool {1}> ()
    y, h, r = Loop (n, t, x) <body = b (int64 i, bool go, float[3,4] s)
        => (bool on, float[3,4] z, float[3,4] z1, float[3] q)
    {
        on = Identity(go)
        z = Tanh(s)
        z1 = Identity(z)
        axis = Constant <value_ints = [1]> ()
        q = ReduceSum <keepdims = 0> (z, axis)
    }>
    axis1 = Constant <value_ints = [1]> ()
    b = Neg(h)
    after = ReduceMax <axes = [1], keepdims = 0> (b)
}
"""
NESTED = """
g (float[4] x, int64 n, float limit) => (float[4] y, float total)
{
    t = Constant <value = bool {1}> ()
    y = Loop (n, t, x) <body = outer (int64 i, bool go, float[4] s) => (bool on, float[4] z)
    {
        on = Identity(go)
        true = Constant <value = bool {1}> ()
        one = Constant <value = int64 {1}> ()
        m = Add(i, one)
        r = Loop (m, true, s) <body = inner (int64 j, bool go2, float[4] v) => (bool on2, float[4] w)
        {
            h = Constant <value = float {1.25}> ()
            f = Mul(v, h)
            ci = Cast <to = 1> (i)
            g = Add(f, ci)
            a = Abs(g)
            b = ReduceMax <keepdims = 0> (a)
            big = Greater(b, limit)
            w = If (big) <then_branch = yes () => (float[4] c)
            {
                e = Constant <value = float {0.125}> ()
                c = Mul(g, e)
            }, else_branch = no () => (float[4] d)
            {
                d = Identity(g)
            }>
            on2 = Identity(go2)
        }>
        q = Mul(r, x)
        z = Tanh(q)
    }>
    total = ReduceSum <keepdims = 0> (y)
}
"""
