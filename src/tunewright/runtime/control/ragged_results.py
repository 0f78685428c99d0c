"""Results that become as long as a loop is: room for as many iterations as there may be, and what of it was used."""

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

#: bytes that may be left over
FEW = 4096


class RaggedRoom(NamedTuple):
    """How large a result may become, for the sizes at hand."""

    #: iterations that there may be; None: what the node's first input says
    most: int | None
    dims: tuple[int, ...]
    dtype: np.dtype[Any]
    #: elements of a result whose sizes the launch tells
    size: int

    @staticmethod
    def of(one: Ragged, number: Callable[[Whole], int]) -> RaggedRoom:
        """The room for a result, where ``number`` says what sizes are."""
        dims = tuple([number(d) for d in one.type.dims])
        return RaggedRoom(None if one.most is None else number(one.most), dims, one.type.dtype.numpy, math.prod(dims))


def make_room(
    results: Sequence[tuple[int, Ragged, int, Node]], rooms: Mapping[Ragged, RaggedRoom],
    values: MutableMapping[int, Any], iterations: tuple[int, int], max_tensor_bytes: int,
) -> None:  # fmt: skip
    """Memory for what a launch makes rows of, as many as there may be.

    ``results``: the slot, what it will be, the slot that says how many iterations there may be (-1: it is known), the
    node. ``iterations``: how many all loops together may take from here on, and in all.
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
    """The rows that a launch has made; a copy if most of the memory is left over."""
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
