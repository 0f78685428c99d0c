"""Products with weights of a few bits: every kernel against the reference."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import helper, numpy_helper

import tunewright
from tunewright.ir.graph import Fused
from tunewright.ops import lookup
from tunewright.ops.tolerance import compare
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


def test_any_number_of_rows_with_one_plan() -> None:
    """The number of rows is open: the plan for a class of shapes serves every length."""
    one = case((1, 64), 40, 32, 4, "bytes", True)
    weights = [numpy_helper.from_array(a, n) for n, a in zip("wszb", (*one.inputs[1:4], one.inputs[5]), strict=True)]
    node = helper.make_node("MatMulNBits", ["x", "w", "s", "z", "", "b"], ["y"], domain="com.microsoft", **one.attrs)
    sides = [helper.make_tensor_value_info(n, 1, ["N", d]) for n, d in (("x", 64), ("y", 40))]
    graph = helper.make_graph([node], "g", sides[:1], sides[1:], weights)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    compiled = tunewright.Core().compile_model(helper.make_model(graph, opset_imports=opsets, ir_version=10), "CPU")
    for rows in (3, 1, 50, 4, 7):
        x = np.random.default_rng(rows).standard_normal((rows, 64)).astype(np.float32)
        spec = lookup(OP)
        assert spec is not None
        (want,) = spec.reference([x, *one.inputs[1:]], one.attrs, 1)
        assert not compare(compiled({"x": x})["y"], np.asarray(want), terms=64), rows
