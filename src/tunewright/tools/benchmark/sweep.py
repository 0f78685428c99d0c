"""``tunewright benchmark --sweep``: measures streams x requests x batch in turns and finds the best combination."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tunewright.errors import InputError, TunewrightError

from ..shared.console import console, milliseconds, note, table
from .measure import BenchmarkResult, Load, measure
from .report import figures, many
from .statistics import percentile, percentile_name

if TYPE_CHECKING:
    from tunewright.runtime.requests.compiled import CompiledModel

#: Points whose throughput is within this part of the best count as equal; the one with the lowest latency wins.
AS_GOOD = 0.05
#: maximum number of points of a sweep
MOST_POINTS = 200
#: warm-up inferences of a request before each turn after the first
WARM_AGAIN = 1
LABELS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


@dataclass
class SweepPoint:
    """One combination of streams, requests and batch, with its measurements."""

    streams: int
    requests: int
    batch: int | None
    result: BenchmarkResult = field(default_factory=BenchmarkResult)
    label: str = "?"

    @property
    def key(self) -> ModelKey:
        """Points with the same key share a compiled model."""
        return self.streams, self.batch

    @property
    def rate(self) -> float:
        """Examples per second."""
        return len(self.result.latencies) * (self.batch or 1) / max(self.result.seconds, 1e-9)

    def latency(self, percent: float) -> float:
        return percentile(self.result.latencies, percent)


def whole_numbers(text: str | None, option: str) -> list[int]:
    """Parse ``4``, ``1,2,4`` or ``1-4``."""
    found: list[int] = []
    for part in (text or "").split(","):
        low, dash, high = part.strip().partition("-")
        if not part.strip() and text is None:
            continue
        if not low.isdecimal() or (dash and not high.isdecimal()) or int(low) < 1 or int(high or low) > 4096:
            raise InputError(f"{text!r} is not a whole number from 1 to 4096", where=option,
                             hint="with --sweep also several: 1,2,4 or 1-4")  # fmt: skip
        found += range(int(low), int(high or low) + 1)
    return list(dict.fromkeys(found))


def doubling(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to and including ``most``."""
    found = [1]
    while found[-1] * 2 < most:
        found.append(found[-1] * 2)
    return found if most <= 1 else [*found, most]


@dataclass(frozen=True)
class Axes:
    """The axes of a sweep. Without ``requests`` each point has one or two requests per stream."""

    streams: Sequence[int]
    requests: Sequence[int]
    batches: Sequence[int | None]

    def points(self) -> list[SweepPoint]:
        found = [
            SweepPoint(streams, requests, batch)
            for batch in self.batches
            for streams in self.streams
            for requests in (self.requests or (streams, 2 * streams))
        ]
        if len(found) > MOST_POINTS:
            hint = f"the limit is {MOST_POINTS}: name fewer"
            raise InputError(f"{len(found)} points are too many", where="--sweep", hint=hint)
        for i, point in enumerate(found):
            point.label = LABELS[i] if i < len(LABELS) else "+"
        return found


#: a number of streams and a batch
ModelKey = tuple[int, int | None]
#: a model compiled for a number of streams and a batch, and its inputs
Made = tuple["CompiledModel", list[dict[str, Any]]]


def sweep(
    axes: Axes,
    compiled: Callable[[int, int | None], Made],
    seconds: float,
    count: int | None,
    warm_up: int,
    repetitions: int,
    api: str | None,
    seed: int,
) -> tuple[list[SweepPoint], bool]:
    """Measure every point for ``seconds`` in total, in turns of random order.

    Returns the measured points, and whether Ctrl-C ended the sweep. Turns spread disturbances of the machine over all
    points. ``compiled`` compiles the model for a number of streams and a batch, and returns it with inputs. Only one
    model is in memory at a time. Points that share a model follow each other, and a turn begins with the last model of
    the turn before. Points that cannot be compiled are left out with a note; if none can, the first error is raised.
    """
    points, refused = axes.points(), dict[ModelKey, TunewrightError]()
    groups = {p.key: [q for q in points if q.key == p.key] for p in points}
    turns, order, interrupted = 1 if count else repetitions, random.Random(seed), False
    one = _OneAtATime(compiled)
    with _progress(len(points) * turns) as step:
        try:
            for turn, group in _visits(groups, refused, turns, order, one):
                warm = warm_up if turn == 0 else WARM_AGAIN
                loads = [load_of(point, api, seconds / turns, count, warm) for point in group]
                step(f"compiling for {_say(group[0])}", 0)
                refusal = one.refusal(group[0].key)
                if refusal is None:
                    _measure_group(one, group, loads, step, f"turn {turn + 1} of {turns}")
                else:
                    refused[group[0].key] = refusal
                    step("", len(group) * turns)
        except KeyboardInterrupt:
            interrupted = True
    if len(refused) == len(groups):
        raise next(iter(refused.values()))
    for key, why in refused.items():
        note(f"left out: {_say(groups[key][0])}: {why}")
    return [point for point in points if point.result.latencies], interrupted


def _visits(
    groups: Mapping[ModelKey, Sequence[SweepPoint]],
    refused: Collection[ModelKey],
    turns: int,
    order: random.Random,
    one: _OneAtATime,
) -> Iterator[tuple[int, list[SweepPoint]]]:
    """Yield each turn with each group of points that share a model, in random order, without refused models.

    A turn begins with the model that is in memory.
    """
    for turn in range(turns):
        keys = [key for key in order.sample(list(groups), len(groups)) if key not in refused]
        for key in sorted(keys, key=lambda key: key != one.key):
            yield turn, order.sample(groups[key], len(groups[key]))


def _measure_group(
    one: _OneAtATime, group: Sequence[SweepPoint], loads: Sequence[Load], step: Callable[[str, int], None], turn: str
) -> None:
    """Measure the points that share a model. Raises KeyboardInterrupt if Ctrl-C ended a measurement."""
    model, feeds = one.get(group[0].key)
    for point, load in zip(group, loads, strict=True):
        step(f"{turn}: {_say(point)}", 0)
        found = measure(model, feeds, load, progress=False)
        point.result.add(found)
        if found.interrupted:
            raise KeyboardInterrupt
        step("", 1)


class _OneAtATime:
    """Keeps the last compiled model, and frees it before the next is compiled."""

    def __init__(self, compiled: Callable[[int, int | None], Made]) -> None:
        self._compiled = compiled
        self.key: ModelKey | None = None
        self._made: Made | None = None

    def get(self, key: ModelKey) -> Made:
        if key != self.key or self._made is None:
            self.key = self._made = None
            gc.collect()  # requests and their callbacks form reference cycles
            self._made, self.key = self._compiled(*key), key
        return self._made

    def refusal(self, key: ModelKey) -> TunewrightError | None:
        """Compile a model. Returns the error if that fails."""
        try:
            self.get(key)
        except TunewrightError as error:
            return error
        return None


def load_of(point: SweepPoint, api: str | None, seconds: float | None, count: int | None, warm_up: int) -> Load:
    is_async = api == "async" or (api is None and (point.requests > 1 or point.streams > 1))
    return Load(point.requests, is_async, None if count else seconds, count, warm_up)


def _say(point: SweepPoint) -> str:
    batch = "" if point.batch is None else f", batch {point.batch}"
    return f"{many(point.streams, 'stream')}, {many(point.requests, 'request')}{batch}"


def frontier(points: Sequence[SweepPoint], percent: float) -> list[SweepPoint]:
    """Return the points that no other point beats in both latency and throughput, ordered by latency."""
    found: list[SweepPoint] = []
    for point in sorted(points, key=lambda p: (p.latency(percent), -p.rate)):
        if not found or point.rate > found[-1].rate:
            found.append(point)
    return found


def sweet_spot(points: Sequence[SweepPoint], percent: float, bound: float | None) -> SweepPoint | None:
    """Return the point with the best throughput within the bound, or None if no point is within it.

    Without a bound, it is the point with the lowest latency among those whose throughput is close to the best.
    """
    fit = [p for p in points if bound is None or p.latency(percent) <= bound]
    if not fit:
        return None
    most = max(p.rate for p in fit)
    near = [p for p in fit if p.rate >= most * (1 - AS_GOOD)]
    return min(near, key=lambda p: (p.latency(percent), -p.rate)) if bound is None else max(fit, key=lambda p: p.rate)


def points_report(
    points: Sequence[SweepPoint],
    spot: SweepPoint | None,
    percent: float,
    bound: float | None,
    percentiles: Sequence[float],
    api: str | None,
) -> dict[str, Any]:
    """Return the part of a report that describes a sweep."""
    best = frontier(points, percent)

    def one(point: SweepPoint) -> dict[str, Any]:
        load = load_of(point, api, None, None, 0)
        return {"label": point.label, "streams": point.streams, "frontier": point in best,
                **figures(point.result, load, point.batch, percentiles)}  # fmt: skip

    return {
        "percentile": percent,
        "latency_bound_ms": None if bound is None else bound * 1e3,
        "sweet_spot": None if spot is None else spot.label,
        "points": [one(point) for point in points],
    }


def show_points(points: Sequence[SweepPoint], spot: SweepPoint | None, percent: float) -> None:
    """Print a table of all points, with the frontier in bold."""
    batched = any(p.batch is not None for p in points)
    columns = ["streams", "requests", *(["batch"] if batched else []), percentile_name(percent, " ms")]
    columns += [] if percent == 99 else ["p99 ms"]
    made = table("point", *(f">{name}" for name in columns), f">{'examples' if batched else 'inferences'}/s")
    best = frontier(points, percent)
    for point in points:
        late = [milliseconds(point.latency(p)) for p in dict.fromkeys((percent, 99.0))]
        batch = [str(point.batch or "-")] if batched else []
        made.add_row(
            point.label + (" *" if point is spot else ""), str(point.streams), str(point.requests), *batch, *late,
            f"{point.rate:,.1f}", style="bold" if point in best else None,
        )  # fmt: skip
    console().print(made)


def say_spot(points: Sequence[SweepPoint], spot: SweepPoint | None, percent: float, bound: float | None) -> str:
    """Describe the sweet spot, with the options that reproduce it."""
    at = "median latency" if percent == 50 else f"{percent:g} % percentile"
    if spot is None:
        best = min(points, key=lambda p: p.latency(percent))
        return (f"nothing has a {at} within {milliseconds(bound or 0)} ms: the least is "
                f"{milliseconds(best.latency(percent))} ms ({options(best)})")  # fmt: skip
    why = f"the most within {milliseconds(bound)} ms" if bound is not None else f"within {AS_GOOD:.0%} of the most"
    what = "examples" if spot.batch else "inferences"
    return (f"sweet spot: {options(spot)}: {spot.rate:,.1f} {what} per second ({why}) at a {at} of "
            f"{milliseconds(spot.latency(percent))} ms")  # fmt: skip


def options(point: SweepPoint) -> str:
    """Return the options that run the model like this point."""
    batch = "" if point.batch is None else f" --batch {point.batch}"
    return f"--streams {point.streams} --requests {point.requests}{batch}"


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """Show a bar on a terminal with the current point and the remaining time."""
    if not sys.stderr.isatty():
        yield lambda text, done: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console(stderr=True), transient=True, refresh_per_second=4) as bar:
        task = bar.add_task("", total=total)

        def step(text: str, done: int) -> None:
            bar.update(task, advance=done, description=text or None)

        yield step


def announce(points: int, seconds: float, count: int | None) -> None:
    """Announce the duration."""
    if count is None:
        note(f"{points} points of {seconds:g} s: about {points * seconds:,.0f} s, plus the time of compiling")


def unsupported(given: Mapping[str, object]) -> None:
    """Raise InputError for options that do not apply to a sweep."""
    for option, value in given.items():
        if value:
            raise InputError("does not apply to --sweep", where=option, hint="run a single point with it")
