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
from functools import cache
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


@cache
def _names(package: str) -> tuple[str, ...]:
    """Modules and packages in a package, sorted, by their names inside of it."""
    prefix = f"{package}."
    found = pkgutil.walk_packages(importlib.import_module(package).__path__, prefix)
    return tuple(sorted(info.name.removeprefix(prefix) for info in found))


@cache
def _installed() -> Any:
    """The entry points of all distributions; the class depends on Python's version, `select` does not. To read them
    takes as long for one group as for all."""
    return entry_points()


def modules(group: str, skip: Callable[[str], bool] | None = None) -> Iterator[ModuleType]:
    """The modules of a group: those of the package in sorted order, then those that entry points name.

    ``skip`` is told the name that a module or package has inside of the package, and says whether to do without.
    """
    package = GROUPS[group][0]
    for name in _names(package):
        if skip is None or not skip(name):
            yield importlib.import_module(f"{package}.{name}")
    for entry in sorted(_installed().select(group=group), key=lambda e: (e.name, e.value)):
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


def find(group: str, key: Callable[[Any], str], skip: Callable[[str], bool] | None = None) -> dict[str, Any]:
    """All extensions of a group by key, in order of discovery; see `modules`."""
    attribute = GROUPS[group][1]
    found: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for module in modules(group, skip):
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
