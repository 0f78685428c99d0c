"""What happened when: inferences, kernels and copies on a time line, as a file for Chrome's and Perfetto's viewers.

>>> with Trace() as trace:
...     compiled(inputs)
>>> trace.save("trace.json")  # open it at https://ui.perfetto.dev

Every inference in the process is recorded while a trace is entered; its kernels and copies where PERF_COUNT is on.
A kernel's time is that of its device's clock. The two clocks are brought together where that clock is not the host's:
the host looks at its own as soon as it learns that a kernel is over, and the quickest look tells how far they differ.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import InputError

if TYPE_CHECKING:
    from .plan import Step

#: the one that records
active: Trace | None = None
#: events that are kept, some 100 MB of them; later ones are counted
MOST = 500_000
#: groups of tracks, as viewers show them from the top down
REQUESTS, STREAMS = 1, 2


class _Track(NamedTuple):
    """A line of events: of a request, of a thread, or of a device that works for a thread."""

    group: int
    name: str
    #: of the thread: streams of different models have the same names
    thread: int = 0
    device: str = ""

    @property
    def order(self) -> tuple[Any, ...]:
        """Groups, then names; numbers in them as numbers."""
        parts = [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in self.name.split()]
        return self.group, parts, self.thread, self.device


class _Event(NamedTuple):
    """Something that took a while on a track. ``clock``: whose time it is; empty: the host's (`time.perf_counter`)."""

    track: _Track
    name: str
    category: str
    begin: float
    seconds: float
    args: Mapping[str, Any]
    clock: str = ""


class Trace:
    """A recorder. One at a time records: enter it."""

    def __init__(self) -> None:
        self._events: list[_Event] = []
        #: how much later the host's clock is than another, at least
        self._offsets: dict[str, float] = {}
        self._lock = threading.Lock()
        #: what is told of a step with so many launches, the same in each inference
        self._told: dict[tuple[Step, int], dict[str, Any]] = {}
        #: events that did not find room
        self.dropped = 0

    def __enter__(self) -> Trace:
        global active
        if active is not None:
            raise InputError("a trace is being recorded", hint="one at a time can be")
        active = self
        return self

    def __exit__(self, *_: object) -> None:
        global active
        active = None

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: _Event) -> None:
        if len(self._events) < MOST:
            self._events.append(event)
        else:
            self.dropped += 1

    def request(self, number: int, name: str, begin: float, end: float) -> None:
        """A request held an inference, from its start until its callback."""
        self.add(_Event(_Track(REQUESTS, f"request {number}"), name, "request", begin, end - begin, {}))

    def inference(self, device: str, begin: float, end: float) -> None:
        """A thread ran an inference on a device."""
        self.add(_Event(_here(), f"inference on {device}", "inference", begin, end - begin, {"device": device}))

    def copy(self, device: str, name: str, begin: float, seconds: float, nbytes: int) -> None:
        """Bytes went to a device, or came from there."""
        self.add(_Event(_here(device), name, "copy", begin, seconds, {"bytes": nbytes}))

    def kernel(self, device: str, step: Step, begin: float, seconds: float, launches: int) -> None:
        """A step of a plan is over just now; ``begin`` is the device's time."""
        now = time.perf_counter()
        track = _here(device)
        clock = f"{device} in {track.thread}"
        with self._lock:
            self._offsets[clock] = min(self._offsets.get(clock, now), now - begin - seconds)
        self._step(track, clock, step, begin, seconds, launches)

    def kernels(self, device: str, steps: Sequence[Step], times: Sequence[float], begin: float, end: float) -> None:
        """Steps that were one launch: it was enqueued and known to be over at these times of the host.

        What lies between is a little more than the steps took: they end with it.
        """
        track, at = _here(device), max(begin, end - sum(times))
        for i, (step, seconds) in enumerate(zip(steps, times, strict=True)):
            self._step(track, "", step, at, seconds, int(i == 0))
            at += seconds

    def _step(
        self, track: _Track, clock: str, step: Step, begin: float, seconds: float, launches: int
    ) -> None:
        args = self._told.get((step, launches))
        if args is None:
            args = {"op": step.node.op, "launches": launches}
            args["kernel"] = "control flow" if step.kernel is None else step.kernel.name
            if step.choice is not None:
                args["origin"] = step.choice.why
            self._told[step, launches] = args
        where = "control flow" if step.control is not None else "host" if step.on_host else "kernel"
        self.add(_Event(track, step.node.name or step.node.output.name, where, begin, seconds, args, clock))

    def events(self) -> list[dict[str, Any]]:
        """In the trace-event format: times in microseconds since the first event, tracks with their names."""
        known = list(self._events)
        # Where both clocks are the same one, the quickest look was late by no more than the look itself.
        offsets = {clock: 0.0 if abs(late) < 1e-4 else late for clock, late in self._offsets.items()}
        spans = [(e, e.begin + offsets.get(e.clock, 0.0)) for e in known]
        first = min((begin for _, begin in spans), default=0.0)
        ordered = sorted({e.track for e in known}, key=lambda track: track.order)
        tracks = {track: number for number, track in enumerate(ordered, 1)}
        found: list[dict[str, Any]] = [
            _named("process_name", group, 0, name)
            for group, name in ((REQUESTS, "requests"), (STREAMS, "streams"))
            if any(track.group == group for track in tracks)
        ]
        for track, number in tracks.items():
            name = f"{track.name}: {track.device}" if track.device else track.name
            found.append(_named("thread_name", track.group, number, name))
            found.append(_named("thread_sort_index", track.group, number, number))
        for event, begin in sorted(spans, key=lambda s: (tracks[s[0].track], s[1], -s[0].seconds)):
            group, number = event.track.group, tracks[event.track]
            found.append({
                "ph": "X", "name": event.name, "cat": event.category, "pid": group, "tid": number,
                "ts": round((begin - first) * 1e6, 3), "dur": round(event.seconds * 1e6, 3), "args": dict(event.args),
            })  # fmt: skip
        return found

    def save(self, path: str | os.PathLike[str], about: Mapping[str, Any] | None = None) -> None:
        """Write it as JSON; ``about`` is shown by viewers as what the trace is of."""
        other = {**(about or {}), **({"dropped_events": self.dropped} if self.dropped else {})}
        content = {"traceEvents": self.events(), "displayTimeUnit": "ms", "otherData": other}
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump(content, file, separators=(",", ":"))
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror or error}", where=str(path)) from None


def _here(device: str = "") -> _Track:
    """The calling thread's track, under the name that people know it by: stream 0, or main."""
    thread = threading.current_thread()
    name = thread.name.removeprefix("tunewright-").replace("-", " ").replace("_", " ")
    return _Track(STREAMS, "main" if thread is threading.main_thread() else name, threading.get_ident(), device)


def _named(what: str, group: int, track: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if isinstance(value, int) else "name"
    return {"ph": "M", "name": what, "pid": group, "tid": track, "args": {key: value}}
