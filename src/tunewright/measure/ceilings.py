"""Measure a device's peak fp32 arithmetic and peak memory bandwidth. The roofline follows from both.

Two small kernels run through the device's own compiler and queue. One multiplies and adds in registers and touches no
memory. The other reads memory that no cache holds. Each is repeated and the best time counts: a busy machine can only
lower a measured ceiling. Both use the vector width that the device's kernels are compiled for, so a processor has a
ceiling for each instruction set (CPU_ISA). The host compiles no kernels; numpy measures it with a matrix product and a
maximum over an array.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..devices.base import Device
from ..devices.c_device import CDevice
from ..devices.c_kernel import CKernel
from ..devices.executable import Part
from ..errors import DeviceError, ExecutionError
from ..ir.types import DType, TensorType
from ..ops import lookup
from ..ops.base import Work
from ..ops.infer import MISTAKES
from ..solvers.base import Problem
from ..solvers.c.source.emit import In, Out, Source

#: Seconds of repetitions for one ceiling, not counting compilation, and the minimum number of repetitions.
ENOUGH, LEAST = 0.12, 4
#: Consecutive multiply-adds of each accumulator, and independent accumulators: enough to hide their latency.
ROUNDS, ACCUMULATORS = 1 << 15, 12
#: Loads in flight at a time.
UNROLLED = 4
#: Work-items: several per CPU core; on a GPU many groups of a few warps per unit.
CPU_ITEMS, GPU_GROUPS, GPU_LOCAL = 16, 32, 256
#: Size of the memory that is read, as a multiple of the last-level cache, and its bounds. A GPU needs 2 GiB: it reads
#: 256 MiB in less time than ten launches take. An H200 shows 3.3 TB/s with 256 MiB and 4.3 TB/s with 2 GiB.
BEYOND, LEAST_BYTES, MOST_BYTES, GPU_BYTES = 4, 64 << 20, 512 << 20, 2 << 30


@dataclass(frozen=True)
class Ceilings:
    """Peak speeds of a device; or, in ``why``, the reason why they are unknown."""

    #: fp32 operations per second; a multiply-add counts as two
    flops: float = 0.0
    #: bytes per second from memory
    bandwidth: float = 0.0
    why: str = ""

    def floor(self, work: Work) -> tuple[float, str]:
        """Return the minimum seconds that some work takes, and what limits it: "arithmetic" or "memory"."""
        arithmetic, memory = work.flops / self.flops, work.bytes / self.bandwidth
        return max(arithmetic, memory), "arithmetic" if arithmetic > memory else "memory"


def work_of(problem: Problem) -> Work | str:
    """Return arithmetic and traffic of one execution, with the epilogue; or the reason why they cannot be computed."""
    spec = lookup(problem.op)
    if spec is None:
        return f"the work of {problem.op} is not defined"
    given = [t for t in problem.inputs if t is not None]
    made = [t for t in problem.outputs if isinstance(t, TensorType)]
    if not all(isinstance(t, TensorType) and t.is_static for t in [*given, *problem.outputs]):
        return "its shapes depend on data"
    if any(isinstance(t, TensorType) and t.dtype is DType.STRING for t in [*given, *made]):
        return "texts have no fixed size"
    main = [t if isinstance(t, TensorType) else None for t in problem.main_inputs]
    try:
        flops = spec.work(main, made, problem.attrs).flops
    except (*MISTAKES, AssertionError) as error:  # a mistake in the model: running it reports the error
        return f"its types do not fit: {error}"
    results = sum(t.nbytes for t in made)
    read = [t.nbytes for t in given if isinstance(t, TensorType)]
    if spec.picks:
        read = [min(nbytes, results) for nbytes in read]
    return Work(flops + len(problem.epilogue) * sum(t.size for t in made), float(sum(read) + results))


_MEASURED: dict[Device, Ceilings] = {}
_LOCK = threading.Lock()


def ceilings(device: Device) -> Ceilings:
    """Return the ceilings of a device. They are measured once per process, in well under a second."""
    with _LOCK:
        if device not in _MEASURED:
            _MEASURED[device] = _measure(device)
        return _MEASURED[device]


def _measure(device: Device) -> Ceilings:
    try:
        if isinstance(device, CDevice):
            return _Probe(device).ceilings()
        if device.runs_references:
            return _host(device)
    except (DeviceError, ExecutionError, MemoryError) as error:
        return Ceilings(why=f"measuring it failed: {error}")
    return Ceilings(why=f"peak and bandwidth of {device.family} devices cannot be measured")


def best_of(run: Callable[[], object], now: Callable[[], float]) -> float:
    """Return the shortest time of several runs. The first run does not count."""
    run()
    best, begin = float("inf"), now()
    end, times = begin, 0
    while times < LEAST or end - begin < ENOUGH:
        start = now()
        run()
        end, times = now(), times + 1
        best = min(best, end - start)
    return max(best, 1e-9)


# ---- devices that compile C ------------------------------------------------------------------------------------------


def arithmetic(lanes: int) -> Source:
    """Multiply-adds of vectors of ``lanes`` floats, in registers."""
    source = Source("arithmetic")
    source.buffer("out", DType.FLOAT32, Out(0))
    source.dims(COUNT=ROUNDS)
    # these factors keep the values between 0 and 16 forever: no denormals, no infinities
    source.numbers(first=1.0, times=0.5, plus=1.0)
    _sum(source, lanes)
    each = range(ACCUMULATORS)
    source.add(" ".join(f"V a{i} = (V)(first + {i});" for i in each))
    source.add(f"for (int r = 0; r < COUNT; r++) {{ {' '.join(f'a{i} = a{i} * times + plus;' for i in each)} }}")
    source.add(f"out[GID(0)] = total({' + '.join(f'a{i}' for i in each)});")
    return source


def memory(lanes: int, apart: int, stride: int, count: int) -> Source:
    """Emits a kernel in which each work-item reads ``count`` vectors, ``stride`` apart.

    Neighbouring work-items start ``apart`` vectors from each other.
    """
    source = Source("memory")
    source.buffer("out", DType.FLOAT32, Out(0))
    source.buffer("data", DType.FLOAT32, In(0))
    source.dims(APART=apart, STRIDE=stride, COUNT=count)
    _sum(source, lanes)
    each = range(UNROLLED)
    source.add("GLOBAL const V* v = (GLOBAL const V*)data + (i64)GID(0) * APART;")
    source.add(" ".join(f"V s{i} = (V)(0.0f);" for i in each))
    loads = " ".join(f"s{i} += v[(i64)(i + {i}) * STRIDE];" for i in each)
    source.add(f"for (int i = 0; i < COUNT; i += {UNROLLED}) {{ {loads} }}")
    source.add(f"out[GID(0)] = total({' + '.join(f's{i}' for i in each)});")
    return source


def _sum(source: Source, lanes: int) -> None:
    source.function(f"vector_of(f32, {lanes}, V);")
    source.function(f"INLINE f32 total(V v) {{ f32 s = 0.0f; for (int i = 0; i < {lanes}; i++) s += v[i]; return s; }}")


class _Probe:
    """Runs the probe kernels on a device."""

    def __init__(self, device: CDevice) -> None:
        self.device, self.queue = device, device.queue()
        self.grouped, self.lanes = device.target.traits.has_work_groups, device.target.vector_bytes // 4
        units = max(device.target.units, 1)
        self.group = GPU_LOCAL if self.grouped else 1
        self.items = units * (GPU_GROUPS * GPU_LOCAL if self.grouped else CPU_ITEMS)
        self.out = device.alloc(4 * self.items)

    def ceilings(self) -> Ceilings:
        return Ceilings(self.arithmetic(), self.bandwidth())

    def arithmetic(self) -> float:
        run = self.launch(arithmetic(self.lanes), self.out)
        return 2.0 * ACCUMULATORS * self.lanes * ROUNDS * self.items / best_of(run, self.queue.now)

    def bandwidth(self) -> float:
        each = 4 * self.lanes * UNROLLED * self.items
        rounds = max(1, _beyond(self.device) // each)
        data, count = self.device.alloc(each * rounds), UNROLLED * rounds
        if isinstance(data, np.ndarray):
            data[:] = 0  # pages that were never written may all map to one physical page
        # neighbouring work-items on a GPU read neighbouring vectors; a CPU core reads a stretch of its own
        apart, stride = (1, self.items) if self.grouped else (count, 1)
        run = self.launch(memory(self.lanes, apart, stride, count), self.out, data)
        return each * rounds / best_of(run, self.queue.now)

    def launch(self, source: Source, out: Any, data: Any = None) -> Callable[[], object]:
        """Link a kernel with its tensors and return a function that runs it. Groups hold many work-items on a GPU."""
        call = replace(source.call((self.items,)), group=self.group, local=(self.group,))
        inputs = () if data is None else (None,)
        kernel = CKernel("ceiling", Problem("ceiling", inputs, (None,), {}, constant=(False,)), self.device, [call], {})
        memory = [out] if data is None else [data, out]
        bound = self.device.link([Part.alone(kernel, len(inputs), 1)]).bind(self.queue, memory)
        return lambda: bound.invoke({})


def _beyond(device: Device) -> int:
    """Return a number of bytes that exceeds the caches of the device but fits its memory."""
    most = (device.memory_bytes or 8 * MOST_BYTES) // 8
    if device.target.traits.has_work_groups:
        return min(max(BEYOND * device.cache_bytes, GPU_BYTES), most)
    return min(max(BEYOND * device.cache_bytes, LEAST_BYTES), MOST_BYTES, most)


# ---- the host --------------------------------------------------------------------------------------------------------


def _host(device: Device) -> Ceilings:
    n = 512
    a, out = np.ones((n, n), np.float32), np.empty((n, n), np.float32)
    product = best_of(lambda: np.matmul(a, a, out=out), time.perf_counter)
    data = np.zeros(_beyond(device) // 4, np.float32)
    data[:] = 1
    return Ceilings(2.0 * n**3 / product, data.nbytes / best_of(data.max, time.perf_counter))
