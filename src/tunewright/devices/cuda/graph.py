"""Executables of NVIDIA GPUs: kernels that are recorded into one CUDA graph for each request."""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableMapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tunewright.errors import ExecutionError

from ..base import Queue
from ..executable import Bound, Executable, Kernel, Part

if TYPE_CHECKING:
    from .device import CudaDevice, CudaQueue


class CudaGraph(Executable):
    """Kernels that are one launch."""

    def __init__(self, device: CudaDevice, parts: Sequence[Part]) -> None:
        self.parts, self.timed = parts, device.is_gpu

    def bind(
        self, queue: Queue, memory: Sequence[Any], fitted: Collection[int] = (), clocked: bool = False
    ) -> BoundGraph:  # fmt: skip
        return BoundGraph(self, queue, memory, clocked)  # type: ignore[arg-type]


class BoundGraph(Bound):
    """A graph with the memory of one request: recorded when it is first invoked, and anew where tensors change."""

    def __init__(self, graph: CudaGraph, queue: CudaQueue, memory: Sequence[Any], clocked: bool) -> None:
        self._parts, self._queue, self._memory = graph.parts, queue, memory
        numbers = {n for part in graph.parts for n in (*part.ins, *part.outs) if n >= 0 and memory[n] is None}
        #: tensors that come with each inference, and those that the graph was recorded with
        self._given: dict[int, Any] = dict.fromkeys(numbers)
        self._replay: Callable[[], object] | None = None
        #: events between the kernels of the graph, when each is to be timed
        self._clocked, self._marks = clocked and graph.timed, list[Any]()

    def invoke(self, values: MutableMapping[int, Any]) -> None:
        for number, before in self._given.items():
            if values[number] is not before:
                self._given[number], self._replay = values[number], None
        if self._queue.stream is None:
            self._work()
        else:
            if self._replay is None:
                self._work()  # whatever is compiled or allocated at the first run
                self.prepare()
            assert self._replay is not None
            self._replay()
        self._queue.launches += 1

    def prepare(self) -> None:
        if self._replay is None and self._queue.stream is not None:
            try:
                self._replay = self._queue.capture(self._work)
            except RuntimeError as error:
                what = f"the graph of {len(self._parts)} kernels cannot be recorded: {error}"
                raise ExecutionError(what) from error

    def seconds(self) -> list[float]:
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(self._marks)]

    def _work(self) -> None:
        queue = self._queue
        launches, self._marks = queue.launches, [queue.mark()] if self._clocked else []
        for part in self._parts:
            assert isinstance(part.kernel, Kernel)
            part.kernel.run(queue, *([self._tensor(n) for n in numbers] for numbers in (part.ins, part.outs)))
            if self._clocked:
                self._marks.append(queue.mark())
        queue.launches = launches  # they are one

    def _tensor(self, number: int) -> Any:
        if number < 0:
            return None
        return self._given[number] if number in self._given else self._memory[number]
