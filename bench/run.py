"""``make bench``: Tunewright and the other engines that are installed, model by model, interleaved.

python bench/run.py                          networks with random weights
python bench/run.py resnet50 model.onnx      some of them, or files
python bench/run.py --real                   trained models (scripts/fetch_models.py gets them)
python bench/run.py --json figures.json      for a machine
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from rich import box
from rich.console import Console
from rich.table import Table

import engines
from tunewright import Core, TunewrightError
from tunewright.testing import models
from tunewright.tools.common import environment
from tunewright.tools.inputs import make_feed

SCHEMA = "tunewright.bench/1"
NETWORKS: dict[str, Callable[[], onnx.ModelProto]] = {
    "resnet18": models.resnet,
    "resnet50": lambda: models.resnet(50),
    "mobilenet_v2": models.mobilenet,
    "transformer": lambda: models.transformer(layers=6, hidden=384, heads=12, length=128),
}


def chosen(names: Sequence[str], real: bool) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Models by name or file."""
    if real:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
        import fetch_models

        for name, folder in fetch_models.fetch(names or None).items():
            for file in fetch_models.model_files(folder):
                yield f"{name}/{file.stem}", onnx.load(file)
        return
    for name in names or NETWORKS:
        if name in NETWORKS:
            yield name, NETWORKS[name]()
        elif Path(name).is_file():
            yield Path(name).stem, onnx.load(name)
        else:
            raise SystemExit(f"bench: {name} is neither a file nor one of {', '.join(NETWORKS)}")


def measure(
    name: str, model: onnx.ModelProto, shapes: Sequence[str], rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """One row per engine."""
    core = Core()
    feed = make_feed(core.read_model(model), None, shapes, 0, core.settings)
    inputs: engines.Arrays = {k: np.asarray(v) for k, v in feed.values.items()}
    contestants = [engines.tunewright(model), *engines.peers(model, inputs)]
    times = engines.interleave(contestants, inputs, rounds, seconds)
    ours = contestants[0].run(inputs)
    rows = []
    for engine, taken in zip(contestants, times, strict=True):
        low, high = taken.quartiles
        rows.append(
            {
                "model": name,
                "engine": engine.name,
                "version": engine.version,
                "compile_ms": engine.compile_seconds * 1e3,
                "rounds": len(taken.all),
                "median_ms": taken.median * 1e3,
                "quartile_ms": [low * 1e3, high * 1e3],
                "min_ms": min(taken.all) * 1e3,
                "ratio_to_ours": taken.ratio(times[0]).median,
                "error": engines.error(ours, engine.run(inputs)),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"a file, or one of {', '.join(NETWORKS)} (default: these)"
    )
    parser.add_argument("--real", action="store_true", help="trained models; MODEL then names packages")
    parser.add_argument("--shape", action="append", default=[], metavar="NAME=SHAPE", help="as in tunewright run")
    parser.add_argument("--rounds", type=int, default=30, help="inferences of each engine")
    parser.add_argument("--seconds", type=float, default=30.0, help="stop a model after so long")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    options = parser.parse_args()
    out = Console(highlight=False)
    figures: list[dict[str, Any]] = []
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in ("model", "engine", "median ms", "quartiles", "time / ours", "error"):
        table.add_column(
            column, justify="left" if column in ("model", "engine") else "right", no_wrap=column != "model"
        )
    for name, model in chosen(options.models, options.real):
        try:
            rows = measure(name, model, options.shape, options.rounds, options.seconds)
        except TunewrightError as error:
            print(f"bench: {name}: {error}", file=sys.stderr)
            continue
        figures += rows
        for i, row in enumerate(rows):
            low, high = row["quartile_ms"]
            table.add_row(
                name if not i else "",
                row["engine"],
                f"{row['median_ms']:.2f}",
                f"{low:.2f} .. {high:.2f}",
                f"{row['ratio_to_ours']:.2f}",
                f"{row['error']:.0e}" if i else "",
            )
        table.add_section()
    versions = {row["engine"]: row["version"] for row in figures}
    out.print(f"{engines.machine()}; " + ", ".join(f"{k} {v}" for k, v in versions.items()))
    out.print("batch 1, interleaved; time / ours: round by round; error: ours against theirs, of the output's scale")
    out.print()
    out.print(table)
    if options.json:
        report = {"schema": SCHEMA, "environment": environment(), "figures": figures}
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
