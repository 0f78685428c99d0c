"""The file that tells what a tuning did: `tune_result_{timestamp}_pid{pid}.json`, there from the start of tuning.

One JSON object, written anew (atomically) whenever there is news, so that it can be watched and survives any end.
docs/tune.md has its members. Here is what all kinds of tuning share, and the file of a process that tunes as it loads
models (`Online`); `plugins.tune_result` writes down the tuning of whole models and of dumped problems.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..devices.base import Device
from ..errors import InputError
from ..settings import Settings
from ..solvers.base import Problem
from . import evidence, suggest
from .key import WHERE_FIELDS, Where
from .measure import Candidate
from .record import Ratio
from .session import Outcome

if TYPE_CHECKING:
    from .tuner import Choice

LOG = logging.getLogger("tunewright")
SCHEMA = "tunewright.tune/1"


class ResultFile:
    """Writes the file; no folder (an empty name): it is only kept here. An error of the disk is told once."""

    def __init__(self, folder: str, head: Mapping[str, Any]) -> None:
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d%H%M%S")
        self.path = Path(folder).expanduser() / f"tune_result_{stamp}_pid{os.getpid()}.json" if folder else None
        if self.path is not None and self.path.exists():  # of this process and second
            self.path = _numbered(self.path)
        #: what the file holds, or should
        self.content: dict[str, Any] = {"schema": SCHEMA, **head}
        self._told = False

    @property
    def is_written(self) -> bool:
        """The file is there: it has a name, and nothing was in the way."""
        return self.path is not None and not self._told

    def write(self, **members: Any) -> None:
        """Members change, and so does the file."""
        self.content.update(members)
        if self.path is None:
            return
        unfinished = self.path.with_suffix(".unfinished")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps(self.content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
            os.replace(unfinished, self.path)
        except (OSError, ValueError, RuntimeError) as error:  # of writing; of names that no file can have
            if not self._told:
                why = getattr(error, "strerror", None) or error
                LOG.warning("%s: cannot be written, and tuning goes on: %s", self.path, why)
            self._told = True


def _numbered(path: Path) -> Path:
    """The first name like this that is free."""
    return next(p for n in count(2) if not (p := path.with_stem(f"{path.stem}_{n}")).exists())


def head(kind: str, model: str | None, device: Device, settings: Mapping[str, Any], budget: float | None) -> Any:
    """The members that are known from the start. ``kind``: model, problems or online."""
    where = Where.of(device.target)
    return {
        "kind": kind, "state": "search", "model": model, "device": device.name,
        "where": {name: getattr(where, name) for name in WHERE_FIELDS}, "settings": dict(settings),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": evidence.environment(), "budget": budget, "elapsed": 0.0, "phases": {}, "layers": [],
    }  # fmt: skip


def problem_json(problem: Problem, device: str, settings: Settings) -> dict[str, Any]:
    """A problem, and the command that poses it there; None where it is too long for one."""
    try:
        line = suggest.driver(problem, device, settings)
    except InputError:
        line = None
    return {"problem": problem.key(), "op": problem.op, "command": line}


def choice_json(choice: Choice) -> dict[str, Any]:
    return {"solver": choice.solver.id, "config": dict(choice.config), "origin": choice.why}


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    return {"solver": candidate[0], "config": dict(candidate[1])}


def ratio_json(ratio: Ratio | None) -> Sequence[float] | None:
    """[median, low, high, pairs]; None too for a ratio that nobody knows."""
    known = ratio is not None and all(map(math.isfinite, (ratio.median, ratio.low, ratio.high)))
    return [ratio.median, ratio.low, ratio.high, ratio.pairs] if ratio is not None and known else None


def outcome_json(outcome: Outcome | None) -> dict[str, Any]:
    """What a search found, and all that it looked at."""
    return {
        "reason": outcome.reason if outcome is not None else "",
        "gain": ratio_json(outcome.gain) if outcome is not None else None,
        "spent": dict(outcome.seconds) if outcome is not None else {},
        "trials": [
            {**candidate_json(t.candidate), "status": str(t.status), "why": t.why, "at": t.at,
             "seconds": t.seconds if math.isfinite(t.seconds) else None}
            for t in (outcome.trials if outcome is not None else ())
        ],
    }  # fmt: skip


class Online:
    """What this process tunes while it loads or runs models: one file, in which problem follows problem."""

    def __init__(self, settings: Settings, device: Device) -> None:
        limits = {"TUNE_SECONDS": settings.tune_seconds, "TUNE_BUDGET": settings.tune_budget}
        budget = settings.tune_budget or None
        self._file = ResultFile(settings.tune_result_path, head("online", None, device, limits, budget))
        if self._file.path is not None:
            LOG.info("what is tuned is told in %s", self._file.path)
        self._settings = settings
        self._layers: list[dict[str, Any]] = []
        self._since, self._tuning = 0.0, 0.0

    def begin(self, problem: Problem, device: Device, default: Choice, seconds: float) -> None:
        """A search begins."""
        self._layers.append({
            **problem_json(problem, device.name, self._settings), "device": device.name, "nodes": [], "seconds": None, "after": None, "floor": None,
            "bound": "", "hope": None, "before": choice_json(default), "budget": seconds, "skipped": "",
            "network": [], "chosen": None, **outcome_json(None),
        })  # fmt: skip
        self._since = time.monotonic()
        self._file.write(state="search", layers=self._layers)

    def end(self, outcome: Outcome | None) -> None:
        """It is over; without an outcome there was nothing to choose from, or it failed."""
        entry = self._layers[-1]
        self._tuning += time.monotonic() - self._since
        before = (entry["before"]["solver"], entry["before"]["config"])
        if outcome is None:
            entry["skipped"] = "nothing could be searched"
        else:
            entry.update(outcome_json(outcome))
            times = [t.seconds for t in outcome.trials if (t.candidate[0], dict(t.candidate[1])) == before]
            seconds = next((s for s in times if math.isfinite(s)), None)
            gain = outcome.gain.median if outcome.gain is not None else 1.0
            entry["seconds"], entry["after"] = seconds, seconds / gain if seconds is not None else None
            entry["chosen"] = candidate_json(outcome.chosen) if outcome.changed else None
        self._file.write(
            state="finished", layers=self._layers, elapsed=self._tuning, phases={"search": self._tuning}
        )  # fmt: skip


#: by folder and process: a child that was forked has a file of its own
_ONLINE: dict[tuple[str, int], Online] = {}


def online(settings: Settings, device: Device) -> Online:
    """The file of this process."""
    at = settings.tune_result_path, os.getpid()
    if at not in _ONLINE:
        _ONLINE[at] = Online(settings, device)
    return _ONLINE[at]
