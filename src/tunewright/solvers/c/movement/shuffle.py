"""Exchanges channels between groups (ShuffleChannels along the channels), plain and blocked."""

from __future__ import annotations

import math

import numpy as np

from tunewright.devices.base import Target
from tunewright.ir.symbolic import greater, lesser
from tunewright.ir.types import DType
from tunewright.search.space import Config as Point
from tunewright.search.space import Space
from tunewright.solvers.base import Array, Config, Problem, tensor

from ..source.base import CSolver, both, layout_of
from ..source.element_words import MOVABLE, word, words
from ..source.emit import STORAGE, ConstantTable, EmittedLaunch, In, Out, Source
from .move import SLICE, SLICES, slices

#: bytes of an element -> an integer type that holds two elements
_PAIRS = {1: "u16", 2: "u32", 4: "u64"}


class ShuffleChannels(CSolver):
    """Reads a table with the source of each channel. In blocks, it gathers a pixel's channels, with neighbours
    together."""

    version = "1.1"
    family = "shuffle"
    ops = frozenset({"org.openvinotoolkit::ShuffleChannels"})
    dtypes = MOVABLE
    layouts = frozenset({"plain", "blocked"})
    rank = 50

    def refuse(self, problem: Problem, target: Target) -> str | None:
        x = tensor(problem.inputs[0])
        if layout_of(x) != layout_of(problem.outputs[0]):
            return "input and output differ in layout"
        if x.rank is not None and int(problem.attrs.get("axis", 1)) % greater(x.rank, 1) != 1:
            return "it moves other axes than the channels"
        if x.layout.block and words(x.dtype) != 1:
            return f"blocks of {x.dtype}"
        return "has no epilogue" if problem.epilogue else None

    def default(self, problem: Problem, target: Target) -> Config:
        return Point(slice=SLICE)

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"slice": SLICES})

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x = tensor(problem.inputs[0])
        if not x.size:
            return []
        dtype, block = word(x.dtype), x.layout.block or 1
        size = math.prod(x.dims[2:]) * words(x.dtype)  # words of a plane, or vectors of a plane of blocks
        blocks = x.physical[1]
        source = Source("shuffle_channels", self.specialise)
        source.buffer("x", dtype, In(0))
        source.buffer("y", dtype, Out())
        source.buffer(
            "table", DType.INT32, ConstantTable(_table(x.dims[1], int(problem.attrs.get("group", 1)), size, block))
        )
        planes = x.dims[0] * blocks
        items = slices(planes * size * block * dtype.itemsize, target, config["slice"])
        if block > 1:  # Every block of the result reads several blocks: those of some pixels stay in the cache.
            parts, items = lesser(size, -(-items // x.dims[0])), x.dims[0]
        else:
            parts = greater(1, -(-items // planes))
        source.dims(PLANES=planes, PLANES_EACH=-(-planes // items), BLOCKS=blocks, SIZE=size, PART=-(-size // parts))
        source.fixed(W=block)
        c, groups = STORAGE[dtype], int(problem.attrs.get("group", 1))
        each = _neighbours(x.dims[1], groups, block)
        lanes = range(block // each)
        pointers = "\n".join(f"GLOBAL const {c}* p{k} = from + channels[{k}];" for k in lanes)
        store = "to[i] = p0[i];"
        if block > 1:  # Written as a vector: the compiler does not see that the stores are contiguous.
            source.function(f"vector_of({c}, W, V);\ntypedef V VU __attribute__((aligned({dtype.itemsize})));")
            store = f"STOREV(to + i * W, VECTOR(V, {', '.join(f'p{k}[i * W]' for k in lanes)}));"
        aligned = f"__attribute__((aligned({dtype.itemsize})))"
        if each == 2 and dtype.itemsize in _PAIRS:  # Read as numbers of twice the width, whose halves are then sorted.
            source.function(f"vector_of({_PAIRS[dtype.itemsize]}, {len(lanes)}, P);")
            source.function(f"typedef {_PAIRS[dtype.itemsize]} PU {aligned};")
            pairs = ", ".join(f"*(GLOBAL const PU*)(p{k} + i * W)" for k in lanes)
            order = ", ".join(str(2 * k + j) for j in range(each) for k in lanes)
            sorted_ = f"__builtin_shufflevector(v, v, {order})"
            store = f"{{ P p = VECTOR(P, {pairs}); V v = *(V*)&p; STOREV(to + i * W, {sorted_}); }}"
        elif each > 1:
            source.function(f"vector_of({c}, {each}, R);\ntypedef R RU {aligned};")
            reads = " ".join(f"R r{k} = *(GLOBAL const RU*)(p{k} + i * W);" for k in lanes)
            order = ", ".join(f"r{k}[{j}]" for j in range(each) for k in lanes)
            store = f"{{ {reads} STOREV(to + i * W, VECTOR(V, {order})); }}"
        source.add(f"""
const int stop = (GID(0) + 1) * PLANES_EACH < PLANES ? (GID(0) + 1) * PLANES_EACH : PLANES;
const int begin = GID(1) * PART, end = SIZE - begin < PART ? SIZE : begin + PART;
for (int plane = GID(0) * PLANES_EACH; plane < stop; plane++) {{
  GLOBAL const {c}* from = x + plane / BLOCKS * (BLOCKS * SIZE * W);
  GLOBAL const int* channels = table + plane % BLOCKS * W;
  GLOBAL {c}* to = y + plane * SIZE * W;
  {pointers}
  for (int i = begin; i < end; i++) {store}
}}""")
        return [source.call([-(-planes // -(-planes // items)), -(-size // -(-size // parts))])]


def _neighbours(channels: int, groups: int, block: int) -> int:
    """How many successive channels of a group form its part of every block of the result, or 1."""
    each = block // groups
    if groups == 1 or block % groups or channels % block or channels // groups % each:
        return 1
    return each


def _table(channels: int, groups: int, size: int, block: int) -> Array:
    """The position of the first element of each channel in the input.

    Lanes beyond the last channel repeat the first channel.
    """
    origin = np.arange(channels).reshape(groups, channels // groups).T.reshape(-1)
    origin = np.pad(origin, (0, -channels % block))
    return (origin // block * (size * block) + origin % block).astype(np.int32)


SOLVERS = both(ShuffleChannels)
