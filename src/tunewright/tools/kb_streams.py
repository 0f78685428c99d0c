"""``tunewright kb streams``: how many streams and requests models were measured to do best with."""

from __future__ import annotations

import dataclasses
import json
import sys

from .common import Configs, cell, console, table
from .kb_open import AsJson, settings_of
from .kb_view import safe


def streams(config: Configs = None, as_json: AsJson = False) -> None:
    """Streams and requests that were measured for models (NUM_STREAMS = AUTO), the newest first.

    Example: tunewright kb streams --json
    """
    from ..tuning.streams import StreamsFile

    file = StreamsFile.of(settings_of(config))
    found = sorted(file.read().items(), key=lambda item: item[1].date, reverse=True)
    if as_json:
        rows = [{"key": key, **dataclasses.asdict(answer)} for key, answer in found]
        sys.stdout.write(json.dumps({"path": str(file.path), "models": rows}, indent=2) + "\n")
        return
    out = console()
    if not found:
        out.print(f"nothing was measured yet: {file.path}", markup=False, soft_wrap=True)
        return
    made = table("date", "model", ">streams", ">requests", "inferences per second by streams x requests")
    for _, answer in found:
        rates = ", ".join(f"{name} {rate:.4g}" for name, rate in answer.rates.items())
        texts = (answer.date[:10], answer.model, str(answer.streams), str(answer.requests), rates)
        made.add_row(*(cell(safe(text)) for text in texts))
    out.print(made)
