"""Find the fastest placement of a model by measurement: candidates run in turns, and the best one is stored.

Candidates are each device alone, the order of devices, the cheapest cut, and the earliest end according to the measured
time of each layer. They include single devices, so the stored placement is never slower than the best of these beyond
noise. A split must gain more than ``WORTHWHILE`` to be preferred.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tunewright.errors import TunewrightError, UnsupportedError
from tunewright.frontend.model import Model
from tunewright.ir.graph import Node
from tunewright.settings import Settings
from tunewright.tuning.tuner import Tuner

from ..hetero import LOOKING, Hetero, PlacedModel, PlacementTask, bare
from . import costs as hetero_costs
from . import place, store

#: Minimum and maximum number of turns of a candidate.
LEAST, MOST = 5, 200
#: Minimum seconds of a turn.
TURN = 5e-3
#: Minimum speed-up of a split over the best single device.
WORTHWHILE = 1.01


@dataclass
class CandidatePlacement:
    """One placement, and the time of an inference with it."""

    name: str
    placed: PlacedModel
    #: median of its turns; None if it was not run
    seconds: float | None = None
    subgraphs: int = 0
    #: why it was not run
    why: str = ""

    @property
    def is_single(self) -> bool:
        return len(set(self.placed.labels.values())) <= 1


@dataclass
class Measured:
    """The compared placements, and the one that is used from now on."""

    candidates: list[CandidatePlacement]
    best: CandidatePlacement
    #: node -> device
    affinity: dict[str, str]
    #: file in which it is stored
    path: Path


def measure(plugin: Hetero, model: Model, inputs: Mapping[str, Any], settings: Settings, budget: float) -> Measured:
    """Compare placements on these inputs for ``budget`` seconds, and store the best one in the user's data folder."""
    task = PlacementTask(plugin, model, settings)
    candidates = _candidates(task, inputs)
    _race(plugin, model, candidates, inputs, settings, budget)
    ran = [c for c in candidates if c.seconds is not None]
    if not ran:
        why = "; ".join(f"{c.name}: {c.why}" for c in candidates)
        raise UnsupportedError(f"no placement runs: {why}", where=plugin.name)
    best = min(ran, key=_seconds)
    single = min((c for c in ran if c.is_single), key=_seconds, default=best)
    if _seconds(best) * WORTHWHILE > _seconds(single):
        best = single
    affinity = {node.name: plugin.names[d] for node, d in best.placed.labels.items()}
    path = store.keep(settings, task.key, affinity, {c.name: _seconds(c) for c in ran})
    return Measured(candidates, best, affinity, path)


def _seconds(candidate: CandidatePlacement) -> float:
    assert candidate.seconds is not None
    return candidate.seconds


def _candidates(task: PlacementTask, inputs: Mapping[str, Any]) -> list[CandidatePlacement]:
    """Return all distinct placements, the simplest first."""
    named: list[tuple[str, dict[Node, int]]] = [
        (f"all on {name}", task.all_on(d)) for d, name in enumerate(task.plugin.names)
    ]
    named.append(("priorities", task.by_priority()))
    costs = _profile(task, inputs)
    if costs is not None:
        problem = task.problem(costs)
        named.append(("cheapest cut", problem.spread(place.by_cut(problem))))
        named.append(("earliest end", problem.spread(place.by_schedule(problem))))
    found: dict[tuple[int, ...], CandidatePlacement] = {}
    for name, labels in named:
        key = tuple(labels[node] for node in task.graph.nodes)
        if key not in found:
            found[key] = CandidatePlacement(name, task.placed(labels, name, costs or ()))
    return list(found.values())


def _profile(task: PlacementTask, inputs: Mapping[str, Any]) -> list[hetero_costs.NodeCosts] | None:
    """Measure the nodes on each device in the whole model; None if a device cannot run all of it."""
    settings = Settings.make(LOOKING | {"PERF_COUNT": "YES"}, task.settings)
    tuner, found = Tuner(settings), []
    for plugin in task.plugin.plugins:
        try:
            request = plugin.compile(bare(task.model, task.graph), settings, tuner).create_infer_request()
        except UnsupportedError:
            return None
        found.append(hetero_costs.profiled(task.graph, request, inputs))
    return found


def _race(
    plugin: Hetero, model: Model, candidates: list[CandidatePlacement], inputs: Mapping[str, Any], settings: Settings,
    budget: float,
) -> None:  # fmt: skip
    """Run candidates in turns and in random order, so that disturbances affect all of them."""
    requests = {}
    for candidate in candidates:
        try:
            compiled = plugin.compile_placed(model, candidate.placed, settings)
            request = compiled.create_infer_request()
            begin = time.perf_counter()
            for _ in range(2):  # the first inference may compile kernels
                begin = time.perf_counter()
                request.infer(inputs)
        except TunewrightError as error:
            candidate.why = str(error)
            continue
        candidate.subgraphs = len(compiled.subgraphs)
        laps = max(1, min(50, round(TURN / max(time.perf_counter() - begin, 1e-6))))
        requests[candidate.name] = candidate, request, laps
    samples: dict[str, list[float]] = {name: [] for name in requests}
    shuffle, end, turn = random.Random(settings.tune_seed), time.perf_counter() + budget, 0
    while turn < LEAST or (turn < MOST and time.perf_counter() < end):
        order = list(requests)
        shuffle.shuffle(order)
        for name in order:
            _, request, laps = requests[name]
            begin = time.perf_counter()
            for _ in range(laps):
                request.infer(inputs)
            samples[name].append((time.perf_counter() - begin) / laps)
        turn += 1
    for name, (candidate, _, _) in requests.items():
        candidate.seconds = median(samples[name])
