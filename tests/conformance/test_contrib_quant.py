"""com.microsoft quantised operators against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance.ort_oracle import Case, check, ids, random_arrays, supported

rng, f, _ = random_arrays(2)


def u8(*shape: int) -> np.ndarray:
    return rng.integers(0, 256, shape).astype(np.uint8)


def i8(*shape: int) -> np.ndarray:
    return rng.integers(-128, 128, shape).astype(np.int8)


def i16(*shape: int) -> np.ndarray:
    return rng.integers(-30000, 30000, shape).astype(np.int16)


def i32(*shape: int) -> np.ndarray:
    return rng.integers(-999, 999, shape).astype(np.int32)


def s(value: float) -> np.ndarray:
    return np.array(value, np.float32)


def uz(value: Any) -> np.ndarray:
    return np.array(value, np.uint8)


def iz(value: Any) -> np.ndarray:
    return np.array(value, np.int8)


def positive(n: int) -> np.ndarray:
    return np.abs(f(n)) * s(0.01)


POINTWISE = []
for name in ("QLinearAdd", "QLinearMul"):
    POINTWISE += [
        Case(name, [u8(9, 3, 50), s(0.02), uz(100), u8(9, 3, 50), s(0.013), uz(120), s(0.03), uz(90)]),
        Case(name, [i8(9, 3, 50), s(0.02), iz(10), i8(50), s(0.02), iz(-12), s(0.02), iz(9)]),
        Case(name, [u8(9, 1, 50), s(0.02), uz(0), u8(3, 1), s(0.013), uz(255), s(0.3), uz(3)]),
    ]
for name, attrs in (("QLinearSigmoid", {}), ("QLinearLeakyRelu", {"alpha": 0.2})):
    POINTWISE += [
        Case(name, [u8(3, 90), s(0.02), uz(100), s(0.004), uz(3)], attrs),
        Case(name, [i8(3, 90), s(0.02), iz(1), s(0.004), iz(3)], attrs, constants=(1, 2, 3, 4)),
        Case(name, [u8(3, 90), s(0.02), None, s(0.004), uz(9)], attrs),
    ]
POINTWISE += [
    Case("QLinearConcat", [s(0.02), uz(3), u8(2, 3), s(0.02), uz(3), u8(2, 5), s(0.03), uz(7)], {"axis": 1}),
    Case(
        "QLinearConcat",
        [s(0.02), iz(3), i8(2, 3), s(0.015), iz(3), i8(4, 3), s(0.03), iz(-7)],
        {"axis": 0},
        constants=(0, 1, 3, 4, 6, 7),
    ),
    Case(
        "QLinearWhere",
        [rng.random((3, 1, 4)) > 0.5, u8(2, 4), s(0.02), uz(3), u8(1), s(0.03), uz(5), s(0.025), uz(9)],
        constants=(2, 3, 5, 6, 7, 8),
    ),
    Case(
        "QLinearWhere",
        [rng.random((3, 4)) > 0.5, i8(3, 4), s(0.02), iz(3), i8(3, 4), s(0.03), iz(5), s(0.025), iz(9)],
    ),
    Case("QLinearSoftmax", [u8(4, 3, 90), s(0.1), uz(100), s(0.003), uz(0)], {"axis": -1, "opset": 13}),
    Case("QLinearSoftmax", [u8(4, 3, 30), s(0.1), uz(100), s(1 / 256), uz(0)], {"axis": 1, "opset": 12}),
    Case(
        "QLinearSoftmax",
        [i8(4, 30, 9), s(0.1), iz(10), s(1 / 256), iz(-128)],
        {"axis": 1, "opset": 13},
        constants=(1, 2, 3, 4),
    ),
]

POOLS = [
    Case(
        "QLinearAveragePool",
        [u8(2, 3, 9, 8), s(0.02), uz(100), s(0.015), uz(90)],
        {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 1]},
    ),
    Case(
        "QLinearAveragePool",
        [i8(2, 9, 8, 3), s(0.02), iz(10), s(0.015), iz(9)],
        {"kernel_shape": [3, 3], "channels_last": 1, "pads": [1, 1, 1, 1], "count_include_pad": 1},
    ),
    Case(
        "QLinearAveragePool",
        [u8(2, 3, 9), s(0.02), uz(2), s(0.015), uz(3)],
        {"kernel_shape": [3], "ceil_mode": 1, "strides": [2]},
    ),
    Case("QLinearGlobalAveragePool", [u8(2, 30, 9, 8), s(0.02), uz(100), s(0.015), uz(90)]),
    Case("QLinearGlobalAveragePool", [u8(2, 30, 2, 2), s(0.02), uz(100), s(0.02), uz(90)]),
    Case("QLinearGlobalAveragePool", [i8(2, 9, 8, 30), s(0.02), iz(0), s(0.015), iz(9)], {"channels_last": 1}),
]

CONVERSIONS = [
    Case("QuantizeLinear", [f(3, 40), s(0.02), uz(100)]),
    Case("QuantizeLinear", [f(3, 4), np.abs(f(4)), iz([1, 2, 3, 4])], {"axis": 1}),
    Case("QuantizeLinear", [f(3, 4) * 100, s(0.002), np.array(100, np.uint16)]),
    Case("QuantizeLinear", [f(3, 4) * 100, s(0.002), np.array(100, np.int16)]),
    Case("DequantizeLinear", [u8(3, 4), s(0.02), uz(100)]),
    Case("DequantizeLinear", [i8(3, 4), np.abs(f(3)), iz([1, 2, 3])], {"axis": 0}),
    Case("DequantizeLinear", [rng.integers(-(2**30), 2**30, (3, 4)).astype(np.int32), s(0.02)]),
    Case("DequantizeLinear", [i16(3, 4), s(0.02), np.array(5, np.int16)]),
    Case(
        "DequantizeLinear",
        [rng.integers(-8, 8, (3, 4)).astype(ml_dtypes.int4), s(0.02), np.array(3, ml_dtypes.int4)],
        constants=(0, 2),
    ),
]

PRODUCTS = []
for draw, zero in ((u8, uz), (i8, iz)):
    for last in (0, 1):
        x = draw(2, 9, 8, 4) if last else draw(2, 4, 9, 8)
        PRODUCTS += [
            Case(
                "QLinearConv",
                [x, s(0.02), zero(10), i8(6, 4, 3, 3), s(0.01), iz(0), s(0.2), zero(20), i32(6)],
                {"channels_last": last, "pads": [1, 1, 1, 1]},
                constants=(3, 4, 5),
            ),
            Case(
                "QLinearConv",
                [x, s(0.02), zero(10), i8(6, 2, 3, 2), positive(6), iz([0] * 6), s(0.2), zero(20)],
                {"channels_last": last, "group": 2, "strides": [2, 1]},
                constants=(3, 4, 5),
            ),
        ]
PRODUCTS += [
    Case("QGemm", [u8(5, 7), s(0.02), uz(100), u8(7, 6), s(0.01), uz(120), i32(6), s(0.1), uz(30)]),
    Case(
        "QGemm",
        [i8(7, 5), s(0.02), iz(10), i8(6, 7), positive(6), iz([1, 2, 3, 4, 5, 6])],
        {"transA": 1, "transB": 1, "alpha": 0.7},
    ),
    Case("QGemm", [u8(5, 7), s(0.02), uz(100), i8(6, 7), s(0.01), iz(3), i32(5, 6)], {"transB": 1}),
    Case(
        "QGemm",
        [u8(5, 7), s(0.02), uz(100), i8(7, 6), positive(6), iz([0] * 6), None, s(0.1), uz(30)],
        constants=(3, 4, 5),
    ),
    Case("MatMulIntegerToFloat", [u8(2, 5, 7), u8(7, 6), s(0.02), s(0.01), uz(3), uz(120), f(6)]),
    Case(
        "MatMulIntegerToFloat",
        [u8(2, 5, 7), i8(7, 6), s(0.02), positive(6), uz(3), iz([1, 2, 3, 4, 5, 6])],
        constants=(1,),
    ),
    Case("MatMulIntegerToFloat", [i8(2, 5, 7), i8(2, 7, 6), s(0.02), s(0.03)]),
    Case("DynamicQuantizeMatMul", [f(2, 5, 7), u8(7, 6), s(0.01), uz(120), f(6)]),
    Case("DynamicQuantizeMatMul", [f(5, 7), i8(7, 6), positive(6), iz([1, 2, 3, 4, 5, 6])], constants=(1,)),
    Case("DynamicQuantizeMatMul", [f(2, 5, 7), i8(7, 6), s(0.01)]),
    Case("MatMulInteger16", [i16(3, 5, 7) // 10, i16(7, 4) // 10]),
]


def n_bits(
    rows: int, depth: int, block: int, bits: int, zeros: str = "", bias: bool = False, dtype: Any = np.float32,
    grouped: bool = False,
) -> Case:  # fmt: skip
    """Weights in blocks; zero points packed ("bytes"), in the activation's type ("float"), or the default."""
    blocks = -(-depth // block)
    zero = {"": None, "bytes": u8(rows, -(-blocks * bits // 8)), "float": (f(rows, blocks) + 8).astype(dtype)}[zeros]
    groups = (np.arange(depth) // block).astype(np.int32)[::-1].copy() if grouped else None
    weights = [u8(rows, blocks, block * bits // 8), (np.abs(f(rows, blocks)) * s(0.1)).astype(dtype), zero, groups]
    inputs = [f(3, 2, depth).astype(dtype), *weights, f(rows).astype(dtype) if bias else None]
    attrs = {"N": rows, "K": depth, "block_size": block, "bits": bits}
    return Case("MatMulNBits", inputs, attrs, constants=(1, 2, 3, 4, 5))


def gather(data: np.ndarray, indices: np.ndarray, scales: np.ndarray, zeros: Any = None, **attrs: Any) -> Case:
    attrs = {"block_size": 16, **attrs}
    return Case("GatherBlockQuantized", [data, indices, scales, zeros], attrs, constants=(0, 2, 3))


def four_bits(dtype: Any, *shape: int) -> np.ndarray:
    low = -8 if dtype is ml_dtypes.int4 else 0
    return rng.integers(low, low + 16, shape).astype(dtype)


def rows(high: int, *shape: int) -> np.ndarray:
    return rng.integers(0, high, shape)


BITS = [
    n_bits(6, 32, 16, 4),
    n_bits(7, 40, 16, 4, "bytes"),
    n_bits(7, 40, 32, 4, "float", bias=True),
    n_bits(7, 100, 64, 8, "bytes", bias=True),
    n_bits(8, 64, 32, 8),
    n_bits(8, 64, 32, 2, "bytes"),
    n_bits(6, 48, 16, 4, grouped=True),
    n_bits(6, 48, 16, 4, "bytes", dtype=np.float16),
    *(
        Case(
            "MatMulBnb4",
            [f(3, 20), u8(60), np.abs(f(8))],
            {"N": 6, "K": 20, "block_size": 16, "quant_type": kind},
            constants=(1, 2),
        )
        for kind in (0, 1)
    ),
    gather(four_bits(ml_dtypes.int4, 9, 40), rows(9, 2, 3), f(9, 3)),
    gather(four_bits(ml_dtypes.uint4, 9, 40), rows(9, 2, 3), f(9, 3), four_bits(ml_dtypes.uint4, 9, 3)),
    gather(u8(9, 20), rows(9, 2, 3).astype(np.int32), f(9, 3), bits=4),
    gather(u8(9, 20), rows(9, 2, 3), f(9, 3), u8(9, 2), bits=4),
    gather(u8(9, 40), rows(9, 2) - 4, f(9, 3), u8(9, 3), bits=8),
    gather(four_bits(ml_dtypes.int4, 20, 9, 5), rows(9, 2, 3), f(2, 9, 5), gather_axis=1, quantize_axis=0),
    gather(four_bits(ml_dtypes.int4, 9, 20, 5), rows(5, 2), f(9, 2, 5).astype(np.float16), gather_axis=-1),
]


def lstm(
    direction: str = "forward", draw: Any = u8, per_channel: bool = False, bias: bool = True, lengths: Any = None,
    initial: bool = True, peepholes: bool = False, **attrs: Any,
) -> Case:  # fmt: skip
    count, steps, batch, width, size = 2 if direction == "bidirectional" else 1, 6, 3, 5, 4
    shape = (count, 4 * size) if per_channel else (count,)
    low, high = (0, 1) if per_channel else (100, 140) if draw is u8 else (-5, 5)

    def parameters() -> list[np.ndarray]:
        zero = rng.integers(low, high, shape).astype(draw(1).dtype)
        return [np.abs(f(*shape)) * s(0.01), zero]

    inputs = [
        f(steps, batch, width), draw(count, width, 4 * size), draw(count, size, 4 * size),
        f(count, 8 * size) if bias else None, None if lengths is None else np.array(lengths, np.int32),
        f(count, batch, size) if initial else None, f(count, batch, size) if initial else None,
        f(count, 3 * size) if peepholes else None, *parameters(), *parameters(),
    ]  # fmt: skip
    return Case("DynamicQuantizeLSTM", inputs, {"direction": direction, "hidden_size": size, **attrs}, outputs=3)


RECURRENT = [
    lstm(),
    lstm("bidirectional"),
    lstm("reverse", bias=False, initial=False),
    lstm(draw=i8, per_channel=True),
    lstm(peepholes=True, clip=0.7),
    lstm(lengths=[6, 2, 4]),
    lstm("bidirectional", draw=i8, lengths=[5, 2, 4]),
    lstm(input_forget=1),
    lstm(activations=["HardSigmoid", "Relu", "Tanh"], activation_alpha=[0.3], activation_beta=[0.4]),
]

CASES = [*POINTWISE, *POOLS, *CONVERSIONS, *PRODUCTS, *BITS, *RECURRENT]


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_like_onnx_runtime(case: Case) -> None:
    supported(case)
    check(case)
