"""The model and the requests that a user of several devices holds (`multi.DevicePool`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tunewright.devices.remote import RemoteContext
from tunewright.ir.types import Type
from tunewright.settings import Settings

from ..insight.counters import CounterRow, Totals
from ..insight.properties import check_changeable
from ..requests.compiled import CompiledModel, InferRequest
from ..requests.streams import Streams, Task
from .multi import CandidateDevice, DevicePool, Served


class _PoolStreams(Streams):
    """As many threads as requests keep the devices busy. The number changes when devices come and go."""

    def __init__(self, pool: DevicePool) -> None:
        super().__init__(pool.count)
        self._pool = pool
        self._changing = threading.Lock()

    def submit(self, task: Task) -> None:
        if self.count != self._pool.count:
            with self._changing:
                if self.count != self._pool.count:
                    self.resize(self._pool.count)
        super().submit(task)


class PoolModel(CompiledModel):
    """A model on several devices."""

    def __init__(
        self,
        name: str,
        pool: DevicePool,
        settings: Settings,
        candidates: Callable[[str], Sequence[CandidateDevice]] | None = None,
    ) -> None:
        """``candidates``: returns the devices that a text names, if the user may change them."""
        super().__init__()
        self.device_name, self.pool, self.settings, self._candidates = name, pool, settings, candidates
        self.streams = _PoolStreams(pool)
        first = pool.model()
        self._inputs, self._outputs, self.nodes, self._name = first.inputs, first.outputs, first.nodes, first.name
        # AUTO used MODEL_PRIORITY at compile time.
        own = {"MULTI_DEVICE_PRIORITIES"} if candidates is not None else set()
        self.changeable = (self.changeable | own) - ({"MODEL_PRIORITY"} if candidates is None else set())

    @property
    def inputs(self) -> dict[str, Type | None]:
        return dict(self._inputs)

    @property
    def outputs(self) -> dict[str, Type | None]:
        return dict(self._outputs)

    @property
    def name(self) -> str:
        return self._name

    @property
    def optimal_requests(self) -> int:
        return self.pool.count

    @property
    def execution_devices(self) -> list[str]:
        """The devices that serve now, the preferred one first."""
        return self.pool.devices()

    @property
    def served(self) -> dict[str, int]:
        return self.pool.served()

    def memory_statistics(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for model in self.pool.models():
            for key, nbytes in model.memory_statistics().items():
                found[key] = found.get(key, 0) + nbytes
        return found

    def set_property(self, config: Mapping[str, Any]) -> None:
        """Change settings. MULTI_DEVICE_PRIORITIES names the devices that serve from now on, in order of preference.

        The pool compiles for a new device in the background. A removed device finishes what it has begun.

        >>> compiled.set_property({"MULTI_DEVICE_PRIORITIES": "CPU,GPU.0"})
        """
        settings = check_changeable(self, config)
        keys = {key: Settings.key(str(key)) for key in config}
        if self._candidates is not None and "MULTI_DEVICE_PRIORITIES" in keys.values():
            self.pool.arrange(self._candidates(settings.multi_device_priorities))
        self.pool.set_property({key: config[key] for key, name in keys.items() if name != "MULTI_DEVICE_PRIORITIES"})
        self.settings = settings

    @property
    def context(self) -> RemoteContext:
        """The context of the preferred device. Only that device uses tensors in it."""
        return self.pool.model().context

    def create_infer_request(self) -> PoolRequest:
        return PoolRequest(self)


class PoolRequest(InferRequest):
    """A request that any of the devices serves. The device gets the inputs unchanged."""

    model: PoolModel

    def __init__(self, model: PoolModel) -> None:
        super().__init__(model)
        self._served = Served({}, "", Totals(0.0, 0.0, 0), [])

    @property
    def device(self) -> str:
        """The device that did the last inference; empty: there was none."""
        return self._served.device

    def run(
        self,
        inputs: Mapping[str, Any] | Sequence[Any] | Any,
        remote: bool = False,
        outputs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        inputs, outputs = self.completed(inputs, outputs)
        served = self.model.pool.infer(inputs, remote, outputs)
        self._served, self.results = replace(served, results={}), served.results
        return self.results

    def get_totals(self) -> Totals:
        return self._served.totals

    def get_profiling_info(self) -> list[CounterRow]:
        return self._served.rows
