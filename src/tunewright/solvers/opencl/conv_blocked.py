"""Direct convolution in the blocked layout: output channels in vector lanes, a register tile of channels x pixels.

A work-item makes NB blocks of output channels for a run of output pixels, UR pixels at a time. Pixels are numbered
through the whole image, so a tile may go on in the next row and none is left half-empty but the last. The inner loop is
one vector of weights per block and one broadcast input per pixel: NB * UR fused multiply-adds for NB + UR loads. A tap
in the padding reads from a block of zeros, which is cheaper than a second version of the loop for borders.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ...devices.base import Target
from ...ir.types import PLAIN, DType, Layout, TensorType, blocked
from ...search.space import Space
from ..base import Array, Config, Packing, Problem
from . import epilogue
from .base import CSolver, both, tensor
from .emit import Call, In, Out, Source, Table
from .window import Window

OPS = frozenset({"Conv"})


def lanes(target: Target) -> int:
    """Channels in a block: floats in a vector register."""
    return target.vector_bytes // 4


class ConvBlocked(CSolver):
    """Constant f32 weights; the input blocked, or plain when it has few channels; the output blocked."""

    family = "conv_blocked"
    ops = OPS
    dtypes = frozenset({DType.FLOAT32})
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
        most = target.registers
        return Space(
            {"nb": [1, 2, 3, 4, 6], "ur": [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14], "run": [1, 2, 4, 8, 16, 32, 64]},
            # accumulators, and one register each for a broadcast and a weight
            lambda c: int(str(c["nb"])) * int(str(c["ur"])) + min(int(str(c["nb"])), int(str(c["ur"]))) < most,
            version="1",
        )

    def default(self, problem: Problem, target: Target) -> Config:
        nb, ur = (4, 6) if target.registers >= 32 else (2, 6)
        if not problem.is_static:
            return {"nb": nb, "ur": ur, "run": 1}
        out, block = tensor(problem.outputs[0]).dims, lanes(target)
        nb = min(nb, -(-out[1] // int(problem.attrs.get("group", 1)) // block))
        pixels = math.prod(out[2:])
        groups = -(-out[1] // (nb * block)) * out[0]
        tiles = -(-pixels // ur)
        # runs of tiles long enough to be worth a work-item, short enough that the units finish together
        run = 1
        while run < 64 and groups * -(-tiles // (2 * run)) >= 16 * target.units:
            run *= 2
        return {"nb": nb, "ur": ur, "run": run}

    def packings(self, problem: Problem, config: Config, target: Target) -> Mapping[int, Packing]:
        block, nb = lanes(target), int(config["nb"])
        groups = int(problem.attrs.get("group", 1))
        inner = block if tensor(problem.inputs[0]).layout != PLAIN else 1
        found = {1: Packing(f"conv{nb}x{block}i{inner}g{groups}", lambda w: pack(w, groups, nb, block, inner))}
        if problem.input(2) is not None:
            found[2] = Packing(f"bias{nb * block}g{groups}", lambda b: pack_bias(b, groups, nb * block))
        return found

    def calls(self, problem: Problem, config: Config, target: Target) -> list[Call]:
        x, out = tensor(problem.inputs[0]), tensor(problem.outputs[0])
        window, groups, block = Window.of(problem), int(problem.attrs.get("group", 1)), lanes(target)
        nb, ur, run = int(config["nb"]), int(config["ur"]), int(config["run"])
        inner = block if x.layout != PLAIN else 1
        per_group = out.dims[1] // groups
        slabs = -(-per_group // (nb * block))  # of NB blocks, in each group
        pixels = math.prod(window.output)
        source = Source("conv_blocked", self.specialise)
        source.buffer("x", DType.FLOAT32, In(0))
        source.buffer("w", DType.FLOAT32, In(1))
        bias = problem.input(2) is not None
        if bias:
            source.buffer("bias", DType.FLOAT32, In(2))
        source.buffer("zeros", DType.FLOAT32, Table(np.zeros(16, np.float32)))
        steps = epilogue.Epilogue(source, problem)
        source.buffer("y", DType.FLOAT32, Out())
        (kd, kh, kw), (sd, sh, sw), (dd, dh, dw) = window.kernel, window.stride, window.dilation
        padded = any(window.head) or any(window.tail)
        source.fixed(
            W=block, L=inner, NB=nb, UR=ur, KD=kd, KH=kh, KW=kw, SD=sd, SH=sh, SW=sw, DD=dd, DH=dh, DW=dw,
            PADDED=int(padded),
        )  # fmt: skip
        source.dims(
            PD=window.head[0], PH=window.head[1], PW=window.head[2], ID=window.input[0], IH=window.input[1],
            IW=window.input[2], OH=window.output[1], OW=window.output[2], PIXELS=pixels, GROUPS=groups, SLABS=slabs,
            IC=x.dims[1] // groups, XBLOCKS=x.physical[1], YBLOCKS=out.physical[1], OBLOCKS=-(-per_group // block),
            OC=out.dims[1], RUN=run,
        )  # fmt: skip
        ragged = out.dims[1] % block != 0
        channel = "(c + l < OC ? c + l : OC - 1)" if ragged else "c + l"
        lines, result = steps.apply("v", channel, "at + l")
        source.function("vector_of(f32, W, V);\ntypedef V VU __attribute__((aligned(4)));" + _MULTIPLY)
        source.add(_SETUP)
        source.add("UNROLL for (int b = 0; b < NB; b++) {")
        source.add("V start = LOADV(bias + (slab * NB + b) * W);" if bias else "V start = 0;")
        source.add("UNROLL for (int u = 0; u < UR; u++) acc[b][u] = start;\n}")
        if window.pointwise:
            source.add(_POINTWISE)
        else:
            source.add(_CORNERS)
            source.add(_PLAIN if inner == 1 else _BLOCKED)
        source.add("UNROLL for (int b = 0; b < NB; b++) if (b < blocks)")
        source.add("UNROLL for (int u = 0; u < UR; u++) if (u < count) {")
        source.add("int at = (first_block + b) * PIXELS * W + (p + u) * W;")
        if problem.epilogue:
            source.add("f32 t[W]; *(V*)t = acc[b][u];")
            source.add("int c = (group * OBLOCKS + (slab % SLABS) * NB + b) * W;")
            source.add(f"for (int l = 0; l < W; l++) {{ f32 v = t[l];\n{lines}\ny[at + l] = {result}; }}")
        else:
            source.add("STOREV(y + at, acc[b][u]);")
        source.add("}\n}")
        tiles = -(-pixels // ur)
        return [source.call([-(-tiles // run), slabs * groups, out.dims[0]])]


_SETUP = """
int slab = GID(1), n = GID(2), group = slab / SLABS;
GLOBAL const f32* xn = x + (n * XBLOCKS + (L == 1 ? group * IC : group * (IC / W))) * (ID * IH * IW * L);
int first_block = n * YBLOCKS + group * OBLOCKS + (slab % SLABS) * NB;
int blocks = OBLOCKS - (slab % SLABS) * NB;
int p_end = (GID(0) + 1) * (RUN * UR);
p_end = p_end < PIXELS ? p_end : PIXELS;
for (int p = GID(0) * (RUN * UR); p < p_end; p += UR) {
int count = PIXELS - p < UR ? PIXELS - p : UR;
V acc[NB][UR];
"""

# One input channel under one tap: x is the expression of pixel u's input.
_MULTIPLY = """
#define MULTIPLY(x) { \\
  V wv[NB]; \\
  UNROLL for (int b = 0; b < NB; b++) wv[b] = LOADV(wp + b * W); \\
  UNROLL for (int u = 0; u < UR; u++) { V xv = (x); UNROLL for (int b = 0; b < NB; b++) acc[b][u] += wv[b] * xv; } \\
  wp += NB * W; \\
}
#define INSIDE(at, size) ((u32)(at) < (u32)(size))
"""

# Pixels beyond the image repeat the last one and are not stored.
_POINTWISE = """
GLOBAL const f32* wp = w + slab * (IC * NB * W);
GLOBAL const f32* xp[UR];
UNROLL for (int u = 0; u < UR; u++) xp[u] = xn + (u < count ? p + u : PIXELS - 1) * L;
for (int ic = 0; ic < IC; ic += L) {
  int depth = IC - ic < L ? IC - ic : L;
  _Pragma("unroll 1") for (int i = 0; i < depth; i++) MULTIPLY(xp[u][i])
  UNROLL for (int u = 0; u < UR; u++) xp[u] += PIXELS * L;
}
"""

_CORNERS = """
GLOBAL const f32* wp = w + slab * (IC * KD * KH * KW * NB * W);
int z0[UR], y0[UR], x0[UR];
{
  int ox = p % OW, oy = p / OW % OH, oz = p / OW / OH;
  UNROLL for (int u = 0; u < UR; u++) {
    z0[u] = oz * SD - PD; y0[u] = oy * SH - PH; x0[u] = ox * SW - PW;
    if (p + u + 1 < PIXELS && ++ox == OW) { ox = 0; if (++oy == OH) { oy = 0; oz++; } }
  }
}
"""

_BLOCKED = """
for (int ic = 0; ic < IC; ic += L) {
  int depth = IC - ic < L ? IC - ic : L;
  GLOBAL const f32* xc = xn + ic * (ID * IH * IW);
  for (int kz = 0; kz < KD; kz++) for (int ky = 0; ky < KH; ky++) for (int kx = 0; kx < KW; kx++) {
    GLOBAL const f32* xp[UR];
    UNROLL for (int u = 0; u < UR; u++) {
      int iz = z0[u] + kz * DD, iy = y0[u] + ky * DH, ix = x0[u] + kx * DW;
      xp[u] = xc + ((iz * IH + iy) * IW + ix) * L;
#if PADDED
      xp[u] = INSIDE(iz, ID) & INSIDE(iy, IH) & INSIDE(ix, IW) ? xp[u] : zeros;
#endif
    }
    _Pragma("unroll 1") for (int i = 0; i < depth; i++) MULTIPLY(xp[u][i])
  }
}
"""

# A plain input has one channel under a tap, too little to pay for choosing pointers: tiles without padding need none.
_PLAIN = """
int inside = 1;
#if PADDED
UNROLL for (int u = 0; u < UR; u++)
  inside &= z0[u] >= 0 & z0[u] + (KD - 1) * DD < ID & y0[u] >= 0 & y0[u] + (KH - 1) * DH < IH
          & x0[u] >= 0 & x0[u] + (KW - 1) * DW < IW;
#endif
for (int ic = 0; ic < IC; ic++) for (int kz = 0; kz < KD; kz++) for (int ky = 0; ky < KH; ky++) {
  GLOBAL const f32* xp[UR];
  UNROLL for (int u = 0; u < UR; u++) xp[u] = xn + ((ic * ID + z0[u] + kz * DD) * IH + y0[u] + ky * DH) * IW + x0[u];
  if (inside) {
    _Pragma("unroll 1") for (int kx = 0; kx < KW; kx++) MULTIPLY(xp[u][kx * DW])
  } else {
    int row[UR];
    UNROLL for (int u = 0; u < UR; u++) row[u] = INSIDE(z0[u] + kz * DD, ID) & INSIDE(y0[u] + ky * DH, IH);
    _Pragma("unroll 1") for (int kx = 0; kx < KW; kx++)
      MULTIPLY((row[u] & INSIDE(x0[u] + kx * DW, IW)) ? xp[u][kx * DW] : 0.0f)
  }
}
"""


def _outlined(problem: Problem, target: Target) -> Problem:
    """The problem with the output in blocks, to be asked about."""
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
    if groups == 1 and out.dims[1] < block // 2:
        return f"{out.dims[1]} output channels fill a vector of {block} badly"
    return None


def pack(w: Array, groups: int, nb: int, block: int, inner: int) -> Array:
    """O I spatial... -> group, slab of NB blocks, I/inner, spatial..., inner, NB, block; zeros fill up the last one."""
    out, depth = w.shape[0] // groups, w.shape[1]
    taps = math.prod(w.shape[2:])
    slabs = -(-out // (nb * block))
    padded = np.zeros((groups, slabs * nb * block, depth, taps), np.float32)
    padded[:, :out] = w.reshape(groups, out, depth, taps)
    whole = padded.reshape(groups, slabs, nb * block, depth, taps)
    parts = []
    for at in range(0, depth, inner):  # the last part may be smaller: its channels are not filled up
        part = whole[:, :, :, at : at + inner].transpose(0, 1, 4, 3, 2)
        parts.append(part.reshape(groups, slabs, -1))
    return np.ascontiguousarray(np.concatenate(parts, axis=2))


def pack_bias(b: Array, groups: int, width: int) -> Array:
    """Each group filled up to whole slabs."""
    per = b.size // groups
    padded = np.zeros((groups, -(-per // width) * width), np.float32)
    padded[:, :per] = b.reshape(groups, per)
    return padded


SOLVERS = both(ConvBlocked)
