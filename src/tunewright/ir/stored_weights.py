"""Weights that can be released from memory and read again from their file.

A graph with open shapes is planned anew for each set of shapes, from the weights as the model's file stores them. Plans
run with packed weights. Between two planning runs the unpacked weights need not be in memory.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ModelError
from .weight_memory import Pages, lasting

Array = np.ndarray[Any, Any]


class StoredFile:
    """An open file whose bytes can be read again as long as nobody changes them, even after the file is unlinked."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self.descriptor)
        self._was = self._looks()

    def _looks(self) -> tuple[int, int]:
        status = os.fstat(self.descriptor)
        return status.st_size, status.st_mtime_ns

    def is_changed(self) -> bool:
        return self._looks() != self._was


class StoredBytes:
    """A range of bytes of a file."""

    def __init__(self, file: StoredFile, offset: int, length: int) -> None:
        self.file, self.offset, self.length = file, offset, length
        #: the pages with the bytes, while some array uses them
        self._pages: weakref.ref[Pages] | None = None
        self._lock = threading.Lock()

    def in_memory(self, memory: Array) -> Array:
        """Record that ``memory`` holds the bytes. Arrays made from it know their origin if it has pages of its own."""
        pages = _pages(memory)
        if pages is not None:
            pages.origin, self._pages = self, weakref.ref(pages)
        return memory

    def bytes(self) -> Array:
        """Return the bytes from memory if they are there, else from the file. A changed file raises ModelError."""
        with self._lock:
            pages = None if self._pages is None else self._pages()
            return self.in_memory(self._read()) if pages is None else np.frombuffer(pages, np.uint8, self.length)

    def _read(self) -> Array:
        memory = lasting(self.length)
        try:
            if self.file.is_changed():
                raise OSError("it has changed since")
            read_into(self.file.descriptor, memory, self.offset)
        except OSError as error:
            raise ModelError(
                f"weights for another shape cannot be read from the model's file again: {error}",
                hint="load the model again, or keep the result of read_model: it keeps the weights in memory",
            ) from None
        return memory


@dataclass(frozen=True)
class Stored:
    """Describes an array in the bytes of a file, without its memory. Equal descriptions mean equal elements."""

    origin: StoredBytes
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    def array(self) -> Array:
        """Return the array. All readers get the same object as long as one of them holds it."""
        made = _LIVING.get(self)
        if made is None:
            made = np.ndarray(self.shape, self.dtype, self.origin.bytes(), self.offset, self.strides)
            made.flags.writeable = False
            _LIVING[self] = made
        return made


_LIVING: weakref.WeakValueDictionary[Stored, Array] = weakref.WeakValueDictionary()


def stored(array: Array) -> Stored | None:
    """Describe where an array comes from. None unless its elements can be read again from a file."""
    pages = _pages(array)
    if pages is None or not isinstance(pages.origin, StoredBytes):
        return None
    offset = array.__array_interface__["data"][0] - np.frombuffer(pages, np.uint8).__array_interface__["data"][0]
    found = Stored(pages.origin, offset, array.shape, array.strides, array.dtype)
    _LIVING.setdefault(found, array)
    return found


def _pages(array: Array) -> Pages | None:
    """Return the pages that an array is a view of, or None."""
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    under = root.base.obj if isinstance(root.base, memoryview) else None
    return under if isinstance(under, Pages) else None


def read_into(descriptor: int, memory: Array, offset: int) -> None:
    """Fill ``memory`` with the bytes of a file from ``offset`` on. Raises OSError if the file has fewer."""
    while len(memory):
        count = os.preadv(descriptor, [memory.data], offset)
        if not count:
            raise OSError("the file has become shorter")
        memory, offset = memory[count:], offset + count
