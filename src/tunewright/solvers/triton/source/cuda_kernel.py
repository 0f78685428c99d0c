"""The base of the solvers of CUDA devices: kernels are functions of torch's tensors, captured into graphs."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias
from weakref import WeakSet

import numpy as np

from tunewright.devices import kernel_cache
from tunewright.devices.base import Device, Queue, Target
from tunewright.devices.cuda.device import HELD, CudaArray, CudaDevice, CudaQueue, torch_dtype
from tunewright.devices.executable import Kernel, Packing, Sizes
from tunewright.errors import ModelError
from tunewright.ir.symbolic import Whole, hint
from tunewright.ir.types import PLAIN, DType, TensorType
from tunewright.ops.infer import MISTAKES
from tunewright.solvers.base import Config, Missing, Problem, Solver, why_not_type
from tunewright.solvers.shape_classes import numbers, with_numbers

from .compile import Pair, capability, obtain, recording
from .compile_many import build_all
from .sizes_page import PagedKernel, Tracing, Unpaged, again, pages
from .text import load_alone

#: calls that a kernel for a class of shapes keeps, each for some sizes
MOST_CALLS = 32

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
    serves_classes = True
    #: all that its launches know of sizes is in texts and grids; otherwise each size needs its own launches
    paged: ClassVar[bool] = True
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
        """Return further reasons to refuse a static problem, or None."""
        return None

    @abstractmethod
    def call(self, problem: Problem, config: Config, device: CudaDevice) -> Call:
        """Return the call that solves a static problem. `serves_classes`: the problem may be one of a class of shapes.
        Then only the kernels that the call loads, and their grids, are used."""

    def packings(self, problem: Problem, config: Config) -> Mapping[int, Packing]:
        """Return how constant inputs are rearranged, once, before the kernel reads them."""
        return {}

    def compile(self, problem: Problem, config: Config, device: Device) -> Kernel:
        assert isinstance(device, CudaDevice)
        if problem.at_hand is not problem:
            return OpenCudaKernel(self, problem, config, device)
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
        """Return the Triton kernels that its call launches; empty if torch needs the memory of the arguments to find
        out."""
        with recording(arch) as found:
            try:
                self.call(_Dry(), [*map(_nowhere, self.problem.inputs)], [*map(_nowhere, self.problem.outputs)])
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
        """Return the inputs as torch tensors; host arrays are copied to the device."""
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


class OpenCudaKernel(CudaKernel):
    """A kernel for a class of shapes. `fitted` makes its call for some sizes."""

    is_replaceable = False

    def __init__(self, solver: CudaSolver, problem: Problem, config: Config, device: CudaDevice) -> None:
        self._solver, self._of_class, self._config, self.device = solver, problem, config, device
        self.paged = solver.paged
        tracing = Tracing(load_alone)
        at_hand = problem.at_hand
        ins, outs = ([*map(_nowhere, types)] for types in (at_hand.inputs, at_hand.outputs))
        with tracing.active(), recording(0):
            solver.call(problem, config, device)(_Dry(), ins, outs)
            packings = solver.packings(problem, config)
        self.kernels = [one for one in tracing.kernels if one.grid is not None]
        if len(self.kernels) < len(tracing.kernels):
            raise Unpaged("it loads kernels that it does not launch")
        #: the sizes that it must know: `devices.executable.Sizes`
        self.open = OpenSizes(tuple(size for one in self.kernels for size in one.words))
        self._calls: OrderedDict[tuple[int, ...], Call] = OrderedDict()
        self._numbers = numbers(problem)
        super().__init__(solver.id, at_hand, device, self._made(at_hand), packings)

    def fitted(self, sizes: Sizes) -> Call:
        """Return the call for these sizes; with a page, it also serves smaller ones that the page gives."""
        found = tuple([sizes.values[sizes.place(number)] for number in self._numbers])
        call = self._calls.get(found)
        if call is None:
            values, place = sizes.values, sizes.place
            call = self._calls[found] = self._made(with_numbers(self._of_class, lambda n: values[place(n)]))
            while len(self._calls) > MOST_CALLS:
                self._calls.popitem(last=False)
        return call

    def _made(self, problem: Problem) -> Call:
        with again(self.kernels):
            return self._solver.call(problem, self._config, self.device)

    def launch(self, queue: CudaQueue, call: Call, found: Mapping[PagedKernel, Any], inputs: Any, outputs: Any) -> None:
        """Enqueue the result of `fitted`; ``found``: where its kernels read their sizes."""
        self.prepare()
        ins = self.tensors(inputs)
        with queue.current(), pages(found):
            call(queue, ins, [out.tensor for out in outputs])

    def run(self, queue: Queue, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
        raise AssertionError("a kernel for a class of shapes runs where its sizes are known")


@dataclass(frozen=True)
class OpenSizes:
    """The sizes that a kernel for a class of shapes must know."""

    sizes: tuple[Whole, ...]


def _nowhere(type: Any) -> Any:
    """Return a tensor without memory."""
    import torch

    if not isinstance(type, TensorType):
        return None
    return torch.empty(type.physical, dtype=torch_dtype(type.dtype.numpy), device="meta")


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
        return self._empty(hint(nbytes), dtype=self._bytes)

    def zeros(self, count: int) -> Any:
        return self._empty(hint(count), dtype=self._numbers)


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
