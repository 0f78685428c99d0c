"""Recurrent networks and decoders as exporters write them with Loop and If: in one launch, as ONNX Runtime has it."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from tunewright import Core
from tunewright.plugins.single import open_device

ort = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.skipif(open_device("CPU").family != "native", reason="needs the native CPU device")


def check(model: onnx.ModelProto, *feeds: dict[str, np.ndarray]) -> None:
    """All control flow is part of a launch."""
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    core = Core({"ENABLE_LOOP_UNROLLING": "NO", "DISABLED_PASSES": "recurrent-loops"})
    one = core.compile_model(core.read_model(model), "CPU")
    request = one.create_infer_request()
    for feed in feeds:
        for _ in range(2):
            found = request.infer(feed)
            for output, value in zip(model.graph.output, session.run(None, feed), strict=True):
                assert found[output.name].shape == np.shape(value)
                np.testing.assert_allclose(found[output.name], value, rtol=1e-4, atol=1e-5)
    steps = [step for plan in one.program.plans for step in plan.steps]
    assert any(step.control is not None for step in steps)
    for step in steps:
        assert step.control is None or step.block is not None, step.control.why_not_compiled


LSTM = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[%(t)d,%(b)d,6] x, float[6,32] w, float[8,32] r, float[32] bias, float[%(b)d,8] h0, float[%(b)d,8] c0)
    => (float[n,%(b)d,8] y, float[%(b)d,8] hn)
{
    t = Constant <value = bool {1}> ()
    n = Constant <value = int64 {9223372036854775807}> ()
    zero = Constant <value = int32 {0}> ()
    steps, hn, cn, y = Loop (n, t, zero, h0, c0)
        <body = b (int64 i, bool go, int32 k, float[%(b)d,8] h1, float[%(b)d,8] c1)
        => (bool on, int32 k2, float[%(b)d,8] h2, float[%(b)d,8] c2, float[%(b)d,8] out)
    {
        one = Constant <value = int32 {1}> ()
        end = Constant <value = int32 {%(t)d}> ()
        k2 = Add(k, one)
        less = Less(k2, end)
        on = And(less, go)
        xt = Gather <axis = 0> (x, k)
        xh = Concat <axis = 1> (xt, h1)
        wr = Concat <axis = 0> (w, r)
        s = MatMul(xh, wr)
        g = Add(s, bias)
        gi, gj, gf, go2 = Split <axis = 1> (g)
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
"""


@pytest.mark.parametrize("steps, batch", [(1, 1), (30, 1), (12, 3)])
def test_a_while_loop_with_a_counter(steps: int, batch: int) -> None:
    rng = np.random.default_rng(0)
    shapes = {"x": (steps, batch, 6), "w": (6, 32), "r": (8, 32), "bias": (32,), "h0": (batch, 8), "c0": (batch, 8)}
    feed = {name: rng.standard_normal(shape).astype(np.float32) / 2 for name, shape in shapes.items()}
    check(parser.parse_model(LSTM % {"t": steps, "b": batch}), feed)


def exported(module: Any, args: tuple[Any, ...], axes: dict[str, Any] | None = None) -> onnx.ModelProto:
    torch = pytest.importorskip("torch")
    file = io.BytesIO()
    try:
        torch.onnx.export(
            torch.jit.script(module.eval()), args, file, input_names=["x"], opset_version=17, dynamo=False,
            dynamic_axes=axes,
        )  # fmt: skip
    except Exception as error:  # of another version of torch
        pytest.skip(f"torch does not export it: {error}")
    return onnx.load_from_string(file.getvalue())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("axes", [None, {"x": {0: "t", 1: "b"}}], ids=["fixed", "open"])
@pytest.mark.parametrize("form", ["Stacked", "Joined", "Last", "Written", "Greedy"])
def test_loops_that_torch_scripts(form: str, axes: dict[str, Any] | None) -> None:
    torch = pytest.importorskip("torch")
    from helpers import scripted

    torch.manual_seed(0)
    if form == "Greedy":
        model = exported(scripted.Greedy(), (torch.randn(1, 16),), axes and {"x": {0: "b"}})
        check(model, *({"x": np.random.default_rng(k).standard_normal((1, 16)).astype(np.float32)} for k in range(4)))
        return
    model = exported(getattr(scripted, form)(), (torch.randn(9, 2, 6),), axes)
    shapes = [(9, 2, 6)] if axes is None else [(9, 2, 6), (1, 1, 6), (30, 3, 6)]
    check(model, *({"x": np.random.default_rng(1).standard_normal(shape).astype(np.float32)} for shape in shapes))
