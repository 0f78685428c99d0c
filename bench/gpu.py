"""``make bench-gpu``: Tunewright and torch on a GPU, network by network, in one process and in turns.

python bench/gpu.py                                    the networks of the goals: ten cases, some ten minutes
python bench/gpu.py --models resnet50:1,bert:1x128     some; a name is network:batch, or bert:batch x tokens
python bench/gpu.py --rows eager,graph,compile,ours --seconds 3
python bench/gpu.py --models resnet50:64 --tune 90 --curve 30,60 --from-nothing    how fast is tuning?
python bench/gpu.py --models resnet50:1 --max-autotune 250    torch.compile's own tuning, within 250 s
python bench/gpu.py --limit 560 --json figures.json    stops before a machine's time is over
python bench/gpu.py --from figures.json                prints again, measures nothing
python bench/gpu.py --device cpu --tiny                tries everything without a GPU: times mean nothing

docs/benchmark-gpu.md says how it is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu_tables

if TYPE_CHECKING:
    import torch

    from gpu_ours import Ours
    from gpu_peers import Peers
    from gpu_sources import Arrays, Case
    from gpu_turns import Ready

SCHEMA = "tunewright.bench-gpu/1"
MODELS = (
    "resnet50:1", "resnet50:64", "bert:1x128", "bert:32x128", "yolo:1", "yolo:8", "unet:1", "unet:8", "efficientnet:1",
    "efficientnet:8",
)  # fmt: skip
PEERS = ("eager", "graph", "compile", "compile-graph")
SLOW = ("tuned", "max-autotune")
ROWS = (*PEERS, "ours", "shipped", *SLOW)
#: what each precision is called by us
HINTS = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
#: seconds that are kept for compiling what was tuned, and less than which tuning is not worth while
COMPILING, LEAST_TUNING = 20.0, 5.0
#: options that figures depend on
KEPT = (
    "seconds", "turn", "precision", "definitions", "tune", "curve", "from_nothing", "max_autotune", "tiny", "ours"
)  # fmt: skip


class Refused(Exception):
    """What was asked for cannot be done; says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        report = read(options.source) if options.source else measured(check(options))
    except Refused as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    for line in gpu_tables.text(report):
        print(line)
    ours = [r for m in report["models"] for r in m["rows"] if r["ours"]]
    skipped = any("skipped" in m for m in report["models"])
    return int(skipped or any(not gpu_tables.is_right(r) for r in ours))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="network:batch, with commas (default: the goals')")
    parser.add_argument("--rows", default="", help=f"of {', '.join(ROWS)} (default: all but the last two)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of measuring each row (default: 2)")
    parser.add_argument("--turn", type=float, default=0.03, help="seconds of a turn (default: 0.03)")
    parser.add_argument("--precision", choices=[*HINTS], default="float16", help="of everybody (default: float16)")
    parser.add_argument(
        "--source",
        dest="definitions",
        choices=["own", "packages"],
        default="own",
        help="definitions: ours in plain torch, or torchvision's, timm's, transformers' if installed",
    )
    parser.add_argument("--tune", type=float, default=0.0, metavar="SECONDS", help="tune each network: row 'tuned'")
    parser.add_argument("--curve", default="", metavar="S,S", help="also measure after so many seconds of tuning")
    parser.add_argument("--from-nothing", action="store_true", help="tune without what ships (an empty knowledge base)")
    parser.add_argument("--kb", type=Path, metavar="FOLDER", help="where what is tuned is kept (default: a new one)")
    parser.add_argument(
        "--max-autotune",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="torch.compile's max-autotune, in a box of so many seconds for each network",
    )
    parser.add_argument("--load", action="store_true", help="measure a load with a warm cache, in a new process")
    parser.add_argument("--box", type=float, default=120.0, help="seconds for preparing any other row (default: 120)")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which nothing new begins")
    parser.add_argument("--device", default="cuda", help="of torch: cuda, cuda:1, cpu (default: cuda)")
    parser.add_argument("--ours", default="", metavar="DEVICE", help="of ours (default: the same GPU; the interpreter)")
    parser.add_argument("--tiny", action="store_true", help="small networks, to try the benchmark itself")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="of compiled kernels (default: a new, empty one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures after each row")
    parser.add_argument("--from", dest="source", type=Path, metavar="FILE", help="print what --json wrote")
    return parser.parse_args(arguments)


def check(options: argparse.Namespace) -> argparse.Namespace:
    """The options, made complete; what is wrong with them is told before anything takes long."""
    default = ("eager", "ours") if options.device == "cpu" else (*PEERS, "ours", "shipped")
    rows = options.rows.split(",") if options.rows else list(default)
    rows += ["tuned"] * bool(options.tune) + ["max-autotune"] * bool(options.max_autotune)
    unknown = [row for row in rows if row not in ROWS]
    if unknown:
        raise Refused(f"there is no row {unknown[0]!r}; there are {', '.join(ROWS)}")
    options.rows = [row for row in ROWS if row in rows]
    if "tuned" in options.rows and not options.tune and options.kb is None:
        raise Refused("the row 'tuned' needs --tune SECONDS, or --kb FOLDER with what was tuned before")
    if "max-autotune" in options.rows and not options.max_autotune:
        raise Refused("the row 'max-autotune' needs its time: --max-autotune SECONDS")
    if min(options.seconds, options.turn, options.box, options.limit) <= 0 or options.tune < 0:
        raise Refused("times are positive numbers of seconds")
    try:
        options.curve = sorted(float(part) for part in options.curve.split(",") if part)
    except ValueError:
        raise Refused(f"--curve {options.curve}: seconds, with commas between them") from None
    if options.curve and not (options.tune > options.curve[-1] and options.curve[0] > 0):
        raise Refused("--curve names times before the end of --tune SECONDS")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise Refused(f"there is no folder {options.json.absolute().parent} for {options.json.name}")
    options.models = [name for name in options.models.split(",") if name]
    options.gpu = options.device != "cpu"
    if not options.ours:
        options.ours = f"GPU.{options.device.partition(':')[2] or 0}" if options.gpu else "interpreter"
    if options.ours == "interpreter":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
    try:
        import torch
    except ImportError as error:
        raise Refused(f"torch cannot be imported ({error}): pip install 'tunewright[cuda]'") from None
    if options.gpu and not torch.cuda.is_available():
        raise Refused("torch finds no GPU; --device cpu --tiny tries the benchmark itself")
    import gpu_sources

    try:
        for name in options.models:
            gpu_sources.parse(name, options.tiny)
    except gpu_sources.Refused as error:
        raise Refused(str(error)) from None
    return options


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- measuring ------------------------------------------------------------------------------------------------------


def measured(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from gpu_turns import TimeUp, reason

    device = torch.device(options.device)
    machine = torch.cuda.get_device_name(device) if options.gpu else "no GPU: times mean nothing"
    report: dict[str, Any] = {
        "schema": SCHEMA, "machine": machine, "versions": versions(),
        "options": {name: getattr(options, name) for name in KEPT}, "models": [],
    }  # fmt: skip
    end = time.monotonic() + options.limit
    lost = ""
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            begin = time.monotonic()
            entry: dict[str, Any] = {"model": name, "rows": []}
            report["models"].append(entry)
            if lost or time.monotonic() > end:
                entry["skipped"] = lost or f"no time was left of {options.limit:.0f} s"
                continue
            say(f"{name} ...")
            try:
                Network(name, entry, options, Path(folder), end, lambda: write(options.json, report)).run(device)
            except KeyboardInterrupt:
                entry["skipped"] = "stopped"
                break
            except (Exception, TimeUp) as error:  # the other networks can be measured
                entry["skipped"] = reason(error)
                say(f"  skipped: {entry['skipped']}")
            entry["seconds"] = time.monotonic() - begin
            write(options.json, report)
            gc.collect()
            try:
                if "torch._dynamo" in sys.modules:
                    torch.compiler.reset()
                if options.gpu:
                    torch.cuda.synchronize()
                    torch.cuda.empty_cache()
            except RuntimeError as error:  # a kernel took the context with it: nothing runs in this process any more
                lost = f"{name} has broken the GPU's context, run the others again: {reason(error)}"
    write(options.json, report)
    return report


def versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from tunewright import __version__

    found = [f"Tunewright {__version__}"]
    for package in ("torch", "triton", "torchvision", "timm", "transformers", "onnx"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found.append(f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    return ", ".join(found)


class Network:
    """One network: rows are prepared, take turns, and are written down; those that take minutes come after the others
    have figures, and then everybody takes turns again."""

    def __init__(
        self, name: str, entry: dict[str, Any], options: argparse.Namespace, folder: Path, end: float,
        save: Callable[[], None],
    ) -> None:  # fmt: skip
        self.name, self.entry, self.options, self.end, self.save = name, entry, options, end, save
        self.folder = folder / name.replace(":", "_")
        self.folder.mkdir()
        self.cache = options.cache or folder / "cache"
        self.ready: dict[str, Ready] = {}

    def run(self, device: torch.device) -> None:
        import torch

        import gpu_sources
        from gpu_ours import Ours
        from gpu_peers import Peers
        from gpu_turns import boxed

        options, begin = self.options, time.monotonic()
        file = self.folder / "model.onnx"
        with boxed(self.box()):
            self.case: Case = gpu_sources.make(self.name, device, options.definitions, options.tiny)
            try:
                self.entry["exporter"] = gpu_sources.export(self.case, file)
            except gpu_sources.Refused as error:
                if self.case.source == "own":
                    raise
                say(f"  {self.case.source}'s: {error}; ours instead")
                self.case = gpu_sources.make(self.name, device, "own", options.tiny)
                self.entry["exporter"] = gpu_sources.export(self.case, file)
            self.entry["source"] = self.case.source
            self.expected: Arrays = self.case.expected(device)
        say(f"  {self.case.source}, exported by {self.entry['exporter']} in {time.monotonic() - begin:.1f} s")
        dtype = getattr(torch, options.precision)
        peers = Peers(self.case, device, dtype)
        config = {"INFERENCE_PRECISION_HINT": HINTS[options.precision], "CACHE_DIR": str(self.cache)}
        kb = (options.kb or self.folder / "kb").absolute()
        ours = Ours(file, self.case.inputs, options.ours, config, kb, options.from_nothing)
        for phase in self.phases(peers, ours):
            for label, make, box in phase:
                self.prepare(label, make, box)
            self.turns()
        if options.load and self.left() > 0:
            say("  load ...")
            kind = "shipped" if "shipped" in options.rows else "ours"
            self.entry["load"] = ours.load(kind, min(options.box, self.left()))
            self.save()

    def phases(self, peers: Peers, ours: Ours) -> Iterator[list[tuple[str, Callable[[], Ready], float]]]:
        """What is prepared before each round of turns: a row's label, what makes it, and how long that may take."""
        from functools import partial

        import gpu_peers

        rows, box = self.options.rows, self.options.box
        quick = [(n, partial(make, peers, n), box) for n, make in gpu_peers.ROWS.items() if n in rows]
        quick += [(n, partial(ours.row, n, n), box) for n in ("ours", "shipped") if n in rows]
        if quick:
            yield quick
        if "tuned" in rows:
            times = [*self.options.curve, self.options.tune] if self.options.tune else []
            labels = [*(f"tuned {t:g} s" for t in times[:-1]), "tuned"]
            todo = [b - a for a, b in zip([0.0, *times], times, strict=False)] or [0.0]
            # a budget is kept by who has it; the box is for one that is not
            yield [(y, partial(self.tuned, ours, y, t), 2 * t + box) for y, t in zip(labels, todo, strict=True)]
        if gpu_peers.AUTOTUNED in rows:
            autotuned = partial(peers.autotuned, gpu_peers.AUTOTUNED)
            yield [(gpu_peers.AUTOTUNED, autotuned, self.options.max_autotune)]

    def tuned(self, ours: Ours, label: str, seconds: float) -> Ready:
        facts = {}
        if seconds:
            budget = min(seconds, self.box(math.inf) - COMPILING)
            if budget < min(seconds, LEAST_TUNING):
                raise Refused("no time was left for tuning")
            if budget < seconds:
                say(f"  {label}: only {budget:.0f} s are left for tuning")
            facts = ours.tune(budget)
        made = ours.row(label, "tuned")
        made.facts |= facts
        return made

    def left(self) -> float:
        return self.end - time.monotonic()

    def box(self, seconds: float | None = None) -> float:
        """Seconds that a preparation may take: what is needed for the turns is left over."""
        turns = self.options.seconds * (len(self.ready) + 1)
        return min(self.options.box if seconds is None else seconds, max(self.left() - turns, 0.1))

    def prepare(self, label: str, make: Callable[[], Ready], seconds: float) -> None:
        from gpu_turns import TimeUp, boxed, reason

        row: dict[str, Any] = {"row": label, "ours": label.startswith(gpu_tables.OURS)}
        self.entry["rows"].append(row)
        begin, box = time.monotonic(), self.box(seconds)
        if self.left() <= 0:
            row["failed"] = "no time was left"
        else:
            try:
                with boxed(box):
                    made = make()
                    row |= made.facts
                    self.judge(row, made)
                self.ready[label] = made
            except TimeUp as error:
                row["failed"] = str(error)
            except Exception as error:  # whatever a library raises: the other rows go on
                row["failed"] = reason(error)
        row["prepare_seconds"] = time.monotonic() - begin
        say(f"  {label}: {row.get('failed') or 'ready'} ({row['prepare_seconds']:.1f} s)")
        self.save()

    def judge(self, row: dict[str, Any], made: Ready) -> None:
        """How far its outputs are from single precision's, and how far they may be."""
        import torch

        import engines
        from tunewright.ir.types import DType
        from tunewright.ops.tolerance import TOLERANCES

        with torch.no_grad(), made.around():
            error = engines.error(made.outputs(), self.expected)
        worst = max(error, row["error"]) if row.get("error") is not None else error
        row["error"] = worst if math.isfinite(worst) else None  # there is no such number in JSON
        row["limit"] = TOLERANCES[DType(self.options.precision)].network

    def turns(self) -> None:
        """All that is ready, in turns; outputs are looked at again, since a graph may run over its own memory."""
        from gpu_turns import measure, reason, summary

        rows = {row["row"]: row for row in self.entry["rows"]}
        measure([*self.ready.values()], self.options.seconds, self.options.turn, self.options.gpu, self.end)
        for label, made in list(self.ready.items()):
            row = rows[label]
            try:
                if not made.failed:
                    self.judge(row, made)
            except Exception as error:
                made.failed = f"after it ran: {reason(error)}"
            if made.failed:
                row["failed"] = made.failed
                row.pop("median_ms", None)
                del self.ready[label]
            else:
                row |= summary(made)
                say(f"  {label}: {gpu_tables.milliseconds(row['median_ms'])} ms, error {row['error'] or 0:.1e}")
        self.save()


# ---- files ----------------------------------------------------------------------------------------------------------


def write(file: Path | None, report: dict[str, Any]) -> None:
    """The file is whole at any time."""
    if file is None:
        return
    part = file.with_name(f"{file.name}.part")
    part.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(file)


def read(file: Path) -> dict[str, Any]:
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{file} cannot be read: {error}") from None
    schema = report.get("schema") if isinstance(report, dict) else None
    if schema != SCHEMA:
        raise Refused(f"{file} is not a file of this benchmark: its schema is {schema}, not {SCHEMA}")
    return report


if __name__ == "__main__":
    sys.exit(main())
