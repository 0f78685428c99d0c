"""Products with half-precision weights and single-precision activations, which passes make in half networks.

ONNX requires one type for both operands of a product. In a widened network (`passes/placement/widen.py`) the products
read the weights in the type of the file. This matters where there are few rows.
"""

from __future__ import annotations

from tunewright.ir.types import DType

HALVES = frozenset({DType.FLOAT16, DType.BFLOAT16})
#: products whose second operand may be half-precision weights
PRODUCTS = frozenset({"MatMul", "Gemm", "com.microsoft::FusedMatMul"})


def is_half_of(weights: DType | None, x: DType | None) -> bool:
    """Whether ``weights`` is half precision where the activations ``x`` are float32."""
    return x is DType.FLOAT32 and weights in HALVES
