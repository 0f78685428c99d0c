"""The devices of a device string one by one, for what looks at one at a time: tuning, explaining, locking."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..frontend.model import Model
from ..runtime.compiled import CompiledModel
from ..runtime.hetero import HeteroModel
from ..runtime.request import DeviceModel, of_one_device
from ..settings import Settings
from .auto import Auto
from .batch import Batch
from .batch_axis import batched
from .find import find
from .hetero import Hetero
from .multi import Multi


@dataclass(frozen=True)
class Apart:
    """A device as it serves in a device string: what is done for it by itself holds there, too."""

    device: str
    #: settings that are its own: the streams of ``CPU(2)``
    config: Mapping[str, Any] = field(default_factory=dict)
    #: examples that it runs together
    batch: int = 1

    def __str__(self) -> str:
        streams = self.config.get("NUM_STREAMS")
        batch = f", {self.batch} examples at a time" if self.batch > 1 else ""
        return f"{self.device}({streams}){batch}" if streams else f"{self.device}{batch}"

    def model(self, model: Model) -> Model:
        """The model as it runs there."""
        return batched(model, self.batch) if self.batch > 1 else model

    def inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs for that: an example, so many times."""
        if self.batch == 1:
            return dict(inputs)
        return {name: np.repeat(np.asarray(value), self.batch, axis=0) for name, value in inputs.items()}


def apart(device: str, settings: Settings, model: Model | None = None) -> list[Apart]:
    """The devices that a string names, in its order; of a single device, that.

    BATCH runs two models: several examples at a time, and one, where the others did not come. ``model``: where the
    number is left open, it is the one that was measured to be best for it.
    """
    plugin = find(device, replace(settings, allow_auto_batching=False))
    if isinstance(plugin, Multi | Auto):
        return [Apart(part.name, part.own) for part in plugin.parts]
    own = {"DEVICE_ID": ""}
    if isinstance(plugin, Hetero):
        exclusive = {"EXCLUSIVE_ASYNC_REQUESTS": "YES"} if plugin.is_exclusive else {}
        return [Apart(name, own | exclusive) for name in plugin.names]
    if isinstance(plugin, Batch):
        choice = None if model is None or plugin.size else plugin.choice(model, settings)
        size = plugin.requests // plugin.single.streams if choice is None else choice.batch
        return [Apart(plugin.single.name, own, n) for n in dict.fromkeys((size, 1))]
    return [Apart(plugin.name, own)]


@dataclass(frozen=True)
class Piece:
    """What one device runs of a model, with inputs for that; ``title``: which it is, where there are several."""

    title: str
    compiled: DeviceModel
    inputs: Mapping[str, Any]
    #: of a single device: what a user would hold
    served: CompiledModel | None = None


def pieces(
    model: Model,
    inputs: Mapping[str, Any],
    device: str,
    settings: Settings,
    compile: Callable[[Model, str, Mapping[str, Any]], CompiledModel],
) -> Iterator[Piece]:
    """What each device of a string runs: the whole model, or its subgraphs where HETERO shares it out."""
    plugin = find(device, replace(settings, allow_auto_batching=False))
    if isinstance(plugin, Hetero):
        yield from _subgraphs(compile(model, device, {}), inputs)
        return
    if not isinstance(plugin, Multi | Auto | Batch):
        served = compile(model, device, {})
        yield Piece("", of_one_device(served), inputs, served)
        return
    for one in apart(device, settings, model):
        single = {**one.config, "ALLOW_AUTO_BATCHING": "NO"}
        yield Piece(str(one), of_one_device(compile(one.model(model), one.device, single)), one.inputs(inputs))


def _subgraphs(compiled: CompiledModel, inputs: Mapping[str, Any]) -> Iterator[Piece]:
    """Subgraphs in the order in which they run, each with what those before made for it."""
    assert isinstance(compiled, HeteroModel)
    values = dict(inputs)
    for number, subgraph in enumerate(compiled.subgraphs):
        feed = {name: values[name] for name in subgraph.inputs} if not compiled.is_whole else inputs
        title = subgraph.device if compiled.is_whole else f"subgraph {number} on {subgraph.device}"
        yield Piece(title, subgraph.model, feed)
        if number + 1 < len(compiled.subgraphs):
            values |= subgraph.model(feed)
