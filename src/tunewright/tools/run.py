"""``tunewright run``: runs one inference, prints a summary of its outputs and saves them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import InputError
from .shared.console import (
    Configs,
    DeviceName,
    Frozen,
    Inputs,
    ModelFile,
    Preprocessing,
    Seed,
    Shapes,
    Stateful,
    cell,
    check_writable,
    console,
    number,
    parse_config,
    table,
    working,
)


def run(
    model: ModelFile,
    input: Inputs = None,
    shape: Shapes = None,
    preprocess: Preprocessing = None,
    stateful: Stateful = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            metavar="N",
            show_default="1",
            help="Run this number of inferences, each with the states of the one before.",
        ),
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", "-o", metavar="DIR", help="Folder for the outputs.", show_default="MODEL.outputs"),
    ] = None,
    save: Annotated[bool, typer.Option("--save/--no-save", help="Write the outputs as .npy files.")] = True,
    device: DeviceName = "CPU",
    frozen: Frozen = False,
    config: Configs = None,
    seed: Seed = 0,
) -> None:
    """Run a model once, print a summary of the outputs, and save them.

    Inputs that are not given are random, and symbolic dimensions that nothing sets are 1. States begin with zeros, or
    with the values of --input. They are saved under the names of the outputs that continue them.

    Example: tunewright run model.onnx --input x=image.npy --output-dir out

    With states: tunewright run decoder.onnx -i ids=[[7]] --stateful auto --steps 20

    Bytes, channels last: tunewright run model.onnx -i x=frame.npy --preprocess x=u8,nhwc,reverse,scale=255
    """
    from ..core import Core
    from ..plugins.find import find
    from .shared.inputs import load

    if steps is not None and stateful is None:
        raise InputError("needs --stateful", where="--steps", hint="without states each inference would be the same")
    core = Core(parse_config(config, frozen))
    find(device, core.settings)  # an unknown device fails before the work starts
    folder = output_dir or Path(f"{model.stem}.outputs")
    if save:
        check_writable(folder, folder=True)
    feed = load(core, model, input, shape, preprocess, seed, stateful)
    with working("running"):
        request = core.compile_model(feed.model, device).create_infer_request()
        for variable in request.query_state():
            variable.state = feed.values.pop(variable.name, None)
        for _ in range(steps or 1):
            outputs = request.infer(feed.values)
        states = {feed.model.states[v.name]: (v.name, v.state) for v in request.query_state()}

    made = table("input", "type", "value")
    for name, value in feed.values.items():
        made.add_row(cell(name), cell(type_text(value)), cell(feed.origin[name]))
    out = console()
    if feed.values:
        out.print(made)
        out.print()
    made = table("output", "type", ">min", ">mean", ">max")
    for name, value in outputs.items():
        for label, part in parts(name, value):
            made.add_row(cell(label), cell(type_text(part)), *summary(part))
    out.print(made)
    if states:
        made = table("state", "type", "saved as" if save else "output")
        for name, (input_name, value) in states.items():
            made.add_row(cell(input_name), cell(type_text(value)), cell(name))
        out.print()
        out.print(made)
    if save:
        out.print()
        count = save_outputs({**outputs, **{name: value for name, (_, value) in states.items()}}, folder)
        out.print(f"{count} {'file' if count == 1 else 'files'} in {folder}", markup=False, soft_wrap=True)


def parts(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return a tensor as one part, and a sequence as one part per element."""
    if not isinstance(value, list):
        return [(name, value)]
    return [(f"{name}[{i}]", v) for i, v in enumerate(value)] or [(f"{name} (empty)", None)]


def type_text(value: Any) -> str:
    """Return the type of a run-time value in the notation of the graph."""
    import numpy as np

    from ..ir.types import TensorType

    if isinstance(value, np.ndarray):
        return str(TensorType.of(value))
    if isinstance(value, list):
        return f"seq of {len(value)}"
    return "nothing" if value is None else value.__class__.__name__


def summary(value: Any) -> tuple[str, str, str]:
    """Return min, mean and max; only the first element of types without an order."""
    import numpy as np

    if not isinstance(value, np.ndarray) or value.size == 0:
        return "-", "-", "-"
    if value.dtype == object or value.dtype.kind == "c":
        return str(value.ravel()[0])[:16], "-", "-"
    wide = value.astype(np.float64)
    with np.errstate(all="ignore"):
        return number(wide.min()), number(wide.mean()), number(wide.max())


def save_outputs(outputs: dict[str, Any], folder: Path) -> int:
    """Save every tensor as .npy and maps as .json. Types that .npy lacks are widened."""
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    used: set[str] = set()
    count = 0
    for name, value in outputs.items():
        for label, part in parts(name, value):
            if part is None:
                continue
            file = unique(re.sub(r"[^\w.+-]+", "_", label).strip("_.") or "output", used)
            if isinstance(part, np.ndarray):
                np.save(folder / f"{file}.npy", portable(part), allow_pickle=False)
            else:
                text = json.dumps(part, indent=1, default=lambda x: x.item() if hasattr(x, "item") else str(x))
                (folder / f"{file}.json").write_text(text, encoding="utf-8")
            count += 1
    return count


def unique(name: str, used: set[str]) -> str:
    """Return ``name``, or the first free variation of it. Case is ignored, because file systems may fold it."""
    made, k = name, 1
    while made.lower() in used:
        k += 1
        made = f"{name}-{k}"
    used.add(made.lower())
    return made


def portable(array: Any) -> Any:
    """Convert to a type that every .npy reader knows: text to text, bfloat16 and narrow types to float32 or int8."""
    import numpy as np

    from ..ir.types import DType

    if array.dtype == object:
        return np.asarray([str(x) for x in array.ravel()], np.str_).reshape(array.shape)
    if array.dtype.isbuiltin == 1:
        return array
    dtype = DType.of_numpy(array.dtype)
    return array.astype(np.float32 if dtype.is_float else np.int8)


COMMANDS = (run,)
