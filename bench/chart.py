"""The speed-ups of ``make bench`` as a picture."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

import results
from results import Report, Speed
from tables import YOURS, short

#: a paper of its own: the page behind it may be white or black
PAPER, INK, FAINT, GRID = "#fbfbf8", "#22272e", "#6b7480", "#dfe1dc"
FASTER, SLOWER, OTHER, AIM = "#2f7fb8", "#c8693a", "#22272e", "#3a8f5c"
#: lines do not run through text
BEHIND = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.8}
#: marks of our other rows, in their order
MARKS = ("D", "o", "s", "^")
TICKS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 8, 10, 15, 20)
#: inches of a model, of a set's heading, and of what stands above and below
LINE, HEADING, MARGIN = 0.235, 0.40, 1.45


def draw(report: Report, file: Path) -> None:
    """A bar for each model: how many times as fast as the better peer; from 1 to the left it is slower."""
    ours = results.ours(report)
    rows: list[tuple[float, str, list[Speed | None]]] = []
    headings: list[tuple[float, str]] = []
    goals: list[tuple[float, float, float]] = []
    y = 0.0
    for name, models in results.sets(report).items():
        peer = results.GOALS[name].peer if name in results.GOALS else ""
        found = [(m["model"], [results.over(m, label, peer) for label in ours]) for m in models]
        found = [(model, speeds) for model, speeds in found if speeds and speeds[0] is not None]
        if not found:
            continue
        y += HEADING
        headings.append((y - 0.62 * LINE, heading(report, name)))
        begin = y
        for model, speeds in found:
            y += LINE
            rows.append((y - LINE / 2, model, speeds))
        if name in results.GOALS:
            goal = results.GOALS[name]
            goals.append((goal.mean or goal.least, begin, y))
    if not rows:
        raise ValueError("there is no model that both a peer and we ran")
    figure = plt.figure(figsize=(9.2, y + MARGIN), facecolor=PAPER)
    # in inches from the top; the axes span exactly the rows
    high = y + MARGIN
    axes = figure.add_axes((0.175, 0.72 / high, 0.79, y / high))
    body(axes, rows, y)
    for value, begin, end in goals:
        axes.plot([value, value], [begin, end], color=AIM, lw=1.4, ls=(0, (3, 2)), zorder=3)
    for place, text in headings:
        axes.text(0.0, place, text, transform=axes.get_yaxis_transform(), color=INK, weight="bold", size=9.5,
                  ha="left", va="center", bbox=BEHIND, zorder=6)  # fmt: skip
    title = f"Speed-up over the better of {peers(report)}"
    figure.text(0.175, 1 - 0.22 / high, title, color=INK, size=12, weight="bold", va="center")
    about = f"{report['machine']}, batch 1; Tunewright, {short(ours[0])}; thin lines: quartiles over turns"
    figure.text(0.175, 1 - 0.47 / high, about, color=FAINT, size=8.5, va="center")
    legend(axes, ours, bool(goals), 0.72 / y)
    figure.savefig(file, dpi=160, facecolor=PAPER)
    plt.close(figure)


def draw_front(report: Report, file: Path) -> None:
    """The same on a front page: a narrow bar for each model, the fastest first."""
    label = results.ours(report)[0]
    found = [(m["model"], results.over(m, label, "")) for models in results.sets(report).values() for m in models]
    bars = sorted(((s.median, name) for name, s in found if s is not None), reverse=True)
    if not bars:
        raise ValueError("there is no model that both a peer and we ran")
    figure = plt.figure(figsize=(9.2, 3.6), facecolor=PAPER)
    axes = figure.add_axes((0.06, 0.30, 0.93, 0.54))
    axes.set_facecolor(PAPER)
    axes.set_yscale("log")
    high = bars[0][0] * 1.25
    low = min(0.9, bars[-1][0]) / 1.04
    axes.set_ylim(low, high)
    axes.set_xlim(-0.6, len(bars) - 0.4)
    for x, (value, _) in enumerate(bars):
        axes.bar(x, value - 1, 0.74, bottom=1, color=FASTER if value >= 1 else SLOWER, zorder=2)
        text = f"{value:.2f}" if value < 10 else f"{value:.0f}"
        place = (x, max(value, 1))
        axes.annotate(text, place, (0, 3), textcoords="offset points", ha="center", size=6.3, color=INK)
    axes.axhline(1, color=INK, lw=1.2, zorder=3)
    axes.set_xticks(range(len(bars)), [name for _, name in bars], rotation=60, ha="right", rotation_mode="anchor")
    axes.yaxis.set_major_locator(FixedLocator([t for t in (0.5, 1, 1.5, 2, 3, 4, 6, 10) if low <= t <= high]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}x"))
    axes.tick_params(axis="both", colors=INK, labelsize=7.5, length=0)
    axes.grid(axis="y", color=GRID, lw=0.8, zorder=0)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    title = f"Speed-up over the better of {peers(report)}"
    figure.text(0.06, 0.945, title, color=INK, size=11, weight="bold", va="center")
    about = f"{report['machine']}, batch 1, fp32 and int8; Tunewright {short(label)}; medians of turns"
    figure.text(0.06, 0.885, about, color=FAINT, size=8, va="center")
    figure.savefig(file, dpi=160, facecolor=PAPER)
    plt.close(figure)


def heading(report: Report, name: str) -> str:
    """A set, with its mean."""
    found = results.verdict(name, results.sets(report)[name], results.ours(report)[0])
    over = f", over {found.goal.peer}" if found.goal and found.goal.peer else ""
    mean = f"   geometric mean {found.mean.value:.2f}" if found.mean and found.mean.count > 1 else ""
    aim = f" (goal {found.goal.mean:g})" if mean and found.goal and found.goal.mean else ""
    return f"{name or YOURS}{over}{mean}{aim}"


def peers(report: Report) -> str:
    there = [name for name in (results.ORT, results.OPENVINO) if name in report["versions"]]
    return " and ".join(f"{name} {report['versions'][name]}" for name in there)


def body(axes: Axes, rows: list[tuple[float, str, list[Speed | None]]], height: float) -> None:
    """Bars, their spread, and the marks of other rows."""
    axes.set_facecolor(PAPER)
    axes.set_xscale("log")
    values = [q for _, _, speeds in rows for s in speeds if s for q in (*s.quartiles, s.median)]
    low, high = min(0.9, *values) / 1.04, max(1.15, *values) * 1.14
    axes.set_xlim(low, high)
    axes.set_ylim(height, 0)
    for y, _, speeds in rows:
        first, *others = speeds
        assert first is not None
        value, (left, right) = first.median, first.quartiles
        axes.barh(y, value - 1, LINE * 0.66, left=1, color=FASTER if value >= 1 else SLOWER, zorder=2)
        axes.plot([left, right], [y, y], color=INK, lw=1.1, zorder=4, solid_capstyle="butt")
        for k, other in enumerate(others):
            if other is not None:
                axes.plot(other.median, y, MARKS[k % len(MARKS)], ms=4, mfc=PAPER, mec=OTHER, mew=0.9, zorder=5)
        end = max([1.0, right, *(s.median * 1.01 for s in others if s)])
        axes.annotate(f"{value:.2f}", (end, y), (5, 0), textcoords="offset points", va="center", size=8, color=INK,
                      bbox=BEHIND, zorder=6)  # fmt: skip
    axes.axvline(1, color=INK, lw=1.2, zorder=3)
    axes.set_yticks([y for y, _, _ in rows], [name for _, name, _ in rows])
    ticks = spaced([t for t in TICKS if low <= t <= high], low, high)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
    axes.tick_params(axis="both", colors=INK, labelsize=8.5, length=0)
    axes.grid(axis="x", color=GRID, lw=0.8, zorder=0)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)


def spaced(ticks: list[float], low: float, high: float) -> list[float]:
    """Those that have room beside each other; 1 always has."""
    room = (high / low) ** 0.055
    kept = [1.0]
    for tick in sorted(ticks, key=lambda t: max(t, 1 / t)):
        if all(max(tick / other, other / tick) >= room for other in kept):
            kept.append(tick)
    return sorted(kept)


def legend(axes: Axes, ours: list[str], with_goals: bool, below: float) -> None:
    """Under the bars."""
    entries: list[Patch | Line2D] = [Patch(color=FASTER, label="faster"), Patch(color=SLOWER, label="slower")]
    for k, label in enumerate(ours[1:]):
        entries.append(Line2D([], [], ls="", marker=MARKS[k % len(MARKS)], ms=4.5, mfc=PAPER, mec=OTHER, mew=0.9,
                              label=short(label)))  # fmt: skip
    if with_goals:
        entries.append(Line2D([], [], color=AIM, lw=1.4, ls=(0, (3, 2)), label="goal of the set"))
    axes.legend(handles=entries, loc="upper left", bbox_to_anchor=(-0.005, -0.38 * below), ncols=len(entries),
                frameon=False, fontsize=8.5, labelcolor=INK, handlelength=1.6, columnspacing=1.4)  # fmt: skip
