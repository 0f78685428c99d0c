"""Grouped convolutions in the blocked layout, whose groups need not be whole blocks of channels.

A tile is NB blocks of output channels x UR pixels, whatever groups these channels belong to. It reads the range of
input channels that all of these groups use. Weights are zero where a lane's group does not use an input. Where groups
end inside a block some products are wasted, but the tensors stay in the layout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater, lesser
from tunewright.ir.types import DType, Layout, TensorType, blocked
from tunewright.search.space import Space
from tunewright.solvers.base import Array, Config, Packing, Problem, tensor

from ..source import epilogue
from ..source.base import CSolver, both, layout_of
from ..source.emit import ConstantTable, EmittedLaunch, In, Out, Source
from ..source.window import Window, groups
from ..source.window import why_not as why_not_window

#: multiply-adds of vectors that are worth a separate work-item
LEAST_WORK = 1 << 12

_BEGIN = """
const int slab = GID(1), n = GID(2), low = table[3 * slab], high = table[3 * slab + 1];
GLOBAL const f32 *xn = x + n * XBLOCKS * (ID * IH * IW * W), *weights = w + table[3 * slab + 2] * (NB * W);
const int first_block = slab * NB, blocks = YBLOCKS - first_block;
int stop = (GID(0) + 1) * (RUN * UR);
stop = stop < PIXELS ? stop : PIXELS;
for (int p = GID(0) * (RUN * UR); p < stop; p += UR) {
  const int count = PIXELS - p < UR ? PIXELS - p : UR;
  V acc[NB][UR];
"""

# Pixels beyond the image repeat the last one and are not stored.
_CORNERS = """
  int z0[UR], y0[UR], x0[UR];
  UNROLL for (int u = 0; u < UR; u++) {
    const int q = u < count ? p + u : PIXELS - 1;
    z0[u] = q / (OH * OW) * SD - HEAD_D; y0[u] = q / OW % OH * SH - HEAD_H; x0[u] = q % OW * SW - HEAD_W;
  }
"""

# Handles the channels of a block that are in the range, under each tap.
_CHANNELS = """
  GLOBAL const f32* wp = weights;
  for (int ic = low; ic < high;) {
    const int from = ic % W, to = from + high - ic < W ? from + high - ic : W;
    GLOBAL const f32* xc = xn + ic / W * (ID * IH * IW * W);
    ic += to - from;
"""

_TAPS = """
    for (int kz = 0; kz < KD; kz++) for (int ky = 0; ky < KH; ky++) for (int kx = 0; kx < KW; kx++) {
      GLOBAL const f32* xp[UR];
      UNROLL for (int u = 0; u < UR; u++) {
        const int iz = z0[u] + kz * DD, iy = y0[u] + ky * DH, ix = x0[u] + kx * DW;
        xp[u] = xc + ((iz * IH + iy) * IW + ix) * W;
#if PADDED
        xp[u] = (((u32)iz < (u32)ID) & ((u32)iy < (u32)IH) & ((u32)ix < (u32)IW)) ? xp[u] : zeros;
#endif
      }
"""

# A whole tile needs one pointer. The loop over a whole block is unrolled: the end of a loop of eight steps is
# mispredicted.
_POINTS = """
    if (count == UR) {
      GLOBAL const f32* xp = xc + p * W;
      if (to - from == W) {
        _Pragma("unroll 4") for (int i = 0; i < W; i++) PRODUCTS(xp[u * W + i])
      } else {
        _Pragma("unroll 1") for (int i = from; i < to; i++) PRODUCTS(xp[u * W + i])
      }
    } else {
      GLOBAL const f32* xp[UR];
      UNROLL for (int u = 0; u < UR; u++) xp[u] = xc + (u < count ? p + u : PIXELS - 1) * W;
      _Pragma("unroll 1") for (int i = from; i < to; i++) PRODUCTS(xp[u][i])
    }
  }
"""

_TAP = """
      if (to - from == W) {
        _Pragma("unroll 4") for (int i = 0; i < W; i++) PRODUCTS(xp[u][i])
      } else {
        _Pragma("unroll 1") for (int i = from; i < to; i++) PRODUCTS(xp[u][i])
      }
    }
  }
"""

# x: the expression of pixel u's input
_PRODUCTS = """
#define PRODUCTS(x) { \\
  V wv[NB]; \\
  UNROLL for (int b = 0; b < NB; b++) wv[b] = LOADV(wp + b * W); \\
  UNROLL for (int u = 0; u < UR; u++) { V xv = (x); UNROLL for (int b = 0; b < NB; b++) acc[b][u] += wv[b] * xv; } \\
  wp += NB * W; \\
}
"""


@dataclass(frozen=True)
class Slabs:
    """How the output channels are divided into slabs of ``width`` lanes, and the input channels of each slab."""

    groups: int
    inputs: int
    outputs: int
    width: int

    @property
    def count(self) -> int:
        return -(-self.groups * self.outputs // self.width)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """The input channels [low, high) of each slab."""
        for first in range(0, self.groups * self.outputs, self.width):
            last = lesser(first + self.width, self.groups * self.outputs) - 1
            yield first // self.outputs * self.inputs, (last // self.outputs + 1) * self.inputs

    @property
    def depth(self) -> int:
        """The number of input channels of all slabs together."""
        return sum(high - low for low, high in self.ranges())

    def table(self, taps: int) -> Array:
        """(low, high, offset of its weights) of each slab."""
        rows, at = [], 0
        for low, high in self.ranges():
            rows.append((low, high, at))
            at += (high - low) * taps
        return np.array(rows, np.int32)


class ConvGrouped(CSolver):
    """Takes constant f32 weights, and input and output in blocks."""

    version = "1.1"
    family = "conv_grouped"
    ops = frozenset({"Conv"})
    dtypes = frozenset({DType.FLOAT32})
    stores = epilogue.NARROW
    layouts = frozenset({"plain", "blocked"})
    rank = 47  # where groups are whole blocks, the direct convolution wastes nothing

    def refuse(self, problem: Problem, target: Target) -> str | None:
        layout = _layout(target)
        for type in (problem.inputs[0], problem.outputs[0]):
            if layout_of(type) != layout:
                return f"works in the layout {layout}, not in {layout_of(type)}"
        if int(problem.attrs.get("group", 1)) == 1:
            return "has no groups"
        if not problem.constant[1] or (problem.input(2) is not None and not problem.constant[2]):
            return "the weights are not constant"
        return why_not_window(problem) or epilogue.why_not(problem)

    def preferred(self, problem: Problem, target: Target) -> tuple[Layout, Layout] | None:
        layout, out = _layout(target), problem.outputs[0]
        if self.specialise or problem.op not in self.ops or not problem.is_static or tensor(out).dims[1] < layout.block:
            return None
        slabs = _slabs(problem, layout.block)
        if slabs.depth > 3 * slabs.inputs * slabs.count:
            return None  # tiny groups would waste too much
        whole = tensor(out).shape
        along = [i for i, t in enumerate(problem.inputs) if i > 2 and isinstance(t, TensorType) and t.shape == whole]
        return (layout, layout) if self.why_not(problem.in_layout(layout, [0, *along]), target) is None else None

    def space(self, problem: Problem, target: Target) -> Space:
        return Space(
            {"nb": (1, 2, 3, 4), "ur": (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14), "slices": (1, 2, 4, 8, 16)},
            lambda c: _registers(c["nb"], c["ur"]) <= target.registers, version="1",
        )  # fmt: skip

    def default(self, problem: Problem, target: Target) -> Config:
        """The tile with the least time in a simple model of a core."""
        tiles = ((4, 6), (2, 12), (1, 14)) if target.registers >= 32 else ((2, 6), (1, 12))
        if not problem.is_static:
            return {"nb": tiles[0][0], "ur": tiles[0][1], "slices": 4}
        block, pixels = _layout(target).block, math.prod(Window.of(problem).output)

        def cycles(tile: tuple[int, int]) -> float:
            nb, ur = tile
            # Two multiply-adds per cycle. Loads cost a third more than their number, because loads of weights are not
            # hidden.
            return -(-pixels // ur) * _slabs(problem, nb * block).depth * greater(nb * ur, 1.3 * (nb + ur), 8)

        nb, ur = min(tiles, key=cycles)
        return {"nb": nb, "ur": ur, "slices": 4}

    def packings(self, problem: Problem, config: Config, target: Target) -> Mapping[int, Packing]:
        slabs, block = _slabs(problem, int(config["nb"]) * _layout(target).block), _layout(target).block
        found = {1: Packing(f"grouped{slabs.width}x{block}g{slabs.groups}", lambda w: pack(w, slabs, block))}
        if problem.input(2) is not None:
            found[2] = Packing(f"padded{slabs.width}", lambda b: np.pad(b, (0, -len(b) % slabs.width)))
        return found

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x, out = tensor(problem.inputs[0]), tensor(problem.outputs[0])
        if not out.size:
            return []
        window, block = Window.of(problem), _layout(target).block
        nb, ur = int(config["nb"]), int(config["ur"])
        slabs = _slabs(problem, nb * block)
        pixels = math.prod(window.output)
        tiles = -(-pixels // ur)
        source = Source("conv_grouped", self.specialise)
        source.buffer("x", DType.FLOAT32, In(0))
        source.buffer("w", DType.FLOAT32, In(1))
        if problem.input(2) is not None:
            source.buffer("bias", DType.FLOAT32, In(2))
        source.buffer("zeros", DType.FLOAT32, ConstantTable(np.zeros(block, np.float32)))
        source.buffer("table", DType.INT32, ConstantTable(slabs.table(window.taps)))
        steps = epilogue.Epilogue(source, problem)
        source.buffer("y", out.dtype, Out())
        for k, axis in enumerate("DHW"):
            source.dims(**{f"I{axis}": window.input[k], f"O{axis}": window.output[k], f"HEAD_{axis}": window.head[k]})
            source.fixed(**{f"K{axis}": window.kernel[k], f"S{axis}": window.stride[k], f"D{axis}": window.dilation[k]})
        work = out.dims[0] * tiles * nb * ur * slabs.depth * window.taps
        items = greater(1, lesser(int(config["slices"]) * target.units, work // LEAST_WORK))
        run = -(-tiles // greater(1, items // (slabs.count * out.dims[0])))
        source.dims(
            PIXELS=pixels, XBLOCKS=x.physical[1], YBLOCKS=out.physical[1], RUN=run, CHANNELS=out.dims[1],
        )  # fmt: skip
        source.fixed(W=block, NB=nb, UR=ur, PADDED=int(any(window.head) or any(window.tail)))
        source.function("vector_of(f32, W, V);\ntypedef V VU __attribute__((aligned(4)));" + _PRODUCTS)
        source.add(_BEGIN)
        start = "LOADV(bias + (first_block + b) * W)" if problem.input(2) is not None else "(V)(0.0f)"
        source.add(f"UNROLL for (int b = 0; b < NB; b++) {{ const V start = {start};")
        source.add("UNROLL for (int u = 0; u < UR; u++) acc[b][u] = start; }")
        source.add(_CHANNELS + _POINTS if window.pointwise else _CORNERS + _CHANNELS + _TAPS + _TAP)
        source.add("UNROLL for (int b = 0; b < NB; b++) if (b < blocks) UNROLL for (int u = 0; u < UR; u++)")
        source.add("if (u < count) { const int at = ((n * YBLOCKS + first_block + b) * PIXELS + p + u) * W;")
        if problem.epilogue:
            channel = "c + l" if not out.dims[1] % block else "(c + l < CHANNELS ? c + l : CHANNELS - 1)"
            lines, result = steps.apply("v", channel, "at + l")
            source.add("f32 t[W]; *(VU*)t = acc[b][u]; const int c UNUSED = (first_block + b) * W;")
            end = source.store("y", "at + l", result)
            source.add(f"for (int l = 0; l < W; l++) {{ f32 v = t[l];\n{lines}\n{end} }}")
        else:
            source.add("STOREV(y + at, acc[b][u]);")
        source.add("}\n}")
        return [source.call([-(-tiles // run), slabs.count, out.dims[0]])]


def _layout(target: Target) -> Layout:
    return blocked(target.vector_bytes // 4)


def _slabs(problem: Problem, width: int) -> Slabs:
    return Slabs(*groups(problem), width)


def _registers(nb: Any, ur: Any) -> int:
    """Registers for accumulators, a vector of weights for each block, and an input."""
    return int(nb * ur + nb + 1)


def pack(w: Array, slabs: Slabs, block: int) -> Array:
    """Packs O I spatial... as slab, block of its inputs, spatial..., input of the block, lane; with zeros between
    groups."""
    taps = math.prod(w.shape[2:])
    given = w.reshape(slabs.groups * slabs.outputs, slabs.inputs, taps)
    parts = []
    for slab, (low, high) in enumerate(slabs.ranges()):
        whole = np.zeros((high - low, taps, slabs.width), np.float32)
        for lane, out in enumerate(range(slab * slabs.width, lesser((slab + 1) * slabs.width, len(given)))):
            first = out // slabs.outputs * slabs.inputs - low
            whole[first : first + slabs.inputs, :, lane] = given[out]
        ends = [low, *range((low // block + 1) * block, high, block), high]
        parts += [whole[a - low : b - low].swapaxes(0, 1).reshape(-1) for a, b in itertools.pairwise(ends)]
    return np.concatenate(parts)


SOLVERS = both(ConvGrouped)
