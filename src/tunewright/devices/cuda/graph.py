"""Executables of NVIDIA GPUs: the kernels of each request are recorded into one CUDA graph."""

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

#: graphs of one request in plans for classes of shapes: each holds the addresses of one memory layout
MOST_GRAPHS = 16
#: each kernel's part of a page begins at a multiple of this number of words
_ALIGNED = 4


class PageReader(Protocol):
    """Reads sizes from its part of a page."""

    @property
    def words(self) -> Sequence[Whole]: ...


class OpenCudaCall(Protocol):
    """A kernel for a class of shapes (`solvers.triton.source.cuda_kernel.OpenCudaKernel`)."""

    #: whether its launches read all sizes from the page
    paged: bool
    kernels: Sequence[PageReader]

    def fitted(self, sizes: Sizes) -> Any:
        """Return the call that computes it for some sizes."""

    def launch(self, queue: CudaQueue, call: Any, found: Mapping[Any, Any], inputs: Any, outputs: Any) -> None:
        """Enqueue that call; ``found``: where its kernels read their sizes."""


class CudaGraph(Executable):
    """Kernels that run as a single launch."""

    def __init__(self, device: CudaDevice, parts: Sequence[Part]) -> None:
        self.parts, self.timed, self.device = parts, device.is_gpu, device

    def bind(
        self, queue: Queue, memory: Sequence[Any], fitted: Collection[int] = (), clocked: bool = False
    ) -> BoundGraph:  # fmt: skip
        return BoundGraph(self, cast("CudaQueue", queue), memory, fitted, clocked)


class BoundGraph(Bound):
    """A graph with the memory of one request: recorded at the first invocation, and again when tensors change.

    A plan for a class of shapes has one graph for each memory layout. Where the kernels read all sizes from a page, the
    graph serves every size that fits in the memory.
    """

    def __init__(
        self, graph: CudaGraph, queue: CudaQueue, memory: Sequence[Any], fitted: Collection[int], clocked: bool
    ) -> None:  # fmt: skip
        self._parts, self._queue, self._memory = graph.parts, queue, memory
        numbers = {n for part in graph.parts for n in (*part.ins, *part.outs) if n >= 0 and memory[n] is None}
        #: tensors that come with each inference, and the tensors that the graph was recorded with
        self._given: dict[int, Any] = dict.fromkeys(numbers.difference(fitted))
        self._replay: Callable[[], object] | None = None
        #: events between the kernels of the graph, for timing each kernel
        self._clocked, self._marks = clocked and graph.timed, list[Any]()
        opened = dict.fromkeys(part.kernel for part in graph.parts if getattr(part.kernel, "open", None) is not None)
        self._page = _Page(graph.device, [cast("OpenCudaCall", kernel) for kernel in opened]) if opened else None
        #: by memory layout; None: invoked once, without a graph
        self._graphs: OrderedDict[Hashable, Callable[[], object] | None] = OrderedDict()
        self._layout: Hashable = None

    def refit(self, sizes: Sizes, room: Sizes, layout: Hashable) -> None:
        """Select the graph of this layout. A layout has none until its second invocation."""
        paged = self._page is None or self._page.write(self._queue, sizes, room)
        if not paged and self._page is not None:
            layout = layout, self._page.numbers
        if self._layout == layout:
            return
        if self._given:  # the addresses may differ too
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
                self._work()  # compiles and allocates whatever the first run needs
                self.prepare()
            assert self._replay is not None
            self._replay()
        self._queue.launches += 1

    def _of_class(self) -> None:
        """Run without a graph first: the layout may never come again."""
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
        queue.launches = launches  # the kernels count as one launch: the graph

    def _tensor(self, number: int) -> Any:
        if number < 0:
            return None
        return self._given[number] if number in self._given else self._memory[number]


class _Page:
    """The sizes that kernels read in device memory, and the kernels' calls for the memory's room."""

    def __init__(self, device: CudaDevice, kernels: Sequence[OpenCudaCall]) -> None:
        #: each kernel's call
        self.calls: dict[OpenCudaCall, Any] = dict.fromkeys(kernels)
        self._begins: dict[PageReader, int] = {}
        #: words and their sizes; which of them are numbers of programs, of kernels that read all sizes
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
        #: positions of the sizes among a plan's values, found at first use
        self._places: list[int] | None = None
        self._grids = np.array(self._is_grid, bool)
        self._words = np.zeros(max(count, 1), np.int32)
        self._known: bytes | None = None
        #: the room that the calls are for
        self._room: Sizes | None = None
        #: sizes of the last layout, where kernels do not read all of them
        self.numbers: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return int(self._words.nbytes)

    def write(self, queue: CudaQueue, sizes: Sizes, room: Sizes) -> bool:
        """Write other sizes for the kernels. True: their launches are the same for every size that fits in the room."""
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
