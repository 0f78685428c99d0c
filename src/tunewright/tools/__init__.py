"""The command line. Every module here with a tuple ``COMMANDS`` of functions adds sub-commands.

A command is a typed function: its parameters are the options, its docstring is the help. It prints its result to
stdout, notes and progress to stderr, and raises `TunewrightError` for a user's mistake. Heavy imports belong inside the
function, because ``tunewright --help`` imports every module here.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import TunewrightError
from ..settings import rejoin_words
from .shared import interrupts

#: exit codes: a negative answer, such as outputs that differ; a user's mistake; interrupted
DIFFERENT, MISTAKE, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. A user's mistake gives one line on stderr and exit code 2."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as in `tunewright ... 2>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  it stays open
    log = logging.getLogger("tunewright")
    log.setLevel(logging.INFO)
    log.addHandler(_Notes())
    interrupts.ours = True
    given = sys.argv[1:] if arguments is None else arguments
    head = rejoin_words()
    if head:
        from .shared.complete import behind

        raise SystemExit(behind(head, lambda: execute(given)))
    raise SystemExit(execute(given))


class _Notes(logging.Handler):
    """Shows what the engine logs: warnings, and each problem that is tuned, because tuning takes time."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.name != "tunewright":  # driver commands, printed without a prefix so that users can copy them
            sys.stderr.write(f"{text}\n")
            return
        from .shared.console import note

        note(text)


def execute(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code."""
    try:
        code = _app()(list(arguments) or ["--help"], standalone_mode=False, prog_name="tunewright")
        if code == INTERRUPTED:  # typer converts KeyboardInterrupt into this code
            return _fail("interrupted", INTERRUPTED)
        sys.stdout.flush()  # flush here, where an error can still be reported
        return code if isinstance(code, int) else 0
    except TunewrightError as error:
        return _fail(str(error))
    except MemoryError:
        return _fail("not enough memory")
    except BrokenPipeError:
        return _unread()
    except SystemExit as error:  # typer and rich raise it for a broken pipe
        if isinstance(error.__context__, BrokenPipeError):
            return _unread()
        raise
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))
    except (KeyboardInterrupt, EOFError):
        return _fail("interrupted", INTERRUPTED)
    except Exception as error:
        # The parser's errors come from click, which typer may bundle. They are therefore recognised by their methods.
        if error.__class__.__name__ == "Abort":
            return _fail("interrupted", INTERRUPTED)
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        return _fail(f"{error.format_message().removesuffix('.').replace('Value error, ', '')}{hint}")


def _fail(text: str, code: int = MISTAKE) -> int:
    sys.stderr.write(f"tunewright: {' '.join(text.split())}\n")
    return code


def _unread() -> int:
    """Ignore a closed pipe, as in `tunewright graph m.onnx | head`: the reader has what it wanted."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _app() -> Any:
    """Return the typer application with every command that discovery finds."""
    import typer

    from .. import discovery

    app = typer.Typer(
        name="tunewright",
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def tunewright(
        version: bool = typer.Option(
            False, "--version", help="Print the version and exit.", callback=_version, is_eager=True
        ),
    ) -> None:
        """An inference engine for ONNX models that tunes its own kernels."""

    for name, command in discovery.find("tunewright.commands", key=_name).items():
        if isinstance(command, typer.Typer):
            for each in command.registered_commands:
                each.help = each.help or _help(each.callback)
            if command.registered_callback is not None:
                command.registered_callback.help = _help(command.registered_callback.callback)
            app.add_typer(command, name=name)
        else:
            app.command(name, help=_help(command))(command)
    return app


def _help(command: Any) -> str | None:
    """Return a command's docstring with one line per paragraph: terminals wrap at other widths than the source."""
    text = inspect.getdoc(command)
    return None if text is None else "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _name(command: Any) -> str:
    """Return the name of a command: a function, or a named typer application (a group of commands)."""
    info = getattr(command, "info", None)
    return str(info.name) if info is not None else str(command.__name__).replace("_", "-")


def _version(wanted: bool) -> None:
    if wanted:
        import typer

        from .._version import __version__

        sys.stdout.write(f"tunewright {__version__}\n")
        raise typer.Exit
