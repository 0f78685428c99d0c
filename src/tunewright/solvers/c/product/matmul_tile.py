"""The inner loop of every matrix product: the sums of one tile of some rows by VECTORS vectors of LANES columns."""

from __future__ import annotations

from tunewright.ir.types import DType

#: Needed in front of every `tile`. T is the type of the elements.
VECTORS = """
#define WIDTH (VECTORS * LANES)
vector_of(T, LANES, V);
typedef V VU __attribute__((aligned(sizeof(T))));
#ifdef __has_builtin
#if __has_builtin(__builtin_prefetch)
#define PREFETCH(p) __builtin_prefetch((const void*)(size_t)(p))
#endif
#endif
#ifndef PREFETCH
#define PREFETCH(p) ((void)(p))
#endif
"""

_TILE = """
INLINE void multiply_COUNT(GLOBAL const T* a, GLOBAL const STORED* panel, GLOBAL T* out, int out_row, int m, int m_end,
                           int steps, int a_row, int a_step, int b_step, int more,
                           GLOBAL const char* next UNUSED, int ahead UNUSED) {
  GLOBAL const T* row[COUNT];
  V sum[COUNT][VECTORS];
  UNROLL for (int r = 0; r < COUNT; r++) {
    row[r] = a + (m + r < m_end ? m + r : m_end - 1) * a_row;
    UNROLL for (int i = 0; i < VECTORS; i++) sum[r][i] = (V)(0);
  }
  for (int k = 0; k < steps; k++) {
    FETCH
    V right[VECTORS];
    UNROLL for (int i = 0; i < VECTORS; i++) right[i] = LOADP(panel + i * LANES);
    UNROLL for (int r = 0; r < COUNT; r++) {
      V left = (V)(row[r][k * a_step]);
      UNROLL for (int i = 0; i < VECTORS; i++) sum[r][i] += left * right[i];
    }
    panel += b_step;
  }
  if (more)
    UNROLL for (int r = 0; r < COUNT; r++)
      UNROLL for (int i = 0; i < VECTORS; i++) sum[r][i] += LOADV(out + r * out_row + i * LANES);
  UNROLL for (int r = 0; r < COUNT; r++)
    UNROLL for (int i = 0; i < VECTORS; i++) STOREV(out + r * out_row + i * LANES, sum[r][i]);
}
"""


#: Loads LANES elements of a panel that is stored in halves.
HALVES = {
    DType.BFLOAT16: """
typedef u16 HU __attribute__((ext_vector_type(LANES), aligned(2)));
typedef u32 WU __attribute__((ext_vector_type(LANES)));
INLINE V load_panel(GLOBAL const u16* p) {
  return CAST_BITS(__builtin_convertvector(*(GLOBAL const HU*)p, WU) << 16, V);
}
""",
    DType.FLOAT16: """
#ifdef WITH_F16
typedef f16 HU __attribute__((ext_vector_type(LANES), aligned(2)));
INLINE V load_panel(GLOBAL const u16* p) { return __builtin_convertvector(*(GLOBAL const HU*)p, V); }
#else
INLINE V load_panel(GLOBAL const u16* p) {
  V v;
  UNROLL for (int i = 0; i < LANES; i++) v[i] = f16_load(p[i]);
  return v;
}
#endif
""",
}


def tile(rows: int, prefetch: bool = False, halves: bool = False) -> str:
    """The text of the function multiply_ROWS; with ``halves`` its panel is stored in halves (`HALVES`).

    Rows beyond the last one repeat it, so that nothing is read out of bounds. Rows of sums are ``out_row`` elements
    apart; with ``more`` the sums are added to the stored ones. With ``prefetch`` the function prefetches memory from
    ``next`` on, ``ahead`` bytes in each step.
    """
    fetch = "PREFETCH(next); next += ahead;" if prefetch else ""
    panel, load = ("u16", "load_panel") if halves else ("T", "LOADV")
    text = _TILE.replace("FETCH", fetch).replace("STORED", panel).replace("LOADP", load)
    return text.replace("COUNT", str(rows))
