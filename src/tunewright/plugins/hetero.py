"""``HETERO:A,B,...``: nodes of a model run on several devices, the first listed preferred (docs/hetero.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from ..devices.base import Device
from ..errors import SettingsError, UnsupportedError
from ..frontend.model import Model
from ..ir.graph import Graph, Node
from ..passes.base import Context, run_passes
from ..passes.cleanup.simplify import DeadCode, Propagate, UnknownOps
from ..passes.standard import check_disabled
from ..runtime.requests.request import exclusive
from ..runtime.requests.streams import Streams
from ..runtime.several import hetero_dot
from ..runtime.several.hetero import HeteroModel
from ..runtime.several.hetero_split import GraphPart, split
from ..settings import Settings
from ..tuning.policy import QUIET
from ..tuning.tuner import Tuner, reasons
from .base import Plugin, Support
from .device_strings import usable
from .find import single
from .placement import affinity, store
from .placement import costs as hetero_costs
from .placement import place as hetero_place
from .single import SingleDevice

#: Settings for compiling a whole model only to examine its kernels: nothing is tuned, dumped or locked.
LOOKING = QUIET | {
    "LOCK_FILE": "", "FROZEN": "NO", "ENABLE_TUNE_DUMP": "NO", "ENABLE_LOGGING_CMD": "NO", "GRAPH_DUMPS_DIR": "",
    "SOURCES_DUMPS_DIR": "",
}  # fmt: skip
#: Passes over the whole model before it is divided: constants and known shapes need no device.
PREPARE = (UnknownOps(), DeadCode(), Propagate(keep_quantised=True), DeadCode())


@dataclass
class PlacedModel:
    """A model with a device for each node."""

    graph: Graph
    labels: dict[Node, int]
    #: origin of the placement: "priorities", "costs", "measurement", "hand", or a name that the caller gives
    origin: str
    #: approximate seconds of each node on its device
    seconds: dict[Node, float]
    #: nodes that no device runs, with the reasons
    unable: dict[Node, str] = field(default_factory=dict)

    def parts(self) -> list[GraphPart]:
        """Return one graph for each run of nodes on one device; the whole graph if there is only one device."""
        if len(set(self.labels.values())) == 1 and len(self.graph):
            return [GraphPart(next(iter(self.labels.values())), self.graph.nodes, self.graph)]
        return split(self.graph, self.labels, self.seconds)


class Hetero(Plugin):
    """Places nodes, divides the graph, and has each part compiled by its device's plugin."""

    def __init__(self, names: Sequence[str], settings: Settings) -> None:
        names = list(names) or [n.strip() for n in settings.target_fallback.split(",") if n.strip()]
        if not names:
            raise SettingsError("HETERO names no devices", hint="for example HETERO:GPU,CPU; TARGET_FALLBACK may, too")
        self.is_exclusive = settings.exclusive_async_requests or not (
            settings.num_streams or settings.performance_hint != "LATENCY"
        )
        one = {"EXCLUSIVE_ASYNC_REQUESTS": "YES"} if self.is_exclusive else {}
        own = Settings.make(one, settings)
        opened = usable([(name, partial(single, name, own)) for name in names], "HETERO")
        names, self.plugins = [name for name, _ in opened], [plugin for _, plugin in opened]
        self.names = [plugin.name for plugin in self.plugins]
        twice = next((name for name in self.names if self.names.count(name) > 1), None)
        if twice is not None:
            raise SettingsError(f"HETERO names {twice} twice", hint="each device once, the preferred one first")
        self.name = f"HETERO:{','.join(self.names)}"
        #: possible names of each device
        self.spellings = [(plugin.name, given) for plugin, given in zip(self.plugins, names, strict=True)]

    @property
    def devices(self) -> list[Device]:
        return [plugin.device for plugin in self.plugins]

    # ---- placing -----------------------------------------------------------------------------------------------------

    def query(self, model: Model, settings: Settings) -> dict[str, Support]:
        """Return the answer of each node's device, with the device's name.

        Nodes without a device get the first one's answer.
        """
        placed = self.place(model, settings)
        own = [plugin.query(model, settings) for plugin in self.plugins]
        chosen = {n.name: d for node, d in placed.labels.items() for n in (node, *_inner(node))}
        return {
            name: replace(own[chosen.get(name, 0)][name], device=self.names[chosen.get(name, 0)]) for name in own[0]
        }

    def place(self, model: Model, settings: Settings) -> PlacedModel:
        """Choose a device for each node according to HETERO_PLACEMENT. Nodes placed by hand stay there."""
        task = PlacementTask(self, model, settings)
        mode = settings.hetero_placement
        if task.fixed and len(task.fixed) == len(task.graph):
            return task.placed(dict(task.fixed), "hand")
        if mode == "AUTO":
            stored = store.find(settings, task.key)
            labels = task.stored(stored) if stored is not None else None
            if labels is not None:
                return task.placed(labels, "measurement")
        if mode in ("AUTO", "COST"):
            labels = task.by_known_costs(estimates=mode == "COST")
            if labels is not None:
                return task.placed(labels, "costs")
        return task.placed(task.by_priority(), "priorities")

    # ---- compiling ---------------------------------------------------------------------------------------------------

    def compile(self, model: Model, settings: Settings, *, consume: bool = False) -> HeteroModel:
        check_disabled(settings)
        return self.compile_placed(model, self.place(model, settings), settings)

    def compile_placed(self, model: Model, placed: PlacedModel, settings: Settings) -> HeteroModel:
        """Compile a model with this placement."""
        self.check(placed)
        tuner, nodes = Tuner(settings), [(n.name, n.op) for g in model.graph.walk() for n in g.nodes]
        parts = placed.parts()
        if settings.hetero_dump_graph_dot:
            hetero_dot.write(settings.graph_dumps_dir or ".", placed.graph, placed.labels, self.names, parts)
        compiled = [
            (part, self.plugins[part.device].compile(bare(model, part.graph), settings, tuner)) for part in parts
        ]
        told = Settings.make({"EXCLUSIVE_ASYNC_REQUESTS": self.is_exclusive}, settings)
        return HeteroModel(self.name, placed.graph, compiled, told, nodes, self._streams(), placed.origin)

    def check(self, placed: PlacedModel) -> None:
        """Raise if no device runs a node."""
        for node, why in placed.unable.items():
            where = f"node {node.name!r} ({node.op})"
            raise UnsupportedError(f"no device of {self.name} runs it: {why}", where=where)

    def _streams(self) -> Streams:
        if self.is_exclusive:
            return exclusive(self.name)
        return Streams(max(plugin.streams for plugin in self.plugins))


class PlacementTask:
    """Placement of one model: the undivided graph, the devices' answers, and the nodes placed by hand."""

    def __init__(self, plugin: Hetero, model: Model, settings: Settings) -> None:
        self.plugin, self.model, self.settings = plugin, model, settings
        self.graph = model.graph.clone()
        run_passes(self.graph, PREPARE, Context(settings))
        self.affinity = dict(model.affinity)
        if settings.hetero_affinity:
            self.affinity = affinity.read(settings.hetero_affinity, settings.max_file_bytes) | self.affinity
        self.fixed = affinity.fixed(self.affinity, model.graph, self.graph, plugin.spellings)
        self._check_fixed()

    @cached_property
    def answers(self) -> list[dict[str, Support]]:
        """Answers for each node, by device."""
        return [self._answers(plugin) for plugin in self.plugin.plugins]

    def _answers(self, plugin: SingleDevice) -> dict[str, Support]:
        """Return a device's answer for each node.

        A node that the device fuses into another one counts as having a kernel.

        Otherwise a normalisation that convolutions absorb would divide a network after every convolution.
        """
        model = bare(self.model, self.graph)
        found = plugin.query(model, self.settings)
        if not any(said.on_host for said in found.values()):
            return found
        alone = plugin.left_to_host(model, Settings.make(LOOKING, self.settings))
        return {name: replace(said, on_host=said.on_host and name in alone) for name, said in found.items()}

    @cached_property
    def key(self) -> str:
        return store.key(self.graph, self.plugin.devices, self.settings, self.affinity)

    def _check_fixed(self) -> None:
        for node, device in self.fixed.items():
            said = self.answers[device][node.name]
            if not said:
                name = self.plugin.names[device]
                raise UnsupportedError(f"{name} cannot run it: {reasons(said.rejected)}",
                                       where=f"affinity of {node.name!r} ({node.op})")  # fmt: skip

    def by_priority(self) -> dict[Node, int]:
        return hetero_place.by_priority(self.graph, self.answers, self.fixed)

    def stored(self, names: Mapping[str, str]) -> dict[Node, int] | None:
        """Return a stored placement; None if it no longer fits the model."""
        number = {name: i for i, name in enumerate(self.plugin.names)}
        found = {node: number.get(names.get(node.name, ""), -1) for node in self.graph.nodes}
        right = all(d >= 0 and self.answers[d][n.name] for n, d in found.items())
        return found if right and all(found[n] == d for n, d in self.fixed.items()) else None

    def by_known_costs(self, estimates: bool) -> dict[Node, int] | None:
        """Return the cheapest placement; None if the costs of nodes are unknown.

        With ``estimates``, estimated costs suffice.
        """
        static = all(v.tensor is not None and v.tensor.is_static for v in self.graph.inputs)
        if not static or not (estimates or not any(d.runs_references for d in self.plugin.devices)):
            return None  # kernels for open shapes are never measured, and neither are references
        looking = Settings.make(LOOKING, self.settings)
        tuner = Tuner(looking)
        costs: dict[str, hetero_costs.NodeCosts] = {}
        # CPUs first: kernels of GPUs compile slowly, and one device with unknown costs ends the search
        for plugin in sorted(self.plugin.plugins, key=lambda plugin: not plugin.device.target.traits.shares_cores):
            found = self.known(plugin, looking, tuner)
            if found is None or not (found.is_known or estimates):
                return None
            costs[plugin.name] = found
        return self.cheapest([costs[name] for name in self.plugin.names])

    def known(self, plugin: SingleDevice, settings: Settings, tuner: Tuner) -> hetero_costs.NodeCosts | None:
        """Return the known costs of a device's kernels for the whole model; None if the device cannot run it."""
        try:
            compiled = plugin.compile(bare(self.model, self.graph), settings, tuner)
        except UnsupportedError:
            return None
        return hetero_costs.known(self.graph, compiled)

    def problem(self, costs: Sequence[hetero_costs.NodeCosts]) -> hetero_place.PlacementProblem:
        seconds: dict[Node, Sequence[float]] = {}
        for node in self.graph.nodes:
            able = [self.fixed.get(node, d) == d and bool(said[node.name]) for d, said in enumerate(self.answers)]
            seconds[node] = [c.seconds[node] if can else math.inf for c, can in zip(costs, able, strict=True)]
        # Nodes fixed to different devices cannot stay together, even if a device would fuse them.
        follow = [list(pair) for pair in hetero_place.followers(self.graph).items()]
        groups = (
            group
            for group in (*follow, *(group for c in costs for group in c.together))
            if len({self.fixed[n] for n in group if n in self.fixed}) <= 1
        )
        transfer = hetero_costs.transfer(self.plugin.devices)
        return hetero_place.PlacementProblem(self.graph, seconds, transfer, len(costs), list(groups))

    def cheapest(self, costs: Sequence[hetero_costs.NodeCosts]) -> dict[Node, int]:
        problem = self.problem(costs)
        return problem.spread(hetero_place.by_cut(problem))

    def all_on(self, device: int) -> dict[Node, int]:
        """Place everything on one device, except nodes that are fixed elsewhere or cannot run there."""
        elsewhere = self.by_priority()
        return {
            n: self.fixed.get(n, device if self.answers[device][n.name] else elsewhere[n]) for n in self.graph.nodes
        }

    def placed(
        self, labels: dict[Node, int], origin: str, costs: Sequence[hetero_costs.NodeCosts] = ()
    ) -> PlacedModel:  # fmt: skip
        said = {node: self.answers[device][node.name] for node, device in labels.items()}
        unable = {node: reasons(support.rejected) for node, support in said.items() if not support}
        devices = self.plugin.devices
        seconds = {n: costs[d].seconds[n] if costs else hetero_costs.roughly(n, devices[d]) for n, d in labels.items()}
        return PlacedModel(self.graph, labels, origin, seconds, unable)


def bare(model: Model, graph: Graph) -> Model:
    """Make a model of another graph, without the declarations about the first graph's nodes."""
    return replace(model, graph=graph, affinity={}, declared={})


def _inner(node: Node) -> list[Node]:
    return [n for body in node.bodies.values() for graph in body.walk() for n in graph.nodes]
