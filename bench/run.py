"""``make bench``: Tunewright and the other engines that are installed, model by model, in turns.

python bench/run.py                          the models that the documentation speaks of
python bench/run.py resnet50 silero m.onnx   some, by short name, by part of a name (light/, ddddocr), or files
python bench/run.py --all                    every light model, own network and trained model
python bench/run.py --tune 120 resnet50      tune each model first, from nothing; then tuned, defaults, peers
python bench/run.py --kb folder              the same with what is tuned in a folder (--tune adds to it)
python bench/run.py --json figures.json      for a machine
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from rich import box
from rich.console import Console
from rich.table import Table

import catalogue
import engines
import turns
from tunewright.tools.common import environment

SCHEMA = "tunewright.bench/3"
#: What ours runs with, by the name of its row: nothing known; the heuristic alone; as it ships; what was tuned here.
#: A folder that does not exist is a knowledge base with nothing in it.
NOTHING = "/nonexistent"
OURS: dict[str, dict[str, Any]] = {
    "defaults": {"TUNING_MODE": "TUNING_DISABLED", "HEURISTIC_PATH": ""},
    "heuristic": {"USER_DB_PATH": NOTHING, "SYSTEM_DB_PATH": NOTHING},
    "shipped": {"USER_DB_PATH": NOTHING},
    "tuned": {},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="short name, part of a name, or file")
    parser.add_argument("--all", action="store_true", help="every model there is")
    parser.add_argument("--device", default="CPU", help="device of ours")
    parser.add_argument("--ours", default="", help=f"rows of ours, of {', '.join(OURS)} (default: what makes sense)")
    parser.add_argument("--tune", type=float, default=0.0, metavar="SECONDS", help="tune each model for so long first")
    parser.add_argument("--kb", metavar="FOLDER", help="where what is tuned is kept (default: a new, empty one)")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each engine")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a turn")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return bench(options, Path(options.kb or folder).absolute())


def bench(options: argparse.Namespace, kb: Path) -> int:
    out, progress = Console(highlight=False), Console(stderr=True, highlight=False)
    names = options.ours.split(",") if options.ours else ["tuned"] * bool(options.tune or options.kb) + ["defaults"]
    labels: dict[str, tuple[str, dict[str, Any]]] = {}
    for name in names:
        where = {"USER_DB_PATH": str(kb)} if name == "tuned" else {}
        labels[f"Tunewright, {name}"] = "tunewright", {"device": options.device, **OURS[name], **where}
    peers = {} if options.no_peers else {engines.PEERS[name]: (name, {}) for name in engines.installed()}
    figures: list[dict[str, Any]] = []
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in ("", "start s", "median ms", "ours / theirs", "error"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for entry in catalogue.everything() if options.all else catalogue.find(options.models):
        progress.print(f"{entry.name} ...", style="dim")
        model, inputs = entry.load()
        if options.tune:
            took = tune(entry.name, model, inputs, options, kb)
            progress.print(f"  tuned in {took:.0f} s", style="dim")
        rows = turns.measure(model, inputs, labels | peers, options.rounds, options.seconds)
        figures += [{"model": entry.name, **row} for row in rows]
        table.add_row(f"[bold]{entry.name}[/bold]")
        for i, row in enumerate(rows):
            add_row(table, row, first=not i)
        table.add_section()
        if options.json:  # as far as it is
            report = {"schema": SCHEMA, "environment": environment(), "tune": options.tune, "figures": figures}
            Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for row in figures:
        if "failed" in row:
            progress.print(f"{row['engine']} cannot run {row['model']}: {row['failed']}", style="dim", markup=False)
    out.print(f"{engines.machine()}; batch 1, fp32, a process per engine, in turns of {options.seconds} s")
    out.print("ours / theirs: the first row's time over this one's, below 1 it is faster (quartiles over turns).")
    out.print("Start: compiling and the first inference. Error: of the output's scale, against the first row.")
    out.print()
    out.print(table)
    out.print()
    for name in [*labels, *peers][1:]:
        out.print(f"geometric mean over {name}: {mean(r for r in figures if r['engine'] == name)}")
    if peers:
        out.print(f"geometric mean over the better peer: {mean(better(figures, peers))}")
    return 0


def tune(name: str, model: onnx.ModelProto, inputs: engines.Arrays, options: argparse.Namespace, kb: Path) -> float:
    """Tune a model as a user would, in a process of its own; how long it took."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        file = re.sub(r"[^\w.-]+", "_", name) + ".onnx"
        onnx.save(model, folder / file)
        command = [sys.executable, "-m", "tunewright", "tune", file]
        for k, (input, array) in enumerate(inputs.items()):
            np.save(folder / f"{k}.npy", array)
            command += ["--input", f"{input}={k}.npy"]
        command += ["--device", options.device, "--budget", f"{options.tune}s", "-c", f"USER_DB_PATH={kb}"]
        if options.kb:  # `tunewright kb train` learns from them which problem belongs to which network
            (kb / "results").mkdir(parents=True, exist_ok=True)
            command += ["--result", str(kb / "results")]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"bench: tuning failed\n{done.stderr}")
    return time.perf_counter() - begin


def better(figures: list[dict[str, Any]], peers: Iterable[str]) -> Iterable[dict[str, Any]]:
    """Of each model the row of the peer that is faster."""
    rows: dict[str, dict[str, Any]] = {}
    for row in figures:
        if row["engine"] in peers and "ours_over" in row:
            best = rows.get(row["model"])
            if best is None or row["ours_over"] > best["ours_over"]:
                rows[row["model"]] = row
    return rows.values()


def mean(rows: Iterable[dict[str, Any]]) -> str:
    logs = [math.log(row["ours_over"]) for row in rows if "ours_over" in row]
    return f"{math.exp(sum(logs) / len(logs)):.3f} ({len(logs)} models)" if logs else "nothing to compare"


def add_row(table: Table, row: dict[str, Any], first: bool) -> None:
    if "failed" in row:
        table.add_row(f"  {row['engine']}", "", "failed")
        return
    ratio = ""
    if not first and "ours_over" in row:
        around = "..".join(f"{q:.2f}" for q in row["ours_over_quartiles"])
        ratio = f"{row['ours_over']:.2f} ({around})"
    start = f"{row['compile'] + row['first']:.1f}"
    wrong = "" if first else f"{row['error']:.0e}"
    table.add_row(f"  {row['engine']}", start, f"{row['median_ms']:.2f}", ratio, wrong)


if __name__ == "__main__":
    sys.exit(main())
