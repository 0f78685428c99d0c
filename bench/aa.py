"""Is tuning honest? Two experiments on the real device: A/A, and repeatability.

A/A: the default against a twin of itself, a solver of another name that makes the same kernel. Whenever the twin
replaces the default, noise was taken for a gain. Goal: in less than 2 % of 200 sessions.

Repeatability: five layers of ResNet-50, each tuned several times with different seeds. What the sessions chose is then
raced against each other, interleaved. Goal: within 3 % of each other's speed.

    python bench/aa.py --short          about a minute
    python bench/aa.py --json out.json  the full experiments, on a machine that does nothing else
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tunewright.devices.base import Device, Target
from tunewright.ir.types import PLAIN, blocked
from tunewright.measure.base import Candidate, Measurer
from tunewright.measure.isolated import Isolated
from tunewright.measure.local import LocalMeasurer
from tunewright.measure.statistics import ratio, relative
from tunewright.plugins.single import open_device
from tunewright.search import Space
from tunewright.solvers.base import Config, Kernel, Problem, Solver, solvers
from tunewright.testing.kernelcheck import Case
from tunewright.tuning.candidate_search import plain
from tunewright.tuning.session import SearchPlan, SessionSubject, tune

#: name -> image, channels in, channels out, window, stride
LAYERS = {
    "7x7/2 3>64 @224": (224, 3, 64, 7, 2),
    "3x3 64>64 @56": (56, 64, 64, 3, 1),
    "1x1 256>64 @56": (56, 256, 64, 1, 1),
    "3x3 256>256 @14": (14, 256, 256, 3, 1),
    "1x1 512>2048 @7": (7, 512, 2048, 1, 1),
}
#: rounds of the final race between what sessions chose
FINAL = 96


class Twin(Solver):
    """Another solver under another name."""

    def __init__(self, other: Solver) -> None:
        self.other = other
        self.id, self.version, self.rank = f"{other.id}.twin", other.version, other.rank + 1
        self.host, self.ops, self.language = other.host, other.ops, other.language

    def why_not(self, problem: Problem, target: Target) -> str | None:
        return self.other.why_not(problem, target)

    def default(self, problem: Problem, target: Target) -> Config:
        return self.other.default(problem, target)

    def space(self, problem: Problem, target: Target) -> Space:
        return self.other.space(problem, target)

    def source(self, problem: Problem, config: Config, target: Target) -> str:
        return self.other.source(problem, config, target)

    def compile(self, problem: Problem, config: Config, device: Device) -> Kernel:
        return self.other.compile(problem, config, device)


def layer(name: str, device: Device) -> Problem:
    """A convolution as the engine would pose it: blocked, with a bias; the first one takes a plain image."""
    size, channels, out, window, stride = LAYERS[name]
    block = blocked(device.target.vector_bytes // 4)
    shapes = [(1, channels, size, size), (out, channels, window, window), (out,)]
    attrs = {"kernel_shape": (window,) * 2, "group": 1, "pads": (window // 2,) * 4, "strides": (stride,) * 2}
    layouts = PLAIN if channels < block.block else block, block
    zeros = [np.zeros(shape, np.float32) for shape in shapes]
    return Case("Conv", zeros, attrs, constant=frozenset({1, 2}), layouts=layouts).problem()


def accepting(problem: Problem, device: Device) -> list[Solver]:
    """The device's solvers for a problem, the default first."""
    target = device.target
    asked = [s for s in solvers() if not s.host and s.language in (None, target.language)]
    return [s for s in asked if (s.ops is None or problem.op in s.ops) and s.why_not(problem, target) is None]


def aa(device: Device, name: str, count: int, seconds: float, regime: str) -> dict[str, Any]:
    """Sessions with the default and its twin alone."""
    problem = layer(name, device)
    first = accepting(problem, device)[0]
    default = first.id, first.default(problem, device.target)
    pair = [first, Twin(first)]
    rows = []
    with LocalMeasurer(device, pair) as measurer:
        for seed in range(count):
            start = time.monotonic()
            found = tune(
                SessionSubject(problem, device.target, default, pair), measurer,
                SearchPlan(seconds, seed, regime, strategy=lambda solver: None),
            )  # fmt: skip
            twin = next((m for m in found.records if m.key.solver != first.id), None)
            gain = twin.evidence.gain if twin is not None else None
            rows.append(
                {
                    "changed": found.changed, "seconds": time.monotonic() - start, "reason": found.reason,
                    "ms": found.records[0].evidence.seconds * 1e3 if found.records else None,
                    "gain": [gain.median, gain.low, gain.high, gain.pairs] if gain is not None else None,
                }
            )  # fmt: skip
            show(f"A/A {name}: {seed + 1} of {count}, {sum(r['changed'] for r in rows)} changed")
    changed = sum(r["changed"] for r in rows)
    measured = [r["gain"] for r in rows if r["gain"]]
    outside = sum(not low <= 1 <= high for _, low, high, _ in measured)
    print(f"\n\nA/A, {name}, {regime}: the default is replaced in {changed} of {count} sessions")
    if measured:
        spread = np.percentile([m[0] for m in measured], [5, 50, 95])
        print(f"  twin over default: 5 %, 50 %, 95 % of sessions at {spread[0]:.3f}, {spread[1]:.3f}, {spread[2]:.3f}")
        print(f"  interval without 1: {outside} of {len(measured)}; pairs: {np.median([m[3] for m in measured]):.0f}")
    print(f"  seconds of a session: {np.median([r['seconds'] for r in rows]):.2f}")
    return {"layer": name, "regime": regime, "count": count, "changed": changed, "outside": outside, "sessions": rows}


def repeat(
    device: Device, names: Sequence[str], runs: int, seconds: float, regime: str, isolated: bool
) -> list[dict[str, Any]]:
    """Sessions with different seeds; then a race of what they chose."""
    rows = []
    for name in names:
        problem = layer(name, device)
        offered = accepting(problem, device)
        default = plain((offered[0].id, offered[0].default(problem, device.target)))
        chosen: list[Candidate] = []
        sessions = []
        with measurer_for(device, isolated) as measurer:
            for seed in range(runs):
                found = tune(
                    SessionSubject(problem, device.target, default, offered), measurer,
                    SearchPlan(seconds, seed, regime, strategy="auto"),
                )  # fmt: skip
                chosen.append(found.chosen)
                sessions.append({"chosen": words(found.chosen), "reason": found.reason, "attempted": found.attempted})
                show(f"{name}: session {seed + 1} of {runs}, {found.attempted} attempted, {words(found.chosen)}")
            rows.append({"layer": name, "sessions": sessions, **final(measurer, problem, default, chosen, regime)})
    print("\n\nRepeatability: what sessions with different seeds chose, raced against each other")
    print(f"  {'layer':<17} {'ms':>7} {'gain':>11} {'apart':>6} {'at least':>8}  chosen (sessions)")
    for row in rows:
        gains = f"{min(row['gains']):.2f}-{max(row['gains']):.2f}"
        picks = ", ".join(f"{who} ({n})" for who, n in row["chosen"].items())
        apart, sure = (row["apart"] - 1) * 100, (max(row["apart_low"], 1) - 1) * 100
        print(f"  {row['layer']:<17} {row['default_ms']:>7.3f} {gains:>11} {apart:>5.1f}% {sure:>7.1f}%  {picks}")
    print("  ms: of the default; gain: of the chosen ones over it; apart: slowest over fastest, and its lower bound")
    return rows


def final(
    measurer: Measurer, problem: Problem, default: Candidate, chosen: Sequence[Candidate], regime: str
) -> dict[str, Any]:
    """How far apart the chosen ones are, and how they do against the default."""
    distinct = list(dict.fromkeys(chosen))
    field = list(dict.fromkeys([default, *distinct]))
    measurer.pose(problem, 10_000, regime)
    for candidate in field:
        measurer.attempt(candidate)
    race = measurer.race([default, *field], FINAL)
    times = dict(zip(field, race.samples[1:], strict=True))
    order = sorted(distinct, key=lambda c: relative(times[c], race.samples[0]))
    apart = ratio(times[order[-1]], times[order[0]], 0.05)
    return {
        "default_ms": float(np.median(race.samples[0])) * 1e3,
        "gains": [1.0 if c == default else relative(race.samples[0], times[c]) for c in chosen],
        "control": relative(race.samples[0], times[default]),
        "apart": apart.median if len(distinct) > 1 else 1.0,
        "apart_low": apart.low if len(distinct) > 1 else 1.0,
        "chosen": {words(c): chosen.count(c) for c in order},
    }


def measurer_for(device: Device, isolated: bool) -> Measurer:
    return Isolated(device.name, 20.0) if isolated else LocalMeasurer(device)


def words(candidate: Candidate) -> str:
    """A candidate in short: the end of its solver's name, and its values."""
    solver, config = candidate
    return f"{solver.split('.', 1)[-1]} {'/'.join(str(value) for value in config.values())}"


def show(text: str) -> None:
    """What is going on, on one line that is overwritten."""
    if sys.stderr.isatty():
        print(f"\r{text[:110]:<110}", end="", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", choices=["aa", "repeat", "both"], default="both")
    parser.add_argument("--short", action="store_true", help="about a minute: 15 A/A sessions, 2 of each of 2 layers")
    parser.add_argument("--count", type=int, help="A/A sessions (200)")
    parser.add_argument("--aa-seconds", type=float, default=5.0, help="most seconds of an A/A session (5)")
    parser.add_argument("--runs", type=int, help="sessions of each layer (5)")
    parser.add_argument("--seconds", type=float, help="of each of them (20)")
    parser.add_argument("--layers", nargs="*", choices=list(LAYERS), metavar="LAYER", help="by name; all of them")
    parser.add_argument("--aa-layer", choices=list(LAYERS), metavar="LAYER", default="1x1 256>64 @56")
    parser.add_argument("--regime", choices=["cold", "warm"], default="cold")
    parser.add_argument("--isolated", action="store_true", help="repeatability through a worker, as in real use")
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--json", type=Path, help="write everything there")
    args = parser.parse_args()
    count = args.count or (15 if args.short else 200)
    runs, seconds = args.runs or (2 if args.short else 5), args.seconds or (8.0 if args.short else 20.0)
    names = args.layers or (list(LAYERS)[1:3] if args.short else list(LAYERS))
    device = open_device(args.device)
    before = os.getloadavg()[0]
    result: dict[str, Any] = {"target": str(device.target), "load before": before}
    print(f"{device.target}; load {before:.2f}")
    if args.experiment != "repeat":
        result["aa"] = aa(device, args.aa_layer, count, args.aa_seconds, args.regime)
    if args.experiment != "aa":
        result["repeat"] = repeat(device, names, runs, seconds, args.regime, args.isolated)
        worst = max(row["apart"] for row in result["repeat"])
        result["worst"] = worst if math.isfinite(worst) else None
    result["load after"] = os.getloadavg()[0]
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
