"""Does `tunewright driver` reproduce a layer's time in the network? The dearest layers, in turns, on a quiet machine.

For each layer the network runs with performance counters, then the driver's measurer times the layer's kernel by
itself (in its worker process, as `tunewright driver` does), and so on in turns: both see the same machine. A ratio is
the driver's time through the network's: of the medians, and of the tenths below which a tenth of all samples lies,
which other processes disturb less.

Where the machine is not quiet, `--clock processor` compares processor time instead: of all threads, through their
number, both measured in this process. Waiting for a core does not count then, only what the work costs.

    python bench/driver.py --model resnet50 --layers 10
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import engines
from tunewright import Core
from tunewright.devices.base import Device, Queue
from tunewright.measure.isolated import measurer_for
from tunewright.measure.local import LocalMeasurer
from tunewright.plugins.single import open_device
from tunewright.runtime.insight.explain import steps
from tunewright.settings import Settings
from tunewright.solvers.base import Problem
from tunewright.testing.models import mobilenet, resnet
from tunewright.tools.kb.view import problem_text

NETWORKS = {"resnet50": lambda: resnet(50), "resnet18": lambda: resnet(18), "mobilenet": mobilenet}
#: the bar: within this part of the time in the network
BAR = 0.10
#: inferences of a turn in the network, and rounds of one in the driver
INFERENCES, ROUNDS = 3, 7


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="resnet50", choices=NETWORKS, help="which network")
    parser.add_argument("--layers", type=int, default=10, help="so many of the dearest layers")
    parser.add_argument("--turns", type=int, default=12, help="turns of network and driver for each layer")
    parser.add_argument("--clock", default="wall", choices=("wall", "processor"), help="which time is compared")
    parser.add_argument("--regime", default=None, help="LAYER, COLD or WARM; else as TUNE_REGIME says")
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    options = parser.parse_args()
    out = Console(highlight=False)
    rows = measure(options, out)
    show(out, rows)
    if options.json is not None:
        found = {"model": options.model, "clock": options.clock, "machine": engines.machine(), "layers": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if all(abs(row["ratio"] - 1) <= BAR for row in rows) else 1


def measure(options: argparse.Namespace, out: Console) -> list[dict[str, Any]]:
    """A row per layer: all nodes of one problem; times are of one execution."""
    device = open_device("CPU")
    if options.clock == "processor":
        count_processor_time(device)
    counted = {"PERF_COUNT": "YES", "JOIN_LAUNCHES": "NO"}  # a launch for each layer, as the driver measures them
    settings = Settings.make(counted | ({"TUNE_REGIME": options.regime} if options.regime else {}))
    model = NETWORKS[options.model]()
    inputs = {"x": np.random.default_rng(1).standard_normal((1, 3, 224, 224), np.float32)}
    request = Core(counted).compile_model(model).create_infer_request()
    request.infer(inputs)
    layers: dict[str, tuple[Problem, tuple[str, Any], list[str]]] = {}
    for plan in request.model.program.plans:
        for _, step, _ in steps(plan):
            if step.choice is not None and not step.choice.solver.host:
                problem = Problem.of(step.node)
                kernel = step.choice.solver.id, step.choice.config
                layers.setdefault(problem.key(), (problem, kernel, []))[2].append(step.node.name)

    def times(count: int) -> dict[str, list[float]]:
        """Seconds of each node, of several inferences."""
        found: dict[str, list[float]] = {}
        for _ in range(count):
            request.infer(inputs)
            for row in request.get_profiling_info():
                if row.calls:
                    found.setdefault(row.name, []).append(row.device_seconds + row.host_seconds)
        return found

    first = {name: median(samples) for name, samples in times(10).items()}
    order = sorted(layers.values(), key=lambda layer: -sum(first[name] for name in layer[2]))
    measurer = LocalMeasurer(device) if options.clock == "processor" else measurer_for(device, settings)
    rows = []
    for problem, kernel, nodes in order[: options.layers]:
        why = measurer.pose(problem, 0, settings.tune_regime.lower())
        if why is not None:
            out.print(f"{nodes[0]}: {why}")
            continue
        measurer.attempt(kernel)
        network: list[float] = []
        alone: list[float] = []
        for _ in range(options.turns):
            times(1)  # the other has filled the caches
            found = times(INFERENCES)
            network += [sample for name in nodes for sample in found[name]]
            alone += measurer.race([kernel], ROUNDS).samples[0]
        rows.append({
            "layer": nodes[0], "nodes": len(nodes), "problem": problem.key(), "kernel": kernel[0],
            "regime": measurer.regime().kind, "network": median(network), "driver": median(alone),
            "network_quartiles": [float(q) for q in np.quantile(network, (0.25, 0.75))],
            "driver_quartiles": [float(q) for q in np.quantile(alone, (0.25, 0.75))],
            "ratio": median(alone) / median(network),
            "ratio_of_tenths": float(np.quantile(alone, 0.1) / np.quantile(network, 0.1)),
        })  # fmt: skip
    measurer.close()
    return rows


def count_processor_time(device: Device) -> None:
    """From now on the clock of the device's queues is the time that its threads spent on the processor."""
    queue, units = type(device.queue()), max(device.target.units, 1)

    def now(self: Queue) -> float:
        self.finish()
        return time.process_time() / units

    queue.now = now  # type: ignore[method-assign]


def show(out: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("layer", "network ms", "quartiles", "driver ms", "quartiles", "ratio", "of tenths"):
        table.add_column(name, justify="left" if name == "layer" else "right", no_wrap=True)
    for row in rows:
        spread = ["-".join(f"{q * 1e3:.2f}" for q in row[f"{who}_quartiles"]) for who in ("network", "driver")]
        table.add_row(
            f"{row['layer']} (x{row['nodes']})", f"{row['network'] * 1e3:.3f}", spread[0], f"{row['driver'] * 1e3:.3f}",
            spread[1], f"{row['ratio']:.3f}", f"{row['ratio_of_tenths']:.3f}",
        )  # fmt: skip
    out.print(table)
    if not rows:
        return
    far = [row for row in rows if abs(row["ratio"] - 1) > BAR]
    out.print(f"\n{len(rows) - len(far)} of {len(rows)} layers within {BAR:.0%}; regime {rows[0]['regime'].lower()}")
    for row in far:
        out.print(f"{row['layer']}: {problem_text(row['problem'])}", soft_wrap=True, markup=False)


if __name__ == "__main__":
    sys.exit(main())
