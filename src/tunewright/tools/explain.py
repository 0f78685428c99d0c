"""``tunewright explain``: shows why every layer of a model runs its kernel."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError
from .benchmark.report import write_json
from .shared.console import (
    Configs,
    DeviceName,
    Frozen,
    Inputs,
    ModelFile,
    Preprocessing,
    Seed,
    Shapes,
    check_writable,
    console,
    environment,
    given_options,
    note,
    parse_config,
    working,
)

if TYPE_CHECKING:
    from ..plugins.members import CompiledPart
    from ..runtime.insight.explain import Explanation
    from ..runtime.requests.compiled import CompiledModel
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
            help="Everything about the layers with this name, or that match a pattern such as 'conv_*'; also the "
            "name of a node that was fused into one. Repeatable.",
            show_default=False,
        ),
    ] = None,
    input: Inputs = None,
    shape: Shapes = None,
    preprocess: Preprocessing = None,
    seconds: Annotated[
        float, typer.Option("--time", "-t", min=0.0, metavar="SECONDS", help="Time the layers for this time.")
    ] = 1.0,
    count: Annotated[
        int | None,
        typer.Option("--count", "-n", min=1, metavar="N", help="Or over N inferences.", show_default=False),
    ] = None,
    no_time: Annotated[bool, typer.Option("--no-time", help="Do not time the layers: run one inference.")] = False,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write everything as JSON; - is stdout.", show_default=False),
    ] = None,
    device: DeviceName = "CPU",
    frozen: Frozen = False,
    config: Configs = None,
    seed: Seed = 0,
) -> None:
    """Per layer of a model: its kernel, the origin of that choice, and how near the kernel is to the roofline.

    With --layer also the evidence, the runner-up, the answer of every other solver, and the nearest stored record.
    Several devices are explained one by one, and HETERO per subgraph. Nothing is tuned or deleted, whatever the
    settings say.

    Example: tunewright explain model.onnx --layer 'conv_*'
    """
    from ..core import Core
    from ..plugins.find import find
    from ..runtime.insight.explain import explain as explain_compiled
    from ..tuning.offline.suggested_commands import command
    from .explain_view import show_layers, show_requests, show_table, summary
    from .shared.inputs import concrete, load

    settings = parse_config(config, frozen)
    core = Core(settings)
    core.settings, aside = looking(core.settings)
    if aside:
        note(aside)
    find(device, core.settings)  # an unknown device fails before the work starts
    if json_file not in (None, "-"):
        check_writable(Path(json_file))
    feed = load(core, model, input, shape, preprocess, seed)
    found: list[tuple[CompiledPart, list[Explanation]]] = []
    with working("compiling, and timing the layers"):
        for piece in core.pieces(concrete(feed), feed.values, device):
            times = 0 if no_time else count
            found.append((piece, explain_compiled(piece.compiled, piece.inputs, seconds=seconds, count=times)))
    wanted = [each for _, layers in found for each in layers]
    if layer:
        wanted = selected(wanted, layer, {name for piece, _ in found for name, _ in piece.compiled.nodes})
    again = command(
        "tune", str(model), options=given_options(input, shape, preprocess, seed), device=device,
        settings=core.settings,
    )  # fmt: skip
    parts: list[dict[str, Any]] = []
    shown = 0
    for piece, layers in found:
        about, some = summary(layers), [each for each in layers if any(each is other for other in wanted)]
        parts.append({
            **({"part": piece.title} if piece.title else {}),
            "inputs": {name: str(type) for name, type in piece.compiled.inputs.items()},
            **about.to_json(),
            **({} if piece.served is None else served_json(piece.served)),
            "layers": [each.to_json() for each in some],
        })  # fmt: skip
        if json_file == "-" or (layer and not some):
            continue
        if shown:
            console().print()
        shown += 1
        part = f", {piece.title}" if piece.title else ""
        target = piece.compiled.env.device.target
        title = f"{model} on {device}{part}: {target.name} ({target.arch})"
        if layer and piece.title:
            console().print(title, style="bold", markup=False, soft_wrap=True)
        show_layers(some, about) if layer else show_table(layers, about, title, again)
        if piece.served is not None:
            show_requests(piece.served)
    if json_file is not None:
        head = {"schema": SCHEMA, "model": str(model), "device": device, "config": settings, "tune": again}
        several = {"parts": parts} if found[0][0].title else parts[0]
        write_json({**head, **several, "environment": environment()}, json_file)


def served_json(served: CompiledModel) -> dict[str, Any]:
    """Return how requests are served, for the JSON."""
    return {
        "streams": served.streams.count,
        "requests": served.optimal_requests,
        "auto_batch": served.size,
        "streams_origin": served.streams_origin,
    }


def looking(settings: Settings) -> tuple[Settings, str]:
    """Return the settings without those that tune or delete, and a note if that changes something."""
    creates, enforces = settings.tuning_mode == "TUNING_CREATE", settings.find_enforce != "1"
    if not creates and not enforces:
        return settings, ""
    changes: dict[str, Any] = {"find_enforce": "1"}
    if creates:
        changes["tuning_mode"] = "TUNING_USE_EXISTING"
        if settings.tuning_file and not Path(settings.tuning_file).exists():  # tuning would create it
            changes["tuning_file"] = ""
    named = ["TUNING_MODE TUNING_CREATE"] * creates + [f"FIND_ENFORCE {settings.find_enforce}"] * enforces
    return replace(settings, **changes), f"nothing is tuned or deleted here, in spite of {' and '.join(named)}"


def selected(layers: Sequence[Explanation], patterns: Sequence[str], nodes: set[str]) -> list[Explanation]:
    """Return the layers that are named, in order. Raises InputError for a name that matches none."""
    names = [{each.name, *each.nodes} for each in layers]
    found: set[int] = set()
    for pattern in patterns:
        fits = [i for i, known in enumerate(names) if pattern in known]
        fits = fits or [i for i, known in enumerate(names) if any(fnmatchcase(name, pattern) for name in known)]
        if not fits and pattern in nodes:
            raise InputError(
                "was folded or dropped at compile time, so no layer runs it",
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
