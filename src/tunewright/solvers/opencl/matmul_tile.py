"""The heart of every matrix product: the sums of one tile of ROWS rows by VECTORS vectors of LANES columns."""

from __future__ import annotations

#: Rows beyond the last one repeat it, so that nothing is read out of bounds. T is the type of the elements, SPACE the
#: address space of the sums, a row of which lies every ``out_row`` elements.
TILE = """
#define WIDTH (VECTORS * LANES)
vector_of(T, LANES, V);
typedef V VU __attribute__((aligned(sizeof(T))));
INLINE void multiply(GLOBAL const T* a, GLOBAL const T* panel, SPACE T* out, int out_row, int m, int m_end,
                     int steps, int a_row, int a_step, int b_step) {
  GLOBAL const T* row[ROWS];
  V sum[ROWS][VECTORS];
  UNROLL for (int r = 0; r < ROWS; r++) {
    row[r] = a + (m + r < m_end ? m + r : m_end - 1) * a_row;
    UNROLL for (int i = 0; i < VECTORS; i++) sum[r][i] = (V)(0);
  }
  for (int k = 0; k < steps; k++) {
    V right[VECTORS];
    UNROLL for (int i = 0; i < VECTORS; i++) right[i] = LOADV(panel + i * LANES);
    UNROLL for (int r = 0; r < ROWS; r++) {
      V left = (V)(row[r][k * a_step]);
      UNROLL for (int i = 0; i < VECTORS; i++) sum[r][i] += left * right[i];
    }
    panel += b_step;
  }
  UNROLL for (int r = 0; r < ROWS; r++)
    UNROLL for (int i = 0; i < VECTORS; i++) *(SPACE VU*)(out + r * out_row + i * LANES) = sum[r][i];
}
"""
