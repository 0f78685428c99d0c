"""``tunewright graph``: shows a model as read, after the passes, or as executed."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import DeviceError, InputError
from .shared.console import (
    Configs,
    Inputs,
    ModelFile,
    OneDevice,
    Preprocessing,
    Seed,
    Shapes,
    cell,
    check_writable,
    console,
    note,
    parse_config,
    table,
    working,
)

if TYPE_CHECKING:
    from ..core import Core
    from ..ir.graph import Graph, Node, Value
    from ..passes.base import Log
    from ..runtime.plans.plan import Plan, Step


class Format(enum.StrEnum):
    TEXT = "text"
    DOT = "dot"
    ONNX = "onnx"


class GraphStage(enum.StrEnum):
    READ = "read"
    OPTIMIZED = "optimized"
    EXECUTED = "executed"


def graph(
    model: ModelFile,
    stage: Annotated[GraphStage, typer.Option("--stage", help="Which graph.")] = GraphStage.OPTIMIZED,
    format: Annotated[
        Format | None,
        typer.Option("--format", "-f", help="How to write it.", show_default="by FILE's ending, else text"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to a file.", show_default=False)
    ] = None,
    why: Annotated[bool, typer.Option("--why", help="Print what each rewrite did or refused, and the reason.")] = False,
    input: Inputs = None,
    shape: Shapes = None,
    preprocess: Preprocessing = None,
    device: OneDevice = "CPU",
    config: Configs = None,
    seed: Seed = 0,
) -> None:
    """Show a model's graph: as text, for Graphviz, or as an ONNX file for Netron.

    The executed graph names the kernel of every step, the origin of that choice, and the model's nodes that the step
    implements. If sizes are open, it also shows shapes as formulas, and the conditions under which the plan holds.

    Example: tunewright graph model.onnx --stage executed -o executed.onnx
    """
    from ..core import Core
    from ..ir.graph_text import to_dot, to_text
    from .shared.inputs import coming

    chosen = format or _by_suffix(output)
    if chosen is Format.ONNX and output is None and not why:
        raise InputError(
            "an ONNX file cannot be printed on a terminal", where="--format onnx", hint="name a file: -o graph.onnx"
        )
    if output is not None:
        check_writable(output)
    core = Core(parse_config(config))
    device = _only(core, device)
    notes: dict[Node, str] = {}
    about: dict[Node, dict[str, str]] = {}
    holds: list[str] = []
    with working("compiling"):
        loaded = coming(core.read_model(model), preprocess)
        shown, log = loaded.graph, None
        if stage is GraphStage.EXECUTED:
            from ..runtime.requests.request import of_one_device
            from .shared.inputs import make_feed

            feed = make_feed(loaded, input, shape, seed, core.settings)
            for text in feed.notes:
                note(text)
            compiled = of_one_device(core.compile_model(feed.model, device))
            # an inference makes the plans: for a class of shapes, and after data-dependent shapes
            compiled(feed.values)
            plan = compiled.program.plans[-1]
            shown, steps = executed_graph(plan, compiled.graph.inputs)
            shown.output_names = list(compiled.graph.output_names)
            log = compiled.env.context.log
            about = {node: describe_step(step) | describe_sizes(plan, step) for node, step in steps.items()}
            holds = [] if plan.template is None else plan.template.trace.guard_texts()
            notes = {node: ", ".join(texts.values()) for node, texts in about.items()}
        elif stage is GraphStage.OPTIMIZED or why:
            from ..runtime.requests.request import of_one_device
            from .shared.inputs import parse_shapes

            wanted, _ = parse_shapes(loaded, shape or ())
            compiled = of_one_device(core.compile_model(loaded.reshape(wanted) if wanted else loaded, device))
            shown = compiled.graph if stage is GraphStage.OPTIMIZED else shown
            log = compiled.env.context.log
    if why and log is not None:
        explain(log)
        if output is None:
            return
    if chosen is Format.ONNX:
        from ..frontend.export import to_model

        data = to_model(shown, about, loaded.name, loaded.declared).SerializeToString()
    else:
        text = to_dot(shown, notes.get) if chosen is Format.DOT else to_text(shown, note=notes.get)
        data = "\n".join([text, *(f"# holds where {guard}" for guard in holds), ""]).encode()
    if output is None:
        sys.stdout.write(data.decode())
        return
    try:
        output.write_bytes(data)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", where=str(output)) from None
    console().print(cell(f"{stage} graph, {len(shown)} nodes, in {output}"), soft_wrap=True)


def _only(core: Core, device: str) -> str:
    """Return the single device that a device string stands for. Raises DeviceError if it stands for several."""
    names = list(dict.fromkeys(one.device for one in core.apart(device)))
    if len(names) > 1:
        hint = f"name one of {', '.join(names)}"
        raise DeviceError(f"{device} stands for several devices, and a graph is that of one", hint=hint)
    return names[0]


def _by_suffix(output: Path | None) -> Format:
    endings = {"": Format.TEXT, ".txt": Format.TEXT, ".onnx": Format.ONNX, ".dot": Format.DOT, ".gv": Format.DOT}
    suffix = output.suffix.lower() if output is not None else ""
    if suffix not in endings:
        hint = "end it with .txt, .dot or .onnx, or choose with --format; Graphviz draws: dot -Tsvg graph.dot"
        raise InputError(f"{suffix} is not the suffix of a known format", where=f"--output {output}", hint=hint)
    return endings[suffix]


def explain(log: Log) -> None:
    """Print the log of the rewrites: how often each rule was applied, then each refusal with its reason."""
    from rich.padding import Padding

    out = console()
    decisions: dict[tuple[str, str], list[str]] = {}
    for entry in log.entries:
        decisions.setdefault((entry.rule, entry.reason), []).append(entry.node)
    applied = sorted((rule, nodes) for (rule, reason), nodes in decisions.items() if not reason)
    refused = [(rule, reason, nodes) for (rule, reason), nodes in decisions.items() if reason]
    if applied:
        made = table("applied", ">times", "to")
        for rule, nodes in applied:
            made.add_row(cell(rule), str(len(nodes)), cell(_some(nodes)))
        out.print(made)
    else:
        out.print("no rewrite was applied")
    if refused:
        out.print()
        out.print("refused", style="bold")
    for rule, reason, nodes in refused:
        out.print(cell(f"{rule} at {_some(nodes)}"))
        out.print(Padding(cell(reason), (0, 0, 0, 4)))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def executed_graph(plan: Plan, inputs: Sequence[Value]) -> tuple[Graph, dict[Node, Step]]:
    """Return one graph with a node per step of a plan and of its later segments, and the step of each node.

    The first inference plans the segments after data-dependent shapes, so one must have run before.
    """
    from ..ir.graph import Graph

    graph = Graph("executed")
    steps: dict[Node, Step] = {}

    def collect(plan: Plan, given: Sequence[Value]) -> list[Value]:
        values = dict(zip(plan.inputs, given, strict=True))
        for i, one in enumerate(plan.slots):
            if one.const is not None:
                source = one.const if one.packed is None else one.packed.source
                assert source is not None, "the weights were freed when they were packed: compile a `Model`"
                values[i] = graph.constant(source, one.name)
        for step in plan.steps:
            ins = [None if i < 0 else values[i] for i in step.ins]
            node = graph.add_copy(step.node, ins, [plan.slots[i].type for i in step.outs])
            steps[node] = step
            for i, value in zip(step.outs, node.outputs, strict=True):
                values[i] = value
        rest: list[Value] = []
        if plan.rest is not None:
            planned = plan.rest.plans
            if not planned:
                raise InputError(
                    "the plan after data-dependent shapes does not exist yet", hint="run the model once before"
                )
            rest = collect(planned[-1], [values[i] for i in plan.rest_inputs])
        return [values[i] if kind == "slot" else rest[i] for kind, i in plan.outputs]

    given = [graph.add_input(v.name, t) for v, t in zip(inputs, plan.types, strict=True)]
    for value in collect(plan, given):
        graph.add_output(value)
    return graph, steps


def describe_sizes(plan: Plan, step: Step) -> dict[str, str]:
    """Return the shape of the first result as a formula, if the plan is for a class of shapes."""
    texts = {} if plan.template is None else plan.template.texts
    return {"shape": texts[step.outs[0]]} if step.outs and step.outs[0] in texts else {}


def describe_step(step: Step) -> dict[str, str]:
    """Describe the kernel, config and origin of a step."""
    if step.optimized_out:
        return {"kernel": "optimized out"}
    if step.kernel is None:
        return {"kernel": "control flow"}
    if step.choice is None:
        return {"kernel": step.kernel.name}
    about = {"kernel": step.kernel.name, "origin": step.choice.why}
    if step.choice.config:
        about["config"] = json.dumps(dict(step.choice.config), sort_keys=True)
    return about


COMMANDS = (graph,)
