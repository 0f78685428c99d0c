"""``tunewright kb train``: trains a heuristic from knowledge bases, and evaluates it on unseen networks."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunewright.errors import DeviceError, InputError

from ..shared.console import Configs, cell, check_writable, console, note, size, table, working
from .ask import AskedDevice
from .open import AsJson, base, damage, opened, settings_of, writable
from .view import plural, safe

if TYPE_CHECKING:
    from tunewright.devices.base import Target
    from tunewright.heuristic.regret import HeldOut, Judged, Network
    from tunewright.heuristic.train import Example
    from tunewright.knowledge.record import AnyRecord, Fault, Measurement
    from tunewright.measure.base import Measurer
    from tunewright.settings import Settings

#: the largest result file that is read
MOST_BYTES = 256 << 20


def train(
    results: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RESULTS", show_default=False,
            help="Files tune_result_*.json: they say which problems belong to which network, and their times.",
        ),
    ] = None,
    bases: Annotated[
        list[str] | None,
        typer.Option(
            "--from", "-f", metavar="KB", show_default=False,
            help="A knowledge base to learn from: user, system, folder or file. Repeatable (default: user, system).",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write it here (default: for loads).", show_default=False),
    ] = None,
    measure: Annotated[
        float,
        typer.Option(
            "--measure", min=0, metavar="SECONDS",
            help="Measure each unmeasured pick for this time, and store the results. 0: do not.",
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the training.")] = 0,
    config: Configs = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Train a heuristic, which picks kernels for problems that nobody has measured. Needs scikit-learn (extra train).

    It is evaluated on unseen networks by leaving out each network once. A pick that was never measured for its problem
    counts as the default; --measure measures such picks.

    Example: tunewright kb train tune_result_*.json --measure 5
    """
    from tunewright.heuristic import file as heuristic_file
    from tunewright.heuristic.find import HEURISTIC
    from tunewright.heuristic.regret import hold_out, summary
    from tunewright.heuristic.train import LEAST_PROBLEMS, examples, learnable
    from tunewright.heuristic.train import train as learn
    from tunewright.knowledge.open_databases import user_folder
    from tunewright.solvers.base import solvers

    settings = settings_of(config)
    path = out if out is not None else user_folder(settings) / HEURISTIC
    if out is not None:
        check_writable(out)
    networks = read_networks(results or [])
    records = _records(bases, settings)
    known, unused = examples(records, solvers())
    for why, count in unused.most_common():
        note(f"{plural(count, 'record')} not used: {safe(why)}")
    if not learnable(known):
        hint = f"`tunewright tune` collects more: at least {LEAST_PROBLEMS} problems of one kind are needed"
        raise InputError(f"{plural(len(known), 'problem')} are too few to learn from", where="kb train", hint=hint)
    with working("training without each network in turn"):
        held = hold_out(known, networks, solvers(), seed)
    if not held:
        raise InputError("none of their problems is in the knowledge bases", where="the result files")
    if measure:
        records += _measure_picks(held, settings, measure)
        known, _ = examples(records, solvers())
    about = {"examples": _counts(known, records), **summary(held, bool(networks))}
    with working("training"):
        heuristic = learn(known, about, seed)
    text = heuristic_file.dump(heuristic)
    heuristic_file.parse(text)  # check that the text can be read before it is written
    _write(path, text)
    if as_json:
        sections = [
            {"kind": s.kind, "problems": len(s.points), "candidates": len(s.shortlist)} for s in heuristic.sections
        ]
        picks = [_pick_json(one.name, j) for one in held for j in one.judged]
        report = {"path": str(path), **about, "sections": sections, "picks": picks}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return
    _print(about, networks=bool(networks))
    kinds = plural(len(heuristic.sections), "kind") + " of problems"
    console().print(cell(f"{path}: {kinds}, {size(len(text))}"), soft_wrap=True)


def read_networks(paths: Sequence[Path]) -> list[Network]:
    """Return the networks of result files. Files of the same model make one network."""
    from tunewright.heuristic.regret import Network
    from tunewright.tuning.result_file import SCHEMA

    found: dict[str, dict[str, float]] = {}
    for path in paths:
        try:
            if path.stat().st_size > MOST_BYTES:
                raise InputError("is too large", where=str(path))
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"is not JSON: {error}", where=str(path)) from None
        hint = f"a file tune_result_*.json with the schema {SCHEMA} is needed"
        if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("layers"), list):
            raise InputError("is not a result file of tuning", where=str(path), hint=hint)
        model = data.get("model")
        mine = found.setdefault(Path(model).name if isinstance(model, str) and model else path.name, {})
        for layer in data["layers"]:
            given = layer if isinstance(layer, dict) else {}
            problem, seconds = given.get("problem"), given.get("seconds")
            if not isinstance(problem, str) or not isinstance(seconds, int | float | None):
                raise InputError("has a layer without a problem or its seconds", where=str(path), hint=hint)
            if seconds:
                mine[problem] = max(mine.get(problem, 0.0), float(seconds))
    return [Network(name, seconds) for name, seconds in found.items()]


def _records(bases: Sequence[str] | None, settings: Settings) -> list[AnyRecord]:
    """Return all records of the knowledge bases, each once."""
    found: dict[str, AnyRecord] = {}
    databases = {text: base(text, settings) for text in bases} if bases else opened(settings)
    for name, database in databases.items():
        damage(name, database.damage())
        found.update((r.digest, r) for r in database)
    return [found[digest] for digest in sorted(found)]


def _counts(known: Sequence[Example], records: Sequence[AnyRecord]) -> dict[str, int]:
    return {
        "records": len(records), "problems": len(known), "candidates": sum(len(e.gains) for e in known),
    }  # fmt: skip


def _write(path: Path, text: str) -> None:
    from tunewright.knowledge.files import make_folder, replace_file

    try:
        make_folder(path.absolute().parent)
        replace_file(path, text.encode())
    except OSError as error:
        hint = "choose another file with --out"
        raise InputError(f"cannot be written: {error.strerror}", where=str(path), hint=hint) from None


# ---- measuring what is not known ------------------------------------------------------------------------------------


def _measure_picks(held: Sequence[HeldOut], settings: Settings, seconds: float) -> list[Measurement | Fault]:
    """Measure the unmeasured picks for devices of this machine. The results are stored."""
    from tunewright.measure.isolated import measurer_for
    from tunewright.plugins.single import visible

    user, layers = writable(settings), opened(settings)
    made: list[Measurement | Fault] = []
    for name in visible():
        try:
            asked = AskedDevice(name, layers, settings)
        except DeviceError as error:
            note(f"{name} cannot be used: {error}")
            continue
        due = [
            (one, n)
            for one in held
            for n, j in enumerate(one.judged)
            if j.gain is None and _is_here(j.example.target, asked.device.target)
        ]
        if not due:
            continue
        with measurer_for(asked.device, settings) as measurer:
            for count, (one, n) in enumerate(due, 1):
                with working(f"{asked.name}: measuring pick {count} of {len(due)}", patience=0.1):
                    record = _duel(asked, one.judged[n], measurer, settings, seconds)
                if record is not None:
                    user.add([record])  # stored at once, so that an interrupt loses nothing
                    made.append(record)
                    one.judged[n] = _found(one.judged[n], record)
        user.note("trained", f"{plural(len(made), 'pick')} of a heuristic measured on {asked.name}")
    return made


def _is_here(one: Target, other: Target) -> bool:
    """Whether it is the same device, possibly with other versions of its software."""
    from tunewright.knowledge.key import Where

    return replace(Where.of(one), software="") == replace(Where.of(other), software="")


def _duel(
    asked: AskedDevice, judged: Judged, measurer: Measurer, settings: Settings, seconds: float
) -> Measurement | Fault | None:
    from tunewright.heuristic.train import tells
    from tunewright.knowledge.record import Fault
    from tunewright.tuning.session import MeasuringPlan, SessionSubject, duel

    e = judged.example
    assert judged.pick is not None
    try:
        found = duel(
            SessionSubject(e.problem, asked.device.target, e.default, asked.solvers(e.problem)), judged.pick, measurer,
            MeasuringPlan(seconds, settings.tune_seed, settings.tune_regime.lower()),
        )  # fmt: skip
    except DeviceError as error:
        note(f"a pick cannot be measured: {safe(str(error))}")
        return None
    # An inconclusive measurement must not replace earlier ones.
    return found if isinstance(found, Fault) or tells(found) else None


def _found(judged: Judged, record: Measurement | Fault) -> Judged:
    """Update a pick with its measurement. If it is the fastest known kernel, it also becomes the tuned speed."""
    from tunewright.heuristic.trees import Listed
    from tunewright.knowledge.record import Measurement

    gain = record.evidence.gain.median if isinstance(record, Measurement) else 0.0
    listed = Listed(record.key.solver, record.key.version, record.config)
    example = replace(judged.example, gains={**judged.example.gains, listed: gain})
    return replace(judged, example=example, gain=gain)


# ---- output ---------------------------------------------------------------------------------------------------------


def _pick_json(network: str, judged: Judged) -> dict[str, Any]:
    return {
        "network": network, "problem": judged.example.problem.key(), "weight": judged.weight, "why": judged.why,
        "pick": None if judged.pick is None else {"solver": judged.pick[0], "config": dict(judged.pick[1])},
        "abstains": judged.abstains, "gain": judged.gain, "best": judged.example.best, "share": judged.share,
    }  # fmt: skip


def _print(about: Mapping[str, Any], networks: bool) -> None:
    out = console()
    made = table("left out", ">problems", ">picks", ">abstained", ">unknown", ">default", ">heuristic")
    for one in about["networks"]:
        numbers = [str(one[k]) for k in ("problems", "picked", "abstained", "unknown")]
        made.add_row(cell(safe(one["name"])), *numbers, f"{one['untuned']:.1%}", f"{one['speed']:.1%}")
    out.print(made)
    out.print()
    what = "networks" if networks else "groups of problems"
    defaults = f"the defaults have {about['untuned']:.1%}"
    out.print(f"{about['speed']:.1%} of the tuned speed on {what} that it had not seen; {defaults}.")
    if about["regret"]:
        regret = about["regret"]
        out.print(
            f"Lost on a problem: {regret['median']:.1%} in the middle, {regret['p90']:.1%} in nine of ten at most,"
            f" {regret['worst']:.1%} at worst."
        )
    if about["unknown"]:
        picks = plural(about["unknown"], "pick")
        out.print(
            f"{picks} of {about['picked']} not measured for that problem count as the default (--measure 5 measures"
            f" them); without those problems it is {about['known']:.1%}."
        )
    if not networks:
        note("no result files were given: groups of problems are left out, not networks, which is an easier test")
