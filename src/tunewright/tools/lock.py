"""``tunewright lock``: writes the kernels that a model uses now to a lockfile."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .shared.console import (
    Configs,
    DeviceName,
    Inputs,
    ModelFile,
    Preprocessing,
    Seed,
    Shapes,
    check_writable,
    console,
    note,
    parse_config,
    working,
)

if TYPE_CHECKING:
    from ..core import Core
    from ..frontend.model import Model
    from ..tuning.lockfile import Written

#: number of replaced kernels, and of kernels that are not reproducible, that are listed
SHOWN = 8


def lock(
    model: ModelFile,
    input: Inputs = None,
    shape: Shapes = None,
    preprocess: Preprocessing = None,
    device: DeviceName = "CPU",
    config: Configs = None,
    seed: Seed = 0,
) -> None:
    """Write the currently chosen kernel of every layer to MODEL.lock.json, or to the LOCK_FILE of the settings.

    `--frozen` then loads the model with exactly these kernels, or fails. One inference is run, and nothing is tuned.
    Lock again with other shapes to add theirs. With several devices (MULTI, AUTO, HETERO, BATCH) all are locked.

    Example: tunewright lock model.onnx --shape batch=8
    """
    from ..core import Core
    from ..plugins.find import find
    from .explain import looking
    from .shared.inputs import concrete, load

    core = Core(parse_config(config))
    core.settings, aside = looking(core.settings)
    if aside:
        note(aside)
    find(device, core.settings)  # an unknown device fails before the work starts
    path = lock_path(core, model)
    feed = load(core, model, input, shape, preprocess, seed)
    write_lock(core, concrete(feed), feed.values, device, path)


def lock_path(core: Core, model: Path) -> Path:
    """Return the path of a model's lockfile. Raises if it cannot be written."""
    from ..tuning.lockfile import LockFile, default_path

    path = Path(core.settings.lock_file).expanduser() if core.settings.lock_file else default_path(model)
    check_writable(path)
    if path.exists() and path.stat().st_size:
        LockFile(path).read()  # a file that is no lockfile fails before the work starts
    return path


def write_lock(core: Core, model: Model, values: Mapping[str, Any], device: str, path: Path) -> None:
    """Lock a model and print the changes."""
    with working("compiling"):
        done = run_and_lock(core, model, values, device, path)
    for title, written in done:
        for text in remarks(written):
            note(text)
        part = f"{title}: " if title else ""
        console().print(part + summary(written), markup=False, soft_wrap=True)


def run_and_lock(
    core: Core, model: Model, values: Mapping[str, Any], device: str, path: str | os.PathLike[str]
) -> list[tuple[str, Written]]:
    """Run a model once without a lockfile and without tuning, and lock the kernels that it used.

    Returns, for each part that runs on its own device, its title and the changes.
    """
    from .explain import looking

    core.settings, _ = looking(core.settings)
    found = []
    for piece in core.pieces(model, values, device, {"LOCK_FILE": "", "FROZEN": "NO"}):
        piece.compiled(piece.inputs)
        found.append((piece.title, core.lock(piece.compiled, path)))
    return found


def summary(done: Written) -> str:
    """Summarise the changes to a lockfile in one line."""
    counts = [(done.added, "new"), (len(done.replaced), "replaced"), (done.same, "as before")]
    told = ", ".join(f"{n} {what}" for n, what in counts if n)
    return f"{done.total} {'kernel' if done.total == 1 else 'kernels'} in {done.path}: {told or 'nothing to lock'}"


def remarks(done: Written) -> list[str]:
    """Return notes for the user about the changes."""
    found = [f"replaced: {text}" for text in done.replaced[:SHOWN]]
    if done.dropped:
        found.append(f"{done.dropped} kernels were dropped: they were locked in the other EXECUTION_MODE_HINT")
    found += [f"not reproducible, --frozen refuses it: {text}" for text in done.refused[:SHOWN]]
    more = max(0, len(done.replaced) - SHOWN) + max(0, len(done.refused) - SHOWN)
    return [*found, f"and {more} more"] if more else found


COMMANDS = (lock,)
