"""Inferences per second with all cores busy: our streams, one of them alone, and what others offer for the same.

Each way has a process of its own (`turns.Worker`), and they take turns: noise of the machine hits all of them alike.

    python bench/throughput.py                                    six networks, some 3 minutes
    python bench/throughput.py resnet50 silero --json figures.json
    python bench/throughput.py --list                             names, as bench/run.py has them

Ways: ``one`` is a single stream on a single core, ``streams`` PERFORMANCE_HINT = THROUGHPUT, ``auto`` NUM_STREAMS =
AUTO (as measured; --auto), ``latency`` the default settings; then ONNX Runtime with as many sessions of one thread as
there are cores, and OpenVINO with its THROUGHPUT hint. Goals: streams / one >= 1.6, streams / the best other >= 1.25 as
a geometric mean. ``cores`` is the processor time of a way over the time it took: what streams leave alone. On a busy
machine ways get different shares of the cores; ``by processor time`` compares inferences per second of that.

    python bench/throughput.py silero --ways one,streams,onnxruntime    fewer processes
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import catalogue
import engines
import turns
from tunewright.tools.shared.console import environment

SCHEMA = "tunewright.throughput/1"
OURS: dict[str, dict[str, Any]] = {
    "one": {"CPU_THREADS_NUM": 1, "NUM_STREAMS": 1},
    "streams": {"PERFORMANCE_HINT": "THROUGHPUT"},
    "auto": {"NUM_STREAMS": "AUTO"},
    "latency": {},
}
PEERS = ("onnxruntime", "openvino")
#: answers a turn: inferences per second, and processor time over time
Rate = Callable[[float], tuple[float, float]]


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] == "--worker":
        return work(sys.argv[2], Path(sys.argv[3]))
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("models", nargs="*", metavar="MODEL", help="short name, set, part of a name, or file")
    options.add_argument("--list", action="store_true", help="names of the catalogue, by set")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=1.0, help="length of a turn")
    options.add_argument("--auto", action="store_true", help="measure NUM_STREAMS = AUTO too")
    options.add_argument("--ways", help="only these, with commas between them")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the figures, model by model")
    given = options.parse_args()
    if given.list:
        for name, entries in catalogue.SETS.items():
            print(f"{name}: {', '.join(entries)}")
        return 0
    ways = [way for way in OURS if given.auto or way != "auto"] + [p for p in PEERS if p in engines.installed()]
    if given.ways is not None:
        unknown = set(given.ways.split(",")) - {*OURS, *PEERS}
        if unknown:
            options.error(f"there is no way {min(unknown)!r}; they are {', '.join([*OURS, *PEERS])}")
        ways = given.ways.split(",")
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
        report["models"].append(one(entry, ways, given.rounds, given.seconds))
        print(said(report["models"][-1]), flush=True)
        report["geometric_means"] = means(report["models"])
        if given.json is not None:
            given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for name, mean in report["geometric_means"].items():
        print(f"geometric mean of {name}: {mean:.3f}")
    return 0


def one(entry: catalogue.Entry, ways: Sequence[str], rounds: int, seconds: float) -> dict[str, Any]:
    """A model's rates by way, or why there are none."""
    found: dict[str, Any] = {"model": entry.name}
    workers: dict[str, turns.Worker] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            model, inputs = entry.load()
            onnx.save(model, folder / "model.onnx")
            np.savez(folder / "inputs.npz", **inputs)
            outputs = [o.name for o in model.graph.output]
            (folder / "outputs.json").write_text(json.dumps(outputs), encoding="utf-8")
        except Exception as error:  # not here, or not to be fetched: the others can be measured
            return found | {"skipped": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        try:
            for way in ways:
                workers[way] = started(way, folder)
            for worker in workers.values():
                ready(worker)
            taken: dict[str, list[list[float]]] = {way: [] for way in ways}
            for number in range(rounds + 1):
                for way in random.Random(number).sample(list(ways), len(ways)):
                    answer = None if "failed" in workers[way].facts else workers[way].ask(str(seconds))
                    if answer is None:
                        workers[way].fail() if "failed" not in workers[way].facts else None
                    elif number:  # the first turn warms up
                        taken[way].append(answer)
        finally:
            for worker in workers.values():
                worker.stop()
        rows = found["ways"] = {}
        judge = next((way for way in ("onnxruntime", "one", "streams") if taken.get(way)), None)
        expected = turns.stored(folder, judge, outputs) if judge else {}
        for way in ways:
            if not taken[way]:
                rows[way] = {"failed": workers[way].facts.get("failed", "no answer")}
                continue
            rates, cores = zip(*taken[way], strict=True)
            error = engines.error(turns.stored(folder, way, outputs), expected)
            rows[way] = {
                "rate": statistics.median(rates), "rates": list(rates), "cores": statistics.median(cores),
                "rates_by_processor_time": [rate / max(core, 1e-9) for rate, core in zip(rates, cores, strict=True)],
                "streams": workers[way].facts.get("streams"), "error": error if math.isfinite(error) else None,
            }  # fmt: skip
    return found | {"ratios": ratios(rows)}


def ratios(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Turn by turn, since both then saw the same machine; medians."""

    def over(way: str, other: str, what: str = "rates") -> float:
        return statistics.median(a / b for a, b in zip(rows[way][what], rows[other][what], strict=False))

    found: dict[str, float] = {}
    there = [way for way in rows if "rates" in rows[way]]
    peers = [p for p in PEERS if p in there and "streams" in there]
    if {"streams", "one"} <= set(there):
        found["streams / one"] = over("streams", "one")
    if peers:
        found["streams / the best other"] = min(over("streams", p) for p in peers)
        by_time = min(over("streams", p, "rates_by_processor_time") for p in peers)
        found["streams / the best other, by processor time"] = by_time
    if {"auto", "streams"} <= set(there):
        found["auto / streams"] = over("auto", "streams")
    return found


def means(models: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = dict.fromkeys(name for model in models for name in model.get("ratios", {}))
    return {n: statistics.geometric_mean([m["ratios"][n] for m in models if n in m.get("ratios", {})]) for n in names}


def said(model: Mapping[str, Any]) -> str:
    if "skipped" in model:
        return f"{model['model']}: skipped: {model['skipped']}"
    texts = []
    for way, row in model["ways"].items():
        told = f"{row['rate']:.4g}/s ({row['cores']:.2f} cores)" if "rate" in row else f"failed: {row['failed'][:80]}"
        texts.append(f"{way} {told}" + ("" if row.get("error", 0) is not None else " WRONG"))
    rates = ", ".join(f"{name} {value:.2f}" for name, value in model["ratios"].items())
    return f"{model['model']}: {', '.join(texts)} | {rates}"


def started(way: str, folder: Path) -> turns.Worker:
    """A worker that compiles the model."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--worker", way, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    return turns.Worker(way, process, {}, [])


def ready(worker: turns.Worker) -> None:
    """Wait until it has compiled the model."""
    facts = worker.ask("")
    if facts is None:
        worker.fail()
    else:
        worker.facts = facts


# -- in the worker's process ------------------------------------------------------------------------------------------
def work(way: str, folder: Path) -> int:
    outputs = json.loads((folder / "outputs.json").read_text(encoding="utf-8"))
    with np.load(folder / "inputs.npz") as stored:
        inputs = {k: stored[k] for k in stored.files}
    try:
        make = ours if way in OURS else {"onnxruntime": sessions, "openvino": openvino}[way]
        rate, found, facts = make(way, str(folder / "model.onnx"), inputs, outputs)
        rate(0.1)
    except Exception as error:  # another engine's native code raises what it likes, and the table says so
        print(json.dumps({"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}), flush=True)
        return 1
    np.savez(folder / f"{way}.npz", *found)
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        print(json.dumps(rate(float(line))), flush=True)
    return 0


Made = tuple[Rate, list[np.ndarray[Any, Any]], dict[str, Any]]


def timed(run: Callable[[float], int]) -> Rate:
    """What a turn answers, of something that runs until a time and says how often."""

    def rate(seconds: float) -> tuple[float, float]:
        begin, used = time.perf_counter(), time.process_time()
        count = run(begin + seconds)
        took = time.perf_counter() - begin
        return count / took, (time.process_time() - used) / took

    return rate


def kept_full(queue: Any, start: Callable[[], None]) -> Callable[[float], int]:
    """A queue that is never empty until a time."""

    def run(end: float) -> int:
        count = 0
        while time.perf_counter() < end:
            start()
            count += 1
        queue.wait_all()
        return count

    return run


def ours(way: str, model: str, inputs: engines.Arrays, outputs: Sequence[str]) -> Made:
    import tunewright

    compiled = tunewright.Core().compile_model(model, "CPU", OURS[way])
    queue = tunewright.AsyncInferQueue(compiled)
    found = compiled(inputs)
    facts = {"streams": f"{compiled.streams.count}x{len(queue)}", "version": tunewright.__version__}
    return timed(kept_full(queue, lambda: queue.start_async(inputs))), [found[o] for o in outputs], facts


def sessions(way: str, model: str, inputs: engines.Arrays, outputs: Sequence[str]) -> Made:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    made = [ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]) for _ in range(engines.THREADS)]

    def run(end: float) -> int:
        counts = [0] * len(made)

        def go(i: int) -> None:
            while time.perf_counter() < end:
                made[i].run(None, inputs)
                counts[i] += 1

        threads = [threading.Thread(target=go, args=(i,)) for i in range(len(made))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts)

    return (
        timed(run),
        made[0].run(list(outputs), inputs),
        {"streams": f"{len(made)} sessions", "version": ort.__version__},
    )


def openvino(way: str, model: str, inputs: engines.Arrays, outputs: Sequence[str]) -> Made:
    import openvino as ov

    core = ov.Core()
    read = core.read_model(model)
    if any(port.partial_shape.is_dynamic for port in read.inputs):
        read.reshape({name: list(array.shape) for name, array in inputs.items()})
    compiled = core.compile_model(read, "CPU", {"PERFORMANCE_HINT": "THROUGHPUT", "INFERENCE_PRECISION_HINT": "f32"})
    queue = ov.AsyncInferQueue(compiled)
    request = compiled.create_infer_request()
    request.infer(inputs)
    found = [request.get_output_tensor(i).data.copy() for i in range(len(outputs))]
    streams = compiled.get_property("NUM_STREAMS")
    facts = {"streams": f"{streams}x{len(queue)}", "version": ov.__version__}
    return timed(kept_full(queue, lambda: queue.start_async(inputs, share_inputs=True))), found, facts


if __name__ == "__main__":
    sys.exit(main())
