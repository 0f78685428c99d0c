"""Open the knowledge bases that settings or paths name. A process opens each of them once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..errors import InputError
from ..settings import Settings, own_folder
from .database import Database

#: Folder of the shipped data.
SHIPPED = Path(__file__).parents[1] / "data"
_OPEN: dict[tuple[str, Path], Database] = {}


def user_folder(settings: Settings) -> Path:
    """Return USER_DB_PATH, else TUNE_BANK_PATH, else a folder in the user's data."""
    named = settings.user_db_path or settings.tune_bank_path
    if named:
        return Path(named).expanduser().absolute()
    return own_folder("data")


def system_folder(settings: Settings) -> Path:
    """Return SYSTEM_DB_PATH, else the folder that ships with the package."""
    if settings.system_db_path:
        return Path(settings.system_db_path).expanduser().absolute()
    return SHIPPED


def warnings(settings: Settings) -> list[str]:
    """Return warnings about contradictory settings."""
    one, other = settings.user_db_path, settings.tune_bank_path
    if one and other and Path(one).expanduser().absolute() != Path(other).expanduser().absolute():
        return [f"USER_DB_PATH ({one}) and TUNE_BANK_PATH ({other}) differ: USER_DB_PATH is used"]
    folder, mode = user_folder(settings), settings.user_db_mode
    there = {"SQLITE": folder / "kb.sqlite", "SHARED": folder / "writers"}
    others = [name for name, path in there.items() if name != mode and path.exists()]
    if others and not there[mode].exists():
        return [f"{folder} holds a knowledge base of USER_DB_MODE = {others[0]}, which {mode} does not read"]
    return []


def open_user(settings: Settings) -> Database:
    """Open the user's knowledge base."""
    return _open(settings.user_db_mode, user_folder(settings))


def open_system(settings: Settings) -> Database:
    """Open the system's knowledge base, which is read-only."""
    return _open("SYSTEM", system_folder(settings))


def open_path(path: Path) -> Database:
    """Open any knowledge base.

    ``path``: a folder, its ``kb.sqlite``, a file of JSON Lines (.jsonl), a tuning file (.json), or a model with
    embedded records (.onnx). Raises `InputError` for anything else.
    """
    path = path.absolute()
    if path.suffix == ".json":
        from .tuning_file import TuningFile

        return TuningFile(path).as_database()
    if path.suffix == ".onnx":
        from .embedded import EmbeddedDatabase

        return EmbeddedDatabase(path)
    if path.suffix == ".jsonl":
        from .system import SystemDatabase

        return SystemDatabase(path.parent, path.name)
    folder = path.parent if path.name == "kb.sqlite" else path
    for mode, name in (("SQLITE", "kb.sqlite"), ("SHARED", "writers"), ("SYSTEM", "system.jsonl")):
        if (folder / name).exists():
            return _open(mode, folder)
    hint = "it is a folder with kb.sqlite, writers or system.jsonl in it, a .jsonl file or a tuning file in .json"
    raise InputError("is no knowledge base", where=str(path), hint=hint)


def _open(mode: str, folder: Path) -> Database:
    if (mode, folder) not in _OPEN:
        # Opening reads nothing, so two threads may do it at once; the first object is kept.
        _OPEN.setdefault((mode, folder), _opener(mode)(folder))
    return _OPEN[mode, folder]


def _opener(mode: str) -> Callable[[Path], Database]:
    """Return the class of a mode, imported on demand because most programs use only one."""
    if mode == "SHARED":
        from .shared import SharedDatabase

        return SharedDatabase
    if mode == "SYSTEM":
        from .system import SystemDatabase

        return SystemDatabase
    from .sqlite import SqliteDatabase

    return SqliteDatabase
