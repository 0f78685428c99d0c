"""TopK: each row keeps its best K elements in a heap with the worst at its root, and sorts it at the end."""

from __future__ import annotations

from tunewright.devices.base import Target
from tunewright.ir.types import DType
from tunewright.solvers.base import Config, Missing, Problem, tensor

from ..source import fold
from ..source.base import CSolver, both
from ..source.emit import COMPUTE, STORAGE, EmittedLaunch, In, Out, Scratch, Source

#: The heap lies in the outputs, so that K may be large. Of equal values the lower index is better; NaN is worse than
#: all others. No two elements are equally good, so the result does not depend on the algorithm.
_HEAP = """
INLINE int better(T a, i64 i, T b, i64 j) {
  const int no_a = IS_NAN(a), no_b = IS_NAN(b);
  return (no_a | no_b) ? (no_a == no_b ? i < j : no_b) : a == b ? i < j : a BEATS b;
}
INLINE int enters(T v, T worst) { return (v BEATS worst) | (IS_NAN(worst) & !IS_NAN(v)); }
INLINE int any_enters(GLOBAL const S* from, T worst) {
  int any = 0;
  for (int l = 0; l < 16; l++) any |= enters(LOAD(from[l]), worst);
  return any;
}
/* puts an element into the heap's first `size` places from the root down */
INLINE void sift(GLOBAL S* y, GLOBAL i64* at, int size, int step, S s, i64 i) {
  int here = 0;
  const T v = LOAD(s);
  for (;;) {
    int next = 2 * here + 1;
    if (next >= size) break;
    if (next + 1 < size && better(LOAD(y[next * step]), at[next * step],
                                  LOAD(y[(next + 1) * step]), at[(next + 1) * step])) next++;
    if (!better(v, i, LOAD(y[next * step]), at[next * step])) break;
    y[here * step] = y[next * step];
    at[here * step] = at[next * step];
    here = next;
  }
  y[here * step] = s;
  at[here * step] = i;
}
"""


class TopK(CSolver):
    """A work-item takes whole rows, along any axis."""

    family = "topk"
    ops = frozenset({"TopK"})
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if problem.epilogue:
            return "takes no epilogue"
        return Missing("K is not constant") if problem.value(1) is None else None

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x, k = tensor(problem.inputs[0]), tensor(problem.outputs[0])
        axis = int(problem.attrs.get("axis", -1))
        outer, size, inner = fold.around(x.dims, axis)
        source = Source("topk", self.specialise)
        source.buffer("x", x.dtype, In(0))
        source.buffer("values", x.dtype, Out(0))
        indices: Out | Scratch = Out(1)
        if len(problem.outputs) < 2 or problem.outputs[1] is None:
            indices = Scratch("indices", k.size * DType.INT64.itemsize)
        source.buffer("indices", DType.INT64, indices)
        element = source.load("x", "0").replace("x[0]", "{}")
        source.fixed(STRIDE=1 if inner == 1 else "INNER")
        source.fixed(T=COMPUTE[x.dtype], S=STORAGE[x.dtype], BEATS=">" if problem.attrs.get("largest", 1) else "<")
        source.function(f"#define LOAD(s) {element.format('(s)')}")
        source.function(f"#define IS_NAN(x) ({fold.is_nan(x.dtype, '(x)')})")
        source.function(_HEAP)
        each, grid = fold.split(outer * inner, fold.work_items(x.size, target.units, 2048))
        source.dims(ROWS=outer * inner, ROWS_EACH=each, SIZE=size, INNER=inner, K=k.dims[axis])
        source.add("""
const int stop = (GID(0) + 1) * ROWS_EACH < ROWS ? (GID(0) + 1) * ROWS_EACH : ROWS;
for (int row = GID(0) * ROWS_EACH; row < stop; row++) {
  GLOBAL const S* from = x + row / INNER * SIZE * INNER + row % INNER;
  const int first = row / INNER * K * INNER + row % INNER;
  GLOBAL S* y = values + first;
  GLOBAL i64* at = indices + first;
  /* a heap of the first K elements: each is put in at the end and moved up */
  for (int i = 0; i < K; i++) {
    const S s = from[i * STRIDE];
    int here = i;
    for (; here > 0; here = (here - 1) / 2) {
      const int up = (here - 1) / 2;
      if (better(LOAD(s), i, LOAD(y[up * STRIDE]), at[up * STRIDE])) break;
      y[here * STRIDE] = y[up * STRIDE];
      at[here * STRIDE] = at[up * STRIDE];
    }
    y[here * STRIDE] = s;
    at[here * STRIDE] = i;
  }
  /* each later one that is better than the worst takes its place; its index is higher, so equal is not better */
  T worst = LOAD(y[0]);
  for (int i = K; i < SIZE; i++) {
    if (STRIDE == 1)
      while (i + 16 <= SIZE && !any_enters(from + i, worst)) i += 16;
    if (i >= SIZE) break;
    const S s = from[i * STRIDE];
    if (enters(LOAD(s), worst)) {
      sift(y, at, K, STRIDE, s, i);
      worst = LOAD(y[0]);
    }
  }
  /* the worst goes to the end of what is left */
  for (int left = K - 1; left > 0; left--) {
    const S s = y[left * STRIDE];
    const i64 i = at[left * STRIDE];
    y[left * STRIDE] = y[0];
    at[left * STRIDE] = at[0];
    sift(y, at, left, STRIDE, s, i);
  }
}""")
        return [source.call([grid if k.size else 0])]


SOLVERS = both(TopK)
