"""OpenCL devices through pyopencl: the processor with PoCL from its wheel, other runtimes and GPUs where installed."""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from ..errors import DeviceError, ExecutionError
from ..settings import Settings, export
from . import icd
from .base import Device, Queue, Target
from .host import cpu_flags, cpu_name, memory_bytes

#: Results are compared with references of their own arithmetic, so nothing that changes values but denormals as zero
#: (they cost 30 to 50 times). Kernels ask for reassociation where they sum.
OPTIONS = "-cl-denorms-are-zero -w"

#: processors that LLVM compiles AVX-512 for by name
_AVX512 = ("skylake-avx512", "cascadelake", "cooperlake", "cannonlake", "icelake", "tigerlake", "rocketlake",
           "sapphirerapids", "emeraldrapids", "graniterapids", "znver4", "znver5")  # fmt: skip


class _Shared:
    """A kernel object of one queue. Launches of the same program share it: making one takes longer than running it."""

    __slots__ = ("kernel", "owner")

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        #: whose arguments are set
        self.owner: Launch | None = None


class Launch:
    """A kernel with its arguments: calling it enqueues. It belongs to one queue and is not shared between threads."""

    __slots__ = ("_enqueue", "_grid", "_local", "_numbers", "_pointers", "_queue", "_shared", "_svm")

    def __init__(self, queue: OpenCLQueue, shared: _Shared, grid: tuple[int, ...]) -> None:
        import pyopencl as cl

        self._queue, self._shared, self._grid, self._local = queue, shared, grid, _ONE[: len(grid)]
        self._svm, self._enqueue = cl.SVM, cl.enqueue_nd_range_kernel
        self._pointers: dict[int, Any] = {}
        self._numbers: tuple[Any, ...] = ()

    def set(self, at: int, value: Any) -> None:
        """An array (the kernel reads and writes its bytes) or a number."""
        if isinstance(value, np.ndarray):
            self._pointers[at] = self._svm(_bytes(value))
        else:
            self._numbers += (at, value.dtype.char.encode(), value.item())
        if self._shared.owner is self:
            self._shared.owner = None

    def __call__(self) -> None:
        queue, shared = self._queue, self._shared
        if shared.owner is not self:
            # One call for all numbers takes a fifth of a microsecond, `set_arg` seven for each.
            shared.kernel._set_arg_buf_pack_multi(self._numbers)
            for at, pointer in self._pointers.items():
                shared.kernel.set_arg(at, pointer)
            shared.owner = self
        queue.launches += 1
        queue.pending = True
        self._enqueue(queue.raw, shared.kernel, self._grid, self._local)


def _bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array that pyopencl takes a pointer from: it asks for a writable one, though kernels do not write to inputs."""
    if not array.size:
        return _NOTHING
    if array.flags.writeable:
        return array
    return np.frombuffer((ctypes.c_ubyte * array.nbytes).from_address(array.ctypes.data), np.uint8)


_ONE = (1, 1, 1)
#: what the pointer to an empty tensor points to: nobody reads it, but it must be one
_NOTHING = np.zeros(64, np.uint8)


class OpenCLQueue(Queue):
    """An in-order queue of one request."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.pending = False
        self.launches = 0
        self.kept: list[Any] = []
        self._kernels: dict[tuple[int, str], tuple[Any, _Shared]] = {}

    def kernel(self, program: Any, name: str) -> _Shared:
        """The queue's own kernel object of a program."""
        key = (id(program), name)
        if key not in self._kernels:
            import pyopencl as cl

            self._kernels[key] = program, _Shared(cl.Kernel(program, name))  # kept, so that its id stays its own
        return self._kernels[key][1]

    def keep(self, owner: object) -> None:
        """Let something live until everything queued so far has finished."""
        self.kept.append(owner)

    def now(self) -> float:
        self.finish()
        return time.perf_counter()

    def finish(self) -> None:
        if self.pending:
            self.raw.finish()
            self.pending = False
            self.kept.clear()


class OpenCLDevice(Device):
    """One device of one runtime. On a processor its memory is the host's: kernels work on numpy's own bytes."""

    family = "opencl"
    priority = 10

    @classmethod
    def available(cls) -> list[str] | str:
        found = _found()
        return found if isinstance(found, str) else list(found)

    def __init__(self, name: str) -> None:
        import pyopencl as cl

        found = _found()
        if isinstance(found, str) or name not in found:
            raise DeviceError(f"there is no OpenCL device {name!r}")
        self.name, self.raw = name, found[name]
        self.context = cl.Context([self.raw])
        self.target = _target(self.raw)
        self.memory_bytes = memory_bytes() if self.target.device == "cpu" else int(self.raw.global_mem_size)
        self._programs: dict[str, Any] = {}
        self._lock = threading.Lock()

    def queue(self) -> OpenCLQueue:
        import pyopencl as cl

        return OpenCLQueue(cl.CommandQueue(self.context))

    def build(self, source: str) -> Any:
        """The compiled program of a source; each text is compiled once."""
        import pyopencl as cl

        with self._lock:
            program = self._programs.get(source)
            if program is None:
                try:
                    program = cl.Program(self.context, source).build(options=OPTIONS.split(), cache_dir=False)
                except cl.Error as error:
                    raise ExecutionError(f"{self.name} cannot compile a kernel: {error}") from error
                self._programs[source] = program
            return program

    def launch(self, queue: Queue, program: Any, name: str, grid: Sequence[int]) -> Launch:
        """A kernel of a program over a grid of work-items, ready for its arguments."""
        assert isinstance(queue, OpenCLQueue)
        return Launch(queue, queue.kernel(program, name), tuple(grid))


def _target(device: Any) -> Target:
    software = (("opencl", device.platform.name), ("driver", device.driver_version), ("version", device.version))
    if not _is_cpu(device):
        arch = device.vendor
        return Target("gpu", device.name, arch, device.max_compute_units, software, "c", OPTIONS)
    vector, registers = _vectors(device.version)
    return Target(
        "cpu", cpu_name(), f"{vector * 8}-bit vectors", device.max_compute_units, software, "c", OPTIONS, vector, registers
    )  # fmt: skip


def _vectors(version: str) -> tuple[int, int]:
    """Bytes of a vector register and their number, as the runtime's compiler uses them.

    PoCL names the processor that it compiles for at the end of its version. An old LLVM takes a new processor for an
    older one: it is the name that counts, not what the processor could do.
    """
    flags = cpu_flags()
    if "PoCL" in version:
        wide = any(name in version for name in _AVX512)
    else:
        wide = "avx512f" in flags
    if wide:
        return 64, 32
    return (32, 16) if "avx2" in flags else (16, 16)


def _is_cpu(device: Any) -> bool:
    import pyopencl as cl

    return bool(device.type & cl.device_type.CPU)


@cache
def _found() -> dict[str, Any] | str:
    """OpenCL devices by our name, or why there are none."""
    # It would keep pickles in the user's cache folder: code to whoever reads them, and slower than making them anew.
    export("PYOPENCL_NO_CACHE", "1")
    try:
        import pyopencl as cl
    except ImportError as error:
        return f"pyopencl cannot be imported ({error})"
    try:
        with icd.runtimes(Settings.from_environment().cpu_bind_threads):
            platforms = cl.get_platforms()
        devices = {(p.name, p.version, d.name, d.version): d for p in platforms for d in p.get_devices()}
    except cl.Error as error:
        return f"no OpenCL platform ({error})"
    found: dict[str, Any] = {}
    for device in sorted(filter(_is_cpu, devices.values()), key=_preference):
        found.setdefault("CPU", device)
        found.setdefault(f"CPU.{_runtime(device)}", device)
    gpus = [d for d in devices.values() if d.type & cl.device_type.GPU]
    for number, device in enumerate(sorted(gpus, key=lambda d: not d.host_unified_memory)):  # integrated ones first
        found[f"GPU.{number}"] = device
    return found or "the OpenCL platforms offer no device"


def _runtime(device: Any) -> str:
    """Short name of the runtime that offers a device."""
    name = device.platform.name.upper()
    return next((short for text, short in (("PORTABLE", "POCL"), ("POCL", "POCL"), ("INTEL", "INTEL")) if text in name),
                name.split()[0])  # fmt: skip


def _preference(device: Any) -> tuple[int, list[int]]:
    """Intel's runtime, then PoCL, the newest first (the wheel's is of 2022)."""
    numbers = [-int(n) for n in re.findall(r"\d+", device.driver_version)]
    return {"INTEL": 0, "POCL": 1}.get(_runtime(device), 2), numbers


DEVICES = (OpenCLDevice,)
