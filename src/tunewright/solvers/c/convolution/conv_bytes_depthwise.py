"""Depthwise convolutions of bytes with channels in blocks: four rows of a window per instruction; QLinearConv.

The kernel computes one row of results at a time. First it collects the rows that these need: the bytes of up to four
rows, one below the other, become a quad for each column and channel. Where the window reaches into the padding, the
quad contains the zero point. A result then takes one `dot4` per column of the window, for each four of its rows. Signed
bytes have their highest bit flipped, as in `conv_bytes`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import numpy as np

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater, lesser
from tunewright.ir.types import DType, Layout, blocked
from tunewright.search.space import Scalar, Space
from tunewright.solvers.base import Array, Config, Packing, Problem, tensor

from ..quantised.integer_conv import IntegerConv, IntegerConvShape
from ..quantised.integer_product import MS, ROLES, present
from ..source import dot
from ..source.base import CSolver, both
from ..source.byte_slabs import pack_slabs
from ..source.emit import STORAGE, ConstantTable, EmittedLaunch, In, Out, Scratch, Source
from .conv_bytes import INSIDE, QUANTISE, lanes, pending, zero_point

#: the numbers of rows of a work-item
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
#: the numbers of results of a row that are computed together
TILES = (2, 4, 6, 8)
#: the least number of work-items per unit, and of products of one work-item
ITEMS, WORK = 4, 1 << 15
#: The most columns of a window times quads of rows: their weights should stay in registers or the nearest cache.
LARGEST = 64


class ConvBytesDepthwise(CSolver):
    """Takes windows of one input and one output channel; input and output are in blocks."""

    family = "conv_bytes_depthwise"
    ops = frozenset({"QLinearConv", MS + "QLinearConv"})
    dtypes = IntegerConv.dtypes
    layouts = frozenset({"plain", "blocked"})
    rank = 40

    def refuse(self, problem: Problem, target: Target) -> str | None:
        roles, block = ROLES[problem.op], blocked(lanes(target))
        reason = _PLAIN.refuse(problem, target)
        if reason is not None:
            return reason
        x, w, out = tensor(problem.inputs[0]), tensor(problem.inputs[roles.b]), tensor(problem.outputs[0])
        if x.rank != 4:
            return "takes images"
        if x.layout != block or out.layout != block:
            return f"its layouts are blocks of {block.block} channels"
        if not problem.constant[roles.b]:
            return "the weights are not constant"
        groups = int(problem.attrs.get("group", 1))
        if w.shape is None or w.shape[:2] != (groups, 1) or groups == 1:
            return "every channel has a filter of its own"
        if pending(problem) or zero_point(problem) is None:
            return "the input's zero point is constant, and that of the weights is in their middle"
        if problem.is_static:
            window = IntegerConvShape(problem).window
            if lesser(*window.head, *window.tail) < 0:
                return "its padding is not negative"
            if -(-window.kernel[1] // 4) * window.kernel[2] > LARGEST:
                return "its window is too large"
        return None

    def preferred(self, problem: Problem, target: Target) -> tuple[Layout, Layout] | None:
        block = blocked(lanes(target))
        if self.specialise or self.why_not(problem.in_layout(block, [0]), target) is not None:
            return None
        return block, block

    def space(self, problem: Problem, target: Target) -> Space:
        height = IntegerConvShape(problem).window.output[1]

        def allow(c: Mapping[str, Scalar]) -> bool:
            return int(str(c["rows"])) // 2 < greater(height, 1)

        return Space({"rows": ROWS, "tile": TILES}, allow)

    def default(self, problem: Problem, target: Target) -> Config:
        if not problem.is_static:
            return {"rows": 1, "tile": 4}
        window, out = IntegerConvShape(problem).window, tensor(problem.outputs[0])
        _, height, width = window.output
        blocks, row = math.prod(out.physical[:2]), width * window.taps * lanes(target)
        rows = [r for r in ROWS if r // 2 < greater(height, 1)]
        while len(rows) > 1 and blocks * -(-height // rows[-1]) < ITEMS * target.units and rows[-1] * row > WORK:
            rows.pop()
        return {"rows": rows[-1], "tile": 4}

    def packings(self, problem: Problem, config: Config, target: Target) -> Mapping[int, Packing]:
        width = lanes(target)
        return {ROLES[problem.op].b: Packing(f"depthwise bytes {width}", partial(pack, width=width))}

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        roles, out, window = ROLES[problem.op], tensor(problem.outputs[0]), IntegerConvShape(problem).window
        if not out.size:
            return []
        batch, blocks, *_ = out.physical
        rows, width, type = int(config["rows"]), lanes(target), tensor(problem.inputs[0])
        (_, high, wide), groups = window.kernel, -(-window.kernel[1] // 4)
        columns = window.head[2] + window.input[2]
        columns = greater(columns, (window.output[2] - 1) * window.stride[2] + (wide - 1) * window.dilation[2] + 1)
        parts = -(-window.output[1] // rows)
        source = Source("conv_bytes_depthwise", self.specialise)
        source.buffer("x", DType.UINT8, In(0))
        source.buffer("w", DType.INT8, In(roles.b))
        source.buffer("border", DType.UINT8, ConstantTable(np.full(width, zero_point(problem), np.uint8)))
        source.buffer("kept", DType.INT32, Scratch("quads", 4 * parts * batch * blocks * columns * groups * width))
        for name in ("a_zero", "addend", "a_scale", "b_scale", "y_scale", "y_zero"):
            i = getattr(roles, name)
            given = present(problem, i)
            if given is not None:
                source.buffer(name, given.dtype, In(i))
        source.buffer("y", out.dtype, Out())
        flip = type.dtype is DType.INT8
        source.fixed(KH=high, KW=wide, GROUPS=groups, UR=int(config["tile"]), MOVED=128 if flip else 0)
        source.dims(BLOCKS=blocks, CHANNELS=out.dims[1], ROWS=rows, PARTS=parts, COLUMNS=columns)
        for axis, name in ((1, "H"), (2, "W")):
            source.dims(**{f"S{name}": window.stride[axis], f"D{name}": window.dilation[axis]})
            source.dims(**{f"P{name}": window.head[axis], f"X{name}": window.input[axis]})
            source.dims(**{f"O{name}": window.output[axis]})
        dot.add(source, target)
        source.function(INSIDE)
        source.function(f"vector_of({STORAGE[out.dtype]}, WIDTH, VY); typedef VY VYU __attribute__((aligned(1)));")
        source.function("vector_of(f32, WIDTH, VF);" + QUANTISE + _quads(width))
        source.add(self._constants(problem))
        source.add(_ROWS)
        return [source.call([parts, batch * blocks])]

    def _constants(self, problem: Problem) -> str:
        """Statements for the channels of a block: the initial values of sums, and their factors."""
        roles, out = ROLES[problem.op], tensor(problem.outputs[0])

        def at(i: int | None, name: str) -> str:
            type = present(problem, i)
            return "0" if type is None else f"{name}[{'channel' if type.size > 1 else '0'}]"

        low, high = ("-128.0f", "127.0f") if out.dtype is DType.INT8 else ("0.0f", "255.0f")
        return f"""
i32 begins[WIDTH] __attribute__((aligned(64))); f32 factors[WIDTH] __attribute__((aligned(64)));
int block = GID(1) % BLOCKS;
{{
  GLOBAL const i32* weights = (GLOBAL const i32*)(w + BLOCKS * (GROUPS * KW * WIDTH * 4)) + block * WIDTH;
  u32 z = (u32)({at(roles.a_zero, "a_zero")} + MOVED);
  for (int i = 0; i < WIDTH; i++) {{
    int channel = block * WIDTH + i < CHANNELS ? block * WIDTH + i : CHANNELS - 1;
    begins[i] = (i32)((u32){at(roles.addend, "addend")} - z * (u32)weights[i]);
    f32 f = {at(roles.a_scale, "a_scale")} * {at(roles.b_scale, "b_scale")};
    factors[i] = f / {at(roles.y_scale, "y_scale")};
  }}
}}
V begin = *(V*)begins; VF factor = *(VF*)factors;
f32 zero = (f32){at(roles.y_zero, "y_zero")};
VF low = {low} - zero, high = {high} - zero;
V none = (V){low if problem.op.startswith(MS) else "0"}, shift = (V)(i32)zero;"""


_PLAIN = IntegerConv()


def pack(w: Array, width: int) -> Array:
    """Packs C 1 H W as blocks of [quads of rows][columns][channels][4 rows], then the sums of each channel."""
    channels, _, high, wide = w.shape
    groups = -(-high // 4)

    def arrange(whole: Array) -> Array:
        return whole.reshape(width, groups, 4, wide).transpose(1, 3, 0, 2)

    slabs = [w[first : first + width, 0] for first in range(0, channels, width)]
    return pack_slabs(slabs, (width, groups * 4, wide), arrange, 0)


def _quads(width: int) -> str:
    """C text that combines four vectors of bytes, one for each row, to quads."""
    pairs = ", ".join(f"{i}, {width + i}" for i in range(width))
    return f"""
vector_of(u8, WIDTH, B); vector_of(u16, WIDTH, S);
typedef B BU __attribute__((aligned(1)));
INLINE V quads_of(B a, B b, B c, B d) {{
  S ab = CAST_BITS(__builtin_shufflevector(a, b, {pairs}), S);
  S cd = CAST_BITS(__builtin_shufflevector(c, d, {pairs}), S);
  return CAST_BITS(__builtin_shufflevector(ab, cd, {pairs}), V);
}}
"""


# Columns of the padding stay the same for all rows. Surplus rows of a quad have weights of zero.
_ROWS = """
int first = GID(0) * ROWS, last = first + ROWS < OH ? first + ROWS : OH;
GLOBAL const u8* image = x + GID(1) * (XH * XW * WIDTH);
GLOBAL i32* quads = kept + (GID(1) * PARTS + GID(0)) * (COLUMNS * GROUPS * WIDTH);
GLOBAL VY* to = (GLOBAL VY*)y + GID(1) * OH * OW;
const V turned = (V)(i32)(MOVED * 0x01010101u);
V wv[GROUPS][KW];
UNROLL for (int g = 0; g < GROUPS; g++) UNROLL for (int k = 0; k < KW; k++)
  wv[g][k] = LOADV(w + ((block * GROUPS + g) * KW + k) * (WIDTH * 4));
{
  V outside = (V)(i32)(*border * 0x01010101u) ^ turned;
  for (int i = 0; i < COLUMNS * GROUPS; i++)
    if (!INSIDE(i / GROUPS - PW, XW)) STOREV(quads + i * WIDTH, outside);
}
for (int row = first; row < last; row++) {
  UNROLL for (int g = 0; g < GROUPS; g++) {
    GLOBAL const u8* from[4];
    int step[4];
    UNROLL for (int r = 0; r < 4; r++) {
      int at = row * SH - PH + (4 * g + r) * DH, inside = 4 * g + r < KH && INSIDE(at, XH);
      from[r] = inside ? image + at * (XW * WIDTH) : border;
      step[r] = inside ? WIDTH : 0;
    }
    int end = XW + PW < COLUMNS ? XW : COLUMNS - PW;
    for (int i = 0; i < end; i++) {
      V v = quads_of(*(GLOBAL const BU*)(from[0] + i * step[0]), *(GLOBAL const BU*)(from[1] + i * step[1]),
                     *(GLOBAL const BU*)(from[2] + i * step[2]), *(GLOBAL const BU*)(from[3] + i * step[3]));
      STOREV(quads + ((PW + i) * GROUPS + g) * WIDTH, v ^ turned);
    }
  }
  for (int left = 0; left < OW; left += UR) {
    V acc[UR];
    UNROLL for (int u = 0; u < UR; u++) acc[u] = begin;
    int at[UR];
    UNROLL for (int u = 0; u < UR; u++) at[u] = (left + u < OW ? left + u : OW - 1) * SW;
    UNROLL for (int k = 0; k < KW; k++) UNROLL for (int g = 0; g < GROUPS; g++)
      UNROLL for (int u = 0; u < UR; u++)
        acc[u] = dot4(acc[u], LOADV(quads + ((at[u] + k * DW) * GROUPS + g) * WIDTH), wv[g][k]);
    UNROLL for (int u = 0; u < UR; u++)
      if (left + u < OW) *(GLOBAL VYU*)(to + row * OW + left + u) = quantise(acc[u], factor, low, high, none, shift);
  }
}
"""

SOLVERS = both(ConvBytesDepthwise)
