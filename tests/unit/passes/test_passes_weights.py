"""Large weights are not transposed, reshaped or cast at each inference."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import tunewright

TEXT = """<ir_version: 10, opset_import: ["" : 18]>
g (int64[2,3] tokens, float[1,4] row) => (float[2,3,64] y, float[1,8] z) <float[64,8] table, float16[8,4] half>
{ x = Gather(table, tokens) t = Transpose<perm=[1,0]>(table) y = MatMul(x, t)
  w = Cast<to=1>(half) u = Transpose<perm=[1,0]>(w) z = Gemm(row, u) }"""


@pytest.mark.parametrize("fold", [1 << 26, 64])
@pytest.mark.parametrize("device", ["CPU", "CPU.HOST"])
def test_tied_weights(device: str, fold: int) -> None:
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(TEXT)
    table = rng.standard_normal((64, 8)).astype(np.float32)
    half = rng.standard_normal((8, 4)).astype(np.float16)
    del model.graph.value_info[:]
    for name, array in (("table", table), ("half", half)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    tokens, row = rng.integers(0, 64, (2, 3)), rng.standard_normal((1, 4)).astype(np.float32)
    compiled = tunewright.Core({"FOLD_BYTES": fold}).compile_model(model, device)
    got = compiled({"tokens": tokens, "row": row})
    np.testing.assert_allclose(got["y"], table[tokens] @ table.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got["z"], row @ half.astype(np.float32).T, rtol=1e-5, atol=1e-5)
    ran = [s.node.op for s in compiled.program.plans[-1].steps if not s.optimized_out]
    assert "Transpose" not in ran and "Cast" not in ran, ran
