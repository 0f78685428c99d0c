"""Options of the `tunewright kb` commands, and the knowledge bases that an argument names."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunewright.errors import DeviceError, InputError

from ..shared.console import note, parse_config
from .view import plural, safe

if TYPE_CHECKING:
    from tunewright.knowledge.database import Database
    from tunewright.knowledge.record import AnyRecord
    from tunewright.settings import Settings


class Layers(enum.StrEnum):
    """The knowledge bases whose records a command reads."""

    ALL = "all"
    USER = "user"
    SYSTEM = "system"


#: number of damaged lines that are listed one by one
NAMED = 10

Op = Annotated[str, typer.Option("--op", metavar="NAME", help="Only of this operation.", show_default=False)]
DeviceKind = Annotated[
    str, typer.Option("--device", metavar="KIND", help="Only of this kind of device: cpu, gpu.", show_default=False)
]
Processor = Annotated[
    str, typer.Option("--processor", metavar="TEXT", help="Only processors with this in the name.", show_default=False)
]
SolverName = Annotated[
    str, typer.Option("--solver", metavar="TEXT", help="Only solvers whose name contains this.", show_default=False)
]
LayerName = Annotated[Layers, typer.Option("--layer", "-l", help="Whose records.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AnyProcessor = Annotated[bool, typer.Option("--any-processor", help="Also records of other processors.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")]


def settings_of(config: Sequence[str] | None) -> Settings:
    """Return the settings. Prints a note about each problem with the folders that they name."""
    from tunewright.knowledge.open_databases import warnings
    from tunewright.settings import Settings

    settings = Settings.make(parse_config(config))
    for text in warnings(settings):
        note(text)
    return settings


def opened(settings: Settings, layer: str = "all") -> dict[str, Database]:
    """Open the knowledge bases of the wanted layers, the user's first."""
    from tunewright.knowledge.open_databases import open_system, open_user

    ways = {"user": open_user, "system": open_system}
    return {name: way(settings) for name, way in ways.items() if layer in ("all", name)}


def writable(settings: Settings) -> Database:
    """Return the user's knowledge base. Raises InputError if it cannot be written."""
    user = opened(settings, "user")["user"]
    if user.read_only is not None:
        hint = "choose another folder with USER_DB_PATH"
        raise InputError(f"cannot be written: {user.read_only}", where=user.path, hint=hint)
    return user


def base(text: str, settings: Settings) -> Database:
    """Open the knowledge base that an argument names: user, system, a folder, a kb.sqlite, a .jsonl or a .json file."""
    if text in ("user", "system"):
        return opened(settings, text)[text]
    from tunewright.knowledge.open_databases import open_path

    path = Path(text)
    if not path.exists():
        hint = "a knowledge base is: user, system, a folder, a kb.sqlite, a .jsonl file or a tuning file in .json"
        raise InputError("there is no such file", where=text, hint=hint)
    return open_path(path)


def solvers_here() -> set[str]:
    """Return the ids of the solvers that exist."""
    from tunewright.solvers.base import solvers

    return {solver.id for solver in solvers()}


def damage(name: str, found: Sequence[str]) -> None:
    """Print what could not be read. Some texts already begin with the file's name."""
    for text in found[:NAMED]:
        note(safe(text) if text.startswith(Path(name).name) else f"{name}: {safe(text)}")
    if len(found) > NAMED:
        note(f"{name}: and {plural(len(found) - NAMED, 'other fault')} of this kind")


def here() -> dict[tuple[str, str], str]:
    """Return kind and processor of every device of this machine, with the first name of each."""
    from tunewright.knowledge.key import Where
    from tunewright.plugins.single import open_device, visible

    found: dict[tuple[str, str], str] = {}
    for name in visible(alternatives=True):
        try:
            where = Where.of(open_device(name).target)
        except DeviceError as error:
            note(f"{name} cannot be opened: {error}")
            continue
        found.setdefault((where.device, where.processor), name)
    return found


def check_processors(records: Iterable[AnyRecord], source: str) -> None:
    """Raise InputError if records were measured on a processor that is not in this machine."""
    mine = here()
    other: dict[tuple[str, str], int] = {}
    for record in records:
        at = record.key.where.device, record.key.where.processor
        if at not in mine:
            other[at] = other.get(at, 0) + 1
    if other:
        named = "; ".join(f"{plural(n, 'record')} of {safe(at[1])} ({safe(at[0])})" for at, n in sorted(other.items()))
        have = ", ".join(f"{name} ({kind})" for kind, name in sorted(mine)) or "none"
        raise InputError(
            f"holds {named}, and this machine has {have}; nothing was taken",
            where=source,
            hint="--any-processor takes them anyway; they never match exactly here",
        )
