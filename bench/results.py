"""What the raw figures of ``make bench`` say: speed-ups with spread, means over sets, goals, memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Report = dict[str, Any]
Row = dict[str, Any]

SCHEMA = "tunewright.bench/4"
ORT, OPENVINO = "ONNX Runtime", "OpenVINO"
OURS = "Tunewright, "
#: of the output's scale: more is another answer. Quantised networks round, and a step of theirs is a step of 255.
TOLERANCE = {"int8": 0.05}
FLOAT_TOLERANCE = 1e-3
#: peak memory over ONNX Runtime's
MEMORY = 1.2


@dataclass(frozen=True)
class Goal:
    """Of a set: the geometric mean of its speed-ups, the least of them, and over whom if not over the better peer."""

    mean: float | None
    least: float
    peer: str = ""

    def __str__(self) -> str:
        over = f" of {self.peer}" if self.peer else ""
        each = f"each {self.least:g}{over}"
        return each if self.mean is None else f"mean {self.mean:g}, {each}"


#: all networks together, where vectors of 512 bits have whole data paths (elsewhere a mean of 1.2)
ALL, WHOLE = "all networks", Goal(1.4, 0.95)
GOALS = {
    **dict.fromkeys(("3x3 convolutions", "mobile", "transformers", "recurrent and tiny"), Goal(None, 0.95)),
    "int8": Goal(None, 0.95, ORT),
}
#: of models that nobody tuned: part of the tuned speed, and of what tuning gains
UNTUNED = (0.92, 0.70)


@dataclass(frozen=True)
class Speed:
    """How many times as fast as another engine, turn by turn: the median, and the quartiles."""

    peer: str
    turns: tuple[float, ...]

    @property
    def median(self) -> float:
        return float(np.median(self.turns))

    @property
    def quartiles(self) -> tuple[float, float]:
        low, high = np.percentile(self.turns, [25, 75])
        return float(low), float(high)


@dataclass(frozen=True)
class Mean:
    """A geometric mean of speed-ups, and the interval that holds it in 90 of 100 draws of other turns."""

    value: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}..{self.high:.2f})"


def runs(row: Row | None) -> bool:
    """It was measured to the end."""
    return row is not None and bool(row.get("turns_ms"))


def row_of(model: Row, engine: str) -> Row | None:
    """Of an engine; OpenVINO is the better of its pinnings."""
    rows = [r for r in model.get("rows", []) if r["engine"] == engine or r["engine"].startswith(f"{engine}, ")]
    running = [r for r in rows if runs(r)]
    return min(running, key=lambda r: float(np.median(r["turns_ms"]))) if running else (rows[0] if rows else None)


def speed(mine: Row | None, theirs: Row | None, name: str) -> Speed | None:
    """Theirs through mine, turn by turn: both saw the same machine then."""
    if mine is None or theirs is None or not runs(mine) or not runs(theirs):
        return None
    return Speed(name, tuple(b / a for a, b in zip(mine["turns_ms"], theirs["turns_ms"], strict=True)))


def over(model: Row, ours: str, peer: str = "") -> Speed | None:
    """The speed-up of one of our rows over a peer, or over the better one. A wrong answer has none."""
    mine = next((r for r in model.get("rows", []) if r["engine"] == ours), None)
    if mine is not None and is_wrong(model, mine):
        return None
    found = [speed(mine, row_of(model, name), name) for name in ([peer] if peer else [ORT, OPENVINO])]
    return min((s for s in found if s is not None), key=lambda s: s.median, default=None)


def is_wrong(model: Row, row: Row) -> bool:
    """Its outputs are others than those that all were compared with."""
    if not runs(row):
        return False
    return row["error"] is None or row["error"] > TOLERANCE.get(model.get("set", ""), FLOAT_TOLERANCE)


def mean(speeds: Sequence[Speed]) -> Mean | None:
    """Over models."""
    if not speeds:
        return None
    rng = np.random.default_rng(0)
    logs = [np.log(s.turns) for s in speeds]
    drawn = [np.median(rng.choice(turns, (1000, len(turns))), axis=1) for turns in logs]
    low, high = np.exp(np.percentile(np.mean(drawn, axis=0), [5, 95]))
    value = math.exp(float(np.mean([np.median(turns) for turns in logs])))
    return Mean(value, float(low), float(high), len(speeds))


def ours(report: Report) -> list[str]:
    """Our rows, the one that goals are about first."""
    return [name for name in report["engines"] if name.startswith(OURS)]


def sets(report: Report) -> dict[str, list[Row]]:
    """Models by set, in the order of the goals; those without a set come last."""
    found: dict[str, list[Row]] = {name: [] for name in GOALS}
    for model in report["models"]:
        found.setdefault(model["set"], []).append(model)
    return {name: models for name, models in sorted(found.items(), key=lambda x: not x[0]) if models}


@dataclass(frozen=True)
class Verdict:
    """What one of our rows reached on a set."""

    name: str
    goal: Goal | None
    mean: Mean | None
    #: models below the goal's least, with their speed-ups; then those that failed or answered something else
    missed: tuple[tuple[str, float], ...]
    broken: tuple[str, ...]

    @property
    def reached(self) -> bool | None:
        if self.goal is None or self.mean is None:
            return None
        enough = self.goal.mean is None or self.mean.value >= self.goal.mean
        return enough and not self.missed and not self.broken


def verdict(name: str, models: Iterable[Row], row: str) -> Verdict:
    """Of one of our rows on a set."""
    goal = WHOLE if name == ALL else GOALS.get(name)
    speeds, missed, broken = [], [], []
    for model in models:
        mine = next((r for r in model.get("rows", []) if r["engine"] == row), None)
        if mine is None:
            continue
        if not runs(mine) or is_wrong(model, mine):
            broken.append(model["model"])
            continue
        found = over(model, row, goal.peer if goal else "")
        if found is not None:
            speeds.append(found)
            if goal and found.median < goal.least:
                missed.append((model["model"], found.median))
    return Verdict(name, goal, mean(speeds), tuple(sorted(missed, key=lambda m: m[1])), tuple(broken))


def memory(model: Row, row: str) -> float | None:
    """Peak memory of one of our rows over ONNX Runtime's."""
    mine, theirs = (next((r for r in model.get("rows", []) if r["engine"] == name), {}) for name in (row, ORT))
    return mine["peak_mb"] / theirs["peak_mb"] if "peak_mb" in mine and "peak_mb" in theirs else None


@dataclass(frozen=True)
class Untuned:
    """A model as it ships beside the tuned one: part of the tuned speed, and of what tuning gains over defaults."""

    model: str
    speed: float
    gain: float | None


def untuned(report: Report) -> list[Untuned]:
    """Of the models that were withheld; nothing where one of the three rows is missing."""
    found = []
    for model in report["models"]:
        rows = {r["engine"]: r for r in model.get("rows", [])}
        tuned, shipped, plain = (rows.get(f"{OURS}{name}") for name in ("tuned", "shipped", "defaults"))
        part, whole = speed(shipped, tuned, ""), speed(tuned, plain, "")
        if model["model"] not in report["withheld"] or part is None or whole is None:
            continue
        # in parts of the tuned time: defaults take `whole`, the shipped one 1 / `part`
        gained, most = whole.median - 1 / part.median, whole.median - 1
        found.append(Untuned(model["model"], part.median, gained / most if most > 0.02 else None))
    return found
