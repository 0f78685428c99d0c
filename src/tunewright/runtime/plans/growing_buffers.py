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
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np

from tunewright.devices.base import address
from tunewright.ir.symbolic import LEAST
from tunewright.passes.attention.grow_states import MOST_NEW

#: rows that must be free behind the past, so that new ones are written there
ROOM = LEAST + MOST_NEW


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


class GrowingBuffer(np.ndarray[Any, Any]):
    """Memory of a result that grows, and how many of its rows are in use.

    It owns its bytes, so that numpy makes it the base of the one array of all rows, and that array the base of all
    views. This is how a view is recognised, and why its memory lives as long as any view.
    """

    #: where the rows begin: in memory, and in its bytes
    begin: int
    offset: int
    axis: int
    capacity: int
    used: int

    @staticmethod
    def rows(shape: tuple[int, ...], dtype: np.dtype[Any], axis: int, used: int) -> np.ndarray[Any, Any]:
        """All rows of a new buffer, read-only."""
        memory = GrowingBuffer((math.prod(shape) * dtype.itemsize + 64,), np.uint8)
        where = address(memory)
        offset = -where % 64
        memory.begin, memory.offset = where + offset, offset
        memory.axis, memory.capacity, memory.used = axis, shape[axis], used
        found = np.ndarray(shape, dtype, memory, offset)
        found.flags.writeable = False
        return found


def buffer_of(array: Any) -> GrowingBuffer | None:
    """The buffer that an array is rows of; None: it is no view of one, or not of all that belongs to some rows."""
    every: Any = array.base if type(array) is np.ndarray else None
    buffer = every.base if type(every) is np.ndarray else None
    if type(buffer) is not GrowingBuffer or array.strides != every.strides or array.dtype != every.dtype:
        return None
    shape, whole, axis = array.shape, every.shape, buffer.axis
    return buffer if shape[:axis] == whole[:axis] and shape[axis + 1 :] == whole[axis + 1 :] else None


def is_view(array: Any) -> bool:
    """Whether it is a view of rows of a buffer, which lie apart."""
    return buffer_of(array) is not None


class Growing:
    """The results of a plan that grow, in one request: where they are, and how the next ones continue them."""

    def __init__(self, states: Sequence[GrowingState]) -> None:
        self.states = states
        #: rows that each inference adds to all of them; 0: to each another number
        self._rows = states[0].rows if len({one.rows for one in states}) == 1 else 0
        self._before = [(slice(None),) * one.axis for one in states]
        #: the memory and all rows of each, those that the caller was given last, and how many rows each past has
        self._buffers: list[GrowingBuffer] = []
        self._whole: list[np.ndarray[Any, Any]] = []
        self._newest: list[np.ndarray[Any, Any]] = []
        self._past: list[int] = []
        #: rows behind each past, the new ones included
        self.spare = 0
        #: of each state: is the past copied, and how far its outer rows are apart
        self.copied: list[tuple[bool, int]] = []
        #: pasts and results lie where those of the inference before did, and nothing was or is copied
        self.stays = False

    def next_spare(self, pasts: Sequence[Any]) -> int | None:
        """What `take` will answer for results that the caller was given last; None: they are others, or are full."""
        spare = self.spare - self._rows
        is_next = self._newest and self._rows and spare >= ROOM and all(map(is_, pasts, self._newest))
        return spare if is_next else None

    def take(self, pasts: Sequence[np.ndarray[Any, Any]]) -> int:
        """Decide for each past whether it is continued in place, which is then done. Answers `spare`."""
        spare = self.next_spare(pasts)
        self._newest = []  # until there are others
        if spare is None or not self._continue():
            self._begin(pasts)
        return self.spare

    def _continue(self) -> bool:
        """Append to all buffers, unless another request did."""
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
        """Find the buffer of each past, and make one where there is none that has room."""
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
        """Where the results are, by storage."""
        return {one.storage: buffer.begin for one, buffer in zip(self.states, self._buffers, strict=True)}

    def memory(self, wanted: Collection[int]) -> dict[int, np.ndarray[Any, Any]]:
        """The memory of those results whose storages are wanted."""
        return {
            one.storage: np.ndarray((every.nbytes,), np.uint8, buffer, buffer.offset)
            for one, every, buffer in zip(self.states, self._whole, self._buffers, strict=True)
            if one.storage in wanted
        }

    def views(self) -> list[np.ndarray[Any, Any]]:
        """The results: rows in use, which the caller cannot write to."""
        self._newest = [
            every[(*before, slice(used + one.rows))]
            for every, before, one, used in zip(self._whole, self._before, self.states, self._past, strict=True)
        ]
        return self._newest


def _apart(array: np.ndarray[Any, Any], axis: int) -> int:
    """How many elements outer rows are apart."""
    return array.strides[axis - 1] // array.itemsize if axis else array.size


_lock = threading.Lock()


def _continued(pasts: Sequence[Any], rows: Sequence[int]) -> list[GrowingBuffer | None]:
    """For each array the buffer to which its number of rows is appended in place. They are in use from now on.

    None: there is none, or it has less room, or others were appended to it since.
    """
    found = [buffer_of(past) for past in pasts]
    with _lock:
        for at, (buffer, past, more) in enumerate(zip(found, pasts, rows, strict=True)):
            if buffer is None:
                continue
            # rows that begin behind the first one are fewer than those in use
            if past.shape[buffer.axis] != buffer.used or buffer.used + max(more, ROOM) > buffer.capacity:
                found[at] = None
            else:
                buffer.used += more
    return found


def _in_child() -> None:
    """Who held the lock in the parent of a fork is not here."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


#: arrays that nobody will look at again, by their ids
_LET_GO: weakref.WeakValueDictionary[int, np.ndarray[Any, Any]] = weakref.WeakValueDictionary()


def let_go(array: Any) -> None:
    """Nobody but the next inference that takes this array will look at it: results may be written into it."""
    if type(array) is np.ndarray and array.flags.c_contiguous and array.flags.writeable and not is_view(array):
        _LET_GO[id(array)] = array


def keep(array: Any) -> bool:
    """Take back `let_go`; True where it was let go."""
    return _LET_GO.pop(id(array), None) is array


def grown(rows: int) -> int:
    """Rows of a new buffer: twice the rows that are needed, so that copies cost one row each on average."""
    return max(64, 1 << (2 * rows - 1).bit_length())
