"""``tunewright benchmark``: how long a model takes here."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError
from .common import (
    Configs,
    DeviceName,
    Frozen,
    Inputs,
    ModelFile,
    Seed,
    Shapes,
    cell,
    check_writable,
    console,
    environment,
    milliseconds,
    note,
    parse_config,
    table,
    working,
)

if TYPE_CHECKING:
    from ..runtime.compiled import CompiledModel
    from ..runtime.counters import Row
    from ..settings import Settings

SCHEMA = "tunewright.benchmark/1"
#: rows of counters that are shown; JSON has all
SHOWN = 25
#: characters of a node's name that are shown; JSON has all
LONGEST = 64


def benchmark(
    model: ModelFile,
    input: Inputs = None,
    shape: Shapes = None,
    seconds: Annotated[
        float, typer.Option("--time", "-t", min=0.0, metavar="SECONDS", help="Measure for so long.")
    ] = 10.0,
    count: Annotated[
        int | None,
        typer.Option(
            "--count", "-n", min=1, metavar="N", help="Measure so many inferences instead.", show_default=False
        ),
    ] = None,
    warm_up: Annotated[
        int, typer.Option("--warm-up", "-w", min=0, metavar="N", help="Inferences before measuring.")
    ] = 3,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads", min=1, max=1024, metavar="N", help="Requests at a time (unset: one for each stream).",
            show_default=False,
        ),
    ] = None,
    counters: Annotated[bool, typer.Option("--pc", help="Time per node: performance counters.")] = False,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the figures as JSON; - is stdout.", show_default=False),
    ] = None,
    device: DeviceName = "CPU",
    frozen: Frozen = False,
    config: Configs = None,
    seed: Seed = 0,
) -> None:
    """Measure a model: load, compile and first inference apart, then latency and throughput.

    Example: tunewright benchmark model.onnx -t 5 --pc --json report.json

    Throughput: tunewright benchmark model.onnx -c PERFORMANCE_HINT=THROUGHPUT
    """
    from ..core import Core
    from ..devices.kernel_cache import KernelCache
    from ..plugins.single import open_device
    from .inputs import concrete, make_feed

    settings = parse_config(config, frozen)
    if counters:
        settings["PERF_COUNT"] = "YES"
    core = Core(settings)
    open_device(device)  # a wrong name fails before the work
    if json_file not in (None, "-"):
        check_writable(Path(json_file))
    import_everything(device, core.settings)
    begin = time.perf_counter()
    with working("loading"):
        loaded = core.read_model(model)
    load = time.perf_counter() - begin
    feed = make_feed(loaded, input, shape, seed, core.settings)
    for text in feed.notes:
        note(text)
    cache = KernelCache.of(core.settings)
    counted = None if cache is None else cache.counted()
    begin = time.perf_counter()
    with working("compiling"):
        compiled = core.compile_model(concrete(feed), device)
    compile_ = time.perf_counter() - begin
    threads = threads or compiled.optimal_requests
    begin = time.perf_counter()
    with working("running for the first time"):
        compiled(feed.values)
    first = time.perf_counter() - begin

    kernels = None if cache is None or counted is None else cache.counted() - counted
    result = measure(compiled, feed.values, threads, None if count else seconds, count, warm_up)
    report = {
        "schema": SCHEMA,
        "model": str(model),
        "device": device,
        "config": settings,
        "inputs": {name: str(type) for name, type in compiled.inputs.items()},
        "threads": threads,
        "load_ms": load * 1e3,
        "compile_ms": compile_ * 1e3,
        "first_inference_ms": first * 1e3,
        "kernel_cache": None if kernels is None else kernels.as_dict(),
        "inferences": len(result.latencies),
        "seconds": result.seconds,
        "latency_ms": {key: value * 1e3 for key, value in statistics(result.latencies).items()},
        "throughput_per_second": len(result.latencies) / result.seconds,
        "launches": result.launches / max(1, len(result.latencies)),
        "host_us": statistics(result.hosts)["median"] * 1e6,
        "environment": environment(),
    }
    if counters:
        report["counters"] = [_row(row, result.counted) for row in result.rows]
    if json_file != "-":
        show(report)
        if counters:
            show_counters(result.rows, result.counted)
    if json_file is not None:
        write_json(report, json_file)


def import_everything(device: str, settings: Settings) -> None:
    """Compile and run the smallest model, so that what a process imports and discovers once is not measured."""
    import numpy as np
    from onnx import TensorProto, helper

    from ..core import Core

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "smallest", [x], [y])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    core = Core()
    # The user's limits are meant for the user's model.
    core.settings = replace(type(settings)(), cache_dir=settings.cache_dir, cache_bytes=settings.cache_bytes)
    core.compile_model(proto, device)({"x": np.ones(1, np.float32)})


@dataclass
class Result:
    """Latencies in order of completion, the wall-clock time of all, and counters summed over ``counted`` inferences."""

    latencies: list[float] = field(default_factory=list)
    #: of each latency what was not spent waiting for the device
    hosts: list[float] = field(default_factory=list)
    #: kernels launched
    launches: int = 0
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    counted: int = 0


def measure(
    compiled: CompiledModel,
    values: dict[str, Any],
    threads: int,
    seconds: float | None,
    count: int | None,
    warm_up: int,
) -> Result:
    """Inferences from ``threads`` requests at a time until the time is over or the count is reached."""
    requests = [compiled.create_infer_request() for _ in range(threads)]
    with working("warming up"):
        for request in requests:
            for _ in range(warm_up):
                request.infer(values)
    result = Result()
    lock = threading.Lock()
    started = 0
    failures: list[BaseException] = []
    begin = time.perf_counter()
    deadline = None if seconds is None else begin + seconds

    def go_on() -> bool:
        nonlocal started
        with lock:
            if failures or (count is not None and started >= count):
                return False
            if deadline is not None and started >= threads and time.perf_counter() >= deadline:
                return False
            started += 1
            return True

    def work(number: int, done: Callable[[], None]) -> None:
        request = requests[number]
        try:
            while go_on():
                start = time.perf_counter()
                request.infer(values)
                took = time.perf_counter() - start
                totals = request.get_totals()
                with lock:
                    result.latencies.append(took)
                    result.hosts.append(totals.host_seconds)
                    result.launches += totals.launches
                if number == 0 and compiled.settings.perf_count:
                    _accumulate(result, request.get_profiling_info())
                done()
        except BaseException as error:  # handed to the caller's thread below
            failures.append(error)

    with _progress(result, seconds, count) as done:
        if threads == 1:
            work(0, done)
        else:
            workers = [threading.Thread(target=work, args=(i, done), daemon=True) for i in range(threads)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
    result.seconds = time.perf_counter() - begin
    if failures:
        raise failures[0]
    return result


def statistics(latencies: Sequence[float]) -> dict[str, float]:
    """Median, mean, percentiles, extremes and standard deviation, in seconds."""
    import numpy as np

    times = np.asarray(latencies)
    p90, p95, p99 = np.percentile(times, [90, 95, 99])
    found = {
        "median": np.median(times),
        "mean": times.mean(),
        "p90": p90,
        "p95": p95,
        "p99": p99,
        "min": times.min(),
        "max": times.max(),
        "std": times.std(),
    }
    return {key: float(value) for key, value in found.items()}


def _accumulate(result: Result, rows: Sequence[Row]) -> None:
    result.counted += 1
    if not result.rows:
        result.rows = list(rows)
        return
    known = {row.name: row for row in result.rows}
    for row in rows:
        mine = known.get(row.name)
        if mine is None:
            result.rows.append(row)
            continue
        mine.device_seconds += row.device_seconds
        mine.host_seconds += row.host_seconds
        mine.calls += row.calls
        mine.launches += row.launches


def _row(row: Row, counted: int) -> dict[str, Any]:
    """A row of counters, per inference."""
    n = max(1, counted)
    return {
        "name": row.name,
        "type": row.type,
        "status": row.status.value,
        "kernel": row.kernel,
        "origin": row.origin,
        "device_ms": row.device_seconds * 1e3 / n,
        "host_ms": row.host_seconds * 1e3 / n,
        "calls": row.calls / n,
        "launches": row.launches / n,
    }


@contextlib.contextmanager
def _progress(result: Result, seconds: float | None, count: int | None) -> Iterator[Callable[[], None]]:
    """A bar on stderr, on a terminal, once two seconds have passed."""
    if not sys.stderr.isatty() or (seconds is not None and seconds <= 2):
        yield lambda: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    begin = time.perf_counter()
    columns = (
        TextColumn("measuring"),
        BarColumn(),
        TextColumn("{task.fields[inferences]} inferences"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console(stderr=True), transient=True, refresh_per_second=4) as bar:
        task = bar.add_task("", total=seconds if seconds is not None else count, inferences=0, visible=False)

        def done() -> None:
            elapsed, n = time.perf_counter() - begin, len(result.latencies)
            bar.update(task, completed=elapsed if seconds is not None else n, inferences=n, visible=elapsed > 2)

        yield done


def show(report: dict[str, Any]) -> None:
    """The figures for people."""
    out = console()
    about = report["environment"]
    title = f"{report['model']} on {report['device']}: {about['cpu']}, {about['cores']} cores"
    out.print(cell(title), style="bold", soft_wrap=True)
    out.print()
    made = table("phase", ">ms")
    for key in ("load", "compile", "first_inference"):
        made.add_row(key.replace("_", " "), milliseconds(report[f"{key}_ms"] / 1e3))
    out.print(made)
    kernels = report["kernel_cache"]
    out.print(f"kernel cache: {kernels['hits']} hits, {kernels['misses']} misses" if kernels else "kernel cache: off")
    out.print()
    requests = f"{report['threads']} requests at a time" if report["threads"] > 1 else "one request"
    out.print(f"{report['inferences']:,} inferences in {report['seconds']:.2f} s, {requests}", markup=False)
    out.print()
    latency = report["latency_ms"]
    made = table("ms", *(f">{key}" for key in latency))
    made.add_row("latency", *(milliseconds(ms / 1e3) for ms in latency.values()))
    out.print(made)
    out.print()
    out.print(f"throughput: {report['throughput_per_second']:,.2f} inferences per second", markup=False)
    launches = f"{report['launches']:,.4g} {'launch' if report['launches'] == 1 else 'launches'}"
    out.print(f"of each: {launches}, {report['host_us']:,.0f} us of the host (median)", markup=False)


def show_counters(rows: Sequence[Row], counted: int) -> None:
    """Executed nodes by time, with their share of the sum."""
    from ..runtime.counters import Status

    n = max(1, counted)
    spent = {row.name: (row.device_seconds + row.host_seconds) / n for row in rows}
    # A control-flow node contains the time of its body: only what the leaves took has a share.
    leaves = {row.name: spent[row.name] for row in rows if row.kernel != "control flow"}
    total = sum(leaves.values()) or 1.0
    ran = sorted((row for row in rows if row.status is Status.EXECUTED), key=lambda row: -spent[row.name])
    # Where one of the two has all the time, the other's column would only take room from the names.
    clocks = {"device": [row.device_seconds for row in ran], "host": [row.host_seconds for row in ran]}
    clocks = {name: times for name, times in clocks.items() if any(times)}
    made = table("node", "type", "kernel", *(f">{name} ms" for name in clocks), ">share")
    for i, row in enumerate(ran[:SHOWN]):
        share = f"{leaves[row.name] / total:.1%}" if row.name in leaves else "-"
        times = [_spent(seconds[i] / n) for seconds in clocks.values()]
        kind = row.type.removeprefix("tunewright::")
        made.add_row(cell(_short(row.name)), cell(kind), cell(row.kernel), *times, share)
    out = console()
    out.print()
    out.print(made)
    out.print()
    rest = ran[SHOWN:]
    if rest:
        together = sum(leaves.get(row.name, 0.0) for row in rest) / total
        out.print(f"and {len(rest)} more nodes with {together:.1%} together (--json has all)", markup=False)
    gone = sum(row.status is Status.OPTIMIZED_OUT for row in rows)
    idle = sum(row.status is Status.NOT_RUN for row in rows)
    out.print(
        f"{len(ran)} nodes executed, {gone} optimized out, {idle} not run; mean of {counted} inferences", markup=False
    )
    kernels = [row for row in ran if row.name in leaves]
    launches, host = sum(row.launches for row in kernels) / n, sum(row.host_seconds for row in kernels) / n
    if launches:
        out.print(f"{launches:.0f} kernels launched; {host / total:.1%} of the time in operations on the host")


def _short(name: str) -> str:
    """The end of a long name: exporters put the path to the node in front of what tells it from others."""
    return name if len(name) <= LONGEST else f"...{name[3 - LONGEST :]}"


def _spent(seconds: float) -> str:
    return milliseconds(seconds) if seconds else "-"


def write_json(report: dict[str, Any], target: str) -> None:
    """To a file, or to stdout for ``-``."""
    text = json.dumps(report, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", where=target) from None


COMMANDS = (benchmark,)
