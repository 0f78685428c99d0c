"""Convolutions whose result is one pixel: a vector times a matrix, which is read from memory once and in order.

Squeeze-and-excitation consists of them. A tile is NB blocks of output channels; CHAINS sums of each hide the latency of
a multiply-add. With one pixel the plain and the blocked layout have the same bytes, except for the lanes that fill up a
last block. Therefore the kernel takes any mixture of the two layouts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater, lesser
from tunewright.ir.types import PLAIN, DType, Layout, TensorType, blocked
from tunewright.search.space import Space
from tunewright.solvers.base import Array, Config, Packing, Problem, tensor

from ..source import epilogue
from ..source.base import CSolver, both, layout_of
from ..source.emit import EmittedLaunch, In, Out, Source
from ..source.window import Window
from ..source.window import why_not as why_not_window

#: Multiply-adds of vectors that are worth a separate work-item: waking a thread takes as long as this number.
LEAST_WORK = 1 << 14

_SLABS = """
int slab = SLABS * GID(0) / ITEMS, last = SLABS * (GID(0) + 1) / ITEMS;
GLOBAL const f32* xn = x + GID(1) * XSIZE;
for (; slab < last; slab++) {
  V acc[CHAINS][NB];
  UNROLL for (int b = 0; b < NB; b++) {
    acc[0][b] = START;
    UNROLL for (int c = 1; c < CHAINS; c++) acc[c][b] = (V)(0.0f);
  }
  GLOBAL const f32* wp = w + slab * (DEPTH * NB * W);
  int i = 0;
  _Pragma("unroll 1") for (; i + CHAINS <= DEPTH; i += CHAINS) {
    UNROLL for (int c = 0; c < CHAINS; c++) {
      const V xv = xn[i + c];
      UNROLL for (int b = 0; b < NB; b++) acc[c][b] += LOADV(wp + (c * NB + b) * W) * xv;
    }
    wp += CHAINS * NB * W;
  }
  _Pragma("unroll 1") for (; i < DEPTH; i++) {
    const V xv = xn[i];
    UNROLL for (int b = 0; b < NB; b++) acc[0][b] += LOADV(wp + b * W) * xv;
    wp += NB * W;
  }
  UNROLL for (int c = 1; c < CHAINS; c++)
    UNROLL for (int b = 0; b < NB; b++) acc[0][b] += acc[c][b];
  f32 sums[NB * W];
  UNROLL for (int b = 0; b < NB; b++) *(VU*)(sums + b * W) = acc[0][b];
  const int first = slab * NB * W, rest = CHANNELS - first < NB * W ? CHANNELS - first : NB * W;
"""


class ConvVector(CSolver):
    """Takes constant f32 weights, one group, and a window that covers the whole input."""

    family = "conv_vector"
    ops = frozenset({"Conv"})
    dtypes = frozenset({DType.FLOAT32})
    stores = epilogue.NARROW
    layouts = frozenset({"plain", "blocked"})
    rank = 41

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x, out = tensor(problem.inputs[0]), tensor(problem.outputs[0])
        if not problem.constant[1] or (problem.input(2) is not None and not problem.constant[2]):
            return "the weights are not constant"
        if int(problem.attrs.get("group", 1)) != 1:
            return "has groups"
        if any(layout not in (PLAIN, _layout(target)) for layout in (layout_of(x), layout_of(out))):
            return f"works in plain tensors and in blocks of {_layout(target).block}"
        reason = why_not_window(problem) or epilogue.why_not(problem)
        if reason is not None or not problem.is_static:
            return reason or "only shapes tell whether the result is one pixel"
        window = Window.of(problem)
        if window.output != (1, 1, 1) or window.kernel != window.input or any(window.head) or any(window.tail):
            return "the result is more than one pixel, or the window is not the whole input"
        if window.taps > 1 and x.layout != PLAIN and x.dims[1] % x.layout.block:
            return "the last block of the input is not full"
        return None

    def preferred(self, problem: Problem, target: Target) -> tuple[Layout, Layout] | None:
        return None  # It takes any of its layouts.

    def space(self, problem: Problem, target: Target) -> Space:
        return Space(
            {"nb": (1, 2, 3, 4, 6, 8, 12), "chains": (1, 2, 4), "slices": (1, 2, 4)},
            lambda c: _registers(c["nb"], c["chains"]) <= target.registers, version="1",
        )  # fmt: skip

    def default(self, problem: Problem, target: Target) -> Config:
        return {"nb": 4, "chains": 2, "slices": 2}

    def packings(self, problem: Problem, config: Config, target: Target) -> Mapping[int, Packing]:
        block = _layout(target).block
        width, inner = int(config["nb"]) * block, block if tensor(problem.inputs[0]).layout != PLAIN else 1
        found = {1: Packing(f"vector{width}i{inner}", lambda w: pack(w, width, inner))}
        if problem.input(2) is not None:
            found[2] = Packing(f"padded{width}", lambda b: np.pad(b, (0, -len(b) % width)))
        return found

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x, out = tensor(problem.inputs[0]), tensor(problem.outputs[0])
        if not out.size:
            return []
        block, nb, chains = _layout(target).block, int(config["nb"]), int(config["chains"])
        depth, slabs = x.dims[1] * Window.of(problem).taps, -(-out.dims[1] // (nb * block))
        source = Source("conv_vector", self.specialise)
        source.buffer("x", DType.FLOAT32, In(0))
        source.buffer("w", DType.FLOAT32, In(1))
        if problem.input(2) is not None:
            source.buffer("bias", DType.FLOAT32, In(2))
        steps = epilogue.Epilogue(source, problem)
        source.buffer("y", out.dtype, Out())
        work = slabs * nb * depth
        items = greater(1, lesser(slabs, int(config["slices"]) * target.units, work // LEAST_WORK))
        source.dims(
            SLABS=slabs, ITEMS=items, DEPTH=depth, CHANNELS=out.dims[1], XSIZE=_size(x) // x.dims[0],
            YSIZE=_size(out) // out.dims[0],
        )  # fmt: skip
        source.fixed(W=block, NB=nb, CHAINS=chains)
        source.fixed(START="LOADV(bias + (slab * NB + b) * W)" if problem.input(2) is not None else "(V)(0.0f)")
        source.function("vector_of(f32, W, V);\ntypedef V VU __attribute__((aligned(4)));")
        lines, result = steps.apply("v", "first + l", "GID(1) * YSIZE + first + l")
        source.add(_SLABS)
        source.add(f"for (int l = 0; l < rest; l++) {{ f32 v = sums[l];\n{lines}")
        source.add(f"{source.store('y', 'GID(1) * YSIZE + first + l', result)} }}\n}}")
        return [source.call([items, out.dims[0]])]


def _layout(target: Target) -> Layout:
    return blocked(target.vector_bytes // 4)


def _size(type: TensorType) -> int:
    """The number of elements in memory."""
    return math.prod(type.physical)


def _registers(nb: Any, chains: Any) -> int:
    """Registers for accumulators, an input and a weight."""
    return int(nb * chains + 2)


def pack(w: Array, width: int, inner: int) -> Array:
    """Packs O I spatial... as slab, I/inner, spatial..., inner, lane: the order of the input's bytes; zeros fill up
    slabs."""
    out, depth = w.shape[0], w.shape[1]
    taps: Array = w.reshape(out, depth, -1)
    if taps.shape[2] > 1 and inner > 1:
        taps = taps.reshape(out, depth // inner, inner, -1).swapaxes(2, 3)
    rows = np.pad(taps.reshape(out, -1), [(0, -out % width), (0, 0)])
    return np.ascontiguousarray(rows.reshape(-1, width, rows.shape[1]).swapaxes(1, 2))


SOLVERS = both(ConvVector)
