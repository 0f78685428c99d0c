"""Finds one-file extensions: an explicit, sorted scan of a package, then entry points; a duplicate raises.

An extension is a module with a known tuple in it (``OPS``, ``SOLVERS``, ``STRATEGIES``, ``DEVICES``, ``COMMANDS``).
Inside Tunewright the file alone is enough; another distribution names its module in an entry point of the same group::

    [project.entry-points."tunewright.solvers"]
    mine = "my_package.my_solver"
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from .errors import ExtensionError

#: group -> (package that is scanned, attribute that a module offers)
GROUPS: dict[str, tuple[str, str]] = {
    "tunewright.ops": ("tunewright.ops", "OPS"),
    "tunewright.solvers": ("tunewright.solvers", "SOLVERS"),
    "tunewright.strategies": ("tunewright.search", "STRATEGIES"),
    "tunewright.devices": ("tunewright.devices", "DEVICES"),
    "tunewright.commands": ("tunewright.tools", "COMMANDS"),
}


def modules(group: str) -> Iterator[ModuleType]:
    """The modules of a group: those of the package in sorted order, then those that entry points name."""
    package = importlib.import_module(GROUPS[group][0])
    for info in sorted(pkgutil.walk_packages(package.__path__, package.__name__ + "."), key=lambda i: i.name):
        yield importlib.import_module(info.name)
    for entry in sorted(entry_points(group=group), key=lambda e: (e.name, e.value)):
        try:
            loaded = entry.load()
        except Exception as error:  # third-party code: anything may happen at its import
            raise ExtensionError(
                f"cannot be loaded: {error!r}",
                where=f"entry point {entry.name} = {entry.value}",
                hint="repair or uninstall that package",
            ) from error
        if not isinstance(loaded, ModuleType):
            raise ExtensionError("is not a module", where=f"entry point {entry.name} = {entry.value}")
        yield loaded


def find(group: str, key: Callable[[Any], str]) -> dict[str, Any]:
    """All extensions of a group by key, in order of discovery."""
    attribute = GROUPS[group][1]
    found: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for module in modules(group):
        for item in getattr(module, attribute, ()):
            name = key(item)
            if name in found:
                raise ExtensionError(
                    f"{name} is defined twice: in {origin[name]} and in {module.__name__}",
                    where=group,
                    hint="uninstall or rename one of them",
                )
            found[name], origin[name] = item, module.__name__
    return found
