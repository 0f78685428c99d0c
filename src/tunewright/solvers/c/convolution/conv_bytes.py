"""Convolutions of bytes with channels in blocks, four channels per instruction; ConvInteger and QLinearConv.

Output channels lie in vector lanes. A register tile of NB blocks of them and UR pixels is summed in 32 bits (`dot`).
The instruction multiplies unsigned with signed bytes. Therefore signed inputs are used with their highest bit flipped,
which adds 128 to them, and weights are packed as signed bytes. With the multiplied values x' and w', and their zero
points z' and v'::

    sum (x - z) (w - v) = sum x' w' - z' sum w' - v' sum x' + count z' v'

The second sum is computed when weights are packed. The third is needed only where weights are not signed around 0. Then
a first kernel makes a plane with the sums over all channels. The sums under each window are added up once for all
output channels. Padding reads the zero point, so that borders need no separate sums.

An input in blocks is read in place, or copied with its padding and flipped bits (``copy``), which pays where there are
many products. The same first kernel brings a plain input, with its padding, into blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import numpy as np

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater
from tunewright.ir.types import PLAIN, DType, Layout, TensorType, blocked
from tunewright.search.space import Scalar, Space
from tunewright.solvers.base import Array, Config, Packing, Problem, tensor

from ..quantised.integer_conv import IntegerConv, IntegerConvShape
from ..quantised.integer_product import ROLES, present
from ..quantised.quantize import MS, TO_INTEGER, to_integer
from ..source import dot, epilogue
from ..source.base import CSolver, both
from ..source.byte_slabs import pack_slabs
from ..source.emit import STORAGE, ConstantTable, EmittedLaunch, In, Out, Scratch, Source

#: the numbers of tiles of a work-item
RUNS = (1, 2, 4, 8, 16, 64, 256)
#: the least number of work-items per unit
ITEMS = 4
#: pixels whose sums are collected before they are stored as rows
COLLECTED = 64
#: The least number of products for which an input of signed bytes is copied with its highest bits flipped. Flipping
#: them at each product takes a third more time, a launch some ten microseconds.
COPIED = 12_000_000
#: bytes that a work-item of the first kernel writes
PART = 1 << 14


def lanes(target: Target) -> int:
    """The number of channels in a block: 32-bit sums in a vector register."""
    return target.vector_bytes // 4


class ConvBytes(CSolver):
    """Takes constant weights and one group; input and output are plain or in blocks."""

    family = "conv_bytes"
    version = "1.1"
    ops = IntegerConv.ops
    dtypes = IntegerConv.dtypes
    layouts = frozenset({"plain", "blocked"})
    rank = 45

    def refuse(self, problem: Problem, target: Target) -> str | None:
        roles, block = ROLES[problem.op], blocked(lanes(target))
        reason = _PLAIN.refuse(problem, target)
        if reason is not None:
            return reason
        x, out = tensor(problem.inputs[roles.a]), tensor(problem.outputs[0])
        if x.layout not in (PLAIN, block) or out.layout not in (PLAIN, block):
            return f"its layouts are plain and blocks of {block.block} channels"
        if not problem.constant[roles.b]:
            return "the weights are not constant"
        if int(problem.attrs.get("group", 1)) != 1:
            return "takes one group"
        if x.layout != PLAIN and (pending(problem) or zero_point(problem) is None):
            return "takes an input in blocks when its zero point is constant and that of the weights is in their middle"
        if problem.is_static and out.dims[1] < block.block // 2:
            return f"{out.dims[1]} output channels fill a vector of {block.block} badly"
        return None

    def preferred(self, problem: Problem, target: Target) -> tuple[Layout, Layout] | None:
        if self.specialise or ROLES[problem.op].y_scale is None or self.why_not(problem, target) is not None:
            return None
        block = blocked(lanes(target))
        x = tensor(problem.inputs[0])
        few = x.is_static and x.dims[1] < block.block // 2 + 1
        return (PLAIN if few or pending(problem) or zero_point(problem) is None else block), block

    def space(self, problem: Problem, target: Target) -> Space:
        size = _Size(problem, target)

        def allow(c: Mapping[str, Scalar]) -> bool:
            nb, ur, run = (int(str(c[name])) for name in ("nb", "ur", "run"))
            return size.tiling.fits(nb, ur) and run // 2 < -(-size.pixels // ur)

        copies = [1] if tensor(problem.inputs[0]).layout == PLAIN else [0, 1]
        return Space({"nb": dot.BLOCKS, "ur": dot.ROWS, "run": RUNS, "copy": copies}, allow)

    def default(self, problem: Problem, target: Target) -> Config:
        if not problem.is_static:
            return {"nb": 2, "ur": 6, "run": 1, "copy": 1}
        size = _Size(problem, target)
        nb, ur = size.tiling.best()
        tiles, slabs = -(-size.pixels // ur), size.batch * -(-size.blocks // nb)
        runs = [r for r in RUNS if r // 2 < tiles]
        while len(runs) > 1 and -(-tiles // runs[-1]) * slabs < ITEMS * target.units:
            runs.pop()
        x = tensor(problem.inputs[0])
        much = x.dtype is DType.INT8 and size.products * -(-size.blocks // nb) * nb * size.width >= COPIED
        return {"nb": nb, "ur": ur, "run": runs[-1], "copy": int(much or x.layout == PLAIN)}

    def packings(self, problem: Problem, config: Config, target: Target) -> Mapping[int, Packing]:
        size = _Size(problem, target)
        slab = int(config["nb"]) * size.width
        key = f"conv bytes {slab} of {size.inner}"
        return {ROLES[problem.op].b: Packing(key, partial(pack, slab=slab, inner=size.inner))}

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        size = _Size(problem, target)
        if not tensor(problem.outputs[0]).size:
            return []
        x = tensor(problem.inputs[0])
        if not config["copy"]:
            return [self._main(problem, size, config, target, In(0), None)]
        wide = size.padded
        spare = int(config["ur"]) * size.inner  # A last tile may read beyond the last pixel.
        quads = Scratch("quads", x.dims[0] * size.x_blocks * math.prod(wide) * size.inner + spare)
        if not pending(problem):
            return [
                self._regroup(problem, size, quads, None), self._main(problem, size, config, target, quads, None)
            ]  # fmt: skip
        plane = under = Scratch("plane", 4 * x.dims[0] * math.prod(wide))
        calls = [self._regroup(problem, size, quads, plane)]
        if not size.flat(wide):
            under = Scratch("under", 4 * x.dims[0] * size.pixels)
            calls.append(self._add_up(size, plane, under))
        return [*calls, self._main(problem, size, config, target, quads, under)]

    def _add_up(self, size: _Size, plane: Scratch, under: Scratch) -> EmittedLaunch:
        """The launch that adds up the sums over channels under each window."""
        window = size.window
        source = Source("conv_bytes_add_up", self.specialise)
        source.buffer("plane", DType.INT32, plane)
        source.buffer("under", DType.INT32, under)
        rows = size.batch * window.output[0] * window.output[1]
        part = greater(1, PART // greater(1, 4 * window.output[2] * window.taps))
        source.dims(ROWS=rows, PART=part)
        for axis, name in enumerate("DHW"):
            source.dims(**{f"K{name}": window.kernel[axis], f"S{name}": window.stride[axis]})
            source.dims(**{f"D{name}": window.dilation[axis], f"I{name}": size.padded[axis]})
            source.dims(**{f"O{name}": window.output[axis]})
        source.add(_ADD_UP)
        return source.call([-(-rows // part)])

    def _regroup(self, problem: Problem, size: _Size, out: Scratch, plane: Scratch | None) -> EmittedLaunch:
        """The launch that copies the input into blocks of unsigned bytes, with its padding.

        Given ``plane``, it also writes the sums over channels there.
        """
        roles, window = ROLES[problem.op], size.window
        source = Source("conv_bytes_regroup", self.specialise)
        type, zero = tensor(problem.inputs[roles.a]), present(problem, roles.a_zero)
        source.buffer("x", DType.UINT8, In(roles.a))
        if zero is not None:
            source.buffer("zero", DType.UINT8, In(roles.a_zero or 0))
        source.buffer("out", DType.UINT8, out)
        if plane is not None:
            source.buffer("sums", DType.INT32, plane)
        rows = size.batch * size.padded[0] * size.padded[1]
        part = greater(1, PART // greater(1, size.padded[2] * size.inner * size.x_blocks))
        source.fixed(L=size.inner, FLIP=128 if type.dtype is DType.INT8 else 0, PENDING=int(plane is not None))
        source.dims(XBLOCKS=size.x_blocks, ROWS=rows, PART=part, C=size.channels)
        for axis, name in enumerate("DHW"):
            source.dims(**{f"X{name}": window.input[axis], f"P{name}": window.head[axis]})
            source.dims(**{f"I{name}": size.padded[axis]})
        source.function(INSIDE)
        source.add(f"int z = {'0' if zero is None else '*zero'} ^ FLIP;")
        source.add(_REGROUP if type.layout == PLAIN else _COPY)
        return source.call([-(-rows // part)])

    def _main(
        self, problem: Problem, size: _Size, config: Config, target: Target, x: In | Scratch, under: Scratch | None
    ) -> EmittedLaunch:
        roles, window, out = ROLES[problem.op], size.window, tensor(problem.outputs[0])
        nb, ur, run = (int(config[name]) for name in ("nb", "ur", "run"))
        direct, type = isinstance(x, In), tensor(problem.inputs[roles.a])
        head = window.head if direct else (0, 0, 0)
        inside = window.input if direct else size.padded
        padded = direct and (any(window.head) or any(window.tail))
        source = Source("conv_bytes", self.specialise)
        source.buffer("x", DType.UINT8, x)
        source.buffer("w", DType.INT8, In(roles.b))
        if padded:
            source.buffer("border", DType.UINT8, ConstantTable(np.full(size.inner, zero_point(problem), np.uint8)))
        for name in ("a_zero", "b_zero", "addend", "a_scale", "b_scale", "y_scale", "y_zero"):
            i = getattr(roles, name)
            given = present(problem, i)
            if given is not None:
                source.buffer(name, given.dtype, In(i))
        if under is not None:
            source.buffer("under", DType.INT32, under)
        steps = epilogue.Epilogue(source, problem)
        source.buffer("y", out.dtype, Out())
        flip = type.dtype is DType.INT8
        signed = tensor(problem.inputs[roles.b]).dtype is DType.INT8
        tiles, slabs = -(-size.pixels // ur), -(-size.blocks // nb)
        source.fixed(
            NB=nb, UR=ur, L=size.inner, PADDED=int(padded), FLIP=int(flip and direct), MOVED=128 if flip else 0
        )
        source.fixed(PENDING=int(under is not None), WMOVED=0 if signed else 128)
        # The pixels of a tile are adjacent. Where the kernel reads the input itself, the last tile begins earlier and
        # computes some results again. That is not allowed where the output may share the memory of an operand.
        again = out.layout != PLAIN and roles.y_scale is not None and size.pixels >= ur
        source.fixed(FLAT=int(size.flat(inside) and (not direct or again)), EARLIER=int(direct))
        source.fixed(PLAIN=int(out.layout == PLAIN), KEPT=greater(1, COLLECTED // ur))
        source.dims(SLABS=slabs, TILES=tiles, RUN=run, PIXELS=size.pixels, OC=out.dims[1], XBLOCKS=size.x_blocks)
        source.dims(YBLOCKS=size.blocks, DEPTH=size.channels * window.taps)
        for axis, name in enumerate("DHW"):
            source.dims(**{f"K{name}": window.kernel[axis], f"S{name}": window.stride[axis]})
            source.dims(**{f"D{name}": window.dilation[axis], f"P{name}": head[axis], f"I{name}": inside[axis]})
            source.dims(**{f"O{name}": window.output[axis]})
        dot.add(source, target)
        source.function(INSIDE + _TYPES)
        source.add(self._constants(problem))
        source.add(self._finish(source, problem, steps, out))
        return source.call([-(-tiles // run), slabs, size.batch])

    def _constants(self, problem: Problem) -> str:
        """Statements for the output channels of a slab: the initial values of sums, and their factors."""
        roles = ROLES[problem.op]

        def at(i: int | None, name: str) -> str:
            type = present(problem, i)
            return "0" if type is None else f"{name}[{'column' if type.size > 1 else '0'}]"

        scaled = roles.y_scale is not None
        factor = ""
        if scaled:
            factor = f"f32 f = {at(roles.a_scale, 'a_scale')} * {at(roles.b_scale, 'b_scale')}; "
            factor += f"factors[i] = f / {at(roles.y_scale, 'y_scale')};"
        return f"""
i32 begins[NB * WIDTH], moves[NB * WIDTH]; f32 factors[NB * WIDTH] UNUSED;
int n = GID(2), slab = GID(1), first = slab * NB * WIDTH, blocks = YBLOCKS - slab * NB;
blocks = blocks < NB ? blocks : NB;
GLOBAL const i8* ws = w + slab * (KD * KH * KW * XBLOCKS * L * NB * WIDTH);
{{
  GLOBAL const i32* weights = (GLOBAL const i32*)(w + SLABS * (KD * KH * KW * XBLOCKS * L * NB * WIDTH)) + first;
  u32 z = (u32)({at(roles.a_zero, "a_zero")} + MOVED);
  for (int i = 0; i < NB * WIDTH; i++) {{
    int column UNUSED = first + i < OC ? first + i : OC - 1;
    u32 v = PENDING ? (u32)({at(roles.b_zero, "b_zero")} - WMOVED) : 0;
    begins[i] = (i32)((u32){at(roles.addend, "addend")} - z * (u32)weights[i] + DEPTH * z * v);
    moves[i] = (i32)v; {factor}
  }}
}}
{"f32 zero = (f32)" + at(roles.y_zero, "y_zero") + ";" if scaled else ""}"""

    def _finish(self, source: Source, problem: Problem, steps: epilogue.Epilogue, out: TensorType) -> str:
        """The loop over tiles, with the statements that finish and store their sums."""
        scaled = ROLES[problem.op].y_scale is not None
        low, high = ("-128.0f", "127.0f") if out.dtype is DType.INT8 else ("0.0f", "255.0f")
        if out.layout == PLAIN:
            if scaled:
                source.function(TO_INTEGER)
                lines, contrib = "", problem.op.startswith(MS)
                result = to_integer("(f32)total * factors[j]", "zero", out.dtype, contrib)
            else:
                lines, result = steps.apply("total", "column", "at")
            return _SUM + _STORE_PLAIN.replace("FINISH;", f"{lines}\n{source.store('y', 'at', result)}")
        if scaled:
            none = low if problem.op.startswith(MS) else "0"
            source.function(f"vector_of({STORAGE[out.dtype]}, WIDTH, VY); typedef VY VYU __attribute__((aligned(1)));")
            source.function(QUANTISE)
            source.add(f"VF low = {low} - zero, high = {high} - zero; V none = (V){none}, shift = (V)(i32)zero;")
            store = f"*(GLOBAL VYU*)(y + {_IN_BLOCKS}) = "
            store += "quantise(a, *(VFU*)(factors + b * WIDTH), low, high, none, shift);"
        else:
            lines, result = steps.apply("total", "column", "at")
            store = f"""i32 totals[WIDTH]; *(VU*)totals = a;
    for (int l = 0; l < WIDTH; l++) {{
      int column = first + b * WIDTH + l, at = {_IN_BLOCKS} + l;
      column = column < OC ? column : OC - 1;
      i32 total = totals[l];
      {lines}
      {source.store("y", "at", result)}
    }}"""
        return _SUM + _STORE_BLOCKS.replace("STORE;", store)


_PLAIN = IntegerConv()


def pending(problem: Problem) -> bool:
    """Whether the zero points of weights may differ from the middle of their range, so that sums of the input are
    needed."""
    roles = ROLES[problem.op]
    middle = 0 if tensor(problem.inputs[roles.b]).dtype is DType.INT8 else 128
    if present(problem, roles.b_zero) is None:
        return middle != 0
    value = problem.value(roles.b_zero or 0)
    return value is None or bool((value != middle).any())


def zero_point(problem: Problem) -> int | None:
    """The byte of the input's zero point; None while it is unknown."""
    roles = ROLES[problem.op]
    if present(problem, roles.a_zero) is None:
        return 0
    value = problem.value(roles.a_zero or 0)
    return None if value is None else int(value.reshape(-1)[0]) & 255


class _Size:
    """The sizes of a static problem."""

    def __init__(self, problem: Problem, target: Target) -> None:
        shape, self.width = IntegerConvShape(problem), lanes(target)
        self.window, self.batch, self.channels = shape.window, shape.batch, shape.channels
        x = tensor(problem.inputs[0])
        #: channels in a block of the input: a few channels need not fill a whole block
        self.inner = 4 if x.layout == PLAIN and self.channels <= 4 else self.width
        self.x_blocks, self.blocks = -(-self.channels // self.inner), -(-shape.filters // self.width)
        self.pixels = shape.pixels
        #: the products of all output pixels for one output channel
        self.products = shape.batch * shape.pixels * shape.channels * shape.window.taps
        #: the size of a plain input as far as windows reach
        self.padded = tuple(greater(size, 1) for size in shape.padded)
        self.tiling = dot.Tiling(self.blocks, self.pixels, target.registers)

    def flat(self, inside: tuple[int, ...]) -> bool:
        """Whether the windows are the pixels of an input of this size, in order."""
        return self.window.taps == 1 and set(self.window.stride) == {1} and inside == tuple(self.window.output)


def pack(w: Array, slab: int, inner: int) -> Array:
    """Packs O I spatial... as slabs of [taps][blocks of I][quads][O of a slab][4 of I], then the sums of each output
    channel.

    Zeros fill up incomplete slabs and blocks, and stay zeros.
    """
    out, depth, taps = w.shape[0], w.shape[1], math.prod(w.shape[2:])
    blocks, by_tap = -(-depth // inner), w.reshape(out, depth, taps)

    def arrange(whole: Array) -> Array:
        return whole.reshape(slab, blocks, inner // 4, 4, taps).transpose(4, 1, 2, 0, 3)

    slabs = [by_tap[first : first + slab] for first in range(0, out, slab)]
    return pack_slabs(slabs, (slab, blocks * inner, taps), arrange, 0)


INSIDE = "#define INSIDE(at, size) ((u32)(at) < (u32)(size))\n"

_TYPES = """
vector_of(f32, WIDTH, VF);
typedef VF VFU __attribute__((aligned(4)));
typedef i32 QUAD __attribute__((aligned(1)));
#define STRIDE (ID * IH * IW * L)
#if PADDED
#define STEP(u) step[u]
#else
#define STEP(u) STRIDE
#endif
#if FLIP
#define TURNED(v) ((v) ^ (V)(i32)0x80808080)
#else
#define TURNED(v) (v)
#endif
"""

_REGROUP = """
int end = (GID(0) + 1) * PART < ROWS ? (GID(0) + 1) * PART : ROWS;
for (int row = GID(0) * PART; row < end; row++) {
  int h = row % IH - PH, d = row / IH % ID - PD, n = row / (IH * ID), volume = XD * XH * XW;
  int begin = PW > 0 ? PW : 0, last = XW + PW < IW ? XW + PW : IW;
  if (!INSIDE(d, XD) || !INSIDE(h, XH) || last <= begin) begin = last = IW;
  GLOBAL const u8* from = x + (n * C * XD + d) * (XH * XW) + h * XW - PW;
#if PENDING
  GLOBAL i32* sum = sums + row * IW;
  for (int i = 0; i < IW; i++) sum[i] = i >= begin && i < last ? 0 : C * z;
  for (int c = 0; c < C; c++)
    for (int i = begin; i < last; i++) sum[i] += from[c * volume + i] ^ FLIP;
#endif
  for (int k = 0; k < XBLOCKS; k++, from += L * volume) {
    GLOBAL u8* to = out + ((n * XBLOCKS + k) * ID * IH + row % (ID * IH)) * (IW * L);
    int lanes = C - k * L < L ? C - k * L : L;
    for (int i = 0; i < begin * L; i++) to[i] = z;
    for (int i = last * L; i < IW * L; i++) to[i] = z;
    if (lanes == L) {
      for (int i = begin; i < last; i++)
        UNROLL for (int l = 0; l < L; l++) to[i * L + l] = from[l * volume + i] ^ FLIP;
    } else {
      for (int i = begin; i < last; i++)
        for (int l = 0; l < L; l++) to[i * L + l] = l < lanes ? from[l * volume + i] ^ FLIP : 0;
    }
  }
}
"""

_COPY = """
int end = (GID(0) + 1) * PART < ROWS ? (GID(0) + 1) * PART : ROWS;
for (int row = GID(0) * PART; row < end; row++) {
  int h = row % IH - PH, d = row / IH % ID - PD, n = row / (IH * ID);
  int begin = PW > 0 ? PW : 0, last = XW + PW < IW ? XW + PW : IW;
  if (!INSIDE(d, XD) || !INSIDE(h, XH) || last <= begin) begin = last = IW;
  for (int k = 0; k < XBLOCKS; k++) {
    GLOBAL u8* to = out + ((n * XBLOCKS + k) * ID * IH + row % (ID * IH)) * (IW * L);
    GLOBAL const u8* from = x + ((n * XBLOCKS + k) * XD + d) * (XH * XW * L) + (h * XW - PW) * L;
    for (int i = 0; i < begin * L; i++) to[i] = z;
    for (int i = last * L; i < IW * L; i++) to[i] = z;
    for (int i = begin * L; i < last * L; i++) to[i] = from[i] ^ FLIP;
  }
}
"""

_ADD_UP = """
int end = (GID(0) + 1) * PART < ROWS ? (GID(0) + 1) * PART : ROWS;
for (int row = GID(0) * PART; row < end; row++) {
  int y0 = row % OH * SH, z0 = row / OH % OD * SD, n = row / (OH * OD);
  GLOBAL i32* to = under + row * OW;
  for (int i = 0; i < OW; i++) to[i] = 0;
  for (int kz = 0; kz < KD; kz++) for (int ky = 0; ky < KH; ky++) for (int kx = 0; kx < KW; kx++) {
    GLOBAL const i32* from = plane + ((n * ID + z0 + kz * DD) * IH + y0 + ky * DH) * IW + kx * DW;
    if (SW == 1) for (int i = 0; i < OW; i++) to[i] += from[i];
    else for (int i = 0; i < OW; i++) to[i] += from[i * SW];
  }
}
"""

# Pixels beyond the image repeat the last one and are not stored.
_SUM = """
GLOBAL const u8* xn = x + n * XBLOCKS * STRIDE;
int t_end = (GID(0) + 1) * RUN < TILES ? (GID(0) + 1) * RUN : TILES;
#if PLAIN
i32 made[KEPT * UR][NB * WIDTH] __attribute__((aligned(64)));
int from_tile = GID(0) * RUN;
#endif
for (int t = GID(0) * RUN; t < t_end; t++) {
#if FLAT && EARLIER
const int count = UR;
int p = PIXELS - t * UR < UR ? PIXELS - UR : t * UR;
#else
int p = t * UR, count = PIXELS - p < UR ? PIXELS - p : UR;
#endif
GLOBAL const i8* wp = ws;
V acc[NB][UR];
#if PENDING
UNROLL for (int u = 0; u < UR; u++) {
  i32 sum = under[n * PIXELS + (p + u < PIXELS ? p + u : PIXELS - 1)];
  UNROLL for (int b = 0; b < NB; b++) acc[b][u] = *(VU*)(begins + b * WIDTH) - *(VU*)(moves + b * WIDTH) * sum;
}
#else
UNROLL for (int b = 0; b < NB; b++) UNROLL for (int u = 0; u < UR; u++) acc[b][u] = *(VU*)(begins + b * WIDTH);
#endif
#if FLAT
GLOBAL const u8* xp = xn + p * L;
for (int k = 0; k < XBLOCKS; k++) {
  UNROLL for (int q = 0; q < L / 4; q++) {
    V wv[NB];
    UNROLL for (int b = 0; b < NB; b++) wv[b] = LOADV(wp + (q * NB + b) * WIDTH * 4);
    UNROLL for (int u = 0; u < UR; u++) {
      V xv = TURNED((V)(*(GLOBAL const QUAD*)(xp + u * L + 4 * q)));
      UNROLL for (int b = 0; b < NB; b++) acc[b][u] = dot4(acc[b][u], xv, wv[b]);
    }
  }
  wp += L * NB * WIDTH;
  xp += STRIDE;
}
#else
int z0[UR], y0[UR], x0[UR];
{
  int ox = p % OW, oy = p / OW % OH, oz = p / OW / OH;
  UNROLL for (int u = 0; u < UR; u++) {
    z0[u] = oz * SD - PD; y0[u] = oy * SH - PH; x0[u] = ox * SW - PW;
    if (p + u + 1 < PIXELS && ++ox == OW) { ox = 0; if (++oy == OH) { oy = 0; oz++; } }
  }
}
for (int kz = 0; kz < KD; kz++) for (int ky = 0; ky < KH; ky++) for (int kx = 0; kx < KW; kx++) {
  GLOBAL const u8* xp[UR];
#if PADDED
  int step[UR];
#endif
  UNROLL for (int u = 0; u < UR; u++) {
    int iz = z0[u] + kz * DD, iy = y0[u] + ky * DH, ix = x0[u] + kx * DW;
    xp[u] = xn + ((iz * IH + iy) * IW + ix) * L;
#if PADDED
    int inside = INSIDE(iz, ID) & INSIDE(iy, IH) & INSIDE(ix, IW);
    xp[u] = inside ? xp[u] : border;
    step[u] = inside ? STRIDE : 0;
#endif
  }
  for (int k = 0; k < XBLOCKS; k++) {
    UNROLL for (int q = 0; q < L / 4; q++) {
      V wv[NB];
      UNROLL for (int b = 0; b < NB; b++) wv[b] = LOADV(wp + (q * NB + b) * WIDTH * 4);
      UNROLL for (int u = 0; u < UR; u++) {
        V xv = TURNED((V)(*(GLOBAL const QUAD*)(xp[u] + 4 * q)));
        UNROLL for (int b = 0; b < NB; b++) acc[b][u] = dot4(acc[b][u], xv, wv[b]);
      }
    }
    wp += L * NB * WIDTH;
    UNROLL for (int u = 0; u < UR; u++) xp[u] += STEP(u);
  }
}
#endif
"""

_IN_BLOCKS = "((n * YBLOCKS + slab * NB + b) * PIXELS + p + u) * WIDTH"

# Rounds half to even: adding 1.5 * 2^23 leaves a whole number in the lowest bits. The ends of the range are whole
# numbers, so that clamping before rounding equals clamping after it. NaN is unequal to itself.
QUANTISE = """
INLINE VY quantise(V sum, VF factor, VF low, VF high, V none, V shift) {
  VF v = __builtin_convertvector(sum, VF) * factor;
  V some = v == v;
  v = low > v ? low : v;
  v = high < v ? high : v;
  V whole = CAST_BITS(v + 12582912.0f, V) - 0x4b400000 + shift;
  return __builtin_convertvector(some ? whole : none, VY);
}
"""

# Whole tiles are stored without conditions; partial tiles go through memory.
_STORE_BLOCKS = """
if (count == UR && blocks == NB) {
  UNROLL for (int b = 0; b < NB; b++) UNROLL for (int u = 0; u < UR; u++) {
    V a = acc[b][u];
    STORE;
  }
} else {
  V kept[NB][UR];
  UNROLL for (int u = 0; u < UR; u++) UNROLL for (int b = 0; b < NB; b++) kept[b][u] = acc[b][u];
  for (int b = 0; b < blocks; b++) for (int u = 0; u < count; u++) {
    V a = kept[b][u];
    STORE;
  }
}
}
"""

# The kernel collects the sums of several tiles; then it stores each channel as a row of pixels, as in the output.
_STORE_PLAIN = """
UNROLL for (int u = 0; u < UR; u++)
  UNROLL for (int b = 0; b < NB; b++) *(V*)(made[(t - from_tile) * UR + u] + b * WIDTH) = acc[b][u];
if (t + 1 == t_end || t + 1 - from_tile == KEPT) {
  int begin = from_tile * UR, size = p + count - begin, columns = OC - first < NB * WIDTH ? OC - first : NB * WIDTH;
  for (int j = 0; j < columns; j++) {
    int column = first + j;
    for (int i = 0; i < size; i++) {
      int at = (n * OC + column) * PIXELS + begin + i;
      i32 total = made[i][j];
      FINISH;
    }
  }
  from_tile = t + 1;
}
}
"""

SOLVERS = both(ConvBytes)
