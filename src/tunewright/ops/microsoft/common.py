"""Helpers of the com.microsoft families: standard operators by name, wider arithmetic, activations, quantisation.

ONNX Runtime is the oracle of these operators. Many of them extend a standard operator. Those call the standard
definition, which they look up at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import Dim, Shape, TensorType, Type

from .. import lookup
from ..base import Array, Attrs, Flops, Infer, Operand, Operands, OpSpec, Reference
from ..batch_rules import BatchRule
from ..numeric import erf, limits, sigmoid
from ..shapes import need_rank, tensor

MS = "com.microsoft::"


def spec(op: str) -> OpSpec:
    """The definition of a standard operator."""
    found = lookup(op)
    assert found is not None, op
    return found


def run(op: str, inputs: Sequence[Any], attrs: Attrs | None = None) -> Array:
    """The first result of a standard operator."""
    return np.asarray(spec(op).reference(inputs, attrs or {}, 1)[0])


def infer(op: str, operands: Operands, attrs: Attrs) -> TensorType:
    """The type of a standard operator's first result."""
    found = spec(op).infer(operands, attrs, 1)[0]
    if not isinstance(found, TensorType):
        raise ValueError(f"the type of its {op} is not known")
    return found


def without(attrs: Attrs, *keys: str) -> dict[str, Any]:
    return {k: v for k, v in attrs.items() if k not in keys}


def gelu(x: Array) -> Array:
    """GELU, exact form."""
    return np.asarray(0.5 * x * (1 + erf(np.asarray(x * x.dtype.type(np.sqrt(0.5))))), x.dtype)


def fast_gelu(x: Array) -> Array:
    """GELU, tanh approximation."""
    return np.asarray(0.5 * x * (1 + np.tanh(x * (0.7978845608028654 + 0.035677408136300125 * x * x))), x.dtype)


#: activations whose parameters ONNX Runtime keeps in a list -> the operator's attribute names
PARAMETERS = {
    "LeakyRelu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "ThresholdedRelu": ("alpha",),
    "Elu": ("alpha",),
}


def activate(name: str, x: Array, params: Sequence[float] = (), attrs: Attrs | None = None) -> Array:
    """Apply an activation by its operator name, with parameters in order or by name. No name is the identity."""
    if not name:
        return x
    if name == "Relu":
        return np.asarray(np.maximum(x, x.dtype.type(0)))
    if name == "Sigmoid":
        return sigmoid(x)
    if name == "Tanh":
        return np.tanh(x)
    if name == "Clip":
        low, high = params
        return np.clip(x, x.dtype.type(low), x.dtype.type(high))
    if lookup(name) is None:
        raise ValueError(f"activation {name!r} is not known")
    given = dict(zip(PARAMETERS.get(name, ()), params, strict=False)) if params else dict(attrs or {})
    return run(name, [x], given).astype(x.dtype, copy=False)


def heavy(
    name: str, reference: Reference, infer: Infer, flops: Flops, batch: BatchRule | None = None, steep: bool = False
) -> OpSpec:  # fmt: skip
    """The spec of an operator that is worth a kernel of its own."""
    return OpSpec(MS + name, reference, infer, flops=flops, heavy=True, batch=batch, steep=steep)


def product_flops(k_input: int, k_axis: int) -> Flops:
    """Count two flops per output element and step of the sum. A dimension of one input gives the sum's length."""

    def flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
        t = inputs[k_input]
        return 2.0 * outputs[0].size * (t.dims[k_axis] if t is not None and t.dims else 1)

    return flops


def dequantize(x: Array, scale: Array, zero: Array | None, axis: int | None = None) -> Array:
    """(x - zero) * scale in float32, per tensor or per entry of ``axis``."""
    shifted = x.astype(np.int32)
    if zero is not None:
        shifted = shifted - along(zero, x.ndim, axis).astype(np.int32)
    return np.asarray(shifted.astype(np.float32) * along(scale, x.ndim, axis).astype(np.float32))


def quantize(x: Array, scale: Array, zero: Array | None, dtype: Any = None, axis: int | None = None) -> Array:
    """round(x / scale) + zero, ties to even, saturated."""
    dtype = np.dtype(dtype) if zero is None else zero.dtype
    shift = None if zero is None else along(zero, x.ndim, axis)
    return saturate(np.rint(x / along(scale, x.ndim, axis)), shift, dtype)


def saturate(x: Array, zero: Array | None, dtype: Any) -> Array:
    """x + zero as ``dtype``. NaN becomes the lowest value."""
    low, high = limits(np.dtype(dtype))
    shift = np.float32(0) if zero is None else zero.astype(np.float32)
    return np.asarray(np.clip(np.nan_to_num(x, nan=low) + shift, low, high)).astype(dtype)


def along(p: Array, rank: int, axis: int | None) -> Array:
    """Reshape a parameter so that it broadcasts: one number, or one per entry of ``axis``."""
    if p.size == 1:
        return p.reshape(())
    if axis is None:
        return p
    shape = [1] * rank
    shape[axis] = p.size
    return p.reshape(shape)


def dynamic_quantize(x: Array) -> tuple[Array, np.float32, np.uint8]:
    """x as uint8 over its own range, with scale and zero point, as DynamicQuantizeLinear computes it."""
    low = np.float32(min(0.0, x.min(initial=0.0)))
    high = np.float32(max(0.0, x.max(initial=0.0)))
    scale = np.float32((high - low) / np.float32(255)) if high != low else np.float32(1)
    zero = np.uint8(np.clip(np.rint(-low / scale), 0, 255))
    return saturate(np.rint(x / scale), np.asarray(zero), np.uint8), scale, zero


def permuted(t: TensorType, order: Callable[[int], Sequence[int]]) -> TensorType:
    """The type of a transposed tensor. ``order`` returns the permutation for a rank."""
    return t if t.shape is None else t.with_shape(tuple(t.shape[i] for i in order(len(t.shape))))


def to_first(rank: int) -> list[int]:
    """The permutation from channels last to channels first."""
    return [0, rank - 1, *range(1, rank - 1)]


def to_last(rank: int) -> list[int]:
    """The permutation from channels first to channels last."""
    return [0, *range(2, rank), 1]


def retyped(operands: Operands, i: int, t: Type) -> list[Operand | None]:
    """The operands with another type for input i. The value of that input is then unknown."""
    return [Operand(t) if k == i else o for k, o in enumerate(operands)]


def dims(operands: Operands, i: int, rank: int | None = None) -> Shape:
    """The shape of input i, with all dimensions unknown when the rank is unknown. A wrong rank is an error of the
    model."""
    t = tensor(operands, i)
    return need_rank(t, rank, f"input {i}") if rank is not None else t.shape or ()


def plus(a: Dim, b: Dim) -> Dim:
    if a == 0:
        return b
    if b == 0:
        return a
    return a + b if isinstance(a, WHOLE) and isinstance(b, WHOLE) else None


def part(a: Dim, b: Dim, what: str) -> Dim:
    """a / b. ValueError unless it is a whole number."""
    if not (isinstance(a, WHOLE) and isinstance(b, WHOLE)):
        return None
    if b <= 0 or a % b:
        raise ValueError(f"{what}: {a} is not a multiple of {b}")
    return a // b
