"""What a device can do at most, measured: its fp32 arithmetic and its memory's bandwidth. The roofline follows.

Two small kernels go through the device's own compiler and queue: one multiplies and adds in registers and touches no
memory, one reads memory that no cache holds and does nothing else. Each is repeated, and the best time counts: a busy
machine makes a ceiling look lower, nothing makes it look higher. The host, which compiles no kernels, is measured with
numpy: a product of matrices, and a sum.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..devices.base import Device
from ..devices.opencl import OpenCLDevice
from ..devices.svm import DeviceArray
from ..errors import DeviceError
from ..ir.types import DType, TensorType
from ..ops import lookup
from ..ops.base import Work
from ..ops.infer import MISTAKES
from ..solvers.base import Problem

#: seconds that measuring one ceiling may take once its kernel runs, and how often it is repeated at least
ENOUGH, LEAST = 0.12, 4
#: multiply-adds in a row of each accumulator, and independent accumulators: enough to hide their latency
ROUNDS, ACCUMULATORS = 1 << 15, 12
#: loads under way at a time
UNROLLED = 4
#: work-items: several for each core; many groups of a few warps for each unit of a GPU
CPU_ITEMS, GPU_GROUPS, GPU_LOCAL = 16, 32, 256
#: Memory that is read, as a multiple of the last-level cache, and its bounds. A GPU reads 256 MiB in less time than ten
#: launches take (3.3 TB/s on an H200 where 2 GiB give 4.3).
BEYOND, LEAST_BYTES, MOST_BYTES, GPU_BYTES = 4, 64 << 20, 512 << 20, 2 << 30
#: Operations that pick elements out of an input: of each input no more is read than there are results.
PICKS = frozenset({
    "Gather", "GatherElements", "GatherND", "Slice", "Resize", "Compress", "com.microsoft::EmbedLayerNormalization",
    "com.microsoft::GatherBlockQuantized", "com.microsoft::GatherND",
})  # fmt: skip


@dataclass(frozen=True)
class Ceilings:
    """What a device can do at most; or, in ``why``, why nobody knows."""

    #: fp32 operations per second, a multiply-add being two
    flops: float = 0.0
    #: bytes per second from memory
    bandwidth: float = 0.0
    why: str = ""

    def floor(self, work: Work) -> tuple[float, str]:
        """Seconds that some work takes at least, and what binds it: arithmetic or memory."""
        arithmetic, memory = work.flops / self.flops, work.bytes / self.bandwidth
        return max(arithmetic, memory), "arithmetic" if arithmetic > memory else "memory"


def work_of(problem: Problem) -> Work | str:
    """Arithmetic and traffic of one execution, its epilogue's included; or why it cannot be told."""
    spec = lookup(problem.op)
    if spec is None:
        return f"nobody has counted the work of {problem.op}"
    given = [t for t in problem.inputs if t is not None]
    made = [t for t in problem.outputs if isinstance(t, TensorType)]
    if not all(isinstance(t, TensorType) and t.is_static for t in [*given, *problem.outputs]):
        return "its shapes depend on data"
    if any(isinstance(t, TensorType) and t.dtype is DType.STRING for t in [*given, *made]):
        return "texts have no fixed size"
    main = [t if isinstance(t, TensorType) else None for t in problem.main_inputs]
    try:
        flops = spec.work(main, made, problem.attrs).flops
    except (*MISTAKES, AssertionError) as error:  # of the model: who runs it says so
        return f"its types do not fit: {error}"
    results = sum(t.nbytes for t in made)
    read = [t.nbytes for t in given if isinstance(t, TensorType)]
    if problem.op in PICKS:
        read = [min(nbytes, results) for nbytes in read]
    return Work(flops + len(problem.epilogue) * sum(t.size for t in made), float(sum(read) + results))


_MEASURED: dict[Device, Ceilings] = {}
_LOCK = threading.Lock()


def ceilings(device: Device) -> Ceilings:
    """The ceilings of a device, measured once in a process; well under a second."""
    with _LOCK:
        if device not in _MEASURED:
            _MEASURED[device] = _measure(device)
        return _MEASURED[device]


def _measure(device: Device) -> Ceilings:
    try:
        if isinstance(device, OpenCLDevice):
            return _Probe(device).ceilings()
        if device.family == "host":
            return _host(device)
    except (DeviceError, MemoryError) as error:
        return Ceilings(why=f"measuring it failed: {error}")
    return Ceilings(why=f"nothing measures what a device of the family {device.family} can do")


def best_of(run: Callable[[], object], now: Callable[[], float]) -> float:
    """The shortest time of several runs, the first one not counted."""
    run()
    best, begin = float("inf"), now()
    end, times = begin, 0
    while times < LEAST or end - begin < ENOUGH:
        start = now()
        run()
        end, times = now(), times + 1
        best = min(best, end - start)
    return max(best, 1e-9)


# ---- OpenCL ---------------------------------------------------------------------------------------------------------


def source(lanes: int) -> str:
    """Both kernels, for vectors of so many floats."""
    each = range(ACCUMULATORS)
    declared = " ".join(f"V a{i} = (V)(x + {i});" for i in each)
    steps = " ".join(f"a{i} = a{i} * m + b;" for i in each)
    loads = " ".join(f"s{i} += in[first + (i + {i}) * stride];" for i in range(UNROLLED))
    return f"""
#pragma OPENCL FP_CONTRACT ON
typedef float V __attribute__((ext_vector_type({lanes})));
static float total(V v) {{ float s = 0; for (int i = 0; i < {lanes}; i++) s += v[i]; return s; }}
__kernel void arithmetic(__global float* out, float x, float m, float b, int rounds) {{
  {declared}
  for (int r = 0; r < rounds; r++) {{ {steps} }}
  out[get_global_id(0)] = total({" + ".join(f"a{i}" for i in each)});
}}
__kernel void memory(__global float* out, __global const V* in, long apart, long stride, long count) {{
  V s0 = (V)(0), s1 = s0, s2 = s0, s3 = s0;
  long first = get_global_id(0) * apart;
  for (long i = 0; i < count; i += {UNROLLED}) {{ {loads} }}
  out[get_global_id(0)] = total(s0 + s1 + s2 + s3);
}}
"""


class _Probe:
    """Runs the kernels on a device."""

    def __init__(self, device: OpenCLDevice) -> None:
        self.device, self.queue = device, device.queue()
        self.gpu, self.lanes = device.target.device == "gpu", device.target.vector_bytes // 4
        self.program = device.build(source(self.lanes))
        units = max(device.target.units, 1)
        self.local = GPU_LOCAL if self.gpu else 1
        self.items = units * (GPU_GROUPS * GPU_LOCAL if self.gpu else CPU_ITEMS)
        self.out = device.alloc(4 * self.items)

    def ceilings(self) -> Ceilings:
        return Ceilings(self.arithmetic(), self.bandwidth())

    def arithmetic(self) -> float:
        # m and b keep the values between 0 and 16 for ever: no denormals, no infinities
        numbers = (np.float32(1.0), np.float32(0.5), np.float32(1.0), np.int32(ROUNDS))
        run = self.launch("arithmetic", self.out, *numbers)
        return 2.0 * ACCUMULATORS * self.lanes * ROUNDS * self.items / best_of(run, self.queue.now)

    def bandwidth(self) -> float:
        each = 4 * self.lanes * UNROLLED * self.items
        rounds = max(1, _beyond(self.device) // each)
        data, count = self.device.alloc(each * rounds), UNROLLED * rounds
        if isinstance(data, np.ndarray):
            data[:] = 0  # pages that nobody has written to may all be one
        # neighbours on a GPU read neighbouring vectors; a core reads a stretch of its own
        apart, stride = (1, self.items) if self.gpu else (count, 1)
        run = self.launch("memory", self.out, data, np.int64(apart), np.int64(stride), np.int64(count))
        return each * rounds / best_of(run, self.queue.now)

    def launch(self, name: str, *arguments: Any) -> Callable[[], object]:
        import pyopencl as cl

        kernel = self.queue.kernel(self.program, name).kernel
        for at, value in enumerate(arguments):
            memory = value.memory if isinstance(value, DeviceArray) else value
            kernel.set_arg(at, value if isinstance(value, np.generic) else cl.SVM(memory))

        def run() -> None:
            cl.enqueue_nd_range_kernel(self.queue.raw, kernel, (self.items,), (self.local,))
            self.queue.pending = True

        return run


def _beyond(device: Device) -> int:
    """Bytes that no cache of the device holds, and its memory does."""
    most = (device.memory_bytes or 8 * MOST_BYTES) // 8
    if device.target.device == "gpu":
        return min(max(BEYOND * device.cache_bytes, GPU_BYTES), most)
    return min(max(BEYOND * device.cache_bytes, LEAST_BYTES), MOST_BYTES, most)


# ---- the host -------------------------------------------------------------------------------------------------------


def _host(device: Device) -> Ceilings:
    n = 512
    a, out = np.ones((n, n), np.float32), np.empty((n, n), np.float32)
    product = best_of(lambda: np.matmul(a, a, out=out), time.perf_counter)
    data = np.zeros(_beyond(device) // 4, np.float32)
    data[:] = 1
    return Ceilings(2.0 * n**3 / product, data.nbytes / best_of(data.max, time.perf_counter))
