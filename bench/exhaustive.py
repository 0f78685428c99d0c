"""Does a short search find what an exhaustive one finds? For layers whose spaces are small enough.

Each layer of a model is searched for --seconds by the default strategy, in an empty knowledge base, and then a whole
space is measured, candidate by candidate, within --most seconds. The winners of both, and the default twice, race in
turns of random order. Told is the time of the exhaustive winner as a share of the short search's: 1.0 is as fast.

    python bench/exhaustive.py mobilenet_v2 --layers 20 --seconds 5 --space 300 --most 120 --json exhaustive.json

Layers with larger spaces are left out, and counted. An exhaustive search that ran out of time is told as such.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import catalogue
from tunewright import Core
from tunewright.devices.base import Device
from tunewright.knowledge.record import Ratio
from tunewright.measure.base import Candidate
from tunewright.measure.isolated import measurer_for
from tunewright.measure.statistics import ratio
from tunewright.runtime.insight.explain import steps
from tunewright.settings import Settings
from tunewright.solvers.base import Problem
from tunewright.tools.shared.console import environment
from tunewright.tuning.session import Outcome
from tunewright.tuning.tuner import Tuner

SCHEMA = "tunewright.exhaustive/1"
#: turns of the winners, and the risk of an interval
ROUNDS, ALPHA = 96, 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a name of the catalogue, or a file")
    parser.add_argument("--layers", type=int, default=20, help="most layers of all models together")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a short search")
    parser.add_argument("--most", type=float, default=120.0, help="seconds of an exhaustive one at most")
    parser.add_argument("--space", type=int, default=300, help="candidates of a layer at most")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, layer by layer")
    given = parser.parse_args()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    report: dict[str, Any] = {"schema": SCHEMA, "environment": environment(), "load": os.getloadavg()[0], "layers": []}
    left_out = 0
    for name, problem, device in layers(given.models):
        if len(report["layers"]) >= given.layers:
            break
        with tempfile.TemporaryDirectory() as folder:
            found = one(problem, device, Path(folder), given)
        if found is None:
            left_out += 1
            continue
        report["layers"].append({"model": name, "problem": problem.key(), **found})
        print(said(report["layers"][-1]), flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    near = sum(row["reached"][0] >= 0.97 for row in report["layers"])
    print(f"{near} of {len(report['layers'])} layers within 3 %; {left_out} layers with larger spaces left out")
    return 0


def layers(models: list[str]) -> Iterator[tuple[str, Problem, Device]]:
    """Each problem of the models once."""
    seen: set[str] = set()
    for entry in catalogue.find(models):
        model, inputs = entry.load()
        compiled = Core().compile_model(model.SerializeToString())
        compiled(inputs)
        for plan in compiled.program.plans:
            for within, step, _ in steps(plan):
                problem = Problem.of(step.node)
                if step.choice is not None and not step.choice.solver.host and problem.key() not in seen:
                    seen.add(problem.key())
                    yield entry.name, problem, within.device


def one(problem: Problem, device: Device, folder: Path, given: argparse.Namespace) -> dict[str, Any] | None:
    """The figures of a layer; None where its space is too large, or there is nothing to choose."""
    short = tuner(folder / "short", "AUTO")
    default = short.default(problem, device)
    fit = [s for s in short.candidates if not s.host and short.why_not(s, problem, device) is None]
    size = sum(math.inf if (rows := s.space(problem, device.target).rows) is None else len(rows) for s in fit)
    if not 2 < size <= given.space:
        return None
    mine: Candidate = (default.solver.id, default.config)
    brief, took = searched(short, problem, device, given.seconds)
    whole, long = searched(tuner(folder / "whole", "exhaustive"), problem, device, given.most)
    if brief is None or whole is None:
        return None
    first, best = fastest(brief, mine), fastest(whole, mine)
    measurer = measurer_for(device, short.settings)
    why = measurer.pose(problem, 0, "layer")
    if why is not None:
        return None
    rows = measurer.race([mine, mine, first, best], ROUNDS).samples
    return {
        "candidates": size, "short": {"seconds": took, "compared": brief.attempted, "found": said_of(first)},
        "exhaustive": {
            "seconds": long, "compared": whole.attempted, "found": said_of(best), "is whole": whole.ended,
        },
        "default": median(rows[0]), "control": numbers(ratio(rows[0], rows[1], ALPHA)),
        "gain": numbers(ratio(rows[0], rows[2], ALPHA)), "reached": numbers(ratio(rows[3], rows[2], ALPHA)),
    }  # fmt: skip


def tuner(folder: Path, strategy: str) -> Tuner:
    nothing = {"SYSTEM_DB_PATH": str(folder / "nothing"), "HEURISTIC_PATH": "", "TUNE_RESULT_PATH": "", "CACHE_DIR": ""}
    return Tuner(Settings.make({**nothing, "USER_DB_PATH": str(folder), "AUTO_TUNE_MODE": strategy}))


def searched(made: Tuner, problem: Problem, device: Device, seconds: float) -> tuple[Outcome | None, float]:
    begin = time.monotonic()
    default = made.default(problem, device)
    known = made.known(problem, device, default)
    found = made.tune(problem, device, default, known, seconds=seconds, regime="layer", decide=False)
    return found, time.monotonic() - begin


def fastest(outcome: Outcome, default: Candidate) -> Candidate:
    """What a search proposes; the default where nothing seems faster."""
    gains = {(m.key.solver, m.config): m.evidence.gain.median for m in outcome.records}
    best = max(gains, key=lambda who: gains[who], default=default)
    return best if gains.get(best, 0.0) > 1 else default


def said_of(candidate: Candidate) -> str:
    return f"{candidate[0]} {dict(candidate[1])}"


def numbers(found: Ratio) -> list[float]:
    return [found.median, found.low, found.high, found.pairs]


def said(row: dict[str, Any]) -> str:
    reached, gain, brief, long = row["reached"], row["gain"], row["short"], row["exhaustive"]
    whole = "" if row["exhaustive"]["is whole"] else ", not the whole space"
    return (
        f"{row['model']}: {reached[0]:.3f} ({reached[1]:.3f}..{reached[2]:.3f}) of the exhaustive winner's speed,"
        f" gain {gain[0]:.3f}; {brief['compared']} of {row['candidates']} candidates in {brief['seconds']:.0f} s,"
        f" {long['compared']} in {long['seconds']:.0f} s{whole}"
    )


if __name__ == "__main__":
    sys.exit(main())
