"""Direct convolution in the blocked layout: output channels in vector lanes, a register tile of channels x pixels.

A work-item computes a few slabs of NB blocks of output channels for a run of output pixels, UR pixels at a time. Pixels
are numbered through the whole image, so that a tile may continue in the next row, and only the last tile is partial.
The inner loop uses one vector of weights per block and one broadcast input per pixel: NB * UR fused multiply-adds for
NB + UR loads.

The outer loop runs over taps, the inner one over input channels. The position of a tap's pixels is computed once for
all channels, so that borders cost almost nothing. A tap in the padding reads a block of zeros; a tap without any pixel
in the image is skipped. A plain input, of a few channels, is first copied with its padding. So are the pixels that a 1
x 1 window with a stride and many weights reads: between the unused pixels they would take twice the cache.

The loop over the channels of a block is unrolled. As a loop of eight steps its end was mispredicted, which took a fifth
of the time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tunewright.devices.base import Target, on_lines
from tunewright.ir.symbolic import greater, hint, lesser
from tunewright.ir.types import PLAIN, DType, Layout, TensorType, blocked
from tunewright.search.space import Scalar, Space
from tunewright.solvers.base import Array, Config, Packing, Problem, tensor

from ..source import epilogue
from ..source.base import CSolver, both
from ..source.emit import ConstantTable, EmittedLaunch, In, Out, Scratch, Source
from ..source.window import Window
from .conv_plan import MULTIPLY

OPS = frozenset({"Conv"})
#: the choices of tuning: blocks and pixels of a tile, tiles and slabs of a work-item
BLOCKS, PIXELS, RUNS, SLABS = (1, 2, 3, 4, 6), (1, 2, 3, 4, 5, 6, 7, 8, 10, 12), (1, 4, 16, 64), (1, 4, 16)
#: Tiles (blocks, pixels) by least number of registers, with the time of a multiply-add relative to the best tile. A
#: smaller tile hides the latency less well, and one of few blocks loads more.
TILES = {
    32: {(4, 6): 1.0, (4, 5): 1.04, (3, 8): 1.05, (2, 10): 1.1, (1, 12): 1.3},
    0: {(2, 6): 1.0, (2, 5): 1.03, (3, 4): 1.05, (2, 4): 1.15, (1, 8): 1.2},
}
#: The bytes of input that a work-item reads for each of its slabs, and of weights for each run: the cache of one core.
PANEL, HELD = 128 << 10, 512 << 10
#: The least number of work-items per unit: they should finish together even if one of them is disturbed.
ITEMS = 4
#: The most bytes of a plain input with its padding, where most of it is padding.
MOST_COPIED = 16 << 20
#: Weights of at least this number of bytes always come from memory.
COLD = 1 << 20


def lanes(target: Target) -> int:
    """The number of channels in a block: floats in a vector register."""
    return target.vector_bytes // 4


class ConvBlocked(CSolver):
    """Takes constant f32 weights, an input in blocks (or a plain one of few channels), and an output in blocks."""

    family = "conv_blocked"
    version = "2.1"
    ops = OPS
    dtypes = frozenset({DType.FLOAT32})
    stores = epilogue.NARROW
    layouts = frozenset({"plain", "blocked"})
    rank = 45

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, out = tensor(problem.inputs[0]), tensor(problem.outputs[0])
        if out.layout != blocked(lanes(target)):
            return f"the output is not in blocks of {lanes(target)} channels"
        if x.layout not in (PLAIN, out.layout):
            return f"does not take the layout {x.layout}"
        return _why_not(problem, target) or epilogue.why_not(problem)

    def preferred(self, problem: Problem, target: Target) -> tuple[Layout, Layout] | None:
        if self.specialise or self.why_not(_outlined(problem, target), target) is not None:
            return None
        channels = tensor(problem.inputs[0]).dims[1]
        block = blocked(lanes(target))
        return (PLAIN if channels < block.block // 2 + 1 else block), block

    def space(self, problem: Problem, target: Target) -> Space:
        size = _Size(problem, target)

        def allow(c: Mapping[str, Scalar]) -> bool:
            nb, ur, run, slabs = (int(str(c[name])) for name in ("nb", "ur", "run", "slabs"))
            # A run, or a number of slabs, that exceeds the existing ones acts like the next smaller number.
            enough = run // 4 < -(-size.pixels // ur) and slabs // 4 < size.slabs(nb)
            return enough and size.fits(nb, ur)

        params = {"nb": BLOCKS, "ur": PIXELS, "run": RUNS, "slabs": SLABS, "ahead": [0, 1]}
        return Space(params, allow, version="2")

    def default(self, problem: Problem, target: Target) -> Config:
        if not problem.is_static:
            (nb, ur), *_ = _tiles(target)
            return {"nb": nb, "ur": ur, "run": 1, "slabs": 1, "ahead": 0}
        size = _Size(problem, target)
        nb, ur = size.tile(_tiles(target))
        return {"nb": nb, "ur": ur} | size.share(nb, ur, target.units)

    def packings(self, problem: Problem, config: Config, target: Target) -> Mapping[int, Packing]:
        block, nb = lanes(target), int(config["nb"])
        groups = int(problem.attrs.get("group", 1))
        plain = tensor(problem.inputs[0]).layout == PLAIN
        order = "i" if plain else "t"
        found = {1: Packing(f"conv{nb}x{block}{order}g{groups}", lambda w: pack(w, groups, nb * block, plain))}
        if problem.input(2) is not None:
            found[2] = Packing(f"bias{nb * block}g{groups}", lambda b: pack_bias(b, groups, nb * block))
        return found

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x, out = tensor(problem.inputs[0]), tensor(problem.outputs[0])
        window, size = Window.of(problem), _Size(problem, target)
        groups, block = size.groups, lanes(target)
        nb, ur, run, slabs = (int(config[name]) for name in ("nb", "ur", "run", "slabs"))
        plain = x.layout == PLAIN
        tiles, rounds = -(-size.pixels // ur), -(-size.slabs(nb) // slabs)
        run, slabs = size.run(tiles, run, rounds, target.units), -(-size.slabs(nb) // rounds)
        padded = any(window.head) or any(window.tail)
        before: list[EmittedLaunch] = []
        given: In | Scratch = In(0)
        if plain and padded:
            wide, padded = widened(window), False
            given = Scratch("padded", 4 * math.prod((*x.dims[:2], *wide.input)))
            before, window = [padded_copy(x, window, wide, given, self.specialise)], wide
        elif _gathers(problem, window):
            given = Scratch("gathered", 4 * math.prod((*x.physical[:2], *window.output, block)))
            before, window = [self._gather(x, window, given)], _dense(window)
        source = Source("conv_blocked", self.specialise)
        source.buffer("x", DType.FLOAT32, given)
        source.buffer("w", DType.FLOAT32, In(1))
        bias = problem.input(2) is not None
        if bias:
            source.buffer("bias", DType.FLOAT32, In(2))
        source.buffer("zeros", DType.FLOAT32, ConstantTable(np.zeros(16, np.float32)))
        steps = epilogue.Epilogue(source, problem)
        source.buffer("y", out.dtype, Out())
        (kd, kh, kw), (sd, sh, sw), (dd, dh, dw) = window.kernel, window.stride, window.dilation
        taps = {"KD": kd, "KH": kh, "KW": kw, "SD": sd, "SH": sh, "SW": sw, "DD": dd, "DH": dh, "DW": dw}
        source.fixed(W=block, NB=nb, UR=ur, L=1 if plain else block, PADDED=int(padded))
        if plain:
            source.fixed(**taps)  # The inner loop runs over a row of taps.
        else:
            source.dims(**taps)
        source.dims(
            PD=window.head[0], PH=window.head[1], PW=window.head[2], ID=window.input[0], IH=window.input[1],
            IW=window.input[2], OH=window.output[1], OW=window.output[2], PIXELS=size.pixels, TILES=tiles,
            SLABS=size.slabs(nb) // groups, ALL=size.slabs(nb), IC=size.depth, XBLOCKS=x.physical[1],
            YBLOCKS=out.physical[1], OBLOCKS=size.blocks, OC=out.dims[1], RUN=run, STAY=slabs,
            # The floats of the next slab's weights that are prefetched with each block of channels: over a run, all of
            # them.
            AHEAD=lesser(16, -(-nb * block * block // run)) if config["ahead"] else 0,
        )  # fmt: skip
        channel = "(c + l < OC ? c + l : OC - 1)" if out.dims[1] % block else "c + l"
        lines, result = steps.apply("v", channel, "at + l")
        source.function(_HEAD + MULTIPLY + _STEPS)
        store = "STOREV(y + at, a);"
        if problem.epilogue:
            store = "f32 t[W]; *(VU*)t = a; int c UNUSED = (group * OBLOCKS + (slab % SLABS) * NB + b) * W;\n"
            store += f"for (int l = 0; l < W; l++) {{ f32 v = t[l];\n{lines}\n{source.store('y', 'at + l', result)} }}"
        source.add(_SETUP)
        source.add("V start = LOADV(bias + (slab * NB + b) * W);" if bias else "V start = 0;")
        source.add("UNROLL for (int u = 0; u < UR; u++) acc[b][u] = start;\n}")
        if window.pointwise and not plain:
            source.add(_POINTWISE + _CHANNELS)
        else:
            source.add(_CORNERS)
            source.add(_PLAIN if plain else _TAPS + _CHANNELS + "}")
        source.add(_STORE.replace("STORE;", store))
        return [*before, source.call([-(-tiles // run), rounds, out.dims[0]])]

    def _gather(self, x: TensorType, window: Window, given: Scratch) -> EmittedLaunch:
        """The launch that copies the pixels of a blocked input that a strided window of one tap reads."""
        source = Source("conv_blocked_gather", self.specialise)
        source.buffer("x", DType.FLOAT32, In(0))
        source.buffer("gathered", DType.FLOAT32, given)
        (d, h, w), (sd, sh, sw), (xd, xh, xw) = window.output, window.stride, window.input
        source.fixed(W=x.layout.block)
        source.dims(SD=sd, SH=sh, SW=sw, XD=xd, XH=xh, XW=xw, OD=d, OH=h, OW=w, XBLOCKS=x.physical[1])
        source.function("vector_of(f32, W, V);\ntypedef V VU __attribute__((aligned(4)));")
        source.add(_GATHER)
        return source.call([h, d * x.physical[1], x.dims[0]])


class _Size:
    """The sizes that determine tiles and work-items."""

    def __init__(self, problem: Problem, target: Target) -> None:
        x, out = tensor(problem.inputs[0]), tensor(problem.outputs[0])
        window = Window.of(problem)
        window = _dense(window) if _gathers(problem, window) else window
        self.groups, width, self.registers = int(problem.attrs.get("group", 1)), lanes(target), target.registers
        self.batch, self.pixels = out.dims[0], math.prod(window.output)
        #: input channels and blocks of output channels of a group
        self.depth, self.blocks = x.dims[1] // self.groups, -(-out.dims[1] // self.groups // width)
        #: bytes of input for a pixel of a tile, of a group's input, and of weights for a block
        self.pixel, self.input = self.depth * 4 * window.stride[2], self.depth * 4 * math.prod(window.input)
        self.weights = self.depth * 4 * window.taps * width
        #: the smallest tile that holds all pixels
        self.most = next((n for n in PIXELS if n >= hint(self.pixels)), PIXELS[-1])

    def slabs(self, nb: int) -> int:
        """The number of slabs of NB blocks, in all groups."""
        return self.groups * -(-self.blocks // nb)

    def fits(self, nb: int, ur: int) -> bool:
        """Whether a tile is worth trying."""
        # The registers hold accumulators, one broadcast input and one weight.
        if nb * ur + lesser(nb, ur) >= self.registers or nb > self.blocks:
            return False
        return ur == self.most or (ur < self.most and nb * ur >= self.registers // 2)

    def run(self, tiles: int, most: int, rounds: int, units: int) -> int:
        """The number of tiles of a run: at most ``most``, and more than half of it, so that the units get about equal
        work.

        The choice uses the sizes at hand: any length gives correct results.
        """
        tiles, rounds, batch = hint(tiles), hint(rounds), hint(self.batch)

        def last(run: int) -> int:  # tiles of the unit that has the most work
            return -(-(-(-tiles // run) * rounds * batch) // units) * run

        most = lesser(most, tiles)
        return min(range(most, most // 2, -1), key=last)

    def tile(self, known: Mapping[tuple[int, int], float]) -> tuple[int, int]:
        """The tile that wastes the least work."""
        fitting = {tile: cost for tile, cost in known.items() if self.fits(*tile)}
        few = {(nb, self.most): 2 - nb / 8 for nb in BLOCKS if self.fits(nb, self.most)}
        done = {t: self.slabs(t[0]) * t[0] * -(-self.pixels // t[1]) * t[1] * c for t, c in (few | fitting).items()}
        return min(done, key=lambda tile: done[tile])

    def share(self, nb: int, ur: int, units: int) -> dict[str, int]:
        """The config of a work-item: an input that stays in the cache for several slabs, or all pixels for one slab."""
        tiles, slabs, weights = -(-self.pixels // ur), self.slabs(nb), self.weights * nb
        if weights * slabs > 2 * self.input * self.groups:  # each unit then reads its part of the weights once
            runs, stays = [r for r in RUNS if r // 4 < tiles], [1, 4]
        else:
            runs = [r for r in RUNS if r == 1 or (r // 4 < tiles and r * ur * self.pixel <= PANEL)]
            stays = [s for s in SLABS if s == 1 or s * weights <= HELD]
        stays = [s for s in stays if s // 4 < slabs]

        def items() -> int:
            return self.batch * -(-tiles // runs[-1]) * -(-slabs // stays[-1])

        while items() < ITEMS * units and (len(runs) > 1 or len(stays) > 1):
            (stays if len(stays) > 1 else runs).pop()
        return {"run": runs[-1], "slabs": stays[-1], "ahead": int(weights * slabs >= COLD and runs[-1] >= tiles)}


def padded_copy(x: TensorType, window: Window, wide: Window, given: Scratch, specialise: bool) -> EmittedLaunch:
    """The launch that copies a plain input with its padding, so that no window leaves it."""
    source = Source("conv_blocked_pad", specialise)
    source.buffer("x", DType.FLOAT32, In(0))
    source.buffer("padded", DType.FLOAT32, given)
    (pd, ph, pw), (xd, xh, xw), (d, h, w) = window.head, window.input, wide.input
    source.dims(PD=pd, PH=ph, PW=pw, XD=xd, XH=xh, XW=xw, ID=d, IH=h, IW=w, C=x.dims[1])
    source.function(_INSIDE)
    source.add(_PAD)
    return source.call([h, d * x.dims[1], x.dims[0]])


def widened(window: Window) -> Window:
    """The same window over an input that includes its padding."""
    sides = zip(window.input, window.head, window.tail, strict=True)
    d, h, w = (size + head + tail for size, head, tail in sides)
    return replace(window, head=(0, 0, 0), tail=(0, 0, 0), input=(d, h, w))


def _gathers(problem: Problem, window: Window) -> bool:
    """Whether the pixels that the kernel reads are copied first."""
    strided = window.taps == 1 and window.stride != (1, 1, 1) and not any((*window.head, *window.tail))
    return strided and tensor(problem.inputs[0]).layout != PLAIN and tensor(problem.inputs[1]).nbytes >= COLD


def _dense(window: Window) -> Window:
    """The same window over an input that contains only the pixels it reads."""
    return replace(window, stride=(1, 1, 1), input=window.output)


def _tiles(target: Target) -> Mapping[tuple[int, int], float]:
    return next(tiles for registers, tiles in TILES.items() if target.registers >= registers)


_SETUP = """
int n = GID(2);
int t_end = (GID(0) + 1) * RUN, s_end = (GID(1) + 1) * STAY;
t_end = t_end < TILES ? t_end : TILES;
s_end = s_end < ALL ? s_end : ALL;
for (int slab = GID(1) * STAY; slab < s_end; slab++) {
int group = slab / SLABS, soon UNUSED = AHEAD > 0 && slab + 1 < ALL ? slab + 1 : slab;
GLOBAL const f32* xn = x + (n * XBLOCKS + (L == 1 ? group * IC : group * (IC / W))) * (ID * IH * IW * L);
int first_block = n * YBLOCKS + group * OBLOCKS + (slab % SLABS) * NB;
int blocks = OBLOCKS - (slab % SLABS) * NB;
for (int t = GID(0) * RUN; t < t_end; t++) {
int p = t * UR;
int count = PIXELS - p < UR ? PIXELS - p : UR;
GLOBAL const f32* wp = w + slab * (IC * KD * KH * KW * NB * W);
V acc[NB][UR];
UNROLL for (int b = 0; b < NB; b++) {
"""

_INSIDE = "#define INSIDE(at, size) ((u32)(at) < (u32)(size))"

_HEAD = f"vector_of(f32, W, V);\ntypedef V VU __attribute__((aligned(4)));\n{_INSIDE}\n"

# Defines the step between channels of the input, and the prefetch of the next weights.
_STEPS = """#define STRIDE (ID * IH * IW * L)
#if PADDED
#define STEP(u) step[u]
#else
#define STEP(u) STRIDE
#endif
#define FETCH(p) __builtin_prefetch((const void*)(size_t)(p), 0, 2)
"""

# Pixels beyond the image repeat the last one and are not stored.
_POINTWISE = """
GLOBAL const f32* next = w + soon * (IC * NB * W) + (t - GID(0) * RUN) * (IC / L * AHEAD);
GLOBAL const f32* xp[UR];
UNROLL for (int u = 0; u < UR; u++) xp[u] = xn + (u < count ? p + u : PIXELS - 1) * L;
"""

_CHANNELS = """
int k = 0;
for (; k + L <= IC; k += L) {
  FETCH(next);
  next += AHEAD;
  _Pragma("unroll 4") for (int i = 0; i < L; i++) MULTIPLY(i, xp[u][i])
  wp += L * NB * W;
  UNROLL for (int u = 0; u < UR; u++) xp[u] += STEP(u);
}
_Pragma("unroll 1") for (int i = 0; i < IC - k; i++) MULTIPLY(i, xp[u][i])
"""

_CORNERS = """
int z0[UR], y0[UR], x0[UR];
{
  int ox = p % OW, oy = p / OW % OH, oz = p / OW / OH;
  UNROLL for (int u = 0; u < UR; u++) {
    z0[u] = oz * SD - PD; y0[u] = oy * SH - PH; x0[u] = ox * SW - PW;
    if (p + u + 1 < PIXELS && ++ox == OW) { ox = 0; if (++oy == OH) { oy = 0; oz++; } }
  }
}
"""

_TAPS = """
GLOBAL const f32* next = w + soon * (IC * KD * KH * KW * NB * W)
                       + (t - GID(0) * RUN) * (KD * KH * KW * (IC / L) * AHEAD);
for (int kz = 0; kz < KD; kz++) for (int ky = 0; ky < KH; ky++)
for (int kx = 0; kx < KW; kx++, wp += (IC % L) * NB * W) {
  GLOBAL const f32* xp[UR];
#if PADDED
  int step[UR], any = 0;
#endif
  UNROLL for (int u = 0; u < UR; u++) {
    int iz = z0[u] + kz * DD, iy = y0[u] + ky * DH, ix = x0[u] + kx * DW;
    xp[u] = xn + ((iz * IH + iy) * IW + ix) * L;
#if PADDED
    int inside = INSIDE(iz, ID) & INSIDE(iy, IH) & INSIDE(ix, IW);
    xp[u] = inside ? xp[u] : zeros;
    step[u] = inside ? STRIDE : 0;
    any |= inside;
#endif
  }
#if PADDED
  if (!any) { wp += (IC - IC % L) * NB * W; next += IC / L * AHEAD; continue; }
#endif
"""

# A plain input has one channel under a tap, too little work to choose pointers for: it was copied with its padding.
_PLAIN = """
GLOBAL const f32* xp[UR];
UNROLL for (int u = 0; u < UR; u++) xp[u] = xn + (z0[u] * IH + y0[u]) * IW + x0[u];
for (int ic = 0; ic < IC; ic++) for (int kz = 0; kz < KD; kz++) for (int ky = 0; ky < KH; ky++, wp += KW * NB * W) {
  int row = ((ic * ID + kz * DD) * IH + ky * DH) * IW;
  _Pragma("unroll 4") for (int kx = 0; kx < KW; kx++) MULTIPLY(kx, xp[u][row + kx * DW])
}
"""

# Writes a row of the input between zeros, or a part of the row where padding is negative.
_PAD = """
int y = GID(0) - PH, z = GID(1) % ID - PD, plane = GID(2) * C + GID(1) / ID;
GLOBAL f32* to = padded + ((GID(2) * C * ID + GID(1)) * IH + GID(0)) * IW;
for (int i = 0; i < IW; i++) to[i] = 0;
if (INSIDE(z, XD) && INSIDE(y, XH)) {
  GLOBAL const f32* from = x + ((plane * XD + z) * XH + y) * XW;
  int begin = PW > 0 ? PW : 0, end = XW + PW < IW ? XW + PW : IW;
  for (int i = begin; i < end; i++) to[i] = from[i - PW];
}
"""

_GATHER = """
int block = GID(2) * XBLOCKS + GID(1) / OD, z = GID(1) % OD;
GLOBAL f32* to = gathered + ((block * OD + z) * OH + GID(0)) * OW * W;
GLOBAL const f32* from = x + ((block * XD + z * SD) * XH + GID(0) * SH) * XW * W;
for (int i = 0; i < OW; i++) STOREV(to + i * W, LOADV(from + i * SW * W));
"""

# Whole tiles are stored without conditions; partial tiles go through memory.
_STORE = """
if (count == UR && blocks >= NB) {
  UNROLL for (int b = 0; b < NB; b++) UNROLL for (int u = 0; u < UR; u++) {
    V a = acc[b][u];
    int at = (first_block + b) * PIXELS * W + (p + u) * W;
    STORE;
  }
} else {
  V rest[NB][UR];
  UNROLL for (int b = 0; b < NB; b++) UNROLL for (int u = 0; u < UR; u++) rest[b][u] = acc[b][u];
  for (int b = 0; b < NB && b < blocks; b++) for (int u = 0; u < count; u++) {
    V a = rest[b][u];
    int at = (first_block + b) * PIXELS * W + (p + u) * W;
    STORE;
  }
}
}
}
"""


def _outlined(problem: Problem, target: Target) -> Problem:
    """The problem with its output, and operands of the output's shape, in blocks; for questions to `why_not`."""
    block = blocked(lanes(target))
    last = range(len(problem.main_inputs), len(problem.inputs))
    out = problem.outputs[0]
    along = [i for i in last if isinstance(out, TensorType) and _shape(problem, i) == out.shape]
    return problem.in_layout(block, along)


def _shape(problem: Problem, i: int) -> object:
    type = problem.inputs[i]
    return type.shape if isinstance(type, TensorType) else None


def _why_not(problem: Problem, target: Target) -> str | None:
    x, out = tensor(problem.inputs[0]), tensor(problem.outputs[0])
    if not problem.constant[1] or (problem.input(2) is not None and not problem.constant[2]):
        return "the weights are not constant"
    if not x.is_static or not out.is_static:
        return None if x.rank is None or x.rank in (3, 4, 5) else "has no spatial axes"
    if len(x.dims) not in (3, 4, 5):
        return "takes one to three spatial axes"
    block, groups = lanes(target), int(problem.attrs.get("group", 1))
    if groups > 1 and (x.dims[1] // groups % block or out.dims[1] // groups % block):
        return f"groups of channels are not whole blocks of {block}"
    if groups == 1 and out.dims[1] < block // 2 and x.layout == PLAIN:
        return f"{out.dims[1]} output channels fill a vector of {block} badly"
    if x.layout == PLAIN:
        copied = 4 * math.prod((*x.dims[:2], *widened(Window.of(problem)).input))
        if copied > greater(MOST_COPIED, 4 * x.nbytes):
            return f"with its padding the input takes {copied:,} bytes"
    return None


def pack(w: Array, groups: int, slab: int, plain: bool) -> Array:
    """Packs O I spatial... as group, slab, spatial..., I, channels of a slab; for a plain input I is before spatial.

    Zeros fill up the last slab.
    """
    out, depth = w.shape[0] // groups, w.shape[1]
    slabs, taps = -(-out // slab), math.prod(w.shape[2:])
    whole = w.reshape(groups, out, depth, taps)
    if out % slab:
        whole = np.pad(whole, ((0, 0), (0, slabs * slab - out), (0, 0), (0, 0)))
    whole = whole.reshape(groups, slabs, slab, depth, taps)
    return on_lines(whole.transpose((0, 1, 3, 4, 2) if plain else (0, 1, 4, 3, 2)))


def pack_bias(b: Array, groups: int, width: int) -> Array:
    """Fills up the bias of each group to whole slabs."""
    per = b.size // groups
    padded = np.zeros((groups, -(-per // width) * width), np.float32)
    padded[:, :per] = b.reshape(groups, per)
    return padded


SOLVERS = both(ConvBlocked)
