"""Turns lifetimes of buffers into offsets in one arena."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

from tunewright.ir.symbolic import Whole, greater

ALIGNMENT = 64
#: bytes of results that share one piece of memory: an allocation takes longer than a small kernel
PIECE = 16 << 10


@dataclass(frozen=True)
class Lifetime:
    """A buffer that is needed from step ``first`` to step ``last``, both included."""

    nbytes: int
    first: int
    last: int


def pack(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Return offsets such that buffers alive at the same time never overlap, and the arena's size.

    Greedy by size, first fit: near the lower bound on real networks, and simple.
    """
    if len(lifetimes) > 2000:  # quadratic; a linear scan over time is nearly as tight on long graphs
        return _scan(lifetimes)
    offsets = [0] * len(lifetimes)
    placed: list[int] = []
    total = 0
    for i in sorted(range(len(lifetimes)), key=lambda k: (-lifetimes[k].nbytes, lifetimes[k].first, k)):
        one = lifetimes[i]
        size = aligned(one.nbytes)
        busy = sorted(
            (offsets[k], offsets[k] + aligned(lifetimes[k].nbytes))
            for k in placed
            if lifetimes[k].first <= one.last and one.first <= lifetimes[k].last
        )
        at = 0
        for begin, end in busy:
            if begin - at >= size:
                break
            at = max(at, end)
        offsets[i] = at
        placed.append(i)
        total = max(total, at + size)
    return offsets, total


class Stack:
    """Which storages lie above which others, for sizes that change.

    The order is the one that `pack` chose for the sizes at hand. Of two storages alive together, the higher one begins
    behind the lower one, whatever their sizes are.
    """

    def __init__(self, lifetimes: Mapping[int, Lifetime], offsets: Mapping[int, int]) -> None:
        order = sorted(lifetimes, key=lambda k: (offsets[k], k))
        self._rows: list[tuple[int, tuple[int, ...]]] = []
        under: dict[int, set[int]] = {}
        for at, one in enumerate(order):
            life = lifetimes[one]
            below = [k for k in order[:at] if lifetimes[k].first <= life.last and life.first <= lifetimes[k].last]
            implied = set().union(*(under[k] for k in below)) if below else set()
            under[one] = {*below}
            self._rows.append((one, tuple(k for k in below if k not in implied)))

    def offsets(
        self, nbytes: Mapping[int, int], nothing: int, made: Callable[[Callable[[int, int], int], int, int], int]
    ) -> tuple[dict[int, int], int]:
        """Compute where each storage begins, and the arena's size, as places of values.

        ``made`` returns the place of a function's result for two other places. ``nbytes`` and ``nothing``, which is 0,
        are places.
        """
        found: dict[int, int] = {}
        ends: dict[int, int] = {}
        total = nothing
        for one, below in self._rows:
            found[one] = reduce(partial(made, max), [ends[k] for k in below], nothing)
            ends[one] = made(operator.add, found[one], nbytes[one])
            total = made(max, total, ends[one])
        return found, total

    def expressions(self, nbytes: Mapping[int, Whole]) -> tuple[dict[int, Whole], Whole]:
        """Compute the same for symbolic sizes: where each storage begins, and the arena's size."""
        found: dict[int, Whole] = {}
        total: Whole = 0
        for one, below in self._rows:
            found[one] = greater(0, *(found[k] + aligned(nbytes[k]) for k in below))
            total = greater(total, found[one] + aligned(nbytes[one]))
        return found, total


def aligned(nbytes: Any) -> Any:
    """Round a number of bytes up to whole cache lines, at least one."""
    lines = -(-nbytes // ALIGNMENT)
    return (max(1, lines) if isinstance(lines, int) else greater(1, lines)) * ALIGNMENT


def _scan(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Place buffers in order of time: best fit among the holes that ended buffers left."""
    offsets = [0] * len(lifetimes)
    holes: list[tuple[int, int]] = []  # (begin, end), sorted, never touching
    alive: list[tuple[int, int, int]] = []  # heap of (last, begin, end)
    top = 0
    for i in sorted(range(len(lifetimes)), key=lambda k: (lifetimes[k].first, -lifetimes[k].nbytes, k)):
        one = lifetimes[i]
        while alive and alive[0][0] < one.first:
            _, begin, end = heapq.heappop(alive)
            holes = _join(holes, begin, end)
        size = aligned(one.nbytes)
        fitting = [h for h in holes if h[1] - h[0] >= size]
        if fitting:
            begin, end = min(fitting, key=lambda h: (h[1] - h[0], h[0]))
            holes.remove((begin, end))
            if end - begin > size:
                holes = _join(holes, begin + size, end)
        else:
            begin, top = top, top + size
        offsets[i] = begin
        heapq.heappush(alive, (one.last, begin, begin + size))
    return offsets, top


def _join(holes: list[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    kept = []
    for b, e in holes:
        if e == begin:
            begin = b
        elif b == end:
            end = e
        else:
            kept.append((b, e))
    kept.append((begin, end))
    return kept


def side_by_side(sizes: Mapping[int, int]) -> tuple[dict[int, int], int]:
    """Return where each storage begins in one piece of memory, and the bytes of that piece.

    Large storages are left out: a caller who keeps one result would keep all of them.
    """
    begins, total = {}, 0
    for storage, nbytes in sizes.items():
        begins[storage] = total
        total += aligned(nbytes)
    return (begins, total + ALIGNMENT) if total <= PIECE else ({}, 0)
