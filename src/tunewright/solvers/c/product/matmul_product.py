"""A matrix product in canonical form: MatMul, Gemm and FusedMatMul as sizes and strides."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tunewright.ir.symbolic import greater
from tunewright.ir.types import DType, TensorType
from tunewright.ops.internal.half_weights import is_half_of
from tunewright.solvers.base import Problem, tensor

from ..source.emit import COMPUTE

MS = "com.microsoft::"
FUSED = frozenset({MS + "FusedMatMul", MS + "TransposeMatMul"})
OPS = frozenset({"MatMul", "Gemm"}) | FUSED

#: Integers are summed as unsigned integers, which wrap; the low bits of a sum of products are the same.
SUM = {
    DType.FLOAT32: DType.FLOAT32, DType.FLOAT16: DType.FLOAT32, DType.BFLOAT16: DType.FLOAT32,
    DType.FLOAT64: DType.FLOAT64, DType.INT64: DType.UINT64, DType.UINT64: DType.UINT64,
} | dict.fromkeys(
    (DType.INT8, DType.UINT8, DType.INT16, DType.UINT16, DType.INT32, DType.UINT32), DType.UINT32
)  # fmt: skip


@dataclass(frozen=True)
class Matrix:
    """One operand: its input number, and the strides of its two dimensions, in elements."""

    index: int
    row: int
    column: int

    @property
    def transposed(self) -> Matrix:
        return Matrix(self.index, self.column, self.row)


@dataclass(frozen=True)
class BatchAxis:
    """A dimension of the batch: its size, and the strides of both operands along it (0: broadcast)."""

    size: int
    a: int
    b: int


@dataclass(frozen=True)
class MatrixProduct:
    """y[.., m, n] = alpha * sum over k of a[.., m, k] * b[.., k, n] + beta * c[m, n]; y is contiguous."""

    m: int
    n: int
    k: int
    a: Matrix
    b: Matrix
    batch: tuple[BatchAxis, ...]
    alpha: float = 1.0
    beta: float = 0.0
    #: the addend; where it is broadcast its stride is 0
    c: Matrix | None = None

    @property
    def count(self) -> int:
        """The number of products in the batch."""
        found = 1
        for dim in self.batch:
            found *= dim.size
        return found

    @property
    def flops(self) -> float:
        return 2.0 * self.count * self.m * self.n * self.k


def summed(problem: Problem) -> DType:
    """The type in which products are summed."""
    return SUM[tensor(problem.inputs[0]).dtype]


def is_narrow(problem: Problem) -> bool:
    """Whether the stored elements have fewer bits than the type in which they are summed."""
    given = tensor(problem.inputs[0]).dtype
    return given.itemsize < summed(problem).itemsize


def stored(problem: Problem) -> DType | None:
    """The type of weights that have half the bits of the other operand; None if both have the same type."""
    a, b = problem.input(0), problem.input(1)
    if not (isinstance(a, TensorType) and isinstance(b, TensorType) and problem.constant[1]):
        return None
    return b.dtype if is_half_of(b.dtype, a.dtype) else None


def why_not(problem: Problem, with_stored: bool = False) -> str | None:
    """None when `product` can describe the problem, else the reason.

    Types may be open. With ``with_stored``, weights may be `stored`.
    """
    a, b = problem.input(0), problem.input(1)
    assert isinstance(a, TensorType) and isinstance(b, TensorType)
    alike = a.dtype is b.dtype or (with_stored and stored(problem) is not None)
    if a.dtype not in SUM or not alike:
        return f"does not multiply {a.dtype} with {b.dtype}"
    if not a.dtype.is_float and (problem.attrs.get("alpha", 1.0) != 1 or problem.attrs.get("beta", 1.0) not in (0, 1)):
        return "scales integers with a fraction"
    c = problem.input(2)
    if isinstance(c, TensorType) and COMPUTE[c.dtype] != COMPUTE[a.dtype]:
        return f"adds {c.dtype} to {a.dtype}"
    return None


def product(problem: Problem) -> MatrixProduct:
    """The canonical form of a static problem: rows of the batch joined to M, a product with one column transposed."""
    found = _gemm(problem) if problem.op == "Gemm" else _matmul(problem)
    found = _collapse(found)
    if found.n == 1 and found.m > 1:
        found = replace(
            found, m=1, n=found.m, a=found.b.transposed, b=found.a.transposed,
            batch=tuple(BatchAxis(d.size, d.b, d.a) for d in found.batch), c=found.c and found.c.transposed,
        )  # fmt: skip
    return found


def _gemm(problem: Problem) -> MatrixProduct:
    a, b = (_strided(tensor(problem.inputs[i]).dims, i) for i in range(2))
    (m, k), n = tensor(problem.inputs[0]).dims, tensor(problem.inputs[1]).dims[1]
    if problem.attrs.get("transA", 0):
        a, m, k = a.transposed, k, m
    if problem.attrs.get("transB", 0):
        b, n = b.transposed, tensor(problem.inputs[1]).dims[0]
    alpha, beta = float(problem.attrs.get("alpha", 1.0)), float(problem.attrs.get("beta", 1.0))
    given = problem.input(2)
    c = None
    if given is not None and beta != 0:
        rows, columns = (1, 1, *tensor(given).dims)[-2:]
        c = Matrix(2, columns if rows > 1 else 0, 1 if columns > 1 else 0)
    return MatrixProduct(m, n, k, a, b, (), alpha, beta, c)


def _strided(dims: tuple[int, ...], index: int) -> Matrix:
    return Matrix(index, dims[-1], 1)


def _matmul(problem: Problem) -> MatrixProduct:
    """numpy's matmul: operands of rank 1 are a row or a column; the batch is broadcast."""
    fused = problem.op in FUSED
    a_dims, a_strides = _operand(problem, 0, "A", fused)
    b_dims, b_strides = _operand(problem, 1, "B", fused)
    if len(a_dims) == 1:
        a_dims, a_strides = (1, *a_dims), (0, *a_strides)
    if len(b_dims) == 1:
        b_dims, b_strides = (*b_dims, 1), (*b_strides, 0)
    rank = greater(len(a_dims), len(b_dims)) - 2
    batch = []
    for axis in range(rank):
        x, x_stride = _at(a_dims, a_strides, axis - rank - 2)
        y, y_stride = _at(b_dims, b_strides, axis - rank - 2)
        batch.append(BatchAxis(y if x == 1 else x, x_stride if x != 1 else 0, y_stride if y != 1 else 0))
    a, b = Matrix(0, *a_strides[-2:]), Matrix(1, *b_strides[-2:])
    alpha = float(problem.attrs.get("alpha", 1.0)) if fused else 1.0
    return MatrixProduct(a_dims[-2], b_dims[-1], a_dims[-1], a, b, tuple(batch), alpha)


def _operand(problem: Problem, i: int, name: str, fused: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Dimensions and strides of an operand in the order that the product uses."""
    dims = list(tensor(problem.inputs[i]).dims)
    strides = [1] * len(dims)
    for axis in range(len(dims) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * dims[axis + 1]
    order = list(range(len(dims)))
    if fused and problem.attrs.get(f"transBatch{name}", 0) and len(dims) > 2:
        order.insert(len(order) - 2, order.pop(0))
    if fused and problem.attrs.get(f"trans{name}", 0) and len(dims) > 1:
        order[-2:] = order[:-3:-1]
    return tuple(dims[i] for i in order), tuple(strides[i] for i in order)


def _at(dims: tuple[int, ...], strides: tuple[int, ...], axis: int) -> tuple[int, int]:
    return (dims[axis], strides[axis]) if -axis <= len(dims) else (1, 0)


def _collapse(p: MatrixProduct) -> MatrixProduct:
    """Merges dimensions of the batch: those without b become rows, contiguous neighbours become one."""
    m, row, joined = p.m, p.a.row, False
    kept: list[BatchAxis] = []
    for dim in reversed(p.batch):
        last = kept[-1] if kept else None
        if dim.size == 1:
            continue
        if last is None and dim.b == 0 and (m == 1 or dim.a == m * row):
            row, joined = (dim.a if m == 1 else row), True
            m *= dim.size
        elif last is not None and dim.a == last.a * last.size and dim.b == last.b * last.size:
            kept[-1] = BatchAxis(dim.size * last.size, last.a, last.b)
        else:
            kept.append(dim)
    assert not joined or p.c is None
    return replace(p, m=m, a=replace(p.a, row=row), batch=tuple(reversed(kept)))
