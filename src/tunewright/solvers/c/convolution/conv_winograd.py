"""Winograd convolution of 3 x 3 windows in the blocked layout: fewer multiplications for more additions.

A tile of m x m results is computed from the (m + 2) x (m + 2) inputs below it. They are transformed, and multiplied at
each *position* of the tile with transformed weights, which is a matrix product over the channels. The sums are
transformed back. Tiles are numbered through all images, and taken in groups of UR: the products of a group and NB
blocks of output channels stay in registers, as in the direct kernel.

In the fused form a work-item does all of that for a band of groups at a time. It uses separate scratch memory that
stays in its core's cache. In the split form a first kernel transforms the whole input, and the work-items of a second
one share bands and slabs of NB blocks. The split form is for small images with many channels, whose weights should be
read once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tunewright.devices.base import Target, empty_on_lines
from tunewright.ir.symbolic import greater, lesser
from tunewright.ir.types import DType, blocked
from tunewright.search.space import Scalar, Space
from tunewright.solvers.base import Array, Config, Packing, Problem, tensor

from ..source import epilogue
from ..source.base import CSolver
from ..source.emit import EmittedLaunch, In, Out, Scratch, Source
from ..source.window import Window
from .conv_blocked import lanes, pack_bias
from .conv_winograd_form import lines, of_input, of_output, weight_matrix

#: the most bytes of scratch memory of a kernel
MOST_SCRATCH = 256 << 20
#: the largest grid for which PoCL does not compile another variant of a kernel
MOST_GROUPS = 65_535
#: Unused floats between positions: without them, positions of even sizes would fall on the same lines of a cache.
STAGGER = 16
FUSED, SPLIT = "fused", "split"
#: NB and UR by the least number of registers, with the time of a multiply-add relative to the best tile
REGISTERS = {
    32: {(4, 6): 1.0, (4, 5): 1.03, (3, 8): 1.05, (2, 10): 1.1, (1, 14): 1.3},
    0: {(2, 6): 1.0, (2, 5): 1.03, (3, 4): 1.05, (2, 4): 1.1, (1, 8): 1.2},
}
#: Loading a weight from memory takes as long as its products with this number of tiles.
COLD = 8
#: bytes of transformed inputs that stay in the cache of a core beside weights and sums
HELD = 768 << 10
#: For the untuned kernel: the least expected speed-up over direct summation, and the multiply-adds of direct summation
#: below which nothing can be gained.
SURELY, LEAST_WORK = 1.3, 1 << 22
#: The least speed-up of F(4,3) over F(2,3) that the model must expect.
AHEAD = 1.3
#: Times of a simple model, in units of a vector's multiply-add: the transform of one vector of one of a tile's inputs;
#: a product of this kernel; and, in the direct kernel, the overhead of a tap in input channels.
MOVE, PRODUCT, TAP = 130 / 16, 1.1, 4


@dataclass(frozen=True)
class WinogradSizes:
    """The sizes that follow from a problem and a config."""

    tile: int
    nb: int
    ur: int
    #: tiles of an image along its axes, and of all images
    down: int
    across: int
    tiles: int
    #: groups of UR tiles
    groups: int
    #: groups that are computed at a time
    band: int
    #: work-items
    items: int
    #: blocks of input channels, and slabs of NB blocks of output channels
    blocks: int
    slabs: int
    #: floats of one position: of transformed inputs, and of sums
    inputs: int
    sums: int

    @staticmethod
    def of(problem: Problem, config: Config, target: Target) -> WinogradSizes:
        x, out, block = tensor(problem.inputs[0]).dims, tensor(problem.outputs[0]).dims, lanes(target)
        tile, nb, ur = int(config["tile"]), int(config["nb"]), int(config["ur"])
        down, across = -(-out[2] // tile), -(-out[3] // tile)
        tiles = out[0] * down * across
        groups, blocks, slabs = -(-tiles // ur), -(-x[1] // block), -(-out[1] // (nb * block))
        fused = config["form"] == FUSED
        band = lesser(int(config["band"]), groups)
        tasks = groups if fused else -(-groups // band) * slabs
        # On a processor a work-item of the fused form has the nearest caches to itself. If a unit ran several, it would
        # find the memory of each cold, or in the cache of another unit.
        each = 1 if fused and target.traits.private_caches else int(config["items"])
        items = lesser(each * greater(target.units, 1), tasks)
        band = lesser(band, -(-groups // items)) if fused else band
        inputs = (band if fused else groups) * blocks * ur * block + STAGGER
        return WinogradSizes(
            tile, nb, ur, down, across, tiles, groups, band, items, blocks, slabs, inputs,
            band * nb * ur * block + STAGGER,
        )  # fmt: skip

    @property
    def side(self) -> int:
        """The side of the square of inputs of a tile."""
        return self.tile + 2


def scratch_bytes(problem: Problem, config: Config, target: Target) -> tuple[int, int]:
    """Bytes of transformed inputs and of sums."""
    sizes = WinogradSizes.of(problem, config, target)
    positions = sizes.side**2
    copies = sizes.items if config["form"] == FUSED else 1
    return 4 * positions * sizes.inputs * copies, 4 * positions * sizes.sums * sizes.items


def _fits(problem: Problem, config: Config, target: Target) -> bool:
    """Whether scratch memory is in bounds, and so is the grid of the first kernel of the split form."""
    groups = WinogradSizes.of(problem, config, target).groups if config["form"] == SPLIT else 0
    return groups <= MOST_GROUPS and sum(scratch_bytes(problem, config, target)) <= MOST_SCRATCH


def _widest(problem: Problem, target: Target) -> int:
    """The largest NB that is worth trying: two, or the number of blocks."""
    return greater(2, -(-tensor(problem.outputs[0]).dims[1] // lanes(target)))


class ConvWinograd(CSolver):
    """Takes 3 x 3 windows of stride 1 and constant f32 weights; input and output are in blocks."""

    family = "conv_winograd"
    version = "1.1"
    ops = frozenset({"Conv"})
    dtypes = frozenset({DType.FLOAT32})
    stores = epilogue.NARROW
    layouts = frozenset({"plain", "blocked"})
    rank = 47

    def __init__(self) -> None:
        super().__init__()  # Shapes as literals make it one per cent faster, which is not worth the compilations.
        self.tuned_only = True  # only a measurement shows where it pays

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, w, out = tensor(problem.inputs[0]), tensor(problem.inputs[1]), tensor(problem.outputs[0])
        if w.is_static and w.dims[2:] != (3, 3):
            return "the window is not 3 x 3"
        if any(s != 1 for name in ("strides", "dilations") for s in problem.attrs.get(name, ())):
            return "the window has strides or dilations"
        if int(problem.attrs.get("group", 1)) != 1:
            return "the channels are in groups"
        block = blocked(lanes(target))
        if x.layout != block or out.layout != block:
            return f"the input or the output is not in blocks of {block.block} channels"
        if not problem.constant[1] or (problem.input(2) is not None and not problem.constant[2]):
            return "the weights are not constant"
        if out.is_static and not out.size:
            return "the result is empty"
        return epilogue.why_not(problem)

    def inexact(self, problem: Problem, config: Config) -> str | None:
        if int(config["tile"]) == 2:
            return None
        return "Winograd F(4,3): small results beside large ones are up to three times less exact than direct sums"

    def space(self, problem: Problem, target: Target) -> Space:
        most = target.registers

        def allow(config: Mapping[str, Scalar]) -> bool:
            nb, ur = int(str(config["nb"])), int(str(config["ur"]))
            # Registers for accumulators, the weights of an input channel and a broadcast; a dozen sums hide latencies.
            if nb * ur < lesser(most // 2, 12) or nb * ur + nb + 1 > most:
                return False
            return not problem.is_static or (nb <= _widest(problem, target) and _fits(problem, config, target))

        return Space(
            {
                "tile": [2, 4], "form": [FUSED, SPLIT], "nb": [1, 2, 3, 4, 6], "ur": [2, 3, 4, 5, 6, 7, 8, 10, 12, 14],
                "band": [2, 8, 32], "items": [1, 4],
            },
            allow,
            version="1",
        )  # fmt: skip

    def default(self, problem: Problem, target: Target) -> Config:
        choices = next(tiles for registers, tiles in REGISTERS.items() if target.registers >= registers)
        if not problem.is_static:
            (nb, ur), *_ = choices
            return {"tile": 4, "form": FUSED, "nb": nb, "ur": ur, "band": 8, "items": 4}
        out, block = tensor(problem.outputs[0]).dims, lanes(target)

        def tiles(tile: int) -> int:
            return out[0] * -(-out[2] // tile) * -(-out[3] // tile)

        def work(choice: tuple[int, int]) -> float:  # the number of multiplications, wasted ones included
            nb, ur = choice
            return -(-out[1] // (nb * block)) * nb * -(-tiles(tile) // ur) * ur * choices[choice]

        tile = min((4, 2), key=lambda tile: (tile + 2) ** 2 * greater(tiles(tile), COLD))
        nb, ur = min((choice for choice in choices if choice[0] <= _widest(problem, target)), key=work)
        fused = tiles(tile) >= out[1]  # more inputs than weights
        group = 4 * (tile + 2) ** 2 * ur * tensor(problem.inputs[0]).dims[1]
        band = 2 if fused and 8 * group > HELD else 8
        config = {"tile": tile, "form": FUSED if fused else SPLIT, "nb": nb, "ur": ur, "band": band, "items": 4}
        return config if _fits(problem, config, target) else config | {"form": FUSED, "band": 2, "items": 1}

    def packings(self, problem: Problem, config: Config, target: Target) -> Mapping[int, Packing]:
        tile, nb, block = int(config["tile"]), int(config["nb"]), lanes(target)
        found = {1: Packing(f"winograd{tile}n{nb}x{block}", lambda w: pack(w, tile, nb, block))}
        if problem.input(2) is not None:
            found[2] = Packing(f"bias{nb * block}g1", lambda b: pack_bias(b, 1, nb * block))
        return found

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        sizes = WinogradSizes.of(problem, config, target)
        out = tensor(problem.outputs[0])
        inputs, sums = scratch_bytes(problem, config, target)
        v, fused = Scratch("v", inputs), config["form"] == FUSED
        source = self._source("winograd", problem, sizes, target)
        if fused:
            source.buffer("x", DType.FLOAT32, In(0))
        source.buffer("w", DType.FLOAT32, In(1))
        if problem.input(2) is not None:
            source.buffer("bias", DType.FLOAT32, In(2))
        steps = epilogue.Epilogue(source, problem)
        source.buffer("v", DType.FLOAT32, v)
        source.buffer("m", DType.FLOAT32, Scratch("m", sums))
        source.buffer("y", out.dtype, Out())
        source.fixed(NB=sizes.nb, FETCH=int(target.traits.prefetches))
        source.dims(
            OH=out.dims[2], OW=out.dims[3], GROUPS=sizes.groups, BAND=sizes.band, ITEMS=sizes.items, OC=out.dims[1],
            IC=tensor(problem.inputs[0]).dims[1], YBLOCKS=out.physical[1], SLABS=sizes.slabs, MSTEP=sizes.sums,
        )  # fmt: skip
        source.function(_MULTIPLY)
        results = _PRODUCT + _results(problem, sizes.tile, steps, lanes(target))
        source.add(_filled(_FUSED if fused else _SPLIT, INPUT=_transform(sizes.tile), RESULTS=results))
        last = source.call([sizes.items])
        if fused:
            return [last]
        source = self._source("winograd_input", problem, sizes, target)
        source.buffer("x", DType.FLOAT32, In(0))
        source.buffer("v", DType.FLOAT32, v)
        # The blocks of channels of a work-item: the positions of a group are computed once for all of them.
        chunk = greater(1, lesser(sizes.blocks, sizes.blocks * sizes.groups // (16 * greater(target.units, 1))))
        source.dims(CHUNK=chunk)
        source.add(_filled(_INPUT, INPUT=_transform(sizes.tile)))
        return [source.call([-(-sizes.blocks // chunk), sizes.groups]), last]

    def _source(self, name: str, problem: Problem, sizes: WinogradSizes, target: Target) -> Source:
        """A new kernel with the declarations that the transform of the input needs."""
        window = Window.of(problem)
        source = Source(name)
        source.fixed(W=lanes(target), UR=sizes.ur, TILE=sizes.tile, SIDE=sizes.side)
        source.dims(
            PH=window.head[1], PW=window.head[2], IH=window.input[1], IW=window.input[2], DOWN=sizes.down,
            ACROSS=sizes.across, TILES=sizes.tiles, XBLOCKS=sizes.blocks, VSTEP=sizes.inputs,
        )  # fmt: skip
        source.function(_HELPERS)
        return source


class ConvWinogradTwo(ConvWinograd):
    """F(2,3), which is as exact as direct summation; the default where it is expected to be faster.

    It has one config, in the fused form, because each further config is another text to compile. `ConvWinograd` can be
    tuned.
    """

    family = "conv_winograd_two"
    rank = 44  # before the direct kernel
    tile = 2

    def __init__(self) -> None:
        super().__init__()
        self.tuned_only = False

    def refuse(self, problem: Problem, target: Target) -> str | None:
        why = super().refuse(problem, target)
        if why is not None:
            return why
        if not problem.is_static:
            return "whether it is faster than direct summation depends on shapes, which are not known"
        if not target.traits.private_caches:
            return "whether it is faster than direct summation is known of processors alone"
        problem = problem.at_hand  # The following reasons concern its speed, not its abilities.
        if 9 * tensor(problem.inputs[0]).dims[1] * tensor(problem.outputs[0]).size < LEAST_WORK:
            return "too little to multiply for a kernel of its own"
        gain = speedup(problem, self.default(problem, target), target)
        if gain < SURELY:
            return f"not surely faster than direct summation (expected: {gain:.2f} times)"
        return self.why_not_tile(problem, target, gain)

    def why_not_tile(self, problem: Problem, target: Target, gain: float) -> str | None:
        """Why another size of tiles is better, or None."""
        return None

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({name: [value] for name, value in self.default(problem, target).items()}, version="1")

    def default(self, problem: Problem, target: Target) -> Config:
        known = next(tiles for registers, tiles in REGISTERS.items() if target.registers >= registers)
        usual = {nb: (nb, ur) for nb, ur in reversed(known)}  # one for each NB
        blocks = -(-tensor(problem.outputs[0]).dims[1] // lanes(target)) if problem.is_static else max(usual)
        fitting = [tile for tile in usual.values() if tile[0] <= blocks]
        nb, ur = min(fitting, key=lambda tile: -(-blocks // tile[0]) * tile[0] * known[tile])
        config = {"tile": self.tile, "form": FUSED, "nb": nb, "ur": ur, "band": 8, "items": 4}
        return config if not problem.is_static or _fits(problem, config, target) else config | {"band": 2, "items": 1}


class ConvWinogradFour(ConvWinogradTwo):
    """F(4,3) in the same form; the default where it is expected to be faster than F(2,3) and is permitted.

    EXECUTION_MODE_HINT = ACCURACY excludes it (see `inexact`); then F(2,3) is the default.
    """

    family = "conv_winograd_four"
    rank = 43  # before F(2,3)
    tile = 4

    def why_not_tile(self, problem: Problem, target: Target, gain: float) -> str | None:
        two = speedup(problem, _TWO.default(problem, target), target)
        return None if gain >= AHEAD * two else f"not surely faster than F(2,3) (expected: {gain / two:.2f} times)"


_TWO = ConvWinogradTwo()


def speedup(problem: Problem, config: Config, target: Target) -> float:
    """The expected speed-up of a fused form over direct summation; a low estimate."""
    sizes, out = WinogradSizes.of(problem, config, target), tensor(problem.outputs[0]).dims
    depth, pixels = tensor(problem.inputs[0]).dims[1], out[0] * out[2] * out[3]
    blocks = -(-out[1] // lanes(target))
    products = sizes.side**2 * depth * sizes.slabs * sizes.nb * sizes.groups * sizes.ur
    moves, units = sizes.tiles * (sizes.blocks + blocks), greater(target.units, 1)
    waiting = -(-sizes.groups // units) * units / sizes.groups  # waiting for the unit that has the most work
    return 9 * (depth + TAP) * blocks * pixels / ((PRODUCT * products + MOVE * sizes.side**2 * moves) * waiting)


def _filled(text: str, **parts: str) -> str:
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part)
    return text


def _transform(tile: int) -> str:
    """Statements of the transform of a group's inputs: along rows, where borders are, then along columns."""

    def row(load: str) -> str:
        return lines(of_input, tile, lambda k: load.format(k=k), lambda k, value: f"t[i][{k}] = {value};")

    return _filled(
        _TRANSFORM,
        INSIDE=row("LOADV(xr + {k} * W)"),
        BORDER=row("INSIDE(x0[u] + {k}, IW) ? LOADV(xr + {k} * W) : (V)0"),
        COLUMN=lines(
            of_input, tile, lambda k: f"t[{k}][j]", lambda k, value: f"STOREV(vp + ({k} * SIDE + j) * VSTEP, {value});"
        ),
    )


def _results(problem: Problem, tile: int, steps: epilogue.Epilogue, block: int) -> str:
    """Statements that transform sums to results, along columns, then along rows."""
    ragged = tensor(problem.outputs[0]).dims[1] % block != 0
    text, result = steps.apply("f", "(c + l < OC ? c + l : OC - 1)" if ragged else "c + l", "at + l")
    store = "STOREV(y + at, r[k]);"
    if problem.epilogue:
        store = "f32 a[W]; *(VU*)a = r[k];"
        end = steps.source.store("y", "at + l", result)
        store += f"\nfor (int l = 0; l < W; l++) {{ f32 f = a[l];\n{text}\n{end} }}"
    return _filled(
        _RESULTS,
        BIAS="LOADV(bias + c)" if problem.input(2) is not None else "0",
        COLUMN=lines(
            of_output, tile, lambda k: f"LOADV(mp + ({k} * SIDE + j) * MSTEP)", lambda k, value: f"q[{k}][j] = {value};"
        ),
        ROW=lines(of_output, tile, lambda k: f"q[i][{k}]", lambda k, value: f"r[{k}] = {value} + start;"),
        STORE=store,
    )


_HELPERS = """
vector_of(f32, W, V);
typedef V VU __attribute__((aligned(4)));
#define INSIDE(at, size) ((u32)(at) < (u32)(size))
"""

# Multiplies input channel i of a block: its weights with UR tiles. Unrolled by four, as in the direct kernel.
_MULTIPLY = """
#if defined(__has_builtin)
#if FETCH && __has_builtin(__builtin_prefetch)
#define PREFETCH(p) __builtin_prefetch((const void*)(size_t)(p), 0, 2)
#endif
#endif
#ifndef PREFETCH
#define PREFETCH(p)
#endif
#define MULTIPLY(i) { \\
  V wv[NB]; \\
  UNROLL for (int b = 0; b < NB; b++) wv[b] = LOADV(wp + ((i) * NB + b) * W); \\
  UNROLL for (int b = 0; b < NB * W; b += 16) PREFETCH(wp + (IC + (i)) * NB * W + b); \\
  UNROLL for (int u = 0; u < UR; u++) { \\
    V xv = vp[u * W + (i)]; \\
    UNROLL for (int b = 0; b < NB; b++) acc[b][u] += wv[b] * xv; \\
  } \\
}
"""

# Transforms group g, blocks [c0, c1) of channels; vg is where the group's first position begins. Tiles beyond the last
# one repeat it.
_TRANSFORM = """
int y0[UR], x0[UR], from[UR];
for (int u = 0; u < UR; u++) {
  int t = g * UR + u;
  t = t < TILES ? t : TILES - 1;
  int row = t / ACROSS, n = row / DOWN;
  y0[u] = (row - n * DOWN) * TILE - PH;
  x0[u] = (t - row * ACROSS) * TILE - PW;
  from[u] = (n * XBLOCKS * IH * IW + y0[u] * IW + x0[u]) * W;
}
for (int c = c0; c < c1; c++) for (int u = 0; u < UR; u++) {
  V t[SIDE][SIDE];
  GLOBAL const f32* xr = x + from[u] + c * (IH * IW * W);
  int inside = x0[u] >= 0 & x0[u] + SIDE <= IW;
  for (int i = 0; i < SIDE; i++, xr += IW * W) {
    if (!INSIDE(y0[u] + i, IH)) {
      for (int j = 0; j < SIDE; j++) t[i][j] = 0;
    } else if (inside) {
      @INSIDE@
    } else {
      @BORDER@
    }
  }
  GLOBAL f32* vp = vg + (c * UR + u) * W;
  for (int j = 0; j < SIDE; j++) {
    @COLUMN@
  }
}
"""

_INPUT = """
int g = GID(1), c0 = GID(0) * CHUNK, c1 = c0 + CHUNK < XBLOCKS ? c0 + CHUNK : XBLOCKS;
GLOBAL f32* vg = v + g * (XBLOCKS * UR * W);
@INPUT@
"""

_FUSED = """
GLOBAL f32 *vi = v + GID(0) * (SIDE * SIDE * VSTEP), *mi = m + GID(0) * (SIDE * SIDE * MSTEP);
int last = GROUPS * (GID(0) + 1) / ITEMS;
for (int first = GROUPS * GID(0) / ITEMS; first < last; first += BAND) {
  int count = last - first < BAND ? last - first : BAND;
  for (int g = first; g < first + count; g++) {
    int c0 = 0, c1 = XBLOCKS;
    GLOBAL f32* vg = vi + (g - first) * (XBLOCKS * UR * W);
    @INPUT@
  }
  GLOBAL const f32* vb = vi;
  for (int slab = 0; slab < SLABS; slab++) {
    @RESULTS@
  }
}
"""

_SPLIT = """
GLOBAL f32* mi = m + GID(0) * (SIDE * SIDE * MSTEP);
int bands = (GROUPS + BAND - 1) / BAND, tasks = bands * SLABS;
int last = tasks * (GID(0) + 1) / ITEMS;
for (int task = tasks * GID(0) / ITEMS; task < last; task++) {
  int slab = task / bands, first = (task - slab * bands) * BAND;
  int count = GROUPS - first < BAND ? GROUPS - first : BAND;
  GLOBAL const f32* vb = v + first * (XBLOCKS * UR * W);
  @RESULTS@
}
"""

# Writes the sums of a slab and `count` groups into mi; vb holds the transformed inputs. While a position's weights are
# used for all groups, the following weights, of the next position, are fetched from memory.
_PRODUCT = """
GLOBAL const f32* ws = w + slab * (SIDE * SIDE * IC * NB * W);
for (int at = 0; at < SIDE * SIDE; at++) for (int g = 0; g < count; g++) {
  GLOBAL const f32 *wp = ws + at * (IC * NB * W), *vp = vb + at * VSTEP + g * (XBLOCKS * UR * W);
  V acc[NB][UR];
  UNROLL for (int b = 0; b < NB; b++) UNROLL for (int u = 0; u < UR; u++) acc[b][u] = 0;
  int ic = 0;
  for (; ic + W <= IC; ic += W, vp += UR * W, wp += W * NB * W) {
    _Pragma("unroll 4") for (int i = 0; i < W; i++) MULTIPLY(i)
  }
  _Pragma("unroll 1") for (int i = 0; i < IC - ic; i++) MULTIPLY(i)
  GLOBAL f32* mp = mi + at * MSTEP + g * (NB * UR * W);
  UNROLL for (int b = 0; b < NB; b++) UNROLL for (int u = 0; u < UR; u++) STOREV(mp + (b * UR + u) * W, acc[b][u]);
}
"""

_RESULTS = """
for (int g = 0; g < count; g++) for (int u = 0; u < UR; u++) {
  int tile = (first + g) * UR + u;
  if (tile >= TILES) break;
  int row = tile / ACROSS, n = row / DOWN;
  int oy = (row - n * DOWN) * TILE, ox = (tile - row * ACROSS) * TILE;
  for (int b = 0; b < NB && slab * NB + b < YBLOCKS; b++) {
    int c UNUSED = (slab * NB + b) * W, to = ((n * YBLOCKS + slab * NB + b) * OH + oy) * OW + ox;
    V q[TILE][SIDE], start = @BIAS@;
    GLOBAL const f32* mp = mi + ((g * NB + b) * UR + u) * W;
    for (int j = 0; j < SIDE; j++) {
      @COLUMN@
    }
    for (int i = 0; i < TILE && oy + i < OH; i++) {
      V r[TILE];
      @ROW@
      for (int k = 0; k < TILE && ox + k < OW; k++) {
        int at = (to + i * OW + k) * W;
        @STORE@
      }
    }
  }
}
"""


def pack(w: Array, tile: int, nb: int, block: int) -> Array:
    """Packs O I 3 3 as slab of NB blocks, position, I, NB, block; zeros fill up the last slab."""
    out, depth = w.shape[:2]
    width, positions = nb * block, (tile + 2) ** 2
    slabs = -(-out // width)
    g = weight_matrix(tile)
    both = np.kron(g, g).T
    packed = empty_on_lines((slabs, positions, depth, width), np.dtype(np.float32))
    for slab in range(slabs):  # one slab at a time: f64 takes memory
        part = w[slab * width : (slab + 1) * width].reshape(-1, depth, 9).astype(np.float64) @ both
        packed[slab, :, :, : part.shape[0]] = part.transpose(2, 1, 0)
        packed[slab, :, :, part.shape[0] :] = 0
    return packed


SOLVERS = (ConvWinograd(), ConvWinogradTwo(), ConvWinogradFour())
