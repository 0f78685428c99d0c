"""DynamicQuantizeLSTM with constant weights, four products per instruction (see `dot`, `recurrent_quantised`).

Rows of the input and of the hidden state are unsigned bytes. Packed weights are w' = w - m, where m is the number by
which unsigned ones were moved. z and v are the zero points of rows and columns::

    sum (x - z) (w - v) = sum x w' - z sum w' + (m - v) sum (x - z)

While the input's rows are multiplied with a tile of columns, the next tile is prefetched (``ahead``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater
from tunewright.ir.types import DType
from tunewright.search.space import Space
from tunewright.solvers.base import Array, Config, Packing, Problem, tensor

from ..source import dot
from ..source.base import both
from ..source.byte_slabs import pack_columns
from ..source.emit import In, Scratch, Source
from .recurrent_quantised import PARAMETERS, QuantisedLSTM, QuantisedRecurrentWriter

#: Blocks of columns in a tile of the recurrence: a single row needs eight sums to keep the processor busy.
BLOCKS = (1, 2, 4, 8)


class BytesLSTM(QuantisedLSTM):
    family = "recurrent_bytes"
    version = "1.0"
    rank = 45

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if not dot.has_dot4(target):
            return "without an instruction for sums of four products pairs are faster"
        if not (problem.constant[1] and problem.constant[2]):
            return "its weights are constant"
        return super().refuse(problem, target)

    def default(self, problem: Problem, target: Target) -> Config:
        batch = tensor(problem.inputs[0]).dims[1]
        rows, blocks = (1, 8) if batch == 1 else (2, 4) if batch == 2 else (4, 2)
        return {"rows": rows, "blocks": blocks, "ahead": 1}

    def space(self, problem: Problem, target: Target) -> Space:
        return Space(
            {"rows": [1, 2, 3, 4, 6], "blocks": BLOCKS, "ahead": [0, 1]},
            lambda c: int(str(c["rows"])) * (int(str(c["blocks"])) + 1) < target.registers,
        )

    def writer(self, problem: Problem, config: Config, target: Target) -> QuantisedRecurrentWriter:
        return BytesWriter(problem, config, target, self.specialise)


@dataclass(frozen=True)
class BytesWriter(QuantisedRecurrentWriter):
    @property
    def kind(self) -> DType:
        return DType.UINT8

    def pitch(self, size: int) -> int:
        return size + -size % 4

    def centring(self) -> str:
        return _CENTRE

    def tile(self, i: int) -> tuple[int, int]:
        if i == 2:
            return super().tile(i)
        blocks = -(-4 * self.hidden // (self.target.vector_bytes // 4))
        nb, ur = dot.Tiling(greater(blocks, 1), greater(self.steps * self.batch, 1), self.target.registers).best()
        return ur, nb

    def packing(self, i: int) -> Packing:
        slab = self.tile(i)[1] * (self.target.vector_bytes // 4)
        return Packing(f"recurrent bytes {slab}", partial(pack, slab=slab))

    def _weights(self, i: int) -> In | Scratch:
        return In(i)

    def _product(self, source: Source, i: int) -> str:
        weights = tensor(self.problem.inputs[i])
        source.buffer("weights", DType.INT8, In(i))
        for name, at in zip(("scale", "zero"), PARAMETERS[i], strict=True):
            source.buffer(name, tensor(self.problem.inputs[at]).dtype, In(at))
        scale, zero = (
            "d" if tensor(self.problem.inputs[at]).size == self.directions else "d * WIDE + column"
            for at in PARAMETERS[i]
        )
        rows, blocks = self.tile(i)
        height, wide = greater(self.steps * self.batch, 1), 4 * blocks * (self.target.vector_bytes // 4)
        fetched = i == 1 and self.config["ahead"] and height > rows
        source.fixed(ROWS=rows, BLOCKS=blocks, COLUMNS=blocks * (self.target.vector_bytes // 4))
        source.fixed(MOVED=128 if weights.dtype is DType.UINT8 else 0, FETCH=int(fetched))
        source.dims(COUNT=self.directions, AHEAD=-(-rows * wide // height) if fetched else 0)
        source.function(dot.PREFETCH)
        dot.add(source, self.target)
        source.function("typedef i32 QUAD __attribute__((may_alias, aligned(4)));")
        return _PRODUCT.replace("SCALE_AT", scale).replace("ZERO_AT", zero)


def pack(w: Array, slab: int) -> Array:
    """Packs [directions, K, N] in slabs of columns."""
    return pack_columns(list(w), slab)


# Rows beyond the last repeat it and are not stored.
_PRODUCT = """int left = tile * COLUMNS, right = WIDE - left < COLUMNS ? WIDE - left : COLUMNS;
int quads = (DEPTH + 3) / 4;
GLOBAL const i32* column_sums = (GLOBAL const i32*)(weights + COUNT * TILES * quads * COLUMNS * 4)
                              + (d * TILES + tile) * COLUMNS;
GLOBAL const i8* next = weights + (d * TILES + tile + 1) * quads * COLUMNS * 4;  /* behind the last: their sums */
for (int top = first_row; top < end_row; top += ROWS) {
  GLOBAL const QUAD* quad[ROWS];
  UNROLL for (int u = 0; u < ROWS; u++)
    quad[u] = (GLOBAL const QUAD*)centred + (top + u < end_row ? top + u : end_row - 1) * quads;
  V acc[ROWS][BLOCKS];
  UNROLL for (int u = 0; u < ROWS; u++) UNROLL for (int v = 0; v < BLOCKS; v++) acc[u][v] = 0;
  GLOBAL const i8* w = weights + (d * TILES + tile) * quads * COLUMNS * 4;
  for (int k = 0; k < quads; k++) {
    V b[BLOCKS];
    UNROLL for (int v = 0; v < BLOCKS; v++) b[v] = LOADV(w + v * WIDTH * 4);
    PREFETCH(next);
    next += AHEAD;
    UNROLL for (int u = 0; u < ROWS; u++) {
      V a = (V)(quad[u][k]);
      UNROLL for (int v = 0; v < BLOCKS; v++) acc[u][v] = dot4(acc[u][v], a, b[v]);
    }
    w += COLUMNS * 4;
  }
  V kept[ROWS][BLOCKS];
  UNROLL for (int u = 0; u < ROWS; u++) UNROLL for (int v = 0; v < BLOCKS; v++) kept[u][v] = acc[u][v];
  int bottom = end_row - top < ROWS ? end_row - top : ROWS;
  for (int u = 0; u < bottom; u++) {
    const i32* line = (const i32*)kept[u];
    i32 row_sum = row_sums[top + u];
    for (int j = 0; j < right; j++) {
      int column = left + j;
      i32 sum = line[j] - (i32)x_zero * column_sums[j] + (MOVED - zero[ZERO_AT]) * row_sum;
      to[(top + u) * WIDE + column] = (f32)sum * (s * scale[SCALE_AT]);
    }
  }
}"""

_CENTRE = """
/* floats on a grid as bytes, filled up to quads; returns the sum of what they are more than its zero point */
INLINE i32 centre(GLOBAL const f32* x, GLOBAL u8* to, int size, f32 step, f32 zero) {
  i32 sum = 0, shift = (i32)zero;
  for (int k = 0; k < size; k++) {
    i32 value = (u8)to_integer(x[k] / step, zero, 0.0f, 255.0f);
    to[k] = (u8)value;
    sum += value - shift;
  }
  for (int k = size; k & 3; k++) to[k] = 0;
  return sum;
}
"""

SOLVERS = both(BytesLSTM)
