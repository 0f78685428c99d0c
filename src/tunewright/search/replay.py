"""Replays strategies without hardware: recorded tables answer what a strategy asks.

A table holds the outcome of every config of a space. Two formats are read, both also gzipped:

- kernel_tuner's cache files (also interrupted ones, which lack their closing brackets);
- Tunewright's own, JSON Lines: a header ``{"table": 1, "name": ..., "params": {name: [values]}}`` and one line per
  trial, ``{"config": {...}, "status": "OK", "seconds": 0.0012, "why": ""}``.
"""

from __future__ import annotations

import gzip
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from .base import Status, Trial
from .space import Config, Floats, Scalar, Space

FORMAT = 1

#: kernel_tuner writes the kind of a failure in place of the time
_FAILURES = {
    "CompilationFailedConfig": Status.FAILED,
    "InvalidConfig": Status.FAILED,
    "RuntimeFailedConfig": Status.CRASHED,
    "ErrorConfig": Status.FAILED,
}


@dataclass(frozen=True)
class Table:
    """The outcome of every config of a space."""

    name: str
    space: Space
    trials: Mapping[Config, Trial]
    #: the shortest time of all
    optimum: float

    @classmethod
    def of(cls, name: str, params: Mapping[str, Sequence[Scalar]], trials: Iterable[Trial]) -> Table:
        """Make a table from its trials. Raises InputError if none of them worked."""
        by_config = {Config(trial.config): trial for trial in trials}
        optimum = min((trial.cost for trial in by_config.values()), default=math.inf)
        if optimum == math.inf:
            raise InputError("holds no trial that worked", where=name)
        return cls(name, Space.of(params, by_config), by_config, optimum)

    def share_within(self, fraction: float) -> float:
        """Return the share of configs that reach this fraction of the optimum's speed: a measure of difficulty."""
        return sum(self.optimum / trial.cost >= fraction for trial in self.trials.values()) / len(self.trials)

    def best(self, n: int) -> list[Config]:
        """Return the n fastest configs."""
        return sorted(self.trials, key=lambda config: self.trials[config].cost)[:n]

    def save(self, path: Path) -> None:
        """Write the table in Tunewright's format, gzipped if the name ends in .gz."""
        with _open(path, "wt") as file:
            file.write(json.dumps({"table": FORMAT, "name": self.name, "params": self.space.params}) + "\n")
            for trial in self.trials.values():
                seconds = None if trial.cost == math.inf else trial.seconds
                line = {"config": dict(trial.config), "status": trial.status.value, "seconds": seconds}
                file.write(json.dumps({**line, "why": trial.why}) + "\n")


@dataclass(frozen=True)
class Run:
    """One replay of one strategy with one seed."""

    #: optimum / best so far, after each evaluation; 0 until a trial works
    curve: Floats
    #: configs that were asked more than once
    repeats: int
    #: configs asked that are not in the table: always 0 for a correct strategy
    strays: int
    #: trials that failed
    failures: int
    #: time spent inside ask and tell, in seconds
    overhead: float

    def at(self, evaluations: int) -> float:
        """Return the fraction of the optimum reached after this number of evaluations."""
        return float(self.curve[min(evaluations, len(self.curve)) - 1]) if len(self.curve) else 0.0

    def evaluations_to(self, fraction: float) -> int | None:
        """Return the number of evaluations until the fraction was reached, or None."""
        reached = np.flatnonzero(self.curve >= fraction)
        return int(reached[0]) + 1 if len(reached) else None


@dataclass(frozen=True)
class Summary:
    """The runs of one strategy on one table."""

    strategy: str
    runs: list[Run] = field(default_factory=list)

    def median_at(self, evaluations: int) -> float:
        return float(np.median([run.at(evaluations) for run in self.runs]))

    def median_to(self, fraction: float) -> float:
        """Return the median number of evaluations to the fraction; infinite unless most runs reached it."""
        # The upper median for even counts: a mean with an infinite neighbour would be infinite.
        reached = sorted(run.evaluations_to(fraction) or math.inf for run in self.runs)
        return reached[len(reached) // 2]

    @property
    def milliseconds(self) -> float:
        """Mean overhead per suggestion in milliseconds."""
        asked = sum(len(run.curve) for run in self.runs)
        return 1e3 * sum(run.overhead for run in self.runs) / max(1, asked)


def replay(
    table: Table,
    strategy: str,
    *,
    seed: int = 0,
    budget: int = 200,
    batch: int = 1,
    seeds: Iterable[Mapping[str, Scalar]] = (),
    **options: Any,
) -> Run:
    """Let a strategy search a table: every config that it asks is answered with the recorded trial."""
    from . import create  # a cycle: the package imports this module when it looks for strategies

    clock = time.perf_counter
    start = clock()
    searcher = create(strategy, table.space, seed=seed, seeds=seeds, **options)
    overhead, costs = clock() - start, list[float]()
    asked: set[Config] = set()
    repeats = strays = 0
    while len(costs) < budget:
        start = clock()
        configs = searcher.ask(min(batch, budget - len(costs)))
        overhead += clock() - start
        if not configs:
            break
        trials = []
        for config in configs:
            trial = table.trials.get(config)
            repeats, strays = repeats + (config in asked), strays + (trial is None)
            asked.add(config)
            trials.append(trial or Trial(config, Status.FAILED, why="the table does not hold it"))
        costs += [trial.cost for trial in trials]
        start = clock()
        searcher.tell(trials)
        overhead += clock() - start
    curve = table.optimum / np.minimum.accumulate(np.array(costs)) if costs else np.zeros(0)
    return Run(curve, repeats, strays, sum(cost == math.inf for cost in costs), overhead)


def load(path: Path) -> Table:
    """Read a table in either format. Raises InputError that says what is wrong with the file."""
    try:
        with _open(path, "rt") as file:
            text = file.read()
    except (OSError, EOFError, UnicodeDecodeError) as error:  # a truncated gzip file gives EOFError
        raise InputError(f"cannot be read: {getattr(error, 'strerror', None) or error}", where=str(path)) from None
    try:
        header, rest = _header(text)
        if "table" in header:
            return Table.of(str(header["name"]), header["params"], _lines(header, rest))
        if "cache" in header and "tune_params" in header:
            return Table.of(_kernel_tuner_name(path, header), *_kernel_tuner(header))
    except json.JSONDecodeError as error:
        raise InputError(f"is not JSON: {error}", where=str(path)) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"is damaged: {error!r}", where=str(path)) from None
    raise InputError(
        "is not a recorded table",
        where=str(path),
        hint="give a kernel_tuner cache file or a table of Tunewright",
    )


def _header(text: str) -> tuple[dict[str, Any], str]:
    """Return the first JSON object of a text and the text after it."""
    decoder = json.JSONDecoder()
    try:
        header, end = decoder.raw_decode(text.lstrip())
    except json.JSONDecodeError:
        # kernel_tuner appends while it tunes and closes both objects at the end. Close them if the run was interrupted.
        header, end = json.loads(text.rstrip().rstrip(",") + "}}"), len(text)
    if not isinstance(header, dict):
        raise ValueError("it does not start with a JSON object")
    return header, text.lstrip()[end:]


def _lines(header: Mapping[str, Any], rest: str) -> Iterator[Trial]:
    if header["table"] != FORMAT:
        raise ValueError(f"its format is {header['table']}, this version reads {FORMAT}")
    for line in filter(str.strip, rest.splitlines()):
        entry = json.loads(line)
        seconds = entry["seconds"]
        yield Trial(
            Config(entry["config"]),
            Status(entry["status"]),
            math.inf if seconds is None else float(seconds),
            str(entry.get("why", "")),
        )


def _kernel_tuner_name(path: Path, header: Mapping[str, Any]) -> str:
    return f"{header.get('kernel_name', path.name)} on {header.get('device_name', 'unknown')}"


def _kernel_tuner(header: Mapping[str, Any]) -> tuple[dict[str, list[Scalar]], list[Trial]]:
    keys = list(header.get("tune_params_keys") or header["tune_params"])
    trials = []
    for entry in header["cache"].values():
        config, value = Config((key, entry[key]) for key in keys), entry.get("time")
        # older files mark a failure with a huge time, newer ones with a word
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e19:
            trials.append(Trial(config, Status.OK, float(value) / 1e3))  # kernel_tuner uses milliseconds
        else:
            trials.append(Trial(config, _FAILURES.get(str(value), Status.FAILED), why=str(value)))
    # Drop values that no config uses. Keep values that configs use even if the header lacks them.
    used = {key: {trial.config[key] for trial in trials} for key in keys}
    params = {key: [value for value in header["tune_params"][key] if value in used[key]] for key in keys}
    for key in keys:
        params[key] += sorted(used[key].difference(params[key]), key=str)
    return params, trials


def _open(path: Path, mode: str) -> Any:
    if mode == "wt":
        return gzip.open(path, "wt", encoding="utf-8") if path.suffix == ".gz" else path.open("w", encoding="utf-8")
    with path.open("rb") as file:  # decide by content, because downloads lose suffixes
        zipped = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rt", encoding="utf-8") if zipped else path.open(encoding="utf-8")
