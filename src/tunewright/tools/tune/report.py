"""``tunewright report``: makes a page about a tuning from its result files."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tunewright.errors import InputError

from ..shared.console import check_writable, note


def page(contents: Sequence[Mapping[str, Any]]) -> str:
    """Return a self-contained HTML page about the JSON of result files. InputError if one is no result file."""
    from .report_data import parse
    from .report_page import html

    if not contents:
        raise InputError("a report needs a result of tuning")
    return html([parse(content) for content in contents])


def report(
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULT...", help="Files tune_result_*.json.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page; - is stdout.")] = Path(
        "report.html"
    ),
) -> None:
    """Make a page (HTML, one file, no scripts) about a tuning: times, searches, roofline, what to tune next.

    The result file of a running tuning works too.

    Example: tunewright report tune_result_*.json -o report.html
    """
    from .report_data import read

    if str(output) != "-":
        check_writable(output)
    made = page([read(path) for path in results])
    if str(output) == "-":
        sys.stdout.write(made)
    else:
        output.write_text(made, encoding="utf-8")
        note(f"the report is {output}")


COMMANDS = (report,)
