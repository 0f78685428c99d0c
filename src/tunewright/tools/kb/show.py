"""``tunewright kb show``: shows a whole record, or everything known about a problem."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunewright.errors import DeviceError, InputError

from ..shared.console import Configs, cell, console, note
from .ask import AskedDevice, pose
from .open import AsJson, LayerName, Layers, damage, opened, settings_of
from .view import (
    DIGEST,
    LEAST,
    KnownProblem,
    Standing,
    config_text,
    known,
    plural,
    problem_text,
    record_grid,
    safe,
    split,
)

if TYPE_CHECKING:
    from tunewright.knowledge.database import Database
    from tunewright.knowledge.key import Where
    from tunewright.knowledge.record import AnyRecord, Fault, Measurement, Survey
    from tunewright.settings import Settings
    from tunewright.solvers.base import Problem


def show(
    what: Annotated[
        str,
        typer.Argument(
            metavar="RECORD|PROBLEM", help="The start of a digest, or a problem's text.", show_default=False
        ),
    ],
    device: Annotated[
        str,
        typer.Option(
            "--device",
            "-d",
            metavar="NAME",
            show_default=False,
            help="Devices to ask for answers (default: those that loads use here, and those with measurements).",
        ),
    ] = "",
    layer: LayerName = Layers.ALL,
    config: Configs = None,
    as_json: AsJson = False,
) -> None:
    """Show one record with all its evidence, or every record of a problem in the order of the answer, with reasons.

    `tunewright kb list` shows digests. A problem may be named by any part of its text that no other problem contains.

    Example: tunewright kb show 3f2a91c0
    """
    settings = settings_of(config)
    layers = opened(settings, layer)
    for name, database in layers.items():
        damage(name, database.damage())
    records = {name: list(database) for name, database in layers.items()}
    found = _by_digest(what, records)
    if found is not None:
        problem = found.key.problem
    else:
        problem = _problem(what, records)
    mine = {name: [r for r in some if r.key.problem == problem] for name, some in records.items()}
    faults = [(name, f) for name, some in mine.items() for f in split(some)[1]]
    surveys = [(name, s) for name, some in mine.items() for s in split(some)[2]]
    measured = [m for some in mine.values() for m in split(some)[0]]
    asked = _asked(device, layers, settings, {m.key.where for m in measured})
    worths = _worths(known(mine), asked)
    if found is not None:
        faults = [(name, f) for name, f in faults if f == found]
        surveys = [(name, s) for name, s in surveys if s == found]
        worths = [worth for worth in worths if worth.standing.record == found]
    if as_json:
        _print_json(problem, worths, faults, surveys)
    else:
        _print(problem, worths, faults, surveys, asked if measured else (), whole=found is not None)


def _by_digest(text: str, records: Mapping[str, Sequence[AnyRecord]]) -> AnyRecord | None:
    """Return the record whose digest begins with ``text``, or None if there is none or ``text`` is not a digest."""
    if not re.fullmatch(f"[0-9a-f]{{{LEAST},64}}", text):
        return None
    found = {r.digest: r for some in records.values() for r in some if r.digest.startswith(text)}
    if len(found) > 1:
        named = ", ".join(sorted(found)[:3])
        hint = "give more of the digest"
        raise InputError(f"{len(found)} records begin with it: {named}, ...", where=text, hint=hint)
    return next(iter(found.values()), None)


def _problem(text: str, records: Mapping[str, Sequence[AnyRecord]]) -> str:
    problems = {r.key.problem for some in records.values() for r in some}
    if text in problems:
        return text
    fitting = sorted(p for p in problems if text.lower() in p.lower() or text.lower() in problem_text(p).lower())
    if not fitting:
        hint = "`tunewright kb list` shows what there is"
        raise InputError("matches no record and no problem", where=text, hint=hint)
    if len(fitting) > 1:
        named = "; ".join(problem_text(p) for p in fitting[:3])
        hint = "give more of its text, or the digest of a record"
        raise InputError(f"{len(fitting)} problems fit: {named}{'; ...' if fitting[3:] else ''}", where=text, hint=hint)
    return fitting[0]


def _asked(
    device: str, layers: Mapping[str, Database], settings: Settings, places: Collection[Where]
) -> list[AskedDevice]:
    """Return the devices to query about a problem.

    If ``device`` is given, it is the only one. Otherwise these are the devices that a load would use here, and further
    devices of this machine on which something was measured.
    """
    from tunewright.plugins.single import visible

    if device:
        return [AskedDevice(device, layers, settings)]
    found: list[AskedDevice] = []
    usual = visible()
    for name in usual:
        found += _open(name, layers, settings)
    if any(not any(each.is_like(where) for each in found) for where in places):
        for name in visible(alternatives=True):
            others = _open(name, layers, settings) if name not in usual else []
            found += [each for each in others if any(each.is_like(where) for where in places)]
    return found


def _open(name: str, layers: Mapping[str, Database], settings: Settings) -> list[AskedDevice]:
    try:
        return [AskedDevice(name, layers, settings)]
    except DeviceError as error:
        note(f"{name} cannot be asked: {error}")
        return []


@dataclass(frozen=True)
class Worth:
    """A measurement, and for each device a text that says whether it answers there."""

    standing: Standing
    texts: Mapping[str, str]

    def __str__(self) -> str:
        if len(self.texts) == 1 or len(set(self.texts.values())) == 1:
            return next(iter(self.texts.values()))
        return "; ".join(f"{name}: {text}" for name, text in self.texts.items()) or self.standing.why or "not asked"


def _worths(places: Sequence[KnownProblem], asked: Sequence[AskedDevice]) -> list[Worth]:
    """Sort the measurements of a problem by the answers on the devices, then by the order in their own place."""
    standings = [s for row in places for s in row.standings]
    problem = _posed([s.record for s in standings])
    if problem is None:
        return [Worth(s, {}) for s in standings]
    ranked: list[tuple[int, Worth]] = []
    found = {each: each.answer(problem).found for each in asked}
    for each, answers in found.items():
        if answers and answers[0].measurement.key.problem != problem.key():
            note(f"on {each.name} {answers[0].measurement.digest[:DIGEST]} answers, {answers[0].match}")
    for s in standings:
        texts, best = {}, len(standings)
        for each, answers in found.items():
            at = next((i for i, f in enumerate(answers) if f.measurement == s.record and f.layer == s.layer), None)
            if at is not None:
                texts[each.name] = f"{'answers' if at == 0 else f'number {at + 1}'}, {answers[at].match}"
                best = min(best, at)
            else:
                texts[each.name] = _why_not(s, each.verdict(problem, s.layer, s.record))
        ranked.append((best, Worth(s, texts)))
    return [worth for _, worth in sorted(ranked, key=lambda pair: pair[0])]


def _why_not(s: Standing, alone: str) -> str:
    """Return why a measurement does not answer. ``alone``: how it would match without the others."""
    if s.why:
        return s.why
    kind = alone.partition(":")[0]
    return alone if kind not in ("exact", "provisional") else f"{alone}; a nearer one of this candidate counts"


def _posed(measurements: Sequence[Measurement]) -> Problem | None:
    """Return the problem of the first measurement whose problem can be posed."""
    for m in measurements:
        try:
            return pose(m)
        except InputError as error:
            note(f"{m.digest[:DIGEST]} cannot be posed: {safe(error)}")
    return None


def _heading(record: AnyRecord) -> str:
    return f"{record.digest[:DIGEST]}  {safe(record.key.solver)} {config_text(record.config)}".rstrip()


def _print(
    problem: str,
    worths: Sequence[Worth],
    faults: Sequence[tuple[str, Fault]],
    surveys: Sequence[tuple[str, Survey]],
    asked: Sequence[AskedDevice],
    whole: bool,
) -> None:
    """Print the records. ``whole``: print a single one in full; otherwise surveys take one line.

    ``asked``: the devices that were queried.
    """
    out = console()
    out.print(cell(safe(problem)), style="bold")
    counts = f"{plural(len(worths), 'measurement')}, {plural(len(faults), 'fault')}"
    if surveys:
        seen = {(s.solver, s.version, s.config) for _, survey in surveys for s in survey.seen}
        named = ", ".join(survey.digest[:DIGEST] for _, survey in surveys[:3])
        more = ", ..." if len(surveys) > 3 else ""
        counts += f", {plural(len(seen), 'candidate')} seen in {plural(len(surveys), 'survey')} ({named}{more})"
    out.print(f"{counts}; in the order in which they would answer" if len(worths) > 1 else counts)
    for each in asked:
        where = each.where
        units = plural(where.units, "unit")
        out.print(cell(f"asked about {each.name}: {where.arch.partition(';')[0]}, {units}, {where.runtime}"))
    for worth in worths:
        record = worth.standing.record
        out.print()
        out.print(cell(_heading(record)), style="bold", soft_wrap=True)
        out.print(cell(f"  {worth}"), style="bold")
        out.print(record_grid(record, worth.standing.layer))
    for name, fault in faults:
        out.print()
        out.print(cell(_heading(fault)), style="bold", soft_wrap=True)
        out.print(record_grid(fault, name))
    for name, survey in surveys if whole else ():
        out.print()
        out.print(cell(_heading(survey)), style="bold", soft_wrap=True)
        out.print(record_grid(survey, name))


def _print_json(
    problem: str,
    worths: Sequence[Worth],
    faults: Sequence[tuple[str, Fault]],
    surveys: Sequence[tuple[str, Survey]],
) -> None:
    rows: list[dict[str, Any]] = [
        {
            "layer": worth.standing.layer,
            "worth": dict(worth.texts),
            "why_not": worth.standing.why or None,
            "digest": worth.standing.record.digest,
            **worth.standing.record.body(),
        }
        for worth in worths
    ]
    rows += [{"layer": name, "digest": fault.digest, **fault.body()} for name, fault in faults]
    rows += [{"layer": name, "digest": survey.digest, **survey.body()} for name, survey in surveys]
    sys.stdout.write(json.dumps({"problem": problem, "records": rows}, indent=2) + "\n")
