"""HETERO measured: what branches on two devices gain, and that a measured placement loses nothing to a single device.

The two devices of this machine that can work side by side are one processor twice (CPU and CPU.NATIVE), each confined
to one thread. Everything is timed in turns in one process; ratios are of medians, with the
quartiles of the ratios of turns.

    python bench/hetero.py                       # both parts, about a minute
    python bench/hetero.py --models light/resnet50 --seconds 10
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tunewright import Core
from tunewright.runtime.several.hetero import HeteroModel
from tunewright.testing import models

#: two devices that share no thread
DEVICES = ("CPU", "CPU.NATIVE")
BOTH = f"HETERO:{','.join(DEVICES)}"
#: of the second part: a placement may be slower than the best single device by so much
MOST_LOSS = 1.03


def two_branches(channels: int = 128, size: int = 28, depth: int = 6) -> onnx.ModelProto:
    """A stem, two stacks of convolutions over it, and their sum."""
    b = models.Builder(0)
    stem = b.add("Relu", b.conv("x", 3, channels, 3))
    ends = []
    for _ in range(2):
        path = stem
        for _ in range(depth):
            path = b.add("Relu", b.conv(path, channels, channels, 3))
        ends.append(path)
    pooled = b.add("Flatten", b.add("GlobalAveragePool", b.add("Add", *ends)))
    return b.model("branches", [1, 3, size, size], b.dense(pooled, channels, 10), 10)


def by_hand(core: Core, proto: onnx.ModelProto) -> HeteroModel:
    """The second stack on the second device."""
    loaded = core.read_model(proto)
    nodes = loaded.graph.nodes
    adds = [i for i, n in enumerate(nodes) if n.op == "Add"]
    middle = (2 + adds[0]) // 2
    loaded.affinity = {n.name: DEVICES[middle <= i < adds[0]] for i, n in enumerate(nodes)}
    made = core.compile_model(loaded, BOTH)
    assert isinstance(made, HeteroModel)
    return made


def turns(requests: dict[str, Any], values: dict[str, Any], seconds: float) -> dict[str, np.ndarray[Any, Any]]:
    """Seconds of an inference of each, turn by turn, in random order."""
    for request in requests.values():
        for _ in range(3):
            request.infer(values)
    found: dict[str, list[float]] = {name: [] for name in requests}
    end, rng = time.perf_counter() + seconds, random.Random(0)
    while time.perf_counter() < end or len(next(iter(found.values()))) < 5:
        names = list(requests)
        rng.shuffle(names)
        for name in names:
            begin = time.perf_counter()
            for _ in range(3):
                requests[name].infer(values)
            found[name].append((time.perf_counter() - begin) / 3)
    return {name: np.asarray(times) for name, times in found.items()}


def ratio(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> dict[str, float]:
    low, middle, high = np.percentile(one / other, [25, 50, 75])
    return {"median": float(middle), "low": float(low), "high": float(high), "minima": float(one.min() / other.min())}


def gain(core: Core, seconds: float) -> dict[str, Any]:
    """Branches on two devices against the better one of them alone, by hand and as measured."""
    proto, x = two_branches(), np.random.default_rng(0).standard_normal((1, 3, 28, 28)).astype(np.float32)
    measured = core.place_model(proto, {"x": x}, BOTH, seconds)
    compiled = {name: core.compile_model(proto, name) for name in DEVICES}
    compiled |= {"by hand": by_hand(core, proto), "measured": core.compile_model(proto, BOTH)}
    outputs = [c({"x": x})["y"] for c in compiled.values()]
    assert all(np.allclose(outputs[0], y, rtol=1e-4, atol=1e-4 * np.abs(outputs[0]).max()) for y in outputs)
    times = turns({name: c.create_infer_request() for name, c in compiled.items()}, {"x": x}, seconds)
    best = min(DEVICES, key=lambda name: np.median(times[name]))
    return {
        "ms": {name: float(np.median(t)) * 1e3 for name, t in times.items()},
        "gain": {name: ratio(times[best], times[name]) for name in ("by hand", "measured")},
        "kept": measured.best.name,
    }


def loss(core: Core, name: str, seconds: float) -> dict[str, Any]:
    """A measured placement against each device alone: time over the best one's."""
    import catalogue

    proto, values = next(catalogue.find([name])).load()
    device = "HETERO:CPU.HOST,CPU"
    measured = core.place_model(proto, values, device, seconds)
    compiled = {"CPU": core.compile_model(proto, "CPU"), "measured": core.compile_model(proto, device)}
    slow = next((c.seconds for c in measured.candidates if c.name == "all on CPU.HOST"), None)
    times = turns({n: c.create_infer_request() for n, c in compiled.items()}, values, seconds)
    return {
        "ms": {n: float(np.median(t)) * 1e3 for n, t in times.items()} | {"CPU.HOST": (slow or 0.0) * 1e3},
        "loss": ratio(times["measured"], times["CPU"]),
        "kept": measured.best.name,
    }


def show(name: str, row: dict[str, Any]) -> None:
    times = ", ".join(f"{device} {ms:.2f} ms" for device, ms in row["ms"].items())
    print(f"{name}: {times} (kept: {row['kept']})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each comparison")
    few = ["light/squeezenet", "light/shufflenet"]
    parser.add_argument("--models", nargs="*", default=few, help="of the second part; see bench/catalogue.py")
    parser.add_argument("--json", type=Path, help="write all figures")
    given = parser.parse_args()
    found: dict[str, Any] = {"load": os.getloadavg()[0]}
    print(f"load before: {found['load']:.1f} (figures of a busy machine are noisy)")
    with tempfile.TemporaryDirectory() as folder:
        one = Core({"USER_DB_PATH": folder, "CPU_THREADS_NUM": 1})
        found["gain"] = row = gain(one, given.seconds)
        show("two branches", row)
        for name, r in row["gain"].items():
            quartiles = f"{r['median']:.2f} ({r['low']:.2f}..{r['high']:.2f})"
            print(f"  gain {name}: {quartiles}, minima {r['minima']:.2f}; goal 1.2")
        core = Core({"USER_DB_PATH": folder})
        for name in given.models:
            found[name] = row = loss(core, name, given.seconds)
            show(name, row)
            r = row["loss"]
            quartiles = f"{r['median']:.3f} ({r['low']:.3f}..{r['high']:.3f})"
            print(f"  measured over CPU: {quartiles}, minima {r['minima']:.3f}; goal at most {MOST_LOSS}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
