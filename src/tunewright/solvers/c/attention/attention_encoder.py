"""Attention in which every query of a head sees the same keys, as in encoders: `attention` with less work around the
two products.

Keys are packed through transposes in registers. The mask is spread over the keys once for a head. Queries and mask are
scaled by log2(e), so that exponentials need no multiplication for it.

Softmax does not depend on the number that is subtracted from a row's scores. The highest score keeps powers in range,
but is known only behind the last key. Here it is guessed, and a tile's scores become powers before they leave the
registers. A row's sum of powers shows whether the guess was near enough. Where it was not, the rows are computed again
in two passes with their highest score, which is the next guess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater, lesser
from tunewright.ir.types import DType, TensorType
from tunewright.search.space import Scalar, Space
from tunewright.solvers import attention_form
from tunewright.solvers.attention_form import UNBOUNDED, AttentionForm, form
from tunewright.solvers.base import Config, Problem

from ..product.matmul_tile import VECTORS, tile
from ..source.base import CSolver, both
from ..source.element_words import transpose_tile
from ..source.emit import COMPUTE, EmittedLaunch, In, Out, Source
from .attention import FEW_QUERIES, NEAR_BYTES, split, vectors

LOG2_E = math.log2(math.e)
#: A guess is near enough where the sum of a row's powers is between 1 / FAR and FAR. Then no power was cut off at
#: 2^126, and the powers taken for zero are below a rounding error. Values of up to 10^28 stay finite.
FAR = 2.0**32
#: after this number of wrong guesses, the kernel makes no more for a head
MOST_MISSES = 4


class AttentionEncoder(CSolver):
    """Computes softmax(q k' * scale + mask) v in blocks of query rows; all rows of a head have one mask."""

    family = "attention_encoder"
    ops = attention_form.OPS
    dtypes = frozenset({DType.FLOAT32, DType.BOOL})
    rank = 45  # before the solver that takes everything
    version = "1.1"

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if problem.epilogue:
            return "takes no epilogue"
        if any(t is not None for t in problem.outputs[1:]):
            return "gives nothing but the result"
        reason = attention_form.why_not(problem)
        if reason is not None or not problem.is_static:
            return reason
        return _why_not(form(problem), target.vector_bytes // 4)

    def default(self, problem: Problem, target: Target) -> Config:
        # Each item has separate memory. On one unit, which shares with no other, one item keeps that memory in the
        # cache.
        split = 8 if target.units > 1 else 1
        return {"rows": 6, "vectors": vectors(form(problem), DType.FLOAT32, target), "split": split}

    def space(self, problem: Problem, target: Target) -> Space:
        def fits(config: Mapping[str, Any]) -> bool:
            return bool((config["rows"] + 1) * config["vectors"] < target.registers)

        params: dict[str, Sequence[Scalar]] = {
            "rows": (2, 3, 4, 5, 6, 8), "vectors": (1, 2, 3, 4), "split": (1, 2, 4, 8, 16),
        }  # fmt: skip
        return Space(params, fits, version=f"{target.registers} registers")

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        f, dtype = form(problem), DType.FLOAT32
        lanes, rows = target.vector_bytes // dtype.itemsize, int(config["rows"])
        width = int(config["vectors"]) * lanes
        source = Source("attention_encoder", self.specialise)
        source.fixed(ROWS=rows, VECTORS=config["vectors"], LANES=lanes, T=COMPUTE[dtype], MULTIPLY=f"multiply_{rows}")
        source.fixed(FAR=FAR, MOST_MISSES=MOST_MISSES)
        for i, name in enumerate("qkv"):
            source.buffer(name, dtype, In(i))
        mask = _mask(source, problem, f)
        source.buffer("y", dtype, Out(0))
        source.numbers(SCALE=f.scale * LOG2_E)
        source.dims(
            MATRICES=f.batch * f.heads, HEADS=f.heads, SHARING=f.heads // greater(f.groups, 1), QUERIES=f.queries,
            KEYS=f.total, SIZE=f.size, VALUES=f.width, Q_BATCH=f.q.batch, Q_HEAD=f.q.head, Q_ROW=f.q.row,
            K_BATCH=f.k.batch, K_HEAD=f.k.head, K_ROW=f.k.row, V_BATCH=f.v.batch, V_HEAD=f.v.head, V_ROW=f.v.row,
            Y_BATCH=f.y.batch, Y_HEAD=f.y.head, Y_ROW=f.y.row,
        )  # fmt: skip
        span = -(-f.total // width) * width
        grid = split(source, f, rows, width, True, config["split"] * target.units, target.units, dtype, span)
        source.function(VECTORS)
        source.function(transpose_tile(dtype, lanes))
        source.function(tile(rows))
        source.function(POWERS)
        # Where all keys are hidden the sum is zero, and so is the result, or it is NaN.
        total = "(total == 0 ? 1 : total)" if f.forgiving else "total"
        source.add(BODY.format(mask=mask, total=total))
        return [source.call(grid)]


def _why_not(f: AttentionForm, lanes: int) -> str | None:
    if f.past or f.valid is not None:
        return "takes neither past keys nor lengths"
    if lesser(f.left, f.right) < UNBOUNDED or (f.mask is not None and f.mask.row):
        return "queries of a head see different keys"
    if f.softcap > 0 or f.rounding:
        return "neither caps nor rounds scores"
    if f.queries <= FEW_QUERIES:
        return "so few queries are not worth packing keys for"
    if f.size % lanes:
        return f"a head's size is no multiple of {lanes}"
    if f.total * (f.size + f.width) * 4 > NEAR_BYTES:
        return "a head is larger than the nearer caches"
    return None


def _mask(source: Source, problem: Problem, f: AttentionForm) -> str:
    """The addend of a key's scores, in powers of two. Keys behind the last one of the mask are not seen."""
    if f.mask is None:
        source.fixed(MASK_BATCH=0, MASK_HEAD=0)
        source.dims(SEEN=f.total)
        return "0"
    type = problem.inputs[f.mask.index]
    assert isinstance(type, TensorType)
    source.buffer("mask", type.dtype, In(f.mask.index))
    source.dims(MASK_BATCH=f.mask.batch, MASK_HEAD=f.mask.head, SEEN=f.mask.columns)
    value = source.load("mask", "mask_at + t")
    return f"({value} ? 0 : -INFINITY)" if type.dtype is DType.BOOL else f"{value} * {LOG2_E!r}f"


#: 2^x; zero from -127 down, 2^126 from there up, NaN of NaN. It is 2^f by a polynomial (off by 1.6e-7 in float32), for
#: f from -1/2 to 1/2, times 2^n, whose bits are the shifted bits of t. `powers`: the powers of a tile of scores minus
#: the guess, and their sums.
POWERS = """
vector_of(u32, LANES, VI);
#define BIASED_ROUNDER (F32_ROUNDER + 127.0f)
INLINE V power(V x) {
  V c = x < -127.0f ? (V)(-127.0f) : x;
  c = c > 126.0f ? (V)(126.0f) : c;
  V t = c + BIASED_ROUNDER, f = c - (t - BIASED_ROUNDER);
  V p = f * 1.3264727124e-3f + 9.6715126448e-3f;
  p = p * f + 5.5507337435e-2f; p = p * f + 2.4022242085e-1f; p = p * f + 6.9314697760e-1f; p = p * f + 1.0f;
  return p * CAST_BITS(CAST_BITS(t, VI) << 23, V);
}
INLINE void powers(GLOBAL const T* query, GLOBAL const T* panel, GLOBAL const T* bias, T guess, int size,
                   GLOBAL T* out, int out_row, V* total) {
  V sum[ROWS][VECTORS];
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int i = 0; i < VECTORS; i++) sum[r][i] = (V)(0);
  for (int k = 0; k < size; k++) {
    V right[VECTORS];
    UNROLL for (int i = 0; i < VECTORS; i++) right[i] = LOADV(panel + k * WIDTH + i * LANES);
    UNROLL for (int r = 0; r < ROWS; r++) {
      V left = (V)(query[r * size + k]);
      UNROLL for (int i = 0; i < VECTORS; i++) sum[r][i] += left * right[i];
    }
  }
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int i = 0; i < VECTORS; i++) {
      V p = power(sum[r][i] + (LOADV(bias + i * LANES) - guess));
      STOREV(out + r * out_row + i * LANES, p);
      total[r] += p;
    }
}"""

#: Lanes beyond the last key are zero, and are not seen.
BODY = """
GLOBAL T* query = memory + (GID(1) * ITEMS + GID(0)) * SLOT;
GLOBAL T* score = query + ROWS * SIZE;
GLOBAL T* out = score + ROWS * SPAN;
GLOBAL T* keys = out + ROWS * OUT_SPAN;
GLOBAL T* values = keys + SPAN * SIZE;
GLOBAL T* bias = values + KEYS * OUT_SPAN;
int first_matrix = GID(0) * SHARE_HEADS, m_end = (GID(1) + 1) * SHARE_ROWS;
m_end = m_end < QUERIES ? m_end : QUERIES;
for (int matrix = first_matrix; matrix < first_matrix + SHARE_HEADS && matrix < MATRICES; matrix++) {{
  int batch = matrix / HEADS, head = matrix % HEADS;
  if (matrix == first_matrix || head % SHARING == 0) {{
    GLOBAL const T* from = k + batch * K_BATCH + head / SHARING * K_HEAD;
    for (int n = 0; n < SPAN; n += WIDTH)
      for (int t = n; t < n + WIDTH; t += LANES)
        for (int i = 0; i < SIZE; i += LANES)
          transpose_tile(from + t * K_ROW + i, K_ROW, KEYS - t, keys + n * SIZE + i * WIDTH + t - n, WIDTH, LANES);
    from = v + batch * V_BATCH + head / SHARING * V_HEAD;
    for (int n = 0; n < VALUES; n += WIDTH)
      for (int t = 0; t < KEYS; t++) {{
        int width = VALUES - n;
        if (width >= WIDTH)
          for (int i = 0; i < WIDTH; i++) values[n * KEYS + t * WIDTH + i] = from[t * V_ROW + n + i];
        else
          for (int i = 0; i < width; i++) values[n * KEYS + t * WIDTH + i] = from[t * V_ROW + n + i];
      }}
  }}
  T guess = 0;
  int misses = 0, seen = 0, mask_at UNUSED = batch * MASK_BATCH + head * MASK_HEAD;
  for (int t = 0; t < SEEN; t++) {{
    bias[t] = {mask};
    seen |= bias[t] != -INFINITY;
  }}
  for (int t = SEEN; t < SPAN; t++) bias[t] = -INFINITY;
for (int m = GID(1) * SHARE_ROWS; m < m_end; m += ROWS) {{
  int rows = m_end - m < ROWS ? m_end - m : ROWS;
  for (int r = 0; r < ROWS; r++) {{
    GLOBAL const T* from = q + batch * Q_BATCH + head * Q_HEAD + (m + (r < rows ? r : rows - 1)) * Q_ROW;
    for (int i = 0; i < SIZE; i++) query[r * SIZE + i] = from[i] * SCALE;
  }}
  T parts[ROWS];
  int near = misses < MOST_MISSES;
  if (near) {{
    V totals[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) totals[r] = (V)(0);
    for (int n = 0; n < KEYS; n += WIDTH)
      powers(query, keys + n * SIZE, bias + n, guess, SIZE, score + n, SPAN, totals);
    UNROLL for (int r = 0; r < ROWS; r++) {{
      T total = 0;
      for (int j = 0; j < LANES; j++) total += totals[r][j];
      near &= (total > 1 / FAR) & (total < FAR);
      parts[r] = 1 / total;
    }}
  }}
  if (!near) {{
    misses++;
    for (int n = 0; n < KEYS; n += WIDTH)
      MULTIPLY(query, keys + n * SIZE, score + n, SPAN, 0, rows, SIZE, SIZE, 1, WIDTH, 0, 0, 0);
    for (int r = 0; r < rows; r++) {{
      GLOBAL T* scores = score + r * SPAN;
      V tops[VECTORS], sums[VECTORS];
      UNROLL for (int i = 0; i < VECTORS; i++) tops[i] = (V)(-INFINITY), sums[i] = (V)(0);
      for (int t = 0; t < SPAN; t += WIDTH)
        UNROLL for (int i = 0; i < VECTORS; i++) {{
          V s = LOADV(scores + t + i * LANES) + LOADV(bias + t + i * LANES);
          STOREV(scores + t + i * LANES, s);
          tops[i] = s > tops[i] ? s : tops[i];
        }}
      T top = -INFINITY, total = 0;
      for (int i = 0; i < VECTORS; i++)
        for (int j = 0; j < LANES; j++) top = tops[i][j] > top ? tops[i][j] : top;
      if (!seen) for (int t = 0; t < SPAN; t++) scores[t] = -INFINITY;
      top = (seen & (top != -INFINITY)) ? top : 0;
      for (int t = 0; t < SPAN; t += WIDTH)
        UNROLL for (int i = 0; i < VECTORS; i++) {{
          V s = power(LOADV(scores + t + i * LANES) - top);
          STOREV(scores + t + i * LANES, s);
          sums[i] += s;
        }}
      for (int i = 0; i < VECTORS; i++)
        for (int j = 0; j < LANES; j++) total += sums[i][j];
      guess = top;
      parts[r] = 1 / {total};
    }}
  }}
  for (int n = 0; n < VALUES; n += WIDTH)
    MULTIPLY(score, values + n * KEYS, out + n, OUT_SPAN, 0, rows, KEYS, SPAN, 1, WIDTH, 0, 0, 0);
  for (int r = 0; r < rows; r++) {{
    int y_at = batch * Y_BATCH + head * Y_HEAD + (m + r) * Y_ROW;
    for (int i = 0; i < VALUES; i++) y[y_at + i] = out[r * OUT_SPAN + i] * parts[r];
  }}
}}
}}"""


SOLVERS = both(AttentionEncoder)
