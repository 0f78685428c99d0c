"""What tuning beside a model costs its requests, and how much of offline tuning's gain it reaches.

Two processes serve the same model under the same open-loop load: requests come at times drawn at random (a Poisson
process), whether or not those before are over, and a latency counts from the time at which a request was due. One of
them tunes in the background, into a knowledge base of its own that is empty at first; the other does not. They serve in
turns, a slice of seconds each, so that both meet the same machine; who does not serve rests, and its tuning pauses.

    python bench/background.py model.onnx --minutes 10 --load 0.3 --duty 10
    python bench/background.py --minutes 0.8 --slice 5 --offline 0        # a model with random weights, briefly

Told are p50 and p99 of both and their ratios, what the helper did, and the gains: of background tuning, and of
`tunewright tune` for the working time that the helper had (--offline SECONDS for another time, 0: not measured). Gains
are those of the network with each knowledge base against the one without, timed in turns in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

#: rounds in which networks are compared at the end
ROUNDS = 60


def core(folder: Path, **settings: str) -> Any:
    import tunewright

    nothing = folder / "nothing"
    nothing.mkdir(exist_ok=True)
    return tunewright.Core({
        "SYSTEM_DB_PATH": str(nothing), "HEURISTIC_PATH": "", "TUNE_RESULT_PATH": "",
        "CACHE_DIR": str(folder / "cache"), **settings,
    })  # fmt: skip


def feed(compiled: Any) -> dict[str, Any]:
    """Random values for inputs; open sizes are 1."""
    rng = np.random.default_rng(0)
    found = {}
    for name, type in compiled.inputs.items():
        dims = [size if isinstance(size, int) else 1 for size in type.shape]
        numbers = rng.standard_normal(dims) if type.dtype.is_float else rng.integers(0, 2, dims)
        found[name] = numbers.astype(type.dtype.numpy)
    return found


def serve(folder: Path, model: str, tunes: bool, rate: float, duty: float, threads: int) -> None:
    """A serving process: for each line that it reads (seconds, seed) it serves, and writes latencies as JSON."""
    settings = {"USER_DB_PATH": str(folder / ("tuned" if tunes else "untuned")), "CPU_THREADS_NUM": str(threads)}
    compiled = core(folder, **settings).compile_model(_model(model))
    inputs, request = feed(compiled), compiled.create_infer_request()
    tuning = compiled.tune_in_background(duty=duty) if tunes else None
    for _ in range(5):
        request.infer(inputs)
    if tuning is not None:
        tuning.pause()
    print("ready", flush=True)
    for line in sys.stdin:
        seconds, seed = line.split()
        if tuning is not None:
            tuning.resume()
        rng, latencies = random.Random(int(seed)), []
        begin = time.perf_counter()
        due = begin + rng.expovariate(rate)
        while due < begin + float(seconds):
            left = due - time.perf_counter()
            if left > 0:
                time.sleep(left)
            request.infer(inputs)
            latencies.append(time.perf_counter() - due)
            due += rng.expovariate(rate)
        if tuning is not None:
            tuning.pause()
        status = None if tuning is None else _status(tuning.status())
        print(json.dumps({"latencies": latencies, "status": status}), flush=True)
    if tuning is not None:
        tuning.stop()


def _status(status: Any) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(status)


def _model(model: str) -> Any:
    import tunewright

    if model:
        return tunewright.Core().read_model(model)
    from tunewright.testing.models import mobilenet

    return tunewright.Core().read_model(mobilenet(size=160))


def capacity(folder: Path, model: str, threads: int) -> float:
    """Inferences per second of one request after the other."""
    settings = {"USER_DB_PATH": str(folder / "none"), "CPU_THREADS_NUM": str(threads)}
    compiled = core(folder, **settings).compile_model(_model(model))
    inputs, request = feed(compiled), compiled.create_infer_request()
    took = []
    for _ in range(60):
        begin = time.perf_counter()
        request.infer(inputs)
        took.append(time.perf_counter() - begin)
    return 1 / statistics.median(took[10:])


def gains(folder: Path, model: str, names: list[str], threads: int) -> dict[str, float]:
    """How many times as fast as the untuned one the network is with each knowledge base, in turns."""
    read = _model(model)
    requests = {}
    for name in ["none", *names]:
        compiled = core(folder, USER_DB_PATH=str(folder / name), CPU_THREADS_NUM=str(threads)).compile_model(read)
        inputs, requests[name] = feed(compiled), compiled.create_infer_request()
    took: dict[str, list[float]] = {name: [] for name in requests}
    order = list(requests)
    for _ in range(ROUNDS):
        random.shuffle(order)
        for name in order:
            requests[name].infer(inputs)
            begin = time.perf_counter()
            requests[name].infer(inputs)
            took[name].append(time.perf_counter() - begin)
    return {
        name: statistics.median(a / b for a, b in zip(took["none"], took[name], strict=True)) for name in names
    }  # fmt: skip


def start(arguments: argparse.Namespace, folder: Path, tunes: bool, rate: float) -> subprocess.Popen[str]:
    """A serving process, once it is ready."""
    command = [
        sys.executable, __file__, arguments.model, "--serve", str(int(tunes)), "--folder", str(folder), "--rate",
        str(rate), "--duty", str(arguments.duty), "--threads", str(arguments.threads),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise SystemExit("a serving process did not start")
    return process


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything."""
    most = capacity(folder, arguments.model, arguments.threads)
    rate = arguments.load * most
    print(f"{most:.1f} inferences per second at most, {rate:.1f} come", flush=True)
    processes = {"without": start(arguments, folder, False, rate), "with": start(arguments, folder, True, rate)}
    latencies: dict[str, list[float]] = {name: [] for name in processes}
    status: dict[str, Any] = {}
    slices = max(2, round(arguments.minutes * 60 / 2 / arguments.slice))
    for number in range(slices):
        order = list(processes.items())
        for name, process in order if number % 2 else order[::-1]:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(f"{arguments.slice} {number}\n")  # the same load for both
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            latencies[name] += answer["latencies"]
            status = answer["status"] or status
    for process in processes.values():
        process.communicate(timeout=60)
    names = ["tuned"]
    if arguments.offline != 0:
        offline(arguments, folder, arguments.offline or max(status["worked"], 10.0))
        names.append("offline")
    found = gains(folder, arguments.model, names, arguments.threads)
    quantiles = {
        name: {f"p{q}": float(np.quantile(took, q / 100)) * 1e3 for q in (50, 99)} for name, took in latencies.items()
    }  # fmt: skip
    ratios = {q: quantiles["with"][q] / quantiles["without"][q] for q in ("p50", "p99")}
    return {
        "requests": {name: len(took) for name, took in latencies.items()}, "ms": quantiles, "ratios": ratios,
        "gains": found, "helper": status,
    }  # fmt: skip


def offline(arguments: argparse.Namespace, folder: Path, seconds: float) -> None:
    """`tunewright tune` into a knowledge base of its own."""
    made = core(folder, USER_DB_PATH=str(folder / "offline"), CPU_THREADS_NUM=str(arguments.threads))
    read = _model(arguments.model)
    print(f"tuning offline for {seconds:.0f} s", flush=True)
    made.tune(read, feed(made.compile_model(read)), "CPU", seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help="an ONNX file; else MobileNetV2 with random weights")
    parser.add_argument("--minutes", type=float, default=10.0, help="of load, both processes together")
    parser.add_argument("--slice", type=float, default=15.0, help="seconds that each serves in its turn")
    parser.add_argument("--load", type=float, default=0.3, help="part of the capacity at which requests come")
    parser.add_argument("--duty", type=float, default=10.0, help="BACKGROUND_DUTY")
    parser.add_argument("--threads", type=int, default=0, help="CPU_THREADS_NUM (0: all)")
    parser.add_argument("--offline", type=float, default=None, help="seconds of offline tuning (0: none)")
    parser.add_argument("--json", help="write the figures to a file")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if arguments.serve is not None:
        tunes, duty = bool(arguments.serve), arguments.duty
        serve(arguments.folder, arguments.model, tunes, arguments.rate, duty, arguments.threads)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments, Path(folder))
    print(json.dumps(found, indent=2))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
