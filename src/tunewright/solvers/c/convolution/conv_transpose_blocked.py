"""Transposed convolutions in the blocked layout: every output is written once, by the phase to which it belongs.

Output o along an axis has phase ``o % stride`` and result number ``o // stride``. The results of one phase are a
convolution of the input with the taps of that phase. Where the kernel is as large as its stride, each phase has one
tap. The operation is then a product of pixels and weights whose results are scattered. A tile is NB vectors times UR
neighbouring results.

For a result in blocks, a vector holds a block of channels of one phase. A result of few channels is plain. Then a
vector holds channels and phases side by side, with zeros for a phase that a tap does not reach. The tile is separated
into rows of the image.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater, lesser
from tunewright.ir.types import PLAIN, DType, Layout, TensorType, blocked
from tunewright.search.space import Scalar, Space
from tunewright.solvers.base import Array, Config, Packing, Problem, tensor

from ..source import epilogue
from ..source.base import CSolver, both
from ..source.emit import ConstantTable, EmittedLaunch, In, Out, Source
from ..source.window import Triple, Window, groups
from ..source.window import why_not as why_not_window
from .conv_plan import MULTIPLY

#: the choices of tuning: vectors and results of a tile, tiles and slabs of a work-item
VECTORS, RESULTS, RUNS, SLABS = (1, 2, 3, 4, 6), (1, 2, 3, 4, 5, 6, 7, 8, 10, 12), (1, 4, 16, 64), (1, 4, 16)
#: The least number of work-items per unit: they should finish together even if one of them is disturbed.
ITEMS = 4
#: The most phases: each has an entry in a table, and separate slabs.
MOST_PHASES = 256
#: the bytes of weights and of input that a work-item reads repeatedly
HELD, PANEL = 256 << 10, 32 << 10


class ConvTransposeBlocked(CSolver):
    """Takes constant f32 weights and one group; the output is in blocks, or plain when it has few channels."""

    family = "conv_transpose_blocked"
    ops = frozenset({"ConvTranspose"})
    dtypes = frozenset({DType.FLOAT32})
    stores = epilogue.NARROW
    layouts = frozenset({"plain", "blocked"})
    rank = 45

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, out, layout = tensor(problem.inputs[0]), tensor(problem.outputs[0]), _layout(target)
        if x.layout != layout:
            return f"works in the layout {layout}, not in {x.layout}"
        if out.layout not in (PLAIN, layout):
            return f"does not make the layout {out.layout}"
        if not problem.constant[1] or (problem.input(2) is not None and not problem.constant[2]):
            return "the weights are not constant"
        if int(problem.attrs.get("group", 1)) != 1:
            return "has groups"
        reason = why_not_window(problem) or epilogue.why_not(problem)
        if reason is not None or not problem.is_static:
            return reason
        phases = math.prod(Window.of(problem).stride)
        if phases > MOST_PHASES:
            return f"{phases} phases of results"
        if out.layout != PLAIN:
            return None
        if not _few(out, target):
            return f"a plain result of {out.dims[1]} channels: only few of them share vectors"
        vectors = TransposedConvPlan.of(problem, target).vectors
        return None if vectors in VECTORS else f"channels and phases fill {vectors} vectors: too many for a tile"

    def preferred(self, problem: Problem, target: Target) -> tuple[Layout, Layout] | None:
        if self.specialise or problem.op not in self.ops or not problem.is_static:
            return None
        x, out, layout = tensor(problem.inputs[0]), tensor(problem.outputs[0]), _layout(target)
        if x.rank is None or x.rank < 3 or x.dims[1] < layout.block // 2 + 1:
            return None
        made = PLAIN if _few(out, target) else layout
        first = range(len(problem.main_inputs), len(problem.inputs))
        along = [i for i in first if _shape(problem.inputs[i]) == out.shape and made == layout]
        asked = replace(problem.in_layout(layout, [0, *along]), outputs=(replace(out, layout=made),))
        return (layout, made) if self.why_not(asked, target) is None else None

    def space(self, problem: Problem, target: Target) -> Space:
        plan = TransposedConvPlan.of(problem, target)

        def allow(c: Mapping[str, Scalar]) -> bool:
            nb, ur, run, slabs = (int(str(c[name])) for name in ("nb", "ur", "run", "slabs"))
            # A run, or a number of slabs, that exceeds the existing ones acts like the next smaller number.
            enough = run // 4 < plan.tiles(ur) and slabs // 4 < plan.slabs(nb) * len(plan.parts)
            return enough and plan.fits(nb, ur, target)

        return Space({"nb": VECTORS, "ur": RESULTS, "run": RUNS, "slabs": SLABS}, allow, version="1")

    def default(self, problem: Problem, target: Target) -> Config:
        if not problem.is_static:
            return {"nb": 1, "ur": 8, "run": 1, "slabs": 1}
        plan = TransposedConvPlan.of(problem, target)

        def cost(tile: tuple[int, int]) -> float:
            nb, ur = tile
            # Loads relative to multiply-adds: a cycle has two of either.
            loads = greater(nb * ur, nb + ur, 8) / (nb * ur)
            return plan.slabs(nb) * nb * plan.tiles(ur) * ur * loads

        nb, ur = min((t for t in itertools.product(VECTORS, RESULTS) if plan.fits(*t, target)), key=cost)
        tiles, slabs = plan.tiles(ur), plan.slabs(nb) * len(plan.parts)
        weights, panel = plan.depth * 4 * nb * plan.width * plan.most_taps, ur * plan.depth * 4
        stays = [s for s in SLABS if s == 1 or (s // 4 < slabs and s * weights <= HELD)]
        runs = [r for r in RUNS if r == 1 or (r // 4 < tiles and r * panel <= PANEL)]
        while plan.batch * -(-tiles // runs[-1]) * -(-slabs // stays[-1]) < ITEMS * target.units:
            if len(runs) == len(stays) == 1:
                break
            (runs if len(runs) > 1 else stays).pop()
        return {"nb": nb, "ur": ur, "run": runs[-1], "slabs": stays[-1]}

    def packings(self, problem: Problem, config: Config, target: Target) -> Mapping[int, Packing]:
        plan, nb = TransposedConvPlan.of(problem, target), int(config["nb"])
        found = {1: Packing(f"transposed{nb}x{plan.width} {plan.key}", lambda w: plan.pack(w, nb))}
        if problem.input(2) is not None:
            found[2] = Packing(f"transposed bias{nb}x{plan.width} {plan.key}", lambda b: plan.pack_bias(b, nb))
        return found

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x, out = tensor(problem.inputs[0]), tensor(problem.outputs[0])
        if not out.size:
            return []
        plan = TransposedConvPlan.of(problem, target)
        window, (_, high, wide) = plan.window, plan.results
        nb, ur, run, stay = (int(config[name]) for name in ("nb", "ur", "run", "slabs"))
        source = Source("conv_transpose_blocked", self.specialise)
        source.buffer("x", DType.FLOAT32, In(0))
        source.buffer("w", DType.FLOAT32, In(1))
        bias = problem.input(2) is not None
        if bias:
            source.buffer("bias", DType.FLOAT32, In(2))
        source.buffer("zeros", DType.FLOAT32, ConstantTable(np.zeros(plan.width, np.float32)))
        source.buffer("table", DType.INT32, ConstantTable(plan.table()))
        steps = epilogue.Epilogue(source, problem)
        source.buffer("y", out.dtype, Out())
        source.fixed(W=plan.width, NB=nb, UR=ur, SD=window.stride[0], SH=window.stride[1], SW=window.stride[2])
        tiles, slabs = plan.tiles(ur), plan.slabs(nb)
        source.dims(
            ID=window.input[0], IH=window.input[1], IW=window.input[2], OD=window.output[0], OH=window.output[1],
            OW=window.output[2], RH=high, RW=wide, TILES=tiles, TILES_W=-(-wide // ur), SLABS=slabs,
            PARTS=len(plan.parts), VECTORS=plan.vectors, IC=plan.depth, XBLOCKS=x.physical[1], CHANNELS=out.dims[1],
            RUN=run, STAY=stay,
        )  # fmt: skip
        source.function(_HEAD + MULTIPLY)
        source.add(_BEGIN)
        start = "LOADV(bias + (slab * NB + b) * W)" if bias else "(V)(0.0f)"
        source.add(f"UNROLL for (int b = 0; b < NB; b++) {{ V start = {start};")
        source.add("UNROLL for (int u = 0; u < UR; u++) acc[b][u] = start; }")
        source.add(_TAPS)
        if plan.merged:
            source.fixed(COLUMNS=out.dims[1] * math.prod(window.stride))
            lines, result = steps.apply("v", "channel", "place + i")
            each = f"{{ f32 v = line[from + i];\n{lines}\n{source.store('y', 'place + i', result)} }}"
            source.add(_ROWS.replace("EACH;", each))
        else:
            channel = "(c + l < CHANNELS ? c + l : CHANNELS - 1)" if out.dims[1] % plan.width else "c + l"
            lines, result = steps.apply("v", channel, "at + l")
            store = "STOREV(y + at, a);"
            if problem.epilogue:
                store = "f32 t[W]; *(VU*)t = a; int c UNUSED = (slab * NB + b) * W;\n"
                end = source.store("y", "at + l", result)
                store += f"for (int l = 0; l < W; l++) {{ f32 v = t[l];\n{lines}\n{end} }}"
            source.add(_SCATTER.replace("STORE;", store))
        source.add("}\n}")
        return [source.call([-(-tiles // run), -(-slabs * len(plan.parts) // stay), plan.batch])]


@dataclass(frozen=True)
class TransposedConvPlan:
    """All sizes for one problem."""

    window: Window
    batch: int
    #: input channels and output channels
    depth: int
    channels: int
    #: lanes of a vector
    width: int
    #: Whether the result is plain: vectors then hold channels and phases side by side.
    merged: bool
    #: (input offsets, for each the tap of each phase or None; phases): one for each phase, or one for all
    parts: tuple[PhaseGroup, ...]

    @staticmethod
    def of(problem: Problem, target: Target) -> TransposedConvPlan:
        out, window, (_, inputs, outputs) = tensor(problem.outputs[0]), Window.of(problem), groups(problem)
        axes = [_taps(window, axis) for axis in range(3)]
        phases = list(itertools.product(*(range(s) for s in window.stride)))
        merged = out.layout == PLAIN
        if merged:
            offsets = list(itertools.product(*(sorted({n for _, n in axis}) for axis in axes)))
            parts = [PhaseGroup(tuple(phases), tuple(offsets))]
        else:
            parts = []
            for phase in phases:
                back = ([n for p, n in axis if p == mine] for axis, mine in zip(axes, phase, strict=True))
                parts.append(PhaseGroup((phase,), tuple(itertools.product(*back))))
        batch = tensor(problem.inputs[0]).dims[0]
        return TransposedConvPlan(window, batch, inputs, outputs, _layout(target).block, merged, tuple(parts))

    @property
    def key(self) -> str:
        """The properties, besides the tile, that determine the packed weights."""
        w = self.window
        return f"{'merged' if self.merged else 'apart'} k{w.kernel} s{w.stride} d{w.dilation} h{w.head}"

    @property
    def results(self) -> Triple:
        """Results of one phase along each axis."""
        d, h, w = (-(-o // s) for o, s in zip(self.window.output, self.window.stride, strict=True))
        return d, h, w

    @property
    def vectors(self) -> int:
        """The number of vectors of results in a part."""
        return -(-self.channels * len(self.parts[0].phases) // self.width)

    @property
    def most_taps(self) -> int:
        return max(len(part.offsets) for part in self.parts)

    def slabs(self, nb: int) -> int:
        """The number of slabs of NB vectors in a part."""
        return -(-self.vectors // nb)

    def tiles(self, ur: int) -> int:
        """The number of tiles of UR results of a row."""
        depth, height, width = self.results
        return depth * height * -(-width // ur)

    def fits(self, nb: int, ur: int, target: Target) -> bool:
        """Whether a tile is worth trying: it fits the registers, and is not much smaller than necessary."""
        if nb * ur + lesser(nb, ur) >= target.registers or nb > self.vectors:
            return False
        # Rows of a plain result combine all of its vectors.
        if self.merged and nb != self.vectors:
            return False
        most = next((n for n in RESULTS if n >= self.results[2]), RESULTS[-1])
        return ur <= most and (ur == most or nb > 3 or nb * ur >= target.registers // 2)

    def table(self) -> Array:
        """Three lists: where the offsets of each part begin, with their number at the end; the phase of each part; the
        offsets."""
        begins = np.cumsum([0, *(len(part.offsets) for part in self.parts)])
        phases = [x for part in self.parts for x in part.phases[0]]
        offsets = [x for part in self.parts for offset in part.offsets for x in offset]
        return np.array([*begins, *phases, *offsets], np.int32)

    def pack(self, w: Array, nb: int) -> Array:
        """Packs weights as [part][slab][offset][input channel][vector of the slab][lane]."""
        columns = self.slabs(nb) * nb * self.width
        taps = {
            (phases, back): flat
            for flat, (phases, back) in enumerate(
                (tuple(p for p, _ in point), tuple(n for _, n in point))
                for point in itertools.product(*(_taps(self.window, axis) for axis in range(3)))
            )
        }
        flat = w.reshape(self.depth, self.channels, self.window.taps)
        found = []
        for part in self.parts:
            whole = np.zeros((len(part.offsets), self.depth, columns), np.float32)
            for k, offset in enumerate(part.offsets):
                for at, phase in enumerate(part.phases):
                    tap = taps.get((phase, offset))
                    if tap is not None:
                        step = len(part.phases)
                        whole[k, :, at : self.channels * step : step] = flat[:, :, tap]
            slabs = whole.reshape(len(part.offsets), self.depth, self.slabs(nb), nb * self.width)
            found.append(slabs.transpose(2, 0, 1, 3).reshape(-1))
        return np.ascontiguousarray(np.concatenate(found))

    def pack_bias(self, b: Array, nb: int) -> Array:
        """Packs the bias: one value for each column."""
        each = np.repeat(b, len(self.parts[0].phases))
        return np.pad(each, (0, self.slabs(nb) * nb * self.width - len(each)))


@dataclass(frozen=True)
class PhaseGroup:
    """Results that are computed together: those of ``phases``, from the input at ``offsets`` before their positions."""

    phases: tuple[tuple[int, ...], ...]
    offsets: tuple[tuple[int, ...], ...]


def _taps(window: Window, axis: int) -> list[tuple[int, int]]:
    """(phase, n) of each tap along an axis: result j of that phase reads the input at j - n."""
    kernel, stride, dilation, head = (v[axis] for v in (window.kernel, window.stride, window.dilation, window.head))
    return [(at % stride, at // stride) for at in (k * dilation - head for k in range(kernel))]


def _layout(target: Target) -> Layout:
    return blocked(target.vector_bytes // 4)


def _shape(type: object) -> object:
    return type.shape if isinstance(type, TensorType) else None


def _few(out: TensorType, target: Target) -> bool:
    """Whether the channels are so few that most of a block would be empty."""
    return out.dims[1] < target.vector_bytes // 8


# Tiles lie in a row of results. Positions outside of the input are read from a block of zeros.
_HEAD = """
vector_of(f32, W, V);
typedef V VU __attribute__((aligned(4)));
#define INSIDE(at, size) ((u32)(at) < (u32)(size))
"""

_BEGIN = """
GLOBAL const i32 *phases = table + PARTS + 1, *offsets = phases + 3 * PARTS;
int n = GID(2), t_end = (GID(0) + 1) * RUN, s_end = (GID(1) + 1) * STAY, stride = ID * IH * IW * W;
t_end = t_end < TILES ? t_end : TILES;
s_end = s_end < PARTS * SLABS ? s_end : PARTS * SLABS;
GLOBAL const f32* xn = x + n * XBLOCKS * stride;
for (int s = GID(1) * STAY; s < s_end; s++) {
int part = s / SLABS, slab = s - part * SLABS, begin = table[part], end = table[part + 1];
GLOBAL const f32* weights = w + (begin * SLABS + slab * (end - begin)) * (IC * NB * W);
for (int t = GID(0) * RUN; t < t_end; t++) {
int row = t / TILES_W, x0 = (t - row * TILES_W) * UR, z0 = row / RH, y0 = row - z0 * RH;
int count = RW - x0 < UR ? RW - x0 : UR;
V acc[NB][UR];
"""

_TAPS = """
for (int k = begin; k < end; k++) {
  int iz = z0 - offsets[3 * k], iy = y0 - offsets[3 * k + 1], ix = x0 - offsets[3 * k + 2], c = 0;
  if (!INSIDE(iz, ID) || !INSIDE(iy, IH)) continue;
  GLOBAL const f32 *wp = weights + (k - begin) * (IC * NB * W), *xp = xn + ((iz * IH + iy) * IW + ix) * W;
  if (ix >= 0 && ix + UR <= IW) {
    for (; c + W <= IC; c += W, wp += W * NB * W, xp += stride) {
      _Pragma("unroll 4") for (int i = 0; i < W; i++) MULTIPLY(i, xp[u * W + i])
    }
    _Pragma("unroll 1") for (int i = 0; i < IC - c; i++) MULTIPLY(i, xp[u * W + i])
  } else {
    GLOBAL const f32* from[UR];
    int step[UR];
    UNROLL for (int u = 0; u < UR; u++) {
      int inside = INSIDE(ix + u, IW);
      from[u] = inside ? xp + u * W : zeros;
      step[u] = inside ? stride : 0;
    }
    for (; c + W <= IC; c += W, wp += W * NB * W) {
      _Pragma("unroll 1") for (int i = 0; i < W; i++) MULTIPLY(i, from[u][i])
      UNROLL for (int u = 0; u < UR; u++) from[u] += step[u];
    }
    _Pragma("unroll 1") for (int i = 0; i < IC - c; i++) MULTIPLY(i, from[u][i])
  }
}
"""

# Whole tiles are stored without conditions; partial tiles go through memory.
_SCATTER = """
int od = z0 * SD + phases[3 * part], oh = y0 * SH + phases[3 * part + 1], ow = x0 * SW + phases[3 * part + 2];
if (od < OD && oh < OH) {
  int blocks = VECTORS - slab * NB, all = (OW - ow + SW - 1) / SW;
  all = all < count ? all : count;
  int first = ((((n * VECTORS + slab * NB) * OD + od) * OH + oh) * OW + ow) * W, plane = OD * OH * OW * W;
  if (blocks >= NB && all == UR) {
    UNROLL for (int b = 0; b < NB; b++) UNROLL for (int u = 0; u < UR; u++) {
      V a = acc[b][u];
      int at = first + b * plane + u * SW * W;
      STORE;
    }
  } else {
    V rest[NB][UR];
    UNROLL for (int b = 0; b < NB; b++) UNROLL for (int u = 0; u < UR; u++) rest[b][u] = acc[b][u];
    for (int b = 0; b < NB && b < blocks; b++) for (int u = 0; u < all; u++) {
      V a = rest[b][u];
      int at = first + b * plane + u * SW * W;
      STORE;
    }
  }
}
"""

# Columns are channels times phases, with the phases of the width last: SW of them and a row of the tile are adjacent.
_ROWS = """
f32 line[NB * W * UR];
UNROLL for (int b = 0; b < NB; b++) UNROLL for (int u = 0; u < UR; u++) {
  f32 t[W];
  *(VU*)t = acc[b][u];
  UNROLL for (int l = 0; l < W; l++) {
    int column = b * W + l;
    if (column < COLUMNS) line[(column / SW * UR + u) * SW + column % SW] = t[l];
  }
}
int length = OW - x0 * SW < count * SW ? OW - x0 * SW : count * SW;
for (int r = 0; r < CHANNELS * SD * SH; r++) {
  int channel = r / (SD * SH), ph = r % SH, pd = r / SH % SD, from = r * UR * SW;
  int od = z0 * SD + pd, oh = y0 * SH + ph;
  int place = (((n * CHANNELS + channel) * OD + od) * OH + oh) * OW + x0 * SW;
  if (od >= OD || oh >= OH) continue;
  if (length == UR * SW)
    for (int i = 0; i < UR * SW; i++) EACH;
  else
    for (int i = 0; i < length; i++) EACH;
}
"""

SOLVERS = both(ConvTransposeBlocked)
