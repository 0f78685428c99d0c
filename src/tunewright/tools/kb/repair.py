"""``tunewright kb repair``: rebuilds a damaged knowledge base from what can still be read."""

from __future__ import annotations

import json
import sys

from tunewright.errors import InputError

from ..shared.console import Configs, cell, console
from .open import AsJson, damage, settings_of, writable
from .view import plural


def repair(config: Configs = None, as_json: AsJson = False) -> None:
    """Rebuild the user's knowledge base from what can still be read. The damaged file is kept under another name.

    The next tuning does the same with a file that cannot be used at all.

    Example: tunewright kb repair
    """
    from tunewright.knowledge.sqlite import SqliteDatabase

    settings = settings_of(config)
    if settings.user_db_mode != "SQLITE":
        hint = "damaged lines are never used, and `tunewright kb prune` leaves them out of the files that it joins"
        raise InputError("there is nothing to repair in a shared folder", where="kb repair", hint=hint)
    user = writable(settings)
    assert isinstance(user, SqliteDatabase)
    found = user.repair()
    records = sum(1 for _ in user)
    if as_json:
        sys.stdout.write(json.dumps({"path": user.path, "damage": list(found), "records": records}, indent=2) + "\n")
        return
    damage("user", found)
    state = f"{plural(len(found), 'fault')} found, and the file made anew" if found else "nothing is damaged"
    console().print(cell(f"{state}: {plural(records, 'record')} in {user.path}"), soft_wrap=True)
