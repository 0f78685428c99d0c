"""Products with weights of a few bits: every kernel against the reference."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tunewright.ir.graph import Fused
from tunewright.testing.kernelcheck import Case, check

OP = "com.microsoft::MatMulNBits"


def case(
    shape: tuple[int, ...], columns: int, block: int, bits: int, zeros: str = "", bias: bool = False,
    dtype: Any = np.float32, epilogue: tuple[Fused, ...] = (), operands: tuple[np.ndarray, ...] = (),
) -> Case:  # fmt: skip
    rng = np.random.default_rng(0)
    depth = shape[-1]
    blocks = -(-depth // block)

    def floats(*dims: int) -> np.ndarray:
        return rng.standard_normal(dims).astype(dtype)

    packed = rng.integers(0, 256, (columns, blocks, block * bits // 8)).astype(np.uint8)
    scales = (np.abs(rng.standard_normal((columns, blocks))) * 0.1).astype(dtype)
    zero = {
        "": None, "bytes": rng.integers(0, 256, (columns, -(-blocks * bits // 8))).astype(np.uint8),
        "floats": (rng.standard_normal((columns, blocks)) + (1 << bits - 1)).astype(dtype),
    }[zeros]  # fmt: skip
    inputs = [floats(*shape), packed, scales, zero, None, floats(columns) if bias else None, *operands]
    attrs = {"N": columns, "K": depth, "block_size": block, "bits": bits}
    return Case(OP, inputs, attrs, constant=frozenset({1, 2, 3, 5}), epilogue=epilogue, operands=len(operands))


def ones(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


CASES = {
    f"{bits} bits, {zeros or 'centre'}, {rows} rows": case((rows, 96), 70, 32, bits, zeros)
    for bits in (2, 4, 8) for zeros in ("", "bytes", "floats") for rows in (1, 3, 9)
} | {
    "one column": case((1, 64), 1, 16, 4),
    "depth that fills no block": case((2, 3, 77), 33, 16, 4, "bytes", True),
    "two bits, depth that fills no block": case((5, 50), 17, 32, 2, "bytes"),
    "one block": case((4, 128), 40, 128, 4),
    "large blocks": case((2, 512), 100, 256, 8, "bytes"),
    "many columns": case((1, 256), 1000, 32, 4),
    "many rows": case((130, 256), 200, 64, 4, "bytes", True),
    "halves": case((3, 160), 90, 32, 4, "floats", True, np.float16),
    "brain floats": case((1, 160), 90, 32, 4, "bytes", True, ml_dtypes.bfloat16),
    "epilogue": case(
        (7, 64), 48, 32, 4, "", True, epilogue=(Fused("Add", (~0, 6)), Fused("Relu", (~1,))), operands=(ones(7, 48),)
    ),
    "no rows": case((0, 64), 48, 32, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_kernel(name: str) -> None:
    assert check(CASES[name], "opencl.matmul_nbits") == []


@pytest.mark.parametrize(("change", "reason"), [("groups", "g_idx"), ("bits", "3 bits")])
def test_refusals(change: str, reason: str) -> None:
    one = case((2, 64), 8, 32, 4)
    inputs, attrs = list(one.inputs), dict(one.attrs)
    if change == "groups":
        inputs[4] = (np.arange(64) // 32).astype(np.int32)
    else:
        attrs["bits"], inputs[1] = 3, np.zeros((8, 2, 12), np.uint8)
    changed = Case(OP, inputs, attrs, constant=one.constant | {4})
    assert any(reason in line for line in check(changed, "opencl.matmul_nbits"))
