"""Products of one query with many keys that lie one behind the other, as decoders compute them for each token."""

from __future__ import annotations

#: Handles LANES keys at a time, each with a vector of sums. A tree of shuffles turns these into one vector of scores.
#: Keys behind the last one repeat it, so that nothing is read out of bounds; scores have room for whole vectors.
_TEXT = """
INLINE void dots(GLOBAL const T* query, GLOBAL const T* keys, GLOBAL T* score, int count, int size, int row) {
  int whole = size - size % LANES;
  for (int t = 0; t < count; t += LANES) {
    GLOBAL const T* key[LANES];
    V sum[LANES];
    UNROLL for (int j = 0; j < LANES; j++) {
      key[j] = keys + (t + j < count ? t + j : count - 1) * row;
      sum[j] = (V)(0);
    }
    for (int i = 0; i < whole; i += LANES) {
      V left = LOADV(query + i);
      UNROLL for (int j = 0; j < LANES; j++) sum[j] += left * LOADV(key[j] + i);
    }
    TREE
    STOREV(score + t, sum[0]);
    for (int i = whole; i < size; i++)
      for (int j = 0; j < LANES; j++) score[t + j] += query[i] * key[j][i];
  }
}
"""


def dots(lanes: int) -> str:
    """The text of the function ``dots``, which writes the scores of ``count`` keys that lie ``row`` elements apart."""
    lines, block = [], lanes
    # Each vector holds sums of lanes / block keys; two vectors become one with sums of twice as many keys.
    while block > 1:
        half = block // 2
        low = [side * lanes + at + k for at in range(0, lanes, block) for side in (0, 1) for k in range(half)]
        first, second = ", ".join(map(str, low)), ", ".join(str(k + half) for k in low)
        pair = "sum[j], sum[j + {}], {}"
        lines.append(
            f"UNROLL for (int j = 0; j < {half}; j++) sum[j] = __builtin_shufflevector({pair.format(half, first)})"
            f" + __builtin_shufflevector({pair.format(half, second)});"
        )
        block = half
    return _TEXT.replace("TREE", "\n    ".join(lines))
