"""com.microsoft operators that ONNX Runtime runs on GPUs only, against their definitions: other operators through ONNX
Runtime's CPU, or plain loops."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import tunewright
from conformance.ort_oracle import Case, assert_close, random_arrays, run_ort

rng, f, _ = random_arrays(3)


def ours(case: Case) -> list[Any]:
    """Our outputs, which must not depend on whether the shapes were known when compiling."""
    models = (tunewright.Core().compile_model(case.model(dynamic)) for dynamic in (False, True))
    static, dynamic = (list(model(case.feeds()).values()) for model in models)
    for a, b in zip(static, dynamic, strict=True):
        assert np.array_equal(a, b)
    return static


def peer(op: str, inputs: list[Any], domain: str = "", **attrs: Any) -> Any:
    """The first output of one node through ONNX Runtime."""
    case = Case(op, inputs, attrs, domain=domain)
    return run_ort(case.model(), case.feeds())["o0"]


def single(op: str, inputs: list[Any], outputs: int = 1, **attrs: Any) -> Any:
    found = ours(Case(op, inputs, attrs, outputs=outputs))
    return found[0] if outputs == 1 else found


def test_convolutions_with_channels_last() -> None:
    x, w, bias, residual = f(2, 9, 7, 4), f(6, 2, 3, 3), f(6), f(2, 9, 7, 6)
    attrs = {"group": 2, "pads": [1, 1, 1, 1]}
    want = peer("Conv", [x.transpose(0, 3, 1, 2).copy(), w, bias], **attrs).transpose(0, 2, 3, 1)
    assert_close(single("NhwcConv", [x, w.transpose(0, 2, 3, 1).copy(), bias], **attrs), want)
    fused = single("NhwcFusedConv", [x, w, bias, residual], activation="Relu", **attrs)
    assert_close(fused, np.maximum(want + residual, 0))


def test_products_with_an_activation() -> None:
    a, b, bias = f(3, 5, 4), f(6, 4), f(6)
    want = peer("LeakyRelu", [0.5 * a @ b.T], alpha=0.2)
    attrs = {"transB": 1, "alpha": 0.5, "activation": "LeakyRelu", "activation_alpha": 0.2}
    assert_close(single("FusedMatMulActivation", [a, b], **attrs), want)
    want = peer("FastGelu", [a @ b.T, bias], "com.microsoft")
    assert_close(single("GemmFastGelu", [a, b.T.copy(), bias]), want)


def test_biases() -> None:
    x, skip, bias = f(2, 3, 8), f(2, 3, 8), f(8)
    assert_close(single("BiasAdd", [x, bias, skip]), x + bias + skip)
    left, right = np.split(x + bias, 2, axis=-1)
    assert_close(single("BiasSplitGelu", [x, bias]), left * peer("Gelu", [right.copy()], "com.microsoft"))
    scores, mask = f(2, 4, 3, 5), f(2, 1, 1, 5)
    want = peer("Softmax", [scores + mask], axis=-1)
    assert_close(single("BiasSoftmax", [scores, mask], axis=3, is_inner_broadcast=1), want)


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("silu", [0, 1])
def test_group_norm(last: int, silu: int) -> None:
    x, gamma, beta, skip, bias = f(2, 6, 5, 4), f(6), f(6), f(2, 6), f(6)

    def definition(y: Any) -> Any:
        case = Case("GroupNormalization", [y, gamma, beta], {"num_groups": 3, "epsilon": 1e-3}, domain="")
        z = run_ort(case.model(), case.feeds())["o0"]
        return z / (1 + np.exp(-z)) if silu else z

    def laid(y: Any) -> Any:
        return y.transpose(0, 2, 3, 1).copy() if last else y

    attrs = {"groups": 3, "activation": silu, "channels_last": last, "epsilon": 1e-3}
    assert_close(single("GroupNorm", [laid(x), gamma, beta], **attrs), laid(definition(x)))
    total = x + skip[:, :, None, None] + bias[:, None, None]
    y, s = single("SkipGroupNorm", [laid(x), gamma, beta, skip, bias], outputs=2, **attrs)
    assert_close(y, laid(definition(total)))
    assert_close(s, laid(total))


def test_simplified_layer_norm_in_either_domain() -> None:
    x, scale = f(4, 3, 7), f(7)
    assert_close(single("SimplifiedLayerNormalization", [x, scale]), peer("SimplifiedLayerNormalization", [x, scale]))


OFFSETS = np.array([[0, 4, 5, 8], [9, 10, 11, 1], [2, 3, 6, 7]], np.int32)
COUNT = np.array([0, 1, 3, 7], np.int32)


def test_packed_attention() -> None:
    """Sequences of 1, 2 and 4 tokens, each through ONNX Runtime on its own."""
    x, w, bias, extra = f(7, 6), f(6, 24) * np.float32(0.3), f(24), f(3, 2, 4, 4)
    got = single("PackedAttention", [x, w, bias, OFFSETS, COUNT, extra], num_heads=2)
    for k, (begin, end) in enumerate(pairwise(COUNT)):
        own = extra[k : k + 1, :, : end - begin, : end - begin].copy()
        want = peer("Attention", [x[None, begin:end], w, bias, None, None, own], "com.microsoft", num_heads=2)
        assert_close(got[begin:end], want[0])


@pytest.mark.parametrize("packed", [False, True])
def test_packed_multi_head_attention(packed: bool) -> None:
    q, k, v, bias = f(7, 8), f(7, 8), f(7, 8), f(24)
    qkv = [np.stack([x.reshape(7, 2, 4) for x in (q, k, v)], 2), None, None] if packed else [q, k, v]
    got = single("PackedMultiHeadAttention", [*qkv, bias, OFFSETS, COUNT], num_heads=2)
    for begin, end in pairwise(COUNT):
        own = [x[None, begin:end] for x in (q, k, v)]
        assert_close(got[begin:end], peer("MultiHeadAttention", [*own, bias], "com.microsoft", num_heads=2)[0])


def test_packed_keys_and_values() -> None:
    """MultiHeadAttention with (B, L, N, 2, H) and (B, S, N, 3, H)."""
    q, k, v = f(2, 5, 8), f(2, 5, 8), f(2, 5, 8)
    want = peer("MultiHeadAttention", [q, k, v], "com.microsoft", num_heads=2)
    q5, k5, v5 = (x.reshape(2, 5, 2, 4) for x in (q, k, v))
    assert_close(single("MultiHeadAttention", [q, np.stack([k5, v5], 3)], num_heads=2), want)
    assert_close(single("MultiHeadAttention", [np.stack([q5, k5, v5], 3)], num_heads=2), want)


def test_gemma_rotary_embedding() -> None:
    angles, q, k = f(2, 5, 8), f(2, 3, 5, 8), f(2, 3, 5, 8)
    q_turned, k_turned = (np.concatenate([-x[..., 4:], x[..., :4]], -1) for x in (q, k))
    got = single("GemmaRotaryEmbedding", [angles, q, q_turned, k, k_turned], outputs=2)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    assert_close(got[0], q * cos + q_turned * sin)
    assert_close(got[1], k * cos + k_turned * sin)


@pytest.mark.parametrize("both", [0, 1])
def test_relative_position_bias(both: int) -> None:
    """T5's buckets in plain Python; the table lies head by head in memory."""
    buckets, heads, length, distance = 8, 3, 20, 16
    table = f(heads, buckets)

    def bucket(relative: int) -> int:
        count, offset = buckets, 0
        if both:
            count //= 2
            offset = count if relative > 0 else 0
            near = abs(relative)
        else:
            near = max(-relative, 0)
        if near < count // 2:
            return offset + near
        exact = count // 2
        far = math.log(near / exact) / math.log(distance / exact) * (count - exact)
        return offset + min(exact + int(far), count - 1)

    index = [[bucket(k - q) for k in range(length)] for q in range(length)]
    size = np.array([length])
    inputs = [table.reshape(buckets, heads), size, size]
    got = single("RelativePositionBias", inputs, max_distance=distance, is_bidirectional=both)
    assert_close(got, table[:, index][None])


def test_gated_relative_position_bias() -> None:
    query, query_bias, relative, weight, bias, eco = f(2, 5, 8), f(8), f(1, 2, 5, 5), f(4, 6), f(6), f(1, 2, 1, 1)
    q = (query + query_bias).reshape(2, 5, 2, 4).transpose(0, 2, 1, 3)
    gates = (q @ weight + bias).reshape(2, 2, 5, 2, 3).sum(-1)
    u, r = (1 / (1 + np.exp(-gates[..., j : j + 1])) for j in (0, 1))
    inputs = [query, query_bias, relative, weight, bias, eco]
    assert_close(single("GatedRelativePositionBias", inputs, num_heads=2), (u * (r * eco - 1) + 2) * relative)


def test_integers() -> None:
    x, zero = rng.integers(-128, 128, (3, 4, 5)).astype(np.int8), np.array(3, np.int8)
    y = rng.integers(-128, 128, (4, 1)).astype(np.int8)
    assert_close(single("ReduceSumInteger", [x], axes=[1], keepdims=0), x.sum(1, dtype=np.int32))
    assert_close(single("MulInteger", [x, zero, y, zero]), (x.astype(np.int32) - 3) * (y.astype(np.int32) - 3))
    scale, out = np.array(0.02, np.float32), np.array(0.015, np.float32)
    mean = (x.astype(np.float32) - 3).mean((0, 2), keepdims=True) * scale
    want = np.clip(np.rint(mean / out) + 3, -128, 127).astype(np.int8)
    assert_close(single("QLinearReduceMean", [x, scale, zero, out, zero], axes=[0, 2], keepdims=1), want)


def test_fourier() -> None:
    x = f(3, 8)
    turns = np.exp(-2j * np.pi * np.outer(np.arange(8), np.arange(5)) / 8)
    spectrum = x.astype(np.float64) @ turns
    pairs = np.stack([spectrum.real, spectrum.imag], -1).astype(np.float32)
    assert_close(single("Rfft", [x], signal_ndim=1), pairs)
    assert_close(single("Irfft", [pairs], signal_ndim=1), x)


def test_complex_products() -> None:
    a, b = f(3, 4, 2), f(4, 2)
    for op, other in (("ComplexMul", b), ("ComplexMulConj", b * np.array([1, -1], np.float32))):
        real = a[..., 0] * other[..., 0] - a[..., 1] * other[..., 1]
        imaginary = a[..., 0] * other[..., 1] + a[..., 1] * other[..., 0]
        assert_close(single(op, [a, b]), np.stack([real, imaginary], -1))


@pytest.mark.parametrize(("value", "finite"), [(1.0, True), (np.inf, False), (np.nan, False)])
def test_is_all_finite(value: float, finite: bool) -> None:
    x = f(3)
    x[1] = value
    assert single("IsAllFinite", [f(2, 2), x]).item() is finite


@pytest.mark.parametrize(
    "case",
    [
        Case("Attention", [f(1, 3, 6), f(6, 24), f(24)], {"num_heads": 2, "do_rotary": 1}),
        Case("CDist", [f(2, 3), f(4, 3)], {"metric": "cosine"}),
        Case(
            "MatMulNBits",
            [f(1, 32), np.zeros((4, 2, 8), np.uint8), f(4, 2)],
            {"N": 4, "K": 32, "block_size": 16, "weight_prepacked": 1},
        ),
    ],
    ids=lambda case: case.op,
)
def test_what_is_not_supported_says_so(case: Case) -> None:
    with pytest.raises(tunewright.UnsupportedError, match=rf"com.microsoft::{case.op}.*not supported"):
        tunewright.Core().compile_model(case.model())
