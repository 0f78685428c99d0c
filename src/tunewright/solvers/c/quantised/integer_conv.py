"""Convolutions of 8-bit integers, exact in 32 bits, and QLinearConv, which scales the sums and quantises them again.

The input is first widened to 16 bits, centred and padded with zeros (`_widen`), so that the sums check no borders. Then
a convolution is a matrix product whose rows are output pixels. Two tables say where a pixel's window begins, and where
the numbers of a step lie in it. Therefore one text serves any number of axes, strides, dilations and windows. Groups
with few output channels would leave most lanes of a vector empty; for these, lanes are pixels of a row (`_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater, lesser
from tunewright.ir.types import DType
from tunewright.search.space import Space
from tunewright.solvers.base import Array, Config, Packing, Problem, tensor

from ..source import epilogue, window
from ..source.base import CSolver, both
from ..source.emit import ConstantTable, EmittedLaunch, In, Scratch, Source
from ..source.window import Window
from .integer_product import (
    BYTES,
    DEEPEST,
    LEAST_WORK,
    MS,
    ROLES,
    Finish,
    Sums,
    Weights,
    packed,
    present,
    tile_of,
    tile_space,
)
from .quantize import LEAST

#: the number of vectors of pixels that a row kernel computes at a time
CHUNK = 2


class IntegerConv(CSolver):
    """ConvInteger and QLinearConv in one to three dimensions."""

    family = "integer_conv"
    ops = frozenset({"ConvInteger", "QLinearConv", MS + "QLinearConv"})
    dtypes = BYTES | {DType.INT32, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16}
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        roles = ROLES[problem.op]
        x, w = tensor(problem.inputs[roles.a]), tensor(problem.inputs[roles.b])
        if x.dtype not in BYTES or w.dtype not in BYTES:
            return f"does not convolve {x.dtype} with {w.dtype}"
        if problem.attrs.get("channels_last", 0):
            return "its channels are not the last axis"
        if problem.epilogue and roles.y_scale is not None:
            return "takes no epilogue behind quantised results"
        if roles.y_scale is not None and tensor(problem.outputs[0]).dtype not in BYTES:
            return f"does not make {tensor(problem.outputs[0]).dtype}"
        if roles.y_scale is not None and tensor(problem.inputs[roles.a_scale or 0]).dtype is not DType.FLOAT32:
            return "its scales are float32"
        reason = window.why_not(problem) or epilogue.why_not(problem)
        if reason is not None or not problem.is_static:
            return reason
        shape = IntegerConvShape(problem)
        if roles.b_scale is not None and 2 * shape.steps > DEEPEST:
            return f"sums of {2 * shape.steps} products may not fit into 32 bits"
        for i in (roles.a_zero, roles.a_scale, roles.y_scale, roles.y_zero):
            type = present(problem, i)
            if type is not None and type.size != 1:
                return f"{type} is not one number"
        for i in (roles.b_zero, roles.b_scale, roles.addend):
            type = present(problem, i)
            if type is not None and type.size not in (1, shape.groups * shape.filters):
                return f"{type} is neither one number nor one per output channel"
        return None

    def space(self, problem: Problem, target: Target) -> Space:
        return tile_space(target)

    def default(self, problem: Problem, target: Target) -> Config:
        if not problem.is_static:
            return {"rows": 6, "blocks": 2, "run": 1}
        shape, width = IntegerConvShape(problem), target.vector_bytes // 4
        rows, blocks = tile_of(greater(shape.pixels, 2), shape.filters, target)
        tile = rows * blocks * width * 2 * greater(shape.steps, 1)
        others = shape.batch * shape.groups * -(-shape.filters // (blocks * width))
        tiles, run = -(-shape.pixels // rows), 1
        while run < 32 and tile * run < LEAST_WORK and others * -(-tiles // (2 * run)) >= 4 * target.units:
            run *= 2
        return {"rows": rows, "blocks": blocks, "run": run}

    def packings(self, problem: Problem, config: Config, target: Target) -> Mapping[int, Packing]:
        roles = ROLES[problem.op]
        weights, shape = Weights.of(problem, roles), IntegerConvShape(problem)
        if not weights.constant or shape.narrow(target):
            return {}
        width, blocks, groups = target.vector_bytes // 4, int(config["blocks"]), shape.groups
        zero = "" if weights.zero is None else f" - {weights.zero.tolist()}"
        key = f"integer filters{zero} {weights.dtype} {width} {blocks} in {groups}"
        return {roles.b: Packing(key, partial(_packed, weights=weights, width=width, blocks=blocks, groups=groups))}

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        shape = IntegerConvShape(problem)
        if not tensor(problem.outputs[0]).size:
            return []
        narrow = shape.narrow(target)
        spare = 4 * CHUNK * target.vector_bytes * shape.window.stride[2]  # The last row is read in whole chunks.
        planes = shape.batch * shape.groups * (shape.channels if narrow else shape.pairs)
        x = Scratch("x", planes * shape.plane * (2 if narrow else 4) + spare)
        calls = [self._widen(problem, shape, x, not narrow)]
        if narrow:
            return [*calls, self._rows(problem, shape, x, target)]
        roles = ROLES[problem.op]
        weights = Weights.of(problem, roles)
        w: In | Scratch = In(roles.b)
        if not weights.constant:
            tile = (target.vector_bytes // 4) * int(config["blocks"])
            tiles = shape.groups * -(-shape.filters // tile)
            w = Scratch("w", tiles * shape.steps * tile * 2 * weights.dtype.itemsize)
            calls.append(self._pack(problem, shape, weights, w, tile))
        return [*calls, self._tiles(problem, shape, weights, x, w, config, target)]

    def _widen(self, problem: Problem, shape: IntegerConvShape, out: Scratch, paired: bool) -> EmittedLaunch:
        """The launch that writes 16-bit numbers minus the zero point, with a border of zeros.

        If ``paired``, two channels lie side by side.
        """
        roles, w = ROLES[problem.op], shape.window
        source = Source("widen", self.specialise)
        source.buffer("x", tensor(problem.inputs[roles.a]).dtype, In(roles.a))
        zero = present(problem, roles.a_zero)
        if zero is not None:
            source.buffer("zero", zero.dtype, In(roles.a_zero or 0))
        source.buffer("out", DType.UINT32 if paired else DType.INT16, out)
        planes = shape.batch * shape.groups * (shape.pairs if paired else shape.channels)
        rows = planes * shape.padded[0] * shape.padded[1]
        least = greater(1, LEAST // shape.padded[2])
        first, last = (
            [lesser(greater(bound, 0), shape.padded[k]) for k, bound in enumerate(bounds)]
            for bounds in (w.head, [w.head[k] + w.input[k] for k in range(3)])
        )
        source.dims(ROWS=rows, LEAST=least, CHANNELS=shape.channels, PAIRS=shape.pairs)
        for axis, name in enumerate("DHW"):
            source.dims(**{f"IN_{name}": w.input[axis], f"HEAD_{name}": w.head[axis]})
            source.dims(**{f"OUT_{name}": shape.padded[axis]})
        source.dims(FIRST=first[2], LAST=greater(last[2], first[2]))
        if paired:
            load = """
  int pair = plane % PAIRS, channel = plane / PAIRS * CHANNELS + 2 * pair;
  bool two = 2 * pair + 1 < CHANNELS;"""
            element = """
    if (two)
      for (int i = FIRST; i < LAST; i++)
        to[i] = (u32)(u16)(from[i] - z) | (u32)(from[i + IN_D * IN_H * IN_W] - z) << 16;
    else
      for (int i = FIRST; i < LAST; i++) to[i] = (u16)(from[i] - z);"""
        else:
            load = "\n  int channel = plane;"
            element = "\n    for (int i = FIRST; i < LAST; i++) to[i] = from[i] - z;"
        kind = "u32" if paired else "i16"
        source.add(f"""
int begin = GID(0) * LEAST, end = begin + LEAST < ROWS ? begin + LEAST : ROWS;
i32 z = {"0" if zero is None else "*zero"};
for (int row = begin; row < end; row++) {{
  int h = row % OUT_H - HEAD_H, d = row / OUT_H % OUT_D - HEAD_D, plane = row / (OUT_H * OUT_D);{load}
  GLOBAL {kind}* to = out + row * OUT_W;
  if (d < 0 || d >= IN_D || h < 0 || h >= IN_H)
    for (int i = 0; i < OUT_W; i++) to[i] = 0;
  else {{
    GLOBAL const {source.compute("x")}* from = x + ((channel * IN_D + d) * IN_H + h) * IN_W - HEAD_W;
    for (int i = 0; i < FIRST; i++) to[i] = 0;{element}
    for (int i = LAST; i < OUT_W; i++) to[i] = 0;
  }}
}}""")
        return source.call([-(-rows // least)])

    def _pack(
        self, problem: Problem, shape: IntegerConvShape, weights: Weights, out: Scratch, tile: int
    ) -> EmittedLaunch:
        """The launch that packs filters in tiles of [steps][filters][2], minus their zero points."""
        roles = ROLES[problem.op]
        source = Source("pack", self.specialise)
        source.buffer("w", tensor(problem.inputs[roles.b]).dtype, In(roles.b))
        zero, at = present(problem, roles.b_zero), "0"
        if zero is not None:
            source.buffer("zero", zero.dtype, In(roles.b_zero or 0))
            at = "filter" if zero.size > 1 else "0"
        source.buffer("out", weights.dtype, out)
        source.fixed(TILE=tile)
        source.dims(FILTERS=shape.filters, CHANNELS=shape.channels, TAPS=shape.window.taps, STEPS=shape.steps)
        tiles = -(-shape.filters // tile)
        source.dims(TILES=tiles)
        source.add(f"""
int to = (GID(1) * TILES + GID(0)) * STEPS * TILE * 2;
for (int s = 0; s < STEPS; s++)
  for (int k = 0; k < TILE * 2; k++) {{
    int column = GID(0) * TILE + k / 2, filter = GID(1) * FILTERS + column, channel = s / TAPS * 2 + k % 2;
    bool there = column < FILTERS && channel < CHANNELS;
    i32 value = there ? w[(filter * CHANNELS + channel) * TAPS + s % TAPS]{f" - zero[{at}]" if zero else ""} : 0;
    out[to + s * TILE * 2 + k] = value;
  }}""")
        return source.call([tiles, shape.groups])

    def _tiles(
        self, problem: Problem, shape: IntegerConvShape, weights: Weights, x: Scratch, w: In | Scratch, config: Config,
        target: Target,
    ) -> EmittedLaunch:  # fmt: skip
        rows, blocks, run = int(config["rows"]), int(config["blocks"]), int(config["run"])
        source = Source("integer_conv", self.specialise)
        source.buffer("x", DType.INT32, x)
        source.buffer("weights", weights.dtype, w)
        source.buffer("pixels", DType.INT32, ConstantTable(shape.pixel_table))
        source.buffer("steps", DType.INT32, ConstantTable(shape.step_table()))
        finish = Finish(source, problem, ROLES[problem.op], weights)
        Sums(source, weights, rows, blocks, target)
        tiles = -(-shape.filters // (blocks * (target.vector_bytes // 4)))
        pixel_tiles = -(-shape.pixels // rows)
        run = greater(run, -(-pixel_tiles // 16384))
        source.dims(PIXELS=shape.pixels, FILTERS=shape.filters, GROUPS=shape.groups, STEPS=shape.steps, RUN=run)
        source.dims(PIXEL_TILES=pixel_tiles, TILES=tiles, VOLUME=shape.pairs * shape.plane)
        row_sums = """
i32 row_sums[ROWS];
for (int u = 0; u < ROWS; u++) {
  i32 sum = 0;
  for (int s = 0; s < STEPS; s++) {
    i32 pair = from[u][steps[s]];
    sum += (i16)pair + (pair >> 16);
  }
  row_sums[u] = sum;
}"""
        statements, value = finish.value("sums[u * COLUMNS + j]", "at", "row_sums[u]")
        source.add(f"""
int group = GID(2) % GROUPS, left = GID(1) * COLUMNS;
int right = FILTERS - left < COLUMNS ? FILTERS - left : COLUMNS;
for (int run = 0; run < RUN; run++) {{
int tile = GID(0) * RUN + run, top = tile * ROWS;
if (tile >= PIXEL_TILES) break;
GLOBAL const WEIGHT* w = weights + (group * TILES + GID(1)) * STEPS * COLUMNS * 2;
GLOBAL const i32* from[ROWS];
for (int u = 0; u < ROWS; u++) from[u] = x + GID(2) * VOLUME + pixels[top + u < PIXELS ? top + u : PIXELS - 1];
{Sums.begin}
for (int s = 0; s < STEPS; s++) {{
  int at = steps[s];
  {Sums.step("from[u][at]")}
}}
{Sums.end}{row_sums if weights.pending else ""}
int bottom = PIXELS - top < ROWS ? PIXELS - top : ROWS, base = (GID(2) * FILTERS + left) * PIXELS + top;
{source.compute("y")} made[ROWS][COLUMNS];  /* finished with filters in lanes, stored with pixels next to each other */
for (int u = 0; u < bottom; u++)
  for (int j = 0; j < right; j++) {{
    int column UNUSED = group * FILTERS + left + j, at UNUSED = base + j * PIXELS + u;
    {statements}
    made[u][j] = {value};
  }}
for (int j = 0; j < right; j++)
  for (int u = 0; u < bottom; u++) {{ {source.store("y", "base + j * PIXELS + u", "made[u][j]")} }}
}}""")
        return source.call([-(-pixel_tiles // run), tiles, shape.batch * shape.groups])

    def _rows(self, problem: Problem, shape: IntegerConvShape, x: Scratch, target: Target) -> EmittedLaunch:
        """The launch whose lanes are pixels; it reads filters unpacked."""
        roles, window = ROLES[problem.op], shape.window
        source = Source("integer_conv_rows", self.specialise)
        source.buffer("x", DType.INT16, x)
        w, zero = tensor(problem.inputs[roles.b]), present(problem, roles.b_zero)
        source.buffer("w", w.dtype, In(roles.b))
        if zero is not None:
            source.buffer("w_zero", zero.dtype, In(roles.b_zero or 0))
        source.buffer("steps", DType.INT32, ConstantTable(shape.step_table(False)))
        finish = Finish(source, problem, roles, Weights(w.dtype, None, False, True))
        source.fixed(CHUNK=CHUNK * target.vector_bytes // 4, STRIDE=window.stride[2])
        depth, height, width = window.output
        work = shape.channels * window.taps * width * height * depth
        rows, filters = depth * height, shape.batch * shape.groups * shape.filters
        least = greater(1, lesser(rows, LEAST_WORK // 8 * rows // greater(work, 1)))
        many = greater(1, lesser(filters, LEAST_WORK // 8 // greater(work, 1)))
        source.dims(ALL=filters, MANY=many, HEIGHT=rows, LEAST=least, OUT_H=height, OUT_W=width)
        source.dims(FILTERS=shape.filters, GROUPS=shape.groups, STEPS=shape.channels * window.taps)
        source.dims(VOLUME=shape.channels * shape.plane, DOWN=window.stride[1] * shape.padded[2])
        source.dims(IN=window.stride[0] * shape.padded[1] * shape.padded[2])
        of_filter = "column" if zero is not None and zero.size > 1 else "0"
        source.add(f"""
int begin = GID(0) * LEAST, end = begin + LEAST < HEIGHT ? begin + LEAST : HEIGHT;
for (int filter = GID(1) * MANY; filter < ALL && filter < (GID(1) + 1) * MANY; filter++) {{
int column = filter % (GROUPS * FILTERS);
i32 z = {"0" if zero is None else f"w_zero[{of_filter}]"};
for (int line = begin; line < end; line++) {{
  GLOBAL const i16* from = x + filter / FILTERS * VOLUME + line / OUT_H * IN + line % OUT_H * DOWN;
  for (int first = 0; first < OUT_W; first += CHUNK) {{
    i32 sums[CHUNK];
    for (int j = 0; j < CHUNK; j++) sums[j] = 0;
    for (int s = 0; s < STEPS; s++) {{
      i32 factor = w[column * STEPS + s] - z;
      GLOBAL const i16* at = from + steps[s] + first * STRIDE;
      for (int j = 0; j < CHUNK; j++) sums[j] += factor * at[j * STRIDE];
    }}
    int count = OUT_W - first < CHUNK ? OUT_W - first : CHUNK, base = (filter * HEIGHT + line) * OUT_W + first;
    for (int j = 0; j < count; j++) {{
      {finish.store("sums[j]", "base + j")}
    }}
  }}
}}
}}""")
        return source.call([-(-rows // least), -(-filters // many)])


def _packed(w: Array, weights: Weights, width: int, blocks: int, groups: int) -> Array:
    if weights.zero is not None:
        zero = weights.zero.astype(np.int32).reshape(-1)
        w = w.astype(np.int32) - zero.reshape(-1, *(1 for _ in w.shape[1:]))
    filters, channels = w.shape[:2]
    w = w.astype(weights.dtype.numpy).reshape(filters, channels, -1)
    w = np.pad(w, [(0, 0), (0, channels % 2), (0, 0)])
    w = w.reshape(groups, filters // groups, -1, 2, w.shape[2]).transpose(0, 2, 4, 3, 1)
    return packed(w.reshape(groups, -1, filters // groups), width, blocks)


class IntegerConvShape:
    """The sizes of a static problem, and the tables of offsets into the widened input."""

    def __init__(self, problem: Problem) -> None:
        roles = ROLES[problem.op]
        x, w = tensor(problem.inputs[roles.a]), tensor(problem.inputs[roles.b])
        self.window = Window.of(replace(problem, op="Conv", inputs=(x, w), operands=0, constant=(), values=())).flat()
        self.groups = int(problem.attrs.get("group", 1))
        self.batch, self.channels, self.filters = x.dims[0], w.dims[1], w.dims[0] // self.groups
        self.pairs = -(-self.channels // 2)
        self.steps = self.pairs * self.window.taps
        self.pixels = math.prod(self.window.output)
        win = self.window
        self.padded = tuple(
            (win.output[k] - 1) * win.stride[k] + (win.kernel[k] - 1) * win.dilation[k] + 1 for k in range(3)
        )
        self.plane = math.prod(self.padded)

    def narrow(self, target: Target) -> bool:
        """Whether a group has too few filters for the lanes of a vector."""
        return self.groups > 1 and self.filters <= target.vector_bytes // 16

    def _offsets(self, counts: tuple[int, ...], steps: tuple[int, ...]) -> Array:
        d, h, w = (np.arange(n, dtype=np.int64) * s for n, s in zip(counts, steps, strict=True))
        rows = (d[:, None] * self.padded[1] + h).reshape(-1, 1)
        return (rows * self.padded[2] + w).reshape(-1)

    @property
    def pixel_table(self) -> Array:
        """Where each output pixel's window begins in a plane."""
        return self._offsets(self.window.output, self.window.stride).astype(np.int32)

    def step_table(self, paired: bool = True) -> Array:
        """The offsets of each step's numbers from the beginning of a window."""
        planes = np.arange(self.pairs if paired else self.channels) * self.plane
        taps = self._offsets(self.window.kernel, self.window.dilation)
        return (planes[:, None] + taps).reshape(-1).astype(np.int32)


SOLVERS = both(IntegerConv)
