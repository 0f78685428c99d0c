"""How a plan reaches the processor: a device links it, a request binds its memory, an inference invokes it.

    device.link(parts) -> Executable      once per plan: kernels are loaded, steps stand in one table, graph or list
    executable.bind(queue, memory)        once per request -> Bound: every pointer that stays the same is in place
    bound.invoke(values)                  once per inference: one call; its measurements are read afterwards

Tensors have the numbers that the plan gives them (-1: absent).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..ir.symbolic import Whole
from ..ir.types import DType

if TYPE_CHECKING:
    from .base import Queue
    from .control_rows import Block, Counter

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Packing:
    """How a constant is packed before a kernel reads it. Equal keys mean the same packing."""

    key: str
    pack: Callable[[Array], Array]


class Kernel(ABC):
    """A compiled solution of one problem. Stateless: several requests may run it at the same time."""

    name: str
    #: the type that factors are rounded to before they are multiplied; None: the types of the problem
    like: DType | None = None
    #: constant inputs that the runtime must rearrange once
    packings: Mapping[int, Packing] = MappingProxyType({})
    #: upper bound of scratch bytes, where a launch computes the exact number
    most_scratch: Mapping[str, Whole] = MappingProxyType({})
    #: its device may link it with other kernels: it only enqueues work, and reads no values on the host
    is_linkable: bool = False
    #: for a kernel for a class of shapes: if its guards fail, another kernel may take its place (`is_like`); else
    #: another plan is made
    is_replaceable: bool = True

    def prepare(self) -> None:  # noqa: B027 (most have nothing to do)
        """Compile what is not compiled yet. Otherwise the first run compiles it."""

    def limit_scratch(self, scratch: Mapping[str, Whole]) -> None:  # noqa: B027
        """Set the bytes of scratch memory of a kernel whose scratch depends on sizes that a launch computes."""

    def is_like(self, other: Kernel) -> bool:
        """Whether this kernel can take the place of another one in an executable."""
        return False

    @abstractmethod
    def run(self, queue: Queue, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
        """Compute once and return the outputs. The kernel writes result i to ``outputs[i]``, or to a new array if that
        is None. A device's kernel may return before it has finished; `Queue.finish` waits for it."""


@dataclass(frozen=True, eq=False)
class Part:
    """A kernel, or a block of control flow, with the numbers of its tensors.

    ``tag``: the step or node that an error in it belongs to.
    """

    kernel: Kernel | Block
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    tag: object = None

    @staticmethod
    def alone(kernel: Kernel, inputs: int, outputs: int, tag: object = None) -> Part:
        """A kernel by itself: its inputs are the first tensors, and its outputs follow."""
        return Part(kernel, tuple(range(inputs)), tuple(range(inputs, inputs + outputs)), tag)


@dataclass(frozen=True)
class Sizes:
    """The numbers of a plan for a class of shapes, at given sizes."""

    values: Sequence[int]
    #: the position of an expression among the values
    place: Callable[[Whole], int]
    #: kernels for these sizes only, by the kernels that they replace
    posed: Mapping[Kernel, Kernel] = field(default_factory=dict)
    #: the sizes that are open in the plan
    of: tuple[int, ...] = ()


class Executable(ABC):
    """Parts of a plan, linked for a device. Requests share it."""

    parts: Sequence[Part]
    #: measures how long each part takes, if bound with ``clocked``
    timed: bool = False
    #: accepts addresses in place of arrays
    takes_addresses: bool = False

    @abstractmethod
    def bind(
        self, queue: Queue, memory: Sequence[Any], fitted: Collection[int] = (), clocked: bool = False
    ) -> Bound:  # fmt: skip
        """Bind the parts to the memory of a request. ``memory[number]`` is a tensor at a fixed place, or None if each
        inference brings its own. ``fitted`` are the tensors whose places `Bound.fit` sets.

        The sequence belongs to the caller, who may later exchange arrays of the host in it; only `HostCall` reads them.
        The caller exchanges ``fitted`` tensors before `Bound.refit`.
        """


class Bound(ABC):
    """Parts of a plan with the memory of one request. Never used by two threads at a time."""

    #: the loops in it, if any. The caller limits their iterations before each call
    loops: Loops | None = None

    @abstractmethod
    def invoke(self, values: MutableMapping[int, Any]) -> None:
        """Run or enqueue all parts with the tensors of this inference: arrays by number, or addresses if the executable
        takes them. The arrays must live until the inference is over. Raise KernelError if a kernel reported a fault."""

    def expect(self) -> None:  # noqa: B027 (most have nobody to wake)
        """Get ready for `invoke`, which follows within some microseconds."""

    def prepare(self) -> None:  # noqa: B027 (most do all of it when they are bound)
        """Do now all that the first call would do besides running kernels. The kernels themselves have run before."""

    def fit(self, sizes: Sizes, arena: int, offsets: Mapping[int, int]) -> None:
        """Set everything that depends on sizes, and the addresses of the ``fitted`` tensors.

        ``arena`` is the address of their memory. ``offsets`` maps each tensor to the value that is its offset there.
        The value is the same at each call.
        """
        raise NotImplementedError

    def refit(self, sizes: Sizes, room: Sizes, layout: Hashable) -> None:  # noqa: B027 (`HostCall` knows no sizes)
        """Set everything that depends on sizes, if the executable takes no addresses. The caller has exchanged the
        ``fitted`` tensors in `memory` for those of these sizes.

        Equal ``layout``s mean equal addresses. ``room``: the largest sizes for which that holds.
        """

    def place(self, addresses: Mapping[int, int]) -> None:
        """Set the addresses of tensors, by number, until the next call. Inferences no longer pass these tensors."""
        raise NotImplementedError

    def words(self, part: int, names: Sequence[str]) -> tuple[Any, list[int]]:
        """Return where the numbers among a kernel's arguments are: a buffer of integers, and their positions in it."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it owns."""
        return 0

    def seconds(self) -> Sequence[float]:
        """Return the seconds of each part in the last call. Requires ``clocked`` and `Executable.timed`."""
        raise NotImplementedError

    def inside(self) -> Sequence[tuple[Any, float, int]]:
        """Return the tagged launches inside blocks: tag, seconds in the last call, and number of executions."""
        return ()


class Loops(ABC):
    """The loops of a `Bound`."""

    @abstractmethod
    def allow(self, iterations: int, anew: bool = True) -> None:
        """Limit the iterations of all loops together in the next call. That call begins ``anew``, or continues behind
        the part that the last call left."""

    @abstractmethod
    def left(self) -> int | None:
        """Return the part that the last call left because its rows do not fit the current sizes, or None if all parts
        ran. The parts behind it did not run; the next call continues there."""

    @abstractmethod
    def taken(self) -> int:
        """Return the number of iterations in the last call."""

    @abstractmethod
    def failed(self) -> tuple[Any, int | None] | None:
        """Return the tag of a loop that exceeded the limit, with the iterations that it needs if known. None: all loops
        ended."""

    @abstractmethod
    def counted(self, counter: Counter) -> int:
        """Return the iterations of one loop in the last call."""


class HostCall(Executable):
    """One kernel that Python calls: a reference of the host, or a kernel that reads values as it runs."""

    def __init__(
        self, part: Part, on_host: bool = False, copies: bool = False,
        limit: Callable[[Sequence[Any]], None] = lambda inputs: None,
    ) -> None:  # fmt: skip
        """``on_host``: the kernel works on arrays of the host. ``copies``: it works on copies, since the device has its
        own memory. ``limit`` is called with the inputs before results without planned memory are made."""
        assert isinstance(part.kernel, Kernel)
        self.parts, self.kernel = (part,), part.kernel
        self.on_host, self.copies, self.limit = on_host, copies, limit

    def bind(
        self, queue: Queue, memory: Sequence[Any], fitted: Collection[int] = (), clocked: bool = False
    ) -> Bound:  # fmt: skip
        return BoundCall(self, queue, memory)


class BoundCall(Bound):
    """A kernel with the arrays of a request. Results without planned memory are added to the values of the call."""

    def __init__(self, call: HostCall, queue: Queue, memory: Sequence[Any]) -> None:
        self._call, self._part, self._queue, self._memory = call, call.parts[0], queue, memory

    def invoke(self, values: MutableMapping[int, Any]) -> None:
        call, part, queue = self._call, self._part, self._queue
        ins, outs = self._tensors(part.ins, values), self._tensors(part.outs, values)
        makes = any(i >= 0 and out is None for i, out in zip(part.outs, outs, strict=True))
        if call.on_host or makes:
            queue.finish()
            if queue.watching:
                queue.check()
        if makes:
            ins = list(queue.fetch(ins))  # the sizes of its results may depend on values that are still being computed
            call.limit(ins)
        given: Sequence[Any] = outs
        if call.copies:
            given = [None if out is None else np.empty(out.shape, out.dtype) for out in outs]
        queue.running = part.tag
        made = call.kernel.run(queue, queue.fetch(ins) if call.copies else ins, given)
        for i, out, array in zip(part.outs, outs, made, strict=False):
            if out is None:
                values[i] = array
            elif call.copies:
                queue.put(array, out)

    def _tensors(self, numbers: Sequence[int], values: MutableMapping[int, Any]) -> list[Any]:
        return [None if i < 0 else values[i] if i in values else self._memory[i] for i in numbers]
