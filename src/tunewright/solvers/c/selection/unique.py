"""Unique with a count: elements are radix-sorted, rows along an axis are merge-sorted; then equal ones lie together."""

from __future__ import annotations

from typing import ClassVar

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater
from tunewright.ir.types import DType
from tunewright.ops.internal.row_counts import COUNTED
from tunewright.solvers.base import Config, Problem, tensor

from ..source import fold
from ..source.base import CSolver
from ..source.emit import COMPUTE, STORAGE, EmittedLaunch, In, Out, Scratch, Source

#: A larger element has a larger key. Zeros are equal, and so are NaNs, behind all others. Bits decide: float arithmetic
#: may take the smallest numbers for zero.
_FLOAT_KEY = """
INLINE KEY key_of(T v) {
  const KEY given = AS_KEY(v), bits = (KEY)(given << 1) ? given : 0;
  return v != v ? ~(KEY)0 : bits >> TOP ? ~bits : bits | (KEY)1 << TOP;
}
"""
_INTEGER_KEY = """
INLINE KEY key_of(T v) { return (KEY)v ^ FLIP; }
"""
#: Sorts by one byte after another, the lowest first; equal keys stay in index order.
_RADIX = """
INLINE void sort_keys(GLOBAL KEY* keys, GLOBAL KEY* more_keys, GLOBAL i32* at, GLOBAL i32* more_at, int size) {
  u32 begin[256];
  int turns = 0;
  for (int shift = 0; shift < 8 * (int)sizeof(KEY); shift += 8) {
    GLOBAL KEY* from = turns & 1 ? more_keys : keys;
    GLOBAL KEY* to = turns & 1 ? keys : more_keys;
    GLOBAL i32* from_at = turns & 1 ? more_at : at;
    GLOBAL i32* to_at = turns & 1 ? at : more_at;
    for (int d = 0; d < 256; d++) begin[d] = 0;
    for (int j = 0; j < size; j++) begin[from[j] >> shift & 255]++;
    if (size && begin[from[0] >> shift & 255] == (u32)size) continue;
    u32 sum = 0;
    for (int d = 0; d < 256; d++) {
      const u32 one = begin[d];
      begin[d] = sum;
      sum += one;
    }
    for (int j = 0; j < size; j++) {
      const u32 place = begin[from[j] >> shift & 255]++;
      to[place] = from[j];
      to_at[place] = from_at[j];
    }
    turns++;
  }
  if (turns & 1)
    for (int j = 0; j < size; j++) {
      keys[j] = more_keys[j];
      at[j] = more_at[j];
    }
}
"""
#: Rows are compared element by element. NaN equals nothing there.
_ROWS = """
INLINE int precedes(GLOBAL const S* x, int a, int b, int outer, int size, int inner) {
  for (int o = 0; o < outer; o++)
    for (int i = 0; i < inner; i++) {
      const KEY one = key_of(LOAD(x[((i64)o * size + a) * inner + i]));
      const KEY other = key_of(LOAD(x[((i64)o * size + b) * inner + i]));
      if (one != other) return one < other;
    }
  return 0;
}
INLINE int are_same(GLOBAL const S* x, int a, int b, int outer, int size, int inner) {
  for (int o = 0; o < outer; o++)
    for (int i = 0; i < inner; i++) {
      const T one = LOAD(x[((i64)o * size + a) * inner + i]);
      if (IS_NAN(one) || key_of(one) != key_of(LOAD(x[((i64)o * size + b) * inner + i]))) return 0;
    }
  return 1;
}
INLINE void sort_rows(GLOBAL const S* x, GLOBAL i32* at, GLOBAL i32* more_at, int outer, int size, int inner) {
  for (int width = 1; width < size; width *= 2) {
    for (int begin = 0; begin < size; begin += 2 * width) {
      const int middle = begin + width < size ? begin + width : size;
      const int end = middle + width < size ? middle + width : size;
      int left = begin, right = middle;
      for (int j = begin; j < end; j++) {
        const int second = right < end && (left >= middle || precedes(x, at[right], at[left], outer, size, inner));
        more_at[j] = second ? at[right++] : at[left++];
      }
    }
    for (int j = 0; j < size; j++) at[j] = more_at[j];
  }
}
"""
_SORT_KEYS = """
for (int i = 0; i < SIZE; i++) {
  keys[i] = key_of(LOAD(x[i]));
  at[i] = i;
}
sort_keys(keys, more_keys, at, more_at, SIZE);"""
_SORT_ROWS = """
for (int i = 0; i < SIZE; i++) at[i] = i;
sort_rows(x, at, more_at, OUTER, SIZE, INNER);"""
_GROUPS = """
int groups = 0;
for (int j = 0; j < SIZE; j++) {
  if (j == 0 || !SAME) {
    first[groups] = at[j];
    sizes[groups++] = 0;
  }
  sizes[groups - 1]++;
  of[at[j]] = groups - 1;
}
total[0] = groups;"""
_IN_ORDER = """
for (int g = 0; g < groups; g++) rank[g] = g;"""
_AS_FOUND = """
for (int i = 0, next = 0; i < SIZE; i++)
  if (first[of[i]] == i) rank[of[i]] = next++;"""
_WRITE = """
for (int g = 0; g < groups; g++)
  for (int o = 0; o < OUTER; o++)
    for (int i = 0; i < INNER; i++)
      y[((i64)o * groups + rank[g]) * INNER + i] = x[((i64)o * SIZE + first[g]) * INNER + i];"""
#: the other results, which a model may omit
_MORE = (
    ("indices", "for (int g = 0; g < groups; g++) indices[rank[g]] = first[g];"),
    ("inverse", "for (int i = 0; i < SIZE; i++) inverse[i] = rank[of[i]];"),
    ("counts", "for (int g = 0; g < groups; g++) counts[rank[g]] = sizes[g];"),
)


class Unique(CSolver):
    """A single work-item does all the work."""

    family = "unique"
    ops = frozenset({COUNTED["Unique"]})
    dtypes: ClassVar[frozenset[DType]] = frozenset(STORAGE)
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        return "takes no epilogue" if problem.epilogue else None

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x, axis = tensor(problem.inputs[0]), problem.attrs.get("axis")
        outer, size, inner = (1, x.size, 1) if axis is None else fold.around(x.dims, int(axis))
        source, room = Source("unique", self.specialise), greater(1, size)
        source.buffer("x", x.dtype, In(0))
        source.buffer("y", x.dtype, Out(0))
        outputs = problem.outputs[1:-1]
        more = [(k, *one) for k, one in enumerate(_MORE, 1) if k <= len(outputs) and outputs[k - 1] is not None]
        for k, name, _ in more:
            source.buffer(name, DType.INT64, Out(k))
        source.buffer("total", DType.INT64, Out(len(problem.outputs) - 1))
        for name in ("at", "more_at", "first", "sizes", "of", "rank"):
            source.buffer(name, DType.INT32, Scratch(name, 4 * room))
        source.dims(OUTER=outer, SIZE=size, INNER=inner)
        element = source.load("x", "0").replace("x[0]", "(s)")
        source.fixed(S=STORAGE[x.dtype], T=COMPUTE[x.dtype])
        source.function(f"#define LOAD(s) {element}")
        key = _keys(source, x.dtype)
        if axis is None:
            for name in ("keys", "more_keys"):
                source.buffer(name, key, Scratch(name, key.itemsize * room))
            source.fixed(SAME="(keys[j - 1] == keys[j])")
            source.function(_RADIX)
            source.add(_SORT_KEYS)
        else:
            source.fixed(SAME="are_same(x, at[j - 1], at[j], OUTER, SIZE, INNER)")
            source.function(f"#define IS_NAN(v) ({fold.is_nan(x.dtype, '(v)')})")
            source.function(_ROWS)
            source.add(_SORT_ROWS)
        source.add(_GROUPS)
        source.add(_IN_ORDER if problem.attrs.get("sorted", 1) else _AS_FOUND)
        source.add(_WRITE)
        for _, _, text in more:
            source.add(text)
        return [source.call([1])]


def _keys(source: Source, dtype: DType) -> DType:
    """Return the type of an element's key; adds the function that makes it."""
    compute = COMPUTE[dtype]
    key, bits = (DType.UINT64, 64) if compute.endswith("64") else (DType.UINT32, 32)
    source.fixed(KEY=STORAGE[key])
    if compute.startswith("f"):
        source.fixed(TOP=bits - 1, AS_KEY=f"as_{STORAGE[key]}")
        source.function(_FLOAT_KEY)
    else:
        source.fixed(FLIP=f"(KEY)1 << {bits - 1}" if compute.startswith("i") else "0")
        source.function(_INTEGER_KEY)
    return key


SOLVERS = (Unique(),)
