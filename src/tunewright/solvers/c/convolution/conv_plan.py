"""Plans of convolutions over slabs (see `conv_slab`): tiles, bands, the table of offsets, packed weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tunewright.devices.base import Target
from tunewright.devices.c_kernel import ConstantTable
from tunewright.ir.symbolic import greater, lesser
from tunewright.ir.types import DType
from tunewright.search.space import Scalar, Space
from tunewright.solvers.base import Array, Config, Packing, Problem, tensor

from ..source.window import Triple, Window, groups

#: multiply-adds that are worth a separate work-item: about 5 us
LEAST_WORK = 1 << 17
LANES = ("positions", "channels")
VECTORS = (1, 2, 3, 4, 6)
#: MULTIPLY adds input channel i under one tap; x is the expression of pixel u's input. Of pixels and blocks, the
#: smaller set stays in registers.
MULTIPLY = """\
#if NB > UR
#define MULTIPLY(i, x) { \\
  V xv[UR]; \\
  UNROLL for (int u = 0; u < UR; u++) xv[u] = (x); \\
  UNROLL for (int b = 0; b < NB; b++) { \\
    V wv = LOADV(wp + ((i) * NB + b) * W); UNROLL for (int u = 0; u < UR; u++) acc[b][u] += wv * xv[u]; } \\
}
#else
#define MULTIPLY(i, x) { \\
  V wv[NB]; \\
  UNROLL for (int b = 0; b < NB; b++) wv[b] = LOADV(wp + ((i) * NB + b) * W); \\
  UNROLL for (int u = 0; u < UR; u++) { V xv = (x); UNROLL for (int b = 0; b < NB; b++) acc[b][u] += wv[b] * xv; } \\
}
#endif
"""


@dataclass(frozen=True)
class SlabAxis:
    """How one axis of a slab stores the input that ``band`` neighbouring results read.

    Slot e of phase p holds the input at ``(begin + e) * step - head + p * apart``. For the first result of the band,
    tap k is at ``taps[k]``: (phase of the output, phase, slot). Each following result reads one slot further.
    """

    slots: int
    phases: int
    step: int
    head: int
    apart: int
    taps: tuple[tuple[int, int, int], ...]

    @staticmethod
    def conv(window: Window, axis: int, band: int, per_tap: bool) -> SlabAxis:
        kernel, stride, dilation = window.kernel[axis], window.stride[axis], window.dilation[axis]
        head, reach = window.head[axis], (kernel - 1) * dilation
        if per_tap:  # Every tap has a separate copy: there is nothing between taps, and taps share nothing.
            return SlabAxis(band, kernel, stride, head, dilation, tuple((0, k, 0) for k in range(kernel)))
        taps = tuple((0, k * dilation % stride, k * dilation // stride) for k in range(kernel))
        return SlabAxis(band + reach // stride, lesser(stride, reach + 1), stride, head, 1, taps)

    @staticmethod
    def transposed(window: Window, axis: int, band: int) -> SlabAxis:
        kernel, stride, dilation, head = (v[axis] for v in (window.kernel, window.stride, window.dilation, window.head))
        # Result j of phase p is output j * stride + p; under tap k it reads input j - (k * dilation - head) // stride.
        back = [divmod(k * dilation - head, stride) for k in range(kernel)]
        most = back[-1][0]
        return SlabAxis(band + most - back[0][0], 1, 1, most, 1, tuple((phase, 0, most - n) for n, phase in back))


@dataclass(frozen=True)
class SlabPlan:
    """All sizes of the plan for one problem and config."""

    window: Window
    transposed: bool
    batch: int
    groups: int
    inputs: int  # channels of a group
    outputs: int  # channels of a group
    channels: int  # of a tile
    positions: int  # of a tile
    rows: int  # of a band
    columns: int  # of a band
    axes: tuple[SlabAxis, SlabAxis, SlabAxis]
    items: int

    @property
    def results(self) -> Triple:
        """Results of one phase along each axis."""
        if not self.transposed:
            return self.window.output
        d, h, w = (-(-o // s) for o, s in zip(self.window.output, self.window.stride, strict=True))
        return d, h, w

    @property
    def output_phases(self) -> Triple:
        return self.window.stride if self.transposed else (1, 1, 1)

    @property
    def blocks(self) -> int:
        """Tiles of output channels in a group."""
        return -(-self.outputs // self.channels)

    @property
    def bands(self) -> int:
        depth, height, width = self.results
        return self.batch * self.groups * depth * -(-height // self.rows) * -(-width // self.columns)

    @property
    def tasks(self) -> int:
        return self.bands * math.prod(self.output_phases) * self.blocks

    @property
    def channel_slots(self) -> int:
        """Elements of one channel in a slab."""
        return math.prod(a.slots * a.phases for a in self.axes)


def plan(problem: Problem, config: Config, target: Target) -> SlabPlan:
    """Plans a problem with bands as large as a slab of ``config["slab"]`` KiB allows."""
    along, across = int(config["vectors"]) * lanes(problem, target), int(config["scalars"])
    channels, positions = (across, along) if config["lanes"] == "positions" else (along, across)
    made = SlabPlan(
        Window.of(problem).flat(), problem.op == "ConvTranspose", tensor(problem.inputs[0]).dims[0], *groups(problem),
        channels, positions, rows=1, columns=1, axes=(_POINT, _POINT, _POINT), items=1,
    )  # fmt: skip
    limit = int(config["slab"]) * 1024 // compute_dtype(problem).itemsize // greater(1, made.inputs)
    height, width = made.results[1:]
    columns = _share(width, positions, lambda n: _banded(made, 1, n).channel_slots <= limit)
    rows = 1 if columns < width else _share(height, 1, lambda n: _banded(made, n, width).channel_slots <= limit)
    made = _banded(made, rows, columns)
    work = made.batch * made.groups * made.outputs * made.inputs * made.window.taps * math.prod(made.results)
    return replace(made, items=greater(1, lesser(made.tasks, 4 * target.units, work // LEAST_WORK)))


#: an axis of one element
_POINT = SlabAxis(slots=1, phases=1, step=1, head=0, apart=1, taps=((0, 0, 0),))


def _banded(made: SlabPlan, rows: int, columns: int) -> SlabPlan:
    """The plan with bands of ``rows`` by ``columns`` results."""
    window = made.window
    if made.transposed:
        depth, height, width = (SlabAxis.transposed(window, k, n) for k, n in enumerate((1, rows, columns)))
    else:
        depth = SlabAxis.conv(window, 0, 1, per_tap=True)
        height = min((SlabAxis.conv(window, 1, rows, t) for t in (False, True)), key=lambda a: a.slots * a.phases)
        # Work between the rows of a band is wasted. A separate copy for each tap leaves nothing between the rows.
        vain = 2 * made.outputs * window.kernel[2] // made.positions if rows > 1 else 0
        both = (SlabAxis.conv(window, 2, columns, per_tap) for per_tap in (False, True))
        width = min(both, key=lambda a: a.slots * (a.phases + vain))
    return replace(made, rows=rows, columns=columns, axes=(depth, height, width))


def _share(whole: int, least: int, fits: Callable[[int], bool]) -> int:
    """The largest of equal shares of ``whole`` that fits, but not smaller than ``least``."""
    few, many, most = 1, 1, greater(1, -(-whole // least))
    while not fits(-(-whole // many)) and many < most:  # plain numbers: fewer decisions depend on an open size
        few, many = many + 1, 2 * many
    if many > most:
        many = most
    while few < many:
        half = (few + many) // 2
        few, many = (few, half) if fits(-(-whole // half)) else (half + 1, many)
    return greater(1, -(-whole // few))


def compute_dtype(problem: Problem) -> DType:
    """The type of the arithmetic, of slabs and of packed weights."""
    return DType.FLOAT64 if tensor(problem.inputs[0]).dtype is DType.FLOAT64 else DType.FLOAT32


def lanes(problem: Problem, target: Target) -> int:
    """The number of elements of a vector."""
    return greater(2, target.vector_bytes // compute_dtype(problem).itemsize)


def space(target: Target) -> Space:
    """Tiles that fit the registers, and sizes of slabs from a first-level cache to most of a second-level one."""
    params: dict[str, tuple[Scalar, ...]] = {
        "lanes": LANES, "vectors": VECTORS, "scalars": (1, 2, 3, 4, 6, 8), "slab": (16, 64, 128, 256, 512),
    }  # fmt: skip
    return Space(params, lambda c: _registers(c["vectors"], c["scalars"]) <= target.registers, version="1")


def _registers(vectors: Any, scalars: Any) -> int:
    """Registers for accumulators, vectors, one broadcast scalar, and one that the compiler reserves."""
    return int(vectors * scalars + vectors + 2)


def default(problem: Problem, target: Target) -> Config:
    """The tile with the least time in a simple model of a core. It compares few tiles: each is a separate text to
    compile."""
    width, most = lanes(problem, target), target.registers
    window, (_, inputs, outputs) = Window.of(problem).flat(), groups(problem)
    share = math.prod(window.stride) if problem.op == "ConvTranspose" else 1  # results and taps of a phase
    positions, depth = -(-window.output[1] * window.output[2] // share), inputs * -(-window.taps // share)
    widest = max(s for s in (4, 6, 8) if _registers(3 if s == 8 else 2, s) <= most)
    found = []
    for scalars in (1, 2, 4, widest):
        vectors = max(v for v in VECTORS if _registers(v, scalars) <= most and (v <= 4 or scalars == 1))
        full, rest = divmod(positions, vectors * width)
        full, rest = (full + 1, 0) if rest > width else (full, lesser(rest, 1))
        cycles = full * _cycles(vectors, scalars, depth, 2) + rest * _cycles(1, scalars, depth, 2)
        found.append((cycles * -(-outputs // scalars), "positions", vectors, scalars))
    for scalars in (1, widest):
        cycles = -(-positions // scalars) * _cycles(2, scalars, depth, 2 * width)
        found.append((cycles * -(-outputs // (2 * width)), "channels", 2, scalars))
    _, chosen, vectors, scalars = min(found)
    # Where weights do not stay in the cache, a large band reads them less often.
    slab = 256 if outputs * depth * share <= 1 << 18 else 512
    return {"lanes": chosen, "vectors": vectors, "scalars": scalars, "slab": slab}


def _cycles(vectors: int, scalars: int, depth: int, store: int) -> float:
    """Cycles of a tile: two multiply-adds or loads per cycle (half of the vectors cross a line), four of latency."""
    step = greater(vectors * scalars, 1.5 * vectors + scalars, 8) / 2 + 0.5
    return depth * step + vectors * scalars * store


# -- weights ----------------------------------------------------------------------------------------------------------
def packing(problem: Problem, made: SlabPlan) -> Packing:
    """Packs weights as [group][phase][tile of channels][input channel, tap][channel of the tile], in the type of the
    arithmetic."""
    order = _tap_order(made)
    dtype = compute_dtype(problem).numpy

    def pack(w: Array) -> Array:
        first, second = (made.inputs, made.outputs) if made.transposed else (made.outputs, made.inputs)
        taps = w.astype(dtype).reshape(made.groups, first, second, made.window.taps)
        taps = taps if made.transposed else taps.swapaxes(1, 2)  # group, input, output, tap
        padding = made.blocks * made.channels - made.outputs
        taps = np.pad(taps, [(0, 0), (0, 0), (0, padding), (0, 0)])
        taps = taps.reshape(made.groups, made.inputs, made.blocks, made.channels, made.window.taps)
        taps = taps.transpose(0, 2, 1, 4, 3)
        parts = [taps[:, :, :, chosen].reshape(made.groups, math.prod(taps[0, :, :, chosen].shape)) for chosen in order]
        return np.ascontiguousarray(np.concatenate(parts, axis=1))

    key = f"slab {made.groups} {made.channels} {dtype} {order if made.transposed else ''}"
    return Packing(key, pack)


def _tap_order(made: SlabPlan) -> list[list[int]]:
    """The taps of each phase of the output."""
    _, height, width = made.output_phases
    order: list[list[int]] = [[] for _ in range(math.prod(made.output_phases))]
    for flat, (d, h, w) in enumerate(itertools.product(*(a.taps for a in made.axes))):
        order[(d[0] * height + h[0]) * width + w[0]].append(flat)
    return order


def table(made: SlabPlan) -> ConstantTable:
    """Three lists: where the taps of each phase begin, with their number at the end; the taps in that order; and
    offsets.

    There is one offset in the slab for each input channel and tap, phase by phase.
    """
    order = _tap_order(made)
    first = np.cumsum([0, *map(len, order)])
    _, height, width = made.axes
    # of each tap: whole planes, rows and slots in front of it
    places = np.array([
        ((d[1] + d[2]) * height.phases * width.phases + h[1] * width.phases + w[1], h[2], w[2])
        for d, h, w in itertools.product(*(a.taps for a in made.axes))
    ], np.int64)  # fmt: skip
    channels = np.arange(made.inputs)[:, None]

    def make(rows: int, columns: int, channel: int) -> Array:
        offsets = places @ np.array([rows * columns, columns, 1])
        parts = [(channels * channel + offsets[chosen]).reshape(-1) for chosen in order]
        return np.concatenate([first, *order, *parts]).astype(np.int32)

    return ConstantTable.of(make, [height.slots, width.slots, made.channel_slots])
