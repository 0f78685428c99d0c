"""Objectives of `tune`: latency, throughput under the model's streams, or energy.

In all three cases the search proposes kernels by their time. The final decision differs:

* *latency*: the time of a single inference (`tune.ModelTuning`).
* *throughput*: all streams of the model are busy. While layers are compared, the other streams run the same
  network, so caches and memory are shared as in service. Whole networks are compared by inferences per second.
* *energy*: whole networks are compared by joules per inference, if the device measures them.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..devices.base import Device
from ..devices.energy import EnergyMeter
from ..errors import DeviceError, TunewrightError
from ..frontend.model import Model
from ..plugins.batching import streams
from ..plugins.single import SingleDevice
from ..runtime.requests.asynchronous import AsyncInferQueue
from ..runtime.requests.request import DeviceRequest
from ..settings import Settings
from .layers import TuningOptions, TuningResult
from .model import ModelTuning
from .several_models import Maker

#: Seconds of a network's turn for throughput, and for energy: energy counters change once per millisecond.
TURN, ENERGY_TURN = 0.05, 0.2


class Objective(enum.StrEnum):
    """What tuning should improve."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"
    ENERGY = "energy"


def meter_of(device: Device) -> EnergyMeter:
    """Return the energy meter of a device. Raises `DeviceError` if there is none."""
    found = device.energy_meter()
    if isinstance(found, str):
        hint = "--objective latency or throughput need no such counter"
        raise DeviceError(f"the energy of this device cannot be measured: {found}", where=device.name, hint=hint)
    return found


class Serving(ModelTuning):
    """Decides with all streams busy."""

    def network(self) -> None:
        with self._neighbours():
            super().network()

    @contextlib.contextmanager
    def _neighbours(self) -> Iterator[None]:
        """Context in which the other streams run the present network."""
        count = self.plugin.streams - 1
        if count < 1 or self.stopped:
            yield
            return
        first = self.compile({}, counters=False)
        over = threading.Event()

        def work() -> None:
            request = first.model.create_infer_request()
            with contextlib.suppress(TunewrightError):
                while not over.is_set():
                    request.infer(self.values)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def _duel(self, old: DeviceRequest, new: DeviceRequest) -> tuple[list[float], list[float]]:
        """Return the seconds per inference with all streams busy, in turns."""
        queues = [AsyncInferQueue(one.model, max(1, self.plugin.streams)) for one in (old, new)]
        for queue in queues:
            streams.rate(queue, self.values, 0.0)
        return self._turns(lambda k: 1 / streams.rate(queues[k], self.values, TURN))


class Saving(ModelTuning):
    """Decides by energy."""

    def __init__(self, *given: Any, meter: EnergyMeter) -> None:
        super().__init__(*given)
        self._meter = meter
        self._joules: tuple[list[float], list[float]] | None = None

    def _duel(self, old: DeviceRequest, new: DeviceRequest) -> tuple[list[float], list[float]]:
        """Return the joules per inference, in turns."""
        both = (old, new)

        def turn(k: int) -> float:
            begin, joules, count = time.perf_counter(), self._meter.joules(), 0
            while not count or time.perf_counter() - begin < ENERGY_TURN:
                both[k].infer(self.values)
                count += 1
            return max(self._meter.joules() - joules, 1e-12) / count

        self._joules = self._turns(turn)
        return self._joules

    def whole(self) -> TuningResult:
        """Return the result with times as times, and the compared joules in ``energy``."""
        result = super().whole()
        if result.gain is None or self._joules is None:
            return result
        before = sum(layer.seconds for layer in self.layers)
        after = sum(layer.seconds / layer.gain for layer in self.layers)
        return replace(result, before=before, after=after, energy=(result.before, result.after))


def maker(objective: Objective, plugin: SingleDevice, options: TuningOptions) -> Maker:
    """Return the function that makes a model's tuning for an objective. Raises `DeviceError` if energy has no meter."""
    counter = meter_of(plugin.device) if objective is Objective.ENERGY else None

    def make(model: Model, values: Mapping[str, Any], settings: Settings) -> ModelTuning:
        given = (plugin, model, values, replace(options, settings=settings, report=None))
        if counter is not None:
            return Saving(*given, meter=counter)
        return Serving(*given) if objective is Objective.THROUGHPUT else ModelTuning(*given)

    return make
