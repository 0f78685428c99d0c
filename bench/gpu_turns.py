"""Rows of the GPU benchmark that take turns in one process, timed with the device's own events."""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

Arrays = dict[str, np.ndarray[Any, Any]]
#: rounds that every comparison has at least, and calls of a turn at most
FEW, MOST = 5, 2000


class TimeUp(BaseException):
    """A box of time is over. Nothing that handles mistakes of its own may swallow it."""


@dataclass
class Ready:
    """A row that can run: ``call`` enqueues one inference, ``outputs`` fetches what the last one made."""

    label: str
    call: Callable[[], object]
    outputs: Callable[[], Arrays]
    #: where its work is enqueued; None: on torch's current stream, or on no GPU at all
    stream: Any = None
    #: what has to be set while it runs
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    facts: dict[str, Any] = field(default_factory=dict)
    #: seconds of an inference, turn by turn; calls of a turn
    turns: list[float] = field(default_factory=list)
    count: int = 1
    failed: str = ""


def reason(error: BaseException) -> str:
    """A mistake in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextmanager
def boxed(seconds: float) -> Iterator[None]:
    """Raises `TimeUp` in what takes longer, and again should that be swallowed. It cannot interrupt a call into
    a library, but does so right behind it."""
    if not math.isfinite(seconds):
        yield
        return

    def over(*_: object) -> None:
        raise TimeUp(f"not ready after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 10.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@torch.no_grad()
def once(row: Ready, count: int, gpu: bool) -> float:
    """Seconds of an inference, of so many in a row behind one that does not count."""
    with row.around(), torch.cuda.stream(row.stream) if gpu and row.stream is not None else nullcontext():
        row.call()
        if not gpu:
            begin = time.perf_counter()
            for _ in range(count):
                row.call()
            return (time.perf_counter() - begin) / count
        stream = row.stream if row.stream is not None else torch.cuda.current_stream()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(stream)
        for _ in range(count):
            row.call()
        last.record(stream)
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3 / count


def measure(rows: Sequence[Ready], seconds: float, turn: float, gpu: bool, end: float = math.inf) -> None:
    """Everybody runs for a turn, in another order each round, for ``seconds`` of turns each. After the time ``end`` (of
    `time.monotonic`) no new round begins, except for the least that says something. Who fails is out of it."""

    def guarded(row: Ready, count: int) -> float | None:
        try:
            return once(row, count, gpu)
        except Exception as error:  # of any library: the others go on
            row.failed = f"while it ran: {reason(error)}"
            return None

    for row in rows:
        row.turns.clear()
        took = guarded(row, 1) if not row.failed else None
        if took is not None and took < turn:
            took = guarded(row, 3)
        row.count = max(1, min(MOST, round(turn / took))) if took else 1
    for done in range(max(FEW, round(seconds / turn))):
        if done >= FEW and time.monotonic() > end:
            break
        for row in random.Random(done).sample(list(rows), len(rows)):
            found = None if row.failed else guarded(row, row.count)
            if found is not None:
                row.turns.append(found)


def summary(row: Ready) -> dict[str, Any]:
    """Milliseconds over all turns."""
    ms = [1e3 * t for t in row.turns]
    low, middle, high = np.percentile(ms, [25, 50, 75])
    return {
        "median_ms": float(middle), "quartiles_ms": [float(low), float(high)], "min_ms": min(ms), "turns": len(ms),
        "calls": row.count, "turns_ms": [round(t, 6) for t in ms],
    }  # fmt: skip
