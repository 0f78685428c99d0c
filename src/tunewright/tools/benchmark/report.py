"""Output of a benchmark: the report for programs (JSON, CSV), and the figures for people."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tunewright.errors import InputError

from ..shared.console import cell, console, milliseconds, table
from .advice import origin_word
from .statistics import TimeSlices, percentile, short, statistics, thinned

if TYPE_CHECKING:
    from tunewright.runtime.insight.counters import CounterRow

    from .advice import BenchmarkAdvice
    from .measure import BenchmarkResult, Load
    from .statistics import Comparison

SCHEMA = "tunewright.benchmark/2"
#: number of counter rows printed; reports contain all
SHOWN = 25
#: names of the states of nodes, in the order of `NodeStatus`
TOLD = ("nodes executed", "optimized out", "not run")
#: longest node name that is printed in full; reports contain all names
LONGEST = 48


def _spent(row: CounterRow) -> float:
    return row.device_seconds + row.host_seconds


def _is_leaf(row: CounterRow) -> bool:
    return row.kernel != "control flow"


# -- for programs -----------------------------------------------------------------------------------------------------
def figures(result: BenchmarkResult, load: Load, batch: int | None, percentiles: Sequence[float]) -> dict[str, Any]:
    """Return the measurements of a run or of one point of a sweep, as a dictionary for the report."""
    count = len(result.latencies)
    rate = count / max(result.seconds, 1e-9)
    slices = TimeSlices.of(result.latencies, result.ends, result.begin)
    found = {
        "api": load.api,
        "requests": load.requests,
        "batch": batch,
        "inferences": count,
        "seconds": result.seconds,
        "interrupted": result.interrupted,
        "latency_ms": {k: v * 1e3 for k, v in statistics(result.latencies, percentiles).items()},
        "throughput_per_second": rate,
        "examples_per_second": rate * (batch or 1),
        "concurrency": sum(result.runs) / max(result.seconds, 1e-9),
        "run_ms": median(result.runs) * 1e3,
        "launches": result.launches / max(1, count),
        "host_us": median(result.hosts) * 1e6,
        "copy_us": median(result.copies) * 1e6 if result.rows else None,
        "kernel_us": _kernel_seconds(result) * 1e6 if result.rows else None,
    }
    found["samples"] = {
        "latency_ms": [short(s * 1e3) for s in thinned(result.latencies)], "slices": slices.as_dict()
    }  # fmt: skip
    return found


def _kernel_seconds(result: BenchmarkResult) -> float:
    """Return the device seconds of an inference's kernels, from the counters."""
    return sum(row.device_seconds for row in result.rows if _is_leaf(row)) / max(1, result.counted)


def row_of(row: CounterRow, counted: int, total: float) -> dict[str, Any]:
    """Return a row of counters per inference."""
    n = max(1, counted)
    return {
        "name": row.name,
        "type": row.type,
        "status": row.status.value,
        "kernel": row.kernel,
        "origin": row.origin,
        "chosen": origin_word(row.origin),
        "device": row.device,
        "subgraph": row.subgraph,
        "device_ms": row.device_seconds * 1e3 / n,
        "host_ms": row.host_seconds * 1e3 / n,
        "share": _spent(row) / total if _is_leaf(row) and total else None,
        "calls": row.calls / n,
        "launches": row.launches / n,
    }


def counters_of(result: BenchmarkResult) -> list[dict[str, Any]]:
    """Return all rows, longest time first."""
    total = sum(_spent(row) for row in result.rows if _is_leaf(row))
    rows = sorted(result.rows, key=lambda row: -_spent(row))
    return [row_of(row, result.counted, total) for row in rows]


def write_json(report: Mapping[str, Any], target: str) -> None:
    """Write JSON to a file, or to stdout for ``-``."""
    _write(json.dumps(report, indent=2) + "\n", target)


def write_report(report: Mapping[str, Any], target: str) -> None:
    """Write CSV if the file's suffix says so, else JSON."""
    if target.lower().endswith(".csv"):
        _write(as_csv(report), target)
    else:
        write_json(report, target)


def _write(text: str, target: str) -> None:
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", where=target) from None


def as_csv(report: Mapping[str, Any]) -> str:
    """Return the report as CSV: a row per point of a sweep, or else a row (key, type, value) per figure."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    if "points" in report:
        rows = [dict(_flat({k: v for k, v in point.items() if k != "samples"})) for point in report["points"]]
        keys = list(dict.fromkeys(key for row in rows for key in row))
        writer.writerow(keys)
        writer.writerows([[_plain(row.get(key)) for key in keys] for row in rows])
    else:
        writer.writerow(["key", "type", "value"])
        for key, value in _flat(report):
            writer.writerow([key, type(value).__name__ if value is not None else "none", _plain(value)])
    return out.getvalue()


def _flat(value: Any, key: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [pair for k, v in value.items() for pair in _flat(v, f"{key}.{k}" if key else str(k))]
    if isinstance(value, list):
        if all(not isinstance(v, (Mapping, list)) for v in value):
            return [(key, " ".join(map(str, value)))]
        return [pair for i, v in enumerate(value) for pair in _flat(v, f"{key}.{i}")]
    return [(key, value)]


def _plain(value: Any) -> Any:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else value


def read_report(path: Path) -> dict[str, Any]:
    """Read an earlier report. Raises InputError if it cannot serve as a baseline."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", where=str(path)) from None
    except ValueError as error:
        raise InputError(f"is not JSON: {error}", where=str(path)) from None
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
        raise InputError(f"is not a report of this version ({schema or 'it has no schema'})", where=str(path),
                         hint=f"write one with --report: {SCHEMA}")  # fmt: skip
    if "points" in found:
        raise InputError("is the report of a sweep", where=str(path), hint="compare with that of a plain run")
    slices = (found.get("samples") or {}).get("slices") or {}
    for key in ("latency_ms", "per_second"):
        known = slices.get(key)
        if not isinstance(known, list) or not all(isinstance(v, (int, float)) and v > 0 for v in known):
            raise InputError("has no samples to compare with", where=str(path), hint="measure it again with --report")
    return found


# -- for people -------------------------------------------------------------------------------------------------------
def show(report: Mapping[str, Any], percent: float, latencies: Sequence[float]) -> None:
    """Print the figures of a run. ``percent``: the main percentile."""
    out = console()
    about = report["environment"]
    title = f"{report['model']} on {report['device']}: {about['cpu']}, {about['cores']} cores"
    out.print(cell(title), style="bold", soft_wrap=True)
    for name, text in report["inputs"].items():
        out.print(cell(f"  {name}: {text}, {report['data'].get(name, 'absent')}"), soft_wrap=True)
    out.print()
    made = table("phase", ">ms")
    for key in ("load", "compile", "first_inference"):
        made.add_row(key.replace("_", " "), milliseconds(report[f"{key}_ms"] / 1e3))
    out.print(made)
    kernels = report["kernel_cache"]
    if kernels:
        out.print(f"kernel cache: {many(kernels['hits'], 'hit')}, {many(kernels['misses'], 'miss', 'es')}")
    else:
        out.print("kernel cache: off")
    out.print()
    streams, requests = report["streams"], report["requests"]
    how = f"{many(requests, 'request')} on {many(streams, 'stream')}, {report['api']}"
    how += f", {report['auto_batch']} of them together" if report.get("auto_batch", 1) > 1 else ""
    early = ", interrupted" if report["interrupted"] else ""
    out.print(f"{report['inferences']:,} inferences in {report['seconds']:.2f} s{early}: {how}", markup=False)
    if report.get("served"):
        shares = ", ".join(f"{name} {count:,}" for name, count in report["served"].items())
        out.print(f"served by: {shares} (with warming up)", markup=False, soft_wrap=True)
    elif report.get("devices", [report["device"]]) != [report["device"]]:
        out.print(f"served by: {', '.join(report['devices'])}", markup=False, soft_wrap=True)
    if report.get("streams_origin"):
        out.print(f"streams, requests and batch: {report['streams_origin']}", markup=False, soft_wrap=True)
    out.print()
    latency = report["latency_ms"]
    shown = {key: value for key, value in latency.items() if key not in ("std", "iqr")}
    made = table("ms", *(f">{key}" for key in shown))
    made.add_row("latency", *(milliseconds(ms / 1e3) for ms in shown.values()))
    out.print(made)
    out.print()
    if percent != 50:
        out.print(f"latency: {milliseconds(percentile(latencies, percent))} ms at the {percent:g} % percentile")
    rate, examples = report["throughput_per_second"], report["examples_per_second"]
    out.print(f"throughput: {rate:,.2f} inferences per second", markup=False)
    if examples != rate:
        out.print(f"            {examples:,.2f} examples per second, in batches of {report['batch']}", markup=False)
    launches = f"{report['launches']:,.4g} {'launch' if report['launches'] == 1 else 'launches'}"
    out.print(f"of each: {launches}, {report['host_us']:,.0f} us of the host (median)", markup=False)
    if report["copy_us"] is not None:
        copies = f"{report['copy_us']:,.0f} us of copies" if report["copy_us"] else "no copies"
        out.print(f"         {report['kernel_us']:,.0f} us of kernels (mean), {copies}", markup=False)


def many(count: int, what: str, plural: str = "s") -> str:
    """Return a count with its noun: 1 stream, 2 streams."""
    return f"{count:,} {what}" + ("" if count == 1 else plural)


def show_counters(result: BenchmarkResult) -> None:
    """Print the executed nodes by time, with their share of the sum."""
    from tunewright.runtime.insight.counters import NodeStatus

    rows, counted = result.rows, result.counted
    n = max(1, counted)
    # A control-flow node includes the time of its body, so only leaves have a share.
    total = sum(_spent(row) for row in rows if _is_leaf(row)) or 1.0
    ran = sorted((row for row in rows if row.status is NodeStatus.EXECUTED), key=lambda row: -_spent(row))
    where = "subgraph" if any(row.subgraph for row in ran) else "device" if len({row.device for row in ran}) > 1 else ""
    # Omit the column of a clock without any time, which leaves more room for names.
    clocks = {"device": [row.device_seconds for row in ran], "host": [row.host_seconds for row in ran]}
    clocks = {name: times for name, times in clocks.items() if any(times)}
    columns = ["node", "type", *([where] if where else []), "kernel", "origin"]
    made = table(*columns, *(f">{name} ms" for name in clocks), ">share")
    for i, row in enumerate(ran[:SHOWN]):
        share = f"{_spent(row) / total:.1%}" if _is_leaf(row) else "-"
        times = [milliseconds(s / n) if (s := seconds[i]) else "-" for seconds in clocks.values()]
        place = [row.device if where == "device" else f"{row.subgraph} on {row.device}"] if where else []
        what = [_short(row.name), row.type.removeprefix("tunewright::"), *place, row.kernel]
        made.add_row(*map(cell, [*what, origin_word(row.origin) or "-"]), *times, share)
    out = console()
    out.print()
    out.print(made)
    out.print()
    rest = ran[SHOWN:]
    if rest:
        together = sum(_spent(row) for row in rest if _is_leaf(row)) / total
        out.print(f"and {len(rest)} more nodes with {together:.1%} together (--report has all)", markup=False)
    counts = [len({row.name for row in rows if row.status is status}) for status in NodeStatus]
    told = ", ".join(f"{count} {said}" for count, said in zip(counts, TOLD, strict=True))
    out.print(f"{told}; mean of {many(counted, 'inference')}", markup=False)
    kernels = [row for row in ran if _is_leaf(row)]
    launches, host = sum(row.launches for row in kernels) / n, sum(row.host_seconds for row in kernels)
    if launches:
        part = f"; {host / total:.1%} of the time in operations on the host" if host else ""
        out.print(f"{many(round(launches), 'kernel')} launched{part}")
    if where == "subgraph":
        _show_subgraphs(kernels, n, total)


def _show_subgraphs(ran: Sequence[CounterRow], n: int, total: float) -> None:
    """Print the time of each HETERO subgraph, in the order in which they run."""
    parts: dict[tuple[int, str], list[CounterRow]] = {}
    for row in ran:
        parts.setdefault((row.subgraph or 0, row.device), []).append(row)
    made = table(">subgraph", "device", ">nodes", ">ms", ">share")
    for (number, device), rows in sorted(parts.items()):
        spent = sum(map(_spent, rows))
        made.add_row(str(number), cell(device), str(len(rows)), milliseconds(spent / n), f"{spent / total:.1%}")
    out = console()
    out.print()
    out.print(made)


def _short(name: str) -> str:
    """Return the end of a long name: exporters put the path first, and the end distinguishes the node."""
    return name if len(name) <= LONGEST else f"...{name[3 - LONGEST :]}"


def show_advice(found: Sequence[BenchmarkAdvice]) -> None:
    """Print one line per piece of advice."""
    if found:
        out = console()
        out.print()
        for advice in found:
            out.print(cell(f"advice: {advice.text}"), soft_wrap=True)


def show_comparison(found: Comparison, baseline: str) -> None:
    """Print the comparison with an earlier run."""
    out = console()
    out.print()
    out.print(cell(f"against {baseline}"), style="bold", soft_wrap=True)
    for name, one, better in (("latency", found.latency, "less"), ("throughput", found.throughput, "more")):
        if one is None:
            out.print(f"  {name}: too few inferences to compare (measure longer: -t)")
            continue
        change, low, high = (f"{x - 1:+.1%}" for x in (one.ratio, one.low, one.high))
        good = (one.ratio < 1) == (better == "less")
        verdict = ("better" if good else "worse") if one.certain else "no difference that is beyond chance"
        out.print(f"  {name}: {change} (between {low} and {high}): {verdict}, p = {one.p:.2g}", markup=False)
    for text in found.otherwise:
        out.print(cell(f"  not the same: {text}"), soft_wrap=True)
