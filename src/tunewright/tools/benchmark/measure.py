"""Runs inferences, one after the other or side by side, and measures each."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tunewright.errors import TunewrightError

from ..shared.console import console, working

if TYPE_CHECKING:
    from tunewright.runtime.insight.counters import CounterRow
    from tunewright.runtime.insight.timeline import Trace
    from tunewright.runtime.requests.compiled import CompiledModel, InferRequest
    from tunewright.settings import Settings

#: seconds after which progress is shown
PATIENCE = 2.0


@dataclass(frozen=True)
class Load:
    """How a model is driven: until the time is over or the count is reached."""

    requests: int
    #: start inferences through AsyncInferQueue with callbacks; otherwise one thread per request waits for it
    is_async: bool
    seconds: float | None
    count: int | None
    warm_up: int
    #: for a model with states: a request begins a new sequence after this number of inferences
    sequence: int = 0
    #: part of the time in which a request runs; it rests in between, as in a server
    busy: float = 1.0

    @property
    def api(self) -> str:
        return "async" if self.is_async else "sync"


@dataclass
class BenchmarkResult:
    """Measurements in the order of completion, and counters summed over ``counted`` inferences."""

    #: from the start of an inference to its results, including the wait for a stream
    latencies: list[float] = field(default_factory=list)
    #: for each inference: time on a stream, host time within it, and time of copies
    runs: list[float] = field(default_factory=list)
    hosts: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    #: when each inference ended, on the clock of ``begin``
    ends: list[float] = field(default_factory=list)
    begin: float = 0.0
    #: wall-clock time of the whole run
    seconds: float = 0.0
    #: number of kernels launched
    launches: int = 0
    rows: list[CounterRow] = field(default_factory=list)
    counted: int = 0
    #: whether Ctrl-C ended the run
    interrupted: bool = False

    def add(self, other: BenchmarkResult) -> None:
        """Append another run of the same load."""
        shift = self.ends[-1] - other.begin if self.ends else 0.0  # shifted as if one run had followed the other
        if not self.ends:
            self.begin = other.begin
        self.ends += [end + shift for end in other.ends]
        self.latencies += other.latencies
        self.runs += other.runs
        self.hosts += other.hosts
        self.copies += other.copies
        self.seconds += other.seconds
        self.launches += other.launches


def import_everything(device: str, settings: Settings) -> None:
    """Compile and run a minimal model, so that imports and discovery, done once per process, are not measured."""
    import numpy as np
    from onnx import TensorProto, helper

    from tunewright.core import Core

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "smallest", [x], [y])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    core = Core()
    # The user's limits are meant for the user's model.
    core.settings = replace(type(settings)(), cache_dir=settings.cache_dir, cache_bytes=settings.cache_bytes)
    log = logging.getLogger("tunewright")
    level = log.level
    log.setLevel(logging.WARNING)  # AUTO would log its choice twice
    try:
        core.compile_model(proto, device)({"x": np.ones(1, np.float32)})
    finally:
        log.setLevel(level)


def measure(
    compiled: CompiledModel,
    feeds: Sequence[dict[str, Any]],
    load: Load,
    trace: Trace | None = None,
    progress: bool = True,
) -> BenchmarkResult:
    """Run inferences on these inputs in turn. After Ctrl-C the result holds the inferences so far."""
    driver = _Async(compiled, feeds, load, trace) if load.is_async else _Sync(compiled, feeds, load, trace)
    with working("warming up") if progress else contextlib.nullcontext():  # only one display at a time
        driver.warm_up()
    bar = _progress(driver.result, load) if progress else contextlib.nullcontext(lambda: None)
    with bar as done, contextlib.nullcontext() if trace is None else trace:
        driver.run(done)
    if driver.failures:
        raise driver.failures[0]
    return driver.result


class _Driver(ABC):
    """Common part of both ways to drive a model: when the run ends, and what is recorded for each inference."""

    def __init__(
        self, compiled: CompiledModel, feeds: Sequence[dict[str, Any]], load: Load, trace: Trace | None
    ) -> None:
        self.compiled, self.feeds, self.load, self.trace = compiled, feeds, load, trace
        self.result = BenchmarkResult()
        self.failures: list[BaseException] = []
        self.started = 0
        self._lock = threading.Lock()
        self._deadline: float | None = None

    @abstractmethod
    def warm_up(self) -> None:
        """Run inferences that are not measured."""

    @abstractmethod
    def drive(self, done: Callable[[], None]) -> None:
        """Run inferences, one after the other or side by side, until `next` returns None."""

    def run(self, done: Callable[[], None]) -> None:
        """Run until the load is done or Ctrl-C."""
        begin = self.result.begin = time.perf_counter()
        self._deadline = None if self.load.seconds is None else begin + self.load.seconds
        try:
            self.drive(done)
        except KeyboardInterrupt:
            self.result.interrupted = True
            self.end()
        self.result.seconds = (self.result.ends[-1] if self.result.ends else time.perf_counter()) - begin

    def end(self) -> None:
        """Wait for running inferences."""
        return

    def next(self) -> int | None:
        """Return the number of the next inference, or None at the end of the run."""
        with self._lock:
            over = self.failures or self.result.interrupted
            over = over or (self.load.count is not None and self.started >= self.load.count)
            if self._deadline is not None and self.started >= self.load.requests:
                over = over or time.perf_counter() >= self._deadline
            if over:
                return None
            self.started += 1
            return self.started - 1

    def feed(self, number: int) -> dict[str, Any]:
        return self.feeds[number % len(self.feeds)]

    def note(self, request: InferRequest, which: int, number: int, begin: float) -> None:
        """Record a finished inference."""
        end, totals, result = time.perf_counter(), request.get_totals(), self.result
        with self._lock:
            result.latencies.append(end - begin)
            result.ends.append(end)
            result.runs.append(totals.seconds)
            result.hosts.append(totals.host_seconds)
            result.copies.append(totals.copy_seconds)
            result.launches += totals.launches
        if which == 0 and self.compiled.settings.perf_count:
            accumulate(result, request.get_profiling_info())
        if self.trace is not None:
            self.trace.request(which, f"inference {number}", begin, end)


class _Sync(_Driver):
    """One thread per request, which waits for it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.requests = [self.compiled.create_infer_request() for _ in range(self.load.requests)]

    def warm_up(self) -> None:
        for request in self.requests:
            for i in range(self.load.warm_up):
                request.infer(self.feed(i))
            request.reset_state()

    def drive(self, done: Callable[[], None]) -> None:
        if len(self.requests) == 1:
            self.work(0, done)
            return
        workers = [
            threading.Thread(target=self._guarded, args=(i, done), name=f"thread-{i}", daemon=True)
            for i in range(len(self.requests))
        ]
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                worker.join()
        except KeyboardInterrupt:
            self.result.interrupted = True  # makes the workers stop
            for worker in workers:
                worker.join()
            raise

    def _guarded(self, which: int, done: Callable[[], None]) -> None:
        try:
            self.work(which, done)
        except BaseException as error:  # passed to the caller's thread
            self.failures.append(error)

    def work(self, which: int, done: Callable[[], None]) -> None:
        request, done_before = self.requests[which], 0
        while (number := self.next()) is not None:
            if self.load.sequence and done_before and done_before % self.load.sequence == 0:
                request.reset_state()
            done_before += 1
            begin = time.perf_counter()
            request.infer(self.feed(number))
            self.note(request, which, number, begin)
            done()
            if self.load.busy < 1:
                time.sleep((time.perf_counter() - begin) * (1 / self.load.busy - 1))


class _Async(_Driver):
    """Requests that start as soon as they are free and report through callbacks."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from tunewright.runtime.requests.asynchronous import AsyncInferQueue

        self.queue = AsyncInferQueue(self.compiled, self.load.requests)
        self.which = {id(request): i for i, request in enumerate(self.queue)}

    def warm_up(self) -> None:
        for i in range(self.load.warm_up * len(self.queue)):
            self.queue.start_async(self.feed(i))
        self.queue.wait_all()

    def drive(self, done: Callable[[], None]) -> None:
        self.queue.set_callback(self._over)
        while (number := self.next()) is not None:
            self.queue.wait_ready()  # this wait is not part of the latency
            self.queue.start_async(self.feed(number), (number, time.perf_counter()))
            done()
        self.queue.wait_all()

    def end(self) -> None:
        # Bypass the queue: Ctrl-C may have interrupted it while it held a request.
        for request in self.queue:
            # The request was not started, failed, or was interrupted while this thread ran it (waiting threads also run
            # work).
            with contextlib.suppress(TunewrightError, KeyboardInterrupt):
                request.wait(PATIENCE)

    def _over(self, request: InferRequest, started: tuple[int, float]) -> None:
        self.note(request, self.which[id(request)], *started)


def accumulate(result: BenchmarkResult, rows: Sequence[CounterRow]) -> None:
    """Add the counters of one inference."""
    result.counted += 1
    if not result.rows:
        result.rows = list(rows)
        return
    known = {(row.name, row.device): row for row in result.rows}
    for row in rows:
        mine = known.get((row.name, row.device))
        if mine is None:
            result.rows.append(row)
            continue
        mine.device_seconds += row.device_seconds
        mine.host_seconds += row.host_seconds
        mine.calls += row.calls
        mine.launches += row.launches


@contextlib.contextmanager
def _progress(result: BenchmarkResult, load: Load) -> Iterator[Callable[[], None]]:
    """Show a progress bar on stderr if it is a terminal, once two seconds have passed."""
    if not sys.stderr.isatty() or (load.seconds is not None and load.seconds <= PATIENCE):
        yield lambda: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    begin = time.perf_counter()
    columns = (
        TextColumn("measuring"), BarColumn(), TextColumn("{task.fields[inferences]} inferences"), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=console(stderr=True), transient=True, refresh_per_second=4) as bar:
        total = load.seconds if load.seconds is not None else load.count
        task = bar.add_task("", total=total, inferences=0, visible=False)
        last = begin

        def done() -> None:
            nonlocal last
            now, n = time.perf_counter(), len(result.latencies)
            if now - last < 0.1:  # an update takes longer than a small inference
                return
            last, elapsed = now, now - begin
            bar.update(task, completed=elapsed if load.seconds is not None else n, inferences=n,
                       visible=elapsed > PATIENCE)  # fmt: skip

        yield done
