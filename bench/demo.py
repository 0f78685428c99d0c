"""``make demo``: a network untuned, tuned for about a minute with live progress, and tuned; measured and checked.

Builds a network with random weights, times it, and tunes it into a knowledge base of its own. Then it runs in numpy, in
compiled kernels untuned and tuned, each in a process of its own and in turns, and all of them are checked against the
ONNX reference. Other engines are measured beside them where they are installed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from rich import box
from rich.console import Console
from rich.table import Table

import engines
import turns
from tunewright import Core
from tunewright.testing.models import mobilenet, resnet
from tunewright.tools.tune.command import interruptible
from tunewright.tools.tune.report import page
from tunewright.tools.tune.view import progress, summary

#: fp32: the largest error that counts as the same answer, as a part of the output's scale
TOLERANCE = 1e-4
STATUS = """\
Kernels are compiled for this processor by a clang that pip installs.
Each was compared with its reference before its time counted.
`tunewright tune model.onnx` does the same for a model of yours."""


#: name -> how people call it, and how it is made
NETWORKS = {
    "mobilenet": ("MobileNetV2", mobilenet),
    "resnet18": ("ResNet-18", lambda: resnet(18)),
    "resnet50": ("ResNet-50", lambda: resnet(50)),
}

#: what ships was tuned for networks like these: the demonstration begins without it
NOTHING_SHIPS = {"SYSTEM_DB_PATH": "/nonexistent", "HEURISTIC_PATH": ""}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="mobilenet", choices=NETWORKS, help="which network")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tuning")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a turn")
    parser.add_argument("--report", type=Path, help="write a page about the tuning (HTML)")
    options = parser.parse_args()
    out = Console(highlight=False)

    name, make = NETWORKS[options.model]
    model = make()
    inputs = {"x": np.random.default_rng(1).standard_normal((1, 3, 224, 224), np.float32)}
    out.print(f"{name}, 224 x 224, batch 1, fp32, seeded random weights, {len(model.graph.node)} nodes", style="bold")
    out.print(f"on {engines.machine()}\n")
    with tempfile.TemporaryDirectory(prefix="tunewright-demo-") as folder:
        core = Core({"USER_DB_PATH": folder, "TUNE_RESULT_PATH": "", **NOTHING_SHIPS})
        before, count = quick(core, model, inputs)
        out.print(f"untuned: {before * 1e3:.1f} ms an inference, median of {count}")
        out.print(f"tuning for {options.budget:.0f} s; Ctrl-C ends it early and loses nothing\n")
        with interruptible() as stop, progress() as report:
            found = core.tune(model, inputs, "CPU", options.budget, report=report, stop=stop)
        out.print(f"tuned for {sum(found.seconds.values()):.0f} s: {summary(found)}")
        if options.report is not None:
            options.report.write_text(page([found.written]), encoding="utf-8")
            out.print(f"{options.report} tells how")
        out.print()
        return compare(out, options, model, inputs, folder)


def quick(core: Core, model: onnx.ModelProto, inputs: engines.Arrays) -> tuple[float, int]:
    """A first look: the median time, and of how many inferences."""
    compiled = core.compile_model(model)
    compiled(inputs)
    times: list[float] = []
    while len(times) < 10 or sum(times) < 1.0:
        begin = time.perf_counter()
        compiled(inputs)
        times.append(time.perf_counter() - begin)
    return float(np.median(times)), len(times)


def compare(
    out: Console, options: argparse.Namespace, model: onnx.ModelProto, inputs: engines.Arrays, folder: str
) -> int:
    """All ways to run it, in turns; the exit code says whether they agree."""
    untuned = {"device": "CPU", "USER_DB_PATH": f"{folder}/none", **NOTHING_SHIPS}
    ours: turns.Labels = {
        "kernels, untuned": ("tunewright", untuned),
        "kernels, tuned": ("tunewright", {"device": "CPU", "USER_DB_PATH": folder, **NOTHING_SHIPS}),
        "numpy": ("tunewright", {"device": "CPU.HOST"}),
    }
    peers: turns.Labels = {engines.PEERS[name]: (name, {}) for name in engines.installed()}
    labels = ours | peers
    begin = time.perf_counter()
    expected = dict(zip(["y"], ReferenceEvaluator(model).run(None, inputs), strict=True))
    reference = time.perf_counter() - begin
    with out.status("compiling, then measuring in turns ..."):
        rows = turns.measure(model, inputs, labels, options.rounds, options.seconds, expected)

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("", "steps", "start s", "median ms", "speed (quartiles)", "error"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    failed = False
    for row in rows:
        if "failed" in row:
            failed = failed or row["engine"] in ours
            table.add_row(row["engine"], "", "", row["failed"][:40])
            continue
        failed = failed or (row["engine"] in ours and not row["error"] <= TOLERANCE)
        low, high = row["ours_over_quartiles"]
        table.add_row(
            row["engine"] if row["engine"] in ours else f"{row['engine']} {row['version']}",
            str(row.get("steps", "")),
            f"{row['compile'] + row['first']:.1f}",
            f"{row['median_ms']:.1f}",
            "1" if row is rows[0] else f"{row['ours_over']:.2f}x ({low:.2f}..{high:.2f})",
            f"{row['error']:.0e}",
        )
    out.print(table)
    out.print()
    out.print(f"{options.rounds} turns of {options.seconds} s each, a process per engine.")
    out.print("Speed: against the first row, turn by turn. Start: compiling, first inference.")
    out.print(f"Error: against the ONNX reference ({reference:.1f} s), of the output's scale.")
    missing = [name for name in engines.PEERS.values() if name not in peers]
    if missing:
        out.print(f"Not installed, and so not compared: {', '.join(missing)} (pip install -e '.\\[peers]').")
    tuned = next(row for row in rows if row["engine"] == "kernels, tuned")
    rewrites = tuned.get("rewrites", {})
    if rewrites:
        out.print("Rewrites: " + ", ".join(f"{rule} x{n}" for rule, n in rewrites.items()) + ".")
    out.print()
    out.print(STATUS)
    if failed:
        out.print(f"\n[red]WRONG: a run failed, or its output is off by more than {TOLERANCE:.0e} of its scale[/red]")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
