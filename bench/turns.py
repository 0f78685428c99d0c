"""Engines in processes of their own that take turns: fair on a noisy machine, and nobody's threads disturb others."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import engines


@dataclass
class Worker:
    """An engine in its own process."""

    label: str
    process: subprocess.Popen[str]
    facts: dict[str, Any]
    rounds: list[list[float]]

    @property
    def medians(self) -> list[float]:
        """Of each turn."""
        return [float(np.median(times)) for times in self.rounds]


def start(label: str, engine: str, folder: Path, config: dict[str, Any]) -> Worker:
    """A worker that has compiled the model; its ``facts`` say what went wrong if it could not."""
    command = [sys.executable, str(Path(__file__).with_name("worker.py")), label, engine, str(folder)]
    command.append(json.dumps(config))
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    facts = json.loads(line) if line else {"failed": f"it ended with {process.wait()}"}
    return Worker(label, process, facts, [])


def turns(workers: list[Worker], rounds: int, seconds: float) -> None:
    """Everybody runs for a while in turn, again and again: noise of the machine hits all of them alike."""
    for done in range(rounds + 1):
        for k in range(len(workers)):
            worker = workers[(k + done) % len(workers)]
            assert worker.process.stdin is not None and worker.process.stdout is not None
            worker.process.stdin.write(f"{seconds}\n")
            worker.process.stdin.flush()
            times = json.loads(worker.process.stdout.readline())
            if done:  # the first turn warms up
                worker.rounds.append(times)


#: label -> the engine's package, and what it is told
Labels = dict[str, tuple[str, dict[str, Any]]]


def measure(
    model: onnx.ModelProto, inputs: engines.Arrays, labels: Labels, rounds: int, seconds: float,
    expected: engines.Arrays | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """One row per engine. Errors are those of the first one's outputs, or against ``expected``."""
    workers: list[Worker] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        onnx.save(model, folder / "model.onnx")
        np.savez(folder / "inputs.npz", **inputs)
        try:
            for label, (engine, config) in labels.items():
                workers.append(start(label, engine, folder, config))
            turns([w for w in workers if "failed" not in w.facts], rounds, seconds)
        finally:
            for worker in workers:
                worker.process.kill()
                worker.process.wait()
        rows = []
        for worker in workers:
            row: dict[str, Any] = {"engine": worker.label, **worker.facts}
            if worker.rounds:
                row |= summary(worker, workers[0])
                first = stored(folder, workers[0].label) if "failed" not in workers[0].facts else {}
                outputs = stored(folder, worker.label)
                row["error"] = engines.error(outputs, expected) if expected else engines.error(first, outputs)
            rows.append(row)
        return rows


def stored(folder: Path, label: str) -> engines.Arrays:
    with np.load(folder / f"{label}.npz") as arrays:
        return {k: arrays[k] for k in arrays.files}


def summary(worker: Worker, ours: Worker) -> dict[str, Any]:
    """Times over all turns; the ratio turn by turn, since both then saw the same machine."""
    flat = [t for times in worker.rounds for t in times]
    low, middle, high = np.percentile(flat, [25, 50, 75])
    found = {"median_ms": middle * 1e3, "quartile_ms": [low * 1e3, high * 1e3], "min_ms": min(flat) * 1e3}
    if ours.rounds:
        ratios = [a / b for a, b in zip(ours.medians, worker.medians, strict=True)]
        found["ours_over"] = float(np.median(ratios))
        found["ours_over_quartiles"] = [float(q) for q in np.percentile(ratios, [25, 75])]
    found["runs"] = len(flat)
    return found
