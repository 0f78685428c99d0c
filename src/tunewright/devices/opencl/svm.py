"""Memory of OpenCL devices that do not share the host's: coarse-grained SVM, filled and read by copies.

A kernel takes its pointers as it takes those of host memory, also into the middle of an allocation. The host never
touches it: it holds `DeviceArray`s, which are no arrays of numpy, so that a mistake is an error and not a crash.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from tunewright.ir.types import TensorType

from ..constant_copies import ConstantCopies

Array = np.ndarray[Any, Any]


class DeviceArray:
    """A tensor in a device's memory. `Queue.fetch` copies it out, `Queue.put` into it."""

    __slots__ = ("dtype", "memory", "shape")

    def __init__(self, memory: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        #: its bytes (or, when it has none, some others): for their address, and to keep the allocation
        self.memory = memory
        self.shape, self.dtype = shape, dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, offset: int, type: TensorType) -> DeviceArray:
        """A tensor inside it."""
        memory = self.memory[offset : offset + type.nbytes] if type.nbytes else self.memory
        return DeviceArray(memory, type.physical, type.dtype.numpy)


class Memory:
    """A context's memory, and what was copied there for good."""

    def __init__(self, context: Any, device: Any) -> None:
        import pyopencl as cl

        self._cl, self._context, self._queue = cl, context, cl.CommandQueue(context, device)
        self._constants = ConstantCopies(self._copy)

    def alloc(self, nbytes: int) -> DeviceArray:
        """Bytes with any content."""
        try:
            memory = self._cl.csvm_empty(self._context, (max(nbytes, 64),), np.uint8, alignment=64)
        except self._cl.Error as error:
            raise MemoryError(f"the device has no {nbytes:,} bytes left") from error
        return DeviceArray(memory[:nbytes] if nbytes else memory, (nbytes,), np.dtype(np.uint8))

    @property
    def constants(self) -> int:
        """Bytes that were copied there for good."""
        return self._constants.nbytes

    def constant(self, array: Array) -> DeviceArray:
        """The copy of an array that nobody writes to; it is made once and lives as long as the array."""
        return self._constants.of(array)

    def _copy(self, array: Array) -> DeviceArray:
        copy = DeviceArray(self.alloc(array.nbytes).memory, array.shape, array.dtype)
        self.write(self._queue, array, copy)
        self._queue.finish()
        return copy

    def write(self, queue: Any, array: Array, to: DeviceArray) -> Array:
        """Enqueue a copy to the device; the array that is returned must live until it is over."""
        if (array.shape, array.dtype) != (to.shape, to.dtype):
            raise ValueError(f"{array.dtype}{list(array.shape)} is no {to.dtype}{list(to.shape)}")
        array = np.ascontiguousarray(array)
        if array.size:
            self._cl.enqueue_copy(queue, self._cl.SVM(to.memory), writable(array), is_blocking=False)
        return array

    def read(self, queue: Any, array: DeviceArray) -> Array:
        """Enqueue a copy to the host."""
        copy = np.empty(array.shape, array.dtype)
        if copy.size:
            self._cl.enqueue_copy(queue, copy, self._cl.SVM(array.memory), is_blocking=False)
        return copy


def writable(array: Array) -> Array:
    """The same bytes as an array that may be written to: pyopencl asks for one, also where they are only read."""
    if array.flags.writeable:
        return array
    there: Any = (ctypes.c_ubyte * array.nbytes).from_address(array.ctypes.data)
    return np.frombuffer(there, np.uint8)
