"""``tunewright kb streams``: shows the measured best streams, requests and batches of models."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated

import typer

from tunewright.errors import InputError

from ..shared.console import Configs, cell, console, table
from .open import AsJson, settings_of
from .view import plural, safe

if TYPE_CHECKING:
    from tunewright.knowledge.streams import StreamsAnswer


def streams(
    forget: Annotated[
        str | None,
        typer.Option(
            "--forget", metavar="WHICH", show_default=False,
            help="Drop the measurements of a model: its name, or the beginning of a key; all: of every model.",
        ),
    ] = None,
    config: Configs = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Show the streams, requests and batches that were measured for models (NUM_STREAMS = AUTO), newest first.

    `tunewright benchmark MODEL --hint throughput --streams auto` measures them once. 2x4 means 2 streams with 4
    requests. In 2x32x8 there are 32 requests, 8 of them together. The table shows the best of each batch; --json has
    all.

    Example: tunewright kb streams --json

    Example: tunewright kb streams --forget model.onnx
    """
    from tunewright.knowledge.streams import StreamsFile, told

    file = StreamsFile.of(settings_of(config))
    if forget is not None:
        found = file.forget(lambda key, answer: _is_meant(forget, key, answer))
        if not found:
            hint = "`tunewright kb streams` lists them"
            raise InputError(f"{forget!r} matches no measured model", where="--forget", hint=hint)
    else:
        found = file.read()
    rows = sorted(found.items(), key=lambda item: item[1].date, reverse=True)
    if as_json:
        models = [{"key": key, **dataclasses.asdict(answer)} for key, answer in rows]
        sys.stdout.write(json.dumps({"path": str(file.path), "models": models}, indent=2) + "\n")
        return
    out = console()
    if forget is not None:
        out.print(f"forgotten: {plural(len(rows), 'answer')} of {file.path}", markup=False, soft_wrap=True)
    elif not rows:
        out.print(f"nothing was measured yet: {file.path}", markup=False, soft_wrap=True)
        return
    made = table("key", "date", "model", ">streams", ">requests", ">batch", "inferences per second")
    for key, answer in rows:
        rates = told(answer.rates) + (f"; {answer.ended}" if answer.ended else "")
        rates += f"; {answer.doubt}" if answer.doubt else ""
        numbers = (str(n) for n in (answer.streams, answer.requests, answer.batch))
        texts = (key[:8], answer.date[:10], answer.model, *numbers, rates)
        made.add_row(*(cell(safe(text)) for text in texts))
    out.print(made)


def _is_meant(text: str, key: str, answer: StreamsAnswer) -> bool:
    return text == "all" or key.startswith(text) or text in (answer.model, PurePath(answer.model).name)
