"""Tensors that grow from inference to inference: results with spare rows, to which the next inference appends.

A `GrowingBuffer` is the memory of a result, with more rows than are used. The caller gets a read-only view of the rows
in use. The request recognises this view when the caller passes it as an input. An inference that continues the newest
view appends in place. Any other inference (from an older view, a second continuation, a copy) starts a new buffer with
a copy of the past. So old views keep their contents.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np

from tunewright.devices.base import address
from tunewright.ir.symbolic import LEAST
from tunewright.passes.attention.grow_states import MOST_NEW

#: rows that must be free behind the past for new rows to be written there
ROOM = LEAST + MOST_NEW


@dataclass(frozen=True)
class Filled:
    """An input with room for all rows. A result of the same shape may be written into it after `let_go`."""

    input: int
    output: int
    #: storage of the result, and the number of the step that writes
    storage: int
    step: int


@dataclass(frozen=True)
class GrowingState:
    """An input that a result of the same plan continues."""

    input: int
    output: int
    #: slot of the result, its storage, and the number of the step that appends
    slot: int
    storage: int
    step: int
    axis: int
    #: new rows per inference
    rows: int


class GrowingBuffer(np.ndarray[Any, Any]):
    """Memory of a growing result, and how many of its rows are in use.

    The buffer owns its bytes. So numpy makes it the base of the array of all rows, and makes that array the base of all
    views. `buffer_of` recognises views by these bases, and any view keeps the memory alive.
    """

    #: where the rows begin: as an address, and as an offset in the bytes
    begin: int
    offset: int
    axis: int
    capacity: int
    used: int

    @staticmethod
    def rows(shape: tuple[int, ...], dtype: np.dtype[Any], axis: int, used: int) -> np.ndarray[Any, Any]:
        """Make a buffer and return all its rows, read-only."""
        memory = GrowingBuffer((math.prod(shape) * dtype.itemsize + 64,), np.uint8)
        where = address(memory)
        offset = -where % 64
        memory.begin, memory.offset = where + offset, offset
        memory.axis, memory.capacity, memory.used = axis, shape[axis], used
        found = np.ndarray(shape, dtype, memory, offset)
        found.flags.writeable = False
        return found


def buffer_of(array: Any) -> GrowingBuffer | None:
    """Return the buffer whose rows an array shows.

    None: the array is no view of a buffer, or shows only parts of rows.
    """
    every: Any = array.base if type(array) is np.ndarray else None
    buffer = every.base if type(every) is np.ndarray else None
    if type(buffer) is not GrowingBuffer or array.strides != every.strides or array.dtype != every.dtype:
        return None
    shape, whole, axis = array.shape, every.shape, buffer.axis
    return buffer if shape[:axis] == whole[:axis] and shape[axis + 1 :] == whole[axis + 1 :] else None


def is_view(array: Any) -> bool:
    """Whether an array is a view of rows of a buffer; its rows may lie apart."""
    return buffer_of(array) is not None


class Growing:
    """The growing results of a plan in one request: where they are, and how the next results continue them."""

    def __init__(self, states: Sequence[GrowingState]) -> None:
        self.states = states
        #: rows that each inference adds to every result; 0: the results differ in this
        self._rows = states[0].rows if len({one.rows for one in states}) == 1 else 0
        self._before = [(slice(None),) * one.axis for one in states]
        #: for each result: its memory, all its rows, the view that the caller got last, and the number of past rows
        self._buffers: list[GrowingBuffer] = []
        self._whole: list[np.ndarray[Any, Any]] = []
        self._newest: list[np.ndarray[Any, Any]] = []
        self._past: list[int] = []
        #: rows behind each past, including the new ones
        self.spare = 0
        #: for each state: whether the past is copied, and the distance of its outer rows in elements
        self.copied: list[tuple[bool, int]] = []
        #: pasts and results lie where they lay in the last inference, which copied nothing; this one copies nothing
        #: either
        self.stays = False

    def next_spare(self, pasts: Sequence[Any]) -> int | None:
        """What `take` will answer for the results that the caller got last. None: ``pasts`` are others, or are full."""
        spare = self.spare - self._rows
        is_next = self._newest and self._rows and spare >= ROOM and all(map(is_, pasts, self._newest))
        return spare if is_next else None

    def take(self, pasts: Sequence[np.ndarray[Any, Any]]) -> int:
        """Decide for each past whether to continue it in place, and claim its new rows. Returns `spare`."""
        spare = self.next_spare(pasts)
        self._newest = []  # until there are new views
        if spare is None or not self._continue():
            self._begin(pasts)
        return self.spare

    def _continue(self) -> bool:
        """Claim new rows in all buffers. False: another request has appended."""
        rows, buffers = self._rows, self._buffers
        past = [used + rows for used in self._past]
        with _lock:
            if [buffer.used for buffer in buffers] != past:
                return False
            for buffer in buffers:
                buffer.used += rows
        self._past = past
        self.spare -= rows
        self.stays = not any(copies for copies, _ in self.copied)
        if not self.stays:
            self.copied = [
                (False, _apart(every, one.axis)) for every, one in zip(self._whole, self.states, strict=True)
            ]
        return True

    def _begin(self, pasts: Sequence[np.ndarray[Any, Any]]) -> None:
        """Find the buffer of each past. Make a new one where none has room."""
        states, self.stays = self.states, False
        self._buffers, self._whole, self.copied = [], [], []
        found = _continued(pasts, [one.rows for one in states])
        self._past = [past.shape[one.axis] for past, one in zip(pasts, states, strict=True)]
        room = [one.capacity - used for one, used in zip(found, self._past, strict=True) if one is not None]
        rows = max(used + one.rows for used, one in zip(self._past, states, strict=True))
        self.spare = room[0] if room else grown(rows) - rows + MOST_NEW
        for one, past, buffer, used in zip(states, pasts, found, self._past, strict=True):
            every, axis = past.base, one.axis
            copies = buffer is None or buffer.capacity != used + self.spare
            if copies:
                shape = (*past.shape[:axis], used + self.spare, *past.shape[axis + 1 :])
                every = GrowingBuffer.rows(shape, past.dtype, axis, used + one.rows)
            assert isinstance(every, np.ndarray) and isinstance(every.base, GrowingBuffer)
            self._buffers.append(every.base)
            self._whole.append(every)
            self.copied.append((copies, _apart(past, axis)))

    def begins(self) -> dict[int, int]:
        """Addresses of the results, by storage."""
        return {one.storage: buffer.begin for one, buffer in zip(self.states, self._buffers, strict=True)}

    def memory(self, wanted: Collection[int]) -> dict[int, np.ndarray[Any, Any]]:
        """The memory of the results whose storages are wanted."""
        return {
            one.storage: np.ndarray((every.nbytes,), np.uint8, buffer, buffer.offset)
            for one, every, buffer in zip(self.states, self._whole, self._buffers, strict=True)
            if one.storage in wanted
        }

    def views(self) -> list[np.ndarray[Any, Any]]:
        """The results: read-only views of the rows in use."""
        self._newest = [
            every[(*before, slice(used + one.rows))]
            for every, before, one, used in zip(self._whole, self._before, self.states, self._past, strict=True)
        ]
        return self._newest


def _apart(array: np.ndarray[Any, Any], axis: int) -> int:
    """The distance of outer rows, in elements."""
    return array.strides[axis - 1] // array.itemsize if axis else array.size


_lock = threading.Lock()


def _continued(pasts: Sequence[Any], rows: Sequence[int]) -> list[GrowingBuffer | None]:
    """For each array, claim its number of rows in its buffer, to append in place. Returns the buffers.

    None: the array has no buffer, the buffer has too little room, or other rows were appended since.
    """
    found = [buffer_of(past) for past in pasts]
    with _lock:
        for at, (buffer, past, more) in enumerate(zip(found, pasts, rows, strict=True)):
            if buffer is None:
                continue
            # a view that begins behind the first row has fewer rows than are in use
            if past.shape[buffer.axis] != buffer.used or buffer.used + max(more, ROOM) > buffer.capacity:
                found[at] = None
            else:
                buffer.used += more
    return found


def _in_child() -> None:
    """Replace the lock in a forked child: the thread that held it does not exist there."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


#: arrays that their callers will not read again, by id
_LET_GO: weakref.WeakValueDictionary[int, np.ndarray[Any, Any]] = weakref.WeakValueDictionary()


def let_go(array: Any) -> None:
    """Declare that only the next inference that takes this array will read it: results may be written into it."""
    if type(array) is np.ndarray and array.flags.c_contiguous and array.flags.writeable and not is_view(array):
        _LET_GO[id(array)] = array


def keep(array: Any) -> bool:
    """Undo `let_go`. Returns whether the array was let go."""
    return _LET_GO.pop(id(array), None) is array


def grown(rows: int) -> int:
    """Rows of a new buffer: at least twice the rows that are needed, so that copies cost one row each on average."""
    return max(64, 1 << (2 * rows - 1).bit_length())
