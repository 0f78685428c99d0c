"""``tunewright tune``: the kernels of a model, or of dumped problems, tuned within a time."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError
from .common import (
    Configs,
    DeviceName,
    Inputs,
    Preprocessing,
    Seed,
    Shapes,
    check_writable,
    console,
    note,
    parse_config,
    working,
)
from .interrupts import interruptible

if TYPE_CHECKING:
    from ..core import Core
    from ..frontend.model import Model
    from ..plugins.apart import Apart
    from ..plugins.tune import Result

#: seconds that every device of several has, however long those before it took
LEAST = 1.0


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
    preprocess: Preprocessing = None,
    device: DeviceName = "CPU",
    config: Configs = None,
    seed: Seed = 0,
    from_traffic: Annotated[
        bool,
        typer.Option("--from-traffic", help="Tune for the shapes that the model met most (RECORD_TRAFFIC), by weight."),
    ] = False,
) -> list[Any]:
    """Tune a model: search better kernels where its time goes, check them, and keep what is faster in the network.

    What is found is in the user's knowledge base, and every later load uses it. Ctrl-C ends early and loses nothing;
    the same command again goes on with what is not tuned yet. Dumps of problems (ENABLE_TUNE_DUMP) are tuned without
    their models. Several devices (MULTI, AUTO, BATCH) share the time, and so do the subgraphs of HETERO, each by what
    it takes of an inference.

    Example: tunewright tune model.onnx --budget 2m --report report.html

    For the shapes that it serves: tunewright tune model.onnx --from-traffic
    """
    from ..core import Core
    from ..tuning.policy import decide
    from .inputs import concrete, load
    from .kb_open import writable
    from .kb_traffic import parts
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
    decide(core.settings)  # a strategy that there is not is told before the work
    writable(core.settings)  # there is nothing else that tuning is for
    model = which_model(what)
    if from_traffic:
        if model is None or shape or input:
            raise InputError("is for a model, whose shapes it says", where="--from-traffic",
                             hint="leave out --shape and --input")  # fmt: skip
        if report is not None:
            raise InputError("is of one shape", where="--report", hint="`tunewright report` joins several results")
        found: list[Result] = []
        for shapes, some in parts(core, model, seconds):
            console().print(f"{' '.join(shapes)}, {some:.0f} s", style="bold", markup=False, soft_wrap=True)
            found += tune(what, f"{some:.3f}", strategy, again, folder, None, lock, None, shapes, preprocess, device,
                          config, seed)  # fmt: skip
            if found and found[-1].stopped:
                break
        return found
    if lock and model is None:
        raise InputError("is for models, not for dumps of problems", where="--lock")
    locks = lock_path(core, model) if lock and model is not None else None
    devices = core.apart(device)  # a wrong name fails before the work
    if model is None and (input or shape or preprocess):
        raise InputError("belong to a model", where="--input, --shape, --preprocess", hint="a problem has its shapes")
    if model is None:
        devices = list({one.device: one for one in devices}.values())
        loaded, values, every = None, {}, []
    else:
        feed = load(core, model, input, shape, preprocess, seed)
        loaded, values = concrete(feed), feed.values
        with working("compiling"):
            every = core.apart(device, model=loaded, inputs=values)
        devices = worthwhile(every)

    def tuned(one: Apart, some: float) -> Result:
        with progress() as tell:
            how: dict[str, Any] = {"config": one.config, "again": again, "report": tell, "stop": stop}
            if loaded is None:
                return core.tune_problems(what, one.device, some, **how)
            return core.tune(one.model(loaded), one.inputs(values), one.device, some, **how)

    results: list[Result] = []
    with interruptible() as stop:
        try:
            for one, some in shares(devices, seconds, stop):
                results.append(tuned(one, some))
                show(results[-1])
        finally:  # what was done for some devices is not lost by another's error
            if report is not None and results:
                report.write_text(page([result.written for result in results]), encoding="utf-8")
                note(f"the report is {report}")
    if loaded is not None and results and is_moved(core, device, loaded, every):
        note("what is known now places nodes otherwise: tune once more, or keep one placement (tunewright place)")
    if locks is not None and loaded is not None:
        write_lock(core, loaded, values, device, locks)
    return results


def worthwhile(devices: Sequence[Apart]) -> list[Apart]:
    """Those that tuning can do something for, the dearest subgraphs first; the others are noted."""
    from ..plugins.tune import TAIL

    total = sum(one.section.seconds for one in devices if one.section is not None)
    found = []
    for one in devices:
        if one.section is not None and one.section.is_reference:
            note(f"{one}: nothing can be chosen there")
        elif one.section is not None and one.section.seconds < TAIL * total:
            note(f"{one}: passed over, it takes {one.section.seconds / total:.1%} of an inference")
        else:
            found.append(one)
    return sorted(found, key=lambda one: 0.0 if one.section is None else -one.section.seconds)


def is_moved(core: Core, device: str, model: Model, tuned: Sequence[Apart]) -> bool:
    """HETERO would place nodes otherwise than in the subgraphs that were tuned: costs are known now."""
    from ..plugins.apart import placement

    parts = [(one.device, one.section.model.graph.nodes) for one in tuned if one.section is not None]
    before = {node.name: name for name, nodes in parts for node in nodes}
    return bool(before) and placement(device, core.settings, model) != before


def shares(devices: Sequence[Apart], seconds: float, stop: Callable[[], bool]) -> Iterator[tuple[Apart, float]]:
    """The devices one after the other, each with its part of the time that is left; of several each is named.

    Subgraphs have their parts by what they take of an inference, whole models the same.
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


def parse_time(text: str, where: str = "--budget") -> float:
    """Seconds of 90, 60s, 5m or 1.5h."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip().lower())
    if found is None or not float(found[1]):
        raise InputError(f"{text!r} is not a time", where=where, hint="90, 60s, 5m or 1h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


COMMANDS = (tune,)
