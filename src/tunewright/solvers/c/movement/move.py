"""Copies between arrays of different strides: the kernels of every operation that only moves elements.

There are two kernels. `_rows` loops over rows (any strides) and copies one axis in its inner loop. `_tiles` serves
sources and targets that are contiguous along different axes: it transposes tiles of these two axes in registers.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from tunewright.devices.base import Target
from tunewright.ir.launch_symbols import foreseen
from tunewright.ir.symbolic import greater, hint, lesser
from tunewright.ir.types import DType
from tunewright.search.space import Config as Point
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Problem, tensor

from ..source.base import CSolver
from ..source.element_words import MOVABLE, transposer, word
from ..source.emit import STORAGE, EmittedLaunch, In, Out, Source
from ..source.strided_access import StridedAxis, StridedMove

#: Bytes that one work-item moves. With fewer, its start costs more than it gains.
SLICE = 65536
SLICES = (16384, 65536, 262144)
#: sizes of the tiles that are transposed in registers
_WIDTHS = (16, 8, 4)


@dataclass(frozen=True)
class MoveLaunch:
    """One launch: a move from an input to an output, in words of a type."""

    move: StridedMove
    source: In
    target: Out
    dtype: DType


class MoveSolver(CSolver):
    """A solver of the problems that `copies` can describe."""

    dtypes = MOVABLE
    rank = 60

    def refuse(self, problem: Problem, target: Target) -> str | None:
        return "has no epilogue" if problem.epilogue else None

    @abstractmethod
    def copies(self, problem: Problem) -> list[MoveLaunch]:
        """The launches of a static problem."""

    def default(self, problem: Problem, target: Target) -> Config:
        copies = self.copies(problem)
        widest = greater(4, lesser(16, target.vector_bytes // word(tensor(problem.outputs[0]).dtype).itemsize))
        width = next((w for w in _WIDTHS if w <= widest and any(_pair(c.move, w) for c in copies)), 0)
        return Point(slice=SLICE, width=width, tile=4 if width else 0)

    def space(self, problem: Problem, target: Target) -> Space:
        """``width`` is the size of tiles in registers (0: none); ``tile`` is the length of a cache tile in register
        tiles."""
        copies = self.copies(problem)
        widths = [w for w in _WIDTHS if any(_pair(c.move, w) for c in copies)]
        return Space(
            {"slice": SLICES, "width": (0, *widths), "tile": (0, 1, 2, 4, 8)},
            lambda config: (config["width"] == 0) == (config["tile"] == 0),
        )

    def calls(self, problem: Problem, config: Config, target: Target) -> list[EmittedLaunch]:
        calls = []
        for copy in self.copies(problem):
            if not copy.move.size:
                continue
            pair = _pair(copy.move, config["width"]) if config["width"] else None
            if pair is None:
                calls.append(_rows(copy, config, target, self.specialise))
            else:
                calls.append(_tiles(copy, pair, config, target, self.specialise))
        return calls


def slices(nbytes: int, target: Target, slice: int = SLICE) -> int:
    """The number of work-items among which a move of ``nbytes`` is divided."""
    return greater(1, lesser(-(-nbytes // slice), 4 * target.units))


def _pair(move: StridedMove, width: int) -> tuple[StridedAxis, StridedAxis] | None:
    """The axes along which target and source are contiguous, if these differ and are long enough for tiles; else None.

    The choice uses the sizes at hand: the kernel moves axes that are shorter than a tile word by word.
    """
    p = next((a for a in move.axes if a.target == 1), None)
    q = next((a for a in move.axes if a.source == 1), None)
    is_long = p and q and p is not q and hint(p.size) >= width and hint(q.size) >= width
    return (p, q) if p and q and is_long else None


def _inner(move: StridedMove) -> StridedAxis:
    """The axis of the inner loop: one that is contiguous on both sides, else a long one contiguous on one side."""
    last = move.axes[-1] if move.axes else StridedAxis(1, 1, 1)
    longest = max((a for a in move.axes if 1 in (a.source, a.target)), key=lambda a: foreseen(a.size), default=last)
    contiguous, size = last.target == 1 and last.source in (0, 1), foreseen(last.size)
    return last if contiguous and (size >= 8 or size >= foreseen(longest.size)) else longest


def _outer(source: Source, axes: Sequence[StridedAxis]) -> int:
    """Declares the outer axes, with axes of size 1 so that most moves share a text; returns their number."""
    rank = next(r for r in (3, 7, 15, 31) if r >= len(axes))
    whole = [StridedAxis(1, 0, 0)] * (rank - len(axes)) + list(axes)
    for k, axis in enumerate(whole):
        source.dims(**{f"D{k}": axis.size, f"X{k}": axis.source, f"Y{k}": axis.target})
    return rank


def decode(rank: int, index: str) -> str:
    """Statements that split a flat index into i0, i1, ... (the last is the fastest)."""
    lines = [f"int rest = {index};"]
    for k in reversed(range(1, rank)):
        lines.append(f"int i{k} = rest % D{k}; rest /= D{k};")
    return "\n".join([*lines, "int i0 = rest;"])


def advance(rank: int) -> str:
    """The statement that advances i0, i1, ... to the next index."""
    step = "i0++;"
    for k in range(1, rank):
        step = f"if (++i{k} == D{k}) {{ i{k} = 0; {step} }}"
    return step


def _at(rank: int, side: str) -> str:
    return " + ".join(f"i{k} * {side}{k}" for k in range(rank))


def _begin(name: str, copy: MoveLaunch, specialise: bool) -> Source:
    source = Source(name, specialise)
    source.buffer("x", copy.dtype, copy.source)
    source.buffer("y", copy.dtype, copy.target)
    source.dims(XO=copy.move.source, YO=copy.move.target)
    return source


def _rows(copy: MoveLaunch, config: Config, target: Target, specialise: bool) -> EmittedLaunch:
    source, c = _begin("move_rows", copy, specialise), STORAGE[copy.dtype]
    inner = _inner(copy.move)
    outer = [axis for axis in copy.move.axes if axis is not inner]
    rank = _outer(source, outer)
    rows = math.prod(a.size for a in outer)
    items = slices(copy.move.size * copy.dtype.itemsize, target, config["slice"])
    per_item = -(-rows // items)
    parts = greater(1, items // rows)
    part = -(-inner.size // parts)
    source.dims(COUNT=rows, ROWS=per_item, N=inner.size, PART=part, SX=inner.source, SY=inner.target)
    source.function(_COPY_STRIDED.replace("WORD", c))
    source.add("int first = GID(0) * ROWS, last = first + ROWS < COUNT ? first + ROWS : COUNT;")
    source.add("int begin = GID(1) * PART, n = begin + PART < N ? PART : N - begin;")
    source.add(decode(rank, "first"))
    source.add("for (int row = first; row < last; row++) {")
    source.add(f"GLOBAL const {c}* s = x + XO + {_at(rank, 'X')} + begin * SX;")
    source.add(f"GLOBAL {c}* d = y + YO + {_at(rank, 'Y')} + begin * SY;")
    source.add("copy_strided(s, SX, d, SY, n);")
    source.add(advance(rank) + "}")
    return source.call([-(-rows // per_item), -(-inner.size // part)])


#: copies n adjacent words
COPY_ROW = """
INLINE void copy_row(GLOBAL const WORD* restrict s, GLOBAL WORD* restrict d, int n) {
  for (int i = 0; i < n; i++) d[i] = s[i];
}
"""

#: Copies n words from one stride to another. The cases that the compiler vectorises have separate loops.
_COPY_STRIDED = """
INLINE void copy_strided(GLOBAL const WORD* restrict s, int from, GLOBAL WORD* restrict d, int to, int n) {
#define LOOP(source) for (int i = 0; i < n; i++) d[i] = source
  WORD value = n > 0 ? s[0] : 0;
  switch (to == 1 ? from : -1) {
    case 0: LOOP(value); break;
    case 1: LOOP(s[i]); break;
    case 2: LOOP(s[2 * i]); break;
    case 3: LOOP(s[3 * i]); break;
    case 4: LOOP(s[4 * i]); break;
    default: for (int i = 0; i < n; i++) d[i * to] = s[i * from];
  }
}
"""


def _tiles(
    copy: MoveLaunch, pair: tuple[StridedAxis, StridedAxis], config: Config, target: Target, specialise: bool
) -> EmittedLaunch:
    source, c = _begin("move_tiles", copy, specialise), STORAGE[copy.dtype]
    p, q = pair
    rank = _outer(source, [a for a in copy.move.axes if a is not p and a is not q])
    width, long = config["width"], config["width"] * config["tile"]
    across, along = -(-p.size // long), -(-q.size // long)
    count = across * along * math.prod(a.size for a in copy.move.axes if a is not p and a is not q)
    per_item = -(-count // slices(copy.move.size * copy.dtype.itemsize, target, config["slice"]))
    source.dims(P=p.size, Q=q.size, XP=p.source, YQ=q.target, ACROSS=across, ALONG=along, COUNT=count, TILES=per_item)
    source.fixed(W=width, LONG=long)
    source.function(transposer(copy.dtype, width))
    source.add("int first = GID(0) * TILES, last = first + TILES < COUNT ? first + TILES : COUNT;")
    source.add("for (int tile = first; tile < last; tile++) {")
    source.add("int q0 = tile % ALONG * LONG, p0 = tile / ALONG % ACROSS * LONG;")
    source.add("int p1 = p0 + LONG < P ? p0 + LONG : P, q1 = q0 + LONG < Q ? q0 + LONG : Q;")
    source.add(decode(rank, "tile / ALONG / ACROSS"))
    source.add(f"GLOBAL const {c}* s = x + XO + {_at(rank, 'X')};")
    source.add(f"GLOBAL {c}* d = y + YO + {_at(rank, 'Y')};")
    if not specialise:
        source.add("if (P < W || Q < W) {")
        source.add("for (int j = q0; j < q1; j++) for (int i = p0; i < p1; i++) d[i + j * YQ] = s[i * XP + j];")
        source.add("continue;\n}")
    # A partial last tile is moved back over words that are already copied: the same words are written twice.
    source.add("for (int i = p0; i < p1; i += W) for (int j = q0; j < q1; j += W) {")
    source.add("int p = i < P - W ? i : P - W, q = j < Q - W ? j : Q - W;")
    source.add("transpose_tile(s + p * XP + q, XP, W, d + p + q * YQ, YQ, W);")
    source.add("}\n}")
    return source.call([-(-count // per_item)])
