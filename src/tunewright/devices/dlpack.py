"""Tensors of other libraries in the host's memory, through DLPack: their bytes as numpy arrays, without a copy.

numpy's own `from_dlpack` lacks bfloat16, and makes tensors of exporters older than DLPack 1 read-only.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from ..ir.types import DType

Array = np.ndarray[Any, Any]

#: DLPack's numbers of kinds of memory
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
#: kinds of memory that the processor accesses as its own
HOST = frozenset({CPU, CUDA_HOST})
#: element types by DLPack's code and bits
_DTYPES = {
    **{(0, bits): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{(2, bits): f"float{bits}" for bits in (16, 32, 64)},
    (4, 16): DType.BFLOAT16.value,
    (6, 8): DType.BOOL.value,
}
_READ_ONLY = 1


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", _Tensor),
    )  # fmt: skip


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def is_tensor(value: object) -> bool:
    """Whether a value is a library's tensor with DLPack support."""
    return hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")


def place(value: Any) -> tuple[int, int]:
    """Return the kind of memory that a tensor is in, and the device's number."""
    kind, number = value.__dlpack_device__()
    return int(kind), int(number)


def capsule(value: Any, writable: bool, stream: int | None = None) -> tuple[Any, bool]:
    """Return a tensor's capsule, and whether it is read-only. ``stream``: the reader's stream on a GPU.

    Only the newer form of a capsule tells that a tensor is read-only. An exporter that refuses that form gives the
    older.
    """
    given: dict[str, Any] = {} if stream is None else {"stream": stream}
    if writable:
        try:
            made = value.__dlpack__(max_version=(1, 0), **given)
        except TypeError:
            made = value.__dlpack__(**given)
    else:
        made = value.__dlpack__(**given)
    if _is_valid(made, b"dltensor_versioned"):
        about = _Versioned.from_address(_pointer(made, b"dltensor_versioned"))
        return made, bool(about.flags & _READ_ONLY)
    return made, False


def array(value: Any, writable: bool = False) -> Array:
    """Return a tensor in the host's memory as an array of the same bytes, which keeps the tensor alive.

    Raise BufferError if we lack its element type or, with ``writable``, if it is read-only.
    """
    if not writable:
        try:
            return np.from_dlpack(value)  # takes a fifth of the time
        except (BufferError, RuntimeError, TypeError):
            pass
    made, read_only = capsule(value, writable)
    if writable and read_only:
        raise BufferError("it is read-only")
    versioned = bool(_is_valid(made, b"dltensor_versioned"))
    at = _pointer(made, b"dltensor_versioned" if versioned else b"dltensor")
    tensor = _Versioned.from_address(at).tensor if versioned else _Tensor.from_address(at)
    name = _DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if name is None:
        raise BufferError(f"its elements (DLPack's code {tensor.code}, {tensor.bits} bits) have an unsupported type")
    dtype = DType(name).numpy
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if not math.prod(shape):
        return np.empty(shape, dtype)
    strides = [tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim)] if tensor.strides else None
    memory = _Memory(made, int(tensor.data) + int(tensor.byte_offset), shape, strides, dtype, writable)
    return np.asarray(memory).view(dtype)  # numpy's protocol has no name for bfloat16, so those bytes come as void


class _Memory:
    """A caller's bytes with numpy's array interface. The array holds this object, and this object holds the capsule."""

    def __init__(
        self, owner: Any, at: int, shape: tuple[int, ...], strides: list[int] | None, dtype: np.dtype[Any],
        writable: bool,
    ) -> None:  # fmt: skip
        self.owner = owner
        self.__array_interface__ = {
            "version": 3, "shape": shape, "strides": None if strides is None else tuple(strides),
            "typestr": dtype.str, "data": (at, not writable),
        }  # fmt: skip
