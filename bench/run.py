"""``make bench``: Tunewright and the other engines that are installed, model by model, in turns.

python bench/run.py                          the models that the documentation speaks of
python bench/run.py resnet50 silero m.onnx   some, by short name, by part of a name (light/, ddddocr), or files
python bench/run.py --all                    every light model, own network and trained model
python bench/run.py --json figures.json      for a machine
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import catalogue
import engines
import turns
from tunewright.tools.common import environment

SCHEMA = "tunewright.bench/2"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="short name, part of a name, or file")
    parser.add_argument("--all", action="store_true", help="every model there is")
    parser.add_argument(
        "--device", action="append", default=[], help="device of ours (default: CPU); several: one row each"
    )
    parser.add_argument("--rounds", type=int, default=8, help="turns of each engine")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a turn")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    options = parser.parse_args()
    out, progress = Console(highlight=False), Console(stderr=True, highlight=False)
    labels: dict[str, tuple[str, dict[str, Any]]] = {
        ("Tunewright" if d == "CPU" else f"Tunewright {d}"): ("tunewright", {"device": d})
        for d in options.device or ["CPU"]
    }
    labels |= {engines.PEERS[name]: (name, {}) for name in engines.installed()}
    figures: list[dict[str, Any]] = []
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in ("", "start s", "median ms", "ours / theirs", "error"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for entry in catalogue.everything() if options.all else catalogue.find(options.models):
        progress.print(f"{entry.name} ...", style="dim")
        rows = turns.measure(*entry.load(), labels, options.rounds, options.seconds)
        figures += [{"model": entry.name, **row} for row in rows]
        table.add_row(f"[bold]{entry.name}[/bold]")
        for i, row in enumerate(rows):
            add_row(table, row, first=not i)
        table.add_section()
    for row in figures:
        if "failed" in row:
            progress.print(f"{row['engine']} cannot run {row['model']}: {row['failed']}", style="dim", markup=False)
    out.print(f"{engines.machine()}; batch 1, fp32, a process per engine, in turns of {options.seconds} s")
    out.print("ours / theirs: below 1 we are faster (quartiles over turns). Error: of the output's scale.")
    out.print("Start: compiling and the first inference.")
    out.print()
    out.print(table)
    if options.json:
        report = {"schema": SCHEMA, "environment": environment(), "figures": figures}
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


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
