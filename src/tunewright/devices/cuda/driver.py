"""Loads and launches compiled kernels on a GPU through the driver's own functions.

Triton would compile a small C module for each kind of kernel in order to launch it. This module needs no C compiler for
that. It uses torch's context (the device's primary context).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tunewright.errors import ExecutionError

#: threads that run in step
WARP = 32
#: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES; up to this size no request is needed
_MOST_SHARED, _FREE_SHARED = 8, 48 << 10
#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_OVERLAP = 6
#: number arguments, no pointers, by Triton's names for their types
NUMBERS = {"i1": ctypes.c_int8, "i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


#: the driver's errors for a damaged or foreign binary: invalid image, no binary, invalid source, not found
_UNLOADABLE = frozenset({200, 209, 300, 500})


class Unloadable(ExecutionError):
    """A binary is damaged, or made for another GPU."""


@dataclass(frozen=True)
class LoadedCubin:
    """A kernel in the memory of one GPU."""

    function: int
    warps: int
    #: bytes of shared memory of each program, and of the private memory that the compiler wants for each program
    shared: int
    scratch: int = 0
    #: it waits by itself for the previous kernel, so it may be launched while that one still runs
    overlaps: bool = False


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, with a number as its value."""

    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_uint64), ("unused", ctypes.c_uint64 * 7))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 7), ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )  # fmt: skip


class Driver:
    """The needed functions of the driver's library. Each raises ExecutionError with the driver's message."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._lock = threading.Lock()
        #: primary contexts by device number
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def load(
        self, binary: bytes, name: str, warps: int, shared: int, scratch: int, device: int, overlaps: bool = False
    ) -> LoadedCubin:
        """Load a kernel of a cubin; raises `Unloadable` when it is none. It stays loaded until the process ends: graphs
        hold it."""
        self._enter(device)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(binary))
        self._call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(name.encode()))
        if shared > _FREE_SHARED:
            self._call("cuFuncSetAttribute", function, ctypes.c_int(_MOST_SHARED), ctypes.c_int(shared))
        assert function.value is not None
        return LoadedCubin(function.value, warps, shared, scratch, overlaps)

    def launch(
        self, kernel: LoadedCubin, grid: Sequence[int], stream: int, arguments: Sequence[Any], scratch: int, device: int
    ) -> None:
        """Enqueue a kernel. ``arguments``: ctypes numbers, pointers as c_void_p; ``scratch``: address of its memory."""
        x, y, z = (*map(int, grid), 1, 1)[:3]
        if not x * y * z:
            return
        self._enter(device)
        # Triton's kernels take two more arguments at the end: their private memory, and a profiler's. Kernels with
        # fewer ignore them.
        values = [*arguments, ctypes.c_void_p(scratch), ctypes.c_void_p(0)]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        sizes = (x, y, z, WARP * kernel.warps, 1, 1, kernel.shared)
        function, nothing = ctypes.c_void_p(kernel.function), ctypes.c_void_p(0)
        if kernel.overlaps:
            attribute = _Attribute(_OVERLAP, 1)
            config = _Config((ctypes.c_uint * 7)(*sizes), stream, ctypes.pointer(attribute), 1)
            self._call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, nothing)
        else:
            numbers = map(ctypes.c_uint, sizes)
            self._call("cuLaunchKernel", function, *numbers, ctypes.c_void_p(stream), pointers, nothing)

    def _enter(self, device: int) -> None:
        """Make sure that this thread has a context: torch makes one current only at first need."""
        current = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(current))
        if current.value is None:
            with self._lock:
                if device not in self._contexts:
                    handle, context = ctypes.c_int(), ctypes.c_void_p()
                    self._call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
                    self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
                    self._contexts[device] = context
            self._call("cuCtxSetCurrent", self._contexts[device])

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise (Unloadable if status in _UNLOADABLE else ExecutionError)(f"{name}: {self._words(status)}")

    def _words(self, status: int) -> str:
        text = ctypes.c_char_p()
        known = self._library.cuGetErrorString(ctypes.c_int(status), ctypes.byref(text)) == 0 and text.value is not None
        return f"CUDA error {status}" + (f", {text.value.decode()}" if known and text.value else "")


@cache
def driver() -> Driver:
    """The driver of this machine."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise ExecutionError(f"the driver's library cannot be loaded: {error}") from error
