"""OpenCL devices through pyopencl: the processor with PoCL from its wheel, other runtimes and GPUs where installed."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NoReturn

import numpy as np

from ..errors import DeviceError
from ..ir.types import TensorType
from ..settings import Settings, export
from . import icd, pocl
from .base import Device, Queue, Target
from .host import cache_bytes, cpu_count, cpu_flags, cpu_name, memory_bytes
from .programs import Programs
from .svm import DeviceArray, Memory, writable

#: Results are compared with references of their own arithmetic, so nothing that changes values but denormals as zero
#: (they cost 30 to 50 times). Kernels ask for reassociation where they sum.
OPTIONS = "-cl-denorms-are-zero -w"
#: for a device that lacks fp64
WITHOUT_FP64 = " -DWITHOUT_FP64"

#: processors that LLVM compiles AVX-512 for by name
_AVX512 = ("skylake-avx512", "cascadelake", "cooperlake", "cannonlake", "icelake", "tigerlake", "rocketlake",
           "sapphirerapids", "emeraldrapids", "graniterapids", "znver4", "znver5")  # fmt: skip


#: how PoCL names the processor when kernels run in the thread that launches them
_WITHOUT_THREADS = "basic-"


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
            assert self._queue.shares_memory, "the device cannot read the host's memory"
            self._pointers[at] = self._svm(writable(value) if value.size else _NOTHING)
        elif isinstance(value, DeviceArray):
            self._pointers[at] = self._svm(value.memory)
        else:
            self._numbers += (at, value.dtype.char.encode(), value.item())
        if self._shared.owner is self:
            self._shared.owner = None

    def __call__(self) -> None:
        queue, shared = self._queue, self._shared
        if queue.orphaned:
            _refuse()
        if shared.owner is not self:
            shared.owner = None  # until all are set: Ctrl-C may come in between
            # One call for all numbers takes a fifth of a microsecond, `set_arg` seven for each.
            shared.kernel._set_arg_buf_pack_multi(self._numbers)
            for at, pointer in self._pointers.items():
                shared.kernel.set_arg(at, pointer)
            shared.owner = self
        queue.launches += 1
        queue.pending = True
        if queue.alone:  # it runs here and now
            begin = time.perf_counter()
            self._enqueue(queue.raw, shared.kernel, self._grid, self._local)
            queue.waited += time.perf_counter() - begin
        else:
            self._enqueue(queue.raw, shared.kernel, self._grid, self._local)


#: filters of warnings are the process's, not a thread's
_MAKING = threading.Lock()
_ONE = (1, 1, 1)
#: what the pointer to an empty tensor points to: nobody reads it, but it must be one
_NOTHING = np.zeros(64, np.uint8)


class OpenCLQueue(Queue):
    """An in-order queue of one request."""

    shares_memory = True
    #: the process is a fork: kernels would wait for the runtime's threads for ever
    orphaned = False

    def __init__(self, raw: Any, alone: bool = False) -> None:
        self.raw, self.alone = raw, alone
        self.pending = False
        self.launches = 0
        self.waited = 0.0
        self.kept: list[Any] = []
        #: scratch memory by number: kernels run one after the other, and share it while it is warm
        self.scratch: dict[int, Any] = {}
        #: how often it was waited for
        self.waits = 0
        self._kernels: dict[tuple[int, str], tuple[Any, _Shared]] = {}

    def kernel(self, program: Any, name: str) -> _Shared:
        """The queue's own kernel object of a program."""
        key = (id(program), name)
        if key not in self._kernels:
            import pyopencl as cl

            with _MAKING, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it writes code for each, and finds that the text's name is taken
                kernel = cl.Kernel(program, name)
            self._kernels[key] = program, _Shared(kernel)  # kept, so that its id stays its own
        return self._kernels[key][1]

    def borrow(self, device: OpenCLDevice, number: int, nbytes: int) -> Any:
        """Scratch memory for a kernel: those of a queue run one after the other, and share what has one number."""
        held = self.scratch.get(number)
        if held is None or held.nbytes < nbytes:
            held = self.scratch[number] = device.alloc(nbytes)
        return held

    def keep(self, owner: object) -> None:
        """Let something live until everything queued so far has finished."""
        self.kept.append(owner)

    def now(self) -> float:
        self.finish()
        return time.perf_counter()

    def finish(self) -> None:
        if self.pending:
            begin = time.perf_counter()
            self.raw.finish()
            self.waited += time.perf_counter() - begin
            self.pending = False
            self.waits += 1
            self.kept.clear()


class CopyingQueue(OpenCLQueue):
    """The queue of a device that does not share the host's memory."""

    shares_memory = False

    def __init__(self, raw: Any, memory: Memory) -> None:
        super().__init__(raw)
        self._memory = memory

    def fetch(self, values: Sequence[Any]) -> Sequence[Any]:
        found = [self._memory.read(self.raw, v) if isinstance(v, DeviceArray) else v for v in values]
        self.pending = True
        self.finish()
        return found

    def put(self, array: np.ndarray[Any, Any], to: Any) -> None:
        self.keep(self._memory.write(self.raw, array, to))
        self.pending = True


class OpenCLDevice(Device):
    """One device of one runtime. On a processor its memory is the host's: kernels work on numpy's own bytes.

    ``shares_memory`` False treats a processor as if it were not so.
    """

    family = "opencl"
    priority = 10
    #: the runtime has more threads than it may use: no launch has more work-items than `workers`
    confined: bool = False

    @classmethod
    def available(cls) -> list[str] | str:
        found = _found()
        return found if isinstance(found, str) else list(found[0]) or "the OpenCL platforms offer no device"

    @classmethod
    def unusable(cls) -> dict[str, str]:
        found = _found()
        return {} if isinstance(found, str) else found[1]

    def __init__(self, name: str, shares_memory: bool | None = None, raw: Any = None) -> None:
        import pyopencl as cl

        found = _found()
        if isinstance(found, str) or name not in found[0]:
            raise DeviceError(f"there is no OpenCL device {name!r}")
        if OpenCLQueue.orphaned:
            _refuse()
        self.name, self.raw = name, found[0][name] if raw is None else raw
        self.context = cl.Context([self.raw])
        self.target = _target(self.raw)
        self.memory_bytes = memory_bytes() if self.target.device == "cpu" else int(self.raw.global_mem_size)
        self.cache_bytes = cache_bytes() if self.target.device == "cpu" else _gpu_cache(self.raw)
        self.shares_memory = _shares_memory(self.raw) if shares_memory is None else shares_memory
        self._memory = None if self.shares_memory else Memory(self.context)
        self._programs = Programs(name, self.context, self.raw, self.target.options)
        self._lock = threading.Lock()
        self._inline: OpenCLDevice | None = None
        #: itself with fewer threads
        self._fewer: dict[int, OpenCLDevice] = {}

    def alloc(self, nbytes: int) -> Any:
        return super().alloc(nbytes) if self._memory is None else self._memory.alloc(nbytes)

    def view(self, buffer: Any, offset: int, type: TensorType) -> Any:
        return buffer.view(offset, type) if isinstance(buffer, DeviceArray) else super().view(buffer, offset, type)

    def constant(self, array: np.ndarray[Any, Any]) -> Any:
        return array if self._memory is None else self._memory.constant(array)

    def queue(self) -> OpenCLQueue:
        import pyopencl as cl

        if OpenCLQueue.orphaned:
            _refuse()
        raw = cl.CommandQueue(self.context)
        made = OpenCLQueue(raw, self.alone) if self._memory is None else CopyingQueue(raw, self._memory)
        pocl.queues.add(made)
        return made

    @property
    def alone(self) -> bool:
        """It runs in the calling thread, without threads of its own."""
        return bool(self.raw.name.startswith(_WITHOUT_THREADS))

    def with_threads(self, count: int) -> Device:
        most = min(self.target.units, cpu_count())
        units = min(count or most, most)
        if self.target.device != "cpu" or not self.shares_memory or units == self.target.units:
            return self
        # The runtime has no way to confine a launch to some of its threads: what is launched does it (`confined`).
        twin = self.inline() if units == 1 else None
        with self._lock:
            if units not in self._fewer:
                made = copy.copy(twin if isinstance(twin, OpenCLDevice) else self)  # programs are compiled once for all
                made.target, made.confined = dataclasses.replace(self.target, units=units), not made.alone
                made._lock, made._inline, made._fewer = threading.Lock(), None, {}
                self._fewer[units] = made
            return self._fewer[units]

    @property
    def workers(self) -> int:
        """Work-items of a launch that shares its work out by itself: one for each thread."""
        return 1 if self.alone else max(1, min(self.target.units, cpu_count()))

    def inline(self) -> Device | None:
        twins = [d for d in self.raw.platform.get_devices() if d.name.startswith(_WITHOUT_THREADS)]
        if self.raw in twins or not twins or not self.shares_memory:
            return None
        with self._lock:
            if self._inline is None:
                self._inline = OpenCLDevice(self.name, raw=twins[0])
                self._inline.target = self.target  # the same kernels for the same processor
            return self._inline

    def build(self, source: str) -> Any:
        """The compiled program of a source; each text is compiled once."""
        if OpenCLQueue.orphaned:  # a thread that stayed behind may have been compiling, and holds the lock for ever
            _refuse()
        return self._programs.build(source)

    def launch(self, queue: Queue, program: Any, name: str, grid: Sequence[int]) -> Launch:
        """A kernel of a program over a grid of work-items, ready for its arguments."""
        assert isinstance(queue, OpenCLQueue)
        return Launch(queue, queue.kernel(program, name), tuple(grid))


def _target(device: Any) -> Target:
    software = (("opencl", device.platform.name), ("driver", device.driver_version), ("version", device.version))
    if not _is_cpu(device):
        arch = device.vendor
        lacks, options = ((), OPTIONS) if device.double_fp_config else (("fp64",), OPTIONS + WITHOUT_FP64)
        # Work-items are the vectors of a GPU; one holds four floats at a time, as memory is read best.
        return Target("gpu", device.name, arch, device.max_compute_units, software, "c", options, 16, 16, lacks)
    vector, registers = _vectors(device.version)
    return Target(
        "cpu", cpu_name(), f"{vector * 8}-bit vectors", device.max_compute_units, software, "c", OPTIONS, vector,
        registers,
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


def _gpu_cache(device: Any) -> int:
    """Of the last level; some drivers tell the first one's size instead, so it is taken to be large."""
    return max(int(device.global_mem_cache_size), 64 << 20)


def _is_cpu(device: Any) -> bool:
    import pyopencl as cl

    return bool(device.type & cl.device_type.CPU)


def _svm(device: Any) -> int:
    """What kinds of shared virtual memory a device has: bits of cl.device_svm_capabilities."""
    import pyopencl as cl

    try:
        return int(device.svm_capabilities)
    except cl.Error:  # it was made before there was any
        return 0


def _shares_memory(device: Any) -> bool:
    """Kernels may work on memory of the host that OpenCL knows nothing of."""
    import pyopencl as cl

    return _is_cpu(device) or bool(_svm(device) & cl.device_svm_capabilities.FINE_GRAIN_SYSTEM)


def _orphan() -> None:
    OpenCLQueue.orphaned = True


def _refuse() -> NoReturn:
    """In a fork: kernels would wait for the runtime's threads, and compiling for a lock that one of them held."""
    raise DeviceError(
        "this process was forked from one that had opened the device, whose threads stayed there",
        hint="start processes with multiprocessing's 'spawn', or open the device only after the fork",
    )


@cache
def _found() -> tuple[dict[str, Any], dict[str, str]] | str:
    """`names` of all OpenCL devices, or why there are none."""
    # It would keep pickles in the user's cache folder: code to whoever reads them, and slower than making them anew.
    export("PYOPENCL_NO_CACHE", "1")
    try:
        import pyopencl as cl
    except ImportError as error:
        return f"pyopencl cannot be imported ({error})"
    try:
        settings = Settings.from_environment()
        with icd.runtimes(settings.cpu_bind_threads), pocl.beginning(settings.cpu_threads_num):
            platforms = cl.get_platforms()
            # A runtime may be found twice; a platform may have several devices of one name.
            devices = {
                (p.name, p.version, number): device for p in platforms for number, device in enumerate(p.get_devices())
            }
    except cl.Error as error:
        return f"no OpenCL platform ({error})"
    if hasattr(os, "register_at_fork"):  # a runtime's threads begin when its devices are listed
        os.register_at_fork(after_in_child=_orphan)
    return names(devices.values())


def names(devices: Iterable[Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Devices by our names (GPU.0, GPU.1, ...: integrated ones first), and why others cannot be used."""
    import pyopencl as cl

    devices = list(devices)
    found: dict[str, Any] = {}
    for device in sorted(filter(_is_cpu, devices), key=_preference):
        if device.name.startswith(_WITHOUT_THREADS):
            continue
        found.setdefault("CPU", device)
        found.setdefault(f"CPU.{_runtime(device)}", device)
    gpus = [d for d in devices if d.type & cl.device_type.GPU]
    usable = [d for d in gpus if _svm(d)]
    found |= {f"GPU.{k}": d for k, d in enumerate(sorted(usable, key=lambda d: not d.host_unified_memory))}
    without = "its OpenCL runtime has no shared virtual memory, which kernels need for their pointers"
    return found, {d.name: without for d in gpus if d not in usable}


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
