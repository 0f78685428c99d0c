"""Buffers and SVM of pyopencl that a caller lends, as arguments of kernels. Nothing is copied to the host."""

from __future__ import annotations

import ctypes
import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError
from .opencl.programs import quietly
from .opencl.svm import DeviceArray

if TYPE_CHECKING:
    from .remote import RemoteTensor

Array = np.ndarray[Any, Any]

#: `clEnqueueSVMMemcpy` needs a pointer, and a Buffer has none; kernels take both
COPY = """kernel void copy(global const uchar* x, global uchar* y) { y[get_global_id(0)] = x[get_global_id(0)]; }
kernel void copy8(global const ulong* x, global ulong* y) { y[get_global_id(0)] = x[get_global_id(0)]; }
"""


class BufferArray:
    """A tensor in a Buffer of a device that does not share the host's memory. `Queue.put` and `Queue.fetch` copy it."""

    __slots__ = ("buffer", "dtype", "shape")

    def __init__(self, buffer: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.buffer, self.shape, self.dtype = buffer, shape, dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def check(memory: Any, nbytes: int) -> None:
    """Raise InputError unless the memory is a Buffer or SVM with room for ``nbytes`` bytes."""
    import pyopencl as cl

    if not isinstance(memory, cl.Buffer | cl.SVMPointer):
        raise InputError(f"{type(memory).__name__} is not a Buffer or SVM of pyopencl",
                         hint="pass tensors that support DLPack as they are")  # fmt: skip
    if memory.size is not None and memory.size < nbytes:
        raise InputError(f"the memory has {memory.size:,} bytes, the tensor {nbytes:,}")


class _Mapping:
    """A mapped Buffer, with the number of requests that use the mapping."""

    def __init__(self, buffer: Any, queue: Any) -> None:
        import pyopencl as cl

        self.buffer, self.queue, self.users = buffer, queue, 0
        fixed = buffer.flags & cl.mem_flags.HOST_READ_ONLY
        flags = cl.map_flags.READ if fixed else cl.map_flags.READ | cl.map_flags.WRITE
        found: tuple[Array, Any] = cl.enqueue_map_buffer(
            queue, buffer, flags, 0, (buffer.size,), np.dtype(np.uint8), is_blocking=True
        )  # fmt: skip
        self.bytes = found[0]
        if fixed:
            self.bytes.flags.writeable = False


#: Requests of several threads share a mapping: PoCL crashes when one Buffer is mapped and unmapped by two at a time.
_MAPPED: dict[int, _Mapping] = {}
_MAPPING = threading.Lock()


def mapped(tensor: RemoteTensor, queue: Any) -> Array:
    """Map a Buffer until `unmap`: return its bytes where the host and kernels reach them, after the queue's earlier
    work."""
    import pyopencl as cl

    key = tensor.memory.int_ptr
    with _MAPPING:
        held = _MAPPED.get(key)
        try:
            if held is None:
                held = _MAPPED[key] = _Mapping(tensor.memory, queue)
            else:
                queue.finish()
        except cl.Error as error:
            raise InputError(f"is a Buffer that the host cannot map: {error}") from None
        held.users += 1
    return held.bytes[: tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)


def unmap(buffer: Any) -> None:
    """End one request's use of the mapping. The last one unmaps the Buffer."""
    with _MAPPING:
        held = _MAPPED[buffer.int_ptr]
        held.users -= 1
        if not held.users:
            del _MAPPED[buffer.int_ptr]
            mapping: Any = held.bytes.base
            mapping.release(held.queue)


def pointed(tensor: RemoteTensor) -> Array:
    """Return SVM as an array of its bytes. If the host does not share the device's memory, only the address is used."""
    if not tensor.nbytes:
        return np.empty(tensor.shape, tensor.dtype)
    memory: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.memory.svm_ptr)
    memory.owner = tensor.memory  # keeps the memory as long as the array lives
    return np.frombuffer(memory, np.uint8).view(tensor.dtype).reshape(tensor.shape)


def read_only(memory: Any) -> bool:
    """Whether kernels must not write the memory."""
    import pyopencl as cl

    return isinstance(memory, cl.Buffer) and bool(memory.flags & cl.mem_flags.READ_ONLY)


def copy(program: Any, queue: Any, source: BufferArray | DeviceArray, to: BufferArray | DeviceArray) -> None:
    """Enqueue a copy between a Buffer and SVM, or between two of a kind."""
    import pyopencl as cl

    nbytes = source.nbytes
    if not nbytes:
        return
    if isinstance(source, DeviceArray) and isinstance(to, DeviceArray):
        cl.enqueue_copy(queue, cl.SVM(to.memory), cl.SVM(source.memory), is_blocking=False, byte_count=nbytes)
        return
    if isinstance(source, BufferArray) and isinstance(to, BufferArray):
        cl.enqueue_copy(queue, to.buffer, source.buffer, byte_count=nbytes)
        return
    wide = nbytes % 8 == 0 and all(_aligned(a) for a in (source, to))
    with quietly():  # see `OpenCLQueue.kernel`
        kernel = cl.Kernel(program, "copy8" if wide else "copy")
    for at, array in enumerate((source, to)):
        kernel.set_arg(at, array.buffer if isinstance(array, BufferArray) else cl.SVM(array.memory))
    cl.enqueue_nd_range_kernel(queue, kernel, (nbytes // 8 if wide else nbytes,), None)


def _aligned(array: BufferArray | DeviceArray) -> bool:
    return isinstance(array, BufferArray) or array.memory.ctypes.data % 8 == 0
