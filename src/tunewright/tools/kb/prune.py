"""``tunewright kb prune``: removes records that are no longer useful."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from tunewright.errors import InputError

from ..shared.console import Configs, cell, console, table
from .open import AsJson, DryRun, opened, settings_of, solvers_here, writable
from .view import plural, split

if TYPE_CHECKING:
    from tunewright.knowledge.record import AnyRecord


def prune(
    superseded: Annotated[
        bool, typer.Option("--superseded", help="Measurements and surveys that newer ones replace.")
    ] = False,
    unknown_solvers: Annotated[
        bool, typer.Option("--unknown-solvers", help="Records of solvers that no longer exist.")
    ] = False,
    faults: Annotated[bool, typer.Option("--faults", help="The quarantine: all may be tried again.")] = False,
    older_than: Annotated[
        int | None,
        typer.Option(
            "--older-than", min=0, metavar="DAYS", help="Only older records; alone: all older ones.", show_default=False
        ),
    ] = None,
    dry_run: DryRun = False,
    config: Configs = None,
    as_json: AsJson = False,
) -> None:
    """Remove records from the user's knowledge base that are no longer useful. Without an option nothing is removed.

    Records that another knowledge base still has come back with the next merge from it.

    Example: tunewright kb prune --superseded --unknown-solvers --dry-run
    """
    if not (superseded or unknown_solvers or faults or older_than is not None):
        hint = "--superseded, --unknown-solvers, --faults, --older-than DAYS"
        raise InputError("say what to drop", where="kb prune", hint=hint)
    from tunewright.knowledge.shared import SharedDatabase

    settings = settings_of(config)
    user = opened(settings, "user")["user"] if dry_run else writable(settings)
    records = list(user)
    chosen: dict[str, Sequence[AnyRecord]] = {
        "superseded": _superseded(records) if superseded else [],
        "of unknown solvers": _unknown(records) if unknown_solvers else [],
        "faults": split(records)[1] if faults else [],
    }
    if older_than is not None:
        date = _days_ago(older_than)
        if not (superseded or unknown_solvers or faults):
            chosen = {f"older than {plural(older_than, 'day')}": records}
        chosen = {why: [r for r in found if r.date < date] for why, found in chosen.items()}
    gone = {r.digest for found in chosen.values() for r in found}
    if gone and not dry_run:
        user.remove(gone)
        what = ", ".join(why for why, found in chosen.items() if found)
        user.note("pruned", f"{plural(len(gone), 'record')}: {what}")
    if not dry_run and isinstance(user, SharedDatabase):
        user.compact()
    if as_json:
        counts = {why: len(found) for why, found in chosen.items() if found}
        report = {"by": counts, "dropped": len(gone), "of": len(records), "dry_run": dry_run, "user": user.path}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return
    out = console()
    made = table("dropped", ">records")
    for why, found in chosen.items():
        if found:
            made.add_row(why, f"{len(found):,}")
    if gone:
        out.print(made)
        out.print()
    verb = "would be dropped of" if dry_run else "dropped of"
    out.print(cell(f"{plural(len(gone), 'record')} {verb} {len(records):,} in {user.path}"), soft_wrap=True)


def _superseded(records: Iterable[AnyRecord]) -> list[AnyRecord]:
    from tunewright.knowledge import database

    measurements, _, surveys = split(records)
    counting = {m.digest for m in database.newest(measurements)}
    return [*(m for m in measurements if m.digest not in counting), *database.superseded(surveys)]


def _unknown(records: Iterable[AnyRecord]) -> list[AnyRecord]:
    from tunewright.knowledge.record import Survey

    there = solvers_here()
    # A survey covers many solvers; a missing solver of its default alone is no reason to drop it.
    return [
        r
        for r in records
        if r.key.solver not in there and not (isinstance(r, Survey) and any(s.solver in there for s in r.seen))
    ]


def _days_ago(days: int) -> str:
    """Return the date in the format of records, which compares as text."""
    import datetime

    try:
        then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days)
    except OverflowError:
        raise InputError(f"{days} days are too many for a date", where="--older-than") from None
    return then.isoformat(timespec="seconds").replace("+00:00", "Z")
