"""OpenCL devices through pyopencl: the processor with PoCL from its wheel, other runtimes and GPUs where installed."""

from __future__ import annotations

import copy
import dataclasses
import gc
import logging
import os
import threading
import time
from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

import numpy as np

from ..errors import DeviceError, InputError
from ..ir.types import DType, TensorType
from ..settings import Settings, export
from . import affinity, cuda, icd, lent, pci, pocl, unlocked
from .base import Device, Hints, Queue, Target
from .c_device import CDevice, CLaunch, CQueue
from .code_pages import SET_UP, drop_code
from .host import cache_bytes, cpu_count, cpu_flags, cpu_name, free_bytes, memory_bytes
from .opencl_names import WITHOUT_THREADS, gpu_cache, is_cpu, names, queue_properties, runtime_of, svm_kinds
from .programs import Programs
from .quiet import quietly
from .remote import RemoteTensor
from .svm import DeviceArray, Memory, writable

#: Results are compared with references of their own arithmetic, so nothing that changes values but denormals as zero
#: (they cost 30 to 50 times). Kernels ask for reassociation where they sum.
OPTIONS = "-cl-denorms-are-zero -w"
#: for a device that lacks fp64
WITHOUT_FP64 = " -DWITHOUT_FP64"

#: processors that LLVM compiles AVX-512 for by name: Intel's, of whose vectors it would rather use half, and others
_INTEL = ("skylake-avx512", "cascadelake", "cooperlake", "cannonlake", "icelake", "tigerlake", "rocketlake",
          "sapphirerapids", "emeraldrapids", "graniterapids")  # fmt: skip
_AVX512 = (*_INTEL, "znver4", "znver5")


LOG = logging.getLogger("tunewright")
_NO_HINTS = Hints()


class _Shared:
    """A kernel object of one queue. Launches of the same program share it: making one takes longer than running it."""

    __slots__ = ("kernel", "owner")

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        #: whose arguments are set
        self.owner: Launch | None = None


class Launch(CLaunch):
    """A kernel with its arguments: calling it enqueues. It belongs to one queue and is not shared between threads."""

    __slots__ = (
        "_again", "_enqueue", "_grid", "_leaving", "_local", "_numbers", "_pointers", "_queue", "_shared", "_svm",
        "_times",
    )  # fmt: skip

    def __init__(
        self, queue: OpenCLQueue, shared: _Shared, grid: tuple[int, ...], local: tuple[int, ...] = ()
    ) -> None:  # fmt: skip
        import pyopencl as cl

        self._queue, self._shared, self._grid, self._local = queue, shared, grid, local or _ONE[: len(grid)]
        self._svm, self._enqueue = cl.SVM, cl.enqueue_nd_range_kernel
        self._pointers: dict[int, Any] = {}
        self._numbers: tuple[Any, ...] = ()
        #: in the calling thread: what enqueues it from the second time on, and what leaves Python's lock to others
        self._again: unlocked.Enqueue | None = None
        self._leaving: unlocked.Enqueue | None = None
        #: how long it took at first, until it is known which of them pays
        self._times: list[float] | None = []

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
        if queue.held is not None:
            queue.begin([])
        if shared.owner is not self:
            shared.owner = None  # until all are set: Ctrl-C may come in between
            # One call for all numbers takes a fifth of a microsecond, `set_arg` seven for each.
            shared.kernel._set_arg_buf_pack_multi(self._numbers)
            for at, pointer in self._pointers.items():
                shared.kernel.set_arg(at, pointer)
            shared.owner = self
        queue.launches += 1
        queue.pending = True
        if not queue.alone:
            self._enqueue(queue.raw, shared.kernel, self._grid, self._local)
            return
        begin = time.perf_counter()  # it runs here and now
        if self._again is None or self._again():
            # The first time it is compiled, which is nobody else's business; and pyopencl says what is wrong.
            self._enqueue(queue.raw, shared.kernel, self._grid, self._local)
            ways = unlocked.enqueuing(queue.raw, shared.kernel, self._grid, self._local)
            if ways is not None:
                self._again, self._leaving = ways
            queue.waited += time.perf_counter() - begin
            return
        took = time.perf_counter() - begin
        queue.waited += took
        if self._times is not None:
            self._times.append(took)
            if len(self._times) == unlocked.TRIALS:
                if min(self._times) > unlocked.BRIEF:
                    self._again = self._leaving
                self._times = None


_ONE = (1, 1, 1)
#: what the pointer to an empty tensor points to: nobody reads it, but it must be one
_NOTHING = np.zeros(64, np.uint8)


class OpenCLQueue(CQueue):
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
        #: Buffers of a caller's that are mapped for now
        self._mapped: list[Any] = []
        self.held: unlocked.Held | None = None

    def kernel(self, program: Any, name: str) -> _Shared:
        """The queue's own kernel object of a program."""
        key = (id(program), name)
        if key not in self._kernels:
            import pyopencl as cl

            with quietly():  # it writes code for each, and finds that the text's name is taken
                kernel = cl.Kernel(program, name)
            self._kernels[key] = program, _Shared(kernel)  # kept, so that its id stays its own
        return self._kernels[key][1]

    def borrow(self, device: OpenCLDevice, number: int, nbytes: int) -> Any:
        """Scratch memory for a kernel: those of a queue run one after the other, and share what has one number."""
        held = self.scratch.get(number)
        if held is None or held.nbytes < nbytes:
            held = self.scratch[number] = device.alloc(nbytes)
        return held

    @property
    def scratch_bytes(self) -> int:
        return sum(held.nbytes for held in self.scratch.values())

    def keep(self, owner: object) -> None:
        """Let something live until everything queued so far has finished."""
        self.kept.append(owner)

    def now(self) -> float:
        self.finish()
        return time.perf_counter()

    @property
    def can_hold(self) -> bool:
        return self.alone and unlocked.possible()

    def drop(self) -> None:
        self.held = None

    def hold(self, launch: unlocked.Held) -> None:
        """Enqueue it when somebody waits for it, or something else is enqueued."""
        if self.held is not None:
            self.begin([])
        self.held, self.pending = launch, True

    def begin(self, others: Sequence[Queue]) -> None:
        first = self.held
        if first is None:
            return
        held: list[tuple[OpenCLQueue, unlocked.Held]] = []
        for other in others:
            if isinstance(other, OpenCLQueue) and other.held is not None and other.held.program is first.program:
                held.append((other, other.held))
        # Taken before they run: nothing is begun twice, and who finds none asks OpenCL.
        waited, self.held = self.waited, None
        try:
            first.begin([launch for _, launch in held])
        except BaseException:
            if held:  # each by itself tells whose error it is
                self.held = first
            raise
        waited = (self.waited - waited) / (1 + len(held))
        self.waited -= len(held) * waited
        for queue, _ in held:
            queue.held, queue.pending = None, False
            queue.waited += waited
            queue.launches += 1
            queue.waits += 1
            queue.kept.clear()

    def finish(self) -> None:
        if self.held is not None:
            self.begin([])
        if self.pending:
            begin = time.perf_counter()
            if self.alone and unlocked.possible():
                unlocked.finish(self.raw)
            else:
                self.raw.finish()
            self.waited += time.perf_counter() - begin
            self.pending = False
            self.waits += 1
            self.kept.clear()

    def adopt(self, value: Any, writable: bool = False) -> Any:
        import pyopencl as cl

        if not isinstance(value, RemoteTensor) or not isinstance(value.memory, cl.Buffer | cl.SVMPointer):
            return super().adopt(value, writable)
        if writable and lent.read_only(value.memory):
            raise InputError("is a Buffer that may only be read")
        self.pending = True  # what a caller has enqueued before it: the host waits before it looks
        if isinstance(value.memory, cl.SVMPointer) or not value.nbytes:
            return lent.pointed(value)
        # Without the caller's queue the caller has waited for it, as docs/remote-tensors.md says.
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

    ``shares_memory`` False treats a processor as if it were not so.
    """

    family = "opencl"
    priority = 10
    dialect = "opencl"
    #: the context is a caller's, and so is the queue that all requests work on, if there is one
    is_lent: bool = False
    lent_queue: Any = None

    @classmethod
    def available(cls) -> list[str] | str:
        found = _found()
        return found if isinstance(found, str) else list(found[0]) or "the OpenCL platforms offer no device"

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
        self.rest()
        self.target = _target(self.raw)
        self.memory_bytes = memory_bytes() if self.target.device == "cpu" else int(self.raw.global_mem_size)
        self.cache_bytes = cache_bytes() if self.target.device == "cpu" else gpu_cache(self.raw)
        self.pci = None if self.target.device == "cpu" else pci.of_opencl(self.raw)
        self.shares_memory = _shares_memory(self.raw) if shares_memory is None else shares_memory
        self._memory = None if self.shares_memory else Memory(self.context, self.raw)
        self._programs = Programs(name, self.context, self.raw, self.target.options, _halves(self.raw.version))
        self._lock = threading.Lock()
        self._inline: OpenCLDevice | None = None
        #: hints that it was asked for in vain
        self._told: set[Hints] = set()
        #: itself with fewer threads, and with all of them
        self._fewer: dict[int, OpenCLDevice] = {}
        self._whole: OpenCLDevice | None = None

    def alloc(self, nbytes: int) -> Any:
        return super().alloc(nbytes) if self._memory is None else self._memory.alloc(nbytes)

    def view(self, buffer: Any, offset: int, type: TensorType) -> Any:
        return buffer.view(offset, type) if isinstance(buffer, DeviceArray) else super().view(buffer, offset, type)

    def constant(self, array: np.ndarray[Any, Any]) -> Any:
        return array if self._memory is None else self._memory.constant(array)

    def rest(self) -> None:
        drop_code(*SET_UP)

    def bind(self, mode: str) -> None:
        if self.target.device == "cpu" and not OpenCLQueue.orphaned:
            affinity.bind(mode)

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
        except (AttributeError, cl.Error):  # of an older pyopencl, or without the extension
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
        made = OpenCLQueue(raw, self.alone) if self._memory is None else CopyingQueue(raw, self._memory, self)
        pocl.queues.add(made)
        return made

    def lent(self, context: Any, queue: Any) -> OpenCLDevice:
        import pyopencl as cl

        if queue is not None and not isinstance(queue, cl.CommandQueue):
            raise DeviceError(f"{type(queue).__name__} is no CommandQueue of pyopencl")
        context = queue.context if context is None and queue is not None else context
        if not isinstance(context, cl.Context):
            raise DeviceError(f"{type(context).__name__} is no Context of pyopencl")
        if self.raw not in context.devices:
            raise DeviceError(f"the context has no {self.raw.name}, which {self.name} is",
                              hint=f"its devices are {', '.join(d.name for d in context.devices)}")  # fmt: skip
        if queue is not None and (queue.context != context or queue.device != self.raw):
            raise DeviceError(f"the queue is not of that context and {self.name}")
        if queue is not None and queue.properties & cl.command_queue_properties.OUT_OF_ORDER_EXEC_MODE_ENABLE:
            raise DeviceError("the queue runs out of order", hint="make it without OUT_OF_ORDER_EXEC_MODE_ENABLE")
        made = OpenCLDevice(self.name, self.shares_memory, self.raw, context)
        made.is_lent, made.lent_queue = True, queue
        return made

    def check_lent(self, memory: Any, nbytes: int) -> None:
        lent.check(memory, nbytes)

    @property
    def alone(self) -> bool:
        """It runs in the calling thread, without threads of its own."""
        return bool(self.raw.name.startswith(WITHOUT_THREADS))

    def with_threads(self, count: int) -> Device:
        most = min(self.target.units, cpu_count())
        units = min(count or most, most)
        if self.target.device != "cpu" or not self.shares_memory or units == self.target.units:
            return self
        # The runtime has no way to confine a launch to some of its threads: what is launched does it (`confined`).
        with self._lock:
            if units not in self._fewer:
                made = copy.copy(self)  # programs are compiled once for all
                made.target, made.confined = dataclasses.replace(self.target, units=units), True
                made._lock, made._inline, made._fewer, made._whole = threading.Lock(), None, {}, self
                self._fewer[units] = made
            return self._fewer[units]

    @property
    def joins(self) -> bool:
        """A network is better one launch than many. With Intel's compiler that is slower, and takes long to compile."""
        return self.shares_memory and runtime_of(self.raw) != "INTEL"

    @property
    def workers(self) -> int:
        """Work-items of a launch that shares its work out by itself: one for each thread."""
        return 1 if self.alone else max(1, min(self.target.units, cpu_count()))

    def inline(self) -> OpenCLDevice | None:
        twins = [d for d in self.raw.platform.get_devices() if d.name.startswith(WITHOUT_THREADS)]
        if self.raw in twins or not twins or not self.shares_memory or self.is_lent:
            return None
        with self._lock:
            if self._inline is None:
                twin = None if self._whole is None else self._whole.inline()
                made = OpenCLDevice(self.name, raw=twins[0]) if twin is None else copy.copy(twin)
                made.target = self.target  # the same kernels for the same processor
                made._told, made.leaves_lock = self._told, unlocked.possible()
                self._inline = made
            return self._inline

    def build(self, source: str) -> Any:
        """The compiled program of a source; each text is compiled once."""
        if OpenCLQueue.orphaned:  # a thread that stayed behind may have been compiling, and holds the lock for ever
            _refuse()
        return self._programs.build(source)

    def launch(
        self, queue: Queue, program: Any, name: str, grid: Sequence[int], local: Sequence[int] = ()
    ) -> Launch:  # fmt: skip
        """A kernel of a program over a grid of work-items, ready for its arguments; ``local``: in groups of so many."""
        assert isinstance(queue, OpenCLQueue)
        return Launch(queue, queue.kernel(program, name), tuple(grid), tuple(local))


def _target(device: Any) -> Target:
    software: tuple[tuple[str, str], ...] = (
        ("opencl", device.platform.name), ("driver", device.driver_version), ("version", device.version),
    )  # fmt: skip
    if not is_cpu(device):
        arch = device.vendor
        lacks, options = ((), OPTIONS) if device.double_fp_config else (("fp64",), OPTIONS + WITHOUT_FP64)
        # Work-items are the vectors of a GPU; one holds four floats at a time, as memory is read best.
        return Target("gpu", device.name, arch, device.max_compute_units, software, "c", options, 16, 16, lacks)
    vector, registers = _vectors(device.version)
    if _halves(device.version):  # what was tuned while vectors were split is a guess
        software = (*software, ("vectors", "whole"))
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


def _halves(version: str) -> bool:
    """PoCL's compiler would use half of each vector register, if it were not told otherwise (`programs.WHOLE`)."""
    return "PoCL" in version and any(name in version for name in _INTEL)


def _shares_memory(device: Any) -> bool:
    """Kernels may work on memory of the host that OpenCL knows nothing of."""
    import pyopencl as cl

    return is_cpu(device) or bool(svm_kinds(device) & cl.device_svm_capabilities.FINE_GRAIN_SYSTEM)


def _orphan() -> None:
    OpenCLQueue.orphaned = True
    # What is garbage already stays: to release objects of the runtime may take a lock that a thread held at the fork.
    gc.freeze()


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
        mode = settings.cpu_bind_threads
        runtimes, beginning = icd.runtimes(affinity.by_core(mode)), pocl.beginning(settings.cpu_threads_num)
        with runtimes, beginning, affinity.beginning(mode):
            platforms = cl.get_platforms()
            # A runtime may be found twice; a platform may have several devices of one name.
            devices = {
                (p.name, p.version, number): device for p in platforms for number, device in enumerate(p.get_devices())
            }
            drop_code(*SET_UP)
    except cl.Error as error:
        return f"no OpenCL platform ({error})"
    if hasattr(os, "register_at_fork"):  # a runtime's threads begin when its devices are listed
        os.register_at_fork(after_in_child=_orphan)
    found = list(devices.values())
    # torch, which takes seconds to import, is asked only where there is a GPU that it could offer too
    return names(found, cuda.places() if any(d.type & cl.device_type.GPU for d in found) else ())


DEVICES = (OpenCLDevice,)
