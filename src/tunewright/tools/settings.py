"""``tunewright settings``: lists the settings."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from .shared.console import cell, console, size


def settings(
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEY", help="Show more about only these.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the settings: key, type, default, meaning. For named keys also their values and other names.

    Give one as --config KEY=VALUE, or in the environment as TUNEWRIGHT_KEY. For an unknown key the closest one is
    suggested.

    Example: tunewright settings NUM_STREAMS

    Example: tunewright run model.onnx --config PERF_COUNT=YES
    """
    from rich.padding import Padding
    from rich.text import Text

    from ..settings import Settings

    rows = Settings.describe()
    if keys:
        wanted = dict.fromkeys(Settings.key(key) for key in keys)
        rows = [row for row in rows if row["key"] in wanted]
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return
    out = console()
    if keys:
        for row in rows:
            _detail(row, set(Settings.deprecated()))
        return
    for row in rows:  # no table, because long keys would leave only few columns for the meaning
        about = f"  {row['type']}, default {_default(row['key'], row['default'])}"
        out.print(Text.assemble((row["key"], "bold"), about))
        out.print(Padding(cell(row["help"]), (0, 0, 0, 4)))


def _detail(row: dict[str, Any], deprecated: set[str]) -> None:
    from rich.table import Table

    values = row["values"] and ", ".join(row["values"])
    if row["type"] in ("int", "float") and values:
        values = f"a number or {values}"
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    about = {
        "type": row["type"], "values": values, "least": row["least"], "default": _default(row["key"], row["default"]),
        "other names": ", ".join(name for name in row["aliases"] if name not in deprecated),
        "old names": ", ".join(name for name in row["aliases"] if name in deprecated), "meaning": row["help"],
    }  # fmt: skip
    for name, value in about.items():
        if value not in (None, ""):
            grid.add_row(f"  {name}", cell(str(value)))
    console().print(cell(row["key"]), style="bold")
    console().print(grid)


def _default(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "YES" if value else "NO"
    if key.endswith("_BYTES") and isinstance(value, int):
        return size(value)
    return f"{value:,}" if isinstance(value, int) else str(value) or "-"


COMMANDS = (settings,)
