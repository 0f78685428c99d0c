"""The result file of a tuning: `tune_result_{timestamp}_pid{pid}.json`, which exists from the start.

It is one JSON object, replaced atomically at each change. It can therefore be watched, and stays valid however tuning
ends. docs/tune-files.md describes its members. This module holds the part common to all kinds of tuning. `online`
writes the tuning of a process that loads models; `model_tuning.result` that of whole models and dumped problems.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..devices.base import Device
from ..errors import InputError
from ..knowledge.key import WHERE_FIELDS, Where
from ..knowledge.record import Ratio
from ..measure.base import Candidate
from ..settings import Settings
from ..solvers.base import Problem
from . import evidence
from .offline import suggested_commands
from .session import Outcome

if TYPE_CHECKING:
    from .tuner import Choice

LOG = logging.getLogger("tunewright")
SCHEMA = "tunewright.tune/1"


class ResultFile:
    """Writes the result file.

    With an empty folder name it keeps the content in memory only. Disk errors are reported once.
    """

    def __init__(self, folder: str, head: Mapping[str, Any]) -> None:
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d%H%M%S")
        self.path = Path(folder).expanduser() / f"tune_result_{stamp}_pid{os.getpid()}.json" if folder else None
        if self.path is not None and self.path.exists():  # another one of this process from the same second
            self.path = _numbered(self.path)
        #: the file's content, also if it could not be written
        self.content: dict[str, Any] = {"schema": SCHEMA, **head}
        self._told = False

    @property
    def is_written(self) -> bool:
        """Whether the file exists: it has a name, and no error prevented writing."""
        return self.path is not None and not self._told

    def write(self, **members: Any) -> None:
        """Change members and rewrite the file."""
        self.content.update(members)
        if self.path is None:
            return
        unfinished = self.path.with_suffix(".unfinished")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(self.content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
            os.replace(unfinished, self.path)
        except (OSError, ValueError, RuntimeError) as error:  # failed writes, and invalid file names
            if not self._told:
                why = getattr(error, "strerror", None) or error
                LOG.warning("%s: cannot be written, and tuning goes on: %s", self.path, why)
            self._told = True


def _numbered(path: Path) -> Path:
    """Return the first free name with a number appended."""
    return next(p for n in count(2) if not (p := path.with_stem(f"{path.stem}_{n}")).exists())


def head(kind: str, model: str | None, device: Device, settings: Mapping[str, Any], budget: float | None) -> Any:
    """Return the members that are known at the start. ``kind``: model, problems or online."""
    where = Where.of(device.target)
    return {
        "kind": kind, "state": "search", "model": model, "device": device.name,
        "where": {name: getattr(where, name) for name in WHERE_FIELDS}, "settings": dict(settings),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": evidence.environment(), "budget": budget, "elapsed": 0.0, "phases": {}, "layers": [],
    }  # fmt: skip


def problem_json(problem: Problem, device: str, settings: Settings) -> dict[str, Any]:
    """Describe a problem with the command that poses it on a device; the command is None if there is none."""
    try:
        line = suggested_commands.driver(problem, device, settings)
    except InputError:
        line = None
    return {"problem": problem.key(), "op": problem.op, "command": line}


def choice_json(choice: Choice) -> dict[str, Any]:
    return {"solver": choice.solver.id, "config": dict(choice.config), "origin": choice.why}


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    return {"solver": candidate[0], "config": dict(candidate[1])}


def ratio_json(ratio: Ratio | None) -> Sequence[float] | None:
    """Return [median, low, high, pairs]; None for a missing or unknown ratio."""
    known = ratio is not None and all(map(math.isfinite, (ratio.median, ratio.low, ratio.high)))
    return [ratio.median, ratio.low, ratio.high, ratio.pairs] if ratio is not None and known else None


def outcome_json(outcome: Outcome | None) -> dict[str, Any]:
    """Describe the result of a search and every candidate that it examined."""
    return {
        "reason": outcome.reason if outcome is not None else "",
        "open": outcome is not None and outcome.is_open,
        "gain": ratio_json(outcome.gain) if outcome is not None else None,
        "spent": dict(outcome.seconds) if outcome is not None else {},
        "trials": [
            {**candidate_json(t.candidate), "status": str(t.status), "why": t.why, "at": t.at,
             "seconds": t.seconds if math.isfinite(t.seconds) else None}
            for t in (outcome.trials if outcome is not None else ())
        ],
    }  # fmt: skip
