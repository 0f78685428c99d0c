"""Runs a sweep from the command line: chooses its points and prints the results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunewright.errors import InputError

from .. import INTERRUPTED
from ..shared.console import console, environment, note
from .chart import draw, lines, why_not
from .data import batch_inputs
from .report import write_report
from .run import SECONDS_OF_POINT, Bench, Lists
from .sweep import Axes, announce, doubling, points_report, say_spot, show_points, sweep, sweet_spot

if TYPE_CHECKING:
    from tunewright.frontend.model import Model
    from tunewright.runtime.requests.compiled import CompiledModel

    from .data import Data

#: default batches of a sweep, for a model with an open batch dimension
ON_PROCESSOR, ON_GPU = [1, 4], [1, 8, 32]
#: default maximum of streams on a GPU
GPU_STREAMS = 4


def axes_of(device: str, model: Model, lists: Lists) -> Axes:
    """Return the given axes. Defaults: streams up to the number of cores, and batches if the model leaves them open."""
    from tunewright.devices.host import cpu_count

    gpu = "GPU" in device.upper()
    batches: list[int | None] = list(lists.batches)
    if not batches:
        try:
            opened = not isinstance(batch_inputs(model)[0], int)
        except InputError:
            opened = False
        batches = list(ON_GPU if gpu else ON_PROCESSOR) if opened else [None]
    streams = lists.streams or doubling(GPU_STREAMS if gpu else cpu_count())
    return Axes(streams, lists.requests, batches)


def run_sweep(bench: Bench, lists: Lists, bound: float | None, chart: Path | None, repetitions: int) -> int:
    """Measure, print, and return the exit code.

    Without matplotlib the sweep still runs and prints its results, and then fails because it cannot draw the chart.
    """
    wish = bench.wish
    reason = None if chart is None else why_not()
    if reason is not None:
        note(f"{reason}: the chart is not drawn, but the sweep runs")
    axes = axes_of(wish.device, bench.model, lists)
    seconds = SECONDS_OF_POINT if wish.seconds is None else wish.seconds
    announce(len(axes.points()), seconds, wish.count)
    about: dict[str, Any] = {}
    gathered: dict[int | None, Data] = {}  # files are read once, models are compiled again

    def compiled(streams: int, batch: int | None) -> tuple[CompiledModel, list[dict[str, Any]]]:
        data = gathered.get(batch) or bench.gather(batch)
        gathered[batch] = data
        about.update(bench.about(data))
        return bench.compile(data, str(streams), batch), data.feeds

    points, interrupted = sweep(
        axes, compiled, seconds, wish.count, wish.warm_up, repetitions, wish.api, wish.seed
    )  # fmt: skip
    if not points:
        raise KeyboardInterrupt
    spot = sweet_spot(points, wish.percent, bound)
    made = {
        **about,
        "inputs": {name: str(type) for name, type in bench.model.inputs.items()},
        **points_report(points, spot, wish.percent, bound, wish.percentiles, wish.api),
        "interrupted": interrupted,
        "environment": environment(),
    }
    where = made["environment"]
    title = f"{Path(wish.model).name} on {wish.device}: {where['cpu']}, {where['cores']} cores"
    if not wish.quiet:
        out = console()
        out.print(title, style="bold", markup=False, soft_wrap=True)
        out.print()
        show_points(points, spot, wish.percent)
        out.print()
        for line in [*lines(points, spot, wish.percent, bound), "", say_spot(points, spot, wish.percent, bound)]:
            out.print(line, markup=False, soft_wrap=True)
    if wish.report is not None:
        write_report(made, wish.report)
    if chart is not None:
        draw(points, spot, wish.percent, bound, title, chart)
        note(f"chart written to {chart}")
    return INTERRUPTED if interrupted else 0
