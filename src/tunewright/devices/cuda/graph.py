"""Executables of NVIDIA GPUs: kernels that are recorded into one CUDA graph for each request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, MutableMapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from tunewright.errors import ExecutionError
from tunewright.ir.symbolic import Whole

from ..base import Queue
from ..executable import Bound, Executable, Kernel, Part, Sizes

if TYPE_CHECKING:
    from .device import CudaDevice, CudaQueue

#: graphs of one request for plans for classes of shapes: each holds the addresses of one layout of memory
MOST_GRAPHS = 16
#: kernels' parts of a page begin at multiples of this number of words
_ALIGNED = 4


class PageReader(Protocol):
    """What reads sizes from its part of a page."""

    @property
    def words(self) -> Sequence[Whole]: ...


class OpenCudaCall(Protocol):
    """A kernel for a class of shapes (`solvers.triton.source.cuda_kernel.OpenCudaKernel`)."""

    #: its launches know sizes from the page alone
    paged: bool
    kernels: Sequence[PageReader]

    def fitted(self, sizes: Sizes) -> Any:
        """What computes it for some sizes."""

    def launch(self, queue: CudaQueue, call: Any, found: Mapping[Any, Any], inputs: Any, outputs: Any) -> None:
        """Enqueue that; ``found``: where its kernels read their sizes."""


class CudaGraph(Executable):
    """Kernels that are one launch."""

    def __init__(self, device: CudaDevice, parts: Sequence[Part]) -> None:
        self.parts, self.timed, self.device = parts, device.is_gpu, device

    def bind(
        self, queue: Queue, memory: Sequence[Any], fitted: Collection[int] = (), clocked: bool = False
    ) -> BoundGraph:  # fmt: skip
        return BoundGraph(self, cast("CudaQueue", queue), memory, fitted, clocked)


class BoundGraph(Bound):
    """A graph with the memory of one request: recorded when it is first invoked, and anew where tensors change.

    In a plan for a class of shapes there is a graph for each layout of the memory. Where the kernels read all sizes
    from a page, it serves every size that the memory has room for.
    """

    def __init__(
        self, graph: CudaGraph, queue: CudaQueue, memory: Sequence[Any], fitted: Collection[int], clocked: bool
    ) -> None:  # fmt: skip
        self._parts, self._queue, self._memory = graph.parts, queue, memory
        numbers = {n for part in graph.parts for n in (*part.ins, *part.outs) if n >= 0 and memory[n] is None}
        #: tensors that come with each inference, and those that the graph was recorded with
        self._given: dict[int, Any] = dict.fromkeys(numbers.difference(fitted))
        self._replay: Callable[[], object] | None = None
        #: events between the kernels of the graph, when each is to be timed
        self._clocked, self._marks = clocked and graph.timed, list[Any]()
        opened = dict.fromkeys(part.kernel for part in graph.parts if getattr(part.kernel, "open", None) is not None)
        self._page = _Page(graph.device, [cast("OpenCudaCall", kernel) for kernel in opened]) if opened else None
        #: by layout of the memory; None: it was invoked once, without a graph
        self._graphs: OrderedDict[Hashable, Callable[[], object] | None] = OrderedDict()
        self._layout: Hashable = None

    def refit(self, sizes: Sizes, room: Sizes, layout: Hashable) -> None:
        """The graph of this layout; there is none yet where it was never invoked twice."""
        paged = self._page is None or self._page.write(self._queue, sizes, room)
        if not paged and self._page is not None:
            layout = layout, self._page.numbers
        if self._layout == layout:
            return
        if self._given:  # they may differ as well
            self._graphs.clear()
        self._layout, self._replay = layout, self._graphs.get(layout)
        if layout in self._graphs:
            self._graphs.move_to_end(layout)

    def invoke(self, values: MutableMapping[int, Any]) -> None:
        for number, before in self._given.items():
            if values[number] is not before:
                self._given[number], self._replay = values[number], None
        if self._layout is not None:
            self._of_class()
        elif self._queue.stream is None:
            self._work()
        else:
            if self._replay is None:
                self._work()  # whatever is compiled or allocated at the first run
                self.prepare()
            assert self._replay is not None
            self._replay()
        self._queue.launches += 1

    def _of_class(self) -> None:
        """Without a graph at first: it may be the only time."""
        if self._replay is None and self._layout in self._graphs:
            self.prepare()
            self._graphs[self._layout] = self._replay
        if self._replay is not None:
            self._replay()
            return
        self._work()
        self._graphs[self._layout] = None
        while len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)

    def prepare(self) -> None:
        if self._replay is None:
            try:
                self._replay = self._queue.capture(self._work)
            except RuntimeError as error:
                what = f"the graph of {len(self._parts)} kernels cannot be recorded: {error}"
                raise ExecutionError(what) from error

    @property
    def nbytes(self) -> int:
        return 0 if self._page is None else self._page.nbytes

    def seconds(self) -> list[float]:
        return [a.elapsed_time(b) / 1e3 for a, b in pairwise(self._marks)]

    def _work(self) -> None:
        queue, page = self._queue, self._page
        launches, self._marks = queue.launches, [queue.mark()] if self._clocked else []
        for part in self._parts:
            assert isinstance(part.kernel, Kernel)
            ins, outs = ([self._tensor(n) for n in numbers] for numbers in (part.ins, part.outs))
            opened = cast("OpenCudaCall", part.kernel)
            if page is not None and opened in page.calls:
                page.launch(queue, opened, ins, outs)
            else:
                part.kernel.run(queue, ins, outs)
            if self._clocked:
                self._marks.append(queue.mark())
        queue.launches = launches  # they are one

    def _tensor(self, number: int) -> Any:
        if number < 0:
            return None
        return self._given[number] if number in self._given else self._memory[number]


class _Page:
    """The sizes that kernels read, in the device's memory, and the kernels' calls for the room that there is."""

    def __init__(self, device: CudaDevice, kernels: Sequence[OpenCudaCall]) -> None:
        #: each kernel's call
        self.calls: dict[OpenCudaCall, Any] = dict.fromkeys(kernels)
        self._begins: dict[PageReader, int] = {}
        #: words and the sizes that they are; which of them are numbers of programs, of kernels that read all sizes
        self._sizes: list[tuple[int, Whole]] = []
        self._is_grid: list[bool] = []
        self._is_paged = all(kernel.paged for kernel in kernels)
        count = 0
        for kernel in kernels:
            for reader in kernel.kernels:
                self._begins[reader] = count
                self._sizes += enumerate(reader.words, count)
                self._is_grid += [at < 2 for at in range(len(reader.words))]
                count += -(-len(reader.words) // _ALIGNED) * _ALIGNED
        self._memory = device.words(max(count, 1))
        self._parts = {reader: self._memory[begin:] for reader, begin in self._begins.items()}
        self._at = np.array([at for at, _ in self._sizes], np.intp)
        #: where the sizes are among a plan's values, once they are asked for
        self._places: list[int] | None = None
        self._grids = np.array(self._is_grid, bool)
        self._words = np.zeros(max(count, 1), np.int32)
        self._known: bytes | None = None
        #: for which room the calls are
        self._room: Sizes | None = None
        #: sizes that the last layout was for, where kernels do not read all of them
        self.numbers: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return int(self._words.nbytes)

    def write(self, queue: CudaQueue, sizes: Sizes, room: Sizes) -> bool:
        """Tell kernels other sizes. True: what they launch is the same for every size that there is room for."""
        if self._places is None:
            self._places = [sizes.place(size) for _, size in self._sizes]
        found, most = (np.array([one.values[at] for at in self._places], np.int64) for one in (sizes, room))
        if found.size and abs(found).max() >= 1 << 31:
            raise ExecutionError("a size has more than 31 bits")
        paged = self._is_paged and bool((found[self._grids] <= most[self._grids]).all())
        if not paged:
            room = sizes
            self.numbers = tuple(found.tolist())
        if room is not self._room:
            self._room = room
            for kernel in self.calls:
                self.calls[kernel] = kernel.fitted(room)
        self._words[self._at] = found
        told = self._words.tobytes()
        if told != self._known:
            queue.write_words(self._words, self._memory)
            self._known = told
        return paged

    def launch(self, queue: CudaQueue, kernel: OpenCudaCall, ins: Sequence[Any], outs: Sequence[Any]) -> None:
        kernel.launch(queue, self.calls[kernel], self._parts, ins, outs)
