"""Tensors that grow from inference to inference: results with room to spare, which the next inference appends to.

A `Buffer` is memory of a result with more rows than are used. What the caller gets is a view of the rows in use, which
cannot be written to; given back as an input it is recognised. The inference that continues the newest view appends in
place; any other one (an older view, a second continuation, a copy) begins a buffer of its own with a copy of the past.
So old views keep what they showed.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..devices.base import aligned


@dataclass(frozen=True)
class Filled:
    """An input with room for all rows, into which a result of the same shape may be written, where it was let go."""

    input: int
    output: int
    #: storage of the result, and the number of the step that writes
    storage: int
    step: int


@dataclass(frozen=True)
class State:
    """An input that is continued by a result of the same plan."""

    input: int
    output: int
    #: slot of the result, its storage, and the number of the step that appends
    slot: int
    storage: int
    step: int
    axis: int
    #: new rows of one inference
    rows: int


class Buffer:
    """Memory of a result that grows, and how many of its rows are in use."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], axis: int, used: int) -> None:
        self.memory = aligned(math.prod(shape) * dtype.itemsize)
        self.array = np.ndarray(shape, dtype, self.memory)
        self.axis, self.used = axis, used

    @property
    def capacity(self) -> int:
        return int(self.array.shape[self.axis])

    def view(self, rows: int) -> np.ndarray[Any, Any]:
        """The first rows, for the caller."""
        found = self.array[(*(slice(None),) * self.axis, slice(0, rows))]
        found.flags.writeable = False
        _KNOWN[id(found)] = found, self
        return found

    def is_newest(self, view: np.ndarray[Any, Any]) -> bool:
        """Nobody appended behind these rows, which are one of `view`: all of them begin where the memory does."""
        return bool(view.shape[self.axis] == self.used)


class _Views:
    """Buffers by the views that callers hold, as long as they hold them."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Any], Buffer]] = {}
        self._lock = threading.Lock()

    def __setitem__(self, at: int, pair: tuple[np.ndarray[Any, Any], Buffer]) -> None:
        view, buffer = pair

        def forget(_: object) -> None:
            self._found.pop(at, None)

        self._found[at] = weakref.ref(view, forget), buffer

    def of(self, array: Any) -> Buffer | None:
        found = self._found.get(id(array))
        return found[1] if found is not None and found[0]() is array else None

    def continued(self, array: Any, rows: int, room: int) -> Buffer | None:
        """The buffer to append ``rows`` rows to in place; from now on they are in use.

        None: there is none, or it has less room.
        """
        buffer = self.of(array)
        if buffer is None:
            return None
        with self._lock:
            if not buffer.is_newest(array) or buffer.used + max(rows, room) > buffer.capacity:
                return None
            buffer.used += rows
            return buffer

    def in_child(self) -> None:
        """Who held the lock in the parent of a fork is not here."""
        self._lock = threading.Lock()


#: arrays that nobody will look at again, by their ids
_LET_GO: weakref.WeakValueDictionary[int, np.ndarray[Any, Any]] = weakref.WeakValueDictionary()


def let_go(array: Any) -> None:
    """Nobody but the next inference that takes this array will look at it: results may be written into it."""
    if type(array) is np.ndarray and array.flags.c_contiguous and array.flags.writeable and not is_view(array):
        _LET_GO[id(array)] = array


def keep(array: Any) -> bool:
    """Take back `let_go`; True where it was let go."""
    return _LET_GO.pop(id(array), None) is array


_KNOWN = _Views()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_KNOWN.in_child)


def is_view(array: Any) -> bool:
    """Whether it is a view of rows of a buffer, which lie apart."""
    return _KNOWN.of(array) is not None


def continued(array: Any, rows: int, room: int) -> Buffer | None:
    """See `_Views.continued`."""
    return _KNOWN.continued(array, rows, room)


def grown(rows: int) -> int:
    """Rows of a new buffer: twice the rows that are needed, so that copies cost one row each on average."""
    return max(64, 1 << (2 * rows - 1).bit_length())
