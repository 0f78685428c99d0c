"""Names of several devices, as they stand behind ``MULTI:``, ``AUTO:`` and ``BATCH:``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import SettingsError
from .find import is_several

_NAME = re.compile(r"([^()]+?)\s*(?:\(\s*(\d+)\s*\))?")


def split(text: str) -> list[str]:
    """The names in a list with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def parse(names: Sequence[str], kind: str) -> list[tuple[str, int]]:
    """Names and the numbers behind them, as in ``CPU(2)``; 0 where there is none."""
    if not names:
        raise SettingsError(f"{kind}: no device is named", hint=f"name one, or more: {kind}:GPU.0 for example")
    found = []
    for text in names:
        match = _NAME.fullmatch(text)
        if match is None or (match[2] is not None and not int(match[2])):
            raise SettingsError(f"{kind}: {text!r} is not a device", hint="a name, or a name and a number: CPU(2)")
        if is_several(match[1]):
            raise SettingsError(f"{kind}: {match[1]} is several devices itself", hint="name single ones, as in CPU")
        found.append((match[1], int(match[2] or 0)))
    return found
