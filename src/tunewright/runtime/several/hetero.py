"""HETERO: one model over several devices. Each part is a model of one device, and a request runs all parts.

Parts exchange arrays of the host. Devices that share the host's memory need no copies. A device with memory of its own
keeps results there for its own later parts. Parts of different devices run at the same time, unless one waits for the
other. One thread runs the parts of a device. All threads follow the same order, so no two can wait for each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tunewright.devices.host import HostDevice
from tunewright.devices.remote import RemoteContext, RemoteTensor
from tunewright.ir.graph import Graph
from tunewright.ir.types import Type
from tunewright.settings import Settings

from ..insight.counters import CounterRow, NodeStatus, Totals
from ..requests.compiled import CompiledModel, InferRequest
from ..requests.remote_tensors import Stay
from ..requests.request import DeviceModel, bind
from ..requests.streams import Streams
from .hetero_split import GraphPart


@dataclass(frozen=True)
class Subgraph:
    """A part of the model, ready to run."""

    device: str
    model: DeviceModel
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    #: subgraphs whose results it reads
    before: tuple[int, ...]
    #: names of the nodes that it was made of, without the nodes in their bodies
    nodes: tuple[str, ...]
    #: outputs that stay in the memory of the device, because another of its subgraphs reads them
    stay: frozenset[str] = frozenset()
    #: outputs that leave the device: other parts or the caller read them
    leave: frozenset[str] = frozenset()


class HeteroModel(CompiledModel):
    """A model on several devices."""

    def __init__(
        self,
        name: str,
        graph: Graph,
        parts: Sequence[tuple[GraphPart, DeviceModel]],
        settings: Settings,
        nodes: Sequence[tuple[str, str]],
        streams: Streams,
        origin: str = "",
    ) -> None:
        super().__init__()
        #: where the placement comes from
        self.origin = origin
        self.device_name, self.settings, self.streams, self.nodes = name, settings, streams, list(nodes)
        #: a graph with the inputs only: the whole graph would keep weights alive that nothing reads any more
        self.front = Graph(graph.name)
        for value in graph.inputs:
            self.front.add_input(value.name, value.type)
        self._outputs = {n: v.type for n, v in zip(graph.output_names, graph.outputs, strict=True)}
        #: the source of each output: a constant, or the name of a value. `given`: values that are inputs of the model
        self.sources = [v.name if v.const is None else v.const for v in graph.outputs]
        self.given = {value.name for value in graph.inputs}
        self.subgraphs = [
            Subgraph(
                model.device_name, model, tuple(part.inputs), tuple(part.outputs), tuple(part.before),
                tuple(node.name for node in part.nodes),
            )
            for part, model in parts
        ]  # fmt: skip
        self.subgraphs = [self._with_ways(subgraph) for subgraph in self.subgraphs]
        #: one device runs the whole model
        self.is_whole = len(parts) == 1 and parts[0][0].graph is graph
        self.lanes = self._lanes([part.device for part, _ in parts])
        #: how many subgraphs and outputs read each value that parts exchange
        self.readers: dict[str, int] = {}
        for read in (*(s.inputs for s in self.subgraphs), [v for v in self.sources if isinstance(v, str)]):
            for one in read:
                self.readers[one] = self.readers.get(one, 0) + 1

    def _with_ways(self, subgraph: Subgraph) -> Subgraph:
        """Add which of its results stay on the device and which leave it."""
        mine = frozenset(subgraph.outputs)
        near = [s for s in self.subgraphs if s.device == subgraph.device]
        far = [s for s in self.subgraphs if s.device != subgraph.device]
        stay = {name for s in near for name in s.inputs} if not subgraph.model.env.device.shares_memory else set()
        leave = {name for s in far for name in s.inputs} | {v for v in self.sources if isinstance(v, str)}
        return replace(subgraph, stay=mine & stay, leave=mine & leave if mine & stay else mine)

    def _lanes(self, devices: Sequence[int]) -> list[list[int]]:
        """Group the parts by device if parts of different devices can run at the same time; otherwise make one group.
        """
        behind = [0] * len(devices)
        for k, subgraph in enumerate(self.subgraphs):
            for b in subgraph.before:
                behind[k] |= behind[b] | 1 << b
        apart = any(
            devices[k] != devices[j] and not behind[k] >> j & 1 for k in range(len(devices)) for j in range(k)
        )  # fmt: skip
        if not apart:
            return [list(range(len(devices)))]
        lanes: dict[int, list[int]] = {}
        for k, device in enumerate(devices):
            lanes.setdefault(device, []).append(k)
        return list(lanes.values())

    @property
    def inputs(self) -> dict[str, Type | None]:
        return {v.name: v.type for v in self.front.inputs}

    @property
    def outputs(self) -> dict[str, Type | None]:
        return dict(self._outputs)

    @property
    def name(self) -> str:
        return self.front.name

    @property
    def execution_devices(self) -> list[str]:
        return list(dict.fromkeys(subgraph.device for subgraph in self.subgraphs))

    def memory_statistics(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for subgraph in self.subgraphs:
            for purpose, nbytes in subgraph.model.memory_statistics().items():
                found[purpose] = found.get(purpose, 0) + nbytes
        return found

    @property
    def affinity(self) -> dict[str, str]:
        """The device of every node that runs, except nodes in bodies. `Model.affinity` takes it (docs/hetero.md).

        >>> json.dump(compiled.affinity, file)  # to be edited, and given as HETERO_AFFINITY
        """
        return {name: subgraph.device for subgraph in self.subgraphs for name in subgraph.nodes}

    @property
    def context(self) -> RemoteContext:
        """The context of the device that runs the whole model; otherwise that of the host's memory, where results meet.
        """
        return self.subgraphs[0].model.context if self.is_whole else RemoteContext(HostDevice("CPU.HOST"))

    def create_infer_request(self) -> HeteroRequest:
        return HeteroRequest(self)


class HeteroRequest(InferRequest):
    """A request over several devices, with one request for each part."""

    model: HeteroModel

    def __init__(self, model: HeteroModel) -> None:
        super().__init__(model)
        self.requests = [subgraph.model.create_infer_request() for subgraph in model.subgraphs]
        #: threads for all lanes but the first, which the caller's thread runs
        self._workers = Streams(max(1, len(model.lanes) - 1))
        self._queue = model.context.device.queue()
        self._seconds = 0.0

    def run(
        self,
        inputs: Mapping[str, Any] | Sequence[Any] | Any,
        remote: bool = False,
        outputs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        begin = time.perf_counter()
        inputs, outputs = self.completed(inputs, outputs)
        if self.model.is_whole:
            self.results = found = self.requests[0].run(inputs, remote, outputs)
            self.requests[0].results = {}
            self._seconds = time.perf_counter() - begin
            return found
        values = bind(self.model.front, inputs, self._queue)
        stay = Stay.of(outputs, self.model.outputs, remote, self._queue) if remote or outputs else None
        run = _Run(self, dict(zip(self.model.inputs, values, strict=True)))
        run.go(self._workers)
        made = self._results(run.values)
        names = list(self.model.outputs)
        found = dict(zip(names, made, strict=True))
        if stay is not None:
            found = stay.results(made, names, outputs or {}, self.model.context, self._queue)
        self._seconds = time.perf_counter() - begin
        self.results = found
        return found

    def _results(self, values: Mapping[str, Any]) -> list[Any]:
        """Return the outputs, and copy those that would share memory."""
        made: list[Any] = []
        taken: set[str] = set()
        for source in self.model.sources:
            value = values[source] if isinstance(source, str) else source
            shared = not isinstance(source, str) or source in self.model.given or source in taken
            if isinstance(source, str):
                taken.add(source)
            made.append(_copy(value) if shared else value)
        return made

    def get_totals(self) -> Totals:
        """Totals of all parts. Threads wait in parallel, so the waiting time is that of the thread that waited longest.
        """
        totals = [request.get_totals() for request in self.requests]
        waited = (sum(totals[k].seconds - totals[k].host_seconds for k in lane) for lane in self.model.lanes)
        host = max(0.0, self._seconds - max(waited, default=0.0))
        return Totals(self._seconds, host, sum(t.launches for t in totals))

    def get_subgraph_totals(self) -> list[Totals]:
        """Totals of the last inference, part by part."""
        return [request.get_totals() for request in self.requests]

    def get_profiling_info(self) -> list[CounterRow]:
        """Return the rows as for one device. Every row that ran has its device and the number of its subgraph."""
        if not self.model.settings.perf_count:
            return []
        found: dict[str, CounterRow] = {}
        inserted: list[CounterRow] = []
        known = {name for name, _ in self.model.nodes}
        for number, request in enumerate(self.requests):
            for row in request.get_profiling_info():
                mine = replace(row, device=self.model.subgraphs[number].device, subgraph=number)
                if row.name in known:
                    found[row.name] = mine
                else:
                    inserted.append(mine)
        # A node without a part was folded before the model was cut.
        rows = [found.get(name) or CounterRow(name, op, NodeStatus.OPTIMIZED_OUT) for name, op in self.model.nodes]
        return [*rows, *inserted]


class _Run:
    """One inference: its values, and the state of each part."""

    def __init__(self, request: HeteroRequest, values: dict[str, Any]) -> None:
        self.request, self.model, self.values = request, request.model, values
        #: values in a device's own memory, for its later parts
        self.there: dict[str, RemoteTensor] = {}
        self.left = dict(self.model.readers)
        self.error: BaseException | None = None
        self.guard = threading.Lock()
        self.done = [threading.Event() for _ in self.model.subgraphs] if len(self.model.lanes) > 1 else []

    def go(self, workers: Streams) -> None:
        """Run all parts, in this thread and in ``workers``. Raise the first error."""
        first, *others = self.model.lanes
        over = [threading.Event() for _ in others]
        for lane, event in zip(others, over, strict=True):
            workers.submit(lambda lane=lane, event=event: self.beside(lane, event))  # type: ignore[misc]
        try:
            self.lane(first)
        except BaseException as error:  # also an interrupt while waiting: the other lanes must not wait for this one
            self.fail(error)
        for event in over:
            event.wait()
        if self.error is not None:
            raise self.error

    def beside(self, lane: Sequence[int], over: threading.Event) -> None:
        try:
            self.lane(lane)
        except BaseException as error:  # the caller's thread raises it
            self.fail(error)
        finally:
            over.set()

    def fail(self, error: BaseException) -> None:
        with self.guard:
            self.error = self.error or error
        for event in self.done:
            event.set()

    def lane(self, numbers: Sequence[int]) -> None:
        for k in numbers:
            if self.done:
                for b in self.model.subgraphs[k].before:
                    self.done[b].wait()
            if self.error is not None:
                return
            self.part(k)
            if self.done:
                self.done[k].set()

    def part(self, k: int) -> None:
        subgraph, request = self.model.subgraphs[k], self.request.requests[k]
        feed = {name: self.value(name, subgraph.device) for name in subgraph.inputs}
        made = request.run(feed, remote=bool(subgraph.stay))
        request.results = {}
        for name, value in made.items():
            if isinstance(value, RemoteTensor):
                if name in subgraph.stay:
                    self.there[name] = value
                if name not in subgraph.leave:
                    continue
                value = value.numpy()
            self.values[name] = value
        with self.guard:
            for name in subgraph.inputs:
                self.left[name] -= 1
                if not self.left[name]:  # nothing reads the value any more
                    self.values.pop(name, None)
                    self.there.pop(name, None)

    def value(self, name: str, device: str) -> Any:
        """Return a value in the place where a device reads it best."""
        near = self.there.get(name)
        return near if near is not None and near.device == device else self.values[name]


def _copy(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    return [_copy(v) for v in value] if isinstance(value, list) else value
