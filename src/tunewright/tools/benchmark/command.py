"""``tunewright benchmark``: measures how fast a model is here, where its time goes, and suggests improvements."""

from __future__ import annotations

import enum
import time
from pathlib import Path
from typing import Annotated

import typer

from tunewright.errors import InputError

from ..shared.console import (
    Configs,
    DeviceName,
    Frozen,
    ModelFile,
    Preprocessing,
    Seed,
    Shapes,
    Stateful,
    check_readable,
    check_writable,
    parse_config,
    working,
)


class Hint(enum.StrEnum):
    """Values of PERFORMANCE_HINT; none leaves it to the settings."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"
    CUMULATIVE_THROUGHPUT = "cumulative_throughput"
    NONE = "none"


class Api(enum.StrEnum):
    SYNC = "sync"
    ASYNC = "async"


class Precision(enum.StrEnum):
    """Values of INFERENCE_PRECISION_HINT."""

    AUTO = "auto"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"


#: default length of a sequence, in inferences
SEQUENCE = 128
#: titles of the panels in the help
DATA = "Data: inputs of the model"
LOAD = "Load: requests and streams"
OUTPUT = "Output: reports"
SWEEP = "Sweep: streams x requests x batch"


def benchmark(
    model: ModelFile,
    device: DeviceName = "CPU",
    input: Annotated[
        list[str] | None,
        typer.Option(
            "--input", "-i", metavar="NAME=VALUE", show_default=False, rich_help_panel=DATA,
            help="An input: a .npy, .npz, .pb or picture file, a folder of them (taken in turn), a number or a list. "
            "Random where absent. Repeatable.",
        ),
    ] = None,
    shape: Shapes = None,
    preprocess: Preprocessing = None,
    batch: Annotated[
        str | None,
        typer.Option("--batch", "-b", metavar="N", show_default=False, rich_help_panel=DATA,
                     help="Examples in one inference: sets the batch dimension."),
    ] = None,
    seed: Seed = 0,
    stateful: Stateful = None,
    sequence: Annotated[
        int | None,
        typer.Option("--sequence", min=1, metavar="N", show_default="128", rich_help_panel=DATA,
                     help="Inferences of a request until its states are reset; with --stateful.")
    ] = None,
    hint: Annotated[
        Hint, typer.Option("--hint", rich_help_panel=LOAD, help="What streams are made for: PERFORMANCE_HINT.")
    ] = Hint.NONE,
    streams: Annotated[
        str | None,
        typer.Option("--streams", metavar="N|auto", show_default=False, rich_help_panel=LOAD,
                     help="Inferences that run at the same time: NUM_STREAMS."),
    ] = None,
    requests: Annotated[
        str | None,
        typer.Option("--requests", "--threads", metavar="N", show_default="one for each stream",
                     rich_help_panel=LOAD, help="Requests at a time."),
    ] = None,
    api: Annotated[
        Api | None,
        typer.Option("--api", show_default="async where there are several requests", rich_help_panel=LOAD,
                     help="async: AsyncInferQueue with callbacks; sync: a thread waits for each request."),
    ] = None,
    precision: Annotated[
        Precision | None,
        typer.Option("--precision", show_default=False, rich_help_panel=LOAD,
                     help="The precision of the computation: INFERENCE_PRECISION_HINT."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option("--time", "-t", min=0.0, metavar="SECONDS", show_default="10; 3 for a point of a sweep",
                     rich_help_panel=LOAD, help="Measure for this time."),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option("--count", "-n", min=1, metavar="N", show_default=False, rich_help_panel=LOAD,
                     help="Measure this number of inferences instead."),
    ] = None,
    warm_up: Annotated[
        int, typer.Option("--warm-up", "-w", min=0, metavar="N", rich_help_panel=LOAD,
                          help="Inferences of each request before measuring.")
    ] = 3,
    percentiles: Annotated[
        str, typer.Option("--percentiles", "--percentile", metavar="LIST", rich_help_panel=OUTPUT,
                          help="Percentiles of latencies; charts and --latency-bound use the first.")
    ] = "50,90,95,99",
    counters: Annotated[
        bool, typer.Option("--pc", rich_help_panel=OUTPUT, help="Time per node: performance counters.")
    ] = False,
    report: Annotated[
        str | None,
        typer.Option("--report", "--json", metavar="FILE", show_default=False, rich_help_panel=OUTPUT,
                     help="Write the figures: .csv, else JSON; - is stdout."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", show_default=False, rich_help_panel=OUTPUT, dir_okay=False,
                     help="Write a time line of requests, streams and kernels, for ui.perfetto.dev."),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option("--baseline", metavar="FILE", show_default=False, rich_help_panel=OUTPUT,
                     help="Compare with the report of an earlier run."),
    ] = None,
    fail_if_slower: Annotated[
        float | None,
        typer.Option("--fail-if-slower", min=0.0, metavar="PCT", show_default=False, rich_help_panel=OUTPUT,
                     help="Exit with 1 if it is certainly slower than --baseline by more than this many percent."),
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", rich_help_panel=SWEEP,
                           help="Measure all combinations; --streams, --requests and --batch take lists then: 1,2,4.")
    ] = False,
    latency_bound: Annotated[
        str | None,
        typer.Option("--latency-bound", metavar="TIME", show_default=False, rich_help_panel=SWEEP,
                     help="The sweet spot has the most throughput within this latency, as in 20ms."),
    ] = None,
    chart: Annotated[
        Path | None,
        typer.Option("--chart", metavar="FILE", show_default=False, rich_help_panel=SWEEP, dir_okay=False,
                     help="Also draw the throughput-latency chart, as .png; needs matplotlib."),
    ] = None,
    repetitions: Annotated[
        int, typer.Option("--repetitions", min=1, max=100, metavar="N", rich_help_panel=SWEEP,
                          help="Number of turns into which the time of a point is split.")
    ] = 3,
    frozen: Frozen = False,
    busy: Annotated[
        float | None,
        typer.Option("--busy", min=0.1, max=100.0, metavar="PCT", rich_help_panel=LOAD,
                     show_default="100; 30 with --tune-in-background",
                     help="Percentage of the time in which a request runs; it rests in between, as in a server.")
    ] = None,
    tune_in_background: Annotated[
        bool, typer.Option("--tune-in-background", rich_help_panel=LOAD,
                           help="Also tune, in a helper process of low priority: TUNING_MODE=TUNING_BACKGROUND.")
    ] = False,
    config: Configs = None,
) -> None:  # fmt: skip
    """Measure a model: load, compile and first inference, then latency and throughput. Suggests improvements.

    Example: tunewright benchmark model.onnx -t 5 --pc --report report.json

    Throughput: tunewright benchmark model.onnx --hint throughput

    Best streams, requests and batch: tunewright benchmark model.onnx --sweep --latency-bound 20ms --chart sweep.png

    Tokens of a decoder: tunewright benchmark decoder.onnx -i ids=[[7]] --stateful auto --sequence 512

    Serve and tune: tunewright benchmark model.onnx --tune-in-background -t 60 -c BACKGROUND_DUTY=50

    Compare with an earlier run: tunewright benchmark model.onnx --baseline report.json --fail-if-slower 5
    """
    from tunewright.core import Core
    from tunewright.plugins.find import find

    from ..shared.inputs import coming
    from .measure import import_everything
    from .report import read_report
    from .run import Bench, BenchmarkOptions, Lists, parse_latency, parse_percentiles, run_once
    from .sweep import unsupported

    settings = parse_config(config, frozen)
    if hint is not Hint.NONE:
        settings["PERFORMANCE_HINT"] = hint.value.upper()
    if precision is not None:
        settings["INFERENCE_PRECISION_HINT"] = precision.value.upper()
    if tune_in_background:
        settings["TUNING_MODE"] = "TUNING_BACKGROUND"
    share = (30.0 if tune_in_background else 100.0) if busy is None else busy
    if busy is not None and busy < 100 and api is Api.ASYNC:
        raise InputError("is for --api sync", where="--busy", hint="leave one of them out")
    if tune_in_background and sweep:
        raise InputError("is for one run, not for --sweep", where="--tune-in-background")
    if counters or trace is not None:
        settings["PERF_COUNT"] = "YES"
    wish = BenchmarkOptions(
        str(model), device, settings, input, shape, seed, None if api is None else api.value, seconds, count, warm_up,
        parse_percentiles(percentiles), report, preprocess=preprocess, sequence=sequence or SEQUENCE,
        busy=1.0 if api is Api.ASYNC else share / 100,
    )  # fmt: skip
    if sequence is not None and stateful is None:
        raise InputError("needs --stateful", where="--sequence", hint="--stateful auto finds states")
    old = None if baseline is None else read_report(baseline)
    if fail_if_slower is not None and old is None:
        raise InputError("needs --baseline", where="--fail-if-slower", hint="the report of an earlier run")
    for path in (Path(p) for p in (report, trace, chart) if p not in (None, "-")):
        check_writable(path)
    if sweep:
        unsupported({"--stateful": stateful, "--pc": counters, "--trace": trace, "--baseline": baseline})
    elif latency_bound is not None or chart is not None:
        raise InputError("needs --sweep", where="--chart" if latency_bound is None else "--latency-bound")
    bound = None if latency_bound is None else parse_latency(latency_bound)
    lists = Lists.parse(streams, requests, batch, sweep)
    core = Core(settings)
    find(device, core.settings)  # an unknown device fails before the work starts
    check_readable(model)
    with working("starting"):
        import_everything(device, core.settings)
    begin = time.perf_counter()
    with working("loading"):
        loaded = coming(core.read_model(model), preprocess, stateful)
    load = time.perf_counter() - begin
    bench = Bench(core, loaded, load, wish)
    if sweep:
        from .sweep_run import run_sweep

        code = run_sweep(bench, lists, bound, chart, repetitions)
    else:
        code = run_once(bench, lists, trace, counters, old, str(baseline), fail_if_slower)
    if code:
        raise typer.Exit(code)


COMMANDS = (benchmark,)
