"""MAX_BATCH_SIZE and OPTIMAL_BATCH_SIZE: measure a model with ever larger batches on its device.

A batch fits if the weights and the working memory of all streams leave room on the device. The memory of the next batch
is known before it is tried, because everything but the weights grows with the batch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tunewright.devices.base import Device
from tunewright.errors import InputError, SettingsError, TunewrightError
from tunewright.frontend.model import Model
from tunewright.ir.types import DType, TensorType, Type
from tunewright.knowledge.streams import StreamsAnswer, batch_of
from tunewright.runtime.insight.memory_usage import plans, usage
from tunewright.runtime.requests.request import DeviceModel
from tunewright.settings import Settings, plain

from ..single import SingleDevice, streams
from .streams import known

#: Options that are not settings.
MODEL, MEMORY, SECONDS, LIMIT = "MODEL_PTR", "AVAILABLE_DEVICE_MEM_SIZE", "TIME_LIMIT", "MAX_BATCH"
#: Share of the best speed in examples per second above which differences count as noise.
LOSS = 0.97
#: Seconds for all batches together; largest batch; seconds of timing for each; and minimum number of inferences.
ALL_SECONDS, MOST, EACH_SECONDS, LEAST = 20.0, 1024, 0.3, 3
#: Share of the free memory that may be used.
ROOM = 0.8


@dataclass(frozen=True)
class TriedBatch:
    """One batch: its speed in examples per second, and its memory."""

    batch: int
    rate: float
    nbytes: int


@dataclass(frozen=True)
class Batches:
    """The measured batches, and why the search ended."""

    tried: tuple[TriedBatch, ...]
    ended: str
    #: the batch in which requests run together, if it was measured (`batch_tune`)
    chosen: int = 0

    @property
    def best(self) -> float:
        return max(one.rate for one in self.tried)

    @property
    def largest(self) -> int:
        """The largest batch that does not lose speed."""
        return max(self.chosen, max(one.batch for one in self.tried if one.rate >= LOSS * self.best))

    @property
    def optimal(self) -> int:
        """The smallest batch that is as fast as any; a larger one only makes requests wait longer."""
        return self.chosen or min(one.batch for one in self.tried if one.rate >= LOSS * self.best)


def measure_batches(device: Device, settings: Settings, options: Mapping[str, Any]) -> Batches:
    """Try 1, 2, 4, ... examples of a model.

    ``options``: MODEL_PTR, a `Model` or a path; AVAILABLE_DEVICE_MEM_SIZE, bytes; TIME_LIMIT, seconds; MAX_BATCH; and
    settings. If the options set no bounds, a stored measurement of NUM_STREAMS = AUTO with requests that run together
    is the answer.
    """
    bounded = any(plain(str(key)) in (MEMORY, SECONDS, LIMIT) for key in options)
    given = {plain(str(key)): value for key, value in options.items()}
    model = given.pop(MODEL, None)
    memory = _positive(given.pop(MEMORY, None), MEMORY)
    seconds = _positive(given.pop(SECONDS, ALL_SECONDS), SECONDS)
    most = _positive(given.pop(LIMIT, MOST), LIMIT)
    settings = Settings.make(given, settings)
    if isinstance(model, str | os.PathLike):
        from tunewright.frontend.onnx import load

        model = load(model, settings)
    if not isinstance(model, Model):
        raise SettingsError(f"{MODEL} is missing or is not a model", where="property", hint="read_model's, or a path")
    found = None if bounded else measured(model, device, settings)
    if found is not None and found.rates:
        return _of(found)
    assert seconds is not None and most is not None
    free = device.free_bytes or device.memory_bytes
    room = memory if memory is not None else None if free is None else ROOM * free
    return _measure(device, settings, model, room, seconds, int(most))


def measured(model: Model, device: Device, settings: Settings) -> StreamsAnswer | None:
    """Return what was measured of a model's requests that run together.

    An open batch and a batch of one are the same model.
    """
    try:
        one = with_batch(model, 1)
    except TunewrightError:
        return None
    return known(one, device, settings, batches=True)


def _of(answer: StreamsAnswer) -> Batches:
    """Convert a stored measurement: each batch with the rate of its best streams and requests."""
    rates: dict[int, float] = {}
    for name, rate in answer.rates.items():
        rates[batch_of(name)] = max(rate, rates.get(batch_of(name), 0.0))
    tried = tuple(TriedBatch(batch, rate, 0) for batch, rate in sorted(rates.items()))
    return Batches(tried, f"measured {answer.date[:10]}: {answer.ended}", answer.batch)


def _measure(
    device: Device, settings: Settings, model: Model, room: float | None, seconds: float, most: int
) -> Batches:
    until = time.monotonic() + seconds
    count = streams(device, settings)
    plugin = SingleDevice(device.with_threads(max(1, device.target.units // count)), count)
    # This measurement tunes nothing, and requests of other models do not wait for it.
    settings = replace(
        settings, tuning_mode="TUNING_USE_EXISTING", find_enforce="1", exclusive_async_requests=False, num_streams=count
    )  # fmt: skip
    tried: list[TriedBatch] = []
    best: tuple[Timed, float] | None = None
    batch = 1
    while True:
        try:
            compiled = plugin.compile(with_batch(model, batch), settings, consume=True)
            weights, each = _memory(compiled)
            if room is not None and weights + count * each > room and tried:
                return Batches(tuple(tried), f"a batch of {batch} does not fit into the memory")
            mine = Timed(compiled, batch)
            rate = mine.against(best, min(EACH_SECONDS, max(until - time.monotonic(), 0)))
        except (TunewrightError, MemoryError) as error:
            if not tried:
                raise
            return Batches(tuple(tried), f"a batch of {batch} cannot run: {error}")
        tried.append(TriedBatch(batch, rate, weights + count * each))
        if best is None or rate > best[1]:
            best = mine, rate
        del compiled, mine
        found = Batches(tuple(tried), "")
        if rate < LOSS * found.best and tried[-2].rate < LOSS * found.best:  # twice in a row, because once may be noise
            return replace(found, ended="larger batches lose speed")
        batch *= 2
        if batch > most:
            return replace(found, ended=f"larger ones were not asked for: {LIMIT} = {most}")
        if room is not None and weights + count * 2 * each > room:
            return replace(found, ended=f"a batch of {batch} does not fit into the memory")
        if time.monotonic() > until:
            return replace(found, ended=f"{SECONDS} = {seconds:g} s is over")


def with_batch(model: Model, batch: int) -> Model:
    """Return the model with another first dimension of its inputs. Raises `InputError` if other dimensions are open."""
    shapes: dict[str, tuple[int | str | None, ...]] = {}
    for name, type in model.inputs.items():
        if not isinstance(type, TensorType) or not type.shape:
            raise InputError(f"{type} has no batch", where=f"input {name!r}")
        if any(not isinstance(d, int) for d in type.shape[1:]):
            hint = "fix them: Model.reshape"
            raise InputError(f"{type} has other open dimensions", where=f"input {name!r}", hint=hint)
        shapes[name] = (batch, *type.shape[1:])
    first = {t.shape[0] for t in model.inputs.values() if isinstance(t, TensorType) and t.shape}
    if len(first) > 1:
        raise InputError("the inputs have different first dimensions: there is no batch", hint="Model.reshape")
    return model.reshape(shapes)


def _memory(compiled: DeviceModel) -> tuple[int, int]:
    """Return the bytes of the weights, and of one request."""
    each = sum(plan.arena_bytes + sum(plan.results.values()) for plan in plans(compiled.program))
    each += sum(t.nbytes for t in compiled.inputs.values() if isinstance(t, TensorType) and t.is_static)
    return usage([compiled])["constants"], each


def fits(compiled: DeviceModel, streams: int) -> bool:
    """Whether requests of this number of streams fit beside the current content of the device's memory."""
    device = compiled.env.device
    free = device.free_bytes or device.memory_bytes
    return free is None or streams * _memory(compiled)[1] <= ROOM * free


class Timed:
    """A batch that is ready to be timed."""

    def __init__(self, compiled: DeviceModel, batch: int) -> None:
        self.batch, self._request = batch, compiled.create_infer_request()
        self._inputs = {name: _data(type) for name, type in compiled.inputs.items()}
        self.seconds()

    def seconds(self) -> float:
        """Run one inference and return its seconds."""
        begin = time.perf_counter()
        self._request.infer(self._inputs)
        return time.perf_counter() - begin

    def against(self, best: tuple[Timed, float] | None, seconds: float) -> float:
        """Measure examples per second, in turns with the best batch so far, so that a busy machine slows both down."""
        times: list[float] = []
        others: list[float] = []
        end = time.perf_counter() + seconds
        while len(times) < LEAST or time.perf_counter() < end:
            times.append(self.seconds())
            if best is not None:
                others.append(best[0].seconds())
        rate = self.batch / min(times)
        return rate if best is None else best[1] * rate / (best[0].batch / min(others))


def _data(type: Type | None) -> np.ndarray[Any, Any]:
    assert isinstance(type, TensorType)
    if type.dtype is DType.STRING:
        raise InputError("inputs of text cannot be generated for a batch")
    made: np.ndarray[Any, Any] = np.ones(type.dims, type.dtype.numpy)
    return made


def _positive(value: Any, key: str) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not number > 0:
        raise SettingsError(f"{key} = {value!r} is not a number above 0", where="property")
    return number
