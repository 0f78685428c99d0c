"""``tunewright kb traffic``: shows the shapes that models met while they served (RECORD_TRAFFIC)."""

from __future__ import annotations

import json
import sys
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated

import typer

from tunewright.errors import InputError

from ..shared.console import Configs, cell, check_writable, console, note, table
from ..tune.workloads import InputShapes
from .open import AsJson, settings_of, writable
from .view import plural, safe

if TYPE_CHECKING:
    from tunewright.core import Core
    from tunewright.knowledge.traffic import ModelTraffic, Weighted

#: number of shapes of a model that are listed, and that `tune --from-traffic` tunes for
LISTED, TUNED = 8, 4
#: minimum seconds of tuning per shape
LEAST = 5.0


def traffic(
    which: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", show_default=False, help="Only this model: its name or key.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option("--export", metavar="FILE", show_default=False, help="Write it to a file (.json).")
    ] = None,
    import_: Annotated[
        list[Path] | None,
        typer.Option("--import", metavar="FILE", show_default=False,
                     help="Merge an exported file; nothing counts twice. Repeatable."),
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Drop the records of MODEL; all: of every model.")
    ] = False,
    config: Configs = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Show the shapes that models met, how often, and their total time (RECORD_TRAFFIC = YES).

    Only shapes are recorded, never data. `tunewright tune MODEL --from-traffic` divides its time by them.

    Example: tunewright kb traffic model.onnx --json

    From another machine: tunewright kb traffic --import theirs.json
    """
    from tunewright.knowledge.traffic import TrafficFile, merge_files, to_text

    settings = settings_of(config)
    file = TrafficFile.of(settings)
    if import_:
        writable(settings)
        taken = merge_files(file, import_)
        note(f"merged: {plural(len(taken), 'model')} into {file.path}")
    if forget and which is None:
        raise InputError("needs a model", where="--forget", hint="name one, or all")
    known = file.read()
    rows = {k: m for k, m in known.items() if which is None or _is_meant(which, k, m) or (forget and which == "all")}
    if which is not None and not rows:
        raise InputError(f"no traffic of {which!r} was recorded", where=str(file.path),
                         hint="`tunewright kb traffic` lists the models")  # fmt: skip
    if forget:
        gone = file.forget(lambda key, model: key in rows)
        note(f"forgotten: the traffic of {plural(len(gone), 'model')}")
        return
    if export is not None:
        check_writable(export)
        export.write_text(to_text(rows), encoding="utf-8")
        note(f"{plural(len(rows), 'model')} in {export}")
    elif as_json:
        sys.stdout.write(json.dumps(_as_json(file.path, rows), indent=2) + "\n")
    else:
        _show(file.path, rows)


def _as_json(path: Path, rows: dict[str, ModelTraffic]) -> dict[str, object]:
    from tunewright.knowledge.traffic import weighted

    def shape(one: Weighted) -> dict[str, object]:
        return {"shapes": one.shapes, "count": one.count, "seconds": one.seconds, "weight": one.weight}

    models = [
        {"key": key, "name": model.name, "processes": len(model.entries), "shapes": [shape(s) for s in weighted(model)]}
        for key, model in rows.items()
    ]
    return {"path": str(path), "models": models}


def _show(path: Path, rows: dict[str, ModelTraffic]) -> None:
    from tunewright.knowledge.traffic import weighted

    out = console()
    if not rows:
        out.print(f"nothing was recorded yet: {path}", markup=False, soft_wrap=True)
        return
    made = table("model and shapes", ">count", ">ms each", ">share")
    for key, model in rows.items():
        every = weighted(model)
        made.add_row(cell(safe(f"{PurePath(model.name).name} ({key[:8]})")), "", "", "")
        for one in every[:LISTED]:
            numbers = f"{one.count:,}", f"{1e3 * one.seconds / max(one.count, 1):.3f}", f"{one.weight:.0%}"
            made.add_row(*(cell(safe(text)) for text in (f"  {' '.join(options(one))}", *numbers)))
        if len(every) > LISTED:
            made.add_row(cell(f"  {plural(len(every) - LISTED, 'other shape')} (--json has all)"), "", "", "")
    out.print(made)


def options(one: Weighted) -> list[str]:
    """Return the shapes as values of ``--shape``. Scalars need none."""
    return [f"{name}={'x'.join(map(str, shape))}" for name, shape in one.shapes.items() if shape]


def cases_of_traffic(core: Core, model: Path, seconds: float) -> list[InputShapes]:
    """Return the cases of ``tune --from-traffic``: the shapes with the most time, weighted by their number.

    The tuning time limits how many there are.
    """
    every = core.traffic(model, max(1, min(TUNED, int(seconds / LEAST))))
    return [InputShapes(tuple(options(one)), weight=one.count) for one in every]


def _is_meant(text: str, key: str, model: ModelTraffic) -> bool:
    return key.startswith(text) or text in (model.name, PurePath(model.name).name)
