"""``tunewright tune``: tunes the kernels of models, or of dumped problems, within a time budget."""

from __future__ import annotations

import enum
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunewright.errors import InputError

from ..shared.console import (
    Configs,
    DeviceName,
    Inputs,
    Preprocessing,
    Seed,
    Shapes,
    check_writable,
    console,
    given_options,
    note,
    parse_config,
    working,
)
from ..shared.interrupts import interruptible
from .workloads import Fed, InputShapes, cases_of, paths_of, weights_of, works_of

if TYPE_CHECKING:
    from tunewright.core import Core
    from tunewright.frontend.model import Model
    from tunewright.model_tuning.layers import TuningResult
    from tunewright.plugins.members import MemberDevice

#: minimum seconds for each of several devices, however long the earlier ones took
LEAST = 1.0


class Goals(enum.StrEnum):
    """What tuning improves."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"
    ENERGY = "energy"


@dataclass(frozen=True)
class TuneOptions:
    """Options of the command line."""

    budget: float
    fed: Fed
    cases: list[InputShapes]
    weights: list[str] | None
    again: bool
    objective: str
    until: str | None
    #: the command that continues the tuning
    command: str
    as_json: bool

    def is_plain(self, models: Sequence[Path]) -> bool:
        """Whether it is one model with one set of shapes, tuned for latency until the time is over."""
        return len(models) == 1 and self.cases == [InputShapes()] and self.objective == "latency" and self.until is None


def tune(
    what: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL | FOLDER | PROBLEMS...",
            show_default=False,
            help="ONNX files, folders of them, or dumps of problems (.jsonl, folders).",
        ),
    ],
    budget: Annotated[
        str, typer.Option("--budget", "-b", metavar="TIME", help="How long it may take: 90, 60s, 5m or 1h.")
    ] = "60s",
    until: Annotated[
        str | None,
        typer.Option(
            "--until",
            metavar="GOAL",
            show_default=False,
            help="End earlier: 1.2x when that is gained, stalls when searching stops paying.",
        ),
    ] = None,
    objective: Annotated[
        Goals,
        typer.Option(
            "--objective",
            metavar="WHAT",
            help="What to improve: latency, throughput (of all streams that serve) or energy.",
        ),
    ] = Goals.LATENCY,
    case: Annotated[
        list[str] | None,
        typer.Option(
            "--case",
            metavar="SHAPES:WEIGHT",
            show_default=False,
            help="Shapes to tune for, and how often they come: x=1x3x224x224:0.7, or ids=1x128,mask=1x128:0.3. "
            "Repeatable.",
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            "--batch", metavar="N:WEIGHT,...", help="Batches, and how often they come: 1:0.8,8:0.2.", show_default=False
        ),
    ] = None,
    weight: Annotated[
        list[str] | None,
        typer.Option(
            "--weight", metavar="MODEL=W", help="How much one of several models counts. Repeatable.", show_default=False
        ),
    ] = None,
    max_workspace: Annotated[
        str | None,
        typer.Option(
            "--max-workspace",
            metavar="BYTES",
            show_default=False,
            help="Leave out kernels that need more scratch memory: 64M. As TUNE_MAX_WORKSPACE.",
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy", metavar="NAME", help="How to search; the values of AUTO_TUNE_MODE.", show_default="auto"
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Also search problems with a known answer.")] = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--result", metavar="FOLDER", help="Folder of the result file; else TUNE_RESULT_PATH.", show_default="."
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
    preprocess: Preprocessing = None,
    device: DeviceName = "CPU",
    config: Configs = None,
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    from_traffic: Annotated[
        bool,
        typer.Option("--from-traffic", help="Tune for the shapes that the model met most (RECORD_TRAFFIC), by weight."),
    ] = False,
) -> None:
    """Tune models: search faster kernels for the slowest layers, check them, and keep those that speed up the network.

    The results go into the user's knowledge base, and every later load uses them. Ctrl-C ends early and loses nothing;
    the same command again continues with what is not tuned yet. Layers that several models, shapes or batches share are
    searched once, and the next search goes to the layer with the largest weighted expected gain. Dumps of problems
    (ENABLE_TUNE_DUMP) are tuned without their models. Several devices (MULTI, AUTO, BATCH) share the time. So do the
    subgraphs of HETERO, in proportion to their part of an inference.

    Example: tunewright tune model.onnx --budget 2m --report report.html

    Several: tunewright tune models/ --weight detector.onnx=3 --budget 10m

    Several batch sizes: tunewright tune model.onnx --batch 1:0.8,8:0.2 --until stalls

    For recorded shapes: tunewright tune model.onnx --from-traffic
    """
    from tunewright.core import Core
    from tunewright.tuning.offline.suggested_commands import command
    from tunewright.tuning.policy import decide

    from ..kb.open import writable
    from ..kb.traffic import cases_of_traffic
    from ..lock import lock_path
    from .report import page

    settings: dict[str, Any] = parse_config(config) | ({"AUTO_TUNE_MODE": strategy} if strategy is not None else {})
    if max_workspace is not None:
        settings["TUNE_MAX_WORKSPACE"] = parse_bytes(max_workspace)
    if folder is not None:
        check_writable(folder, folder=True)
        settings["TUNE_RESULT_PATH"] = str(folder)
    if report is not None:
        check_writable(report)
    core = Core(settings)
    decide(core.settings)  # an unknown strategy fails before the work starts
    writable(core.settings)  # tuning is useless if its results cannot be stored
    options = given_options(input, shape, preprocess, seed)
    for name, texts in (("--case", case), ("--batch", [batch] if batch else ()), ("--weight", weight)):
        options += [word for text in texts or () for word in (name, text)]
    for name, value, usual in (("--objective", str(objective), "latency"), ("--until", until, None)):
        options += [name, value] if value is not None and value != usual else []
    options += ["--from-traffic"] if from_traffic else []
    line = command("tune", *map(str, what), options=options, device=device, settings=core.settings)
    fed = Fed(input, shape, preprocess, seed)
    seconds = parse_time(budget)
    models, dumps = paths_of(what)
    if from_traffic:
        if len(models) != 1 or input or shape or case or batch:
            raise InputError("applies to one model, whose recorded shapes it uses", where="--from-traffic",
                             hint="leave out --input, --shape, --case and --batch")  # fmt: skip
        cases = cases_of_traffic(core, models[0], seconds)
    else:
        cases = cases_of(case, batch)
    wish = TuneOptions(seconds, fed, cases, weight, again, str(objective), until, line, as_json)
    if until is not None:
        from tunewright.model_tuning.several_models import Goal

        Goal.parse(until)
    of_models = {
        "--input": input, "--shape": shape, "--preprocess": preprocess, "--case": case, "--batch": batch,
        "--weight": weight, "--until": until, "--objective": objective is not Goals.LATENCY,
    }  # fmt: skip
    given = [name for name, value in of_models.items() if value]
    if dumps and given:
        hint = "a dumped problem has its own shapes, and no network around it: leave these options out"
        raise InputError("apply to models, not to dumps of problems", where=", ".join(given), hint=hint)
    if lock and dumps:
        raise InputError("applies to models, not to dumps of problems", where="--lock")
    if lock and not wish.is_plain(models):
        hint = "write the others with `tunewright lock`"
        raise InputError("applies to one model with one set of shapes", where="--lock", hint=hint)
    weights_of(weight, models)
    locks = lock_path(core, models[0]) if lock else None
    core.apart(device)  # an unknown device fails before the work starts
    results: list[TuningResult] = []
    with interruptible() as stop:
        try:
            for some in _tuned(core, models, dumps, device, wish, stop):
                results += some
        finally:  # an error on one device must not lose the results of others
            if report is not None and results:
                report.write_text(page([result.written for result in results]), encoding="utf-8")
                note(f"the report is {report}")
    if results:
        _end(results, wish)
    if locks is not None:
        _lock(core, models[0], fed, device, locks)


def _end(results: Sequence[TuningResult], wish: TuneOptions) -> None:
    """Print what was gained, what is left and what to run next."""
    from .view import closing, summary_json

    lines = closing(results, wish.command, wish.budget)
    if wish.as_json:
        sys.stdout.write(json.dumps(summary_json(results, lines), indent=2) + "\n")
        return
    out = console()
    out.print()
    for text in lines:
        out.print(text, markup=False, soft_wrap=True)


def _tuned(
    core: Core, models: Sequence[Path], dumps: Sequence[Path], device: str, wish: TuneOptions, stop: Callable[[], bool]
) -> Iterator[list[TuningResult]]:
    """Tune the models or dumps on each device in turn, and yield the results."""
    if dumps:
        alone = list({one.device: one for one in core.apart(device)}.values())
        for one, some in shares(alone, wish.budget, stop):
            yield _shown(lambda how, one=one, some=some: [  # type: ignore[misc]
                core.tune_problems(dumps, one.device, some, config=one.config, again=wish.again, **how)
            ], wish, stop)  # fmt: skip
    elif wish.is_plain(models):
        yield from _plainly(core, models[0], device, wish, stop)
    else:
        weights = weights_of(wish.weights, models)
        every = core.apart(device)
        if device.upper().startswith("HETERO"):
            hint = "tune each model separately"
            raise InputError("applies to one model with one set of shapes", where=f"--device {device}", hint=hint)
        for one, some in shares(every, wish.budget, stop):
            works = works_of(core, weights, wish.cases, wish.fed, one)
            yield _shown(lambda how, one=one, some=some, works=works: core.tune_many(  # type: ignore[misc]
                works, one.device, some, objective=wish.objective, until=wish.until, config=one.config,
                again=wish.again, command=wish.command, **how,
            ), wish, stop)  # fmt: skip


def _plainly(
    core: Core, model: Path, device: str, wish: TuneOptions, stop: Callable[[], bool]
) -> Iterator[list[TuningResult]]:  # fmt: skip
    """Tune one model on one device, on several, or on HETERO's subgraphs."""
    from tunewright.tuning.offline.suggested_commands import command

    from ..shared.inputs import concrete, load

    fed = wish.fed
    feed = load(core, model, fed.input, fed.shape, fed.preprocess, fed.seed)
    loaded, values = concrete(feed), feed.values
    with working("compiling"):
        every = core.apart(device, model=loaded, inputs=values)
    for one, some in shares(worthwhile(every), wish.budget, stop):
        yield _shown(lambda how, one=one, some=some: [core.tune(  # type: ignore[misc]
            one.model(loaded), one.inputs(values), one.device, some, config=one.config, again=wish.again,
            command=wish.command, **how,
        )], wish, stop)  # fmt: skip
    if is_moved(core, device, loaded, every):
        place = command("place", str(model), device=device, options=given_options(fed.input, fed.shape),
                        settings=core.settings)  # fmt: skip
        note(f"with the new costs HETERO places nodes differently: tune once more, or fix the placement (`{place}`)")


def _shown(
    tuning: Callable[[dict[str, Any]], list[TuningResult]], wish: TuneOptions, stop: Callable[[], bool]
) -> list[TuningResult]:  # fmt: skip
    """Tune with a progress display, and print the results."""
    from .view import progress, show

    with progress() as tell:
        results = tuning({"report": tell, "stop": stop})
    for result in results if not wish.as_json else ():
        if len(results) > 1:
            title = str(result.written.get("model", ""))
            console().print(f"\n{title}", style="bold", markup=False, soft_wrap=True)
        show(result)
    return results


def _lock(core: Core, model: Path, fed: Fed, device: str, path: Path) -> None:
    from ..lock import write_lock
    from ..shared.inputs import concrete, load

    feed = load(core, model, fed.input, fed.shape, fed.preprocess, fed.seed)
    write_lock(core, concrete(feed), feed.values, device, path)


def worthwhile(devices: Sequence[MemberDevice]) -> list[MemberDevice]:
    """Return the devices or subgraphs that tuning can improve, most expensive first. Notes name the others."""
    from tunewright.model_tuning.model import TAIL

    total = sum(one.section.seconds for one in devices if one.section is not None)
    found = []
    for one in devices:
        if one.section is not None and one.section.is_reference:
            note(f"{one}: it runs reference operations, which cannot be tuned")
        elif one.section is not None and one.section.seconds < TAIL * total:
            note(f"{one}: skipped, it takes {one.section.seconds / total:.1%} of an inference")
        else:
            found.append(one)
    return sorted(found, key=lambda one: 0.0 if one.section is None else -one.section.seconds)


def is_moved(core: Core, device: str, model: Model, tuned: Sequence[MemberDevice]) -> bool:
    """Whether HETERO would now place nodes differently than in the tuned subgraphs, because costs are known."""
    from tunewright.plugins.members import placement

    parts = [(one.device, one.section.model.graph.nodes) for one in tuned if one.section is not None]
    before = {node.name: name for name, nodes in parts for node in nodes}
    return bool(before) and placement(device, core.settings, model) != before


def shares(
    devices: Sequence[MemberDevice], seconds: float, stop: Callable[[], bool]
) -> Iterator[tuple[MemberDevice, float]]:
    """Yield the devices one after the other, each with its share of the remaining time.

    Prints the name of each if there are several. Subgraphs get shares in proportion to their time in an inference;
    whole models get equal shares.
    """
    end = time.monotonic() + seconds
    weights = [1.0 if one.section is None else one.section.seconds for one in devices]
    for number, one in enumerate(devices):
        if number and stop():
            note(f"stopped before {', '.join(map(str, devices[number:]))}")
            return
        left = seconds if not number else max(LEAST, end - time.monotonic())
        share = left * weights[number] / sum(weights[number:])
        if len(devices) > 1:
            console().print("\n" * bool(number) + f"{one}, {share:.0f} s", style="bold",
                            markup=False, soft_wrap=True)  # fmt: skip
        yield one, share


def parse_time(text: str, where: str = "--budget") -> float:
    """Parse 90, 60s, 5m or 1.5h into seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip().lower())
    if found is None or not float(found[1]):
        raise InputError(f"{text!r} is not a time", where=where, hint="90, 60s, 5m or 1h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def parse_bytes(text: str, where: str = "--max-workspace") -> int:
    """Parse 4096, 64k, 64M or 1.5G into bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if found is None or not float(found[1]):
        raise InputError(f"{text!r} is not a size", where=where, hint="4096, 64k, 64M or 1G")
    return int(float(found[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}[found[2]])


COMMANDS = (tune,)
