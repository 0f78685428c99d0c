"""``tunewright place``: shows which node runs on which device of HETERO, measures placements, and saves them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .shared.console import (
    Configs,
    Inputs,
    ModelFile,
    Preprocessing,
    Seed,
    Shapes,
    cell,
    check_writable,
    console,
    milliseconds,
    parse_config,
    size,
    table,
    working,
)

if TYPE_CHECKING:
    from ..plugins.placement.measure import Measured
    from ..runtime.several.hetero import HeteroModel


def place(
    model: ModelFile,
    device: Annotated[str, typer.Option("--device", "-d", metavar="NAMES", help="The devices, as in HETERO:GPU,CPU.")],
    measure: Annotated[
        float | None,
        typer.Option(
            "--measure",
            "-m",
            min=0.0,
            metavar="SECONDS",
            show_default=False,
            help="Compare placements for this time, and keep the fastest for later loads.",
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save",
            "-o",
            metavar="FILE",
            show_default=False,
            help="Write the device of each node (.json or .csv), to be edited and given as HETERO_AFFINITY.",
        ),
    ] = None,
    input: Inputs = None,
    shape: Shapes = None,
    preprocess: Preprocessing = None,
    config: Configs = None,
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show where HETERO runs the nodes of a model: its subgraphs, and how they were placed.

    Example: tunewright place model.onnx -d HETERO:GPU,CPU --measure 10

    By hand: tunewright place model.onnx -d HETERO:GPU,CPU --save nodes.json; then edit it, and tunewright run
    model.onnx -d HETERO:GPU,CPU -c HETERO_AFFINITY=nodes.json
    """
    from ..core import Core
    from ..errors import DeviceError
    from ..plugins.find import find
    from ..plugins.hetero import Hetero
    from ..plugins.placement import affinity
    from ..runtime.several.hetero import HeteroModel
    from .shared.inputs import concrete, load

    core = Core(parse_config(config))
    if not isinstance(find(device, core.settings), Hetero):
        hint = "name several devices: HETERO:GPU,CPU"
        raise DeviceError(f"{device} is not a HETERO device, so there are no nodes to place", hint=hint)
    if save is not None:
        check_writable(save)
    feed = load(core, model, input, shape, preprocess, seed)
    loaded = concrete(feed)
    measured = None
    if measure is not None:
        with working("measuring", patience=0.0):
            measured = core.place_model(loaded, feed.values, device, measure)
    with working("compiling"):
        compiled = core.compile_model(loaded, device)
    assert isinstance(compiled, HeteroModel)
    if save is not None:
        affinity.write(save, compiled.affinity)
    if as_json:
        sys.stdout.write(json.dumps(_report(compiled, measured), indent=2) + "\n")
        return
    _show(compiled, measured)
    if save is not None:
        console().print(f"the device of each node: {save}", markup=False, soft_wrap=True)


def _report(compiled: HeteroModel, measured: Measured | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "device": compiled.device_name,
        "placement": compiled.origin,
        "subgraphs": [
            {"device": s.device, "nodes": list(s.nodes), "inputs": list(s.inputs), "outputs": list(s.outputs),
             "after": list(s.before)}
            for s in compiled.subgraphs
        ],
    }  # fmt: skip
    if measured is not None:
        found["measured"] = [
            {"placement": c.name, "subgraphs": c.subgraphs, "ms": None if c.seconds is None else c.seconds * 1e3,
             "why_not": c.why}
            for c in measured.candidates
        ]  # fmt: skip
        found["kept"], found["file"] = measured.best.name, str(measured.path)
    return found


def _show(compiled: HeteroModel, measured: Measured | None) -> None:
    out = console()
    if measured is not None:
        made = table("placement", ">subgraphs", ">ms", "")
        for c in measured.candidates:
            spent = "-" if c.seconds is None else milliseconds(c.seconds)
            remark = c.why or ("kept" if c is measured.best else "")
            made.add_row(cell(c.name), str(c.subgraphs or "-"), spent, cell(remark))
        out.print(made)
        out.print()
    made = table(">subgraph", "device", ">nodes", "after", ">handed over")
    for k, subgraph in enumerate(compiled.subgraphs):
        others = {name for j, s in enumerate(compiled.subgraphs) if j != k for name in s.inputs}
        types = [t for name, t in subgraph.model.outputs.items() if name in others]
        known = [t.nbytes for t in types if t is not None and t.is_static and hasattr(t, "nbytes")]
        handed = size(sum(known)) + ("" if len(known) == len(types) else " or more") if types else "-"
        after = ", ".join(map(str, subgraph.before)) or "-"
        made.add_row(str(k), cell(subgraph.device), str(len(subgraph.nodes)), after, handed)
    out.print(made)
    how = "side by side" if len(compiled.lanes) > 1 else "one after the other"
    count = len(compiled.subgraphs)
    parts = f"{count} subgraphs, {how}" if count != 1 else "1 subgraph"
    out.print(f"\n{parts}; placed by {compiled.origin}", markup=False, soft_wrap=True)


COMMANDS = (place,)
