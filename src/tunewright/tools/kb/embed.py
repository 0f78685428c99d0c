"""``tunewright kb embed`` and ``kb extract``: write tuning results into a model file and read them back."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunewright.errors import InputError

from ..shared.console import (
    Configs,
    ModelFile,
    OneDevice,
    Preprocessing,
    Shapes,
    cell,
    check_writable,
    console,
    given_options,
    note,
    parse_config,
    size,
    working,
)
from .exchange import take
from .open import AnyProcessor, AsJson, DryRun, LayerName, Layers, damage, opened, settings_of
from .view import plural

if TYPE_CHECKING:
    from tunewright.core import Core
    from tunewright.knowledge.record import Measurement


def embed(
    model: ModelFile,
    out: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write to this file, not the model.", show_default=False),
    ] = None,
    shape: Shapes = None,
    preprocess: Preprocessing = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the embedded records.")] = False,
    layer: LayerName = Layers.USER,
    device: OneDevice = "CPU",
    config: Configs = None,
    as_json: AsJson = False,
) -> None:
    """Put what tuning found for a model into its file: measurements of its layers, as an entry of the metadata.

    Other engines ignore the entry. With USE_EMBEDDED = YES Tunewright uses it at load; `kb extract` copies it into a
    knowledge base. Measurements embedded earlier for other shapes or devices stay.

    Example: tunewright kb embed model.onnx -o tuned.onnx
    """
    from tunewright.core import Core
    from tunewright.knowledge.embedded import MOST_BYTES, EmbeddedDatabase
    from tunewright.knowledge.embedded import embed as clear
    from tunewright.model_tuning.embed import answers, put
    from tunewright.tuning.offline.suggested_commands import command

    to = out or model
    check_writable(to)
    core = Core(parse_config(config))
    damage(str(model), EmbeddedDatabase(model).damage())
    left_out: list[Measurement]
    if remove:
        clear(model, to, [])
        left_out, nbytes, new = [], 0, 0
    else:
        with working("compiling"):
            problems = _problems(core, model, shape, preprocess, device)
        found = answers(opened(core.settings, layer).values(), problems)
        if not found:
            tune = command("tune", str(model), device=device, options=given_options(None, shape, preprocess),
                           settings=core.settings)  # fmt: skip
            hint = f"`{tune}` measures them"
            raise InputError("the knowledge base has no measurements of its layers", where=str(model), hint=hint)
        left_out, nbytes = put(model, to, found)
        new = len(found)
    if left_out:
        note(f"{plural(len(left_out), 'measurement')} left out: a model holds at most {MOST_BYTES >> 20} MiB of them")
    count = len(list(EmbeddedDatabase(to)))
    if as_json:
        report = {"model": str(to), "embedded": count, "new": new, "left_out": len(left_out), "bytes": nbytes}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return
    what = f"{plural(count, 'measurement')} ({size(nbytes)}) in {to}" if count else f"nothing is left in {to}"
    console().print(cell(what), soft_wrap=True)


def extract(
    model: ModelFile,
    out: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write to a new .jsonl instead.", show_default=False),
    ] = None,
    any_processor: AnyProcessor = False,
    dry_run: DryRun = False,
    config: Configs = None,
    as_json: AsJson = False,
) -> None:
    """Copy the measurements in a model file into the user's knowledge base. Each is checked separately.

    It works like `kb import` of a file. Damaged records are named and left out, and the exit code is then 1. Records of
    a processor that this machine does not have are refused, unless --any-processor is given.

    Example: tunewright kb extract model.onnx -o records.jsonl
    """
    from tunewright.knowledge.embedded import EmbeddedDatabase, text_of
    from tunewright.model_tuning.embed import measurements

    if not text_of(model):
        raise InputError("carries no measurements", where=str(model), hint="`tunewright kb embed` puts some in")
    if out is None:
        take("extracted", [str(model)], any_processor, dry_run, settings_of(config), as_json)
    if out is None or out.suffix != ".jsonl":
        raise InputError("the output must be a .jsonl file", where=str(out))
    from tunewright.knowledge.system import write_lines

    if out.exists():
        raise InputError("exists already", where=str(out), hint="name another one, or remove it first")
    check_writable(out)
    found = EmbeddedDatabase(model)
    bad = found.damage()
    damage(str(model), bad)
    records = measurements([found])
    if not dry_run:
        write_lines(out, records)
    if as_json:
        report = {"file": str(out), "records": len(records), "damaged": len(bad), "dry_run": dry_run}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        console().print(cell(f"{plural(len(records), 'measurement')} in {out}"), soft_wrap=True)
    raise typer.Exit(1 if bad else 0)


def _problems(
    core: Core, model: Path, shape: Sequence[str] | None, preprocess: Sequence[str] | None, device: str
) -> set[str]:
    """Return the keys of the problems that a model poses on a device. Nothing is tuned."""
    from tunewright.model_tuning.embed import problems_of

    from ..explain import looking
    from ..shared.inputs import concrete, load

    core.settings, _ = looking(core.settings)
    feed = load(core, model, None, shape, preprocess, 0)
    found: set[str] = set()
    for piece in core.pieces(concrete(feed), feed.values, device):
        piece.compiled(piece.inputs)
        found |= problems_of(piece.compiled)
    return found
