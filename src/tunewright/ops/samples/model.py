"""Samples of recurrence, attention, resizing, sampling and quantisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .base import Rng, Samples, each, integers, ints, join, normal, over, scalar, uniform


# -- recurrence -------------------------------------------------------------------------------------------------------
def _recurrent(gates: int, *attrs: dict[str, Any], states: int = 1, peepholes: bool = False) -> Samples:
    """Samples with all inputs, then without the optional ones."""

    def inputs(rng: Rng, directions: int, full: bool, layout: int = 0) -> list[Any]:
        steps, batch, size, hidden = 6, 3, 4, 5
        x = normal(rng, batch, steps, size) if layout else normal(rng, steps, batch, size)
        found: list[Any] = [
            x,
            normal(rng, directions, gates * hidden, size) * 0.5,
            normal(rng, directions, gates * hidden, hidden) * 0.5,
        ]
        if full:
            state = (batch, directions, hidden) if layout else (directions, batch, hidden)
            found += [normal(rng, directions, 2 * gates * hidden), np.array([6, 2, 4], np.int32)]
            found += [normal(rng, *state) for _ in range(states)]
            if peepholes:
                found.append(normal(rng, directions, 3 * hidden))
        return found

    def make(one: dict[str, Any]) -> Samples:
        directions = 2 if one.get("direction") == "bidirectional" else 1
        layout = one.get("layout", 0)
        return join(
            each(lambda rng: inputs(rng, directions, True, layout), one, outputs=states + 1),
            each(lambda rng: inputs(rng, directions, False, layout), one, outputs=states + 1),
        )

    return join(
        *(
            make({"hidden_size": 5, **one})
            for one in ({}, {"direction": "reverse"}, {"direction": "bidirectional"}, *attrs)
        )
    )


RECURRENT: dict[str, Samples] = {
    "LSTM": _recurrent(
        4,
        {
            "activations": ("HardSigmoid", "Softsign", "Relu"),
            "activation_alpha": (0.3125,),
            "activation_beta": (0.375,),
        },
        {"clip": 0.8},
        {"input_forget": 1},
        states=2,
        peepholes=True,
    ),
    "GRU": _recurrent(
        3,
        {"linear_before_reset": 1},
        {"clip": 0.8},
        {"activations": ("HardSigmoid", "LeakyRelu"), "activation_alpha": (0.3, 0.2)},
    ),
    "RNN": _recurrent(
        1, {"activations": ("Relu",)}, {"clip": 0.8}, {"activations": ("Affine",), "activation_alpha": (0.5,)}
    ),
}


# -- attention --------------------------------------------------------------------------------------------------------
def _qkv(heads: int, groups: int, queries: int, keys: int) -> Any:
    return lambda rng: [
        normal(rng, 2, heads, queries, 8),
        normal(rng, 2, groups, keys, 8),
        normal(rng, 2, groups, keys, 6),
    ]


def _past(rng: Rng) -> list[Any]:
    return [None, normal(rng, 2, 4, 3, 8), normal(rng, 2, 4, 3, 6)]


ATTENTION: dict[str, Samples] = {
    "Attention": join(
        each(_qkv(4, 4, 5, 7), {}, {"is_causal": 1}, {"scale": 0.3}, {"softcap": 2.0}),
        each(_qkv(4, 2, 5, 7), {}, {"is_causal": 1}),
        each(lambda rng: [*_qkv(4, 4, 5, 7)(rng), normal(rng, 5, 7)]),
        each(lambda rng: [*_qkv(4, 4, 5, 7)(rng), integers(rng, 0, 2, 2, 1, 5, 7, dtype=np.bool_)]),
        each(lambda rng: [*_qkv(4, 4, 5, 7)(rng), *_past(rng)], {}, {"is_causal": 1}, outputs=3),
        each(
            lambda rng: [normal(rng, 2, 5, 24), normal(rng, 2, 7, 12), normal(rng, 2, 7, 12)],
            {"q_num_heads": 6, "kv_num_heads": 3},
        ),
        each(_qkv(2, 2, 4, 5), *({"qk_matmul_output_mode": m} for m in range(4)), outputs=4),
    ),
    "RotaryEmbedding": join(
        each(
            lambda rng: [normal(rng, 2, 3, 5, 8), normal(rng, 9, 4), normal(rng, 9, 4), integers(rng, 0, 9, 2, 5)],
            {},
            {"interleaved": 1},
        ),
        each(
            lambda rng: [normal(rng, 2, 5, 24), normal(rng, 2, 5, 2), normal(rng, 2, 5, 2)],
            {"num_heads": 3, "rotary_embedding_dim": 4},
        ),
    ),
}


# -- resizing, sampling -----------------------------------------------------------------------------------------------
def _resize(*attrs: dict[str, Any], scales: Sequence[float] = (), sizes: Sequence[int] = ()) -> Samples:
    def inputs(rng: Rng) -> list[Any]:
        x = normal(rng, 1, 2, 7, 9)
        return [x, None, None, ints(*sizes)] if sizes else [x, None, np.array(scales, np.float32)]

    return each(inputs, *attrs)


_LINEAR, _CUBIC = {"mode": "linear"}, {"mode": "cubic"}

RESIZE: dict[str, Samples] = {
    "Resize": join(
        *(
            _resize(
                *(
                    {"coordinate_transformation_mode": c, **m}
                    for c in ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
                    for m in ({}, _LINEAR, _CUBIC)
                ),
                **where,
            )
            for where in ({"sizes": (1, 2, 14, 13)}, {"sizes": (1, 2, 3, 5)}, {"scales": (1, 1, 2, 3)})
        ),
        _resize(*({"nearest_mode": m} for m in ("floor", "ceil", "round_prefer_ceil")), sizes=(1, 2, 5, 20)),
        _resize(
            {**_CUBIC, "exclude_outside": 1},
            {**_LINEAR, "antialias": 1},
            {**_CUBIC, "antialias": 1},
            sizes=(1, 2, 4, 5),
        ),
        _resize(
            {"axes": (3, 2), **_LINEAR}, {"axes": (2, 3), "keep_aspect_ratio_policy": "not_larger"}, sizes=(14, 20)
        ),
    ),
    "GridSample": each(
        lambda rng: [normal(rng, 2, 3, 5, 6), uniform(rng, -1.3, 1.3, 2, 4, 7, 2)],
        *(
            {"mode": m, "padding_mode": p, "align_corners": a}
            for m in ("linear", "nearest", "cubic")
            for p in ("zeros", "border", "reflection")
            for a in (0, 1)
        ),
    ),
    "RoiAlign": each(
        lambda rng: [
            normal(rng, 2, 3, 9, 11),
            uniform(rng, 0, 4, 5, 4) + np.array([0, 0, 4, 4], np.float32),
            integers(rng, 0, 2, 5),
        ],
        {"output_height": 3, "output_width": 2, "sampling_ratio": 2},
        {"output_height": 2, "output_width": 2, "spatial_scale": 0.5},
        {"output_height": 2, "output_width": 3, "coordinate_transformation_mode": "output_half_pixel"},
        {"output_height": 2, "output_width": 2, "mode": "max", "sampling_ratio": 2},
    ),
    "AffineGrid": join(
        each(lambda rng: [normal(rng, 2, 2, 3), ints(2, 3, 4, 5)], {}, {"align_corners": 1}),
        each(lambda rng: [normal(rng, 2, 3, 4), ints(2, 3, 4, 5, 3)]),
    ),
}


# -- quantisation -----------------------------------------------------------------------------------------------------
def _bytes(rng: Rng, *shape: int, dtype: Any = np.uint8) -> Any:
    return integers(rng, np.iinfo(dtype).min, np.iinfo(dtype).max, *shape, dtype=dtype)


def _scale(rng: Rng, *shape: int) -> Any:
    return uniform(rng, 0.01, 0.1, *shape)


QUANTIZE: dict[str, Samples] = {
    "QuantizeLinear": join(
        over(
            (np.uint8, np.int8, np.uint16, np.int16), lambda rng, k: [normal(rng, 3, 4, 5), _scale(rng), scalar(3, k)]
        ),
        each(lambda rng: [normal(rng, 3, 4, 5), _scale(rng)], {}, {"output_dtype": 3}),
        each(lambda rng: [normal(rng, 3, 4, 5), _scale(rng, 4), _bytes(rng, 4)], {}),
        each(lambda rng: [normal(rng, 3, 4, 5), _scale(rng, 5), _bytes(rng, 5, dtype=np.int8)], {"axis": -1}),
        each(lambda rng: [normal(rng, 3, 8), _scale(rng, 3, 4), _bytes(rng, 3, 4)], {"axis": 1, "block_size": 2}),
    ),
    "DequantizeLinear": join(
        over((np.uint8, np.int8, np.int16), lambda rng, k: [_bytes(rng, 3, 4, 5, dtype=k), _scale(rng), scalar(3, k)]),
        each(lambda rng: [_bytes(rng, 3, 4, 5), _scale(rng, 4), _bytes(rng, 4)]),
        each(lambda rng: [integers(rng, -(1 << 20), 1 << 20, 3, 4, dtype=np.int32), _scale(rng, 4)]),
        each(lambda rng: [_bytes(rng, 3, 8), _scale(rng, 3, 4), _bytes(rng, 3, 4)], {"axis": 1, "block_size": 2}),
    ),
    "DynamicQuantizeLinear": join(
        over((0, 9, -9), lambda rng, o: [normal(rng, 3, 7) + np.float32(o)], outputs=3),
    ),
    "QLinearConv": join(
        each(
            lambda rng: [
                _bytes(rng, 1, 3, 7, 6),
                _scale(rng),
                scalar(120, np.uint8),
                _bytes(rng, 4, 3, 3, 3, dtype=np.int8),
                _scale(rng, 4),
                np.zeros(4, np.int8),
                uniform(rng, 1, 2),
                scalar(110, np.uint8),
                integers(rng, -999, 999, 4, dtype=np.int32),
            ],
            {"pads": (1, 1, 1, 1)},
            {"strides": (2, 2)},
        ),
        each(
            lambda rng: [
                _bytes(rng, 1, 3, 7, 6),
                _scale(rng),
                scalar(120, np.uint8),
                _bytes(rng, 4, 3, 3, 3),
                _scale(rng),
                scalar(100, np.uint8),
                uniform(rng, 1, 2),
                scalar(110, np.uint8),
            ],
        ),
    ),
    "QLinearMatMul": join(
        each(
            lambda rng: [
                _bytes(rng, 2, 5, 7),
                _scale(rng),
                scalar(120, np.uint8),
                _bytes(rng, 7, 3),
                _scale(rng),
                scalar(100, np.uint8),
                uniform(rng, 0.5, 1),
                scalar(110, np.uint8),
            ]
        ),
        each(
            lambda rng: [
                _bytes(rng, 5, 7),
                _scale(rng),
                scalar(120, np.uint8),
                _bytes(rng, 7, 3, dtype=np.int8),
                _scale(rng, 3),
                np.zeros(3, np.int8),
                uniform(rng, 0.5, 1),
                scalar(110, np.uint8),
            ]
        ),
    ),
    "MatMulInteger": join(
        each(lambda rng: [_bytes(rng, 5, 700), _bytes(rng, 700, 3), scalar(120, np.uint8), scalar(100, np.uint8)]),
        each(
            lambda rng: [
                _bytes(rng, 2, 5, 7),
                _bytes(rng, 7, 3, dtype=np.int8),
                scalar(9, np.uint8),
                _bytes(rng, 3, dtype=np.int8),
            ]
        ),
        each(lambda rng: [_bytes(rng, 5, 7), _bytes(rng, 7, 3)]),
    ),
}
