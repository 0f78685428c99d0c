"""Handles Ctrl-C while code runs that does not react to it, such as a compiler or a kernel."""

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

#: signals that ask to stop: Ctrl-C, and the one that service managers and `timeout` send
STOPS = (signal.SIGINT, signal.SIGTERM)
#: Seconds after which a stop request interrupts the running step, and further seconds until the process is ended.
PATIENCE, GRACE = 1.4, 0.4
#: Whether this process is the command line and may be ended. False if Python code calls the functions of commands.
ours = False


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a stop request, which the yielded function reports.

    A second one, or a step that takes too long, raises KeyboardInterrupt. A step that cannot be interrupted, such as a
    compiler's, ends with the process. The results of earlier layers are stored by then.
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
    """Guard a block that may be aborted: Ctrl-C ends the process within two seconds, whatever runs."""
    if not ours or threading.current_thread() is not threading.main_thread():
        return contextlib.nullcontext()
    return end_after(PATIENCE + GRACE, (signal.SIGINT,), "interrupted")


@contextlib.contextmanager
def end_after(seconds: float, stops: Sequence[int], said: str) -> Iterator[None]:
    """End the process if the block lasts this many seconds longer after a signal.

    A signal handler cannot do that, because Python runs it only after the current step.
    """
    listening, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    done = threading.Event()

    def watch() -> None:
        while (heard := os.read(listening, 1)) and heard[0] not in stops:
            pass
        if heard and not done.wait(seconds):
            sys.stderr.write("\x1b[?25h" if sys.stderr.isatty() else "")  # progress displays hide the cursor
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
