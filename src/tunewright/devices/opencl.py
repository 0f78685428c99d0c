"""OpenCL devices through pyopencl: the processor with PoCL from its wheel, other runtimes and GPUs where installed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from ..errors import DeviceError, ExecutionError
from .base import Device, Queue, Target
from .host import cpu_flags, cpu_name, memory_bytes

#: Results are compared with references of their own arithmetic, so nothing that changes values but denormals as zero
#: (they cost 30 to 50 times). Kernels ask for reassociation where they sum.
OPTIONS = "-cl-denorms-are-zero"

#: processors that LLVM compiles AVX-512 for by name
_AVX512 = ("skylake-avx512", "cascadelake", "cooperlake", "cannonlake", "icelake", "tigerlake", "rocketlake",
           "sapphirerapids", "emeraldrapids", "graniterapids", "znver4", "znver5")  # fmt: skip


class Launch:
    """A kernel with its arguments: calling it enqueues. It belongs to one queue and is not shared between threads."""

    __slots__ = ("_enqueue", "_grid", "_kernel", "_queue", "_svm")

    def __init__(self, queue: OpenCLQueue, program: Any, name: str, grid: tuple[int, ...]) -> None:
        import pyopencl as cl

        self._kernel = cl.Kernel(program, name)
        self._queue, self._grid = queue, grid
        self._svm, self._enqueue = cl.SVM, cl.enqueue_nd_range_kernel

    def set(self, at: int, value: Any) -> None:
        """An array (the kernel reads and writes its bytes) or a number."""
        if isinstance(value, np.ndarray):
            self._kernel.set_arg(at, self._svm(value if value.size else _NOTHING))
        else:
            self._kernel.set_arg(at, value)

    def __call__(self) -> None:
        queue = self._queue
        queue.launches += 1
        queue.pending = True
        self._enqueue(queue.raw, self._kernel, self._grid, _ONE[: len(self._grid)])


_ONE = (1, 1, 1)
#: what the pointer to an empty tensor points to: nobody reads it, but it must be one
_NOTHING = np.zeros(64, np.uint8)


class OpenCLQueue(Queue):
    """An in-order queue of one request."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.pending = False
        self.launches = 0

    def now(self) -> float:
        self.finish()
        return time.perf_counter()

    def finish(self) -> None:
        if self.pending:
            self.raw.finish()
            self.pending = False


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
        return Launch(queue, program, name, tuple(grid))


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
    _prepare_environment()
    try:
        import pyopencl as cl

        platforms = cl.get_platforms()
    except ImportError as error:
        return f"pyopencl cannot be imported ({error})"
    except Exception as error:  # the loader's own error class cannot be named when the import fails half-way
        return f"no OpenCL platform ({error})"
    found: dict[str, Any] = {}
    for platform in platforms:
        for device in platform.get_devices():
            if _is_cpu(device):
                found.setdefault("CPU", device)
    return found or "the OpenCL platforms offer no device"


def _prepare_environment() -> None:
    """What PoCL reads when it is loaded: threads stay on their cores (two on one core halve the speed)."""
    if hasattr(os, "sched_getaffinity") and os.sched_getaffinity(0) == set(range(os.cpu_count() or 1)):
        os.environ.setdefault("POCL_AFFINITY", "1")


DEVICES = (OpenCLDevice,)
