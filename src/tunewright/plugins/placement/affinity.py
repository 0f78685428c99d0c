"""Placement of nodes by hand: a mapping of names to devices, from a model (`Model.affinity`) or a file.

A file is JSON, ``{"conv1": "GPU", "softmax": "CPU"}``, or CSV with a node and a device in each line. Nodes that it does
not name are placed automatically.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tunewright.errors import InputError, SettingsError
from tunewright.ir.graph import Graph, Node

HEADER = ("node", "device")


def read(path: str | os.PathLike[str], most: int) -> dict[str, str]:
    """Read the mapping from a file of at most ``most`` bytes. Raises `InputError` naming the mistake and its place."""
    where = str(path)
    try:
        if os.path.getsize(path) > most:
            raise InputError(f"is larger than {most} bytes", where=where)
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot be read: {why}", where=where, hint="`tunewright place` writes such a file") from None
    return _csv(text, where) if Path(path).suffix.lower() == ".csv" else _json(text, where)


def _json(text: str, where: str) -> dict[str, str]:
    def once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
        names = [name for name, _ in pairs]
        twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
        if twice is not None:
            raise InputError(f"names {twice!r} twice", where=where)
        return dict(pairs)

    try:
        found = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not JSON: {error}", where=where) from None
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise InputError('is not an object of names, as {"conv1": "CPU"}', where=where)
    return {str(k): str(v) for k, v in found.items()}


def _csv(text: str, where: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for number, row in enumerate(csv.reader(io.StringIO(text)), start=1):
        cells = [cell.strip() for cell in row]
        if not any(cells) or tuple(c.lower() for c in cells) == HEADER:
            continue
        if len(cells) != 2 or not all(cells):
            raise InputError("is not a node and a device", where=f"{where}:{number}", hint="for example: conv1,CPU")
        if cells[0] in found:
            raise InputError(f"names {cells[0]!r} twice", where=f"{where}:{number}")
        found[cells[0]] = cells[1]
    return found


def write(path: str | os.PathLike[str], affinity: Mapping[str, str]) -> None:
    """Write a file that `read` accepts, for editing."""
    if Path(path).suffix.lower() == ".csv":
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(HEADER)
        writer.writerows(affinity.items())
        text = out.getvalue()
    else:
        text = json.dumps(dict(affinity), indent=1, ensure_ascii=False) + "\n"
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror or error}", where=str(path)) from None


def device_number(name: str, devices: Sequence[Sequence[str]], where: str) -> int:
    """Return the number of the device with this name; each device has several spellings."""
    for number, spellings in enumerate(devices):
        if name.strip().upper() in (s.upper() for s in spellings):
            return number
    listed = ", ".join(spellings[0] for spellings in devices)
    raise SettingsError(f"{name!r} is not one of the devices", where=where, hint=f"they are {listed}")


def fixed(
    affinity: Mapping[str, str], original: Graph, prepared: Graph, devices: Sequence[Sequence[str]]
) -> dict[Node, int]:
    """Return the nodes of the prepared graph that the user placed, with their devices.

    A name may belong to a node, or to one that was split into several nodes when the model was read. Raises
    `InputError` for unknown names and for nodes in bodies, which follow their outer node.
    """
    if not affinity:
        return {}
    top = {name for node in original.nodes for name in (node.name, *node.origin)}
    inner = {
        n.name: node.name
        for node in original.nodes
        for body in node.bodies.values()
        for graph in body.walk()
        for n in graph.nodes
        if n.name not in top
    }
    for name in affinity:
        if name in inner:
            hint = f"it goes where {inner[name]!r} goes: name that"
            raise InputError("is in the body of another node", where=f"affinity of {name!r}", hint=hint)
        if name not in top:
            raise InputError("there is no such node", where=f"affinity of {name!r}", hint=_closest(name, top))
    numbers = {name: device_number(device, devices, f"affinity of {name!r}") for name, device in affinity.items()}
    found: dict[Node, int] = {}
    for node in prepared.nodes:
        named = next((name for name in (node.name, *node.origin) if name in numbers), None)
        if named is not None:
            found[node] = numbers[named]
    return found


def _closest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else "`tunewright query` lists the nodes"
