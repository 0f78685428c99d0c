"""OpenCL devices through pyopencl: GPUs, and runtimes for the processor that a user chooses by name."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Sequence
from ctypes import c_char
from functools import cache
from typing import Any, NoReturn

import numpy as np

from tunewright.errors import DeviceError, InputError
from tunewright.ir.types import DType, TensorType
from tunewright.settings import Settings

from .. import interop as lent
from .. import pci
from ..base import Device, Hints, Queue, Target
from ..c_device import NOTHING, CDevice, CLaunch, CQueue
from ..cuda import device as cuda
from ..host import cache_bytes, cpu_flags, cpu_name, free_bytes, memory_bytes
from ..remote import RemoteTensor
from . import naming, probe
from .naming import gpu_cache, is_cpu, is_gpu, names, queue_properties
from .programs import OPTIONS, OpenCLPrograms, quietly
from .svm import DeviceArray, Memory, writable

#: for a device that lacks fp64
WITHOUT_FP64 = " -DWITHOUT_FP64"

LOG = logging.getLogger("tunewright")
_NO_HINTS = Hints()


class _Shared:
    """A kernel object of one queue. Launches of one program share it: making it takes longer than running it."""

    __slots__ = ("kernel", "owner")

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        #: the launch whose arguments are set
        self.owner: OpenCLLaunch | None = None


class OpenCLLaunch(CLaunch):
    """A kernel with its arguments: calling it enqueues it. It belongs to one queue and is not shared by threads."""

    __slots__ = ("_enqueue", "_grid", "_local", "_numbers", "_packed", "_pointers", "_queue", "_shared", "_svm")

    def __init__(
        self, queue: OpenCLQueue, shared: _Shared, grid: tuple[int, ...], local: tuple[int, ...] = ()
    ) -> None:  # fmt: skip
        import pyopencl as cl

        self._queue, self._shared, self._grid, self._local = queue, shared, grid, local or _ONE[: len(grid)]
        self._svm, self._enqueue = cl.SVM, cl.enqueue_nd_range_kernel
        self._pointers: dict[int, Any] = {}
        #: numbers by argument, and all of them in pyopencl's form, from the next launch on
        self._numbers: dict[int, tuple[int, bytes, Any]] = {}
        self._packed: tuple[Any, ...] | None = None

    def set(self, at: int, value: Any) -> None:
        if isinstance(value, np.ndarray):
            assert self._queue.shares_memory, "the device cannot read the host's memory"
            self._pointers[at] = self._svm(writable(value) if value.size else NOTHING)
        elif isinstance(value, DeviceArray):
            self._pointers[at] = self._svm(value.memory)
        elif type(value) is int:
            assert self._queue.shares_memory, "the device cannot read the host's memory"
            self._pointers[at] = self._svm(c_char.from_address(value))
        else:
            self._numbers[at] = at, value.dtype.char.encode(), value.item()
            self._packed = None
        if self._shared.owner is self:
            self._shared.owner = None

    def number(self, at: int, value: int) -> None:
        self._numbers[at] = at, b"i", value
        self._packed = None
        if self._shared.owner is self:
            self._shared.owner = None

    def spread(self, grid: Sequence[int]) -> None:
        self._grid = tuple(grid)

    def __call__(self) -> None:
        queue, shared = self._queue, self._shared
        if queue.orphaned:
            _refuse()
        if shared.owner is not self:
            shared.owner = None  # no owner until all arguments are set: Ctrl-C may come in between
            # One call for all numbers takes a fifth of a microsecond, `set_arg` seven for each.
            if self._packed is None:
                self._packed = tuple([part for number in self._numbers.values() for part in number])
            shared.kernel._set_arg_buf_pack_multi(self._packed)
            for at, pointer in self._pointers.items():
                shared.kernel.set_arg(at, pointer)
            shared.owner = self
        queue.launches += 1
        queue.pending = True
        self._enqueue(queue.raw, shared.kernel, self._grid, self._local)


_ONE = (1, 1, 1)


class OpenCLQueue(CQueue):
    """An in-order queue of one request."""

    shares_memory = True
    #: the process is a fork: kernels would wait for the runtime's threads for ever
    orphaned = False

    def __init__(self, raw: Any) -> None:
        super().__init__()
        self.raw = raw
        self._kernels: dict[tuple[int, str], tuple[Any, _Shared]] = {}
        #: a caller's buffers that are currently mapped
        self._mapped: list[Any] = []

    def kernel(self, program: Any, name: str) -> _Shared:
        """Return the queue's own kernel object of a program."""
        key = (id(program), name)
        if key not in self._kernels:
            import pyopencl as cl

            with quietly():  # pyopencl writes code for each kernel; two threads may choose one name for it
                kernel = cl.Kernel(program, name)
            self._kernels[key] = program, _Shared(kernel)  # kept, so that its id stays its own
        return self._kernels[key][1]

    def finish(self) -> None:
        if self.pending:
            begin = time.perf_counter()
            self.raw.finish()
            self.waited += time.perf_counter() - begin
            self.pending = False
            self.kept.clear()

    def adopt(self, value: Any, writable: bool = False) -> Any:
        import pyopencl as cl

        if not isinstance(value, RemoteTensor) or not isinstance(value.memory, cl.Buffer | cl.SVMPointer):
            return super().adopt(value, writable)
        if writable and lent.read_only(value.memory):
            raise InputError("is a Buffer that may only be read")
        self.pending = True  # the caller may have queued work on it: the host waits before it looks
        if isinstance(value.memory, cl.SVMPointer) or not value.nbytes:
            return lent.pointed(value)
        # Without the caller's queue, the caller has waited for it, as docs/remote-tensors.md says.
        theirs = self.raw if self.raw.context == value.memory.context else cl.CommandQueue(value.memory.context)
        array = lent.mapped(value, theirs)
        self._mapped.append(value.memory)
        if writable and not array.flags.writeable:
            raise InputError("is a Buffer that the host may only read")
        return array

    def release(self) -> None:
        mapped, self._mapped = self._mapped, []
        for buffer in mapped:
            lent.unmap(buffer)


class CopyingQueue(OpenCLQueue):
    """The queue of a device that does not share the host's memory."""

    shares_memory = False

    def __init__(self, raw: Any, memory: Memory, device: OpenCLDevice) -> None:
        super().__init__(raw)
        self._memory, self._device = memory, device

    def fetch(self, values: Sequence[Any]) -> Sequence[Any]:
        there = [self.duplicate(v) if isinstance(v, lent.BufferArray) else v for v in values]
        found = [self._memory.read(self.raw, v) if isinstance(v, DeviceArray) else v for v in there]
        self.pending = True
        self.finish()
        return found

    def put(self, array: Any, to: Any) -> None:
        self.pending = True
        if isinstance(array, np.ndarray) and isinstance(to, DeviceArray):
            self.keep(self._memory.write(self.raw, array, to))
            return
        source = self.duplicate(array) if isinstance(array, np.ndarray) else array
        if (source.shape, source.dtype) != (to.shape, to.dtype):
            raise ValueError(f"{source.dtype}{list(source.shape)} is no {to.dtype}{list(to.shape)}")
        lent.copy(self._device.build(lent.COPY), self.raw, source, to)
        self.keep((source, to))

    def duplicate(self, value: Any) -> DeviceArray:
        type = TensorType(DType.of_numpy(value.dtype), value.shape)
        made = self._memory.alloc(type.nbytes).view(0, type)
        self.put(value, made)
        return made

    def adopt(self, value: Any, writable: bool = False) -> Any:
        import pyopencl as cl

        if not isinstance(value, RemoteTensor):
            return super().adopt(value, writable)
        memory = value.memory
        theirs = getattr(value.context.device, "context", None)
        if isinstance(memory, DeviceArray) and theirs != self._device.context:
            raise InputError("is in another context's memory", hint="compile both models in one RemoteContext")
        if isinstance(memory, cl.Buffer):
            if writable and lent.read_only(memory):
                raise InputError("is a Buffer that may only be read")
            if memory.context != self._device.context:
                raise InputError("is a Buffer of another context", hint="Core.create_context(device, context=...)")
            memory = lent.BufferArray(memory, value.shape, value.dtype)
        elif isinstance(memory, cl.SVMPointer):
            whole = lent.pointed(value)
            memory = DeviceArray(whole.reshape(-1).view(np.uint8), value.shape, value.dtype)
        elif not isinstance(memory, DeviceArray):
            return super().adopt(value, writable)
        self.keep(memory)
        self.pending = True
        return memory


class OpenCLDevice(CDevice):
    """One device of one runtime. On a processor its memory is the host's: kernels work on numpy's own bytes.

    ``shares_memory`` False treats a processor as if its memory were separate.
    """

    family = "opencl"
    stand_in = "through OpenCL, which takes longer"
    priority = 10
    kinds = ("CPU", "GPU")
    dialect = "opencl"
    serves_classes = True
    #: the context is a caller's, and so is the queue that all requests use, if there is one
    is_lent: bool = False
    lent_queue: Any = None

    @classmethod
    def available(cls) -> list[str] | str:
        found = _found()
        return found if isinstance(found, str) else list(found[0]) or "no OpenCL device here can be used"

    @classmethod
    def unusable(cls) -> dict[str, str]:
        found = _found()
        return {} if isinstance(found, str) else found[1]

    def __init__(
        self, name: str, shares_memory: bool | None = None, raw: Any = None, context: Any = None
    ) -> None:  # fmt: skip
        import pyopencl as cl

        found = _found()
        if isinstance(found, str) or name not in found[0]:
            raise DeviceError(f"there is no OpenCL device {name!r}")
        if OpenCLQueue.orphaned:
            _refuse()
        self.name, self.raw = name, found[0][name] if raw is None else raw
        self.context = cl.Context([self.raw]) if context is None else context
        self.target = _target(self.raw)
        self.memory_bytes = memory_bytes() if self.target.device == "cpu" else int(self.raw.global_mem_size)
        self.cache_bytes = cache_bytes() if self.target.device == "cpu" else gpu_cache(self.raw)
        self.pci = None if self.target.device == "cpu" else pci.of_opencl(self.raw)
        self.shares_memory = naming.shares_memory(self.raw) if shares_memory is None else shares_memory
        self._memory = None if self.shares_memory else Memory(self.context, self.raw)
        self._programs = OpenCLPrograms(name, self.context, self.raw, self.target.options)
        #: requested hints that are not supported
        self._told: set[Hints] = set()
        self._told_threads = False

    @property
    def kernel_label(self) -> str:
        return self._programs.label

    def alloc(self, nbytes: int) -> Any:
        return super().alloc(nbytes) if self._memory is None else self._memory.alloc(nbytes)

    def view(self, buffer: Any, offset: int, type: TensorType) -> Any:
        return buffer.view(offset, type) if isinstance(buffer, DeviceArray) else super().view(buffer, offset, type)

    def constant(self, array: np.ndarray[Any, Any]) -> Any:
        return array if self._memory is None else self._memory.constant(array)

    def held(self) -> dict[str, int]:
        return {} if self._memory is None else {"constants": self._memory.constants}

    @property
    def free_bytes(self) -> int | None:
        return free_bytes() if self.target.device == "cpu" else None  # OpenCL does not tell

    @property
    def is_discrete(self) -> bool:
        return not is_cpu(self.raw) and not self.raw.host_unified_memory

    @property
    def uuid(self) -> str | None:
        import pyopencl as cl

        try:
            return bytes(self.raw.get_info(cl.device_info.UUID_KHR)).hex()
        except (AttributeError, cl.Error):  # an older pyopencl, or no extension
            return None

    def queue(self) -> OpenCLQueue:
        import pyopencl as cl

        if OpenCLQueue.orphaned:
            _refuse()
        raw = cl.CommandQueue(self.context, self.raw) if self.lent_queue is None else self.lent_queue
        return self._queue_of(raw)

    def request_queue(self, hints: Hints) -> OpenCLQueue:
        if self.lent_queue is not None or hints == _NO_HINTS:
            return self.queue()
        properties = queue_properties(self.raw, hints)
        if not properties:
            if hints not in self._told:
                self._told.add(hints)
                LOG.warning("%s has no hints for queues: %s changes nothing there", self.name, hints)
            return self.queue()
        import pyopencl as cl

        return self._queue_of(cl.CommandQueue(self.context, self.raw, properties=[*properties, 0]))

    def _queue_of(self, raw: Any) -> OpenCLQueue:
        return OpenCLQueue(raw) if self._memory is None else CopyingQueue(raw, self._memory, self)

    def lent(self, context: Any, queue: Any) -> OpenCLDevice:
        import pyopencl as cl

        if queue is not None and not isinstance(queue, cl.CommandQueue):
            raise DeviceError(f"{type(queue).__name__} is no CommandQueue of pyopencl")
        try:
            its = None if queue is None else queue.context
        except cl.Error:  # the runtime's queues do not keep it
            raise DeviceError("the queue's context is gone", hint="keep the Context as long as the queue") from None
        context = its if context is None else context
        if not isinstance(context, cl.Context):
            raise DeviceError(f"{type(context).__name__} is no Context of pyopencl")
        if self.raw not in context.devices:
            raise DeviceError(f"the context has no {self.raw.name}, which {self.name} is",
                              hint=f"its devices are {', '.join(d.name for d in context.devices)}")  # fmt: skip
        if queue is not None and (its != context or queue.device != self.raw):
            raise DeviceError(f"the queue is not of that context and {self.name}")
        if queue is not None and queue.properties & cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE:
            raise DeviceError("the queue runs out of order", hint="make it without OUT_OF_ORDER_EXEC_MODE_ENABLE")
        made = OpenCLDevice(self.name, self.shares_memory, self.raw, context)
        made.is_lent, made.lent_queue, made._told_threads = True, queue, self._told_threads
        return made

    def check_lent(self, memory: Any, nbytes: int) -> None:
        lent.check(memory, nbytes)

    def configured(self, settings: Settings) -> Device:
        fewer = 0 < settings.cpu_threads_num < self.target.units and self.target.device == "cpu"
        if fewer and not self._told_threads:
            self._told_threads = True
            LOG.warning("%s uses all its threads: CPU_THREADS_NUM changes nothing there", self.name)
        return self

    def build(self, source: str) -> Any:
        """Return the compiled program of a source; each text is compiled once."""
        # a thread left behind by the fork may have been compiling, and holds the lock for ever
        if OpenCLQueue.orphaned:
            _refuse()
        return self._programs.build(source)

    def launch(
        self, queue: Queue, program: Any, name: str, grid: Sequence[int], local: Sequence[int] = ()
    ) -> OpenCLLaunch:  # fmt: skip
        """Return a kernel of a program over a grid of work-items, ready for its arguments; ``local``: the size of a
        group."""
        assert isinstance(queue, OpenCLQueue)
        return OpenCLLaunch(queue, queue.kernel(program, name), tuple(grid), tuple(local))


def _target(device: Any) -> Target:
    software = (
        ("runtime", device.platform.name), ("driver", device.driver_version), ("version", device.version),
    )  # fmt: skip
    if not is_cpu(device):
        arch = device.vendor
        lacks, options = ((), OPTIONS) if device.double_fp_config else (("fp64",), OPTIONS + WITHOUT_FP64)
        # Work-items are the vectors of a GPU; each holds four floats at a time, the best width for memory reads.
        return Target("gpu", device.name, arch, device.max_compute_units, software, "c", options, 16, 16, lacks)
    vector, registers = _vectors()
    return Target(
        "cpu", cpu_name(), f"{vector * 8}-bit vectors", device.max_compute_units, software, "c", OPTIONS, vector,
        registers,
    )  # fmt: skip


def _vectors() -> tuple[int, int]:
    """Return the bytes and the number of vector registers: runtimes compile for the processor that is there."""
    flags = cpu_flags()
    if "avx512f" in flags:
        return 64, 32
    return (32, 16) if "avx2" in flags else (16, 16)


def _orphan() -> None:
    OpenCLQueue.orphaned = True
    # Freeze existing garbage: releasing runtime objects may take a lock that a thread held at the fork.
    gc.freeze()


def _refuse() -> NoReturn:
    """Refuse work in a fork: kernels would wait for the runtime's threads, and compiling for a lock that one of them
    held."""
    raise DeviceError(
        "this process was forked from one that had opened the device, whose threads stayed there",
        hint="start processes with multiprocessing's 'spawn', or open the device only after the fork",
    )


@cache
def _found() -> tuple[dict[str, Any], dict[str, str]] | str:
    """Return `names` of all OpenCL devices, or why there are none."""
    found = probe.devices()
    if isinstance(found, str):
        return found
    if hasattr(os, "register_at_fork"):  # a runtime's threads begin when its devices are listed
        os.register_at_fork(after_in_child=_orphan)
    # torch takes seconds to import, so it is asked only where there is a GPU that it could offer too
    return names(found, cuda.places() if any(map(is_gpu, found)) else (), probe.why_not)


DEVICES = (OpenCLDevice,)
