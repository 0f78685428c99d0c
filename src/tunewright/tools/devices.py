"""``tunewright devices``: what can run models here."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from .common import cell, console, size


def devices(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the devices: what each is, or why it is unusable. CPU is the best of the ways to run on the processor
    that are listed as CPU.*. A GPU appears once, through CUDA where that is installed; GPU.N.OPENCL is the same one
    through OpenCL.

    Example: tunewright devices
    """
    from rich.table import Table

    from ..errors import DeviceError
    from ..plugins.single import available, open_device, visible

    found: dict[str, dict[str, Any]] = {}
    for name in visible(alternatives=True):
        try:
            found[name] = open_device(name).describe()
        except DeviceError as error:
            found[name] = {"name": name, "unusable": str(error)}
    reasons = available()[1]
    if as_json:
        sys.stdout.write(json.dumps({"devices": list(found.values()), "unusable": reasons}, indent=2) + "\n")
        return
    rows = list(found.items()) + [(name, {"unusable": why}) for name, why in reasons.items()]
    out = console()
    for i, (name, about) in enumerate(rows):
        if i:
            out.print()
        out.print(cell(name), style="bold")
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for key, value in about.items():
            if key != "name" and value not in (None, "", {}):
                grid.add_row(f"  {LABELS.get(key, key)}", cell(_text(key, value)))
        out.print(grid)


#: what people read for the keys of Device.describe()
LABELS = {"full_name": "name", "family": "runs through", "arch": "architecture", "memory_bytes": "memory",
          "pci": "plugged in at"}  # fmt: skip


def _text(key: str, value: Any) -> str:
    if key.endswith("_bytes"):
        return size(value)
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


COMMANDS = (devices,)
