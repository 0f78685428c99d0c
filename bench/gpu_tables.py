"""What the GPU benchmark found, as tables in Markdown that are also good to read as they are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Row = dict[str, Any]
#: rows of ours, the one that counts first
OURS = ("tuned", "shipped", "ours")
#: what must be reached: milliseconds, or how many times as fast as the best peer
MILLISECONDS = {"resnet50:1": 0.32, "resnet50:64": 1.9, "bert:1x128": 0.45}
TIMES = {"bert:32x128": 1.1}
#: networks whose geometric mean has to be this, and each of them 1 at least
MEAN, GROUP = 1.15, ("yolo", "unet", "efficientnet")


@dataclass(frozen=True)
class Speed:
    """Their time through ours, turn by turn."""

    peer: str
    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}..{self.high:.2f})"


def is_right(row: Row) -> bool:
    """It ran, and its outputs are within the tolerance."""
    return "median_ms" in row and row.get("error") is not None and row["error"] <= row["limit"]


def best(rows: Sequence[Row], ours: bool) -> Row | None:
    """The fastest row of peers whose outputs are right; of ours the first of `OURS` that there is."""
    if not ours:
        peers = [r for r in rows if not r["ours"] and is_right(r)]
        return min(peers, key=lambda r: r["median_ms"], default=None)
    return next((r for name in OURS for r in rows if r["row"] == name and is_right(r)), None)


def speed(mine: Row | None, theirs: Row | None) -> Speed | None:
    if mine is None or theirs is None:
        return None
    ratios = [b / a for a, b in zip(mine["turns_ms"], theirs["turns_ms"], strict=False)]
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return Speed(theirs["row"], float(middle), float(low), float(high))


def milliseconds(value: float) -> str:
    return f"{value:.4f}" if value < 1 else f"{value:.3f}" if value < 100 else f"{value:.1f}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for first, *others in [columns, ["-" * width for width in widths], *rows]:
        aligned = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield f"| {' | '.join([first.ljust(widths[0]), *aligned])} |"


def details(model: Row) -> Iterator[str]:
    """Every row of a network with its spread."""
    rows = []
    for r in model["rows"]:
        if "median_ms" not in r:
            continue
        low, high = r["quartiles_ms"]
        wrong = "" if is_right(r) else " (!)"
        error = "none" if r.get("error") is None else f"{r['error']:.1e}"
        rows.append([
            r["row"], milliseconds(r["median_ms"]), f"{milliseconds(low)}..{milliseconds(high)}",
            milliseconds(r["min_ms"]), f"{r['turns']} x {r['calls']}", error + wrong, f"{r['prepare_seconds']:.1f}",
        ])  # fmt: skip
    if rows:
        yield from table([model["model"], "median ms", "quartiles", "least", "turns x calls", "error", "ready s"], rows)
    for r in model["rows"]:
        if "failed" in r:
            yield f"{model['model']}, {r['row']}: {r['failed']}"
    if "skipped" in model:
        yield f"{model['model']} was skipped: {model['skipped']}"
    yield from notes(model)


def notes(model: Row) -> Iterator[str]:
    """What runs on the host, what tuning took, and what a load takes."""
    first = next((r for r in model["rows"] if r["ours"] and "steps" in r), None)
    if first is not None and first["host"]:
        ops: dict[str, list[str]] = {}
        for step in first["host"]:
            ops.setdefault(step["op"], []).append(step["why"])
        told = "; ".join(f"{op} x {len(why)} ({why[0]})" for op, why in ops.items())
        yield f"{model['model']}: on the host: {told}"
    slices = [r for r in model["rows"] if "tuning_seconds" in r and "median_ms" in r]
    if slices:
        least = min(r["median_ms"] for r in slices)
        points = ", ".join(
            f"{r['tuning_seconds']:.0f} s: {milliseconds(r['median_ms'])} ms ({r['median_ms'] / least - 1:+.1%})"
            for r in sorted(slices, key=lambda r: r["tuning_seconds"])
        )
        near = min(r["tuning_seconds"] for r in slices if r["median_ms"] <= 1.03 * least)
        reached = f"; within 3 % of the best of these after {near:.0f} s" if len(slices) > 1 else ""
        yield f"{model['model']}: tuned for {points}{reached}"
    load = model.get("load")
    if load:
        again = load.get("again")
        told = load["failed"] if again is None else f"{again['seconds']:.2f} s ({again['load']:.2f} + first inference)"
        if again is not None:
            told += f": {', '.join(f'{name} {seconds:.2f}' for name, seconds in again['phases'].items())}"
        yield f"{model['model']}: load with a warm cache: {told}"


def whole(report: Row) -> Iterator[str]:
    """A line for each network, then the means."""
    kinds = list(dict.fromkeys(r["row"] for m in report["models"] for r in m["rows"]))
    lines, group = [], []
    for model in report["models"]:
        rows = {r["row"]: r for r in model["rows"]}
        mine, theirs = best(model["rows"], True), best(model["rows"], False)
        found = speed(mine, theirs)
        if found is not None and model["model"].partition(":")[0] in GROUP:
            group.append(found.median)
        cells = [cell(rows.get(kind)) for kind in kinds]
        lines.append([
            model["model"], *cells, mine["row"] if mine else "", f"{found} of {found.peer}" if found else "",
            "" if report["options"]["tiny"] else goal(model["model"], mine, found),
        ])  # fmt: skip
    yield from table(["ms", *kinds, "counts", "times as fast as the best peer", "must"], lines)
    if group and not report["options"]["tiny"]:
        mean = math.exp(sum(map(math.log, group)) / len(group))
        reached = mean >= MEAN and min(group) >= 1
        yield (
            f"YOLO-, U-Net-, EfficientNet-like: geometric mean {mean:.2f} of {len(group)} (must: {MEAN}), least "
            f"{min(group):.2f} (must: 1): {'reached' if reached else 'missed'}"
        )


def cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "median_ms" not in row:
        return "failed"
    return milliseconds(row["median_ms"]) + ("" if is_right(row) else " (!)")


def goal(model: str, mine: Row | None, found: Speed | None) -> str:
    if model in MILLISECONDS and mine is not None:
        return f"{MILLISECONDS[model]} ms: {'reached' if mine['median_ms'] <= MILLISECONDS[model] else 'missed'}"
    if model in TIMES and found is not None:
        return f"{TIMES[model]}: {'reached' if found.median >= TIMES[model] else 'missed'}"
    return ""


def text(report: Row) -> Iterator[str]:
    """All of it, the whole last: what is printed last is read first."""
    yield f"{report['machine']}; {report['versions']}; {report['options']['precision']}"
    for model in report["models"]:
        yield ""
        yield from details(model)
    yield ""
    yield from whole(report)
    if any("(!)" in line for line in whole(report)):
        yield "(!): outputs are not within the tolerance of fp32's, and such a row has no speed"
