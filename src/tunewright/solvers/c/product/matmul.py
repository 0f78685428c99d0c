"""Matrix products in register tiles: MatMul, Gemm and FusedMatMul with batches, an addend and an epilogue.

A tile is ROWS rows by VECTORS vectors of columns. One step of its sum loads a row of a panel of b and one element of
each row of a. A work-item takes some panels and, for each block of their sums, some tiles of rows. The block of a panel
is read repeatedly from the nearest cache while a is streamed, and the next block is prefetched. Where the number of
rows is not a multiple of ROWS, some tiles have one row less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater, hint, lesser
from tunewright.ir.types import DType
from tunewright.search.space import Scalar, Space
from tunewright.solvers.base import Config, Packing, Problem, tensor

from ..source import epilogue
from ..source.base import MOST_ELEMENTS, CSolver, both
from ..source.emit import COMPUTE, EmittedLaunch, In, Scratch, Source
from . import matmul_pack, matmul_product
from .matmul_pack import MOST_ITEMS, PackedOperand, batch_offset
from .matmul_product import MatrixProduct, is_narrow, product, stored, summed
from .matmul_store import Store
from .matmul_tile import HALVES, VECTORS, tile

#: The rows of a that a work-item reads for each panel take at most half of a usual second-level cache.
NEAR_BYTES = 512 * 1024
#: The steps of a sum in a block, whose part of a panel about fills a usual first-level cache.
BLOCK = 384
#: the most vectors of columns in a tile
MOST_VECTORS = 4
#: Up to this number of rows, panels of half weights stay in halves, on architectures that convert them in one
#: instruction.
FEW_ROWS, CONVERTING = 8, ("x86-64-v3", "x86-64-v4", "armv8")
#: The least work of a work-item: about five microseconds.
LEAST_FLOPS = 400_000
#: Or it reads this much of b at least, which takes about a microsecond: with few rows that is what it waits for.
LEAST_BYTES = 128 * 1024


class MatMul(CSolver):
    """Takes every problem that `matmul_product` describes."""

    family = "matmul"
    ops = matmul_product.OPS
    dtypes = frozenset(matmul_product.SUM) | {DType.BOOL}
    rank = 50
    version = "2.0"

    def refuse(self, problem: Problem, target: Target) -> str | None:
        reason = matmul_product.why_not(problem, with_stored=True) or epilogue.why_not(problem, -1)
        if reason is not None or not problem.is_static:
            return reason
        p = product(problem)
        if stored(problem) is not None and p.b.index != 1:
            return "weights of one column are of the type of what they are multiplied with"
        _, b = _operands(p)
        widest = MOST_VECTORS * _lanes(problem, target)
        return "too large in panels" if b.count * b.packed_size(widest) > MOST_ELEMENTS else None

    def default(self, problem: Problem, target: Target) -> Config:
        p, lanes = product(problem), _lanes(problem, target)
        rows, vectors = _tile(p, lanes, target)
        while vectors > 1 and p.n <= lanes * (vectors - 1):
            vectors -= 1
        # With no more rows than a tile has, every panel is read once: that needs no blocks, and the hardware streams it
        # best.
        again = p.m > rows
        return {
            "rows": rows, "vectors": vectors, "k_block": BLOCK if again else 2048, "split": 4,
            "direct": p.m <= 4 * rows, "prefetch": target.traits.prefetches and again,
        }  # fmt: skip

    def space(self, problem: Problem, target: Target) -> Space:
        def fits(config: Mapping[str, Any]) -> bool:
            return bool((config["rows"] + 1) * config["vectors"] < target.registers)

        params: dict[str, Sequence[Scalar]] = {
            "rows": (1, 2, 3, 4, 5, 6, 8, 12), "vectors": range(1, MOST_VECTORS + 1),
            "k_block": (128, 192, 256, 384, 512, 768, 1024, 2048), "split": (1, 2, 4, 8, 16), "direct": (False, True),
            "prefetch": (False, True),
        }  # fmt: skip
        return Space(params, fits, version=f"{target.registers} registers")

    def packings(self, problem: Problem, config: Config, target: Target) -> Mapping[int, Packing]:
        p, dtype, found = product(problem), summed(problem), {}
        a, b = _operands(p)
        if problem.constant[p.b.index]:
            panels = _in_halves(problem, target) or dtype
            found[p.b.index] = matmul_pack.packing(b, _width(problem, config, target), panels)
        if problem.constant[p.a.index] and is_narrow(problem):
            found[p.a.index] = matmul_pack.packing(a, 1, dtype)
        return found

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        p, dtype, width = product(problem), summed(problem), _width(problem, config, target)
        source = Source("matmul", self.specialise)
        source.fixed(ROWS=config["rows"], VECTORS=config["vectors"], LANES=_lanes(problem, target))
        source.fixed(T=COMPUTE[dtype])
        source.dims(M=p.m, N=p.n, K=p.k, COUNT=p.count)
        a, b = _operands(p)
        narrow, halves = is_narrow(problem), _in_halves(problem, target)
        direct = config["direct"] and not (narrow or problem.constant[p.b.index] or p.b.column != 1 or p.n < width)
        calls = []
        for name, operand, panel, packed in (("a", a, 1, narrow), ("b", b, width, not direct)):
            i = operand.matrix.index
            if packed and not problem.constant[i]:
                given = tensor(problem.inputs[i]).dtype
                calls.append(matmul_pack.launch(operand, panel, given, dtype, name, self.specialise))
                source.buffer(name, dtype, operand.scratch(panel, dtype, name))
            else:
                source.buffer(name, halves if halves and name == "b" else dtype, In(i))
        a_batch, b_batch = [d.a for d in p.batch], [d.b for d in p.batch]
        if narrow:
            a_batch = a.strides(a_batch, 1)
            source.dims(A_ROW=p.k)
        else:
            source.dims(A_ROW=p.a.row)
        # A step of one has a separate text: with any step, sums do not stay in registers.
        if narrow or p.a.column == 1:
            source.fixed(A_STEP=1)
        else:
            source.dims(A_STEP=p.a.column)
        if direct:  # The last panel begins earlier, so that it ends where the row does.
            source.dims(B_STEP=p.b.row, B_ACROSS=1, LAST=p.n - width)
        else:
            b_batch = b.strides(b_batch, width)
            source.fixed(B_STEP=width)
            source.dims(B_ACROSS=p.k, LAST=p.n)
        sizes = [d.size for d in p.batch]
        source.fixed(
            A_BEGIN=f"({batch_offset(source, 'z', list(zip(sizes, a_batch, strict=True)), 'A')})",
            B_BEGIN=f"({batch_offset(source, 'z', list(zip(sizes, b_batch, strict=True)), 'B')})",
        )
        rows, less = int(config["rows"]), greater(int(config["rows"]) - 1, 1)
        source.function(VECTORS)
        if halves:
            source.function(HALVES[halves])
        for count in sorted({rows, less}):
            source.function(tile(count, config["prefetch"] and not direct, halves is not None))
        source.fixed(LESS=less, MULTIPLY=f"multiply_{rows}", MULTIPLY_LESS=f"multiply_{less}")
        grid = _split(source, p, config, width, target.units, dtype)
        store = Store(source, problem, p)
        source.add(LOOPS.replace("STORED", "u16" if halves else "T") % (
            store.element("sum[r * WIDTH + j]", "m + r", "n + j", "at + j"),
            store.element("sum[r * WIDTH + skip + j]", "m + r", "n + j", "at + j"),
        ))  # fmt: skip
        return [*calls, source.call(grid)]


#: Sums of a block are added to those of the blocks before it, which are kept in memory of the work-item. Therefore the
#: error does not grow with the length of a sum.
LOOPS = """
int panels = (N + WIDTH - 1) / WIDTH;
int z_end = (GID(2) + 1) * SHARE_BATCH < COUNT ? (GID(2) + 1) * SHARE_BATCH : COUNT;
int m_begin = GID(1) * SHARE_ROWS, m_end = m_begin + SHARE_ROWS < M ? m_begin + SHARE_ROWS : M;
int p_end = (GID(0) + 1) * SHARE_PANELS < panels ? (GID(0) + 1) * SHARE_PANELS : panels;
int tiles = (m_end - m_begin + ROWS - 1) / ROWS, whole = m_end - m_begin - tiles * LESS;
GLOBAL T* sums = memory + ((GID(2) * ITEMS_M + GID(1)) * ITEMS_N + GID(0)) * SLOT;
for (int z = GID(2) * SHARE_BATCH; z < z_end; z++)
  for (int p = GID(0) * SHARE_PANELS; p < p_end; p++) {
    int n = p * WIDTH, first = n < LAST ? n : LAST;
    int skip = n - first, columns = N - n < WIDTH ? N - n : WIDTH;
    GLOBAL const T* left = a + A_BEGIN;
    GLOBAL const STORED* right = b + B_BEGIN + first * B_ACROSS;
    for (int block = 0; block < BLOCKS; block++) {
      int steps = K - block * K_BLOCK < K_BLOCK ? K - block * K_BLOCK : K_BLOCK, m = m_begin;
      GLOBAL const char* next = (GLOBAL const char*)(right + steps * B_STEP);
      int part = steps * WIDTH * (int)sizeof(STORED) / tiles, ahead = part / (steps + 1) + 1;
      for (int t = 0; t < tiles; t++) {
        GLOBAL T* sum = sums + (m - m_begin) * SUM_ROW;
        int rows = t < whole ? ROWS : LESS;
        if (t < whole)
          MULTIPLY(left, right, sum, WIDTH, m, m_end, steps, A_ROW, A_STEP, B_STEP, block, next, ahead);
        else
          MULTIPLY_LESS(left, right, sum, WIDTH, m, m_end, steps, A_ROW, A_STEP, B_STEP, block, next, ahead);
        if (block == BLOCKS - 1)
          for (int r = 0; r < rows && m + r < m_end; r++) {
            int at = (z * M + m + r) * N + n;
            if (columns == WIDTH)
              for (int j = 0; j < WIDTH; j++)
%s
            else
              for (int j = 0; j < columns; j++)
%s
          }
        m += rows, next += part;
      }
      left += steps * A_STEP, right += steps * B_STEP;
    }
  }"""


def _in_halves(problem: Problem, target: Target) -> DType | None:
    """The type of panels that stay in halves, or None: reading them limits a few rows, arithmetic limits more rows."""
    halves = stored(problem)
    few = hint(product(problem).m) <= FEW_ROWS
    return halves if few and (halves is DType.BFLOAT16 or target.arch.startswith(CONVERTING)) else None


def _lanes(problem: Problem, target: Target) -> int:
    """The number of elements of a vector of sums."""
    return greater(target.vector_bytes // summed(problem).itemsize, 1)


def _tile(p: MatrixProduct, lanes: int, target: Target) -> tuple[int, int]:
    """Rows and vectors of the default tile: sums in three quarters of the registers, in the shape that wastes least."""
    if p.m <= 2:
        return greater(p.m, 1), 4
    if target.registers > 16:
        return (4 if p.m <= 4 else 6), 4
    columns = {vectors: -(-p.n // (vectors * lanes)) * vectors for vectors in (2, 3)}
    if p.m <= 4 or columns[3] <= columns[2] * 1.04:  # a wide tile loads less
        return lesser(p.m, 4), 3
    return 6, 2


def _width(problem: Problem, config: Config, target: Target) -> int:
    """The number of columns of a panel."""
    return int(config["vectors"]) * _lanes(problem, target)


def _operands(p: MatrixProduct) -> tuple[PackedOperand, PackedOperand]:
    """Both operands for packing; rows of a are columns of its packed matrix."""
    a = PackedOperand(p.a.transposed, p.k, p.m, tuple((d.size, d.a) for d in p.batch if d.a))
    return a, PackedOperand(p.b, p.k, p.n, tuple((d.size, d.b) for d in p.batch if d.b))


def _split(
    source: Source, p: MatrixProduct, config: Config, width: int, units: int, dtype: DType
) -> tuple[int, int, int]:
    """Decides the shares of a work-item; returns the number of work-items along columns, rows and batch."""
    rows = int(config["rows"])
    # The number of work-items is chosen for the sizes at hand; any division gives correct results.
    tiles, panels, k = -(-hint(p.m) // rows), -(-hint(p.n) // width), hint(p.k)
    near = greater(1, NEAR_BYTES // greater(rows * k * dtype.itemsize, 1))
    read = hint(p.count * p.n) * k * dtype.itemsize
    worth = greater(int(hint(p.flops) / LEAST_FLOPS), read // LEAST_BYTES)
    items = greater(1, lesser(int(config["split"]) * units, worth))
    batches = lesser(hint(p.count), items, MOST_ITEMS)
    bands = -(-tiles // near)
    columns = lesser(panels, -(-items // greater(1, batches * bands)))
    if columns == panels:
        bands = greater(bands, lesser(tiles, -(-items // greater(1, batches * columns))))
    if hint(p.n) * k * dtype.itemsize <= NEAR_BYTES:  # several bands of rows may read a small matrix

        def longest(split: tuple[int, int]) -> int:
            """The number of tiles of the busiest unit."""
            each = -(-panels // greater(split[0], 1)) * -(-tiles // greater(split[1], 1))
            return each * -(-split[0] * split[1] * batches // units)

        many = [(c, lesser(tiles, bands * b)) for b in (1, 2, 4) for c in (-(-columns // b), 1)]
        most = greater(items, columns * bands * batches)
        columns, bands = min((s for s in many if s[0] * s[1] * batches <= most), key=longest)
    wanted = ((panels, columns), (tiles, bands), (hint(p.count), batches))
    shares = [greater(1, -(-total // greater(1, parts))) for total, parts in wanted]
    whole = (-(-p.n // width), -(-p.m // rows), p.count)
    x, y, z = (-(-total // share) for total, share in zip(whole, shares, strict=True))
    source.dims(SHARE_PANELS=shares[0], SHARE_ROWS=shares[1] * rows, SHARE_BATCH=shares[2])
    k_block = -(-p.k // greater(1, _rounded(p.k, int(config["k_block"]))))
    blocks = greater(1, -(-p.k // greater(k_block, 1)))
    # the last tile may extend beyond the last row, but not beyond its slot
    slot = (shares[1] if blocks > 1 else 1) * rows * width
    source.dims(BLOCKS=blocks, K_BLOCK=k_block, ITEMS_N=x, ITEMS_M=y, SLOT=slot, SUM_ROW=width if blocks > 1 else 0)
    source.buffer("memory", dtype, Scratch("sums", greater(1, x * y * z * slot * dtype.itemsize)))
    return x, y, z


def _rounded(number: int, by: int) -> int:
    """The quotient, rounded like `round` (halves to even), for symbolic numbers too."""
    doubled = 2 * number + by
    quotient, rest = doubled // (2 * by), doubled % (2 * by)
    return quotient - (1 - lesser(1, rest)) * (quotient % 2)


SOLVERS = both(MatMul)
