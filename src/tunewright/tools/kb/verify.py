"""``tunewright kb verify``: measures stored answers again, against the current default."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunewright.errors import DeviceError, InputError

from ..shared.console import Configs, console, note, table, working
from .ask import AskedDevice, pose
from .open import AsJson, Op, SolverName, damage, opened, settings_of, writable
from .view import Filter, KnownProblem, config_text, gain_lines, known, plural, problem_text, safe, stacked

if TYPE_CHECKING:
    from tunewright.knowledge.database import Database
    from tunewright.knowledge.record import Measurement, Ratio
    from tunewright.measure.base import Measurer
    from tunewright.settings import Settings

#: rows of the table; JSON has all
SHOWN = 50
#: possible verdicts about an answer
HOLDS, DRIFTED, OPEN, GONE, UNCHECKED = "holds", "drifted", "open", "gone", "not checkable"


@dataclass
class VerifiedAnswer:
    """A stored answer and the verdict about it."""

    device: str
    stored: Measurement
    verdict: str = ""
    why: str = ""
    #: the gain measured now
    gain: Ratio | None = None


def verify(
    count: Annotated[int, typer.Option("--count", "-n", min=1, metavar="N", help="Measure N, oldest first.")] = 5,
    everything: Annotated[bool, typer.Option("--all", help="Measure every answer.")] = False,
    op: Op = "",
    solver: SolverName = "",
    device: Annotated[
        str, typer.Option("--device", "-d", metavar="NAME", help="Only this device (default: all).", show_default=False)
    ] = "",
    config: Configs = None,
    as_json: AsJson = False,
) -> None:
    """Measure stored answers again, for example after an upgrade of a driver. Answers that drifted are no longer used.

    Each is measured against the default for up to TUNE_SECONDS, oldest first. A measured answer becomes the newest, so
    the next call continues with others. Exits with 1 when something drifted.

    Example: tunewright kb verify --count 20 --op Conv
    """
    settings = settings_of(config)
    user = writable(settings)
    layers = {"user": user, **opened(settings, "system")}
    for name, database in layers.items():
        damage(name, database.damage())
    wanted = Filter(op=op, solver=solver)
    rows = [row for row in known(layers) if row.answer and wanted(row.answer.record)]
    cases: list[VerifiedAnswer] = []
    left = 0
    for asked in _devices(device, layers, settings):
        found = _cases(asked, rows)
        settled = [c for c in found if c.verdict]
        due = sorted((c for c in found if not c.verdict), key=lambda c: (c.stored.date, c.stored.digest))
        chosen = due if everything else due[:count]
        left += len(due) - len(chosen)
        _measure(asked, chosen, user, settings)
        cases += [*chosen, *settled]
    drifted = sum(c.verdict == DRIFTED for c in cases)
    if as_json:
        sys.stdout.write(json.dumps([_json(c) for c in cases], indent=2) + "\n")
    else:
        _print(cases, left)
    raise typer.Exit(1 if drifted else 0)


def _devices(name: str, layers: Mapping[str, Database], settings: Settings) -> Iterator[AskedDevice]:
    from tunewright.plugins.single import visible

    for each in [name] if name else visible():
        try:
            yield AskedDevice(each, layers, settings)
        except DeviceError as error:
            if name:
                raise
            note(f"{each} cannot be used: {error}")


def _cases(asked: AskedDevice, rows: Iterable[KnownProblem]) -> list[VerifiedAnswer]:
    """Return the answers for a device, and with a verdict those of its own that no longer answer."""
    problems: dict[str, list[KnownProblem]] = {}
    for row in rows:
        if asked.is_like(row.where):
            problems.setdefault(row.problem, []).append(row)
    found: list[VerifiedAnswer] = []
    for some in problems.values():
        mine = next((row.answer for row in some if row.answer and asked.is_here(row.where)), None)
        try:
            problem = pose(next(row.answer for row in some if row.answer).record)
            found_here = asked.answer(problem).found
        except InputError as error:
            if mine is not None:
                found.append(VerifiedAnswer(asked.name, mine.record, UNCHECKED, str(error)))
            continue
        # an answer from a similar shape is measured as the answer of that shape
        best = next((f for f in found_here if f.measurement.key.problem == problem.key()), None)
        if best is not None:
            # an answer that is the default needs no duel
            if (best.solver.id, best.config) != asked.default(problem):
                found.append(VerifiedAnswer(asked.name, best.measurement))
        elif mine is not None and (mine.record.key.solver, mine.record.config) != mine.record.evidence.default:
            found.append(VerifiedAnswer(asked.name, mine.record, GONE, asked.verdict(problem, mine.layer, mine.record)))
    return found


def _measure(asked: AskedDevice, cases: Sequence[VerifiedAnswer], user: Database, settings: Settings) -> None:
    """Run a duel for each answer. Each result is stored at once, so that an interrupt loses nothing."""
    if not cases:
        return
    from tunewright.measure.isolated import measurer_for

    with measurer_for(asked.device, settings) as measurer:
        for i, case in enumerate(cases, 1):
            with working(f"{asked.name}: {i} of {len(cases)}, {problem_text(case.stored.key.problem)}", patience=0.1):
                _duel(asked, case, measurer, user, settings)
    checked = sum(c.verdict != UNCHECKED for c in cases)
    drifted = sum(c.verdict == DRIFTED for c in cases)
    user.note("verified", f"{plural(checked, 'answer')} on {asked.name}, {drifted} drifted")


def _duel(asked: AskedDevice, case: VerifiedAnswer, measurer: Measurer, user: Database, settings: Settings) -> None:
    from tunewright.knowledge.record import Fault
    from tunewright.tuning.session import MeasuringPlan, SessionSubject, duel

    m = case.stored
    problem = pose(m)
    default = asked.default(problem)
    if default is None:
        case.verdict, case.why = UNCHECKED, "there is no default to compare it with"
        return
    # "layer" reproduces the cache state of a network
    regime = "layer" if m.evidence.regime == "network" else m.evidence.regime
    try:
        now = duel(
            SessionSubject(problem, asked.device.target, default, asked.solvers(problem)),
            (m.key.solver, m.config), measurer,
            MeasuringPlan(settings.tune_seconds, settings.tune_seed, regime),
        )  # fmt: skip
    except DeviceError as error:
        case.verdict, case.why = UNCHECKED, str(error)
        return
    if isinstance(now, Fault):
        case.verdict, case.why = DRIFTED, f"{now.status.lower()}: {now.why}"
        user.add([now])
        return
    case.gain = now.evidence.gain
    if now.evidence.confirmed:
        case.verdict = HOLDS
    elif case.gain.high < m.evidence.gain.low:
        case.verdict, case.why = DRIFTED, "the default is used from now on"
    else:
        # Noise left the result open. The newest measurement counts, so this one must not replace a better one.
        case.verdict, case.why = OPEN, "too noisy to tell; a larger TUNE_SECONDS may help"
        return
    user.add([now])


def _json(case: VerifiedAnswer) -> dict[str, Any]:
    m = case.stored
    return {
        "problem": m.key.problem,
        "device": case.device,
        "solver": m.key.solver,
        "config": dict(m.config),
        "record": m.digest,
        "before": vars(m.evidence.gain),
        "now": vars(case.gain) if case.gain is not None else None,
        "verdict": case.verdict,
        "why": case.why or None,
    }


def _print(cases: Sequence[VerifiedAnswer], left: int) -> None:
    out = console()
    if cases:
        made = table("problem and kernel", ">before", ">now", "verdict")
        for case in cases[:SHOWN]:
            m = case.stored
            kernel = f"{safe(m.key.solver)} {config_text(m.config)}".rstrip()
            texts = [problem_text(m.key.problem), kernel, *([safe(case.why)] if case.why else [])]
            now = gain_lines(case.gain) if case.gain is not None else "-"
            made.add_row(stacked(*texts), gain_lines(m.evidence.gain), now, case.verdict)
        out.print(made)
        out.print()
    if len(cases) > SHOWN:
        out.print(f"and {len(cases) - SHOWN:,} more (--json has all)")
    counts = [(n, v) for v in (HOLDS, DRIFTED, OPEN, GONE, UNCHECKED) if (n := sum(c.verdict == v for c in cases))]
    summary = ", ".join(f"{n} {verdict}" for n, verdict in counts) or "no stored answer is used here"
    out.print(f"{summary}; {plural(left, 'answer')} not measured this time (--all)" if left else summary)
