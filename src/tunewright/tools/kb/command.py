"""``tunewright kb``: commands for knowledge bases.

This module has the commands that only read. `kb_exchange` moves records, `kb_verify` and `kb_prune` maintain them, and
`kb_train` learns from them. `kb_streams` shows measurements of whole models, `kb_traffic` the shapes that they met.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..shared.console import Configs, cell, console, size, table
from .embed import embed, extract
from .exchange import diff, export, import_, merge
from .open import (
    AsJson,
    DeviceKind,
    LayerName,
    Layers,
    Op,
    Processor,
    SolverName,
    damage,
    opened,
    settings_of,
    solvers_here,
)
from .prune import prune
from .repair import repair
from .show import show
from .streams import streams
from .traffic import traffic
from .train import train
from .verify import verify
from .view import Filter, KnownProblem, answers_table, faults_table, grid, known, op_of, place, plural, safe, split

if TYPE_CHECKING:
    from pathlib import Path

    from tunewright.knowledge.key import Where
    from tunewright.knowledge.record import AnyRecord, Fault

#: rows of each table of `stats`; JSON has all
SHOWN = 10

app = typer.Typer(name="kb", invoke_without_command=True)


@app.callback()
def kb(context: typer.Context) -> None:
    """Knowledge bases: what was measured, and which kernels follow from it.

    Example: tunewright kb list --op Conv
    """
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")


def path(config: Configs = None, as_json: AsJson = False) -> None:
    """Show the folders and the state of the user's and the system's knowledge bases.

    Example: tunewright kb path --config USER_DB_PATH=/shared/kb
    """
    from tunewright.knowledge.open_databases import system_folder, user_folder

    settings = settings_of(config)
    found: dict[str, dict[str, Any]] = {}
    for layer, folder in (("user", user_folder(settings)), ("system", system_folder(settings))):
        sizes = _sizes(folder)
        database = opened(settings, layer)[layer]
        found[layer] = {
            "path": str(folder),
            "mode": settings.user_db_mode if layer == "user" else "JSON Lines",
            "exists": folder.is_dir(),
            "read_only": database.read_only,
            "files": len(sizes),
            "bytes": sum(sizes),
            "records": sum(1 for _ in database),
            "damage": list(database.damage()),
        }
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    out = console()
    for layer, about in found.items():
        out.print(cell(layer), style="bold")
        out.print(cell(f"  {about['path']}"), soft_wrap=True)
        state = "not there yet: the first record makes it" if layer == "user" else "not there"
        if about["exists"]:
            state = f"{plural(about['records'], 'record')} in {plural(about['files'], 'file')}, {size(about['bytes'])}"
        rows = [("mode", about["mode"]), ("state", state), ("writable", about["read_only"] or "yes")]
        if about["read_only"]:
            rows[-1] = ("writable", f"no: {about['read_only']}")
        out.print(grid(rows))
        out.print()
        damage(layer, about["damage"])


def _sizes(folder: Path) -> list[int]:
    """Return the sizes of the files in a folder. Other processes may remove files at the same time."""
    sizes = []
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            if file.is_file():
                sizes.append(file.stat().st_size)
    return sizes


def list_(
    op: Op = "",
    device: DeviceKind = "",
    processor: Processor = "",
    solver: SolverName = "",
    layer: LayerName = Layers.ALL,
    faults: Annotated[bool, typer.Option("--faults", help="Show the quarantine: faulty candidates.")] = False,
    count: Annotated[int, typer.Option("--count", "-n", min=1, metavar="N", help="Print at most N rows.")] = 30,
    config: Configs = None,
    as_json: AsJson = False,
) -> None:
    """List the answers: for each problem and device the kernel that the records name, and its gain over the default.

    A user's answer precedes one of the system. JSON has every row, with complete problems.

    Example: tunewright kb list --op Conv --layer user
    """
    layers = opened(settings_of(config), layer)
    wanted = Filter(op, device, processor, solver)
    for name, database in layers.items():
        damage(name, database.damage())
    if faults:
        _list_faults([(name, f) for name, found in layers.items() for f in found.faults() if wanted(f)], count, as_json)
        return
    # Filter by solver last, because the answer depends on all candidates.
    outer = Filter(op, device, processor)
    rows = known({name: [r for r in found if outer(r)] for name, found in layers.items()})
    rows = [row for row in rows if wanted(row.shown.record)]
    if as_json:
        sys.stdout.write(json.dumps([_row(row) for row in rows], indent=2) + "\n")
        return
    out = console()
    answers = sum(row.answer is not None for row in rows)
    gains = sum(row.answer is not None and not row.is_default for row in rows)
    for where, some in _by_place(rows[:count]):
        out.print(cell(place(where)), style="bold", soft_wrap=True)
        out.print(cell(f"  {safe(where.software)}"), soft_wrap=True)
        out.print()
        out.print(answers_table(some, solvers_here()))
        out.print()
    summary = f"{plural(len(rows), 'problem')}, {plural(answers, 'answer')}, {gains} of them faster than the default"
    _print_summary(summary, len(rows), count)


def _print_summary(summary: str, rows: int, count: int) -> None:
    out = console()
    if rows > count:
        out.print(f"and {rows - count:,} more rows (--count {rows}, or --json)\n")
    out.print(summary)


def _by_place(rows: Iterable[KnownProblem]) -> Iterator[tuple[Where, list[KnownProblem]]]:
    """Group rows by device. The rows are sorted by it."""
    some: list[KnownProblem] = []
    for row in rows:
        if some and some[0].where != row.where:
            yield some[0].where, some
            some = []
        some.append(row)
    if some:
        yield some[0].where, some


def _row(row: KnownProblem) -> dict[str, Any]:
    s = row.shown
    gain = s.record.evidence.gain
    return {
        "problem": row.problem,
        "where": vars(row.where),
        "answer": {"solver": s.record.key.solver, "config": dict(s.record.config)} if row.answer else None,
        "why_not": s.why or None,
        "gain": {"median": gain.median, "low": gain.low, "high": gain.high, "pairs": gain.pairs},
        "seconds": s.record.evidence.seconds,
        "layer": s.layer,
        "date": s.record.date,
        "record": s.record.digest,
        "measurements": len(row.standings),
    }


def _list_faults(faults: Sequence[tuple[str, Fault]], count: int, as_json: bool) -> None:
    faults = sorted(faults, key=lambda pair: (pair[1].date, pair[1].digest), reverse=True)
    if as_json:
        rows = [{"layer": name, "digest": fault.digest, **fault.body()} for name, fault in faults]
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return
    out = console()
    if faults:
        out.print(faults_table(faults[:count]))
        out.print()
    _print_summary(plural(len(faults), "fault"), len(faults), count)


def stats(
    op: Op = "",
    device: DeviceKind = "",
    processor: Processor = "",
    solver: SolverName = "",
    config: Configs = None,
    as_json: AsJson = False,
) -> None:
    """Count records, answers, gains, faults and damage, by device, solver and operation.

    Example: tunewright kb stats --processor EPYC
    """
    layers = opened(settings_of(config))
    wanted = Filter(op, device, processor, solver)
    records = {name: [r for r in found if wanted(r)] for name, found in layers.items()}
    report = {name: _figures(found) | {"damage": len(layers[name].damage())} for name, found in records.items()}
    everything = list({r.digest: r for found in records.values() for r in found}.values())
    by = {
        "processor": Counter(f"{r.key.where.processor} ({r.key.where.device})" for r in everything),
        "solver": Counter(r.key.solver for r in everything),
        "op": Counter(op_of(r.key.problem) for r in everything),
        "fault": Counter(f.status.lower() for f in split(everything)[1]),
    }
    if as_json:
        counts = {name: dict(found.most_common()) for name, found in by.items()}
        sys.stdout.write(json.dumps({"layers": report, "records_by": counts}, indent=2) + "\n")
        return
    out = console()
    made = table("", *(f">{name}" for name in report))
    for what in next(iter(report.values())):
        made.add_row(what.replace("_", " "), *(_figure(figures[what]) for figures in report.values()))
    out.print(made)
    for name, found in by.items():
        if found:
            out.print()
            made = table(name, ">records")
            for text, n in found.most_common(SHOWN):
                made.add_row(cell(safe(text)), f"{n:,}")
            if len(found) > SHOWN:
                made.add_row(f"{len(found) - SHOWN} more", f"{sum(n for _, n in found.most_common()[SHOWN:]):,}")
            out.print(made)
    for name, database in layers.items():
        damage(name, database.damage())


def _figures(records: Sequence[AnyRecord]) -> dict[str, Any]:
    from statistics import median

    measurements, faults, surveys = split(records)
    rows = known({"": records})
    answers = [row for row in rows if row.answer]
    gains = [row.answer.record.evidence.gain.median for row in answers if row.answer and not row.is_default]
    return {
        "measurements": len(measurements),
        "confirmed": sum(m.evidence.confirmed for m in measurements),
        "problems": len(rows),
        "answers": len(answers),
        "faster_than_default": len(gains),
        "median_gain": median(gains) if gains else None,
        "faults": len(faults),
        "surveys": len(surveys),
        "candidates_seen": sum(len(s.seen) for s in surveys),
    }


def _figure(value: Any) -> str:
    return "-" if value is None else f"{value:.2f}x" if isinstance(value, float) else f"{value:,}"


def log(
    count: Annotated[int, typer.Option("--count", "-n", min=1, metavar="N", help="Print the last N lines.")] = 20,
    config: Configs = None,
    as_json: AsJson = False,
) -> None:
    """Show the log of the user's knowledge base, newest line last.

    Example: tunewright kb log --count 50
    """
    events = opened(settings_of(config), "user")["user"].events()
    if as_json:
        sys.stdout.write(json.dumps([vars(event) for event in events[-count:]], indent=2) + "\n")
        return
    out = console()
    if len(events) > count:
        out.print(f"{plural(len(events) - count, 'earlier line')} (--count {len(events)})")
        out.print()
    made = table("date", "action", "what")
    for event in events[-count:]:
        made.add_row(*(cell(safe(text)) for text in (f"{event.date[:19]}Z", event.action, event.what)))
    out.print(made if events else "nothing has happened yet")


_COMMANDS: dict[str, Callable[..., None]] = {
    "path": path, "list": list_, "show": show, "stats": stats, "diff": diff, "merge": merge, "export": export,
    "import": import_, "verify": verify, "prune": prune, "repair": repair, "train": train, "streams": streams,
    "traffic": traffic, "embed": embed, "extract": extract, "log": log,
}  # fmt: skip
for _name, _command in _COMMANDS.items():
    app.command(_name)(_command)

COMMANDS = (app,)
