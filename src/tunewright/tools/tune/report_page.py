"""The page of a report: one self-contained HTML file. Every text is escaped, because names come from models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from ..kb.view import plural
from ..shared.console import milliseconds
from .report_data import ReportedLayer, ReportedTuning
from .report_plots import curve, label, rooflines, segments

#: maximum number of layers in a plot, and of table rows that are not folded
PLOTTED, SHOWN = 24, 16
#: minimum part of the time of a layer in a plot
LEAST = 0.002

PHASES = {
    "profile": "measuring layers",
    "search": "searching kernels",
    "network": "deciding in the network",
    "whole": "comparing whole networks",
}
TIERS = ("search", "lock file", "tuning file", "user knowledge base", "model file", "system knowledge base",
         "heuristic", "default")  # fmt: skip

STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1d2430; --dim: #66707f; --line: #e3e7ec; --soft: #f5f7f9;
  --before: #a9b4c2; --after: #0a7ea4; --bad: #c8452f; --a: #7d8da1; --b: #0a7ea4; --c: #c78a1b; --d: #6d5bb0; }
@media (prefers-color-scheme: dark) { :root { --page: #14181d; --text: #e2e7ed; --dim: #93a0af; --line: #2b333c;
  --soft: #1b2127; --before: #6a788a; --after: #3fb4d8; --bad: #ee7f68; --a: #6f7e90; --b: #3fb4d8; --c: #dba53c;
  --d: #9a8ae0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 48px 0 4px; letter-spacing: -0.005em; }
p { margin: 4px 0 12px; max-width: 75ch; }
.dim { color: var(--dim); } .small { font-size: 13px; } a { color: var(--after); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, max-content)); gap: 14px 32px;
  margin: 28px 0 8px; }
.fact b { display: block; font-size: 25px; white-space: nowrap; line-height: 1.2; font-weight: 600;
  letter-spacing: -0.02em; }
.fact span { color: var(--dim); font-size: 13px; display: block; }
table { border-collapse: collapse; width: 100%; margin: 12px 0; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; color: var(--dim); font-size: 13px; padding: 4px 12px 4px 0;
  border-bottom: 1px solid var(--line); white-space: nowrap; }
td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th:last-child, td:last-child { padding-right: 0; }
.n { text-align: right; white-space: nowrap; }
.name { max-width: 250px; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.wrap { overflow-wrap: anywhere; } .up { color: var(--after); font-weight: 600; }
.wide { overflow-x: auto; }
code { font: 12.5px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: 6px; padding: 10px 14px;
  margin: 8px 0 16px; overflow-x: auto; white-space: pre-wrap; }
.bars { width: 34%; min-width: 140px; } .bars div { height: 7px; border-radius: 2px; margin-top: 3px; min-width: 1px; }
.bars .was { background: var(--before); } .bars .is { background: var(--after); }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin: 0 6px 0 0; }
.keys span { margin-right: 20px; white-space: nowrap; }
svg { display: block; font: inherit; } svg text { fill: var(--text); }
svg .tick { fill: var(--dim); font-size: 10px; } svg .grid { stroke: var(--line); }
.bar { width: 100%; height: 20px; border-radius: 4px; margin: 10px 0; }
.profile { fill: var(--a); background: var(--a); } .search { fill: var(--b); background: var(--b); }
.network { fill: var(--c); background: var(--c); } .whole { fill: var(--d); background: var(--d); }
.rest { fill: var(--line); background: var(--line); }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(236px, 1fr)); gap: 20px 22px;
  margin-top: 14px; }
.curves figure { margin: 0; min-width: 0; }
.curves figcaption { font-size: 13px; display: flex; justify-content: space-between; gap: 8px; }
.curves figcaption span:first-child { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.curve { width: 100%; } .curve .best { fill: none; stroke: var(--after); stroke-width: 1.8; }
.curve .first { stroke: var(--before); stroke-dasharray: 3 3; } .curve .try { fill: var(--before); }
.curve .far { fill: var(--before); opacity: 0.4; } .curve .bad { fill: var(--bad); }
.rooflines { width: 100%; min-width: 640px; } .rooflines .tick, .rooflines .said, .rooflines .name { font-size: 13px; }
.rooflines .said { fill: var(--dim); } .rooflines .edge { stroke: var(--dim); stroke-dasharray: 4 3; }
.rooflines .lead { stroke: var(--line); stroke-width: 2; } .rooflines .move { stroke: var(--after); stroke-width: 3; }
.rooflines .before { fill: var(--before); } .rooflines .after { fill: var(--after); }
details { margin: 8px 0; } summary { cursor: pointer; color: var(--dim); font-size: 14px; }
.aside { display: inline-block; margin: 0 0 0 12px; } .aside[open] { display: block; margin: 4px 0 0; }
article + article, ul + article { border-top: 2px solid var(--line); margin-top: 64px; padding-top: 40px; }
@media print { main { padding: 0; } h2 { break-after: avoid; } figure, tr { break-inside: avoid; } }
"""


def html(tunings: Sequence[ReportedTuning]) -> str:
    """Return the whole page."""
    name = title(tunings[0]) if len(tunings) == 1 else plural(len(tunings), "tuning")
    index = ""
    if len(tunings) > 1:
        links = (f'<li><a href="#t{n}">{escape(title(t))}</a>: {_headline(t)}</li>' for n, t in enumerate(tunings))
        index = f"<h1>{escape(name)}</h1><ul>{''.join(links)}</ul>"
    body = "".join(f'<article id="t{n}">{_article(t)}</article>' for n, t in enumerate(tunings))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(name)}: tuning report</title><style>{STYLE}</style></head>\n"
        f"<body><main>{index}{body}</main></body></html>\n"
    )


def title(t: ReportedTuning) -> str:
    """Return the name of the tuned model, or a text in its place."""
    return t.model.rpartition("/")[2] or {"online": "Tuned while models were loaded"}.get(t.kind, "A model")


def _article(t: ReportedTuning) -> str:
    parts = (_head, _budget, _times, _curves, _roofline, _tiers, _failures, _undone, _next, _foot)
    return "\n".join(made for part in parts if (made := part(t)))


# ---- parts --------------------------------------------------------------------------------------------------------


def _head(t: ReportedTuning) -> str:
    place = " \u00b7 ".join(filter(None, (t.device, t.where.get("processor"), t.where.get("runtime"), _day(t.date))))
    state = {"finished": "", "stopped": "It was stopped before the end."}.get(t.state, f"It is under way: {t.state}.")
    what = "an inference" if t.kind == "model" else "all problems, each run once by itself"
    facts = [_fact(_headline(t), f"{what}, before and after" if t.changed else what)]
    if t.gain is not None:
        low, high, pairs = t.gain[1], t.gain[2], int(t.gain[3])
        facts.append(_fact(f"{t.gain[0]:.3f}\u00d7", f"as fast; {low:.3f} to {high:.3f} in {pairs} pairs"))
    elif t.before and t.after < t.before:
        facts.append(_fact(f"{t.before / t.after:.2f}\u00d7", "as fast, by sums"))
    facts.append(_fact(f"{len(t.changed)} of {len(t.rows)}", "layers have another kernel now"))
    tried = sum(1 for _ in t.trials)
    facts.append(_fact(f"{tried:,}", "candidates tried"))
    if t.error and t.changed:
        facts.append(_fact(f"{t.error:.0e}", "largest difference of outputs"))
    warning = f"<p><b>{escape(state)}</b></p>" if state else ""
    top = f'<h1>{escape(title(t))}</h1><p class="dim">{escape(place)}</p>'
    return f'{top}{warning}<div class="facts">{"".join(facts)}</div>'


def _headline(t: ReportedTuning) -> str:
    after = f" \u2192 {milliseconds(t.after)}" if t.changed else ""
    return f"{milliseconds(t.before)}{after} ms"


def _fact(value: str, what: str) -> str:
    return f'<div class="fact"><b>{escape(value)}</b><span>{escape(what)}</span></div>'


def _budget(t: ReportedTuning) -> str:
    phases = [(name, t.phases[name]) for name in PHASES if t.phases.get(name, 0.0) >= 0.05]
    if not phases:
        return ""
    used = sum(seconds for _, seconds in phases)
    parts = [(name, seconds, f"{PHASES[name]}: {seconds:.1f} s") for name, seconds in phases]
    rest = (t.budget or 0.0) - used
    if rest > 0:
        parts.append(("rest", rest, f"not used: {rest:.1f} s"))
    keys = "".join(
        f'<span><i class="key {name}"></i>{escape(PHASES.get(name, "not used"))} {seconds:.1f} s</span>'
        for name, seconds, _ in parts
    )
    spent = t.spent
    whole = sum(spent.get(name, 0.0) for name in ("search", "race", "confirm"))
    searched = ""
    if whole:
        compiling, checking = spent.get("compile", 0.0), spent.get("check", 0.0)
        timing = max(whole - compiling - checking, 0.0)
        searched = (
            f"<p>Of the search, {compiling:.1f} s went into compiling candidates, {checking:.1f} s into checking them"
            f" against the reference, {timing:.1f} s into timing and the rest{_races(spent)}.</p>"
        )
    of = f" of {t.budget:.0f} s" if t.budget else ""
    total = max(used, t.budget or 0.0)
    bar = f'{segments(parts, total)}<p class="keys small">{keys}</p>'
    return f"<h2>Where the time of tuning went</h2><p>{used:.1f} s{of}.</p>{bar}{searched}"


def _races(spent: Mapping[str, float]) -> str:
    found = [
        f"{spent[name]:.1f} s of {what}"
        for name, what in (("race", "races"), ("confirm", "confirmations"))
        if spent.get(name, 0.0) >= 0.05
    ]
    return f" ({', '.join(found)} included)" if found else ""


def _times(t: ReportedTuning) -> str:
    rows = [row for row in t.rows if row.seconds > 0]
    if not rows:
        return ""
    most, total = rows[0].seconds, t.total

    def line(row: ReportedLayer) -> str:
        gain = f'<td class="n up">{row.gain:.2f}\u00d7</td>' if row.chosen else '<td class="n dim">\u2013</td>'
        bars = f'<div class="was" style="width:{100 * row.seconds / most:.1f}%"></div>'
        bars += f'<div class="is" style="width:{100 * row.after / most:.1f}%"></div>' if row.chosen else ""
        return (
            f'<tr>{_name(row)}<td>{escape(row.op)}</td><td class="bars">{bars}</td>'
            f'<td class="n">{row.seconds / total:.1%}</td><td class="n">{milliseconds(row.seconds)}</td>'
            f'<td class="n">{milliseconds(row.after)}</td>{gain}</tr>'
        )

    head = _row_head("layer", "operation", "", ">share", ">before, ms", ">after, ms", ">gain")
    what = "an inference spends its time" if t.kind == "model" else "time goes, one execution of each"
    keys = '<span><i class="key" style="background:var(--before)"></i>before</span>'
    keys += '<span><i class="key" style="background:var(--after)"></i>after, where the kernel changed</span>'
    lines = _folded(head, [line(row) for row in rows], "layer")
    return f'<h2>Where {what}</h2><p class="keys small dim">{keys}</p>{lines}'


def _curves(t: ReportedTuning) -> str:
    rows = [row for row in t.rows if sum(trial.seconds is not None for trial in row.trials) > 1][:PLOTTED]
    if not rows:
        return ""
    made = []
    for row in rows:
        times = [trial.seconds for trial in row.trials if trial.seconds]
        gain = times[0] / min(times)
        said = f'<span class="up">{gain:.2f}\u00d7</span>' if gain > 1.005 else '<span class="dim">\u2013</span>'
        named = f'<figcaption title="{escape(row.name)}"><span>{escape(label(row.name, 30))}</span>{said}</figcaption>'
        made.append(f"<figure>{named}{curve(row)}</figure>")
    return (
        "<h2>How the search went</h2><p>Best time so far, of the first candidate's (the default, dashed), over seconds"
        " of the search. Each mark is a candidate; red ones failed. The gain is that of the search alone: the network,"
        f' or a confirmation, decides afterwards.</p><div class="curves">{"".join(made)}</div>'
    )


def _roofline(t: ReportedTuning) -> str:
    rows = [row for row in t.rows if row.floor and row.seconds > LEAST * t.total][:PLOTTED]
    if not rows:
        return ""
    bounds = Counter(row.bound for row in rows if row.bound)
    said = ", ".join(f"{count} by {escape(bound)}" for bound, count in bounds.most_common())
    return (
        "<h2>Share of the roofline</h2><p>The time that arithmetic or memory traffic would take at the rates measured"
        " on this device, through the layer's time. More than 100 %: less work than the definition counts, as in fast"
        f' algorithms, or data that was in the cache. Bound: {said}.</p><div class="wide">{rooflines(rows)}</div>'
    )


def _tiers(t: ReportedTuning) -> str:
    if not t.rows:
        return ""
    names = sorted({row.tier for row in t.rows}, key=lambda n: (TIERS.index(n) if n in TIERS else len(TIERS), n))
    total = sum(row.after for row in t.rows) or 1.0
    lines = []
    for name in names:
        mine = [row for row in t.rows if row.tier == name]
        part = sum(row.after for row in mine) / total
        lines.append(f'<tr><td>{escape(name)}</td><td class="n">{len(mine)}</td><td class="n">{part:.1%}</td></tr>')
    head = _row_head("from", ">layers", ">share of time")
    kernels = [
        f'<tr>{_name(row)}<td class="wrap"><code>{escape(row.chosen or row.kernel)}</code></td>'
        f'<td>{escape(row.tier)}</td><td class="wrap">{escape(row.verdict)}</td></tr>'
        for row in t.rows
    ]
    each = _folded(_row_head("layer", "kernel", "from", "what came of it"), kernels, "layer")
    return f'<h2>Where the kernels come from</h2><table style="width:auto">{head}{"".join(lines)}</table>{each}'


def _failures(t: ReportedTuning) -> str:
    bad = [trial for trial in t.trials if trial.seconds is None]
    if not bad:
        return "" if not any(True for _ in t.trials) else "<h2>Candidates that failed</h2><p>None.</p>"
    tried = sum(1 for _ in t.trials)
    lines = []
    for status, count in Counter(trial.status for trial in bad).most_common():
        why = Counter(trial.why for trial in bad if trial.status == status)
        solvers = Counter(trial.kernel.partition(" ")[0] for trial in bad if trial.status == status)
        said = "<br>".join(f"{escape(label(w, 160))} ({n})" for w, n in why.most_common(3))
        who = "<br>".join(f"<code>{escape(s)}</code> ({n})" for s, n in solvers.most_common(3))
        lines.append(
            f'<tr><td>{escape(status.lower())}</td><td class="n">{count}</td><td>{who}</td>'
            f'<td class="wrap">{said}</td></tr>'
        )
    head = _row_head("what", ">candidates", "kernels", "why, the most frequent")
    top = f"<h2>Candidates that failed</h2><p>{len(bad):,} of {tried:,}. None of them is ever used.</p>"
    return f"{top}{_table(head, lines)}"


def _undone(t: ReportedTuning) -> str:
    rows = [row for row in t.rows if row.undone or (row.network and not row.chosen and row.trials)]
    if not rows:
        return ""
    lines = []
    for row in rows:
        best = row.best_in_network
        said = f"{best[1][0]:.3f}\u00d7 ({best[1][1]:.3f} to {best[1][2]:.3f})" if best is not None else ""
        kernel = f"<code>{escape(best[0])}</code>" if best is not None else ""
        lines.append(
            f'<tr>{_name(row)}<td class="wrap">{kernel}</td><td class="n">{said}</td>'
            f"<td>{escape(row.verdict)}</td></tr>"
        )
    head = _row_head("layer", "best in the network", ">over the default", "why it was not kept")
    return f"<h2>What the network did not confirm</h2>{_folded(head, lines, 'layer')}"


def _next(t: ReportedTuning) -> str:
    following, settled = t.following(), t.settled()[:8]
    if not following and not settled:
        return ""
    parts = ["<h2>What to tune next</h2>"]
    if following:
        hope = sum(row.hope for row in following)
        parts.append(
            f"<p>{plural(len(following), 'layer')} had no search, or one that was too short or too noisy to tell. At"
            f" most {milliseconds(hope)} ms may be saved there. The same command goes on where it ended:</p>"
        )
        if line := _again(t):
            parts.append(f"<pre><code>{escape(line)}</code></pre>")
        lines = [
            f'<tr>{_name(row)}<td class="n">{milliseconds(row.after)}</td><td class="n">{milliseconds(row.hope)}</td>'
            f'<td class="wrap">{escape(row.verdict)}{_command(row)}</td></tr>'
            for row in following
        ]
        head = _row_head("layer", ">ms", ">at most saved, ms", "why it is open")
        parts.append(_folded(head, lines, "layer"))
    if settled:
        names = ", ".join(f"{escape(label(row.name, 40))} ({row.share(row.after) or 0:.0%})" for row in settled)
        parts.append(
            "<p>Searched, and still below half of the roofline: another search finds little there, another kernel may."
            f' <span class="dim">{names}</span></p>'
        )
    return "".join(parts)


def _foot(t: ReportedTuning) -> str:
    facts = {"model": t.model, **t.where, **t.settings, **t.environment}
    lines = "".join(f'<tr><td>{escape(k)}</td><td class="wrap">{escape(v)}</td></tr>' for k, v in facts.items() if v)
    summary = "<summary>Where and how it was measured</summary>"
    return f'<details style="margin-top:48px">{summary}<table>{lines}</table></details>'


# ---- pieces -------------------------------------------------------------------------------------------------------


def _name(row: ReportedLayer) -> str:
    hint = "\n".join([*row.nodes[:20], row.problem])
    return f'<td class="name" title="{escape(hint)}"><bdi>{escape(label(row.name))}</bdi></td>'


def _row_head(*names: str) -> str:
    cells = (f'<th class="n">{n[1:]}</th>' if n.startswith(">") else f"<th>{n}</th>" for n in names)
    return f"<tr>{''.join(cells)}</tr>"


def _folded(head: str, lines: Sequence[str], what: str) -> str:
    """Make a table whose rows beyond a limit are folded."""
    first = _table(head, lines[:SHOWN])
    if len(lines) <= SHOWN:
        return first
    summary = f"<summary>{plural(len(lines) - SHOWN, f'more {what}')}</summary>"
    return f"{first}<details>{summary}{_table(head, lines[SHOWN:])}</details>"


def _table(head: str, lines: Iterable[str]) -> str:
    return f'<div class="wide"><table>{head}{"".join(lines)}</table></div>'


def _command(row: ReportedLayer) -> str:
    if not row.command:
        return ""
    line = f"{escape(row.command)} --tune --seconds 20"
    return f'<details class="aside"><summary>by itself</summary><code>{line}</code></details>'


def _again(t: ReportedTuning) -> str:
    """Return the command that continues the tuning, with twice the time."""
    from tunewright.tuning.offline.suggested_commands import command

    more = f"--budget {max(30, round(2 * (t.budget or 30.0)))}s"
    if t.command:
        return f"{t.command} {more}"
    return f"{command('tune', *t.model.split(', '), device=t.device)} {more}" if t.model else ""


def _day(date: str) -> str:
    return date.replace("T", " ")[:16] + " UTC" if date else ""
