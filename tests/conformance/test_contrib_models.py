"""Files that ONNX Runtime's optimizer and quantizer write run here with ONNX Runtime's outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import tunewright
from conformance.contrib_models import conv_net, lstm, transformer
from conformance.ort_oracle import assert_close, ort, run_ort
from conformance.short_form import every_other

quant = pytest.importorskip("onnxruntime.quantization")
SEED = 7


def image(rng: np.random.Generator) -> dict[str, Any]:
    return {"x": rng.standard_normal((3, 3, 17, 15)).astype(np.float32)}


def text(rng: np.random.Generator) -> dict[str, Any]:
    return {"ids": rng.integers(0, 23, (3, 9)), "mask": (np.arange(9) < np.array([[9], [4], [7]])).astype(np.int64)}


def sound(rng: np.random.Generator) -> dict[str, Any]:
    return {"x": rng.standard_normal((7, 3, 5)).astype(np.float32)}


#: name -> (model, inputs, com.microsoft operators that the optimizer puts in)
MODELS: dict[str, tuple[Callable[[], onnx.ModelProto], Callable[[np.random.Generator], dict[str, Any]], set[str]]] = {
    "conv": (conv_net, image, {"FusedConv", "FusedGemm"}),
    "transformer": (transformer, text, {"FusedMatMul", "SkipLayerNormalization", "BiasGelu"}),
    "old-transformer": (
        lambda: transformer(opset=13, decomposed=True), text, {"FusedMatMul", "SkipLayerNormalization", "BiasGelu"}
    ),
    "lstm": (lstm, sound, set()),
}  # fmt: skip


class Samples(quant.CalibrationDataReader):  # type: ignore[misc]
    """A few random inputs to calibrate with."""

    def __init__(self, rng: np.random.Generator, inputs: Callable[[np.random.Generator], dict[str, Any]]) -> None:
        self.left = iter([inputs(rng) for _ in range(4)])

    def get_next(self) -> dict[str, Any] | None:
        return next(self.left, None)


def optimise(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """What ONNX Runtime writes at its extended level, without its own memory layouts."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(folder / "optimised.onnx")


def contrib(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node if node.domain == "com.microsoft"}


def output_step(model: onnx.ModelProto, name: str) -> float:
    """The quantisation step of an output that a DequantizeLinear makes; 0 for any other."""
    weights = {t.name: t for t in model.graph.initializer}
    maker = next(node for node in model.graph.node if name in node.output)
    if maker.op_type != "DequantizeLinear":
        return 0.0
    return float(onnx.numpy_helper.to_array(weights[maker.input[1]]).reshape(-1)[0])


def compare(model: onnx.ModelProto, feeds: dict[str, Any]) -> None:
    """Equal to ONNX Runtime: floats to 1e-5 of the scale, quantised outputs to one step in 99.9 % of the elements."""
    expected = run_ort(model, feeds)
    actual = tunewright.Core().compile_model(model)(feeds)
    for name, want in expected.items():
        step = output_step(model, name)
        if step:
            assert (np.abs(actual[name] - want) <= 1.01 * step).mean() >= 0.999, name
        else:
            assert_close(actual[name], want, name)


@pytest.mark.parametrize("name", MODELS)
def test_optimised(rng: np.random.Generator, name: str, tmp_path: Path) -> None:
    build, inputs, expected = MODELS[name]
    model = optimise(build(), tmp_path)
    assert contrib(model) >= expected
    compare(model, inputs(rng))


# Each network is a program of its own, which takes seconds to compile.
@every_other(("name", MODELS), ("kind", ["uint8", "int8-per-channel"]), ("form", ["as-written", "optimised"]))
def test_dynamically_quantised(rng: np.random.Generator, name: str, kind: str, form: str, tmp_path: Path) -> None:
    build, inputs, _ = MODELS[name]
    onnx.save(build(), tmp_path / "model.onnx")
    quant.quantize_dynamic(
        tmp_path / "model.onnx", tmp_path / "quantised.onnx", per_channel=kind != "uint8",
        weight_type=quant.QuantType.QUInt8 if kind == "uint8" else quant.QuantType.QInt8,
    )  # fmt: skip
    model = onnx.load(tmp_path / "quantised.onnx")
    if name == "lstm":
        assert "DynamicQuantizeLSTM" in contrib(model)
    compare(optimise(model, tmp_path) if form == "optimised" else model, inputs(rng))


@every_other(
    ("name", ["conv", "transformer"]), ("kind", ["uint8", "int8"]), ("form", ["QDQ", "QDQ-optimised", "QOperator"])
)
def test_statically_quantised(rng: np.random.Generator, name: str, kind: str, form: str, tmp_path: Path) -> None:
    build, inputs, _ = MODELS[name]
    onnx.save(build(), tmp_path / "model.onnx")
    quant.quantize_static(
        tmp_path / "model.onnx", tmp_path / "quantised.onnx", Samples(rng, inputs), per_channel=kind == "uint8",
        quant_format=quant.QuantFormat.QOperator if form == "QOperator" else quant.QuantFormat.QDQ,
        activation_type=quant.QuantType.QUInt8 if kind == "uint8" else quant.QuantType.QInt8,
        weight_type=quant.QuantType.QInt8,
    )  # fmt: skip
    model = onnx.load(tmp_path / "quantised.onnx")
    if form == "QDQ-optimised":
        model = optimise(model, tmp_path)
    if form != "QDQ":
        assert any(op.startswith("Q") for op in contrib(model))
    compare(model, inputs(rng))
