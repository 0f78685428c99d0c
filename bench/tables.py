"""Results as text: tables on the terminal, and the same in Markdown for the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import results
from results import OPENVINO, ORT, OURS, Report, Row

#: what has no set
YOURS = "models of yours"


@dataclass(frozen=True)
class Sheet:
    """A table: its columns (the first one is text and says what it is about), its rows, and what to know."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def short(label: str) -> str:
    """A row of ours without our name."""
    return label.removeprefix(OURS)


def times(value: float) -> str:
    """Milliseconds with three digits, or as many as there are."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def spread(found: results.Speed | None, narrow: bool = False) -> str:
    if found is None or narrow:
        return "" if found is None else f"{found.median:.2f}"
    low, high = found.quartiles
    return f"{found.median:.2f} ({low:.2f}..{high:.2f})"


def sheets(report: Report, narrow: bool) -> Iterator[Sheet]:
    """All of a report; a narrow one has the spread of the first of our rows alone."""
    mine = results.ours(report)
    if not mine:
        return
    alone = len(mine) == len(report["engines"])
    for name, models in results.sets(report).items():
        yield by_row(name or YOURS, models, mine) if alone else by_model(name or YOURS, models, mine, narrow)
    if not alone:
        yield by_set(report, mine)
    yield costs(report, mine[0])
    shares = results.untuned(report)
    if shares:
        yield withheld(shares)


def by_model(name: str, models: Sequence[Row], mine: Sequence[str], narrow: bool) -> Sheet:
    """Times, and how many times as fast as the others we are."""
    columns = [name, *(f"{who}\nms" for who in (short(mine[0]), ORT, OPENVINO)), "over ONNX\nRuntime", "over\nOpenVINO"]
    columns += [f"{short(label)}\nover the better" for label in mine]
    rows = []
    for model in models:
        first = next((r for r in model.get("rows", []) if r["engine"] == mine[0]), None)
        cells = [model["model"], "skipped" if "skipped" in model else time_of(model, first)]
        cells += [time_of(model, results.row_of(model, peer)) for peer in (ORT, OPENVINO)]
        found = [results.over(model, mine[0], peer) for peer in (ORT, OPENVINO)]
        cells += [f"{s.median:.2f}" if s else "" for s in found]
        cells += [spread(results.over(model, label), narrow and label != mine[0]) for label in mine]
        rows.append(cells)
    return Sheet(columns, rows)


def by_row(name: str, models: Sequence[Row], mine: Sequence[str]) -> Sheet:
    """Without other engines: our rows, and how many times as fast as the last of them they are."""
    columns = [name, *(f"{short(label)}\nms" for label in mine)]
    columns += [f"{short(label)}\nover {short(mine[-1])}" for label in mine[:-1]]
    rows = []
    for model in models:
        there = [next((r for r in model.get("rows", []) if r["engine"] == label), None) for label in mine]
        cells = [model["model"], *(time_of(model, row) for row in there)]
        cells += [spread(results.speed(row, there[-1], short(mine[-1]))) for row in there[:-1]]
        rows.append(cells)
    return Sheet(columns, rows)


def time_of(model: Row, row: Row | None) -> str:
    if row is None:
        return ""
    if not results.runs(row):
        return "cannot"
    mark = " (!)" if results.is_wrong(model, row) else ""
    return times(row["median_ms"]) + mark


def by_set(report: Report, mine: Sequence[str]) -> Sheet:
    """Geometric means beside their goals."""
    columns = ["geometric means", "of", "goal", *(short(label) for label in mine), "reached"]
    notes = ["Speed-up over the better peer (int8: over ONNX Runtime), with the interval of 90 of 100 draws of turns."]
    rows = []
    found = results.sets(report)
    for name, models in {**found, results.ALL: report["models"] if len(found) > 1 else []}.items():
        verdicts = [results.verdict(name, models, label) for label in mine]
        first = verdicts[0]
        if first.mean is None and not first.broken:
            continue
        reached = {None: "", True: "yes", False: "no"}[first.reached]
        missed = [f"{model} {value:.2f}" for model, value in first.missed] + [f"{m} (broken)" for m in first.broken]
        if missed and name != results.ALL:  # its set tells of each
            notes.append(f"{name or YOURS}, {short(mine[0])}: missed by {', '.join(missed)}.")
        count = str(first.mean.count if first.mean else 0)
        means = [str(v.mean) if v.mean else "" for v in verdicts]
        rows.append([name or YOURS, count, str(first.goal or ""), *means, reached])
    return Sheet(columns, rows, notes)


def costs(report: Report, label: str) -> Sheet:
    """Memory and start of all that ran."""
    names = [label, ORT, OPENVINO]
    heads = ["cold", short(label), ORT, OPENVINO]
    sizes, starts = [f"{h}\nMB" for h in heads], [f"{h}\ns" for h in heads]
    columns = ["peak memory and start", *sizes, "of ONNX\nRuntime's", *starts, "error"]
    rows, high, wrong = [], [], []
    for model in report["models"]:
        there = [results.row_of(model, name) for name in names]
        if not any(map(results.runs, there)):
            continue
        share = results.memory(model, label)
        if share is not None and share > results.MEMORY:
            high.append(f"{model['model']} {share:.2f}")
        wrong += [f"{r['engine']} on {model['model']}" for r in model["rows"] if results.is_wrong(model, r)]
        all_of_them = [(there[0] or {}).get("cold"), *there]
        sizes = [f"{r['peak_mb']:.0f}" if r and "peak_mb" in r else "" for r in all_of_them]
        starts = [f"{r['compile'] + r['first']:.2f}" if r and "compile" in r else "" for r in all_of_them]
        rows.append([model["model"], *sizes, "" if share is None else f"{share:.2f}", *starts, error_of(there[0])])
    notes = ["Start: reading, compiling and the first inference; ours cold (nothing compiled), and once it was. "
             "Error: of the output's scale, against ONNX Runtime where it runs."]  # fmt: skip
    if any(results.memory(m, label) is not None for m in report["models"]):
        notes.append(f"Above {results.MEMORY} of ONNX Runtime's memory: {', '.join(high) or 'none'}.")
    notes.append(f"Other answers (!): {', '.join(wrong) or 'none'}.")
    return Sheet(columns, rows, notes)


def error_of(row: Row | None) -> str:
    if row is None or not results.runs(row):
        return ""
    return "other" if row["error"] is None else f"{row['error']:.0e}"


def withheld(shares: Sequence[results.Untuned]) -> Sheet:
    """What ships beside what tuning finds, on models that it was made without."""
    speed, gain = results.UNTUNED
    rows = [[s.model, f"{s.speed:.2f}", "nothing to gain" if s.gain is None else f"{s.gain:.2f}"] for s in shares]
    return Sheet(["withheld models, as shipped", "of the tuned speed", "of the gain over defaults"], rows, [
        f"What ships was made without them. Goals: {speed} of the speed, {gain} of the gain."
    ])  # fmt: skip


def preface(report: Report) -> list[str]:
    """What was measured, and how."""
    how, versions = report["options"], report["versions"]
    peers = ", ".join(f"{name} {versions[name]}" for name in (ORT, OPENVINO) if name in versions)
    lines = [
        f"{report['machine']}; batch 1, a process per engine, in turns of {how['seconds']:g} s "
        f"({how['rounds']} turns, {how['least']} inferences at least).",
        f"Tunewright {versions.get('Tunewright', '')}" + (f", {peers} (fp32, latency hint, the better of pinned and "
        "unpinned), all with the same threads." if peers else "; no other engine."),
        "Speed-ups: their time through ours, turn by turn; above 1 we are faster. In brackets: quartiles over turns.",
    ]  # fmt: skip
    if how.get("tune"):
        lines.append(f"Tuned for at most {how['tune']:g} s a model.")
    return lines + list(report.get("notes", []))


def skipped(report: Report) -> list[str]:
    """What was not measured, and why."""
    lines = [f"{m['model']} was skipped: {m['skipped']}" for m in report["models"] if "skipped" in m]
    for model in report["models"]:
        # both pinnings of OpenVINO fail for the same reason
        said = {(r["engine"].removesuffix(", unpinned").removesuffix(", pinned"), r["failed"]): r["failed"]
                for r in model.get("rows", []) if "failed" in r}  # fmt: skip
        lines += [f"{engine} cannot run {model['model']}: {why[:160]}" for (engine, _), why in said.items()]
    return lines


def show(report: Report, out: Console) -> None:
    """On the terminal."""
    for line in preface(report):
        out.print(line, markup=False)
    for sheet in sheets(report, narrow=True):
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for k, column in enumerate(sheet.columns):
            table.add_column(column, justify="right" if k else "left", no_wrap=True)
        for row in sheet.rows:
            table.add_row(*map(escape, row))
        out.print()
        out.print(table)
        for note in sheet.notes:
            out.print(note, style="dim", markup=False)


def markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def markdown(report: Report) -> str:
    """For the documentation."""
    parts = [" ".join(preface(report))]
    for sheet in sheets(report, narrow=False):
        bars = ["---", *["--:"] * (len(sheet.columns) - 1)]
        lines = [sheet.columns, bars, *sheet.rows]
        parts.append("\n".join(map(markdown_line, lines)))
        parts += sheet.notes
    unmeasured = skipped(report)
    if unmeasured:
        parts.append("\n".join(f"- {line}" for line in unmeasured))
    return "\n\n".join(parts) + "\n"
