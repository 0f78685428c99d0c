"""com.microsoft operators against ONNX Runtime: fused, elementwise, normalising, positional, indexing; legacy ones."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.ort_oracle import Case, check, ids, random_arrays, supported

rng, f, h = random_arrays(0)


def i32(high: int, *shape: int) -> np.ndarray:
    return rng.integers(0, high, shape).astype(np.int32)


FUSED = [
    Case("FusedConv", [f(1, 3, 9, 7), f(5, 3, 3, 3), f(5)], {"activation": "Relu", "pads": [1, 1, 1, 1]}),
    Case(
        "FusedConv",
        [f(2, 4, 9, 7), f(6, 2, 3, 2), f(6), f(2, 6, 4, 3)],
        {"activation": "LeakyRelu", "activation_params": [0.2], "group": 2, "strides": [2, 2]},
    ),
    Case("FusedConv", [f(2, 4, 9, 7), f(6, 4, 1, 1)], {"activation": "Clip", "activation_params": [-0.5, 1.0]}),
    Case("FusedConv", [f(2, 4, 9, 7), f(6, 4, 1, 1)], {"activation": "HardSigmoid", "activation_params": [0.3, 0.4]}),
    Case("FusedConv", [f(2, 4, 9), f(6, 4, 3)], {"activation": "Tanh", "auto_pad": "SAME_UPPER"}),
    Case("FusedConv", [f(2, 4, 5, 5), f(6, 4, 3, 3), None, f(2, 6, 3, 3)], {"activation": "Sigmoid"}),
    Case("FusedMatMul", [f(2, 3, 5, 4), f(2, 3, 4, 6)], {"alpha": 0.5}),
    Case("FusedMatMul", [f(3, 5, 4), f(6, 4)], {"transB": 1}),
    Case("FusedMatMul", [f(5, 2, 3, 4), f(2, 3, 4, 6)], {"transBatchA": 1}),
    Case(
        "FusedMatMul",
        [f(4, 2, 3, 5), f(6, 2, 3, 4)],
        {"alpha": 0.5, "transA": 1, "transB": 1, "transBatchA": 1, "transBatchB": 1},
    ),
    Case("TransposeMatMul", [f(3, 4, 5), f(3, 4, 6)], {"transA": 1, "alpha": 2.0}),
    Case("NhwcMaxPool", [i32(256, 1, 9, 7, 3).astype(np.uint8)], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    Case(
        "NhwcMaxPool",
        [(i32(256, 1, 9, 7, 3) - 128).astype(np.int8)],
        {"kernel_shape": [2, 3], "ceil_mode": 1, "strides": [2, 2]},
    ),
    Case(
        "ConvTransposeWithDynamicPads",
        [f(1, 3, 5, 4), f(3, 2, 3, 3), np.array([0, 1, 1, 0]), f(2)],
        {"strides": [2, 2]},
    ),
]
ACTIVATIONS = {
    "Relu": {},
    "Sigmoid": {},
    "Tanh": {},
    "Softplus": {},
    "Softsign": {},
    "LeakyRelu": {"activation_alpha": 0.3},
    "Elu": {"activation_alpha": 0.7},
    "ThresholdedRelu": {"activation_alpha": 0.5},
    "HardSigmoid": {"activation_alpha": 0.3, "activation_beta": 0.6},
    "Selu": {"activation_alpha": 1.5, "activation_gamma": 1.2},
}
FUSED += [
    Case("FusedGemm", [f(5, 4), f(6, 4), f(6)], {"transB": 1, "alpha": 0.5, "beta": 2.0, "activation": name, **attrs})
    for name, attrs in ACTIVATIONS.items()
]

ELEMENTWISE = [
    Case("Gelu", [f(3, 5) * 3]),
    Case("BiasGelu", [f(2, 3, 5), f(5)]),
    Case("FastGelu", [f(2, 3, 5), f(5)]),
    Case("FastGelu", [f(2, 3, 5) * 4]),
    Case("QuickGelu", [f(2, 3, 5) * 4]),
    Case("QuickGelu", [f(2, 3, 5) * 4], {"alpha": 1.0}),
    Case("ScaledSiLU", [f(3, 4), np.array(1.5, np.float32)]),
    Case("ScaledSiLU", [h(3, 4)], {"alpha": 0.7}),
    Case("GatedAdd", [f(3, 4), f(3, 4), f(3, 1)]),
    Case("GatedAdd", [h(3, 4), h(3, 4), h(3, 1)]),
]

LEGACY = [
    Case("Affine", [f(7)], {"alpha": 2.0, "beta": 0.3}, domain="", opset=9),
    Case("Scale", [f(2, 3)], {"scale": 0.3}, domain="", opset=9),
    Case("ScaledTanh", [f(2, 3)], {"alpha": 0.3, "beta": 0.7}, domain="", opset=9),
    Case("ParametricSoftplus", [f(2, 3)], {"alpha": 0.3, "beta": 0.7}, domain="", opset=9),
    Case("ImageScaler", [f(2, 3, 4, 5)], {"scale": 0.3, "bias": [1.0, 2.0, 3.0]}, domain="", opset=9),
    Case("Crop", [f(2, 3, 7, 9)], {"border": [1, 2, 1, 1]}, domain="", opset=9),
    Case("Crop", [f(2, 3, 7, 9)], {"border": [1, 2, 1, 1], "scale": [3, 4]}, domain="", opset=9),
    Case("DynamicSlice", [f(4, 6), np.array([1, 0]), np.array([3, -1])], domain="", opset=9),
    Case("LayerNormalization", [f(4, 3, 7), f(7), f(7)], outputs=3, domain="", opset=11),
]

MASK = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)


def u8(*shape: int) -> np.ndarray:
    return rng.integers(0, 256, shape).astype(np.uint8)


def quantised_embedding(segments: bool) -> list[object]:
    tables = [u8(9, 8), u8(7, 8), u8(2, 8) if segments else None, u8(8), u8(8)]
    scales = [np.float32(s) for s in (0.1, 0.02, 0.03, 0.01, 0.02)]
    zeros = [np.uint8(z) for z in (128, 120, 3, 100, 9)]
    if not segments:
        scales[2] = zeros[2] = None
    parameters = [None if p is None else np.asarray(p) for p in (*scales, *zeros)]
    return [i32(9, 2, 5), i32(2, 2, 5) if segments else None, *tables, MASK if segments else None, *parameters]


SKIP, RMS = "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"
NORMS = [
    Case(SKIP, [f(2, 3, 7), f(2, 3, 7), f(7), f(7), f(7)], outputs=4, absent=(1, 2)),
    Case(SKIP, [f(2, 3, 7), f(3, 7), f(7)]),
    Case(SKIP, [f(2, 3, 7), f(1, 3, 7), f(7), None, f(7)], {"epsilon": 1e-3}),
    Case(SKIP, [f(5, 7), f(5, 7), f(7), f(7)]),
    Case(SKIP, [h(2, 3, 7), h(2, 3, 7), h(7), h(7)], outputs=4, absent=(1, 2)),
    Case(RMS, [f(2, 3, 7), f(2, 3, 7), f(7)], outputs=4, absent=(1, 2)),
    Case(RMS, [f(4, 7), f(4, 7), f(7), f(7)]),
    Case(RMS, [h(4, 7), h(4, 7), h(7), h(7)], outputs=4, absent=(1, 2)),
    Case("SimplifiedLayerNormalization", [f(4, 3, 7), f(7)], outputs=2, domain=""),
    Case("SimplifiedLayerNormalization", [f(4, 3, 7), f(3, 7)], {"axis": 1, "epsilon": 1e-2}, domain=""),
    Case("SimplifiedLayerNormalization", [h(4, 3, 7), h(7)], domain=""),
    Case("GatedRMSNorm", [f(3, 2, 8), f(4), f(3, 2, 8)]),
    Case("GatedRMSNorm", [f(3, 2, 8), f(4), f(3, 2, 8)], {"activation": "sigmoid", "epsilon": 1e-3}),
    Case(
        "EmbedLayerNormalization",
        [i32(9, 2, 5), i32(2, 2, 5), f(9, 8), f(7, 8), f(2, 8), f(8), f(8), MASK],
        outputs=3,
    ),
    Case(
        "EmbedLayerNormalization",
        [i32(9, 2, 5), None, f(9, 8), f(7, 8), None, f(8), f(8)],
        {"epsilon": 1e-3},
        outputs=2,
    ),
    Case(
        "EmbedLayerNormalization",
        [i32(9, 2, 5), i32(2, 2, 5), f(9, 8), f(7, 8), f(2, 8), f(8), f(8), None, i32(7, 1, 5)],
        outputs=2,
    ),
    Case("QEmbedLayerNormalization", quantised_embedding(segments=True), outputs=2),
    Case("QEmbedLayerNormalization", quantised_embedding(segments=False), outputs=2),
]


def cache(half: int) -> list[np.ndarray]:
    angles = rng.random((20, half))
    return [np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)]


def places(*shape: int) -> np.ndarray:
    return rng.integers(0, 20, shape)


ROTARY = "RotaryEmbedding"
POSITIONS = [
    Case(ROTARY, [f(2, 5, 48), places(2, 5), *cache(8)]),
    Case(ROTARY, [f(2, 5, 48), np.array([3]), *cache(8)], {"interleaved": 1}),
    Case(ROTARY, [f(2, 3, 5, 16), places(2, 5), *cache(8)]),
    Case(ROTARY, [f(2, 5, 48), places(2, 5), *cache(4)], {"num_heads": 3, "rotary_embedding_dim": 8}),
    Case(ROTARY, [f(2, 3, 1, 16), np.array([3]), *cache(8)]),
    Case(ROTARY, [f(1, 1, 48), places(1, 1), *cache(8)]),
    Case(ROTARY, [h(2, 5, 48), places(2, 5), *(c.astype(np.float16) for c in cache(8))]),
]

BOXES = np.array([[0, 0, 1, 1], [0.1, 0.2, 0.7, 1.3], [0.9, 0.8, 0.1, 0.1]], np.float32)


def grid(low: float, high: float) -> np.ndarray:
    return (rng.random((2, 4, 3, 2)) * (high - low) + low).astype(np.float32)


def i32s(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


MISC = [
    Case("Inverse", [f(3, 4, 4) + 4 * np.eye(4, dtype=np.float32)]),
    Case("Trilu", [f(2, 4, 5)]),
    Case("Trilu", [f(2, 4, 5), np.array(1)], {"upper": 0}),
    Case("GatherND", [f(3, 4, 5), np.array([[0, 1], [2, 3]])]),
    Case("SampleOp", [f(2, 3)]),
    Case("Pad", [f(2, 3), np.array([1, 0, 2, 1]), np.array([0.5], np.float32)]),
    Case("Pad", [f(4, 5), np.array([1, -1, 2, 1])], {"mode": "edge"}),
    Case("Pad", [f(4, 5), np.array([1, 2, 0, 1])], {"mode": "reflect"}, constants=(1,)),
    Case("GridSample", [f(2, 3, 5, 6), grid(-1.2, 1.2)]),
    Case(
        "GridSample",
        [f(2, 3, 5, 6), grid(-1, 1)],
        {"mode": "bicubic", "align_corners": 1, "padding_mode": "border"},
    ),
    Case("GridSample", [f(2, 3, 5, 6), grid(-1.5, 1.5)], {"mode": "nearest", "padding_mode": "reflection"}),
    Case("ExpandDims", [f(2, 3), np.array(-1, np.int32)]),
    Case("ExpandDims", [f(2, 3), np.array(1, np.int32)], constants=(1,)),
    Case("Unique", [np.array([2, 1, 1, 3, 4, 3], np.float32)], outputs=3),
    Case("Range", [np.array([v], np.float32) for v in (1, 7, 1.3)]),
    Case("Range", [np.array(2), np.array(9)]),
    Case("Range", [np.array(v, np.int32) for v in (9, 2, -2)]),
    Case("CDist", [f(4, 5), f(3, 5)]),
    Case("CDist", [f(4, 5).astype(np.float64), f(3, 5).astype(np.float64)], {"metric": "euclidean"}),
    Case("CropAndResize", [f(2, 3, 9, 8), BOXES, i32s(0, 1, 1), i32s(4, 5)], {"extrapolation_value": 0.5}),
    Case("CropAndResize", [f(2, 3, 9, 8), BOXES, i32s(0, 1, 1), i32s(4, 1)], {"mode": "nearest"}, constants=(3,)),
    Case("NGramRepeatBlock", [rng.integers(0, 3, (3, 12)), f(3, 5)], {"ngram_size": 3}),
    Case("UnfoldTensor", [f(3, 10, 4)], {"dim": 1, "size": 3, "step": 2}),
    Case("UnfoldTensor", [f(3, 10)], {"size": 10}),
]

MISC += [
    Case(
        "MoE",
        [f(2, 5, 8), f(10, 4), f(4, 6, 8), f(4, 6), f(4, 8, 6), f(4, 8)],
        {"k": 2, "activation_type": kind, "normalize_routing_weights": 1},
    )
    for kind in ("relu", "gelu", "silu", "identity")
]
MISC.append(
    Case(
        "MoE",
        [f(10, 8), f(10, 4), f(4, 12, 8), f(4, 12), f(4, 8, 6), None],
        {
            "k": 3,
            "activation_type": "swiglu",
            "swiglu_fusion": 1,
            "swiglu_limit": 1.5,
            "activation_alpha": 1.7,
            "activation_beta": 1.0,
        },
    )
)

CASES = [*FUSED, *ELEMENTWISE, *LEGACY, *NORMS, *POSITIONS, *MISC]


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_like_onnx_runtime(case: Case) -> None:
    supported(case)
    check(case)
