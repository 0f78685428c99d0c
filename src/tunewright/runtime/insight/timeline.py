"""Record inferences, kernels and copies on a time line, as a file for the viewers of Chrome and Perfetto.

>>> with Trace() as trace:
...     compiled(inputs)
>>> trace.save("trace.json")  # open it at https://ui.perfetto.dev

An entered trace records every inference in the process, and their kernels and copies if PERF_COUNT is on. A kernel's
time comes from its device's clock. If that clock is not the host's, the trace aligns both: the host reads its own clock
as soon as it learns that a kernel is over. The reading with the least delay gives the difference of the clocks.

Perfetto drops an event that overlaps its neighbour, even by one nanosecond, its unit of time. So the trace rounds the
times where events begin and end, never their durations.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from tunewright.errors import InputError

if TYPE_CHECKING:
    from tunewright.ir.graph import Node

    from ..plans.plan import Step

#: the trace that records now
active: Trace | None = None
#: the most events that are kept, about 100 MB; later events are only counted
MOST = 500_000
#: kinds of tracks, as viewers show them from the top down
REQUESTS, STREAMS = 1, 2
#: All tracks share one process: viewers keep the order of tracks within a process, but not of processes.
PROCESS = 1
#: Perfetto shows a track's number behind its name. "request 0 101" is not mistaken for a name.
FIRST_TRACK = 101


class _Track(NamedTuple):
    """A track of events: of a request, of a thread, or of a device that works for a thread."""

    group: int
    name: str
    #: the thread's identifier: streams of different models have the same names
    thread: int = 0
    device: str = ""

    @property
    def order(self) -> tuple[Any, ...]:
        """The sort key of a track: its group, then its name, with numbers compared as numbers."""
        parts = [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in self.name.split()]
        return self.group, parts, self.thread, self.device


class _Event(NamedTuple):
    """An event with a duration on a track. ``clock``: the clock of its time; empty: the host's (`time.perf_counter`).
    """

    track: _Track
    name: str
    category: str
    begin: float
    seconds: float
    args: Mapping[str, Any]
    clock: str = ""


class Trace:
    """A recorder of events. Only one trace at a time can be entered."""

    def __init__(self) -> None:
        self._events: list[_Event] = []
        #: the least difference that was seen between the host's clock and each other clock
        self._offsets: dict[str, float] = {}
        self._lock = threading.Lock()
        #: arguments for a step with this number of launches, the same in each inference
        self._told: dict[tuple[Step, int], dict[str, Any]] = {}
        #: by thread: inferences since it last ended a request's, and the inferences for that request
        self._ran: dict[int, tuple[list[_Event], list[_Event]]] = {}
        #: for each request's inference, by name: its waiting event and the inferences that streams ran for it
        self._served: list[tuple[str, list[_Event]]] = []
        #: events beyond `MOST`
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

    def add(self, event: _Event) -> bool:
        """Keep an event. False: there is no room."""
        if len(self._events) < MOST:
            self._events.append(event)
            return True
        self.dropped += 1
        return False

    def request(self, number: int, name: str, begin: float, end: float) -> None:
        """Record a request's inference from its start to its callback. The thread that ran it calls this."""
        track, thread = _Track(REQUESTS, f"request {number}"), threading.get_ident()
        since, before = self._ran.get(thread, ([], []))
        ran = since or before  # no new inference: one inference served several requests
        self._ran[thread] = [], ran
        ran = sorted((e for e in ran if begin <= e.begin and e.begin + e.seconds <= end), key=lambda e: e.begin)
        if self.add(_Event(track, name, "request", begin, end - begin, {})) and ran:
            waits = _Event(track, "waiting", "waiting", begin, ran[0].begin - begin, {})
            if self.add(waits):
                self._served.append((name, [waits, *ran]))

    def inference(self, device: str, begin: float, end: float) -> None:
        """Record that the calling thread ran an inference on a device."""
        event = _Event(_here(), f"inference on {device}", "inference", begin, end - begin, {"device": device})
        if self.add(event):
            self._ran.setdefault(event.track.thread, ([], []))[0].append(event)

    def copy(self, device: str, name: str, begin: float, seconds: float, nbytes: int) -> None:
        """Record a copy to or from a device."""
        self.add(_Event(_here(device), name, "copy", begin, seconds, {"bytes": nbytes}))

    def kernel(self, device: str, step: Step, begin: float, seconds: float, launches: int) -> None:
        """Record a step that has just ended. ``begin`` is the device's time."""
        now = time.perf_counter()
        track = _here(device)
        clock = f"{device} in {track.thread}"
        with self._lock:
            self._offsets[clock] = min(self._offsets.get(clock, now), now - begin - seconds)
        self._step(track, clock, step, begin, seconds, launches)

    def kernels(self, device: str, steps: Sequence[Step], times: Sequence[float], begin: float, end: float) -> None:
        """Record the steps of one launch. ``begin`` and ``end``: the host enqueued the launch, and learned of its end.

        This span is a little longer than the steps took. The steps are placed at its end.
        """
        track, at = _here(device), max(begin, end - sum(times))
        for i, (step, seconds) in enumerate(zip(steps, times, strict=True)):
            self._step(track, "", step, at, seconds, int(i == 0))
            at += seconds

    def _step(self, track: _Track, clock: str, step: Step, begin: float, seconds: float, launches: int) -> None:
        args = self._told.get((step, launches))
        if args is None:
            args = {"node": step.node.name or step.node.output.name, "op": step.node.op, "launches": launches}
            args["kernel"] = "control flow" if step.kernel is None else step.kernel.name
            if step.choice is not None:
                args["origin"] = step.choice.why
            self._told[step, launches] = args
        where = "control flow" if step.control is not None else "host" if step.on_host else "kernel"
        self.add(_Event(track, _short(step.node), where, begin, seconds, args, clock))

    def events(self, title: str = "tunewright") -> list[dict[str, Any]]:
        """Return the trace-event format: times in microseconds since the first event, and tracks with names."""
        known = list(self._events)
        # If both are the same clock, the least difference is only the delay of the reading.
        offsets = {clock: 0.0 if abs(late) < 1e-4 else late for clock, late in self._offsets.items()}
        first = min((e.begin + offsets.get(e.clock, 0.0) for e in known), default=0.0)

        def span(event: _Event) -> tuple[int, int]:
            """Nanoseconds since the first event. Neighbours that touch share a value."""
            begin = event.begin + offsets.get(event.clock, 0.0)
            return round((begin - first) * 1e9), round((begin + event.seconds - first) * 1e9)

        ordered = sorted({e.track for e in known}, key=lambda track: track.order)
        tracks = {track: number for number, track in enumerate(ordered, FIRST_TRACK)}
        found = [_named("process_name", 0, title)] if tracks else []
        for track, number in tracks.items():
            name = f"{track.name}: {track.device}" if track.device else track.name
            found.append(_named("thread_name", number, name))
            found.append(_named("thread_sort_index", number, number))
        names = self._names()
        spans = [(tracks[event.track], *span(event), event) for event in known]
        for number, begin, end, event in sorted(spans, key=lambda s: (s[0], s[1], -s[2])):
            found.append({
                "ph": "X", "name": names.get(id(event), event.name), "cat": event.category, "pid": PROCESS,
                "tid": number, "ts": _microseconds(begin), "dur": _microseconds(end - begin), "args": dict(event.args),
            })  # fmt: skip
        flows = (pair for _, chain in self._served for pair in pairwise(chain))
        for number, (before, after) in enumerate(flows, 1):
            for phase, event in (("s", before), ("f", after)):
                found.append({
                    "ph": phase, "id": number, "name": "then", "cat": "flow", "pid": PROCESS,
                    "tid": tracks[event.track], "ts": _microseconds(span(event)[0]), "bp": "e",
                })  # fmt: skip
        return found

    def _names(self) -> dict[int, str]:
        """Name each inference of a stream after the requests that it served."""
        served: dict[int, list[str]] = {}
        for name, (_, *ran) in self._served:
            for event in ran:
                served.setdefault(id(event), []).append(name)
        return {key: names[0] if len(names) == 1 else f"{len(names)} inferences" for key, names in served.items()}

    def save(self, path: str | os.PathLike[str], about: Mapping[str, Any] | None = None) -> None:
        """Write the trace as JSON. ``about``: facts that viewers show, with ``model`` and ``device`` as the title."""
        other = {**(about or {}), **({"dropped_events": self.dropped} if self.dropped else {})}
        title = " on ".join(os.path.basename(str(other[key])) for key in ("model", "device") if key in other)
        content = {"traceEvents": self.events(title or "tunewright"), "displayTimeUnit": "ms", "otherData": other}
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump(content, file, separators=(",", ":"))
        except OSError as error:
            raise InputError(f"cannot be written: {error.strerror or error}", where=str(path)) from None


def _here(device: str = "") -> _Track:
    """Return the calling thread's track, under its common name: stream 0, or main."""
    thread = threading.current_thread()
    name = thread.name.removeprefix("tunewright-").replace("-", " ").replace("_", " ")
    return _Track(STREAMS, "main" if thread is threading.main_thread() else name, threading.get_ident(), device)


def _short(node: Node) -> str:
    """Return a node's operation and the end of its name.

    Viewers show only the beginning of a long name. Exporters begin all names with the same folders, and end them with
    the operation.
    """
    op = node.op.rpartition("::")[2]
    parts = [part for part in (node.name or node.output.name).split("/") if part] or [op]
    if len(parts) > 1 and parts[-1].startswith(op):
        parts[-2:] = [parts[-2] + parts[-1].removeprefix(op)]
    name = "/".join(parts[-3:])
    return name if name.startswith(op) else f"{op} {name}"


def _microseconds(nanoseconds: int) -> float:
    """Return microseconds that give the same nanoseconds again when a viewer multiplies and truncates them."""
    found = nanoseconds / 1000
    return found if int(found * 1000) == nanoseconds else math.nextafter(found, math.inf)


def _named(what: str, track: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if isinstance(value, int) else "name"
    return {"ph": "M", "name": what, "pid": PROCESS, "tid": track, "args": {key: value}}
