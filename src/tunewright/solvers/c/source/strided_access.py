"""Where the elements of a tensor lie: `Access` (sizes, strides and an offset), and `StridedMove`, a copy between two of
them.

Every operation that only moves elements (transpose, slice, expand, depth to space, ...) is a `StridedMove`. Its source
and its target are accesses of equal sizes. Strides and offsets count elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Access:
    """Element (i, j, ...) lies at ``offset`` + i * ``strides[0]`` + j * ``strides[1]`` + ..."""

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @staticmethod
    def of(dims: Sequence[int]) -> Access:
        """The access of a whole array, whose last axis is contiguous."""
        return Access(tuple(dims), tuple(math.prod(dims[k + 1 :]) for k in range(len(dims))))

    def permute(self, order: Sequence[int]) -> Access:
        """The access with its axes permuted: axis k of the result is axis ``order[k]`` of this one."""
        return replace(self, dims=tuple(self.dims[k] for k in order), strides=tuple(self.strides[k] for k in order))

    def cut(self, axis: int, start: int, count: int, step: int = 1) -> Access:
        """The access to ``count`` indices of an axis, from ``start`` on, ``step`` apart."""
        start = start if count else 0
        return self._with(axis, [count], [self.strides[axis] * step], start * self.strides[axis])

    def split(self, axis: int, sizes: Sequence[int]) -> Access:
        """The access with an axis split into several, the last of them the fastest."""
        inner = Access.of(sizes).strides
        return self._with(axis, sizes, [s * self.strides[axis] for s in inner])

    def repeat(self, axis: int, times: int) -> Access:
        """The access with a new axis of size ``times`` in front of an axis, along which elements repeat."""
        return self._with(axis, [times, self.dims[axis]], [0, self.strides[axis]])

    def broadcast(self, dims: Sequence[int]) -> Access:
        """The access broadcast to ``dims``, as numpy broadcasts."""
        lead = len(dims) - len(self.dims)
        strides = [0 if d == 1 else s for d, s in zip(self.dims, self.strides, strict=True)]
        return replace(self, dims=tuple(dims), strides=(*(0,) * lead, *strides))

    def _with(self, axis: int, dims: Sequence[int], strides: Sequence[int], further: int = 0) -> Access:
        return Access(
            (*self.dims[:axis], *dims, *self.dims[axis + 1 :]),
            (*self.strides[:axis], *strides, *self.strides[axis + 1 :]),
            self.offset + further,
        )


@dataclass(frozen=True)
class StridedAxis:
    """A loop over ``size`` elements with its strides in source and target."""

    size: int
    source: int
    target: int


@dataclass(frozen=True)
class StridedMove:
    """A copy with as few axes as possible, by falling stride in the target. Without axes there is one element."""

    axes: tuple[StridedAxis, ...]
    source: int
    target: int

    @staticmethod
    def between(source: Access, target: Access, words: int = 1) -> StridedMove:
        """The copy between accesses of equal sizes. An element is ``words`` words, and the move counts words."""
        loops = [
            StridedAxis(d, s * words, t * words)
            for d, s, t in zip(source.dims, source.strides, target.strides, strict=True)
            if d != 1
        ]
        if words > 1:
            loops.append(StridedAxis(words, 1, 1))
        loops.sort(key=lambda a: -a.target)
        merged: list[StridedAxis] = []
        for axis in loops:
            outer = merged[-1] if merged else None
            if outer and outer.source == axis.source * axis.size and outer.target == axis.target * axis.size:
                merged[-1] = StridedAxis(outer.size * axis.size, axis.source, axis.target)
            else:
                merged.append(axis)
        return StridedMove(tuple(merged), source.offset * words, target.offset * words)

    @property
    def size(self) -> int:
        """The number of words that are copied."""
        return math.prod(a.size for a in self.axes)
