"""Products of few rows with a matrix of contiguous rows that is not constant: one pass over the matrix in place.

The kernel streams rows of the matrix, four at a time. It adds them to sums of all columns (or a strip of them) that
stay in the nearest cache. A large matrix is split along the sum, so that each work-item reads one piece of memory from
end to end. A second launch adds up the parts. A small one is split by columns, which saves that launch.
"""

from __future__ import annotations

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater, lesser
from tunewright.ir.types import DType
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Problem, tensor

from ..source import epilogue
from ..source.base import CSolver, both
from ..source.emit import COMPUTE, EmittedLaunch, In, Scratch, Source
from . import matmul_product
from .gemv import SLICE
from .matmul_pack import MOST_ITEMS, batch_offset
from .matmul_product import MatrixProduct, product, summed
from .matmul_store import Store

#: With more rows than this, register tiles are faster, even if they have to pack a large matrix first.
MOST_ROWS = 2
#: with fewer columns than this, register tiles are faster
FEWEST_COLUMNS = 32
#: The least number of columns of a strip, if there are as many: shorter runs of memory are not worth their streams.
LEAST_STRIP = 128
#: the least number of rows of the matrix in a part of the sum
LEAST_SUM = 64
#: the least elements of a matrix for which a second launch pays
LARGE = 16 * SLICE


class GemvRows(CSolver):
    """Takes one row, or up to `MOST_ROWS` with a large matrix, and contiguous rows of b."""

    family = "gemv_rows"
    ops = matmul_product.OPS
    dtypes = frozenset(matmul_product.SUM) | {DType.BOOL}
    rank = 40

    def refuse(self, problem: Problem, target: Target) -> str | None:
        reason = matmul_product.why_not(problem) or epilogue.why_not(problem, -1)
        if reason is not None or not problem.is_static:
            return reason
        p = product(problem)
        if p.m > (MOST_ROWS if p.n * p.k >= LARGE else 1):
            return f"{p.m} rows: register tiles are faster"
        if problem.constant[p.b.index]:
            return "a constant matrix is faster in panels"
        if p.n < FEWEST_COLUMNS:
            return f"{p.n} columns: register tiles are faster"
        return None if p.b.column == 1 else "rows of the second operand are not contiguous"

    def default(self, problem: Problem, target: Target) -> Config:
        return {"strip": 4096, "split": 4}

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"strip": (1024, 2048, 4096, 8192), "split": (1, 2, 4, 8, 16)})

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        p, dtype = product(problem), summed(problem)
        source = Source("gemv_rows", self.specialise)
        source.buffer("a", tensor(problem.inputs[p.a.index]).dtype, In(p.a.index))
        source.buffer("b", tensor(problem.inputs[p.b.index]).dtype, In(p.b.index))
        source.fixed(T=COMPUTE[dtype], STRIP=int(config["strip"]))
        source.dims(M=p.m, N=p.n, K=p.k, COUNT=p.count, A_ROW=p.a.row, A_COLUMN=p.a.column, B_ROW=p.b.row)
        source.fixed(
            A_BEGIN=f"({batch_offset(source, 'z', [(d.size, d.a) for d in p.batch], 'A')})",
            B_BEGIN=f"({batch_offset(source, 'z', [(d.size, d.b) for d in p.batch], 'B')})",
        )
        grid, parts = _split(source, p, int(config["strip"]), int(config["split"]) * target.units)
        left = [source.load("a", f"row + (k + {i}) * A_COLUMN") for i in range(4)]
        right = [source.load("b", f"from + {i} * B_ROW + j") for i in range(4)]
        if parts == 1:
            store = Store(source, problem, p).element("sums[m * SHARE_N + j]", "m", "n + j", "(z * M + m) * N + n + j")
            source.add(_text(left, right, store))
            return [source.call(grid)]
        partial = Scratch("partial", p.count * p.m * p.n * parts * dtype.itemsize)
        source.buffer("y", dtype, partial)
        source.add(_text(left, right, "y[((GID(1) * COUNT + z) * M + m) * N + n + j] = sums[m * SHARE_N + j];"))
        return [source.call(grid), self._gather(problem, p, dtype, partial, parts)]

    def _gather(self, problem: Problem, p: MatrixProduct, dtype: DType, partial: Scratch, parts: int) -> EmittedLaunch:
        """The launch that adds up the parts of each sum."""
        source = Source("gather_rows", self.specialise)
        source.buffer("x", dtype, partial)
        source.fixed(T=COMPUTE[dtype])
        source.dims(M=p.m, N=p.n, PARTS=parts, SIZE=p.count * p.m * p.n)
        source.add("""
for (int n = 0; n < N; n++) {
  int at = GID(0) * N + n;
  T sum = x[at];
  for (int i = 1; i < PARTS; i++) sum += x[i * SIZE + at];""")
        source.add(Store(source, problem, p).element("sum", "GID(0) % M", "n", "at"))
        source.add("}")
        return source.call([p.count * p.m])


def _text(left: list[str], right: list[str], store: str) -> str:
    """The kernel's text. ``left`` and ``right`` load four rows of the sum (at its end only the first), ``store`` stores
    a sum."""
    factors = ", ".join(f"l{i} = (T){text}" for i, text in enumerate(left))
    terms = " ".join(f"sum += l{i} * (T){text};" for i, text in enumerate(right))
    return f"""
int z_end = (GID(2) + 1) * SHARE_BATCH < COUNT ? (GID(2) + 1) * SHARE_BATCH : COUNT;
int k_end = (GID(1) + 1) * SHARE_K < K ? (GID(1) + 1) * SHARE_K : K;
int n = GID(0) * SHARE_N, width = N - n < SHARE_N ? N - n : SHARE_N;
for (int z = GID(2) * SHARE_BATCH; z < z_end; z++) {{
  T sums[STRIP];  /* of all rows */
  for (int m = 0; m < M; m++)
    for (int j = 0; j < width; j++) sums[m * SHARE_N + j] = 0;
  int k = GID(1) * SHARE_K;
  for (; k + 4 <= k_end; k += 4)
    for (int m = 0; m < M; m++) {{
      int row = A_BEGIN + m * A_ROW, from = B_BEGIN + k * B_ROW + n;
      T {factors};
      for (int j = 0; j < width; j++) {{
        T sum = sums[m * SHARE_N + j];
        {terms}
        sums[m * SHARE_N + j] = sum;
      }}
    }}
  for (; k < k_end; k++)
    for (int m = 0; m < M; m++) {{
      int row = A_BEGIN + m * A_ROW, from = B_BEGIN + k * B_ROW + n;
      T l0 = (T){left[0]};
      for (int j = 0; j < width; j++) sums[m * SHARE_N + j] += l0 * (T){right[0]};
    }}
  for (int m = 0; m < M; m++)
    for (int j = 0; j < width; j++)
      {store}
}}"""


def _split(source: Source, p: MatrixProduct, strip: int, items: int) -> tuple[tuple[int, int, int], int]:
    """Decides the shares of a work-item: the grid over strips, parts of the sum and the batch; and the parts."""
    whole = p.count * p.m * p.n * p.k
    batches = lesser(p.count, greater(1, lesser(items, whole // SLICE)), MOST_ITEMS)
    wanted = -(-greater(1, lesser(items, whole // SLICE)) // greater(1, batches))
    strips, parts = -(-p.n // (strip // p.m)), 1
    if p.n * p.k < LARGE or p.count * p.m >= MOST_ITEMS:
        strips = greater(strips, lesser(wanted, p.n // LEAST_STRIP))
    else:
        parts = greater(1, lesser(-(-wanted // strips), p.k // LEAST_SUM))
    share_batch, share_n, share_k = (
        -(-total // greater(1, among)) for total, among in ((p.count, batches), (p.n, strips), (p.k, parts))
    )
    source.dims(SHARE_BATCH=share_batch, SHARE_N=share_n, SHARE_K=share_k)
    return (-(-p.n // share_n), parts, -(-p.count // greater(1, share_batch))), parts


SOLVERS = both(GemvRows)
