"""``BATCH:GPU.0(8)``: requests of single examples are run together, eight at a time (docs/multi.md)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ..errors import SettingsError, TunewrightError, UnsupportedError
from ..frontend.model import Model
from ..ir.types import DType, Shape, TensorType, Type
from ..runtime.batch import BatchModel
from ..runtime.compiled import CompiledModel
from ..settings import Settings
from .base import Plugin, Support
from .find import single
from .several import parse
from .single import SingleDevice

LOG = logging.getLogger("tunewright")

#: examples in a batch, where nobody says how many
SIZE = 8


class Batch(Plugin):
    """One device that runs the requests of several as one."""

    def __init__(self, names: Sequence[str], settings: Settings) -> None:
        found = parse(names, "BATCH")
        if len(found) > 1:
            raise SettingsError(f"BATCH: {len(found)} devices are named", hint="one: BATCH:GPU.0(8) for example")
        (name, size), self.required = found[0], True
        self._set(single(name, settings), size or _size(settings))

    @classmethod
    def over(cls, device: SingleDevice, settings: Settings) -> Batch:
        """The same for a device, where the model allows it; else it is the device as it is."""
        made = cls.__new__(cls)
        made.required = False
        made._set(device, _size(settings))
        return made

    def _set(self, device: SingleDevice, size: int) -> None:
        if size < 2:
            raise SettingsError("BATCH: one example is no batch", hint=f"two or more: BATCH:{device.name}({SIZE})")
        self.single, self.size = device, size
        self.name = f"BATCH:{device.name}({size})"
        #: how many it takes at a time
        self.requests = size * device.streams

    def query(self, model: Model, settings: Settings) -> dict[str, Support]:
        return self.single.query(model, settings)

    def compile(self, model: Model, settings: Settings, *, consume: bool = False) -> CompiledModel:
        alone = self.single.compile(model, settings)
        try:
            together = self.single.compile(batched(model, self.size), settings)
            for name, type in together.outputs.items():
                _check_output(name, alone.outputs[name], type, self.size)
        except TunewrightError as error:
            why = f"batches of {self.size} are not possible: {error}"
            if self.required:
                hint = f"name the device alone: {self.single.name}"
                raise UnsupportedError(why, where=self.name, hint=hint) from None
            LOG.info("%s: %s", self.name, why)
            return alone
        LOG.info("%s: requests run together, %d at a time", self.name, self.size)
        precision = alone.env.context.precision
        return BatchModel(self.name, alone, together, self.size, settings.auto_batch_timeout / 1e3, precision)


def with_batches(device: SingleDevice, settings: Settings) -> Plugin:
    """A device, with batches where settings ask for them (ALLOW_AUTO_BATCHING) and they pay: on a GPU."""
    wanted = settings.allow_auto_batching and settings.performance_hint != "LATENCY"
    if wanted and device.device.target.device == "gpu" and _size(settings) > 1:
        return Batch.over(device, settings)
    return device


def _size(settings: Settings) -> int:
    return min(SIZE, settings.performance_hint_num_requests or SIZE)


def batched(model: Model, size: int) -> Model:
    """The model for so many examples at a time; UnsupportedError where its inputs are not one example each."""
    shapes: dict[str, list[int | str | None]] = {}
    for name, type in model.inputs.items():
        where = f"input {name!r}"
        if not isinstance(type, TensorType) or type.dtype is DType.STRING or not type.shape:
            raise UnsupportedError(f"{type} has no dimension for examples", where=where)
        first, *rest = type.shape
        if isinstance(first, int) and first != 1:
            raise UnsupportedError(f"{type} is not one example: its first dimension is not 1", where=where)
        if not all(isinstance(size, int) for size in rest):
            raise UnsupportedError(f"{type} has a size that requests may choose", where=where, hint="reshape the model")
        shapes[name] = [size, *rest]
    if not shapes:
        raise UnsupportedError("the model has no inputs")
    return model.reshape(shapes)


def _check_output(name: str, alone: Type | None, together: Type | None, size: int) -> None:
    """Every example must have its part of the output. What is not known here is seen at the first inference."""
    if not isinstance(together, TensorType):
        raise UnsupportedError(f"{together} is not made of examples", where=f"output {name!r}")
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
