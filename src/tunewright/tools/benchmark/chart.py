"""The throughput-latency chart of a sweep: in the terminal, and as a picture if matplotlib is installed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunewright.errors import InputError, SettingsError

from .sweep import frontier

if TYPE_CHECKING:
    from .sweep import SweepPoint

#: size of the chart in the terminal, without axes
WIDTH, HEIGHT = 64, 16
#: latencies that differ by more than this factor get a logarithmic axis
WIDE = 12
#: Colours that colour-blind people can distinguish (Okabe and Ito), and marks, strongest first.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKS = "osD^vP*X"


def nice(low: float, high: float, most: int) -> list[float]:
    """Return at most ``most`` round numbers between two limits."""
    span = high - low
    if span <= 0 or most < 2:
        return [low]
    raw = span / most
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= raw)
    return [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _tick(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"


class _Scale:
    """The axis of latencies in ms: linear, or logarithmic if they differ much."""

    def __init__(self, values: Sequence[float]) -> None:
        low, high = min(values), max(values)
        self.logarithmic = low > 0 and high / low > WIDE
        if self.logarithmic:
            self.low, self.high = low / 1.15, high * 1.15
        else:
            room = (high - low or high or 1.0) * 0.08
            self.low, self.high = max(0.0, low - room), high + room

    def place(self, value: float) -> float:
        """Return the position of a value on the axis, from 0 to 1."""
        if self.logarithmic:
            return math.log(max(value, 1e-9) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[float]:
        if not self.logarithmic:
            return nice(self.low, self.high, most)
        found = [m * 10.0**k for k in range(-6, 7) for m in (1, 2, 5)]
        return [v for v in found if self.low <= v <= self.high]


def lines(points: Sequence[SweepPoint], spot: SweepPoint | None, percent: float, bound: float | None) -> list[str]:
    """Draw the chart as text: letters are points, ``*`` the sweet spot, ``:`` the bound, dots the frontier."""
    at = {id(p): p.latency(percent) * 1e3 for p in points}
    reach = [*at.values()] + ([bound * 1e3] if bound is not None and bound * 1e3 < 2 * max(at.values()) else [])
    scale, top = _Scale(reach), max(p.rate for p in points) * 1.08
    rows = [[" "] * WIDTH for _ in range(HEIGHT)]

    def x(ms: float) -> int:
        return min(WIDTH - 1, max(0, round(scale.place(ms) * (WIDTH - 1))))

    def y(rate: float) -> int:
        return HEIGHT - 1 - min(HEIGHT - 1, max(0, round(rate / top * (HEIGHT - 1))))

    if bound is not None and scale.low <= bound * 1e3 <= scale.high:
        for row in rows:
            row[x(bound * 1e3)] = ":"
    best = frontier(points, percent)
    for a, b in pairwise(best):
        ax, ay, bx, by = x(at[id(a)]), y(a.rate), x(at[id(b)]), y(b.rate)
        for column in range(ax + 1, bx):
            rows[round(ay + (by - ay) * (column - ax) / max(1, bx - ax))][column] = "."
    for point in sorted(points, key=lambda p: (p is spot, p in best)):  # the last one drawn is on top
        rows[y(point.rate)][x(at[id(point)])] = "*" if point is spot else point.label
    heights = {y(v): _tick(v) for v in nice(0.0, top, 5)}
    margin = max(map(len, heights.values()))
    unit = "examples" if any(p.batch for p in points) else "inferences"
    made = [f"{unit} per second"]
    for k, row in enumerate(rows):
        made.append(f"{heights.get(k, ''):>{margin}} {'┤' if k in heights else '│'}{''.join(row)}".rstrip())
    axis, texts = ["─"] * WIDTH, [" "] * (WIDTH + 8)
    for value in scale.ticks(8):
        column, text = x(value), _tick(value)
        start = max(0, column - len(text) // 2)
        if all(c == " " for c in texts[max(0, start - 1) : start + len(text) + 1]):
            axis[column] = "┬"
            texts[start : start + len(text)] = text
    made.append(f"{'':>{margin}} └{''.join(axis)}")
    made.append(f"{'':>{margin}}  {''.join(texts)}".rstrip())
    name = "median latency" if percent == 50 else f"{percent:g} % percentile of latency"
    made.append(f"{'':>{margin}}  {f'{name}, ms':^{WIDTH}}".rstrip())
    return made


def why_not() -> str | None:
    """Return why no picture can be drawn, or None if it can."""
    return None if find_spec("matplotlib") is not None else "matplotlib is not installed"


def draw(
    points: Sequence[SweepPoint], spot: SweepPoint | None, percent: float, bound: float | None, title: str, path: Path
) -> None:
    """Save the chart as a picture in the format of the file's suffix."""
    reason = why_not()
    if reason is not None:
        raise SettingsError(reason, where="--chart", hint="pip install tunewright[plot]; the terminal has the chart")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 10, "svg.hashsalt": "tunewright"}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(8.4, 5.4), layout="constrained")
        try:
            _fill(axes, points, spot, percent, bound)
            axes.set_title(title, loc="left", fontsize=11, pad=14)
            figure.savefig(path, dpi=150)
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror or error}", where=str(path)) from None
        except ValueError as error:  # matplotlib does not know the format
            raise InputError(f"cannot be drawn: {error}", where=str(path), hint="name a .png file") from None
        finally:
            pyplot.close(figure)


def _fill(
    axes: Any, points: Sequence[SweepPoint], spot: SweepPoint | None, percent: float, bound: float | None
) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, NullFormatter

    batches = list(dict.fromkeys(p.batch for p in points))
    streams = sorted({p.streams for p in points})
    colour = {batch: COLOURS[i % len(COLOURS)] for i, batch in enumerate(batches)}
    mark = {count: MARKS[i % len(MARKS)] for i, count in enumerate(streams)}
    best = frontier(points, percent)
    axes.plot([p.latency(percent) * 1e3 for p in best], [p.rate for p in best], color="0.75", linewidth=5, zorder=1,
              solid_capstyle="round", solid_joinstyle="round")  # fmt: skip
    for batch in batches:
        for count in streams:
            run = sorted((p for p in points if (p.batch, p.streams) == (batch, count)), key=lambda p: p.requests)
            across = [p.latency(percent) * 1e3 for p in run]
            axes.plot(across, [p.rate for p in run], "-", color=colour[batch], marker=mark[count], markersize=7,
                      linewidth=1.0, alpha=0.9, markeredgecolor="white", markeredgewidth=0.8, zorder=3)  # fmt: skip
    scale = _Scale([p.latency(percent) * 1e3 for p in points])
    if scale.logarithmic:
        axes.set_xscale("log")
        axes.set_xticks(scale.ticks(8))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    left, right = scale.low, scale.high
    if bound is not None:
        limit = bound * 1e3
        right = max(right, limit * 1.08) if limit < 2 * right else right
        if left < limit <= right:
            axes.axvline(limit, color="0.35", linewidth=1.0, linestyle=(0, (4, 3)), zorder=2)
            axes.axvspan(limit, right, color="0.95", zorder=0)
            axes.annotate(f"bound: {_tick(limit)} ms", (limit, 1.0), xycoords=("data", "axes fraction"),
                          xytext=(-4, 2), textcoords="offset points", ha="right", va="bottom", color="0.35",
                          fontsize=8.5)  # fmt: skip
    axes.set_xlim(left, right)
    top = max(p.rate for p in points)
    axes.set_ylim(0, top * 1.14)
    for point in points:
        ms = point.latency(percent) * 1e3
        _label(axes, point, point is spot, point in best, ms, scale.place(ms))
    if spot is not None:
        axes.plot([spot.latency(percent) * 1e3], [spot.rate], "o", markersize=17, markerfacecolor="none",
                  markeredgecolor="black", markeredgewidth=1.6, zorder=4)  # fmt: skip
    name = "Median latency" if percent == 50 else f"{percent:g} % percentile of latency"
    axes.set_xlabel(f"{name} (ms)")
    axes.set_ylabel(f"{'Examples' if any(p.batch for p in points) else 'Inferences'} per second")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(value)))
    axes.set_axisbelow(True)
    axes.grid(color="0.92")
    shown = [Line2D([], [], color=colour[b], linewidth=3, label="batch as it is" if b is None else f"batch {b}")
             for b in batches if len(batches) > 1 or b is not None]  # fmt: skip
    shown += [Line2D([], [], color="0.35", marker=mark[s], linestyle="none", markersize=7,
                     label=f"{s} stream{'' if s == 1 else 's'}") for s in streams]  # fmt: skip
    if spot is not None:
        shown.append(Line2D([], [], color="black", marker="o", linestyle="none", markerfacecolor="none", markersize=11,
                            markeredgewidth=1.4, label="sweet spot"))  # fmt: skip
    if len(best) > 1:
        shown.append(Line2D([], [], color="0.75", linewidth=5, label="the frontier"))
    # The legend goes beside the chart, because points may be anywhere in it.
    axes.legend(handles=shown, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)


def _label(axes: Any, point: SweepPoint, is_spot: bool, is_best: bool, ms: float, across: float) -> None:
    """Write a point's letter; on the frontier also its requests. The text goes to the left if the right has no room."""
    from matplotlib.patheffects import withStroke

    requests = f"{point.requests} request{'' if point.requests == 1 else 's'}"
    text = f"{point.label}: {requests}" if is_best else point.label
    if is_spot:
        text = f"{text}, {point.rate:,.0f}/s"
    left, far = across > 0.6, 12 if is_spot else 7
    below = is_best and not left  # the frontier rises to the right
    axes.annotate(text, (ms, point.rate), xytext=(-far if left else far, -5 if below else 5),
                  textcoords="offset points", ha="right" if left else "left", va="top" if below else "bottom",
                  fontsize=9 if is_spot else 8, path_effects=[withStroke(linewidth=2.5, foreground="white")],
                  fontweight="bold" if is_spot else "normal", color="black" if is_spot else "0.35", zorder=5,
                  )  # fmt: skip
