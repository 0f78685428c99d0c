"""One run of a benchmark: options, compiling, measuring, printing."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunewright.errors import InputError, TunewrightError

from .. import DIFFERENT, INTERRUPTED
from ..shared.console import environment, given_options, note, working
from .background import watching
from .report import SCHEMA, write_report

if TYPE_CHECKING:
    from tunewright.core import Core
    from tunewright.frontend.model import Model
    from tunewright.runtime.insight.timeline import Trace
    from tunewright.runtime.requests.compiled import CompiledModel

    from .advice import Again, BenchmarkAdvice
    from .data import Data
    from .measure import BenchmarkResult

#: default seconds of a run, and of each point of a sweep
SECONDS, SECONDS_OF_POINT = 10.0, 3.0


# -- options ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class BenchmarkOptions:
    """Options of the command line that a run and a sweep share."""

    model: str
    device: str
    settings: dict[str, str]
    input: list[str] | None
    shape: list[str] | None
    seed: int
    api: str | None
    seconds: float | None
    count: int | None
    warm_up: int
    percentiles: list[float]
    report: str | None = None
    #: input values as Python objects, in place of ``input``
    values: Mapping[str, Any] | None = None
    preprocess: list[str] | None = None
    #: inferences of a sequence, for a model with states
    sequence: int = 0
    #: see `Load`
    busy: float = 1.0

    @property
    def percent(self) -> float:
        """The main percentile."""
        return self.percentiles[0]

    @property
    def quiet(self) -> bool:
        """Whether stdout is reserved for the report."""
        return self.report == "-"


@dataclass(frozen=True)
class Lists:
    """Values of --streams, --requests and --batch: several for a sweep, empty if not given."""

    streams: list[int] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    #: --streams auto
    auto: bool = False

    @staticmethod
    def parse(streams: str | None, requests: str | None, batch: str | None, several: bool) -> Lists:
        from .sweep import whole_numbers

        auto = (streams or "").strip().lower() == "auto"
        if auto and several:
            raise InputError("auto has no meaning with --sweep", where="--streams", hint="name numbers: 1,2,4")
        found = Lists(
            [] if auto else whole_numbers(streams, "--streams"), whole_numbers(requests, "--requests"),
            whole_numbers(batch, "--batch"), auto,
        )  # fmt: skip
        for option, numbers in (("streams", found.streams), ("requests", found.requests), ("batch", found.batches)):
            if len(numbers) > 1 and not several:
                hint = "--sweep takes several"
                raise InputError(f"{len(numbers)} numbers instead of one", where=f"--{option}", hint=hint)
        return found


def parse_percentiles(text: str) -> list[float]:
    """Parse percentiles such as ``50,90,99``."""
    found = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = -1.0
        if not 0 <= value <= 100:
            hint = "for example 50,90,99"
            raise InputError(f"{part.strip()!r} is not a percentile", where="--percentiles", hint=hint)
        found.append(value)
    return list(dict.fromkeys(found))


def parse_latency(text: str) -> float:
    """Parse ``20ms``, ``500us`` or ``0.1s`` into seconds; a bare number is milliseconds."""
    number = text.strip().lower()
    units = {"ms": 1e-3, "us": 1e-6, "µs": 1e-6, "s": 1.0}
    unit = next((u for u in units if number.endswith(u)), "")
    try:
        value = float(number.removesuffix(unit)) * units.get(unit, 1e-3)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise InputError(f"{text!r} is not a time", where="--latency-bound", hint="for example 20ms")
    return value


# -- running ----------------------------------------------------------------------------------------------------------
class Bench:
    """A loaded model that is compiled with different streams and batches."""

    def __init__(self, core: Core, model: Model, load: float, wish: BenchmarkOptions) -> None:
        self.core, self.model, self.load, self.wish = core, model, load, wish
        self._noted: set[str] = set()

    def gather(self, batch: int | None) -> Data:
        from .data import gather

        wish = self.wish
        data = gather(self.model, wish.input, wish.shape, batch, wish.seed, self.core.settings, wish.values)
        for text in data.notes:
            if text not in self._noted:
                self._noted.add(text)
                note(text)
        return data

    def compile(self, data: Data, streams: str | None, batch: int | None) -> CompiledModel:
        """Compile the model. ``streams``: NUM_STREAMS, if it was given."""
        from .data import check_batch

        config = {} if streams is None else {"NUM_STREAMS": streams}
        if batch is not None:  # a batch that the user names must not change
            config["ALLOW_AUTO_BATCHING"] = "NO"
        try:
            compiled = self.core.compile_model(data.model, self.wish.device, config)
        except TunewrightError as error:
            if batch is None:
                raise
            raise InputError(f"the model takes no batch of {batch}: {error}", where="--batch") from error
        if batch is not None:
            check_batch(compiled.outputs, batch)
        return compiled

    def about(self, data: Data) -> dict[str, Any]:
        """Return the head of a report."""
        wish = self.wish
        return {
            "schema": SCHEMA,
            "model": wish.model,
            "device": wish.device,
            "config": wish.settings,
            "inputs": {name: str(type) for name, type in data.model.inputs.items()},
            "data": data.origin,
        }


@dataclass
class MeasuredRun:
    """A measured run."""

    report: dict[str, Any]
    result: BenchmarkResult
    advice: list[BenchmarkAdvice]


def measure_once(bench: Bench, lists: Lists, recorder: Trace | None = None) -> MeasuredRun:
    """Compile the model, run it for the first time, then measure it."""
    from tunewright.devices.kernel_cache import KernelCache
    from tunewright.runtime.insight import profiler_ranges

    from .advice import advise, facts_of
    from .measure import Load, measure
    from .report import counters_of, figures
    from .statistics import TimeSlices

    wish, batch = bench.wish, next(iter(lists.batches), None)
    data = bench.gather(batch)
    cache = KernelCache.of(bench.core.settings)
    counted = None if cache is None else cache.counted()
    begin = time.perf_counter()
    with working("compiling"):
        streams = "AUTO" if lists.auto else str(lists.streams[0]) if lists.streams else None
        compiled = bench.compile(data, streams, batch)
    compile_, phases = time.perf_counter() - begin, compiled.alone.phases
    begin = time.perf_counter()
    with working("running for the first time"):
        request = compiled.create_infer_request()
        request.infer(data.feeds[0])
        del request
    first = time.perf_counter() - begin
    kernels = None if cache is None or counted is None else cache.counted() - counted
    requests = next(iter(lists.requests), 0) or compiled.optimal_requests
    several = wish.busy == 1 and (requests > 1 or compiled.streams.count > 1)
    is_async = wish.api == "async" or (wish.api is None and several and not compiled.states)
    seconds = None if wish.count else SECONDS if wish.seconds is None else wish.seconds
    sequence = wish.sequence if compiled.states else 0
    load = Load(requests, is_async, seconds, wish.count, wish.warm_up, sequence, wish.busy)
    with profiler_ranges.listening(), watching(compiled) as beside:
        result = measure(compiled, data.feeds, load, recorder)
    if not result.latencies:
        raise KeyboardInterrupt
    slices = TimeSlices.of(result.latencies, result.ends, result.begin)
    advice = advise(facts_of(compiled, result, load, _again(bench, data.model, compiled), slices))
    made = {
        **bench.about(data),
        "streams": compiled.streams.count,
        "auto_batch": compiled.size,
        "streams_origin": compiled.streams_origin,
        "devices": compiled.execution_devices,
        "served": compiled.served,
        **figures(result, load, data.batch, wish.percentiles),
        "load_ms": bench.load * 1e3,
        "compile_ms": compile_ * 1e3,
        "compile_phases_ms": {name: seconds * 1e3 for name, seconds in phases.items()},
        "first_inference_ms": first * 1e3,
        **({"states": compiled.states, "sequence": load.sequence} if compiled.states else {}),
        "kernel_cache": None if kernels is None else kernels.as_dict(),
        "advice": [{"kind": a.kind, "text": a.text} for a in advice],
    }
    if beside:
        made["background"] = beside
    if result.rows:
        made["counters"] = counters_of(result)
    made["environment"] = environment()
    return MeasuredRun(made, result, advice)


def run_once(
    bench: Bench,
    lists: Lists,
    trace: Path | None,
    counters: bool,
    old: dict[str, Any] | None,
    baseline: str,
    allowed: float | None,
) -> int:
    """Measure, print the results, and return the exit code."""
    from tunewright.runtime.insight.timeline import Trace

    from .report import show, show_advice, show_comparison, show_counters
    from .statistics import compare

    wish, recorder = bench.wish, None if trace is None else Trace()
    run = measure_once(bench, lists, recorder)
    comparison = None if old is None else compare(run.report, old)
    if comparison is not None:
        run.report["baseline"] = comparison.as_dict()
    if not wish.quiet:
        show(run.report, wish.percent, run.result.latencies)
        if counters:
            show_counters(run.result)
        show_advice(run.advice)
        if comparison is not None:
            show_comparison(comparison, baseline)
    if wish.report is not None:
        write_report(run.report, wish.report)
    if recorder is not None and trace is not None:
        about = {key: run.report[key] for key in ("model", "device", "config", "inputs", "streams", "requests")}
        recorder.save(trace, {**about, **run.report["environment"]})
        note(f"{len(recorder):,} events in {trace}: open it at https://ui.perfetto.dev" + _dropped(recorder.dropped))
    return _code(run.result, comparison.slower if comparison is not None else 0.0, allowed)


def _again(bench: Bench, run: Model, compiled: CompiledModel) -> Again:
    """Return what reproduces the run: the options that set the inputs' shapes, and settings with equal threads.

    One of several streams has only a part of the threads, and kernels are tuned for that number of threads.
    """
    from tunewright.runtime.requests.request import DeviceModel

    from .advice import Again

    changed = (name for name, type in run.inputs.items() if type != bench.model.inputs.get(name))
    shapes = {name: getattr(run.inputs[name], "shape", None) for name in changed}
    found = [word for name, shape in shapes.items() if shape for word in ("-s", f"{name}={'x'.join(map(str, shape))}")]
    found += given_options(preprocess=bench.wish.preprocess)
    settings = bench.core.settings
    if isinstance(compiled, DeviceModel):
        count = compiled.streams.count
        settings = replace(settings, performance_hint="LATENCY", num_streams=count if count > 1 else 0)
    return Again(bench.wish.model, found, settings)


def _dropped(count: int) -> str:
    return f" ({count:,} more did not fit: measure for a shorter time)" if count else ""


def _code(result: BenchmarkResult, slower: float, allowed: float | None) -> int:
    if result.interrupted:
        return INTERRUPTED
    if allowed is not None and slower * 100 > allowed:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"tunewright: {slower:.1%} slower than the baseline, {allowed:g} % is allowed\n")
        return DIFFERENT
    return 0
