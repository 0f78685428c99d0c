"""Completions of the shell: devices, settings and their values, model files.

``tunewright --install-completion`` sets up a shell; ``--show-completion`` prints what it would write.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from pathlib import Path

#: devices that combine others
SEVERAL = ("HETERO", "MULTI", "AUTO", "BATCH")


def model_files(incomplete: str) -> list[str]:
    """Return ONNX files and folders. Without ONNX files returns nothing, because the shell completes folders itself."""
    folder, _, start = incomplete.rpartition("/")
    at = Path(folder or ("/" if incomplete.startswith("/") else ".")).expanduser()
    head = f"{folder}/" if "/" in incomplete else ""
    try:
        entries = sorted(p for p in at.iterdir() if p.name.startswith(start) and (start or not p.name.startswith(".")))
    except OSError:
        return []
    files = [head + p.name for p in entries if p.suffix.lower() == ".onnx"]
    return files + [f"{head}{p.name}/" for p in entries if p.is_dir()] if files else []


def devices(incomplete: str) -> list[str]:
    """Return the devices of this machine, also in lists after ``HETERO:`` and the like."""
    from tunewright.plugins.single import visible

    kind, colon, names = incomplete.partition(":")
    if colon and kind.upper() in SEVERAL:
        taken, comma, _ = names.rpartition(",")
        known = {name.upper() for name in taken.split(",")}
        return [f"{kind}:{taken}{comma}{name}" for name in visible() if name not in known]
    return [*visible(alternatives=True), "AUTO", *(f"{name}:" for name in SEVERAL)]


def settings(incomplete: str) -> list[str]:
    """Return ``KEY=``, or after the ``=`` the values of the key."""
    from tunewright.settings import Settings

    key, equals, _ = incomplete.partition("=")
    rows = {row["key"]: row for row in Settings.describe()}
    if not equals:
        return [f"{name}=" for name in rows]
    return [f"{key}={value}" for value in _values(key.upper())] if key.upper() in rows else []


def _values(key: str) -> list[str]:
    from dataclasses import fields

    from tunewright.settings import Settings

    field = next(f for f in fields(Settings) if f.name.upper() == key)
    if field.type == "bool":
        return ["YES", "NO"]
    named = [*(field.metadata.get("values") or ()), *(field.metadata.get("words") or ())]
    return [str(value) for value in named if not str(value).isdecimal()]


def behind(head: str, run: Callable[[], int]) -> int:
    """Run ``run`` and print its lines without the prefix ``head``: bash replaces only its own idea of the word."""
    printed = io.StringIO()
    code: int | str | None
    with contextlib.redirect_stdout(printed):
        try:
            code = run()
        except SystemExit as end:
            code = end.code
    lines = printed.getvalue().splitlines()
    sys.stdout.write("".join(f"{line.removeprefix(head)}\n" for line in lines))
    return code if isinstance(code, int) else 0
