"""``tunewright query``: shows which solver would run each node on a device, or why none can."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated

import typer

from .kb.view import plural
from .shared.console import Configs, DeviceName, ModelFile, Preprocessing, cell, console, parse_config, table, working


def query(
    model: ModelFile,
    device: DeviceName = "CPU",
    preprocess: Preprocessing = None,
    config: Configs = None,
    reasons: Annotated[bool, typer.Option("--why", help="Also print the answers of the other solvers.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Per node of a model: the solver that would run it on a device, or why there is none.

    Exits with 1 when a node cannot run. Nodes are those of the file: compiling may fold, fuse or drop them first.

    Example: tunewright query model.onnx --device CPU --config HOST_FALLBACK=NO --why
    """
    from ..core import Core
    from .shared.inputs import coming

    core = Core(parse_config(config))
    with working("reading the model"):
        loaded = coming(core.read_model(model), preprocess)
        answers = core.query_model(loaded, device)
        choice = core.query_requests(loaded, device)
    ops = {node.name: node.op for graph in loaded.graph.walk() for node in graph.nodes}
    missing = [name for name, support in answers.items() if not support]
    if as_json:
        rows = [{"node": name, "op": ops[name], **dataclasses.asdict(answer)} for name, answer in answers.items()]
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        raise typer.Exit(1 if missing else 0)
    several = any(support.device for support in answers.values())
    columns = ["node", "op", *(["device"] if several else []), "solver", *(["why not the others"] if reasons else [])]
    rows_table = table(*columns)
    for name, support in answers.items():
        why = "; ".join(f"{k}: {v}" for k, v in support.rejected.items())
        solver = "none" if not support else f"{support.solver} (host)" if support.on_host else str(support.solver)
        if not support and not reasons:
            solver = f"none: {why}"
        where = [cell(support.device)] if several else []
        rows_table.add_row(cell(name), cell(ops[name]), *where, cell(solver), *([cell(why)] if reasons else []))
    out = console()
    out.print(rows_table)
    host = sum(s.on_host for s in answers.values())
    devices = [support.device or device for support in answers.values() if support and not support.on_host]
    counts = ", ".join(f"{devices.count(name)} on {name}" for name in dict.fromkeys(devices or [device]))
    out.print(f"\n{len(answers)} nodes: {counts}, {host} on the host, {len(missing)} without a solver")
    if choice is not None:
        together = f", {choice.batch} of them together" if choice.batch > 1 else ""
        how = f"{plural(choice.requests, 'request')} on {plural(choice.streams, 'stream')}{together}"
        out.print(f"served with {how}: {choice.why}", markup=False, soft_wrap=True)
    raise typer.Exit(1 if missing else 0)


COMMANDS = (query,)
