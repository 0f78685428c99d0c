"""What ships: tune networks and common shapes into a knowledge base, train the heuristic on it, pack both, check them.

python bench/ship.py tune --budget 40m --kb FOLDER    networks that are here, then a grid of shapes; Ctrl-C and the same
                                                      command go on; --again goes over all of it once more;
                                                      --device GPU.0: the networks of bench/gpu.py
python bench/ship.py train --kb FOLDER                the heuristic, in FOLDER/heuristic.json (--measure 2.5: its picks)
python bench/ship.py pack --kb FOLDER [--kb OTHER]    src/tunewright/data; further folders are of other machines
python bench/ship.py pack --keep --kb FOLDER          what ships of other machines than FOLDER's stays
python bench/ship.py check                            everything that ships is whole, usable, and nothing is withheld

Tune on a quiet machine. Nothing that is known already is used: no knowledge base but FOLDER, and no heuristic.
docs/shipped.md tells more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import ship_pack
from ship_sources import GRID, Absent, Arrays, Source, grid_model, is_of_grid, is_withheld, sources, work
from tunewright import Core
from tunewright.errors import TunewrightError
from tunewright.heuristic.find import HEURISTIC
from tunewright.tools.tune.command import parse_time
from tunewright.tuning.result_file import SCHEMA as RESULT

#: settings of a tuning that starts from nothing; a folder that does not exist is a knowledge base with nothing in it
ALONE = {"SYSTEM_DB_PATH": ship_pack.NOTHING, "HEURISTIC_PATH": "", "TUNING_MODE": "TUNING_USE_EXISTING"}
#: what was done, in the folder of the knowledge base; dumps of problems
STATE, GRID_FILE = "ship.json", "grid.jsonl"
#: seconds that a network gets at least: loading and profiling it take time, whatever there is to search
LEAST = 12.0
#: of a network, beside what it has to search: so much of the work of one operation
ITSELF = 2.0
#: rows of the grid that are compiled together
TOGETHER = 16
#: a place in the grid counts as less than one in a network: it is tuned by itself, and in nobody's network
GRID_WEIGHT = 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("tune", help="tune what ships")
    one.add_argument("--kb", type=Path, required=True, metavar="FOLDER", help="where what is tuned is kept")
    one.add_argument("--budget", default="40m", help="time for all of it: 90s, 40m, 2h")
    one.add_argument("--device", default="CPU")
    one.add_argument("--only", action="append", metavar="NAME", help="networks with this in their name; grid")
    one.add_argument("--again", action="store_true", help="also networks that were tuned before; they go on")
    two = commands.add_parser("train", help="train the heuristic")
    two.add_argument("--kb", type=Path, action="append", required=True, metavar="FOLDER", help="several: machines")
    two.add_argument("--measure", type=float, default=0.0, metavar="SECONDS", help="measure picks that nobody has")
    three = commands.add_parser("pack", help="write what ships")
    three.add_argument("--kb", type=Path, action="append", required=True, metavar="FOLDER", help="several: machines")
    three.add_argument("--keep", action="store_true", help="what is there of other machines stays")
    three.add_argument("--out", type=Path, default=ship_pack.DATA, metavar="FOLDER")
    four = commands.add_parser("check", help="check what ships")
    four.add_argument("--data", type=Path, default=ship_pack.DATA, metavar="FOLDER")
    options = parser.parse_args()
    if options.command == "tune":
        return tune(options)
    if options.command == "train":
        return train(options)
    if options.command == "pack":
        kbs = {kb: (read_state(kb), read_results(kb)) for kb in options.kb}
        for line in ship_pack.pack(kbs, options.out, options.keep):
            print(line)
    found = ship_pack.check(options.out if options.command == "pack" else options.data)
    lines = [*found.facts, *(f"stale: {text}" for text in found.stale), *(f"WRONG: {text}" for text in found.wrong)]
    print("\n".join(lines))
    return 1 if found.wrong else 0


# ---- what was done ---------------------------------------------------------------------------------------------------


def read_state(kb: Path) -> dict[str, Any]:
    """What `tune` did in a folder: seconds by network, and the problems of the withheld ones."""
    try:
        state: dict[str, Any] = json.loads((kb / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        state = {}
    return {"tuned": {}, "withheld": {}, **state}


def write_state(kb: Path, state: Mapping[str, Any]) -> None:
    made = kb / f"{STATE}.new"
    made.write_text(json.dumps(state, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(made, kb / STATE)


def read_results(kb: Path) -> list[dict[str, Any]]:
    """The result files of a folder, those of networks and of the grid."""
    found = []
    for path in sorted((kb / "results").glob("tune_result_*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("schema") != RESULT:
            raise SystemExit(f"ship: {path} is no result of tuning")
        model = data["model"] if isinstance(data["model"], str) else GRID_FILE
        if is_withheld(model):
            raise SystemExit(f"ship: {path} is of {model}, which is withheld: tune into a folder of its own")
        found.append({**data, "path": path, "model": model})
    return found


# ---- tune ------------------------------------------------------------------------------------------------------------


def tune(options: argparse.Namespace) -> int:
    """Each network gets the part of the time left that its work has among those to come; the grid comes last."""
    begin, budget = time.monotonic(), parse_time(options.budget)
    kb: Path = options.kb.absolute()
    (kb / "results").mkdir(parents=True, exist_ok=True)
    state = read_state(kb)
    wanted = [s for s in sources(options.device) if not options.only or any(text in s.name for text in options.only)]
    queue = list[tuple[Source, float]]()
    seen: set[tuple[Any, ...]] = set()
    for source in wanted:
        if (source.name in state["tuned"] and not options.again) or source.name in state["withheld"]:
            print(f"done before: {source.name}", flush=True)
            continue
        try:
            model, inputs = source.load()
        except Absent as error:
            print(f"skipped: {source.name}: {error}", flush=True)
            continue
        if source.withheld:
            print(f"withheld: {source.name}: its problems are noted, and not tuned", flush=True)
            state["withheld"][source.name] = problems(model, inputs, options.device)
            write_state(kb, state)
            continue
        mine = work(model)
        queue.append((source, ITSELF + len(mine - seen)))
        seen |= mine
    grid = not options.device.startswith("GPU") and (not options.only or "grid" in options.only)
    rest = sum(weight for _, weight in queue) + (GRID_WEIGHT * len(GRID) if grid else 0.0)
    for n, (source, weight) in enumerate(queue, 1):
        left = budget - (time.monotonic() - begin)
        seconds = left * weight / rest
        rest -= weight
        if left < LEAST:
            print(f"the time is over: {len(queue) - n + 1} networks and the grid wait for another call", flush=True)
            return 0
        spent = tune_network(source, kb, max(seconds, LEAST), options.device)
        state["tuned"][source.name] = state["tuned"].get(source.name, 0.0) + spent
        write_state(kb, state)
        print(f"{n:3} of {len(queue)}  {source.name}: {spent:.0f} s, {left - spent:.0f} s left", flush=True)
    left = budget - (time.monotonic() - begin)
    if grid and left >= LEAST:
        spent = tune_grid(kb, left, options.device)
        state["tuned"]["grid"] = state["tuned"].get("grid", 0.0) + spent
        write_state(kb, state)
        print(f"grid: {spent:.0f} s", flush=True)
    return 0


def tune_network(source: Source, kb: Path, seconds: float, device: str) -> float:
    """As a user would, in a process of its own; how long it took."""
    model, inputs = source.load()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        onnx.save(model, folder / source.file)
        arguments = ["tune", source.file]
        for k, (name, array) in enumerate(inputs.items()):
            np.save(folder / f"{k}.npy", array)
            arguments += ["--input", f"{name}={k}.npy"]
        return tunewright([*arguments, "--device", device, "--budget", f"{seconds:.1f}s"], kb, folder)


def tune_grid(kb: Path, seconds: float, device: str) -> float:
    """The shapes of the grid, each by itself."""
    begin = time.monotonic()
    dump = kb / GRID_FILE
    if not dump.exists():
        lines: dict[str, str] = {}
        for at in range(0, len(GRID), TOGETHER):
            rows = GRID[at : at + TOGETHER]
            lines |= dumped(grid_model(rows), {}, device, lambda p, rows=rows: is_of_grid(p["inputs"], rows))
        made = kb / f"{GRID_FILE}.new"
        made.write_text("".join(f"{lines[key]}\n" for key in sorted(lines)), encoding="utf-8")
        os.replace(made, dump)
        print(f"grid: {len(lines)} problems in {time.monotonic() - begin:.0f} s", flush=True)
    left = max(seconds - (time.monotonic() - begin), LEAST)
    tunewright(["tune", GRID_FILE, "--device", device, "--budget", f"{left:.1f}s"], kb, kb)
    return time.monotonic() - begin


def tunewright(arguments: Sequence[str], kb: Path, folder: Path) -> float:
    """A command of Tunewright that writes to a knowledge base; how long it took."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "tunewright", *arguments, "--result", str(kb / "results")]
    for key, value in {**ALONE, "USER_DB_PATH": kb}.items():
        command += ["-c", f"{key}={value}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"ship: tunewright {' '.join(arguments[:2])} failed\n{done.stderr[-2000:]}", file=sys.stderr, flush=True)
    return time.monotonic() - begin


def problems(model: onnx.ModelProto, inputs: Arrays, device: str) -> list[str]:
    """Keys of the problems that a network poses, as it is without any tuning."""
    return sorted(dumped(model, inputs, device))


def dumped(model: onnx.ModelProto, inputs: Arrays, device: str, wanted: Any = lambda problem: True) -> dict[str, str]:
    """Lines of a dump of a network's problems, by key; it runs once where inputs are given."""
    with tempfile.TemporaryDirectory() as temporary:
        file, dump = Path(temporary) / "model.onnx", Path(temporary) / "dump.jsonl"
        onnx.save(model, file)
        config = {**ALONE, "USER_DB_PATH": ship_pack.NOTHING, "ENABLE_TUNE_DUMP": "YES", "TUNE_DUMP_PATH": str(dump)}
        compiled = Core().compile_model(file, device, config)
        if inputs:
            compiled(inputs)
        lines = dump.read_text(encoding="utf-8").splitlines()
    found = ((json.loads(line), line) for line in lines)
    return {entry["key"]: line for entry, line in found if wanted(entry["problem"])}


# ---- train -----------------------------------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> int:
    """Of all machines one heuristic, in the first folder."""
    kbs: list[Path] = [kb.absolute() for kb in options.kb]
    results = [result for kb in kbs for result in read_results(kb)]
    withheld = {key for kb in kbs for keys in read_state(kb)["withheld"].values() for key in keys}
    for kb in kbs:
        strangers = ship_pack.strangers(kb, results)
        leaked = [key for key in strangers if key in withheld]
        if leaked:
            print(f"ship: {kb} has {len(leaked)} problems of withheld networks alone: {leaked[0]}", file=sys.stderr)
            return 1
        if strangers:
            print(f"{kb}: {len(strangers)} problems are of no network: {strangers[0]}", flush=True)
    command = [sys.executable, "-m", "tunewright", "kb", "train", *networks(results)]
    command += ["--out", str(kbs[0] / HEURISTIC)]
    for kb in kbs:
        command += ["--from", str(kb)]
    for key, value in {**ALONE, "USER_DB_PATH": kbs[0]}.items():
        command += ["-c", f"{key}={value}"]
    if options.measure:
        command += ["--measure", str(options.measure)]
    return subprocess.run(command, check=False).returncode


def networks(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """Files of networks: the grid is none, and cannot be left out as one."""
    return [str(result["path"]) for result in results if result["kind"] == "model"]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TunewrightError as error:
        print(f"ship: {error}", file=sys.stderr)
        sys.exit(2)
