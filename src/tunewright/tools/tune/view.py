"""Output of `tunewright tune`: progress and results."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..kb.view import config_text, plural, problem_text, safe
from ..shared.console import cell, console, milliseconds, note, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tunewright.model_tuning.layers import TunedLayer, TuningResult, TuningState

#: schema of the JSON; changes when the meaning of a key changes
SCHEMA = "tunewright.tuned/1"
#: number of layers shown; the result file has all
SHOWN = 16
#: part of an inference below which the remaining hope is not worth another run
SLIGHT = 0.01
#: number of layers without a search that are listed by name
NAMED = 3
#: lines of the terminal that are not layers
AROUND = 7
#: shown characters of a node's name
LONGEST = 22

PHASES = {
    "profile": "measuring the layers",
    "search": "searching",
    "network": "deciding inside the running network",
    "whole": "comparing whole networks",
}


# ---- while it works -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def progress() -> Iterator[Callable[[TuningState], None]]:
    """Show a live table on a terminal, and otherwise print a line per layer. Both replace the log's lines."""
    log = logging.getLogger("tunewright")
    log.addFilter(_is_other)
    try:
        with _drawn() if sys.stderr.isatty() else contextlib.nullcontext(_lines()) as tell:
            yield tell
    finally:
        log.removeFilter(_is_other)


def _is_other(record: logging.LogRecord) -> bool:
    """Whether a log record is not the one about a tuned problem."""
    return record.levelno > logging.INFO or not str(record.msg).startswith("tuned ")


def _lines() -> Callable[[TuningState], None]:
    told: set[str] = set()

    def line(state: TuningState) -> None:
        """Print a line when a layer is done or a phase begins."""
        done = state.at is not None and state.progress is None
        key = state.at.problem.key() if state.at is not None and done else state.phase
        if key in told or not (done or state.at is None):
            return
        told.add(key)
        what = f"{title(state.at)}: {outcome(state.at)}" if state.at is not None and done else PHASES[state.phase]
        far = "; ".join(["", *filter(None, (standing(state), remaining(state)))]) if done else ""
        note(f"{state.elapsed:.0f} of {state.budget:.0f} s: {what}{far}")

    return line


@contextlib.contextmanager
def _drawn() -> Iterator[Callable[[TuningState], None]]:
    from rich.live import Live

    from tunewright.model_tuning.layers import TuningState

    out, told = console(stderr=True), [(TuningState("profile", (), None, None, 0.0, 0.0), 0.0)]

    def draw() -> RenderableType:
        """Draw with a clock that also advances during long steps."""
        state, at = told[0]
        since = time.monotonic() - at if at else 0.0
        return picture(replace(state, elapsed=state.elapsed + since), out.height)

    def tell(state: TuningState) -> None:
        told[0] = state, time.monotonic()

    # few refreshes, because drawing disturbs the measurements
    with Live(console=out, get_renderable=draw, refresh_per_second=2, transient=True):
        yield tell


def picture(state: TuningState, height: int = SHOWN + AROUND) -> RenderableType:
    """Return a table of the slowest layers, with the gains so far and what is left."""
    from rich.console import Group
    from rich.text import Text

    from tunewright.model_tuning.expected_gain import promised

    left = max(0.0, state.budget - state.elapsed)
    head = Text(f"{PHASES[state.phase]}, {state.elapsed:.0f} of {state.budget:.0f} s", style="bold")
    head.append(f", {left:.0f} s left" if left else "", style="not bold")
    if not state.layers:
        return head
    total = sum(layer.seconds for layer in state.layers) or 1.0
    made = table("layer", ">share", ">ms", ">best", ">gain", "state")
    made.columns[0].no_wrap = True
    for layer in visible(state, height - AROUND):
        at = state.progress if layer is state.at else None
        gain = promised(layer, at)
        made.add_row(
            cell(title(layer)), f"{layer.seconds / total:.0%}", milliseconds(layer.seconds),
            milliseconds(layer.seconds / gain), f"{gain:.2f}x" if gain > 1 else "",
            Text(now(state, layer), no_wrap=True, overflow="ellipsis"),
            style="bold" if layer is state.at else "dim" if layer.skipped else "",
        )  # fmt: skip
    lines = [Text(text) for text in (standing(state), remaining(state)) if text]
    return Group(head, *lines, Text(), made)


def visible(state: TuningState, most: int) -> Sequence[TunedLayer]:
    """Return the most expensive layers, including the one being searched."""
    shown = list(state.layers[: max(1, min(SHOWN, most))])
    if state.at is not None and state.at not in shown:
        shown[-1] = state.at
    return shown


def standing(state: TuningState) -> str:
    """Return the gain so far as a text."""
    from tunewright.model_tuning.expected_gain import promised

    before = sum(layer.seconds for layer in state.layers)
    after = sum(
        layer.seconds / promised(layer, state.progress if layer is state.at else None) for layer in state.layers
    )
    text = f"{milliseconds(before)} ms"
    if after < before:
        how = "in the network" if state.phase == "whole" else "promised"
        text += f" -> {milliseconds(after)} ms {how} ({before / after:.2f}x)"
    return text


def remaining(state: TuningState) -> str:
    """Describe what this run may still gain, or return an empty text."""
    from tunewright.model_tuning.expected_gain import expected, is_waiting

    waiting = [layer for layer in state.layers if is_waiting(layer)]
    if state.phase != "search" or not waiting:
        return ""
    likely, most = expected(state.layers, waiting), sum(layer.hope for layer in waiting)
    return (
        f"{milliseconds(likely)} ms more expected of {plural(len(waiting), 'layer')} to come, "
        f"at most {milliseconds(most)} ms"
    )


def now(state: TuningState, layer: TunedLayer) -> str:
    """Describe the state of a layer: waiting, in progress, or its outcome."""
    from tunewright.model_tuning.expected_gain import promised

    p = state.progress
    if layer is state.at and p is not None:
        failed = f", {p.failed} failed" if p.failed else ""
        return f"{p.phase}, {max(0.0, p.budget - p.elapsed):.0f} s: {p.attempted} tried{failed}"
    if promised(layer) > 1:  # the gain is in the next column
        return "in the network" if layer.chosen is not None and layer.network else "by itself"
    return outcome(layer) or ("waits" if state.phase == "search" else "")


def title(layer: TunedLayer) -> str:
    """Return the first node of a layer and the number of others, or the problem if there is no model."""
    if not layer.nodes:
        text = problem_text(layer.problem.key())
        return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
    more = f" (+{len(layer.nodes) - 1})" if len(layer.nodes) > 1 else ""
    name, most = layer.nodes[0], LONGEST - len(more)
    return (name if len(name) <= most else f"...{name[3 - most :]}") + more


def outcome(layer: TunedLayer) -> str:
    """Describe the outcome of a layer."""
    from tunewright.model_tuning.expected_gain import promised

    if layer.chosen is not None:
        return f"{layer.gain:.2f}x in the network" if layer.network else f"{layer.gain:.2f}x by itself"
    if layer.skipped:
        return layer.skipped
    if layer.outcome is None:
        return ""
    if layer.network:
        return "not confirmed in the network"
    gain = promised(layer)
    if gain > 1:
        return f"{gain:.2f}x by itself"
    return "open: few were compared" if layer.outcome.is_open else "nothing is faster"


# ---- the end --------------------------------------------------------------------------------------------------------


def show(result: TuningResult) -> None:
    """Print the results of the layers and of the whole network."""
    out = console()
    total = sum(layer.seconds for layer in result.layers) or 1.0
    made = table("layer", ">share", ">ms", ">gain", "kernel")
    made.columns[0].no_wrap, made.columns[-1].no_wrap = True, False  # long configs wrap to further lines
    shown = [layer for layer in result.layers if layer.outcome is not None or layer.chosen is not None][:SHOWN]
    for layer in shown:
        gain = f"{layer.gain:.2f}x" if layer.chosen is not None else "-"
        share = f"{layer.seconds / total:.0%}"
        made.add_row(cell(title(layer)), share, milliseconds(layer.seconds), gain, cell(_kernel(layer)))
    if shown:
        out.print(made)
        out.print()
    out.print(summary(result), markup=False, soft_wrap=not out.is_terminal)
    if missed := unsearched(result):
        out.print(missed, markup=False, soft_wrap=not out.is_terminal)


def unsearched(result: TuningResult) -> str:
    """Name the layers whose search did not start, most hope first. Empty if there are none."""
    from tunewright.model_tuning.layers import NO_TIME

    missed = sorted((layer for layer in result.layers if layer.skipped == NO_TIME), key=lambda layer: -layer.hope)
    more = f" and {plural(len(missed) - NAMED, 'more layer')}" if len(missed) > NAMED else ""
    names = ", ".join(safe(title(layer)) for layer in missed[:NAMED])
    return f"not begun: {names}{more}" if missed else ""


def _kernel(layer: TunedLayer) -> str:
    if layer.chosen is None:
        return outcome(layer)
    solver, config = layer.chosen
    return f"{solver} {config_text(config)}"


def summary(result: TuningResult) -> str:
    """Summarise the result in one or two sentences."""
    changed = [layer for layer in result.layers if layer.chosen is not None]
    text = _changes(result, changed) if changed else _no_change(result.layers)
    known = sum(layer.skipped == "it was tuned before" for layer in result.layers)
    text += f"; {known} tuned before" if known else ""
    late = sum(layer.skipped == "no time was left for it" for layer in result.layers)
    text += f"; no time was left to search {plural(late, 'layer')}" if late else ""
    if result.undone:
        text += f"; {plural(len(result.undone), 'change')} taken back: the whole network did not gain by that"
    return text + ("; stopped early" if result.stopped else "")


def _changes(result: TuningResult, changed: Sequence[TunedLayer]) -> str:
    """Say what changed layers gain."""
    if result.gain is None and any(layer.network for layer in changed):  # the tuning was stopped
        text = f"{plural(len(changed), 'layer')} changed, {milliseconds(result.before)} ->"
        return text + f" {milliseconds(result.after)} ms promised: whole networks were not compared"
    if result.gain is None:  # the tuning was of problems
        text = f"{len(changed)} of {plural(len(result.layers), 'problem')} have a faster kernel now"
        return text + f"; all together {milliseconds(result.before)} -> {milliseconds(result.after)} ms, each by itself"
    g = result.gain
    noise = ", within noise" if g.low < 1 < g.high else ""
    text = (
        f"{milliseconds(result.before)} -> {milliseconds(result.after)} ms, {g.median:.3f} times as fast"
        f" ({g.low:.3f} to {g.high:.3f} in {g.pairs} pairs{noise});"
        f" {plural(len(changed), 'layer')} changed, outputs differ by {result.error:.1e}"
    )
    if result.energy is not None:
        text = text.replace(" times as fast", " times less energy")
        text += f"; {result.energy[0]:.4g} -> {result.energy[1]:.4g} J"
    return text


def _no_change(layers: Sequence[TunedLayer]) -> str:
    """Say why no layer has changed."""
    from tunewright.model_tuning.expected_gain import promised

    if not any(layer.outcome is not None for layer in layers):
        return "nothing was searched"
    seeming = sum(layer.chosen is None and promised(layer) > 1 for layer in layers)
    if seeming:
        return f"nothing was changed; {plural(seeming, 'layer')} may have a faster kernel: more time would tell"
    unclear = sum(layer.outcome is not None and layer.outcome.is_open for layer in layers)
    if unclear:
        return f"nothing faster was found; {plural(unclear, 'layer')} open, because time was short"
    return "nothing is faster than what is used already"


def closing(results: Sequence[TuningResult], command: str, budget: float, weights: Sequence[float] = ()) -> list[str]:
    """Return two lines: what was gained and is left, and the command to run next.

    ``command`` continues the tuning. ``weights``: the weight of each result.
    """
    from tunewright.model_tuning.expected_gain import expected, is_left, overall

    left = [layer for result in results for layer in result.layers if is_left(layer)]
    likely = sum(expected(result.layers, [one for one in result.layers if is_left(one)]) for result in results)
    compared = all(result.gain is not None or result.after >= result.before for result in results)
    what = f"{'gained' if compared else 'promised'}: {overall(results, weights):.3f}x"
    what += f" over {len(results)} models or shapes" if len(results) > 1 else ""
    hope = sum(layer.hope for layer in left)
    if hope <= SLIGHT * sum(result.before for result in results):
        again = f"{command} --again"
        lines = ["left: nothing, every layer that counts was searched", f"next: nothing ({again} searches anew)"]
        return [f"{what}; {lines[0]}", lines[1]]
    amount = f"{milliseconds(likely)} ms expected, at most {milliseconds(hope)} ms"
    more = max(30, round(2 * budget))
    return [f"{what}; left: {plural(len(left), 'layer')}, {amount}", f"next: {command} --budget {more}s"]


def summary_json(results: Sequence[TuningResult], lines: Sequence[str]) -> dict[str, Any]:
    """Return all results for the JSON."""
    from tunewright.model_tuning.expected_gain import overall

    return {
        "schema": SCHEMA, "gain": overall(results), "summary": lines[0], "next": lines[1].removeprefix("next: "),
        "results": [_result_json(result) for result in results],
    }  # fmt: skip


def _result_json(result: TuningResult) -> dict[str, Any]:
    from tunewright.model_tuning.expected_gain import expected, is_left

    left = [layer for layer in result.layers if is_left(layer)]
    written = result.written
    return {
        "model": written.get("model"), "device": written.get("device"), "state": written.get("state"),
        "before": result.before, "after": result.after, "gain": written.get("result", {}).get("gain"),
        "energy": result.energy, "changed": sum(layer.chosen is not None for layer in result.layers),
        "left": len(left), "expected": expected(result.layers, left),
        "file": None if result.path is None else str(result.path),
    }  # fmt: skip
