"""Helpers of kernels over rows: a tensor as rows of elements that are folded together, and the tiles that cover it.

A program has a tile of ``rows`` x ``block`` elements. Where kept axes are innermost, neighbouring rows are neighbours
in memory (*columns*). Otherwise the elements of a row are. Triton knows all strides and chooses which of the two the
threads follow. A row that fits the block is read once. A longer row is read in a loop. Few long rows are divided into
``split`` parts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tunewright.devices.base import Target
from tunewright.devices.cuda.device import CudaQueue
from tunewright.ir.symbolic import SymInt, greater, hint
from tunewright.ir.types import DType, TensorType
from tunewright.search.space import Space
from tunewright.solvers.base import Config, Problem

from .text import HEAD, computed, offset, physical_order, strides

#: (size, stride) of some axes, in memory order
Axes = Sequence[tuple[int, int]]

FLOATS = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64})
#: most elements of a tile; most elements of a row that the default reads once
MOST, ONCE = 16384, 8192
#: most elements of a tensor, because positions are 32-bit numbers
MOST_ELEMENTS = 2_000_000_000
#: elements of a row that justify a program of their own
WORTH_A_PART = 2048
#: With this many tiles per multiprocessor there is enough work. Programs then have fewer threads, which wait less for
#: each other.
PLENTY = 8
BLOCKS = [1 << i for i in range(15)]


def power(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()


def real_text(number: int) -> str:
    """A whole number as one with a fraction; ``number`` may be a size of a class of shapes."""
    return f"({number} * 1.0)" if isinstance(number, SymInt) else str(float(number))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def filling(size: int, units: int) -> int:
    """Number of elements of a program, reduced where there are too few programs for every multiprocessor."""
    block = 1024
    while block > 128 and cdiv(size, block) < 4 * max(units, 1):
        block //= 2
    return block


def tensor(type: object) -> TensorType:
    assert isinstance(type, TensorType), type
    return type


@dataclass(frozen=True)
class RowView:
    """A static tensor and its folded logical axes. ``groups`` divides the channels into groups, which are kept."""

    x: TensorType
    folded: frozenset[int]
    groups: int = 0

    @cached_property
    def _gone(self) -> list[bool]:
        """Whether each axis is folded, in memory order."""
        found = []
        for axis in physical_order(self.x, len(self.x.dims)):
            if self.groups and axis == 1:
                found.append(False)
            found.append(axis in self.folded)
        return found

    def spread(self, type: TensorType) -> list[tuple[int, int]]:
        """Sizes of the tensor's axes in memory order, with the strides of an operand that broadcasts to the tensor."""
        found = []
        for axis, (size, stride) in zip(physical_order(self.x, len(self.x.dims)), strides(type, self.x), strict=True):
            if self.groups and axis == 1:
                found.append((self.groups, stride * (size // self.groups)))
                size //= self.groups
            found.append((size, stride))
        return found

    @cached_property
    def _last(self) -> int:
        """Number of axes up to the last folded axis with more than one element. The axes behind it are columns."""
        sizes = [size for size, _ in self.spread(self.x)]
        return max((i + 1 for i, gone in enumerate(self._gone) if gone and sizes[i] > 1), default=len(sizes))

    def folded_axes(self, type: TensorType) -> Axes:
        return [a for a, gone in zip(self.spread(type), self._gone, strict=True) if gone]

    def outer_axes(self, type: TensorType) -> Axes:
        found = zip(self.spread(type)[: self._last], self._gone, strict=False)
        return [a for a, gone in found if not gone]

    def column_axes(self, type: TensorType) -> Axes:
        found = zip(self.spread(type)[self._last :], self._gone[self._last :], strict=True)
        return [a for a, gone in found if not gone]

    @cached_property
    def count(self) -> int:
        """Number of elements of a row."""
        return math.prod(size for size, _ in self.folded_axes(self.x))

    @cached_property
    def outer(self) -> int:
        return math.prod(size for size, _ in self.outer_axes(self.x))

    @cached_property
    def columns(self) -> int:
        """Number of adjacent rows; 1 where the elements of a row are adjacent instead."""
        return math.prod(size for size, _ in self.column_axes(self.x))

    @property
    def rows(self) -> int:
        return self.outer * self.columns

    @property
    def extent(self) -> int:
        """Number of rows from which a tile takes neighbours."""
        return self.columns if self.columns > 1 else self.outer

    def tiles(self, rows: int) -> int:
        """Number of tiles over all rows."""
        return self.rows // greater(self.extent, 1) * cdiv(self.extent, rows)


class Tile:
    """Writes the parts of a kernel that locate the elements of a view, for one config."""

    def __init__(self, view: RowView, config: Mapping[str, Any]) -> None:
        self.view = view
        self.rows, self.block, self.split = (int(config[k]) for k in ("rows", "block", "split"))
        #: whether a row is read once
        self.whole = self.block >= view.count and self.split == 1
        #: elements of a part
        self.each = cdiv(cdiv(view.count, self.block), self.split) * self.block

    @property
    def grid(self) -> tuple[int, ...]:
        tiles = self.view.tiles(self.rows)
        return (tiles, self.split) if self.split > 1 else (tiles,)

    def head(self) -> list[str]:
        """Statements for ``row`` (the numbers of the rows), ``inside`` and ``start``, and the elements of rows that are
        read once."""
        view = self.view
        lines = ["tile = tl.program_id(0)"]
        if view.columns > 1:
            across = cdiv(view.columns, self.rows)
            lines += [
                f"outer = tile // {across}", f"column = tile % {across} * {self.rows} + tl.arange(0, {self.rows})",
                f"row = outer * {view.columns} + column", f"inside = column < {view.columns}",
            ]  # fmt: skip
        else:
            lines += [f"row = tile * {self.rows} + tl.arange(0, {self.rows})", f"inside = row < {view.rows}"]
        if self.split > 1:
            lines += ["part = tl.program_id(1)", f"begin = part * {self.each}",
                      f"end = tl.minimum(begin + {self.each}, {view.count})"]  # fmt: skip
        lines.append(f"start = {self.kept(view.x)}")
        if self.whole:
            lines += self._elements(f"tl.arange(0, {self.block})")
        return lines

    def _elements(self, r: str) -> list[str]:
        """Statements for ``r``, the elements' numbers in their rows; ``live``, whether they exist; ``at``, their
        positions; ``ok``."""
        return [
            f"r = {r}", f"live = (r < {'end' if self.split > 1 else self.view.count})[None, :]",
            "ok = inside[:, None] & live", f"at = start[:, None] + ({self.along(self.view.x)})[None, :]",
        ]  # fmt: skip

    def kept(self, type: TensorType) -> str:
        """The start of a broadcast operand for each ``row``, as an expression."""
        if self.view.columns > 1:
            outer = offset(self.view.outer_axes(type), "outer")
            return f"{outer} + {offset(self.view.column_axes(type), 'column')}"
        return offset(self.view.outer_axes(type), "row")

    def along(self, type: TensorType) -> str:
        """The offset of a broadcast operand's elements from its start for each ``r``, as an expression."""
        return offset(self.view.folded_axes(type), "r")

    def sweep(self, *body: str) -> list[str]:
        """Statements for all elements of a row or part: once, or in a loop."""
        if self.whole:
            return list(body)
        first = "first" if self.split == 1 else "begin + first"
        length = self.view.count if self.split == 1 else self.each  # the last parts may have fewer elements, or none
        inner = [*self._elements(f"{first} + tl.arange(0, {self.block})"), *body]
        return [f"for first in range(0, {length}, {self.block}):", *indented(inner)]

    def operand(self, name: str, pointer: str, type: TensorType, other: str = "0.0") -> str:
        """The load of a broadcast operand, in as few dimensions as it varies along."""
        real = computed(type.dtype)
        view = self.view
        varies_down = any(s and n > 1 for n, s in [*view.outer_axes(type), *view.column_axes(type)])
        varies_along = any(s and n > 1 for n, s in view.folded_axes(type))
        if varies_down and varies_along:
            place = f"({self.kept(type)})[:, None] + ({self.along(type)})[None, :]"
            return f"{name} = tl.load({pointer} + ({place}), mask=ok, other={other}).to({real})"
        if varies_down:
            return f"{name} = tl.load({pointer} + ({self.kept(type)}), mask=inside, other={other}).to({real})[:, None]"
        if varies_along:
            mask = f"r < {view.count}"
            return f"{name} = tl.load({pointer} + ({self.along(type)}), mask={mask}, other={other}).to({real})[None, :]"
        return f"{name} = tl.load({pointer}).to({real})"

    @property
    def last(self) -> str:
        """Positions along the last axis, for `text.chain`; empty unless a row is exactly that axis."""
        axes = [a for a in self.view.folded_axes(self.view.x) if a[0] > 1]
        plain = self.view.columns == 1 and len(axes) == 1 and axes[0][0] == self.view.spread(self.view.x)[-1][0]
        return "(r[None, :] + row[:, None] * 0)" if plain else ""


def indented(lines: Sequence[str]) -> list[str]:
    return ["    " + line for line in lines]


def kernel(pointers: Sequence[str], lines: Sequence[str], functions: str = "") -> str:
    """The text of a kernel with these arguments and statements. ``functions`` are placed in front of it."""
    body = "\n".join(indented(lines))
    return f"{HEAD}{functions}@triton.jit\ndef kernel({', '.join(pointers)}):\n{body}\n"


def space(view: RowView, target: Target) -> Space:
    """Tiles that waste less than half of their lanes, with up to 64 elements per thread."""
    units = max(target.units, 1)
    most_rows, most_block = min(256, power(view.extent)), min(MOST, power(view.count))

    def useful(config: Mapping[str, Any]) -> bool:
        rows, block, warps, split = (int(config[k]) for k in ("rows", "block", "warps", "split"))
        tile = rows * block
        if rows > most_rows or block > most_block or tile > MOST or tile > 64 * 32 * warps:
            return False
        if warps > 1 and tile < 32 * warps:
            return False
        if block < min(most_block, 64) and tile < min(1024, most_rows * most_block):
            return False  # loops of many short iterations are slow
        # splitting only serves few rows
        return split == 1 or (rows <= 64 and split * block <= view.count and view.tiles(rows) * split <= 8 * units)

    return Space(
        {
            "rows": [1, 2, 4, 8, 16, 32, 64, 128, 256], "block": BLOCKS, "warps": [1, 2, 4, 8, 16],
            "split": [1, 2, 4, 8, 16, 32, 64],
        },
        useful, version="1",
    )  # fmt: skip


def default(view: RowView, target: Target) -> Config:
    """The default tile: rows are read once unless too long; programs occupy all multiprocessors if possible."""
    units = max(target.units, 1)
    whole, extent = power(view.count), power(view.extent)
    if view.columns > 1:  # a memory sector is 32 bytes, so fewer columns would waste part of it
        rows = min(extent, 64)
        while rows > 16 and view.tiles(rows) < 2 * units:
            rows //= 2
        block = min(whole, max(1, (1024 if view.tiles(rows) >= PLENTY * units else 4096) // rows))
    else:
        few = view.count > 2 * WORTH_A_PART and 2 * view.rows <= units
        rows, block = 1, min(whole, WORTH_A_PART if few else ONCE)
        while rows * block < 1024 and rows < min(extent, 256) and view.tiles(2 * rows) >= 2 * units:
            rows *= 2
        if block >= 1024:
            while rows < 4 and rows * block < MOST and view.tiles(2 * rows) >= PLENTY * units:
                rows *= 2
        if block < 64:  # the elements of several short rows fill a warp
            rows = max(rows, min(extent, 64 // block))
    split, tiles = 1, view.tiles(rows)
    least = max(block, WORTH_A_PART // rows)
    while split < 64 and 2 * split * least <= view.count and 2 * tiles * split <= units:
        split *= 2
    each = 1024 if view.tiles(rows) >= PLENTY * units and (view.columns > 1 or block >= 1024) else 256
    warps = min(16, max(1, rows * block // each))
    return {"rows": rows, "block": block, "warps": warps, "split": split}


def scratch(queue: CudaQueue, count: int, real: str) -> Any:
    """``count`` numbers in the queue's scratch memory. ``real`` is "tl.float32", ..."""
    import torch

    dtype, count = getattr(torch, real.removeprefix("tl.")), hint(count)
    return queue.scratch(count * dtype.itemsize)[: count * dtype.itemsize].view(dtype)


def why_not_size(problem: Problem) -> str | None:
    """The reason why a tensor is too large for 32-bit positions, else None."""
    types = [t for t in (*problem.inputs, *problem.outputs) if isinstance(t, TensorType)]
    large = next((t for t in types if t.size > MOST_ELEMENTS), None)
    return None if large is None else f"{large} has more than {MOST_ELEMENTS:,} elements"
