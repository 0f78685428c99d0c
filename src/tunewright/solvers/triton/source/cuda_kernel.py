"""The base of the solvers of CUDA devices: kernels are functions of torch's tensors, captured into graphs."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias
from weakref import WeakSet

import numpy as np

from tunewright.devices import kernel_cache
from tunewright.devices.base import Device, Queue, Target
from tunewright.devices.cuda.device import HELD, CudaArray, CudaDevice, CudaQueue, torch_dtype
from tunewright.devices.executable import Kernel, Packing
from tunewright.errors import ModelError
from tunewright.ir.types import PLAIN, DType, TensorType
from tunewright.ops.infer import MISTAKES
from tunewright.solvers.base import Config, Missing, Problem, Solver, why_not_type

from .compile import Pair, capability, obtain, recording
from .compile_many import build_all

#: Enqueues a kernel's work on the current stream. Its arguments are its queue (for scratch memory), inputs and outputs:
#: torch tensors in physical order, with None for an absent input. It must neither wait for the device nor read values,
#: because it is captured into a graph.
Call: TypeAlias = Callable[[CudaQueue, Sequence[Any], Sequence[Any]], None]


class CudaSolver(Solver):
    """A solver whose kernels are launched by torch or Triton."""

    language = "cuda"
    ops: frozenset[str] = frozenset()
    #: element types of inputs and outputs
    dtypes: ClassVar[frozenset[DType]] = HELD
    #: layouts of inputs and outputs
    layouts: ClassVar[frozenset[str]] = frozenset({PLAIN.name})

    def why_not(self, problem: Problem, target: Target) -> str | None:
        if problem.op not in self.ops:
            return f"solves {', '.join(sorted(self.ops))}"
        for type in [*problem.inputs, *problem.outputs]:
            reason = why_not_type(type, self.dtypes, self.layouts)
            if reason is not None:
                return reason
        if not problem.is_static or None in problem.outputs:
            return Missing("shapes are not known yet")
        try:
            return self.refuse(problem, target)
        except MISTAKES as error:  # The mistake is in the model; the host kernel reports where.
            return str(error) or repr(error)

    def refuse(self, problem: Problem, target: Target) -> str | None:
        """Further reasons to refuse a static problem, or None."""
        return None

    @abstractmethod
    def call(self, problem: Problem, config: Config, device: CudaDevice) -> Call:
        """The call that solves a static problem."""

    def packings(self, problem: Problem, config: Config) -> Mapping[int, Packing]:
        """How constant inputs are rearranged, once, before the kernel reads them."""
        return {}

    def compile(self, problem: Problem, config: Config, device: Device) -> Kernel:
        assert isinstance(device, CudaDevice)
        try:
            return CudaKernel(self.id, problem, device, self.call(problem, config, device),
                              self.packings(problem, config))  # fmt: skip
        except MISTAKES as error:
            raise ModelError(str(error) or repr(error)) from error


class CudaKernel(Kernel):
    """A call with its problem."""

    is_linkable = True

    def __init__(
        self, name: str, problem: Problem, device: CudaDevice, call: Call, packings: Mapping[int, Packing]
    ) -> None:
        self.name, self.problem, self.device, self.call, self.packings = name, problem, device, call, packings
        #: the cache of its compiled programs
        self.cache = kernel_cache.current()
        with _LOCK:
            _UNPREPARED.add(self)

    def prepare(self) -> None:
        if self in _UNPREPARED:
            _prepare(self.device)

    def programs(self, arch: int) -> list[Pair]:
        """The Triton kernels that its call launches; empty if torch needs the memory of the arguments to find out."""
        import torch

        def nowhere(type: Any) -> Any:
            if not isinstance(type, TensorType):
                return None
            return torch.empty(type.physical, dtype=torch_dtype(type.dtype.numpy), device="meta")

        with recording(arch) as found:
            try:
                self.call(_Dry(), [*map(nowhere, self.problem.inputs)], [*map(nowhere, self.problem.outputs)])
            except Exception:  # Torch may raise anything; then the kernels are compiled when they are launched.
                return []
        return found

    def run(self, queue: Queue, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
        assert isinstance(queue, CudaQueue)
        self.prepare()
        made = [self._new(i) if out is None else out for i, out in enumerate(outputs)]
        ins = self.tensors(inputs)
        with queue.current():
            self.call(queue, ins, [out.tensor for out in made])
        queue.launches += 1
        return made

    def tensors(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs as torch tensors; host arrays are copied to the device."""
        return [None if value is None else self._there(value).tensor for value in inputs]

    def _there(self, value: Any) -> CudaArray:
        if isinstance(value, CudaArray):
            return value
        assert isinstance(value, np.ndarray)
        return self.device.constant(value)

    def _new(self, i: int) -> CudaArray:
        type = self.problem.outputs[i]
        assert isinstance(type, TensorType)
        return self.device.new(type)


#: Kernels that are not prepared yet. They are prepared together, on all cores, when one of them is needed: all kernels
#: of a plan are made before the first one is needed.
_UNPREPARED: WeakSet[CudaKernel] = WeakSet()
_LOCK = threading.RLock()


class _Dry(CudaQueue):
    """A queue that runs nothing, and whose tensors have no memory."""

    def __init__(self) -> None:
        import torch

        self._empty = partial(torch.empty, device="meta")
        self._bytes, self._numbers = torch.uint8, torch.int32

    def scratch(self, nbytes: int) -> Any:
        return self._empty(nbytes, dtype=self._bytes)

    def zeros(self, count: int) -> Any:
        return self._empty(count, dtype=self._numbers)


def _prepare(device: CudaDevice) -> None:
    """Compile the programs of a device's unprepared kernels that neither memory nor the kernel cache contains."""
    with _LOCK:
        kernels = [kernel for kernel in _UNPREPARED if kernel.device is device]
        arch = capability(device.target)
        try:
            if arch is not None:
                wanted = [(kernel.cache, pair) for kernel in kernels for pair in kernel.programs(arch)]
                for cache in dict.fromkeys(cache for cache, _ in wanted):
                    obtain([pair for of, pair in wanted if of is cache], cache, build_all)
        finally:  # A kernel that cannot be compiled raises the error again when it is launched.
            _UNPREPARED.difference_update(kernels)
