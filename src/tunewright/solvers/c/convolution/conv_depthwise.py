"""Depthwise convolutions in the blocked layout: a vector holds one pixel of as many channels as it has lanes.

A tile is some pixels of a row of results. Each pixel of the input is read once for all results that use it, while the
weights of a row of taps stay in registers. Tiles at the border check the positions that they read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from tunewright.devices.base import Target
from tunewright.ir.symbolic import SymInt, greater, lesser
from tunewright.ir.types import DType, Layout, TensorType, blocked
from tunewright.search.space import Space
from tunewright.solvers.base import Array, Config, Packing, Problem, tensor

from ..source import epilogue, window
from ..source.base import CSolver, both, layout_of
from ..source.emit import ConstantTable, EmittedLaunch, In, Out, Source
from ..source.window import Window, as_conv

#: multiply-adds of vectors that are worth a separate work-item: about 5 us
LEAST_WORK = 1 << 13
#: Widths of results that are literals in the generic kernel too. In images this small every tile is at a border, and a
#: known width saves 12 to 30 %. Most classifiers end in these sizes, and there are few such texts.
WIDTHS = (7, 14, 28)
#: the most taps of a row that are unrolled; more taps are a loop
_UNROLLED_TAPS = 8

_BEGIN = """
int row = ROWS * GID(0) / ITEMS, last = ROWS * (GID(0) + 1) / ITEMS;
int oh = row % OH, od = row / OH % OD, plane = row / OH / OD;
for (; row < last; row++) {
  int block = plane % BLOCKS;
  GLOBAL const f32 *image = x + plane * ID * IH * IW * W, *filter = w + block * TAPS * W;
  /* taps inside the input, of depth and height */
  int id = od * SD - HEAD_D, ih = oh * SH - HEAD_H, d0 = 0, d1 = KD, h0 = 0, h1 = KH;
  while (d0 < d1 && id + d0 * DD < 0) d0++;
  while (d0 < d1 && id + (d1 - 1) * DD >= ID) d1--;
  while (h0 < h1 && ih + h0 * DH < 0) h0++;
  while (h0 < h1 && ih + (h1 - 1) * DH >= IH) h1--;
  for (int ow = 0; ow < OW; ow += TILE) {
    int iw = ow * SW - HEAD_W, place = (row * OW + ow) * W;
"""

_TAPS = """
for (int d = d0; d < d1; d++)
  for (int h = h0; h < h1; h++) {
    GLOBAL const f32* line = image + (((id + d * DD) * IH + ih + h * DH) * IW + iw) * W;
    GLOBAL const f32* factors = filter + (d * KH + h) * KW * W;
"""

_END = """
  }
  if (++oh == OH) {
    oh = 0;
    if (++od == OD) { od = 0; plane++; }
  }
}
"""


class ConvDepthwise(CSolver):
    """Computes a row of output pixels at a time, with a tile of them in registers."""

    version = "1.1"
    family = "conv_depthwise"
    ops = window.CONVOLUTIONS
    dtypes = frozenset({DType.FLOAT32})
    stores = epilogue.NARROW
    layouts = frozenset({"plain", "blocked"})
    rank = 40

    def refuse(self, problem: Problem, target: Target) -> str | None:
        layout = _layout(target)
        for type in (problem.inputs[0], problem.outputs[0]):
            if layout_of(type) != layout:
                return f"works in the layout {layout}, not in {layout_of(type)}"
        return _why_not_depthwise(problem) or window.why_not_fused(problem) or epilogue.why_not(as_conv(problem))

    def preferred(self, problem: Problem, target: Target) -> tuple[Layout, Layout] | None:
        layout, out = _layout(target), problem.outputs[0]
        if self.specialise or problem.op not in self.ops or not problem.is_static or tensor(out).dims[1] < layout.block:
            return None
        whole = tensor(out).shape
        along = [i for i, t in enumerate(problem.inputs) if i > 2 and isinstance(t, TensorType) and t.shape == whole]
        return (layout, layout) if self.why_not(problem.in_layout(layout, [0, *along]), target) is None else None

    def space(self, problem: Problem, target: Target) -> Space:
        return Space(
            {"tile": (2, 4, 6, 7, 8, 10, 12, 14), "slices": (1, 2, 4, 8)},
            lambda c: int(c["tile"]) + 2 <= target.registers,  # type: ignore[arg-type]
            version="2",
        )

    def default(self, problem: Problem, target: Target) -> Config:
        """Tiles of 8 pixels, or of 7 or 4 where the width is known and these divide it better."""
        width = Window.of(problem).output[2] if problem.is_static else 0
        tile = min((8, 7, 4), key=lambda n: (-(-width // n) * (n + 2), -n))
        return {"tile": tile if self._knows(width) else 8, "slices": 4}

    def _knows(self, width: int) -> bool:
        """Whether the width of the result is part of the text."""
        return self.specialise or (not isinstance(width, SymInt) and width in WIDTHS)

    def packings(self, problem: Problem, config: Config, target: Target) -> Mapping[int, Packing]:
        block = _layout(target).block
        found = {1: Packing(f"depthwise{block}", lambda w: pack(w, block))}
        if problem.input(2) is not None:
            found[2] = Packing(f"padded{block}", lambda b: np.pad(b, (0, -len(b) % block)))
        return found

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        problem = as_conv(problem)
        out, block, tile = tensor(problem.outputs[0]), _layout(target).block, int(config["tile"])
        if not out.size:
            return []
        win, channels = Window.of(problem), out.dims[1]
        source = Source("conv_depthwise", self.specialise)
        source.buffer("x", DType.FLOAT32, In(0))
        source.buffer("w", DType.FLOAT32, In(1))
        if problem.input(2) is not None:
            source.buffer("b", DType.FLOAT32, In(2))
        source.buffer("nothing", DType.FLOAT32, ConstantTable(np.zeros(block, np.float32)))
        steps = epilogue.Epilogue(source, problem)
        source.buffer("y", out.dtype, Out())
        for k, name in enumerate("DHW"):
            sizes = {f"I{name}": win.input[k], f"O{name}": win.output[k], f"HEAD_{name}": win.head[k]}
            (source.fixed if name == "W" and self._knows(win.output[2]) else source.dims)(**sizes)
            source.fixed(**{
                f"K{name}": win.kernel[k], f"S{name}": win.stride[k], f"D{name}": win.dilation[k],
            })  # fmt: skip
        blocks = -(-channels // block)
        rows = out.dims[0] * blocks * win.output[0] * win.output[1]
        work = rows * win.output[2] * win.taps
        items = greater(1, lesser(rows, config["slices"] * target.units, work // LEAST_WORK))
        source.dims(BLOCKS=blocks, ROWS=rows, ITEMS=items)
        source.fixed(W=block, TILE=tile, TAPS=win.taps)
        source.function(f"vector_of(f32, {block}, V);\ntypedef V VU __attribute__((aligned(4)));")
        source.add(_BEGIN)
        bias = "LOADV(b + block * W)" if problem.input(2) is not None else "(V)(0.0f)"
        source.add(f"V bias = {bias};\n" + "\n".join(f"V a{u} = bias;" for u in range(tile)))
        source.add("if (iw >= 0 && iw + (TILE - 1) * SW + (KW - 1) * DW < IW) {" + _TAPS)
        source.add(row_taps(win, tile, lambda at: f"LOADV(line + ({at}) * W)"))
        source.add("}\n} else {" + _TAPS)
        source.add(row_taps(win, tile, lambda at: f"LOADV((u32)(iw + {at}) < (u32)IW ? line + ({at}) * W : nothing)"))
        source.add("}\n}")
        if channels % block:  # Lanes beyond the last channel have no separate operand.
            source.dims(CHANNELS=channels)
            lines, result = steps.apply("v", "(block * W + l < CHANNELS ? block * W + l : CHANNELS - 1)", "place + l")
        else:
            lines, result = steps.apply("v", "block * W + l", "place + l")
        for u in range(tile):
            source.add(f"if (ow + {u} < OW) {{")
            if problem.epilogue:
                source.add(f"f32 pixel[W];\n*(VU*)pixel = a{u};\nfor (int l = 0; l < W; l++) {{ f32 v = pixel[l];")
                source.add(f"{lines}\n{source.store('y', 'place + l', result)} }}")
            else:
                source.add(f"STOREV(y + place, a{u});")
            source.add("place += W; }")
        source.add(_END)
        return [source.call([items])]


def row_taps(win: Window, tile: int, load: Callable[[str], str]) -> str:
    """Statements for the taps of one row; ``load`` reads the pixel at a distance from the tile's first pixel."""
    taps, step, dilation = win.kernel[2], win.stride[2], win.dilation[2]
    if taps > _UNROLLED_TAPS:
        sums = "\n".join(f"a{u} = f * {load(f'{u} * SW + k * DW')} + a{u};" for u in range(tile))
        return f"for (int k = 0; k < KW; k++) {{ V f = LOADV(factors + k * W);\n{sums} }}"
    lines = [f"V f{k} = LOADV(factors + {k} * W);" for k in range(taps)]
    under: dict[int, list[str]] = {}
    for k in range(taps):
        for u in range(tile):
            under.setdefault(u * step + k * dilation, []).append(f"a{u} = f{k} * p + a{u};")
    lines += [f"{{ V p = {load(str(at))}; {' '.join(sums)} }}" for at, sums in sorted(under.items())]
    return "\n".join(lines)


def _layout(target: Target) -> Layout:
    return blocked(target.vector_bytes // 4)


def _why_not_depthwise(problem: Problem) -> str | None:
    weights, group = problem.inputs[1], int(problem.attrs.get("group", 1))
    if not problem.constant[1]:
        return "the weights are not constant"
    if problem.input(2) is not None and not problem.constant[2]:
        return "the bias is not constant"
    shape = tensor(weights).shape
    if shape is None or shape[:2] != (group, 1):
        return f"weights {weights} in {group} groups: not one filter for each channel"
    return window.why_not(problem)


def pack(w: Array, block: int) -> Array:
    """Packs C 1 spatial... as C/block, spatial..., block; zeros fill up the last block."""
    taps = w.reshape(w.shape[0], math.prod(w.shape[1:]))
    taps = np.pad(taps, [(0, -len(taps) % block), (0, 0)])
    return np.ascontiguousarray(taps.reshape(-1, block, taps.shape[1]).swapaxes(1, 2))


SOLVERS = both(ConvDepthwise)
