"""Reports background tuning (TUNING_MODE = TUNING_BACKGROUND) during a benchmark."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..shared.console import note

if TYPE_CHECKING:
    from tunewright.runtime.insight.background import BackgroundStatus, KernelSwap
    from tunewright.runtime.requests.compiled import CompiledModel

#: seconds between two polls
LOOK = 1.0


@contextmanager
def watching(compiled: CompiledModel) -> Iterator[dict[str, Any]]:
    """Log each swap and rollback while the model is measured, and stop the tuning at the end.

    Yields a dictionary for the report. It is filled at the end, and stays empty if nothing is tuned.
    """
    found: dict[str, Any] = {}
    tuning = getattr(compiled.alone, "background", None)
    if tuning is None:
        yield found
        return
    over = threading.Event()

    def watch() -> None:
        before = tuning.status()
        while not over.wait(LOOK):
            now = tuning.status()
            tell(before, now)
            before = now

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join()
        tuning.stop()
        status = tuning.status()
        found.update(dataclasses.asdict(status))
        note(f"tuned in the background: {summary(status)}")


def tell(before: BackgroundStatus, now: BackgroundStatus) -> None:
    """Log what happened between two polls."""
    if now.phase != before.phase and now.phase in ("tuning", "waiting", "done", "failed"):
        note(f"{now.elapsed:.0f} s: {now.phase}" + f", {now.why}" * bool(now.why))
    if now.last_swap is not None and now.last_swap != before.last_swap:
        note(f"{now.elapsed:.0f} s: swapped in {swapped(now.last_swap)}; {summary(now)}")
    if now.last_rollback is not None and now.last_rollback != before.last_rollback:
        note(f"{now.elapsed:.0f} s: rolled back {swapped(now.last_rollback)}")


def swapped(swap: KernelSwap) -> str:
    """Describe the swapped kernels and the speed-up of the network with them."""
    median, low, high = swap.gain
    count = len(swap.kernels)
    what = f"{count} kernels" if count > 1 else next(iter(swap.kernels.values()), "nothing")
    return f"{what}: {median:.3f}x ({low:.3f} to {high:.3f} in {swap.pairs} pairs)"


def summary(status: BackgroundStatus) -> str:
    """Describe the progress in one line."""
    layers = status.layers_done + status.layers_left
    return (
        f"{status.layers_done} of {layers} layers, {status.candidates} candidates, {status.worked:.0f} s of work, "
        f"{status.interrupted} of {status.samples} samples thrown away, {status.gain:.2f}x"
    )
