"""``tunewright explain``: why every layer of a model runs as it does."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError
from .benchmark_report import write_json
from .common import (
    Configs,
    DeviceName,
    Frozen,
    Inputs,
    ModelFile,
    Seed,
    Shapes,
    check_writable,
    environment,
    note,
    parse_config,
    working,
)

if TYPE_CHECKING:
    from ..runtime.explain import Explanation
    from ..settings import Settings

SCHEMA = "tunewright.explain/1"


def explain(
    model: ModelFile,
    layer: Annotated[
        list[str] | None,
        typer.Option(
            "--layer",
            "-l",
            metavar="NAME",
            help="Everything about the layers of this name, or those that a pattern such as 'conv_*' fits; also the "
            "name of a node that was fused into one. Repeatable.",
            show_default=False,
        ),
    ] = None,
    input: Inputs = None,
    shape: Shapes = None,
    seconds: Annotated[
        float, typer.Option("--time", "-t", min=0.0, metavar="SECONDS", help="Time the layers for so long.")
    ] = 1.0,
    count: Annotated[
        int | None,
        typer.Option("--count", "-n", min=1, metavar="N", help="Or over so many inferences.", show_default=False),
    ] = None,
    no_time: Annotated[bool, typer.Option("--no-time", help="Do not time the layers: one inference is run.")] = False,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write it all as JSON; - is stdout.", show_default=False),
    ] = None,
    device: DeviceName = "CPU",
    frozen: Frozen = False,
    config: Configs = None,
    seed: Seed = 0,
) -> None:
    """Per layer of a model: the kernel that runs it, where that choice comes from, and how near it is to the roofline.

    With --layer also the evidence, the runner-up, what every other solver said, and the nearest stored answer. Nothing
    is tuned or deleted, whatever the settings say.

    Example: tunewright explain model.onnx --layer 'conv_*'
    """
    from ..core import Core
    from ..plugins.single import open_device
    from ..runtime.explain import explain as explain_compiled
    from ..runtime.request import of_one_device
    from .explain_view import show_layers, show_table, summary
    from .inputs import concrete, make_feed

    settings = parse_config(config, frozen)
    core = Core(settings)
    core.settings, aside = looking(core.settings)
    if aside:
        note(aside)
    open_device(device)  # a wrong name fails before the work
    if json_file not in (None, "-"):
        check_writable(Path(json_file))
    with working("compiling"):
        loaded = core.read_model(model)
        feed = make_feed(loaded, input, shape, seed, core.settings)
        for text in feed.notes:
            note(text)
        compiled = of_one_device(core.compile_model(concrete(feed), device))
    with working("timing the layers"):
        layers = explain_compiled(compiled, feed.values, seconds=seconds, count=0 if no_time else count)
    wanted = selected(layers, layer, {name for name, _ in compiled.nodes}) if layer else layers
    about = summary(layers)
    if json_file != "-":
        title = f"{model} on {device}: {compiled.env.device.target.name}"
        show_layers(wanted, about) if layer else show_table(layers, about, title)
    if json_file is not None:
        report: dict[str, Any] = {
            "schema": SCHEMA,
            "model": str(model),
            "device": device,
            "config": settings,
            "inputs": {name: str(type) for name, type in compiled.inputs.items()},
            **about.to_json(),
            "layers": [each.to_json() for each in wanted],
            "environment": environment(),
        }
        write_json(report, json_file)


def looking(settings: Settings) -> tuple[Settings, str]:
    """The settings without what would tune or delete, and a note where that changes something."""
    creates, enforces = settings.tuning_mode == "TUNING_CREATE", settings.find_enforce != "1"
    if not creates and not enforces:
        return settings, ""
    changes: dict[str, Any] = {"find_enforce": "1"}
    if creates:
        changes["tuning_mode"] = "TUNING_USE_EXISTING"
        if settings.tuning_file and not Path(settings.tuning_file).exists():  # tuning would make it
            changes["tuning_file"] = ""
    named = ["TUNING_MODE TUNING_CREATE"] * creates + [f"FIND_ENFORCE {settings.find_enforce}"] * enforces
    return replace(settings, **changes), f"nothing is tuned or deleted here, in spite of {' and '.join(named)}"


def selected(layers: Sequence[Explanation], patterns: Sequence[str], nodes: set[str]) -> list[Explanation]:
    """The layers that are named, in order; InputError for a name that fits none."""
    names = [{each.name, *each.nodes} for each in layers]
    found: set[int] = set()
    for pattern in patterns:
        fits = [i for i, known in enumerate(names) if pattern in known]
        fits = fits or [i for i, known in enumerate(names) if any(fnmatchcase(name, pattern) for name in known)]
        if not fits and pattern in nodes:
            raise InputError(
                "was computed or dropped before the model runs: no layer stands for it",
                where=f"node {pattern!r}",
                hint="`tunewright graph MODEL --why` says what became of it",
            )
        if not fits:
            every = sorted({name for known in names for name in known})
            close = difflib.get_close_matches(pattern, every, n=3, cutoff=0.4)
            some = ", ".join(every[:5]) + (", ..." if every[5:] else "")
            hint = f"did you mean {', '.join(close)}?" if close else f"the layers are {some}"
            raise InputError("there is no such layer", where=f"--layer {pattern}", hint=hint)
        found.update(fits)
    return [layers[i] for i in sorted(found)]


COMMANDS = (explain,)
