"""``make demo``: a network in numpy as it was exported, then optimised, then in compiled kernels.

Builds a ResNet-18 with random weights, runs it in three ways, each in a process of its own and in turns, and checks
all of them against the ONNX reference. Other engines are measured beside them where they are installed.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
from onnx.reference import ReferenceEvaluator
from rich import box
from rich.console import Console
from rich.table import Table

import engines
import turns
from tunewright.testing.models import resnet

#: fp32: the largest error that counts as the same answer, as a part of the output's scale
TOLERANCE = 1e-4
STATUS = """\
Kernels are compiled for this processor by an OpenCL runtime that pip installs.
Each step runs its default kernel: nothing is tuned yet in this version."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--depth", type=int, default=18, choices=(18, 34, 50, 101))
    parser.add_argument("--size", type=int, default=224, help="height and width of the image")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a turn")
    options = parser.parse_args()
    out = Console(highlight=False)

    model = resnet(options.depth, options.size)
    inputs = {"x": np.random.default_rng(1).standard_normal((1, 3, options.size, options.size), np.float32)}
    out.print(
        f"ResNet-{options.depth}, {options.size} x {options.size}, batch 1, fp32, seeded random weights, "
        f"{len(model.graph.node)} nodes",
        style="bold",
    )
    out.print(f"on {engines.machine()}\n")
    ours: turns.Labels = {
        "numpy, as exported": (
            "tunewright", {"device": "CPU.HOST", "DISABLED_PASSES": engines.every_optimisation()}
        ),
        "numpy, optimised": ("tunewright", {"device": "CPU.HOST"}),
        "compiled kernels": ("tunewright", {"device": "CPU"}),
    }  # fmt: skip
    labels = ours | {engines.PEERS[name]: (name, {}) for name in engines.installed()}
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
    rewrites = next((row["rewrites"] for row in rows if row["engine"] == "compiled kernels" and "rewrites" in row), {})
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
