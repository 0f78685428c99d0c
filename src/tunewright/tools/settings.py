"""``tunewright settings``: what can be set."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from .common import cell, console, size, table


def settings(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the settings: key, type, default, meaning.

    Give one as --config KEY=VALUE, or in the environment as TUNEWRIGHT_KEY.

    Example: tunewright run model.onnx --config PERF_COUNT=YES
    """
    from ..settings import Settings

    rows = Settings.describe()
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return
    made = table("key", "type", ">default", "meaning")
    for row in rows:
        made.add_row(row["key"], row["type"], cell(_default(row["key"], row["default"])), cell(row["help"]))
    console().print(made)


def _default(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "YES" if value else "NO"
    if key.endswith("_BYTES") and isinstance(value, int):
        return size(value)
    return f"{value:,}" if isinstance(value, int) else str(value) or "-"


COMMANDS = (settings,)
