"""Plots of a report as inline SVG. Colours come from the page's CSS, hints are titles; there are no scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from ..shared.console import milliseconds
from .report_data import ReportedLayer

#: size of a search curve
WIDTH, HEIGHT = 250, 132
#: margins around its axes
LEFT, RIGHT, TOP, BOTTOM = 36, 6, 8, 20
#: maximum characters of a name beside a plot
LONGEST = 44
#: maximum number of marks on a curve
MOST_MARKS = 400


def label(text: str, most: int = LONGEST) -> str:
    """Shorten a name to one line. The end is kept, because it distinguishes layers of a network."""
    return text if len(text) <= most else f"\u2026{text[1 - most :]}"


def segments(parts: Sequence[tuple[str, float, str]], total: float) -> str:
    """Draw one bar made of parts (class, amount, hint)."""
    at, made = 0.0, []
    for kind, amount, hint in parts:
        width = 1000 * amount / total if total else 0.0
        made.append(
            f'<rect class="{kind}" x="{at:.1f}" y="0" width="{max(width, 0):.1f}" height="20">'
            f"<title>{escape(hint)}</title></rect>"
        )
        at += width
    return f'<svg class="bar" viewBox="0 0 1000 20" preserveAspectRatio="none" role="img">{"".join(made)}</svg>'


def curve(row: ReportedLayer) -> str:
    """Draw the best time so far over the search time, relative to the first time. Every candidate is a mark."""
    timed = [(t.at, t.seconds, t) for t in row.trials if t.seconds]
    if not timed:
        return ""
    first = timed[0][1]
    best = min(s for _, s, _ in timed)
    end = max(t.at for t in row.trials) or 1.0
    top = max(1.25, min(2.0, max(s for _, s, _ in timed) / first))
    bottom = min(0.95, best / first) * 0.94

    def x(at: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * at / end

    def y(seconds: float) -> float:
        part = (min(seconds / first, top) - bottom) / (top - bottom)
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - part)

    made = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(v * first):.1f}" y2="{y(v * first):.1f}"/>'
        f'<text class="tick" x="{LEFT - 5}" y="{y(v * first) + 3:.1f}" text-anchor="end">{v:.0%}</text>'
        for v in ticks(bottom, top)
    ]
    made.append(f'<line class="first" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(first):.1f}" y2="{y(first):.1f}"/>')
    step = max(1, len(row.trials) // MOST_MARKS)
    for t in row.trials[::step]:
        hint = f"{t.kernel}: " + (f"{milliseconds(t.seconds)} ms" if t.seconds else f"{t.status.lower()}, {t.why}")
        place = f'cx="{x(t.at):.1f}" cy="{y(t.seconds) if t.seconds else HEIGHT - BOTTOM - 3:.1f}"'
        kind = ("far" if t.seconds / first > top else "try") if t.seconds else "bad"
        made.append(f'<circle class="{kind}" {place} r="2"><title>{escape(hint[:300])}</title></circle>')
    so_far, path = math.inf, ""
    for at, seconds, _ in timed:
        if seconds < so_far:
            path += f"H{x(at):.1f}V{y(seconds):.1f}" if path else f"M{x(at):.1f} {y(seconds):.1f}"
            so_far = seconds
    made.append(f'<path class="best" d="{path}H{x(end):.1f}"/>')
    made.append(f'<text class="tick" x="{LEFT}" y="{HEIGHT - 5}">0</text>')
    made.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 5}" text-anchor="end">{end:.1f} s</text>')
    return f'<svg class="curve" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(made)}</svg>'


def ticks(bottom: float, top: float) -> list[float]:
    """Return up to four round numbers between two limits."""
    for each in (0.05, 0.1, 0.2, 0.25, 0.5):
        found = [k * each for k in range(math.ceil(bottom / each), math.floor(top / each) + 1)]
        if len(found) <= 4:
            return found
    return [1.0]


def rooflines(rows: Sequence[ReportedLayer]) -> str:
    """Draw for each layer the share of the roofline before and after tuning."""
    wide, high, left, right, head = 1000, 22, 220, 120, 22
    below = head + high * len(rows)
    most = max(1.0, *(row.share(row.after) or 0.0 for row in rows))

    def x(share: float) -> float:
        return left + (wide - left - right) * min(share, most) / most

    made = []
    for k in range(5):
        at = x(k / 4)
        kind = "edge" if k == 4 else "grid"
        made.append(f'<line class="{kind}" x1="{at:.1f}" x2="{at:.1f}" y1="{head - 4}" y2="{below}"/>')
        made.append(f'<text class="tick" x="{at:.1f}" y="{head - 9}" text-anchor="middle">{k / 4:.0%}</text>')
    for n, row in enumerate(rows):
        y = head + high * n + high / 2
        before, after = row.share(row.seconds), row.share(row.after)
        if before is None or after is None:
            continue
        said = f"{before:.0%}" if not row.chosen else f"{before:.0%} \u2192 {after:.0%}"
        made.append(
            f"<g><title>{escape(f'{row.name}: {said} of the roofline, bound by {row.bound}')}</title>"
            f'<text class="name" x="{left - 10}" y="{y + 4:.1f}" text-anchor="end">{escape(label(row.name, 28))}</text>'
            f'<line class="lead" x1="{left}" x2="{x(before):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<line class="move" x1="{x(before):.1f}" x2="{x(after):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<circle class="before" cx="{x(before):.1f}" cy="{y:.1f}" r="4.5"/>'
            + (f'<circle class="after" cx="{x(after):.1f}" cy="{y:.1f}" r="5"/>' if row.chosen else "")
            + f'<text class="said" x="{wide}" y="{y + 4:.1f}" text-anchor="end">{escape(said)}</text></g>'
        )
    return f'<svg class="rooflines" viewBox="0 0 {wide} {below + 4:.0f}" role="img">{"".join(made)}</svg>'
