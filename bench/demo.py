"""``make demo``: a network as it was exported, and as Tunewright runs it.

Builds a ResNet-18 with random weights, compiles it with every optimisation off and with all on, measures both in turn,
and checks both against the ONNX reference. Other engines are measured beside them where they are installed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

import numpy as np
from onnx.reference import ReferenceEvaluator
from rich import box
from rich.console import Console
from rich.table import Table

import engines
from tunewright.testing.models import resnet

#: fp32: the largest error that counts as the same answer, as a part of the output's scale
TOLERANCE = 1e-4
STATUS = """\
In this version every kernel is the numpy reference of its operation, and nearly
all of the time is spent in the same convolutions before and after: the graph
passes and the memory plan can save steps and memory, and little time. Compiled
kernels, and the tuner that chooses among them, come next. Engines of others,
where they are installed, show how far there is to go."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--depth", type=int, default=18, choices=(18, 34, 50, 101))
    parser.add_argument("--size", type=int, default=224, help="height and width of the image")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=90.0, help="stop measuring after so long")
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

    before = engines.tunewright(model, "as exported", {"DISABLED_PASSES": engines.every_optimisation()})
    after = engines.tunewright(model, "optimised")
    contestants = [before, after, *engines.peers(model, inputs)]
    begin = time.perf_counter()
    expected = dict(zip(["y"], ReferenceEvaluator(model).run(None, inputs), strict=True))
    reference = time.perf_counter() - begin
    times = engines.interleave(contestants, inputs, options.rounds, options.seconds)

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("", "steps", "memory", "median ms", "speed (quartiles)", "error"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    failed = False
    for engine, taken in zip(contestants, times, strict=True):
        wrong = engines.error(engine.run(inputs), expected)
        failed = failed or (engine in (before, after) and not wrong <= TOLERANCE)
        memory, speed = engine.facts.get("memory"), times[0].ratio(taken)
        low, high = speed.quartiles
        table.add_row(
            engine.name if engine in (before, after) else f"{engine.name} {engine.version}",
            str(engine.facts.get("steps", "")),
            "" if memory is None else f"{memory / 2**20:.1f} MiB",
            f"{taken.median * 1e3:.1f}",
            "1" if engine is before else f"{speed.median:.2f}x ({low:.2f} .. {high:.2f})",
            f"{wrong:.0e}",
        )
    out.print(table)
    out.print()
    out.print(f"{len(times[0].all)} rounds, interleaved. Speed: against the model as exported, round by round.")
    out.print("Error: against the ONNX reference, as a part of the output's scale")
    out.print(f"(the reference takes {reference:.1f} s for one inference).")
    rewrites = Counter(e.rule for e in after.facts["log"].entries if not e.reason)
    if rewrites:
        out.print("Rewrites: " + ", ".join(f"{rule} x{n}" for rule, n in rewrites.most_common()) + ".")
    same = engines.error(after.run(inputs), before.run(inputs))
    out.print(f"Optimised against as exported: {same:.0e}.")
    out.print()
    out.print(STATUS)
    if failed or not same <= TOLERANCE:
        out.print(f"\n[red]WRONG: an output is off by more than {TOLERANCE:.0e} of its scale[/red]")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
