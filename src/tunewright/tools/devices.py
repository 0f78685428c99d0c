"""``tunewright devices``: lists the devices that can run models here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .shared.console import Configs, Shapes, cell, check_readable, console, parse_config, size, working

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..devices.base import Device
    from ..settings import Settings


def devices(
    properties: Annotated[
        bool, typer.Option("--properties", "-p", help="Every property of each device that is not a setting.")
    ] = False,
    device: Annotated[
        str | None, typer.Option("--device", "-d", metavar="NAME", help="Only this device.", show_default=False)
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", "-m", metavar="MODEL", show_default=False,
            help="Also measure MAX_BATCH_SIZE and OPTIMAL_BATCH_SIZE of an ONNX file.",
        ),
    ] = None,
    shape: Shapes = None,
    config: Configs = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:  # fmt: skip
    """List the devices: what each is, or why it is unusable.

    CPU is the best of the devices listed as CPU.*, which all run on the processor. A GPU appears once, through CUDA if
    that is installed; GPU.N.OPENCL is the same GPU through OpenCL.

    Example: tunewright devices

    Example: tunewright devices --properties --device CPU --model model.onnx
    """
    from ..errors import DeviceError, SettingsError
    from ..plugins.single import available, open_device, visible
    from ..settings import Settings

    settings = Settings.make(parse_config(config))
    if model is not None:
        check_readable(model)
    named = device or settings.device_id
    alone = [open_device(_named(device or "CPU", settings.device_id)).name] if named else []
    found: dict[str, dict[str, Any]] = {}
    for name in alone or visible(alternatives=True):
        try:
            opened = open_device(name, settings)
            found[name] = opened.describe()
            if properties or model is not None:
                found[name]["properties"] = _properties(opened, settings, model, shape or ())
        except (DeviceError, SettingsError) as error:
            found[name] = {"name": name, "unusable": str(error)}
    reasons = {} if alone else available()[1]
    if as_json:
        sys.stdout.write(json.dumps({"devices": list(found.values()), "unusable": reasons}, indent=2) + "\n")
        return
    rows = list(found.items()) + [(name, {"unusable": why}) for name, why in reasons.items()]
    for i, (name, about) in enumerate(rows):
        if i:
            console().print()
        _show(name, about)


def _named(device: str, number: str) -> str:
    return f"{device}.{number}" if number and "." not in device else device


def _properties(opened: Device, settings: Settings, model: Path | None, shape: Sequence[str]) -> dict[str, Any]:
    """Return the properties that are neither settings nor lists of names, with a model also the batch sizes."""
    from ..plugins import metrics

    lists = {"SUPPORTED_PROPERTIES", "SUPPORTED_METRICS", "SUPPORTED_CONFIG_KEYS", "AVAILABLE_DEVICES"}
    names = [name for name in metrics.metrics(opened) if name not in lists and name not in metrics.WITH_MODEL]
    found = {name: metrics.get(opened, name, settings) for name in names}
    if model is not None:
        from ..frontend.onnx import load
        from ..plugins.batching.batch_size import measure_batches
        from .shared.inputs import parse_shapes

        with working(f"measuring batches on {opened.name}"):
            loaded = load(model, settings)
            wanted, _ = parse_shapes(loaded, shape)
            batches = measure_batches(opened, settings, {"MODEL_PTR": loaded.reshape(wanted) if wanted else loaded})
        found |= {"MAX_BATCH_SIZE": batches.largest, "OPTIMAL_BATCH_SIZE": batches.optimal}
        found["BATCHES"] = {f"{one.batch}": f"{one.rate:,.1f}/s" for one in batches.tried}
        found["BATCHES_ENDED"] = batches.ended
    return found


def _show(name: str, about: dict[str, Any]) -> None:
    from rich.table import Table

    out = console()
    out.print(cell(name), style="bold")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for key, value in about.items():
        if key not in ("name", "properties") and value not in (None, "", {}):
            grid.add_row(f"  {LABELS.get(key, key)}", cell(_text(key, value)))
    for key, value in about.get("properties", {}).items():
        grid.add_row(f"  {key}", cell(_text(key, value)))
    out.print(grid)


#: labels for the keys of Device.describe()
LABELS = {"full_name": "name", "family": "runs through", "arch": "architecture", "memory_bytes": "memory",
          "pci": "plugged in at"}  # fmt: skip


def _text(key: str, value: Any) -> str:
    if key.endswith(("_bytes", "_MEM_SIZE")):
        return size(value)
    if key.endswith("MEMORY_STATISTICS"):
        return ", ".join(f"{k} {size(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


COMMANDS = (devices,)
