"""Reorder: copies a tensor from one layout to another."""

from __future__ import annotations

import math

from tunewright.devices.base import Target
from tunewright.ir.symbolic import hint
from tunewright.ir.types import NHWC, PLAIN, TensorType
from tunewright.ops.internal.reorder import REORDER
from tunewright.search.space import Config as Point
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Problem, tensor

from ..source.base import CSolver, both, layout_of
from ..source.element_words import SINGLE, transposer, word, words
from ..source.emit import STORAGE, EmittedLaunch, In, Out, Source
from ..source.strided_access import Access, StridedMove
from .move import SLICE, SLICES, MoveLaunch, MoveSolver, slices


class ChannelsLast(MoveSolver):
    """Reorders between plain and NHWC: a transpose of channels and pixels."""

    family = "reorder.nhwc"
    ops = frozenset({REORDER})
    layouts = frozenset({"plain", "nhwc"})

    def copies(self, problem: Problem) -> list[MoveLaunch]:
        x, y = tensor(problem.inputs[0]), tensor(problem.outputs[0])
        source, target = (_channels(t) for t in (x, y))
        return [MoveLaunch(StridedMove.between(source, target, words(x.dtype)), In(0), Out(), word(x.dtype))]


def _channels(type: TensorType) -> Access:
    """The access (batch, channels, pixels) of a tensor that is plain or in NHWC."""
    batch, channels = type.dims[:2]
    pixels = math.prod(type.dims[2:])
    if type.layout == NHWC:
        return Access.of((batch, pixels, channels)).permute((0, 2, 1))
    return Access.of((batch, channels, pixels))


class Blocked(CSolver):
    """Reorders into and out of channels in blocks. A block and some pixels are a tile that is transposed in registers.

    Channels that fill up a last block are written as zeros.
    """

    family = "reorder.blocked"
    ops = frozenset({REORDER})
    dtypes = SINGLE
    layouts = frozenset({"plain", "nhwc", "blocked"})
    rank = 60

    def refuse(self, problem: Problem, target: Target) -> str | None:
        sides = [layout_of(problem.inputs[0]), layout_of(problem.outputs[0])]
        if sum(side.name == "blocked" for side in sides) != 1:
            return f"goes from {sides[0]} to {sides[1]}: not into or out of blocks"
        block = sides[0].block or sides[1].block
        return f"blocks of {block} channels" if block & (block - 1) or block > 64 else None

    def default(self, problem: Problem, target: Target) -> Config:
        return Point(slice=SLICE)

    def space(self, problem: Problem, target: Target) -> Space:
        return Space({"slice": SLICES})

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        x, y = tensor(problem.inputs[0]), tensor(problem.outputs[0])
        into = y.layout.name == "blocked"
        inside, outside = (y, x) if into else (x, y)
        if not x.size:
            return []
        block, dtype = inside.layout.block, word(x.dtype)
        batch, channels = x.dims[:2]
        pixels, blocks = math.prod(x.dims[2:]), -(-channels // block)
        items = slices(inside.nbytes, target, config["slice"])
        # The unit of work is a stretch of pixels of one block of channels.
        stretch = pixels if hint(items) <= hint(batch * blocks) else -(-pixels // -(-items // (batch * blocks)))
        parts = -(-pixels // stretch)
        count = batch * blocks * parts
        per_item = -(-count // items)
        source, c = Source("reorder", self.specialise), STORAGE[dtype]
        source.buffer("x", dtype, In(0))
        source.buffer("y", dtype, Out())
        source.dims(C=channels, BLOCKS=blocks, PIXELS=pixels, STRETCH=stretch, PARTS=parts, COUNT=count, UNITS=per_item)
        source.fixed(B=block)
        source.function(transposer(dtype, block))
        source.add("int first = GID(0) * UNITS, last = first + UNITS < COUNT ? first + UNITS : COUNT;")
        source.add("for (int unit = first; unit < last; unit++) {")
        source.add("int begin = unit % PARTS * STRETCH, end = begin + STRETCH < PIXELS ? begin + STRETCH : PIXELS;")
        source.add("int index = unit / PARTS, batch = index / BLOCKS, channel = index % BLOCKS * B;")
        source.add("int lanes = C - channel < B ? C - channel : B;")
        blocked = "index * PIXELS * B"
        plain = "(batch * C + channel) * PIXELS" if outside.layout == PLAIN else "batch * C * PIXELS + channel"
        source.add(f"GLOBAL const {c}* s = x + {plain if into else blocked};")
        source.add(f"GLOBAL {c}* d = y + {blocked if into else plain};")
        source.add(_body(into, outside.layout == PLAIN))
        source.add("}")
        return [source.call([-(-count // per_item)])]


def _body(into: bool, plain: bool) -> str:
    """Statements for pixels ``begin`` to ``end`` of one block, of which ``lanes`` channels exist."""
    # strides of channel and pixel outside of the blocks
    c, p = ("PIXELS", "1") if plain else ("1", "C")
    if into:
        single = f"d[i * B + k] = k < lanes ? s[k * {c} + i * {p}] : 0;"
        tile = "transpose_tile(s + p, PIXELS, {0}, d + p * B, B, B);"
    else:
        single = f"if (k < lanes) d[k * {c} + i * {p}] = s[i * B + k];"
        tile = "transpose_tile(s + p * B, B, B, d + p, PIXELS, {0});"
    singles = f"for (int i = begin; i < end; i++) for (int k = 0; k < B; k++) {single}"
    if not plain:
        return singles
    # A partial last tile is moved back over pixels that are already done: the same words are written twice.
    return f"""
if (PIXELS < B) {{
  {singles}
}} else if (lanes == B) {{
  for (int i = begin; i < end; i += B) {{ int p = i < PIXELS - B ? i : PIXELS - B; {tile.format("B")} }}
}} else {{
  for (int i = begin; i < end; i += B) {{ int p = i < PIXELS - B ? i : PIXELS - B; {tile.format("lanes")} }}
}}"""


SOLVERS = (*both(ChannelsLast), *both(Blocked))
