"""Transformers as torch exports them (`bench/zoo_transformers.py`, but smaller): every attention is recognised."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import tunewright
from tunewright.ops.tolerance import compare

FOLDER = Path(__file__).parent / "exports"
#: attentions in each file, counted by hand
EXPORTS = {
    "bert.sdpa.dynamo18-fp32": 1, "gpt2.sdpa.legacy18-fp32": 1, "llama.sdpa.dynamo18-fp16": 1,
    "llama.sdpa.dynamo18open-fp32": 1, "llama.eager.legacy18-fp16": 1, "mistral.sdpa.dynamo23-fp32": 1,
    "llama-cached.eager.legacy18open-fp32": 1, "gpt2-cached.eager.legacy18open-fp32": 1, "t5.eager.dynamo18-fp32": 3,
    "bloom.eager.legacy18-fp32": 1, "gemma2.eager.dynamo18-fp32": 1, "deberta.eager.dynamo18-fp32": 1,
    "xlnet.eager.legacy18open-fp32": 1, "swin.eager.dynamo18-fp32": 2, "vit.sdpa.legacy18-fp32": 1,
}  # fmt: skip
#: what must be part of something larger
LOOSE = {"Softmax", "Einsum", "IsNaN", "Sqrt", "Sigmoid"}
#: models that turn queries and keys by their position
ROTARY = ("llama", "mistral", "gemma2")


def test_every_file_has_a_case() -> None:
    assert {path.stem for path in FOLDER.glob("*.onnx")} == set(EXPORTS)


@pytest.mark.parametrize("name", EXPORTS)
def test_export(name: str) -> None:
    path = FOLDER / f"{name}.onnx"
    arrays = dict(np.load(path.with_suffix(".npz")))
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    outputs = [o.name for o in onnx.load(str(path)).graph.output]
    compiled = tunewright.Core().compile_model(path, "CPU")
    for given in (arrays, _longer(arrays) if "open" in name else arrays):
        got = compiled(given)
        for output, want in zip(outputs, session.run(outputs, given), strict=True):
            assert not compare(got[output], want, terms=1000, like=None), output
    steps = [s for s in compiled.program.plans[-1].steps if not s.optimized_out]
    ran = [s.node.op for s in steps]
    assert sum("Attention" in op for op in ran) == EXPORTS[name], ran
    assert not LOOSE & set(ran)
    assert not [s.node.op for s in steps if s.on_host]
    if name.startswith(ROTARY):
        assert ran.count("RotaryEmbedding") == 2, ran


def _longer(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Inputs that are longer by one along the axis that holds tokens: masks and a past, else all of them."""
    past = any(a.ndim == 4 for a in arrays.values())
    made = {}
    for name, array in arrays.items():
        axis = 2 if array.ndim == 4 else 1
        grows = array.ndim == 4 or not past or array.shape[1] > 1
        made[name] = np.concatenate([array.take([0], axis), array], axis) if grows else array
    return made
