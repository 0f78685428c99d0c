"""Products of few rows with a matrix of contiguous columns: each result is a dot product of two runs of memory.

The solver serves fully connected layers whose weights are not constant, in one pass over them. It serves products of a
matrix with a vector, and products with few results but a long sum, which it splits among work-items.
"""

from __future__ import annotations

from collections.abc import Mapping

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater, hint, lesser
from tunewright.ir.types import DType
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Packing, Problem, tensor

from ..source import epilogue
from ..source.base import CSolver, both
from ..source.emit import COMPUTE, EmittedLaunch, In, Scratch, Source
from . import matmul_pack, matmul_product
from .matmul_pack import MOST_ITEMS, PackedOperand, batch_offset
from .matmul_product import MatrixProduct, product, summed
from .matmul_store import Store

#: With more rows than this, register tiles are faster, even if they have to pack the matrix first.
MOST_ROWS = 4
#: With fewer columns than this, a constant matrix is stored by columns.
FEW_COLUMNS = 16
#: the least number of elements of the matrix that a work-item reads: about five microseconds
SLICE = 32768
#: a sum shorter than this is not split
LEAST_SUM = 4096


class Gemv(CSolver):
    """Takes up to `MOST_ROWS` rows, and contiguous columns of b."""

    family = "gemv"
    ops = matmul_product.OPS
    dtypes = frozenset(matmul_product.SUM) | {DType.BOOL}
    rank = 40

    def refuse(self, problem: Problem, target: Target) -> str | None:
        reason = matmul_product.why_not(problem) or epilogue.why_not(problem, -1)
        if reason is not None or not problem.is_static:
            return reason
        p = product(problem)
        if p.m > MOST_ROWS:
            return f"{p.m} rows: register tiles are faster"
        if p.a.column != 1 and p.k > 1:
            return "rows of the first operand are not contiguous"
        if problem.constant[p.b.index]:
            return None if p.n <= FEW_COLUMNS else f"a constant matrix of {p.n} columns is faster in panels"
        return None if p.b.row == 1 or p.k <= 1 else "columns of the second operand are not contiguous"

    def default(self, problem: Problem, target: Target) -> Config:
        return {"columns": 4, "split": 4}

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"columns": (1, 2, 4, 8), "split": (1, 2, 4, 8, 16)})

    def packings(self, problem: Problem, config: Config, target: Target) -> Mapping[int, Packing]:
        p = product(problem)
        i = p.b.index
        return {i: matmul_pack.packing(_matrix(p), 1, tensor(problem.inputs[i]).dtype)} if problem.constant[i] else {}

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        p, dtype = product(problem), summed(problem)
        columns = int(config["columns"])
        source = Source("gemv", self.specialise)
        source.buffer("a", tensor(problem.inputs[p.a.index]).dtype, In(p.a.index))
        source.buffer("b", tensor(problem.inputs[p.b.index]).dtype, In(p.b.index))
        source.fixed(T=COMPUTE[dtype], COLUMNS=columns)
        b_column, b_batch = p.b.column, [d.b for d in p.batch]
        if problem.constant[p.b.index]:
            b_column, b_batch = p.k, _matrix(p).strides(b_batch, 1)
        source.dims(M=p.m, N=p.n, K=p.k, COUNT=p.count, A_ROW=p.a.row, B_COLUMN=b_column)
        sizes = [d.size for d in p.batch]
        source.fixed(
            A_BEGIN=f"({batch_offset(source, 'z', [(d.size, d.a) for d in p.batch], 'A')})",
            B_BEGIN=f"({batch_offset(source, 'z', list(zip(sizes, b_batch, strict=True)), 'B')})",
        )
        grid, parts = _split(source, p, columns, int(config["split"]) * target.units)
        each = range(columns)
        begin = "\n".join(f"int b{i} = B_BEGIN + (n + {i} < N ? n + {i} : N - 1) * B_COLUMN; T s{i} = 0;" for i in each)
        step = "\n".join(f"s{i} += left * (T){source.load('b', f'b{i} + k')};" for i in each)
        sums, left = ", ".join(f"s{i}" for i in each), source.load("a", "row + k")
        if parts == 1:
            store = Store(source, problem, p).element("sums[i]", "m", "n + i", "(z * M + m) * N + n + i")
            source.add(DOT.format(begin=begin, step=step, sums=sums, left=left, store=store))
            return [source.call(grid)]
        partial = Scratch("partial", greater(1, p.count * p.m * p.n * parts * dtype.itemsize))
        source.buffer("y", dtype, partial)
        source.dims(PARTS=parts)
        store = "y[((z * M + m) * N + n + i) * PARTS + GID(1)] = sums[i];"
        source.add(DOT.format(begin=begin, step=step, sums=sums, left=left, store=store))
        return [source.call(grid), self._gather(problem, p, dtype, partial, parts)]

    def _gather(self, problem: Problem, p: MatrixProduct, dtype: DType, partial: Scratch, parts: int) -> EmittedLaunch:
        """The launch that adds up the parts of each sum."""
        source = Source("gather", self.specialise)
        source.buffer("x", dtype, partial)
        source.fixed(T=COMPUTE[dtype])
        source.dims(M=p.m, N=p.n, PARTS=parts)
        source.add("""
for (int n = 0; n < N; n++) {
  int at = GID(0) * N + n;
  T sum = 0;
  for (int i = 0; i < PARTS; i++) sum += x[at * PARTS + i];""")
        source.add(Store(source, problem, p).element("sum", "GID(0) % M", "n", "at"))
        source.add("}")
        return source.call([p.count * p.m])


DOT = """
int z_end = (GID(2) + 1) * SHARE_BATCH < COUNT ? (GID(2) + 1) * SHARE_BATCH : COUNT;
int k_end = (GID(1) + 1) * SHARE_K < K ? (GID(1) + 1) * SHARE_K : K;
int n_end = (GID(0) + 1) * SHARE_N < N ? (GID(0) + 1) * SHARE_N : N;
for (int z = GID(2) * SHARE_BATCH; z < z_end; z++)
  for (int n = GID(0) * SHARE_N; n < n_end; n += COLUMNS) {{
    int count = n_end - n < COLUMNS ? n_end - n : COLUMNS;
    for (int m = 0; m < M; m++) {{
      REASSOCIATE
      int row = A_BEGIN + m * A_ROW;
      {begin}
      for (int k = GID(1) * SHARE_K; k < k_end; k++) {{
        T left = (T){left};
        {step}
      }}
      T sums[COLUMNS] = {{ {sums} }};
      for (int i = 0; i < count; i++)
        {store}
    }}
  }}"""


def _matrix(p: MatrixProduct) -> PackedOperand:
    return PackedOperand(p.b, p.k, p.n, tuple((d.size, d.b) for d in p.batch if d.b))


def _split(source: Source, p: MatrixProduct, columns: int, items: int) -> tuple[tuple[int, int, int], int]:
    """Decides the shares of a work-item: the grid over columns, parts of the sum and the batch; and the number of
    parts."""
    whole = p.count * p.n * p.k * p.m
    items = greater(1, lesser(items, whole // SLICE))
    batches = lesser(p.count, items, MOST_ITEMS)
    groups = -(-p.n // columns)
    strips = lesser(groups, -(-items // greater(1, batches)))
    few = hint(p.count * p.m) < MOST_ITEMS
    parts = greater(1, lesser(-(-items // greater(1, batches * strips)), p.k // LEAST_SUM)) if few else 1
    share_batch, share_groups, share_k = (
        -(-total // greater(1, among)) for total, among in ((p.count, batches), (groups, strips), (p.k, parts))
    )
    source.dims(SHARE_BATCH=share_batch, SHARE_N=share_groups * columns, SHARE_K=share_k)
    return (-(-groups // greater(1, share_groups)), parts, -(-p.count // greater(1, share_batch))), parts


SOLVERS = both(Gemv)
