"""How far a minute of tuning comes from nothing: against a long tuning, and against itself with another seed.

For each network, with nothing shipped and nothing cached at the beginning: two tunings of --seconds with different
seeds, each into an empty knowledge base, and a third one that goes on from the first for --long seconds. Then networks
with the three knowledge bases, and one without any, run in turns in one process.

    python bench/from_nothing.py resnet50 mobilenet_v2 minilm-128 yolox ocr-rec --json figures.json
    python bench/from_nothing.py squeezenet --seconds 30 --long 60

Told are speeds over the network without knowledge (medians of turns, with quartiles), the part of the long tuning's
speed that a minute reaches, the ratio of both seeds, and the layers in which the seeds chose different kernels.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import catalogue
import engines
from tunewright.tools.shared.console import environment

SCHEMA = "tunewright.from-nothing/1"
#: ways to run a network: without knowledge, and with three knowledge bases
FIRST, SECOND, LONG, NONE = "first", "second", "long", "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a name that bench/throughput.py --list tells")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the short tunings")
    parser.add_argument("--long", type=float, default=1140.0, help="how long the third one goes on")
    parser.add_argument("--rounds", type=int, default=60, help="turns of the comparison")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, model by model")
    given = parser.parse_args()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    report: dict[str, Any] = {
        "schema": SCHEMA, "environment": environment(), "machine": engines.machine(), "load": os.getloadavg()[0],
        "options": {"seconds": given.seconds, "long": given.long, "rounds": given.rounds}, "models": [],
    }  # fmt: skip
    try:
        entries = list(catalogue.find(given.models))
    except catalogue.NotFound as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    for entry in entries:
        with tempfile.TemporaryDirectory() as folder:
            found = one(entry, Path(folder), given)
        report["models"].append(found)
        print(said(found), flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def one(entry: catalogue.Entry, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """The figures of one network."""
    model, inputs = entry.load()
    onnx.save(model, folder / "model.onnx")
    np.savez(folder / "inputs.npz", **inputs)
    runs = {
        FIRST: tuned(folder, FIRST, given.seconds, seed=1),
        SECOND: tuned(folder, SECOND, given.seconds, seed=2),
    }  # fmt: skip
    (folder / LONG).mkdir()
    for file in (folder / FIRST).iterdir():
        (folder / LONG / file.name).write_bytes(file.read_bytes())
    runs[LONG] = tuned(folder, LONG, given.long, seed=1, cache=FIRST)
    took = in_turns(folder, inputs, given.rounds)
    over = {name: [a / b for a, b in zip(took[NONE], took[name], strict=True)] for name in runs}
    reached = [a / b for a, b in zip(took[LONG], took[FIRST], strict=True)]
    seeds = [a / b for a, b in zip(took[SECOND], took[FIRST], strict=True)]
    return {
        "model": entry.name, "ms": {name: statistics.median(times) * 1e3 for name, times in took.items()},
        "gains": {name: quartiles(found) for name, found in over.items()}, "reached": quartiles(reached),
        "seeds": quartiles(seeds), "tunings": runs, "apart": apart(runs[FIRST], runs[SECOND]),
    }  # fmt: skip


def quartiles(values: Sequence[float]) -> list[float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return [middle, low, high]


def core(folder: Path, knowledge: str, cache: str, **settings: Any) -> Any:
    """Everything in a folder, and nothing that ships."""
    import tunewright

    nothing = folder / "nothing"
    nothing.mkdir(exist_ok=True)
    return tunewright.Core({
        "SYSTEM_DB_PATH": str(nothing), "HEURISTIC_PATH": "", "USER_DB_PATH": str(folder / knowledge),
        "CACHE_DIR": str(folder / f"cache-{cache}"), "TUNE_RESULT_PATH": "", **settings,
    })  # fmt: skip


def tuned(folder: Path, name: str, seconds: float, seed: int, cache: str = "") -> dict[str, Any]:
    """A tuning in a process of its own, which has nothing compiled unless ``cache`` names another tuning."""
    code = "import sys, from_nothing; from_nothing.tune(*sys.argv[1:])"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", code, str(folder), name, cache or name, str(seconds), str(seed)], env=environ, check=True
    )  # fmt: skip
    wall = time.perf_counter() - begin
    result = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    layers = [layer for layer in result["layers"] if layer["trials"]]
    return {
        "wall": wall, "phases": result["phases"], "searched": len(layers),
        "candidates": sum(len(layer["trials"]) for layer in layers), "result": result["result"],
        "curve": curve(result),
        "chosen": {layer["problem"]: layer["chosen"] for layer in result["layers"]},
        "shares": {layer["problem"]: layer["seconds"] for layer in result["layers"]},
    }  # fmt: skip


def curve(result: Mapping[str, Any], step: float = 5.0) -> list[list[float]]:
    """How many times as fast the network is by what searches promised until then, every few seconds of the search."""
    layers = sorted((layer for layer in result["layers"] if layer["trials"]), key=lambda layer: -layer["hope"])
    total, began = sum(layer["seconds"] for layer in result["layers"]), 0.0
    gains: list[tuple[float, int, float]] = []
    for number, layer in enumerate(layers):
        best = first = layer["trials"][0]["seconds"]
        for trial in layer["trials"]:
            if first and trial["seconds"] is not None and trial["seconds"] < best:
                best = trial["seconds"]
                gains.append((began + trial["at"], number, layer["seconds"] * (1 - best / first)))
        began += sum(layer["spent"].get(phase, 0.0) for phase in ("search", "race", "confirm"))
    saved, points = [0.0] * len(layers), list[list[float]]()
    for n in range(int(began / step) + 1):
        for at, number, seconds in gains:
            if at <= n * step:
                saved[number] = max(saved[number], seconds)
        points.append([n * step, total / max(total - sum(saved), 1e-12)])
    return points


def tune(place: str, name: str, cache: str, seconds: str, seed: str) -> None:
    """In the process of a tuning."""
    folder = Path(place)
    made = core(folder, name, cache, TUNE_SEED=int(seed))
    with np.load(folder / "inputs.npz") as stored:
        inputs = {key: stored[key] for key in stored.files}
    result = made.tune(str(folder / "model.onnx"), inputs, "CPU", float(seconds))
    (folder / f"{name}.json").write_text(json.dumps(result.written), encoding="utf-8")


def in_turns(folder: Path, inputs: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Seconds of inferences of the network with each knowledge base, round by round."""
    requests = {}
    for name in (NONE, FIRST, SECOND, LONG):
        cache = FIRST if name == NONE else name
        requests[name] = core(folder, name, cache).compile_model(str(folder / "model.onnx")).create_infer_request()
        requests[name].infer(inputs)
    took: dict[str, list[float]] = {name: [] for name in requests}
    order = list(requests)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            requests[name].infer(inputs)
            begin = time.perf_counter()
            requests[name].infer(inputs)
            took[name].append(time.perf_counter() - begin)
    return took


def apart(one: dict[str, Any], other: dict[str, Any]) -> list[dict[str, Any]]:
    """Layers for which two tunings chose different kernels, those that take longest first."""
    found = [
        {"problem": key, "seconds": one["shares"][key], FIRST: chosen, SECOND: other["chosen"].get(key)}
        for key, chosen in one["chosen"].items()
        if chosen != other["chosen"].get(key)
    ]
    return sorted(found, key=lambda row: -(row["seconds"] or 0.0))


def said(found: dict[str, Any]) -> str:
    gains = ", ".join(f"{name} {row[0]:.3f} ({row[1]:.3f}..{row[2]:.3f})" for name, row in found["gains"].items())
    tries = ", ".join(f"{n} {r['candidates']} of {r['searched']} layers" for n, r in found["tunings"].items())
    return (
        f"{found['model']}: {found['ms'][NONE]:.3f} ms untuned; gains {gains}; of the long one's speed "
        f"{found['reached'][0]:.3f}; seeds {found['seeds'][0]:.3f}; candidates {tries}; "
        f"{len(found['apart'])} layers apart"
    )


if __name__ == "__main__":
    sys.exit(main())
