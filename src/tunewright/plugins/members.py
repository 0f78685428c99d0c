"""Split a device string into its devices, for tools that handle one at a time: tuning, explaining, locking."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..frontend.model import Model
from ..runtime.requests.compiled import CompiledModel
from ..runtime.requests.request import DeviceModel, DeviceRequest, of_one_device
from ..runtime.several.hetero import HeteroModel
from ..settings import Settings
from ..tuning.tuner import Tuner
from .auto import Auto
from .batch import Batch
from .batching.batch_axis import batched
from .find import find
from .hetero import LOOKING, Hetero, bare
from .multi import Multi

#: Number of inferences for the estimate of a subgraph's time; the shortest counts, since others may disturb some.
TIMES = 4


@dataclass(frozen=True)
class SubgraphModel:
    """A subgraph of HETERO as a model of its own."""

    number: int
    model: Model
    #: the outputs of earlier subgraphs
    inputs: Mapping[str, Any]
    #: approximate seconds of an inference of the subgraph
    seconds: float
    #: whether its device only has the operators' reference kernels
    is_reference: bool


@dataclass(frozen=True)
class MemberDevice:
    """One device of a device string with its settings. What is tuned for it alone also applies within the string."""

    device: str
    #: its own settings, such as the streams of ``CPU(2)``
    config: Mapping[str, Any] = field(default_factory=dict)
    #: number of examples that it runs together
    batch: int = 1
    #: the part that it runs of a model divided by HETERO; None: the whole model
    section: SubgraphModel | None = None

    def __str__(self) -> str:
        if self.section is not None:
            return _title(self.section.number, self.device)
        streams = self.config.get("NUM_STREAMS")
        batch = f", {self.batch} examples at a time" if self.batch > 1 else ""
        return f"{self.device}({streams}){batch}" if streams else f"{self.device}{batch}"

    def model(self, model: Model) -> Model:
        """Return the model that this device runs."""
        if self.section is not None:
            return self.section.model
        return batched(model, self.batch) if self.batch > 1 else model

    def inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return inputs for that model; for a batch, the example is repeated."""
        if self.section is not None:
            return dict(self.section.inputs)
        if self.batch == 1:
            return dict(inputs)
        return {name: np.repeat(np.asarray(value), self.batch, axis=0) for name, value in inputs.items()}


def apart(
    device: str, settings: Settings, model: Model | None = None, inputs: Mapping[str, Any] | None = None
) -> list[MemberDevice]:
    """Return the devices of a string in order; a single device gives just that one.

    BATCH runs two models: one for several examples, and one for a single example in case the others did not arrive.
    ``model``: if the batch size is not given, the one measured to be best for this model is used. With ``inputs`` for
    the model, HETERO places it, and the result has one entry per subgraph, in the order in which they run.
    """
    plugin = find(device, replace(settings, allow_auto_batching=False))
    if isinstance(plugin, Multi | Auto):
        return [MemberDevice(part.name, part.own) for part in plugin.parts]
    own: dict[str, Any] = {"DEVICE_ID": ""}
    if isinstance(plugin, Hetero):
        own |= {"EXCLUSIVE_ASYNC_REQUESTS": "YES"} if plugin.is_exclusive else {}
        if model is None or inputs is None:
            return [MemberDevice(name, own) for name in plugin.names]
        return _sections(plugin, model, inputs, Settings.make(LOOKING, settings), own)
    if isinstance(plugin, Batch):
        choice = None if model is None or plugin.size else plugin.choice(model, settings)
        size = plugin.requests // plugin.single.streams if choice is None else choice.batch
        return [MemberDevice(plugin.single.name, own, n) for n in dict.fromkeys((size, 1))]
    return [MemberDevice(plugin.name, own)]


def _sections(
    plugin: Hetero, model: Model, inputs: Mapping[str, Any], settings: Settings, own: Mapping[str, Any]
) -> list[MemberDevice]:
    """Return the subgraphs of HETERO, each compiled, run once for its inputs, and again for its approximate time.

    Nothing is tuned for this. If one device runs everything, the result is the unchanged model.
    """
    placed = plugin.place(model, settings)
    plugin.check(placed)
    parts = placed.parts()
    if len(parts) == 1:
        return [MemberDevice(plugin.names[parts[0].device], own)]
    tuner, values, found = Tuner(settings), dict(inputs), []
    for number, part in enumerate(parts):
        single = plugin.plugins[part.device]
        name = f"{model.path or model.name}, subgraph {number} of {len(parts)}"
        section = replace(bare(model, part.graph), name=name, path="")
        request = single.compile(section, settings, tuner).create_infer_request()
        feed = {name: values[name] for name in part.inputs}
        values |= request.infer(feed)
        spent = min(_seconds(request, feed) for _ in range(TIMES))
        found.append(
            MemberDevice(
                single.name, own, section=SubgraphModel(number, section, feed, spent, single.device.runs_references)
            )
        )
    return found


def _seconds(request: DeviceRequest, inputs: Mapping[str, Any]) -> float:
    begin = time.perf_counter()
    request.infer(inputs)
    return time.perf_counter() - begin


def placement(device: str, settings: Settings, model: Model) -> dict[str, str]:
    """Return the device of every node as HETERO places them now."""
    plugin = find(device, settings)
    assert isinstance(plugin, Hetero)
    placed = plugin.place(model, Settings.make(LOOKING, settings))
    return {node.name: plugin.names[number] for node, number in placed.labels.items()}


def _title(number: int, device: str) -> str:
    return f"subgraph {number} on {device}"


@dataclass(frozen=True)
class CompiledPart:
    """The part of a model that one device runs, with inputs for it. ``title`` identifies it among several."""

    title: str
    compiled: DeviceModel
    inputs: Mapping[str, Any]
    #: for a single device: the model as the user gets it
    served: CompiledModel | None = None


def pieces(
    model: Model,
    inputs: Mapping[str, Any],
    device: str,
    settings: Settings,
    compile: Callable[[Model, str, Mapping[str, Any]], CompiledModel],
) -> Iterator[CompiledPart]:
    """Yield the part for each device of a string: the whole model, or the subgraphs of HETERO."""
    plugin = find(device, replace(settings, allow_auto_batching=False))
    if isinstance(plugin, Hetero):
        yield from _subgraphs(compile(model, device, {}), inputs)
        return
    if not isinstance(plugin, Multi | Auto | Batch):
        served = compile(model, device, {})
        yield CompiledPart("", of_one_device(served), inputs, served)
        return
    for one in apart(device, settings, model):
        single = {**one.config, "ALLOW_AUTO_BATCHING": "NO"}
        yield CompiledPart(str(one), of_one_device(compile(one.model(model), one.device, single)), one.inputs(inputs))


def _subgraphs(compiled: CompiledModel, inputs: Mapping[str, Any]) -> Iterator[CompiledPart]:
    """Yield the subgraphs in the order in which they run, each with the outputs of earlier ones as its inputs."""
    assert isinstance(compiled, HeteroModel)
    values = dict(inputs)
    for number, subgraph in enumerate(compiled.subgraphs):
        feed = {name: values[name] for name in subgraph.inputs} if not compiled.is_whole else inputs
        title = subgraph.device if compiled.is_whole else _title(number, subgraph.device)
        yield CompiledPart(title, subgraph.model, feed)
        if number + 1 < len(compiled.subgraphs):
            values |= subgraph.model(feed)
