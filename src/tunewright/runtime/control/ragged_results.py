"""Results that become as long as a loop is: room for as many iterations as there may be, and what of it was used."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from tunewright.devices.control_rows import Counter, Ragged
from tunewright.errors import LimitError
from tunewright.ir.graph import Node

from .interpreter import too_long


def make_room(
    results: Sequence[tuple[int, Ragged, int, Node]], rooms: Mapping[Ragged, tuple[Any, tuple[int, ...]]],
    values: MutableMapping[int, Any], iterations: tuple[int, int], max_tensor_bytes: int,
) -> None:  # fmt: skip
    """Memory for what a launch makes rows of, as many as there may be.

    ``results``: the slot, what it will be, the slot that says how many iterations there may be (-1: it is known), the
    node. ``rooms``: that number where it is known, and dimensions for the sizes at hand. ``iterations``: how many all
    loops together may take from here on, and in all.
    """
    left, allowed = iterations
    for slot, one, limit, node in results:
        known, dims = rooms[one]
        most = known if limit < 0 else max(0, int(np.asarray(values[limit]).reshape(())))
        assert most is not None
        if one.most is None and most > left:
            raise too_long(node, f"runs {most:,} times", allowed)
        row = one.type.with_shape(dims)
        if one.steps is None and one.told is None and 0 < max_tensor_bytes < most * row.nbytes:
            raise LimitError(
                f"a result of {most:,} times {row}", where=f"node {node.name!r} ({node.op})",
                hint=f"the limit is MAX_TENSOR_BYTES = {max_tensor_bytes:,}",
            )  # fmt: skip
        values[slot] = np.empty(_shape(one, dims, most), one.type.dtype.numpy)


def used(
    one: Ragged, dims: Sequence[int], room: np.ndarray[Any, Any], counted: Callable[[Counter], int]
) -> np.ndarray[Any, Any]:
    """The rows that a launch has made; a copy if most of the memory is left over."""
    if one.told is None:
        shape = _shape(one, dims, counted(one.counter))
    else:
        shape = tuple([d if c is None else counted(c) for d, c in zip(dims, one.told, strict=True)])
    found = room.reshape(-1)[: math.prod(shape)].reshape(shape)
    return found.copy() if 2 * found.size < room.size else found


def _shape(one: Ragged, dims: Sequence[int], count: int) -> tuple[int, ...]:
    if one.told is not None:
        return (*dims,)
    if one.steps is None:
        return (count, *dims)
    return tuple([d + step * count for d, step in zip(dims, one.steps, strict=True)])
