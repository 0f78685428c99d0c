"""Tensors that grow from inference to inference: results with room to spare, which the next inference appends to.

A `GrowingBuffer` is memory of a result with more rows than are used. What the caller gets is a view of the rows in use,
which cannot be written to; given back as an input it is recognised. The inference that continues the newest view
appends in place; any other one (an older view, a second continuation, a copy) begins a buffer of its own with a copy of
the past. So old views keep what they showed.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunewright.devices.base import address, aligned


@dataclass(frozen=True)
class Filled:
    """An input with room for all rows, into which a result of the same shape may be written, where it was let go."""

    input: int
    output: int
    #: storage of the result, and the number of the step that writes
    storage: int
    step: int


@dataclass(frozen=True)
class GrowingState:
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


class GrowingBuffer:
    """Memory of a result that grows, and how many of its rows are in use."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], axis: int, used: int) -> None:
        self.memory = aligned(math.prod(shape) * dtype.itemsize)
        self.begin, self.capacity = address(self.memory), shape[axis]
        self.axis, self.used = axis, used
        self._array = np.ndarray(shape, dtype, self.memory)
        self._array.flags.writeable = False
        self._before = (slice(None),) * axis

    def view(self, rows: int) -> np.ndarray[Any, Any]:
        """The first rows, for the caller, who cannot write to them."""
        found = self._array[(*self._before, slice(rows))]
        _KNOWN.add(found, self)
        return found

    def is_newest(self, view: np.ndarray[Any, Any]) -> bool:
        """Nobody appended behind these rows, which are one of `view`: all of them begin where the memory does."""
        return bool(view.shape[self.axis] == self.used)


class _View(weakref.ref[np.ndarray[Any, Any]]):
    """A view that a caller holds."""

    __slots__ = ("at", "buffer")
    at: int
    buffer: GrowingBuffer


class _Views:
    """Buffers by the views that callers hold, as long as they hold them."""

    def __init__(self) -> None:
        found = self._found = dict[int, _View]()
        self._lock = threading.Lock()

        def forget(view: Any) -> None:
            found.pop(view.at, None)

        self._forget = forget

    def add(self, view: np.ndarray[Any, Any], buffer: GrowingBuffer) -> None:
        made = _View(view, self._forget)
        made.at, made.buffer = id(view), buffer
        self._found[made.at] = made

    def of(self, array: Any) -> GrowingBuffer | None:
        found = self._found.get(id(array))
        return found.buffer if found is not None and found() is array else None

    def continued(self, pasts: Sequence[tuple[Any, int]], room: int) -> list[GrowingBuffer | None]:
        """For each array the buffer to which its number of rows is appended in place. They are in use from now on.

        None: there is none, or it has less room.
        """
        buffers = [self.of(array) for array, _ in pasts]
        with self._lock:
            for at, (array, rows) in enumerate(pasts):
                buffer = buffers[at]
                if buffer is None:
                    continue
                if not buffer.is_newest(array) or buffer.used + max(rows, room) > buffer.capacity:
                    buffers[at] = None
                else:
                    buffer.used += rows
        return buffers

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


#: the buffer that an array is a view of; None: it is none
buffer_of = _KNOWN.of
#: see `_Views.continued`
continued = _KNOWN.continued


def is_view(array: Any) -> bool:
    """Whether it is a view of rows of a buffer, which lie apart."""
    return buffer_of(array) is not None


def grown(rows: int) -> int:
    """Rows of a new buffer: twice the rows that are needed, so that copies cost one row each on average."""
    return max(64, 1 << (2 * rows - 1).bit_length())
