"""Memory of OpenCL devices that do not share the host's: coarse-grained SVM, filled and read by copies.

Kernels take its pointers like those of host memory, even into the middle of an allocation. The host never touches it.
It holds `DeviceArray`s, which are not numpy arrays, so that a mistake raises an error instead of crashing.
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
        #: its bytes, or others if it has none: gives the address and keeps the allocation
        self.memory = memory
        self.shape, self.dtype = shape, dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, offset: int, type: TensorType) -> DeviceArray:
        """Return a tensor inside this memory."""
        memory = self.memory[offset : offset + type.nbytes] if type.nbytes else self.memory
        return DeviceArray(memory, type.physical, type.dtype.numpy)


class Memory:
    """A context's memory, and the constants copied there for good."""

    def __init__(self, context: Any, device: Any) -> None:
        import pyopencl as cl

        self._cl, self._context, self._queue = cl, context, cl.CommandQueue(context, device)
        self._constants = ConstantCopies(self._copy)

    def alloc(self, nbytes: int) -> DeviceArray:
        """Allocate uninitialised bytes."""
        try:
            memory = self._cl.csvm_empty(self._context, (max(nbytes, 64),), np.uint8, alignment=64)
        except self._cl.Error as error:
            raise MemoryError(f"the device has no {nbytes:,} bytes left") from error
        return DeviceArray(memory[:nbytes] if nbytes else memory, (nbytes,), np.dtype(np.uint8))

    @property
    def constants(self) -> int:
        """Return the number of bytes of constants."""
        return self._constants.nbytes

    def constant(self, array: Array) -> DeviceArray:
        """Return the device copy of an array that nobody writes to. It is made once and lives as long as the array."""
        return self._constants.of(array)

    def _copy(self, array: Array) -> DeviceArray:
        copy = DeviceArray(self.alloc(array.nbytes).memory, array.shape, array.dtype)
        self.write(self._queue, array, copy)
        self._queue.finish()
        return copy

    def write(self, queue: Any, array: Array, to: DeviceArray) -> Array:
        """Enqueue a copy to the device. The caller must keep the returned array alive until the copy is over."""
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
    """Return the same bytes as a writable array: pyopencl asks for one even where it only reads."""
    if array.flags.writeable:
        return array
    there: Any = (ctypes.c_ubyte * array.nbytes).from_address(array.ctypes.data)
    return np.frombuffer(there, np.uint8)
