"""Finds one-file extensions: scans a package in sorted order, then reads entry points. A duplicate raises.

An extension is a module with a known tuple in it (``OPS``, ``SOLVERS``, ``STRATEGIES``, ``DEVICES``, ``COMMANDS``).
Inside Tunewright the file alone is enough. Another distribution names its module in an entry point of the same group::

    [project.entry-points."tunewright.solvers"]
    mine = "my_package.my_solver"
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

from .errors import ExtensionError

#: group -> (package to scan, attribute that holds a module's extensions)
GROUPS: dict[str, tuple[str, str]] = {
    "tunewright.ops": ("tunewright.ops", "OPS"),
    "tunewright.solvers": ("tunewright.solvers", "SOLVERS"),
    "tunewright.strategies": ("tunewright.search", "STRATEGIES"),
    "tunewright.devices": ("tunewright.devices", "DEVICES"),
    "tunewright.commands": ("tunewright.tools", "COMMANDS"),
}


@cache
def _names(package: str) -> tuple[str, ...]:
    """Return the sorted names of all modules in a package and in the packages inside of it.

    The packages inside are not imported: their ``__init__`` offers nothing.
    """
    found: list[str] = []
    folders = [("", path) for path in importlib.import_module(package).__path__]
    for prefix, folder in folders:
        for info in pkgutil.iter_modules([folder]):
            if info.ispkg:
                folders.append((f"{prefix}{info.name}.", os.path.join(folder, info.name)))
            else:
                found.append(prefix + info.name)
    return tuple(sorted(found))


#: matches a Tunewright group in an entry-points file
_HEAD = re.compile(rb"^\s*\[\s*tunewright\.", re.MULTILINE)


@cache
def _installed() -> Any:
    """Return the entry points of all distributions, or None if no distribution extends Tunewright.

    Reading one group takes as long as reading all of them. The result's class depends on the Python version; every
    version has `select`.
    """
    if not _may_be_ours():
        return None
    from importlib.metadata import entry_points  # this import takes as long as loading a tiny network

    return entry_points()


def _may_be_ours() -> bool:
    """Whether some distribution may offer extensions. True if that cannot be ruled out without reading all of them."""
    if any(hasattr(finder, "find_distributions") for finder in sys.meta_path if finder is not PathFinder):
        return True
    return any(_offers(folder or os.curdir) for folder in sys.path)


def _offers(folder: str) -> bool:
    """Whether a distribution in a folder of ``sys.path`` may offer extensions."""
    if not os.path.isdir(folder):
        return os.path.exists(folder)  # an archive may offer some
    try:
        with os.scandir(folder) as listing:
            found = [item.path for item in listing if item.name.endswith((".dist-info", ".egg-info", ".egg"))]
    except OSError:
        return False
    return any(path.endswith(".egg") or _has_group(os.path.join(path, "entry_points.txt")) for path in found)


def _has_group(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return _HEAD.search(file.read()) is not None
    except OSError:  # most distributions have no such file
        return False


def modules(group: str, skip: Callable[[str], bool] | None = None) -> Iterator[ModuleType]:
    """Import the modules of a group: those of the package in sorted order, then those that entry points name.

    ``skip`` is called with a module's name relative to the package. If it returns True the module is not imported.
    """
    package = GROUPS[group][0]
    for name in _names(package):
        if skip is None or not skip(name):
            yield importlib.import_module(f"{package}.{name}")
    installed = _installed()
    ours = () if installed is None else installed.select(group=group)
    for entry in sorted(ours, key=lambda e: (e.name, e.value)):
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
    """Return all extensions of a group by key, in order of discovery (see `modules`). Duplicates are an error."""
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
