"""Weights in halves beside activations in single precision: what passes make of products in half networks.

ONNX wants both operands of a product in one type. Products of a network that was widened (`passes/placement/widen.py`)
read their weights as the file has them, which matters where there are few rows.
"""

from __future__ import annotations

from tunewright.ir.types import DType

HALVES = frozenset({DType.FLOAT16, DType.BFLOAT16})
#: products whose second operand may be such weights
PRODUCTS = frozenset({"MatMul", "Gemm", "com.microsoft::FusedMatMul"})


def is_half_of(weights: DType | None, x: DType | None) -> bool:
    """Whether weights of that type stand beside activations of wider ones, ``x``."""
    return x is DType.FLOAT32 and weights in HALVES
