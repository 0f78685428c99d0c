"""MatMul, Gemm and Einsum. Floats of fewer than 32 bits are summed in float32. Integers are summed exactly, then
wrapped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunewright.ir.symbolic import WHOLE
from tunewright.ir.types import Dim, DType, Shape, TensorType, Type
from tunewright.ops import batch_rules

from .. import shapes
from ..base import Array, Attrs, Operands, OpSpec
from ..internal.half_weights import is_half_of
from ..numeric import integer_matmul, narrow, wide
from ..samples import dense
from ..samples.base import with_samples


def matmul(a: Array, b: Array) -> Array:
    """numpy's matmul in the accumulation type."""
    if a.dtype.kind in "iu":
        return narrow(integer_matmul(a, b), a.dtype)
    return np.asarray(np.matmul(wide(a), wide(b)))


def _matmul(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    return [narrow(matmul(inputs[0], inputs[1]), inputs[0].dtype)]


def matmul_shape(a: Shape | None, b: Shape | None) -> Shape | None:
    """The shape of numpy's matmul. Raises when the shapes do not match."""
    if a is None or b is None:
        return None
    if not a or not b:
        raise ValueError("a matrix product needs operands of rank 1 at least")
    left, right = a if len(a) > 1 else (1, *a), b if len(b) > 1 else (*b, 1)
    shapes.same_dim(left[-1], right[-2], f"{_text(a)} and {_text(b)} do not fit a matrix product")
    batch = shapes.broadcast(left[:-2], right[:-2])
    assert batch is not None
    return (*batch, *(left[-2:-1] if len(a) > 1 else ()), *(right[-1:] if len(b) > 1 else ()))


def _check_types(a: DType, b: DType) -> None:
    """Check that both types are equal, or that the second is that of weights that passes left in half precision."""
    if a is not b and not is_half_of(b, a):
        raise ValueError(f"inputs differ in type: {a} and {b}")


def _text(shape: Shape) -> str:
    return "[" + ", ".join("?" if d is None else str(d) for d in shape) + "]"


def _infer_matmul(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    a, b = shapes.tensor(operands, 0), shapes.tensor(operands, 1)
    _check_types(a.dtype, b.dtype)
    return [TensorType(a.dtype, matmul_shape(a.shape, b.shape))]


def matmul_flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    """Count a multiply and an add per output element and step of the sum."""
    a = inputs[0]
    assert a is not None
    return 2.0 * outputs[0].size * a.dims[-1]


# -- Gemm -------------------------------------------------------------------------------------------------------------
def _gemm(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    a, b, c = inputs[0], inputs[1], shapes.optional(inputs, 2)
    dtype = a.dtype
    a, b = a.T if attrs.get("transA", 0) else a, b.T if attrs.get("transB", 0) else b
    y = matmul(a, b)
    alpha, beta = attrs.get("alpha", 1.0), attrs.get("beta", 1.0)
    if alpha != 1:
        y = y * alpha if y.dtype.kind != "f" else y * y.dtype.type(alpha)
    if c is not None and beta != 0:
        c = wide(c)
        if beta != 1:
            c = c * beta if c.dtype.kind != "f" else c * c.dtype.type(beta)
        y = y + c
    return [narrow(y, dtype)]


def _infer_gemm(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    a, b = shapes.tensor(operands, 0), shapes.tensor(operands, 1)
    _check_types(a.dtype, b.dtype)
    left, right = shapes.need_rank(a, 2, "input 0"), shapes.need_rank(b, 2, "input 1")
    left, right = left[::-1] if attrs.get("transA", 0) else left, right[::-1] if attrs.get("transB", 0) else right
    shapes.same_dim(left[1], right[0], f"{_text(left)} and {_text(right)} do not fit a matrix product")
    shape = (left[0], right[1])
    if shapes.given(operands, 2):
        c = shapes.tensor(operands, 2).shape
        if c is not None and len(c) > 2:
            raise ValueError(f"input 2 has rank {len(c)}")
        shapes.broadcast(shape, c)  # raises when it does not fit
    return [TensorType(a.dtype, shape)]


def _gemm_flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    a = inputs[0]
    assert a is not None
    return 2.0 * outputs[0].size * a.dims[0 if attrs.get("transA", 0) else 1]


# -- Einsum -----------------------------------------------------------------------------------------------------------
def einsum_terms(equation: str, count: int) -> tuple[list[str], str | None]:
    """The terms of the inputs, and the term of the output where the equation has one."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != count:
        raise ValueError(f"equation {equation!r} has {len(terms)} terms for {count} inputs")
    return terms, right if arrow else None


def _einsum(inputs: Sequence[Any], attrs: Attrs, n: int) -> Sequence[Array]:
    dtype = inputs[0].dtype
    y = np.einsum(attrs["equation"].replace(" ", ""), *(wide(x) for x in inputs), optimize=len(inputs) > 1)
    y = narrow(y, dtype)
    return [y.copy() if y.base is not None else y]


def _infer_einsum(operands: Operands, attrs: Attrs, n: int) -> Sequence[Type | None]:
    types = [shapes.tensor(operands, i) for i in range(len(operands))]
    terms, output = einsum_terms(str(attrs.get("equation", "")), len(types))
    if any(t.shape is None for t in types):
        known = output is not None and "..." not in output
        return [TensorType(types[0].dtype, shapes.unknown(len(output)) if known and output is not None else None)]
    sizes: dict[str, Dim] = {}
    spread: Shape | None = ()
    for term, t in zip(terms, types, strict=True):
        assert t.shape is not None
        spread = shapes.broadcast(spread, _label(term, t.shape, sizes))
    if output is None:
        letters = "".join(terms).replace(".", "")
        output = "..." + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    result: list[Dim] = []
    before, dots, after = output.partition("...")
    for c in before + after:
        if c not in sizes:
            raise ValueError(f"{c!r} of the result {output!r} stands in no input")
    result = [sizes[c] for c in before] + list(spread if dots and spread else ()) + [sizes[c] for c in after]
    return [TensorType(types[0].dtype, tuple(result))]


def _label(term: str, shape: Shape, sizes: dict[str, Dim]) -> Shape:
    """Record the size of every letter in ``sizes``. Returns the dimensions that the ellipsis stands for."""
    before, dots, after = term.partition("...")
    letters = len(before) + len(after)
    if letters > len(shape) or (not dots and letters != len(shape)):
        raise ValueError(f"term {term!r} does not fit rank {len(shape)}")
    end = len(shape) - len(after)
    for c, d in [*zip(before, shape, strict=False), *zip(after, shape[end:], strict=True)]:
        old = sizes.get(c)
        if c in sizes and 1 in (old, d):
            sizes[c] = d if old == 1 else old  # numpy lets ones broadcast
        else:
            sizes[c] = shapes.same_dim(old, d, f"{c!r} stands for two sizes")
    return shape[len(before) : end]


def _einsum_flops(inputs: Sequence[TensorType | None], outputs: Sequence[TensorType], attrs: Attrs) -> float:
    """Count a multiply and an add per point of the space of all letters. Pairwise products need no more."""
    terms, _ = einsum_terms(str(attrs["equation"]), len(inputs))
    sizes: dict[str, Dim] = {}
    spread: Shape | None = ()
    for term, t in zip(terms, inputs, strict=True):
        assert t is not None and t.shape is not None
        spread = shapes.broadcast(spread, _label(term, t.shape, sizes))
    return 2.0 * math.prod(d for d in [*sizes.values(), *(spread or ())] if isinstance(d, WHOLE))


OPS = with_samples(
    (
        OpSpec(
            "MatMul",
            _matmul,
            _infer_matmul,
            flops=matmul_flops,
            heavy=True,
            batch=batch_rules.product(0, 1),
            roles=("a", "b"),
        ),
        OpSpec(
            "Gemm", _gemm, _infer_gemm, flops=_gemm_flops, heavy=True, batch=batch_rules.gemm, roles=("a", "b", "c")
        ),
        OpSpec("Einsum", _einsum, _infer_einsum, flops=_einsum_flops, heavy=True),
    ),
    dense.MATMUL,
)
