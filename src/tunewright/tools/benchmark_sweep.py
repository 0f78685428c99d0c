"""``tunewright benchmark --sweep``: streams x requests x batch, measured in turns, and the best of them."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import InputError, TunewrightError
from .benchmark_measure import Load, Result, measure
from .benchmark_report import figures, many
from .benchmark_statistics import percentile, percentile_name
from .common import console, milliseconds, note, table

if TYPE_CHECKING:
    from ..runtime.compiled import CompiledModel

#: throughput within this part of the best is as good: of such points the one with the least latency is preferred
AS_GOOD = 0.05
#: points of a sweep
MOST_POINTS = 200
#: warm-up inferences of a request before turns behind the first
WARM_AGAIN = 1
LABELS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


@dataclass
class Point:
    """One way to run the model, and what it gave."""

    streams: int
    requests: int
    batch: int | None
    result: Result = field(default_factory=Result)
    label: str = "?"

    @property
    def key(self) -> tuple[int, int | None]:
        """Points with the same one share a compiled model."""
        return self.streams, self.batch

    @property
    def rate(self) -> float:
        """Examples per second."""
        return len(self.result.latencies) * (self.batch or 1) / max(self.result.seconds, 1e-9)

    def latency(self, percent: float) -> float:
        return percentile(self.result.latencies, percent)


def whole_numbers(text: str | None, option: str) -> list[int]:
    """``4``, ``1,2,4`` or ``1-4``."""
    found: list[int] = []
    for part in (text or "").split(","):
        low, dash, high = part.strip().partition("-")
        if not part.strip() and text is None:
            continue
        if not low.isdecimal() or (dash and not high.isdecimal()) or int(low) < 1 or int(high or low) > 4096:
            raise InputError(f"{text!r} is no whole number from 1 to 4096", where=option,
                             hint="with --sweep also several: 1,2,4 or 1-4")  # fmt: skip
        found += range(int(low), int(high or low) + 1)
    return list(dict.fromkeys(found))


def doubling(most: int) -> list[int]:
    """1, 2, 4, ... and the last one."""
    found = [1]
    while found[-1] * 2 < most:
        found.append(found[-1] * 2)
    return found if most <= 1 else [*found, most]


@dataclass(frozen=True)
class Axes:
    """What is swept over. Without ``requests``: one and two for each stream."""

    streams: Sequence[int]
    requests: Sequence[int]
    batches: Sequence[int | None]

    def points(self) -> list[Point]:
        found = [
            Point(streams, requests, batch)
            for batch in self.batches
            for streams in self.streams
            for requests in (self.requests or (streams, 2 * streams))
        ]
        if len(found) > MOST_POINTS:
            raise InputError(f"{len(found)} points", where="--sweep", hint=f"{MOST_POINTS} is the most: name fewer")
        for i, point in enumerate(found):
            point.label = LABELS[i] if i < len(LABELS) else "+"
        return found


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
) -> tuple[list[Point], bool]:
    """Measure every point for ``seconds`` in all, in turns of random order; what Ctrl-C cut short, and whether it did.

    Turns spread what happens on the machine over all points. ``compiled``: the model for a number of streams and a
    batch, with its inputs. One model is in memory at a time: points that share it follow each other, and a turn begins
    with the one that the last turn ended with. What cannot be compiled is left out and noted; an error, if that is all.
    """
    points, refused = axes.points(), dict[tuple[int, int | None], TunewrightError]()
    groups = {p.key: [q for q in points if q.key == p.key] for p in points}
    turns, order, interrupted = 1 if count else repetitions, random.Random(seed), False
    one = _OneAtATime(compiled)
    with _progress(len(points) * turns) as step:
        try:
            for turn in range(turns):
                keys = [key for key in order.sample(list(groups), len(groups)) if key not in refused]
                for key in sorted(keys, key=lambda key: key != one.key):
                    group = order.sample(groups[key], len(groups[key]))
                    step(f"compiling for {_say(group[0])}", 0)
                    try:
                        model, feeds = one.get(key)
                    except TunewrightError as error:
                        refused[key] = error
                        step("", len(group) * turns)
                        continue
                    for point in group:
                        step(f"turn {turn + 1} of {turns}: {_say(point)}", 0)
                        load = load_of(point, api, seconds / turns, count, warm_up if turn == 0 else WARM_AGAIN)
                        found = measure(model, feeds, load, progress=False)
                        point.result.add(found)
                        if found.interrupted:
                            raise KeyboardInterrupt
                        step("", 1)
                    del model, feeds  # it is kept in one place alone
        except KeyboardInterrupt:
            interrupted = True
    if len(refused) == len(groups):
        raise next(iter(refused.values()))
    for key, why in refused.items():
        note(f"left out: {_say(groups[key][0])}: {why}")
    return [point for point in points if point.result.latencies], interrupted


class _OneAtATime:
    """Keeps the model that was asked for last. The one before is gone when the next is compiled."""

    def __init__(self, compiled: Callable[[int, int | None], Made]) -> None:
        self._compiled = compiled
        self.key: tuple[int, int | None] | None = None
        self._made: Made | None = None

    def get(self, key: tuple[int, int | None]) -> Made:
        if key != self.key or self._made is None:
            self.key = self._made = None
            gc.collect()  # requests and their callbacks hold each other
            self._made, self.key = self._compiled(*key), key
        return self._made


def load_of(point: Point, api: str | None, seconds: float | None, count: int | None, warm_up: int) -> Load:
    is_async = api == "async" or (api is None and (point.requests > 1 or point.streams > 1))
    return Load(point.requests, is_async, None if count else seconds, count, warm_up)


def _say(point: Point) -> str:
    batch = "" if point.batch is None else f", batch {point.batch}"
    return f"{many(point.streams, 'stream')}, {many(point.requests, 'request')}{batch}"


def frontier(points: Sequence[Point], percent: float) -> list[Point]:
    """Points that no other beats in both latency and throughput, by latency."""
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (p.latency(percent), -p.rate)):
        if not found or point.rate > found[-1].rate:
            found.append(point)
    return found


def sweet_spot(points: Sequence[Point], percent: float, bound: float | None) -> Point | None:
    """The most throughput within a bound of latency, and without one the least latency of those near the most.

    None: nothing is within the bound.
    """
    fit = [p for p in points if bound is None or p.latency(percent) <= bound]
    if not fit:
        return None
    most = max(p.rate for p in fit)
    near = [p for p in fit if p.rate >= most * (1 - AS_GOOD)]
    return min(near, key=lambda p: (p.latency(percent), -p.rate)) if bound is None else max(fit, key=lambda p: p.rate)


def points_report(
    points: Sequence[Point], spot: Point | None, percent: float, bound: float | None, percentiles: Sequence[float],
    api: str | None,
) -> dict[str, Any]:
    """The part of a report that a sweep makes."""
    best = frontier(points, percent)

    def one(point: Point) -> dict[str, Any]:
        load = load_of(point, api, None, None, 0)
        return {"label": point.label, "streams": point.streams, "frontier": point in best,
                **figures(point.result, load, point.batch, percentiles)}  # fmt: skip

    return {
        "percentile": percent,
        "latency_bound_ms": None if bound is None else bound * 1e3,
        "sweet_spot": None if spot is None else spot.label,
        "points": [one(point) for point in points],
    }


def show_points(points: Sequence[Point], spot: Point | None, percent: float) -> None:
    """A table of all points, those of the frontier in bold."""
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


def say_spot(points: Sequence[Point], spot: Point | None, percent: float, bound: float | None) -> str:
    """The sweet spot in words, with the options that give it."""
    at = "median latency" if percent == 50 else f"{percent:g} % percentile"
    if spot is None:
        best = min(points, key=lambda p: p.latency(percent))
        return (f"nothing has a {at} within {milliseconds(bound or 0)} ms: the least is "
                f"{milliseconds(best.latency(percent))} ms ({options(best)})")  # fmt: skip
    why = f"the most within {milliseconds(bound)} ms" if bound is not None else f"within {AS_GOOD:.0%} of the most"
    what = "examples" if spot.batch else "inferences"
    return (f"sweet spot: {options(spot)}: {spot.rate:,.1f} {what} per second ({why}) at a {at} of "
            f"{milliseconds(spot.latency(percent))} ms")  # fmt: skip


def options(point: Point) -> str:
    """The options that run the model as a point did."""
    batch = "" if point.batch is None else f" --batch {point.batch}"
    return f"--streams {point.streams} --requests {point.requests}{batch}"


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """A bar on a terminal: what is measured now, and how long it takes still."""
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
    """How long it will take."""
    if count is None:
        note(f"{points} points of {seconds:g} s: about {points * seconds:,.0f} s, and what compiling takes")


def unsupported(given: Mapping[str, object]) -> None:
    """InputError for options that a sweep has no use for."""
    for option, value in given.items():
        if value:
            raise InputError("has no meaning with --sweep", where=option, hint="run the point that you like with it")
