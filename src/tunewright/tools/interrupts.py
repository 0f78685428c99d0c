"""Ctrl-C while something runs that does not hear it: a compiler, a kernel."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

#: signals that ask to stop: Ctrl-C, and what service managers and `timeout` send
STOPS = (signal.SIGINT, signal.SIGTERM)
#: seconds after which a wish to stop no longer waits for the step that runs, and that remain for the end then
PATIENCE, GRACE = 1.4, 0.4
#: the process is the command line's own, and may be ended; not where Python calls what commands are made of
ours = False


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks to stop; a second one, or a step that takes too long, interrupts. One that cannot be interrupted (a
    compiler's) ends with the process: what was found for layers before is stored already.
    """
    wished = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal wished
        if wished:
            raise KeyboardInterrupt
        wished = True
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)

    def insist(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, ask) for number in STOPS}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, insist)
    try:
        with end_after(PATIENCE + GRACE, STOPS, "interrupted; what was stored is kept"):
            yield lambda: wished
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def ending() -> contextlib.AbstractContextManager[None]:
    """Guard a block that may end with the process: Ctrl-C ends it within two seconds, whatever runs."""
    if not ours or threading.current_thread() is not threading.main_thread():
        return contextlib.nullcontext()
    return end_after(PATIENCE + GRACE, (signal.SIGINT,), "interrupted")


@contextlib.contextmanager
def end_after(seconds: float, stops: Sequence[int], said: str) -> Iterator[None]:
    """End the process if the block lasts this much longer after Ctrl-C. A signal's handler cannot do that: it waits
    for the step that runs.
    """
    listening, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    done = threading.Event()

    def watch() -> None:
        while (heard := os.read(listening, 1)) and heard[0] not in stops:
            pass
        if heard and not done.wait(seconds):
            sys.stderr.write("\x1b[?25h" if sys.stderr.isatty() else "")  # progress hides the cursor
            sys.stderr.write(f"\ntunewright: {said}\n")
            sys.stderr.flush()
            os._exit(130)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        done.set()
        signal.set_wakeup_fd(before)
        os.close(writing)
        watching.join()
        os.close(listening)
