"""Tables of kernel steps, as the pool reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import DeviceError
from .pool import HEAD
from .pool import ROW as ROW

#: kernels count work-items in 32 bits
MOST_ITEMS = 2**31 - 1


def table(
    steps: Sequence[tuple[int, Sequence[int], int]], participants: int
) -> tuple[np.ndarray[Any, Any], list[int]]:
    """A table of steps (entry point, grid, number of arguments), and where each one's arguments begin."""
    begins = [HEAD + len(steps)]
    for _, _, arguments in steps:
        begins.append(begins[-1] + ROW + arguments)
    made = np.zeros(begins.pop(), np.uint64)
    made[:HEAD] = len(steps), participants
    for at, ((entry, grid, _), begin) in enumerate(zip(steps, begins, strict=True)):
        x, y, _ = (*grid, 1, 1)[:3]
        items = math.prod(grid)
        if items > MOST_ITEMS:
            raise DeviceError(f"a kernel over {items:,} work-items: there are {MOST_ITEMS:,} at most")
        made[HEAD + at] = begin
        made[begin : begin + ROW] = entry, x, y, items, 0
    return made, [begin + ROW for begin in begins]


def number(value: np.generic) -> int:
    """A number as it stands in a table."""
    if isinstance(value, np.floating):
        return int(np.float32(value).view(np.uint32))
    return int(value) & 0xFFFFFFFFFFFFFFFF
