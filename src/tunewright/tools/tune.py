"""``tunewright tune``: the kernels of a model, or of dumped problems, tuned within a time."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError
from .common import Configs, DeviceName, Inputs, Seed, Shapes, check_writable, note, parse_config, working

if TYPE_CHECKING:
    from types import FrameType

    from ..core import Core
    from ..frontend.model import Model

#: signals that ask to stop: Ctrl-C, and what service managers and `timeout` send
STOPS = (signal.SIGINT, signal.SIGTERM)
#: seconds after which a wish to stop no longer waits for the step that runs, and that remain for the end then
PATIENCE, GRACE = 1.4, 0.4


def tune(
    what: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL | PROBLEMS...",
            show_default=False,
            help="The ONNX file, or dumps of problems (.jsonl, folders).",
        ),
    ],
    budget: Annotated[
        str, typer.Option("--budget", "-b", metavar="TIME", help="How long it may take: 90, 60s, 5m or 1h.")
    ] = "60s",
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy", metavar="NAME", help="How to search; the values of AUTO_TUNE_MODE.", show_default="auto"
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Search also where the answer is known already.")] = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--result", metavar="FOLDER", help="For the file of results; else TUNE_RESULT_PATH.", show_default="."
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="FILE", help="Write a page about it (HTML).", show_default=False)
    ] = None,
    lock: Annotated[
        bool, typer.Option("--lock", help="Write down the kernels: MODEL.lock.json, or the LOCK_FILE of the settings.")
    ] = False,
    input: Inputs = None,
    shape: Shapes = None,
    device: DeviceName = "CPU",
    config: Configs = None,
    seed: Seed = 0,
) -> None:
    """Tune a model: search better kernels where its time goes, check them, and keep what is faster in the network.

    What is found is in the user's knowledge base, and every later load uses it. Ctrl-C ends early and loses nothing;
    the same command again goes on with what is not tuned yet. Dumps of problems (ENABLE_TUNE_DUMP) are tuned without
    their models.

    Example: tunewright tune model.onnx --budget 2m --report report.html
    """
    from ..core import Core
    from .kb_open import writable
    from .lock import lock_path, write_lock
    from .tune_report import page
    from .tune_view import progress, show

    seconds = parse_time(budget)
    settings = parse_config(config) | ({"AUTO_TUNE_MODE": strategy} if strategy is not None else {})
    if folder is not None:
        check_writable(folder, folder=True)
        settings["TUNE_RESULT_PATH"] = str(folder)
    if report is not None:
        check_writable(report)
    core = Core(settings)
    writable(core.settings)  # there is nothing else that tuning is for
    model = which_model(what)
    if lock and model is None:
        raise InputError("is for models, not for dumps of problems", where="--lock")
    locks = lock_path(core, model) if lock and model is not None else None
    loaded, values = (None, {}) if model is None else _loaded(core, model, input, shape, seed)
    with interruptible() as stop:
        if loaded is None:
            if input or shape:
                raise InputError("belong to a model", where="--input, --shape", hint="a problem has its shapes")
            with progress() as tell:
                result = core.tune_problems(what, device, seconds, again=again, report=tell, stop=stop)
        else:
            with progress() as tell:
                result = core.tune(loaded, values, device, seconds, again=again, report=tell, stop=stop)
    if report is not None:
        report.write_text(page([result.written]), encoding="utf-8")
    show(result)
    if report is not None:
        note(f"the report is {report}")
    if locks is not None and loaded is not None:
        write_lock(core, loaded, values, device, locks)


def which_model(paths: Sequence[Path]) -> Path | None:
    """The model among the arguments; None where they are dumps of problems."""
    dumps = [is_dump(path) for path in paths]
    if all(dumps):
        return None
    model = paths[dumps.index(False)]
    if len(paths) > 1:
        hint = "one model, or any number of dumps (.jsonl)"
        raise InputError("is not a dump of problems, and a model stands alone", where=str(model), hint=hint)
    return model


def is_dump(path: Path) -> bool:
    """A folder, or lines of JSON; ONNX files never begin like that."""
    if path.is_dir() or path.suffix == ".jsonl":
        return True
    with path.open("rb") as file:
        return file.read(64).lstrip().startswith(b"{")


def _loaded(
    core: Core, path: Path, inputs: list[str] | None, shapes: list[str] | None, seed: int
) -> tuple[Model, Mapping[str, Any]]:
    """The model, and inputs for it."""
    from .inputs import concrete, make_feed

    with working("loading"):
        loaded = core.read_model(path)
    feed = make_feed(loaded, inputs, shapes, seed, core.settings)
    for text in feed.notes:
        note(text)
    return concrete(feed), feed.values


def parse_time(text: str, where: str = "--budget") -> float:
    """Seconds of 90, 60s, 5m or 1.5h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip().lower())
    if found is None or not float(found[1]):
        raise InputError(f"{text!r} is not a time", where=where, hint="90, 60s, 5m or 1h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


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
        with _end_after(PATIENCE + GRACE):
            yield lambda: wished
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _end_after(seconds: float) -> Iterator[None]:
    """End the process when the block lasts so much longer after Ctrl-C. A signal's handler cannot do that: it waits
    for the step that runs.
    """
    listening, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    done = threading.Event()

    def watch() -> None:
        while (heard := os.read(listening, 1)) and heard[0] not in STOPS:
            pass
        if heard and not done.wait(seconds):
            sys.stderr.write("\x1b[?25h" if sys.stderr.isatty() else "")  # progress hides the cursor
            sys.stderr.write("\ntunewright: interrupted; what was stored is kept\n")
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


COMMANDS = (tune,)
