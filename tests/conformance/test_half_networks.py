"""Whole networks in fp16 and bf16 against ONNX Runtime in single precision, within the table of tolerances."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from golden import graphs
from tunewright import Core
from tunewright.ir.types import DType
from tunewright.ops.tolerance import TOLERANCES, deviation
from tunewright.testing import models

ort = pytest.importorskip("onnxruntime")

BENCH = Path(__file__).parents[2] / "bench"
TEXTS = {
    "u-net": """g (float[1,3,24,24] x) => (float[1,2,24,24] y)
    <float[16,3,3,3] a, float[16] ab, float[32,16,3,3] b, float[32,16,2,2] t, float[16,32,3,3] c, float[2,16,1,1] d>
    { p = Conv<pads=[1,1,1,1]>(x, a, ab) q = Relu(p) r = MaxPool<kernel_shape=[2,2], strides=[2,2]>(q)
      s = Conv<pads=[1,1,1,1]>(r, b) u = ConvTranspose<strides=[2,2]>(s, t) v = Concat<axis=1>(u, q)
      w = Conv<pads=[1,1,1,1]>(v, c) z = Relu(w) y = Conv(z, d) }""",
    "pyramid": """g (float[1,3,32,32] x) => (float[1,85,80] y)
    <float[16,3,3,3] a, float[32,16,3,3] b, float[16,48,1,1] c, float[85,16,1,1] d, float[85,32,1,1] e,
     int64[3] flat = {1,85,-1}, float[4] scales = {1,1,2,2}>
    { p = Conv<strides=[4,4], pads=[1,1,1,1]>(x, a) q = HardSwish(p) r = Conv<strides=[2,2], pads=[1,1,1,1]>(q, b)
      u = Resize<mode="nearest">(r, , scales) v = Concat<axis=1>(u, q) w = Conv(v, c) s = Relu(w) h = Conv(s, d)
      k = Conv(r, e) m = Reshape(h, flat) n = Reshape(k, flat) o = Concat<axis=2>(m, n) y = Sigmoid(o) }""",
    "audio": """g (float[1,1,400] x) => (float[1,1,400] y)
    <float[16,1,16] a, float[16,16,5] b, float[16] bb, float[16,1,16] t, float h = {0.5}>
    { p = Conv<strides=[4], pads=[6,6]>(x, a) q = Tanh(p) r = Conv<pads=[4,4], dilations=[2]>(q, b, bb) s = Add(r, p)
      u = Mul(s, h) y = ConvTranspose<strides=[4], pads=[6,6]>(u, t) }""",
    "recurrent": """g (float[7,2,20] x) => (float[7,1,2,24] y, float[7,1,2,24] z)
    <float[1,96,20] w, float[1,96,24] r, float[1,192] b, float[1,72,20] v, float[1,72,24] s>
    { y = LSTM<hidden_size=24>(x, w, r, b) z = GRU<hidden_size=24>(x, v, s) }""",
    "one row": """g (float[1,256] x) => (float[1,512] y)
    <float[256,512] w, float[512] b, float[512,512] v, float[512] n>
    { p = Gemm(x, w, b) q = Relu(p) r = LayerNormalization(q, n) y = MatMul(r, v) }""",
}
NETWORKS: dict[str, Callable[[], onnx.ModelProto]] = {
    **{name: lambda text=text: spread(graphs.model(text, opset=22)) for name, text in TEXTS.items()},
    "resnet": lambda: models.resnet(18, 64, 10),
    "mobilenet": lambda: models.mobilenet(64, 10),
    "transformer": lambda: models.transformer(),
}
CODES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


def spread(model: onnx.ModelProto) -> onnx.ModelProto:
    """Random weights of which sums stay near one."""
    rng = np.random.default_rng(0)
    for weight in model.graph.initializer:
        array = numpy_helper.to_array(weight)
        if array.dtype == np.float32 and array.size > 8:
            made = rng.standard_normal(array.shape) / np.sqrt(max(array[0].size, 1))
            weight.CopyFrom(numpy_helper.from_array(made.astype(np.float32), weight.name))
    return model


@pytest.mark.parametrize("half", CODES)
@pytest.mark.parametrize("mode", ["PERFORMANCE", "ACCURACY"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_half_network(name: str, mode: str, half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import half as bench

    whole = NETWORKS[name]()
    narrow = bench.twin(onnx.ModelProto.FromString(whole.SerializeToString()), CODES[half])
    for mine, rounded in zip(whole.graph.initializer, narrow.graph.initializer, strict=True):
        if mine.data_type == TensorProto.FLOAT:
            array = numpy_helper.to_array(rounded).astype(np.float32)
            mine.CopyFrom(numpy_helper.from_array(array, mine.name))
    dtype, rng, given = DType(half).numpy, np.random.default_rng(1), {}
    for value in whole.graph.input:
        dims = [d.dim_value or 1 for d in value.type.tensor_type.shape.dim]
        kind = value.type.tensor_type.elem_type
        given[value.name] = (
            rng.standard_normal(dims).astype(dtype) if kind == TensorProto.FLOAT else rng.integers(0, 9, dims)
        )
    session = ort.InferenceSession(whole.SerializeToString(), providers=["CPUExecutionProvider"])
    want = session.run(None, {k: v.astype(np.float32) if v.dtype == dtype else v for k, v in given.items()})
    model = Core({"EXECUTION_MODE_HINT": mode}).compile_model(narrow, "CPU")
    got = list(model(given).values())
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype and a.shape == b.shape
        assert deviation(a.astype(np.float32), b) <= TOLERANCES[DType(half)].network
