"""Shared parts of the commands: options, the console, tables, progress, number formats, and the environment."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunewright.errors import InputError, SettingsError

from . import complete
from .interrupts import ending

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: seconds between updates of a spinner's text
SPIN = 0.25

ModelFile = Annotated[
    Path,
    typer.Argument(metavar="MODEL", help="The ONNX file.", show_default=False, autocompletion=complete.model_files),
]
DeviceName = Annotated[
    str,
    typer.Option(
        "--device",
        "-d",
        metavar="NAME",
        help="Where to run; see `tunewright devices`. Also AUTO, MULTI:A,B, HETERO:A,B and BATCH:A(8).",
        autocompletion=complete.devices,
    ),
]
OneDevice = Annotated[
    str,
    typer.Option(
        "--device",
        "-d",
        metavar="NAME",
        help="Where to run; see `tunewright devices`.",
        autocompletion=complete.devices,
    ),
]
Configs = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        "-c",
        metavar="KEY=VALUE",
        help="A setting; see `tunewright settings`. Repeatable.",
        show_default=False,
        autocompletion=complete.settings,
    ),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        "-i",
        metavar="NAME=VALUE",
        show_default=False,
        help="An input: a .npy, .npz or .pb file, or a number or list. Random where absent. Repeatable.",
    ),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        "-s",
        metavar="NAME=SHAPE",
        show_default=False,
        help="An input's shape, as in x=1x3x224x224, or the size of a symbolic dimension, as in batch=8. Repeatable.",
    ),
]
Preprocessing = Annotated[
    list[str] | None,
    typer.Option(
        "--preprocess",
        metavar="NAME=HOW",
        show_default=False,
        help="The format of an input, as in x=u8,nhwc,reverse,mean=123.7:116.3:103.5,scale=57.4 or x=u8,hwc,resize; it "
        "becomes part of the model. Repeatable.",
    ),
]
Stateful = Annotated[
    str | None,
    typer.Option(
        "--stateful",
        metavar="auto|IN=OUT,...",
        show_default=False,
        help="Inputs that the request keeps, each with the output that continues it, as in past_k=present_k; auto "
        "finds them.",
    ),
]
Frozen = Annotated[
    bool,
    typer.Option(
        "--frozen", help="Run exactly the kernels of the lockfile (MODEL.lock.json, or LOCK_FILE), or fail: FROZEN=YES."
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of random inputs.")]


def parse_config(pairs: Sequence[str] | None, frozen: bool = False) -> dict[str, str]:
    """Parse ``KEY=VALUE`` texts into a mapping, and add FROZEN. `Settings` checks the keys and values."""
    config = {"FROZEN": "YES"} if frozen else {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise SettingsError(
                f"{pair!r} is not KEY=VALUE", where="--config", hint="for example --config PERF_COUNT=YES"
            )
        config[key.strip()] = value.strip()
    return config


def given_options(
    input: Sequence[str] | None = None,
    shape: Sequence[str] | None = None,
    preprocess: Sequence[str] | None = None,
    seed: int = 0,
) -> list[str]:
    """Return the options that determine a model's inputs, for suggested command lines."""
    named = (("-i", input), ("-s", shape), ("--preprocess", preprocess))
    words = [word for option, texts in named for text in texts or () for word in (option, text)]
    return [*words, *(["--seed", str(seed)] if seed else [])]


def check_writable(path: Path, folder: bool = False) -> None:
    """Raise InputError if no file (or folder) can be created at ``path``. Call it before the work, not after."""
    there = next((p for p in (path, *path.absolute().parents) if p.exists()), path)
    if path.is_dir() and not folder:
        why, hint = "it is a folder", "name a file in it"
    elif not folder and not path.parent.is_dir():
        why, hint = f"there is no folder {path.parent}", "make it first"
    elif folder and not there.is_dir():
        why, hint = f"{there} is not a folder", "name another one"
    elif not os.access(there, os.W_OK):
        why, hint = "permission denied", "name another place"
    else:
        return
    raise InputError(f"cannot be written: {why}", where=str(path), hint=hint)


def check_readable(path: Path) -> None:
    """Raise InputError if the file cannot be opened. Its content is not checked."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where=str(path)) from None


def console(stderr: bool = False) -> Console:
    """Return the console of a command. A pipe gets no colours, and 80 columns unless COLUMNS is set."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=False, emoji=False)


def note(text: str) -> None:
    """Print a remark to the user that is not part of the result."""
    console(stderr=True).print(f"note: {text}", style="dim", markup=False, soft_wrap=True)


def table(*columns: str, title: str | None = None) -> Table:
    """Make a plain table. Types, kernels, origins and columns that begin with ``>`` (right-aligned) do not wrap."""
    from rich import box
    from rich.table import Table

    made = Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False, show_edge=False
    )
    for name in columns:
        right = name.startswith(">")
        whole = right or name in ("type", "kernel", "origin")
        made.add_column(name.lstrip(">"), justify="right" if right else "left", no_wrap=whole, overflow="fold")
    return made


@contextlib.contextmanager
def working(what: str, patience: float = 2.0) -> Iterator[None]:
    """Show a spinner on stderr if the block takes longer than ``patience`` seconds and stderr is a terminal.

    Use it only for work that Ctrl-C may abort without loss.
    """
    with ending():
        yield from _spinning(what, patience)


def _spinning(what: str, patience: float) -> Iterator[None]:
    if not sys.stderr.isatty():
        yield
        return
    from tunewright.tuning.progress import listening

    done, shown = threading.Event(), [what]

    def spin() -> None:
        if done.wait(patience):
            return
        out = console(stderr=True)
        with out.status(cell(f"{what} ...")) as status:
            while not done.wait(SPIN):
                status.update(cell(f"{shown[0] or what} ..."[: out.width - 3]))

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        with listening(lambda text: shown.__setitem__(0, text)):  # loading a model may tune it
            yield
    finally:
        done.set()
        thread.join()


def cell(text: Any) -> Any:
    """Return a table cell in which brackets are plain text, not markup."""
    from rich.text import Text

    return Text(str(text))


def number(value: float) -> str:
    """Format with five significant digits."""
    return f"{value:.5g}"


def milliseconds(seconds: float) -> str:
    """Format milliseconds for display: 0.1230, 12.30, 123.4, 1,234."""
    ms = seconds * 1e3
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.1f}" if ms >= 100 else f"{ms:.2f}" if ms >= 1 else f"{ms:.4f}"


def size(nbytes: float) -> str:
    """Format a number of bytes for display: 512 B, 1.5 KiB, 12 MiB, 7.8 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if nbytes >= 10 or unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def environment() -> dict[str, Any]:
    """Return what a measurement depends on beside the model: versions, processor, date."""
    import datetime
    from importlib import metadata

    from tunewright._version import __version__
    from tunewright.devices.host import cpu_count, cpu_name

    versions = {}
    for name in ("numpy", "onnx"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "tunewright": __version__,
        "python": platform.python_version(),
        **versions,
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": cpu_count(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
