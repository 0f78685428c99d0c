"""Convolutions in the plain layout, ordinary and transposed, as one loop over a table of offsets.

A work-item copies the part of the input that a band of outputs reads into its slab. The slab is padded and has the type
of the arithmetic. It separates the phases of a stride, so that one tap of neighbouring outputs lies in neighbouring
elements. The result at position q of the band is then ``sum over k of weight[k] * slab[offset[k] + q]``, where k runs
over input channels and taps. Rank, stride, dilation and padding only affect the offsets, and no loop checks for
borders.

A transposed convolution does this for each phase of its output (position modulo stride); each phase has separate taps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tunewright.devices.base import Target
from tunewright.ir.symbolic import lesser
from tunewright.ir.types import DType
from tunewright.solvers.base import Config, Problem, tensor

from ..source.emit import COMPUTE, EmittedLaunch, In, Out, Scratch, Source
from ..source.epilogue import Epilogue
from .conv_plan import SlabPlan, compute_dtype, lanes, table

_BEGIN = """
GLOBAL const i32 *first = table, *offsets = table + PHASES + 1 + TAPS;
GLOBAL T* slab = slabs + GID(0) * SLAB;
int held = -1, last_task = TASKS * (GID(0) + 1) / ITEMS;
for (int task = TASKS * GID(0) / ITEMS; task < last_task; task++) {
  int band = task / (PHASES * BLOCKS), sub = task - band * (PHASES * BLOCKS);
  int left = band / BANDS_W, w0 = (band - left * BANDS_W) * COLUMNS;
  int h0 = left % BANDS_H * ROWS; left /= BANDS_H;
  int d0 = left % DEPTHS; left /= DEPTHS;
  int group = left % GROUPS, image = left / GROUPS;
  int rows = RESULTS_H - h0 < ROWS ? RESULTS_H - h0 : ROWS;
  int columns = RESULTS_W - w0 < COLUMNS ? RESULTS_W - w0 : COLUMNS;
"""

_COPY = """
  if (band != held) {
    held = band;
    if (PIXEL) for (int c = 0; c < IC; c++) slab[c] = @PIXELS@;
    int high = rows + SLOTS_H - ROWS, wide = columns + SLOTS_W - COLUMNS;
    for (int c = 0; c < (PIXEL ? 0 : IC); c++)
      for (int d = 0; d < PHASES_D * SLOTS_D; d++) {
        int id = d0 * STEP_D - HEAD_D + d * APART_D;
        for (int pw = 0; pw < PHASES_W; pw++) {
          int iw = w0 * STEP_W - HEAD_W + pw * APART_W;
          int from = iw < 0 ? (STEP_W - 1 - iw) / STEP_W : 0;
          int to = IW > iw ? (IW - iw + STEP_W - 1) / STEP_W : 0;
          to = to < wide ? to : wide;
          from = from < to ? from : to;
          for (int ph = 0; ph < PHASES_H; ph++)
            for (int e = 0; e < high; e++) {
              int ih = h0 * STEP_H - HEAD_H + ph * APART_H + e * STEP_H;
              GLOBAL T* row = slab + c * SLOTS + d * SLICE + (ph * PHASES_W + pw) * PLANE + e * SLOTS_W;
              int inside = id >= 0 && id < ID && ih >= 0 && ih < IH;
              int begin = inside ? from : 0, end = inside ? to : 0;
              int source = ((((image * GROUPS + group) * IC + c) * ID + id) * IH + ih) * IW + iw;
              ROLLED for (int i = 0; i < begin; i++) row[i] = 0;
              if (STEP_W == 1)
                for (int i = begin; i < end; i++) row[i] = @CONTIGUOUS@;
              else
                ROLLED for (int i = begin; i < end; i++) row[i] = @STRIDED@;
              ROLLED for (int i = end; i < wide; i++) row[i] = 0;
            }
        }
      }
  }
"""

_PRODUCT = """
  int phase = sub / BLOCKS, block = sub - phase * BLOCKS;
  int depth = IC * (first[phase + 1] - first[phase]);
  GLOBAL const i32* offset = offsets + IC * first[phase];
  GLOBAL const T* weights = w + (group * TAPS + first[phase]) * IC * BLOCKS * CT + block * depth * CT;
  int rest = OC - block * CT < CT ? OC - block * CT : CT, channel0 = group * OC + block * CT;
  T bias[CT];
  ROLLED for (int j = 0; j < CT; j++) bias[j] = @BIAS@;
  int stop = (rows - 1) * SLOTS_W + columns;
  for (int q0 = 0; q0 < stop; q0 += PT) {
    T tile[CT * PT];
    GLOBAL const T* start = slab + q0;
    if (stop - q0 > @FEW@) {
@FULL@
    } else {
@SMALL@
    }
    int q1 = q0 + PT < stop ? q0 + PT : stop;
    for (int q = q0; q < q1;) {
      int row = q / SLOTS_W, column = q - row * SLOTS_W;
      int until = column + q1 - q < columns ? column + q1 - q : columns;
      @WHERE@
      for (int j = 0; j < rest; j++) {
        int channel = channel0 + j, line = (((image * GROUPS * OC + channel) * OD + od) * OH + oh) * OW + ow;
        for (int c = column; c < until; c++) {
          T v = tile[@TILE@];
          int place = line + c@ACROSS@;
          @STORE@
        }
      }
      q += SLOTS_W - column;
    }
  }
}
"""
_WHERE = "int od = d0, oh = h0 + row, ow = w0;"
_WHERE_TRANSPOSED = """int pw = phase % OUT_STEP_W, pd = phase / OUT_STEP_W / OUT_STEP_H;
      int ph = phase / OUT_STEP_W - pd * OUT_STEP_H;
      int od = d0 * OUT_STEP_D + pd, oh = (h0 + row) * OUT_STEP_H + ph, ow = w0 * OUT_STEP_W + pw;
      int most = OW > ow ? (OW - ow + OUT_STEP_W - 1) / OUT_STEP_W : 0;
      until = od >= OD || oh >= OH ? 0 : until < most ? until : most;"""

_PACK = """
GLOBAL const i32 *first = table, *order = table + PHASES + 1;
int last = GROUPS * BLOCKS * (GID(0) + 1) / ITEMS;
for (int task = GROUPS * BLOCKS * GID(0) / ITEMS; task < last; task++) {
  int group = task / BLOCKS, block = task - group * BLOCKS;
  for (int phase = 0; phase < PHASES; phase++) {
    int begin = first[phase], count = first[phase + 1] - begin;
    GLOBAL T* to = packed + ((group * TAPS + begin) * BLOCKS + block * count) * IC * CT;
    for (int c = 0; c < IC; c++)
      for (int t = 0; t < count; t++)
        for (int j = 0; j < CT; j++) {
          int channel = block * CT + j < OC ? block * CT + j : OC - 1;
          *to++ = @WEIGHT@;
        }
  }
}
"""


def calls(problem: Problem, made: SlabPlan, config: Config, target: Target, specialise: bool) -> list[EmittedLaunch]:
    """The launches for a Conv or ConvTranspose; weights that are not constant are packed in each run."""
    if not tensor(problem.outputs[0]).size:
        return []
    dtype, name = compute_dtype(problem), "conv_transpose" if made.transposed else "conv"
    source = Source(name, specialise)
    source.buffer("x", tensor(problem.inputs[0]).dtype, In(0))
    whole = made.groups * made.inputs * made.window.taps * made.blocks * made.channels
    packed = Scratch("weights", whole * dtype.itemsize)
    source.buffer("w", dtype, In(1) if problem.constant[1] else packed)
    bias = problem.input(2)
    if bias is not None:
        source.buffer("b", tensor(bias).dtype, In(2))
    steps = Epilogue(source, problem)
    source.buffer("y", tensor(problem.outputs[0]).dtype, Out())
    slab = made.inputs * made.channel_slots + made.positions
    source.buffer("slabs", dtype, Scratch("slabs", made.items * slab * dtype.itemsize))
    source.dims(SLAB=slab, PIXEL=int(made.window.pointwise and math.prod(made.window.input) == 1))
    _geometry(source, made, made.items)
    _bands(source, made)
    wide, across = int(config["vectors"]), int(config["scalars"])
    source.fixed(T=COMPUTE[dtype], CT=made.channels, PT=made.positions)
    source.function(f"vector_of(T, {lanes(problem, target)}, V);")
    source.function(f"typedef V VU __attribute__((aligned({dtype.itemsize})));")
    source.function('#define ROLLED _Pragma("clang loop vectorize(disable) unroll(disable)")')
    source.function("#define PUT(p, v) (*(VU*)(p) = (v))")
    by_position = config["lanes"] == "positions"
    step = lanes(problem, target)
    lines, result = steps.apply("v", "channel", "place")
    text = _BEGIN + _COPY + _PRODUCT
    marks = {
        "PIXELS": source.load("x", "(image * GROUPS + group) * IC + c"),
        "CONTIGUOUS": source.load("x", "source + i"),
        "STRIDED": source.load("x", "source + i * STEP_W"),
        "BIAS": "0" if bias is None else source.load("b", "channel0 + (j < rest ? j : rest - 1)"),
        "FEW": str(step if by_position and wide > 1 else 1 if not by_position and across > 1 else 0),
        "FULL": _tile(wide, across, step, by_position),
        "SMALL": _tile(1, across, step, True) if by_position else _tile(wide, 1, step, False),
        "WHERE": _WHERE_TRANSPOSED if made.transposed else _WHERE,
        "TILE": "j * PT + q - q0 + c - column" if by_position else "(q - q0 + c - column) * CT + j",
        "ACROSS": " * OUT_STEP_W" if made.transposed else "",
        "STORE": lines + "\n" + source.store("y", "place", result),
    }
    source.add(_marked(text, marks))
    main = source.call([made.items])
    return [main] if problem.constant[1] else [_pack(problem, made, packed, specialise), main]


def _geometry(source: Source, made: SlabPlan, items: int) -> None:
    """Declares the table and the dimensions that every kernel here reads."""
    source.buffer("table", DType.INT32, table(made))
    source.dims(
        IC=made.inputs, OC=made.outputs, GROUPS=made.groups, BLOCKS=made.blocks, TAPS=made.window.taps,
        PHASES=math.prod(made.output_phases), ITEMS=items,
    )  # fmt: skip


def _bands(source: Source, made: SlabPlan) -> None:
    """Declares the dimensions of bands and slabs."""
    for k, name in enumerate("DHW"):
        axis = made.axes[k]
        source.dims(**{
            f"SLOTS_{name}": axis.slots, f"PHASES_{name}": axis.phases, f"STEP_{name}": axis.step,
            f"HEAD_{name}": axis.head, f"APART_{name}": axis.apart, f"I{name}": made.window.input[k],
            f"O{name}": made.window.output[k],
        })  # fmt: skip
        if made.transposed:
            source.dims(**{f"OUT_STEP_{name}": made.output_phases[k]})
    _, height, width = made.axes
    plane = height.slots * width.slots
    depths, results_h, results_w = made.results
    source.dims(
        PLANE=plane, SLICE=plane * height.phases * width.phases, SLOTS=made.channel_slots, TASKS=made.tasks,
        ROWS=made.rows, COLUMNS=made.columns, RESULTS_H=results_h, RESULTS_W=results_w, DEPTHS=depths,
        BANDS_H=-(-results_h // made.rows), BANDS_W=-(-results_w // made.columns),
    )  # fmt: skip


def _pack(problem: Problem, made: SlabPlan, packed: Scratch, specialise: bool) -> EmittedLaunch:
    """The launch that brings weights which another kernel computed into the order of `packing`."""
    source = Source("pack_weights", specialise)
    source.buffer("w", tensor(problem.inputs[1]).dtype, In(1))
    source.buffer("packed", compute_dtype(problem), packed)
    source.fixed(T=COMPUTE[compute_dtype(problem)], CT=made.channels)
    items = lesser(made.groups * made.blocks, made.items)
    _geometry(source, made, items)
    filter = "(group * IC + c) * OC + channel" if made.transposed else "(group * OC + channel) * IC + c"
    source.add(_marked(_PACK, {"WEIGHT": source.load("w", f"({filter}) * TAPS + order[begin + t]")}))
    return source.call([items])


def _tile(vectors: int, scalars: int, step: int, by_position: bool) -> str:
    """A tile of results: ``vectors`` along the lanes times ``scalars`` across them."""
    pairs = [(s, v) for s in range(scalars) for v in range(vectors)]
    # If lanes are positions, the scalar is a channel's weight and the vector comes from the slab; else the reverse.
    vector, scalar = ("values", "factors") if by_position else ("factors", "values")
    bias = {(s, v): f"(V)(bias[{s}])" if by_position else f"*(VU*)(bias + {v * step})" for s, v in pairs}
    place = {(s, v): f"{s} * PT + {v * step}" if by_position else f"{s} * CT + {v * step}" for s, v in pairs}
    return "\n".join(
        [f"V a{s}_{v} = {bias[s, v]};" for s, v in pairs]
        + ["for (int k = 0; k < depth; k++) {"]
        + ["GLOBAL const T *values = start + offset[k], *factors = weights + k * CT;"]
        + [f"V x{v} = LOADV({vector} + {v * step});" for v in range(vectors)]
        + [f"a{s}_{v} = (V)({scalar}[{s}]) * x{v} + a{s}_{v};" for s, v in pairs]
        + ["}"]
        + [f"PUT(tile + {place[s, v]}, a{s}_{v});" for s, v in pairs]
    )


def _marked(text: str, marks: Mapping[str, str]) -> str:
    """The text with every @MARK@ of ``marks`` replaced."""
    for name, value in marks.items():
        text = text.replace(f"@{name}@", value)
    return text
