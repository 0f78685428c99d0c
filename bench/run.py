"""``make bench``: Tunewright and the other engines that are installed, model by model, in turns.

python bench/run.py                          the catalogue: 33 networks in sets, about 15 minutes (--list names them)
python bench/run.py --quick                  six of them, in 3 minutes
python bench/run.py resnet50 silero m.onnx   some, by short name, set, part of a name (light/, ddddocr), or files
python bench/run.py --all                    every light model, own network and trained model
python bench/run.py --tune 120 resnet50      tune each model first, from nothing; then tuned, as shipped, defaults
python bench/run.py --kb folder              the same with what is tuned in a folder (--tune adds to it)
python bench/run.py --json figures.json --continue            all that is not in the file yet
python bench/run.py --from figures.json --chart figures.png   print and draw again, measure nothing

docs/benchmark-cpu.md says how it is measured, and what is not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from rich.console import Console

import catalogue
import engines
import results
import tables
import turns
from tunewright.heuristic.find import HEURISTIC
from tunewright.knowledge.open_databases import system_folder
from tunewright.settings import Settings
from tunewright.tools.shared.console import environment

#: What ours runs with, by the name of its row: what was tuned here; as it ships; the heuristic alone; nothing known.
#: A folder that does not exist is a knowledge base with nothing in it.
NOTHING = "/nonexistent"
SHIPPED = system_folder(Settings())
OURS: dict[str, dict[str, Any]] = {
    "tuned": {},  # over what ships, as a user has it
    "shipped": {"USER_DB_PATH": NOTHING},
    "heuristic": {
        "USER_DB_PATH": NOTHING, "SYSTEM_DB_PATH": NOTHING,
        "HEURISTIC_PATH": str(SHIPPED / HEURISTIC) if (SHIPPED / HEURISTIC).exists() else "",
    },
    "defaults": {"USER_DB_PATH": NOTHING, "SYSTEM_DB_PATH": NOTHING, "HEURISTIC_PATH": ""},
    "avx2": {"USER_DB_PATH": NOTHING, "SYSTEM_DB_PATH": NOTHING, "HEURISTIC_PATH": "", "CPU_ISA": "X86-64-V3"},
}  # fmt: skip
#: of OpenVINO both are measured, and the better one counts
PINNINGS = {"pinned": {"ENABLE_CPU_PINNING": True}, "unpinned": {"ENABLE_CPU_PINNING": False}}
#: inferences of a turn at least, and seconds of measuring a model after which no new round begins
LEAST, LIMIT = 2, 40.0


class Refused(Exception):
    """What was asked for cannot be done; says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    try:
        return run(options, out)
    except (Refused, catalogue.NotFound) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="short name, set, part of a name, or file")
    parser.add_argument("--all", action="store_true", help="every model there is")
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(catalogue.QUICK)}")
    parser.add_argument("--list", action="store_true", help="names of the catalogue, by set")
    parser.add_argument("--device", default="CPU", help="devices of ours, with commas between them (default: CPU)")
    parser.add_argument("--ours", default="", help=f"rows of ours, of {', '.join(OURS)} (default: what makes sense)")
    parser.add_argument("--tune", type=float, default=0.0, metavar="SECONDS", help="tune each model for so long first")
    parser.add_argument("--kb", metavar="FOLDER", help="where what is tuned is kept (default: a new, empty one)")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--rounds", type=int, help="turns of each engine (default: 10; 8 with --quick)")
    parser.add_argument("--seconds", type=float, default=0.12, help="length of a turn (default: 0.12)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, with raw samples, as they come")
    parser.add_argument("--continue", dest="go_on", action="store_true", help="skip models that are in --json's file")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="print and draw what --json wrote")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="draw the speed-ups (PNG)")
    parser.add_argument("--front", type=Path, metavar="FILE", help="draw them in little room, sorted (PNG)")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables in Markdown")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, out: Console) -> int:
    if options.list:
        for name, entries in catalogue.SETS.items():
            out.print(f"{name}: {', '.join(entries)}")
        return 0
    for file in (options.json, options.chart, options.front, options.markdown):
        if file is not None and not file.absolute().parent.is_dir():
            raise Refused(f"there is no folder {file.absolute().parent} for {file.name}")
    for file in (options.chart, options.front):
        if file is not None and file.suffix.lower() != ".png":
            raise Refused(f"{file.name}: a chart is a PNG file")
    if options.source is not None:
        report, ended = read(options.source), False
    else:
        with tempfile.TemporaryDirectory() as folder:
            report, ended = measure(options, Path(options.kb or folder).absolute())
    tables.show(report, out)
    if options.markdown is not None:
        options.markdown.write_text(tables.markdown(report), encoding="utf-8")
    draw(report, options.chart, options.front)
    if ended:
        return 130
    ours = set(results.ours(report))
    mine = [(model, row) for model in report["models"] for row in model.get("rows", []) if row["engine"] in ours]
    return int(any("failed" in row or results.is_wrong(model, row) for model, row in mine))


def draw(report: results.Report, whole: Path | None, front: Path | None) -> None:
    """The charts that are asked for."""
    if whole is None and front is None:
        return
    try:
        import chart
    except ImportError as error:
        raise Refused(f"a chart needs matplotlib (pip install -e '.[plot]'): {error}") from None
    try:
        if whole is not None:
            chart.draw(report, whole)
        if front is not None:
            chart.draw_front(report, front)
    except ValueError as error:
        raise Refused(f"no chart: {error}") from None


def measure(options: argparse.Namespace, kb: Path) -> tuple[results.Report, bool]:
    """The report, and whether Ctrl-C ended it before its time."""
    progress = Console(stderr=True, highlight=False)
    entries = chosen(options)
    labels, notes = rows_to_measure(options, kb)
    rounds = options.rounds if options.rounds is not None else 8 if options.quick else 10
    if rounds < 1 or options.seconds <= 0 or options.tune < 0:
        raise Refused("--rounds, --seconds and --tune are positive numbers")
    report: results.Report = {
        "schema": results.SCHEMA, "environment": environment(), "machine": engines.machine(),
        "options": {"rounds": rounds, "seconds": options.seconds, "least": LEAST, "tune": options.tune},
        "withheld": list(catalogue.WITHHELD),
        "engines": list(labels), "versions": {}, "notes": notes, "models": [],
    }  # fmt: skip
    if options.go_on:
        go_on(report, options.json)
    if os.getloadavg()[0] > engines.THREADS:
        notes.append(f"The machine was not quiet (load {os.getloadavg()[0]:.1f} before the first turn).")
        progress.print(notes[-1], markup=False)
    done = {m["model"] for m in report["models"]}
    for number, entry in enumerate(entries, 1):
        if entry.name in done:
            continue
        progress.print(f"{number} of {len(entries)}: {entry.name} ...", style="dim", markup=False, soft_wrap=True)
        begin = time.monotonic()
        try:
            model = one(entry, labels, options, kb, rounds)
        except KeyboardInterrupt:
            progress.print("stopped: what follows is what was measured until then")
            return report, True
        model["load"], model["seconds"] = os.getloadavg()[0], time.monotonic() - begin
        report["models"].append(model)
        for row in model.get("rows", []):
            if "version" in row:
                report["versions"].setdefault(row["engine"].partition(",")[0], row["version"])
        if options.json is not None:  # as far as it is
            write(options.json, report)
        progress.print(f"  {said(report, model)}", style="dim", markup=False, soft_wrap=True)
    for line in tables.skipped(report):
        progress.print(line, style="dim", markup=False, soft_wrap=True)
    return report, False


def chosen(options: argparse.Namespace) -> list[catalogue.Entry]:
    """The models, each once."""
    if options.all:
        found = list(catalogue.everything())
    else:
        found = list(catalogue.find(catalogue.QUICK if options.quick and not options.models else options.models))
    return list({entry.name: entry for entry in found}.values())


def rows_to_measure(options: argparse.Namespace, kb: Path) -> tuple[turns.Labels, list[str]]:
    """Engines by the labels of their rows, and what to tell about those that are missing."""
    notes = []
    knowledge = (SHIPPED / "system.jsonl").exists()
    if options.ours:
        names = options.ours.split(",")
        unknown = [name for name in names if name not in OURS]
        if unknown:
            raise Refused(f"there is no row {unknown[0]!r} of ours; there are {', '.join(OURS)}")
    else:
        there = {"tuned": bool(options.tune or options.kb), "shipped": knowledge,
                 "heuristic": (SHIPPED / HEURISTIC).exists(), "defaults": True}  # fmt: skip
        names = [name for name, is_there in there.items() if is_there]
        missing = [name for name in ("shipped", "heuristic") if not there[name]]
        if missing:
            notes.append(f"Nothing ships for: {', '.join(missing)}.")
    devices = [name.strip().upper() for name in options.device.split(",")]
    labels: turns.Labels = {}
    for device in devices:
        # a second device is a second column: of what counts
        for name in names if device == devices[0] else names[:1]:
            where = {"USER_DB_PATH": str(kb)} if name == "tuned" else {}
            label = f"{results.OURS}{name}" + (f", {device}" if device != devices[0] else "")
            labels[label] = "tunewright", {"device": device, **OURS[name], **where}
    if options.no_peers:
        return labels, notes
    there = set(engines.installed())
    if "onnxruntime" in there:
        labels[results.ORT] = "onnxruntime", {}
    if "openvino" in there:
        labels |= {f"{results.OPENVINO}, {how}": ("openvino", dict(c)) for how, c in PINNINGS.items()}
    absent = [name for package, name in engines.PEERS.items() if package not in there]
    if absent:
        notes.append(f"Not installed, and so not compared: {', '.join(absent)} (pip install -e '.[peers]').")
    return labels, notes


def go_on(report: results.Report, file: Path | None) -> None:
    """Take over what was measured before, if it was measured here and in the same way."""
    if file is None:
        raise Refused("--continue needs the file: --json FILE")
    if not file.exists():
        return
    before = read(file)
    for what in ("machine", "options", "engines"):
        if before[what] != report[what]:
            raise Refused(f"{file} cannot be continued: its {what} are {before[what]}, and now {report[what]}")
    if before["environment"]["tunewright"] != report["environment"]["tunewright"]:
        raise Refused(f"{file} cannot be continued: it is of Tunewright {before['environment']['tunewright']}")
    report["models"] = [m for m in before["models"] if "skipped" not in m]
    report["versions"] = before["versions"]


def one(
    entry: catalogue.Entry, labels: turns.Labels, options: argparse.Namespace, kb: Path, rounds: int
) -> dict[str, Any]:
    """A model's rows, or why it was skipped."""
    found: dict[str, Any] = {"model": entry.name, "set": entry.group}
    try:
        model, inputs = entry.load()
        if options.tune:
            devices = dict.fromkeys(c["device"] for label, (_, c) in labels.items() if "tuned" in label)
            found["tuning_seconds"] = [tune(entry.name, model, inputs, options, kb, device) for device in devices]
        with tempfile.TemporaryDirectory() as cache:  # the row that counts starts with nothing compiled, then again
            first = next(iter(labels))
            package, config = labels[first]
            own = {**labels, first: (package, {**config, "CACHE_DIR": cache})}
            rows = turns.measure(
                model, inputs, own, rounds, options.seconds, least=LEAST, limit=LIMIT, reference=results.ORT,
                twice=first,
            )  # fmt: skip
    except Exception as error:  # not here, not to be fetched, or not to be tuned: the others can be measured
        return found | {"skipped": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    for row in rows:
        if row.get("error") == float("inf"):
            row["error"] = None  # there is no such number in JSON
    return found | {"rows": rows}


def said(report: results.Report, model: dict[str, Any]) -> str:
    """A model in a line."""
    if "skipped" in model:
        return f"skipped: {model['skipped']}"
    ours = results.ours(report)
    found = results.over(model, ours[0]) if ours else None
    first = next((r for r in model["rows"] if results.runs(r)), None)
    told = "nothing runs it" if first is None else f"{first['engine']} {tables.times(first['median_ms'])} ms"
    faster = f", {tables.spread(found)} times as fast as {found.peer}" if found else ""
    return f"{told}{faster}; {model['seconds']:.0f} s, load {model['load']:.1f}"


def tune(
    name: str, model: onnx.ModelProto, inputs: engines.Arrays, options: argparse.Namespace, kb: Path, device: str
) -> float:
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
        command += ["--device", device, "--budget", f"{options.tune}s", "-c", f"USER_DB_PATH={kb}"]
        if options.kb:  # `tunewright kb train` learns from them which problem belongs to which network
            (kb / "results").mkdir(parents=True, exist_ok=True)
            command += ["--result", str(kb / "results")]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Refused(f"tuning failed: {done.stderr}")
    return time.perf_counter() - begin


def write(file: Path, report: results.Report) -> None:
    """A line for each model; the file is whole at any time."""
    heads = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in report.items() if key != "models"]
    models = ",\n".join(json.dumps(model) for model in report["models"])
    part = file.with_name(f"{file.name}.part")
    part.write_text("{" + ",\n".join([*heads, f'"models": [\n{models}\n]']) + "}\n", encoding="utf-8")
    part.replace(file)


def read(file: Path) -> results.Report:
    """What `write` has written."""
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{file} cannot be read: {error}") from None
    schema = report.get("schema") if isinstance(report, dict) else None
    if schema != results.SCHEMA:
        raise Refused(f"{file} is not a file of this benchmark: its schema is {schema}, not {results.SCHEMA}")
    return report


if __name__ == "__main__":
    sys.exit(main())
