"""The plugin of a single device, and the search for it by name."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from .. import discovery
from ..devices.base import Device
from ..errors import DeviceError, SettingsError
from ..frontend.model import Model
from ..ir.graph import Fused, Graph, Node, Value
from ..ir.types import DType, Layout
from ..ir.verify import verify
from ..ops.infer import propagate
from ..passes.base import Context, run_passes
from ..passes.standard import DEVICE, NEUTRAL, check_disabled
from ..runtime.background import BackgroundTuning
from ..runtime.late import LateKernel, ShapeKernel, follows_from_shapes
from ..runtime.phases import Phases, uncollected
from ..runtime.program import Environment
from ..runtime.request import DeviceModel
from ..settings import Settings
from ..solvers.base import Problem, solvers
from ..tuning.costs import LayoutCosts
from ..tuning.tuner import Tuner
from .base import Choice, Plugin, Support
from .streams import compiled_auto, known, origin

LOG = logging.getLogger("tunewright")

#: names of plugins over several devices, which stand in front of a colon: each is a module and a class here
SEVERAL = ("AUTO", "BATCH", "HETERO", "MULTI")
#: names of devices that may be anywhere
_KNOWN = re.compile(r"CPU(\.NATIVE|\.HOST|\.INTEL|\.POCL)?|GPU(\.\d+(\.OPENCL)?)?")
#: what serves instead of kernels for the processor, by family
_SLOWER = {"host": "in numpy, which takes many times as long", "opencl": "through OpenCL, which takes longer"}
#: of a GPU: one inference runs while the data of the other comes and goes
GPU_STREAMS = 2


@cache
def families() -> dict[str, type[Device]]:
    """Device implementations by family."""
    return discovery.find("tunewright.devices", key=lambda d: d.family)


@cache
def available() -> tuple[dict[str, type[Device]], dict[str, str]]:
    """Device names with the implementation that serves each, and why others (families, devices) cannot be used."""
    names: dict[str, type[Device]] = {}
    reasons: dict[str, str] = {}
    for family, implementation in families().items():
        found = implementation.available()
        reasons |= implementation.unusable()
        if isinstance(found, str):
            reasons[implementation.title or family] = found
            continue
        for name in found:
            if name not in names or implementation.priority > names[name].priority:
                names[name] = implementation
    return names, reasons


def open_device(name: str, settings: Settings | None = None) -> Device:
    """The device of that name, opened once per process, as settings want it (the environment's, if None)."""
    key = name.upper()
    if key.partition(":")[0] in SEVERAL:
        raise DeviceError(f"{name}: a single device is wanted here", hint=f"name one of {_singles(name)}")
    ways = key, f"{key}.0"
    found = next((spelt for spelt in ways if serving(spelt)), None)
    if found is None:  # an extension may offer any name
        names, reasons = available()
        found = next((spelt for spelt in ways if spelt in names), None)
        if found is None:
            raise _mistake(key) or _missing(name, reasons)
    mistake = _mistake(found)
    if mistake is not None:
        raise mistake
    return _opened(found).configured(settings or Settings.from_environment())


def expect(name: str) -> None:
    """A device will be opened by this name: what that takes long for begins beside what this thread does meanwhile."""
    kind = name.strip().upper().partition(".")[0]
    for implementation in families().values():
        if implementation.kinds is None or kind in implementation.kinds:
            implementation.begin()


@cache
def serving(name: str) -> type[Device] | None:
    """The implementation that serves exactly this name. As few are asked as possible: to find devices takes OpenCL's
    runtimes and torch time and memory."""
    kind = name.partition(".")[0]
    for implementation in sorted(families().values(), key=lambda family: -family.priority):
        if implementation.kinds is None or kind in implementation.kinds:
            found = implementation.available()
            if not isinstance(found, str) and name in found:
                return implementation
    return None


def _refusing(key: str) -> Iterator[type[Device]]:
    """Implementations that would rather serve a name than what does, and cannot."""
    served = serving(key)
    for each in families().values():
        is_meant = each.title and key in (*(each.kinds or ()), each.title)
        if is_meant and (served is None or each.priority > served.priority) and isinstance(each.available(), str):
            yield each


def _mistake(key: str) -> SettingsError | None:
    """The setting that keeps a device from being what its name means."""
    return next((error for each in _refusing(key) if (error := each.mistake()) is not None), None)


def is_known(name: str) -> bool:
    """Whether the device exists, or could exist but is missing or unusable here."""
    key, names = name.upper(), available()[0]
    if key in names or f"{key}.0" in names:
        return True
    return _KNOWN.fullmatch(key) is not None and not (key.startswith("GPU") and any(n.startswith("GPU") for n in names))


def _missing(name: str, reasons: Mapping[str, str]) -> DeviceError:
    """There is no such device: why, and which there are."""
    key = name.upper()
    kind = key.partition(".")[0]
    able = {it.title or family for family, it in families().items() if it.kinds is None or kind in it.kinds}
    why = {key: reasons[key]} if key in reasons else {k: v for k, v in reasons.items() if k in able}
    said = why.get(key) or "; ".join(f"{k}: {v}" for k, v in why.items())
    others = "; ".join(f"{k}: {v}" for k, v in reasons.items() if k not in why)
    there = f"the devices are {', '.join(visible(alternatives=True))}"
    hint = f"{there}; not usable here: {others}" if others else there
    if key in why:
        return DeviceError(f"{name} cannot be used: {said}", hint=hint)
    return DeviceError(f"there is no device {name!r}" + (f" ({said})" if said else ""), hint=hint)


def _singles(device: str) -> str:
    """The names behind the colon, or all."""
    found = [part.partition("(")[0].strip() for part in device.partition(":")[2].split(",")]
    return ", ".join(name for name in found if name) or ", ".join(visible())


@cache
def _opened(key: str) -> Device:
    served = serving(key) or available()[0][key]
    for each in _refusing(key):
        LOG.warning("%s computes %s: %s", key, _SLOWER.get(served.family, f"through {served.family}"), each.available())
    return served(key)


def visible(alternatives: bool = False) -> list[str]:
    """Devices that a user would choose (the Null device is for tests); also other ways to run on them."""
    names = (n for n in available()[0] if n != "NULL")
    return sorted(n for n in names if alternatives or not (n.startswith("CPU.") or n.count(".") > 1))


def streams(device: Device, settings: Settings) -> int:
    """How many inferences run side by side: NUM_STREAMS, else what PERFORMANCE_HINT is best served with."""
    if settings.exclusive_async_requests:
        return 1
    if settings.num_streams > 0 or (settings.performance_hint == "LATENCY" and not settings.num_streams):
        return settings.num_streams or 1
    count = device.target.units if device.target.device == "cpu" else GPU_STREAMS
    return min(count, settings.performance_hint_num_requests or count)


def measured_streams(settings: Settings) -> bool:
    """How many streams a model has is, or may be, a matter of measurement."""
    hinted = not settings.num_streams and settings.performance_hint != "LATENCY"
    return (settings.num_streams < 0 or hinted) and not settings.exclusive_async_requests


class SingleDevice(Plugin):
    """Passes, then a program on one device."""

    def __init__(self, device: Device, streams: int = 1, whole: Device | None = None) -> None:
        self.device, self.streams = device, streams
        #: the device before its threads were shared out among streams
        self.whole = whole or device
        self.name = device.name

    def query(self, model: Model, settings: Settings) -> dict[str, Support]:
        tuner = Tuner(settings)
        answer: dict[str, Support] = {}
        whole = model.graph.clone()
        _infer(whole)
        for graph in whole.walk():
            for node in graph.nodes:
                answer[node.name] = self._who(node, tuner)
        return answer

    def left_to_host(self, model: Model, settings: Settings) -> set[str]:
        """Names of nodes without a kernel of the device that still stand by themselves behind the passes.

        `query` is of nodes as they are read; most that a device has no kernel for become part of another node.
        """
        tuner, graph = Tuner(settings), model.graph.clone()
        prepare(graph, self._context(settings, tuner))
        hosted = (node for node in graph.nodes if self._who(node, tuner).on_host)
        return {name for node in hosted for name in (node.name, *node.origin)}

    def _who(self, node: Node, tuner: Tuner) -> Support:
        """Who would run a node."""
        if node.bodies:
            return Support("control flow", on_host=True)
        problem = Problem.of(node)
        accepting, rejected = tuner.ask(problem, self.device)
        if accepting:
            return Support(accepting[0].id, accepting[0].host and self.device.family != "host", rejected)
        if follows_from_shapes(node):
            return Support(ShapeKernel.name, rejected=rejected)
        return Support(LateKernel.name if tuner.is_late(problem, self.device) else None, rejected=rejected)

    def choice(self, model: Model, settings: Settings) -> Choice:
        answer = known(model, self.whole, settings) if measured_streams(settings) else None
        if answer is not None:
            return Choice(answer.streams, answer.requests, 1, origin(answer))
        asked = f"NUM_STREAMS = {settings.num_streams}" if settings.num_streams > 0 else ""
        why = asked or f"PERFORMANCE_HINT = {settings.performance_hint}" + ", nothing was measured" * (
            measured_streams(settings)
        )
        return Choice(self.streams, min(self.streams, settings.performance_hint_num_requests or self.streams), 1, why)

    def compile(
        self, model: Model, settings: Settings, tuner: Tuner | None = None, *, consume: bool = False
    ) -> DeviceModel:
        check_disabled(settings)
        self.device.bind(settings.cpu_bind_threads)
        if tuner is None and measured_streams(settings):
            found = compiled_auto(self._with_streams(model, settings, consume), model, self.whole, settings)
            if found is not None:
                return found
        with uncollected():
            return self._compile(model, settings, tuner, consume)

    def _compile(self, model: Model, settings: Settings, given: Tuner | None, consume: bool) -> DeviceModel:
        phases = Phases()
        with phases("solvers"):
            tuner = _tuner(model, settings) if given is None else given
            nodes = [(n.name, n.op) for g in model.graph.walk() for n in g.nodes]
            for op in {op for _, op in nodes}:
                solvers(self.device.target.language, op)
        context = self._context(settings, tuner)
        graph = model.graph if consume else model.graph.clone()
        with phases("passes"):
            prepare(graph, context)
        env = Environment(self.device, tuner, settings, context, phases=phases)
        made = DeviceModel(graph, env, nodes, self.streams, consume)
        made.background_starter = _start_background
        return made

    def _context(self, settings: Settings, tuner: Tuner) -> Context:
        """What passes are told of the device."""

        def can_fuse(node: Node, operands: Sequence[Value], epilogue: tuple[Fused, ...], output: Value) -> str | None:
            fused, plain = Problem.of(node, operands, epilogue, output), Problem.of(node, ())
            return tuner.why_not_fused(fused, plain, self.device)

        def works_in(node: Node, layout: Layout, inputs: Sequence[int]) -> str | None:
            return tuner.why_not_layout(Problem.of(node).in_layout(layout, inputs), self.device)

        precision = _precision(settings, self.device)
        context = Context(
            settings, can_fuse, precision=precision, widens=self.device.widens and precision is DType.FLOAT32,
            convert=self.device.convert,
        )  # fmt: skip
        if self.device.family != "host":
            context.layouts, context.works_in = LayoutCosts(tuner, self.device), works_in
            context.knows = lambda op: tuner.knows(op, self.device)
        return context

    def _with_streams(self, model: Model, settings: Settings, consume: bool) -> Callable[[int, bool], DeviceModel]:
        """What compiles the model for a number of streams; ``last``: it may be taken apart."""

        def compile(streams: int, last: bool) -> DeviceModel:
            given = dataclasses.replace(settings, num_streams=streams)
            return of_device(self.whole, given).compile(model, given, consume=consume and last)

        return compile


def _start_background(model: DeviceModel, **wishes: Any) -> BackgroundTuning:
    from .background import start  # few are tuned so

    return start(model, **wishes)


def of_device(opened: Device, settings: Settings) -> SingleDevice:
    """The plugin of a device that is open, with its streams, which share its threads."""
    count = streams(opened, settings)
    return SingleDevice(opened.with_threads(max(1, opened.target.units // count)), count, opened)


def _tuner(model: Model, settings: Settings) -> Tuner:
    """Who chooses kernels for a model, with what it carries where the user says so."""
    tuner, text = Tuner(settings), ""
    if settings.use_embedded:
        from ..tuning.embedded import KEY, EmbeddedDatabase

        text = model.metadata.get(KEY, "")
    if text:
        tuner.carry(EmbeddedDatabase(Path(model.path or model.name or "model"), text))
    return tuner


_PRECISIONS = {"F32": DType.FLOAT32, "F16": DType.FLOAT16, "BF16": DType.BFLOAT16}


def _precision(settings: Settings, device: Device) -> DType:
    return _PRECISIONS.get(settings.inference_precision_hint, device.precision)


def _infer(graph: Graph, in_body: bool = False) -> None:
    """Types of a graph and of what its bodies take from it; what a body is given at each iteration stays open."""
    propagate(graph, tolerant=in_body)
    for node in graph.nodes:
        for body in node.bodies.values():
            for inner, outer in zip(body.inputs[::-1], node.inputs[: ~node.captures : -1], strict=False):
                inner.type = outer.type if outer is not None else None
            _infer(body, in_body=True)


def prepare(graph: Graph, context: Context) -> None:
    """The passes that run once, at compile time; what remains open is specialised per set of shapes."""
    run_passes(graph, [*NEUTRAL, *DEVICE], context)
    verify(graph, "the passes")
