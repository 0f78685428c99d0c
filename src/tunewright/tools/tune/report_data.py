"""Data of a report: the checked JSON of a result file (docs/tune-files.md), and figures derived from it.

Result files are untrusted: a member of a wrong type counts as absent.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunewright.errors import InputError

from ..kb.view import config_text, problem_text, safe

#: the largest result file that is read, in bytes
MOST_BYTES = 256 << 20
#: the part of a layer's time that always counts as savable (the same as in tuning)
LEAST_HOPE = 0.2
#: phrases in a search's reason that mean that it was inconclusive
OPEN = ("open:", "time was too short", "too noisy", "stopped before")


@dataclass(frozen=True)
class ReportedTrial:
    """A candidate that was tried."""

    kernel: str
    status: str
    seconds: float | None
    why: str
    at: float


@dataclass
class ReportedLayer:
    """A layer: all nodes with the same problem."""

    problem: str
    op: str
    nodes: Sequence[str]
    seconds: float
    after: float
    floor: float | None
    bound: str
    #: kernel and origin before the tuning
    kernel: str
    origin: str
    #: the final kernel, if it is a new one
    chosen: str
    skipped: str
    reason: str
    command: str
    trials: Sequence[ReportedTrial]
    #: candidates that ran in the network beside the default: kernel, and gain over it with its interval
    network: Sequence[tuple[str, Sequence[float]]]
    spent: Mapping[str, float]
    #: whether too few candidates were compared to say that nothing is faster
    open: bool = False
    undone: bool = False

    @property
    def name(self) -> str:
        more = f" (+{len(self.nodes) - 1})" if len(self.nodes) > 1 else ""
        return f"{self.nodes[0]}{more}" if self.nodes else problem_text(self.problem)

    @property
    def gain(self) -> float:
        return self.seconds / self.after if self.after else 1.0

    @property
    def tier(self) -> str:
        """Origin of the final kernel."""
        return "search" if self.chosen else self.origin.partition(" (")[0]

    @property
    def hope(self) -> float:
        """Seconds that might still be saved."""
        least = self.after * LEAST_HOPE
        return least if self.floor is None else max(self.after - self.floor, least)

    def share(self, seconds: float) -> float | None:
        """Return the share of the roofline that a time reaches."""
        return self.floor / seconds if self.floor is not None and seconds else None

    @property
    def best_in_network(self) -> tuple[str, Sequence[float]] | None:
        return max(self.network, key=lambda found: found[1][0], default=None)

    @property
    def is_undecided(self) -> bool:
        """Whether a candidate seems faster in the network, but noise leaves it uncertain."""
        best = self.best_in_network
        return best is not None and not self.chosen and not self.undone and best[1][1] < 1 < best[1][0]

    @property
    def is_open(self) -> bool:
        """Whether a longer search may help: there was none, it was too short, or noise hid the result."""
        if self.skipped:
            return self.skipped in ("no time was left for it", "stopped")
        is_short = self.open and not self.chosen
        return is_short or self.is_undecided or any(word in self.reason for word in OPEN)

    @property
    def verdict(self) -> str:
        """The outcome in a few words."""
        if self.undone:
            return "taken back: the whole did not gain"
        if self.chosen:
            return f"{self.gain:.2f} times as fast"
        if self.skipped:
            return f"not searched: {self.skipped}"
        if self.is_undecided:
            return "seems faster, not for certain"
        if self.network:
            return "no faster between its neighbours"
        return self.reason or "not searched yet"


@dataclass
class ReportedTuning:
    """A parsed result file."""

    kind: str
    state: str
    model: str
    device: str
    where: Mapping[str, str]
    date: str
    budget: float | None
    elapsed: float
    phases: Mapping[str, float]
    rows: list[ReportedLayer]
    settings: Mapping[str, str]
    environment: Mapping[str, str]
    #: seconds of an inference; for problems the sum of single executions
    before: float
    after: float
    #: median, low, high, pairs
    gain: Sequence[float] | None
    error: float | None
    #: whether the file contains the final result
    is_whole: bool
    #: the command that continues the tuning; older files have none
    command: str = ""

    @property
    def total(self) -> float:
        return sum(row.seconds for row in self.rows)

    @property
    def changed(self) -> list[ReportedLayer]:
        return [row for row in self.rows if row.chosen]

    @property
    def trials(self) -> Iterable[ReportedTrial]:
        return (trial for row in self.rows for trial in row.trials)

    @property
    def spent(self) -> Mapping[str, float]:
        """Seconds of all searches by step: search, race, confirm. Compile and check are included in these."""
        found: Counter[str] = Counter()
        for row in self.rows:
            found.update(row.spent)
        return found

    def following(self) -> list[ReportedLayer]:
        """Return the layers to tune next: those still open, most savable time first."""
        return sorted((row for row in self.rows if row.is_open), key=lambda row: -row.hope)

    def settled(self) -> list[ReportedLayer]:
        """Return layers that were searched and are still far from the roofline: only other kernels help there."""
        rows = [r for r in self.rows if r.trials and not r.is_open and r.floor is not None and r.after > 2 * r.floor]
        return sorted(rows, key=lambda row: -row.hope)


# ---- reading ------------------------------------------------------------------------------------------------------


def read(path: Path) -> Mapping[str, Any]:
    """Read the JSON of a result file. Raises InputError if it is not one."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"has more than {MOST_BYTES:,} bytes", where=str(path))
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _not(f"it is not JSON ({error})", str(path)) from None
    parse(content, str(path))
    return content  # type: ignore[no-any-return]


def parse(content: Any, where: str = "a result file") -> ReportedTuning:
    """Parse the content of a result file. Raises InputError if it is not one."""
    from tunewright.tuning.result_file import SCHEMA

    if not isinstance(content, Mapping) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, Mapping) else type(content).__name__
        raise _not(f"{SCHEMA!r} is its schema, this one has {found!r}", where)
    layers = content.get("layers")
    if not isinstance(layers, list) or not all(isinstance(layer, Mapping) for layer in layers):
        raise _not("layers is not a list of objects", where)
    rows = [_row(layer) for layer in layers]
    rows.sort(key=lambda row: -row.seconds)
    result = content.get("result")
    result = result if isinstance(result, Mapping) else {}
    undone = {text(p, whole=True) for p in _list(result.get("undone"))}
    for row in rows:
        row.undone = row.problem in undone
    before, after = number(result.get("before")), number(result.get("after"))
    return ReportedTuning(
        text(content.get("kind")) or "model", text(content.get("state")), text(content.get("model")),
        text(content.get("device")), _texts(content.get("where")), text(content.get("date")),
        number(content.get("budget")), number(content.get("elapsed")) or 0.0, _numbers(content.get("phases")), rows,
        _texts(content.get("settings")), _texts(content.get("environment")),
        before if before is not None else sum(r.seconds for r in rows),
        after if after is not None else sum(r.after for r in rows),
        _ratio(result.get("gain")), number(result.get("error")), bool(result), text(content.get("command"), whole=True),
    )  # fmt: skip


def _row(layer: Mapping[str, Any]) -> ReportedLayer:
    seconds = number(layer.get("seconds")) or 0.0
    after = number(layer.get("after"))
    before = layer.get("before")
    before = before if isinstance(before, Mapping) else {}
    trials = [
        ReportedTrial(
            _kernel(t), text(t.get("status")) or "?", number(t.get("seconds")), text(t.get("why")),
            number(t.get("at")) or 0.0,
        )
        for t in _list(layer.get("trials"))
        if isinstance(t, Mapping)
    ]  # fmt: skip
    network = [
        (_kernel(n), ratio)
        for n in _list(layer.get("network"))
        if isinstance(n, Mapping) and (ratio := _ratio(n.get("gain"))) is not None and ratio[3]
    ]
    chosen = layer.get("chosen")
    return ReportedLayer(
        text(layer.get("problem"), whole=True), text(layer.get("op")), [text(n) for n in _list(layer.get("nodes"))],
        seconds, seconds if after is None else after, number(layer.get("floor")), text(layer.get("bound")),
        _kernel(before), text(before.get("origin")) or "unknown",
        _kernel(chosen) if isinstance(chosen, Mapping) else "", text(layer.get("skipped")),
        text(layer.get("reason")), text(layer.get("command"), whole=True), trials, network,
        _numbers(layer.get("spent")), layer.get("open") is True,
    )  # fmt: skip


def number(value: Any) -> float | None:
    """Return a finite, non-negative number, or None."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
    return float(value) if fits else None


def text(value: Any, whole: bool = False) -> str:
    """Return a text that is safe to display."""
    found = safe(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
    return found if whole or len(found) <= 2000 else f"{found[:1997]}..."


def _kernel(value: Mapping[str, Any]) -> str:
    config = value.get("config")
    return f"{text(value.get('solver'))} {config_text(config) if isinstance(config, Mapping) else ''}".strip()


def _ratio(value: Any) -> Sequence[float] | None:
    found = [number(part) for part in _list(value)]
    known = [part for part in found if part is not None]
    return known if len(known) == 4 and known[0] > 0 else None


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _texts(value: Any) -> Mapping[str, str]:
    return {text(k): text(v) for k, v in value.items()} if isinstance(value, Mapping) else {}


def _numbers(value: Any) -> Mapping[str, float]:
    found = {text(k): number(v) for k, v in value.items()} if isinstance(value, Mapping) else {}
    return {k: v for k, v in found.items() if v is not None}


def _not(why: str, where: str) -> InputError:
    hint = "tunewright tune writes tune_result_*.json"
    return InputError(f"is not a result file of tuning: {why}", where=where, hint=hint)
