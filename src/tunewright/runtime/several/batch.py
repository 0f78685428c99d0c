"""BATCH: requests of single examples that run together. The model exists twice, for one example and for a whole batch.

A request waits until the batch is full, until every request of the model waits, or until its time is up. The caller
bounds that time (AUTO_BATCH_TIMEOUT). It is also at most the time of a few batches, since more waiting costs more than
it can gain. While the device is busy, waiting costs nothing.

Only numbers show whether examples are independent of each other. The model runs the first batch both ways and compares
the results. If they differ, it runs all later examples one by one.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from tunewright.devices.remote import RemoteContext
from tunewright.ir.types import DType, TensorType, Type
from tunewright.ops.tolerance import TOLERANCES, deviation

from ..insight.counters import CounterRow, Totals
from ..requests.compiled import CompiledModel, InferRequest
from ..requests.request import DeviceModel
from ..requests.streams import Streams, Task

LOG = logging.getLogger("tunewright")

Array = np.ndarray[Any, Any]
#: A request waits for others at most as long as this number of batches takes.
PATIENCE = 2.0
#: seconds that a batch is assumed to take before one has run
FIRST = 0.005
#: batches that run before their times count: the first ones take longer
TRIALS = 5
#: batches in a row that may fail although each of their examples runs
FAILURES = 3
#: `entry`: the finished entry that a callback on this thread is called for; its request takes the results from it
_NOW = threading.local()


class _Entry:
    """One waiting request, and its results or error."""

    __slots__ = ("done", "error", "request", "results", "rows", "since", "totals", "values")

    def __init__(self, request: BatchRequest, values: list[Array], done: Callable[[], object]) -> None:
        self.request, self.values, self.done, self.since = request, values, done, time.monotonic()
        self.results: dict[str, Any] = {}
        self.error: BaseException | None = None
        self.totals, self.rows = Totals(0.0, 0.0, 0), list[CounterRow]()

    def finish(self) -> None:
        _NOW.entry = self
        try:
            self.done()
        finally:
            _NOW.entry = None


class _Shelf:
    """A queue where requests wait for others. It knows no model, so its thread keeps no model alive."""

    def __init__(self, size: int, timeout: float, streams: Streams) -> None:
        self.size, self.patience, self._streams = size, timeout, streams
        self._changed = threading.Condition()
        self._entries: list[_Entry] = []
        #: the entries have waited long enough, but the device is busy
        self._overdue = False
        self._running = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def put(self, entry: _Entry, requests: int) -> None:
        """Add a waiting request. ``requests``: how many requests the model has; once all of them wait, the batch
        starts."""
        with self._changed:
            self._entries.append(entry)
            if len(self._entries) >= min(self.size, requests):
                self._send()
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="tunewright-batch", daemon=True)
                self._thread.start()
            if len(self._entries) == 1:
                self._changed.notify()

    def _send(self) -> None:
        entries, self._entries, self._overdue = self._entries, [], False
        self._running += 1
        self._streams.submit(partial(_serve, entries, self))

    def over(self) -> None:
        """Note that a batch has ended, and send the entries that are overdue."""
        with self._changed:
            self._running -= 1
            if self._overdue:
                self._send()

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                if not self._entries or self._overdue:
                    self._changed.wait()
                    continue
                left = self._entries[0].since + self.patience - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                elif self._running < self._streams.count:
                    self._send()
                else:
                    self._overdue = True

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()


def _serve(entries: list[_Entry], shelf: _Shelf) -> None:
    """Run a batch on the thread of a stream."""
    try:
        entries[0].request.model.serve(entries)
    except BaseException as error:
        for entry in entries:
            entry.error = error
    finally:
        shelf.over()
    for entry in entries:
        entry.finish()


class _Space:
    """A request for whole batches, with memory for its inputs."""

    def __init__(self, model: DeviceModel) -> None:
        self.request, self.inputs = model.create_infer_request(), dict[str, Array]()
        for name, type in model.inputs.items():
            assert isinstance(type, TensorType)
            memory = model.env.device.host_memory(type.nbytes)
            self.inputs[name] = np.ndarray(type.dims, type.dtype.numpy, memory)
            self.inputs[name][...] = 0


class BatchModel(CompiledModel):
    """A model that runs its requests together."""

    def __init__(
        self, name: str, alone: DeviceModel, together: DeviceModel, size: int, streams: int, timeout: float
    ) -> None:
        """``streams``: batches that run side by side. ``timeout``: seconds that a request waits for others."""
        super().__init__()
        self.device_name, self.settings, self.nodes = name, alone.settings, alone.nodes
        self.size, self._timeout, self._precision = size, timeout, alone.env.context.precision
        self.streams = Streams(streams)
        self._alone, self.together = alone, together
        self._singles: list[InferRequest] = []
        self._spaces: list[_Space] = []
        self._shelf = _Shelf(size, min(timeout, PATIENCE * FIRST), self.streams)
        self._requests: weakref.WeakSet[BatchRequest] = weakref.WeakSet()
        weakref.finalize(self, self._shelf.close).atexit = False
        #: shape and type of an example, by input
        self._like: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        for key, type in together.inputs.items():
            assert isinstance(type, TensorType)
            self._like[key] = ((1, *type.dims[1:]), type.dtype.numpy)
        #: the shortest time in seconds of one example and of a batch so far
        self._seconds = {1: float("inf"), size: float("inf")}
        self._batches = self._failures = 0
        self._compared = self._seen_alike = False
        #: why the examples do not run together; empty: they may
        self.refused = ""

    @property
    def inputs(self) -> dict[str, Type | None]:
        return self._alone.inputs

    @property
    def outputs(self) -> dict[str, Type | None]:
        return self._alone.outputs

    @property
    def alone(self) -> CompiledModel:
        return self._alone

    @property
    def context(self) -> RemoteContext:
        return self._alone.context

    @property
    def name(self) -> str:
        return self._alone.name

    @property
    def execution_devices(self) -> list[str]:
        return self._alone.execution_devices

    def memory_statistics(self) -> dict[str, int]:
        one, many = self._alone.memory_statistics(), self.together.memory_statistics()
        return {key: one.get(key, 0) + many.get(key, 0) for key in one | many}

    def set_property(self, config: Mapping[str, Any]) -> None:
        super().set_property(config)
        for model in (self._alone, self.together):
            model.set_property(config)
        self._singles.clear()
        self._spaces.clear()

    def with_streams(self, count: int) -> BatchModel:
        """Return a model that shares both copies and runs ``count`` batches side by side.

        For devices whose streams share the whole device.
        """
        return BatchModel(self.device_name, self._alone, self.together, self.size, count, self._timeout)

    @property
    def optimal_requests(self) -> int:
        count = self.best_requests or self.size * self.streams.count
        return min(count, self.settings.performance_hint_num_requests or count)

    def create_infer_request(self) -> BatchRequest:
        made = BatchRequest(self)
        self._requests.add(made)
        return made

    def example(self, inputs: Any) -> list[Array] | None:
        """Return the values of one example in order.

        None: the inputs are no single example. The request then runs by itself, which reports any error in them.
        """
        if self.refused:
            return None
        if not isinstance(inputs, Mapping):
            given = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
            inputs = dict(zip(self._like, given, strict=False)) if len(given) == len(self._like) else {}
        if len(inputs) != len(self._like):
            return None
        values = [inputs.get(name) for name in self._like]
        for value, like in zip(values, self._like.values(), strict=True):
            if not isinstance(value, np.ndarray) or (value.shape, value.dtype) != like:
                return None
        return [value for value in values if value is not None]

    @property
    def has_one_request(self) -> bool:
        """Whether the model has one request only, which has no other to wait for."""
        return len(self._requests) == 1

    def put(self, entry: _Entry) -> None:
        self._shelf.put(entry, len(self._requests))

    def by_itself(self, inputs: Any, remote: bool = False, outputs: Mapping[str, Any] | None = None) -> InferRequest:
        """Run a single inference. The returned request holds the results until the caller hands it to `free`."""
        try:
            request = self._singles.pop()
        except IndexError:
            request = self._alone.create_infer_request()
        request.run(inputs, remote, outputs)
        return request

    def free(self, request: InferRequest) -> None:
        request.results = {}
        self._singles.append(request)

    def serve(self, entries: Sequence[_Entry]) -> None:
        """Give every entry its results, or its error."""
        count, failure = len(entries), ""
        if not self.refused and count > 1 and self._pays(count):
            try:
                self._run_together(entries)
                if not self._compared:
                    self._compare(entries)
                if not self.refused:
                    self._failures = 0
                    return
            except Exception as error:  # running each example by itself shows which one is to blame
                LOG.debug("%s: %s", self.device_name, error)
                failure = str(error) or type(error).__name__
        for entry in entries:
            self._run_alone(entry)
        # no single example is to blame: perhaps they do not fit
        if failure and all(entry.error is None for entry in entries):
            self._failures += 1
            if self._failures == FAILURES:
                self._refuse(f"batches fail: {failure}")

    def _pays(self, count: int) -> bool:
        """Whether this many examples run faster together than one by one, as far as the times are known."""
        return self._batches < TRIALS or count * self._seconds[1] > self._seconds[self.size]

    def _run_together(self, entries: Sequence[_Entry]) -> None:
        try:
            space = self._spaces.pop()
        except IndexError:
            space = _Space(self.together)
        begin = time.perf_counter()
        for at, array in enumerate(space.inputs.values()):
            for i, entry in enumerate(entries):
                array[i] = entry.values[at][0]
        results = space.request.run(space.inputs)
        self._took(self.size, time.perf_counter() - begin)
        totals, rows = space.request.get_totals(), space.request.get_profiling_info()
        space.request.results = {}
        self._spaces.append(space)
        for name, value in results.items():
            if not isinstance(value, np.ndarray) or value.shape[:1] != (self.size,):
                self._refuse(f"output {name!r} is not one part for each of {self.size} examples")
        for i, entry in enumerate(entries):
            entry.results = {name: value[i : i + 1] for name, value in results.items()} if not self.refused else {}
            entry.totals, entry.rows = totals, rows

    def _run_alone(self, entry: _Entry) -> None:
        entry.error = None
        try:
            begin = time.perf_counter()
            request = self.by_itself(dict(zip(self._like, entry.values, strict=True)))
            self._took(1, time.perf_counter() - begin)
            entry.results = request.results
            entry.totals, entry.rows = request.get_totals(), request.get_profiling_info()
            self.free(request)
        except Exception as error:
            entry.error = error

    def _took(self, size: int, seconds: float) -> None:
        self._seconds[size] = min(seconds, self._seconds[size])
        self._batches += size > 1
        # Before the first batch, assume that it takes no longer than its examples one by one.
        least = min(self._seconds[self.size], self.size * self._seconds[1])
        self._shelf.patience = min(self._timeout, PATIENCE * least)

    def _compare(self, entries: Sequence[_Entry]) -> None:
        """Compare the results of real examples that ran together with those of each alone. Refuse batches if they
        differ.

        Equal examples show little about how others would affect them. In that case one example also runs beside zeros,
        once, and the first batch with different examples is compared again.
        """
        first = entries[0].values
        pairs = [(a, b) for entry in entries[1:] for a, b in zip(first, entry.values, strict=True)]
        same = all(a is b or np.array_equal(a, b) for a, b in pairs)
        if same and self._seen_alike:
            return
        for entry in entries:
            self._compare_one(entry)
        if same and not self.refused:
            beside = _Entry(entries[0].request, first, lambda: None)
            self._spaces.append(_Space(self.together))
            self._run_together([beside])
            self._compare_one(beside)
        self._compared, self._seen_alike = not same, True

    def _compare_one(self, entry: _Entry) -> None:
        if self.refused:
            return
        begin = time.perf_counter()
        request = self.by_itself(dict(zip(self._like, entry.values, strict=True)))
        self._took(1, time.perf_counter() - begin)
        for name, value in request.results.items():
            why = _differs(entry.results[name], value, self._precision)
            if why:
                self._refuse(f"output {name!r} of an example depends on the others: {why}")
        self.free(request)

    def _refuse(self, why: str) -> None:
        if not self.refused:
            self.refused = why
            LOG.warning("%s: requests run one by one, %s", self.device_name, why)


def _differs(mine: Any, other: Any, precision: DType) -> str:
    """Describe how two results differ. Empty: they are the same within the tolerance."""
    if not isinstance(other, np.ndarray) or mine.shape != other.shape or mine.dtype != other.dtype:
        return "it has another type"
    dtype = DType.of_numpy(other.dtype)
    if dtype not in TOLERANCES:
        return "" if np.array_equal(mine, other) else "numbers differ"
    if not np.array_equal(np.isfinite(mine), np.isfinite(other)):
        return "infinities or NaNs stand in different places"
    allowed = max(TOLERANCES[dtype].network, TOLERANCES[precision].network if precision in TOLERANCES else 0.0)
    found = deviation(mine, other)
    return f"by {found:.2g} of the largest" if found > allowed else ""


class _Handing(Streams):
    """Stands in for the streams in `Startable.start_async`, and puts the inference into the queue with its inputs."""

    def __init__(self, request: BatchRequest, values: list[Array]) -> None:
        # This object has no threads, so it skips the base class's constructor.
        self._entry, self._model = partial(_Entry, request, values), request.model

    def submit(self, task: Task) -> None:
        self._model.put(self._entry(task))


class BatchRequest(InferRequest):
    """A request of one example, which runs together with others where possible."""

    model: BatchModel

    def __init__(self, model: BatchModel) -> None:
        super().__init__(model)
        self._totals, self._rows = Totals(0.0, 0.0, 0), list[CounterRow]()

    def start_async(self, inputs: Any = None, userdata: Any = None) -> None:
        self.check_idle()
        values = None
        if not self._into:
            values = self.model.example(self.completed(inputs, None)[0])
        if values is not None:
            self._streams = _Handing(self, values)
        try:
            super().start_async(inputs, userdata)
        finally:
            self._streams = self.model.streams

    def run(
        self,
        inputs: Mapping[str, Any] | Sequence[Any] | Any,
        remote: bool = False,
        outputs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        entry: _Entry | None = getattr(_NOW, "entry", None)
        if entry is None or entry.request is not self:
            inputs, outputs = self.completed(inputs, outputs)
            # A callback runs on a thread that serves batches, so it must not wait for a batch.
            values = None if remote or outputs or entry is not None else self.model.example(inputs)
            if values is None or self.model.has_one_request:
                return self._by_itself(inputs, remote, outputs)
            over = threading.Event()
            entry = _Entry(self, values, over.set)
            self.model.put(entry)
            over.wait()
        if entry.error is not None:
            raise entry.error
        self.results, self._totals, self._rows = entry.results, entry.totals, entry.rows
        return self.results

    def _by_itself(self, inputs: Any, remote: bool, outputs: Mapping[str, Any] | None) -> dict[str, Any]:
        request = self.model.by_itself(inputs, remote, outputs)
        self.results, self._totals, self._rows = request.results, request.get_totals(), request.get_profiling_info()
        self.model.free(request)
        return self.results

    def get_totals(self) -> Totals:
        return self._totals

    def get_profiling_info(self) -> list[CounterRow]:
        return self._rows
