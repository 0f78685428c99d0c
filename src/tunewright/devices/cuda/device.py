"""NVIDIA GPUs through torch: its memory, streams and graphs, the vendor's libraries that it brings, and Triton.

This module imports torch only when a device is opened. Torch types stay in this module and the solvers of
`solvers.triton` and `solvers.vendor`. Elsewhere a tensor in GPU memory is a `CudaArray`.
"""

from __future__ import annotations

import copy
import ctypes
import importlib.util
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tunewright.errors import DeviceError, InputError
from tunewright.ir.types import DType, TensorType

from .. import dlpack, pci
from ..base import Device, Hints, Queue, Target, address, host_array
from ..constant_copies import ConstantCopies
from ..executable import Part
from ..remote import RemoteTensor
from .graph import CudaGraph

Array = np.ndarray[Any, Any]

#: files of a loaded driver: importing torch takes seconds and tells no more
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
#: types that a torch tensor can hold; sub-byte types and strings stay on the host
HELD = frozenset(
    {DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64, DType.BOOL, DType.UINT8, DType.INT8, DType.INT16,
     DType.INT32, DType.INT64, DType.UINT16, DType.UINT32, DType.UINT64}
)  # fmt: skip


_NO_HINTS = Hints()
#: tensors that are copied to the device before anything waits for it
_MOST_STAGED = 64


class CudaArray:
    """A tensor in the GPU's memory, contiguous in its physical order. `Queue.fetch` copies it out, `put` into it."""

    __slots__ = ("_begin", "_raw", "_tensor", "dtype", "shape", "staging")

    def __init__(self, raw: Any, shape: tuple[int, ...], dtype: np.dtype[Any], begin: int | None = None) -> None:
        """``begin``: where this tensor starts, if it is a part of these bytes."""
        self._raw, self._begin, self.shape, self.dtype = raw, begin, shape, dtype
        self._tensor: Any = None
        #: pinned host memory that it is copied through
        self.staging: Any = None

    @property
    def raw(self) -> Any:
        """Its bytes, looked up at first use: a graph holds their address."""
        if self._begin is not None:
            self._raw, self._begin = self._raw[self._begin : self._begin + self.nbytes], None
        return self._raw

    @property
    def tensor(self) -> Any:
        """The same memory as a torch tensor."""
        if self._tensor is None:
            self._tensor = self.raw.view(torch_dtype(self.dtype)).view(self.shape)
        return self._tensor

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def torch_dtype(dtype: np.dtype[Any]) -> Any:
    """Return torch's name of an element type."""
    import torch

    return getattr(torch, dtype.name)


class CudaQueue(Queue):
    """A stream of one request."""

    compares = True

    def __init__(self, device: CudaDevice, hints: Hints = _NO_HINTS) -> None:
        import torch

        self.device, self._torch = device, torch
        self.pending = False
        self.launches = 0
        #: The caller's stream, where one is given: its other work is then ordered before or behind ours, and nothing
        #: waits for results that stay on the device.
        self.stream = device.stream if device.stream is not None or not device.is_gpu else torch.cuda.Stream(
            device.raw, priority=_priority(hints.priority)
        )  # fmt: skip
        #: waiting threads sleep until the device is done, instead of polling
        self._sleeps = hints.throttle == "LOW"
        #: memory of others that kernels read, kept until they finish; and the same behind an event, where nothing waits
        self._kept: list[Any] = []
        self._held: deque[tuple[Any, list[Any]]] = deque()
        #: Memory that kernels share in turn, and numbers that each kernel leaves at zero. The last is largest; earlier
        #: graphs hold the addresses of others.
        self._scratch: list[Any] = []
        self._zeros: list[Any] = []
        #: copies whose host source may still be read
        self._staged: list[CudaArray] = []
        #: the last event asked for its time, and that time: only differences of near events are exact
        self._last: tuple[Any, float] | None = None

    @contextmanager
    def current(self) -> Iterator[None]:
        """Send everything that torch and Triton enqueue inside the block to this stream."""
        self.pending = True
        with nullcontext() if self.stream is None else self._torch.cuda.stream(self.stream):
            yield

    @property
    def scratch_bytes(self) -> int:
        return sum(one.nbytes for one in [*self._scratch, *self._zeros])

    def scratch(self, nbytes: int) -> Any:
        """Return uninitialised memory, valid until the next kernel asks: the kernels of a queue run in turn."""
        if not self._scratch or len(self._scratch[-1]) < nbytes:
            self._scratch.append(self._torch.empty(nbytes, dtype=self._torch.uint8, device=self.device.raw))
        return self._scratch[-1]

    def zeros(self, count: int) -> Any:
        """Return integers that are zero; their user makes them zero again."""
        if not self._zeros or len(self._zeros[-1]) < count:
            self._zeros.append(self._torch.zeros(max(count, 4096), dtype=self._torch.int32, device=self.device.raw))
        return self._zeros[-1]

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """Record what ``work`` enqueues as a graph: one launch. It must have run before, because nothing may be
        compiled now."""
        torch = self._torch
        if self.stream is None:  # Triton's interpreter records nothing
            return work
        self.finish()
        graph = torch.cuda.CUDAGraph()
        stream = self.stream
        if self.device.stream is not None:  # it may be the default stream, which cannot be recorded
            self.stream = torch.cuda.Stream(self.device.raw)
        try:
            # Not torch.cuda.graph(): it collects garbage and empties torch's cache first, which takes 0.1 s.
            with torch.cuda.stream(self.stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        finally:
            self.stream = stream

        def replay() -> None:
            with self.current():
                graph.replay()

        return replay

    def write_words(self, words: Array, to: Any) -> None:
        """Copy numbers into memory that `CudaDevice.words` made, in order behind queued work."""
        there = self._torch.from_numpy(words)
        with self.current():
            # newly pinned memory: older memory may still be read, and torch tracks until when
            to.copy_(there.pin_memory() if self.device.is_gpu else there, non_blocking=True)

    def mark(self) -> Any:
        """Mark a point between the work enqueued before and after it, also in a graph; see `Event.elapsed_time`."""
        event = self._torch.cuda.Event(enable_timing=True, external=True)
        event.record(self.stream)
        return event

    def now(self) -> float:
        if self.stream is None:
            return time.perf_counter()
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        event.synchronize()
        self.pending = False
        last, at = self._last or (event, 0.0)
        at += last.elapsed_time(event) / 1e3 if last is not event else 0.0
        self._last = event, at
        return at

    def finish(self) -> None:
        if self.pending and self.stream is not None:
            begin = time.perf_counter()
            if self._sleeps:
                event = self._torch.cuda.Event(blocking=True)
                event.record(self.stream)
                event.synchronize()
            else:
                self.stream.synchronize()
            self.waited += time.perf_counter() - begin
        self.pending = False
        self._staged.clear()
        self._kept.clear()
        self._held.clear()

    def adopt(self, value: Any, writable: bool = False) -> Any:
        if isinstance(value, RemoteTensor):
            if not isinstance(value.memory, CudaArray):
                return super().adopt(value, writable)
            array = value.memory
            if array.raw.device != self.device.raw:
                raise InputError(f"is in {value.device}'s memory, the model is on {self.device.name}")
            if value.ready is not None and self.stream is not None:
                self.stream.wait_event(value.ready)
        else:
            kind, number = dlpack.place(value)
            if (kind, number) != self.device.place and not (kind == dlpack.CUDA_MANAGED and self.device.is_gpu):
                if kind == dlpack.CUDA:
                    raise InputError(f"is in GPU.{number}'s memory, the model is on {self.device.name}")
                return host_array(value, writable)
            array = self._imported(value, writable)
        self._kept.append(array)
        self.pending = True
        return array

    def _imported(self, value: Any, writable: bool) -> CudaArray:
        """Return the memory of another library's tensor on this GPU, after the work which that library has enqueued."""
        torch, stream = self._torch, None
        if self.stream is not None:
            stream = self.stream.cuda_stream or 1  # DLPack's number of the default stream
        # Not with our stream as torch's current one: torch takes the current stream for the one that writes its
        # tensors.
        with torch.cuda.device(self.device.raw) if self.device.is_gpu else nullcontext():
            try:
                capsule, read_only = dlpack.capsule(value, writable, stream)
                tensor = torch.from_dlpack(capsule)
            except (BufferError, RuntimeError) as error:
                raise InputError(f"cannot be shared through DLPack: {error}") from None
        if writable and (read_only or not tensor.is_contiguous()):
            raise InputError("is read-only" if read_only else "has gaps: an output's elements must lie in a row")
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in {dtype.value for dtype in HELD}:
            raise InputError(f"has elements of {name}, which no kernel takes")
        self._kept.append(tensor)  # also when gaps force a copy
        with self.current():
            flat = tensor.contiguous().reshape(-1)
        return CudaArray(flat.view(torch.uint8), tuple(tensor.shape), DType(name).numpy)

    def duplicate(self, value: Any) -> Any:
        type = TensorType(DType.of_numpy(value.dtype), value.shape)
        if isinstance(value, np.ndarray) and type.dtype not in HELD:  # the host made it, and keeps it
            return value.copy()
        with self.current():  # its memory returns to this stream
            made = self.device.new(type)
        self.put(value, made)
        return made

    def settle(self) -> Any:
        if self.stream is None or self.device.stream is None:
            return super().settle()
        while self._held and self._held[0][0].query():
            self._held.popleft()
        event = self._torch.cuda.Event()
        event.record(self.stream)
        self._held.append((event, self._kept))
        self._kept = []
        return event

    def put(self, array: Array | CudaArray, to: CudaArray) -> None:
        if isinstance(array, CudaArray):
            # A graph has fixed addresses, so inputs are copied to where it reads them: 2 us, while recording takes
            # 1000.
            if (array.shape, array.dtype) != (to.shape, to.dtype):
                raise ValueError(f"{array.dtype}{list(array.shape)} is no {to.dtype}{list(to.shape)}")
            with self.current():
                to.raw.copy_(array.raw, non_blocking=True)
            return
        if (array.shape, array.dtype) != (to.shape, to.dtype):
            raise ValueError(f"{array.dtype}{list(array.shape)} is no {to.dtype}{list(to.shape)}")
        if not array.size:
            return
        if self.device.pinned and array.flags.c_contiguous and address(array) in self.device.pinned:
            with self.current():
                to.raw.copy_(self._torch.from_numpy(array.reshape(-1).view(np.uint8)), non_blocking=True)
            return
        if len(self._staged) >= _MOST_STAGED or any(one is to for one in self._staged):
            self.finish()
        self._staged.append(to)
        staging = self._staging(to)
        staging.numpy()[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        with self.current():
            to.raw.copy_(staging, non_blocking=True)

    def fill(self, to: CudaArray, byte: int) -> None:
        with self.current():
            to.raw.fill_(byte)

    def equal(self, one: CudaArray, other: CudaArray) -> bool:
        with self.current():
            return bool(self._torch.equal(one.raw, other.raw))

    def fetch(self, values: Sequence[Any]) -> Sequence[Any]:
        found: list[Any] = []
        with self.current():
            for value in values:
                if isinstance(value, CudaArray) and value.nbytes:
                    self._staging(value).copy_(value.raw, non_blocking=True)
        self.finish()
        for value in values:
            if isinstance(value, CudaArray):
                copy = np.empty(value.shape, value.dtype)
                if copy.size:
                    copy.reshape(-1).view(np.uint8)[:] = value.staging.numpy()
                found.append(copy)
            else:
                found.append(value)
        return found

    def _staging(self, array: CudaArray) -> Any:
        if array.staging is None:
            array.staging = self._torch.empty(array.nbytes, dtype=self._torch.uint8, pin_memory=self.device.is_gpu)
        return array.staging


class CudaDevice(Device):
    """One GPU. ``raw`` = "cpu" runs the same solvers on the processor, with Triton's interpreter: for tests."""

    family = "cuda"
    priority = 20
    kinds = ("GPU",)
    shares_memory = False
    serves_classes = prefers_exact = True
    precision = DType.FLOAT16

    @classmethod
    def available(cls) -> list[str] | str:
        found = _found()
        return found if isinstance(found, str) else [f"GPU.{k}" for k in range(found)]

    def __init__(self, name: str, raw: str | None = None) -> None:
        import torch

        self.name = name
        #: a caller's stream, which requests work on
        self.stream: Any = None
        self.raw = torch.device(raw or f"cuda:{int(name.partition('.')[2] or 0)}")
        self.is_gpu = self.raw.type != "cpu"
        if self.is_gpu:
            found = _found()
            if isinstance(found, str) or (self.raw.index or 0) >= found:
                raise DeviceError(f"there is no CUDA device {name!r}")
        self.target = _target(self.raw)
        if self.is_gpu:
            properties = torch.cuda.get_device_properties(self.raw)
            self.memory_bytes = int(properties.total_memory)
            self.cache_bytes = int(getattr(properties, "L2_cache_size", 0))
            self.pci = pci.of_cuda(properties)
        self._constants = ConstantCopies(self._copy)
        #: addresses where `host_memory` blocks begin
        self.pinned: set[int] = set()

    def host_memory(self, nbytes: int) -> Array:
        import torch

        made: Array = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.is_gpu).numpy()
        self.pinned.add(address(made))
        weakref.finalize(made, self.pinned.discard, address(made)).atexit = False
        return made

    def held(self) -> dict[str, int]:
        import torch

        found = {"constants": self._constants.nbytes}
        if self.is_gpu:  # counts all users of torch in this process
            found["allocated"] = int(torch.cuda.memory_allocated(self.raw))
            found["reserved"] = int(torch.cuda.memory_reserved(self.raw))
        return found

    @property
    def free_bytes(self) -> int | None:
        import torch

        return int(torch.cuda.mem_get_info(self.raw)[0]) if self.is_gpu else None

    @property
    def is_discrete(self) -> bool:
        import torch

        return self.is_gpu and not getattr(torch.cuda.get_device_properties(self.raw), "is_integrated", False)

    @property
    def uuid(self) -> str | None:
        import torch

        found = getattr(torch.cuda.get_device_properties(self.raw), "uuid", None) if self.is_gpu else None
        return None if found is None else str(found)

    def queue(self) -> CudaQueue:
        return CudaQueue(self)

    def link(self, parts: Sequence[Part]) -> CudaGraph:
        return CudaGraph(self, parts)

    def request_queue(self, hints: Hints) -> CudaQueue:
        return CudaQueue(self, hints)

    def lent(self, context: Any, queue: Any) -> CudaDevice:
        if context is not None:
            raise DeviceError(f"{self.name} takes no context", hint="give a stream: queue=torch.cuda.current_stream()")
        import torch

        made = copy.copy(self)
        handle = _stream_handle(queue)
        if self.is_gpu:
            made.stream = torch.cuda.ExternalStream(handle, device=self.raw) if handle else torch.cuda.default_stream(
                self.raw
            )  # fmt: skip
        return made

    @property
    def place(self) -> tuple[int, int]:
        """DLPack's name of its memory."""
        return (dlpack.CUDA, self.raw.index or 0) if self.is_gpu else (dlpack.CPU, 0)

    def dlpack_device(self, memory: Any) -> tuple[int, int]:
        return self.place if isinstance(memory, CudaArray) else super().dlpack_device(memory)

    def export(self, memory: Any, ready: Any, stream: int | None, given: dict[str, Any]) -> Any:
        if not isinstance(memory, CudaArray):
            return super().export(memory, ready, stream, given)
        if not self.is_gpu:
            return memory.tensor.__dlpack__(**given)
        import torch

        if stream in (0, 2):
            raise BufferError(f"DLPack's stream {stream} is not supported: give 1 or the handle of a stream")
        with torch.cuda.device(self.raw):
            if stream != -1:
                reader = torch.cuda.ExternalStream(stream) if stream not in (None, 1) else torch.cuda.default_stream()
                if ready is not None:
                    reader.wait_event(ready)
                memory.raw.record_stream(reader)  # its memory is not reused before the reader is done
            return memory.tensor.__dlpack__(stream=-1, **given)

    def alloc(self, nbytes: int) -> CudaArray:
        import torch

        try:
            raw = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self.raw)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"the device has no {nbytes:,} bytes left") from error
        return CudaArray(raw[:nbytes], (nbytes,), np.dtype(np.uint8))

    def view(self, buffer: CudaArray, offset: int, type: TensorType) -> CudaArray:
        return CudaArray(buffer.raw, type.physical, type.dtype.numpy, offset)

    def new(self, type: TensorType) -> CudaArray:
        """Allocate memory for a tensor."""
        return self.view(self.alloc(type.nbytes), 0, type)

    def words(self, count: int) -> Any:
        """Allocate memory for 32-bit numbers, as a torch tensor."""
        import torch

        return torch.empty(count, dtype=torch.int32, device=self.raw)

    @property
    def kernel_label(self) -> str:
        return f"CUDA: {self.target.arch} (Triton)"

    def broken(self) -> str:
        """A kernel that reads unmapped memory takes the whole context with it: every later call fails."""
        import torch

        try:
            if self.is_gpu:
                torch.cuda.synchronize(self.raw)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return ""

    def constant(self, array: Array) -> CudaArray:
        return self._constants.of(array)

    def _copy(self, array: Array) -> CudaArray:
        made = CudaArray(self.alloc(array.nbytes).raw, array.shape, array.dtype)
        if array.size:
            # It is copied once, while the caller waits: copying through pinned memory would take longer.
            made.raw.copy_(_over(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))
        return made

    def convert(self, array: Array, dtype: DType) -> Array:
        """Torch makes halves eight times as fast as numpy on one core; and it uses several."""
        if not array.size or dtype not in HELD or DType.of_numpy(array.dtype) not in (DType.FLOAT32, DType.FLOAT16):
            return super().convert(array, dtype)
        import torch

        made = _over(np.ascontiguousarray(array).reshape(-1)).to(torch_dtype(dtype.numpy), copy=True)
        found: Array = made.view(torch.uint8).numpy().view(dtype.numpy).reshape(array.shape)
        return found


def _over(flat: Array) -> Any:
    """Return a tensor over an array's memory that is only read: torch's own function warns for read-only arrays."""
    import torch

    memory: Any = (ctypes.c_uint8 * flat.nbytes).from_address(address(flat))
    memory.kept = flat
    return torch.from_numpy(np.frombuffer(memory, flat.dtype))


@cache
def _found() -> int | str:
    """Return how many GPUs there are, or why there are none."""
    if not any(path.exists() for path in _DRIVERS):
        return "no NVIDIA driver is loaded: install it, and 'tunewright[cuda]'"
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be found: pip install 'tunewright[cuda]'"
    import torch

    if not torch.cuda.is_available():
        return "torch finds no GPU"
    return int(torch.cuda.device_count())


def places() -> list[str | None]:
    """Return where each GPU is plugged in, in the order of their numbers."""
    found = _found()
    if isinstance(found, str):
        return []
    import torch

    return [pci.of_cuda(torch.cuda.get_device_properties(k)) for k in range(found)]


def _target(raw: Any) -> Target:
    import torch
    import triton

    versions = [("torch", torch.__version__), ("triton", triton.__version__)]
    if raw.type == "cpu":
        return Target("gpu", "Triton's interpreter", "none", 1, tuple(versions), "cuda")
    properties = torch.cuda.get_device_properties(raw)
    versions += [("cuda", str(torch.version.cuda)), ("cudnn", str(torch.backends.cudnn.version()))]
    versions += [("cublas", _cublas(str(torch.version.cuda))), ("driver", _driver())]
    arch = f"sm_{properties.major}{properties.minor}"
    return Target("gpu", properties.name, arch, properties.multi_processor_count, tuple(versions), "cuda")


def _cublas(cuda: str) -> str:
    """Return the version of the library that torch has loaded, which torch does not give; ``cuda``: torch's."""
    found = ctypes.c_int()
    try:
        ask = ctypes.CDLL(f"libcublas.so.{cuda.partition('.')[0]}").cublasGetProperty
        numbers = [found.value for part in range(3) if ask(part, ctypes.byref(found)) == 0]
    except (OSError, AttributeError):
        return "unknown"
    return ".".join(map(str, numbers)) or "unknown"


def _driver() -> str:
    """Return the kernel driver's version, as the driver states it."""
    try:
        words = _DRIVERS[0].read_text(encoding="utf-8").split()
    except OSError:
        return "unknown"
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), "unknown")


def _priority(hint: str) -> int:
    """Return a stream's priority: CUDA's default is the lowest, so LOW equals MEDIUM."""
    import torch

    return min(torch.cuda.Stream.priority_range()) if hint == "HIGH" else 0


def _stream_handle(stream: Any) -> int:
    """Return the address of a stream of torch, CuPy or any library with `__cuda_stream__`, or a number; 0: the default
    one."""
    for name in ("cuda_stream", "ptr"):
        found = getattr(stream, name, None)
        if isinstance(found, int):
            return found
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return 0 if stream == 1 else stream  # 1 is DLPack's number of the default stream
    raise DeviceError(f"{type(stream).__name__} is no stream of CUDA", hint="queue=torch.cuda.current_stream()")


DEVICES = (CudaDevice,)
