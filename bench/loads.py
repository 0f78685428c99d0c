"""How long loads take, cold (nothing compiled) and warm (a new process, everything compiled), by two definitions.

python bench/loads.py                        ResNet-50 and tiny networks, ours and the engines that are installed
python bench/loads.py resnet50 silero        some, by short name of the catalogue
python bench/loads.py --times 7 --json loads.json silero

*load*: finding and opening the device, reading, compiling and the first inference, in a process that has imported the
engine. *whole*: from the start of the process to the first result; Python and its imports (numpy, the engine) are part
of it. Every load is a process of its own (`load_once`), engines take turns, and the median counts. What an engine keeps
on disk begins empty for a cold load. *own* is processor time of the process, *compilers* of those that it started.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ONCE = Path(__file__).with_name("load_once.py")
#: nothing is known: neither what was tuned here nor what ships
DEFAULTS = {"USER_DB_PATH": "/nonexistent", "SYSTEM_DB_PATH": "/nonexistent", "HEURISTIC_PATH": ""}
TINY = ("silero", "thai2rom-decoder", "speechmos-gru", "ocr-cls")
#: seconds after which a load has failed
PATIENCE = 120

Answer = dict[str, Any]


@dataclass(frozen=True)
class Stored:
    """A model and its inputs in files."""

    name: str
    folder: Path

    @classmethod
    def of(cls, name: str, model: Any, inputs: Mapping[str, Any], folder: Path) -> Stored:
        import numpy as np
        import onnx

        made = cls(name, folder / name)
        made.folder.mkdir(parents=True)
        onnx.save(model, made.folder / "model.onnx")
        np.savez(made.folder / "inputs.npz", **inputs)
        return made


@dataclass
class How:
    """What a load is given."""

    engine: str = "tunewright"
    #: where compiled kernels are kept
    cache: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    #: in front of the command: taskset, for example
    before: Sequence[str] = ()


def load(model: Stored, how: How) -> Answer:
    """One load in a process of its own; RuntimeError says why there is none."""
    environment = {**os.environ, **how.environment}
    if "PYTHONDONTWRITEBYTECODE" not in how.environment:  # an installed package has its bytecode
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if how.engine == "tunewright":
        environment["TUNEWRIGHT_CACHE_DIR"] = str(how.cache or "")
    config = {**(DEFAULTS if how.engine == "tunewright" else {}), **how.config}
    told = {"engine": how.engine, "model": str(model.folder / "model.onnx"),
            "inputs": str(model.folder / "inputs.npz"), "config": config, "begun": time.monotonic()}  # fmt: skip
    command = [*how.before, sys.executable, str(ONCE), json.dumps(told)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        raise RuntimeError(" ".join(done.stderr.split())[-300:] or f"it ended with {done.returncode}") from None


def cold(model: Stored, how: How) -> Answer:
    """With an empty folder for what is compiled."""
    with tempfile.TemporaryDirectory() as folder:
        return load(model, How(how.engine, Path(folder), how.config, how.environment, how.before))


def middle(answers: Sequence[Answer]) -> Answer:
    """The answer whose load is the median."""
    return sorted(answers, key=lambda a: float(a["load"]))[len(answers) // 2]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower, median and upper."""
    if len(values) < 2:
        return (values[0],) * 3
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, median, high


def compilers(answer: Answer) -> dict[str, dict[str, float]]:
    """What processes that were started did, by kind: how many, seconds of all and of the longest, processor time,
    pages read from disk (``reads``), when the first began and the last ended, and most at a time."""
    found: dict[str, dict[str, float]] = {}
    for what in sorted({row["what"] for row in answer["processes"]}):
        rows = [row for row in answer["processes"] if row["what"] == what]
        takes = [row["end"] - row["begin"] for row in rows]
        found[what] = {
            "count": len(rows), "wall": sum(takes), "longest": max(takes),
            "processor": sum(row["user"] + row["system"] for row in rows),
            "system": sum(row["system"] for row in rows), "starting": sum(r["started"] - r["begin"] for r in rows),
            "reads": sum(row["reads"] for row in rows), "from": min(row["begin"] for row in rows),
            "to": max(row["end"] for row in rows), "at_a_time": most_at_a_time(rows),
        }  # fmt: skip
    return found


def most_at_a_time(rows: Sequence[Mapping[str, float]]) -> int:
    """Of these processes."""
    events = sorted([(row["begin"], 1) for row in rows] + [(row["end"], -1) for row in rows])
    most = now = 0
    for _, change in events:
        now += change
        most = max(most, now)
    return most


def told(answer: Answer) -> list[str]:
    """A load in some lines."""
    phases = "  ".join(
        f"{name} {p['wall']:.3f} ({p['own']:.3f}+{p['children']:.3f})" for name, p in answer["phases"].items()
    )
    lines = [f"  seconds (own + compilers' processor time): {phases}"]
    inside = answer.get("compile phases", {})
    if inside:
        lines.append("  compiled.phases: " + "  ".join(f"{name} {took:.3f}" for name, took in inside.items()))
    for what, row in compilers(answer).items():
        lines.append(
            f"  {row['count']:.0f} x {what}: {row['from']:.3f} to {row['to']:.3f}, {row['at_a_time']} at a time; "
            f"their seconds {row['wall']:.2f} (longest {row['longest']:.3f}), processor {row['processor']:.2f}"
            f" ({row['system']:.2f} of it system), waiting {row['wall'] - row['processor']:.2f}, "
            f"starting {row['starting']:.2f}; {row['reads']:.0f} reads from disk"
        )
    return lines


def measure(models: Sequence[Stored], engines: Sequence[str], times: int) -> list[dict[str, Any]]:
    """A row for each model and engine: cold and warm loads, in turns."""
    rows = []
    for model in models:
        answers: dict[str, dict[str, list[Answer]]] = {engine: {"cold": [], "warm": []} for engine in engines}
        failed: dict[str, str] = {}
        with tempfile.TemporaryDirectory() as folder:
            for turn in range(times + 1):
                for engine in engines:
                    if engine in failed:
                        continue
                    try:
                        if engine == "tunewright" and turn:  # others keep nothing on disk
                            answers[engine]["cold"].append(cold(model, How(engine)))
                        found = load(model, How(engine, Path(folder)))
                    except (RuntimeError, subprocess.TimeoutExpired) as error:
                        failed[engine] = str(error)
                        continue
                    if turn:  # the first one compiles, or brings files into memory
                        answers[engine]["warm"].append(found)
        for engine in engines:
            row: dict[str, Any] = {"model": model.name, "engine": engine}
            if engine in failed:
                row["failed"] = failed[engine]
            else:
                row |= {kind: found for kind, found in answers[engine].items() if found}
            rows.append(row)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Medians, with the least of the load in brackets."""
    lines = ["| model | engine | kind | load s | whole s | own | compilers | processes | peak MB |",
             "| --- | --- | --- | --: | --: | --: | --: | --: | --: |"]  # fmt: skip
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['model']} | {row['engine']} | failed: {row['failed'][:80]} | | | | | | |")
        for kind in ("cold", "warm"):
            answers = row.get(kind)
            if not answers:
                continue
            loads, one = [a["load"] for a in answers], middle(answers)
            whole, own = (statistics.median(a[key] for a in answers) for key in ("whole", "own"))
            children = sum(p["children"] for p in one["phases"].values())
            lines.append(
                f"| {row['model']} | {row['engine']} | {kind} | {statistics.median(loads):.3f} ({min(loads):.3f}) "
                f"| {whole:.3f} | {own:.3f} | {children:.2f} | {len(one['processes'])} | {one['peak_mb']:.0f} |"
            )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["resnet50", *TINY], help="short names of the catalogue")
    parser.add_argument("--times", type=int, default=5, help="loads of each kind (default: 5)")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--phases", action="store_true", help="tell where the time of the median load went")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every load with its phases")
    options = parser.parse_args(arguments)
    if options.times < 1:
        parser.error("--times is a positive number")
    import catalogue
    import engines

    try:
        entries = list(catalogue.find(options.models))
    except catalogue.NotFound as error:
        print(f"loads: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        models = [Stored.of(f"{k}-{e.name.replace('/', '-')}", *e.load(), Path(folder)) for k, e in enumerate(entries)]
        rows = measure(models, ["tunewright", *([] if options.no_peers else engines.installed())], options.times)
    for row in rows:
        row["model"] = row["model"].partition("-")[2]
    print("\n".join(table(rows)))
    for row in rows if options.phases else ():
        for kind in ("cold", "warm"):
            if row.get(kind) and row["engine"] == "tunewright":
                print("\n".join([f"{row['model']}, {kind}:", *told(middle(row[kind]))]))
    if options.json is not None:
        options.json.write_text(json.dumps(rows), encoding="utf-8")
    return int(any("failed" in row for row in rows if row["engine"] == "tunewright"))


if __name__ == "__main__":
    sys.exit(main())
