"""How a plan reaches the processor: a device links it, a request binds its memory, an inference invokes it.

    device.link(parts) -> Executable      once per plan: kernels are loaded, steps stand in one table, graph or list
    executable.bind(queue, memory)        once per request -> Bound: every pointer that stays the same is in place
    bound.invoke(values)                  once per inference: one call; what it took is read from it afterwards

Tensors have the numbers that the plan gives them (-1: absent).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..ir.symbolic import Whole
from ..ir.types import DType

if TYPE_CHECKING:
    from .base import Queue
    from .rows import Block, Counter

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Packing:
    """How a constant is rearranged before a kernel sees it. Equal keys mean the same arrangement."""

    key: str
    pack: Callable[[Array], Array]


class Kernel(ABC):
    """A compiled solution of one problem. Stateless: several requests may run it at the same time."""

    name: str
    #: a type with as few digits as it rounds factors to before it multiplies them; None: those of the problem's types
    like: DType | None = None
    #: constant inputs that it wants rearranged; who runs it does so once
    packings: Mapping[int, Packing] = MappingProxyType({})
    #: bytes of scratch memory, where their number is known in the middle of a launch: as many as there may be
    most_scratch: Mapping[str, Whole] = MappingProxyType({})
    #: its device may link it with others: it only enqueues work, and needs no values
    is_linkable: bool = False

    def prepare(self) -> None:  # noqa: B027 (most have nothing to do)
        """Compile what is not compiled yet: making a kernel need not, running it does."""

    def limit_scratch(self, scratch: Mapping[str, Whole]) -> None:  # noqa: B027
        """Have so many bytes of scratch memory, where it depends on numbers that a launch finds out by itself."""

    def is_like(self, other: Kernel) -> bool:
        """It can take another one's place in an executable."""
        return False

    @abstractmethod
    def run(self, queue: Queue, inputs: Sequence[Any], outputs: Sequence[Any]) -> Sequence[Any]:
        """Compute once. Where ``outputs[i]`` is an array the result is written there; where it is None a new one is
        made. Returns the outputs. A device's kernel may return before it has finished; `Queue.finish` waits for it.
        """


@dataclass(frozen=True, eq=False)
class Part:
    """A kernel, or a block of control flow, with the numbers of its tensors.

    ``tag``: what an error in it is of.
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
    """The numbers of a plan for a class of shapes, at some sizes."""

    values: Sequence[int]
    #: which of the values an expression is
    place: Callable[[Whole], int]
    #: kernels for these sizes alone, by those that they stand in for
    posed: Mapping[Kernel, Kernel] = field(default_factory=dict)


class Executable(ABC):
    """Parts of a plan, linked for a device. Requests share it."""

    parts: Sequence[Part]
    #: bound with ``clocked``, it knows how long each part took
    timed: bool = False
    #: it is given addresses in place of arrays, where they are known sooner
    takes_addresses: bool = False

    @abstractmethod
    def bind(
        self, queue: Queue, memory: Sequence[Any], fitted: Collection[int] = (), clocked: bool = False
    ) -> Bound:  # fmt: skip
        """The parts with a request's memory: ``memory[number]`` is a tensor that stays where it is, or None where each
        inference brings its own. Where `Bound.fit` says where tensors are, their numbers are ``fitted``.

        The sequence belongs to the caller, who may exchange arrays of the host in it for `Call`s.
        """


class Bound(ABC):
    """Parts of a plan with the memory of one request. Never in two threads at a time."""

    #: its loops, where control flow is part of it: it is told how long they may be before each call
    loops: Loops | None = None

    @abstractmethod
    def invoke(self, values: MutableMapping[int, Any]) -> None:
        """Run, or enqueue, all parts, with this inference's own tensors: arrays by their numbers, or addresses where
        device and host share memory. They must live until it is over. `KernelError` says what a kernel has reported.
        """

    def prepare(self) -> None:  # noqa: B027 (most do all of it when they are bound)
        """Do now what the first call would otherwise do besides running its kernels, which have run before."""

    def fit(self, sizes: Sizes, arena: int, offsets: Mapping[int, int]) -> None:
        """Set all that depends on sizes, and where tensors that are ``fitted`` lie: behind the address of the arena, by
        as much as a value says for each of them, which is the same value each time."""
        raise NotImplementedError

    def words(self, part: int, names: Sequence[str]) -> tuple[Any, list[int]]:
        """Where numbers stand that a kernel is given: a buffer of integers, and the places in it."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Memory that it has for itself."""
        return 0

    def seconds(self) -> Sequence[float]:
        """Of each part in the last call, once that is over: where it is bound ``clocked``, and `Executable.timed`."""
        raise NotImplementedError

    def inside(self) -> Sequence[tuple[Any, float, int]]:
        """Of each launch in a block that has a tag: the tag, seconds in the last call, and how often it ran."""
        return ()


class Loops(ABC):
    """The loops of a `Bound`."""

    @abstractmethod
    def allow(self, iterations: int, anew: bool = True) -> None:
        """Bound the iterations of all loops together in the next call, which begins ``anew``, or goes on behind what
        the last one left."""

    @abstractmethod
    def left(self) -> int | None:
        """The number of the part that the last call left because its rows do not fit what comes. What stands behind
        it did not run; the next call goes on there."""

    @abstractmethod
    def taken(self) -> int:
        """Iterations in the last call."""

    @abstractmethod
    def failed(self) -> tuple[Any, int | None] | None:
        """The tag of the loop that would have needed more than there were, and how many that would have been, if that
        is known; None: all of them ended."""

    @abstractmethod
    def counted(self, counter: Counter) -> int:
        """Iterations of one of them in the last call."""


class Call(Executable):
    """One kernel that is called from Python: a reference of the host, or what decides as it runs."""

    def __init__(
        self, part: Part, on_host: bool = False, copies: bool = False,
        limit: Callable[[Sequence[Any]], None] = lambda inputs: None,
    ) -> None:  # fmt: skip
        """``on_host``: it works on arrays of the host, which are ``copies`` where the device has memory of its own.
        ``limit`` is given the inputs before results are made whose memory is not planned."""
        assert isinstance(part.kernel, Kernel)
        self.parts, self.kernel = (part,), part.kernel
        self.on_host, self.copies, self.limit = on_host, copies, limit

    def bind(
        self, queue: Queue, memory: Sequence[Any], fitted: Collection[int] = (), clocked: bool = False
    ) -> Bound:  # fmt: skip
        return BoundCall(self, queue, memory)


class BoundCall(Bound):
    """A kernel with a request's arrays. Results without memory of their own are added to what it is invoked with."""

    def __init__(self, call: Call, queue: Queue, memory: Sequence[Any]) -> None:
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
            ins = list(queue.fetch(ins))  # how large its results are may depend on values that were being computed
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
