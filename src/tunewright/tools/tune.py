"""``tunewright tune``: the kernels of a model, tuned within a time."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InputError
from .common import (
    Configs,
    DeviceName,
    Inputs,
    ModelFile,
    Seed,
    Shapes,
    cell,
    check_writable,
    console,
    milliseconds,
    note,
    parse_config,
    table,
    working,
)

if TYPE_CHECKING:
    from types import FrameType

    from rich.console import RenderableType

    from ..plugins.tune import Layer, Result, State

#: layers that are shown; the result file has all
SHOWN = 16
#: characters of a node's name that are shown
LONGEST = 28
#: seconds after which Ctrl-C no longer waits for the step that runs
PATIENCE = 1.5


def tune(
    model: ModelFile,
    budget: Annotated[
        str, typer.Option("--budget", "-b", metavar="TIME", help="How long it may take: 90, 60s, 5m or 1h.")
    ] = "60s",
    strategy: Annotated[
        str, typer.Option("--strategy", metavar="NAME", help="How to search; the values of AUTO_TUNE_MODE.")
    ] = "auto",
    again: Annotated[bool, typer.Option("--again", help="Search also where the answer is known already.")] = False,
    folder: Annotated[
        Path, typer.Option("--result", metavar="FOLDER", help="Where the file of results goes.", show_default="here")
    ] = Path(),
    input: Inputs = None,
    shape: Shapes = None,
    device: DeviceName = "CPU",
    config: Configs = None,
    seed: Seed = 0,
) -> None:
    """Tune a model: search better kernels where its time goes, check them, and keep what is faster in the network.

    What is found is in the user's knowledge base, and every later load uses it. Ctrl-C ends early and loses nothing;
    the same command again goes on with what is not tuned yet.

    Example: tunewright tune model.onnx --budget 2m
    """
    from ..core import Core
    from ..plugins.single import open_device
    from ..plugins.tune_result import ResultFile
    from .inputs import concrete, make_feed

    seconds = parse_time(budget)
    settings = parse_config(config) | {"AUTO_TUNE_MODE": strategy}
    core = Core(settings)
    opened = open_device(device)
    check_writable(folder, folder=True)
    with working("loading"):
        loaded = core.read_model(model)
    feed = make_feed(loaded, input, shape, seed, core.settings)
    for text in feed.notes:
        note(text)
    file = ResultFile(folder, str(model), opened, settings, seconds)
    note(f"results go to {file.path}")
    with interruptible() as stop, progress(file.update) as report:
        result = core.tune(concrete(feed), feed.values, device, seconds, again=again, report=report, stop=stop)
    file.finish(result)
    if file.problem:
        note(f"{file.path} could not be written: {file.problem}")
    show(result)


def parse_time(text: str) -> float:
    """Seconds of 90, 60s, 5m or 1.5h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip().lower())
    if found is None or not float(found[1]):
        raise InputError(f"{text!r} is not a time", where="--budget", hint="90, 60s, 5m or 1h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks to stop; a second one, or a step that takes too long, interrupts."""
    wished = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal wished
        if wished:
            raise KeyboardInterrupt
        wished = True
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)

    def insist(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, ask), signal.signal(signal.SIGALRM, insist)
    try:
        yield lambda: wished
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGALRM, before[1])


@contextlib.contextmanager
def progress(update: Callable[[State], None]) -> Iterator[Callable[[State], None]]:
    """A table that grows on a terminal; elsewhere a line for each layer."""
    told: set[str] = set()

    def news(state: State) -> bool:
        """A layer is done, or a phase begins: worth writing down."""
        key = state.phase if state.at is None or state.progress is not None else state.at.problem.key()
        fresh = key not in told
        told.add(key)
        return fresh

    if not sys.stderr.isatty():

        def line(state: State) -> None:
            if news(state):
                update(state)
                if state.at is not None and state.progress is None:
                    note(f"{state.elapsed:.0f} s: {title(state.at)}: {outcome(state.at)}")
                elif state.at is None:
                    note(f"{state.elapsed:.0f} s: {PHASES[state.phase]}")

        yield line
        return
    from rich.live import Live

    with Live(console=console(stderr=True), refresh_per_second=4, transient=True) as live:

        def draw(state: State) -> None:
            if news(state):
                update(state)
            live.update(picture(state))

        yield draw


PHASES = {
    "profile": "measuring the layers",
    "search": "searching",
    "network": "deciding inside the running network",
    "whole": "comparing whole networks",
}


def picture(state: State) -> RenderableType:
    """How far it is: the layers with most time, what was found so far, and what is left."""
    from rich.console import Group
    from rich.text import Text

    total = sum(layer.seconds for layer in state.layers) or 1.0
    saved = sum(layer.seconds * (1 - 1 / promised(layer)) for layer in state.layers)
    left = max(0.0, state.budget - state.elapsed)
    head = f"{PHASES[state.phase]}: {state.elapsed:.0f} of {state.budget:.0f} s, {left:.0f} s left"
    if saved > 0:
        head += f"; kernels alone promise {total / (total - saved):.2f}x so far"
    made = table("layer", "op", ">share", ">ms", ">best ms", "state")
    for layer in state.layers[:SHOWN]:
        best = layer.seconds / promised(layer)
        now = outcome(layer)
        if layer is state.at and state.progress is not None:
            p = state.progress
            if p.best_seconds < p.default_seconds:
                best = layer.seconds * p.best_seconds / p.default_seconds
            now = f"{p.phase}, {p.attempted} tried, {max(0.0, p.budget - p.elapsed):.0f} s left"
        share = f"{layer.seconds / total:.0%}"
        times = milliseconds(layer.seconds), milliseconds(best)
        made.add_row(cell(title(layer)), cell(layer.problem.op), share, *times, cell(now))
    return Group(Text(head), made)


def promised(layer: Layer) -> float:
    """How many times as fast a layer became, as far as it is known."""
    if layer.chosen is not None:
        return layer.gain
    if layer.network or layer.outcome is None or layer.outcome.gain is None:
        return 1.0
    return layer.outcome.gain.median


def title(layer: Layer) -> str:
    """The first of its nodes, and how many there are."""
    name = layer.nodes[0] if len(layer.nodes[0]) <= LONGEST else f"...{layer.nodes[0][3 - LONGEST :]}"
    return f"{name} (+{len(layer.nodes) - 1})" if len(layer.nodes) > 1 else name


def outcome(layer: Layer) -> str:
    """What became of a layer, in words."""
    if layer.chosen is not None:
        return f"{layer.gain:.2f}x in the network"
    if layer.skipped:
        return layer.skipped
    if layer.outcome is None:
        return ""
    if layer.network:
        return "no faster in the network"
    found = layer.outcome
    return f"{found.gain.median:.2f}x" if found.changed and found.gain is not None else "the default stays"


def show(result: Result) -> None:
    """What became of the model."""
    out = console()
    total = sum(layer.seconds for layer in result.layers) or 1.0
    made = table("layer", "op", ">share", ">ms", ">gain", "kernel")
    shown = [layer for layer in result.layers if layer.outcome is not None or layer.chosen is not None][:SHOWN]
    for layer in shown:
        gain = f"{layer.gain:.2f}x" if layer.chosen is not None else "-"
        share = f"{layer.seconds / total:.0%}"
        time = milliseconds(layer.seconds)
        made.add_row(cell(title(layer)), cell(layer.problem.op), share, time, gain, cell(_kernel(layer)))
    if shown:
        out.print(made)
        out.print()
    out.print(summary(result), markup=False, soft_wrap=True)


def _kernel(layer: Layer) -> str:
    if layer.chosen is None:
        return outcome(layer)
    solver, config = layer.chosen
    return f"{solver} {' '.join(f'{k}={v}' for k, v in config.items())}"


def summary(result: Result) -> str:
    """The end in a sentence or two."""
    changed = [layer for layer in result.layers if layer.chosen is not None]
    if result.gain is not None and changed:
        g = result.gain
        text = (
            f"{milliseconds(result.before)} -> {milliseconds(result.after)} ms, {g.median:.3f} times as fast"
            f" ({g.low:.3f} to {g.high:.3f} in {g.pairs} pairs);"
            f" {len(changed)} layers changed, outputs differ by {result.error:.1e}"
        )
    else:
        known = sum(layer.skipped == "it was tuned before" for layer in result.layers)
        text = "nothing is faster than what is used already" + (f"; {known} layers were tuned before" if known else "")
    if result.undone:
        text += f"; {len(result.undone)} changes were taken back, because the whole network did not gain by them"
    return text + ("; stopped early" if result.stopped else "")


COMMANDS = (tune,)
