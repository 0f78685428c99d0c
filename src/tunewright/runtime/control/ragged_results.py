"""Results whose size a launch finds out: memory for the largest size, and the part of it that was used."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tunewright.devices.control_rows import Counter, Ragged
from tunewright.errors import LimitError
from tunewright.ir.graph import Node
from tunewright.ir.symbolic import Whole

from .interpreter import too_long

#: most bytes of a result whose unused part may always stay
FEW = 4096


class RaggedRoom(NamedTuple):
    """The largest size of a result, for the sizes at hand."""

    #: most iterations; None: the node's first input says how many
    most: int | None
    dims: tuple[int, ...]
    dtype: np.dtype[Any]
    #: number of elements, for a result whose sizes the launch tells
    size: int

    @staticmethod
    def of(one: Ragged, number: Callable[[Whole], int]) -> RaggedRoom:
        """Compute the room for a result. ``number`` returns the value of a size."""
        dims = tuple([number(d) for d in one.type.dims])
        return RaggedRoom(None if one.most is None else number(one.most), dims, one.type.dtype.numpy, math.prod(dims))


def make_room(
    results: Sequence[tuple[int, Ragged, int, Node]], rooms: Mapping[Ragged, RaggedRoom],
    values: MutableMapping[int, Any], iterations: tuple[int, int], max_tensor_bytes: int,
) -> None:  # fmt: skip
    """Allocate memory for rows that a launch makes, for the largest possible number.

    ``results``: the slot, what it will hold, the slot that limits the iterations (-1: the limit is known), the node.
    ``iterations``: how many all loops together may still take, and how many in all. Raises LimitError.
    """
    left, allowed = iterations
    for slot, one, limit, node in results:
        room = rooms[one]
        if one.told is not None:
            values[slot] = np.empty(room.size, room.dtype)
            continue
        most = room.most if limit < 0 else max(0, int(np.asarray(values[limit]).reshape(())))
        assert most is not None
        if one.most is None and most > left:
            raise too_long(node, f"runs {most:,} times", allowed)
        row = one.type.with_shape(room.dims)
        if one.steps is None and 0 < max_tensor_bytes < most * row.nbytes:
            raise LimitError(
                f"a result of {most:,} times {row}", where=f"node {node.name!r} ({node.op})",
                hint=f"the limit is MAX_TENSOR_BYTES = {max_tensor_bytes:,}",
            )  # fmt: skip
        values[slot] = np.empty(_shape(one, room.dims, most), room.dtype)


def used(
    one: Ragged, room: RaggedRoom, array: np.ndarray[Any, Any], counted: Callable[[Counter], int]
) -> np.ndarray[Any, Any]:  # fmt: skip
    """Return the rows that a launch has made. They are a copy if more than half of a large memory is unused."""
    if one.told is None:
        shape = _shape(one, room.dims, counted(one.counter))
    else:
        shape = tuple([d if c is None else counted(c) for d, c in zip(room.dims, one.told, strict=True)])
    found: np.ndarray[Any, Any] = np.ndarray(shape, room.dtype, array)
    return found.copy() if array.nbytes > FEW and 2 * found.size < array.size else found


def _shape(one: Ragged, dims: Sequence[int], count: int) -> tuple[int, ...]:
    if one.steps is None:
        return (count, *dims)
    return tuple([d + step * count for d, step in zip(dims, one.steps, strict=True)])
