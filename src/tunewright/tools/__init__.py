"""The command line. Every module here with a tuple ``COMMANDS`` of functions adds sub-commands."""

from __future__ import annotations

import sys

from ..errors import TunewrightError


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit code 2."""
    import typer

    from .. import discovery

    app = typer.Typer(
        name="tunewright", no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False,
        help="An inference engine for ONNX models that tunes its own kernels.",
    )
    for name, command in discovery.find("tunewright.commands", key=lambda c: c.__name__.replace("_", "-")).items():
        app.command(name)(command)
    try:
        app()
    except TunewrightError as error:
        sys.stderr.write(f"tunewright: {error}\n")
        raise SystemExit(2) from None
