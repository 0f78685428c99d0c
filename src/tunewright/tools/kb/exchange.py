"""Commands of `tunewright kb` that move records: diff, merge, export, import."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from tunewright.errors import InputError

from ..shared.console import Configs, cell, check_writable, console, table, working
from .open import (
    AnyProcessor,
    AsJson,
    DeviceKind,
    DryRun,
    LayerName,
    Layers,
    Op,
    Processor,
    SolverName,
    base,
    check_processors,
    damage,
    opened,
    settings_of,
    writable,
)
from .view import Filter, KnownProblem, config_text, known, plural, problem_text, safe, split

if TYPE_CHECKING:
    from tunewright.knowledge.record import AnyRecord
    from tunewright.settings import Settings

#: rows of a table that are printed; JSON has all
SHOWN = 20
BASE = "user, system, a folder, a kb.sqlite, a .jsonl or a tuning file (.json)."


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=f"A knowledge base: {BASE}", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.", show_default=False)],
    config: Configs = None,
    as_json: AsJson = False,
) -> None:
    """Show records that only one of two knowledge bases has, and problems whose answers differ.

    Exits with 1 when the two differ.

    Example: tunewright kb diff user colleague.jsonl
    """
    settings = settings_of(config)
    bases = [base(text, settings) for text in (a, b)]
    records = [{r.digest: r for r in found} for found in bases]
    for text, found in zip((a, b), bases, strict=True):
        damage(text, found.damage())
    only = [[r for digest, r in mine.items() if digest not in others] for mine, others in (records, records[::-1])]
    answers = [{(k.problem, k.where): k for k in known({"": mine.values()})} for mine in records]
    both = sorted(answers[0].keys() & answers[1].keys(), key=lambda at: (at[0], str(at[1])))
    pairs = [(answers[0][at], answers[1][at]) for at in both]
    differ = [(one, other) for one, other in pairs if _candidate(one) != _candidate(other)]
    code = 1 if only[0] or only[1] else 0
    if as_json:
        report: dict[str, Any] = {
            "only_a": [r.digest for r in only[0]],
            "only_b": [r.digest for r in only[1]],
            "answers": [
                {"problem": one.problem, "where": vars(one.where), "a": _candidate(one), "b": _candidate(other)}
                for one, other in differ
            ],
        }
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        raise typer.Exit(code)
    out = console()
    made = table("records", ">measurements", ">faults", ">surveys", ">problems")
    for name, some in ((f"only in {a}", only[0]), (f"only in {b}", only[1]), ("in both", _both(*records))):
        kinds = split(some)
        counts = *(len(kind) for kind in kinds), len({m.key.problem for m in kinds[0]})
        made.add_row(cell(safe(name)), *(f"{n:,}" for n in counts))
    out.print(made)
    if not differ:
        agree = f"{plural(len(both), 'problem')} known to both: the answers agree"
        out.print(f"\n{agree}" if both else "\nno problem is known to both")
        raise typer.Exit(code)
    made = table(f"{plural(len(differ), 'problem')} with other answers", ">gain")
    for one, other in differ[:SHOWN]:
        lines = [problem_text(one.problem), f"  A: {_answer_text(one)}", f"  B: {_answer_text(other)}"]
        made.add_row(cell("\n".join(lines)), "\n".join(["", _gain(one), _gain(other)]))
    out.print()
    out.print(made)
    if len(differ) > SHOWN:
        out.print(f"\nand {len(differ) - SHOWN} more (--json has all)")
    raise typer.Exit(code)


def _both(one: dict[str, AnyRecord], other: dict[str, AnyRecord]) -> list[AnyRecord]:
    return [r for digest, r in one.items() if digest in other]


def _candidate(row: KnownProblem) -> list[Any] | None:
    """Return the solver and config of the answer, or None for the default."""
    answer = row.answer
    return [answer.record.key.solver, dict(answer.record.config)] if answer else None


def _answer_text(row: KnownProblem) -> str:
    answer = row.answer
    if answer is None:
        return "the default"
    return f"{safe(answer.record.key.solver)} {config_text(answer.record.config)}".rstrip()


def _gain(row: KnownProblem) -> str:
    return f"{row.answer.record.evidence.gain.median:.2f}x" if row.answer else "-"


def merge(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE...", help=f"Each: {BASE}", show_default=False)],
    any_processor: AnyProcessor = False,
    dry_run: DryRun = False,
    config: Configs = None,
    as_json: AsJson = False,
) -> None:
    """Add the records of other knowledge bases to the user's. It is a union of sets: nothing is overwritten.

    Refuses records of a processor that this machine does not have, unless --any-processor is given.

    Example: tunewright kb merge /shared/kb colleague.jsonl --dry-run
    """
    take("merged", sources, any_processor, dry_run, settings_of(config), as_json)


def take(
    action: str, sources: Sequence[str], any_processor: bool, dry_run: bool, settings: Settings, as_json: bool
) -> NoReturn:
    """Add all sources to the user's knowledge base, or none. Always raises Exit, with 1 if some records are damaged."""
    user = opened(settings, "user")["user"] if dry_run else writable(settings)
    loaded: dict[str, list[AnyRecord]] = {}
    bad = 0
    for source in sources:
        with working(f"reading {source}"):
            found = base(source, settings)
            loaded[source] = list(found)
        damage(source, found.damage())
        bad += len(found.damage())
    if not any_processor:
        for source, records in loaded.items():
            check_processors(records, source)
    have = {r.digest for r in user}
    rows: list[dict[str, Any]] = []
    new: dict[str, AnyRecord] = {}
    for source, records in loaded.items():
        fresh = [r for r in records if r.digest not in have and r.digest not in new]
        new |= {r.digest: r for r in fresh}
        rows += _counts(source, records, fresh)
    if not dry_run and new:
        user.merge(new.values())
        user.note(action, f"{plural(len(new), 'record')} from {', '.join(sources)}")
    if as_json:
        report = {"sources": rows, "new": len(new), "damaged": bad, "dry_run": dry_run, "user": user.path}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        raise typer.Exit(1 if bad else 0)
    made = table("source", "processor", ">records", ">new")
    for row in rows:
        where = f"{safe(row['processor'])} ({safe(row['device'])})"
        made.add_row(cell(safe(row["source"])), cell(where), f"{row['records']:,}", f"{row['new']:,}")
    out = console()
    if rows:
        out.print(made)
        out.print()
    verb = "would be added to" if dry_run else "added to"
    left_out = f"; left out as damaged: {bad}" if bad else ""
    out.print(cell(f"{plural(len(new), 'record')} {verb} {user.path}{left_out}"), soft_wrap=True)
    raise typer.Exit(1 if bad else 0)


def _counts(source: str, records: Sequence[AnyRecord], fresh: Sequence[AnyRecord]) -> list[dict[str, Any]]:
    """Count the records of a source, one row for each processor."""
    all_, new = (Counter((r.key.where.processor, r.key.where.device) for r in some) for some in (records, fresh))
    return [
        {"source": source, "processor": at[0], "device": at[1], "records": count, "new": new[at]}
        for at, count in sorted(all_.items())
    ]


def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file: .jsonl or .json.", show_default=False)],
    layer: LayerName = Layers.USER,
    op: Op = "",
    device: DeviceKind = "",
    processor: Processor = "",
    solver: SolverName = "",
    config: Configs = None,
) -> None:
    """Write records to a new file: .jsonl holds all of them, .json is a tuning file with the answers alone.

    The file contains only parameters and measurements. Exits with 1 when an answer cannot be written to such a file.

    Example: tunewright kb export team.jsonl --op Conv
    """
    _check_ending(file)
    if file.exists():
        raise InputError("exists already", where=str(file), hint="name another one, or remove it first")
    check_writable(file)
    wanted = Filter(op, device, processor, solver)
    records: dict[str, list[AnyRecord]] = {}
    for name, found in opened(settings_of(config), layer).items():
        records[name] = [r for r in found if wanted(r)]
        damage(name, found.damage())
    everything = {r.digest: r for some in records.values() for r in some}
    answers = [row.answer.record for row in known(records) if row.answer]
    lines = file.suffix == ".jsonl"
    if not (answers if not lines else everything):
        what = "no record matches" if lines else "no answer matches"
        raise InputError(what, where="kb export", hint="`tunewright kb list` shows what there is")
    left_out: Sequence[str] = ()
    if lines:
        from tunewright.knowledge.system import write_lines

        write_lines(file, everything.values())
        counts = [len(some) for some in split(everything.values())]
        kinds = ("measurement", "fault", "survey")
        written = ", ".join(plural(count, kind) for count, kind in zip(counts, kinds, strict=True))
    else:
        from tunewright.knowledge import tuning_file

        added, left_out = tuning_file.export(file, answers)
        damage("left out", left_out)
        if not added:
            hint = "a .jsonl file can hold them"
            raise InputError("no answer can be written as a tuning file", where=str(file), hint=hint)
        written = plural(added, "answer")
    console().print(cell(f"{written} in {file}"), soft_wrap=True)
    raise typer.Exit(1 if left_out else 0)


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file: .jsonl or .json.", show_default=False)],
    any_processor: AnyProcessor = False,
    dry_run: DryRun = False,
    config: Configs = None,
    as_json: AsJson = False,
) -> None:
    """Add the records of a file to the user's knowledge base. Each is checked separately.

    Damaged records are named with their line and left out. All others are added, and the exit code is then 1.

    Example: tunewright kb import team.jsonl
    """
    _check_ending(file)
    take("imported", [str(file)], any_processor, dry_run, settings_of(config), as_json)


def _check_ending(file: Path) -> None:
    if file.suffix not in (".jsonl", ".json"):
        hint = "name it .jsonl for records, or .json for a tuning file"
        raise InputError("its suffix is neither .jsonl nor .json", where=str(file), hint=hint)
