"""``tunewright cache``: compiled kernels on disk, which processes share."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import SettingsError
from .shared.console import Configs, cell, console, parse_config, size, table

if TYPE_CHECKING:
    from ..devices.kernel_cache import CacheEntry, KernelCache

#: changes when the meaning of a JSON key changes
SCHEMA = "tunewright.cache/1"

app = typer.Typer(name="cache", help="The cache of compiled kernels on disk: show its folder, count it, clear it.")


@app.command()
def path(config: Configs = None) -> None:
    """Print the folder of the cache. CACHE_DIR sets it; it need not exist yet.

    Example: du -sh "$(tunewright cache path)"
    """
    sys.stdout.write(f"{_open(config).folder}\n")


@app.command()
def stats(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False, config: Configs = None) -> None:
    """Show the number and size of cached programs, the size limit, when they were last used, and their devices.

    Example: tunewright cache stats --json
    """
    cache = _open(config)
    entries = cache.entries()
    devices: dict[str, dict[str, int]] = {}
    for entry in entries:
        about = devices.setdefault(entry.label or "unknown", {"entries": 0, "bytes": 0})
        about["entries"] += 1
        about["bytes"] += entry.nbytes
    total = sum(entry.nbytes for entry in entries)
    if as_json:
        report = {
            "schema": SCHEMA,
            "folder": str(cache.folder),
            "entries": len(entries),
            "bytes": total,
            "limit_bytes": cache.limit_bytes,
            "oldest": _date(entries[0]) if entries else None,
            "newest": _date(entries[-1]) if entries else None,
            "devices": devices,
        }
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return
    out = console()
    out.print(cell(cache.folder), soft_wrap=True)
    out.print(f"{len(entries):,} programs, {size(total)} of at most {size(cache.limit_bytes)}", markup=False)
    if entries:
        out.print(f"last used between {_date(entries[0])} and {_date(entries[-1])}", markup=False)
        out.print()
        made = table("device", ">programs", ">size")
        for name, about in sorted(devices.items()):
            made.add_row(cell(name), f"{about['entries']:,}", size(about["bytes"]))
        out.print(made)


@app.command()
def clear(
    device: Annotated[
        str | None,
        typer.Option(
            "--device", "-d", metavar="TEXT", show_default=False, help="Only those whose device has TEXT in its name."
        ),
    ] = None,
    config: Configs = None,
) -> None:
    """Remove all cached programs, or those of one device. Running processes only have to compile them again.

    Example: tunewright cache clear --device intel
    """
    cache = _open(config)
    word = (device or "").casefold()
    gone = cache.clear(lambda entry: word in entry.label.casefold())
    left = len(cache.entries())
    text = f"removed {len(gone):,} programs ({size(sum(entry.nbytes for entry in gone))}) from {cache.folder}"
    console().print(cell(text + (f"; {left:,} are left" if left else "")), soft_wrap=True)


def _open(config: list[str] | None) -> KernelCache:
    from ..devices.kernel_cache import KernelCache
    from ..settings import Settings

    cache = KernelCache.of(Settings.make(parse_config(config)))
    if cache is None:
        raise SettingsError("there is no kernel cache: CACHE_DIR is empty", hint="unset it for the default folder")
    return cache


def _date(entry: CacheEntry) -> str:
    return datetime.fromtimestamp(entry.used).isoformat(" ", "seconds")


COMMANDS = (app,)
