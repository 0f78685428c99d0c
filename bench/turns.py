"""Engines in processes of their own that take turns: fair on a noisy machine, and nobody's threads disturb others."""

from __future__ import annotations

import contextlib
import json
import math
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import engines

#: seconds after which an engine that does not answer has failed
PATIENCE = 300.0
#: rounds that make a ratio worth telling
FEW = 5
#: samples of a turn that are kept beside its median, evenly spread over it
KEPT = 32


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

    def ask(self, line: str) -> Any:
        """What it answers; None when it has ended, or was ended because it did not answer."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        late = threading.Timer(PATIENCE, self.process.kill)
        late.start()
        try:
            if line:
                stdin.write(f"{line}\n")
                stdin.flush()
            answer = stdout.readline()
            return json.loads(answer) if answer.strip() else None
        except (BrokenPipeError, ValueError):  # it was killed in the middle of an answer
            return None
        finally:
            late.cancel()

    def fail(self) -> None:
        self.process.kill()
        self.facts["failed"] = f"it ended with {self.process.wait()}"
        self.rounds.clear()

    def memory(self) -> dict[str, float]:
        """Megabytes of the process: the most that were resident at a time, and those that are now."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        except OSError:  # another system
            return {}
        values = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        names = {"peak_mb": "VmHWM", "resident_mb": "VmRSS"}
        return {name: int(values[key].split()[0]) / 1024 for name, key in names.items() if key in values}

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def start(label: str, engine: str, folder: Path, config: Mapping[str, Any]) -> Worker:
    """A worker that has compiled the model; its ``facts`` say what went wrong if it could not."""
    command = [sys.executable, str(Path(__file__).with_name("worker.py")), label, engine, str(folder)]
    command.append(json.dumps(config))
    # in a session of its own: Ctrl-C is for the one who asks
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    worker = Worker(label, process, {}, [])
    try:
        facts = worker.ask("")
    except BaseException:  # nobody else knows of it yet
        worker.stop()
        raise
    if facts is None:
        worker.fail()
    else:
        worker.facts = facts
    return worker


def start_once(label: str, engine: str, folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Start and first inference of a worker that ends as it likes, so that it leaves to the next one what it keeps."""
    worker = start(label, engine, folder, config)
    try:
        found = {key: worker.facts[key] for key in ("compile", "first") if key in worker.facts} | worker.memory()
        if worker.process.stdin is not None:
            worker.process.stdin.close()
        worker.process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        pass
    finally:
        worker.stop()
    return found


def turns(workers: list[Worker], rounds: int, seconds: float, least: int = 1, limit: float = math.inf) -> None:
    """Everybody runs for a while in turn, again and again: noise of the machine hits all of them alike. Behind `FEW`
    rounds nothing new begins after ``limit`` seconds."""
    begin = time.perf_counter()
    for done in range(rounds + 1):
        if done > FEW and time.perf_counter() - begin > limit:
            return
        for worker in random.Random(done).sample(workers, len(workers)):  # nobody always follows the same one
            if "failed" in worker.facts:
                continue
            times = worker.ask(f"{seconds} {least}")
            if times is None:
                worker.fail()
            elif done:  # the first turn warms up
                worker.rounds.append(times)


#: label -> the engine's package, and what it is told
Labels = dict[str, tuple[str, dict[str, Any]]]


def measure(
    model: onnx.ModelProto, inputs: engines.Arrays, labels: Labels, rounds: int, seconds: float,
    expected: engines.Arrays | None = None, *, least: int = 1, limit: float = math.inf, reference: str = "",
    twice: str = "",
) -> list[dict[str, Any]]:  # fmt: skip
    """One row per engine, out of `turns` of theirs. Errors are against ``expected``, else against the outputs of the
    engine called ``reference`` where that runs, else of the first one that does. The engine called ``twice`` is started
    once before, and what that took is its row's ``cold``."""
    workers: list[Worker] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        onnx.save(model, folder / "model.onnx")
        np.savez(folder / "inputs.npz", **inputs)
        outputs = [o.name for o in model.graph.output]
        (folder / "outputs.json").write_text(json.dumps(outputs), encoding="utf-8")
        try:
            for k, (label, (engine, config)) in enumerate(labels.items()):
                cold = start_once(str(k), engine, folder, config) if label == twice else {}
                workers.append(start(str(k), engine, folder, config))
                if cold:
                    workers[-1].facts["cold"] = cold
            turns(workers, rounds, seconds, least, limit)
            memory = [worker.memory() if worker.rounds else {} for worker in workers]
        finally:
            for worker in workers:
                worker.stop()
        found = dict(zip(labels, workers, strict=True))
        running = {label: w for label, w in found.items() if w.rounds}
        if expected is None and running:
            judge = running.get(reference) or next(iter(running.values()))
            expected = stored(folder, judge.label, outputs)
        rows = []
        for (label, worker), used in zip(found.items(), memory, strict=True):
            row: dict[str, Any] = {"engine": label, **worker.facts}
            if worker.rounds:
                row |= used | summary(worker, workers[0])
                row["error"] = engines.error(stored(folder, worker.label, outputs), expected or {})
            rows.append(row)
        return rows


def stored(folder: Path, label: str, outputs: list[str]) -> engines.Arrays:
    with np.load(folder / f"{label}.npz") as arrays:
        return {name: arrays[f"arr_{k}"] for k, name in enumerate(outputs)}


def summary(worker: Worker, first: Worker) -> dict[str, Any]:
    """Times over all turns; the ratio turn by turn, since both then saw the same machine."""
    flat = [t for times in worker.rounds for t in times]
    low, middle, high = np.percentile(flat, [25, 50, 75])
    found = {"median_ms": middle * 1e3, "quartile_ms": [low * 1e3, high * 1e3], "min_ms": min(flat) * 1e3}
    if first.rounds:
        ratios = [a / b for a, b in zip(first.medians, worker.medians, strict=True)]
        found["ours_over"] = float(np.median(ratios))
        found["ours_over_quartiles"] = [float(q) for q in np.percentile(ratios, [25, 75])]
    found["runs"] = len(flat)
    found["turns_ms"] = [round(1e3 * m, 6) for m in worker.medians]
    found["samples_ms"] = [[round(1e3 * t, 5) for t in thinned(times)] for times in worker.rounds]
    return found


def thinned(times: list[float]) -> list[float]:
    """At most `KEPT` of them, evenly spread."""
    if len(times) <= KEPT:
        return times
    return [times[round(k)] for k in np.linspace(0, len(times) - 1, KEPT)]
