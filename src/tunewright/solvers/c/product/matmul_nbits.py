"""Products with constant weights of 2, 4 or 8 bits (com.microsoft's MatMulNBits), dequantised in registers.

Weights lie in slabs of NB vectors of columns, and in these by blocks of the sum: a word of 32 bits holds 32 / bits
steps of one column. A vector of words becomes a vector of weights by one look-up in a table of 16 numbers (AVX-512, up
to 4 bits), else by a shift, a mask and a conversion. For few rows, the kernel sums a block of whole numbers and scales
the sum (``blockwise``), so that a single row streams its weights. With more rows it scales each vector of weights once
for all rows. q is the whole number minus its centre, z the zero point minus the centre, s the scale of a block::

    sum x (q - z) s  =  s (sum x q - z sum x)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from tunewright.devices.base import Target, empty_on_lines
from tunewright.ir.symbolic import greater, hint, lesser
from tunewright.ir.types import DType, TensorType
from tunewright.ops.microsoft.quantised_product import unpack_bits
from tunewright.search.space import Space
from tunewright.solvers.base import Array, Config, Packing, Problem, tensor

from ..source import epilogue
from ..source.base import CSolver, both
from ..source.emit import COMPUTE, EmittedLaunch, In, Out, Scratch, Source

FLOATS = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})
BITS = (2, 4, 8)
#: Up to this number of rows, sums of blocks stay in registers beside their total.
FEW_ROWS = 4
#: The rows that a work-item reads for each slab take at most half of a usual second-level cache.
NEAR_BYTES = 512 * 1024
#: the least number of products of a work-item: about five microseconds
LEAST_WORK = 200_000


class MatMulNBits(CSolver):
    """Rows of floats times weights of a few bits."""

    family = "matmul_nbits"
    ops = frozenset({"com.microsoft::MatMulNBits"})
    dtypes = FLOATS | {DType.UINT8, DType.INT32, DType.BOOL}
    rank = 45

    def refuse(self, problem: Problem, target: Target) -> str | None:
        attrs, a = problem.attrs, problem.input(0)
        bits, block = int(attrs.get("bits", 4)), int(attrs["block_size"])
        if bits not in BITS:
            return f"weights of {bits} bits"
        if block < 16 or block & (block - 1):
            return f"blocks of {block}"
        if problem.input(4) is not None:
            return "weights in an order of groups of their own (g_idx)"
        if not isinstance(a, TensorType) or a.dtype not in FLOATS:
            return f"rows of {a}"
        given = [i for i in (1, 2, 3) if problem.input(i) is not None]
        if not all(problem.constant[i] for i in given):
            return "weights, scales and zero points must be constant"
        scales = problem.input(2)
        if isinstance(scales, TensorType) and scales.dtype not in FLOATS:
            return f"scales of {scales.dtype}"
        return epilogue.why_not(problem, -1)

    def space(self, problem: Problem, target: Target) -> Space:
        def fits(c: Mapping[str, Any]) -> bool:
            few = c["rows"] <= FEW_ROWS
            held = c["rows"] * c["nb"] * (2 if few else 1) + c["nb"] * (1 if few else 3)
            return bool(held < target.registers)

        return Space({"rows": (1, 2, 3, 4, 6, 8, 12), "nb": (1, 2, 3, 4, 6), "split": (1, 2, 4, 8, 16)}, fits)

    def default(self, problem: Problem, target: Target) -> Config:
        rows, many = hint(_rows(problem)), target.registers > 16
        if rows <= 1:
            ur, nb = 1, 4
        elif rows <= 2:
            ur, nb = 2, 4 if many else 2
        elif rows <= FEW_ROWS:
            ur, nb = (4, 2) if many else (3, 1)
        else:
            ur, nb = (8, 2) if many else (6, 1)
        columns = -(-int(problem.attrs["N"]) // _lanes(target))
        while nb > 1 and columns < nb:
            nb -= 1
        return {"rows": ur, "nb": nb, "split": 8}

    def packings(self, problem: Problem, config: Config, target: Target) -> Mapping[int, Packing]:
        slab, (block, blocks) = int(config["nb"]) * _lanes(target), _blocks(problem)
        bits, columns = int(problem.attrs.get("bits", 4)), int(problem.attrs["N"])
        key = f"{slab} {bits} {block} {blocks} {columns}"
        made = {
            1: Packing(f"n bits {key}", partial(_pack_weights, slab=slab, columns=columns, blocks=blocks)),
            2: Packing(f"n bits scales {key}", partial(_pack_scales, slab=slab, columns=columns, blocks=blocks)),
        }
        if problem.input(3) is not None:
            made[3] = Packing(
                f"n bits zeros {key}", partial(_pack_zeros, slab=slab, columns=columns, blocks=blocks, bits=bits)
            )
        return made

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        rows, columns = _rows(problem), int(problem.attrs["N"])
        if not columns or (isinstance(rows, int) and not rows):
            return []
        block, blocks = _blocks(problem)
        floats = Scratch("rows", 4 * rows * greater(blocks * block, 1))
        sums = Scratch("row_sums", 4 * rows * greater(blocks, 1))
        return [self._spread(problem, rows, floats, sums), self._multiply(problem, config, target, floats, sums)]

    def _spread(self, problem: Problem, rows: int, floats: Scratch, sums: Scratch) -> EmittedLaunch:
        """The launch that writes rows in single precision, filled up to whole blocks, and their sums over blocks."""
        block, blocks = _blocks(problem)
        source = Source("n_bits_rows", self.specialise)
        source.buffer("a", tensor(problem.inputs[0]).dtype, In(0))
        source.buffer("rows", DType.FLOAT32, floats)
        source.buffer("sums", DType.FLOAT32, sums)
        share = greater(1, 32768 // greater(blocks * block, 1))
        source.dims(DEPTH=int(problem.attrs["K"]), BLOCK=block, BLOCKS=blocks)
        source.dims(SHARE=share, HEIGHT=rows)
        source.add(SPREAD.format(value=source.load("a", "row * DEPTH + k")))
        return source.call([-(-rows // share)])

    def _multiply(
        self, problem: Problem, config: Config, target: Target, floats: Scratch, sums: Scratch
    ) -> EmittedLaunch:
        nb, ur, lanes = int(config["nb"]), int(config["rows"]), _lanes(target)
        rows, (block, blocks) = _rows(problem), _blocks(problem)
        bits = int(problem.attrs.get("bits", 4))
        source = Source("matmul_nbits", self.specialise)
        source.buffer("a", DType.FLOAT32, floats)
        source.buffer("sums", DType.FLOAT32, sums)
        source.buffer("b", DType.UINT32, In(1))
        source.buffer("scales", DType.FLOAT32, In(2))
        if problem.input(3) is not None:
            source.buffer("zeros", DType.FLOAT32, In(3))
        source.fixed(
            NB=nb, UR=ur, LANES=lanes, BITS=bits, PER=32 // bits, CENTRE=float(1 << (bits - 1)),
            BLOCKWISE=int(ur <= FEW_ROWS), ZEROS=int(problem.input(3) is not None),
        )  # fmt: skip
        columns = int(problem.attrs["N"])
        stay, band, grid = _split(rows, columns, block * blocks, nb * lanes, ur, int(config["split"]) * target.units)
        source.dims(
            HEIGHT=rows, WIDE=columns, BLOCKS=blocks, WORDS=block * bits // 32, PITCH=block * blocks, STAY=stay,
            SLABS=-(-columns // (nb * lanes)), BAND=band,
        )  # fmt: skip
        source.function(LOOKUP)
        source.add(MULTIPLY.replace("STORE;", _store(source, problem)))
        return source.call(grid)


def _lanes(target: Target) -> int:
    return greater(target.vector_bytes // 4, 1)


def _rows(problem: Problem) -> int:
    if not problem.is_static:
        return 1
    return math.prod(tensor(problem.inputs[0]).dims[:-1])


def _blocks(problem: Problem) -> tuple[int, int]:
    """The number of steps of a block of the sum, and the number of blocks."""
    block = int(problem.attrs["block_size"])
    return block, -(-int(problem.attrs["K"]) // block)


def _split(rows: int, columns: int, depth: int, slab: int, ur: int, items: int) -> tuple[int, int, tuple[int, int]]:
    """Slabs and rows of a work-item, and the grid of work-items."""
    slabs = -(-columns // slab)
    items = greater(1, lesser(items, int(hint(rows) * columns * depth / LEAST_WORK)))
    tiles = -(-hint(rows) // ur)
    near = greater(1, NEAR_BYTES // greater(4 * ur * depth, 1))
    bands = greater(-(-tiles // near), lesser(tiles, -(-items // slabs)))
    band = ur * greater(1, -(-tiles // bands))
    stay = greater(1, slabs // greater(1, -(-items // bands)))
    return stay, band, (-(-slabs // stay), -(-rows // band))


def _store(source: Source, problem: Problem) -> str:
    """Statements that finish the sum of an element: its bias, the epilogue, and the store."""
    bias = problem.input(5)
    if bias is not None:
        source.buffer("bias", tensor(bias).dtype, In(5))
    steps = epilogue.Epilogue(source, problem, -1)
    source.buffer("y", tensor(problem.outputs[0]).dtype, Out())
    lines, result = steps.apply("v", "column", "at")
    value = "line[j]" if bias is None else f"line[j] + {source.load('bias', 'column')}"
    return f"{COMPUTE[steps.dtypes[0]]} v = {value};\n{lines}\n{source.store('y', 'at', result)}"


# -- packing -----------------------------------------------------------------------------------------------------------


def _slabs(array: Array, slab: int) -> Array:
    """Packs [columns, blocks, n] as [slabs, blocks, n, slab]; zeros fill up the last slab."""
    columns, blocks, n = array.shape
    count = -(-columns // slab)
    out = empty_on_lines((count, blocks, n, slab), array.dtype)
    for i in range(count):
        part = array[i * slab : (i + 1) * slab]
        out[i, :, :, : len(part)] = part.transpose(1, 2, 0)
        out[i, :, :, len(part) :] = 0
    return out


def _pack_weights(array: Array, slab: int, columns: int, blocks: int) -> Array:
    """Packs weights. The steps of a column keep the order of their bytes in the words, lowest bits first."""
    words = np.ascontiguousarray(array).reshape(columns, blocks, -1)
    return _slabs(words.view("<u4").astype(np.uint32, copy=False), slab)


def _pack_scales(array: Array, slab: int, columns: int, blocks: int) -> Array:
    return _slabs(np.asarray(array, np.float32).reshape(columns, blocks, 1), slab)


def _pack_zeros(array: Array, slab: int, columns: int, blocks: int, bits: int) -> Array:
    """Packs zero points minus the centre of the range."""
    if array.dtype == np.uint8:
        packed = np.ascontiguousarray(array).reshape(columns, -1)
        numbers = unpack_bits(packed, bits)[:, :blocks].astype(np.float32)
    else:
        numbers = np.asarray(array, np.float32).reshape(columns, blocks)
    return _slabs((numbers - np.float32(1 << (bits - 1))).reshape(columns, blocks, 1), slab)


SPREAD = """
int end = (GID(0) + 1) * SHARE < HEIGHT ? (GID(0) + 1) * SHARE : HEIGHT;
for (int row = GID(0) * SHARE; row < end; row++) {{
  GLOBAL f32* out = rows + row * BLOCKS * BLOCK;
  for (int k = 0; k < DEPTH; k++) out[k] = {value};
  for (int k = DEPTH; k < BLOCKS * BLOCK; k++) out[k] = 0;
  for (int i = 0; i < BLOCKS; i++) {{
    REASSOCIATE
    f32 sum = 0;
    for (int k = 0; k < BLOCK; k++) sum += out[i * BLOCK + k];
    sums[row * BLOCKS + i] = sum;
  }}
}}"""

#: `weights(words)`: the numbers in the lowest bits of words, minus their centre. A permutation of 16 numbers, where the
#: processor has one, reads only the lowest bits of its indices, so that no mask is needed. A table of fewer numbers is
#: repeated.
LOOKUP = """
vector_of(f32, LANES, V);
vector_of(u32, LANES, U);
vector_of(i32, LANES, VI);
typedef V VU __attribute__((aligned(4)));
typedef U UU __attribute__((aligned(4)));
#ifdef __has_builtin
#if LANES == 16 && BITS <= 4 && defined(__AVX512F__) && __has_builtin(__builtin_ia32_permvarsf512)
#define TABLE 1
#endif
#endif
#ifdef TABLE
typedef f32 VX __attribute__((vector_size(64)));
typedef i32 IX __attribute__((vector_size(64)));
#define ENTRY(n) ((f32)((n) & ((1 << BITS) - 1)) - CENTRE)
INLINE V weights(U words) {
  const VX table = {ENTRY(0), ENTRY(1), ENTRY(2), ENTRY(3), ENTRY(4), ENTRY(5), ENTRY(6), ENTRY(7),
                    ENTRY(8), ENTRY(9), ENTRY(10), ENTRY(11), ENTRY(12), ENTRY(13), ENTRY(14), ENTRY(15)};
  return CAST_BITS(__builtin_ia32_permvarsf512(table, CAST_BITS(words, IX)), V);
}
#else
INLINE V weights(U words) {
  return __builtin_convertvector(CAST_BITS(words & ((1u << BITS) - 1), VI), V) - CENTRE;
}
#endif
"""

#: Rows beyond the last repeat it and are not stored.
MULTIPLY = """
int s_end = (GID(0) + 1) * STAY < SLABS ? (GID(0) + 1) * STAY : SLABS;
int bottom = (GID(1) + 1) * BAND < HEIGHT ? (GID(1) + 1) * BAND : HEIGHT;
for (int slab = GID(0) * STAY; slab < s_end; slab++)
for (int top = GID(1) * BAND; top < bottom; top += UR) {
  GLOBAL const u32* words = b + slab * BLOCKS * WORDS * NB * LANES;
  GLOBAL const f32* scale = scales + slab * BLOCKS * NB * LANES;
#if ZEROS
  GLOBAL const f32* zero = zeros + slab * BLOCKS * NB * LANES;
#endif
  GLOBAL const f32* x[UR];
  UNROLL for (int u = 0; u < UR; u++) x[u] = a + (top + u < bottom ? top + u : bottom - 1) * PITCH;
  V sum[UR][NB];
  UNROLL for (int u = 0; u < UR; u++) UNROLL for (int v = 0; v < NB; v++) sum[u][v] = (V)(0);
  for (int block = 0; block < BLOCKS; block++) {
    V s[NB];
    UNROLL for (int v = 0; v < NB; v++) s[v] = *(GLOBAL const VU*)(scale + v * LANES);
#if BLOCKWISE
    V part[UR][NB];
    UNROLL for (int u = 0; u < UR; u++) UNROLL for (int v = 0; v < NB; v++) part[u][v] = (V)(0);
#elif ZEROS
    V z[NB];
    UNROLL for (int v = 0; v < NB; v++) z[v] = *(GLOBAL const VU*)(zero + v * LANES) * s[v];
#endif
    for (int word = 0; word < WORDS; word++) {
      U left[NB];
      UNROLL for (int v = 0; v < NB; v++) left[v] = *(GLOBAL const UU*)(words + v * LANES);
      words += NB * LANES;
      UNROLL for (int k = 0; k < PER; k++) {
        V w[NB];
        UNROLL for (int v = 0; v < NB; v++) {
          w[v] = weights(left[v] >> (u32)(k * BITS));
#if !BLOCKWISE && ZEROS
          w[v] = w[v] * s[v] - z[v];
#elif !BLOCKWISE
          w[v] = w[v] * s[v];
#endif
        }
        UNROLL for (int u = 0; u < UR; u++) {
          V one = (V)(x[u][k]);
#if BLOCKWISE
          UNROLL for (int v = 0; v < NB; v++) part[u][v] += one * w[v];
#else
          UNROLL for (int v = 0; v < NB; v++) sum[u][v] += one * w[v];
#endif
        }
      }
      UNROLL for (int u = 0; u < UR; u++) x[u] += PER;
    }
#if BLOCKWISE
    UNROLL for (int u = 0; u < UR; u++) UNROLL for (int v = 0; v < NB; v++) {
#if ZEROS
      f32 whole = sums[(top + u < bottom ? top + u : bottom - 1) * BLOCKS + block];
      part[u][v] -= *(GLOBAL const VU*)(zero + v * LANES) * whole;
#endif
      sum[u][v] += part[u][v] * s[v];
    }
#endif
    scale += NB * LANES;
#if ZEROS
    zero += NB * LANES;
#endif
  }
  int first = slab * NB * LANES, wide = WIDE - first < NB * LANES ? WIDE - first : NB * LANES;
  int high = bottom - top < UR ? bottom - top : UR;
  V kept[UR][NB];
  UNROLL for (int u = 0; u < UR; u++) UNROLL for (int v = 0; v < NB; v++) kept[u][v] = sum[u][v];
  for (int u = 0; u < high; u++) {
    const f32* line = (const f32*)kept[u];
    for (int j = 0; j < wide; j++) {
      int column = first + j, at = (top + u) * WIDE + column;
      STORE;
    }
  }
}
"""


SOLVERS = both(MatMulNBits)
