"""How much slower inferences get while another process keeps one core of two busy: ours, and other engines'.

Each engine has a process of its own, and they take turns: first alone, then beside the busy neighbour, again and again.

    python bench/neighbour.py                                 six networks, some 4 minutes
    python bench/neighbour.py resnet50 silero --json figures.json

There is one neighbour for each two cores. It computes all the time, at normal priority, on whatever core it gets.
*Slow-down* is the median latency beside it over the median latency alone. Goal: ours at most 10 % above the better
peer's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import catalogue
import engines
import turns
from tunewright.tools.shared.console import environment

SCHEMA = "tunewright.neighbour/1"
#: what our slow-down may be, of the better peer's
GOAL = 1.1


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("models", nargs="*", metavar="MODEL", help="short name, set, part of a name, or file")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--seconds", type=float, default=0.3, help="length of a turn")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the figures, model by model")
    given = options.parse_args()
    report: dict[str, Any] = {
        "schema": SCHEMA, "environment": environment(), "machine": engines.machine(), "load": os.getloadavg()[0],
        "options": {"rounds": given.rounds, "seconds": given.seconds}, "models": [],
    }  # fmt: skip
    try:
        entries = list(catalogue.find(given.models or catalogue.QUICK))
    except catalogue.NotFound as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    for entry in entries:
        report["models"].append(one(entry, given.rounds, given.seconds))
        print(said(report["models"][-1]), flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    over = [model["over_better_peer"] for model in report["models"] if "over_better_peer" in model]
    if over:
        mean, missed = statistics.geometric_mean(over), sum(ratio > GOAL for ratio in over)
        print(f"our slow-down over the better peer's: geometric mean {mean:.3f}, worst {max(over):.3f}, "
              f"{missed} of {len(over)} above {GOAL}")  # fmt: skip
    return 0


def labels() -> turns.Labels:
    """Ours with its default settings, and every peer as its users run it."""
    found: turns.Labels = {"tunewright": ("tunewright", {})}
    for name in engines.installed():
        found[name] = (name, {})
    return found


@contextlib.contextmanager
def busy(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Neighbours compute inside, and are stopped outside."""
    for process in processes:
        process.send_signal(signal.SIGCONT)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGSTOP)


def one(entry: catalogue.Entry, rounds: int, seconds: float) -> dict[str, Any]:
    """A model's latencies alone and beside neighbours, by engine, or why there are none."""
    found: dict[str, Any] = {"model": entry.name}
    try:
        model, inputs = entry.load()
    except Exception as error:  # not here, or not to be fetched: the others can be measured
        return found | {"skipped": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    workers: dict[str, turns.Worker] = {}
    neighbours = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(max(1, engines.THREADS // 2))
    ]
    alone: dict[str, list[float]] = {}
    beside: dict[str, list[float]] = {}
    try:
        for process in neighbours:
            process.send_signal(signal.SIGSTOP)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            onnx.save(model, folder / "model.onnx")
            np.savez(folder / "inputs.npz", **inputs)
            outputs = [o.name for o in model.graph.output]
            (folder / "outputs.json").write_text(json.dumps(outputs), encoding="utf-8")
            for label, (engine, config) in labels().items():
                workers[label] = turns.start(label, engine, folder, config)
            for number in range(rounds + 1):
                for label in random.Random(number).sample(list(workers), len(workers)):
                    pair = _pair(workers[label], neighbours, seconds)
                    if pair is not None and number:  # the first turn warms up
                        alone.setdefault(label, []).append(pair[0])
                        beside.setdefault(label, []).append(pair[1])
    finally:
        for process in neighbours:
            process.kill()
            process.wait()
        for worker in workers.values():
            worker.stop()
    rows = found["engines"] = {}
    for label, worker in workers.items():
        if label not in alone:
            rows[label] = {"failed": worker.facts.get("failed", "no answer")}
            continue
        slower = [b / a for a, b in zip(alone[label], beside[label], strict=True)]
        rows[label] = {
            "alone_ms": 1e3 * statistics.median(alone[label]), "beside_ms": 1e3 * statistics.median(beside[label]),
            "slow_down": statistics.median(slower), "slow_downs": slower,
        }  # fmt: skip
    peers = [row["slow_down"] for label, row in rows.items() if label != "tunewright" and "slow_down" in row]
    if peers and "slow_down" in rows["tunewright"]:
        found["over_better_peer"] = rows["tunewright"]["slow_down"] / min(peers)
    return found


def _pair(
    worker: turns.Worker, neighbours: Sequence[subprocess.Popen[bytes]], seconds: float
) -> tuple[float, float] | None:
    """Median latencies of one turn alone and one beside neighbours; None where the engine failed."""
    medians = []
    for is_busy in (False, True):
        if "failed" in worker.facts:
            return None
        with busy(neighbours) if is_busy else contextlib.nullcontext():
            times = worker.ask(f"{seconds} 2")
        if not times:
            worker.fail()
            return None
        medians.append(float(np.median(times)))
    return medians[0], medians[1]


def said(model: dict[str, Any]) -> str:
    if "skipped" in model:
        return f"{model['model']}: skipped: {model['skipped']}"
    texts = []
    for label, row in model["engines"].items():
        if "failed" in row:
            texts.append(f"{label} failed: {row['failed'][:80]}")
        else:
            texts.append(f"{label} {row['alone_ms']:.4g} -> {row['beside_ms']:.4g} ms ({row['slow_down']:.2f})")
    over = model.get("over_better_peer", math.nan)
    return f"{model['model']}: {', '.join(texts)} | over the better peer's {over:.2f}"


if __name__ == "__main__":
    sys.exit(main())
