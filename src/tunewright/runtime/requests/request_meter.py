"""Meters of a model's requests. They record that a request runs now, the shapes of its inputs and its time.

A meter keeps only shapes and times, never data. A model without a meter records nothing, at no cost.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from tunewright.measure.request_activity import Activity

T = TypeVar("T")
#: shapes of the inputs, in the model's order
Shapes: TypeAlias = tuple[tuple[int, ...], ...]
#: the most shapes that are counted separately; beyond that, the shape with the least time joins `Histogram.others`
MOST_SHAPES = 256


@dataclass(frozen=True)
class Met:
    """How often a model met some shapes, and the total time."""

    shapes: Mapping[str, tuple[int, ...]]
    count: int
    seconds: float


class Histogram:
    """Counts and seconds of a bounded number of shapes. Only one thread at a time adds to it."""

    def __init__(self) -> None:
        self.rows: dict[Shapes, tuple[int, float]] = {}
        #: count and seconds of shapes that made room for others
        self.others: tuple[int, float] = (0, 0.0)

    def add(self, shapes: Shapes, count: int, seconds: float) -> None:
        """Add inferences with these shapes, and their seconds."""
        row = self.rows.get(shapes)
        if row is None:
            if len(self.rows) >= MOST_SHAPES:
                self._make_room()
            self.rows[shapes] = (count, seconds)
        else:
            self.rows[shapes] = (row[0] + count, row[1] + seconds)

    def _make_room(self) -> None:
        least = min(self.rows, key=lambda shapes: self.rows[shapes][1])
        count, seconds = self.rows.pop(least)
        self.others = self.others[0] + count, self.others[1] + seconds


class ModelMeter:
    """The meter of one model. ``activity``: where its requests report that they run; None: nowhere."""

    def __init__(self, names: Sequence[str], activity: Activity | None = None) -> None:
        self.names, self.activity = list(names), activity
        self._gone = Histogram()
        self._living: weakref.WeakSet[RequestMeter] = weakref.WeakSet()

    def continued(self, activity: Activity | None) -> ModelMeter:
        """Return a meter for later requests that continues these counts."""
        made = ModelMeter(self.names, activity)
        _add(made._gone, self.histogram())
        return made

    def of_request(self) -> RequestMeter:
        """Make the meter of one request."""
        histogram = Histogram()
        made = RequestMeter(self.activity, histogram)
        self._living.add(made)
        weakref.finalize(made, self._keep, histogram).atexit = False  # the object still exists when the process ends
        return made

    def _keep(self, histogram: Histogram) -> None:
        """Keep the counts of a request that is gone."""
        _add(self._gone, histogram)

    def histogram(self) -> Histogram:
        """The shapes that all requests met so far."""
        found = Histogram()
        for one in (self._gone, *(mine.met for mine in alive(self._living))):
            _add(found, one)
        return found

    def met(self) -> list[Met]:
        """The shapes that were met, by total time, the longest first."""
        rows = sorted(self.histogram().rows.items(), key=lambda row: -row[1][1])
        return [Met(dict(zip(self.names, shapes, strict=False)), *row) for shapes, row in rows]


class RequestMeter:
    """The meter of one request, which serves one inference at a time."""

    def __init__(self, activity: Activity | None, met: Histogram) -> None:
        self._activity, self.met = activity, met
        self._looks: Any = None
        self._shapes: Shapes = ()
        if activity is not None:
            self._word = activity.take()
            weakref.finalize(self, activity.give_back, self._word).atexit = False

    def measured(self, infer: Callable[..., dict[str, Any]], looks: Callable[[], Any], *given: Any) -> dict[str, Any]:
        """Run an inference and record it. ``looks``: returns the shapes and types of its inputs after the run."""
        activity, begin = self._activity, time.perf_counter()
        if activity is not None:
            activity.begin(self._word)
        try:
            found = infer(*given)
        finally:
            if activity is not None:
                activity.end(self._word)
        seen = looks()
        if seen:
            if seen is not self._looks:
                self._looks, self._shapes = seen, tuple(tuple(shape) for shape, _ in seen)
            self.met.add(self._shapes, 1, time.perf_counter() - begin)
        return found


def _add(to: Histogram, one: Histogram) -> None:
    for shapes, row in list(one.rows.items()):
        to.add(shapes, *row)
    to.others = to.others[0] + one.others[0], to.others[1] + one.others[1]


def alive(objects: weakref.WeakSet[T]) -> list[T]:
    """List a set while other threads add to it."""
    for _ in range(16):
        try:
            return list(objects)
        except RuntimeError:  # another thread has just added one
            continue
    return []
