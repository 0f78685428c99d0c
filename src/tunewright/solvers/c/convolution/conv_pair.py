"""A convolution and the following depthwise convolution in one kernel, in the blocked layout.

In mobile networks the result of the first one (the middle) is several times as large as its input, and is read once.
Here the middle never becomes a tensor. A work-item computes a strip of rows of the result, for some slabs of NB blocks
of channels. It keeps as many rows of the middle as the depthwise window is high, in a ring on its stack. Columns of
zeros surround them where the window reaches into the padding. The register tiles of `conv_blocked` compute a row of the
middle, which goes through the steps between the convolutions. The depthwise window then reads it from the core's cache
and checks for no border. Wide images are cut into panels of columns, because the ring has a fixed size.

The first convolution is 1 x 1, or one over a plain input of few channels, which is first copied with its padding. Rows
where strips meet are computed twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater, lesser
from tunewright.ir.types import PLAIN, DType, TensorType, blocked
from tunewright.ops.base import Operand
from tunewright.ops.internal.conv_pair import MAIN, PAIR, apart, between, middle
from tunewright.search.space import Scalar, Space
from tunewright.solvers.base import Config, Packing, Problem, tensor

from ..source import epilogue
from ..source.base import CSolver, both
from ..source.emit import EmittedLaunch, In, Out, Scratch, Source
from ..source.window import Window
from . import conv_depthwise
from .conv_blocked import ITEMS, MOST_COPIED, TILES, lanes, pack, pack_bias, padded_copy, widened
from .conv_plan import MULTIPLY

#: The choices of tuning: blocks and pixels of a tile of the first convolution, and pixels of a tile of the depthwise
#: one; rows of a strip, and slabs of a work-item.
BLOCKS, PIXELS, TILE = (1, 2, 3, 4), (3, 4, 5, 6, 7, 8, 10, 12), (4, 6, 7, 8, 10, 12)
ROWS, SLABS = (4, 8, 16, 32, 64), (1, 2, 4, 8, 16, 32)
#: vectors of the ring: three rows of 320 pixels for two blocks, 64 KiB with AVX2
RING = 2048
#: the most channels of a plain input
FEW = 8
#: The most of the middle's rows that may be computed twice, as a fraction, where there are enough rows.
TWICE = 0.04


class ConvPair(CSolver):
    """Takes constant f32 weights, an input in blocks (or a plain one of few channels), and an output in blocks."""

    family = "conv_pair"
    ops = frozenset({PAIR})
    dtypes = frozenset({DType.FLOAT32})
    layouts = frozenset({"plain", "blocked"})
    rank = 45

    def refuse(self, problem: Problem, target: Target) -> str | None:
        return _why_not(problem, target) or epilogue.why_not(problem)

    def space(self, problem: Problem, target: Target) -> Space:
        form = _Form(problem, target)

        def allow(c: Mapping[str, Scalar]) -> bool:
            nb, ur, tile, rows, slabs = (int(str(c[name])) for name in ("nb", "ur", "tile", "rows", "slabs"))
            # More rows, or more slabs, than exist act like the next smaller number.
            enough = (rows == ROWS[0] or rows // 2 < form.window.output[1]) and slabs // 2 < form.slabs(nb)
            return enough and form.fits(nb, ur, tile)

        params = {"nb": BLOCKS, "ur": PIXELS, "tile": TILE, "rows": ROWS, "slabs": SLABS}
        return Space(params, allow, version="1")

    def default(self, problem: Problem, target: Target) -> Config:
        """The tile that wastes the least work; strips long enough that few rows are computed twice."""
        if not problem.is_static:
            return {"nb": 1, "ur": 8, "tile": 8, "rows": 16, "slabs": 1}
        form = _Form(problem, target)
        known = next(tiles for registers, tiles in TILES.items() if target.registers >= registers)
        fitting = {t: c for t, c in known.items() if form.fits(*t, TILE[0])} or form.small()
        nb, ur = min(fitting, key=lambda t: form.done(*t) * fitting[t])
        width = form.window.output[2]
        tile = min((t for t in (8, 7, 4) if form.fits(nb, ur, t)), key=lambda t: (-(-width // t) * (t + 2), -t))
        _, kh, _ = form.window.kernel
        _, sh, _ = form.window.stride
        rows = next((r for r in ROWS if greater(0, kh - sh) <= TWICE * r * sh), ROWS[-1])
        rows = next((r for r in ROWS if r >= lesser(rows, form.window.output[1])), ROWS[-1])
        strips = form.batch * form.panels(nb, tile) * -(-form.window.output[1] // rows)
        slabs = [s for s in SLABS if s == 1 or (s // 2 < form.slabs(nb))]
        while len(slabs) > 1 and strips * -(-form.slabs(nb) // slabs[-1]) < ITEMS * target.units:
            slabs.pop()
        return {"nb": nb, "ur": ur, "tile": tile, "rows": rows, "slabs": slabs[-1]}

    def packings(self, problem: Problem, config: Config, target: Target) -> Mapping[int, Packing]:
        block, nb = lanes(target), int(config["nb"])
        plain = tensor(problem.inputs[0]).layout == PLAIN
        found = {
            1: Packing(f"conv{nb}x{block}{'i' if plain else 't'}g1", lambda w: pack(w, 1, nb * block, plain)),
            3: Packing(f"depthwise{block}", lambda w: conv_depthwise.pack(w, block)),
        }
        if problem.inputs[2] is not None:
            found[2] = Packing(f"bias{nb * block}g1", lambda b: pack_bias(b, 1, nb * block))
        if problem.inputs[4] is not None:
            found[4] = Packing(f"padded{block}", lambda b: np.pad(b, (0, -len(b) % block)))
        return found

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        form, out = _Form(problem, target), tensor(problem.outputs[0])
        if not out.size:
            return []
        nb, ur, tile, rows, slabs = (int(config[name]) for name in ("nb", "ur", "tile", "rows", "slabs"))
        first, window = form.first, form.window
        before: list[EmittedLaunch] = []
        given: In | Scratch = In(0)
        if form.plain and (any(first.head) or any(first.tail)):
            wide = widened(first)
            given = Scratch("padded", 4 * math.prod((*form.x.dims[:2], *wide.input)))
            before, first = [padded_copy(form.x, first, wide, given, self.specialise)], wide
        source = Source("conv_pair", self.specialise)
        source.buffer("x", DType.FLOAT32, given)
        for i, name in enumerate(("w", "bias", "w2", "bias2"), 1):
            if problem.inputs[i] is not None:
                source.buffer(name, DType.FLOAT32, In(i))
        steps, last = epilogue.Epilogue(source, form.inner), epilogue.Epilogue(source, problem)
        source.buffer("y", DType.FLOAT32, Out())
        (_, kh, kw), (_, sh, sw), (_, ph, pw) = window.kernel, window.stride, window.head
        panels = form.panels(nb, tile)
        strips, rounds = -(-window.output[1] // rows), -(-form.slabs(nb) // slabs)
        source.fixed(W=form.width, NB=nb, UR=ur, TILE=tile, KH=kh, KW=kw, SH=sh, SW=sw, DW=1, RING=RING)
        source.dims(
            PH=ph, PW=pw, MH=window.input[1], MW=window.input[2], OH=window.output[1], OW=window.output[2],
            PANELS=panels, PITCH=form.pitch(panels), STRIPS=strips, STAY=-(-form.slabs(nb) // rounds),
            ALL=form.slabs(nb), BLOCKS=form.blocks, IC=form.x.dims[1],
        )  # fmt: skip
        if form.plain:
            (_, kh, kw), (_, sh, sw) = first.kernel, first.stride
            source.fixed(KH1=kh, KW1=kw, SH1=sh, SW1=sw)
            source.dims(IH=first.input[1], IW=first.input[2])
        else:
            source.dims(XBLOCKS=form.x.physical[1])
        source.function(_HEAD + MULTIPLY)
        if out.dims[1] % form.width:  # Lanes beyond the last channel have no separate operand.
            source.dims(CHANNELS=out.dims[1])
        within = "(c + l < CHANNELS ? c + l : CHANNELS - 1)" if out.dims[1] % form.width else "c + l"
        source.add(_BEGIN)
        source.add("V start = LOADV(bias + (slab * NB + b) * W);" if problem.inputs[2] is not None else "V start = 0;")
        source.add("UNROLL for (int u = 0; u < UR; u++) acc[b][u] = start;\n}")
        source.add(_STEM if form.plain else _POINTWISE)
        kept = _lanes(form.inner, steps, "int c UNUSED = (slab * NB + b) * W;", within, "0")
        source.add(_KEEP.replace("STEPS;", kept))
        source.add("V start = LOADV(bias2 + block * W);" if problem.inputs[4] is not None else "V start = 0;")
        source.add(_TILES + "\n".join(f"V a{u} = start;" for u in range(tile)))
        source.add(_ROW + conv_depthwise.row_taps(window, tile, lambda at: f"line[{at}]") + "\n}")
        ends = []
        for u in range(tile):
            done = _lanes(problem, last, "int c UNUSED = block * W;", within, f"place + {u} * W + l")
            ends.append(f"{{ V a = a{u};\n{done}\nSTOREV(y + place + {u} * W, a); }}")
        source.add("if (ow + TILE <= end) {\n" + "\n".join(ends) + "\n} else {")
        source.add("\n".join(f"if (ow + {u} < end) {store}" for u, store in enumerate(ends[:-1])) + "\n}")
        source.add(_END)
        return [*before, source.call([strips, rounds, panels * out.dims[0]])]


def _lanes(problem: Problem, steps: epilogue.Epilogue, setup: str, channel: str, offset: str) -> str:
    """Statements that apply an epilogue to vector a."""
    if not problem.epilogue:
        return ""
    lines, result = steps.apply("v", channel, offset)
    loop = f"for (int l = 0; l < W; l++) {{ f32 v = t[l];\n{lines}\nt[l] = {result}; }}"
    return f"f32 t[W]; *(VU*)t = a; {setup}\n{loop}\na = *(VU*)t;"


@dataclass(frozen=True)
class _Form:
    """Both convolutions of a static problem, and the sizes that determine tiles and work-items."""

    problem: Problem
    target: Target

    @property
    def width(self) -> int:
        return lanes(self.target)

    @property
    def x(self) -> TensorType:
        return tensor(self.problem.inputs[0])

    @property
    def plain(self) -> bool:
        return self.x.layout == PLAIN

    @property
    def batch(self) -> int:
        return self.x.dims[0]

    @cached_property
    def inner(self) -> Problem:
        """The first convolution with its steps; its operands have the numbers that they have in the pair."""
        given = [None if t is None else Operand(t) for t in self.problem.main_inputs]
        made = tensor(between(given, self.problem.attrs)).with_layout(tensor(self.problem.outputs[0]).layout)
        count, attrs = len(self.problem.main_inputs), self.problem.attrs
        return Problem(
            "Conv", self.problem.main_inputs, (made,), apart(attrs)[0], middle(attrs), count - MAIN,
            self.problem.constant[:count],
        )  # fmt: skip

    @cached_property
    def first(self) -> Window:
        return Window.of(self.inner)

    @cached_property
    def window(self) -> Window:
        """The window of the depthwise convolution."""
        inputs = (self.inner.outputs[0], self.problem.inputs[3])
        return Window.of(Problem("Conv", inputs, self.problem.outputs, apart(self.problem.attrs)[1]))

    @property
    def blocks(self) -> int:
        return -(-tensor(self.problem.outputs[0]).dims[1] // self.width)

    def slabs(self, nb: int) -> int:
        return -(-self.blocks // nb)

    def pitch(self, panels: int) -> int:
        """Columns of the middle tensor under the widest group of this number of panels."""
        return (-(-self.window.output[2] // panels) - 1) * self.window.stride[2] + self.window.kernel[2]

    def panels(self, nb: int, tile: int) -> int:
        """The fewest panels whose rows fit the ring, with the columns that the last tile reads beyond them; 0: none
        fit."""
        (_, height, taps), (_, _, stride) = self.window.kernel, self.window.stride
        spare = (tile - 1) * stride + taps
        widest = ((RING - spare) // (height * nb) - taps) // stride + 1
        return -(-self.window.output[2] // widest) if widest > 0 else 0

    def narrowest(self, panels: int) -> int:
        """A lower bound of the columns of the middle that a panel reads."""
        (_, _, width), (_, _, stride), (_, _, head) = self.window.output, self.window.stride, self.window.head
        (_, _, taps), (_, _, size) = self.window.kernel, self.window.input
        beyond = greater(0, (width - 1) * stride - head + taps - size)
        return (width // panels - 1) * stride + taps - max(head, 0) - beyond

    def columns(self, panels: int) -> list[int]:
        """The number of columns of the middle that each panel needs."""
        (_, _, width), (_, _, stride), (_, _, head) = self.window.output, self.window.stride, self.window.head
        (_, _, taps), (_, _, size) = self.window.kernel, self.window.input
        cuts = [(width * p // panels, width * (p + 1) // panels) for p in range(panels)]
        return [lesser(size, (c1 - 1) * stride - head + taps) - greater(0, c0 * stride - head) for c0, c1 in cuts]

    def fits(self, nb: int, ur: int, tile: int) -> bool:
        """Whether the registers hold the tiles, and these are not wider than a panel."""
        registers = self.target.registers
        if nb > self.blocks or nb * ur + lesser(nb, ur) >= registers or tile + self.window.kernel[2] >= registers:
            return False
        panels = self.panels(nb, tile)
        return panels > 0 and ur <= self.narrowest(panels)

    def small(self) -> dict[tuple[int, int], float]:
        """Tiles for narrow images."""
        pairs = ((nb, ur) for nb in BLOCKS for ur in PIXELS)
        return {t: 1 + 8 / (t[0] * t[1]) for t in pairs if self.fits(*t, TILE[0])}

    def done(self, nb: int, ur: int) -> int:
        """The number of pixels of blocks that are computed for a row of the middle."""
        return self.slabs(nb) * nb * sum(-(-n // ur) * ur for n in self.columns(self.panels(nb, TILE[0])))


_HEAD = """vector_of(f32, W, V);
typedef V VU __attribute__((aligned(4)));
#define SLOT(row) ((row) % KH * (NB * PITCH))
"""

# m0 to m1: columns of the middle that the panel reads; b0 to b1: those of them that exist
_BEGIN = """
int n = GID(2) / PANELS, panel = GID(2) % PANELS, c0 = OW * panel / PANELS, end = OW * (panel + 1) / PANELS - c0;
int r0 = OH * GID(0) / STRIPS, r1 = OH * (GID(0) + 1) / STRIPS;
int s_end = (GID(1) + 1) * STAY < ALL ? (GID(1) + 1) * STAY : ALL;
int m0 = c0 * SW - PW, m1 = m0 + (end - 1) * SW + KW;
int b0 = m0 < 0 ? 0 : m0, b1 = m1 < MW ? m1 : MW;
V ring[RING];
for (int i = 0; i < KH * NB; i++) {
  for (int j = 0; j < b0 - m0; j++) ring[i * PITCH + j] = 0;
  for (int j = b1 - m0; j < PITCH; j++) ring[i * PITCH + j] = 0;
}
for (int j = 0; j < (TILE - 1) * SW + KW; j++) ring[KH * NB * PITCH + j] = 0;
for (int slab = GID(1) * STAY; slab < s_end; slab++) {
int blocks = BLOCKS - slab * NB < NB ? BLOCKS - slab * NB : NB;
int next = r0 * SH - PH;
next = next < 0 ? 0 : next;
for (int r = r0; r < r1; r++) {
int top = r * SH - PH, h0 = top < 0 ? -top : 0, h1 = top + KH > MH ? MH - top : KH;
for (; next < top + h1; next++) for (int q = b0; q < b1; q += UR) {
int at = q + UR <= b1 ? q : b1 - UR;  /* the last tile makes some pixels again */
GLOBAL const f32* xp[UR];
V acc[NB][UR];
UNROLL for (int b = 0; b < NB; b++) {
"""

_POINTWISE = """
GLOBAL const f32* wp = w + slab * (IC * NB * W);
UNROLL for (int u = 0; u < UR; u++) xp[u] = x + (n * XBLOCKS * (MH * MW) + next * MW + at + u) * W;
int k = 0;
for (; k + W <= IC; k += W) {
  _Pragma("unroll 4") for (int i = 0; i < W; i++) MULTIPLY(i, xp[u][i])
  wp += W * NB * W;
  UNROLL for (int u = 0; u < UR; u++) xp[u] += MH * MW * W;
}
_Pragma("unroll 1") for (int i = 0; i < IC - k; i++) MULTIPLY(i, xp[u][i])
"""

_STEM = """
GLOBAL const f32* wp = w + slab * (IC * KH1 * KW1 * NB * W);
UNROLL for (int u = 0; u < UR; u++) xp[u] = x + (n * IC * IH + next * SH1) * IW + (at + u) * SW1;
for (int ic = 0; ic < IC; ic++) for (int ky = 0; ky < KH1; ky++, wp += KW1 * NB * W) {
  int row = (ic * IH + ky) * IW;
  _Pragma("unroll 4") for (int kx = 0; kx < KW1; kx++) MULTIPLY(kx, xp[u][row + kx])
}
"""

_KEEP = """
V* to = ring + SLOT(next) + (at - m0);
UNROLL for (int b = 0; b < NB; b++) UNROLL for (int u = 0; u < UR; u++) {
  V a = acc[b][u];
  STEPS;
  to[b * PITCH + u] = a;
}
}
for (int b = 0; b < blocks; b++) {
int block = slab * NB + b;
GLOBAL const f32* filter = w2 + block * (KH * KW * W);
"""

_TILES = """
int place = (((n * BLOCKS + block) * OH + r) * OW + c0) * W;
for (int ow = 0; ow < end; ow += TILE, place += TILE * W) {
"""

_ROW = """
for (int h = h0; h < h1; h++) {
const V* line = ring + SLOT(top + h) + b * PITCH + ow * SW;
GLOBAL const f32* factors = filter + h * KW * W;
"""

_END = """
}
}
}
}
"""


def _why_not(problem: Problem, target: Target) -> str | None:
    if not target.traits.private_caches:
        return "the ring is larger than what a work-item has elsewhere than on a processor"
    x, out, block = problem.inputs[0], problem.outputs[0], lanes(target)
    if not problem.is_static or not isinstance(x, TensorType) or not isinstance(out, TensorType):
        return "shapes are not known"
    if out.layout != blocked(block):
        return f"the output is not in blocks of {block} channels"
    if not all(problem.constant[i] for i, t in enumerate(problem.main_inputs) if i and t is not None):
        return "the weights are not constant"
    if len(x.dims) != 4:
        return "takes two spatial axes"
    form = _Form(problem, target)
    if int(form.inner.attrs.get("group", 1)) != 1 or tensor(problem.inputs[3]).dims[1] != 1:
        return "the first convolution has groups, or the second is not depthwise"
    if out.dims[1] != tensor(problem.inputs[3]).dims[0] or out.dims[1] != tensor(form.inner.outputs[0]).dims[1]:
        return "the depthwise convolution has more than one filter for a channel"
    if form.window.dilation != (1, 1, 1) or form.first.dilation != (1, 1, 1):
        return "takes no dilation"
    if form.plain and x.dims[1] > FEW:
        return f"a plain input of more than {FEW} channels"
    if form.plain and 4 * math.prod((*x.dims[:2], *widened(form.first).input)) > greater(MOST_COPIED, 4 * x.nbytes):
        return "the input with its padding is too large"
    if not form.plain and (x.layout != out.layout or not form.first.pointwise):
        return f"the first convolution is neither 1 x 1 nor over a plain input ({x.layout})"
    if out.size and not form.small():
        return "the image is too narrow for a tile, or the window too high for the ring"
    return epilogue.why_not(form.inner)


SOLVERS = both(ConvPair)
