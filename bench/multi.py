"""MULTI against each of its devices alone: requests per second, in short turns, interleaved.

The goal is 1.6 times the better device, or the sum of all less 15 %, for devices that share nothing. Two one-thread
devices of one processor are such on two cores:

    python bench/multi.py --devices CPU,CPU.NATIVE --threads 1
    python bench/multi.py --devices GPU.0,CPU --model resnet50 --seconds 40
    python bench/multi.py --devices GPU.0,CPU --model model.onnx --json figures.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from functools import partial
from typing import Any

import numpy as np

from tunewright import AsyncInferQueue, Core
from tunewright.ir.types import TensorType
from tunewright.testing import models

#: networks with random weights
NETWORKS = {"mobilenet": models.mobilenet, "resnet50": partial(models.resnet, 50), "transformer": models.transformer}
#: what counts as reached
GAIN, OF_SUM = 1.6, 0.85


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--devices", default="CPU,CPU.NATIVE", help="with commas between, the preferred one first")
    options.add_argument("--model", default="mobilenet", help="mobilenet, resnet50, transformer, or a file")
    options.add_argument("--threads", type=int, help="CPU_THREADS_NUM (beside a GPU: all cores but two)")
    options.add_argument("--hint", default="LATENCY", help="PERFORMANCE_HINT of each device")
    options.add_argument("--seconds", type=float, default=20.0, help="for all measurements together")
    options.add_argument("--turn", type=float, default=0.5, help="seconds of a turn")
    options.add_argument("--json", help="write the figures to a file")
    given = options.parse_args()
    names = [name.strip() for name in given.devices.split(",")]
    threads = given.threads
    if threads is None:
        gpu = any(name.upper().startswith("GPU") for name in names)
        threads = max(1, (os.cpu_count() or 1) - 2) if gpu else 0
    report = measure(names, given.model, {"PERFORMANCE_HINT": given.hint, "CPU_THREADS_NUM": threads}, given)
    show(report)
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)


def measure(names: list[str], model: str, config: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    """Requests per second of each device and of MULTI, by turn."""
    core = Core(config)
    loaded = core.read_model(NETWORKS[model]() if model in NETWORKS else model)
    inputs = random_inputs(loaded.inputs)
    together = f"MULTI:{','.join(names)}"
    queues, compiled = {}, {}
    for name in [*names, together]:
        begin = time.perf_counter()
        compiled[name] = core.compile_model(loaded, name)
        queues[name] = AsyncInferQueue(compiled[name], 2 * compiled[name].optimal_requests)
        turn(queues[name], inputs, 0.0)
        turn(queues[name], inputs, 0.1)
        print(f"{name}: ready in {time.perf_counter() - begin:.1f} s, "
              f"{compiled[name].optimal_requests} requests keep it busy", flush=True)  # fmt: skip
    rates: dict[str, list[float]] = {name: [] for name in queues}
    before = compiled[together].served
    end = time.perf_counter() + given.seconds
    while time.perf_counter() < end or not rates[together]:
        for name, queue in queues.items():
            rates[name].append(turn(queue, inputs, given.turn))
    served = {name: n - before[name] for name, n in compiled[together].served.items()}
    return {"model": model, "config": config, "together": together, "rates": rates, "served": served}


def random_inputs(types: dict[str, Any]) -> dict[str, Any]:
    rng, found = np.random.default_rng(0), {}
    for name, type in types.items():
        assert isinstance(type, TensorType) and type.shape is not None, f"{name} has no shape"
        shape = [size if isinstance(size, int) else 1 for size in type.shape]
        kind = type.dtype.numpy
        found[name] = (rng.random(shape) if kind.kind == "f" else rng.integers(0, 2, shape)).astype(kind)
    return found


def turn(queue: AsyncInferQueue, inputs: dict[str, Any], seconds: float) -> float:
    """Requests per second of a queue that is kept full for so long; what is over later does not count.

    Else a slow device beside a fast one would cost the time in which the fast one waits for its last request.
    """
    over: list[float] = []
    queue.set_callback(lambda request, userdata: over.append(time.perf_counter()))
    begin, count = time.perf_counter(), 0
    while count < len(queue) or time.perf_counter() - begin < seconds:
        queue.start_async(inputs)
        count += 1
    queue.wait_all()
    in_time = [moment for moment in over if moment <= begin + seconds] or over[:1]
    return len(in_time) / (max(in_time) - begin)


def show(report: dict[str, Any]) -> None:
    """A short table, and whether the goal is reached: by the medians of ratios of one round each."""
    rates, together = report["rates"], report["together"]
    alone = [name for name in rates if name != together]
    rounds = range(len(rates[together]))
    of_best = statistics.median(rates[together][i] / max(rates[name][i] for name in alone) for i in rounds)
    of_sum = statistics.median(rates[together][i] / sum(rates[name][i] for name in alone) for i in rounds)
    print(f"\n{report['model']}, {report['config']}, {len(rounds)} rounds")
    print(f"{'':24} {'requests/s':>10} {'least':>9} {'most':>9} {'in MULTI':>8}")
    for name, found in rates.items():
        served = report["served"].get(name, sum(report["served"].values()))
        row = f"{statistics.median(found):10.1f} {min(found):9.1f} {max(found):9.1f} {served:8}"
        print(f"{name:24} {row}")
    reached = of_best >= GAIN or of_sum >= OF_SUM
    print(f"MULTI: {of_best:.2f} of the better device, {of_sum:.2f} of the sum: "
          f"{'reached' if reached else 'missed'} (goal {GAIN} of the better, or {OF_SUM} of the sum)")  # fmt: skip


if __name__ == "__main__":
    main()
