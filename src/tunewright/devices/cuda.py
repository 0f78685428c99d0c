"""NVIDIA GPUs through torch: its memory, streams and graphs, the vendor's libraries that it brings, and Triton.

Nothing here imports torch before a device is opened, and no type of torch's leaves this module and the solvers of
`solvers.triton` and `solvers.vendor`: elsewhere a tensor in the GPU's memory is a `CudaArray`.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DeviceError
from ..ir.types import DType, TensorType
from .base import Device, Queue, Target
from .copies import Copies

Array = np.ndarray[Any, Any]

#: where the driver says that it is loaded: torch takes seconds to import, and tells no more
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
#: what a tensor of torch can hold; sub-byte types and strings stay with the host
HELD = frozenset(
    {DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64, DType.BOOL, DType.UINT8, DType.INT8, DType.INT16,
     DType.INT32, DType.INT64, DType.UINT16, DType.UINT32, DType.UINT64}
)  # fmt: skip


class CudaArray:
    """A tensor in the GPU's memory, contiguous in its physical order. `Queue.fetch` copies it out, `put` into it."""

    __slots__ = ("dtype", "raw", "shape", "staging", "tensor")

    def __init__(self, raw: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        #: its bytes, and the same as torch's type
        self.raw, self.shape, self.dtype = raw, shape, dtype
        self.tensor = raw.view(torch_dtype(dtype)).view(shape)
        #: pinned memory of the host that it is copied through
        self.staging: Any = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def torch_dtype(dtype: np.dtype[Any]) -> Any:
    """Torch's name of an element type."""
    import torch

    return getattr(torch, dtype.name)


class CudaQueue(Queue):
    """A stream of one request."""

    def __init__(self, device: CudaDevice) -> None:
        import torch

        self.device, self._torch = device, torch
        self.pending = False
        self.launches = 0
        self.stream = torch.cuda.Stream(device.raw) if device.is_gpu else None
        #: Memory that kernels share, one after the other, and numbers that each leaves at zero. The last is largest;
        #: graphs that were recorded before it was there hold the addresses of others.
        self._scratch: list[Any] = []
        self._zeros: list[Any] = []
        #: the last event asked for its time, and that time: differences of near events are exact, of far ones not
        self._last: tuple[Any, float] | None = None

    @contextmanager
    def current(self) -> Iterator[None]:
        """What torch and Triton enqueue inside goes to this stream."""
        self.pending = True
        with nullcontext() if self.stream is None else self._torch.cuda.stream(self.stream):
            yield

    def scratch(self, nbytes: int) -> Any:
        """Memory with any content, until the next kernel asks: those of a queue run one after the other."""
        if not self._scratch or len(self._scratch[-1]) < nbytes:
            self._scratch.append(self._torch.empty(nbytes, dtype=self._torch.uint8, device=self.device.raw))
        return self._scratch[-1]

    def zeros(self, count: int) -> Any:
        """Integers that are zero; whoever changes them makes them zero again."""
        if not self._zeros or len(self._zeros[-1]) < count:
            self._zeros.append(self._torch.zeros(max(count, 4096), dtype=self._torch.int32, device=self.device.raw))
        return self._zeros[-1]

    def together(self, calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
        return super().together(calls) if self.stream is None else self.capture(super().together(calls))

    def capture(self, work: Callable[[], object]) -> Callable[[], object]:
        """What ``work`` enqueues, as a graph: one launch. It must have run before: nothing may be compiled now."""
        torch = self._torch
        self.finish()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            work()

        def replay() -> None:
            with self.current():
                graph.replay()

        return replay

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
            self.stream.synchronize()
            self.waited += time.perf_counter() - begin
        self.pending = False

    def put(self, array: Array, to: CudaArray) -> None:
        if (array.shape, array.dtype) != (to.shape, to.dtype):
            raise ValueError(f"{array.dtype}{list(array.shape)} is no {to.dtype}{list(to.shape)}")
        if not array.size:
            return
        self.finish()  # the staging memory may still be read
        staging = self._staging(to)
        staging.numpy()[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        with self.current():
            to.raw.copy_(staging, non_blocking=True)

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
    shares_memory = False
    precision = DType.FLOAT16

    @classmethod
    def available(cls) -> list[str] | str:
        found = _found()
        return found if isinstance(found, str) else [f"GPU.{k}" for k in range(found)]

    def __init__(self, name: str, raw: str | None = None) -> None:
        import torch

        self.name = name
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
        self._constants = Copies(self._copy)

    def queue(self) -> CudaQueue:
        return CudaQueue(self)

    def alloc(self, nbytes: int) -> CudaArray:
        import torch

        try:
            raw = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self.raw)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"the device has no {nbytes:,} bytes left") from error
        return CudaArray(raw[:nbytes], (nbytes,), np.dtype(np.uint8))

    def view(self, buffer: CudaArray, offset: int, type: TensorType) -> CudaArray:
        return CudaArray(buffer.raw[offset : offset + type.nbytes], type.physical, type.dtype.numpy)

    def new(self, type: TensorType) -> CudaArray:
        """Memory of its own for a tensor."""
        return self.view(self.alloc(type.nbytes), 0, type)

    def constant(self, array: Array) -> CudaArray:
        return self._constants.of(array)

    def _copy(self, array: Array) -> CudaArray:
        copy, queue = CudaArray(self.alloc(array.nbytes).raw, array.shape, array.dtype), self.queue()
        queue.put(array, copy)
        queue.finish()
        copy.staging = None  # it is never copied again
        return copy


@cache
def _found() -> int | str:
    """How many GPUs there are, or why there are none."""
    if not any(path.exists() for path in _DRIVERS):
        return "no NVIDIA driver is loaded"
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be found: pip install 'tunewright[cuda]'"
    import torch

    if not torch.cuda.is_available():
        return "torch finds no GPU"
    return int(torch.cuda.device_count())


def _target(raw: Any) -> Target:
    import torch
    import triton

    versions = [("torch", torch.__version__), ("triton", triton.__version__)]
    if raw.type == "cpu":
        return Target("gpu", "Triton's interpreter", "none", 1, tuple(versions), "cuda")
    properties = torch.cuda.get_device_properties(raw)
    versions += [("cuda", str(torch.version.cuda)), ("cudnn", str(torch.backends.cudnn.version()))]
    versions.append(("driver", _driver()))
    arch = f"sm_{properties.major}{properties.minor}"
    return Target("gpu", properties.name, arch, properties.multi_processor_count, tuple(versions), "cuda")


def _driver() -> str:
    """The kernel driver's version, as it says itself."""
    try:
        words = _DRIVERS[0].read_text(encoding="utf-8").split()
    except OSError:
        return "unknown"
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), "unknown")


DEVICES = (CudaDevice,)
