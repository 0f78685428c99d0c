"""``BATCH:GPU.0(8)``: requests with single examples run together, eight at a time (docs/multi.md).

Without a number, and on a GPU with a throughput hint (ALLOW_AUTO_BATCHING), the batch size is the one measured to be
best. NUM_STREAMS = AUTO measures it. Without a measurement it is `SIZE`. On an NVIDIA H200, eight examples took 2.1 to
4 times as long as one (three networks, docs/gpu.md). At run time a batch that does not pay is detected and left out.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TypeVar

from ..errors import SettingsError, TunewrightError, UnsupportedError
from ..frontend.model import Model
from ..ir.types import Shape, TensorType, Type
from ..knowledge.streams import StreamsAnswer
from ..runtime.requests.compiled import CompiledModel
from ..runtime.requests.request import DeviceModel
from ..runtime.several.batch import BatchModel
from ..settings import Settings
from .base import Plugin, ServingChoice, Support
from .batching import batch_tune
from .batching.batch_axis import batched, why_not
from .batching.batch_size import fits, measured
from .batching.streams import ServingPoint, is_automatic, is_due, origin
from .device_strings import parse
from .find import single
from .single import SingleDevice, measured_streams, of_device

LOG = logging.getLogger("tunewright")

Served = TypeVar("Served", bound=CompiledModel)

#: Batch size if none is given and nothing was measured.
SIZE = 8


class Batch(Plugin):
    """A device that runs several requests as one."""

    def __init__(self, names: Sequence[str], settings: Settings) -> None:
        found = parse(names, "BATCH")
        if len(found) > 1:
            raise SettingsError(f"BATCH: {len(found)} devices are named", hint="one: BATCH:GPU.0(8) for example")
        [(name, size)] = found
        if size == 1:
            raise SettingsError("BATCH: a batch of 1 combines no requests", hint=f"two or more: BATCH:{name}({SIZE})")
        self._set(single(name, settings), size, required=True)

    @classmethod
    def over(cls, device: SingleDevice) -> Batch:
        """Make the plugin of a device whose models may run in batches; a model that may not runs without."""
        made = cls.__new__(cls)
        made._set(device, 0, required=False)
        return made

    def _set(self, device: SingleDevice, size: int, required: bool) -> None:
        #: ``size`` 0: the measured size; ``required``: a model that cannot run in batches is an error
        self.single, self.size, self.required = device, size, required
        self.name = f"BATCH:{device.name}({size})" if size else f"BATCH:{device.name}"

    @property
    def requests(self) -> int:
        """The number of requests that run at a time, as far as it is known without a model."""
        return (self.size or SIZE) * self.single.streams

    def query(self, model: Model, settings: Settings) -> dict[str, Support]:
        return self.single.query(model, settings)

    def choice(self, model: Model, settings: Settings) -> ServingChoice:
        why = self._why_not(model, settings)
        if why:
            return dataclasses.replace(self.single.choice(model, settings), why=f"one by one: {why}")
        answer = None if self.size else measured(model, self.single.whole, settings)
        point, told = self._point(answer, settings)
        return ServingChoice(point.streams, _requests(point, settings), point.batch, told)

    def compile(self, model: Model, settings: Settings, *, consume: bool = False) -> CompiledModel:
        why = self._why_not(model, settings)
        if why:
            LOG.info("%s: requests run one by one: %s", self.name, why)
            only = self.single.compile(model, settings, consume=consume)
            only.streams_origin = f"{only.streams_origin}; one by one: {why}".removeprefix("; ")
            return only
        answer = None if self.size else measured(model, self.single.whole, settings)
        if (answer is None or is_due(answer, settings)) and not self.size and is_automatic(settings):
            new, made = batch_tune.tuned(self, model, batched(model, 1), settings)
            answer = new or answer
            if made is not None:
                return made
        point, told = self._point(answer, settings)
        # the batch size is given; this measures how many streams of them are best
        if self.size and is_automatic(settings):
            try:
                found = self.single.compile(batched(model, self.size), settings)
                point, told = point._replace(streams=found.streams.count), f"{told}; {found.streams_origin}"
            except TunewrightError as error:
                raise self._refusal(f"batches of {self.size} are not possible: {error}") from None
        alone = self.alone(model, settings, point.streams)
        while point.batch > 1:
            together: BatchModel | None = None
            try:
                together = self.together(alone, model, settings, point.streams, point.batch)
            except MemoryError:
                if self.size:
                    raise
            except TunewrightError as error:
                told = f"batches of {point.batch} are not possible: {error}"
                if self.required:
                    raise self._refusal(told) from None
                point = point._replace(batch=1, requests=0)
                break
            known = self.size or answer is not None
            if together is not None and (known or fits(together.together, point.streams)):
                LOG.info("%s: requests run together, %d at a time: %s", self.single.name, point.batch, told)
                return _served(together, point, told)
            told = f"a batch of {point.batch} does not fit into the memory"
            LOG.info("%s: %s", self.name, told)
            point = point._replace(batch=point.batch // 2, requests=0)
        LOG.info("%s: requests run one by one: %s", self.name, told)
        return _served(alone, point, told)

    def alone(self, model: Model, settings: Settings, streams: int) -> DeviceModel:
        """Compile the model for single examples."""
        given = dataclasses.replace(settings, num_streams=streams)
        return of_device(self.single.whole, given).compile(model, given)

    def together(self, alone: DeviceModel, model: Model, settings: Settings, streams: int, batch: int) -> BatchModel:
        """Compile the model for ``batch`` examples beside that for a single example. Raises if that is impossible."""
        made = self.alone(batched(model, batch), settings, streams)
        for name, type in made.outputs.items():
            _check_output(name, alone.outputs[name], type, batch)
        name, timeout = f"BATCH:{self.single.name}({batch})", settings.auto_batch_timeout / 1e3
        return BatchModel(name, alone, made, batch, streams, timeout)

    def _why_not(self, model: Model, settings: Settings) -> str:
        """Return why requests of a model do not run together; empty if they may.

        Raises instead if batches were requested.
        """
        try:
            batched(model, 1)
        except TunewrightError as error:
            if self.required:
                raise self._refusal(f"batches are not possible: {error}") from None
            return f"batches are not possible: {error}"
        # A user who names BATCH states that examples are independent, and the first batch is compared. Here nobody
        # stated it.
        found = "" if self.required else why_not(model, settings)
        return found and f"it is not proven that examples are independent: {found}"

    def _refusal(self, why: str) -> UnsupportedError:
        return UnsupportedError(why, where=self.name, hint=f"name the device alone: {self.single.name}")

    def _point(self, answer: StreamsAnswer | None, settings: Settings) -> tuple[ServingPoint, str]:
        """Return what to compile, and why."""
        most = settings.performance_hint_num_requests
        if answer is not None and measured_streams(settings):
            return ServingPoint(answer.streams, answer.requests, answer.batch), origin(answer)
        streams = self.single.streams
        if answer is not None:  # the user chose the streams
            return ServingPoint(streams, 0, answer.batch), f"batch {origin(answer)}"
        if self.size:
            return ServingPoint(streams, 0, self.size), f"{self.name} is named"
        size = min(SIZE, most or SIZE)
        bound = f", no more than PERFORMANCE_HINT_NUM_REQUESTS = {most}" if most and most < SIZE else ""
        return ServingPoint(
            streams, 0, size
        ), f"a batch of {size}: nothing was measured (NUM_STREAMS = AUTO does){bound}"


def _served(made: Served, point: ServingPoint, why: str) -> Served:
    made.best_requests, made.streams_origin = point.requests, why
    return made


def _requests(point: ServingPoint, settings: Settings) -> int:
    count = point.requests or point.streams * point.batch
    return min(count, settings.performance_hint_num_requests or count)


def with_batches(device: SingleDevice, settings: Settings) -> Plugin:
    """Return a device with batches if settings allow them (ALLOW_AUTO_BATCHING) and they pay, which means on a GPU.

    Not if requests of other models count too (EXCLUSIVE_ASYNC_REQUESTS). Not with fixed kernels (FROZEN) either,
    because a lockfile has the kernels of the unbatched model.
    """
    wanted = settings.allow_auto_batching and settings.performance_hint != "LATENCY"
    barred = settings.exclusive_async_requests or settings.frozen or settings.performance_hint_num_requests == 1
    return Batch.over(device) if wanted and not barred and device.device.target.traits.batches_pay else device


def _check_output(name: str, alone: Type | None, together: Type | None, size: int) -> None:
    """Check that every example has its part of the output. Unknown sizes are checked at the first inference."""
    if not isinstance(together, TensorType):
        raise UnsupportedError(f"{together} has no part for each example", where=f"output {name!r}")
    wanted: Shape | None = None
    if isinstance(alone, TensorType) and alone.shape:
        wanted = (size, *alone.shape[1:])
    elif together.shape:
        wanted = (size, *together.shape[1:])
    pairs = zip(wanted or (), together.shape or (), strict=False)
    differs = any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs)
    if together.shape == () or differs or (wanted and together.shape and len(wanted) != len(together.shape)):
        raise UnsupportedError(
            f"it is {alone} for one example and {together} for {size}: not one part for each", where=f"output {name!r}"
        )
