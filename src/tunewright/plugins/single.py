"""The plugin of a single device, and the search for devices by name."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

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
from ..runtime.plans.deferred_kernels import LateKernel, ShapeKernel, follows_from_shapes
from ..runtime.plans.load_phases import Phases, uncollected
from ..runtime.plans.program import Environment
from ..runtime.requests.request import DeviceModel
from ..settings import Settings
from ..solvers.base import Problem, solvers
from ..tuning.layout_costs import LayoutCosts
from ..tuning.tuner import Tuner
from .base import Plugin, ServingChoice, Support
from .batching.streams import compiled_auto, known, origin

LOG = logging.getLogger("tunewright")

#: Names of plugins over several devices, written before a colon. Each has a module and a class in this package.
SEVERAL = ("AUTO", "BATCH", "HETERO", "MULTI")
#: Device names that may exist on some machine.
_KNOWN = re.compile(r"CPU(\.NATIVE|\.HOST|\.INTEL|\.POCL)?|GPU(\.\d+(\.OPENCL)?)?")


@cache
def families() -> dict[str, type[Device]]:
    """Return the device implementations by family."""
    return discovery.find("tunewright.devices", key=lambda d: d.family)


@cache
def available() -> tuple[dict[str, type[Device]], dict[str, str]]:
    """Return device names with the implementation that serves each, and why other families or devices are unusable."""
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
    """Open the device of that name, once per process, configured by ``settings`` (None: those of the environment)."""
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
    """Announce that a device of this name will be opened, so that slow initialisation begins in parallel."""
    kind = name.strip().upper().partition(".")[0]
    for implementation in families().values():
        if implementation.kinds is None or kind in implementation.kinds:
            implementation.begin()


@cache
def serving(name: str) -> type[Device] | None:
    """Return the implementation that serves exactly this name.

    It asks as few implementations as possible, because finding devices costs OpenCL's runtimes and torch time and
    memory.
    """
    kind = name.partition(".")[0]
    for implementation in sorted(families().values(), key=lambda family: -family.priority):
        if implementation.kinds is None or kind in implementation.kinds:
            found = implementation.available()
            if not isinstance(found, str) and name in found:
                return implementation
    return None


def _refusing(key: str) -> Iterator[type[Device]]:
    """Yield the implementations that should serve a name rather than the present one, but cannot."""
    served = serving(key)
    for each in families().values():
        is_meant = each.title and key in (*(each.kinds or ()), each.title)
        if is_meant and (served is None or each.priority > served.priority) and isinstance(each.available(), str):
            yield each


def _mistake(key: str) -> SettingsError | None:
    """Return the error for a setting that prevents a device from being what its name means; None if there is none."""
    return next((error for each in _refusing(key) if (error := each.mistake()) is not None), None)


def is_known(name: str) -> bool:
    """Whether the device exists, or could exist but is missing or unusable here."""
    key, names = name.upper(), available()[0]
    if key in names or f"{key}.0" in names:
        return True
    return _KNOWN.fullmatch(key) is not None and not (key.startswith("GPU") and any(n.startswith("GPU") for n in names))


def _missing(name: str, reasons: Mapping[str, str]) -> DeviceError:
    """Make the error for a missing device, with the reason and the existing devices."""
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
    """Return the names behind the colon; without any, all devices."""
    found = [part.partition("(")[0].strip() for part in device.partition(":")[2].split(",")]
    return ", ".join(name for name in found if name) or ", ".join(visible())


@cache
def _opened(key: str) -> Device:
    served = serving(key) or available()[0][key]
    for each in _refusing(key):
        LOG.warning("%s computes %s: %s", key, served.stand_in or f"through {served.family}", each.available())
    return served(key)


def visible(alternatives: bool = False) -> list[str]:
    """Return the devices that a user would choose, without those that are hidden.

    ``alternatives``: also other implementations for the same hardware.
    """
    names = (n for n, implementation in available()[0].items() if not implementation.is_hidden)
    return sorted(n for n in names if alternatives or not (n.startswith("CPU.") or n.count(".") > 1))


def streams(device: Device, settings: Settings) -> int:
    """Return the number of parallel inferences: NUM_STREAMS, else the best for PERFORMANCE_HINT."""
    if settings.exclusive_async_requests:
        return 1
    if settings.num_streams > 0 or (settings.performance_hint == "LATENCY" and not settings.num_streams):
        return settings.num_streams or 1
    count = device.target.traits.streams or device.target.units
    return min(count, settings.performance_hint_num_requests or count)


def measured_streams(settings: Settings) -> bool:
    """Whether the number of a model's streams is, or may be, determined by measurement."""
    hinted = not settings.num_streams and settings.performance_hint != "LATENCY"
    return (settings.num_streams < 0 or hinted) and not settings.exclusive_async_requests


class SingleDevice(Plugin):
    """Runs passes, then builds a program on one device."""

    def __init__(self, device: Device, streams: int = 1, whole: Device | None = None) -> None:
        self.device, self.streams = device, streams
        #: the device before its threads were divided among streams
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
        """Return the names of nodes without a device kernel that still exist on their own after the passes.

        `query` answers for nodes as they are read; most nodes without a kernel become part of another node.
        """
        tuner, graph = Tuner(settings), model.graph.clone()
        prepare(graph, self._context(settings, tuner))
        hosted = (node for node in graph.nodes if self._who(node, tuner).on_host)
        return {name for node in hosted for name in (node.name, *node.origin)}

    def _who(self, node: Node, tuner: Tuner) -> Support:
        """Return the solver that would run a node."""
        if node.bodies:
            return Support("control flow", on_host=True)
        problem = Problem.of(node)
        accepting, rejected = tuner.ask(problem, self.device)
        if accepting:
            return Support(accepting[0].id, accepting[0].host and not self.device.runs_references, rejected)
        if follows_from_shapes(node):
            return Support(ShapeKernel.name, rejected=rejected)
        return Support(LateKernel.name if tuner.is_late(problem, self.device) else None, rejected=rejected)

    def choice(self, model: Model, settings: Settings) -> ServingChoice:
        answer = known(model, self.whole, settings) if measured_streams(settings) else None
        if answer is not None:
            return ServingChoice(answer.streams, answer.requests, 1, origin(answer))
        asked = f"NUM_STREAMS = {settings.num_streams}" if settings.num_streams > 0 else ""
        why = asked or f"PERFORMANCE_HINT = {settings.performance_hint}" + ", nothing was measured" * (
            measured_streams(settings)
        )
        return ServingChoice(
            self.streams, min(self.streams, settings.performance_hint_num_requests or self.streams), 1, why
        )

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
        return DeviceModel(graph, env, nodes, self.streams, consume)

    def _context(self, settings: Settings, tuner: Tuner) -> Context:
        """Describe the device for the passes."""

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
        if not self.device.runs_references:
            context.layouts, context.works_in = LayoutCosts(tuner, self.device), works_in
            context.knows = lambda op: tuner.knows(op, self.device)
        return context

    def _with_streams(self, model: Model, settings: Settings, consume: bool) -> Callable[[int, bool], DeviceModel]:
        """Return a function that compiles the model for a number of streams; ``last``: it may take the model apart."""

        def compile(streams: int, last: bool) -> DeviceModel:
            given = dataclasses.replace(settings, num_streams=streams)
            return of_device(self.whole, given).compile(model, given, consume=consume and last)

        return compile


def of_device(opened: Device, settings: Settings) -> SingleDevice:
    """Return the plugin of an open device, whose threads its streams share."""
    count = streams(opened, settings)
    return SingleDevice(opened.with_threads(max(1, opened.target.units // count)), count, opened)


def _tuner(model: Model, settings: Settings) -> Tuner:
    """Make the tuner of a model, with the model's embedded records if settings say so."""
    tuner, text = Tuner(settings), ""
    if settings.use_embedded:
        from ..knowledge.embedded import KEY, EmbeddedDatabase

        text = model.metadata.get(KEY, "")
    if text:
        tuner.carry(EmbeddedDatabase(Path(model.path or model.name or "model"), text))
    return tuner


_PRECISIONS = {"F32": DType.FLOAT32, "F16": DType.FLOAT16, "BF16": DType.BFLOAT16}


def _precision(settings: Settings, device: Device) -> DType:
    return _PRECISIONS.get(settings.inference_precision_hint, device.precision)


def _infer(graph: Graph, in_body: bool = False) -> None:
    """Infer the types of a graph and of values that its bodies capture; inputs of iterations stay open."""
    propagate(graph, tolerant=in_body)
    for node in graph.nodes:
        for body in node.bodies.values():
            for inner, outer in zip(body.inputs[::-1], node.inputs[: ~node.captures : -1], strict=False):
                inner.type = outer.type if outer is not None else None
            _infer(body, in_body=True)


def prepare(graph: Graph, context: Context) -> None:
    """Run the passes of compile time; open shapes are specialised later, for each set of shapes."""
    run_passes(graph, [*NEUTRAL, *DEVICE], context)
    verify(graph, "the passes")
