"""One-call functions for scripts: `tunewright.tune`, `tunewright.explain`, `tunewright.benchmark`.

They are thin wrappers around `Core`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .core import Core
from .errors import InputError
from .frontend.model import Model
from .frontend.preprocess_inputs import Preprocess

if TYPE_CHECKING:
    import onnx

    from .model_tuning.layers import TuningResult, TuningState
    from .runtime.insight.explain import Explanation


def tune(
    model: Model | str | os.PathLike[str] | bytes | onnx.ModelProto,
    inputs: Mapping[str, Any] | None = None,
    device: str = "CPU",
    budget: float | str = "60s",
    strategy: str | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    preprocess: Mapping[str, Preprocess] | Preprocess | None = None,
    again: bool = False,
    lock: bool | str | os.PathLike[str] = False,
    report: Callable[[TuningState], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> TuningResult:
    """Tune a model: search for faster kernels for its slowest layers, and keep those that speed up the network.

    The results go into the user's knowledge base, and every later load uses them. Inputs that are not given are random;
    open dimensions that no input sets are 1. ``budget``: seconds, or a text such as 90s, 5m, 1h. ``strategy`` overrides
    AUTO_TUNE_MODE. ``preprocess`` describes the inputs as in `Core.compile_model`. ``lock`` also writes a lockfile: to
    the path that it gives, or with True beside the model. Several devices are tuned one by one (`Core.apart`). See
    `Core.tune`.

    >>> result = tunewright.tune("model.onnx", budget="2m")
    >>> result.gain.median  # the speed-up
    """
    from .tools.lock import run_and_lock
    from .tools.shared.inputs import concrete, feed_with
    from .tools.tune.command import parse_time
    from .tuning.lockfile import default_path

    seconds = parse_time(budget, "budget") if isinstance(budget, str) else budget
    core = Core({**(config or {}), **({"AUTO_TUNE_MODE": strategy} if strategy is not None else {})})
    feed = feed_with(_read(core, model, preprocess), inputs or {}, core.settings)
    path = None if isinstance(lock, bool) else lock
    if lock is True:
        if not feed.model.path:
            hint = "pass a path: lock=..."
            raise InputError("the model has no file, so its lockfile has no default path", where="lock", hint=hint)
        path = core.settings.lock_file or default_path(feed.model.path)
    result = core.tune(concrete(feed), feed.values, device, seconds, again=again, report=report, stop=stop)
    if path is not None:
        run_and_lock(core, concrete(feed), feed.values, device, path)
    return result


def tune_many(
    models: Sequence[str | os.PathLike[str]] | Mapping[str | os.PathLike[str], float] | str | os.PathLike[str],
    device: str = "CPU",
    budget: float | str = "60s",
    *,
    cases: Mapping[str, float] | Sequence[str] = (),
    batches: Mapping[int, float] | Sequence[int] = (),
    objective: str = "latency",
    until: str | None = None,
    config: Mapping[str, Any] | None = None,
    again: bool = False,
    report: Callable[[TuningState], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> list[TuningResult]:
    """Tune several models, or models for several shapes. Returns a result for each model and case.

    ``models``: files and folders, or a mapping from each to its weight. ``cases``: shapes as for ``tunewright tune
    --case``, or a mapping from each to its frequency; ``batches``: the same for batch sizes. Inputs are random.
    ``objective``: latency, throughput or energy; ``until``: 1.2x or stalls. The other arguments are as for `tune`; see
    docs/tune.md.

    >>> tunewright.tune_many({"detector.onnx": 3, "classifier.onnx": 1}, budget="10m")
    >>> tunewright.tune_many("models", batches={1: 0.8, 8: 0.2}, until="stalls")
    """
    from .tools.tune.command import parse_time
    from .tools.tune.workloads import Fed, InputShapes, cases_of, paths_of, works_of
    from .tuning.offline import suggested_commands

    named = [models] if isinstance(models, str | os.PathLike) else list(models)
    weights = {Path(path): weight for path, weight in models.items()} if isinstance(models, Mapping) else {}
    found, dumps = paths_of([Path(path) for path in named])
    if dumps:
        raise InputError("is a dump of problems", where=str(dumps[0]), hint="`Core.tune_problems` tunes it")
    texts = [f"{text}:{weight}" for text, weight in cases.items()] if isinstance(cases, Mapping) else cases
    several = cases_of(texts, None)
    if batches:
        parts = batches if isinstance(batches, Mapping) else dict.fromkeys(batches, 1.0)
        several = [InputShapes(batch=size, weight=weight) for size, weight in parts.items()]
    core = Core(config)
    (one, *others) = core.apart(device)
    if others:
        hint = f"tune {', '.join(each.device for each in (one, *others))} one by one"
        raise InputError("stands for several devices", where=device, hint=hint)
    works = works_of(core, {path: weights.get(path, 1.0) for path in found}, several, Fed(), one)
    seconds = parse_time(budget, "budget") if isinstance(budget, str) else budget
    options = [word for case in several for text in case.shapes for word in ("--case", f"{text}:{case.weight:g}")]
    sizes = ",".join(f"{case.batch}:{case.weight:g}" for case in several if case.batch is not None)
    options += ["--batch", sizes] if sizes else []
    options += [word for path, weight in weights.items() for word in ("--weight", f"{path}={weight:g}")]
    line = suggested_commands.command("tune", *map(str, named), options=options, device=device, settings=core.settings)
    return core.tune_many(
        works, one.device, seconds, objective=objective, until=until, config=one.config, again=again, report=report,
        stop=stop, command=line,
    )  # fmt: skip


def _read(
    core: Core,
    model: Model | str | os.PathLike[str] | bytes | onnx.ModelProto,
    preprocess: Mapping[str, Preprocess] | Preprocess | None,
) -> Model:
    """Read the model and apply ``preprocess`` to its inputs."""
    read = model if isinstance(model, Model) else core.read_model(model)
    return read if preprocess is None else read.preprocess(preprocess)


def explain(
    model: Model | str | os.PathLike[str] | bytes | onnx.ModelProto,
    inputs: Mapping[str, Any] | None = None,
    device: str = "CPU",
    *,
    config: Mapping[str, Any] | None = None,
    preprocess: Mapping[str, Preprocess] | Preprocess | None = None,
    seconds: float = 1.0,
    count: int | None = None,
) -> list[Explanation]:
    """Explain why every layer of a model runs its kernel, in the order of the plan. Nothing is tuned or changed.

    With several devices (MULTI:A,B) the layers of the first device come first; with HETERO those of the first subgraph.
    `Explanation.device` names the device. Inputs that are not given are random. The layers are timed for ``seconds``,
    or over ``count`` inferences (0: not timed). `tunewright.runtime.insight.explain.explain` does the same for a
    compiled model.

    >>> for layer in tunewright.explain("model.onnx"):
    ...     print(layer.name, layer.solver, layer.why)
    """
    from .runtime.insight.explain import explain as explain_compiled
    from .tools.explain import looking
    from .tools.shared.inputs import concrete, feed_with

    core = Core(config)
    core.settings, _ = looking(core.settings)
    feed = feed_with(_read(core, model, preprocess), inputs or {}, core.settings)
    return [
        layer
        for piece in core.pieces(concrete(feed), feed.values, device)
        for layer in explain_compiled(piece.compiled, piece.inputs, seconds=seconds, count=count)
    ]


def benchmark(
    model: str | os.PathLike[str],
    inputs: Mapping[str, Any] | None = None,
    device: str = "CPU",
    *,
    config: Mapping[str, str] | None = None,
    preprocess: Mapping[str, Preprocess] | Preprocess | None = None,
    streams: int = 0,
    requests: int = 0,
    batch: int | None = None,
    seconds: float = 10.0,
    count: int | None = None,
) -> dict[str, Any]:
    """Measure a model. Returns what `tunewright benchmark --report` writes (docs/benchmark.md), as a dictionary.

    Inputs that are not given are random. ``streams`` and ``requests``: 0 leaves them to the settings; ``batch`` sets
    the batch dimension; ``count`` inferences are measured instead of ``seconds``.

    >>> report = tunewright.benchmark("model.onnx", config={"PERFORMANCE_HINT": "THROUGHPUT"}, seconds=5)
    >>> report["latency_ms"]["p99"], report["throughput_per_second"]
    """
    import time

    from .tools.benchmark.measure import import_everything
    from .tools.benchmark.run import Bench, BenchmarkOptions, Lists, measure_once

    settings = {key: str(value) for key, value in (config or {}).items()}
    core = Core(settings)
    import_everything(device, core.settings)
    begin = time.perf_counter()
    loaded = _read(core, model, preprocess)
    load = time.perf_counter() - begin
    wish = BenchmarkOptions(
        str(model), device, settings, None, None, 0, None, seconds, count, 3, [50, 90, 95, 99], values=inputs or {}
    )
    lists = Lists([streams] if streams else [], [requests] if requests else [], [batch] if batch else [])
    return measure_once(Bench(core, loaded, load, wish), lists).report
