"""Constant weights as bytes for `dot`: one slab after the other, then the sums of their columns.

The weights are packed slab by slab. Whole intermediate matrices (widened to move unsigned bytes, padded, summed) took
up to seven times the memory of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from tunewright.devices.base import empty_on_lines
from tunewright.solvers.base import Array


def pack_slabs(slabs: Sequence[Array], filled: tuple[int, ...], arrange: Callable[[Array], Array], axis: int) -> Array:
    """Packs slabs: the signed bytes of each, padded with zeros to ``filled`` and arranged, then 32-bit sums of its
    columns.

    The columns lie along ``axis``. Unsigned bytes become signed ones: flipping their highest bits subtracts 128.
    """
    size, columns = math.prod(filled), filled[axis]
    others = tuple(other for other in range(len(filled)) if other != axis)
    made = empty_on_lines((len(slabs) * (size + 4 * columns),), np.dtype(np.int8))
    packed = made[: len(slabs) * size].reshape(len(slabs), size)
    sums = made[len(slabs) * size :].view(np.int32).reshape(len(slabs), columns)
    for slab, to, sum in zip(slabs, packed, sums, strict=True):
        whole = np.zeros(filled, np.int8)
        inside = whole[tuple(map(slice, slab.shape))]
        inside[...] = slab.view(np.int8)
        if slab.dtype == np.uint8:
            inside ^= np.int8(-128)
        arranged = arrange(whole)
        to.reshape(arranged.shape)[...] = arranged
        whole.sum(others, dtype=np.int32, out=sum)
    return made


def pack_columns(matrices: Sequence[Array], slab: int) -> Array:
    """Matrices K N -> slabs of [quads][N of a slab][4 of K], then the sums of each column."""
    depth = matrices[0].shape[0]
    slabs = [matrix[:, left : left + slab] for matrix in matrices for left in range(0, matrix.shape[1], slab)]
    return pack_slabs(slabs, (depth + -depth % 4, slab), lambda w: w.reshape(-1, 4, slab).swapaxes(1, 2), 1)
