"""com.microsoft attention against ONNX Runtime: every mask form, packed and cached keys, grouped heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conformance.ort_oracle import Case, check, ids, random_arrays, supported

rng, f, h = random_arrays(1)
QK = {3: np.float32}  # the type of the scores, which ONNX Runtime does not infer


def bits(*shape: int) -> np.ndarray:
    return rng.integers(0, 2, shape).astype(np.int32)


def i32s(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def u8(*shape: int) -> np.ndarray:
    return rng.integers(0, 256, shape).astype(np.uint8)


def i8(*shape: int) -> np.ndarray:
    return rng.integers(-128, 128, shape).astype(np.int8)


def w(rows: int, columns: int) -> np.ndarray:
    return f(rows, columns) * np.float32(0.3)


def s(value: float) -> np.ndarray:
    return np.array(value, np.float32)


SELF = [
    Case("Attention", [f(2, 5, 6), w(6, 24), f(24)], {"num_heads": 2}),
    Case("Attention", [f(2, 5, 6), w(6, 24), f(24), i32s(3, 5)], {"num_heads": 2, "scale": 0.3}),
    Case("Attention", [f(2, 5, 6), w(6, 24), f(24), i32s(3, 5, 1, 2)], {"num_heads": 4, "mask_filter_value": -50.0}),
    Case("Attention", [f(2, 5, 6), w(6, 24), f(24), bits(2, 5)], {"num_heads": 4, "unidirectional": 1}),
    Case("Attention", [f(2, 5, 6), w(6, 24), f(24), bits(2, 5, 5)], {"num_heads": 4}),
    Case(
        "Attention",
        [f(2, 3, 6), w(6, 24), f(24), bits(2, 7), f(2, 2, 2, 4, 4)],
        {"num_heads": 2, "unidirectional": 1},
        outputs=2,
    ),
    Case("Attention", [f(2, 3, 6), w(6, 24), f(24), None, None, f(1, 2, 3, 3)], {"num_heads": 2}, outputs=2),
    Case(
        "Attention",
        [f(2, 3, 6), w(6, 26), f(26), None, None, f(2, 1, 3, 3)],
        {"num_heads": 2, "qkv_hidden_sizes": [8, 8, 10]},
    ),
    Case(
        "QAttention",
        [u8(2, 5, 6), u8(6, 24), f(24), s(0.02), s(0.01), i32s(3, 5), u8(1), u8(1)],
        {"num_heads": 2},
        constants=(1, 4, 7),
    ),
    Case(
        "QAttention",
        [u8(2, 5, 6), i8(6, 24), f(24), s(0.02), np.abs(f(24)) * s(0.02), None, u8(1), np.zeros(24, np.int8)],
        {"num_heads": 2, "unidirectional": 1},
    ),
    Case(
        "QAttention",
        [u8(2, 3, 6), i8(6, 24), f(24), s(0.02), s(0.01), bits(2, 7), u8(1), i8(1), f(2, 2, 2, 4, 4)],
        {"num_heads": 2, "unidirectional": 1},
        outputs=2,
    ),
]

MHA, DECODER = "MultiHeadAttention", "DecoderMaskedMultiHeadAttention"
HEADS = {"num_heads": 4}
MULTI = [
    Case(MHA, [f(2, 3, 8), f(2, 5, 8), f(2, 5, 12)], HEADS),
    Case(MHA, [f(2, 3, 8), f(2, 5, 8), f(2, 5, 12), f(28), i32s(2, 5)], {**HEADS, "scale": 0.2}),
    Case(
        MHA, [f(2, 3, 8), f(2, 5, 8), f(2, 5, 8), f(24), bits(2, 5), f(2, 4, 3, 5)], HEADS, outputs=4, types=QK
    ),
    Case(MHA, [f(2, 5, 8), f(2, 5, 8), f(2, 5, 8), None, bits(2, 5, 5)], {**HEADS, "unidirectional": 1}),
    Case(MHA, [f(2, 3, 8), f(2, 5, 8), f(2, 5, 8)], {**HEADS, "unidirectional": 1}),
    Case(MHA, [f(2, 3, 8), f(2, 3, 8), f(2, 3, 8), None, i32s(2, 3, 0, 3, 6, 0, 2, 5)], HEADS),
    Case(MHA, [f(2, 3, 8), f(2, 4, 5, 2), f(2, 4, 5, 2), f(24)], HEADS),
    Case(
        MHA,
        [f(2, 3, 8), f(2, 3, 8), f(2, 3, 8), f(24), None, f(1, 1, 3, 7), f(2, 4, 4, 2), f(2, 4, 4, 2)],
        {**HEADS, "unidirectional": 1},
        outputs=3,
    ),
    Case(DECODER, [f(2, 1, 8), f(2, 4, 5, 2), f(2, 4, 5, 2), bits(2, 5)], HEADS),
    Case(
        DECODER,
        [
            *(f(2, 1, 8) for _ in range(3)), bits(2, 4), f(1, 4, 1, 4), f(2, 4, 6, 2), f(2, 4, 6, 2), i32s(3), None,
            None, f(24),
        ],
        {**HEADS, "past_present_share_buffer": 1, "output_qk": 1},
        outputs=4,
        types=QK,
    ),
    Case(
        DECODER,
        [
            *(f(4, 1, 8) for _ in range(3)), None, None, f(4, 4, 6, 2), f(4, 4, 6, 2), i32s(3), i32s(2), bits(2, 2, 6),
        ],
        {**HEADS, "past_present_share_buffer": 1},
        outputs=3,
    ),
]  # fmt: skip

ANGLES = rng.random((20, 8))
COS, SIN = np.cos(ANGLES).astype(np.float32), np.sin(ANGLES).astype(np.float32)


def grouped(
    batch: int, length: int, past: int, *, packed: bool = False, rotary: bool = False, room: int | None = None,
    total: int | None = None, ends: list[int] | None = None, positions: Any = None, bias: Any = None, sink: Any = None,
    half: bool = False, outputs: int = 3, **attrs: Any,
) -> Case:  # fmt: skip
    """GroupQueryAttention with four query heads over two key heads of 16."""
    make = h if half else f
    whole = past + length if total is None else total
    if packed:
        qkv = [make(batch, length, 8 * 16), None, None]
    else:
        qkv = [make(batch, length, 4 * 16), make(batch, length, 2 * 16), make(batch, length, 2 * 16)]
    caches = [make(batch, 2, past if room is None else room, 16) for _ in range(2)]
    last = np.array([whole - 1] * batch if ends is None else ends, np.int32)
    angles = [COS.astype(make(1).dtype), SIN.astype(make(1).dtype)] if rotary else [None, None]
    attrs = {"num_heads": 4, "kv_num_heads": 2, **({"do_rotary": 1} if rotary else {}), **attrs}
    inputs = [*qkv, *caches, last, np.array(whole, np.int32), *angles, positions, bias, sink]
    return Case("GroupQueryAttention", inputs, attrs, outputs=outputs)


GROUPED = [
    grouped(2, 5, 0),
    grouped(2, 5, 0, packed=True, rotary=True),
    grouped(2, 1, 6, rotary=True),
    grouped(1, 3, 4, rotary=True, rotary_interleaved=1),
    grouped(2, 5, 0, ends=[2, 4]),
    grouped(2, 5, 0, local_window_size=2),
    grouped(2, 1, 6, local_window_size=3, softcap=5.0),
    grouped(2, 1, 6, ends=[4, 6]),
    grouped(2, 1, 4, room=10, total=5),
    grouped(2, 5, 0, room=9, total=5, rotary=True),
    grouped(2, 5, 0, smooth_softmax=1),
    grouped(2, 5, 0, sink=f(4)),
    grouped(2, 1, 6, sink=f(4), scale=0.3),
    grouped(2, 5, 0, bias=f(1, 1, 5, 5)),
    grouped(2, 1, 6, bias=f(2, 4, 1, 7)),
    grouped(1, 5, 0, rotary=True, positions=np.arange(5)[None] + 2),
    grouped(2, 1, 4, rotary=True, positions=np.array([[4], [3]])),
    grouped(2, 5, 0, causal=0),
    grouped(2, 5, 0, qk_output=1, outputs=4),
    grouped(2, 5, 0, qk_output=2, outputs=4),
    grouped(2, 5, 0, half=True, packed=True, rotary=True),
    grouped(2, 1, 6, half=True),
]

CASES = [*SELF, *MULTI, *GROUPED]


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_like_onnx_runtime(case: Case) -> None:
    supported(case)
    check(case)
