"""NonMaxSuppression with a count: a heap orders the boxes of a class, and each is compared with the kept ones."""

from __future__ import annotations

from typing import ClassVar

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater, lesser
from tunewright.ir.types import DType
from tunewright.ops.internal.row_counts import COUNTED
from tunewright.solvers.base import Config, Problem, tensor

from ..source import fold
from ..source.base import CSolver
from ..source.emit import EmittedLaunch, In, Out, Scratch, Source
from .nonzero import SUMMED

#: boxes that one box is compared with at a time
LANES = 16

#: A candidate is one number: its score, encoded so that larger is better, above the complement of its index. NaN is
#: worse than all scores. Of equal scores the lower index is better.
_HEAP = """
INLINE u64 candidate(f32 score, int index) {
  const u32 bits = as_u32(score + 0.0f);
  const u32 order = score != score ? 0 : bits >> 31 ? ~bits : bits | 0x80000000u;
  return (u64)order << 32 | (u32)~index;
}
INLINE void sink(GLOBAL u64* heap, int size, int here, u64 one) {
  for (;;) {
    int next = 2 * here + 1;
    if (next >= size) break;
    next += next + 1 < size && heap[next + 1] > heap[next];
    if (heap[next] < one) break;
    heap[here] = heap[next];
    here = next;
  }
  heap[here] = one;
}
"""
#: The corners of a box, lower ones first, and its area. Each sum and product is its own statement, so that no two are
#: rounded at once. Suppression is then decided as in the reference.
_BOX = """
typedef struct { f32 x1, y1, x2, y2, area; } Box;
INLINE Box box_of(GLOBAL const f32* b) {
  Box box;
#if CENTRE
  const f32 width = b[2] * 0.5f, height = b[3] * 0.5f;
  box.x1 = b[0] - width, box.x2 = b[0] + width;
  box.y1 = b[1] - height, box.y2 = b[1] + height;
#else
  box.x1 = f32_minimum(b[1], b[3]), box.x2 = f32_maximum(b[1], b[3]);
  box.y1 = f32_minimum(b[0], b[2]), box.y2 = f32_maximum(b[0], b[2]);
#endif
  const f32 wide = box.x2 - box.x1, high = box.y2 - box.y1;
  box.area = wide * high;
  return box;
}
/* Whether a box overlaps one of those that stay, which lie in blocks of five rows. */
INLINE int overlaps(GLOBAL const f32* kept, int blocks, Box box, f32 threshold) {
  for (; blocks > 0; blocks--, kept += 5 * LANES) {
    int any = 0;
    for (int l = 0; l < LANES; l++) {
      const f32 right = f32_min(kept[2 * LANES + l], box.x2), left = f32_max(kept[l], box.x1);
      const f32 lower = f32_min(kept[3 * LANES + l], box.y2), upper = f32_max(kept[LANES + l], box.y1);
      f32 width = right - left, height = lower - upper;
      width = width > 0 ? width : 0;
      height = height > 0 ? height : 0;
      const f32 inside = width * height, areas = kept[4 * LANES + l] + box.area;
      const f32 whole = areas - inside;
      any |= (inside / whole > threshold) & (inside > 0);
    }
    if (any) return 1;
  }
  return 0;
}
"""
#: the rest of a started block overlaps nothing
_KEEP = """
INLINE void keep(GLOBAL f32* kept, int count, Box box) {
  const int l = count % LANES;
  kept += count / LANES * 5 * LANES;
  if (l == 0)
    for (int i = 0; i < LANES; i++) {
      kept[i] = kept[LANES + i] = F32_INFINITY;
      kept[2 * LANES + i] = kept[3 * LANES + i] = -F32_INFINITY;
      kept[4 * LANES + i] = 0;
    }
  kept[l] = box.x1, kept[LANES + l] = box.y1;
  kept[2 * LANES + l] = box.x2, kept[3 * LANES + l] = box.y2;
  kept[4 * LANES + l] = box.area;
}
"""
#: Skip blocks of low scores, but not on OpenCL: Intel's runtime crashes in that loop.
_SELECT = """
const i64 given = LIMIT;
const int most = given < 0 ? 0 : given < MOST ? (int)given : MOST;
const f32 threshold = THRESHOLD;
GLOBAL u64* heap = candidates + (i64)GID(0) * BOXES;
GLOBAL f32* own = kept + (i64)GID(0) * KEPT;
const int stop = (GID(0) + 1) * EACH < GROUPS ? (GID(0) + 1) * EACH : GROUPS;
for (int group = GID(0) * EACH; group < stop; group++) {
  GLOBAL const f32* score = scores + (i64)group * BOXES;
  GLOBAL const f32* box = boxes + (i64)(group / CLASSES) * BOXES * 4;
  int size = 0, count = 0;
#ifdef __OPENCL_VERSION__
  for (int i = 0; i < BOXES && most; i++) {
    heap[size] = candidate(score[i], i);
    size += PASSES(score[i]);
  }
#else
  for (int i = 0; i < BOXES && most; i += LANES) {
    const int end = i + LANES < BOXES ? i + LANES : BOXES;
    int any = end < i + LANES;
    if (!any)
      for (int l = 0; l < LANES; l++) any |= PASSES(score[i + l]);
    if (!any) continue;
    for (int j = i; j < end; j++) {
      heap[size] = candidate(score[j], j);
      size += PASSES(score[j]);
    }
  }
#endif
  for (int i = size / 2 - 1; i >= 0; i--) sink(heap, size, i, heap[i]);
  while (size > 0 && count < most) {
    const int index = (int)~(u32)heap[0];
    sink(heap, size - 1, 0, heap[size - 1]);
    size--;
    const Box one = box_of(box + index * 4);
    if (overlaps(own, (count + LANES - 1) / LANES, one, threshold)) continue;
    keep(own, count, one);
    selected[(i64)group * MOST + count++] = index;
  }
  counts[group] = count;
}
"""
_WRITE = (
    SUMMED
    + """
if (GID(0) == 0) total[0] = all;
const int group = GID(0), count = counts[group];
for (int j = 0; j < count; j++) {
  GLOBAL i64* row = y + (i64)(at + j) * 3;
  row[0] = group / CLASSES;
  row[1] = group % CLASSES;
  row[2] = selected[(i64)group * MOST + j];
}
"""
)
_NOTHING = "total[0] = 0;"


class NonMaxSuppression(CSolver):
    """Work-items take whole classes of an image; then their rows are written, one class behind another."""

    family = "nms"
    ops = frozenset({COUNTED["NonMaxSuppression"]})
    dtypes: ClassVar[frozenset[DType]] = frozenset({DType.FLOAT32, DType.INT64})
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        if problem.epilogue:
            return "takes no epilogue"
        for i, dtype in enumerate((*(DType.FLOAT32,) * 2, DType.INT64, *(DType.FLOAT32,) * 2)):
            given = problem.input(i)
            if given is not None and tensor(given).dtype is not dtype:
                return f"input {i} of {tensor(given).dtype}"
        return None

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        batch, classes, boxes = tensor(problem.inputs[1]).dims
        groups, most = batch * classes, _most(problem)
        limit, threshold, least = (_is_there(problem, i) for i in (2, 3, 4))
        select, write = Source("nms_select", self.specialise), Source("nms_write", self.specialise)
        write.buffer("total", DType.INT64, Out(1))
        if not limit or not groups * boxes:
            write.add(_NOTHING)
            return [write.call([1])]
        each, items = fold.split(groups, 4 * target.units)
        rows = -(-most // LANES) * LANES * 5
        for source in (select, write):
            source.buffer("counts", DType.INT32, Scratch("counts", groups * 4))
            source.buffer("selected", DType.INT32, Scratch("selected", greater(1, groups * most) * 4))
            source.dims(CLASSES=classes, MOST=most)
        select.buffer("boxes", DType.FLOAT32, In(0))
        select.buffer("scores", DType.FLOAT32, In(1))
        select.buffer("limits", DType.INT64, In(2))
        select.buffer("thresholds", DType.FLOAT32, In(3))
        select.buffer("least", DType.FLOAT32, In(4))
        select.buffer("candidates", DType.UINT64, Scratch("candidates", items * boxes * 8))
        select.buffer("kept", DType.FLOAT32, Scratch("kept", greater(1, items * rows) * 4))
        select.dims(BOXES=boxes, GROUPS=groups, EACH=each, KEPT=rows)
        select.fixed(LANES=LANES, CENTRE=int(bool(problem.attrs.get("center_point_box", 0))), LIMIT="limits[0]")
        select.fixed(THRESHOLD="thresholds[0]" if threshold else "0")
        select.function(f"#define PASSES(s) ({'(s) > least[0]' if least else '1'})")
        for function in (_HEAP, _BOX, _KEEP):
            select.function(function)
        select.add(_SELECT)
        write.buffer("y", DType.INT64, Out(0))
        write.dims(PARTS=groups)
        write.add(_WRITE)
        return [select.call([items]), write.call([groups])]


def _is_there(problem: Problem, i: int) -> bool:
    """Whether an optional scalar is given."""
    given = problem.input(i)
    return given is not None and tensor(given).size > 0


def _most(problem: Problem) -> int:
    """Return how many boxes of a class may stay, as far as that is known."""
    boxes, limit = tensor(problem.inputs[1]).dims[2], problem.value(2)
    return boxes if limit is None or not limit.size else lesser(boxes, greater(0, limit.reshape(-1).tolist()[0]))


SOLVERS = (NonMaxSuppression(),)
