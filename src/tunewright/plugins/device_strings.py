"""Parse the names of several devices behind ``MULTI:``, ``AUTO:`` and ``BATCH:``."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

from ..errors import DeviceError, SettingsError
from .find import is_several
from .single import is_known

_T = TypeVar("_T")

LOG = logging.getLogger("tunewright")

_NAME = re.compile(r"([^()]+?)\s*(?:\(\s*(\d+)\s*\))?")


def split(text: str) -> list[str]:
    """Split a list of names at commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def parse(names: Sequence[str], kind: str) -> list[tuple[str, int]]:
    """Return names with the numbers behind them, as in ``CPU(2)``; 0 if there is no number."""
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


def usable(wanted: Sequence[tuple[str, Callable[[], _T]]], kind: str) -> list[tuple[str, _T]]:
    """Open the devices of these names, and return those that open, with their names.

    The others are left out with a warning, unless none remains. A name that no device has is an error.
    """
    found: list[tuple[str, _T]] = []
    reasons: list[DeviceError] = []
    for name, open in wanted:
        try:
            found.append((name, open()))
        except DeviceError as error:
            if not is_known(name):
                raise
            reasons.append(error)
    if reasons and not found:
        raise reasons[0]
    for reason in reasons:
        _tell(kind, reason.what)
    return found


@lru_cache(64)
def _tell(kind: str, why: str) -> None:
    """Warn once, because several parts of a command open the devices of the same string."""
    LOG.warning("%s does without a device: %s", kind, why)
