"""Store measured placements in a file of the user's data folder, for the next load of the model.

The key of an entry covers the model's structure, its input types, the devices, and other conditions of its speed. An
unreadable file counts as empty, with a warning.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunewright.devices.base import Device
from tunewright.ir.graph import Graph
from tunewright.ir.graph_text import format_attrs
from tunewright.ir.types import TensorType
from tunewright.knowledge import files, open_databases
from tunewright.knowledge.key import Where
from tunewright.settings import Settings
from tunewright.tuning.knowledge_layers import warn

FILE, SCHEMA = "hetero.json", "tunewright.hetero/1"
#: Maximum number of entries, of which the oldest are dropped first; and maximum bytes that are read.
MOST, MOST_BYTES = 200, 64 << 20


def key(graph: Graph, devices: Sequence[Device], settings: Settings, affinity: Mapping[str, str]) -> str:
    """Return the key of a model before it is divided, on these devices."""
    digest = hashlib.sha256()

    def add(*texts: object) -> None:
        for text in texts:
            digest.update(f"{text}\0".encode())

    for device in devices:
        add(device.name, *dataclasses.astuple(Where.of(device.target)))
    add(settings.execution_mode_hint, settings.inference_precision_hint, settings.host_fallback)
    add(json.dumps(dict(affinity), sort_keys=True))
    for value in graph.inputs:
        add(value.name, value.type)
    for node in (n for g in graph.walk() for n in g.nodes):
        add(node.name, node.op, format_attrs(node.attrs))
        for read in node.inputs:
            add(None if read is None else read.name if read.const is None else TensorType.of(read.const))
    return digest.hexdigest()


def find(settings: Settings, at: str) -> dict[str, str] | None:
    """Return the device of every node in the stored placement; None if there is none."""
    found = _read(_path(settings)).get(at)
    nodes = found.get("nodes") if isinstance(found, dict) else None
    if not isinstance(nodes, dict) or not all(isinstance(v, str) for v in nodes.values()):
        return None
    return {str(name): str(device) for name, device in nodes.items()}


def keep(settings: Settings, at: str, nodes: Mapping[str, str], measured: Mapping[str, float]) -> Path:
    """Store the device of every node, and the seconds of all compared placements. Raises `DatabaseError` on failure."""
    path = _path(settings)
    entries = _read(path)
    entries.pop(at, None)
    entries[at] = {"nodes": dict(nodes), "seconds": dict(measured), "date": int(time.time())}
    kept = dict(list(entries.items())[-MOST:])
    try:
        files.make_folder(path.parent)
        files.replace_file(path, json.dumps({"schema": SCHEMA, "placements": kept}, indent=1).encode())
    except OSError as error:
        raise files.failed(str(path), error) from None
    return path


def _path(settings: Settings) -> Path:
    return open_databases.user_folder(settings) / FILE


def _read(path: Path) -> dict[str, Any]:
    try:
        if not path.exists():
            return {}
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it is larger than {MOST_BYTES} bytes")
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict) or found.get("schema") != SCHEMA or not isinstance(found["placements"], dict):
            raise ValueError(f"it is not {SCHEMA}")
        return dict(found["placements"])
    except (OSError, ValueError, KeyError, RecursionError) as error:
        warn(f"{path}: placements cannot be read, none is used: {error}")
        return {}
