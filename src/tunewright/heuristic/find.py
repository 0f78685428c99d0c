"""Finds the file of the heuristic that settings ask for, and opens it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..knowledge.open_databases import system_folder, user_folder
from ..settings import Settings

if TYPE_CHECKING:
    from .trees import Heuristic

#: File name of the heuristic in the folder of a knowledge base.
HEURISTIC = "heuristic.json"


def heuristic_file(settings: Settings) -> Path | None:
    """Return HEURISTIC_PATH, else the file in the user's folder, else that in the system's folder, or None."""
    if settings.heuristic_path is not None:
        return Path(settings.heuristic_path).expanduser().absolute() if settings.heuristic_path else None
    there = (user_folder(settings) / HEURISTIC, system_folder(settings) / HEURISTIC)
    return next((path for path in there if path.exists()), None)


def open_heuristic(settings: Settings) -> Heuristic | None:
    """Return the heuristic, read again if its file changed.

    Returns None if there is none. If it is unreadable, warns and returns None.
    """
    path = heuristic_file(settings)
    if path is None:
        return None
    from .file import load  # imported late: a fully tuned model does not need it

    return load(path)
