"""Values at points between pixels: GridSample and RoiAlign, and the grids of AffineGrid.

The kernels compute points like the reference, operation by operation (no fused multiply-add): at a border between two
pixels the last bit decides. Where the reference raises an error (a NaN as coordinate), they return some value of the
image.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from tunewright.devices.base import Target
from tunewright.ir.symbolic import lesser
from tunewright.ir.types import DType, TensorType
from tunewright.ops.microsoft.misc import GRID_MODES
from tunewright.ops.onnx.tensors.sampling import MOST_SAMPLES, axis_points
from tunewright.solvers.base import Config, Missing, Problem, tensor

from ..source.base import CSolver, both
from ..source.emit import COMPUTE, ConstantTable, EmittedLaunch, In, Out, Source
from ..source.indices import Shares, no_indices, unfit

_FLOATS = frozenset({DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16})
_TAPS = {"nearest": 1, "linear": 2, "cubic": 4}
_PADDING = {"zeros": 0, "border": 1, "reflection": 2}

_AXIS = """
#define EXACT _Pragma("clang fp contract(off)")
INLINE G reflected(G x, G low, G high) {
  EXACT
  G span = high - low, away = x < low ? low - x : x > high ? x - high : 0;
  G turns = TRUNC(away / span), rest = away - turns * span;
  bool even = turns - 2 * TRUNC(turns / 2) == 0;
  G folded = even == (x < low) ? low + rest : high - rest;
  return span <= 0 ? low : x < low || x > high ? folded : x;
}
INLINE G keys(G t) {
  const G a = -0.75f;
  t = t < 0 ? -t : t;
  G near = ((a + 2) * t - (a + 3)) * t * t + 1, far = ((t - 5) * t + 8) * t * a - 4 * a;
  return t <= 1 ? near : t < 2 ? far : 0;
}
/* Along one axis: which pixels count for a coordinate between -1 and 1, and how much. */
INLINE void taps(G x, int size, int corners, int padding, int* at, G* weight) {
  EXACT
  G low = corners ? 0 : -0.5f, high = corners ? size - 1 : size - 0.5f;
  x = corners ? (x + 1) / 2 * (size - 1) : ((x + 1) * size - 1) / 2;
  x = TAPS == 1 ? RINT(x) : x;
  if (padding == 1 && TAPS != 4 && (x < low || x > high)) x = x < 0 ? 0 : x > size - 1 ? size - 1 : x;
  if (padding == 2) x = reflected(x, low, high);
  G base = TAPS == 1 ? TRUNC(x) : FLOOR(x), part = x - base;
  for (int t = 0; t < TAPS; t++) {
    int step = TAPS == 4 ? t - 1 : t;
    G i = base + step, w = TAPS == 1 ? 1 : TAPS == 2 ? (t == 0 ? 1 - part : part) : keys(part - step);
    weight[t] = padding == 0 && !(i >= 0 && i < size) ? 0 : w;
    i = padding == 2 ? TRUNC(reflected(i, low, high)) : i;
    at[t] = i >= 0 ? (i < size ? (int)i : size - 1) : 0;
  }
}
"""

_GRID = """
int at[COMBINATIONS][POINTS];
T weight[COMBINATIONS][POINTS];
const int sizes[3] = {S0, S1, S2};
int begin = GID(0) * SHARE, end = begin + SHARE < BATCH * BLOCKS ? begin + SHARE : BATCH * BLOCKS;
for (int b = begin; b < end; b++) {
  int n = b / BLOCKS, first = b % BLOCKS * POINTS, count = TOTAL - first < POINTS ? TOTAL - first : POINTS;
  for (int p = 0; p < count; p++) {
    int index[RANK][TAPS];
    G part[RANK][TAPS];
    for (int k = 0; k < RANK; k++) {  /* the last coordinate belongs to the first axis */
      int place = (n * TOTAL + first + p) * RANK + RANK - 1 - k;
      taps(GRID, sizes[k], CORNERS, PADDING, index[k], part[k]);
    }
    for (int c = 0; c < COMBINATIONS; c++) {
      int rest = c, flat = 0;
      G product = 1;
      for (int k = 0, unit = COMBINATIONS / TAPS; k < RANK; k++, unit /= TAPS) {
        flat = flat * sizes[k] + index[k][rest / unit];
        product *= part[k][rest / unit];
        rest %= unit;
      }
      at[c][p] = flat;
      weight[c][p] = (T)product;
    }
  }
  for (int c = 0; c < CHANNELS; c++) {
    i64 plane = (n * CHANNELS + c) * PLANE, to = (n * CHANNELS + c) * TOTAL + first;
    for (int p = 0; p < count; p++) {
      T v = 0;
      UNROLL for (int k = 0; k < COMBINATIONS; k++) v += weight[k][p] * PIXEL;
      STORE
    }
  }
}
"""


class GridSample(CSolver):
    """Handles a block of points at a time: first their pixels and weights, then each channel."""

    family = "grid_sample"
    ops = frozenset({"GridSample", "com.microsoft::GridSample"})
    dtypes: ClassVar[frozenset[DType]] = _FLOATS
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        reason = unfit(problem, 2)
        if reason is not None:
            return reason
        mode, padding = _mode(problem), problem.attrs.get("padding_mode", "zeros")
        if mode not in _TAPS or padding not in _PADDING:
            return f"does not know mode {mode!r} with padding {padding!r}"
        shape = tensor(problem.inputs[0]).shape
        if shape is not None and len(shape) not in (3, 4, 5):
            return f"{len(shape) - 2} spatial axes"
        if problem.is_static and not tensor(problem.inputs[0]).size and tensor(problem.outputs[0]).size:
            return "there is nothing to sample"
        return None

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x, grid, y = tensor(problem.inputs[0]), tensor(problem.inputs[1]), tensor(problem.outputs[0])
        if not y.size:
            return []
        rank, count = len(x.dims) - 2, _TAPS[_mode(problem)]
        combinations = count**rank
        points = 64 if combinations <= 16 else 16
        total = math.prod(y.dims[2:])
        blocks = -(-total // points)
        shares = Shares.of(x.dims[0] * blocks, 1, 4 * points * x.dims[1] * (combinations + 2), target)
        source = Source("grid_sample", self.specialise)
        source.buffer("x", x.dtype, In(0))
        source.buffer("grid", grid.dtype, In(1))
        source.buffer("y", y.dtype, Out())
        suffix = "" if grid.dtype is DType.FLOAT64 else "f"
        source.fixed(G=COMPUTE[grid.dtype], T=COMPUTE[x.dtype], RANK=rank, TAPS=count, COMBINATIONS=combinations)
        source.fixed(POINTS=points, **{n.upper(): f"__builtin_{n}{suffix}" for n in ("trunc", "floor", "rint")})
        sizes = {f"S{k}": x.dims[k + 2] if k < rank else 1 for k in range(3)}
        source.dims(BATCH=x.dims[0], CHANNELS=x.dims[1], PLANE=math.prod(x.dims[2:]), **sizes)
        source.dims(TOTAL=total, BLOCKS=blocks, SHARE=shares.rows, CORNERS=int(problem.attrs.get("align_corners", 0)))
        source.dims(PADDING=_PADDING[problem.attrs.get("padding_mode", "zeros")])
        source.function(_AXIS)
        text = _GRID.replace("GRID", source.load("grid", "place")).replace("STORE", source.store("y", "to + p", "v"))
        source.add(text.replace("PIXEL", source.load("x", "plane + at[k][p]")))
        return [source.call(shares.grid[:1])]


def _mode(problem: Problem) -> str:
    mode = str(problem.attrs.get("mode", "linear"))
    return GRID_MODES.get(mode, mode)


_LINE = """
#define EXACT _Pragma("clang fp contract(off)")
typedef struct { int low, high; f64 below, above; } Point;
/* Sample k of bin i: the pixels around it and their weights, which are 0 far outside. */
INLINE Point point(f64 begin, f64 step, int i, int k, int samples, int size) {
  EXACT
  f64 at = begin + i * step + (k + 0.5) * step / samples;
  f64 counts = at >= -1 && at <= size;
  at = at > 0 ? at : 0;
  Point p;
  p.low = at < size - 1 ? (int)at : size - 1;
  p.high = p.low + 1 < size ? p.low + 1 : size - 1;
  at = p.low >= size - 1 ? p.low : at;
  p.above = (at - p.low) * counts;
  p.below = (1 - (at - p.low)) * counts;
  return p;
}
"""

_ROI = """
int begin = GID(0) * SHARE, end = begin + SHARE < ROIS ? begin + SHARE : ROIS;
int first = GID(1) * CHUNK, count = CHANNELS - first < CHUNK ? CHANNELS - first : CHUNK;
T sum[CHUNK];
int too_large = -1;
for (int r = begin; r < end; r++)
  if (batch[r] < 0 || batch[r] >= IMAGES) wrong(report, WRONG_ROW, batch[r], IMAGES);
for (int r = begin; r < end; r++) {
  EXACT
  f64 left = (f64)ROI0 * scale[0] - scale[1], top = (f64)ROI1 * scale[0] - scale[1];
  f64 right = (f64)ROI2 * scale[0] - scale[1], bottom = (f64)ROI3 * scale[0] - scale[1];
  f64 wide = right - left, tall = bottom - top;
  wide = GROW && wide < 1 ? 1 : wide;
  tall = GROW && tall < 1 ? 1 : tall;
  f64 down = RATIO ? RATIO : __builtin_ceil(tall / HEIGHT), along = RATIO ? RATIO : __builtin_ceil(wide / WIDTH);
  bool sampled = down >= 1 && along >= 1, large = down * HEIGHT * along * WIDTH > MOST;
  too_large = sampled && large ? r : too_large;
  int rows = sampled && !large ? (int)down : 0, columns = sampled && !large ? (int)along : 0;
  i64 image = (within(batch[r], IMAGES) * CHANNELS + first) * H * W;
  for (int i = 0; i < HEIGHT; i++)
    for (int j = 0; j < WIDTH; j++) {
      for (int c = 0; c < count; c++) sum[c] = MAXIMUM && rows && columns ? -INFINITY : 0;
      for (int a = 0; a < rows; a++)
        for (int b = 0; b < columns; b++) {
          Point v = point(top, tall / HEIGHT, i, a, rows, H), h = point(left, wide / WIDTH, j, b, columns, W);
          T w0 = (T)(v.below * h.below), w1 = (T)(v.below * h.above);
          T w2 = (T)(v.above * h.below), w3 = (T)(v.above * h.above);
          i64 p0 = image + v.low * W + h.low, p1 = image + v.low * W + h.high;
          i64 p2 = image + v.high * W + h.low, p3 = image + v.high * W + h.high;
          for (int c = 0; c < count; c++) {
            i64 plane = (i64)c * H * W;
            T x0 = X0 * w0, x1 = X1 * w1, x2 = X2 * w2, x3 = X3 * w3, s = sum[c];
            if (MAXIMUM) {
              s = x0 > s || x0 != x0 ? x0 : s;
              s = x1 > s || x1 != x1 ? x1 : s;
              s = x2 > s || x2 != x2 ? x2 : s;
              s = x3 > s || x3 != x3 ? x3 : s;
            } else {
              s += x0 + x1 + x2 + x3;
            }
            sum[c] = s;
          }
        }
      for (int c = 0; c < count; c++) {
        T value = MAXIMUM || !rows || !columns ? sum[c] : sum[c] / ((T)rows * columns);
        value = large ? (T)NAN : value;
        STORE
      }
    }
}
if (too_large >= 0) wrong(report, WRONG_BOX, too_large, MOST_SAMPLES);
"""
#: the number of channels that are summed side by side
_CHUNK = 64


class RoiAlign(CSolver):
    """Reports a box of more pixels than the reference takes, and fills it with NaN."""

    family = "roi_align"
    ops = frozenset({"RoiAlign"})
    dtypes: ClassVar[frozenset[DType]] = _FLOATS | {DType.INT32, DType.INT64}
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        reason = unfit(problem, 3)
        if reason is not None:
            return reason
        x, rois = (tensor(t) for t in problem.inputs[:2])
        if not {x.dtype, rois.dtype} <= _FLOATS:
            return f"does not compute with {x.dtype} and {rois.dtype}"
        if str(problem.attrs.get("mode", "avg")).lower() not in ("avg", "max"):
            return f"does not know the mode {problem.attrs['mode']}"
        if problem.is_static and not x.size and tensor(problem.outputs[0]).size:
            return "there is nothing to sample"
        return no_indices(problem.input(2))

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x, rois, batch = (tensor(t) for t in problem.inputs)
        y, attrs = tensor(problem.outputs[0]), problem.attrs
        if not y.size:
            return []
        count, channels, height, width = y.dims
        half = str(attrs.get("coordinate_transformation_mode", "half_pixel")).lower() == "half_pixel"
        chunks = -(-channels // _CHUNK)
        shares = Shares.of(count, 1, 64 * height * width * lesser(channels, _CHUNK), target)
        source = Source("roi_align", self.specialise)
        source.buffer("x", x.dtype, In(0))
        source.buffer("rois", rois.dtype, In(1))
        source.buffer("batch", batch.dtype, In(2))
        source.buffer("scale", DType.FLOAT64, _scale(float(attrs.get("spatial_scale", 1.0)), 0.5 if half else 0.0))
        source.buffer("y", y.dtype, Out())
        maximum = str(attrs.get("mode", "avg")).lower() == "max"
        source.fixed(T=COMPUTE[x.dtype], CHUNK=_CHUNK, MAXIMUM=int(maximum), MOST=f"{MOST_SAMPLES}.0")
        source.fixed(MOST_SAMPLES=MOST_SAMPLES)
        source.dims(ROIS=count, CHANNELS=channels, IMAGES=x.dims[0], H=x.dims[2], W=x.dims[3], SHARE=shares.rows)
        source.dims(HEIGHT=height, WIDTH=width, RATIO=int(attrs.get("sampling_ratio", 0)), GROW=int(not half))
        source.function("INLINE int within(i64 i, int n) { return (int)(i < 0 ? 0 : i < n ? i : n - 1); }")
        source.function(_LINE)
        place = "((r * CHANNELS + first + c) * HEIGHT + i) * WIDTH + j"
        text = _ROI.replace("STORE", source.store("y", place, "value"))
        for k in range(4):
            text = text.replace(f"ROI{k}", source.load("rois", f"4 * r + {k}"))
            text = text.replace(f"X{k}", source.load("x", f"plane + p{k}"))
        source.add(text)
        return [source.call([shares.grid[0], chunks])]


_AFFINE = """
int begin = GID(0) * SHARE, end = begin + SHARE < ROWS ? begin + SHARE : ROWS;
for (int r = begin; r < end; r++) {  /* a row is one line of points along the last axis */
  int n = r / LINES, line = r % LINES, first = n * RANK * (RANK + 1);
  for (int k = 0; k < RANK; k++) {
    int at = first + k * (RANK + 1);
    f64 slope = THETA0, rest = THETA1 * lines[W + line % H] + THETA_LAST;
    if (RANK == 3) rest += THETA2 * lines[W + H + line / H];
    i64 to = (i64)r * W * RANK + k;
    for (int j = 0; j < W; j++) {
      f64 v = slope * lines[j] + rest;
      STORE
    }
  }
}
"""


class AffineGrid(CSolver):
    """Computes points in double precision, as the reference does: a row of the matrix times (x, y, z, 1)."""

    family = "affine_grid"
    ops = frozenset({"AffineGrid"})
    dtypes: ClassVar[frozenset[DType]] = _FLOATS | {DType.INT64}
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        reason = unfit(problem, 2)
        if reason is not None:
            return reason
        if tensor(problem.inputs[0]).dtype not in _FLOATS:
            return f"does not compute with {tensor(problem.inputs[0]).dtype}"
        size = problem.value(1)
        if size is None:
            return Missing("the size is not constant")
        if size.size not in (4, 5):
            return f"{size.size - 2} spatial axes"
        return None

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        theta, y = tensor(problem.inputs[0]), tensor(problem.outputs[0])
        if not y.size:
            return []
        *outer, width = y.dims[1:-1]
        rank, rows = len(outer) + 1, math.prod(outer)
        shares = Shares.of(y.dims[0] * rows, 1, width * rank * y.dtype.itemsize, target)
        source = Source("affine_grid", self.specialise)
        source.buffer("theta", theta.dtype, In(0))
        source.buffer("lines", DType.FLOAT64, _points(y, bool(problem.attrs.get("align_corners", 0))))
        source.buffer("y", y.dtype, Out())
        source.fixed(RANK=rank)
        source.dims(ROWS=y.dims[0] * rows, LINES=rows, H=outer[-1], W=width, SHARE=shares.rows)
        text = _AFFINE.replace("THETA_LAST", f"(f64){source.load('theta', 'at + RANK')}")
        for k in range(3):
            text = text.replace(f"THETA{k}", f"(f64){source.load('theta', f'at + {k}')}")
        source.add(text.replace("STORE", source.store("y", "to + j * RANK", "v")))
        return [source.call(shares.grid[:1])]


def _points(y: TensorType, corners: bool) -> ConstantTable:
    """The coordinates of the last axis, then of the one before, and so on, one after the other."""
    return ConstantTable(np.concatenate([axis_points(d, corners) for d in reversed(y.dims[1:-1])]))


def _scale(scale: float, offset: float) -> ConstantTable:
    return ConstantTable(np.array([scale, offset]))


SOLVERS = (*both(GridSample), *both(RoiAlign), *both(AffineGrid))
